"""The sparse products: arguments are checked here, then handed to the torch operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from cute_kernels.cpu import engine
from cute_kernels.dtypes import FLOATS, Integer, Number, check_pair, digits
from magicube_cutlass.dispatch import dense_fallback as dense_product
from magicube_cutlass.dispatch.cpu import engine_call
from magicube_cutlass.dispatch.plan import operand_number, plan_sddmm, plan_spmm, size_bucket
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.ops import torch_ops as library
from magicube_cutlass.quantization.float_operands import DenseFloats, dense_operand
from magicube_cutlass.quantization.float_tensor import FloatTensor
from magicube_cutlass.quantization.precision import FLOAT_OUT, INTEGER_OUT, check_fits, check_out_dtype
from magicube_cutlass.quantization.quant_tensor import QuantTensor

if TYPE_CHECKING:
    from cute_kernels.spmm.heuristics import SpmmKernel

_DEFAULT_STRIDE = 32


Operand = QuantTensor | FloatTensor | Tensor


def _check_dense(name: str, given: object, device: torch.device) -> QuantTensor | DenseFloats:
    operand = dense_operand(name, given)
    if len(operand.shape) < 2:
        raise ValueError(f"{name} must have at least 2 dimensions, got shape {tuple(operand.shape)}")
    if operand.device != device:
        raise ValueError(f"{name} must be on {device}, got {operand.device}")
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{name} is on {device}: only CPU and CUDA tensors have a kernel; call .to('cpu')")
    return operand


def _out_dtype(out_dtype: torch.dtype | None, scaled: bool, inner: int, left: Number, right: Number) -> torch.dtype:
    check_pair(left, right)
    whole = isinstance(left, Integer)
    dtype = out_dtype or (torch.int32 if whole and not scaled else torch.float32)
    check_out_dtype(dtype)
    if not isinstance(left, Integer) or not isinstance(right, Integer):
        if dtype in INTEGER_OUT:
            raise TypeError(f"out_dtype must be one of {FLOAT_OUT} for a product of floats, got {dtype}")
        return dtype
    check_fits(dtype, inner, left, right)
    if dtype in FLOAT_OUT:  # the exact totals behind a float are int64
        check_fits(torch.int64, inner, left, right)
    return dtype


def _factor(scale: Tensor | None, batch: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """A scale as float32 factors: () for all, (length,) a row or column, (*batch, length); None for integer output."""
    if scale is None or dtype in INTEGER_OUT:
        return None
    flat = scale.to(torch.float32)
    if flat.ndim == 0:
        return flat
    flat = flat.flatten(-2)  # one of the two has size 1
    return flat.contiguous() if flat.ndim == 1 else flat.expand(*batch, flat.shape[-1]).contiguous()


def _sparse(matrix: object) -> SRBCRS:
    if isinstance(matrix, BCRS):
        found = matrix._execution.get("srbcrs")
        if found is None:
            found = matrix._execution["srbcrs"] = matrix.to_srbcrs()
            found.used_once = matrix.used_once
        matrix = found
    if not isinstance(matrix, SRBCRS):
        raise TypeError(f"A must be an SRBCRS or BCRS, got {type(matrix).__name__}")
    if matrix.number is None:
        raise TypeError(f"A must hold quantized integers, got results of dtype {matrix.values.dtype}; floats must be "
                        f"{', '.join(FLOATS)}")  # fmt: skip
    if matrix.batch_shape:
        raise ValueError(f"A must be a single matrix, got a batch of shape {matrix.batch_shape}")
    return matrix


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
        result = call(*_tensors(B), bias, out)
        if result is not None:
            return result
    matrix = _sparse(A)
    dense = _check_dense("B", B, matrix.device)
    rows, inner = matrix.shape
    if dense.shape[-2] != inner:
        raise ValueError(f"B must have {inner} rows to follow A of shape {matrix.shape}, got {dense.shape[-2]}")
    if dense.axis == 1:
        raise ValueError("B must have one scale or one a column, got one a row, which varies along the sum: "
                         "quantize(x, bits, axis=0)")  # fmt: skip
    left_kind, right_kind = operand_number(matrix), dense.number
    if out is not None and out_dtype is None:
        out_dtype = out.dtype
    scaled = matrix.scale is not None or dense.scale is not None
    dtype = _out_dtype(out_dtype, scaled, inner, left_kind, right_kind)
    n, batch = dense.shape[-1], dense.shape[:-2]
    if out is not None:
        _check_out(out, (*batch, rows, n), dtype, matrix.device)
    offset = None if bias is None else _check_bias(bias, rows, dtype, matrix.device)
    forecast = dense_product.forecast(matrix, dense, dtype) if allow_dense else None
    if forecast and forecast.dense_wins and isinstance(dense, QuantTensor):
        product = dense_product.DenseCall(matrix, dense, dtype)
        if key is not None:
            A._execution[key] = product
        return product(dense.data, dense.scale, bias, out)
    several = 1 if batch.numel() == 1 else 2
    kernel, copy = matrix._constant(
        matrix._version_id, plan_spmm, right_kind, dtype, size_bucket(n), several, atom, config
    )
    left = _factor(matrix.scale, batch, dtype)
    operands = (copy, dense.data, left, _factor(dense.scale, batch, dtype), offset)
    bits, signed = [left_kind.bits, dense.bits], [left_kind.signed, dense.signed]
    if out is None:
        result = library.spmm(*operands, rows, inner, n, bits, signed, dense.packed_dim, kernel, dtype)
    else:
        library.spmm_out(*operands, inner, bits, signed, dense.packed_dim, kernel, out)
        result = out
    if key is not None:
        right = dense.scale if dtype in FLOAT_OUT else None
        if matrix.device.type == "cpu":
            if isinstance(dense, QuantTensor):
                kind = (inner, left_kind.bits, left_kind.signed)
                A._execution[key] = engine_call(copy, A.scale, left, dense, right, bias, result, kind)
        else:
            from magicube_cutlass.dispatch.cuda import spmm_call

            A._execution[key] = spmm_call(kernel, copy, A.scale, left, dense, right, bias, result, inner)
    return result


def _check_allow_dense(atom: str | None, config: SpmmKernel | None) -> None:
    if atom is not None or config is not None:
        raise ValueError(f"allow_dense must be False where a sparse kernel is asked for, got atom={atom!r}, "
                         f"config={config}")  # fmt: skip
    if torch.compiler.is_compiling():
        raise NotImplementedError("allow_dense must be False in a compiled graph: the dense kernel is not in it")


def _tensors(B: Operand) -> tuple[Tensor, Tensor | None]:
    """The data of an operand as a product reads it, and the scale; cheap."""
    if isinstance(B, QuantTensor):  # first: to ask whether something is a Tensor takes longer
        return B.data, B.scale
    if isinstance(B, Tensor):
        return B, None
    if B.transposed:
        return B.data.mT, B.scale.mT if B.scale.ndim else B.scale
    return B.data, B.scale


def _operand_key(B: object) -> tuple[object, ...] | None:
    """Everything that the checks of the products look at of an operand; None for what hides behind another type."""
    kind: tuple[object, ...]
    if type(B) is QuantTensor:
        data, kind = B.data, (B.shape, B.bits, B.signed, B.axis)
    elif type(B) is Tensor:
        wanted = B.requires_grad and torch.is_grad_enabled()
        return "tensor", B.shape, B.stride(), B.device, B.dtype, wanted
    elif type(B) is FloatTensor:
        data, kind = B.data, (B.k, B.dtype, B.block, B.transposed)
    else:
        return None
    if type(data) is not Tensor:
        return None
    scale = None if B.scale is None else (B.scale.shape, B.scale.stride(), B.scale.dtype, B.scale.device)
    return data.shape, data.stride(), data.device, kind, scale


def _call_key(
    B: Operand,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    out: Tensor | None,
    atom: str | None,
    config: SpmmKernel | None,
    allow_dense: bool,
) -> tuple[object, ...] | None:
    """Everything that the checks of :func:`spmm` look at, besides A; None where a call cannot be kept.

    A compiler has to see the operator.
    """
    operand = None if torch.compiler.is_compiling() else _operand_key(B)
    if operand is None:
        return None
    others = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in (bias, out)]
    return (operand, *others, out_dtype, atom, config, allow_dense)


def _check_bias(bias: Tensor, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype in INTEGER_OUT:
        raise TypeError(f"bias needs a float out_dtype, got {dtype}")
    if tuple(bias.shape) != (rows,):
        raise ValueError(f"bias must have shape ({rows},), got {tuple(bias.shape)}")
    if bias.device != device:
        raise ValueError(f"bias must be on {device}, got {bias.device}")
    return bias.to(torch.float32).contiguous()


def _check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if out.dtype != dtype:
        raise TypeError(f"out must have dtype {dtype}, got {out.dtype}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    if out.device != device:
        raise ValueError(f"out must be on {device}, got {out.device}")
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")


def sddmm(
    X: Operand,
    Y: Operand,
    mask: Pattern | SRBCRS | BCRS,
    *,
    out_format: Literal["srbcrs", "bcrs"] = "srbcrs",
    out_dtype: torch.dtype | None = None,
    transposed_y: bool = False,
    atom: str | None = None,
) -> SRBCRS | BCRS:
    """``S[i, j] = scale_X[i] * scale_Y[j] * sum_k X[i, k] Y[j, k]`` at the vectors of ``mask``, of integers exact.

    ``X``: (..., M, K), ``Y``: (..., N, K), or (..., K, N) with ``transposed_y``; each row- or column-major, any widths
    and signs.  Scales are one number or one a row of X, of Y (a column of Y when it is transposed).  ``mask``: (M, N).
    ``out_dtype``, and floats as operands, as in :func:`spmm`.  Returns a matrix on the mask's pattern with
    ``bits=None``; leading dimensions of X and Y, which must agree, lead its values.
    :func:`magicube_cutlass.autograd.sddmm` is differentiable.
    Raises as :func:`spmm` does.  Source: Li, Osawa, Hoefler, SC'22, section IV-E.
    """
    if isinstance(mask, Pattern):  # first: to ask whether something is an SRBCRS takes longer
        pattern, stride = mask, _DEFAULT_STRIDE
    elif isinstance(mask, (SRBCRS, BCRS)):
        pattern, stride = mask.pattern, mask.stride if isinstance(mask, SRBCRS) else _DEFAULT_STRIDE
    else:
        raise TypeError(f"mask must be a Pattern, SRBCRS or BCRS, got {type(mask).__name__}")
    key = _sddmm_key(X, Y, stride, out_format, out_dtype, transposed_y, atom)
    call = pattern._cache.get(key) if key is not None else None
    if call is not None:
        (x_data, x_scale), (y_data, y_scale) = _tensors(X), _tensors(Y)
        kept: SRBCRS | None = call(x_data, y_data, x_scale, y_scale)
        if kept is not None:
            return kept
    if out_format not in ("srbcrs", "bcrs"):
        raise ValueError(f"out_format must be 'srbcrs' or 'bcrs', got {out_format!r}")
    left_op, right_op = _check_dense("X", X, pattern.device), _check_dense("Y", Y, pattern.device)
    inner_y = -2 if transposed_y else -1
    m, n = pattern.shape
    inner = left_op.shape[-1]
    if left_op.shape[-2] != m:
        raise ValueError(f"X must have {m} rows for a mask of shape {pattern.shape}, got {left_op.shape[-2]}")
    if right_op.shape[-3 - inner_y] != n:
        raise ValueError(f"Y must have {n} {'columns' if transposed_y else 'rows'} for a mask of shape "
                         f"{pattern.shape}, got {right_op.shape[-3 - inner_y]}")  # fmt: skip
    if right_op.shape[inner_y] != inner:
        raise ValueError(f"X and Y must have the same inner size, got {inner} and {right_op.shape[inner_y]}")
    if left_op.shape[:-2] != right_op.shape[:-2]:
        raise ValueError(f"X and Y must have the same leading dimensions, got {tuple(left_op.shape[:-2])} and "
                         f"{tuple(right_op.shape[:-2])}")  # fmt: skip
    for name, operand, along in (("X", left_op, 0), ("Y", right_op, 1 if transposed_y else 0)):
        if operand.axis is not None and operand.axis == along:
            raise ValueError(f"{name} must have one scale or one outside the sum, got one along the inner dimension")
    scaled = left_op.scale is not None or right_op.scale is not None
    kinds = left_op.number, right_op.number
    dtype = _out_dtype(out_dtype, scaled, inner, *kinds)
    padded = pattern._constant_layout(pattern._version_id, stride)
    batch = left_op.shape[:-2]
    kernel, copy = pattern._constant(pattern._version_id, plan_sddmm, stride, kinds, dtype, size_bucket(inner), atom)
    values = library.sddmm(
        copy,
        left_op.data,
        right_op.data,
        _factor(left_op.scale, batch, dtype),
        _factor(right_op.scale, batch, dtype),
        [m, n, inner],
        pattern.vector_length,
        stride,
        [left_op.bits, right_op.bits],
        [left_op.signed, right_op.signed],
        inner_y,
        [left_op.packed_dim, right_op.packed_dim],
        kernel,
        dtype,
    )
    result = SRBCRS(
        padded.row_start, padded.row_end, padded.col_indices, values,
        shape=pattern.shape, vector_length=pattern.vector_length, bits=None, stride=stride,
    )  # fmt: skip
    result._cache["pattern"] = pattern
    if key is not None:
        from magicube_cutlass.dispatch.cuda import sddmm_call

        pattern._cache[key] = sddmm_call(kernel, copy, left_op, right_op, inner_y, (m, n, inner), result)
    return result if out_format == "srbcrs" else result.to_bcrs()


def _sddmm_key(
    X: Operand,
    Y: Operand,
    stride: int,
    out_format: str,
    out_dtype: torch.dtype | None,
    transposed_y: bool,
    atom: str | None,
) -> tuple[object, ...] | None:
    """As :func:`_call_key`, for :func:`sddmm` on a GPU; a CPU takes longer than the checks."""
    if out_format != "srbcrs" or torch.compiler.is_compiling():
        return None
    x, y = _operand_key(X), _operand_key(Y)
    if x is None or y is None or X.device.type != "cuda":
        return None
    return ("call", stride, out_dtype, transposed_y, atom, x, y)


def explain(A: SRBCRS | BCRS, B: Operand, *, out_dtype: torch.dtype | None = None) -> str:
    """Which kernel :func:`spmm` runs for these operands, with which digits or instruction, what it moves, and why."""
    matrix = _sparse(A)
    dense = _check_dense("B", B, matrix.device)
    if matrix.device.type == "cuda":
        from magicube_cutlass.ops.explain import explain_spmm

        scaled = matrix.scale is not None or dense.scale is not None
        kinds = operand_number(matrix), dense.number
        return explain_spmm(matrix, dense, _out_dtype(out_dtype, scaled, matrix.shape[1], *kinds))
    kinds = operand_number(matrix), dense.number
    check_pair(*kinds)
    if isinstance(dense, DenseFloats):
        return (f"torch's CSR product of float32, {torch.get_num_threads()} threads: {matrix.shape[0]} x "
                f"{matrix.shape[1]} of {kinds[0].name} times {tuple(dense.shape)} of {kinds[1].name}")  # fmt: skip
    counts = digits(kinds[0]), digits(kinds[1])
    predicted = dense_product.forecast(matrix, dense, out_dtype or torch.int32)
    order = (
        "row"
        if engine.run_dim(engine.Dense(dense.data, dense.bits, dense.signed, -2, dense.packed_dim)) == -1
        else "column"
    )
    return (
        f"CPU engine, {engine.path()} path, {torch.get_num_threads()} threads: {matrix.shape[0]} x {matrix.shape[1]} "
        f"times {tuple(dense.shape)}, {counts[0]} x {counts[1]} digits of 8 bits, B {order}-major, "
        "panels of 64 columns" + ("" if predicted is None else f"\n{predicted}")
    )
