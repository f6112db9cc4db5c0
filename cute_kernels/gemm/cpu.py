"""Dense integer product on a CPU: ``torch._int_mm``, one call per level of digit products."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.gemm.epilogue import apply_epilogue
from cute_kernels.gemm.problem import GemmProblem

_CHUNK = 2**53 // 2**14  # K up to which float64 sums products of two bytes exactly


@lru_cache
def int_mm_is_exact() -> bool:
    """Return whether ``torch._int_mm`` sums exactly here; some processors saturate sums of two products at 16 bits."""
    a, b = torch.full((17, 67), -128, dtype=torch.int8), torch.full((67, 33), 127, dtype=torch.int8)
    a[:, ::3] = 127
    try:
        return torch.equal(torch._int_mm(a, b).long(), a.long() @ b.long())
    except RuntimeError:
        return False


def _matmul(a: Tensor, b: Tensor, max_k: int) -> Tensor:
    """Return the exact product (M, N): int32 for K up to `max_k`, else int64."""
    # torch._int_mm does not write its output if a single row or column has both strides 1.
    a = a.reshape(-1).view(1, -1) if a.shape[0] == 1 else a  # (M, K)
    b = b.reshape(-1).view(-1, 1) if b.shape[1] == 1 else b.reshape(-1).view(1, -1) if b.shape[0] == 1 else b  # (K, N)
    k = a.shape[1]
    if not int_mm_is_exact():
        parts = (a[:, i : i + _CHUNK].double() @ b[i : i + _CHUNK].double() for i in range(0, k, _CHUNK))
        return sum((part.long() for part in parts), torch.zeros(a.shape[0], b.shape[1], dtype=torch.int64))
    if k <= max_k:
        return torch._int_mm(a, b)  # (M, N)
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int64)  # (M, N)
    for i in range(0, k, max_k):
        total += torch._int_mm(a[:, i : i + max_k], b[i : i + max_k])  # (M, N)
    return total


def _stack_rows(planes: list[Tensor]) -> Tensor:
    """Concatenate planes along K, (pairs K, N); contiguous columns stay contiguous, which saves a slow transpose."""
    if planes[0].stride(0) == 1:
        return torch.cat([plane.t() for plane in planes], dim=1).t()
    return torch.cat(planes, dim=0)


def level_sum(problem: GemmProblem, level: int, max_k: int) -> Tensor:
    """Return the exact sum of the products of one level, shape (M, N), by one product of planes concatenated along K.

    Parameters
    ----------
    problem : GemmProblem
        A product on a CPU.
    level : int
        ``i + j`` of the products ``a_i b_j``.
    max_k : int
        K up to which int32 cannot overflow.

    Returns
    -------
    Tensor, shape (M, N)
        int32 or int64.
    """
    pairs = problem.products.pairs(level)
    if len(pairs) == 1:
        return _matmul(problem.a[pairs[0][0]], problem.b[pairs[0][1]], max_k)
    a = torch.cat([problem.a[i] for i, _ in pairs], dim=1)  # (M, pairs K)
    return _matmul(a, _stack_rows([problem.b[j] for _, j in pairs]), max_k)


def gemm_cpu(problem: GemmProblem, max_k: int) -> Tensor:
    """Return the product, shape (M, N), in its output dtype; `max_k`: K up to which int32 cannot overflow."""
    total = level_sum(problem, 0, max_k)  # (M, N)
    if problem.is_integer:
        return total.to(problem.out_dtype)
    needs_float64 = problem.out_dtype == torch.float64 or total.dtype == torch.int64
    work = torch.float64 if needs_float64 else torch.float32
    result = total.to(work)  # (M, N)
    for level in range(1, problem.products.levels):
        result += level_sum(problem, level, max_k).to(work).mul_(2.0 ** (-problem.shift * level))  # (M, N)
    return apply_epilogue(problem, result, problem.alpha, problem.row_scale, problem.col_scale)
