"""Machine code of the float product for sm_100a and sm_103a, compiled without such a chip, and CuTe's own descriptors."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from cute_kernels.floats import FORMATS
from cute_kernels.jit import Binary, Unit
from cute_kernels.scaled_gemm.sm100 import Tcgen05Config, candidates
from cute_kernels.scaled_gemm.tcgen05 import MMA_KINDS, MmaKind, accumulator_place, matrix_descriptor
from tests.helpers import disassemble, lean_sass

pytest.importorskip("cuda.core")
sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from harness.tma_box_probe import BoxProbeConfig

CASES = [
    *((candidates(kind, "float16")[0], "sm_100a") for kind in MMA_KINDS),
    (candidates("f8f6f4", "float32", "bfloat16")[-1], "sm_103a"),
    (candidates("nvf4", "bfloat16")[-1], "sm_103a"),
    *((Tcgen05Config("float16", bits_a=bits), "sm_100a") for bits in (4, 6, 8)),
    (Tcgen05Config("float32", tile_n=64, bits_a=4), "sm_103a"),
]
PAIRS = [
    *(
        (Tcgen05Config("float16", tile_n=n, pair_rows=rows), "sm_100a")
        for rows, n in ((128, 256), (256, 128), (256, 256))
    ),
    (Tcgen05Config("float32", "bfloat16", tile_n=128, pair_rows=128), "sm_103a"),
]
COPIES = {0: [], 4: ["UTCCP.T.S.U4x16P64"], 6: ["UTCCP.T.S.U6x16P32"], 8: ["UTCCP.T.S"]}  # of values of A
# Four factors per row and instruction have another name on either chip.
PLAIN = MMA_KINDS["f8f6f4"]
MMAS = {"f8f6f4": {"UTCQMMA"}, "mxf8f6f4": {"UTCQMMA"}, "mxf4": {"UTCOMMA"}}
FOUR = {"sm_100a": {"UTCOMMA.4X"}, "sm_103a": {"UTCOMMA.BLOCK16"}}
# The assembler guards tensor memory: misuse of it is a call of a trap.
_GUARD = r"\$__internal_\d+_\$__cuda_sm10x_tcgen05_guardrail_trap_\w+"
_CUTE = {
    **{name: f"float_{name}_t" for name in ("e4m3", "e5m2")},
    **{name: f"detail::float_{name}_unpacksmem_t" for name in ("e3m2", "e2m3", "e2m1")},
}


def cute_descriptor(kind: MmaKind, a: str, b: str, n: int, m: int = 128) -> str:
    """CuTe's expression for an instruction's descriptor."""
    types = ("float_e2m1_t", "float_e2m1_t") if kind.packed else (_CUTE[a], _CUTE[b])
    shape = f"{m}, {n}, UMMA::Major::K, UMMA::Major::K"
    if not kind.block:
        return f"UMMA::make_instr_desc<{types[0]}, {types[1]}, float, {shape}>()"
    scale = "float_ue8m0_t" if kind.scale == "ue8m0" else "float_ue4m3_t"
    return f"UMMA::make_instr_desc_block_scaled<{types[0]}, {types[1]}, float, {scale}, {shape}>()"


def cute_places() -> str:
    """Assertions that places in tensor memory are CuTe's: corners of both CTAs, and some in between."""
    lines = []
    for m, n, ctas in ((128, 64, 1), (128, 256, 1), (128, 128, 2), (128, 256, 2), (256, 64, 2), (256, 256, 2)):
        rows = m // ctas
        layout = f"UMMA::tmem_frg_{ctas}sm<float>::make(Shape<Shape<C<{rows}>, C<{n}>>, _1, _1>{{}}).layout()"
        some = {(row, column) for row in (0, rows // 2 + 5, rows - 1) for column in (0, 1, n // 2 - 1, n // 2, n - 1)}
        for row, column in sorted(some):
            places = {accumulator_place(row + rows * cta, column, m, n, ctas)[1:] for cta in range(ctas)}
            ((lane, at),) = places  # the same in both CTAs
            index = f"make_coord(make_coord({row}, {column}), 0, 0)"
            lines.append(f"static_assert(decltype({layout}){{}}({index}) == ({lane} << 16 | {at}));")
    return chr(10).join(lines)


def comparison() -> Unit:
    """A kernel that writes unless CuTe's descriptors are the host's, and unless two are the host's with a bit turned
    over.  The compiler knows: its machine code has the stores that will be done."""
    pairs = [
        (kind.instruction(a, b, 128, n), f"uint32_t({cute_descriptor(kind, a, b, n)})")
        for kind in MMA_KINDS.values()
        for a in FORMATS
        for b in FORMATS
        for n in (64, 128, 256)
        if not kind.packed or (a, b) == ("e2m1", "e2m1")
    ]
    pairs += [
        (PLAIN.instruction(a, b, m, n, 2), f"uint32_t({cute_descriptor(PLAIN, a, b, n, m)})")
        for a in FORMATS
        for b in FORMATS
        for m, n in ((128, 128), (256, 256))
    ]
    lines = [f"  if ({theirs} != {ours}u) *out = 1;" for ours, theirs in pairs]
    text = f"""
#include <cute/tensor.hpp>
#include <cute/atom/copy_traits_sm100.hpp>
#include "scaled_gemm/tcgen05.cuh"
namespace magicube {{
using Load = Copy_Traits<SM100::TMEM::LOAD::SM100_TMEM_LOAD_16dp256b8x>;
// Bits: lane (t, g) has 64 of row g at column 2 t, the same of row g + 8, and that for eight times 256.
static_assert(is_same_v<Load::DstLayout, Layout<Shape<Shape<_4, _8>, Shape<_64, _2, _8>>,
                                                Stride<Stride<_64, _2048>, Stride<_1, _16384, _256>>>>);
{cute_places()}
__global__ void compare(volatile uint64_t* out) {{
  extern __shared__ __align__(1024) uint8_t shared[];
{chr(10).join(lines)}
  if ({pairs[0][1]} != {pairs[0][0] ^ 1 << 26}u) *out = 2;
  const auto layout = tile_to_shape(UMMA::Layout_K_SW128_Atom<float_e4m3_t>{{}}, Shape<_128, _128>{{}});
  const auto tensor = make_tensor(make_smem_ptr(reinterpret_cast<float_e4m3_t*>(shared)), layout);
  const uint64_t theirs = UMMA::make_umma_desc<UMMA::Major::K>(tensor);
  const uint64_t start = uint64_t(shared_address(shared)) >> 4 & 0x3FFF;
  if (theirs != ({matrix_descriptor(0)}ull | start)) *out = 1;
  if (theirs != tensor_memory::smem_descriptor(shared_address(shared))) *out = 1;
  if (theirs != ({matrix_descriptor(0) ^ 1 << 40}ull | start)) *out = 3;
}}
}}  // namespace magicube
"""
    return Unit(text, "magicube::compare", "sm_100a")


@pytest.mark.parametrize(("config", "arch"), CASES, ids=[f"{arch}-{config.name}" for config, arch in CASES])
def test_the_kernel_is_made_of_the_instructions_that_were_meant(
    config: Tcgen05Config, arch: str, binaries: dict[tuple[Tcgen05Config, str], Future[Binary]]
) -> None:
    binary = binaries[config, arch].result()
    sass = lean_sass(binary, _GUARD)
    assert binary.usage is not None
    assert binary.usage.registers * config.threads <= 65536
    meant = MMAS.get(config.kind, FOUR[arch])
    assert set(re.findall(r"\b(?:UTC|[A-Z])[QOIH]?MMA\S*", sass)) == meant
    assert "UTMALDG.2D" in sass and "LDTM.16dp256bit.x8" in sass and "UTCBAR" in sass and "UTCATOMSWS" in sass
    assert ("UTCCP.T.S.4x32dp128bit" in sass) == (config.mma.block > 0)
    # Offsets of the pipeline's barriers and of the tensor memory address, as the host computes them.
    assert f"+{config.stages * config.part_bytes:#x}]" in sass and f"+{config.smem_bytes - 16:#x}]" in sass
    # Operands' descriptors: 128-byte swizzle, 1024 bytes from eight rows to the next.
    assert f"{matrix_descriptor(0) >> 32:#x}" in sass
    loop = re.findall(r"UTC(?:[QO]MMA|CP|BAR)", sass)
    copies = 4 if config.bits_a else 2 * config.mma.words
    period = [*["UTCCP"] * copies, *[min(meant)[:7]] * 4, "UTCBAR"]
    assert loop[: len(period)] == period, "factors or A, four products of a part, and the stage is given back"
    if not config.mma.block:
        assert sorted(set(re.findall(r"UTCCP\S*", sass))) == COPIES[config.bits_a]
    sources = set(re.findall(r"UTC[QO]MMA\S* (\w+)\[", sass))
    assert sources == ({"tmem"} if config.bits_a else {"gdesc"}), "where A is read"
    if config.bits_a:
        columns = re.findall(r"UTCCP\S* tmem\[UR\d+(?:\+(\w+))?\]", sass)
        assert columns[:4] == ["", "0x8", "0x10", "0x18"], "32 values of a row take eight columns"
    ends = [index for index, name in enumerate(loop) if name == "UTCBAR"]
    assert len(ends) >= 2 and ends[-1] == len(loop) - 1 == ends[-2] + 1, "a tile's sums are announced behind the parts"


@pytest.mark.parametrize(("config", "arch"), PAIRS, ids=[f"{arch}-{config.name}" for config, arch in PAIRS])
def test_a_pair_is_made_of_two_sm_instructions(
    config: Tcgen05Config, arch: str, compile_one: Callable[[Unit], Binary]
) -> None:
    binary = compile_one(config.translation_unit(arch))
    sass = lean_sass(binary, _GUARD)
    assert binary.usage is not None and binary.usage.registers * config.threads <= 65536
    assert set(re.findall(r"\bUTCQMMA\S*", sass)) == {"UTCQMMA.2CTA"}
    assert set(re.findall(r"\bUTMALDG\S*", sass)) == {"UTMALDG.2D.2CTA"}
    assert set(re.findall(r"\bUTCBAR\S*", sass)) == {"UTCBAR.2CTA.MULTICAST"}
    assert any(each.startswith("UTCATOMSWS.2CTA") for each in re.findall(r"\bUTCATOMSWS\S*", sass))
    assert len(re.findall(r"\bUCGABAR_ARV", sass)) == 2, "both CTAs begin and end together"
    assert "LDTM.16dp256bit.x8" in sass
    assert re.search(r"0xfefffff[8f]", sass), "copies of the odd CTA complete on the barrier of the even one"
    assert f"+{config.stages * config.part_bytes:#x}]" in sass and f"+{config.smem_bytes - 16:#x}]" in sass
    loop = re.findall(r"UTC(?:QMMA|BAR)", sass)
    assert loop[:5] == [*["UTCQMMA"] * 4, "UTCBAR"] and loop[-2:] == ["UTCBAR"] * 2


def test_the_probe_copies_a_box(compile_one: Callable[[Unit], Binary]) -> None:
    sass = disassemble(compile_one(BoxProbeConfig(128 * 128).translation_unit("sm_100a")).code)
    assert "UTMALDG.2D" in sass and "SYNCS.PHASECHK.TRANS64" in sass and "CALL" not in sass


def test_descriptors_are_those_of_cute(compile_one: Callable[[Unit], Binary]) -> None:
    sass = disassemble(compile_one(comparison()).code)
    assert len(re.findall(r"\bSTG\.E\.64", sass)) == 2, "those of the turned bits, and no other"
