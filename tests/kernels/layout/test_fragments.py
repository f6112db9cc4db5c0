"""Fragment layouts: the data movement of a group of SpMM and of SDDMM, simulated byte by byte on the host."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from pycute import Layout

from cute_kernels.atoms import Atom, atom, atoms
from cute_kernels.layout.fragments import column_order, fragment_order, gather_order, k_run, pack_index, stride, swizzle

Array = np.ndarray[Any, Any]
LANES = np.arange(32)
G, T = LANES // 4, LANES % 4

DEEP = replace(  # two m16n8k32 one after the other, as a user would add them
    atom("s8_m16n8k32"),
    name="deep",
    shape=(16, 8, 64),
    a_layout=Layout(((4, 8), (4, 2, 2, 2)), ((64, 1), (16, 8, 256, 512))),
    b_layout=Layout(((4, 8), (4, 2, 2)), ((32, 1), (8, 128, 256))),
)
ATOMS = [*atoms(), DEEP]
BY_BYTES = [entry for entry in ATOMS if entry.mma_bits == 8]


def name_of(value: object) -> str | None:
    return value.name if isinstance(value, Atom) else None


def ldmatrix_trans(rows: Array) -> Array:
    """(8,) of rows of 16 bytes -> (lanes,) registers, as PTX says: two elements of 16 bits of column lane / 4."""
    units = rows.view(np.uint16).astype(np.uint32)  # (8 rows, 8 units)
    return units[2 * T, G] | units[2 * T + 1, G] << 16


def prmt(a: Array, b: Array, selector: int) -> Array:
    """Bytes of ``b:a`` picked by the nibbles of ``selector``, as PTX says."""
    both = b.astype(np.uint64) << 32 | a.astype(np.uint64)
    picked = [(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4)]
    return np.bitwise_or.reduce(picked).astype(np.uint32)


def blocks_of(memory: Array, bits: int, signed: bool, mma_bits: int) -> Array:
    """(slots, 16) bytes -> (planes, blocks of 8 rows, registers along k, lanes): the kernel's moves, as documented."""
    raw = [ldmatrix_trans(memory[8 * j : 8 * j + 8]) for j in range(len(memory) // 8)]
    low, high = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)
    depths = []
    for j in range(0, len(raw), 16 // mma_bits):
        picked = [prmt(raw[i], raw[i + 1], s) for i in range(j, j + 16 // mma_bits, 2) for s in (0x6420, 0x7531)]
        if mma_bits == 4:
            l01, m01, l23, m23 = picked
            halves = ((l01, l23), (m01, m23))
            depth = [[part for x, y in halves for part in (x & low | (y & low) << 4, x >> 4 & low | y & high)]]
        elif bits == 16:
            depth = [[picked[0]], [picked[1]]]  # low digits, high digits
        elif bits == 8:
            depth = [picked]
        else:
            moved = np.uint32(0x08080808 if signed else 0)
            uppers = [x & high if signed else x >> 4 & low for x in picked]
            depth = [[part for x, upper in zip(picked, uppers, strict=True) for part in ((x ^ moved) & low, upper)]]
        depths.append(depth)
    return np.array(depths).transpose(1, 2, 0, 3)


def values_of(registers: Array, bits: int, signed: bool) -> Array:
    """(..., lanes) registers -> (..., lanes, values), low bits first."""
    fields = registers[..., None].astype(np.int64) >> np.arange(0, 32, bits) & (1 << bits) - 1
    return np.where(signed & (fields >> bits - 1 == 1), fields - (1 << bits), fields)


@cache
def _place(shape: Any, strides: Any, thread: int, value: int) -> int:
    return int(Layout(shape, strides)(thread, value))


def place_of(layout: Layout, thread: int, value: int) -> int:
    """``layout(thread, value)``, which pycute takes 50 us for."""
    return _place(layout.shape, layout.stride, thread, value)


def operand_a(entry: Atom, registers: Array, signed: bool) -> Array:
    """(blocks, registers along k, lanes) -> (atoms, M, K) by the atom's own layout; each warp has the same rows."""
    m, _, k = entry.shape
    tall = min(2, m // 8)  # blocks that one warp's part takes
    values = values_of(registers, entry.mma_bits, signed)
    count, depth, _, run = values.shape
    out = np.full((count // tall, m, k), 999)
    for index, thread in product(range(count // tall), range(entry.threads)):
        for d, block, i in product(range(depth), range(tall), range(run)):
            at = place_of(entry.a_layout, thread, i + run * (block + tall * d))
            out[index, at % m, at // m] = values[index * tall + block, d, thread % 32, i]
    return out


def random_ints(shape: tuple[int, ...], bits: int, signed: bool) -> Array:
    low = -(1 << bits - 1) if signed else 0
    return np.random.default_rng(bits).integers(low, low + (1 << bits), shape)


def in_memory(ints: Array, bits: int) -> Array:
    """(slots, columns) of ``bits`` bits as bytes, 4-bit ones two per byte with the low nibble first."""
    if bits == 4:
        return (ints[:, 0::2] & 15 | (ints[:, 1::2] & 15) << 4).astype(np.uint8)
    return ints.astype(np.dtype(f"i{bits // 8}") if ints.min() < 0 else np.dtype(f"u{bits // 8}")).view(np.uint8)


CASES = [(entry, bits, signed) for entry in BY_BYTES for bits in (4, 8, 16) for signed in (True, False)]
CASES += [(entry, 4, signed) for entry in ATOMS if entry.mma_bits == 4 for signed in (True, False)]


@pytest.mark.parametrize(("entry", "bits", "signed"), CASES, ids=name_of)
def test_the_mma_gets_slot_gather_order_of_k(entry: Atom, bits: int, signed: bool) -> None:
    """The whole of SpMM on one group: dense rows through ldmatrix and prmt, sparse values through pack_index."""
    m, n, k = entry.shape
    order, columns = gather_order(entry), column_order(bits)
    slots = [order(i) for i in range(k)]
    assert sorted(slots) == list(range(k)) and stride(entry) == k
    tiles = 2 if bits == 16 and m > 8 else 1  # a tile of 16-bit elements is one block of rows
    width = 128 // bits
    dense = random_ints((k, tiles * width), bits, signed)
    dense[0, 0], dense[-1, -1] = dense.min(), dense.max()
    parts = [
        blocks_of(in_memory(dense[:, i * width :][:, :width], bits), bits, signed, entry.mma_bits) for i in range(tiles)
    ]
    planes = np.concatenate(parts, axis=1)  # (digits, blocks, registers along k, lanes)

    through_bytes = bits == 4 and entry.mma_bits == 8 and signed  # low nibbles come eight too large, high ones 16-fold
    fed = sum(
        operand_a(entry, plane, signed and digit == len(planes) - 1) << 8 * digit for digit, plane in enumerate(planes)
    )
    period = min(m, 16)
    for index, row in product(range(len(fed)), range(m)):
        tile, row_of_tile = divmod(index * period + row % period, 8 * columns[1].size())
        column = tile * width + columns(row_of_tile)
        expected = dense[slots, column]
        if through_bytes:
            expected = 16 * expected if column % 2 else expected + 8
        np.testing.assert_array_equal(fed[index, row], expected)

    group = random_ints((n, k), 8, True)  # N rows of K slots
    held = group.reshape(-1)[pack_index(entry)]
    sums = np.einsum("amk,nk->amn", fed, operand_b(entry, held))
    for index, row in product(range(len(fed)), range(m)):
        tile, row_of_tile = divmod(index * period + row % period, 8 * columns[1].size())
        column = tile * width + columns(row_of_tile)
        total = sums[index, row]
        if through_bytes:  # one more product, by minus eight everywhere, puts the low ones right
            total = total >> 4 if column % 2 else total + group @ np.full(k, -8)
        np.testing.assert_array_equal(total, group @ dense[:, column])


def operand_b(entry: Atom, held: Array) -> Array:
    """(threads * values,) in the execution copy's order -> (N, K)."""
    _, n, k = entry.shape
    out = np.full((n, k), 999)
    if entry.b_shared:  # core matrices of 8 rows of 16 bytes, first down the rows, then along k
        for place, value in enumerate(held):
            out[place % (16 * n) // 16, place // (16 * n) * 16 + place % 16] = value
        return out
    values = entry.values("B")
    for thread, value in product(range(32), range(values)):
        at = place_of(entry.b_layout, thread, value)
        out[at % n, at // n] = held[thread * values + value]
    return out


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("entry", [entry for entry in BY_BYTES if not entry.b_shared], ids=name_of)
def test_packed_nibbles_become_the_registers(entry: Atom, signed: bool) -> None:
    _, n, k = entry.shape
    group = random_ints((n, k), 4, signed)
    nibbles = (group.reshape(-1)[pack_index(entry, packed=True)] & 15).astype(np.uint32)
    registers = np.zeros((entry.registers("B"), 32), dtype=np.uint32)
    low, high = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)
    unit = min(8, entry.values("B"))
    words = np.bitwise_or.reduce(nibbles.reshape(32, -1, unit) << 4 * np.arange(unit, dtype=np.uint32), axis=-1)
    for w in range(words.shape[1]):
        x = words[:, w]
        first, second = (x << 4 & high, x & high) if signed else (x & low, x >> 4 & low)
        if unit == 8:
            registers[2 * w], registers[2 * w + 1] = first, second
        else:
            registers[w] = first & 0xFFFF | second << 16
    values = values_of(registers, 8, signed).transpose(1, 0, 2).reshape(-1)  # lanes, registers, bytes
    expected = operand_b(entry, group.reshape(-1)[pack_index(entry)])
    np.testing.assert_array_equal(operand_b(entry, values), (16 if signed else 1) * expected)


def test_four_bit_instructions_need_no_other_order() -> None:
    for entry in ATOMS:
        if entry.mma_bits == 4:
            np.testing.assert_array_equal(pack_index(entry, packed=True), pack_index(entry))


@pytest.mark.parametrize("entry", ATOMS, ids=name_of)
def test_pack_index_reads_every_value_once(entry: Atom) -> None:
    _, n, k = entry.shape
    for packed in (False, True):
        index = pack_index(entry, packed)
        assert index.dtype == np.int64 and index.shape == (n * k,)
        assert sorted(index.tolist()) == list(range(n * k))
    index[:] = 0  # the caller's own copy
    assert sorted(pack_index(entry, True).tolist()) == list(range(n * k))
    if not entry.b_shared:
        order, slot = fragment_order(entry), gather_order(entry)
        for thread, value in product(range(32), range(entry.values("B"))):
            at = place_of(entry.b_layout, thread, value)
            assert order(thread, value) == at % n * k + slot(at // n)


@pytest.mark.parametrize("entry", ATOMS, ids=name_of)
def test_a_lane_reads_one_run_along_k(entry: Atom) -> None:
    m, n, k = entry.shape
    order = k_run(entry)
    assert sorted(order(i) for i in range(k)) == list(range(k))
    for operand, rows in [("A", m), ("B", n)]:
        if not entry.registers(operand):
            continue
        layout = entry.layout(operand)
        for thread in range(entry.threads):
            at = [layout(thread, value) for value in range(entry.values(operand))]
            for row in {place % rows for place in at}:
                run = [order(place // rows) for place in at if place % rows == row]
                assert run == list(range(thread % 4 * (k // 4), (thread % 4 + 1) * (k // 4)))


def test_orders_have_the_published_forms() -> None:
    def forms(name: str) -> list[str]:
        entry = DEEP if name == "deep" else atom(name)
        return [str(gather_order(entry)), str(k_run(entry))]

    assert forms("s8_m16n8k32") == ["(2, 2, 4, 2):(1, 8, 2, 16)", "(4, 4, 2):(1, 8, 4)"]
    assert forms("s8_m64n8k32") == forms("int4_as_int8_m16n8k32") == forms("s8_m16n8k32")
    assert forms("s8_m8n8k16") == forms("s8_m16n8k16") == ["(2, 2, 4):(1, 8, 2)", "(4, 4):(1, 4)"]
    assert forms("s4_m16n8k64") == ["(2, 2, 2, 4, 2):(16, 1, 8, 2, 32)", "(8, 4, 2):(1, 16, 8)"]
    assert forms("deep") == ["(2, 2, 4, 4):(1, 8, 2, 16)", "(4, 4, 4):(1, 16, 4)"]


@pytest.mark.parametrize(
    ("operand", "shape", "steps", "message"),
    [
        (
            "A",
            ((4, 8), (2, 4, 2)),
            ((64, 1), (8, 16, 256)),
            "operand A of odd must hold 4 values next to each other along k",
        ),
        ("A", ((8, 4), (4, 2, 2)), ((1, 64), (16, 8, 256)), "operand A of odd is not laid out by lanes"),
        ("A", ((4, (2, 4)), (4, 2, 2)), ((64, (4, 1)), (16, 8, 256)), "operand A of odd is not laid out by lanes"),
        ("A", ((4, 8), (4, 2, 2)), ((64, 17), (16, 8, 256)), "operand A of odd is not laid out by lanes"),
        ("B", ((4, 8), (4, 2)), ((64, 1), (8, 32)), "operands A and B of odd differ along k"),
    ],
)
def test_atoms_of_another_kind_are_refused(operand: str, shape: Any, steps: Any, message: str) -> None:
    field = f"{operand.lower()}_layout"
    odd = replace(atom("s8_m16n8k32"), name="odd", **{field: Layout(shape, steps)})
    with pytest.raises(ValueError, match=re.escape(message)):
        k_run(odd)
    if operand == "A":
        with pytest.raises(ValueError, match=re.escape(message)):
            gather_order(odd)


@pytest.mark.parametrize("row_bytes", [64, 128])
def test_swizzle_moves_units_within_their_row(row_bytes: int) -> None:
    move = swizzle(row_bytes)
    for row in range(16):
        places = [move(row * row_bytes + byte) for byte in range(row_bytes)]
        assert sorted(places) == list(range(row * row_bytes, (row + 1) * row_bytes))
        assert all(place % 16 == byte % 16 for byte, place in enumerate(places))
    assert move(3 * 128) == 3 * 128 + 3 * 16


def test_wrong_arguments_raise() -> None:
    with pytest.raises(ValueError, match=r"row_bytes must be one of \(64, 128\), got 96"):
        swizzle(96)
    with pytest.raises(ValueError, match="bits must be 4, 8 or 16, got 12"):
        column_order(12)
