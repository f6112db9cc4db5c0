"""One operand of a quantized product: finite lines in float32, their scales, and digit planes made when asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from residual.operand.operand import Digits, real_dtype
from residual.operand.prepared import PreparedOperand

FAR = 30  # a line's magnitude beyond 2**FAR or below 2**-FAR is brought to one by a power of two
HOT = 16.0  # a column of k is an outlier where its mean square is this many times the median one
MOST_HOT = 16  # at most one column in so many is an outlier
SAMPLE = 16  # lines that statistics look at
_HALVES = (torch.float16, torch.bfloat16)
# Of a line's largest magnitude: float16 holds it, and entries down to a 16th of it, with all of their digits.
HALF_RANGE = (2.0**-10, 2.0**15)


def largest(x: Tensor) -> Tensor:
    """Largest magnitude of each line of ``x`` (L, K); NaN where the line holds one."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0])
    return torch.maximum(x.amax(1), x.amin(1).neg_())  # (L,)


def scale_by_powers(x: Tensor, exponent: Tensor) -> Tensor:
    """``x * 2**exponent`` for a line's ``exponent`` (L,), in two steps so that neither factor leaves the range."""
    half = torch.div(exponent, 2, rounding_mode="floor")
    ones = torch.ones_like(half, dtype=x.dtype)
    first, second = torch.ldexp(ones, half), torch.ldexp(ones, exponent - half)  # (L,)
    return x * first[:, None] * second[:, None]  # (L, K)


