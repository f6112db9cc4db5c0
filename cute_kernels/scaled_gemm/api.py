"""Dense product of low-precision floats: any two of e5m2, e4m3, e3m2, e2m3 and e2m1, with scales of several kinds."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.gemm.epilogue import apply_epilogue, run_problem
from cute_kernels.gemm.problem import check_epilogue, check_output
from cute_kernels.scaled_gemm.config import ScaledGemmConfig
from cute_kernels.scaled_gemm.cuda import plan_scaled_gemm, prepared_operands, scaled_gemm_cuda
from cute_kernels.scaled_gemm.operand import FloatOperand, ScaledGemmProblem
from cute_kernels.scaled_gemm.sm100 import Tcgen05Config
from cute_kernels.scaled_gemm.small_m.config import SmallMConfig
from cute_kernels.watch import watched

__all__ = ["ScaledGemmPlan", "check", "explain_scaled_gemm", "scaled_gemm"]

_RENAMED = {"gemm_floats": "scaled_gemm", "explain_gemm_floats": "explain_scaled_gemm"}


@dataclass(frozen=True)
class ScaledGemmPlan:
    """How a product runs.

    Attributes
    ----------
    kernel : str
        ``"torch.matmul"`` or the name of `config`.
    copies : tuple of str
        Operands whose packed data is copied to 16-byte aligned rows first, ``"a"``, ``"b"``, and block or tile scales
        that are copied to a multiple of 16 bytes, ``"a's scales"``, ``"b's scales"``.
    decoded : tuple of str
        Operands that a kernel of its own dequantizes first, because they are read by many tiles.
    config : ScaledGemmConfig, SmallMConfig or Tcgen05Config, optional
        Kernel config.
    refused : str
        On sm_100a and sm_103a: why ``tcgen05.mma`` does not run; else empty.
    folded : tuple of str
        Operands whose block scales a kernel of its own makes part of e4m3 values first, with `fold_scales`.

    Examples
    --------
    >>> a = FloatOperand(torch.zeros(4, 8, dtype=torch.uint8), "e4m3", k=8)
    >>> explain_scaled_gemm(a, a)
    ScaledGemmPlan(kernel='torch.matmul', copies=(), decoded=(), config=None, refused='', folded=())
    """

    kernel: str
    copies: tuple[str, ...] = ()
    decoded: tuple[str, ...] = ()
    config: ScaledGemmConfig | SmallMConfig | Tcgen05Config | None = None
    refused: str = ""
    folded: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [self.kernel]
        if self.copies:
            parts.append(f"{', '.join(self.copies)} copied to aligned rows first")
        if self.decoded:
            parts.append(f"{', '.join(self.decoded)} dequantized first by a kernel of its own")
        if self.folded:
            parts.append(f"{', '.join(self.folded)} folded into e4m3 first by a kernel of its own")
        return ", ".join([*parts, f"tcgen05 refused: {self.refused}"] if self.refused else parts)


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
    fold_scales: bool = False,
) -> ScaledGemmProblem:
    """Return the checked product that the arguments of :func:`scaled_gemm` describe.

    Raises
    ------
    TypeError
        If a type or a dtype is not supported.
    ValueError
        If shapes or devices do not match.

    Examples
    --------
    >>> a = FloatOperand(torch.zeros(4, 8, dtype=torch.uint8), "e4m3", k=8)
    >>> check(a, a, 1.0, 0.0, None, None, None, torch.float32, fast_accum=False).shape
    (4, 4, 8)
    """
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, FloatOperand):
            raise TypeError(f"{name} must be a FloatOperand, got {type(operand).__name__}")
    if a.k != b.k:
        raise ValueError(f"b must have k={a.k} to match a, got k={b.k}")
    if a.device != b.device:
        raise ValueError(f"b must be on {a.device} as a is, got {b.device}")
    shape = (a.rows, b.rows)
    check_output(out, out_dtype, shape, a.device, integers=False)
    c, bias = check_epilogue(c, beta, bias, shape, a.device, out_dtype == torch.float64)
    return ScaledGemmProblem(a, b, float(alpha), float(beta), c, bias, out_dtype, fast_accum, fold_scales)


@watched("cute_kernels.scaled_gemm.api.scaled_gemm")
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
    fold_scales: bool = False,
) -> Tensor:
    """Multiply two matrices of low-precision floats.

    ``D[m, n] = alpha sum_k a[m, k] b[n, k] + beta c[m, n] + bias[n]``, with the values of `a` and `b` that
    :class:`FloatOperand` defines. Block scales are those of [1]_.

    Parameters
    ----------
    a : FloatOperand, shape (M, K)
        Left operand.
    b : FloatOperand, shape (N, K)
        Transpose of the right operand, packed along K.
    alpha : float, default 1.0
        Factor of the product.
    beta : float, default 0.0
        Factor of `c`; `c` is not read if it is 0.
    c : Tensor, shape (M, N), optional
        Source of a float dtype; may be `out`.
    bias : Tensor, shape (N,), optional
        Added to each row; of a float dtype.
    out : Tensor, shape (M, N), optional
        Output with contiguous rows, written in place.
    out_dtype : torch.dtype, default torch.float32
        float32, float16, bfloat16, or float64 on a CPU.
    fast_accum : bool, default False
        On sm_90a without scales inside the sum: accumulate all of K on Tensor Cores, with about 14 bits. Otherwise,
        and always in the small-M kernel, Tensor Cores accumulate 128 elements of K at a time, and float32 additions do
        the rest.
    fold_scales : bool, default False
        On sm_90a with more than 64 rows: let ue8m0 block scales become part of e4m3 values, about 1.6 times as fast;
        see Notes for what that loses.

    Returns
    -------
    Tensor, shape (M, N)
        The product, on the device of `a`.

    Raises
    ------
    TypeError
        If a type or a dtype is not supported.
    ValueError
        If shapes or devices do not match.
    NotImplementedError
        If the operands are on another device than a CPU or a CUDA device; on a GPU, for float32 scales of 128 values
        of `b`, or of `a` beside block scales of `b` or on another architecture than sm_90a.

    See Also
    --------
    explain_scaled_gemm : Report which kernel a call uses.

    Notes
    -----
    Dequantization is exact. The arithmetic depends on the device:

    - sm_90a without block scales of 16 or 32 values: products of e4m3 or e5m2. Partial accumulators keep about 2^-13 of
      the largest of them or of the products (docs/lab/floats.md has the bound); scales of tiles and of 128 values
      multiply the sums of 128 elements of K in float32.
    - These block scales, or another architecture: values times scales are bfloat16, exact for magnitudes within
      2^-126..2^128; accumulators are float32.
    - Few rows on sm_90a and K a multiple of 512: products of e4m3 or e5m2 as above, but block scales multiply the sums
      of their 16 or 32 elements of K in float32. Scales of 32 values: up to 32 rows of `a`, or 64 if it has no block
      scales; of 16 values of 4-bit `b`: up to 8, or 16.
    - With `fold_scales` these block scales on sm_90a, if all are ue8m0, of values that are not e5m2, and M is above 64:
      `a` becomes e4m3 with float32 scales of 128 values, `b` with scales of rows, and bytes are multiplied as above.
      Values are rounded by at most 2^-17 of the largest magnitude that has the same scale then; those of e2m1 are
      exact where the scales of a row differ by no more than 2^13.
    - sm_100a and sm_103a with ``MAGICUBE_TCGEN05=1``: ``tcgen05.mma``, including positive block scales, if it can
      read the operands. This kernel has never run; docs/lab/blackwell.md has its rules.
    - CPU: ``torch.matmul`` in float32, or in float64 for that output.

    References
    ----------
    .. [1] OCP Microscaling Formats (MX) v1.0, section 6.

    Examples
    --------
    >>> import torch
    >>> from cute_kernels import floats
    >>> from cute_kernels.scaled_gemm.api import FloatOperand, scaled_gemm
    >>> values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> packed = floats.pack(floats.encode(values, "e2m1"), "e2m1")
    >>> a = FloatOperand(packed, "e2m1", k=2)
    >>> b = FloatOperand(packed, "e2m1", k=2, scale=torch.tensor([1.0, 0.5]))
    >>> scaled_gemm(a, b)
    tensor([[ 5.0000,  5.5000],
            [11.0000, 12.5000]])
    """
    problem = check(a, b, alpha, beta, c, bias, out, out_dtype, fast_accum, fold_scales)
    return run_problem(problem, out, _scaled_gemm_cpu, scaled_gemm_cuda)


def _scaled_gemm_cpu(problem: ScaledGemmProblem) -> Tensor:
    """Return the product on a CPU, shape (M, N)."""
    work = torch.float64 if problem.out_dtype == torch.float64 else torch.float32
    total = problem.a.values(work) @ problem.b.values(work).t()  # (M, N)
    return apply_epilogue(problem, total, problem.alpha, problem.a.scale, problem.b.scale)


def explain_scaled_gemm(
    a: FloatOperand,
    b: FloatOperand,
    *,
    out_dtype: torch.dtype = torch.float32,
    fast_accum: bool = False,
    fold_scales: bool = False,
) -> ScaledGemmPlan:
    """Report which kernel :func:`scaled_gemm` uses; nothing is computed or compiled.

    Parameters
    ----------
    a : FloatOperand, shape (M, K)
        Left operand.
    b : FloatOperand, shape (N, K)
        Transpose of the right operand.
    out_dtype : torch.dtype, default torch.float32
        Dtype of the output.
    fast_accum, fold_scales : bool, default False
        As for :func:`scaled_gemm`.

    Returns
    -------
    ScaledGemmPlan
        Kernel, copies and operands that are dequantized first.

    Raises
    ------
    TypeError
        If a type or a dtype is not supported.
    ValueError
        If shapes or devices do not match.

    Examples
    --------
    >>> import torch
    >>> from cute_kernels.scaled_gemm.api import FloatOperand, explain_scaled_gemm
    >>> a = FloatOperand(torch.zeros(4, 8, dtype=torch.uint8), "e4m3", k=8)
    >>> explain_scaled_gemm(a, a).kernel
    'torch.matmul'
    """
    problem = check(a, b, 1.0, 0.0, None, None, None, out_dtype, fast_accum, fold_scales)
    if a.device.type == "cpu":
        return ScaledGemmPlan("torch.matmul")
    selection, copies = plan_scaled_gemm(problem)
    config = selection.config
    decoded, folded = prepared_operands(problem, config)
    return ScaledGemmPlan(config.name, copies, decoded, config, selection.refused, folded)


def __getattr__(name: str) -> Any:
    """Return what a deprecated name stands for."""
    if name in _RENAMED:
        warnings.warn(f"{name} is deprecated, use {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return globals()[_RENAMED[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
