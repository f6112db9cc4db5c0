"""The table of MMA atoms: one entry holds the properties of a Tensor Core instruction.

An entry names the CuTe structs of an instruction, one per pair of operand types, and its three thread-value layouts
(:class:`~cute_kernels.mma_atom.Atom`). Layouts of formats and kernels follow from it
(:mod:`cute_kernels.layout.fragments`). :func:`register_atom` adds a shape, :func:`unregister_atom` removes it; see
``docs/how-to/add-an-mma-shape.md``.
Source: PTX ISA, "Matrix Fragments for mma"; CUTLASS, ``cute/atom/mma_traits_sm80.hpp``, ``mma_traits_sm90_gmma.hpp``.
"""

from __future__ import annotations

import re
from itertools import product

from pycute import Layout

from cute_kernels.dtypes import FLOATS, ElementType, Integer, check_pair, holds
from cute_kernels.machine import ProblemTypes
from cute_kernels.mma_atom import OPERANDS, REGISTER_BITS, Atom, check_atom, warp_layouts

__all__ = [
    "OPERANDS",
    "REGISTER_BITS",
    "Atom",
    "atom",
    "atoms",
    "check_warp_atom",
    "declaration",
    "default_atom",
    "format_type",
    "operand_of",
    "operand_type",
    "register_atom",
    "resolve_atom",
    "runs_on",
    "unregister_atom",
]

# Architectures with the instruction in SASS, not emulated; "a": the target needs the suffix.
_AMPERE_AND_ADA = ("80", "86", "87", "88", "89")
_TO_SM90 = (*_AMPERE_AND_ADA, "90")
_FROM_SM80 = (*_TO_SM90, "100", "103", "110", "120", "121")
_HOPPER = ("90a",)
_FP8 = ("89", "120", "121")

_ARCH = re.compile(r"(?:sm_|compute_)?(\d{2,3})([af]?)")


_atoms: dict[str, Atom] = {}


def atom(name: str) -> Atom:
    """Return the entry with this name.

    Raises
    ------
    ValueError
        If there is none; the message lists the names.

    Examples
    --------
    >>> atom("s8_m16n8k32").shape
    (16, 8, 32)
    """
    if name not in _atoms:
        raise ValueError(f"unknown atom {name!r}, known are {', '.join(_atoms)}")
    return _atoms[name]


def atoms(arch: int | str | None = None) -> tuple[Atom, ...]:
    """Return all entries in order of registration, or those that are native on an architecture.

    Parameters
    ----------
    arch : int or str, optional
        As for :func:`runs_on`.

    Examples
    --------
    >>> [entry.name for entry in atoms("sm_80") if entry.floating]
    ['f16_m16n8k16', 'bf16_m16n8k16', 'f16_m16n8k32', 'bf16_m16n8k32']
    """
    return tuple(entry for entry in _atoms.values() if arch is None or runs_on(entry, arch))


def runs_on(entry: Atom, arch: int | str) -> bool:
    """Return whether an entry is a native instruction on an architecture.

    Parameters
    ----------
    entry : Atom
        An entry of the table.
    arch : int or str
        Compiler target such as ``"sm_90a"``, or compute capability such as 90. Warp-group instructions also compile
        for ``"sm_90"`` and trap at run time, so the suffix of a target counts.

    Raises
    ------
    ValueError
        If `arch` is no target.

    Examples
    --------
    >>> [runs_on(atom("s8_m64n8k32"), arch) for arch in ("sm_90a", "sm_90", 90)]
    [True, False, True]
    """
    match = _ARCH.fullmatch(str(arch))
    if match is None:
        raise ValueError(f"arch must look like 'sm_90a' or 90, got {arch!r}")
    number, full = match[1], isinstance(arch, int) or match[2] == "a"
    return number in entry.archs or (full and f"{number}a" in entry.archs)


def register_atom(entry: Atom) -> Atom:
    """Add an entry to the table and return it.

    Each function with an `atom` parameter then accepts its name. An equal entry is accepted again.

    Parameters
    ----------
    entry : Atom
        Shapes are powers of two, each layout reaches each element of its operand once, and there is a struct for at
        least one pair of operand types.

    Raises
    ------
    ValueError
        If a field is wrong, or the name belongs to another entry.

    Examples
    --------
    >>> register_atom(atom("s8_m16n8k32")).name
    's8_m16n8k32'
    """
    check_atom(entry)
    known = _atoms.get(entry.name)
    if known is not None and known != entry:
        raise ValueError(f"atom {entry.name!r} is registered already with other fields: choose another name")
    return _atoms.setdefault(entry.name, entry)


