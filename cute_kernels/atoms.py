"""The table of mma atoms: one entry says everything that the kernels need to know about a Tensor Core instruction.

An entry names the CuTe structs of an instruction, one for each mix of operand types, and its three thread-value
layouts, exactly as CuTe's ``MMA_Traits`` give them: ``(thread, value) -> m + M * k`` for operand A, ``n + N * k`` for B
and ``m + M * n`` for C.  What kernels and formats do with an entry follows from it
(:mod:`cute_kernels.layout.fragments`).
A shape that the table lacks is added by :func:`register_atom`; ``docs/adding-an-mma-shape.md`` shows how.
Source: PTX ISA, "Matrix Fragments for mma"; CUTLASS, ``cute/atom/mma_traits_sm80.hpp``, ``mma_traits_sm90_gmma.hpp``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from pycute import Layout, flatten

from cute_kernels.dtypes import FLOATS, Integer, Number, holds

REGISTER_BITS = 32
OPERANDS = ("A", "B", "C")
MMA_BITS = (4, 8)  # of integers
FLOAT_BITS = (8, 16)

# Chips on which an instruction is one SASS instruction and no call of an emulation; "a" wants the suffix in the target.
_AMPERE_AND_ADA = ("80", "86", "87", "88", "89")
_TO_SM90 = (*_AMPERE_AND_ADA, "90")
_FROM_SM80 = (*_TO_SM90, "100", "103", "110", "120", "121")
_HOPPER = ("90a",)
_FP8 = ("89", "120", "121")

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_STRUCT = re.compile(r"[A-Za-z_][\w:<>, ]*")
_ARCH = re.compile(r"(?:sm_|compute_)?(\d{2,3})([af]?)")


@dataclass(frozen=True)
class Atom:
    """One mma instruction: ``C[m, n] += sum_k A[m, k] * B[n, k]`` over an (M, N, K) tile.

    ``bits`` is the width of an operand as it is stored, ``mma_bits`` the width that the instruction takes; they differ
    where 4-bit integers go through the 8-bit instruction.  ``structs`` maps ``(left_signed, right_signed)``, the signs
    of operands A and B, to the C++ struct, or for floats the names of their formats, such as ``("e4m3", "e5m2")``; a
    name without ``::`` lies in namespace ``cute``.  ``threads`` is 32 for a warp's instruction and 128 for a warp
    group's.  ``archs`` are the chips that have it natively: ``"80"``, or ``"90a"`` where the compiler's target needs
    the suffix.  ``headers`` are included and ``source`` is pasted ahead of the kernel; a user's struct and its
    ``cute::MMA_Traits`` go there.

    Equal atoms have equal hashes.  Nothing is checked here: :func:`register_atom` does that.
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
        """Whether it multiplies floats."""
        return any(isinstance(key, tuple) and isinstance(key[0], str) for key in self.structs)

    @cached_property
    def b_shared(self) -> bool:
        """Whether operand B is read from shared memory; its layout then gives every thread the whole operand."""
        return not any(flatten((self.b_layout[0].stride,)))

    def layout(self, operand: str) -> Layout:
        """The thread-value layout of operand ``"A"``, ``"B"`` or ``"C"``; ``ValueError`` for another name."""
        if operand not in OPERANDS:
            raise ValueError(f"operand must be one of {', '.join(OPERANDS)}, got {operand!r}")
        return {"A": self.a_layout, "B": self.b_layout, "C": self.c_layout}[operand]

    def extent(self, operand: str) -> tuple[int, int]:
        """Rows and columns of operand ``"A"`` (M, K), ``"B"`` (N, K) or ``"C"`` (M, N)."""
        m, n, k = self.shape
        self.layout(operand)
        return {"A": (m, k), "B": (n, k), "C": (m, n)}[operand]

    def values(self, operand: str) -> int:
        """Values of the operand that a thread holds; all of them where the operand lies in shared memory."""
        return self.layout(operand)[1].size()

    def registers(self, operand: str) -> int:
        """32-bit registers of the operand that a thread holds; 0 where the operand lies in shared memory."""
        if operand == "B" and self.b_shared:
            return 0
        return self.values(operand) * (REGISTER_BITS if operand == "C" else self.mma_bits) // REGISTER_BITS


_atoms: dict[str, Atom] = {}


def atom(name: str) -> Atom:
    """The entry called ``name``; ``ValueError`` with the known names when there is none."""
    if name not in _atoms:
        raise ValueError(f"unknown atom {name!r}, known are {', '.join(_atoms)}")
    return _atoms[name]


def atoms(arch: int | str | None = None) -> tuple[Atom, ...]:
    """All entries, or those that :func:`runs_on` finds native on ``arch``, in the order of their registration."""
    return tuple(entry for entry in _atoms.values() if arch is None or runs_on(entry, arch))


