"""Two-digit decomposition of a real matrix: the nearest integers and what their rounding left over."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from cute_kernels.cpu import engine

_ROUNDINGS = ("nearest", "trunc")
_HAIR = 1 + 2.0**-49  # far below the last place of 16 + 16 bits, above the rounding of two divisions
_CHUNK = 1 << 15  # entries a thread, whose doubles stay in its cache between the passes
_MIN_BITS, _MAX_BITS = 2, 16


@dataclass(frozen=True)
class Decomposition:
    """Two signed digits and a scale: ``x ~ scale * (high + low / 2**shift)``.

    Attributes
    ----------
    high : Tensor
        Leading digit, int8 (``bits <= 8``) or int16, the shape of `x`.
    low : Tensor
        Rounding residual as the same kind of integer, up to half a unit.
    scale : Tensor
        float64; a scalar, or the shape of `x` with extent 1 everywhere but at the axis.
    bits : int
        Bits per digit.
    shift : int
        `bits`, or ``bits - 1`` if the leading digit was truncated.

    Examples
    --------
    >>> found = decompose(torch.tensor([1.0, 0.5, -0.3]))
    >>> found.high.tolist(), found.low.tolist()
    ([127, 64, -38], [0, -128, -26])
    >>> float((found.reconstruct() - torch.tensor([1.0, 0.5, -0.3])).abs().max()) < 1e-4
    True
    """

    high: torch.Tensor
    low: torch.Tensor
    scale: torch.Tensor
    bits: int
    shift: int

    def reconstruct(self, digits: int = 2) -> torch.Tensor:
        """Return ``scale * high`` (one digit) or ``scale * (high + low / 2**shift)`` (two) in float64.

        Raises
        ------
        ValueError
            If `digits` is neither 1 nor 2.
        """
        if digits not in (1, 2):
            raise ValueError(f"digits must be 1 or 2, got {digits}")
        value = self.high.double()
        if digits == 2:
            value = value + self.low.double() / 2**self.shift
        return self.scale * value


def decompose(
    x: torch.Tensor,
    bits: int = 8,
    axis: int | None = None,
    rounding: str = "nearest",
    levels: int | None = None,
    name: str = "x",
) -> Decomposition:
    """Split a tensor into two signed digits with one scale per tensor or per slice.

    ``A = sA (A1 + A0 / 2**bits)`` with ``sA = max|A| / (2**(bits-1) - 1)``, ``A1 = round(A / sA)`` in the symmetric
    range ``[-(2**(bits-1) - 1), 2**(bits-1) - 1]`` and ``A0 = round(2**bits (A / sA - A1))`` in ``[-2**(bits-1),
    2**(bits-1)]``. What int8 or int16 cannot hold, the upper end for 8 and 16 bits, is cut by one.

    Parameters
    ----------
    x : Tensor
        Float tensor of any shape; an axis needs at least one dimension.
    bits : int, default 8
        Bits per digit, 2 to 16.
    axis : int, optional
        Dimension that keeps its own scales (0: one scale per row). Default: one scale.
    rounding : {"nearest", "trunc"}, default "nearest"
        To nearest, ties to even: ``|x - x~| <= scale / 2**(bits+1)``, or ``scale / 2**bits`` for a digit that was cut.
        Toward zero, as published: the residual reaches up to a unit, so the second digit counts in steps of
        ``2**-(bits-1)``, and ``|x - x~| < scale / 2**(bits-1)``.
    levels : int, optional
        Integer that ``max|x|`` becomes, 1 to ``2**(bits-1) - 1`` (the default).
    name : str, default "x"
        Name of `x` in errors.

    Returns
    -------
    Decomposition
        A slice of zeros has scale 1; an empty tensor has empty digits.

    Raises
    ------
    TypeError
        If `x` is not a float tensor.
    ValueError
        If an option is out of range, or `x` holds inf or NaN.

    Examples
    --------
    >>> decompose(torch.tensor([[4.0, -1.0], [0.5, 0.25]]), axis=0).high.tolist()
    [[127, -32], [127, 64]]
    """
    _check(x, bits, rounding, name)
    axis = _check_axis(x, axis, name)
    limit = 2 ** (bits - 1) - 1
    if levels is not None and not 1 <= levels <= limit:
        raise ValueError(f"levels must be None or from 1 to {limit} for {bits} bits, got {levels}")
    source = x.detach()
    takes = x.device.type == "cpu" and x.dim() == 2 and x.dtype != torch.float64
    if takes and bits <= 8 and x.numel() and engine.available():
        return _by_engine(source, bits, axis, rounding, levels or limit, name)
    scale = _scales(source, levels or limit, axis, name)
    shift, limits = bits if rounding == "nearest" else bits - 1, (limit, _low_limit(bits))
    high = torch.empty_like(source, dtype=torch.int8 if bits <= 8 else torch.int16)
    low = torch.empty_like(high)
    if x.dim() == 0:
        _split(source, scale, rounding, limits, shift, high, low)
        return Decomposition(high, low, scale, bits, shift)
    rows = x.shape[0] if x.is_cuda else max(1, _CHUNK * torch.get_num_threads() * x.shape[0] // max(x.numel(), 1))
    for start in range(0, x.shape[0], max(rows, 1)):
        part = slice(start, start + rows)
        units = scale[part] if axis == 0 else scale
        _split(source[part], units, rounding, limits, shift, high[part], low[part])
    return Decomposition(high, low, scale, bits, shift)


def _by_engine(x: torch.Tensor, bits: int, axis: int | None, rounding: str, levels: int, name: str) -> Decomposition:
    """The same of a matrix by the CPU engine, which divides as exactly."""
    truncate = rounding == "trunc"
    shift = bits - 1 if truncate else bits
    planes, scale, flags = engine.decompose_cpu(
        x.float(), 2, None if axis is None else 1 - axis, high=float(levels), radix=2.0**shift, exact=True,
        truncate=truncate, limit=float(_low_limit(bits)),
    )  # fmt: skip
    if flags & engine.NONFINITE:
        refuse_nonfinite(x, name)
    shape = [] if axis is None else [x.shape[d] if d == axis else 1 for d in range(2)]
    return Decomposition(planes[0], planes[1], scale.view(shape), bits, shift)


def _split(
    x: torch.Tensor,
    scale: torch.Tensor,
    rounding: str,
    limits: tuple[int, int],
    shift: int,
    high: torch.Tensor,
    low: torch.Tensor,
) -> None:
    """Write both digits of ``x``."""
    limit, low_limit = limits
    ratio = x.to(torch.float64, copy=True).div_(scale)
    # The division may end a hair below an integer, the maximum's own, say.
    digit = torch.round(ratio) if rounding == "nearest" else torch.mul(ratio, _HAIR).trunc_()
    high.copy_(digit.clamp_(-limit, limit))
    # The difference of two doubles this close is exact, so the second digit sees the whole rounding error.
    rest = ratio.sub_(digit).mul_(2**shift)
    low.copy_((rest.round_() if rounding == "nearest" else rest.trunc_()).clamp_(-limit - 1, low_limit))


def _low_limit(bits: int) -> int:
    """Return the largest second digit: half a unit, as far as the integers hold it."""
    return min(2 ** (bits - 1), 127 if bits <= 8 else 2**15 - 1)


def _scales(x: torch.Tensor, levels: int, axis: int | None, name: str) -> torch.Tensor:
    shape = [] if axis is None else [x.shape[d] if d == axis else 1 for d in range(x.dim())]
    if x.numel() == 0:
        return torch.ones(shape, dtype=torch.float64, device=x.device)
    others = tuple(d for d in range(x.dim()) if d != axis)
    top = torch.linalg.vector_norm(x, math.inf, dim=others, keepdim=axis is not None) if others else x.abs()
    top = top.double()  # NaN where an entry is NaN
    if not bool(torch.isfinite(top).all()):
        refuse_nonfinite(x, name)
    scale = top / levels
    # top / levels underflows to zero only for subnormal doubles; those count as zeros.
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def refuse_nonfinite(x: torch.Tensor, name: str) -> None:
    """Raise `ValueError` with the number of values that are inf or NaN."""
    wrong = x.numel() - int(torch.isfinite(x).sum())
    raise ValueError(f"{name} must be finite, but {wrong} of its {x.numel()} values are inf or nan")


def _check(x: torch.Tensor, bits: int, rounding: str, name: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")
    if isinstance(bits, bool) or not isinstance(bits, int) or not _MIN_BITS <= bits <= _MAX_BITS:
        raise ValueError(f"bits must be an integer from {_MIN_BITS} to {_MAX_BITS}, got {bits!r}")
    if rounding not in _ROUNDINGS:
        raise ValueError(f"rounding must be one of {_ROUNDINGS}, got {rounding!r}")


def _check_axis(x: torch.Tensor, axis: int | None, name: str) -> int | None:
    if axis is None:
        return None
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis must be None or in [{-x.dim()}, {x.dim()}) for a {x.dim()}-D {name}, got {axis}")
    return axis % x.dim()
