"""Cross terms ``A1 B0 + A0 B1`` of two digits, in part: over chosen columns of k, or over large entries."""

from __future__ import annotations

import torch
from torch import Tensor

from magicube_cutlass import SRBCRS, QuantTensor, spmm
from residual.operand.operand import Digits

_INT32_K = 2**17 - 1  # K whose products of two 8-bit integers int32 sums


def cross_digits(a: Digits, b: Digits, chosen: Tensor) -> tuple[Digits, Digits]:
    """Return digits (M, 2 S) and (N, 2 S) whose one product is the cross terms over S chosen columns of k.

    Examples
    --------
    >>> planes, scale = tuple(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)[:, None]), torch.ones(1)
    >>> a, b = cross_digits(Digits(planes, scale), Digits(planes, scale), torch.tensor([1]))
    >>> a.planes[0].tolist(), b.planes[0].tolist()
    ([[2, 4]], [[4, 2]])
    """
    lhs = torch.cat([plane[:, chosen] for plane in a.planes], 1)  # (M, 2 S)
    rhs = torch.cat([plane[:, chosen] for plane in reversed(b.planes)], 1)  # (N, 2 S)
    return Digits((lhs,), a.scale), Digits((rhs,), b.scale)


def sparse_product(large: Tensor, small: Tensor, threshold: int) -> Tensor:
    """Return ``(entries of large at or above the threshold) @ small^T``: (L, K), (R, K) to (L, R), exact.

    Examples
    --------
    >>> sparse_product(torch.tensor([[3, 9]], dtype=torch.int8), torch.tensor([[5, 7]], dtype=torch.int8), 4).tolist()
    [[63]]
    """
    length = 8 if large.is_cuda else 1
    kept = large.abs() >= threshold  # (L, K)
    kept |= large == -128  # it has no magnitude among bytes; leading digits reach it in int8 input only
    matrix = SRBCRS.from_mask(large, kept, vector_length=length, bits=8)
    matrix.single_use = True
    wide = torch.int32 if large.shape[1] <= _INT32_K else torch.int64
    return spmm(matrix, QuantTensor.from_ints(small.mT, bits=8), out_dtype=wide)  # (L, R)
