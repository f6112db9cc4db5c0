"""SpMM and SDDMM of floats on a CPU against float64, for every pair of formats, layout, scale, output and odd shape."""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.dtypes import FLOAT_DTYPES, FLOATS, HALF_DTYPES
from magicube_cutlass.checks import STRIDES, VECTOR_LENGTHS
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor
from tests.helpers import SCALES

PAIRS = [pair for pair in product(FLOATS, FLOATS) if set(pair) != set(HALF_DTYPES)]
OUTS = (torch.float32, torch.float16, torch.bfloat16)


def sparse(
    m: int, k: int, name: str, v: int, density: float = 0.4, stride: int = 32, axis: int | None = 1
) -> mc.SRBCRS:
    x = torch.randn(m, k) * mc.random_pattern(m, k, 1 - density, v, distribution="uniform").to_dense()
    return mc.SRBCRS.from_dense(
        x, vector_length=v, stride=stride, dtype=name, scale=SCALES[None if name in HALF_DTYPES else axis]
    )


def dense(
    shape: tuple[int, ...], name: str, axis: int | None, column_major: bool = False
) -> Tensor | ScaledFloatTensor:
    x = torch.randn(shape)
    x = x.mT.contiguous().mT if column_major else x
    return x.to(FLOAT_DTYPES[name]) if name in HALF_DTYPES else mc.quantize(x, dtype=name, scale=SCALES[axis])


def real(x: Tensor | ScaledFloatTensor) -> Tensor:
    return x.dequantize().double() if isinstance(x, ScaledFloatTensor) else x.double()


