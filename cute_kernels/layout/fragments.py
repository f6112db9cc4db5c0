"""What follows from an mma atom: where each operand of a sparse product has to lie so that a lane finds its values.

SpMM computes ``C^T = B^T A^T``: the dense operand (K x N, row-major) is the instruction's operand A, its rows m being
columns n of the product, and the sparse vectors are operand B, whose 8 columns are the rows of a vector row.
The dense rows of a group are gathered into shared memory, one *slot* a row.  ``ldmatrix.trans`` on 16-bit units hands
lane ``4 g + t`` the unit ``g`` of slots ``2 t`` and ``2 t + 1`` of each 8 x 8 matrix, that is of 8 slots; ``prmt``
with 0x6420 and 0x7531 on the registers of two matrices puts four k of one column side by side.  Which k they are is
free, as long as the sparse operand uses the same order: :func:`gather_order` says it, and the rest follows.

All layouts are derived from the atom's own by layout algebra, so that a new table entry brings its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from pycute import Layout, Swizzle, composition, flatten, make_layout, right_inverse

from cute_kernels.atoms import REGISTER_BITS, Atom

Places = np.ndarray[Any, np.dtype[np.int64]]

CORE_BYTES = 16  # a row of a wgmma core matrix
_SWIZZLES = {64: (2, 4, 3), 128: (3, 4, 3)}


def stride(atom: Atom) -> int:
    """Vectors that a group of SR-BCRS holds for this atom: the k extent of the instruction."""
    return atom.shape[2]


def _flat(layout: Layout) -> Layout:
    """``layout`` with its modes side by side."""
    return Layout(flatten((layout.shape,)), flatten((layout.stride,)))


def _register_modes(atom: Atom, operand: str) -> list[tuple[int, bool]]:
    """``(size, along_k)`` of the value modes beyond the first, which must be one register of consecutive k."""
    values, rows = atom.layout(operand)[1], atom.extent(operand)[0]
    sizes, strides = flatten((values.shape,)), flatten((values.stride,))
    if (sizes[0], strides[0]) != (REGISTER_BITS // atom.mma_bits, rows):
        raise ValueError(
            f"a register of operand {operand} of {atom.name} must hold {REGISTER_BITS // atom.mma_bits} values "
            f"next to each other along k, got {sizes[0]} at stride {strides[0]} of a column of {rows}"
        )
    return [(size, step >= rows) for size, step in zip(sizes[1:], strides[1:], strict=True)]


def _order_of_k(atom: Atom, operand: str, lane: int, register: tuple[tuple[int, int], ...], step: int) -> Layout:
    """Layout k -> place, for a movement that gives lane ``4 g + t`` the places ``lane * t + register + step * j``.

    ``register`` is the ``(size, stride)`` modes of the values of one register, j counts a lane's registers along k.
    Raises ``ValueError`` when the atom wants something that the movement does not give.
    """
    layout, (rows, k_extent) = atom.layout(operand), atom.extent(operand)
    sizes, strides = [size for size, _ in register], [place for _, place in register]
    for size, along_k in _register_modes(atom, operand):
        sizes.append(size)
        strides.append(step if along_k else 0)
        step *= size if along_k else 1
    movement = Layout(((4, atom.threads // 4), tuple(sizes)), ((lane, 0), tuple(strides)))
    holder = composition(right_inverse(layout), Layout(k_extent, rows))  # k of row 0 -> thread + threads * value
    order = _flat(composition(movement, holder))
    for index in range(layout.size()):
        row, k = layout(index) % rows, layout(index) // rows
        if row % 8 != index % atom.threads // 4 % 8 or order(k) != movement(index):
            raise ValueError(f"operand {operand} of {atom.name} is not laid out by lanes 4 * (row % 8) + t: {layout}")
    return order


@lru_cache
def gather_order(atom: Atom) -> Layout:
    """Layout: k of the instruction -> slot, the gathered row that feeds this k.

    8-bit operands: ``(2, 2, 4, K / 16) : (1, 8, 2, 16)``, two matrices of 8 slots a register.  4-bit operands:
    ``(2, 2, 2, 4, K / 32) : (16, 1, 8, 2, 32)``, four matrices a register, the odd nibbles from the latter two.
    16-bit operands: one matrix a register, and k is the slot.
    Raises ``ValueError`` for an atom that ``ldmatrix.trans`` and ``prmt`` cannot feed.
    """
    register = {4: ((2, 16), (2, 1), (2, 8)), 8: ((2, 1), (2, 8)), 16: ((2, 1),)}[atom.mma_bits]
    return _order_of_k(atom, "A", 2, register, 128 // atom.mma_bits)


@lru_cache
def k_run(atom: Atom) -> Layout:
    """Layout: k of the instruction -> k in memory, so that a lane's values are one run of K / 4 in memory.

    SDDMM reads both operands along k: ``(r, 4, K / 4r) : (1, K / 4, r)`` with r values a register, for 8 bits and K =
    32 the run is 8 bytes, k = 16 j + 4 t + i <-> 8 t + 4 j + i.
    Raises ``ValueError`` for an atom whose operands A and B, both in registers, are not alike along k.
    """
    per_register, k_extent = REGISTER_BITS // atom.mma_bits, atom.shape[2]
    orders = [
        _order_of_k(atom, operand, k_extent // 4, ((per_register, 1),), per_register)
        for operand in ("A", "B")
        if atom.registers(operand)
    ]
    if any(order(k) != orders[0](k) for order in orders for k in range(k_extent)):
        raise ValueError(f"operands A and B of {atom.name} differ along k: {orders[0]} and {orders[-1]}")
    return orders[0]


@lru_cache
def fragment_order(atom: Atom) -> Layout:
    """Layout: (thread, value) of operand B -> ``row * K + slot`` in a group of SR-BCRS.

    A group is N rows of K slots, row-major.  Where operand B lies in shared memory the threads are one and the values
    are in the order of its core matrices: 8 rows of 16 bytes, first down the rows, then along k (no swizzle).
    """
    n, _ = atom.extent("B")
    k_extent = stride(atom)
    group = make_layout(Layout(n, k_extent), gather_order(atom))  # (n, k) -> row * K + slot
    if not atom.b_shared:
        return composition(group, atom.b_layout)
    core = CORE_BYTES * 8 // atom.mma_bits
    memory = Layout((core, 8, n // 8, k_extent // core), (n, 1, 8, n * core))
    return make_layout(Layout(1, 0), composition(group, memory))


@lru_cache
def _places(atom: Atom) -> tuple[int, ...]:
    layout = fragment_order(atom)
    threads, values = layout[0].size(), layout[1].size()
    return tuple(layout(thread, value) for thread in range(threads) for value in range(values))


def pack_index(atom: Atom, packed: bool = False) -> Places:
    """int64 (threads * values,): for each place of the execution copy, lane after lane, its place in the group.

    ``group.reshape(N * K)[pack_index(atom)]`` is the copy of an N x K group in which each lane reads its whole operand
    B by one load: 8 bytes for 8 values of 8 bits.

    With ``packed`` the places are nibbles, low one first, of 4-bit values that a lane turns into 8-bit ones: nibbles
    ``2 i`` and ``2 i + 1`` of word w become byte i of registers 2 w and 2 w + 1, so ``(x << 4) & 0xF0F0F0F0`` and
    ``x & 0xF0F0F0F0`` are 16 times these registers' signed values.  An atom with one register has 16-bit units: their
    nibbles 2 i and 2 i + 1 become bytes i and i + 2 of it.  For a 4-bit instruction the nibbles are in their own order.
    For one of 16 bits nibbles i and i + 4 of a word become the halves of register i.
    """
    index = np.array(_places(atom), dtype=np.int64)
    if packed and atom.mma_bits == 16:
        index = index.reshape(-1, 4, 2).swapaxes(1, 2).reshape(-1)
    elif packed and atom.mma_bits == 8:
        unit = min(8, fragment_order(atom)[1].size())
        index = index.reshape(-1, 2, unit // 2).swapaxes(1, 2).reshape(-1)
    return index


def column_order(bits: int) -> Layout:
    """Layout: row of operand A -> column of the dense operand, in a tile as wide as one ldmatrix: 8 units of 16 bits.

    Row ``g + 8 b`` is column ``g * 16 / bits + b``; b counts blocks of 8 rows, over as many atoms as it takes.
    ``bits`` of the dense operand's elements: 16 (one block a digit), 8 (two blocks) or 4 (four, low nibbles first:
    low and high nibbles of what 0x6420 gives, then those of 0x7531).
    """
    if bits not in (4, 8, 16):
        raise ValueError(f"bits must be 4, 8 or 16, got {bits!r}")
    return Layout((8, 16 // bits), (16 // bits, 1))


def swizzle(row_bytes: int) -> Swizzle:
    """Swizzle of byte offsets for rows of 64 or 128 bytes in shared memory, as TMA's and CuTe's of that width.

    Eight rows whose numbers are distinct mod 8 then give ``ldmatrix`` their 16-byte units without a bank conflict.
    """
    if row_bytes not in _SWIZZLES:
        raise ValueError(f"row_bytes must be one of {tuple(_SWIZZLES)}, got {row_bytes!r}")
    return Swizzle(*_SWIZZLES[row_bytes])
