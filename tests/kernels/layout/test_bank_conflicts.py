"""The model of shared memory's banks on known cases."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.layout.bank_conflicts import Access, ldmatrix_wavefronts, report, wavefronts

LANES = np.arange(32)


@pytest.mark.parametrize(
    ("addresses", "size", "expected"),
    [
        (LANES, 1, 1),
        (LANES * 2, 2, 1),
        (LANES * 4, 4, 1),
        (LANES * 8, 8, 2),
        (LANES * 16, 16, 4),
        (LANES * 0, 4, 1),  # one word to all lanes
        (LANES * 0, 16, 4),
        (LANES % 2 * 128, 4, 2),  # two words of one bank
        (LANES // 4 * 128, 4, 8),  # eight rows of 128 bytes, one word each
        (LANES // 4 * 128 + LANES % 4 * 4, 4, 8),
        (LANES // 4 * 144 + LANES % 4 * 4, 4, 1),  # rows padded by 16 bytes
        (LANES * 128, 4, 32),
        (LANES * 128, 1, 32),
        (LANES * 8, 4, 2),
        (LANES * 32, 4, 8),
        (LANES * 33 * 4, 4, 1),
        (LANES * 64, 8, 16),  # 16 lanes on two pairs of banks, twice
        (LANES // 8 * 512 + LANES % 8 * 16, 16, 4),
        (LANES * 128, 16, 32),
        (np.where(LANES < 16, LANES * 8, -1), 8, 1),  # half a warp takes part
        (np.where(LANES == 5, 64, -1), 16, 1),
        (np.full(32, -1), 4, 0),
    ],
)
def test_known_accesses(addresses: np.ndarray, size: int, expected: int) -> None:
    assert wavefronts(addresses, size) == expected
    assert wavefronts(addresses + np.where(addresses >= 0, 256, 0), size) == expected


def swizzled(rows: np.ndarray, row_bytes: int, unit: int) -> np.ndarray:
    """Addresses of one 16-byte unit of each row, rows swizzled as TMA does."""
    moved = unit ^ (rows % 8 if row_bytes == 128 else rows // 2 % 4)
    return rows * row_bytes + 16 * moved


@pytest.mark.parametrize("row_bytes", [64, 128])
def test_ldmatrix_of_swizzled_rows(row_bytes: int) -> None:
    pytest.importorskip("pycute")
    from cute_kernels.layout.fragments import swizzle

    move = swizzle(row_bytes)
    rng = np.random.default_rng(0)
    for unit in range(row_bytes // 16):
        assert [move(row * row_bytes + 16 * unit) for row in range(32)] == swizzled(LANES, row_bytes, unit).tolist()
        assert ldmatrix_wavefronts(swizzled(LANES, row_bytes, unit), 4) == 4
        gathered = rng.permutation(8) + 8 * rng.integers(0, 64, 8)  # distinct mod 8
        assert ldmatrix_wavefronts(swizzled(gathered, row_bytes, unit), 1) == 1
        assert ldmatrix_wavefronts(swizzled(8 * gathered, row_bytes, unit), 1) == 8
        assert ldmatrix_wavefronts(swizzled(np.array([0, 1, 2, 3, 4, 5, 6, 14]), row_bytes, unit), 1) == 2
    assert ldmatrix_wavefronts(np.arange(8) * row_bytes, 1) == (8 if row_bytes == 128 else 4)  # not swizzled


@given(st.lists(st.integers(0, 255), min_size=32, max_size=32), st.sampled_from([1, 2, 4, 8, 16]))
def test_order_of_lanes_of_a_phase_does_not_matter(places: list[int], size: int) -> None:
    addresses = np.array(places) * size
    phases = max(1, size // 4)
    count = wavefronts(addresses, size)
    assert phases <= count <= 32
    mixed = addresses.reshape(phases, -1)[:, ::-1].reshape(-1)
    parts = [np.where(LANES * phases // 32 == phase, addresses, -1) for phase in range(phases)]
    assert wavefronts(mixed, size) == count == sum(wavefronts(part, size) for part in parts)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: wavefronts(LANES, 3), ValueError, "bytes_per_lane must be 1, 2, 4, 8 or 16, got 3"),
        (lambda: wavefronts(LANES, 4), ValueError, "multiples of the 4 bytes accessed, got 1"),
        (lambda: wavefronts(LANES[:8], 1), ValueError, "32 entries in the last dimension, got shape (8,)"),
        (lambda: wavefronts(LANES * 4.0, 4), TypeError, "addresses must be integers, got float64"),
        (lambda: ldmatrix_wavefronts(LANES * 16, 3), ValueError, "count must be 1, 2 or 4, got 3"),
        (lambda: ldmatrix_wavefronts(LANES * 16, 2), ValueError, "16 entries in the last dimension, got shape (32,)"),
        (lambda: Access("x", "load32b", LANES), ValueError, "got 'load32b'"),
        (lambda: Access("x", "load32", LANES), ValueError, "multiples of the 4 bytes accessed, got 1"),
    ],
)
def test_wrong_accesses_raise(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_report_sums_over_instructions() -> None:
    rows = np.stack([LANES * 128, LANES * 144])
    good, bad, empty = report(
        [
            Access("copy", "store128", LANES * 16),
            Access("fragments", "ldmatrix.x4", rows),
            Access("none", "load32", np.zeros((0, 32), dtype=int)),
        ]
    )
    assert (good.name, good.kind, good.instructions, good.wavefronts, good.conflicts) == ("copy", "store128", 1, 4, 0)
    assert (bad.instructions, bad.wavefronts, bad.ideal, bad.conflicts) == (2, 36, 8, 28)
    assert (empty.instructions, empty.wavefronts, empty.conflicts) == (0, 0, 0)
