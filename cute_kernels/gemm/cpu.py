"""Dense integer product on a CPU, one call per level of digit products: ``torch._int_mm`` with VNNI, else float32.

Without AVX512-VNNI, ``torch._int_mm`` is a scalar loop (1024^3: 8 s) or saturates sums of two products at 16 bits.
float32 products of at most 1024 columns of K are exact there, as fast as ``torch.mm`` in float32 and as the engine's
own SpMM of a matrix without zeros (1024^3 on one AVX2 thread: 28 ms each).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from cute_kernels.cpu.extension import isa
from cute_kernels.gemm.epilogue import apply_epilogue
from cute_kernels.gemm.problem import GemmProblem

_FLOAT32_K = 2**24 // 2**14  # K up to which float32 sums products of two bytes exactly, in any order


@lru_cache
def int_mm_is_exact() -> bool:
    """Return whether ``torch._int_mm`` sums exactly here: oneDNN saturates where it runs int8 without VNNI.

    It shifts one operand to unsigned bytes, so that all four corners of the range are tried, at two lengths of K.
    """
    for k, x, y in product((67, 256), (-128, 127), (-128, 127)):
        a, b = torch.full((17, k), x, dtype=torch.int8), torch.full((k, 33), y, dtype=torch.int8)
        try:
            if not bool((torch._int_mm(a, b) == k * x * y).all()):
                return False
        except RuntimeError:
            return False
    return True


def dense_backend() -> str:
    """Return what multiplies dense int8 matrices on this CPU: ``"torch._int_mm"`` or ``"float32"``, both exact.

    ``torch._int_mm`` needs AVX512-VNNI, which ``MAGICUBE_CPU`` can forbid, and is tried for saturation once.

    Examples
    --------
    >>> dense_backend() in ("torch._int_mm", "float32")
    True
    """
    return "torch._int_mm" if isa() == "avx512" and int_mm_is_exact() else "float32"


def _matmul_float32(a: Tensor, b: Tensor, max_k: int) -> Tensor:
    """Return the exact product (M, N) by float32 products of ranges of K that no rounding reaches."""
    k = a.shape[1]
    wide = torch.int32 if k <= max_k else torch.int64
    total: Tensor | None = None
    for i in range(0, max(k, 1), _FLOAT32_K):
        part = (a[:, i : i + _FLOAT32_K].float() @ b[i : i + _FLOAT32_K].float()).to(wide)  # (M, N)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _matmul(a: Tensor, b: Tensor, max_k: int) -> Tensor:
    """Return the exact product (M, N): int32 for K up to `max_k`, else int64."""
    if dense_backend() == "float32":
        return _matmul_float32(a, b, max_k)
    # torch._int_mm does not write its output if a single row or column has both strides 1.
    a = a.reshape(-1).view(1, -1) if a.shape[0] == 1 else a  # (M, K)
    b = b.reshape(-1).view(-1, 1) if b.shape[1] == 1 else b.reshape(-1).view(1, -1) if b.shape[0] == 1 else b  # (K, N)
    k = a.shape[1]
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
