"""Dense integer product on the CPU: ``torch._int_mm``, one call a level of digit products."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.gemm.problem import Call

_CHUNK = 2**53 // 2**14  # products of two bytes that float64 sums exactly


@lru_cache
def int_mm_is_exact() -> bool:
    """Whether ``torch._int_mm`` gives exact sums here; some processors sum pairs of products in 16 bits, saturating."""
    a, b = torch.full((17, 67), -128, dtype=torch.int8), torch.full((67, 33), 127, dtype=torch.int8)
    a[:, ::3] = 127
    try:
        return torch.equal(torch._int_mm(a, b).long(), a.long() @ b.long())
    except RuntimeError:
        return False


def _sum(a: Tensor, b: Tensor, longest: int) -> Tensor:
    """a b, exact: int32 up to ``longest`` products, int64 beyond."""
    # torch._int_mm leaves its output as it was for a single row, or column, whose strides are both 1
    a = a.reshape(-1).view(1, -1) if a.shape[0] == 1 else a
    b = b.reshape(-1).view(-1, 1) if b.shape[1] == 1 else b.reshape(-1).view(1, -1) if b.shape[0] == 1 else b
    k = a.shape[1]
    if not int_mm_is_exact():
        parts = (a[:, i : i + _CHUNK].double() @ b[i : i + _CHUNK].double() for i in range(0, k, _CHUNK))
        return sum((part.long() for part in parts), torch.zeros(a.shape[0], b.shape[1], dtype=torch.int64))
    if k <= longest:
        return torch._int_mm(a, b)  # (M, N)
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int64)
    for i in range(0, k, longest):
        total += torch._int_mm(a[:, i : i + longest], b[i : i + longest])  # (M, N)
    return total


def _below(planes: list[Tensor]) -> Tensor:
    """Planes one below the other, (pairs K, N); columns that are contiguous stay so, because to turn them is slow."""
    if planes[0].stride(0) == 1:
        return torch.cat([plane.t() for plane in planes], dim=1).t()
    return torch.cat(planes, dim=0)


def level_sum(call: Call, level: int, longest: int) -> Tensor:
    """Sum of the products of one level, exact: its planes lie side by side along k, so that one product gives it."""
    pairs = call.products.pairs(level)
    if len(pairs) == 1:
        return _sum(call.a[pairs[0][0]], call.b[pairs[0][1]], longest)
    a = torch.cat([call.a[i] for i, _ in pairs], dim=1)  # (M, pairs K)
    return _sum(a, _below([call.b[j] for _, j in pairs]), longest)


def gemm_cpu(call: Call, longest: int) -> Tensor:
    """The product, in the dtype that is asked for; ``longest``: products that int32 sums without overflow."""
    total = level_sum(call, 0, longest)  # (M, N)
    if call.integral:
        return total.to(call.out_dtype)
    wide = call.out_dtype == torch.float64 or total.dtype == torch.int64
    work = torch.float64 if wide else torch.float32
    result = total.to(work)  # (M, N)
    for level in range(1, call.products.levels):
        result += level_sum(call, level, longest).to(work).mul_(2.0 ** (-call.shift * level))  # (M, N)
    if call.scale_a is not None:
        result *= call.scale_a.to(work)[:, None] if call.scale_a.dim() else call.scale_a  # (M, 1)
    if call.scale_b is not None:
        result *= call.scale_b.to(work)  # (N,)
    if call.alpha != 1.0:
        result *= call.alpha
    if call.c is not None:
        result.add_(call.c.to(work), alpha=call.beta)  # (M, N)
    if call.bias is not None:
        result += call.bias.to(work)  # (N,)
    return result.to(call.out_dtype)
