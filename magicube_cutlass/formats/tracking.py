"""Tensors that derived data was made of: noticing that one was written or replaced since."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Stamp = tuple[tuple[str, Tensor | None, int], ...]


def _version(tensor: Tensor | None) -> int:
    """The version that torch counts up at each write in place, -1 for None and inference tensors, which have none."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def stamp(owner: Any, names: tuple[str, ...], live: tuple[str, ...] = ()) -> Stamp:
    """Return the tensors of these attributes with their versions; `live` ones are read at each product, version -1."""
    copied = tuple((name, getattr(owner, name), _version(getattr(owner, name))) for name in names)
    return (*copied, *((name, getattr(owner, name), -1) for name in live))


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
