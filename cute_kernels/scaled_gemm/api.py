"""Dense product of small floats: any two of e5m2, e4m3, e3m2, e2m3 and e2m1, with scales of many kinds.

Source: OCP Microscaling Formats (MX) v1.0, section 6 (block scales).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.gemm.problem import check_float_tensor, check_output, empty_product
from cute_kernels.scaled_gemm.config import ScaledGemmConfig
from cute_kernels.scaled_gemm.cuda import dequantized_operands, plan_cuda, scaled_gemm_cuda
from cute_kernels.scaled_gemm.operand import FloatOperand, ScaledGemmProblem
from cute_kernels.scaled_gemm.sm100 import Tcgen05Config
from cute_kernels.scaled_gemm.small_m import SmallMConfig


@dataclass(frozen=True)
class ScaledGemmPlan:
    """How a product would run: ``kernel`` is ``torch.matmul`` or the name of ``config``; ``copies``: operands whose
    codes are copied first, so that their rows start at multiples of 16 bytes; ``decoded``: operands that a
    kernel of its own decodes first, because of many rows; ``refused``: on sm_100a and sm_103a, what keeps the operands
    from ``tcgen05.mma``."""

    kernel: str
    copies: tuple[str, ...] = ()
    decoded: tuple[str, ...] = ()
    config: ScaledGemmConfig | SmallMConfig | Tcgen05Config | None = None
    refused: str = ""


def check(
    a: FloatOperand,
    b: FloatOperand,
    alpha: float,
    beta: float,
    c: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> ScaledGemmProblem:
    """The product that the arguments of :func:`scaled_gemm` describe."""
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, FloatOperand):
            raise TypeError(f"{name} must be a FloatOperand, got {type(operand).__name__}")
    if a.k != b.k:
        raise ValueError(f"k of a must be k of b, got {a.k} and {b.k}")
    if a.device != b.device:
        raise ValueError(f"b must be on {a.device} as a is, got {b.device}")
    shape, wide = (a.rows, b.rows), out_dtype == torch.float64
    check_output(out, out_dtype, shape, a.device, integers=False)
    if beta != 0.0 and c is None:
        raise ValueError(f"c must be given for beta {beta}")
    c = check_float_tensor(c, "c", (shape,), a.device, wide) if c is not None and beta != 0.0 else None
    if bias is not None:
        bias = check_float_tensor(bias, "bias", ((b.rows,),), a.device, wide)
    return ScaledGemmProblem(a, b, float(alpha), float(beta), c, bias, out_dtype, fast_accum)


def scaled_gemm(
    a: FloatOperand,
    b: FloatOperand,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    fast_accum: bool = False,
) -> Tensor:
    """``D[m, n] = alpha sum_k a[m, k] b[n, k] + beta c[m, n] + bias[n]`` with a and b as :class:`FloatOperand` says.

    Arguments:
        a: operand of M rows.
        b: operand of N rows: the columns of the right matrix, each contiguous in k.
        alpha, beta, c: as in BLAS; ``c`` (M, N) of a float dtype is not read where ``beta`` is 0, and may be ``out``.
        bias: (N,).
        out: (M, N) of ``out_dtype`` to write to; its rows must not have gaps between elements.
        out_dtype: float32, float16, bfloat16, on the CPU float64.
        fast_accum: on sm_90a without block scales, the Tensor Cores sum all of K, with about 14 bits; otherwise, and by
            the kernel of few rows, 128 of K at a time, and float32 additions do the rest.
    PackedMatrix are decoded exactly.  On sm_90a, operands without block scales are multiplied as e4m3 or e5m2; the partial
    sums are then kept to about 2^-13 of the largest of them or of the products (docs/floats.md has the bound).  With
    block scales, and on other chips, values and scales become bfloat16, exactly but for magnitudes outside of
    2^-126..2^128, and sums are those of float32.  On sm_100a and sm_103a, operands that ``tcgen05.mma`` can read are
    multiplied as they are, scales of blocks, which have to be positive, included, where ``MAGICUBE_TCGEN05=1``: that
    kernel has never been run, and docs/blackwell.md has its rules.  On the CPU: ``torch.matmul`` of float32, or of
    float64 for that output.
    Raises ``TypeError`` and ``ValueError`` that name the argument.
    """
    problem = check(a, b, alpha, beta, c, bias, out, out_dtype, fast_accum)
    m, n, k = problem.shape
    if a.device.type == "cpu":
        result = _gemm_cpu(problem)
        return result if out is None else out.copy_(result)
    if a.device.type != "cuda":
        raise NotImplementedError(f"a must be on a CPU or a CUDA device, got {a.device}")
    target = torch.empty((m, n), dtype=out_dtype, device=a.device) if out is None else out
    if min(m, n, k) == 0:
        return empty_product(problem.c, problem.beta, problem.bias, target)
    return scaled_gemm_cuda(problem, target)


def _gemm_cpu(problem: ScaledGemmProblem) -> Tensor:
    work = torch.float64 if problem.out_dtype == torch.float64 else torch.float32
    result = problem.a.values(work) @ problem.b.values(work).t()  # (M, N)
    if problem.a.scale is not None:
        result *= (
            problem.a.scale.to(work).unsqueeze(-1) if problem.a.scale.dim() else problem.a.scale.to(work)
        )  # (M, 1)
    if problem.b.scale is not None:
        result *= problem.b.scale.to(work)  # (N,)
    result *= problem.alpha
    if problem.c is not None:
        result.add_(problem.c.to(work), alpha=problem.beta)  # (M, N)
    if problem.bias is not None:
        result += problem.bias.to(work)  # (N,)
    return result.to(problem.out_dtype)


def explain_scaled_gemm(
    a: FloatOperand, b: FloatOperand, *, out_dtype: torch.dtype = torch.float32, fast_accum: bool = False
) -> ScaledGemmPlan:
    """How :func:`scaled_gemm` would run these arguments; nothing is computed or compiled."""
    problem = check(a, b, 1.0, 0.0, None, None, None, out_dtype, fast_accum)
    if a.device.type == "cpu":
        return ScaledGemmPlan("torch.matmul")
    choice, copies = plan_cuda(problem)
    return ScaledGemmPlan(
        choice.config.name, copies, dequantized_operands(problem, choice.config), choice.config, choice.refused
    )
