"""SpMM and SDDMM of floats on a GPU against float64: each pair of formats, vector length, kernel, layout and odd shape.

A product of two values is exact in float32, and each addition in the Tensor Cores loses at most 2^-23 of the largest
addend or sum, so a sum of k terms is within ``(k + 32) 2^-22 sum |a| |b|``; the output is rounded once more.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels import floats
from cute_kernels.dtypes import FLOAT_DTYPES, FLOATS, HALF_DTYPES
from cute_kernels.machine import ProblemTypes
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import SpmmKernel
from cute_kernels.spmm.panel import PanelConfig
from magicube_cutlass.checks import STRIDES, VECTOR_LENGTHS
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor
from tests.gpu.problems import HERE, PANELS, check_guards, choices, chosen, gather, guarded, panel, sampling_with, sddmm
from tests.helpers import SCALES

pytestmark = pytest.mark.gpu

PAIRS = [pair for pair in product(FLOATS, FLOATS) if set(pair) != set(HALF_DTYPES)]
OUTS = ("float32", "float16", "bfloat16")
Dense = Tensor | ScaledFloatTensor


def kind(v: int = 8, a: str = "float16", b: str = "float16", out: str = "float32") -> ProblemTypes:
    return ProblemTypes(v, FLOATS[a], FLOATS[b], out)


def as_dense(x: Tensor, name: str, axis: int | None = None) -> Dense:
    return x.to(FLOAT_DTYPES[name]) if name in HALF_DTYPES else mc.quantize(x, dtype=name, scale=SCALES[axis])


def dense(shape: tuple[int, ...], name: str, axis: int | None = None, layout: str = "row") -> Dense:
    x = torch.randn(shape)
    return as_dense(x.mT.contiguous().mT if layout == "column" else x, name, axis)


def sparse(
    m: int,
    k: int,
    v: int,
    name: str,
    sparsity: float = 0.6,
    stride: int = 32,
    axis: int | None = None,
    empty: bool = False,
) -> mc.SRBCRS:
    mask = mc.random_pattern(m, k, sparsity, v, distribution="uniform").to_dense()
    if empty:
        mask[(torch.arange(m) // v) % 3 == 1] = False
    scaled = None if name in HALF_DTYPES else axis
    return mc.SRBCRS.from_mask(
        torch.randn(m, k), mask, vector_length=v, stride=stride, dtype=name, scale=SCALES[scaled]
    )


def real(x: Dense) -> Tensor:
    return x.dequantize().double() if isinstance(x, ScaledFloatTensor) else x.double()


def exactly(x: Tensor, name: str) -> Dense:
    """Values of the format as they are."""
    if name in HALF_DTYPES:
        return x.to(FLOAT_DTYPES[name])
    return ScaledFloatTensor(floats.pack(floats.encode(x, name), name), x.shape[-1], name, torch.tensor(1.0))


def check(found: Tensor, x: Tensor, y: Tensor, bias: Tensor | None = None, mask: Tensor | None = None) -> None:
    """``found`` is ``x y + bias`` where ``mask`` is true, within the bound."""
    expected, magnitudes = x @ y, x.abs() @ y.abs()
    if bias is not None:
        expected, magnitudes = expected + bias[:, None].double(), magnitudes + bias[:, None].abs().double()
    if mask is not None:
        expected, magnitudes = expected * mask, magnitudes * mask
    info = torch.finfo(found.dtype)
    bound = (x.shape[-1] + 32) * 2.0**-22 * magnitudes + info.eps * expected.abs() + info.smallest_normal * info.eps
    error = (found.double() - expected).abs()
    assert bool((error <= bound).all()), (
        f"{int((error > bound).sum())} of {error.numel()}, {float((error / bound).max())}"
    )


def spmm(
    a: mc.SRBCRS,
    b: Dense,
    out: str = "float32",
    config: Any = None,
    bias: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """The product on the GPU into a poisoned output between guards; back on the CPU."""
    a, b = a.to("cuda"), b.to("cuda")
    result, memory = guarded((*b.shape[:-2], a.shape[0], b.shape[-1]), getattr(torch, out), offset)
    mc.spmm(a, b, out=result, config=config, bias=None if bias is None else bias.to("cuda"))
    check_guards(result, memory)
    return result.cpu()


def check_spmm(a: mc.SRBCRS, b: Dense, config: Any = None, bias: Tensor | None = None, offset: int = 0) -> None:
    found = spmm(a, b, config.out if config else "float32", config, bias, offset)
    check(found, a.to_dense().double(), real(b), bias)


def covering() -> list[SpmmKernel]:
    """Every pair with the gather kernel and, where there are panels, the panel kernel; all vector lengths and outputs."""
    found: list[SpmmKernel] = []
    for i, (a, b) in enumerate(PAIRS):
        of = kind(VECTOR_LENGTHS[i % 6], a, b, OUTS[i % 3])
        found.append(gather(of, tile_n_bytes=(64, 128)[i % 2], split_k_warps=(1, 2, 4)[i % 3]))
        if PANELS:
            of = kind(VECTOR_LENGTHS[(i + 3) % 6], a, b, OUTS[(i + 1) % 3])
            found.append(panel(of, rows_per_warp=1 + (i % 2 if of.vector_length <= 8 else 0), ordered=i % 3 > 0))
    return found


def variants() -> list[SpmmKernel]:
    """Every knob of both kernels, and each instruction, on few pairs."""
    found: list[SpmmKernel] = []
    for of in (
        kind(),
        kind(4, "e2m1", "e4m3", "float16"),
        kind(16, "e4m3", "bfloat16", "bfloat16"),
        kind(8, "float16", "e2m1"),
    ):
        found += [
            gather(of, tile_n_bytes=size, split_k_warps=team, warps=max(4, team))
            for size in (64, 128)
            for team in (1, 4, 8)
        ]
        found += [gather(of, stages=stages, warps=2) for stages in (2, 3, 6)]
        atom = "bf16_m16n8k16" if "bfloat16" in (of.lhs.name, of.rhs.name) else "f16_m16n8k16"
        found += [gather(of, atom=atom), gather(of, atom=atom, tile_n_bytes=128, split_k_warps=2)]
        if PANELS:
            found += [panel(of, tile_n_bytes=size, rows_per_warp=rows) for size in (64, 128) for rows in (1, 2)]
            found += [panel(of, tile=64, stages=5, warps=15, ordered=False), panel(of, cluster=2), panel(of, atom=atom)]
    return list(dict.fromkeys(found))


def named(config: Any) -> str:
    return str(config.name)


def names_of(config: Any) -> tuple[str, str]:
    return config.a.name, config.b.name


@pytest.mark.parametrize("config", covering(), ids=named)
def test_every_pair_and_vector_length(config: SpmmKernel) -> None:
    torch.manual_seed(len(config.name))
    (a, b), v = names_of(config), config.vector_length
    check_spmm(sparse(100, 700, v, a, 0.8, axis=1), dense((700, 70), b, 0), config, torch.randn(100))
    check_spmm(sparse(61, 331, v, a, empty=True), dense((2, 331, 193), b, layout="column"), config)


@pytest.mark.parametrize("config", variants(), ids=named)
def test_every_knob_keeps_the_result(config: SpmmKernel) -> None:
    torch.manual_seed(2)
    a, b = names_of(config)
    for m, k, n, sparsity in ((100, 1300, 200, 0.8), (7, 2111, 33, 0.3), (90, 256, 129, 0.95), (33, 40, 520, 0.0)):
        check_spmm(sparse(m, k, config.vector_length, a, sparsity), dense((k, n), b), config)


def test_the_kernels_cover_every_pair_and_vector_length() -> None:
    met = covering()
    assert {names_of(config) for config in met} == set(PAIRS)
    assert {config.vector_length for config in met if isinstance(config, GatherConfig)} == set(VECTOR_LENGTHS)
    assert {config.entry.shape[2] for config in variants()} == {16, 32}
    assert not PANELS or {config.vector_length for config in met if isinstance(config, PanelConfig)} == set(
        VECTOR_LENGTHS
    )


EDGES = [gather(kind(8, "float16", "float16"), split_k_warps=2), gather(kind(4, "e2m1", "e2m1", "float16")),
         gather(kind(1, "bfloat16", "e4m3", "bfloat16")),
         *([panel(kind()), panel(kind(8, "e4m3", "e2m1"), rows_per_warp=2)] if PANELS else [])]  # fmt: skip


@pytest.mark.parametrize("config", EDGES, ids=named)
@pytest.mark.parametrize(
    ("m", "k", "n", "batch"),
    [(1, 1, 1, ()), (5, 1, 3, ()), (5, 1, 16, (3,)), (8, 33, 0, ()), (0, 12, 9, ()), (9, 0, 5, ()), (9, 64, 7, (0,)),
     (17, 65, 1, (2, 3)), (3, 255, 17, (1,)), (40, 257, 65, (5,)), (200, 511, 47, ())],
)  # fmt: skip
def test_tiny_empty_and_odd_shapes(config: SpmmKernel, m: int, k: int, n: int, batch: tuple[int, ...]) -> None:
    a, b = names_of(config)
    left, right = sparse(m, k, config.vector_length, a, 0.4), dense((*batch, k, n), b)
    check_spmm(left, right, config)
    check_spmm(left, right)


@pytest.mark.parametrize("config", EDGES, ids=named)
def test_rows_may_be_empty_single_or_full(config: SpmmKernel) -> None:
    (a, b), v, k = names_of(config), config.vector_length, 1100
    mask = torch.zeros(12 * v, k, dtype=torch.bool)
    mask[2 * v : 3 * v] = True
    mask[5 * v : 6 * v, k - 1] = True
    mask[7 * v, ::31] = True
    mask[9 * v : 10 * v, 512:800] = True
    mask[11 * v :, torch.arange(0, k, 32)] = True  # one shared-memory bank, were it not for the swizzle
    left = mc.SRBCRS.from_mask(torch.randn(mask.shape), mask, vector_length=v, dtype=a)
    check_spmm(left, dense((k, 130), b), config)


@pytest.mark.configs([config for of in (kind(), kind(8, "e4m3", "e4m3")) for config in choices(of)])
def test_the_chosen_kernel_in_every_regime() -> None:
    torch.manual_seed(3)
    for a, used in (("float16", set()), ("e4m3", set())):
        for rows, k, n, sparsity in ((1, 4096, 16, 0.5), (40, 512, 128, 0.7), (130, 800, 300, 0.9), (1100, 256, 520, 0.5),
                                     (4, 60, 2000, 0.1), (600, 90, 1, 0.2)):  # fmt: skip
            left, right = sparse(8 * rows - 1, k, 8, a, sparsity), dense((k, n), a)
            on_gpu = left.to("cuda")
            check(spmm(on_gpu, right), left.to_dense().double(), real(right))
            used |= {x[0] for key, x in on_gpu._execution.items() if isinstance(key, tuple) and isinstance(x, tuple)}
        assert len(used) > 1, used


@pytest.mark.configs(EDGES)
def test_many_random_products() -> None:
    torch.manual_seed(4)
    order = random.Random(4)
    for i in range(400):
        config = EDGES[i % len(EDGES)]
        a, b = names_of(config)
        m, k, n = order.randint(1, 48), order.randint(1, 300), order.randint(1, 100)
        left = sparse(m, k, config.vector_length, a, order.choice((0.0, 0.3, 0.7, 0.95)), order.choice(STRIDES))
        check_spmm(left, dense((k, n), b, layout=order.choice(("row", "column"))), config, offset=i % 2)


EXACT = [gather(kind(8, a, b)) for a, b in PAIRS] + ([panel(kind(8, a, b)) for a, b in PAIRS[::4]] if PANELS else [])


@pytest.mark.parametrize("config", EXACT, ids=named)
def test_small_integers_are_exact(config: SpmmKernel) -> None:
    a, b = names_of(config)
    mask = mc.random_pattern(45, 333, 0.5, 8).to_dense()
    x, y = torch.randint(-4, 5, (45, 333)).float() * mask, torch.randint(-4, 5, (333, 77)).float()
    left = mc.SRBCRS.from_mask(exactly(x, a), mask, vector_length=8, dtype=a)
    assert torch.equal(spmm(left, exactly(y, b), config=config), x @ y)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.configs([gather(kind(8, a, b)) for a in FLOATS for b in (a, "float16" if a != "bfloat16" else a)])
def test_every_code_is_multiplied_exactly(name: str) -> None:
    """One value a sum, on either side, the smallest and the largest among them."""
    other, of = "bfloat16" if name == "bfloat16" else "float16", FLOATS[name]
    codes = torch.arange(0, 1 << of.bits, 13 if of.bits == 16 else 1)
    if of.bits == 16:
        values = codes.to(torch.int32).to(torch.int16).view(FLOAT_DTYPES[name]).float()
    else:
        values = floats.decode(codes.to(torch.uint8), name)
    values = values[values.isfinite()]
    n = values.numel()
    one = exactly(torch.ones(8, 1), other)
    left = mc.SRBCRS.from_mask(one, torch.ones(8, 1, dtype=torch.bool), vector_length=8, dtype=other)
    found = spmm(left, exactly(values[None], name), config=gather(kind(8, other, name)))
    assert torch.equal(found, values.expand(8, n)), "as the dense operand"
    n = n // 8 * 8
    square = mc.SRBCRS.from_mask(
        exactly(values[:n, None], name), torch.ones(n, 1, dtype=torch.bool), vector_length=8, dtype=name
    )
    found = spmm(square, exactly(torch.ones(1, 4), name), config=gather(kind(8, name, name)))
    assert torch.equal(found, values[:n, None].expand(n, 4)), "as the sparse operand"


@pytest.mark.parametrize("name", ["float16", "bfloat16", "e5m2", "e4m3"])
@pytest.mark.configs([gather(kind(8, a, a)) for a in ("float16", "bfloat16", "e5m2", "e4m3")])
def test_infinities_and_nan_reach_what_stores_their_column_and_nothing_else(name: str) -> None:
    config = gather(kind(8, name, name))
    mask = torch.zeros(32, 50, dtype=torch.bool)
    mask[0:8, 2] = mask[8:16, 5] = mask[24:32, 7] = mask[16:32, 11] = True
    a = mc.SRBCRS.from_mask(exactly(torch.ones(32, 50), name), mask, vector_length=8, dtype=name)
    y = torch.ones(50, 9)
    y[5, 1] = y[30, 2] = torch.nan
    if name != "e4m3":  # it has none
        y[2, 0] = torch.inf
    expected = torch.where(mask[:, :, None], y, 0).sum(1)
    spoiled = exactly(torch.full((50, 9), torch.nan), name)
    for _ in range(3):  # leaves NaN in shared memory, where padding must not find it
        spmm(a, spoiled, config=config)
        torch.testing.assert_close(spmm(a, exactly(y, name), config=config), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.configs([gather(kind(8, "float16", "float16", out)) for out in OUTS])
def test_sums_beyond_an_output_are_infinite() -> None:
    a = mc.SRBCRS.from_dense(torch.full((8, 4), 65504.0), vector_length=8, dtype="float16")
    b = torch.full((4, 5), 65504.0).half()
    for out in OUTS:
        found = spmm(a, b, out, gather(kind(8, "float16", "float16", out)))
        expected = (torch.full((8, 5), 4.0) * 65504.0**2).to(found.dtype)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


@pytest.mark.configs([chosen(kind(8, "e4m3", "e4m3", "float16"), 16, 64, 40)])
def test_cached_calls_read_new_data() -> None:
    a = sparse(128, 256, 8, "e4m3", 0.5).to("cuda")
    for _ in range(3):
        for b in (
            dense((256, 40), "float16"),
            dense((256, 40), "e4m3"),
            dense((256, 40), "e2m1"),
            dense((256, 40), "e4m3", 0),
        ):
            found = mc.spmm(a, b.to("cuda"), out_dtype=torch.float16)
            check(found.cpu(), a.to("cpu").to_dense().double(), real(b))


@pytest.mark.parametrize("config", EDGES, ids=named)
def test_repeated_runs_agree_to_the_bit(config: SpmmKernel) -> None:
    a, b = names_of(config)
    left, right = sparse(500, 2000, config.vector_length, a, 0.8).to("cuda"), dense((2000, 300), b).to("cuda")
    results = [mc.spmm(left, right, out_dtype=getattr(torch, config.out), config=config) for _ in range(10)]
    assert all(torch.equal(one, results[0]) for one in results)


SAMPLES = [
    (sddmm(kind(VECTOR_LENGTHS[i % 6], x, y, OUTS[i % 3]), STRIDES[i % 3], (64, 1024)[i % 2]), STRIDES[i % 3])
    for i, (x, y) in enumerate(PAIRS)
]


@pytest.mark.parametrize(("config", "stride"), SAMPLES, ids=[config.name for config, _ in SAMPLES])
@pytest.mark.configs([config for config, _ in SAMPLES])
def test_sddmm_of_every_pair(config: SddmmConfig, stride: int) -> None:
    torch.manual_seed(5)
    x, y, v = config.x.name, config.y.name, config.vector_length
    for m, n, k, batch in (
        (100, 130, 700, ()),
        (61, 47, 33, (2,)),
        (9, 300, 1, ()),
        (3, 5, 65, (2, 3)),
        (40, 40, 0, ()),
    ):
        left, right = dense((*batch, m, k), x, None if x in HALF_DTYPES else 1), dense((*batch, n, k), y)
        pattern = mc.random_pattern(m, n, 0.6, v)
        blank = mc.SRBCRS.from_pattern(
            pattern, torch.zeros(pattern.vectors, v, dtype=torch.int8), bits=8, stride=stride
        ).to("cuda")
        with sampling_with(config):
            for turned in (False, True):
                other = right.to("cuda").mT if turned else right.to("cuda")
                poison = torch.full((*batch, *blank.values.shape), torch.nan, dtype=torch.float32, device="cuda")
                del poison  # what the allocator hands out next
                dtype = getattr(torch, config.out)
                found = mc.sddmm(left.to("cuda"), other, blank, out_dtype=dtype, transposed_y=turned).to("cpu")
                found.check_format(full=True)
                check(found.to_dense(), real(left), real(right).mT, mask=pattern.to_dense())


@pytest.mark.configs([sddmm(kind(8, "float16", "float16")), sddmm(kind(8, "e2m1", "e5m2"), inner=64)])
def test_sddmm_of_small_integers_is_exact() -> None:
    for x, y, k in (("float16", "float16", 1000), ("e2m1", "e5m2", 60)):
        left, right = torch.randint(-4, 5, (50, k)).float(), torch.randint(-4, 5, (70, k)).float()
        pattern = mc.random_pattern(50, 70, 0.5, 8)
        found = mc.sddmm(exactly(left, x).to("cuda"), exactly(right, y).to("cuda"), pattern.to("cuda"))
        assert torch.equal(found.to("cpu").to_dense(), left @ right.mT * pattern.to_dense())


@pytest.mark.parametrize("name", FLOATS)
def test_matrices_made_on_the_gpu_are_those_of_the_cpu(name: str) -> None:
    x = torch.randn(45, 70) * mc.random_pattern(45, 70, 0.7, 4).to_dense()
    for axis in (None,) if name in HALF_DTYPES else (None, 1):
        here = mc.SRBCRS.from_dense(x, vector_length=4, dtype=name, scale=SCALES[axis])
        there = mc.SRBCRS.from_dense(x.to("cuda"), vector_length=4, dtype=name, scale=SCALES[axis])
        there.check_format(full=True)
        assert there.device.type == "cuda" and there.element_type == here.element_type
        for one in (there.to("cpu"), here.to("cuda").to("cpu")):
            assert torch.equal(one.to_dense(), here.to_dense()) and torch.equal(one.col_indices, here.col_indices)


def test_the_gpu_refuses_what_the_cpu_refuses() -> None:
    a = sparse(16, 32, 8, "float16").to("cuda")
    for b, message in (
        (torch.ones(32, 4, dtype=torch.bfloat16), "must not be float16 and bfloat16"),
        (mc.quantize(torch.ones(32, 4), 8), "both integers or both floats"),
        (torch.ones(32, 4), "B must be a QuantTensor"),
    ):
        with pytest.raises(TypeError, match=message):
            mc.spmm(a, b.to("cuda"))
    with pytest.raises(ValueError, match=f"atom must be an instruction for float16|of {HERE.arch}"):
        mc.spmm(a, torch.ones(32, 4).half().to("cuda"), atom="fp8_m16n8k32")