def unregister_atom(name: str) -> None:
    """Remove an entry from the table.

    Raises
    ------
    ValueError
        If there is none.

    Examples
    --------
    >>> from dataclasses import replace
    >>> unregister_atom(register_atom(replace(atom("s8_m16n8k32"), name="mine")).name)
    """
    del _atoms[atom(name).name]


def declaration(entry: Atom) -> str:
    """Return the C++ text that makes an entry the atom of a translation unit.

    Headers, the source of the entry, ``magicube::AtomFor<Left, Right>::type`` per pair of operand types
    (``Integer<signed>`` or a format of ``device/float_formats.cuh``), and ``magicube::AtomInfo`` with kM, kN, kK, kBits
    (of the operands in the instruction) and kThreads.

    Examples
    --------
    >>> declaration(atom("s8_m16n8k32")).splitlines()[0]
    '#include <cute/atom/mma_traits_sm80.hpp>'
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
        lhs, rhs = (operand_type(each) for each in key)
        lines += [f"template <> struct AtomFor<{lhs}, {rhs}> {{ using type = {qualified}; }};"]
    lines += [
        f"struct AtomInfo {{ static constexpr int kM = {m}, kN = {n}, kK = {k}, "
        f"kBits = {entry.mma_bits}, kThreads = {entry.threads}; }};",
        "}  // namespace magicube",
    ]
    return "\n".join(lines) + "\n"


def operand_type(key: bool | str) -> str:
    """Return the C++ type of an operand, given an element of a key of ``structs``.

    Examples
    --------
    >>> operand_type(True), operand_type("e4m3")
    ('Integer<true>', 'E4M3')
    """
    return key.upper() if isinstance(key, str) else f"Integer<{str(key).lower()}>"


def format_type(number: ElementType) -> str:
    """Return the C++ type of elements in memory.

    Examples
    --------
    >>> format_type(Integer(8, False)), format_type(FLOATS["float16"])
    ('Integer<false>', 'FLOAT16')
    """
    return operand_type(number.signed if isinstance(number, Integer) else number.name)


def operand_of(entry: Atom, number: ElementType) -> bool | str:
    """Return the operand type of an instruction for elements of a type.

    Parameters
    ----------
    entry : Atom
        An entry of the table.
    number : Integer or FloatFormat
        Type of the elements.

    Returns
    -------
    bool or str
        An element of a key of ``structs``: the sign of integers; for floats the format itself, or the first one that
        holds its values.

    Raises
    ------
    ValueError
        If the instruction has no operand for them.

    Examples
    --------
    >>> operand_of(atom("f16_m16n8k32"), FLOATS["e4m3"])
    'float16'
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


def _warp(name: str, shape: tuple[int, int, int], bits: int, archs: tuple[str, ...], mma_bits: int = 0) -> Atom:
    """A warp-wide instruction for integers of 4 or 8 bits."""
    m, n, k = shape
    mma_bits = mma_bits or bits
    letter = {True: f"S{mma_bits}", False: f"U{mma_bits}"}
    structs = {
        (lhs, rhs): f"SM80_{m}x{n}x{k}_S32{letter[lhs]}{letter[rhs]}S32_TN"
        for lhs, rhs in product((True, False), repeat=2)
    }
    headers = ("cute/atom/mma_traits_sm80.hpp",)
    return Atom(name, shape, bits, mma_bits, structs, 32, *warp_layouts(shape, mma_bits), archs, headers)


def _float16_like(name: str, of: str, letters: str, times: int) -> Atom:
    """A warp-wide m16n8k16 for 16-bit floats with float32 accumulators, one or two along K."""
    struct, headers = f"SM80_16x8x16_F32{letters}{letters}F32_TN", ("cute/atom/mma_traits_sm80.hpp",)
    if times == 2:
        struct, headers = f"magicube::MmaKPair<cute::{struct}>", ("device/mma_k_pair.cuh",)
    shape = (16, 8, 16 * times)
    return Atom(name, shape, 16, 16, {(of, of): struct}, 32, *warp_layouts(shape, 16), _FROM_SM80, headers)


def _small_floats() -> Atom:
    """A warp-wide m16n8k32 for e4m3 and e5m2; architectures without it convert both operands to float16."""
    structs = {
        (lhs, rhs): f"SM89_16x8x32_F32{lhs.upper()}{rhs.upper()}F32_TN"
        for lhs, rhs in product(("e4m3", "e5m2"), repeat=2)
    }
    shape, headers = (16, 8, 32), ("cute/atom/mma_traits_sm89.hpp",)
    return Atom("fp8_m16n8k32", shape, 8, 8, structs, 32, *warp_layouts(shape, 8), _FP8, headers)


