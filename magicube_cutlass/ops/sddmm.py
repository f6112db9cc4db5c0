"""SDDMM: arguments are checked, a kernel is selected, a torch operator runs it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cute_kernels import watch
from cute_kernels.dtypes import INTEGER_OUT, constant_of, result_dtype
from cute_kernels.watch import watched
from magicube_cutlass.checks import has_dispatch_mode
from magicube_cutlass.dispatch import cpu
from magicube_cutlass.dispatch.plan import plan_sddmm, size_bucket
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.fill_in import mask_pattern
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.formats.tracking import NO_RECORDS, RECORDS, is_current, keep_record
from magicube_cutlass.ops import torch_ops
from magicube_cutlass.ops.problem import Operand, check_dense, float32_scale, operand_key, operand_tensors
from magicube_cutlass.quantization.float_operands import DenseFloats
from magicube_cutlass.quantization.quant_tensor import QuantTensor

_DEFAULT_STRIDE = 32
Mask = Pattern | SRBCRS | BCRS | Tensor | Any  # Any: matrices and arrays of scipy.sparse


@watched("magicube_cutlass.sddmm")
def sddmm(
    X: Operand,
    Y: Operand,
    mask: Mask,
    *,
    out_format: Literal["srbcrs", "bcrs"] = "srbcrs",
    out_dtype: torch.dtype | None = None,
    transposed_y: bool = False,
    atom: str | None = None,
) -> SRBCRS | BCRS:
    """Multiply two dense matrices at the nonzeros of a pattern.

    ``S[i, j] = scale_X[i] * scale_Y[j] * sum_k X[i, k] Y[j, k]`` at the vectors of `mask`. Integer sums are exact;
    float products accumulate in float32. Implements the SDDMM of [1]_. A differentiable form is
    :func:`magicube_cutlass.autograd.sddmm`.

    Parameters
    ----------
    X : QuantTensor, ScaledFloatTensor or Tensor, shape (..., M, K)
        Left operand, row- or column-major, with a per-tensor or per-row scale.
    Y : QuantTensor, ScaledFloatTensor or Tensor, shape (..., N, K)
        Right operand with a per-tensor or per-row scale; shape (..., K, N) and a per-column scale with `transposed_y`.
    mask : Pattern, SRBCRS, BCRS, bool Tensor or scipy.sparse matrix, shape (M, N)
        Pattern of the result. Of a tensor or a scipy matrix exactly its elements are sampled, in vectors of at most 8
        as long as that allows; it becomes a pattern in each call, so make a :class:`Pattern` for many calls.
    out_format : {"srbcrs", "bcrs"}, default "srbcrs"
        Format of the result.
    out_dtype : torch.dtype, optional
        As in :func:`magicube_cutlass.spmm`.
    transposed_y : bool, default False
        Y is (..., K, N).
    atom : str, optional
        MMA atom. Default: selected by dtypes and device.

    Returns
    -------
    SRBCRS or BCRS, shape (M, N)
        Results on the mask's pattern, ``bits=None``; leading dimensions of X and Y lead its values.

    Raises
    ------
    TypeError
        If a dtype is not supported.
    ValueError
        If shapes, devices or scales do not match, or int32 could overflow.

    See Also
    --------
    spmm : The product of a sparse and a dense matrix.

    References
    ----------
    .. [1] Li, Osawa, Hoefler, SC'22, section IV-C.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> X = mc.QuantTensor.from_ints(torch.arange(8 * 4).reshape(8, 4), bits=8)
    >>> Y = mc.QuantTensor.from_ints(torch.ones(16, 4, dtype=torch.int8), bits=8)
    >>> mask = mc.Pattern.from_dense(torch.eye(8, 16, dtype=torch.bool), vector_length=8)
    >>> S = mc.sddmm(X, Y, mask)
    >>> S.to_dense()[0, :3]
    tensor([6, 6, 6], dtype=torch.int32)
    """
    return early_sddmm(X, Y, mask, out_format, out_dtype, transposed_y, atom, False)


def early_sddmm(
    X: Operand,
    Y: Operand,
    mask: Mask,
    out_format: Literal["srbcrs", "bcrs"] = "srbcrs",
    out_dtype: torch.dtype | None = None,
    transposed_y: bool = False,
    atom: str | None = None,
    early: bool = True,
) -> SRBCRS | BCRS:
    """As :func:`sddmm`, behind the kernel that quantized X or Y.

    `early`: a cached call may start before that kernel ends.
    """
    compiling = torch.compiler.is_compiling()
    pattern, stride = as_pattern(mask, compiling)
    key: tuple[object, ...] | None = None
    if out_format == "srbcrs" and not compiling and not has_dispatch_mode():
        of_x, of_y = operand_key(X), operand_key(Y)
        if of_x is not None and of_y is not None:
            key = (of_x, of_y, stride, out_dtype, transposed_y, atom, early)
    record = None if key is None else pattern._cache.get(RECORDS, NO_RECORDS).get(key)
    if record is not None:
        x_data, x_scale = (X.data, X.scale) if type(X) is QuantTensor else operand_tensors(X)
        y_data, y_scale = (Y.data, Y.scale) if type(Y) is QuantTensor else operand_tensors(Y)
        cached: SRBCRS | None = record(x_data, y_data, x_scale, y_scale)
        if cached is not None:
            return cached
    if out_format not in ("srbcrs", "bcrs"):
        raise ValueError(f"out_format must be 'srbcrs' or 'bcrs', got {out_format!r}")
    x, y = check_dense("X", X, pattern.device), check_dense("Y", Y, pattern.device)
    inner_y = -2 if transposed_y else -1
    check_operands(x, y, pattern, transposed_y)
    m, n = pattern.shape
    inner = x.shape[-1]
    scaled = x.scale is not None or y.scale is not None
    kinds = x.element_type, y.element_type
    dtype = result_dtype(out_dtype, scaled, inner, *kinds)
    padded = pattern._constant(pattern._version_id, Pattern.padded, stride)
    scales = [None if dtype in INTEGER_OUT else float32_scale(each.scale, x.shape[:-2]) for each in (x, y)]
    types = constant_of(kinds[0]), constant_of(kinds[1])
    kernel, copy = pattern._constant(pattern._version_id, plan_sddmm, stride, types, dtype, size_bucket(inner), atom)
    if watch.LEVEL > 1 and not compiling:
        watch.selected("sddmm", kernel, copy)
    values = torch_ops.sddmm(
        copy, x.data, y.data, *scales, [m, n, inner], pattern.vector_length, stride, [x.bits, y.bits],
        [x.signed, y.signed], inner_y, [x.packed_dim, y.packed_dim], kernel, dtype,
    )  # fmt: skip
    result = SRBCRS(
        padded.row_start, padded.row_end, padded.col_indices, values,
        shape=pattern.shape, vector_length=pattern.vector_length, bits=None, stride=stride,
    )  # fmt: skip
    if not compiling:
        result._trust()
    result._cache["pattern"] = pattern
    if key is not None:
        _keep_record(key, pattern, kernel, copy, (x, y), inner_y, result, early)
    return result if out_format == "srbcrs" else result.to_bcrs()


def _keep_record(
    key: tuple[object, ...], pattern: Pattern, kernel: str, copy: list[Tensor],
    operands: tuple[QuantTensor | DenseFloats, QuantTensor | DenseFloats], inner_y: int, result: SRBCRS, early: bool,
) -> None:  # fmt: skip
    """Keep the product of these operands as a record of the pattern, if it can be one."""
    sizes = *pattern.shape, operands[0].shape[-1]
    if pattern.device.type == "cpu":
        record: object = cpu.sddmm_record(kernel, copy, *operands, inner_y, sizes, result)
    else:
        from magicube_cutlass.dispatch.cuda import sddmm_call

        record = sddmm_call(kernel, copy, *operands, inner_y, sizes, result, early)
    if record is not None:
        keep_record(pattern._cache, key, record)


def as_pattern(mask: object, compiling: bool) -> tuple[Pattern, int]:
    """Return the pattern of `mask`, scanned if a scan is due, and the stride of a result on it."""
    if isinstance(mask, Pattern):  # first: to ask whether something is an SRBCRS takes longer
        pattern, stride = mask, _DEFAULT_STRIDE
    elif isinstance(mask, (SRBCRS, BCRS)):
        pattern, stride = mask.pattern, mask.stride if isinstance(mask, SRBCRS) else _DEFAULT_STRIDE
    else:
        made = None if compiling else mask_pattern(mask)
        if made is None:
            raise TypeError(f"mask must be a Pattern, SRBCRS, BCRS, bool tensor or scipy.sparse matrix, got "
                            f"{type(mask).__name__}")  # fmt: skip
        pattern, stride = made, _DEFAULT_STRIDE
    if not compiling and not is_current(pattern, pattern._cache.get("seen")):
        pattern.refresh()
    return pattern, stride


def check_operands(
    x: QuantTensor | DenseFloats, y: QuantTensor | DenseFloats, pattern: Pattern, transposed_y: bool
) -> None:
    """Raise ``ValueError`` unless shapes and scales match."""
    m, n = pattern.shape
    inner, inner_y = x.shape[-1], -2 if transposed_y else -1
    if x.shape[-2] != m:
        raise ValueError(f"X must have {m} rows for a mask of shape {pattern.shape}, got {x.shape[-2]}")
    if y.shape[-3 - inner_y] != n:
        raise ValueError(f"Y must have {n} {'columns' if transposed_y else 'rows'} for a mask of shape "
                         f"{pattern.shape}, got {y.shape[-3 - inner_y]}")  # fmt: skip
    if y.shape[inner_y] != inner:
        raise ValueError(f"X and Y must have the same inner size, got {inner} and {y.shape[inner_y]}")
    if x.shape[:-2] != y.shape[:-2]:
        raise ValueError(f"X and Y must have the same leading dimensions, got {tuple(x.shape[:-2])} and "
                         f"{tuple(y.shape[:-2])}")  # fmt: skip
    for name, operand, along in (("X", x, 0), ("Y", y, 1 if transposed_y else 0)):
        if operand.axis is not None and operand.axis == along:
            raise ValueError(f"{name} must have one scale or one outside the sum, got one along the inner dimension")
