"""One operand of a product: its finite slices, their scales, and digit planes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from residual.error.estimate import by_power, is_inexact
from residual.error.look import DigitPlanes
from residual.planning.ladder import PLANES, Rung, pairs_of

FAR = 30  # a slice whose magnitude is beyond 2**FAR or below 2**-FAR is brought to one by a power of two
_HOT = 16.0  # a column of k is an outlier if its mean square is this many times the median one
_MOST_HOT = 16  # at most one column in so many is an outlier
_HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *_HALVES)  # that float32 holds
_DTYPES = (*FLOATS, torch.float64)
_SMALL_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.bool)


def real_dtype(x: Tensor) -> torch.dtype:
    """Return the float dtype that holds `x`: its own, or float32 for short and float64 for long integers.

    Examples
    --------
    >>> real_dtype(torch.ones(2, dtype=torch.int8)), real_dtype(torch.ones(2, dtype=torch.int64))
    (torch.float32, torch.float64)
    """
    if x.dtype in _DTYPES or x.is_floating_point():
        return x.dtype
    return torch.float32 if x.dtype in _SMALL_INTEGERS else torch.float64


def check_operand(name: str, x: object) -> Tensor:
    """Return `x` as a 2-D real tensor; raise ``TypeError`` or ``ValueError``."""
    if isinstance(x, Tensor) and x.dtype in _DTYPES and x.is_cpu and x.layout is torch.strided and x.dim() == 2:
        return x
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in _DTYPES and (x.is_complex() or x.is_floating_point()):
        raise TypeError(f"{name} must be of an integer dtype or one of {', '.join(map(str, _DTYPES))}, got {x.dtype}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {x.layout}")
    if x.dim() != 2:
        raise ValueError(f"{name} must be 2-D, got {x.dim()} dimensions")
    if x.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{name} must be on a CPU or a CUDA device, got {x.device}")
    return x


class Digits(NamedTuple):
    """A form of an operand as integers."""

    planes: tuple[Tensor, ...]  # int8 (L, K) each
    scale: Tensor  # float32 (L,)
    mean: Tensor | None = None  # float32 (L,): taken out of each slice by the centered form


@dataclass(frozen=True, eq=False)
class Operand:
    """Slices of one operand: rows of A, or columns of B, so that sums run along the second dimension of both.

    Attributes
    ----------
    given : Tensor, shape (L, K)
        The input.
    real : Tensor, shape (L, K)
        float32: finite slices times ``2**-exponent``, zeros for the others.
    exact : Tensor, shape (L, K)
        float32 or float64: the given numbers times ``2**-power``, zeros for slices that are not finite.
    power : int
        0 except for float64.
    exponent : Tensor, shape (L,), optional
        int32; None if no slice has a magnitude far from one.
    nonfinite : Tensor, optional
        int64: slices with inf or NaN.
    inexact : bool
        Whether int64 entries were rounded to float64.
    """

    given: Tensor
    real: Tensor
    exact: Tensor
    power: int = 0
    exponent: Tensor | None = None
    nonfinite: Tensor | None = None
    inexact: bool = False

    def finite(self) -> Tensor:
        """Return the given numbers, zeros for slices that are not finite."""
        return self.given if self.nonfinite is None else self.given.index_fill(0, self.nonfinite, 0.0)

    def hot(self) -> Tensor:
        """Return which columns of k hold outliers, bool (K,); at most ``K / 16`` of them."""
        top = self.real.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)  # (L,)
        energy = (self.real / top[:, None]).square_().sum(0)  # (K,)
        most = energy.shape[0] // _MOST_HOT
        if most == 0:
            return torch.zeros_like(energy, dtype=torch.bool)
        return energy > torch.maximum(_HOT * energy.median(), energy.topk(most + 1).values[-1])

    def digits(self, rung: Rung, hot: Tensor | None = None) -> Digits:
        """Return the digit planes that a rung multiplies; `hot`: outlier columns, which become zero."""
        count = PLANES.get(rung.mode, 2 if rung.mode in ("columns", "sparse") else 1)
        if rung.mode == "centered":
            mean = self.real.mean(1)  # (L,)
            return Digits(*_digits(self.real - mean[:, None], rung.bits, count), mean)
        if rung.mode == "outlier":
            kept = self.real.masked_fill(self.hot() if hot is None else hot, 0.0)  # (L, K)
            return Digits(*_digits(kept, rung.bits, count))
        if rung.bits == 8 and self.given.dtype == torch.int8:  # bytes are their own digits
            planes = (self.given, *(torch.zeros_like(self.given) for _ in range(count - 1)))
            return Digits(planes, torch.ones(self.given.shape[0], device=self.given.device, dtype=torch.float32))
        return Digits(*_digits(self.real, rung.bits, count))

    def planes(self, rung: Rung, digits: Digits) -> DigitPlanes:
        """Return the digits of a rung in the units of `exact`."""
        scale = digits.scale.double()
        if self.exponent is not None or self.power:
            exponent = -self.power if self.exponent is None else self.exponent - self.power
            scale = scale * torch.exp2(torch.as_tensor(exponent, device=scale.device).double())
        return DigitPlanes(digits.planes, scale, rung.bits, pairs_of(rung.mode))


def _digits(x: Tensor, bits: int, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
    from cute_kernels.convert import digits as convert  # takes longer to import than this package

    found = convert.digits(x, bits, count, axis=1)
    return found.planes, found.scale


def operand(x: Tensor) -> Operand:
    """Return the operand of slices ``x`` (L, K); looks for inf, NaN and magnitudes far from one.

    Examples
    --------
    >>> found = operand(torch.tensor([[1.0, 2.0], [torch.inf, 0.0]]))
    >>> found.nonfinite.tolist(), found.real.tolist()
    ([1], [[1.0, 2.0], [0.0, 0.0]])
    """
    given = x.detach()
    double = real_dtype(given) == torch.float64
    exact = given.double() if double else given.float()  # (L, K)
    if not given.numel():
        return Operand(given, exact.float(), exact)
    top = torch.maximum(exact.amax(1), exact.amin(1).neg_())  # (L,), NaN if a slice holds one
    finite = torch.isfinite(top)
    far = finite & (top > 0) & ((top > 2.0**FAR) | (top < 2.0**-FAR))
    any_nonfinite, any_far = torch.stack(((~finite).any(), far.any())).tolist()
    nonfinite = exponent = None
    if any_nonfinite:
        nonfinite = (~finite).nonzero().flatten()
        exact, top = exact.index_fill(0, nonfinite, 0.0), top.index_fill(0, nonfinite, 0.0)
    real = exact
    if any_far:
        exponent = torch.frexp(top).exponent  # (L,)
        real = by_power(exact, -exponent[:, None])  # (L, K)
    power = int(torch.frexp(top.max()).exponent) if double else 0
    exact = by_power(exact, -power)
    return Operand(given, real.float(), exact, power, exponent, nonfinite, is_inexact(given))


def operands_for(rung: Rung, *sides: Tensor) -> list[tuple[Operand, Digits | None]]:
    """Return operands as :func:`operand` does, with the digits for a rung if these were made on the way.

    The scales of digits tell inf, NaN and magnitudes far from one: usual float slices are read once, and a GPU is
    waited for once.

    Parameters
    ----------
    rung : Rung
        The first to be run.
    *sides : Tensor, shape (L, K) each
        Slices of operands on one device.

    Examples
    --------
    >>> ((found, digits),) = operands_for(Rung("full", 8), torch.tensor([[1.0, 0.5]]))
    >>> found.nonfinite, digits.planes[0].tolist()
    (None, [[127, 63]])
    >>> ((found, digits),) = operands_for(Rung("full", 8), torch.tensor([[1.0, torch.inf]]))
    >>> found.nonfinite.tolist(), digits
    ([0], None)
    """
    if rung.mode in PLANES and all(x.dtype in (torch.float32, *_HALVES) and x.numel() for x in sides):
        from cute_kernels.convert.digits import ZERO_SCALE  # takes longer to import than this package

        found: list[tuple[Operand, Digits | None]] = []
        scales = []
        for x in sides:
            real = x.detach().float()  # (L, K)
            planes, scale = _digits(real, rung.bits, PLANES[rung.mode])
            scales.append(scale)
            found.append((Operand(x.detach(), real, real), Digits(planes, scale)))
        scale = torch.cat(scales)
        top = scale * (2 ** (rung.bits - 1) - 1)  # of a slice, but for a rounding; NaN if it holds inf or NaN
        near = (scale == ZERO_SCALE) | ((top >= 2.0 ** (1 - FAR)) & (top <= 2.0 ** (FAR - 1)))
        if near.all():
            return found
    return [(operand(x), None) for x in sides]
