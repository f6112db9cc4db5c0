"""Quantization of Algorithm 1: integers of a matrix and of its residual, each with its own lambda."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.cpu import engine
from cute_kernels.cpu.compensate import split_residual
from residual.operand.decompose import decompose, refuse_nonfinite

SAFE_SCALE = 2.0**60  # scales between its inverse and this keep float32 arithmetic in range
_CHUNK = 1 << 15  # entries whose doubles stay in a cache


class Quantizer(NamedTuple):
    """How a matrix becomes integers: ``Quant(X, N)`` with ``lambda = levels / max|X|``.

    Attributes
    ----------
    bits : int
        N.
    axis : int or None
        Dimension that keeps its own lambdas; None: one lambda per matrix.
    rounding : str
        ``"trunc"`` or ``"nearest"``.
    levels : int
        Integer that the largest entry becomes.
    """

    bits: int
    axis: int | None
    rounding: str
    levels: int


class Quantized(NamedTuple):
    """Integers and what one of them stands for: ``X ~ scale * integers``, ``scale = 1 / lambda``.

    Attributes
    ----------
    integers : Tensor
        int8, the shape of X.
    scale : Tensor
        float64; a scalar, or the shape of X with extent 1 everywhere but at the axis.
    """

    integers: Tensor
    scale: Tensor

    @property
    def T(self) -> Quantized:
        """The transpose."""
        return Quantized(self.integers.T, self.scale.T if self.scale.dim() else self.scale)


class QuantizedOperand(NamedTuple):
    """One operand of Algorithm 1 after its lines 1 and 4 to 6.

    Attributes
    ----------
    values : Tensor
        The operand, float32 or float64.
    leading, residual : Quantized
        Its integers, and those of what their rounding left over.
    sums : Tensor, optional
        Sums of magnitudes in float64: one, or one per slice with its own lambda, where they were asked for and the CPU
        engine quantized.
    """

    values: Tensor
    leading: Quantized
    residual: Quantized
    sums: Tensor | None = None


def quantize(x: Tensor, how: Quantizer, name: str) -> Quantized:
    """Return ``Quant(x, N)``.

    Raises
    ------
    ValueError
        If `x` holds inf or NaN.

    Examples
    --------
    >>> quantize(torch.tensor([[1.0, 2.5, 4.0]]), Quantizer(8, None, "trunc", 127), "x").integers.tolist()
    [[31, 79, 127]]
    """
    found = decompose(x, how.bits, how.axis, how.rounding, how.levels, name)
    return Quantized(found.high, found.scale)


def quantize_operand(x: Tensor, how: Quantizer, name: str, sums: bool = False) -> QuantizedOperand:
    """Quantize an operand and its residual, lines 1 and 4 to 6 of Algorithm 1.

    The residual is computed in float64 and rounded to the dtype of the values. The CPU engine does it all in one call,
    for float32 and shorter floats, and sums magnitudes where `sums` asks for it.

    Examples
    --------
    >>> found = quantize_operand(torch.tensor([[1.0, 2.5, 4.0]]), Quantizer(8, None, "trunc", 127), "x")
    >>> found.residual.integers.tolist(), round(float(found.residual.scale) * 127, 4)
    ([[127, 63, 0]], 0.0236)
    """
    values = x.detach() if x.dtype == torch.float64 else x.detach().float()
    if values.device.type == "cpu" and values.dtype == torch.float32 and values.numel() and engine.available():
        return _by_engine(values, how, name, sums)
    leading = quantize(values, how, name)
    residual = torch.empty_like(values)
    rows = max(1, values.shape[0] if values.is_cuda else _CHUNK * values.shape[0] // max(values.numel(), 1))
    for start in range(0, values.shape[0], rows):
        part = slice(start, start + rows)
        scale = leading.scale[part] if how.axis == 0 else leading.scale
        dequantized = leading.integers[part].double().mul_(scale)
        residual[part] = torch.sub(values[part], dequantized, out=dequantized)
    return QuantizedOperand(values, leading, quantize(residual, how, name))


def _by_engine(values: Tensor, how: Quantizer, name: str, sums: bool) -> QuantizedOperand:
    """The same by the CPU engine, to the bit."""
    found = split_residual(values, how.axis, high=float(how.levels), truncate=how.rounding == "trunc", sums=sums)
    if found.flags & engine.NONFINITE:
        refuse_nonfinite(values, name)
    shape = [] if how.axis is None else [values.shape[d] if d == how.axis else 1 for d in range(2)]
    leading, residual = (scale.view(shape) for scale in found.scales)
    return QuantizedOperand(values, Quantized(found.leading, leading), Quantized(found.residual, residual), found.sums)
