"""Host model of shared memory: the wavefronts of an access by a warp.

Shared memory has 32 banks of 4 bytes; word ``w`` is in bank ``w mod 32``. In one wavefront each bank serves one word to
any number of lanes. Accesses of 8 bytes per lane take half a warp at a time, of 16 bytes a quarter, and ``ldmatrix``
one 8 x 8 matrix (8 rows of 16 bytes).
Source: CUDA C++ Programming Guide, "Shared Memory".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "BANKS",
    "KINDS",
    "WARP",
    "WORD",
    "Access",
    "Addresses",
    "Conflicts",
    "ldmatrix_wavefronts",
    "report",
    "swizzled",
    "wavefronts",
]

BANKS = 32
WORD = 4
WARP = 32
MATRIX_ROWS, ROW_BYTES = 8, 16

Addresses = np.ndarray[Any, np.dtype[np.int64]]

# kind -> bytes per lane (row) reads or writes, and the lanes (rows) of one instruction
KINDS = {
    **{f"{verb}{8 * size}": (size, WARP) for verb in ("load", "store") for size in (1, 2, 4, 8, 16)},
    **{f"ldmatrix.x{count}": (ROW_BYTES, MATRIX_ROWS * count) for count in (1, 2, 4)},
}


def _phases(addresses: Addresses, size: int) -> Addresses:
    """Addresses (..., lanes) as (..., phases, lanes per phase): as many lanes as fill all banks at most once."""
    lanes = min(addresses.shape[-1], BANKS * WORD // max(size, WORD))
    return addresses.reshape(*addresses.shape[:-1], -1, lanes)


def _count(addresses: Addresses, size: int) -> tuple[int, int]:
    """``(wavefronts, ideal)``: wavefronts of one instruction, and its phases with an active lane."""
    total = ideal = 0
    for phase in _phases(addresses, size):
        active = phase[phase >= 0]
        if active.size:
            words = np.unique(active[:, None] // WORD + np.arange(max(1, size // WORD)))  # one word is broadcast
            total += int(np.bincount(words % BANKS).max())
            ideal += 1
    return total, ideal


def _checked(addresses: Any, size: int, lanes: int) -> Addresses:
    given = np.asarray(addresses)
    if not np.issubdtype(given.dtype, np.integer):
        raise TypeError(f"addresses must be integers, got {given.dtype}")
    if given.ndim == 0 or given.shape[-1] != lanes:
        raise ValueError(f"addresses must have {lanes} entries in the last dimension, got shape {given.shape}")
    wrong = given[(given >= 0) & (given % size != 0)]
    if wrong.size:
        raise ValueError(f"addresses must be multiples of the {size} bytes accessed, got {int(wrong[0])}")
    return given.astype(np.int64)


def wavefronts(addresses: Any, bytes_per_lane: int) -> int:
    """Return the wavefronts of one load or store of a warp.

    Parameters
    ----------
    addresses : array_like, shape (32,)
        Byte addresses in shared memory per lane, multiples of `bytes_per_lane`; negative for inactive lanes.
    bytes_per_lane : int
        1, 2, 4, 8 or 16.

    Returns
    -------
    int
        Without conflicts 1 up to 4 bytes per lane, 2 for 8 and 4 for 16.

    Raises
    ------
    TypeError
        If addresses are no integers.
    ValueError
        For another size, number of lanes or alignment.

    Examples
    --------
    >>> wavefronts(np.arange(32) * 4, 4), wavefronts(np.arange(32) * 128, 4)
    (1, 32)
    """
    if bytes_per_lane not in (1, 2, 4, 8, 16):
        raise ValueError(f"bytes_per_lane must be 1, 2, 4, 8 or 16, got {bytes_per_lane!r}")
    return _count(_checked(addresses, bytes_per_lane, WARP), bytes_per_lane)[0]


def ldmatrix_wavefronts(rows: Any, count: int) -> int:
    """Return the wavefronts of ``ldmatrix``; `count` without conflicts.

    Parameters
    ----------
    rows : array_like, shape (8 * count,)
        Byte addresses of the 16-byte rows, in the order of the lanes that hold them.
    count : int
        Matrices: 1, 2 or 4.

    Raises
    ------
    TypeError, ValueError
        As :func:`wavefronts`.

    Examples
    --------
    >>> ldmatrix_wavefronts(np.arange(8) * 16, 1), ldmatrix_wavefronts(np.arange(8) * 128, 1)
    (1, 8)
    """
    if count not in (1, 2, 4):
        raise ValueError(f"count must be 1, 2 or 4, got {count!r}")
    return _count(_checked(rows, ROW_BYTES, MATRIX_ROWS * count), ROW_BYTES)[0]


@dataclass(frozen=True, eq=False)
class Access:
    """A shared-memory access of a kernel.

    Attributes
    ----------
    name : str
        Name in reports.
    kind : str
        A key of :data:`KINDS`.
    addresses : ndarray, shape (lanes,) or (instructions, lanes)
        Byte addresses; lanes are 32, or the 32 rows of ``ldmatrix.x4``.

    Raises
    ------
    ValueError
        If the kind is unknown, and as :func:`wavefronts`.

    Examples
    --------
    >>> Access("read", "load32", np.arange(32) * 4).addresses[:3]
    array([0, 4, 8])
    """

    name: str
    kind: str
    addresses: Addresses

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        object.__setattr__(self, "addresses", _checked(self.addresses, *KINDS[self.kind]))


@dataclass(frozen=True)
class Conflicts:
    """Wavefronts of one :class:`Access`, summed over its instructions.

    Attributes
    ----------
    name, kind : str
        Of the access.
    instructions : int
        Instructions of the access.
    wavefronts : int
        Wavefronts of all instructions.
    ideal : int
        Wavefronts without conflicts.

    Examples
    --------
    >>> Conflicts("read", "load32", instructions=2, wavefronts=8, ideal=2).conflicts
    6
    """

    name: str
    kind: str
    instructions: int
    wavefronts: int
    ideal: int

    @property
    def conflicts(self) -> int:
        """Wavefronts above the ideal."""
        return self.wavefronts - self.ideal


def report(accesses: Sequence[Access]) -> list[Conflicts]:
    """Return the conflicts of each access, in order.

    Examples
    --------
    >>> report([Access("read", "load32", np.arange(32) * 8)])[0].conflicts
    1
    """
    found = []
    for access in accesses:
        size, lanes = KINDS[access.kind]
        counts = [_count(instruction, size) for instruction in access.addresses.reshape(-1, lanes)]
        total, ideal = (sum(part) for part in zip(*counts, strict=True)) if counts else (0, 0)
        found.append(Conflicts(access.name, access.kind, len(counts), total, ideal))
    return found


def swizzled(row: Any, chunk: Any, row_bytes: int, swizzle: bool = True) -> Addresses:
    """Return the byte offset of a 16-byte chunk in a swizzled tile; twin of ``swizzled`` in ``device/copy.cuh``.

    Parameters
    ----------
    row, chunk : int or array_like
        Row and 16-byte chunk of the row.
    row_bytes : int
        Bytes of a row: 32, 64 or 128.
    swizzle : bool, default True
        Without it the tile is row-major.

    Examples
    --------
    >>> int(swizzled(1, 0, 128))
    144
    """
    chunks, rows_a_line = row_bytes // ROW_BYTES, BANKS * WORD // row_bytes
    row, chunk = np.asarray(row, dtype=np.int64), np.asarray(chunk, dtype=np.int64)
    return np.asarray(row * row_bytes + (chunk ^ (row // rows_a_line % chunks * swizzle)) * ROW_BYTES)
