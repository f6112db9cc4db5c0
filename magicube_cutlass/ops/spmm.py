"""SpMM: arguments are checked, a kernel is selected, a torch operator runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from magicube_cutlass.dispatch import cpu, dense_fallback
from magicube_cutlass.dispatch.plan import plan_spmm, size_bucket
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.ops import torch_ops
from magicube_cutlass.ops.problem import Operand, check_spmm, operand_key, operand_tensors
from magicube_cutlass.quantization.quant_tensor import QuantTensor

if TYPE_CHECKING:
    from cute_kernels.spmm.heuristics import SpmmKernel


def spmm(
    A: SRBCRS | BCRS,
    B: Operand,
    *,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    atom: str | None = None,
    config: SpmmKernel | None = None,
    allow_dense: bool = False,
) -> Tensor:
    """``C = scale_A * scale_B * (A B) + bias[:, None]``, of integers exact, of floats with sums in float32.

    ``A``: (M, K) of 4, 8, 12 or 16 bits.  ``B``: (..., K, N), any of these widths, row- or column-major, signed or not
    independently of A; its scale is one number or one a column (``quantize(x, bits, axis=0)``).  ``bias``: (M,),
    float output only.  ``out``: contiguous, (..., M, N), written in place.
    ``out_dtype``: int32 or int64 give the integer product without scales; float32, float16 and bfloat16 apply them.
    Default: int32 when neither operand has a scale, else float32.  ``atom``: the mma instruction to use on a GPU, a
    name in :mod:`cute_kernels.atoms`; default: by widths and device.  ``config``: exactly this kernel, for experiments.
    ``allow_dense``: A is also kept as a dense int8 matrix and multiplied as such where that is expected to be faster,
    the sums as exact as before (see :func:`explain`): for operands of 4 bits and of 8 bits with a sign.  Such a call is
    no part of a compiled graph: ``torch.compile`` goes around it, or refuses it with ``fullgraph=True``.
    Floats: A and B each of float16, bfloat16, e5m2, e4m3 or e2m1, but for float16 beside bfloat16; B a FloatTensor of
    one scale or one a column, or a tensor of such a dtype.  Output float32 (the default), float16 or bfloat16.  What
    they add up to is in ``docs/floats.md``.
    Integers have no gradient; :func:`magicube_cutlass.autograd.spmm` takes floats and is differentiable.
    Returns (..., M, N).  Raises ``TypeError`` for wrong types, ``ValueError`` for shapes, devices and scales that do
    not go together, and where the bound ``K max|A| max|B|`` does not promise that the integer output fits.
    Source: Li, Osawa, Hoefler, SC'22, sections IV-A to IV-D.
    """
    if allow_dense:
        _check_allow_dense(atom, config)
    key = _call_key(B, out_dtype, bias, out, atom, config, allow_dense)
    call = getattr(A, "_execution", {}).get(key) if key is not None else None
    if call is not None and call.scale is A.scale:
        result = call(*operand_tensors(B), bias, out)
        if result is not None:
            return result
    problem = check_spmm(A, B, out_dtype, bias, out)
    if allow_dense:
        forecast = dense_fallback.forecast(problem.matrix, problem.dense, problem.out_dtype)
        if forecast and forecast.dense_wins and isinstance(problem.dense, QuantTensor):
            product = dense_fallback.DenseCall(problem.matrix, problem.dense, problem.out_dtype)
            if key is not None:
                A._execution[key] = product
            return product(problem.dense.data, problem.dense.scale, bias, out)
    matrix = problem.matrix
    on_cpu = matrix.values.device.type == "cpu"
    planner: Callable[..., tuple[str, list[Tensor]]] = cpu.plan_spmm
    arguments: tuple[object, ...] = (problem.rhs,)
    if not on_cpu:
        several = 1 if problem.batch.numel() == 1 else 2
        planner, arguments = plan_spmm, (*arguments, problem.out_dtype, size_bucket(problem.n), several, atom, config)
    if torch.compiler.is_compiling():  # the plan is a constant of this version of the matrix
        kernel, packed = matrix._constant(matrix._version_id, planner, *arguments)
    else:
        kernel, packed = planner(matrix, *arguments)
    result = torch_ops.run_spmm(problem, kernel, packed, out)
    if key is None:
        return result
    if on_cpu:
        A._execution[key] = cpu.cached_spmm(problem, packed, A.scale, bias, result)
    else:
        from magicube_cutlass.dispatch.cuda import cached_spmm

        A._execution[key] = cached_spmm(problem, kernel, packed, A.scale, bias, result)
    return result


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
) -> tuple[object, ...] | None:
    """Everything that the checks of :func:`spmm` read besides A; None if the call cannot be cached.

    A compiler has to see the operator.
    """
    operand = None if torch.compiler.is_compiling() else operand_key(B)
    if operand is None:
        return None
    bias_key = None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device)
    out_key = None if out is None else (out.shape, out.stride(), out.dtype, out.device)
    return (operand, bias_key, out_key, out_dtype, atom, config, allow_dense)
