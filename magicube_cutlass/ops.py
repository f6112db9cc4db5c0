"""The sparse products: arguments are checked here, then handed to the torch operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from cute_kernels import cpu
from cute_kernels.integers import digit_count, split_digits
from cute_kernels.operands import Vectors
from magicube_cutlass import library
from magicube_cutlass.bcrs import BCRS
from magicube_cutlass.pattern import Padded, Pattern
from magicube_cutlass.precision import FLOAT_OUT, INTEGER_OUT, check_fits, check_out_dtype
from magicube_cutlass.quantize import QuantTensor
from magicube_cutlass.srbcrs import SRBCRS

if TYPE_CHECKING:
    from magicube_cutlass.kernels import SpmmKernel

_DEFAULT_STRIDE = 32


def _check_dense(name: str, operand: object, device: torch.device) -> QuantTensor:
    if not isinstance(operand, QuantTensor):
        raise TypeError(f"{name} must be a QuantTensor (see quantize, QuantTensor.from_ints), "
                        f"got {type(operand).__name__}")  # fmt: skip
    if len(operand.shape) < 2:
        raise ValueError(f"{name} must have at least 2 dimensions, got shape {tuple(operand.shape)}")
    if operand.device != device:
        raise ValueError(f"{name} must be on {device}, got {operand.device}")
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{name} is on {device}: only CPU and CUDA tensors have a kernel; call .to('cpu')")
    return operand


def _out_dtype(
    out_dtype: torch.dtype | None, scaled: bool, inner: int, left: tuple[int, bool], right: tuple[int, bool]
) -> torch.dtype:
    dtype = out_dtype or (torch.float32 if scaled else torch.int32)
    check_out_dtype(dtype)
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
        matrix = found
    if not isinstance(matrix, SRBCRS):
        raise TypeError(f"A must be an SRBCRS or BCRS, got {type(matrix).__name__}")
    if matrix.bits is None:
        raise TypeError(f"A must hold quantized integers, got results of dtype {matrix.values.dtype}")
    if matrix.batch_shape:
        raise ValueError(f"A must be a single matrix, got a batch of shape {matrix.batch_shape}")
    return matrix


def _cpu_copy(matrix: SRBCRS) -> list[Tensor]:
    """What the engine reads: structure, digit planes and row sums; derived once and kept on the matrix."""
    found = matrix._execution.get("cpu")
    if found is None:
        assert matrix.bits is not None
        planes = split_digits(matrix.ints(), matrix.bits, matrix.signed)
        sums = cpu.row_sums(planes, matrix.row_start, matrix.bits, matrix.signed)
        found = [matrix.row_start, matrix.row_end, matrix.col_indices, planes, sums]
        matrix._execution["cpu"] = found
    return found


def _power_of_two(n: int) -> int:
    """The smallest power of two not below n, by comparisons only: a compiler then keeps n symbolic."""
    power = 16
    while power < n:
        power *= 2
    return power


def _spmm_plan(
    matrix: SRBCRS,
    right: tuple[int, bool],
    out: torch.dtype,
    width: int,
    batch: int,
    atom: str | None,
    config: SpmmKernel | None,
) -> tuple[str, list[Tensor]]:
    """Name of the kernel and the execution copy for it; both are derived once and kept on the matrix."""
    if matrix.device.type == "cpu":
        return "cpu", _cpu_copy(matrix)
    from magicube_cutlass import kernels

    key = (right, out, width, batch, atom, config)
    plan = matrix._execution.get(key)
    if plan is None:
        assert matrix.bits is not None
        kind = kernels.Kind(matrix.vector_length, (matrix.bits, matrix.signed), right, dtype_name(out))
        longest = matrix._execution.get("longest")
        if longest is None:
            lengths = matrix.pattern.row_lengths
            longest = matrix._execution["longest"] = int(lengths.max()) if lengths.numel() else 0
        if config is None:
            config = kernels.choose_spmm(
                kind, kernels.machine(matrix.device.index), vector_rows=matrix.pattern.vector_rows, longest=longest,
                n=width, batch=batch, atom=atom,
            )  # fmt: skip
        kernels.check_spmm(config, kind, longest)
        copy = matrix._execution.get(config.sparse_key())
        if copy is None:
            pattern = matrix.pattern
            vectors = Vectors(pattern.row_offsets, pattern.col_indices, matrix.vectors(), matrix.bits, matrix.signed)
            copy = matrix._execution[config.sparse_key()] = list(config.copy(vectors, matrix.shape[1]))
        plan = matrix._execution[key] = (config.name, copy)
    return plan


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spmm(
    A: SRBCRS | BCRS,
    B: QuantTensor,
    *,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    atom: str | None = None,
    config: SpmmKernel | None = None,
) -> Tensor:
    """``C = scale_A * scale_B * (A B) + bias[:, None]``, the integer product exact.

    ``A``: (M, K) of 4, 8, 12 or 16 bits.  ``B``: (..., K, N), any of these widths, row- or column-major, signed or not
    independently of A; its scale is one number or one a column (``quantize(x, bits, axis=0)``).  ``bias``: (M,),
    float output only.  ``out``: contiguous, (..., M, N), written in place.
    ``out_dtype``: int32 or int64 give the integer product without scales; float32, float16 and bfloat16 apply them.
    Default: int32 when neither operand has a scale, else float32.  ``atom``: the mma instruction to use on a GPU, a
    name in :mod:`cute_kernels.atoms`; default: by widths and device.  ``config``: exactly this kernel, for experiments.
    Returns (..., M, N).  Raises ``TypeError`` for wrong types, ``ValueError`` for shapes, devices and scales that do
    not go together, and where the bound ``K max|A| max|B|`` does not promise that the integer output fits.
    Source: Li, Osawa, Hoefler, SC'22, sections IV-A to IV-D.
    """
    matrix = _sparse(A)
    assert matrix.bits is not None
    dense = _check_dense("B", B, matrix.device)
    rows, inner = matrix.shape
    if dense.shape[-2] != inner:
        raise ValueError(f"B must have {inner} rows to follow A of shape {matrix.shape}, got {dense.shape[-2]}")
    if dense.axis == 1:
        raise ValueError("B must have one scale or one a column, got one a row, which varies along the sum: "
                         "quantize(x, bits, axis=0)")  # fmt: skip
    left_kind, right_kind = (matrix.bits, matrix.signed), (dense.bits, dense.signed)
    if out is not None and out_dtype is None:
        out_dtype = out.dtype
    scaled = matrix.scale is not None or dense.scale is not None
    dtype = _out_dtype(out_dtype, scaled, inner, left_kind, right_kind)
    n, batch = dense.shape[-1], dense.shape[:-2]
    if bias is not None:
        bias = _check_bias(bias, rows, dtype, matrix.device)
    kernel, copy = _spmm_plan(matrix, right_kind, dtype, _power_of_two(n), 1 if batch.numel() == 1 else 2, atom, config)
    operands = (copy, dense.data, _factor(matrix.scale, batch, dtype), _factor(dense.scale, batch, dtype), bias)
    bits, signed = [matrix.bits, dense.bits], [matrix.signed, dense.signed]
    if out is None:
        return library.spmm(*operands, rows, inner, n, bits, signed, dense.packed_dim, kernel, dtype)
    _check_out(out, (*batch, rows, n), dtype, matrix.device)
    library.spmm_out(*operands, inner, bits, signed, dense.packed_dim, kernel, out)
    return out


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
    X: QuantTensor,
    Y: QuantTensor,
    mask: Pattern | SRBCRS | BCRS,
    *,
    out_format: Literal["srbcrs", "bcrs"] = "srbcrs",
    out_dtype: torch.dtype | None = None,
    transposed_y: bool = False,
    atom: str | None = None,
) -> SRBCRS | BCRS:
    """``S[i, j] = scale_X[i] * scale_Y[j] * sum_k X[i, k] Y[j, k]`` at the vectors of ``mask``, the sum exact.

    ``X``: (..., M, K), ``Y``: (..., N, K), or (..., K, N) with ``transposed_y``; each row- or column-major, any widths
    and signs.  Scales are one number or one a row of X, of Y (a column of Y when it is transposed).  ``mask``: (M, N).
    ``out_dtype`` as in :func:`spmm`.  Returns a matrix on the mask's pattern with ``bits=None``; leading dimensions
    of X and Y, which must agree, lead its values.
    Raises as :func:`spmm` does.  Source: Li, Osawa, Hoefler, SC'22, section IV-E.
    """
    pattern = mask if isinstance(mask, Pattern) else getattr(mask, "pattern", None)
    if not isinstance(pattern, Pattern):
        raise TypeError(f"mask must be a Pattern, SRBCRS or BCRS, got {type(mask).__name__}")
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
    kinds = (left_op.bits, left_op.signed), (right_op.bits, right_op.signed)
    dtype = _out_dtype(out_dtype, scaled, inner, *kinds)
    stride = mask.stride if isinstance(mask, SRBCRS) else _DEFAULT_STRIDE
    padded = _layout(pattern, stride)
    batch = left_op.shape[:-2]
    kernel, copy = _sddmm_plan(pattern, stride, kinds, dtype, _power_of_two(inner), atom)
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
    return result if out_format == "srbcrs" else result.to_bcrs()


def _layout(pattern: Pattern, stride: int) -> Padded:
    """The padded layout; its size depends on the data, so a compiler takes it as a constant."""
    return pattern.padded(stride)


def _sddmm_plan(
    pattern: Pattern,
    stride: int,
    kinds: tuple[tuple[int, bool], tuple[int, bool]],
    out: torch.dtype,
    inner: int,
    atom: str | None,
) -> tuple[str, list[Tensor]]:
    """Name of the kernel and what it reads of the pattern."""
    padded = pattern.padded(stride)
    if pattern.device.type == "cpu":
        return "cpu", [padded.row_start, padded.row_end, padded.col_indices]
    from magicube_cutlass import kernels

    kind = kernels.Kind(pattern.vector_length, *kinds, dtype_name(out))
    config = kernels.choose_sddmm(kind, kernels.machine(pattern.device.index), stride=stride, inner=inner, atom=atom)
    key = ("block_rows", stride)
    if key not in pattern._cache:
        blocks = torch.arange(padded.col_indices.numel() // stride, device=pattern.device)
        owners = torch.searchsorted(padded.row_start // stride, blocks, right=True) - 1
        pattern._cache[key] = owners.to(torch.int32)
    return config.name, [pattern._cache[key], padded.col_indices]


# What torch.compiler.assume_constant_result sets; calling that imports the compiler, a second of waiting.
for _constant in (_layout, _spmm_plan, _sddmm_plan):
    _constant.__dict__["_dynamo_marked_constant"] = True


def explain(A: SRBCRS | BCRS, B: QuantTensor) -> str:
    """Which kernel :func:`spmm` runs for these operands, and with which digits."""
    matrix = _sparse(A)
    assert matrix.bits is not None
    dense = _check_dense("B", B, matrix.device)
    digits = digit_count(matrix.bits), digit_count(dense.bits)
    order = (
        "row" if cpu.run_dim(cpu.Dense(dense.data, dense.bits, dense.signed, -2, dense.packed_dim)) == -1 else "column"
    )
    return (
        f"CPU engine, {cpu.path()} path, {torch.get_num_threads()} threads: {matrix.shape[0]} x {matrix.shape[1]} "
        f"times {tuple(dense.shape)}, {digits[0]} x {digits[1]} digits of 8 bits, B {order}-major, "
        "panels of 64 columns"
    )
