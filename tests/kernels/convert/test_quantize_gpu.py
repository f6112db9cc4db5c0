"""Quantization by the GPU's kernels: every integer and every scale as the CPU has them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels.convert.quantize import QuantizeConfig, default_configs, quantize_rows_of_two
from cute_kernels.integers import BITS, widen
from cute_kernels.jit import Binary, Unit
from magicube_cutlass import QuantTensor, quantize
from tests.helpers import SCALES, disassemble, lean_sass

AXES = (None, 0, 1)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# One row, narrow, odd, whole vectors, more columns than one pass of a block, longer than what threads keep, tall.
SHAPES = [(1, 1), (3, 5), (1, 1000), (70, 33), (64, 256), (5, 4100), (3, 20_000), (2, 40_001), (3000, 7), (1500, 1)]


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.long), "sm_90a"])
@pytest.mark.parametrize(
    "config",
    [
        QuantizeConfig("absmax_slices", "float32"),
        QuantizeConfig("absmax_columns", "bfloat16"),
        QuantizeConfig("encode_slices", "float16", 4),
        QuantizeConfig("encode_slices", "bfloat16", 8, steps=1),
        QuantizeConfig("encode_rows", "float32", 8),
        QuantizeConfig("encode_short_rows", "float16", 4, steps=2),
        QuantizeConfig("encode_columns", "float64", 16),
        QuantizeConfig("encode_columns", "float32", 12, signed=False, truncate=True),
    ],
    ids=lambda config: config.name,
)
def test_machine_code_keeps_everything_in_registers(
    config: QuantizeConfig, arch: str, compile_one: Callable[[Unit], Binary]
) -> None:
    binary = compile_one(config.translation_unit(arch))
    sass = disassemble(binary.code)
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    assert not re.search(r"\b(?:LDL|STL)\b", sass)
    assert "LDG.E.128" in sass
    if config.kernel.startswith("absmax") and arch == "sm_90a":
        lean_sass(binary)  # the others divide, once a slice, by a call


def test_config_names_are_unique() -> None:
    configs = default_configs()
    assert len({config.name for config in configs}) == len(configs) == 48


def test_lanes_are_enough_for_a_row_and_tiles_for_a_matrix() -> None:
    config = QuantizeConfig("encode_slices", "float32")
    for columns in (1, 15, 16, 17, 255, 4096, 10**6):
        lanes = config.lanes(columns)
        assert lanes & (lanes - 1) == 0 and 1 <= lanes <= config.threads
        assert lanes == config.threads or lanes * config.vector * config.steps >= columns
    assert config.tiles(1, 1 << 20) == 256 and config.tiles(257, 1) == 2


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of magnitudes from the smallest to the largest, ties and integers among them, one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x[..., ::3] = (x[..., ::3] * 8).round() / 8
    x[..., ::7] = 0
    spread = 3 if dtype == torch.float16 else 36
    powers = torch.randint(-spread, spread, (*shape[:-1], 1), generator=generator).double()
    x *= 10.0**powers
    if len(shape) > 1 and shape[-2] > 2:
        x[..., 1, :] = 0
        x[..., 2, :] = x[..., 0, :] * 1e-44
    return x.to(dtype)


def same(ours: QuantTensor, expected: QuantTensor) -> None:
    """Equal in every field, bit by bit."""
    assert (ours.shape, ours.axis, ours.bits, ours.signed) == (
        expected.shape, expected.axis, expected.bits, expected.signed
    )  # fmt: skip
    assert ours.scale is not None and expected.scale is not None
    assert ours.scale.dtype == expected.scale.dtype and ours.scale.shape == expected.scale.shape
    assert torch.equal(torch.nan_to_num(ours.scale.cpu(), -1.0), torch.nan_to_num(expected.scale, -1.0))
    assert ours.data.dtype == expected.data.dtype and ours.data.shape == expected.data.shape
    assert torch.equal(widen(ours.data.cpu()), widen(expected.data))


def check(x: Tensor, bits: int, **options: Any) -> None:
    """``x`` is on the GPU."""
    same(quantize(x, bits, **options), quantize(x.cpu(), bits, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["nearest", "trunc"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", AXES)
def test_integers_and_scales_are_those_of_the_cpu(axis: int | None, dtype: torch.dtype, rounding: str) -> None:
    for i, shape in enumerate(SHAPES):
        for bits in BITS:
            for signed in (True, False):
                x = inputs(shape, dtype, seed=i)
                check((x if signed else x.abs()).cuda(), bits, scale=SCALES[axis], signed=signed, rounding=rounding)


@pytest.mark.gpu
@pytest.mark.parametrize("axis", AXES)
def test_every_quotient_near_a_tie_is_rounded_as_in_double(axis: int | None) -> None:
    scale = torch.rand(64, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    for bits in (4, 8, 16):
        high = (1 << (bits - 1)) - 1
        codes = torch.arange(-high, high + 1).double()[:: max(1, high // 500)]
        near = torch.cat([codes + offset for offset in (-0.5, 0.5, 0.0)]).clamp(-high, high)
        x = (near * scale).float()
        x[:, 0] = float(high) * scale[:, 0].float()
        for step in (-1, 0, 1):  # the neighbours among the floats too
            moved = (x.view(torch.int32) + step * (x != 0).int()).view(torch.float32)
            for rounding in ("nearest", "trunc"):
                check(moved.cuda(), bits, scale=SCALES[axis], rounding=rounding)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_is_read_as_its_float(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = every[torch.isfinite(every)].reshape(-1, 2).cuda()
    for axis in AXES:
        same(quantize(x, 16, scale=SCALES[axis]), quantize(x.float().cpu(), 16, scale=SCALES[axis]))


@pytest.mark.gpu
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", [4, 8])
def test_layouts_give_the_integers_of_a_contiguous_tensor(bits: int, axis: int | None) -> None:
    base = inputs((6, 41, 77), torch.float32).cuda()
    views = {
        "batch": base,
        "column-major": base[0].mT.contiguous().mT,
        "column-major batch": base.mT.contiguous().mT,
        "rows apart": base[1, :, :40],
        "aligned rows apart": torch.randn(33, 96, device="cuda")[:, 32:92],
        "unaligned": base[0, :, 3:],
        "every second row": base[2, ::2],
        "every second column": base[2, :, ::2],
        "every second matrix": base[::2],
        "one row for all": base[0, :1].expand(9, 77),
        "one column for all": base[0, :, :1].expand(41, 9),
        "permuted": base.permute(2, 0, 1),
    }
    for name, x in views.items():
        try:
            check(x, bits, scale=SCALES[axis])
        except AssertionError as error:
            raise AssertionError(name) from error
    if axis is None:
        check(base.flatten()[1:], bits)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_two_tensors_share_a_launch_only_if_their_strides_match(bits: int) -> None:
    storage = torch.randn(3 * 1000 * 72, dtype=torch.float16, device="cuda")
    x, y = storage[:64_000].view(1000, 64), storage[72_000:136_000].view(1000, 64)
    others = {
        "alike": y,
        "another pitch": storage[72_000:144_000].view(1000, 72)[:, :64],
        "not aligned": storage[72_001:136_001].view(1000, 64),
        "longer": storage[72_000:200_000].view(2000, 64),
        "another dtype": y.float(),
        "with holes": torch.where(torch.arange(1000, device="cuda")[:, None] == 7, torch.nan, y.float()).half(),
        "long rows": storage[:72_000].view(2, 36_000),
    }
    for name, other in others.items():
        first = x if name != "long rows" else storage[72_000:144_000].view(2, 36_000)
        found = quantize_rows_of_two(first, other, bits=bits, factor=0.3)
        for (data, scale), each, factor in zip(found, (first, other), (0.3, 1.0), strict=True):
            expected = quantize(each, bits, scale="row", nonfinite="propagate")
            assert torch.equal(data, expected.data), name
            assert expected.scale is not None
            assert torch.equal(scale.nan_to_num(-1.0), (expected.scale * factor).nan_to_num(-1.0)), name


@pytest.mark.gpu
@pytest.mark.parametrize("clip", ["mse", 99.0])
@pytest.mark.parametrize("axis", AXES)
def test_given_scales_are_used(axis: int | None, clip: Any) -> None:
    x = torch.randn(2, 40, 70, generator=torch.Generator().manual_seed(2)).cuda()
    for dtype in (torch.float32, torch.float16):
        ours = quantize(x.to(dtype), 4, scale=SCALES[axis], clip=clip)
        assert ours.scale is not None
        codes = torch.round(x.to(dtype).double() * (1 / ours.scale.double())).clamp(-8, 7)
        assert torch.equal(ours.ints().double(), codes)
    with pytest.raises(ValueError, match="x must not be negative"):
        quantize(x, 8, scale=SCALES[axis], signed=False, clip=clip)
    long = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(3)).cuda()
    ours = quantize(long, 8, scale=SCALES[axis], clip=90.0)
    assert ours.scale is not None
    assert torch.equal(ours.ints().double(), torch.round(long.double() * (1 / ours.scale.double())).clamp(-128, 127))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", AXES)
def test_nonfinite_entries_raise_or_poison_their_own_slice_only(
    axis: int | None, dtype: torch.dtype, bad: float
) -> None:
    for shape in ((3, 5), (3, 9000), (2, 50_000)):
        x = torch.randn(shape, device="cuda").to(dtype)
        x[1, 2] = bad
        with pytest.raises(ValueError, match=f"x must be finite, got 1 inf or nan of {x.numel()} entries"):
            quantize(x, 8, scale=SCALES[axis])
        check(x, 8, scale=SCALES[axis], nonfinite="propagate")
    with pytest.raises(ValueError, match="x must be finite"):
        quantize(x.mT, 8, scale=SCALES[axis])


@pytest.mark.gpu
@pytest.mark.parametrize("axis", AXES)
def test_negative_entries_are_named_where_integers_are_unsigned(axis: int | None) -> None:
    x = torch.rand(300, 77, device="cuda")
    x[0, 0] = -0.0
    quantize(x, 8, scale=SCALES[axis], signed=False)
    x[200, 33] = -0.25
    for nonfinite in ("raise", "propagate"):
        with pytest.raises(ValueError, match=r"x must not be negative for unsigned integers, got -0\.25"):
            quantize(x, 8, scale=SCALES[axis], signed=False, nonfinite=nonfinite)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_empty_tensors_need_no_kernel(shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        for axis in AXES if len(shape) > 1 else (None,):
            check(torch.empty(shape, dtype=dtype, device="cuda"), 4, scale=SCALES[axis])


@pytest.mark.gpu
def test_subnormal_entries_of_a_double_keep_their_integers() -> None:
    x = torch.tensor([[5e-324, 0.0, -5e-324], [3e-310, 1e-310, 0.0]], dtype=torch.float64, device="cuda")
    q = quantize(x, 8, scale="row")
    assert q.scale is not None and bool((q.scale > 0).all())
    assert q.ints()[0, 1] == 0 and q.ints()[1, 2] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("axis", AXES)
def test_a_graph_holds_a_call_that_has_nothing_to_raise(axis: int | None) -> None:
    x = torch.randn(40, 90, device="cuda")
    quantize(x, 8, scale=SCALES[axis], nonfinite="propagate")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = quantize(x, 8, scale=SCALES[axis], nonfinite="propagate")
    for seed in range(2):
        x.copy_(inputs((40, 90), torch.float32, seed))
        graph.replay()
        same(q, quantize(x.cpu(), 8, scale=SCALES[axis]))


@pytest.mark.gpu
def test_the_device_is_waited_for_only_where_there_is_something_to_raise() -> None:
    x = torch.rand(40, 90, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        for axis in AXES:
            quantize(x, 8, scale=SCALES[axis], nonfinite="propagate")
            with pytest.raises(RuntimeError, match="called a synchronizing"):
                quantize(x, 8, scale=SCALES[axis])
    finally:
        torch.cuda.set_sync_debug_mode("default")
