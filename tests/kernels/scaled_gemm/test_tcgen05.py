"""The float product of sm_100a and sm_103a without such a chip: rules, choice, descriptors, and a model of its launch."""

from __future__ import annotations

import ctypes
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import floats
from cute_kernels.floats import FORMATS
from cute_kernels.jit import tensor_map, tma
from cute_kernels.scaled_gemm import cuda as scaled_gemm_cuda
from cute_kernels.scaled_gemm.api import FloatOperand, check, explain_scaled_gemm
from cute_kernels.scaled_gemm.config import OperandFormat
from cute_kernels.scaled_gemm.sm100 import MapParameters, PackedMatrix, Tcgen05Config, candidates, check_alignment

from cute_kernels.scaled_gemm.sm100 import choose, map_parameters, mma_kind  # isort: skip
from cute_kernels.scaled_gemm.small_m.config import supports_small_m
from cute_kernels.scaled_gemm.tcgen05 import ARCHES, COLUMNS, MMA_KINDS, MmaKind, matrix_descriptor
from tests.kernels.scaled_gemm.tcgen05_model import Launch, run

PLAIN, MXF8, MXF4, NVF4 = (MMA_KINDS[name] for name in ("f8f6f4", "mxf8f6f4", "mxf4", "nvf4"))
PAIRS = [(OperandFormat(a), OperandFormat(b)) for a in FORMATS for b in FORMATS]
MX = {name: OperandFormat(name, 32, "ue8m0") for name in FORMATS}
NV = OperandFormat("e2m1", 16, "e4m3")
SCALED = [(MX["e4m3"], MX["e2m1"]), (MX["e2m3"], MX["e5m2"]), (MX["e2m1"], MX["e2m1"]), (NV, NV)]


@pytest.fixture(autouse=True)
def wished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGICUBE_TCGEN05", "1")


