"""Dense integer product on a CPU: the engine on AVX2, ``torch._int_mm`` with VNNI where it is exact, else float32.

Without AVX512-VNNI, ``torch._int_mm`` is a scalar loop (1024^3: 8 s) or saturates sums of two products at 16 bits.
float32 products of at most 1024 columns of K are exact. On one AVX2 thread 1024^3 takes 16 ms in the engine and 24 ms
in float32. On a Xeon with AMX, which oneDNN uses, ``torch._int_mm`` takes 1.4 ms, the engine 3.4 by VNNI (by AMX 1.4,
once the right operand is packed), float32 16. A product of a single level whose scales are float32 is one call of the
engine, epilogue included. A packed right operand is the engine's: layers, and 4-bit operands.
"""

from __future__ import annotations

import os
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from cute_kernels.cpu import dense
from cute_kernels.cpu.extension import available, isa
from cute_kernels.gemm.epilogue import apply_epilogue
from cute_kernels.gemm.problem import GemmProblem

_FLOAT32_K = 2**24 // 2**14  # K up to which float32 sums products of two bytes exactly, in any order
_PACKED_PATHS = ("amx", "avx512", "avx_vnni", "avx2")  # on which the engine's dense product is faster than float32
_COPY = 4  # time to transpose an element of an operand by that to pack one


@lru_cache
def int_mm_is_exact() -> bool:
    """Return whether ``torch._int_mm`` sums exactly here: oneDNN saturates where it runs int8 without VNNI.

    It shifts one operand to unsigned bytes, so that all four corners of the range are tried, at two lengths of K.
    """
    for k, x, y in product((67, 256), (-128, 127), (-128, 127)):
        a, b = (
            torch.full((17, k), x, dtype=torch.int8, device="cpu"),
            torch.full((k, 33), y, dtype=torch.int8, device="cpu"),
        )
        try:
            if not bool((torch._int_mm(a, b) == k * x * y).all()):
                return False
        except RuntimeError:
            return False
    return True


def backends() -> list[str]:
    """Return what can multiply dense int8 matrices exactly on this CPU, the fastest one first.

    Examples
    --------
    >>> "float32" in backends()
    True
    """
    path = isa()
    found = ["torch._int_mm"] if path in ("amx", "avx512") and int_mm_is_exact() else []
    if path in _PACKED_PATHS:
        return [*found, "engine", "float32"]
    return [*found, "float32", *(["engine"] if available() else [])]


def packs_weights() -> bool:
    """Return whether layers multiply by packed dense weights in the engine: on AVX2 and what has more.

    ``MAGICUBE_GEMM`` can name another product.

    Examples
    --------
    >>> packs_weights() in (True, False)
    True
    """
    return os.environ.get("MAGICUBE_GEMM", "engine") == "engine" and isa() in _PACKED_PATHS


