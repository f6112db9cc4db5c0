"""Dense integer product with a fused epilogue: int8 digit planes in, integers or floats out, on CPU and GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.cpu.linear import FUNCTIONS
from cute_kernels.gemm.config import MAX_PLANES, MAX_PRODUCTS, GemmConfig, select_products
from cute_kernels.gemm.cpu import cpu_backend, gemm_cpu
from cute_kernels.gemm.cuda import check_config, gemm_cuda, plan_gemm, takes_glu
from cute_kernels.gemm.cutlass import check_backend, gemm_cutlass
from cute_kernels.gemm.epilogue import activate, gated, integers_of, run_problem
from cute_kernels.gemm.int4 import Int4Matrix
from cute_kernels.gemm.problem import GemmProblem, check_epilogue, check_float_tensor, check_output
from cute_kernels.watch import watched

__all__ = ["GemmPlan", "Planes", "explain_gemm", "gemm"]

Planes = Tensor | Sequence[Tensor] | Int4Matrix


@dataclass(frozen=True)
class GemmPlan:
    """How a product runs.

    Attributes
    ----------
    kernel : str
        ``"engine"``, ``"torch._int_mm"``, ``"float32"`` (exact, in ranges of K) or the name of `config`.
    products : int
        Digit products.
    copies : tuple of str
        Planes that are copied to K-major order first: ``"a0"``, ``"b1"``, ...
    chunks : int
        Ranges of K that are multiplied one after the other.
    workspace : int
        Bytes of temporary GPU memory.
    config : GemmConfig, optional
        Kernel config of the first launch.

    Examples
    --------
    >>> from cute_kernels.gemm import explain_gemm
    >>> a = torch.zeros(4, 8, dtype=torch.int8)
    >>> explain_gemm(a, a.T).products
    1
    """

    kernel: str
    products: int
    copies: tuple[str, ...] = ()
    chunks: int = 1
    workspace: int = 0
    config: GemmConfig | None = None

    def __str__(self) -> str:
        count = f"{self.products} digit product{'s' if self.products != 1 else ''}"
        parts = [f"{self.kernel}: {count}" + (f" in {self.chunks} ranges of K" if self.chunks > 1 else "")]
        if self.copies:
            parts.append(f"{', '.join(self.copies)} copied to K-major order first")
        return ", ".join([*parts, f"{self.workspace} bytes of workspace"] if self.workspace else parts)


def _check_planes(x: Planes, name: str) -> tuple[Tensor, ...]:
    """Return the digit planes of one operand as a tuple, after checking types, dtypes and shapes."""
    if isinstance(x, Int4Matrix):
        if x.axis != (name == "a"):
            raise ValueError(f"{name} must be packed along K, axis={int(name == 'a')}, got axis={x.axis}")
        return (x.shell(),)
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


def _check_scale(
    x: Tensor | float | None, name: str, size: int, device: torch.device, allow_float64: bool
) -> tuple[Tensor | None, float]:
    """Return the scale as a tensor, and as a number that goes into alpha."""
    if x is None:
        return None, 1.0
    if isinstance(x, Tensor):
        return check_float_tensor(x, name, ((size,), ()), device, allow_float64), 1.0
    return None, float(x)


def _check_integer_output(problem: GemmProblem) -> None:
    """Check that an integer output is a single unscaled product that cannot overflow."""
    dtype, k = problem.out_dtype, problem.shape[2]
    if problem.products.number != 1:
        raise ValueError(f"terms must be 1 for out_dtype {dtype}, got {problem.products.number}")
    given = {"scale_a": problem.row_scale, "scale_b": problem.col_scale, "c": problem.c, "bias": problem.bias}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} must be None for out_dtype {dtype}, got a tensor; use a float out_dtype")
    if problem.alpha != 1.0:
        raise ValueError(f"alpha times scales must be 1 for out_dtype {dtype}, got {problem.alpha}")
    if dtype == torch.int32 and k > MAX_PRODUCTS:
        raise ValueError(f"K must be at most {MAX_PRODUCTS} for out_dtype torch.int32, got K = {k}; use torch.int64")


def _check_finish(problem: GemmProblem) -> None:
    """Check what follows the sums: an activation of float results, and the scale of int8 ones."""
    activation, out_scale, dtype = problem.activation, problem.out_scale, problem.out_dtype
    if activation not in FUNCTIONS:
        raise ValueError(f"activation must be one of {FUNCTIONS}, got {activation!r}")
    if activation is not None and problem.is_integer:
        raise ValueError(f"activation must be None for out_dtype {dtype}, got {activation!r}")
    if problem.glu and (problem.is_integer or problem.c is not None or problem.shape[1] % 2):
        got = f"{dtype}, {'no c' if problem.c is None else 'c'}, N = {problem.shape[1]}"
        raise ValueError(f"glu needs a float or int8 out_dtype, no c, and an even N, got {got}")
    if (out_scale is None) == (dtype == torch.int8):
        got = "None" if out_scale is None else "a tensor"
        raise ValueError(f"out_scale must be given for out_dtype torch.int8, and for no other, got {got} for {dtype}")
    if out_scale is not None:
        if out_scale.dtype != torch.float32:
            raise TypeError(f"out_scale must be torch.float32, got {out_scale.dtype}")
        check_float_tensor(out_scale, "out_scale", ((),), problem.device, False)


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
    activation: str | None,
    out_scale: Tensor | None,
    glu: bool,
    out: Tensor | None,
    out_dtype: torch.dtype,
) -> GemmProblem:
    """Return the checked product that the arguments of :func:`gemm` describe."""
    lhs, rhs = _check_planes(a, "a"), _check_planes(b, "b")
    device = lhs[0].device
    for name, planes in (("a", lhs), ("b", rhs)):
        for plane in planes:
            if plane.device != device:
                raise ValueError(f"{name} must be on {device} as a is, got {plane.device}")
    (m, k), (rows, n) = lhs[0].shape, rhs[0].shape
    if k != rows:
        raise ValueError(f"b must have {k} rows to match a of shape {(m, k)}, got {rows}")
    if not isinstance(shift, int) or not 0 <= shift <= 16:
        raise ValueError(f"shift must be an integer from 0 to 16, got {shift!r}")
    check_output(out, out_dtype, (m, n // 2 if glu else n), device, integers=True)
    float64 = out_dtype == torch.float64
    row_scale, number_a = _check_scale(scale_a, "scale_a", m, device, float64)
    col_scale, number_b = _check_scale(scale_b, "scale_b", n, device, float64)
    c, bias = check_epilogue(c, beta, bias, (m, n), device, float64)
    products = select_products(len(lhs), len(rhs), terms)
    lhs, rhs = lhs[: products.planes_a], rhs[: products.planes_b]
    scale = float(alpha) * number_a * number_b
    packed = a if isinstance(a, Int4Matrix) else None, b if isinstance(b, Int4Matrix) else None
    problem = GemmProblem(
        lhs, rhs, products, shift, row_scale, col_scale, scale, float(beta), c, bias, out_dtype, activation, out_scale,
        glu, packed=packed,
    )  # fmt: skip
    _check_finish(problem)
    if problem.is_integer:
        _check_integer_output(problem)
    return problem


@watched("cute_kernels.gemm.gemm")
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
    activation: str | None = None,
    out_scale: Tensor | None = None,
    glu: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.int32,
    config: GemmConfig | None = None,
    backend: str | None = None,
) -> Tensor:
    """Multiply two integer matrices, given as digit planes.

    ``D[m, n] = f(alpha s_a[m] s_b[n] sum_ij 2^(-shift (i + j)) sum_k a_i[m, k] b_j[k, n] + beta c[m, n] + bias[n])``.
    Each sum over k is exact, whatever K is. The sums of the levels ``i + j`` are added in float32, on a CPU in float64
    if the output is float64 or K is long. On a GPU, one kernel computes all levels. Implements the digit products of
    [1]_ and [2]_.

    Parameters
    ----------
    a : Tensor, sequence of Tensor or Int4Matrix, shape (M, K)
        One to three int8 digit planes, the leading one first; any memory strides. Or packed 4-bit integers.
    b : Tensor, sequence of Tensor or Int4Matrix, shape (K, N)
        As `a`. The CPU engine reads packed integers and unpacks them in registers.
    terms : int, optional
        Number of digit products ``a_i b_j``. 1: a0 b0; 3: those with i + j <= 1; 4: all of two planes each; 6: those
        with i + j <= 2 of three planes each. For unequal numbers of planes: the number of products with i + j below
        1, 2 or 3. Default: 1, 3 or 6 for 1, 2 or 3 planes.
    shift : int, default 8
        Bits per digit, 0 to 16.
    scale_a : Tensor, shape (M,) or (), or float, optional
        Per-row or per-tensor scale of `a`.
    scale_b : Tensor, shape (N,) or (), or float, optional
        Per-column or per-tensor scale of `b`.
    alpha : float, default 1.0
        Factor of the product.
    beta : float, default 0.0
        Factor of `c`; `c` is not read if it is 0.
    c : Tensor, shape (M, N), optional
        Source of a float dtype; may be `out`.
    bias : Tensor, shape (N,), optional
        Added to each row; of a float dtype.
    activation : {"relu", "gelu", "gelu_tanh", "silu"}, optional
        f, computed in float32 before the result is rounded. Default: the identity.
    out_scale : Tensor, shape (), optional
        float32 scale of an int8 output, ``D / out_scale`` rounded to nearest and saturated, NaN to 0. The quotient is a
        product with the rounded inverse: next to a tie, the integer may be the next one. On a GPU, GELU and SiLU of z
        are then within ``2^-12 |z| + 4e-5`` before they are rounded.
    glu : bool, default False
        Gated linear unit: with ``z`` the product before f, ``D = f(z[:, :N / 2]) * z[:, N / 2:]``, (M, N / 2), rounded
        once. N is even; no `c`; float or int8 outputs. One kernel on sm_90a, for one digit product and N a multiple of
        64; elsewhere torch multiplies the parts of a float32 product.
    out : Tensor, shape (M, N), optional
        Output with contiguous rows, written in place.
    out_dtype : torch.dtype, default torch.int32
        int32 or int64 (one unscaled product), int8 with `out_scale`, float16, bfloat16, float32, or float64 on a CPU.
    config : GemmConfig, optional
        Kernel config on a GPU; overrides kernel selection. Default: packed operands are unpacked to int8 first.
        ``NATIVE_INT4`` multiplies two packed operands by s4 instructions, from sm_80 to sm_89, where it has not run.
    backend : str, optional
        ``"cutlass"``: a kernel of CUTLASS, for one product in int32 on a GPU, with N a multiple of 4; see
        ``cute_kernels.gemm.cutlass``. Default: the kernels of this library.

    Returns
    -------
    Tensor, shape (M, N)
        The product, on the device of `a`.

    Raises
    ------
    TypeError
        If a type or a dtype is not supported.
    ValueError
        If shapes, devices or options do not match, or int32 could overflow.
    NotImplementedError
        If the operands are on another device than a CPU or a CUDA device.

    See Also
    --------
    explain_gemm : Report which kernel a call uses.

    Notes
    -----
    Scales, `c` and `bias` are float32, float16 or bfloat16, and float64 too if the output is float64. On a GPU, planes
    that are not K-major and 16-byte aligned are copied first; :func:`explain_gemm` reports them.

    References
    ----------
    .. [1] Li, Osawa, Hoefler, SC'22, section IV-D.
    .. [2] Gu, arXiv 2403.06924, equation 7.

    Examples
    --------
    >>> import torch
    >>> from cute_kernels.gemm import gemm
    >>> a = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)
    >>> gemm(a, a)
    tensor([[ 7, 10],
            [15, 22]], dtype=torch.int32)
    >>> gemm(a, a, scale_a=0.5, bias=torch.ones(2), out_dtype=torch.float32)
    tensor([[ 4.5000,  6.0000],
            [ 8.5000, 12.0000]])
    """
    problem = _check(
        a, b, terms, shift, scale_a, scale_b, alpha, beta, c, bias, activation, out_scale, glu, out, out_dtype
    )
    if config is not None:
        check_config(problem, config)
    if backend is not None:
        check_backend(problem, backend)

    def on_gpu(checked: GemmProblem, target: Tensor) -> Tensor:
        return gemm_cuda(checked, target, config) if backend is None else gemm_cutlass(checked, target)

    def on_cpu(checked: GemmProblem) -> Tensor:
        return gemm_cpu(checked, MAX_PRODUCTS)

    is_fused = problem.device.type == "cuda" and 0 not in problem.shape
    if glu and is_fused:
        out = torch.empty(problem.out_shape, dtype=out_dtype, device=problem.device) if out is None else out
        is_fused = takes_glu(problem, out)
    if problem.is_linear or is_fused:
        return run_problem(problem, out, on_cpu, on_gpu)
    y = run_problem(problem.linear(), None, on_cpu, on_gpu)  # (M, N)
    y = gated(y, activation) if glu else activate(y, activation)  # (M, N) or (M, N / 2)
    y = y.to(out_dtype) if out_scale is None else integers_of(y, out_scale)
    return y if out is None else out.copy_(y)


def explain_gemm(a: Planes, b: Planes, *, terms: int | None = None, out_dtype: torch.dtype = torch.int32) -> GemmPlan:
    """Report which kernel :func:`gemm` uses; nothing is computed or compiled.

    Parameters
    ----------
    a : Tensor or sequence of Tensor, shape (M, K)
        int8 digit planes.
    b : Tensor or sequence of Tensor, shape (K, N)
        int8 digit planes.
    terms : int, optional
        Number of digit products, as for :func:`gemm`.
    out_dtype : torch.dtype, default torch.int32
        Dtype of the output.

    Returns
    -------
    GemmPlan
        Kernel, copies, chunks of K and workspace.

    Raises
    ------
    TypeError
        If a type or a dtype is not supported.
    ValueError
        If shapes or devices do not match, or int32 could overflow.

    Examples
    --------
    >>> import torch
    >>> from cute_kernels.gemm import explain_gemm
    >>> a = torch.zeros(4, 8, dtype=torch.int8)
    >>> explain_gemm((a, a), (a.T, a.T), out_dtype=torch.float32).products
    3
    """
    device = (a if isinstance(a, (Tensor, Int4Matrix)) else a[0]).device
    out_scale = torch.ones((), device=device) if out_dtype == torch.int8 else None
    problem = _check(a, b, terms, 8, None, None, 1.0, 0.0, None, None, None, out_scale, False, None, out_dtype)
    if problem.device.type == "cpu":
        chunks = max(1, -(-problem.shape[2] // MAX_PRODUCTS))
        return GemmPlan(cpu_backend(problem, MAX_PRODUCTS), problem.products.number, chunks=chunks)
    plan = plan_gemm(problem.unpacked())
    return GemmPlan(
        plan.config.name, problem.products.number, plan.copies, plan.launches, plan.workspace_bytes, plan.config
    )
