"""One operand of Algorithm 1 on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cute_kernels.compensate import split
from cute_kernels.compensate.split import Plane
from residual.paper.quantize import Quantized, Quantizer

_OF_PLANE = ("memory", "scales", "scales32")


def values_of(x: Tensor) -> Tensor:
    """Return an operand in float32 with contiguous rows or columns, itself if it is so already."""
    values = x.detach().float()
    return values if 1 in values.stride() else values.contiguous()


class DeviceOperand:
    """Integers of an operand, and those of its residual in the order that a product reads.

    Attributes
    ----------
    values : Tensor
        The operand, as :func:`values_of` returns it.
    amaxes : Amaxes
        What its slices are scaled by.
    plane : Plane
        Its integers.
    """

    def __init__(self, values: Tensor, how: Quantizer, is_right: bool) -> None:
        self.values, self.truncate, self._is_right = values, how.rounding == "trunc", is_right
        self.amaxes = split.find_amaxes(values, how.axis, float(how.levels))
        self.plane = split.leading_plane(self.amaxes, truncate=self.truncate, transposed=is_right)
        self._residuals: dict[bool, Plane] = {}

    def _residual_plane(self, transposed: bool) -> Plane:
        """Return the residual's integers; `transposed`: with contiguous columns."""
        if transposed not in self._residuals:
            made = split.residual_plane(self.amaxes, truncate=self.truncate, transposed=transposed)
            self._residuals[transposed] = made
        return self._residuals[transposed]

    @property
    def sparse_residual(self) -> Plane:
        """The residual's integers, as a sparse product reads them."""
        return self._residual_plane(not self._is_right)

    @property
    def leading(self) -> Quantized:
        """The operand's integers, as a dense product reads them."""
        return self._quantized(self.plane)

    @property
    def residual(self) -> Quantized:
        """The residual's integers, as a dense product reads them."""
        return self._quantized(self._residual_plane(self._is_right))

    def _quantized(self, plane: Plane) -> Quantized:
        if self.amaxes.scales == 0:
            return Quantized(plane.integers, plane.scales32.view(()))
        return Quantized(plane.integers, plane.scales32.view((1, -1) if self._is_right else (-1, 1)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All memory but the values: bits of the amaxes, and of each plane its memory and scales."""
        planes = [self.plane, *self._residuals.values()]
        return (self.amaxes.bits, *(getattr(plane, name) for plane in planes for name in _OF_PLANE))

    def on(self, values: Tensor, tensors: Sequence[Tensor]) -> DeviceOperand:
        """Return the operand of values like these with its parts in other memory, in the order of :attr:`tensors`."""
        bits, *parts = tensors
        planes = [
            plane._replace(memory=parts[3 * i], scales=parts[3 * i + 1], scales32=parts[3 * i + 2])
            for i, plane in enumerate([self.plane, *self._residuals.values()])
        ]
        made = object.__new__(DeviceOperand)
        made.values, made.truncate, made._is_right = values, self.truncate, self._is_right
        made.amaxes = self.amaxes._replace(x=split.by_rows(values)[0], bits=bits)
        made.plane, made._residuals = planes[0], dict(zip(self._residuals, planes[1:], strict=True))
        return made
