"""Host model of shared memory's banks: how many passes (*wavefronts*) an access of a warp takes.

Shared memory has 32 banks of 4 bytes; word ``w`` lies in bank ``w mod 32``.  In one pass each bank serves one word to
any number of lanes.  Accesses of 8 bytes a lane go half a warp at a time, of 16 bytes a quarter at a time, and
``ldmatrix`` one 8 x 8 matrix, that is 8 rows of 16 bytes, at a time.
Source: CUDA C++ Programming Guide, "Shared Memory".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BANKS = 32
WORD = 4
WARP = 32
MATRIX_ROWS, ROW_BYTES = 8, 16

Addresses = np.ndarray[Any, np.dtype[np.int64]]

# kind -> bytes a lane (row) reads or writes, and the lanes (rows) of one instruction
KINDS = {
    **{f"{verb}{8 * size}": (size, WARP) for verb in ("load", "store") for size in (1, 2, 4, 8, 16)},
    **{f"ldmatrix.x{count}": (ROW_BYTES, MATRIX_ROWS * count) for count in (1, 2, 4)},
}


def _phases(addresses: Addresses, size: int) -> Addresses:
    """``addresses`` (..., lanes) as (..., phases, lanes a phase): so many lanes as fill all banks at most once."""
    lanes = min(addresses.shape[-1], BANKS * WORD // max(size, WORD))
    return addresses.reshape(*addresses.shape[:-1], -1, lanes)


def _count(addresses: Addresses, size: int) -> tuple[int, int]:
    """``(wavefronts, ideal)``: passes that one instruction takes, and its phases with a lane that takes part."""
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
    """Passes that one load or store of a warp takes.

    ``addresses``: integers (32,), byte addresses in shared memory by lane, multiples of ``bytes_per_lane``; a negative
    one is a lane that takes no part.  ``bytes_per_lane``: 1, 2, 4, 8 or 16.  Without conflicts the result is 1 up to 4
    bytes, 2 for 8 and 4 for 16.
    Raises ``ValueError`` for another size, number of lanes or alignment, ``TypeError`` for addresses that are no
    integers.
    """
    if bytes_per_lane not in (1, 2, 4, 8, 16):
        raise ValueError(f"bytes_per_lane must be 1, 2, 4, 8 or 16, got {bytes_per_lane!r}")
    return _count(_checked(addresses, bytes_per_lane, WARP), bytes_per_lane)[0]


def ldmatrix_wavefronts(rows: Any, count: int) -> int:
    """Passes that ``ldmatrix`` of ``count`` (1, 2, 4) matrices takes; ``count`` without conflicts.

    ``rows``: integers (8 * count,), byte addresses of the rows of 16 bytes, in the order of the lanes that give them.
    Raises as :func:`wavefronts` does.
    """
    if count not in (1, 2, 4):
        raise ValueError(f"count must be 1, 2 or 4, got {count!r}")
    return _count(_checked(rows, ROW_BYTES, MATRIX_ROWS * count), ROW_BYTES)[0]


@dataclass(frozen=True, eq=False)
class Access:
    """An access to shared memory in a kernel: a name for the reader, a kind of :data:`KINDS`, and byte addresses.

    ``addresses``: integers (lanes,) of one instruction, or (instructions, lanes) of several; lanes are 32, or for
    ``ldmatrix.x4`` the 32 rows.  Raises ``ValueError`` for an unknown kind, and as :func:`wavefronts` does.
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
    """Passes of one :class:`Access`, summed over its instructions; ``ideal`` is what they take without conflicts."""

    name: str
    kind: str
    instructions: int
    wavefronts: int
    ideal: int

    @property
    def conflicts(self) -> int:
        """Passes beyond the ideal."""
        return self.wavefronts - self.ideal


def report(accesses: Sequence[Access]) -> list[Conflicts]:
    """The conflicts of each access, in order."""
    found = []
    for access in accesses:
        size, lanes = KINDS[access.kind]
        counts = [_count(instruction, size) for instruction in access.addresses.reshape(-1, lanes)]
        total, ideal = (sum(part) for part in zip(*counts, strict=True)) if counts else (0, 0)
        found.append(Conflicts(access.name, access.kind, len(counts), total, ideal))
    return found


def swizzled(row: Any, chunk: Any, row_bytes: int, swizzle: bool = True) -> Addresses:
    """Byte at which 16-byte piece ``chunk`` of row ``row`` lies in a tile of rows of 32, 64 or 128 bytes.

    The host's twin of ``swizzled`` in ``device/copy.cuh``; rows and pieces are integers or arrays of them.
    """
    chunks, rows_a_line = row_bytes // ROW_BYTES, BANKS * WORD // row_bytes
    row, chunk = np.asarray(row, dtype=np.int64), np.asarray(chunk, dtype=np.int64)
    return np.asarray(row * row_bytes + (chunk ^ (row // rows_a_line % chunks * swizzle)) * ROW_BYTES)