def runs_on(entry: Atom, arch: int | str) -> bool:
    """Whether ``entry`` is a native instruction on ``arch``.

    A text is a compiler's target, such as ``"sm_90a"``: warp-group instructions compile for ``"sm_90"`` without a word
    and trap at run time, so there the suffix counts.  A number is a device's compute capability, such as 90.
    Raises ``ValueError`` for a text that is no target.
    """
    match = _ARCH.fullmatch(str(arch))
    if match is None:
        raise ValueError(f"arch must look like 'sm_90a' or 90, got {arch!r}")
    number, full = match[1], isinstance(arch, int) or match[2] == "a"
    return number in entry.archs or (full and f"{number}a" in entry.archs)


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


def _check(entry: Atom) -> None:
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


def register_atom(entry: Atom) -> Atom:
    """Add ``entry`` to the table and return it, so that its name is good wherever an ``atom`` is asked for.

    Requires shapes that are powers of two, thread-value layouts that reach every element of their operand exactly once,
    and a struct for at least one mix of signs or formats.  Registering an equal atom again changes nothing.
    Raises ``ValueError`` that names the field, or the name when it is taken by a different atom.
    """
    _check(entry)
    known = _atoms.get(entry.name)
    if known is not None and known != entry:
        raise ValueError(f"atom {entry.name!r} is registered already with other fields: choose another name")
    return _atoms.setdefault(entry.name, entry)


def declaration(entry: Atom) -> str:
    """C++ text that makes ``entry`` the atom of a translation unit.

    The headers, the entry's own source, ``magicube::AtomFor<Left, Right>::type`` for each mix of operand types that the
    entry has, ``Integer<signed>`` or a format of ``device/float_formats.cuh``, and ``magicube::AtomInfo`` with kM, kN,
    kK, kBits (of the instruction's operands) and kThreads.
    """
    m, n, k = entry.shape
    lines = [f"#include <{header}>" for header in entry.headers]
    if entry.source:
        lines += [entry.source.strip()]
    lines += ["namespace magicube {", "template <bool kSigned> struct Integer;"]
    formats = dict.fromkeys(name for key in entry.structs for name in key if isinstance(name, str))
    lines += [f"struct {name.upper()};" for name in formats]
    lines += ["template <class Left, class Right> struct AtomFor;"]
    for key, struct in entry.structs.items():
        qualified = struct if "::" in struct else f"cute::{struct}"
        left, right = (operand_type(each) for each in key)
        lines += [f"template <> struct AtomFor<{left}, {right}> {{ using type = {qualified}; }};"]
    lines += [
        f"struct AtomInfo {{ static constexpr int kM = {m}, kN = {n}, kK = {k}, "
        f"kBits = {entry.mma_bits}, kThreads = {entry.threads}; }};",
        "}  // namespace magicube",
    ]
    return "\n".join(lines) + "\n"


def operand_type(key: bool | str) -> str:
    """The C++ type of an operand, an entry of a key of ``structs``."""
    return key.upper() if isinstance(key, str) else f"Integer<{str(key).lower()}>"


def format_type(number: Number) -> str:
    """The C++ type of elements as they lie in memory."""
    return operand_type(number.signed if isinstance(number, Integer) else number.name)


def operand_of(entry: Atom, number: Number) -> bool | str:
    """What ``number`` becomes for the instruction, an entry of a key of ``structs``: a sign, or its own format or the
    first one that holds its values.  ``ValueError`` when there is none.
    """
    if isinstance(number, Integer) and not entry.floating:
        return number.signed
    formats = dict.fromkeys(name for key in entry.structs for name in key if isinstance(name, str))
    if not isinstance(number, Integer):
        fitting = [name for name in formats if holds(FLOATS[name], number)]
        if fitting:
            return number.name if number.name in fitting else fitting[0]
    takes = " and ".join(formats) if formats else "integers"
    raise ValueError(f"atom must be an instruction for {number.name}, got {entry.name}, which multiplies {takes}")