def digits(x: Tensor, bits: int, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """``x ~ scale (q0 + q1 / 2**bits + q2 / 4**bits)`` line by line, by :func:`cute_kernels.convert.digits.digits`.

    ``x``: float32, float16 or bfloat16 (L, K).  Returns ``count`` int8 planes of the layout of ``x`` and the scale,
    float32 (L,): 2**-38 for a line of zeros, NaN for one that is not finite.
    """
    from cute_kernels.convert import digits as gemm_digits  # takes longer to import than this package

    found = gemm_digits.digits(x, bits, count, axis=1)
    return found.planes, found.scale


@dataclass(eq=False)
class GpuOperand:
    """Lines of one operand: rows of A, or columns of B, so that the sum runs along the second dimension of both.

    Attributes:
        given: (L, K), the input as it is.
        real: the same in float32, or in the half dtype given on a GPU; finite where a call may wait for a GPU: lines
            with inf or NaN are zero then, and all are multiplied by ``2**-exponent``.
        exponent: int32 (L,), or None where no line's magnitude is far from one.
        broken: int64, the lines with inf or NaN, or None where there are none.
        seen: whether such lines were looked for.
    """

    given: Tensor
    real: Tensor
    exponent: Tensor | None = None
    broken: Tensor | None = None
    seen: bool = True
    made: dict[tuple[str, int, int], Digits] = field(default_factory=dict)
    kept: dict[object, Any] = field(default_factory=dict)  # statistics and probes of a constant operand

    @cached_property
    def values(self) -> Tensor:
        """``real`` in float32 (L, K)."""
        return self.real.float()

    @cached_property
    def half(self) -> Tensor:
        """``real`` in its own half dtype, or in float16 (L, K)."""
        return self.real if self.real.dtype in _HALVES else self.real.half()

    def fits_half(self) -> bool:
        """Whether the lines' largest magnitudes are zero or in :data:`HALF_RANGE`; waits for a GPU."""
        least, most = HALF_RANGE
        near = (self.top >= least) & (self.top <= most)
        return bool((near | (self.top == 0)).all())

    @cached_property
    def top(self) -> Tensor:
        """float32 (L,): largest magnitude of each line of ``values``."""
        return largest(self.values)

    @property
    def knows_tops(self) -> bool:
        """Whether ``top`` is there already."""
        return "top" in self.__dict__

    def finite(self) -> Tensor:
        """The given numbers in float64 (L, K), lines with inf or NaN zero."""
        exact = self.given.double()  # (L, K)
        return exact if self.broken is None else exact.index_fill(0, self.broken, 0.0)

    def digits(self, bits: int, count: int, form: str = "plain", hot: Tensor | None = None) -> Digits:
        """Digit planes of a form: ``plain``; ``centered``: without each line's mean; ``outlier``: zero where ``hot``.

        Kept, unless ``hot``, bool (K,), says which columns are outliers.
        """
        key = (form, bits, count)  # the leading digits of more digits are other ones
        found = self.made.get(key)
        if found is not None and hot is None:
            return found
        if form == "plain" and bits == 8 and self.given.dtype == torch.int8:  # bytes are their own digits
            planes = (self.given, *(torch.zeros_like(self.given) for _ in range(count - 1)))
            result = Digits(planes, torch.ones(self.given.shape[0], device=self.given.device))
        elif form == "plain":
            result = Digits(*digits(self.real, bits, count))
        elif form == "centered":
            mean = self.values.mean(1)  # (L,)
            result = Digits(*digits(self.values - mean[:, None], bits, count), mean)
        else:
            kept = self.values.masked_fill(self.hot() if hot is None else hot, 0.0)  # (L, K)
            result = Digits(*digits(kept, bits, count))
        if hot is None:
            self.made[key] = result
        return result

    def hot(self) -> Tensor:
        """bool (K,): the outlier columns, from a sample of the lines; at most ``K / MOST_HOT`` of them."""
        found = self.kept.get("hot")
        if found is not None and not isinstance(found, Tensor):
            found = self.kept["hot"] = found.outliers  # by the statistics' kernels
        if not isinstance(found, Tensor):
            step = max(1, self.values.shape[0] // SAMPLE)
            lines = self.values[::step] / self.top[::step, None].clamp(min=2.0**-FAR)  # (S, K)
            found = hot_columns(lines.square().sum(0))
            self.kept["hot"] = found
        return found


def hot_columns(energy: Tensor) -> Tensor:
    """bool (K,): where ``energy`` (K,) exceeds ``HOT`` times its median, the ``K / MOST_HOT`` largest at most."""
    k = energy.shape[0]
    most = k // MOST_HOT
    if most == 0:
        return torch.zeros_like(energy, dtype=torch.bool)
    bound = torch.maximum(HOT * energy.median(), energy.topk(most + 1).values[-1])
    return energy > bound


def gpu_operand(x: Tensor, *, waits: bool = True) -> GpuOperand:
    """An :class:`GpuOperand` of ``x`` (L, K).

    ``waits``: look for lines with inf or NaN or far from one, which waits for a GPU; without it such lines get scale
    NaN, and far ones may lose digits of their scale below 1e-38.
    """
    x = x.detach()
    real = x.to(real_dtype(x))
    if not x.is_cuda and real.dtype != torch.float64:
        real = real.float()
    broken = exponent = None
    if waits and x.numel():
        top = largest(real)
        finite = torch.isfinite(top)
        far = finite & (top > 0) & ((top > 2.0**FAR) | (top < 2.0**-FAR))
        any_broken, any_far = torch.stack(((~finite).any(), far.any())).tolist()
        if any_broken:
            broken = (~finite).nonzero().flatten()
            real = real.index_fill(0, broken, 0.0)  # (L, K)
            top = top.index_fill(0, broken, 0.0)
        if any_far:
            top = top.float() if top.dtype in _HALVES else top
            exponent = torch.frexp(top).exponent  # (L,)
            real = scale_by_powers(real.to(top.dtype), -exponent)  # (L, K)
            top = torch.frexp(top).mantissa
    side = GpuOperand(x, real.float() if real.dtype == torch.float64 else real, exponent, broken, waits)
    if waits and x.numel():
        side.top = top.float()  # found on the way
    return side


def prepared_operand(prepared: PreparedOperand) -> GpuOperand:
    """The columns of a prepared B, with the digits that it has."""
    columns = prepared.columns
    made = {}
    for rung, form in prepared.forms.items():
        name = rung.mode if rung.mode in ("centered", "outlier") else "plain"
        if form.digits is not None:
            made[name, rung.bits, len(form.digits.planes)] = form.digits
    plain = columns.given.dtype in _HALVES and columns.exponent is None and columns.nonfinite is None
    real = columns.given if plain else columns.real
    return GpuOperand(columns.given, real, columns.exponent, columns.nonfinite, True, made)
