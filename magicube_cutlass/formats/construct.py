"""Conversions that both formats share: inputs to vectors on a pattern, and back.

Between formats a matrix is :class:`Parts`: a pattern, its vectors (..., vectors, V), one value per element, and the
scale.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from cute_kernels.dtypes import FLOAT_DTYPES, FLOATS, float_of
from cute_kernels.integers import check_bits, check_range, int_range, is_integer, value_dtype, widen
from magicube_cutlass.checks import check_shape, check_tensor, check_vector_length
from magicube_cutlass.formats.fill_in import warn_of_fill_in
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.smtx import read_smtx
from magicube_cutlass.quantization.float_operands import PACKED, float_values
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor
from magicube_cutlass.quantization.quantize import encode_on_gpu, quantize_along, refuse

if TYPE_CHECKING:
    from cute_kernels.convert.dense_to_sparse import Compressed

# of values without bits; those of the formats of cute_kernels.dtypes are operands too
RESULT_DTYPES = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)

Clip = float | Literal["max", "mse"]
Rounding = Literal["nearest", "trunc"]


class Parts(NamedTuple):
    """A matrix between formats."""

    pattern: Pattern
    vectors: Tensor
    scale: Tensor | None


_MOVABLE = {torch.uint16: torch.int16} | {
    FLOAT_DTYPES[name]: torch.uint8 for name, number in FLOATS.items() if number.bits <= 8
}


def indexable_view(tensor: Tensor) -> Tensor:
    """Return the tensor with uint16 viewed as int16 and small floats as uint8, which torch can select from."""
    return tensor.view(_MOVABLE[tensor.dtype]) if tensor.dtype in _MOVABLE else tensor


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on `device`, itself if it is there; packed floats move as bytes."""
    if tensor.dtype != PACKED:
        return tensor.to(device)
    raw = tensor.view(torch.uint8)
    there = raw.to(device)
    return tensor if there is raw else there.view(PACKED)


def narrow(ints: Tensor, bits: int, signed: bool) -> Tensor:
    """Return in-range integers of any dtype in :func:`value_dtype`, one per element."""
    dtype = value_dtype(bits, signed)
    if ints.dtype == dtype:
        return ints
    wide = widen(ints)
    return wide.to(torch.int16).view(dtype) if dtype == torch.uint16 else wide.to(dtype)


def _check_axis(axis: int | None) -> None:
    if axis not in (None, 1):
        raise ValueError(
            f"scale must be 'tensor' or 'row', got {'column' if axis == 0 else axis!r}: a scale per column varies "
            "along the sum of a product and cannot be taken out of it; scale the other operand's rows instead"
        )


def _integers(
    values: Tensor,
    bits: int,
    signed: bool,
    axis: int | None,
    clip: Clip = "max",
    rounding: Rounding = "nearest",
    name: str = "values",
) -> tuple[Tensor, Tensor | None]:
    """Integers in :func:`value_dtype` and their scale: floats are quantized, integers checked."""
    check_bits(bits)
    _check_axis(axis)
    if values.is_floating_point():
        quantized = quantize_along(values.detach(), bits, axis, signed, clip, rounding)
        return quantized.ints(), quantized.scale
    check_range(values, bits, signed, name)
    return narrow(values, bits, signed), None


def gather_vectors(dense: Tensor, pattern: Pattern) -> Tensor:
    """Return the vectors of a dense matrix (M, K) at a pattern: (vectors, V) of the same dtype, zero beyond M."""
    v, rows = pattern.vector_length, pattern.vector_rows
    movable = indexable_view(dense)
    if dense.shape[0] % v and dense.numel():
        movable = torch.nn.functional.pad(movable, (0, 0, 0, rows * v - dense.shape[0]))
    grouped = movable.reshape(rows, v, dense.shape[1]).transpose(1, 2)  # (R, K, V)
    return grouped[pattern.row_indices, pattern.col_indices].contiguous().view(dense.dtype)