def dense_backend() -> str:
    """Return what multiplies dense int8 matrices: ``"engine"``, ``"torch._int_mm"`` or ``"float32"``, all exact.

    The environment variable ``MAGICUBE_GEMM`` names one. ``torch._int_mm`` needs AVX512-VNNI, which ``MAGICUBE_CPU``
    can forbid, and is tried for saturation once.

    Raises
    ------
    ValueError
        If ``MAGICUBE_GEMM`` names a product that is missing or not exact here.

    Examples
    --------
    >>> dense_backend() in ("engine", "torch._int_mm", "float32")
    True
    """
    named, usable = os.environ.get("MAGICUBE_GEMM"), backends()
    if named is None:
        return usable[0]
    if named not in usable:
        raise ValueError(f"MAGICUBE_GEMM must be one of {usable} on this machine, got {named!r}")
    return named


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


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return the product (M, N) by torch, int32."""
    # torch._int_mm does not write its output if a single row or column has both strides 1.
    a = a.reshape(-1).view(1, -1) if a.shape[0] == 1 else a  # (M, K)
    b = b.reshape(-1).view(-1, 1) if b.shape[1] == 1 else b.reshape(-1).view(1, -1) if b.shape[0] == 1 else b  # (K, N)
    return torch._int_mm(a, b)  # (M, N)


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """Return `x`, copied if its rows have gaps between elements."""
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def _is_swapped(a: Tensor, b: Tensor) -> bool:
    """Whether the product of the transposes, which packs A and reads B by columns, copies less."""
    copied_a = 0 if a.shape[1] <= 1 or a.stride(1) == 1 else a.numel()
    copied_b = 0 if b.shape[0] <= 1 or b.stride(0) == 1 else b.numel()
    return _COPY * copied_b + a.numel() < _COPY * copied_a + b.numel()


def _reads_packed(problem: GemmProblem, max_k: int) -> bool:
    """Whether the engine multiplies by the packed right operand of a product as it is."""
    is_single = problem.products.number == 1 and problem.shape[2] <= max_k
    named = os.environ.get("MAGICUBE_GEMM", "engine") == "engine"
    return problem.packed[1] is not None and is_single and named and available()


def cpu_backend(problem: GemmProblem, max_k: int) -> str:
    """Return what multiplies a product on a CPU, as :func:`dense_backend` names it."""
    return "engine" if _reads_packed(problem, max_k) else dense_backend()


def _packed_product(problem: GemmProblem) -> Tensor:
    """Return the product (M, N) by a packed right operand."""
    (left, right), (m, n, _) = problem.packed, problem.shape
    assert right is not None
    a = _with_contiguous_rows(problem.a[0] if left is None else left.ints())  # (M, K)
    if problem.is_integer:
        return dense.multiply(a, right.packed_right(), out_dtype=problem.out_dtype)
    if problem.alpha == 1.0 and problem.c is None and problem.out_dtype != torch.float64:
        return dense.multiply(
            a, right.packed_right(), row_scale=_vector(problem.row_scale, m), col_scale=_vector(problem.col_scale, n),
            bias=_vector(problem.bias, n), out_dtype=problem.out_dtype,
        )  # fmt: skip
    work = torch.float64 if problem.out_dtype == torch.float64 else torch.float32
    total = dense.multiply(a, right.packed_right()).to(work)  # (M, N)
    return apply_epilogue(problem, total, problem.alpha, problem.row_scale, problem.col_scale)


def _engine(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype = torch.int32,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    c: Tensor | None = None,
) -> Tensor:
    """Return the product (M, N) by the engine, scaled if the output is a float, plus `c` in float32."""
    out = None if c is None else c.clone(memory_format=torch.contiguous_format)
    if bias is None and _is_swapped(a, b):
        out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device="cpu") if out is None else out
        rows = _with_contiguous_rows(b.t())  # (N, K)
        dense.multiply(
            rows, dense.pack_right(a.t()), row_scale=col_scale, col_scale=row_scale, columns_first=True,
            out_dtype=out_dtype, out=out.t(), adds=c is not None,
        )  # fmt: skip
        return out
    return dense.multiply(
        _with_contiguous_rows(a), dense.pack_right(b), row_scale=row_scale, col_scale=col_scale, bias=bias,
        out_dtype=out_dtype, out=out, adds=c is not None,
    )  # fmt: skip


def _matmul(a: Tensor, b: Tensor, max_k: int) -> Tensor:
    """Return the exact product (M, N): int32 for K up to `max_k`, else int64."""
    backend, k = dense_backend(), a.shape[1]
    if backend == "float32":
        return _matmul_float32(a, b, max_k)
    multiply = _engine if backend == "engine" else _int_mm
    if k <= max_k:
        return multiply(a, b)
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int64, device="cpu")  # (M, N)
    for i in range(0, k, max_k):
        total += multiply(a[:, i : i + max_k], b[i : i + max_k])  # (M, N)
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


def _vector(x: Tensor | None, size: int) -> Tensor | None:
    """A scale or a bias as the engine reads it: float32, (size,), contiguous."""
    return None if x is None else x.to(torch.float32).expand(size).contiguous()


def _fused(problem: GemmProblem, max_k: int) -> Tensor | None:
    """Return the product by one call of the engine; None if another product or epilogue is wanted."""
    m, n, k = problem.shape
    several = problem.products.levels > 1 or len(problem.products.pairs(0)) > 1
    if several or k > max_k or problem.alpha != 1.0 or problem.out_dtype == torch.float64:
        return None
    c = problem.c
    if c is not None:  # the bias follows c, and half precision is rounded once
        in_float32 = c.dtype == problem.out_dtype == torch.float32
        if problem.beta != 1.0 or problem.bias is not None or not in_float32:
            return None
    if dense_backend() != "engine":
        return None
    vectors = _vector(problem.row_scale, m), _vector(problem.col_scale, n), _vector(problem.bias, n)
    return _engine(problem.a[0], problem.b[0], problem.out_dtype, *vectors, c)


def gemm_cpu(problem: GemmProblem, max_k: int) -> Tensor:
    """Return the product, shape (M, N), in its output dtype; `max_k`: K up to which int32 cannot overflow."""
    if _reads_packed(problem, max_k):
        return _packed_product(problem)
    problem = problem.unpacked()
    fused = _fused(problem, max_k)
    if fused is not None:
        return fused
    total = level_sum(problem, 0, max_k)  # (M, N)
    if problem.is_integer:
        return total.to(problem.out_dtype)
    needs_float64 = problem.out_dtype == torch.float64 or total.dtype == torch.int64
    work = torch.float64 if needs_float64 else torch.float32
    result = total.to(work)  # (M, N)
    for level in range(1, problem.products.levels):
        result += level_sum(problem, level, max_k).to(work).mul_(2.0 ** (-problem.shift * level))  # (M, N)
    return apply_epilogue(problem, result, problem.alpha, problem.row_scale, problem.col_scale)
