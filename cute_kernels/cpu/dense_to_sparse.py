"""A matrix and a mask to the tensors of SR-BCRS by the CPU engine."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.cpu import _loaded, _threads, path


def _rows_of(x: Tensor) -> Tensor:
    """``x`` (M, K) with contiguous rows."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def compress(ints: Tensor, mask: Tensor, vector_length: int, stride: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The vectors with a true element in ``mask``, their values zero where it is false.

    ``ints``: (M, K) of one or two bytes an entry; ``mask``: bool (M, K); neither empty.  Returns ``row_start`` and
    ``row_end``, int64 (R,), ``col_indices``, int32, and the values (blocks, V, stride) of the dtype of ``ints``.
    """
    ints, mask = _rows_of(ints), _rows_of(mask)
    m, k = ints.shape
    count = -(-m // vector_length)
    lengths = torch.empty(count, dtype=torch.int64)

    def run(lengths: Tensor | None, starts: Tensor | None, columns: Tensor | None, values: Tensor | None) -> None:
        addresses = [0 if t is None else t.data_ptr() for t in (lengths, starts, columns, values)]
        _loaded().compress(
            path(), mask.data_ptr(), ints.data_ptr(), m, k, mask.stride(0), ints.stride(0) * ints.element_size(),
            ints.element_size(), vector_length, stride, *addresses, _threads(4 * m * k),
        )  # fmt: skip

    run(lengths, None, None, None)
    starts = torch.zeros(count + 1, dtype=torch.int64)
    torch.cumsum((lengths + stride - 1) // stride * stride, 0, out=starts[1:])
    total = int(starts[-1])
    columns = torch.empty(total, dtype=torch.int32)
    values = torch.empty(total // stride, vector_length, stride, dtype=ints.dtype)
    run(None, starts, columns, values)
    start = starts[:-1]
    return start, start + lengths, columns, values
