"""The instruction for two kinds of operands."""

from __future__ import annotations

from cute_kernels import atoms
from cute_kernels.dtypes import Integer, check_pair
from cute_kernels.machine import Kind


def default_atom(kind: Kind, arch: str) -> str:
    """The instruction for these operands: 4-bit integers where both are and the chip has it, 16-bit floats for floats.

    Smaller floats become bfloat16 beside that, and float16 otherwise, exactly.  Raises ``TypeError`` for operands that
    no instruction takes together.
    """
    check_pair(kind.left, kind.right)
    if not isinstance(kind.left, Integer):
        return "bf16_m16n8k32" if "bfloat16" in (kind.left.name, kind.right.name) else "f16_m16n8k32"
    if (kind.left.bits, kind.right.bits) != (4, 4):
        return "s8_m16n8k32"
    native = "s4_m16n8k64"
    return native if atoms.runs_on(atoms.atom(native), arch) else "int4_as_int8_m16n8k32"


def _atom(wish: str | None, kind: Kind, arch: str) -> str:
    """``wish``, after checking that the kernels can use it on this architecture, or the default."""
    if wish is None:
        return default_atom(kind, arch)
    _check_warp(wish)
    if not atoms.runs_on(atoms.atom(wish), arch):
        natives = ", ".join(f"sm_{each}" for each in atoms.atom(wish).archs)
        raise ValueError(f"atom must be an instruction of {arch}, got {wish} of {natives}")
    for number in (kind.left, kind.right):
        atoms.operand_of(atoms.atom(wish), number)  # raises
    return wish


def _check_warp(atom: str) -> None:
    threads = atoms.atom(atom).threads
    if threads != 32:
        raise ValueError(f"atom must be an instruction of a warp, 32 threads, got {atom} of {threads}: "
                         "each warp gathers rows of its own")  # fmt: skip
