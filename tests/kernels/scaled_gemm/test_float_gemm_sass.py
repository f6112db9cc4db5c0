"""Machine code of the float product's kernels, compiled without a GPU: the instructions that were meant, nothing spilled."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import pytest

from cute_kernels.jit import Binary, Unit
from cute_kernels.scaled_gemm.config import OperandFormat, ScaledGemmConfig, candidates
from tests.helpers import DIVERGED, lean_sass

pytest.importorskip("cuda.core")

E5M2, E2M1 = OperandFormat("e5m2"), OperandFormat("e2m1")
NV, MX = OperandFormat("e2m1", 16, "e4m3"), OperandFormat("e4m3", 32, "ue8m0")
# Both operands without dequantization, in tiles of 256, 192 and 128 columns; bfloat16; one operand dequantized; block
# scales; mma.sync.
CASES = [
    *(
        (replace(each, out="float16"), "sm_90a")
        for each in candidates(OperandFormat("e4m3"), OperandFormat("e4m3"), "sm_90a")[:3]
    ),
    (replace(candidates(OperandFormat("bfloat16"), OperandFormat("bfloat16"), "sm_90a")[0], out="float16"), "sm_90a"),
    (replace(candidates(E2M1, E5M2, "sm_90a")[0], out="float16"), "sm_90a"),
    (replace(candidates(MX, NV, "sm_90a")[-1], out="float16"), "sm_90a"),
    (replace(candidates(OperandFormat("e3m2"), OperandFormat("e2m1", tiles=True), "sm_80")[0], out="float16"), "sm_80"),
]


@pytest.mark.parametrize(("config", "arch"), CASES, ids=[f"{arch}-{config.name}" for config, arch in CASES])
def test_the_kernel_is_made_of_the_instructions_that_were_meant(
    config: ScaledGemmConfig, arch: str, binaries: dict[tuple[ScaledGemmConfig, str], Future[Binary]]
) -> None:
    binary = binaries[config, arch].result()
    sass = lean_sass(binary, DIVERGED if arch == "sm_80" else "")
    assert binary.usage is not None
    assert binary.usage.registers * config.threads <= 65536
    decoding = config.decoders > 0 or config.kernel == "mma"
    assert ("HMUL2.BF16_V2" in sass or "HFMA2.BF16_V2" in sass) == (config.uses_bfloat16 and decoding)
    if config.kernel == "mma":
        assert set(re.findall(r"\bHMMA\.\S+", sass)) == {"HMMA.16816.F32.BF16"}
        assert "LDGSTS.E.BYPASS" in sass and "LDSM.16.M88.4" in sass
        return
    types = {kind: "E5M2" if kind.dtype == "e5m2" else "E4M3" for kind in (config.a, config.b)}
    columns = 128 if config.promote and config.tile_n == 256 else config.tile_n
    bytes_ = f"QGMMA.64x{columns}x32.F32.{types[config.a]}.{types[config.b]}"
    assert set(re.findall(r"\b[A-Z]GMMA\.\S+", sass)) == {
        f"HGMMA.64x{columns}x16.F32.BF16" if config.uses_bfloat16 else bytes_
    }
    assert "UTMALDG.2D" in sass and ("UCGABAR_ARV" in sass) == (config.split > 1)
    loop = sass[sass.index(f"GMMA.64x{columns}") : sass.rindex(f"GMMA.64x{columns}")]
    if config.promote:  # four products of a part, one behind the other; of two parts where there is room for their sums
        parts = 1 if config.decoders or config.tile_n == 192 else 2
        fresh = re.findall(rf"GMMA\.64x{columns}\S+ R\d+, gdesc\[UR\d+\], RZ", sass)
        assert len(fresh) == parts and len(re.findall(rf"GMMA\.64x{columns}", sass)) == 4 * parts, (
            "a part starts from zero"
        )
        if config.tile_n == 256:  # of two spans of columns, one after the other
            assert loop.count("DEPBAR") == 1, "the assembler made them wait for each other"
        else:
            assert "DEPBAR" not in loop and "FADD" not in loop, "the assembler made them wait for each other"
        assert sass.count("FADD") >= config.tile_n // 2, "sums are added without a factor"
    assert "MEMBAR" not in loop, "a stage is given back without a fence of all memory"
    assert ("USETMAXREG" in sass) == (config.groups + config.decoders > 1)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize(("tile_n", "loop"), [(256, r"m{4}0f{64}m{4}0"), (128, r"m{8}1f{64}0")])
def test_sums_are_scaled_as_they_are_added(
    tile_n: int, loop: str, tiles: bool, compile_one: Callable[[Unit], Binary]
) -> None:
    found = candidates(OperandFormat("e4m3", 128, "float32"), OperandFormat("e4m3", tiles=tiles), "sm_90a")
    config = next(each for each in found if each.tile_n == tile_n)
    sass = lean_sass(compile_one(config.translation_unit("sm_90a")), "")
    seen = re.findall(r"\b(QGMMA|WARPGROUP\.DEPBAR|FFMA)\b(?:\S* gsb0, (0x\d))?", sass)
    text = "".join({"QGMMA": "m", "FFMA": "f"}.get(name, left[-1:]) for name, left in seen)
    assert re.match(loop, text[text.index("m") :]), "one multiplication and addition per element"
