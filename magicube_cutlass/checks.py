"""Checks of arguments that all formats share; each error names the argument and both values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

Granularity = Literal["tensor", "row", "column"]  # what shares a scale
AXES: dict[str | None, int | None] = {None: None, "tensor": None, "row": 1, "column": 0}
NOT_GIVEN: Any = "not given"  # stands for `axis`, of which None means a per-tensor scale
VECTOR_LENGTHS = (1, 2, 4, 8, 16, 32)
STRIDES = (16, 32, 64)
_EDITIONS = count(1)
MAX_DIM = 2**31 - 1  # column indices are int32, and row * K + column must fit in int64


def new_version_id() -> str:
    """Return a name that no other object has: a compiler distinguishes objects by it."""
    return "" if torch.compiler.is_compiling() else str(next(_EDITIONS))


def renamed_property(old: str, new: str) -> property:
    """Return the property `old`, which warns and reads or writes the property `new`."""
    text = f"{old} is deprecated; use {new}"

    def get(self: object) -> object:
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    def put(self: object, value: object) -> None:
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        setattr(self, new, value)

    return property(get, put, doc=f"Deprecated name of `{new}`.")


def axis_of(scale: object, axis: object = NOT_GIVEN) -> int | None:
    """Return the axis of the scales that the arguments `scale` and, deprecated, `axis` of a caller's caller name.

    Examples
    --------
    >>> [axis_of(scale) for scale in ("tensor", "row", "column")]
    [None, 1, 0]
    """
    if axis == NOT_GIVEN and isinstance(scale, int) and not isinstance(scale, bool):
        scale, axis = None, scale  # by position
    if axis != NOT_GIVEN:
        names = {None: "tensor", 1: "row", 0: "column"}
        new = names.get(axis) if axis is None or isinstance(axis, int) else None
        if scale is not None or new is None or isinstance(axis, bool):
            raise ValueError(
                f"scale must be 'tensor', 'row' or 'column' without axis, got scale={scale!r}, axis={axis!r}"
            )
        if not torch.compiler.is_compiling():
            warnings.warn(f"axis={axis} is deprecated; use scale={new!r}", DeprecationWarning, stacklevel=3)
        return AXES[new]
    if not (scale is None or isinstance(scale, str)) or scale not in AXES:
        raise ValueError(f"scale must be 'tensor', 'row' or 'column', got {scale!r}")
    return AXES[scale]


def check_vector_length(vector_length: int) -> None:
    """Raise `ValueError` unless `vector_length` is 1, 2, 4, 8, 16 or 32."""
    if isinstance(vector_length, bool) or vector_length not in VECTOR_LENGTHS:
        raise ValueError(f"vector_length must be one of {VECTOR_LENGTHS}, got {vector_length!r}")


def check_stride(stride: int) -> None:
    """Raise `ValueError` unless `stride` is 16, 32 or 64."""
    if stride not in STRIDES:
        raise ValueError(f"stride must be one of {STRIDES}, got {stride!r}")


def check_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape as (M, K); raise unless it is two integers in [0, 2^31 - 1]."""
    sizes = tuple(shape)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f"shape must hold two integers, got {sizes!r}")
    if len(sizes) != 2:
        raise ValueError(f"shape must have 2 dimensions, got {len(sizes)}: {sizes}")
    for size in sizes:
        if not 0 <= size <= MAX_DIM:
            raise ValueError(f"shape must hold sizes in [0, {MAX_DIM}], got {sizes}")
    return sizes[0], sizes[1]


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    ndim: int | None = None,
    length: int | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise unless `tensor` has this dtype, rank, length and device; reads no data."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {tensor.layout}")
    if not torch.compiler.is_compiling() and (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()):
        raise ValueError(f"{name} must hold its values, got a negated, conjugate or zero tensor; use {name}.clone()")
    if not torch.compiler.is_compiling() and is_transformed(tensor):
        raise transform_error(name)
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if ndim is not None and tensor.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got {tensor.ndim} (shape {tuple(tensor.shape)})")
    if length is not None and tensor.shape[0] != length:
        raise ValueError(f"{name} must have {length} entries, got {tensor.shape[0]}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device} like the other tensors, got {tensor.device}")


# How many counters, fake tensors and the like are on: they see operators only.
has_dispatch_mode: Callable[[], int] = torch._C._len_torch_dispatch_stack
is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def transform_error(name: str) -> NotImplementedError:
    """The error for a tensor of a ``torch.func`` transform, which has no memory that a kernel could read."""
    return NotImplementedError(f"{name} must not belong to a torch.func transform (grad, vmap, jvp), got a tensor that "
                               "does; use torch.autograd.grad, and batch dimensions instead of vmap")  # fmt: skip


def first_true(mask: Tensor) -> int | None:
    """Return the flat index of the first true entry, or None; waits for the device."""
    if mask.numel() == 0:
        return None
    flat = mask.flatten()
    index = int(flat.to(torch.uint8).argmax())
    return index if bool(flat[index]) else None


def vector_rows(rows: int, vector_length: int) -> int:
    """Return the number of vector rows that cover `rows` rows."""
    return -(-rows // vector_length)


def check_pointers(start: Tensor, end: Tensor, stride: int, total: int) -> None:
    """Raise `ValueError` unless vector rows from `start` to `end` fill `total` padded places; scans both."""
    following = torch.cat((start, start.new_tensor([total])))[1:]
    if len(start) == 0 and total:
        raise ValueError(f"col_indices must be empty without vector rows, got {total} entries")
    if len(start) and int(start[0]) != 0:
        raise ValueError(f"row_start[0] must be 0, got {int(start[0])}")
    needed = (end - start + stride - 1) // stride * stride
    for bad, rule in (
        ((start < 0) | (start > total), "row_start[{0}] must lie in [0, {total}], got {start}"),
        (start % stride != 0, "row_start[{0}] must be a multiple of stride = {stride}, got {start}"),
        (following < start, "row_start must not decrease, got {start} then {next} after vector row {0}"),
        (end < start, "row_end[{0}] must be at least row_start[{0}] = {start}, got {end}"),
        (end > following, "vector row {0} must end by {next}, where the next one starts, got row_end {end}"),
        (following - start != needed, "vector row {0} must be padded to {needed} vectors, got {room}"),
    ):
        row = first_true(bad)
        if row is not None:
            at = {"start": int(start[row]), "end": int(end[row]), "next": int(following[row])}
            at.update(total=total, stride=stride, needed=int(needed[row]), room=at["next"] - at["start"])
            raise ValueError(rule.format(row, **at))


def materialized(x: Tensor) -> Tensor:
    """Return `x` with its values in memory: negated and conjugate views are resolved, zero tensors are filled."""
    x = x.resolve_conj().resolve_neg()
    if torch.compiler.is_compiling() or not x._is_zerotensor():  # a compiler cannot trace the question
        return x
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
