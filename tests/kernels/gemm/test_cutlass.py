"""CUTLASS's enumerations against our atoms and tiles, and its kernels compiled by NVRTC without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass_library", reason="needs the wheel nvidia-cutlass")
pytest.importorskip("cuda.core")

from cute_kernels.atoms import atoms
from cute_kernels.gemm import gemm
from cute_kernels.gemm.config import Products
from cute_kernels.gemm.cutlass import CONFIG, CutlassGemm, operations
from cute_kernels.gemm.heuristics import candidates
from cute_kernels.jit import Binary
from cute_kernels.mma_atom import Atom
from tests.helpers import disassemble

# Atoms that no dense product of CUTLASS 4.2's generator names.
UNKNOWN = {
    "s8_m16n8k16", "s4_m16n8k32",  # shorter instructions, which CUTLASS has but enumerates no product of
    "int4_as_int8_m16n8k32",  # our s4 x s4 by an s8 instruction; CUTLASS enumerates s4 x s8 there
    "s8_m64n8k32", "s8_m64n16k32",  # its wgmma products are named by tiles of 64 columns and more
    "f16_m16n8k32", "bf16_m16n8k32",  # two instructions along K
}  # fmt: skip
_NAMES = {"f16": "float16", "bf16": "bfloat16"}


def cutlass_instructions() -> dict[tuple[tuple[int, ...], str, str], int]:
    """(shape, type of A, type of B) of each dense product by warps, with its least compute capability."""
    found: dict[tuple[tuple[int, ...], str, str], int] = {}
    for generator in ("GenerateSM75", "GenerateSM80", "GenerateSM89"):
        for operation in operations(generator):
            math = operation.tile_description.math_instruction
            accumulates = math.element_accumulator.name in ("s32", "f32")
            upcast = "upcast" in math.math_operation.name or "fast" in math.math_operation.name
            if (
                operation.gemm_kind.name != "Universal"
                or math.opcode_class.name != "TensorOp"
                or upcast
                or not accumulates
            ):
                continue
            types = (_NAMES.get(each.name, each.name) for each in (math.element_a, math.element_b))
            key, least = (tuple(math.instruction_shape), *types), operation.tile_description.minimum_compute_capability
            found[key] = min(least, found.get(key, least))
    return found


def operand_names(entry: Atom) -> Iterator[tuple[str, str]]:
    """Types of A and B of each struct of an atom, as CUTLASS names them; integers of one sign each."""
    for key in entry.structs:
        if all(isinstance(each, str) for each in key):
            yield str(key[0]), str(key[1])
        elif key[0] == key[1]:  # CUTLASS enumerates no mixed signs
            yield (f"{'s' if key[0] else 'u'}{entry.bits}",) * 2


def test_cutlass_enumerates_our_atoms_with_their_shapes_types_and_architectures() -> None:
    instructions = cutlass_instructions()
    for entry in atoms():
        least = [instructions.get((entry.shape, *types)) for types in operand_names(entry)]
        if entry.name in UNKNOWN:
            assert not any(least), f"CUTLASS enumerates {entry.name}"
            continue
        for each in least:
            assert each is not None, f"CUTLASS does not enumerate {entry.name}"
            first = min(int(arch.rstrip("a")) for arch in entry.archs)
            assert each <= first, f"{entry.name} is of sm_{each} and later in CUTLASS, of sm_{first} here"
            assert each == first or each < 80 == first, "the table begins with sm_80"
    assert {entry.name for entry in atoms()} >= UNKNOWN


def test_our_wgmma_types_are_those_of_cutlass() -> None:
    found = operations("GenerateSM90_TensorOp_int8_WGMMA_gemm")
    types = {(each.A.element.name, each.B.element.name, each.accumulator_type().name) for each in found}
    assert types == {("s8", "s8", "s32"), ("u8", "u8", "s32")}
    assert {each.tile_description.minimum_compute_capability for each in found} == {90}


def test_our_tiles_of_one_product_are_among_cutlass_s() -> None:
    one = Products(1, 1, 1)
    warps = {
        tuple(each.tile_description.threadblock_shape) for each in operations("GenerateSM80_TensorOp_16832_TN", "*")
    }
    (config,) = candidates(one, "sm_80")
    assert (config.tile_m, config.tile_n, config.tile_k) in warps
    groups = operations("GenerateSM90_TensorOp_int8_WGMMA_gemm")
    tiles = [(each.tile_description.threadblock_shape, each.tile_description.cluster_shape) for each in groups]
    known = {(*shape, cluster[0]) for shape, cluster in tiles if tuple(cluster[1:]) == (1, 1)}
    ours = {(each.tile_m, each.tile_n, each.tile_k, each.cluster) for each in candidates(one, "sm_90a")}
    assert ours & known == {(128, 128, 128, 2)}
    # its default enumeration has no cluster of one, and no smaller tile for small outputs
    assert {cluster for *_, cluster in ours - known} == {1}


CASES = [(CONFIG, arch) for arch in ("sm_80", "sm_90a", "sm_120a")]


@pytest.mark.parametrize(
    ("config", "arch"),
    [pytest.param(config, arch, id=arch, marks=[pytest.mark.long] * (arch == "sm_120a")) for config, arch in CASES],
)
def test_cutlass_kernels_compile_to_its_instructions(
    config: CutlassGemm, arch: str, binaries: dict[tuple[Any, str], Future[Binary]]
) -> None:
    binary = binaries[config, arch].result()
    sass = disassemble(binary.code)
    assert binary.usage is not None and binary.usage.registers * config.threads <= 65536
    found = set(re.findall(r"\bI?G?MMA\.\S+", sass))
    assert found == {"IMMA.16832.S8.S8.SAT"}
    assert "LDGSTS" in sass
    loop = sass[sass.index("MMA.") : sass.rindex("MMA.")]
    assert not re.search(r"\b(LDL|STL)\b", loop), "CTA parameters stay out of the mainloop"
    assert not set(re.findall(r"CALL\S*", sass)) - {"CALL.ABS.NOINC"}, "no call but those of failed assertions"


def test_the_grid_is_the_one_of_cutlass() -> None:
    assert CONFIG.grid(1000, 128) == (4, 1, 1)  # one column of tiles: no swizzle
    assert CONFIG.grid(256, 256) == (2, 1, 1) and CONFIG.grid(256, 384) == (4, 1, 1)
    assert CONFIG.grid(257, 128 * 6) == (16, 1, 1) and CONFIG.grid(1, 128 * 17) == (8, 3, 1)


def test_bad_arguments_are_named() -> None:
    a = torch.zeros(4, 4, dtype=torch.int8)
    with pytest.raises(ValueError, match="backend must be None or 'cutlass', got 'nvcc'"):
        gemm(a, a, backend="nvcc")
    with pytest.raises(ValueError, match="backend must be None on cpu, got 'cutlass'"):
        gemm(a, a, backend="cutlass")
    with pytest.raises(ValueError, match="operation must be one of GenerateSM80_TensorOp_16832_TN, got 'none'"):
        CutlassGemm("none", CONFIG.generator, CONFIG.emitter, (1, 1), 1, 1).translation_unit("sm_80")