def check(found: Tensor, expected: Tensor, magnitudes: Tensor, terms: int) -> None:
    """Within ``terms`` roundings of float32 of sums of these magnitudes, two of scales, and one of the output's type."""
    bound = (terms + 4) * 2.0**-23 * magnitudes + torch.finfo(found.dtype).eps * expected.abs()
    bound += 2.0**-24 if found.dtype == torch.float16 else 0  # below its normal numbers
    assert bool(((found.double() - expected).abs() <= bound).all()), (found - expected).abs().max()


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_spmm(a: str, b: str) -> None:
    torch.manual_seed(len(a) + len(b))
    for i, v in enumerate(VECTOR_LENGTHS):
        m, k, n, batch = ((37, 61, 19, ()), (64, 130, 33, (2,)), (9, 40, 8, (2, 3)))[i % 3]
        left = sparse(m, k, a, v, stride=STRIDES[i % 3], axis=(None, 1)[i % 2])
        right = dense((*batch, k, n), b, (None, 0)[i // 2 % 2], i % 2 == 1)
        bias, out = (torch.randn(m) if i % 2 else None), OUTS[i % 3]
        found = mc.spmm(left, right, out_dtype=out, bias=bias)
        assert found.dtype == out and found.shape == (*batch, m, n)
        x, y = left.to_dense().double(), real(right)
        offset = torch.zeros(m, 1) if bias is None else bias[:, None].double()
        check(found, x @ y + offset, x.abs() @ y.abs() + offset.abs(), k)
        again = torch.full_like(found, torch.nan)
        assert mc.spmm(left, right, out=again, bias=bias) is again and torch.equal(again, found)
        assert torch.equal(mc.spmm(left.to_bcrs(), right, out_dtype=out, bias=bias), found)


@pytest.mark.parametrize(("x", "y"), PAIRS)
def test_sddmm(x: str, y: str) -> None:
    torch.manual_seed(len(x) + 2 * len(y))
    for i, v in enumerate(VECTOR_LENGTHS):
        m, n, k, batch = ((37, 61, 19, ()), (64, 130, 33, (2,)), (9, 40, 8, (2, 3)))[i % 3]
        left = dense((*batch, m, k), x, (None, 1)[i % 2], i % 2 == 1)
        right = dense((*batch, n, k), y, (None, 1)[i // 2 % 2], i // 3 == 1)
        pattern = mc.random_pattern(m, n, 0.6, v, seed=i)
        turned = right.mT if i % 2 else right
        found = mc.sddmm(left, turned, pattern, out_dtype=OUTS[i % 3], transposed_y=i % 2 == 1)
        found.check_format(full=True)
        assert found.values.dtype == OUTS[i % 3] and found.batch_shape == batch
        mask = pattern.to_dense().double()
        check(found.to_dense(), real(left) @ real(right).mT * mask, real(left).abs() @ real(right).abs().mT * mask, k)


def test_small_integers_are_exact() -> None:
    x, y = torch.randint(-4, 5, (40, 300)).float(), torch.randint(-4, 5, (300, 24)).float()
    for a, b in PAIRS:
        # 5 is no value of e2m1, so these integers are of all formats
        left = mc.SRBCRS.from_dense(x.to(FLOAT_DTYPES[a]) if a != "e2m1" else exactly(x, a), vector_length=8, dtype=a)
        right = y.to(FLOAT_DTYPES[b]) if b != "e2m1" else exactly(y, b)
        assert torch.equal(mc.spmm(left, right), x @ y)


def exactly(x: Tensor, name: str) -> ScaledFloatTensor:
    from cute_kernels import floats

    return ScaledFloatTensor(floats.pack(floats.encode(x, name), name), x.shape[-1], name, torch.tensor(1.0))


def test_a_packed_torch_tensor_is_an_operand() -> None:
    a, b = sparse(16, 30, "float16", 8), mc.quantize(torch.randn(30, 10), dtype="e2m1")
    packed = b.data.view(torch.float4_e2m1fn_x2)
    assert torch.allclose(mc.spmm(a, packed) * b.scale, mc.spmm(a, b), rtol=1e-6)


@pytest.mark.parametrize(
    ("m", "k", "n", "batch"),
    [
        (1, 1, 1, ()),
        (5, 1, 3, ()),
        (8, 33, 0, ()),
        (0, 12, 9, ()),
        (9, 0, 5, ()),
        (9, 64, 7, (0,)),
        (17, 65, 1, (2, 3)),
    ],
)
def test_tiny_and_empty_shapes(m: int, k: int, n: int, batch: tuple[int, ...]) -> None:
    bias = torch.arange(m).float()
    for name in ("float16", "e2m1"):
        a = sparse(m, k, name, 4, axis=None)
        b = dense((*batch, k, n), name, None)
        expected = a.to_dense().double() @ real(b) + bias[:, None]
        torch.testing.assert_close(mc.spmm(a, b, bias=bias).double(), expected, rtol=1e-5, atol=1e-5)
        y = dense((*batch, n, k), name, None)
        x = dense((*batch, m, k), name, None)
        pattern = mc.random_pattern(m, n, 0.3, 4)
        found = mc.sddmm(x, y, pattern)
        expected = real(x) @ real(y).mT * pattern.to_dense()
        torch.testing.assert_close(found.to_dense().double(), expected, rtol=1e-5, atol=1e-5)


def test_infinities_and_nan_reach_the_rows_that_store_their_column() -> None:
    mask = torch.zeros(16, 8, dtype=torch.bool)
    mask[3, 2] = mask[4, 5] = mask[12, 2] = True
    a = mc.SRBCRS.from_mask(torch.ones(16, 8), mask, vector_length=1, dtype="float16")
    b = torch.ones(8, 3).half()
    b[2, 0], b[5, 1], b[7, 2] = torch.inf, torch.nan, torch.nan
    expected = torch.zeros(16, 3)
    expected[3], expected[4], expected[12] = torch.tensor([[torch.inf, 1, 1], [1, torch.nan, 1], [torch.inf, 1, 1]])
    torch.testing.assert_close(mc.spmm(a, b), expected, equal_nan=True)
    big = mc.SRBCRS.from_dense(torch.full((1, 4), 6e4), vector_length=1, dtype="float16")
    assert mc.spmm(big, torch.full((4, 1), 6e4).half(), out_dtype=torch.float16).item() == torch.inf
    assert mc.spmm(big, torch.full((4, 1), 6e4).half()).item() == pytest.approx(1.44e10, rel=1e-3)


def test_results_of_one_product_are_operands_of_the_next() -> None:
    x, y, z = torch.randn(32, 20).half(), torch.randn(24, 20).half(), torch.randn(24, 6).half()
    s = mc.sddmm(x, y, mc.random_pattern(32, 24, 0.5, 8), out_dtype=torch.float16)
    expected = s.to_dense().double() @ z.double()
    assert (mc.spmm(s, z).double() - expected).abs().max() < 1e-4
    kept = {"s": s}

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(dense: Tensor) -> Tensor:
        return mc.spmm(kept["s"], dense)

    for factor in (1, 2, 3):  # no copy of the values before is used
        kept["s"] = s.with_values(s.values * factor)
        assert torch.equal(mc.spmm(kept["s"], z), mc.spmm(s.with_values(s.values * factor), z))
        assert torch.equal(compiled(z), mc.spmm(kept["s"], z))
    assert torch.equal(mc.spmm(s.with_values(s.values * 2), z), 2 * mc.spmm(s, z))


def test_a_compiled_graph_has_the_product() -> None:
    a = sparse(32, 40, "e4m3", 8)

    @torch.compile(backend="eager", fullgraph=True)
    def two(x: Tensor) -> Tensor:
        return mc.spmm(a, x, out_dtype=torch.float16) + 1

    for n in (8, 24):
        x = torch.randn(40, n).half()
        assert torch.equal(two(x), mc.spmm(a, x, out_dtype=torch.float16) + 1)


def test_no_warning_and_an_explanation() -> None:
    a, b = sparse(32, 40, "e4m3", 8), torch.randn(40, 8).half()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mc.spmm(a, b)
        mc.sddmm(b.mT.contiguous()[:, :32], b.mT.contiguous()[:, :32], mc.random_pattern(8, 8, 0, 8))
    assert "32 x 40 of e4m3 times (40, 8) of float16" in mc.explain(a, b)
    with pytest.raises(TypeError, match="both integers or both floats"):
        mc.explain(a, mc.quantize(torch.randn(40, 8), 8))
    assert torch.equal(mc.spmm(a, b, allow_dense=True), mc.spmm(a, b))
