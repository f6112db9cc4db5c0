"""Dense integer product on the CPU: ``torch._int_mm``, one call a level of digit products."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.gemm.problem import GemmProblem

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


def level_sum(problem: GemmProblem, level: int, longest: int) -> Tensor:
    """Sum of the products of one level, exact: its planes lie side by side along k, so that one product gives it."""
    pairs = problem.products.pairs(level)
    if len(pairs) == 1:
        return _sum(problem.a[pairs[0][0]], problem.b[pairs[0][1]], longest)
    a = torch.cat([problem.a[i] for i, _ in pairs], dim=1)  # (M, pairs K)
    return _sum(a, _below([problem.b[j] for _, j in pairs]), longest)


def gemm_cpu(problem: GemmProblem, longest: int) -> Tensor:
    """The product, in the dtype that is asked for; ``longest``: products that int32 sums without overflow."""
    total = level_sum(problem, 0, longest)  # (M, N)
    if problem.is_integer:
        return total.to(problem.out_dtype)
    wide = problem.out_dtype == torch.float64 or total.dtype == torch.int64
    work = torch.float64 if wide else torch.float32
    result = total.to(work)  # (M, N)
    for level in range(1, problem.products.levels):
        result += level_sum(problem, level, longest).to(work).mul_(2.0 ** (-problem.shift * level))  # (M, N)
    if problem.scale_a is not None:
        result *= problem.scale_a.to(work)[:, None] if problem.scale_a.dim() else problem.scale_a  # (M, 1)
    if problem.scale_b is not None:
        result *= problem.scale_b.to(work)  # (N,)
    if problem.alpha != 1.0:
        result *= problem.alpha
    if problem.c is not None:
        result.add_(problem.c.to(work), alpha=problem.beta)  # (M, N)
    if problem.bias is not None:
        result += problem.bias.to(work)  # (N,)
    return result.to(problem.out_dtype)
