"""Fragment layouts that follow from an MMA atom: where operands lie so that each lane finds its values.

SpMM computes ``C^T = B^T A^T``: the dense operand (K x N, row-major) is operand A of the instruction, its rows m are
columns n of the product; the sparse vectors are operand B, whose 8 columns are the rows of a vector row.
The dense rows of a group are gathered into shared memory, one *slot* per row. ``ldmatrix.trans`` on 16-bit units gives
lane ``4 g + t`` the unit ``g`` of slots ``2 t`` and ``2 t + 1`` of each 8 x 8 matrix (8 slots); ``prmt`` with 0x6420
and 0x7531 on the registers of two matrices puts four k of one column side by side. The order of k is free if the sparse
operand uses the same order, which is :func:`gather_order`.

All layouts follow from the layouts of the atom by layout algebra, so a new table entry brings its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from pycute import Layout, Swizzle, composition, flatten, make_layout, right_inverse

from cute_kernels.atoms import REGISTER_BITS, Atom

__all__ = [
    "CORE_BYTES",
    "Places",
    "column_order",
    "fragment_order",
    "gather_order",
    "k_run",
    "pack_index",
    "stride",
    "swizzle",
]

Places = np.ndarray[Any, np.dtype[np.int64]]

CORE_BYTES = 16  # a row of a wgmma core matrix
_SWIZZLES = {64: (2, 4, 3), 128: (3, 4, 3)}


def stride(atom: Atom) -> int:
    """Return the vectors per group of SR-BCRS for this atom: the K of the instruction.

    Examples
    --------
    >>> from cute_kernels.atoms import atom
    >>> stride(atom("s8_m16n8k32"))
    32
    """
    return atom.shape[2]


def _flat(layout: Layout) -> Layout:
    """The layout with its modes side by side."""
    return Layout(flatten((layout.shape,)), flatten((layout.stride,)))


def _register_modes(atom: Atom, operand: str) -> list[tuple[int, bool]]:
    """``(size, along_k)`` of the value modes after the first, which must be one register of consecutive k."""
    values, rows = atom.layout(operand)[1], atom.extent(operand)[0]
    sizes, strides = flatten((values.shape,)), flatten((values.stride,))
    if (sizes[0], strides[0]) != (REGISTER_BITS // atom.mma_bits, rows):
        raise ValueError(
            f"a register of operand {operand} of {atom.name} must hold {REGISTER_BITS // atom.mma_bits} values "
            f"next to each other along k, got {sizes[0]} at stride {strides[0]} of a column of {rows}"
        )
    return [(size, step >= rows) for size, step in zip(sizes[1:], strides[1:], strict=True)]


def _order_of_k(atom: Atom, operand: str, lane: int, register: tuple[tuple[int, int], ...], step: int) -> Layout:
    """Layout k -> place, for a movement that gives lane ``4 g + t`` the places ``lane * t + register + step * j``."""
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
def gather_order(atom: Atom, shuffled: bool = True) -> Layout:
    """Return the layout: k of the instruction -> slot, the gathered row with this k.

    8-bit operands: ``(2, 2, 4, K / 16) : (1, 8, 2, 16)``, two matrices of 8 slots per register. 4-bit operands:
    ``(2, 2, 2, 4, K / 32) : (16, 1, 8, 2, 32)``, four matrices per register, the odd nibbles from the last two. 16-bit
    operands: one matrix per register, and k is the slot. Not `shuffled`, a lane's slots keep their order for 4 bits:
    ``(2, 2, 2, 4, K / 32) : (1, 8, 16, 2, 32)``.

    Raises
    ------
    ValueError
        If ``ldmatrix.trans`` and ``prmt`` cannot produce the operand of the atom.

    Examples
    --------
    >>> from cute_kernels.atoms import atom
    >>> [gather_order(atom("s8_m16n8k32"))(k) for k in range(8)]
    [0, 1, 8, 9, 2, 3, 10, 11]
    """
    nibbles = ((2, 16), (2, 1), (2, 8)) if shuffled else ((2, 1), (2, 8), (2, 16))
    register = {4: nibbles, 8: ((2, 1), (2, 8)), 16: ((2, 1),)}[atom.mma_bits]
    return _order_of_k(atom, "A", 2, register, 128 // atom.mma_bits)


@lru_cache
def k_run(atom: Atom) -> Layout:
    """Return the layout: k of the instruction -> k in memory, with K / 4 consecutive values per lane.

    SDDMM reads both operands along K: ``(r, 4, K / 4r) : (1, K / 4, r)`` with r values per register. For 8 bits and
    K = 32 a lane reads 8 bytes, k = 16 j + 4 t + i <-> 8 t + 4 j + i.

    Raises
    ------
    ValueError
        If operands A and B of the atom, both in registers, differ along K.

    Examples
    --------
    >>> from cute_kernels.atoms import atom
    >>> [k_run(atom("s8_m16n8k32"))(k) for k in (0, 4, 16)]
    [0, 8, 4]
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
def fragment_order(atom: Atom, shuffled: bool = True) -> Layout:
    """Return the layout: (thread, value) of operand B -> ``row * K + slot`` in a group of SR-BCRS.

    A group is N rows of K slots, row-major. If operand B is in shared memory, there is one thread, and values have
    the order of core matrices: 8 rows of 16 bytes, first along rows, then along K (no swizzle).

    Examples
    --------
    >>> from cute_kernels.atoms import atom
    >>> order = fragment_order(atom("s8_m16n8k32"))
    >>> [order(0, value) for value in range(4)]  # row 0 and slots 0, 1, 8 and 9
    [0, 1, 8, 9]
    """
    n, _ = atom.extent("B")
    k_extent = stride(atom)
    group = make_layout(Layout(n, k_extent), gather_order(atom, shuffled))  # (n, k) -> row * K + slot
    if not atom.b_shared:
        return composition(group, atom.b_layout)
    core = CORE_BYTES * 8 // atom.mma_bits
    memory = Layout((core, 8, n // 8, k_extent // core), (n, 1, 8, n * core))
    return make_layout(Layout(1, 0), composition(group, memory))


@lru_cache
def _places(atom: Atom, shuffled: bool) -> tuple[int, ...]:
    layout = fragment_order(atom, shuffled)
    threads, values = layout[0].size(), layout[1].size()
    return tuple(layout(thread, value) for thread in range(threads) for value in range(values))


def pack_index(atom: Atom, packed: bool = False, shuffled: bool = True) -> Places:
    """Return for each place of the packed operand, lane after lane, its place in the group.

    ``group.reshape(N * K)[pack_index(atom)]`` is the packed N x K group: each lane reads its operand B by one load.

    Parameters
    ----------
    atom : Atom
        An entry of the table.
    packed : bool, default False
        Places are nibbles, low one first, of 4-bit values that a lane expands to 8 bits. Nibbles ``2 i`` and
        ``2 i + 1`` of word w become byte i of registers 2 w and 2 w + 1, so ``(x << 4) & 0xF0F0F0F0`` and
        ``x & 0xF0F0F0F0`` are 16 times the signed values. An atom with one register has 16-bit units: nibbles 2 i and
        2 i + 1 become bytes i and i + 2. For 4-bit instructions nibbles keep their order; for 16-bit ones nibbles i and
        i + 4 of a word become the two values of register i.
    shuffled : bool, default True
        False: 4-bit values keep the order of k, and the kernel has to order them.

    Returns
    -------
    ndarray, shape (threads * values,)
        int64.

    Examples
    --------
    >>> from cute_kernels.atoms import atom
    >>> pack_index(atom("s8_m16n8k32"))[:8].tolist()
    [0, 1, 8, 9, 16, 17, 24, 25]
    """
    index = np.array(_places(atom, shuffled), dtype=np.int64)
    if packed and atom.mma_bits == 16:
        index = index.reshape(-1, 4, 2).swapaxes(1, 2).reshape(-1)
    elif packed and atom.mma_bits == 8 and shuffled:
        unit = min(8, fragment_order(atom)[1].size())
        index = index.reshape(-1, 2, unit // 2).swapaxes(1, 2).reshape(-1)
    return index


def column_order(bits: int) -> Layout:
    """Return the layout: row of operand A -> column of the dense operand, in a tile of one ``ldmatrix``.

    Row ``g + 8 b`` is column ``g * 16 / bits + b``; b counts blocks of 8 rows over as many atoms as necessary.

    Parameters
    ----------
    bits : int
        Bits of the dense elements: 16 (one block per digit), 8 (two blocks) or 4 (four blocks, low nibbles first).

    Raises
    ------
    ValueError
        For another width.

    Examples
    --------
    >>> [column_order(8)(row) for row in (0, 1, 8)]
    [0, 2, 1]
    """
    if bits not in (4, 8, 16):
        raise ValueError(f"bits must be 4, 8 or 16, got {bits!r}")
    return Layout((8, 16 // bits), (16 // bits, 1))


def swizzle(row_bytes: int) -> Swizzle:
    """Return the swizzle of byte offsets for rows of 64 or 128 bytes in shared memory, as TMA and CuTe define it.

    Eight rows with distinct numbers mod 8 then give ``ldmatrix`` their 16-byte units without bank conflicts.

    Raises
    ------
    ValueError
        For another row size.

    Examples
    --------
    >>> swizzle(128)(128)
    144
    """
    if row_bytes not in _SWIZZLES:
        raise ValueError(f"row_bytes must be one of {tuple(_SWIZZLES)}, got {row_bytes!r}")
    return Swizzle(*_SWIZZLES[row_bytes])