def _warp_layouts(shape: tuple[int, int, int], mma_bits: int) -> tuple[Layout, Layout, Layout]:
    """The thread-value layouts of PTX's ``mma`` of a warp, for operands of 4, 8 and 16 bits.

    Lane ``4 g + t`` holds runs of ``r`` values, one register, at ``k = r t``; further registers are 8 rows down (A, C)
    and then ``4 r`` along k (A, B).
    """
    m, n, k = shape
    run = REGISTER_BITS // mma_bits
    deep = k // (4 * run)

    def operand(rows: int) -> Layout:
        modes = [(run, rows), (rows // 8, 8), (deep, 4 * run * rows)]
        kept = [(size, stride) for size, stride in modes if size > 1]
        sizes, strides = tuple(size for size, _ in kept), tuple(stride for _, stride in kept)
        return Layout(((4, 8), sizes), ((run * rows, 1), strides))

    accumulators = ((2, 2), (m, 8)) if m > 8 else ((2,), (m,))
    return operand(m), operand(n), Layout(((4, 8), accumulators[0]), ((2 * m, 1), accumulators[1]))


def _warp(name: str, shape: tuple[int, int, int], bits: int, archs: tuple[str, ...], mma_bits: int = 0) -> Atom:
    """A warp's instruction for integers of 4 or 8 bits."""
    m, n, k = shape
    mma_bits = mma_bits or bits
    letter = {True: f"S{mma_bits}", False: f"U{mma_bits}"}
    structs = {
        (left, right): f"SM80_{m}x{n}x{k}_S32{letter[left]}{letter[right]}S32_TN"
        for left, right in product((True, False), repeat=2)
    }
    headers = ("cute/atom/mma_traits_sm80.hpp",)
    return Atom(name, shape, bits, mma_bits, structs, 32, *_warp_layouts(shape, mma_bits), archs, headers)


def _halves(name: str, of: str, letters: str, times: int) -> Atom:
    """A warp's m16n8k16 for 16-bit floats with sums in float32, once or twice along k."""
    struct, headers = f"SM80_16x8x16_F32{letters}{letters}F32_TN", ("cute/atom/mma_traits_sm80.hpp",)
    if times == 2:
        struct, headers = f"magicube::MmaKPair<cute::{struct}>", ("device/mma_k_pair.cuh",)
    shape = (16, 8, 16 * times)
    return Atom(name, shape, 16, 16, {(of, of): struct}, 32, *_warp_layouts(shape, 16), _FROM_SM80, headers)


def _small_floats() -> Atom:
    """A warp's m16n8k32 for e4m3 and e5m2; chips that lack it convert both operands to float16 each time."""
    structs = {
        (left, right): f"SM89_16x8x32_F32{left.upper()}{right.upper()}F32_TN"
        for left, right in product(("e4m3", "e5m2"), repeat=2)
    }
    shape, headers = (16, 8, 32), ("cute/atom/mma_traits_sm89.hpp",)
    return Atom("fp8_m16n8k32", shape, 8, 8, structs, 32, *_warp_layouts(shape, 8), _FP8, headers)


def _warp_group(n: int) -> Atom:
    """Hopper's ``wgmma`` 64 x n x 32 with A in registers; B lies in shared memory, k-major, behind a descriptor.

    Each of the four warps holds 16 rows as in m16n8k32.  CuTe gives every thread of B the whole operand (stride 0).
    """
    letter = {True: "S8", False: "U8"}
    structs = {
        (left, right): f"SM90_64x{n}x32_S32{letter[left]}{letter[right]}_RS_TN"
        for left, right in product((True, False), repeat=2)
    }
    return Atom(
        name=f"s8_m64n{n}k32",
        shape=(64, n, 32),
        bits=8,
        mma_bits=8,
        structs=structs,
        threads=128,
        a_layout=Layout(((4, 8, 4), (4, 2, 2)), ((256, 1, 16), (64, 8, 1024))),
        b_layout=Layout((128, (n, 32)), (0, (1, n))),
        c_layout=Layout(((4, 8, 4), (2, 2, n // 8)), ((128, 1, 16), (64, 8, 512))),
        archs=_HOPPER,
        headers=("cute/atom/mma_traits_sm90_gmma.hpp",),
    )


register_atom(_warp("s8_m16n8k32", (16, 8, 32), 8, _FROM_SM80))
register_atom(_warp("s8_m16n8k16", (16, 8, 16), 8, _FROM_SM80))
register_atom(_warp("s8_m8n8k16", (8, 8, 16), 8, _TO_SM90))
register_atom(_warp("s4_m16n8k64", (16, 8, 64), 4, _AMPERE_AND_ADA))
# CuTe 4.2 gives this one a B layout that reaches half of the operand (stride 32 for 64); ours is the one of PTX.
register_atom(_warp("s4_m16n8k32", (16, 8, 32), 4, _AMPERE_AND_ADA))
register_atom(_warp("s4_m8n8k32", (8, 8, 32), 4, _AMPERE_AND_ADA))
# 4-bit integers stay packed in memory and become 8-bit ones in registers: the fast way wherever s4 is emulated.
register_atom(_warp("int4_as_int8_m16n8k32", (16, 8, 32), 4, _FROM_SM80, mma_bits=8))
register_atom(_warp_group(8))
register_atom(_warp_group(16))
for _times in (1, 2):
    register_atom(_halves(f"f16_m16n8k{16 * _times}", "float16", "F16", _times))
    register_atom(_halves(f"bf16_m16n8k{16 * _times}", "bfloat16", "BF16", _times))
register_atom(_small_floats())
