"""The order of columns for kernels with a window of tiles, by the CPU engine."""

from __future__ import annotations

from torch import Tensor

from cute_kernels.cpu import _loaded, _threads

_WORK_OF_COLUMN = 1 << 14  # multiply-adds that ordering one is worth


def spread_slots(until: Tensor, first: Tensor, order: Tensor, group: int, window: int, slots: Tensor) -> None:
    """Fill ``slots``; shapes as in ``layout/column_order.cuh``."""
    rows, tiles = until.shape[:2]
    threads = _threads(_WORK_OF_COLUMN * order.numel())
    _loaded().spread_slots(
        until.data_ptr(), first.data_ptr(), order.data_ptr(), rows, tiles, group, window, slots.data_ptr(), threads
    )
