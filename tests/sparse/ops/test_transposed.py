"""Products with a transpose: exact on every path, no fill-in, and as A.transpose() where that is allowed."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import magicube_cutlass as mc
from cute_kernels.cpu import engine
from cute_kernels.integers import BITS, int_range
from magicube_cutlass.ops import transposed

VECTORS = (1, 2, 4, 8, 16, 32)


def sparse(m: int, k: int, v: int, bits: int, signed: bool, sparsity: float = 0.7, seed: int = 0) -> mc.SRBCRS:
    low, high = int_range(bits, signed)
    pattern = mc.random_pattern(m, k, sparsity, v, seed=seed)
    vectors = torch.randint(low, high + 1, (pattern.vectors, v), generator=torch.Generator().manual_seed(seed))
    vectors[::3] = low
    return mc.SRBCRS.from_pattern(pattern, vectors, bits=bits, signed=signed)


def dense(shape: tuple[int, ...], bits: int, signed: bool, column_major: bool = False) -> mc.QuantTensor:
    low, high = int_range(bits, signed)
    ints = torch.randint(low, high + 1, shape)
    ints[..., ::2, :] = high
    return mc.QuantTensor.from_ints(ints.mT.contiguous().mT if column_major else ints, bits=bits, signed=signed)


def expected(a: mc.SRBCRS, b: mc.QuantTensor) -> torch.Tensor:
    return torch.matmul(a.to_dense(dequantize=False).long().mT, b.ints().long())


@pytest.fixture(params=[*engine.isas(), "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(transposed, "available", lambda: False)
    else:
        monkeypatch.setenv("MAGICUBE_CPU", request.param)
    return str(request.param)


@pytest.mark.parametrize(("left", "right"), list(itertools.product(BITS, BITS)))
@pytest.mark.parametrize("signs", list(itertools.product([True, False], repeat=2)))
def test_every_pair_and_sign_is_exact(path: str, left: int, right: int, signs: tuple[bool, bool]) -> None:
    for v, column_major in ((8, False), (4, True), (1, False)):
        a, b = sparse(37, 50, v, left, signs[0]), dense((37, 45), right, signs[1], column_major)
        assert torch.equal(mc.spmm(a, b, transpose=True, out_dtype=torch.int64), expected(a, b))


@settings(max_examples=100)
@given(
    m=st.integers(1, 70), k=st.integers(1, 60), n=st.integers(0, 70), v=st.sampled_from(VECTORS),
    sparsity=st.sampled_from([0.0, 0.5, 0.95, 1.0]), batch=st.sampled_from([(), (2,), (2, 1, 3)]),
    isa=st.sampled_from(engine.isas()), seed=st.integers(0, 1000),
)  # fmt: skip
def test_random_products_are_exact(m, k, n, v, sparsity, batch, isa, seed) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    a, b = sparse(m, k, v, 8, True, sparsity, seed), dense((*batch, m, n), 8, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAGICUBE_CPU", isa)
        assert torch.equal(mc.spmm(a, b, transpose=True, out_dtype=torch.int64), expected(a, b))
        assert torch.equal(mc.spmm(a.to_bcrs().T, b, out_dtype=torch.int64), expected(a, b))


def test_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.cpu import extension

    a, b = sparse(64, 90, 8, 8, True), dense((64, 300), 8, True)
    before, work = torch.get_num_threads(), extension.load_extension().set_serial_work(0)
    torch.set_num_threads(3)
    try:
        assert torch.equal(mc.spmm(a, b, transpose=True, out_dtype=torch.int64), expected(a, b))
    finally:
        torch.set_num_threads(before)
        extension.load_extension().set_serial_work(work)


def test_the_packed_operand_has_no_more_bytes_than_the_matrix() -> None:
    a = sparse(1024, 1024, 8, 8, True, 0.9)
    mc.spmm(a, dense((1024, 4), 8, True), transpose=True, out_dtype=torch.int64)
    packed = a._execution["transposed columns"]
    assert packed.nbytes <= a.nbytes and a.transpose().nbytes > 4 * a.nbytes
    a.values[0, 0, 0] = 1  # a write drops what was derived
    b = dense((1024, 4), 8, True)
    assert torch.equal(mc.spmm(a, b, transpose=True, out_dtype=torch.int64), expected(a, b))


def test_scales_bias_and_out_are_those_of_the_compressed_transpose(path: str) -> None:
    w, x, bias = torch.randn(40, 30), torch.randn(2, 40, 21), torch.randn(30)
    a = mc.SRBCRS.from_mask(w, mc.prune(w, 0.5, 4), vector_length=4, bits=8)
    for b in (mc.quantize(x, 8, "column"), mc.quantize(x, 8)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            wanted = mc.spmm(a.transpose(), b, out_dtype=dtype, bias=bias)
            out = torch.empty(2, 30, 21, dtype=dtype)
            assert mc.spmm(a, b, transpose=True, out_dtype=dtype, bias=bias, out=out) is out
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "e4m3", "e5m2", "e2m1"])
def test_floats_are_those_of_the_dense_product(dtype: str) -> None:
    w, x = torch.randn(45, 30), torch.randn(2, 45, 7)
    w[torch.rand(45, 30) < 0.7] = 0
    a = mc.SRBCRS.from_dense(w, vector_length=4, dtype=dtype)
    half = dtype in ("float16", "bfloat16")
    b = x.to(getattr(torch, dtype)) if half else mc.quantize(x, dtype="e4m3", scale="column")
    values = b.float() if half else b.dequantize()  # type: ignore[union-attr]
    wanted = a.to_dense().double().mT @ values.double()
    bound = a.to_dense().double().abs().mT @ values.double().abs() * 2**-20  # 45 sums of float32
    assert ((mc.spmm(a, b, transpose=True).double() - wanted).abs() <= bound).all()


def test_more_rows_than_int32_sums_are_exact() -> None:
    m = 33026
    a = mc.SRBCRS.from_dense(torch.full((m, 1), 255), vector_length=8, bits=8, signed=False)
    b = mc.QuantTensor.from_ints(torch.full((m, 1), 255), bits=8, signed=False)
    assert mc.spmm(a, b, transpose=True, out_dtype=torch.int64).item() == m * 255**2


def test_bad_arguments_are_named() -> None:
    w = torch.randn(16, 24)
    a, b = mc.SRBCRS.from_dense(w, vector_length=8, scale="row"), dense((16, 3), 8, True)
    with pytest.raises(ValueError, match="transpose needs one scale"):
        mc.spmm(a, b, transpose=True)
    a = mc.SRBCRS.from_dense(w, vector_length=8)
    with pytest.raises(
        ValueError, match=r"B must have 16 rows to match the transpose of A of shape \(16, 24\), got 24"
    ):
        mc.spmm(a, dense((24, 3), 8, True), transpose=True)
    with pytest.raises(ValueError, match="B must have a per-tensor or per-column scale"):
        mc.spmm(a, mc.quantize(torch.randn(16, 3), 8, "row"), transpose=True)
    with pytest.raises(ValueError, match="atom, config and allow_dense must have their defaults"):
        mc.spmm(a, b, transpose=True, allow_dense=True)
    with pytest.raises(ValueError, match=r"bias must have shape \(24,\), got \(16,\)"):
        mc.spmm(a, b, transpose=True, bias=torch.zeros(16))
    with pytest.raises(ValueError, match="out must share no memory"):
        mc.spmm(a, mc.QuantTensor.from_ints(torch.zeros(16, 4).int(), bits=8), transpose=True, out=a.scale.expand(1))
    c = dense((24, 3), 8, True)
    assert torch.equal(mc.spmm(a.T, c, transpose=True), mc.spmm(a, c))
