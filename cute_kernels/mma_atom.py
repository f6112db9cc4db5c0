"""One MMA instruction: its shape, operands and thread-value layouts, and the rules that an entry must keep.

Source: PTX ISA, "Matrix Fragments for mma"; CUTLASS, ``cute/atom/mma_traits_sm80.hpp``, ``mma_traits_sm90_gmma.hpp``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from pycute import Layout, flatten

from cute_kernels.dtypes import FLOATS

REGISTER_BITS = 32
OPERANDS = ("A", "B", "C")
MMA_BITS = (4, 8)  # of integers
FLOAT_BITS = (8, 16)

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_STRUCT = re.compile(r"[A-Za-z_][\w:<>, ]*")


@dataclass(frozen=True)
class Atom:
    """One MMA instruction: ``C[m, n] += sum_k A[m, k] B[n, k]`` over a tile of (M, N, K).

    Equal atoms have equal hashes. Nothing is checked here: :func:`cute_kernels.atoms.register_atom` does that.

    Attributes
    ----------
    name : str
        Name in the table, such as ``"s8_m16n8k32"``.
    shape : tuple of int
        (M, N, K).
    bits : int
        Bits of an operand in memory.
    mma_bits : int
        Bits of an operand in the instruction; 8 for 4-bit integers that go through 8-bit operands.
    structs : mapping
        C++ struct for each pair of operand types: signs ``(left_signed, right_signed)``, or names of float formats
        such as ``("e4m3", "e5m2")``. A name without ``::`` is in namespace ``cute``.
    threads : int
        32 for an instruction of a warp, 128 for one of a warp group.
    a_layout, b_layout, c_layout : pycute.Layout
        Thread-value layouts of CuTe's ``MMA_Traits``: ``(thread, value) -> m + M k``, ``n + N k`` and ``m + M n``.
    archs : tuple of str
        Architectures with the native instruction: ``"80"``, or ``"90a"`` if the target needs the suffix.
    headers : tuple of str
        Headers that the kernel includes.
    source : str
        C++ text ahead of the kernel: a struct of the user and its ``cute::MMA_Traits``.

    Examples
    --------
    >>> from cute_kernels.atoms import atom
    >>> entry = atom("s8_m16n8k32")
    >>> entry.extent("B"), entry.values("A"), entry.registers("A")
    ((8, 32), 16, 4)
    """

    name: str
    shape: tuple[int, int, int]
    bits: int
    mma_bits: int
    structs: Mapping[tuple[bool, bool], str] | Mapping[tuple[str, str], str] = field(hash=False)
    threads: int
    a_layout: Layout = field(hash=False)
    b_layout: Layout = field(hash=False)
    c_layout: Layout = field(hash=False)
    archs: tuple[str, ...]
    headers: tuple[str, ...] = ()
    source: str = ""

    @property
    def floating(self) -> bool:
        """Whether the operands are floats."""
        return any(isinstance(key, tuple) and isinstance(key[0], str) for key in self.structs)

    @cached_property
    def b_shared(self) -> bool:
        """Whether operand B is read from shared memory; its layout then gives each thread the whole operand."""
        return not any(flatten((self.b_layout[0].stride,)))

    def layout(self, operand: str) -> Layout:
        """Return the thread-value layout of operand ``"A"``, ``"B"`` or ``"C"``; `ValueError` for another name."""
        if operand not in OPERANDS:
            raise ValueError(f"operand must be one of {', '.join(OPERANDS)}, got {operand!r}")
        return {"A": self.a_layout, "B": self.b_layout, "C": self.c_layout}[operand]

    def extent(self, operand: str) -> tuple[int, int]:
        """Return rows and columns of operand ``"A"`` (M, K), ``"B"`` (N, K) or ``"C"`` (M, N)."""
        m, n, k = self.shape
        self.layout(operand)
        return {"A": (m, k), "B": (n, k), "C": (m, n)}[operand]

    def values(self, operand: str) -> int:
        """Return the values of an operand per thread; all values if the operand is in shared memory."""
        return self.layout(operand)[1].size()

    def registers(self, operand: str) -> int:
        """Return the 32-bit registers of an operand per thread; 0 if the operand is in shared memory."""
        if operand == "B" and self.b_shared:
            return 0
        return self.values(operand) * (REGISTER_BITS if operand == "C" else self.mma_bits) // REGISTER_BITS


def _check_layout(entry: Atom, operand: str) -> None:
    layout, (rows, columns) = entry.layout(operand), entry.extent(operand)
    name = f"{operand.lower()}_layout of {entry.name}"
    if len(layout) != 2:
        raise ValueError(f"{name} must have two modes, thread and value, got {len(layout)}")
    if layout[0].size() != entry.threads:
        raise ValueError(f"{name} must have {entry.threads} threads, got {layout[0].size()}")
    mapped = layout[1] if operand == "B" and entry.b_shared else layout
    if mapped.size() != rows * columns:
        raise ValueError(f"{name} must have {rows} x {columns} = {rows * columns} elements, got {mapped.size()}")
    reached = {mapped(i) for i in range(mapped.size())}
    if reached != set(range(rows * columns)):
        inside = len(reached & set(range(rows * columns)))
        raise ValueError(f"{name} must reach each of {rows * columns} elements once, it reaches {inside} of them")


def check_atom(entry: Atom) -> None:
    """Raise `ValueError` unless the fields of an entry are consistent; the message names the field.

    Shapes are powers of two, each layout reaches each element of its operand once, and there is a struct for at least
    one pair of operand types.
    """
    if not _IDENTIFIER.fullmatch(entry.name):
        raise ValueError(f"name must be letters, digits and underscores, got {entry.name!r}")
    if len(entry.shape) != 3 or not all(isinstance(x, int) and x > 0 and x & (x - 1) == 0 for x in entry.shape):
        raise ValueError(f"shape of {entry.name} must be three powers of two (M, N, K), got {entry.shape!r}")
    widths = FLOAT_BITS if entry.floating else MMA_BITS
    if entry.mma_bits not in widths or entry.bits not in widths or entry.bits > entry.mma_bits:
        raise ValueError(
            f"bits <= mma_bits of {entry.name} must be in {widths}, got bits {entry.bits}, mma_bits {entry.mma_bits}"
        )
    if entry.threads not in (32, 128):
        raise ValueError(f"threads of {entry.name} must be 32 or 128, got {entry.threads}")
    if not entry.structs:
        raise ValueError(f"structs of {entry.name} must name a struct for at least one mix of signs or formats")
    formats = [name for name, each in FLOATS.items() if each.bits == entry.mma_bits]
    keys = set(product(formats, repeat=2)) if entry.floating else set(product((True, False), repeat=2))
    for key, struct in entry.structs.items():
        if key not in keys:
            wanted = f"formats of {', '.join(formats)}" if entry.floating else "(left_signed, right_signed)"
            raise ValueError(f"structs of {entry.name} must map {wanted}, got the key {key!r}")
        if not _STRUCT.fullmatch(struct):
            raise ValueError(f"structs of {entry.name} must map to names of C++ structs, got {struct!r}")
    for arch in entry.archs:
        if not re.fullmatch(r"\d{2,3}a?", arch):
            raise ValueError(f"archs of {entry.name} must look like '80' or '90a', got {arch!r}")
    for operand in OPERANDS:
        _check_layout(entry, operand)


def warp_layouts(shape: tuple[int, int, int], mma_bits: int) -> tuple[Layout, Layout, Layout]:
    """Return the thread-value layouts of a warp-wide ``mma`` for operands of 4, 8 or 16 bits.

    Lane ``4 g + t`` holds runs of ``r`` values, one register, at ``k = r t``. Further registers are 8 rows down (A, C)
    and then ``4 r`` along K (A, B).

    Parameters
    ----------
    shape : tuple of int
        (M, N, K).
    mma_bits : int
        Bits of an operand in the instruction.

    Returns
    -------
    tuple of pycute.Layout
        Layouts of A, B and C.

    References
    ----------
    .. [1] PTX ISA, "Matrix Fragments for mma".

    Examples
    --------
    >>> a, b, c = warp_layouts((16, 8, 32), 8)
    >>> a.size(), b.size(), c.size()
    (512, 256, 128)
    """
    m, n, k = shape
    run = REGISTER_BITS // mma_bits
    deep = k // (4 * run)

    def operand(rows: int) -> Layout:
        modes = [(run, rows), (rows // 8, 8), (deep, 4 * run * rows)]
        nontrivial = [(size, stride) for size, stride in modes if size > 1]
        sizes, strides = tuple(size for size, _ in nontrivial), tuple(stride for _, stride in nontrivial)
        return Layout(((4, 8), sizes), ((run * rows, 1), strides))

    accumulators = ((2, 2), (m, 8)) if m > 8 else ((2,), (m,))
    return operand(m), operand(n), Layout(((4, 8), accumulators[0]), ((2 * m, 1), accumulators[1]))
