"""Two-digit decomposition of a real matrix: the nearest integers and what their rounding left over."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ROUNDINGS = ("nearest", "trunc")
_HAIR = 2.0**-36  # far below the last place of 16 + 16 bits, far above the rounding of a double
_MIN_BITS, _MAX_BITS = 2, 16


@dataclass(frozen=True)
class Decomposition:
    """``x ~ scale * (high + low / 2**shift)``; both digits are signed integers of ``bits`` bits.

    Attributes:
        high: the leading digit, int8 (``bits <= 8``) or int16, the shape of ``x``.
        low: the rounding residual as the same kind of integer, the shape of ``x``.
        scale: float64; a scalar (``axis=None``), or ``x``'s shape with extent 1 everywhere but at ``axis``.
        bits: the width of each digit.
        shift: ``bits``, or ``bits - 1`` where the leading digit was truncated.
    """

    high: torch.Tensor
    low: torch.Tensor
    scale: torch.Tensor
    bits: int
    shift: int

    def reconstruct(self, digits: int = 2) -> torch.Tensor:
        """Return ``scale * high`` (``digits=1``) or ``scale * (high + low / 2**shift)`` (``digits=2``) in float64.

        Raises:
            ValueError: ``digits`` is neither 1 nor 2.
        """
        if digits not in (1, 2):
            raise ValueError(f"digits must be 1 or 2, got {digits}")
        value = self.high.double()
        if digits == 2:
            value = value + self.low.double() / 2**self.shift
        return self.scale * value


def decompose(x: torch.Tensor, bits: int = 8, axis: int | None = None, rounding: str = "nearest") -> Decomposition:
    """Split ``x`` into two signed digits with one scale per tensor or per slice.

    ``A = sA (A1 + A0 / 2**bits)`` with ``sA = max|A| / (2**(bits-1) - 1)``, ``A1 = round(A / sA)`` in the symmetric
    range ``[-(2**(bits-1) - 1), 2**(bits-1) - 1]`` and ``A0 = round(2**bits (A / sA - A1))`` cut to the signed range
    ``[-2**(bits-1), 2**(bits-1) - 1]``.

    ``nearest`` rounds both digits to nearest, ties to even: ``|x - x~| <= scale / 2**(bits+1)``, or ``scale / 2**bits``
    where a residual of one half was cut to the range. ``trunc`` (the published algorithm's rule) rounds both toward
    zero; its residual may reach a whole unit, so the second digit counts in steps of ``2**-(bits-1)`` (``shift``) and
    ``|x - x~| < scale / 2**(bits-1)``.

    Args:
        x: floating-point tensor of any shape; with ``axis`` it needs at least one dimension.
        bits: width of each digit, 2 to 16.
        axis: ``None`` for one scale, else the dimension that keeps its own scales (0 is one scale a row).
        rounding: ``"nearest"`` or ``"trunc"``.

    Returns:
        A :class:`Decomposition`. A slice of zeros gets scale 1; an empty tensor gives empty digits.

    Raises:
        TypeError: ``x`` is not a floating-point tensor.
        ValueError: ``x`` holds inf or nan, or ``bits``, ``axis`` or ``rounding`` is out of range.

    Source: Gu, arXiv 2403.06924 (residual compensation of quantized products).
    """
    exact = _check(x, bits, rounding)
    axis = _check_axis(x, axis)
    limit = 2 ** (bits - 1) - 1
    scale = _scales(exact, limit, axis)
    ratio = exact / scale
    if (
        rounding == "trunc"
    ):  # the division may end a hair below an integer (the maximum's own, say): that is no digit less
        whole = torch.round(ratio)
        ratio = torch.where((ratio - whole).abs() < _HAIR, whole, ratio)
    cut = torch.round if rounding == "nearest" else torch.trunc
    shift = bits if rounding == "nearest" else bits - 1
    high = cut(ratio).clamp_(-limit, limit)
    # The difference of two doubles this close is exact, so the second digit sees the whole rounding error.
    low = cut((ratio - high) * 2**shift).clamp_(-limit - 1, limit)
    dtype = torch.int8 if bits <= 8 else torch.int16
    return Decomposition(high.to(dtype), low.to(dtype), scale, bits, shift)


def _scales(exact: torch.Tensor, limit: int, axis: int | None) -> torch.Tensor:
    magnitude = exact.abs()
    if axis is None:
        top = magnitude.max() if exact.numel() else exact.new_zeros(())
    else:
        others = [d for d in range(exact.dim()) if d != axis]
        shape = [exact.shape[d] if d == axis else 1 for d in range(exact.dim())]
        if exact.numel() == 0:
            top = exact.new_zeros(shape)
        else:
            top = magnitude.amax(dim=others, keepdim=True) if others else magnitude
    scale = top / limit
    # top / limit underflows to zero only for subnormal doubles; those count as zeros.
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _check(x: torch.Tensor, bits: int, rounding: str) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, got {x.dtype}")
    if isinstance(bits, bool) or not isinstance(bits, int) or not _MIN_BITS <= bits <= _MAX_BITS:
        raise ValueError(f"bits must be an integer from {_MIN_BITS} to {_MAX_BITS}, got {bits!r}")
    if rounding not in _ROUNDINGS:
        raise ValueError(f"rounding must be one of {_ROUNDINGS}, got {rounding!r}")
    exact = x.detach().double()
    finite = torch.isfinite(exact)
    if not bool(finite.all()):
        raise ValueError(f"x must be finite, but {int((~finite).sum())} of its {x.numel()} values are inf or nan")
    return exact


def _check_axis(x: torch.Tensor, axis: int | None) -> int | None:
    if axis is None:
        return None
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis must be None or in [{-x.dim()}, {x.dim()}) for a {x.dim()}-D x, got {axis}")
    return axis % x.dim()
