"""Integers with a scale: the dense operand of the integer products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.dtypes import Integer
from cute_kernels.integers import STORAGE_DTYPES, check_bits, check_range, fetch, store, widen
from magicube_cutlass.checks import is_transformed, renamed_property, transform_error

__all__ = ["QuantTensor"]


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """Integers and their scale: ``x = scale * q``.

    Parameters
    ----------
    data : Tensor
        Integers in storage form: int8 or uint8 for 8 bits, int16 for 12, int16 or uint16 for 16. 4-bit integers are
        uint8, two per byte along the contiguous one of the last two dimensions.
    scale : Tensor or None
        None (plain integers), shape (), or size 1 along `axis` of the last two dimensions.
    bits : int
        4, 8, 12 or 16.
    signed : bool
        Two's complement if true.
    axis : int or None
        None for a per-tensor scale; 1 for a per-row scale (..., M, 1); 0 for a per-column scale (..., 1, N).
    shape : torch.Size
        Shape of the integers.

    Raises
    ------
    TypeError
        If a dtype does not fit.
    ValueError
        If a shape does not fit.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> q = mc.QuantTensor.from_ints(torch.tensor([[1, -2], [3, 4]]), bits=4, scale=0.5)
    >>> q.dequantize().tolist()
    [[0.5, -1.0], [1.5, 2.0]]
    """

    data: Tensor
    scale: Tensor | None
    bits: int
    signed: bool
    axis: int | None
    shape: torch.Size

    def __post_init__(self) -> None:
        dtype = STORAGE_DTYPES.get((self.bits, self.signed))
        if dtype is None:
            check_bits(self.bits)
        if self.data.dtype != dtype:
            raise TypeError(f"data must have dtype {dtype} for {self.bits}-bit integers, got {self.data.dtype}")
        expected = list(self.shape)
        if self.bits == 4 and expected:
            expected[self.packed_dim] = (expected[self.packed_dim] + 1) // 2
        if list(self.data.shape) != expected:
            raise ValueError(f"data must have shape {tuple(expected)} for integers of shape {tuple(self.shape)}, "
                             f"got {tuple(self.data.shape)}")  # fmt: skip
        if self.scale is not None:
            _check_scale(self.scale, self.shape, self.axis)
        if not torch.compiler.is_compiling():
            for name, each in (("data", self.data), ("scale", self.scale)):
                if each is not None and is_transformed(each):
                    raise transform_error(name)
                if each is not None and (each.is_neg() or each._is_zerotensor()):
                    raise ValueError(f"{name} must hold its values, got a negated or zero tensor; use {name}.clone()")

    @property
    def packed_dim(self) -> int:
        """Dimension along which 4-bit integers are packed: -2 for column-major data, else -1."""
        if self.bits != 4 or len(self.shape) < 2:  # no look at sizes, which an exported graph may keep symbolic
            return -1
        row_major = (self.shape[-2], (self.shape[-1] + 1) // 2)
        return -1 if tuple(self.data.shape[-2:]) == row_major else -2

    @property
    def device(self) -> torch.device:
        """Device of the integers."""
        return self.data.device

    @property
    def element_type(self) -> Integer:
        """Width and signedness of the integers."""
        return Integer(self.bits, self.signed)

    number = renamed_property("number", "element_type")

    def ints(self) -> Tensor:
        """Return the integers, one per element: int8 or uint8 up to 8 bits, else int16 or uint16."""
        length = self.shape[self.packed_dim] if self.bits == 4 else 0
        return fetch(self.data, length, self.bits, self.signed, self.packed_dim)

    def dequantize(self) -> Tensor:
        """Return ``scale * q`` in the dtype of the scale; float32 for plain integers."""
        ints = widen(self.ints())
        return ints.to(torch.float32) if self.scale is None else ints.to(self.scale.dtype) * self.scale

    def to(self, device: torch.device | str) -> QuantTensor:
        """Return this tensor on `device`."""
        scale = None if self.scale is None else self.scale.to(device)
        return QuantTensor(self.data.to(device), scale, self.bits, self.signed, self.axis, self.shape)

    @property
    def mT(self) -> QuantTensor:
        """Transpose of the last two dimensions, a view."""
        scale = self.scale if self.scale is None or self.scale.ndim < 2 else self.scale.mT
        axis = None if self.axis is None else 1 - self.axis
        shape = torch.Size((*self.shape[:-2], self.shape[-1], self.shape[-2]))
        return QuantTensor(self.data.mT, scale, self.bits, self.signed, axis, shape)

    @classmethod
    def from_ints(
        cls, ints: Tensor, *, bits: int, signed: bool = True, scale: Tensor | float | None = None
    ) -> QuantTensor:
        """Make a tensor of given integers.

        Parameters
        ----------
        ints : Tensor, shape (..., M, N)
            Any integer dtype; a column-major tensor stays column-major.
        bits : int
            4, 8, 12 or 16.
        signed : bool, default True
            Two's complement if true.
        scale : Tensor or float, optional
            Shape (), (..., M, 1) or (..., 1, N).

        Returns
        -------
        QuantTensor

        Raises
        ------
        TypeError
            If `ints` has no integer dtype.
        ValueError
            If a value is out of range, or the scale has another shape.

        Examples
        --------
        >>> import torch, magicube_cutlass as mc
        >>> mc.QuantTensor.from_ints(torch.arange(6).reshape(2, 3), bits=4).data.shape
        torch.Size([2, 2])
        """
        check_bits(bits)
        check_range(ints, bits, signed, "ints")
        if ints.ndim < 1:
            raise ValueError(f"ints must have at least 1 dimension, got {ints.ndim}")
        if isinstance(scale, (int, float)):
            scale = torch.tensor(float(scale), device=ints.device)
        axis = None if scale is None else _scale_axis(scale, ints.shape)
        swap = _column_major(ints)
        rows = (ints.mT if swap else ints).contiguous()
        data = store(rows, bits, signed)
        return cls(data.mT if swap else data, scale, bits, signed, axis, ints.shape)

    def __repr__(self) -> str:
        kind = "signed" if self.signed else "unsigned"
        scale = "no scale" if self.scale is None else f"scale {tuple(self.scale.shape)} {self.scale.dtype}"
        return f"QuantTensor({tuple(self.shape)}, {kind} {self.bits}-bit, {scale}, device={self.device})"


def _column_major(x: Tensor) -> bool:
    return x.ndim >= 2 and x.mT.is_contiguous() and not x.is_contiguous()


def _scale_axis(scale: Tensor, shape: torch.Size) -> int | None:
    if scale.numel() == 1 and scale.ndim == 0:
        return None
    if scale.ndim >= 2 and len(shape) >= 2:
        if scale.shape[-1] == 1 and scale.shape[-2] == shape[-2]:
            return 1
        if scale.shape[-2] == 1 and scale.shape[-1] == shape[-1]:
            return 0
    raise ValueError(f"scale must have shape (), (..., {shape[-2] if len(shape) > 1 else 1}, 1) or "
                     f"(..., 1, {shape[-1]}), got {tuple(scale.shape)}")  # fmt: skip


def _check_scale(scale: Tensor, shape: torch.Size, axis: int | None) -> None:
    if not scale.is_floating_point():
        raise TypeError(f"scale must have a floating dtype, got {scale.dtype}")
    if axis is None:
        if scale.ndim != 0:
            raise ValueError(f"scale must have shape () when axis is None, got {tuple(scale.shape)}")
        return
    expected = list(shape)
    expected[-2 if axis == 0 else -1] = 1
    if list(scale.shape) not in (expected, expected[-2:]):
        raise ValueError(f"scale must have shape {tuple(expected)} for axis={axis}, got {tuple(scale.shape)}")