def dense_integers(
    dense: Tensor, bits: int, signed: bool, axis: int | None, clip: Clip, rounding: Rounding
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the integers of a dense matrix, their scale, and where it is nonzero before rounding, bool (M, K)."""
    check_tensor("dense", dense, ndim=2)
    ints, scale = _integers(dense, bits, signed, axis, clip, rounding, "dense")
    return ints, scale, indexable_view(dense) != 0


def dense_parts(
    dense: Tensor,
    vector_length: int,
    bits: int,
    signed: bool,
    axis: int | None,
    clip: Clip,
    rounding: Rounding,
) -> Parts:
    """Return the vectors with a nonzero element."""
    ints, scale, mask = dense_integers(dense, bits, signed, axis, clip, rounding)
    pattern = Pattern.from_dense(mask, vector_length)
    return Parts(pattern, gather_vectors(ints, pattern), scale)


def check_masked(values: Tensor, mask: Tensor) -> None:
    """Raise unless `values` and the bool `mask` are matrices of one shape on one device."""
    check_tensor("values", values, ndim=2)
    check_tensor("mask", mask, dtype=torch.bool, ndim=2, device=values.device)
    if mask.shape != values.shape:
        raise ValueError(f"mask must have the shape of values {tuple(values.shape)}, got {tuple(mask.shape)}")


def compress_on_gpu(
    dense: Tensor,
    mask: Tensor | None,
    vector_length: int,
    bits: int,
    signed: bool,
    stride: int,
    axis: int | None,
    clip: Clip = "max",
    rounding: Rounding = "nearest",
) -> tuple[Compressed, Tensor | None]:
    """Return the tensors of an SR-BCRS matrix and its scale, by GPU kernels.

    Equal to :func:`dense_parts` and, with a mask, :func:`mask_parts`. Waits once for the device, for the size of the
    result and all errors. Matrices without contiguous rows, other float dtypes and masked floats are copied.

    Parameters
    ----------
    dense : Tensor, shape (M, K)
        CUDA tensor, not empty.
    mask : Tensor, shape (M, K), or None
        bool.
    vector_length, bits, signed, stride, axis, clip, rounding
        As for :meth:`SRBCRS.from_dense`.
    """
    from cute_kernels.convert import dense_to_sparse as kernels

    check_vector_length(vector_length)
    check_bits(bits)
    _check_axis(axis)
    name = "dense" if mask is None else "values"
    dense, scale, ints = dense.detach(), None, None
    report = torch.zeros(2, dtype=torch.int64, device=dense.device)
    if dense.is_floating_point():
        dense = dense if dense.dtype in kernels.FLOATS else dense.float()
        dense = kernels.rows_of(dense if mask is None else dense.masked_fill(~mask, 0))
        ints, scale = encode_on_gpu(dense, bits, axis, signed, rounding == "trunc", clip, report.data_ptr() + 8)
    elif not is_integer(dense.dtype):
        check_range(dense, bits, signed, name)  # raises

    def raise_for(flags: int) -> None:
        if dense.is_floating_point():
            refuse(dense, flags, signed)
        else:
            check_range(dense if mask is None else dense.masked_fill(~mask, 0), bits, signed, name)

    found = kernels.compress(
        dense, bits=bits, signed=signed, vector_length=vector_length, stride=stride, mask=mask, ints=ints,
        report=report, refuse=raise_for,
    )  # fmt: skip
    return found, scale


def masked_integers(
    values: Tensor, mask: Tensor, bits: int, signed: bool, axis: int | None
) -> tuple[Tensor, Tensor | None]:
    """Return the integers of `values` inside `mask`, anything elsewhere, and their scale."""
    check_bits(bits)
    _check_axis(axis)
    if bits in (8, 16) and values.dtype == value_dtype(bits, signed):  # any value is in range
        return values, None
    selected = indexable_view(values)
    return _integers(torch.where(mask, selected, selected.new_zeros(())).view(values.dtype), bits, signed, axis)


def takes_floats(
    values: Tensor | ScaledFloatTensor,
    bits: int | None,
    dtype: str | None,
    signed: bool,
    clip: Clip = "max",
    rounding: Rounding = "nearest",
) -> bool:
    """Return whether the arguments of a constructor mean float values; `ValueError` if they mean both."""
    number = float_of(values.dtype) if isinstance(values, Tensor) else None
    if not (isinstance(values, ScaledFloatTensor) or dtype is not None or (number is not None and number.bits == 8)):
        return False
    what = f"dtype {dtype!r}" if dtype is not None else f"values of {values.dtype}"
    for name, given, wanted in (
        ("bits", bits, None), ("signed", signed, True), ("clip", clip, "max"), ("rounding", rounding, "nearest"),
    ):  # fmt: skip
        if given != wanted:
            raise ValueError(f"{name} must be {wanted!r} for {what}, got {given!r}")
    return True


def float_parts(
    values: Tensor | ScaledFloatTensor, mask: Tensor | None, vector_length: int, dtype: str | None, axis: int | None
) -> tuple[Parts, bool]:
    """Return the parts of float values, and whether they are e2m1 (as e4m3 here)."""
    if mask is not None:
        codes = values.codes() if isinstance(values, ScaledFloatTensor) else values
        check_masked(codes, mask)
    elif isinstance(values, Tensor):
        check_tensor("dense", values, ndim=2)
    found = float_values(values, dtype, axis, mask)
    pattern = Pattern.from_dense(found.nonzero if mask is None else mask, vector_length)
    return Parts(pattern, gather_vectors(found.values, pattern), found.scale), found.packed


def mask_parts(values: Tensor, mask: Tensor, vector_length: int, bits: int, signed: bool, axis: int | None) -> Parts:
    """Return the vectors with a true element in `mask`; values outside become zero."""
    check_masked(values, mask)
    pattern = Pattern.from_dense(mask, vector_length)
    ints, scale = masked_integers(values, mask, bits, signed, axis)
    selected = indexable_view(ints).masked_fill(~mask, 0).view(ints.dtype)
    return Parts(pattern, gather_vectors(selected, pattern), scale)


def coordinate_parts(
    rows: Tensor,
    cols: Tensor,
    values: Tensor,
    shape: tuple[int, int],
    vector_length: int,
    bits: int,
    signed: bool,
    axis: int | None,
) -> Parts:
    """Return the matrix with ``values[i]`` at ``(rows[i], cols[i])``; duplicates are summed, zeros stored."""
    m, k = check_shape(shape)
    pattern = Pattern.from_indices(rows, cols, (m, k), vector_length)
    warn_of_fill_in(rows, cols, pattern, bits)
    if not values.is_floating_point():
        if not is_integer(values.dtype):
            raise TypeError(f"values must be integer or float, got {values.dtype}")
        values = widen(values)  # a sum of repeated places must not wrap
    places, entry = torch.unique(rows * k + cols, return_inverse=True)
    summed = values.new_zeros(places.shape).index_add(0, entry, values)
    rows, cols = places // max(k, 1), places % max(k, 1)
    if axis == 1 and values.is_floating_point():
        lengths = torch.bincount(rows, minlength=m)
        column = torch.arange(len(rows), device=rows.device) - (lengths.cumsum(0) - lengths)[rows]
        grid = summed.new_zeros(m, int(lengths.max()) if m else 0)
        grid[rows, column] = summed
        ints, scale = _integers(grid, bits, signed, axis)
        ints = indexable_view(ints)[rows, column].view(ints.dtype)
    else:
        ints, scale = _integers(summed.unsqueeze(0), bits, signed, axis)
        ints = ints.squeeze(0)
    keys = pattern.row_indices * k + pattern.col_indices
    vector = torch.searchsorted(keys, rows // vector_length * k + cols)
    vectors = torch.zeros(pattern.vectors, vector_length, dtype=ints.dtype, device=ints.device)
    indexable_view(vectors)[vector, rows % vector_length] = indexable_view(ints)
    return Parts(pattern, vectors, scale)


def scipy_parts(matrix: Any, vector_length: int, bits: int, signed: bool, axis: int | None) -> Parts:
    """Return the parts of a ``scipy.sparse`` matrix or array."""
    from scipy.sparse import issparse

    if not issparse(matrix):
        raise TypeError(f"matrix must be a scipy.sparse matrix or array, got {type(matrix).__name__}")
    coo = matrix.tocoo()
    if coo.ndim != 2:
        raise ValueError(f"matrix must have 2 dimensions, got {coo.ndim}")
    rows, cols, values = (torch.as_tensor(array.copy(), device="cpu") for array in (coo.row, coo.col, coo.data))
    return coordinate_parts(rows.long(), cols.long(), values, coo.shape, vector_length, bits, signed, axis)


def torch_sparse_parts(tensor: Tensor, vector_length: int, bits: int, signed: bool, axis: int | None) -> Parts:
    """Return the parts of a torch tensor of layout COO, CSR, CSC or BSR."""
    rows, cols, values = _torch_coordinates(tensor)
    shape = (tensor.shape[0], tensor.shape[1])
    return coordinate_parts(rows, cols, values.detach(), shape, vector_length, bits, signed, axis)


def _torch_coordinates(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a torch tensor, got {type(tensor).__name__}")
    if tensor.ndim != 2:
        raise ValueError(f"tensor must have 2 dimensions, got {tensor.ndim}")
    if tensor.layout == torch.sparse_coo:
        if tensor.sparse_dim() != 2:
            raise ValueError(f"tensor must have 2 sparse dimensions, got {tensor.sparse_dim()}")
        rows, cols = tensor._indices()  # uncoalesced ones too; repeated places are summed later
        return rows, cols, tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        offsets, minor = tensor.crow_indices(), tensor.col_indices()
    elif tensor.layout == torch.sparse_csc:
        offsets, minor = tensor.ccol_indices(), tensor.row_indices()
    else:
        raise TypeError(f"tensor must have layout sparse COO, CSR, CSC or BSR, got {tensor.layout}")
    minor, values = minor.long(), tensor.values()
    major = torch.arange(len(offsets) - 1, device=offsets.device).repeat_interleave(offsets.diff())
    if tensor.layout == torch.sparse_csc:
        return minor, major, values
    if tensor.layout == torch.sparse_csr:
        return major, minor, values
    height, width = values.shape[1:]
    rows = major[:, None, None] * height + torch.arange(height, device=major.device)[:, None]
    cols = minor[:, None, None] * width + torch.arange(width, device=major.device)
    return rows.expand(values.shape).flatten(), cols.expand(values.shape).flatten(), values.flatten()


def smtx_parts(path: str | PathLike[str], vector_length: int, bits: int, signed: bool, seed: int) -> Parts:
    """Return the pattern of an ``.smtx`` file with random integers of the full range."""
    low, high = int_range(bits, signed)
    pattern = read_smtx(path, vector_length=vector_length)
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randint(low, high + 1, (pattern.vectors, vector_length), generator=generator, device="cpu")
    return Parts(pattern, narrow(vectors, bits, signed), None)


def pattern_parts(pattern: Pattern, vectors: Tensor, bits: int | None, signed: bool, scale: Tensor | None) -> Parts:
    """Return checked vectors (..., vectors, V) in pattern order, zero beyond M."""
    check_tensor("vectors", vectors, device=pattern.device)
    expected = (pattern.vectors, pattern.vector_length)
    if vectors.shape[-2:] != expected:
        raise ValueError(f"vectors must have shape (*batch, {expected[0]}, {expected[1]}), got {tuple(vectors.shape)}")
    if bits is None:
        check_result_dtype(vectors.dtype)
    else:
        check_range(vectors, bits, signed, "vectors")
        vectors = narrow(vectors, bits, signed)
    if pattern.shape[0] % pattern.vector_length:
        vectors = indexable_view(vectors).masked_fill(beyond(pattern), 0).view(vectors.dtype)
    return Parts(pattern, vectors, scale)


def transpose_error(scale: Tensor) -> ValueError:
    """The error for the transpose of a matrix with a per-row scale."""
    return ValueError(
        f"transpose needs one scale for the matrix, got scale of shape {tuple(scale.shape)}: a scale per row "
        "becomes one per column, which cannot be taken out of a product; quantize with scale='tensor', or transpose "
        "the float matrix and quantize that"
    )


def transpose_parts(pattern: Pattern, vectors: Tensor, scale: Tensor | None) -> Parts:
    """Return the transposed matrix; `ValueError` for a per-row scale, which would become per-column."""
    if scale is not None and scale.ndim:
        raise transpose_error(scale)
    target, positions = pattern.transpose_map()
    batch, size = vectors.shape[:-2], target.vectors * pattern.vector_length
    moved = torch.zeros(*batch, size + 1, dtype=vectors.dtype, device=vectors.device)
    indexable_view(moved)[..., positions] = indexable_view(
        vectors
    )  # position -1, beyond M, is the place that is dropped
    return Parts(target, moved[..., :size].reshape(*batch, target.vectors, pattern.vector_length), scale)


def beyond(pattern: Pattern) -> Tensor:
    """Return bool (vectors, V): entries in rows beyond M."""
    lanes = torch.arange(pattern.vector_length, device=pattern.device)
    return pattern.row_indices[:, None] * pattern.vector_length + lanes >= pattern.shape[0]


def check_result_dtype(dtype: torch.dtype) -> None:
    """Raise `TypeError` unless values without `bits` can have this dtype."""
    number = float_of(dtype)
    if dtype not in RESULT_DTYPES and (number is None or number.bits != 8):
        eight = [FLOAT_DTYPES[name] for name, each in FLOATS.items() if each.bits == 8]
        allowed = ", ".join(str(one).removeprefix("torch.") for one in (*RESULT_DTYPES, *eight))
        raise TypeError(f"values without bits must be one of {allowed}, got {dtype}; give bits for quantized integers")