def operand(kind: OperandFormat, rows: int, k: int, seed: int) -> FloatOperand:
    """All finite codes, with factors of blocks between 1/4 and 4."""
    generator = torch.Generator().manual_seed(seed)
    known = floats.decode(torch.arange(1 << kind.bits).to(torch.uint8), kind.dtype).isfinite().nonzero().flatten()
    codes = known[torch.randint(len(known), (rows, k), generator=generator)].to(torch.uint8)
    scales: dict[str, Any] = {}
    if kind.block:
        numbers = 2.0 ** torch.randint(-2, 3, (rows, -(-k // kind.block)), generator=generator).double()
        scales = {"blocks": floats.encode(numbers, kind.scale), "block": kind.block, "scale_dtype": kind.scale}
    if kind.tiles:
        scales = {"tiles": torch.ones(-(-rows // 128), -(-k // 128))}
    return FloatOperand(floats.pack(codes, kind.dtype), kind.dtype, k, **scales)


def call_of(a: FloatOperand, b: FloatOperand, out: torch.Tensor, **options: Any) -> Any:
    given: dict[str, Any] = {"alpha": 1.0, "beta": 0.0, "c": None, "bias": None} | options
    return check(a, b, **given, out=out, out_dtype=out.dtype, fast_accum=False)


def parameters() -> list[str]:
    """What the kernel takes, read from its source: maps, 64-bit integers or addresses, and floats."""
    source = (Path(scaled_gemm_cuda.__file__).parent / "sm100.cuh").read_text()
    found = re.search(r"\ngemm_floats_sm100\((.*?)\) \{", source, re.DOTALL)
    assert found is not None
    kinds = {"const __grid_constant__ TmaDescriptor": "map", "int64_t": "integer", "float": "float"}
    types = [each.strip().rpartition(" ")[0] for each in found[1].split(",")]
    return ["integer" if type.endswith("*") else kinds[type] for type in types]


def kind_of(argument: Any) -> str:
    return {MapParameters: "map", int: "integer", np.float32: "float"}[type(argument)]


def launched(
    monkeypatch: pytest.MonkeyPatch,
    a: FloatOperand,
    b: FloatOperand,
    config: Tcgen05Config | None = None,
    out: torch.Tensor | None = None,
    **options: Any,
) -> Launch:
    """The launch that a device of sm_100a would get where this kernel is wished."""
    monkeypatch.setenv("MAGICUBE_TCGEN05", "1")
    out = torch.zeros(a.rows, b.rows) if out is None else out
    caught: list[Launch] = []

    def get_kernel(chosen: Tcgen05Config) -> Any:
        def launch(grid: tuple[int, int, int], arguments: tuple[Any, ...], cluster: Any = (1, 1, 1)) -> None:
            blocks = (
                2 * min(1, chosen.tiles(a.rows, b.rows)) if chosen.ctas == 2 else min(3, chosen.tiles(a.rows, b.rows))
            )
            assert grid == (blocks, 1, 1) and cluster == (chosen.ctas, 1, 1)
            assert [kind_of(argument) for argument in arguments] == parameters(), "the kernel has other parameters"
            caught.append(Launch(chosen, *arguments[:8], arguments[8:]))

        return SimpleNamespace(launch=launch, num_sms=3)

    monkeypatch.setattr(scaled_gemm_cuda, "get_kernel", get_kernel)
    monkeypatch.setattr(scaled_gemm_cuda, "tensor_map", MapParameters)
    monkeypatch.setattr(scaled_gemm_cuda, "current_arch", lambda: "sm_100a")
    monkeypatch.setattr(scaled_gemm_cuda, "num_sms", lambda device: 3)
    monkeypatch.setattr(scaled_gemm_cuda, "device_of", lambda out: nullcontext())
    scaled_gemm_cuda.scaled_gemm_cuda(call_of(a, b, out, **options), out, config)
    assert len(caught) == 1
    return caught[0]


def assert_product(launch: Launch, a: FloatOperand, b: FloatOperand) -> None:
    left, right = a.values(torch.float64), b.values(torch.float64)
    error = (run(launch) - left @ right.t()).abs()
    assert bool((error <= 2.0**-44 * (left.abs() @ right.abs().t())).all()), "float64 sums in another order"


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_the_launch_of_every_pair_multiplies_the_operands_in_memory(
    pair: tuple[OperandFormat, OperandFormat], monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = 130, 70, 256
    a, b = operand(pair[0], m, k, 1), operand(pair[1], n, k, 2)
    launch = launched(monkeypatch, a, b)
    assert launch.config.kind == "f8f6f4"
    assert_product(launch, a, b)


@pytest.mark.parametrize("width", [256, 128, 64])
def test_tiles_of_every_width_and_rows_with_gaps(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k = 140, 270, 336  # 8-bit codes need no whole parts of k
    a, b = operand(OperandFormat("e4m3"), m, k, 1), operand(OperandFormat("e5m2"), n, k, 2)
    wide = torch.full((m + 1, 400), 0x7F, dtype=torch.uint8)  # NaN all around
    a = replace(a, packed_data=wide[1:, 16 : 16 + k].copy_(a.packed_data))
    config = replace(candidates("f8f6f4")[0], tile_n=width)
    assert_product(launched(monkeypatch, a, b, config), a, b)


@pytest.mark.parametrize("pair", SCALED, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_factors_of_blocks_reach_their_products(
    pair: tuple[OperandFormat, OperandFormat], monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = 133, 140, 640  # two and a half parts of packed codes
    a, b = operand(pair[0], m, k, 1), operand(pair[1], n, k, 2)
    launch = launched(monkeypatch, a, b)
    assert launch.config.mma == mma_kind(*pair) and launch.config.mma.block == pair[0].block
    assert_product(launch, a, b)


def test_a_pair_does_not_change_the_binary() -> None:
    sources = {
        Tcgen05Config("float32", kind=kind).translation_unit(arch).source for kind in MMA_KINDS for arch in ARCHES
    }
    assert len(sources) == len(MMA_KINDS)
    assert not any(name.upper() in source for name in FORMATS for source in sources)


def test_configs_fit_the_chip() -> None:
    found = [config for kind in MMA_KINDS for config in candidates(kind)]
    assert len({config.name for config in found}) == len(found) == 6
    for config in found:
        assert config.smem_bytes <= 227 * 1024 < config.smem_bytes + config.part_bytes + 16, "as many stages as fit"
        assert config.stages >= 4 and config.columns <= COLUMNS
        assert config.part_bytes % 1024 == 0, "swizzled parts start at multiples of 1024 bytes"


def test_descriptors_are_those_of_the_manual() -> None:
    # Written out from the bits of the tables: d type 1 at 4, a and b types at 7 and 10, n / 8 at 17, m / 16 at 24.
    assert PLAIN.instruction("e4m3", "e4m3", 128, 256) == 0x08400010
    assert PLAIN.instruction("e2m1", "e5m2", 128, 128) == 0x08200010 | 5 << 7 | 1 << 10
    assert MXF8.instruction("e3m2", "e2m3", 128, 128) == 0x08200000 | 4 << 7 | 3 << 10 | 1 << 23
    assert MXF4.instruction("e2m1", "e2m1", 128, 128) == 0x08200000 | 1 << 7 | 1 << 10 | 1 << 23
    assert NVF4.instruction("e2m1", "e2m1", 128, 128) == 0x08200000 | 1 << 7 | 1 << 10
    assert matrix_descriptor(0x2C400) == 2 << 61 | 1 << 46 | 64 << 32 | 1 << 16 | 0x2C40


def test_bytes_of_a_part_are_those_of_packed_codes() -> None:
    config = replace(candidates("f8f6f4")[0], tile_n=128)
    assert config.counted_bytes("e4m3", "e5m2") == config.part_bytes == 2 * 128 * 128
    assert config.counted_bytes("e2m1", "e3m2") == 128 * 64 + 128 * 96
    assert candidates("nvf4")[0].counted_bytes("e2m1", "e2m1") == 2 * 128 * 128, "256 codes a row"


@pytest.mark.parametrize(
    ("codes", "kind", "swizzle", "match"),
    [
        (PackedMatrix("e2m1", 256, 4, 0x1010, 128), PLAIN, 128, "a must start at a multiple of 32 bytes for e2m1 and f8f6f4, got 0x1010"),
        (PackedMatrix("e3m2", 200, 4, 0, 192), PLAIN, 128, "a must have rows of a multiple of 128 values for e3m2 and f8f6f4, got 200"),
        (PackedMatrix("e2m1", 256, 4, 0, 160), PLAIN, 128, "a must have rows of 128 bytes a multiple of 64 bytes apart for e2m1 and f8f6f4, got 160"),
        (PackedMatrix("e2m3", 256, 4, 0, 224), PLAIN, 128, "a must have rows of 192 bytes a multiple of 96 bytes apart for e2m3 and f8f6f4, got 224"),
        (PackedMatrix("e2m3", 256, 4, 0, 96), PLAIN, 128, "a must have rows of 192 bytes a multiple of 96 bytes apart for e2m3 and f8f6f4, got 96"),
        (PackedMatrix("e2m1", 256, 4, 0, 128), PLAIN, 64, "a must have a swizzle of one of 0, 128 bytes for e2m1 and f8f6f4, got 64"),
        (PackedMatrix("e4m3", 77, 4, 8, 80), PLAIN, 128, "a must start at a multiple of 16 bytes for e4m3 and f8f6f4, got 0x8"),
        (PackedMatrix("e4m3", 77, 4, 0, 88), PLAIN, 128, "a must have rows of 77 bytes a multiple of 16 bytes apart for e4m3 and f8f6f4, got 88"),
        (PackedMatrix("e4m3", 96, 4, 0, 96), MXF8, 128, "a must have rows of a multiple of 128 values for e4m3 and mxf8f6f4, got 96"),
        (PackedMatrix("e2m1", 64, 4, 0, 32), NVF4, 128, "a must have rows of a multiple of 128 values for e2m1 and nvf4, got 64"),
        (PackedMatrix("e4m4", 64, 4, 0, 32), PLAIN, 128, "a must be one of e5m2, e4m3, e3m2, e2m3, e2m1, got 'e4m4'"),
    ],
)  # fmt: skip
def test_what_the_copy_engine_cannot_read_is_named(
    codes: PackedMatrix, kind: MmaKind, swizzle: int, match: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(match)):
        check_alignment("a", codes, kind, swizzle)


def test_what_the_copy_engine_can_read_passes() -> None:
    for swizzle in (0, 128):
        check_alignment("a", PackedMatrix("e2m1", 128, 9, 32, 64), PLAIN, swizzle)
        check_alignment("a", PackedMatrix("e2m3", 384, 9, 96, 288), PLAIN, swizzle)
    check_alignment("a", PackedMatrix("e5m2", 77, 9, 16, 80), PLAIN, 32)
    check_alignment("a", PackedMatrix("e2m1", 384, 9, 16, 208), MXF4, 64)
    check_alignment("a", PackedMatrix("e2m1", 128, 1, 0, 1), PLAIN)  # the pitch of one row does not matter


def test_maps_count_codes_that_are_unpacked_and_bytes_that_are_not() -> None:
    assert map_parameters("a", PackedMatrix("e2m1", 384, 9, 64, 256), PLAIN, 128) == (
        64,
        1,
        (384, 9),
        256,
        (128, 128),
        128,
        4,
    )
    assert map_parameters("a", PackedMatrix("e3m2", 384, 9, 64, 288), MXF8, 128) == (
        64,
        1,
        (384, 9),
        288,
        (128, 128),
        128,
        6,
    )
    assert map_parameters("a", PackedMatrix("e2m1", 384, 9, 16, 208), NVF4, 128) == (
        16,
        1,
        (192, 9),
        208,
        (128, 128),
        128,
        0,
    )
    assert map_parameters("b", PackedMatrix("e4m3", 77, 1, 16, 1), PLAIN, 64) == (16, 1, (77, 1), 96, (128, 64), 128, 0)
    with pytest.raises(ValueError, match="b must start at a multiple of 32 bytes"):
        map_parameters("b", PackedMatrix("e2m1", 384, 9, 16, 192), PLAIN, 64)


@pytest.mark.parametrize(
    ("a", "b", "match"),
    [
        (OperandFormat("e4m3", tiles=True), OperandFormat("e4m3"), "a must have no tile scales for tcgen05.mma, got e4m3t"),
        (OperandFormat("e4m3"), MX["e4m3"], "b must have the same blocks as a for tcgen05.mma, got e4m3 and e4m3x32ue8m0"),
        (MX["e2m1"], NV, "b must have the same blocks as a for tcgen05.mma, got e2m1x32ue8m0 and e2m1x16e4m3"),
        (OperandFormat("e4m3", 16, "e4m3"), NV, "a and b must have blocks of 32 ue8m0, or of 16 e4m3 and be e2m1"),
        (OperandFormat("e2m1", 32, "e4m3"), OperandFormat("e2m1", 32, "e4m3"), "a and b must have blocks of 32 ue8m0, or of 16 e4m3"),
    ],
)  # fmt: skip
def test_scales_that_no_instruction_takes_are_named(a: OperandFormat, b: OperandFormat, match: str) -> None:
    with pytest.raises(ValueError, match=re.escape(match)):
        mma_kind(a, b)


def test_each_kind_has_its_instruction() -> None:
    assert all(mma_kind(a, b) is PLAIN for a, b in PAIRS)
    for a in FORMATS:
        for b in FORMATS:
            assert mma_kind(MX[a], MX[b]) is (MXF4 if a == b == "e2m1" else MXF8)
    assert mma_kind(NV, NV) is NVF4
    for kind, a, match in ((MXF4, "e4m3", "a must be e2m1 for mxf4, got 'e4m3'"), (PLAIN, "f8", "a must be one of")):
        with pytest.raises(ValueError, match=re.escape(match)):
            kind.instruction(a, "e2m1", 128, 128)
    for m, n, match in (
        (64, 128, "m must be 128, got 64"),
        (128, 264, "n must be a multiple of 16 up to 256, got 264"),
    ):
        with pytest.raises(ValueError, match=match):
            PLAIN.instruction("e4m3", "e4m3", m, n)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_90a", "sm_120a"])
def test_kernel_selection_depends_on_architecture_and_alignment(arch: str) -> None:
    own = arch in ARCHES
    for a, b in (*PAIRS, *SCALED):
        choice = scaled_gemm_cuda.select_scaled_config(
            call_of(operand(a, 5, 256, 1), operand(b, 7, 256, 2), torch.zeros(5, 7)), arch, 148
        )
        assert isinstance(choice.config, Tcgen05Config) == own and choice.refused == ""
    bytes_, packed = operand(OperandFormat("e4m3"), 5, 200, 1), operand(OperandFormat("e2m1"), 7, 200, 2)
    shifted = replace(bytes_, packed_data=torch.zeros(5, 221, dtype=torch.uint8)[:, 21:])
    for a, b, why in (
        (operand(OperandFormat("e4m3"), 1, 200, 1), packed, "b must have rows of a multiple of 128 values for e2m1 and f8f6f4, got 200"),
        (packed, packed, "a must have rows of a multiple of 128 values"),
        (bytes_, bytes_, "a must have rows of 200 bytes a multiple of 16 bytes apart for e4m3 and f8f6f4, got 200"),
        (shifted, bytes_, "a must start at a multiple of 16 bytes"),
        (replace(bytes_, packed_data=torch.zeros(200, 5, dtype=torch.uint8).t()), bytes_, "a must have bytes at stride 1"),
        (operand(OperandFormat("e4m3", tiles=True), 5, 256, 1), operand(OperandFormat("e4m3"), 7, 256, 1), "a must have no tile scales"),
        (operand(NV, 5, 256, 1), operand(MX["e2m1"], 7, 256, 1), "b must have the same blocks as a"),
        (unaligned_blocks(), operand(NV, 7, 256, 1), "a must have blocks that start at a multiple of 4 bytes for nvf4, got 0x"),
    ):  # fmt: skip
        choice = scaled_gemm_cuda.select_scaled_config(call_of(a, b, torch.zeros(a.rows, b.rows)), arch, 148)
        few = supports_small_m(a.rows, a.format, b.format, arch)
        assert choice.config.kernel == ("few" if few else "wgmma" if arch == "sm_90a" else "mma")
        assert choice.refused.startswith(why) if own else choice.refused == "", choice.refused


@pytest.mark.parametrize("setting", [None, "0", ""])
def test_a_kernel_that_never_ran_is_selected_only_on_request(
    setting: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAGICUBE_TCGEN05")
    if setting is not None:
        monkeypatch.setenv("MAGICUBE_TCGEN05", setting)
    a, b = operand(OperandFormat("e4m3"), 5, 256, 1), operand(OperandFormat("e4m3"), 7, 256, 2)
    choice = scaled_gemm_cuda.select_scaled_config(call_of(a, b, torch.zeros(5, 7)), "sm_100a", 148)
    assert choice.config.kernel == "mma"
    assert choice.refused == "the kernel of tcgen05.mma has not been run on any chip; MAGICUBE_TCGEN05=1 takes it"


def unaligned_blocks() -> FloatOperand:
    """nvfp4 with factors that start at an odd address."""
    found = operand(NV, 5, 256, 1)
    assert found.blocks is not None
    room = torch.zeros(found.blocks.numel() + 1, dtype=torch.uint8)
    return replace(found, blocks=room[1:].view(found.blocks.shape).copy_(found.blocks))


def test_the_choice_of_a_tile_fills_the_chip() -> None:
    for m, n, width in ((8192, 8192, 256), (2048, 2048, 128), (64, 4096, 64), (1, 1, 64)):
        assert choose(m, n, "f8f6f4", "float16", "none", 148) == Tcgen05Config("float16", "none", "f8f6f4", width)
    assert choose(1, 1, "nvf4", "float32", "float16", 148) == Tcgen05Config("float32", "float16", "nvf4", 128)


def test_the_plan_says_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_gemm_cuda, "current_arch", lambda: "sm_103a")
    monkeypatch.setattr(scaled_gemm_cuda, "num_sms", lambda device: 148)
    for k, copies, chosen in ((256, (), "tcgen05"), (200, ("a", "b"), "mma")):
        a, b = operand(OperandFormat("e2m1"), 5, k, 1), operand(OperandFormat("e4m3"), 7, k, 2)
        choice, copied = scaled_gemm_cuda.plan_scaled_gemm(call_of(a, b, torch.zeros(5, 7)))
        assert (choice.config.kernel, copied, bool(choice.refused)) == (chosen, copies, chosen == "mma")
    assert explain_scaled_gemm(a, b).refused == "", "the CPU has no such instruction"


def test_a_config_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operand(OperandFormat("e2m1"), 5, 256, 1), operand(OperandFormat("e4m3"), 7, 256, 2)
    with pytest.raises(ValueError, match="config must be of the kind f8f6f4 for these operands, got mxf8f6f4"):
        launched(monkeypatch, a, b, candidates("mxf8f6f4")[0])
    short = operand(OperandFormat("e2m1"), 5, 200, 1)
    with pytest.raises(ValueError, match="a must have rows of a multiple of 128 values"):
        launched(monkeypatch, short, operand(OperandFormat("e4m3"), 7, 200, 2), candidates("f8f6f4")[0])


def test_the_driver_is_asked_for_unpacking_types(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    asked: list[tuple[Any, ...]] = []
    answer = ctypes.create_string_buffer(b"m" * 128, 128)

    class Driver:
        """The driver's names, and a call that keeps what it was asked."""

        def __getattr__(self, name: str) -> Any:
            return getattr(driver, name)

        def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[int, Any]:
            asked.append(arguments)
            return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(answer))

    monkeypatch.setattr(tma, "_driver", Driver)
    for dtype, wanted in (
        ("e2m1", "16U4_ALIGN16B"),
        ("e2m3", "16U6_ALIGN16B"),
        ("e3m2", "16U6_ALIGN16B"),
        ("e5m2", "UINT8"),
    ):
        pitch = 3 * FORMATS[dtype].bits * 16
        assert tensor_map(*map_parameters("a", PackedMatrix(dtype, 384, 9, 4096, pitch), PLAIN, 64)) == b"m" * 128
        kind, rank, address, shape, pitches, box, strides, interleave, swizzle, *_ = asked[-1]
        assert kind == getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{wanted}")
        assert (rank, address, [int(x) for x in shape], [int(x) for x in pitches]) == (2, 4096, [384, 9], [pitch])
        assert [int(x) for x in box] == [128, 64] and [int(x) for x in strides] == [1, 1] and not int(interleave)
        assert swizzle == driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    for unpack, size in ((5, 1), (4, 2)):
        with pytest.raises(
            ValueError, match=re.escape(f"unpack must be one of (0, 4, 6), not 0 for 1 byte only, got {unpack}")
        ):
            tensor_map(0, size, (128, 1), 64, (128, 1), 128, unpack)
