"""Dense integer product with fused scales: int8 digit planes in, integers or floats out, on CPU and GPU.

Source: Li, Osawa, Hoefler, SC'22, section IV-D (products of digits); Gu, arXiv 2403.06924 (residuals as digits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.gemm.config import MAX_PLANES, MAX_PRODUCTS, GemmConfig, products_of
from cute_kernels.gemm.cpu import gemm_cpu, int_mm_is_exact
from cute_kernels.gemm.cuda import can_emit_sum_of_squares, gemm_cuda, plan_cuda, sum_of_squares_size
from cute_kernels.gemm.problem import GemmProblem, check_float_tensor, check_output, empty_product

Planes = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class GemmPlan:
    """How a product would run.

    ``kernel``: ``torch._int_mm``, ``float64`` or the name of ``config``; ``products``: of digits; ``copies``: planes
    that are first copied into rows of k (``a0``, ``b1``, ...); ``chunks``: parts of K that are multiplied one after
    the other; ``workspace``: bytes.
    """

    kernel: str
    products: int
    copies: tuple[str, ...] = ()
    chunks: int = 1
    workspace: int = 0
    config: GemmConfig | None = None


def _planes(x: Planes, name: str) -> tuple[Tensor, ...]:
    planes = (x,) if isinstance(x, Tensor) else tuple(x)
    if not 1 <= len(planes) <= MAX_PLANES:
        raise ValueError(f"{name} must have 1 to {MAX_PLANES} digit planes, got {len(planes)}")
    for i, plane in enumerate(planes):
        label = f"{name}[{i}]" if len(planes) > 1 else name
        if not isinstance(plane, Tensor):
            raise TypeError(f"{label} must be a tensor, got {type(plane).__name__}")
        if plane.dtype != torch.int8:
            raise TypeError(f"{label} must be int8, got {plane.dtype}")
        if plane.dim() != 2:
            raise ValueError(f"{label} must have 2 dimensions, got {plane.dim()}")
        if plane.shape != planes[0].shape:
            raise ValueError(
                f"{label} must have the shape {tuple(planes[0].shape)} of {name}[0], got {tuple(plane.shape)}"
            )
    return planes


def _scale(
    x: Tensor | float | None, name: str, size: int, device: torch.device, wide: bool
) -> tuple[Tensor | None, float]:
    """A tensor of factors, and the factor that goes into alpha."""
    if x is None:
        return None, 1.0
    if isinstance(x, Tensor):
        return check_float_tensor(x, name, ((size,), ()), device, wide), 1.0
    return None, float(x)


def _check_integral(problem: GemmProblem) -> None:
    """Integer outputs hold the plain sum."""
    dtype, k = problem.out_dtype, problem.shape[2]
    if problem.products.number != 1:
        raise ValueError(f"terms must be 1 for out_dtype {dtype}, got {problem.products.number}")
    given = {"scale_a": problem.scale_a, "scale_b": problem.scale_b, "c": problem.c, "bias": problem.bias}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} must be None for out_dtype {dtype}: a scaled sum is no integer")
    if problem.alpha != 1.0:
        raise ValueError(f"alpha times scales must be 1 for out_dtype {dtype}, got {problem.alpha}")
    if dtype == torch.int32 and k > MAX_PRODUCTS:
        raise ValueError(f"K must be at most {MAX_PRODUCTS} for out_dtype torch.int32, which may overflow, got K = {k}")


def _check_squares(problem: GemmProblem, sum_of_squares: Tensor) -> None:
    """Sums of sum_of_squares are left by one kernel, of a plain product in float32."""
    if problem.out_dtype != torch.float32 or problem.c is not None or problem.bias is not None:
        raise ValueError(
            f"sum_of_squares must be None unless out_dtype is torch.float32 without c and bias, got {problem.out_dtype}"
        )
    if problem.device.type != "cuda" or not can_emit_sum_of_squares(problem.shape[2], problem.products, problem.device):
        raise ValueError(
            f"sum_of_squares must be None on {problem.device} for K = {problem.shape[2]}: can_emit_sum_of_squares tells"
        )
    room, pinned = (
        sum_of_squares_size(problem.device),
        sum_of_squares.device == problem.device or sum_of_squares.is_pinned(),
    )
    if (
        sum_of_squares.dtype != torch.float32
        or sum_of_squares.numel() < room
        or not sum_of_squares.is_contiguous()
        or not pinned
    ):
        raise ValueError(
            f"sum_of_squares must be contiguous float32 of at least {room} entries, on {problem.device} or pinned, got "
            f"{sum_of_squares.dtype} of {sum_of_squares.numel()} on {sum_of_squares.device}"
        )


def _check(
    a: Planes,
    b: Planes,
    terms: int | None,
    shift: int,
    scale_a: Tensor | float | None,
    scale_b: Tensor | float | None,
    alpha: float,
    beta: float,
    c: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype,
    sum_of_squares: Tensor | None = None,
) -> GemmProblem:
    """The product that the arguments of :func:`gemm` describe."""
    left, right = _planes(a, "a"), _planes(b, "b")
    device = left[0].device
    for name, planes in (("a", left), ("b", right)):
        for plane in planes:
            if plane.device != device:
                raise ValueError(f"all planes must be on {device} as a is, got one of {name} on {plane.device}")
    (m, k), (rows, n) = left[0].shape, right[0].shape
    if k != rows:
        raise ValueError(f"columns of a must be rows of b, got {k} and {rows}")
    if not isinstance(shift, int) or not 0 <= shift <= 16:
        raise ValueError(f"shift must be an integer from 0 to 16, got {shift!r}")
    check_output(out, out_dtype, (m, n), device, integers=True)
    wide = out_dtype == torch.float64
    factors_a, number_a = _scale(scale_a, "scale_a", m, device, wide)
    factors_b, number_b = _scale(scale_b, "scale_b", n, device, wide)
    if beta != 0.0 and c is None:
        raise ValueError(f"c must be given for beta {beta}")
    if c is not None:
        c = check_float_tensor(c, "c", ((m, n),), device, wide) if beta != 0.0 else None
    if bias is not None:
        bias = check_float_tensor(bias, "bias", ((n,),), device, wide)
    products = products_of(len(left), len(right), terms)
    left, right = left[: products.planes_a], right[: products.planes_b]
    scale = float(alpha) * number_a * number_b
    problem = GemmProblem(
        left, right, products, shift, factors_a, factors_b, scale, float(beta), c, bias, out, out_dtype, sum_of_squares
    )
    if problem.is_integer:
        _check_integral(problem)
    if sum_of_squares is not None:
        _check_squares(problem, sum_of_squares)
    return problem


def gemm(
    a: Planes,
    b: Planes,
    *,
    terms: int | None = None,
    shift: int = 8,
    scale_a: Tensor | float | None = None,
    scale_b: Tensor | float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.int32,
    sum_of_squares: Tensor | None = None,
) -> Tensor:
    """``D[m, n] = alpha s_a[m] s_b[n] sum_ij 2^(-shift (i + j)) sum_k a_i[m, k] b_j[k, n] + beta c[m, n] + bias[n]``.

    Every sum over k is exact, whatever K is.  The levels ``i + j`` meet as float32, or as float64 on the CPU where the
    output is float64 or K is long; one GPU kernel computes all of them.

    Arguments:
        a: int8 (M, K), or a tuple of up to three digit planes of this shape, the leading one first; any strides.
        b: likewise (K, N).
        terms: digit products: 1: a0 b0; 3: those with i + j <= 1; 4: all of two planes each; 6: those with i + j <= 2
            of three planes each.  None: 1, 3, 6 for 1, 2, 3 planes.  With unequal numbers of planes, such as 2 and 1,
            the number of products with i + j below 1, 2 or 3: here 1 or 2.
        shift: bits of a digit, 0 to 16.
        scale_a, scale_b: factors of rows (M,) and of columns (N,), one factor as a tensor (), or a number.
        alpha, beta, c: as in BLAS; ``c`` (M, N) of a float dtype is not read where ``beta`` is 0, and may be ``out``.
        bias: (N,).
        out: (M, N) of ``out_dtype`` to write to; its rows must not have gaps between elements.
        out_dtype: int32 or int64 for the plain sum of one product; float16, bfloat16, float32, on the CPU float64.
        sum_of_squares: where ``cute_kernels.gemm.cuda.can_emit_sum_of_squares``, float32 on the GPU or in pinned memory, zeros:
            the kernel writes parts of ``||D||_F^2`` to some of its entries, of which there must be
            ``cute_kernels.gemm.cuda.sum_of_squares_size``.
    Scales, ``c`` and ``bias`` are float32, float16 or bfloat16, with float64 output float64 too.
    4-bit integers are int8 tensors with values in [-8, 7].

    On a GPU, planes of ``a`` whose rows, and of ``b`` whose columns, are not contiguous in k, or do not start at
    multiples of 16 bytes, are first copied (the workspace is as large as the plane); :func:`explain_gemm` tells.
    Raises ``TypeError`` and ``ValueError`` that name the argument; among them ``ValueError`` for int32 output where K
    is so large that it may overflow.
    """
    problem = _check(a, b, terms, shift, scale_a, scale_b, alpha, beta, c, bias, out, out_dtype, sum_of_squares)
    m, n, k = problem.shape
    if problem.device.type == "cpu":
        result = gemm_cpu(problem, MAX_PRODUCTS)
        return result if out is None else out.copy_(result)
    if problem.device.type != "cuda":
        raise NotImplementedError(f"a must be on a CPU or a CUDA device, got {problem.device}")
    target = torch.empty((m, n), dtype=out_dtype, device=problem.device) if out is None else out
    if min(m, n, k) == 0:
        return empty_product(problem.c, problem.beta, problem.bias, target)
    return gemm_cuda(problem, target)


def explain_gemm(a: Planes, b: Planes, *, terms: int | None = None, out_dtype: torch.dtype = torch.int32) -> GemmPlan:
    """How :func:`gemm` would run these arguments; nothing is computed or compiled."""
    problem = _check(a, b, terms, 8, None, None, 1.0, 0.0, None, None, None, out_dtype)
    if problem.device.type == "cpu":
        chunks = max(1, -(-problem.shape[2] // MAX_PRODUCTS))
        return GemmPlan("torch._int_mm" if int_mm_is_exact() else "float64", problem.products.number, chunks=chunks)
    config, copies, workspace, chunks = plan_cuda(problem)
    return GemmPlan(config.name, problem.products.number, copies, chunks, workspace, config)