def _warp_group(n: int) -> Atom:
    """Hopper's ``wgmma`` 64 x n x 32 with A in registers and B, K-major, in shared memory behind a descriptor."""
    letter = {True: "S8", False: "U8"}
    structs = {
        (lhs, rhs): f"SM90_64x{n}x32_S32{letter[lhs]}{letter[rhs]}_RS_TN"
        for lhs, rhs in product((True, False), repeat=2)
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


def default_atom(kind: ProblemTypes, arch: str) -> str:
    """Return the name of the instruction for two element types.

    4-bit integers use the 4-bit instruction if both operands have 4 bits and the architecture has it. Floats use
    16-bit operands: bfloat16 if one operand is bfloat16, else float16; both hold the smaller floats exactly.

    Parameters
    ----------
    kind : ProblemTypes
        Element types of the operands.
    arch : str
        Architecture, such as ``"sm_90a"``.

    Raises
    ------
    TypeError
        If no instruction multiplies them.

    Examples
    --------
    >>> four = ProblemTypes(8, Integer(4, True), Integer(4, True), "int32")
    >>> default_atom(four, "sm_80"), default_atom(four, "sm_90a")
    ('s4_m16n8k64', 'int4_as_int8_m16n8k32')
    """
    check_pair(kind.lhs, kind.rhs)
    if not isinstance(kind.lhs, Integer):
        return "bf16_m16n8k32" if "bfloat16" in (kind.lhs.name, kind.rhs.name) else "f16_m16n8k32"
    if (kind.lhs.bits, kind.rhs.bits) != (4, 4):
        return "s8_m16n8k32"
    native = "s4_m16n8k64"
    return native if runs_on(atom(native), arch) else "int4_as_int8_m16n8k32"


def resolve_atom(name: str | None, kind: ProblemTypes, arch: str) -> str:
    """Return the atom that the caller named, after a check, or the default.

    Parameters
    ----------
    name : str or None
        Name of an entry.
    kind : ProblemTypes
        Element types of the operands.
    arch : str
        Architecture.

    Raises
    ------
    ValueError
        If the entry is not native on `arch`, is no instruction of a warp, or does not multiply the operands.

    Examples
    --------
    >>> eight = ProblemTypes(8, Integer(8, True), Integer(8, True), "int32")
    >>> resolve_atom(None, eight, "sm_80"), resolve_atom("s8_m8n8k16", eight, "sm_80")
    ('s8_m16n8k32', 's8_m8n8k16')
    """
    if name is None:
        return default_atom(kind, arch)
    check_warp_atom(name)
    if not runs_on(atom(name), arch):
        natives = ", ".join(f"sm_{each}" for each in atom(name).archs)
        raise ValueError(f"atom must be an instruction of {arch}, got {name} of {natives}")
    for number in (kind.lhs, kind.rhs):
        operand_of(atom(name), number)  # raises
    return name


def check_warp_atom(name: str) -> None:
    """Raise `ValueError` unless the named atom is an instruction of a warp.

    Examples
    --------
    >>> check_warp_atom("s8_m16n8k32")
    >>> check_warp_atom("s8_m64n8k32")
    Traceback (most recent call last):
    ValueError: atom must be an instruction of a warp, 32 threads, got s8_m64n8k32 of 128: ...
    """
    threads = atom(name).threads
    if threads != 32:
        raise ValueError(f"atom must be an instruction of a warp, 32 threads, got {name} of {threads}: "
                         "each warp gathers rows of its own")  # fmt: skip


register_atom(_warp("s8_m16n8k32", (16, 8, 32), 8, _FROM_SM80))
register_atom(_warp("s8_m16n8k16", (16, 8, 16), 8, _FROM_SM80))
register_atom(_warp("s8_m8n8k16", (8, 8, 16), 8, _TO_SM90))
register_atom(_warp("s4_m16n8k64", (16, 8, 64), 4, _AMPERE_AND_ADA))
# CuTe 4.2 gives this one a B layout that reaches half of the operand (stride 32 for 64); ours is the one of PTX.
register_atom(_warp("s4_m16n8k32", (16, 8, 32), 4, _AMPERE_AND_ADA))
register_atom(_warp("s4_m8n8k32", (8, 8, 32), 4, _AMPERE_AND_ADA))
# 4-bit integers stay packed in memory and become 8-bit ones in registers: faster where s4 is emulated.
register_atom(_warp("int4_as_int8_m16n8k32", (16, 8, 32), 4, _FROM_SM80, mma_bits=8))
register_atom(_warp_group(8))
register_atom(_warp_group(16))
for _times in (1, 2):
    register_atom(_float16_like(f"f16_m16n8k{16 * _times}", "float16", "F16", _times))
    register_atom(_float16_like(f"bf16_m16n8k{16 * _times}", "bfloat16", "BF16", _times))
register_atom(_small_floats())
