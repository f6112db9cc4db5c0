"""Digit planes by torch operators: for float64, and for float32 where the engine, whose twin they are, is missing."""

from __future__ import annotations

import torch
from torch import Tensor

_BIAS_FACTOR, _TINY = 2.0**100, 2.0**-100  # exponent bias factor of slices with tiny scales
ZERO_SCALE = 2.0**-38  # of zeros: never the largest scale of a matrix


def decompose(
    x: Tensor, count: int, axis: int | None, *, high: float, radix: float, ahead: tuple[float, float], power: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return digit planes of `x` and their scales, as the engine's ``decompose_cpu``.

    ``x = scale (q0 + q1 / radix + q2 / radix^2)``, ``scale = max|x| / high`` of a slice, rounded up.

    Parameters
    ----------
    x : Tensor, shape (M, N)
        float32 or float64.
    count : int
        Digits, 1 to 3.
    axis : int or None
        1 for per-row, 0 for per-column, None for one scale.
    high, radix : float
        Largest leading digit; ``2**bits``.
    ahead : tuple of float
        Added before the first two roundings.
    power : bool
        Whether scales are powers of two.

    Returns
    -------
    tuple
        int8 planes (M, N), and the scale (M,), (N,) or () in the dtype of `x`: 2**-38 for zeros, NaN with zero digits
        for slices with inf or NaN.

    Examples
    --------
    >>> planes, scale = decompose(torch.tensor([[127.0, -3.25]]), 2, 1, high=127, radix=256, ahead=(0, 0), power=False)
    >>> [plane.tolist() for plane in planes], scale.tolist()
    ([[[127, -3]], [[0, -64]]], [1.0])
    """
    magnitudes = x.abs()
    scale = digit_scales(magnitudes.amax() if axis is None else magnitudes.amax(dim=axis), high, power)
    return _split(x, scale if axis is None else scale.unsqueeze(axis), radix, ahead, count), scale


def digit_scales(absmax: Tensor, high: float, power: bool) -> Tensor:
    """Return the scales of slices with these amaxes, in their dtype and on their device; as :func:`decompose`.

    Examples
    --------
    >>> digit_scales(torch.tensor([127.0, 0.0]), 127.0, power=False).tolist() == [1.0, ZERO_SCALE]
    True
    """
    double = absmax.double()
    scale = (double / high).to(absmax.dtype)
    if power:
        mantissa, exponent = torch.frexp(torch.where(double > 0, double / high, 1.0))
        scale = torch.ldexp(torch.ones_like(double), exponent - (mantissa == 0.5).int()).to(absmax.dtype)
    elif absmax.dtype == torch.float32:
        scale = torch.where(
            scale.double() * high < double, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale
        )
    scale = torch.maximum(scale, torch.nextafter(torch.zeros_like(scale), torch.ones_like(scale)))
    scale = torch.where(absmax > 0, scale, ZERO_SCALE)
    return torch.where(absmax.isfinite(), scale, torch.nan)


def _split(x: Tensor, scale: Tensor, radix: float, ahead: tuple[float, float], count: int) -> tuple[Tensor, ...]:
    """Digit planes of `x`; `scale` broadcasts against it."""
    bias_factor = torch.where(scale * 128 < _TINY, _BIAS_FACTOR, 1.0).to(x.dtype)
    unit = torch.where(scale.isnan(), 1.0, scale * bias_factor)
    residual = torch.where(scale.isnan(), 0.0, x * bias_factor)
    inverse = 1 / unit
    planes = []
    for i in range(count):
        q = residual * inverse
        if i < count - 1:
            q += ahead[i]
        q = q.round_() if i == 0 else q.round_().clamp_(-radix / 2, min(radix / 2, 127.0))
        planes.append(q.to(torch.int8))
        if i < count - 1:
            # Exact in float64, then rounded once: equal to an FMA.
            residual = (residual.double() - q.double() * unit.double()).to(x.dtype)
            inverse, unit = inverse * radix, unit / radix
    return tuple(planes)
