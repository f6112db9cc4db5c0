"""SpMM: arguments are checked, a kernel is selected, a torch operator runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cute_kernels import watch
from cute_kernels.dtypes import constant_of
from cute_kernels.watch import watched
from magicube_cutlass.checks import has_dispatch_mode, is_transformed
from magicube_cutlass.dispatch import cpu, dense_fallback
from magicube_cutlass.dispatch.plan import plan_constant, plan_spmm, size_bucket
from magicube_cutlass.formats.array_methods import TransposedMatrix
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.formats.tracking import NO_RECORDS, RECORDS, is_current, keep_record
from magicube_cutlass.ops import torch_ops
from magicube_cutlass.ops.problem import Operand, check_spmm, check_written, operand_key, operand_tensors
from magicube_cutlass.ops.transposed import transposed_on_gpu, transposed_product
from magicube_cutlass.quantization.quant_tensor import QuantTensor

if TYPE_CHECKING:
    from cute_kernels.spmm.heuristics import SpmmKernel
    from magicube_cutlass.dispatch.cuda_floats import QuantizedColumnsSpmm, QuantizedSpmm


@watched("magicube_cutlass.spmm")
def spmm(
    A: SRBCRS | BCRS | TransposedMatrix,
    B: Operand,
    *,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    atom: str | None = None,
    config: SpmmKernel | None = None,
    allow_dense: bool = False,
    transpose: bool = False,
) -> Tensor:
    """Multiply a sparse matrix by a dense one.

    ``C = scale_A * scale_B * (A @ B) + bias[:, None]``. Integer sums are exact; float products accumulate in float32.
    Implements the SpMM of [1]_. :func:`magicube_cutlass.autograd.spmm` takes floats and is differentiable.

    Parameters
    ----------
    A : SRBCRS, BCRS or TransposedMatrix, shape (M, K)
        Sparse operand: 4-, 8-, 12- or 16-bit integers, or floats (float16, bfloat16, e5m2, e4m3, e2m1).
    B : QuantTensor, ScaledFloatTensor or Tensor, shape (..., K, N)
        Dense operand, row- or column-major, with a per-tensor or per-column scale. Width and sign are independent of
        A's; integers multiply integers and floats floats (float16 with bfloat16 excepted).
    out_dtype : torch.dtype, optional
        int32 or int64 (unscaled), or float32, float16 or bfloat16 (scaled).
        Default: int32 for unscaled integers, else float32.
    bias : Tensor, shape (M,), optional
        Added in the epilogue; needs a float `out_dtype`.
    out : Tensor, shape (..., M, N), optional
        Contiguous output, written in place. It shares no memory with an operand and requires no gradient.
    atom : str, optional
        MMA atom, a name in :mod:`cute_kernels.atoms`. Default: selected by dtypes and device.
    config : SpmmKernel, optional
        Kernel config; overrides kernel selection.
    allow_dense : bool, default False
        Run the dense int8 GEMM on a dense copy of A if it is predicted to be faster. For operands of 4 bits and signed
        8 bits; not inside a compiled graph.
    transpose : bool, default False
        Multiply by the transpose of A: B is (..., M, N), C is (..., K, N), and A has a per-tensor scale. ``A.T`` as A
        means the same. On a CPU nothing is filled in: the vectors are sorted by column once. On a GPU
        :meth:`SRBCRS.transpose` compresses the transpose once, with its fill-in. Not inside a compiled graph.

    Returns
    -------
    Tensor, shape (..., M, N)
        The product, on the device of `A`.

    Raises
    ------
    TypeError
        If a dtype is not supported.
    ValueError
        If shapes, devices or scales do not match, or the bound ``K max|A| max|B|`` exceeds the integer output.
    NotImplementedError
        If `allow_dense` is used in a compiled graph, or the device is neither CPU nor CUDA.

    See Also
    --------
    explain : Report which kernel a call uses.
    sddmm : The product of two dense matrices at a pattern.

    References
    ----------
    .. [1] Li, Osawa, Hoefler, SC'22, sections IV-A to IV-D.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> A = mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)
    >>> B = mc.QuantTensor.from_ints(torch.arange(32).reshape(16, 2), bits=8)
    >>> mc.spmm(A, B)[:2]
    tensor([[0, 1],
            [2, 3]], dtype=torch.int32)
    """
    if transpose or type(A) is TransposedMatrix:
        return _spmm_transposed(A, B, out_dtype, bias, out, atom, config, allow_dense, transpose)
    return early_spmm(A, B, out_dtype, bias, out, atom, config, allow_dense, False)  # type: ignore[arg-type]


def _spmm_transposed(
    A: SRBCRS | BCRS | TransposedMatrix,
    B: Operand,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    out: Tensor | None,
    atom: str | None,
    config: SpmmKernel | None,
    allow_dense: bool,
    transpose: bool,
) -> Tensor:
    """As :func:`spmm` for a transpose: of the matrix itself if it is a transposed one."""
    if isinstance(A, TransposedMatrix):
        if transpose:
            return spmm(A.T, B, out_dtype=out_dtype, bias=bias, out=out, atom=atom, config=config,
                        allow_dense=allow_dense)  # fmt: skip
        A = A.T
    if getattr(getattr(A, "values", None), "is_cuda", False):
        return early_spmm(transposed_on_gpu(A), B, out_dtype, bias, out, atom, config, allow_dense, False)
    if atom is not None or config is not None or allow_dense:
        raise ValueError(f"atom, config and allow_dense must have their defaults for a transpose on a CPU, got "
                         f"atom={atom!r}, config={config}, allow_dense={allow_dense}")  # fmt: skip
    result = transposed_product(A, B, out_dtype, bias, out)
    return result if out is None else _written(out)


def early_spmm(
    A: SRBCRS | BCRS,
    B: Operand,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    atom: str | None = None,
    config: SpmmKernel | None = None,
    allow_dense: bool = False,
    early: bool = True,
) -> Tensor:
    """As :func:`spmm`, behind the kernel that quantized B.

    `early`: a cached call may start before that kernel ends.
    """
    compiling = torch.compiler.is_compiling()
    if allow_dense and (compiling or atom is not None or config is not None):
        _check_allow_dense(atom, config)
    if out is not None and not compiling:
        check_written(out, A, B, bias)
    key = record = None
    if not compiling and not has_dispatch_mode():
        key = _call_key(B, out_dtype, bias, out, atom, config, allow_dense, early)
    if key is not None:
        record = getattr(A, "_execution", NO_RECORDS).get(RECORDS, NO_RECORDS).get(key)
    scale = None if record is None else A.scale
    if record is not None and is_current(A, A._seen) and (scale is None or not scale.requires_grad):
        data, of_b = (B.data, B.scale) if type(B) is QuantTensor else operand_tensors(B)
        result = record(data, of_b, bias, out)
        if result is not None:
            return result if out is None else _written(out)
    problem = check_spmm(A, B, out_dtype, bias, out)
    if allow_dense:
        forecast = dense_fallback.forecast(problem.matrix, problem.dense, problem.out_dtype)
        if forecast and forecast.dense_wins and isinstance(problem.dense, QuantTensor):
            dense = dense_fallback.DenseCall(problem.matrix, problem.dense, problem.out_dtype, bias)
            if key is not None:
                keep_record(A._execution, key, dense)
            result = dense(problem.dense.data, problem.dense.scale, bias, out)
            return result if out is None else _written(out)
    matrix = problem.matrix
    on_cpu = matrix.values.device.type == "cpu"
    planner: Callable[..., tuple[str, list[Tensor]]] = cpu.plan_spmm
    arguments: tuple[object, ...] = (problem.rhs,)
    if not on_cpu:
        several = 1 if problem.batch.numel() == 1 else 2
        planner, arguments = plan_spmm, (*arguments, problem.out_dtype, size_bucket(problem.n), several, atom, config)
    if compiling:  # the plan is a constant of this version of the matrix
        rhs = constant_of(problem.rhs)
        kernel, packed = matrix._constant(matrix._version_id, plan_constant, planner, rhs, *arguments[1:])
    else:
        kernel, packed = planner(matrix, *arguments)
        if watch.LEVEL > 1:
            watch.selected("spmm", kernel, packed)
    if key is not None and on_cpu and (engine_call := cpu.engine_call(problem, packed, bias)):
        keep_record(A._execution, key, engine_call)
        result = engine_call(problem.dense.data, problem.dense.scale, bias, out)
        return result if out is None else _written(out)
    result = torch_ops.run_spmm(problem, kernel, packed, out)
    if key is not None and not on_cpu:
        from magicube_cutlass.dispatch.cuda import cached_spmm

        keep_record(A._execution, key, cached_spmm(problem, kernel, packed, A.scale, bias, result, early))
    return result if out is None or compiling else _written(out)


def floats_key(
    A: object,
    x: object,
    values: Tensor | None,
    bias: Tensor | None,
    act_bits: int,
    act_axis: int | None,
    act_scale: Tensor | None,
    grad_bits: int | None,
) -> tuple[object, ...] | None:
    """Return what a record of floats on a GPU depends on besides the matrix; None for calls that have none."""
    if type(x) is not Tensor or not x.is_cuda or type(A) is not SRBCRS or is_transformed(x):
        return None
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (values, x, bias, A.scale)):
        return None
    if values is not None or any(
        each is not None and (each.is_neg() or each._is_zerotensor()) for each in (x, act_scale)
    ):
        return None
    scale = None if act_scale is None else (act_scale.shape, act_scale.dtype, act_scale.device)
    return ("floats", x.shape, x.stride(), x.dtype, x.device, act_bits, act_axis, scale, grad_bits)


def floats_record(
    A: SRBCRS, dense: QuantTensor, x: Tensor, bias: Tensor | None, by_rows: bool = False
) -> QuantizedSpmm | None:
    """Return the product of a matrix and quantized floats `x` (K, N) on a GPU as a record, if it can be one."""
    from magicube_cutlass.dispatch import cuda_floats

    given = None if dense.axis is not None else dense.scale
    if not cuda_floats.can_record(x, dense.bits, given):
        return None
    problem = check_spmm(A, dense, x.dtype, bias, None)
    if problem.matrix is not A or problem.matrix.values.device != x.device:
        return None
    kernel, packed = plan_spmm(A, problem.rhs, x.dtype, size_bucket(problem.n), 1, None, None, by_rows)
    if watch.LEVEL > 1:
        watch.selected("spmm", kernel, packed)
    return cuda_floats.QuantizedSpmm(problem, kernel, packed, dense.axis, bias, x, by_rows)


def quantized_columns_record(
    A: SRBCRS, dense: QuantTensor, dtype: torch.dtype, bias: Tensor | None
) -> QuantizedColumnsSpmm | None:
    """Return the product of a matrix and quantized columns (..., K, N) on a GPU, written as rows, as a record."""
    from magicube_cutlass.dispatch import cuda_floats

    problem = check_spmm(A, dense, dtype, bias, None)
    if problem.matrix is not A or problem.matrix.values.device != dense.data.device:
        return None
    columns = dense.data.shape[:-2].numel() * problem.n
    kernel, packed = plan_spmm(A, problem.rhs, dtype, size_bucket(columns), 1, None, None, True)
    return cuda_floats.QuantizedColumnsSpmm(problem, kernel, packed, bias)


def _written(out: Tensor) -> Tensor:
    """`out`, with the write counted as torch counts its own: autograd then knows that saved values are gone."""
    torch.autograd.graph.increment_version(out)
    return out


def _check_allow_dense(atom: str | None, config: SpmmKernel | None) -> None:
    if atom is not None or config is not None:
        raise ValueError(f"allow_dense must be False where a sparse kernel is asked for, got atom={atom!r}, "
                         f"config={config}")  # fmt: skip
    if torch.compiler.is_compiling():
        raise NotImplementedError("allow_dense must be False in a compiled graph: the dense kernel is not in it")


def _call_key(
    B: Operand,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    out: Tensor | None,
    atom: str | None,
    config: SpmmKernel | None,
    allow_dense: bool,
    early: bool,
) -> tuple[object, ...] | None:
    """Everything that the checks of :func:`spmm` read besides A; None if the call cannot be cached."""
    operand = operand_key(B)
    for each in (bias, out):  # the checks refuse what has other memory than values
        if each is not None and (each.is_neg() or each._is_zerotensor() or is_transformed(each)):
            return None
    if operand is None:
        return None
    wanted = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    bias_key = None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device, wanted)
    out_key = None if out is None else (out.shape, out.stride(), out.dtype, out.device)
    return (operand, bias_key, out_key, out_dtype, atom, config, allow_dense, early)
