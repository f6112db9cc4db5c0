"""Floats on their way to the mma: the moves of ``device/dequantize_fragment.cuh``, simulated bit by bit on the host, and whole groups."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels import floats
from cute_kernels.atoms import Atom, atom, atoms, operand_of
from cute_kernels.dtypes import FLOATS, Integer, float_of, holds
from cute_kernels.floats import FloatFormat
from cute_kernels.layout.bank_conflicts import report
from cute_kernels.layout.fragments import gather_order
from cute_kernels.operands import Vectors
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.spmm.config import pack_fragments
from cute_kernels.spmm.gather import GatherConfig
from magicube_cutlass.checks import VECTOR_LENGTHS
from tests.kernels.layout.test_fragments import G, T, ldmatrix_trans, place_of, prmt

Array = np.ndarray[Any, Any]
ZERO = np.zeros((), dtype=np.uint32)
HALF = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SMALL = ("e5m2", "e4m3", "e2m1")
EACH_HALF, EACH_BYTE = 0x00010001, 0x01010101
SPECIAL = {"e5m2": 0x7C, "e4m3": 0x7F}


def mask(bits: int) -> np.uint32:
    return np.uint32(bits & 0xFFFFFFFF)


def times(halves: Array, factor: float, half: FloatFormat) -> Array:
    """Both halves of a register times a power of two."""
    parts = halves[..., None].view(np.uint16).view(HALF[half.name])
    with np.errstate(invalid="ignore"):  # NaN of the hardware's choice
        return (parts * np.array(factor, HALF[half.name])).view(np.uint32)[..., 0]


def to_halves(codes: Array, of: FloatFormat, half: FloatFormat) -> Array:
    magnitude = of.bits - 1
    own = codes & mask(((1 << magnitude) - 1) * EACH_HALF)
    moved = (codes << np.uint32(15 - magnitude) & mask(0x8000 * EACH_HALF)) | own << np.uint32(
        half.mantissa - of.mantissa
    )
    if half.bias == of.bias:
        return moved
    if of.bits == 8:
        special = own + mask((0x80 - SPECIAL[of.name]) * EACH_HALF) & mask(0x80 * EACH_HALF)
        moved = moved | (special << np.uint32(8)) - (special << np.uint32(half.mantissa - 7))
    return times(moved, 2.0 ** (half.bias - of.bias), half)


def byte_halves(word: Array, of: FloatFormat, half: FloatFormat, first: int, second: int) -> Array:
    if half.bias == of.bias:
        return prmt(word, ZERO, 0x0404 | first << 4 | second << 12)
    return to_halves(prmt(word, ZERO, 0x4040 | first | second << 8), of, half)


def to_bytes(codes: Array, of: FloatFormat) -> Array:
    sign = codes << np.uint32(4) & mask(0x80 * EACH_BYTE)
    return sign | (codes & mask(7 * EACH_BYTE)) << np.uint32(3 - of.mantissa)


def expand_words(words: list[Array], of: FloatFormat, operand: FloatFormat) -> list[Array]:
    low, out = mask(0x0F0F0F0F), []
    for word in words:
        if of.bits == operand.bits:
            out += [word]
        elif operand.bits == 8:
            out += [to_bytes(word & low, of), to_bytes(word >> np.uint32(4) & low, of)]
        elif of.bits == 8:
            out += [byte_halves(word, of, operand, 0, 1), byte_halves(word, of, operand, 2, 3)]
        else:
            out += [to_halves(word >> np.uint32(4 * s), of, operand) for s in range(4)]
    return out


def split_order(words: list[Array], of: FloatFormat, operand: FloatFormat) -> list[Array]:
    if of.bits == 16:
        return [prmt(words[i // 2], words[2 + i // 2], 0x7632 if i % 2 else 0x5410) for i in range(4)]
    if of.bits == 8:
        return [prmt(words[0], words[1], s) for s in ((0x6420, 0x7531) if operand.bits == 8 else (0x5140, 0x7362))]
    return words


def units(raw: list[Array], of: FloatFormat, operand: FloatFormat) -> list[list[Array]]:
    """(matrices) -> (subs, depth), as FloatUnits::transpose."""
    low, depths = mask(0x0F0F0F0F), []
    if operand.bits == 16:
        for word in raw:
            if of.bits == 16:
                depths.append([word])
            elif of.bits == 8:
                depths.append([byte_halves(word, of, operand, s, s + 2) for s in (0, 1)])
            else:
                depths.append([to_halves(word >> np.uint32(4 * s), of, operand) for s in range(4)])
    else:
        for a, b in zip(raw[0::2], raw[1::2], strict=True):
            picked = [prmt(a, b, s) for s in (0x6420, 0x7531)]
            nibbles = [to_bytes(x >> np.uint32(shift) & low, of) for x in picked for shift in (0, 4)]
            depths.append(picked if of.bits == 8 else nibbles)
    return [list(each) for each in zip(*depths, strict=True)]


def values_of(registers: Array, operand: FloatFormat) -> Array:
    """(...) registers -> (..., values), float64."""
    if operand.bits == 16:
        return registers[..., None].view(np.uint16).view(HALF[operand.name]).astype(np.float64)
    return np.array(operand.values)[registers[..., None].view(np.uint8)]


@pytest.mark.parametrize(("name", "half"), list(product(SMALL, HALF)))
def test_every_code_becomes_its_half(name: str, half: str) -> None:
    of, wide = FLOATS[name], FLOATS[half]
    codes = np.arange(1 << of.bits, dtype=np.uint32)
    expected = np.array(of.values)
    noise = 0 if of.bits == 8 else mask(0xFFF0FFF0)  # bits above a code
    for low, high in ((codes, codes[::-1]), (codes, np.roll(codes, 5))):
        halves = to_halves(low | high << np.uint32(16) | noise, of, wide)
        found = values_of(halves, wide)
        np.testing.assert_array_equal(found, np.stack((expected[low], expected[high]), -1))
        np.testing.assert_array_equal(np.signbit(found[:, 0]), codes >> np.uint32(of.bits - 1) == 1)
        if of.bits == 8:
            word = low | codes[3] << np.uint32(8) | high << np.uint32(16)
            np.testing.assert_array_equal(values_of(byte_halves(word, of, wide, 0, 2), wide), found)


@pytest.mark.parametrize(("wide", "narrow"), list(product(FLOATS.values(), repeat=2)), ids=lambda each: each.name)
def test_holds_means_that_every_value_is_there(wide: FloatFormat, narrow: FloatFormat) -> None:
    lift = 2.0 ** (narrow.bias - wide.bias)  # where the bits are moved as they are
    have = {value for value in wide.values if np.isfinite(value)}
    moved = {value * lift for value in narrow.values if np.isfinite(value)}
    assert (moved <= have) == holds(wide, narrow)


def random_codes(of: FloatFormat, shape: tuple[int, ...], seed: int) -> Array:
    """Codes of finite values, those of 16 bits of moderate magnitude."""
    rng = np.random.default_rng(seed)
    if of.bits == 16:
        return rng.integers(-64, 65, shape).astype(HALF[of.name]).view(np.uint16)
    codes = rng.integers(0, 1 << of.bits, shape).astype(np.uint8)
    return np.where(np.isfinite(np.array(of.values)[codes]), codes, 0).astype(np.uint8)


def real(codes: Array, of: FloatFormat) -> Array:
    if of.bits == 16:
        return codes.view(HALF[of.name]).astype(np.float64)
    return np.array(of.values)[codes]


def bits_of(codes: Array) -> torch.Tensor:
    """As execution copies are made of them."""
    return torch.from_numpy(codes.view(np.int16) if codes.dtype == np.uint16 else codes)


def in_memory(codes: Array, of: FloatFormat) -> Array:
    """(rows, columns) of codes as bytes."""
    if of.bits == 4:
        return codes[:, 0::2] | codes[:, 1::2] << 4
    return np.ascontiguousarray(codes).view(np.uint8)


FLOATING = [entry for entry in atoms() if entry.floating]


def takes(entry: Atom, name: str) -> bool:
    return any(holds(FLOATS[each], FLOATS[name]) for key in entry.structs for each in key)


GROUPS = [
    (entry, a, b) for entry in FLOATING for a, b in product(FLOATS, FLOATS) if takes(entry, a) and takes(entry, b)
]


def lift(of: FloatFormat, operand: FloatFormat) -> float:
    return 2.0 ** (operand.bias - of.bias) if operand.bits == 8 and of.bits < 8 else 1.0


@pytest.mark.parametrize(
    ("entry", "a", "b"), GROUPS, ids=lambda value: value.name if isinstance(value, Atom) else value
)
def test_a_group_of_spmm(entry: Atom, a: str, b: str) -> None:
    """Dense rows through ldmatrix and the decoding, sparse values through the execution copy, one mma after the other."""
    config = GatherConfig(entry.name, 8, FLOATS[a], FLOATS[b], "float32")
    m, n, k = entry.shape
    left, right, stored = FLOATS[a], FLOATS[b], config.stored
    assert not isinstance(stored, Integer)
    op_a, op_b = FLOATS[str(operand_of(entry, left))], FLOATS[str(operand_of(entry, right))]
    sparse, dense = random_codes(left, (k, 8), 1), random_codes(right, (k, config.tile_n), 2)

    vectors = Vectors(torch.tensor([0, k]), torch.arange(k, dtype=torch.int32), bits_of(sparse), left)
    record = pack_fragments(config, vectors, torch.arange(k), 1)[0].numpy().view(np.uint32)
    words = record.reshape(32, -1).T.copy()  # (words, lanes)
    assert len(words) == k * stored.bits // 128
    registers = np.array(expand_words(list(words), stored, op_a))  # (depth, lanes)
    b_values = values_of(registers, op_a)  # (depth, lanes, values)
    operand_b = np.zeros((n, k))
    run = b_values.shape[-1]
    for lane, index in product(range(32), range(len(registers) * run)):
        at = place_of(entry.b_layout, lane, index)
        operand_b[at % n, at // n] = b_values[index // run, lane, index % run]

    order = [gather_order(entry)(i) for i in range(k)]
    np.testing.assert_array_equal(operand_b * lift(left, op_a), real(sparse, left)[order].T)
    memory = in_memory(dense, right)
    found = []
    for chunk in range(config.tile_n_bytes // 16):
        piece = np.ascontiguousarray(memory[:, 16 * chunk :][:, :16])
        raw = [ldmatrix_trans(piece[8 * i : 8 * i + 8]) for i in range(k // 8)]
        found += units(raw, right, op_b)
    for first in range(0, len(found), m // 8):
        operand_a = np.zeros((m, k))
        decoded = [[values_of(register, op_b) for register in unit] for unit in found[first : first + m // 8]]
        for lane, index in product(range(32), range(entry.values("A"))):
            at = place_of(entry.a_layout, lane, index)
            block, depth = at % m // 8, at // m // (4 * run)
            operand_a[at % m, at // m] = decoded[block][depth][lane, index % run]
        total = operand_a @ operand_b.T * (lift(left, op_a) * lift(right, op_b))  # (columns of the tile, rows of A)
        subs = 16 // right.bits
        for block, g in product(range(m // 8), range(8)):
            chunk, sub = divmod(first + block, subs)
            column = (8 * chunk + g) * subs + sub
            expected = real(dense, right)[:, column] @ real(sparse, left)
            np.testing.assert_allclose(total[g + 8 * block], expected, rtol=1e-13, atol=1e-13 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("entry", "x", "y"), GROUPS, ids=lambda value: value.name if isinstance(value, Atom) else value
)
def test_a_run_of_sddmm(entry: Atom, x: str, y: str) -> None:
    """The 32 elements along K of both operands have the same order, for all widths."""
    sides = [FLOATS[x], FLOATS[y]]
    split = (sides[0].bits == 4) != (sides[1].bits == 4)
    found, expected = [], []
    for seed, of in enumerate(sides):
        operand = FLOATS[str(operand_of(entry, of))]
        codes = random_codes(of, (8, 32), 3 + seed)
        row = in_memory(codes, of).copy().view(np.uint32)  # (rows, words)
        count = of.bits // 4  # words of a lane's eight k
        words = [row[G, T * count + i] for i in range(count)]
        words = split_order(words, of, operand) if split else words
        registers = np.array(expand_words(words, of, operand))  # (registers, lanes)
        assert len(registers) == entry.mma_bits // 4
        found.append(values_of(registers, operand) * lift(of, operand))
        expected.append(real(codes, of))
    lanes = found[0].transpose(1, 0, 2).reshape(8, -1), found[1].transpose(1, 0, 2).reshape(8, -1)
    np.testing.assert_allclose((lanes[0] * lanes[1]).sum(1), (expected[0] * expected[1]).sum(1), rtol=1e-12)
    assert not np.allclose((lanes[0] * np.roll(lanes[1], 1, axis=1)).sum(1), (expected[0] * expected[1]).sum(1))


def test_formats_have_torchs_dtypes_and_the_constants_of_the_kernels() -> None:
    for name, of in FLOATS.items():
        assert of.name == name and float_of(torch.float32) is None
    for name in SMALL[:2]:
        of = FLOATS[name]
        assert SPECIAL[name] == of.largest_code + 1
        dtype = torch.float8_e5m2 if name == "e5m2" else torch.float8_e4m3fn
        assert float_of(dtype) == of
        codes = torch.arange(256, dtype=torch.uint8)
        torch.testing.assert_close(
            floats.decode(codes, name), codes.view(dtype).float(), rtol=0, atol=0, equal_nan=True
        )
    assert torch.tensor(FLOATS["bfloat16"].largest) == torch.finfo(torch.bfloat16).max
    assert atom("f16_m16n8k32").structs == {
        ("float16", "float16"): "magicube::MmaKPair<cute::SM80_16x8x16_F32F16F16F32_TN>"
    }


def test_an_instruction_refuses_what_it_cannot_hold() -> None:
    for name, number, message in (
        ("f16_m16n8k32", FLOATS["bfloat16"], "atom must be an instruction for bfloat16, got f16_m16n8k32"),
        ("fp8_m16n8k32", FLOATS["float16"], "for float16, got fp8_m16n8k32, which multiplies e4m3 and e5m2"),
        ("s8_m16n8k32", FLOATS["e4m3"], "for e4m3, got s8_m16n8k32, which multiplies integers"),
        ("bf16_m16n8k16", Integer(8, True), "for s8, got bf16_m16n8k16, which multiplies bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            operand_of(atom(name), number)
    assert operand_of(atom("fp8_m16n8k32"), FLOATS["e2m1"]) == "e4m3"
    assert operand_of(atom("fp8_m16n8k32"), FLOATS["e5m2"]) == "e5m2"


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("v", VECTOR_LENGTHS)
def test_values_of_every_vector_length_find_their_lanes(name: str, v: int) -> None:
    of = FLOATS[name]
    entry = atom("bf16_m16n8k32" if name == "bfloat16" else "f16_m16n8k32")
    config, operand = GatherConfig(entry.name, v, of, of, "float32"), FLOATS[next(iter(entry.structs))[0]]
    k, used = entry.shape[2], min(v, 8)
    sparse = random_codes(of, (k, v), 7)
    vectors = Vectors(torch.tensor([0, k]), torch.arange(k, dtype=torch.int32), bits_of(sparse), of)
    record = pack_fragments(config, vectors, torch.arange(k), 1)[0].numpy().view(np.uint32)
    order = [gather_order(entry)(i) for i in range(k)]
    for tile, words in enumerate(record.reshape(-1, 4 * used, k * of.bits // 128)):
        registers = values_of(np.array(expand_words(list(words.T.copy()), of, operand)), operand)  # (depth, lanes, 2)
        found = np.zeros((used, k))
        for lane, index in product(range(4 * used), range(k // 4)):
            at = place_of(entry.b_layout, lane, index)
            found[at % 8, at // 8] = registers[index // 2, lane, index % 2]
        np.testing.assert_array_equal(found, real(sparse, of)[order][:, 8 * tile : 8 * tile + used].T)


@pytest.mark.parametrize(("a", "b"), list(product(FLOATS, FLOATS)))
def test_no_access_has_bank_conflicts(a: str, b: str) -> None:
    if {a, b} == {"float16", "bfloat16"}:
        return
    name = "bf16_m16n8k32" if "bfloat16" in (a, b) else "f16_m16n8k32"
    operands = (name, 8, FLOATS[a], FLOATS[b], "float16")
    configs = [
        GatherConfig(*operands),
        GatherConfig(*operands, tile_n_bytes=128, split_k_warps=2),
        SddmmConfig(*operands),
    ]
    for config in configs:
        assert all(line.conflicts == 0 for line in report(config.smem_accesses())), config.name
    unswizzled = GatherConfig(*operands, swizzle=False)
    assert any(line.conflicts for line in report(unswizzled.smem_accesses()))
