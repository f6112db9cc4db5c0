"""Tensors that derived data was made of: noticing that one was written or replaced since. Records are such data."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cute_kernels.cpu import extension

Stamp = tuple[tuple[str, Tensor | None, int], ...]

RECORDS = "records"  # name of the records among what an object derived, which it drops when its tensors change
NO_RECORDS: dict[Any, Any] = {}
MAX_RECORDS = 64  # of an object


def real_tensors() -> AbstractContextManager[object]:
    """A context for what is cached: an export runs Python code with fake tensors, which would stay in the cache."""
    return _disable_current_modes() if torch.compiler.is_compiling() else nullcontext()


def stamp(owner: Any, names: tuple[str, ...], live: tuple[str, ...] = ()) -> Stamp:
    """Return the tensors of these attributes with their versions; `live` ones are read at each product, version -1."""
    attributes, found = owner.__dict__, []
    for name in names:
        tensor = attributes[name]  # inference tensors have no version, which torch counts up at each write in place
        found.append((name, tensor, -1 if tensor is None or tensor.is_inference() else tensor._version))
    for name in live:
        found.append((name, attributes[name], -1))
    return tuple(found)


def restamp(seen: Stamp, name: str, tensor: Tensor) -> Stamp:
    """Return a stamp whose entry of this name has another tensor; it is the last but one of a matrix: the values."""
    *before, (last, _, _), scale = seen
    assert last == name
    return (*before, (name, tensor, -1 if tensor.is_inference() else tensor._version), scale)


def is_current(owner: Any, seen: Stamp | None) -> bool:
    """Return whether each attribute still holds the tensor of the stamp, unwritten.

    Writes through ``tensor.data``, numpy views and inference tensors are not counted by torch and not seen.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> A = mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)
    >>> seen = stamp(A, ("values",))
    >>> is_current(A, seen), A.values.zero_() is A.values, is_current(A, seen)
    (True, True, False)
    """
    if seen is None:
        return False
    attributes = owner.__dict__
    for name, tensor, version in seen:
        if attributes[name] is not tensor or (version >= 0 and tensor._version != version):
            return False
    return True


def is_valid(owner: Any, stamp: Stamp, stride: int, bits: int | None, signed: bool) -> bool:
    """Return whether the engine finds the structure valid, and the tensors of the stamp in place and of the right size.

    False for what only torch can read: a GPU's tensors, subclasses, a torch older than 2.10.
    """
    engine, (rows, columns) = extension.ENGINE, owner.shape
    if engine is None:
        return False
    valid: bool = engine.scan(owner.__dict__, stamp, rows, columns, owner.vector_length, stride, bits or 0, signed)
    return valid


def keep_record(derived: dict[Any, Any], kind: Hashable, record: object) -> None:
    """Keep a call that was prepared for one kind of operands, so that another of that kind only passes addresses.

    The oldest of more than :data:`MAX_RECORDS` is dropped. Addresses are no part of a kind.

    Examples
    --------
    >>> derived = {}
    >>> keep_record(derived, ("float32", 3), abs)
    >>> derived[RECORDS][("float32", 3)](-1)
    1
    """
    records = derived.setdefault(RECORDS, {})
    records[kind] = record
    for oldest in list(records)[: len(records) - MAX_RECORDS] if len(records) > MAX_RECORDS else ():
        records.pop(oldest, None)  # another thread may have dropped it
