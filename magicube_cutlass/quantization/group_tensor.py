"""Weights of 4 or 8 bits with a scale, and optionally a minimum, per row and group of columns: ``w = s q + m``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_kernels.integers import check_range, int_range, pack4, unpack4
from magicube_cutlass.quantization.quantize import quantize

__all__ = ["GROUP_SIZES", "GroupTensor", "quantize_groups"]

GROUP_SIZES = (16, 32, 64, 128, 256)
# Elements quantized at a time; on a CPU, whose intermediate results then stay in cache.
_CHUNK, _CPU_CHUNK = 1 << 22, 1 << 18
_STEPS = 24  # clip thresholds tried per group, from 0.6 of the amax up


@dataclass(frozen=True, eq=False)
class GroupTensor:
    """Signed integers (R, K) with scales of groups: ``w = scale * q + minimum``, in float32.

    Attributes
    ----------
    data : Tensor, shape (R, K) or (R, ceil(K / 2))
        int8, or uint8 with two 4-bit integers in a byte, low nibble first.
    scale : Tensor, shape (R, G)
        float32; G = ceil(K / group), 1 without groups.
    minimum : Tensor or None, shape (R, G)
        float32, what the integer 0 stands for; None: 0.
    bits : int
        4 or 8.
    group : int or None
        Columns that share a scale; None: all of a row.
    k : int
        K.

    Examples
    --------
    >>> w = quantize_groups(torch.tensor([[1.0] * 16 + [-7.0] * 16]), bits=4, group=16)
    >>> w.shape, w.data.shape, w.dequantize()[0, ::16].tolist()
    ((1, 32), torch.Size([1, 16]), [1.0, -7.0])
    """

    data: Tensor
    scale: Tensor
    minimum: Tensor | None
    bits: int
    group: int | None
    k: int

    def __post_init__(self) -> None:
        _check_kind(self.bits, self.group)
        dtype, width = (torch.int8, self.k) if self.bits == 8 else (torch.uint8, (self.k + 1) // 2)
        if self.data.dtype != dtype:
            raise TypeError(f"data must be {dtype} for {self.bits} bits, got {self.data.dtype}")
        if self.data.ndim != 2 or self.data.shape[1] != width:
            raise ValueError(f"data must have shape (R, {width}) for k={self.k}, got {tuple(self.data.shape)}")
        expected = (self.data.shape[0], 1 if self.group is None else -(-self.k // self.group))
        for name, each in (("scale", self.scale), ("minimum", self.minimum)):
            if each is not None and (each.dtype != torch.float32 or tuple(each.shape) != expected):
                raise ValueError(f"{name} must be float32 of shape {expected}, got {each.dtype} of {tuple(each.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        """(R, K)."""
        return self.data.shape[0], self.k

    @property
    def device(self) -> torch.device:
        """Device of the integers."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of integers, scales and minima."""
        return sum(each.nbytes for each in (self.data, self.scale, self.minimum) if each is not None)

    def ints(self) -> Tensor:
        """Return the integers as int8, (R, K)."""
        return self.data if self.bits == 8 else unpack4(self.data, self.k, True)

    def dequantize(self) -> Tensor:
        """Return ``scale * q + minimum``, float32, (R, K)."""
        values = self.ints().float() * self._spread(self.scale)
        return values if self.minimum is None else values + self._spread(self.minimum)

    def _spread(self, x: Tensor) -> Tensor:
        return x if self.group is None else x.repeat_interleave(self.group, 1)[:, : self.k]

    def to(self, device: torch.device | str) -> GroupTensor:
        """Return this tensor on `device`."""
        minimum = None if self.minimum is None else self.minimum.to(device)
        return replace(self, data=self.data.to(device), scale=self.scale.to(device), minimum=minimum)

    @classmethod
    def from_ints(
        cls, ints: Tensor, scale: Tensor, minimum: Tensor | None = None, *, bits: int, group: int | None = None
    ) -> GroupTensor:
        """Make a tensor of given integers (R, K), scales and minima (R, G).

        Raises
        ------
        TypeError, ValueError
            If a dtype, a shape or a value does not fit.

        Examples
        --------
        >>> ints = torch.tensor([[-8, 7]])
        >>> GroupTensor.from_ints(ints, torch.tensor([[0.5]]), torch.tensor([[4.0]]), bits=4).dequantize().tolist()
        [[0.0, 7.5]]
        """
        _check_kind(bits, group)
        check_range(ints, bits, True, "ints")
        if ints.ndim != 2:
            raise ValueError(f"ints must have 2 dimensions, got {ints.ndim}")
        data = ints.to(torch.int8).contiguous() if bits == 8 else pack4(ints).contiguous()
        return cls(data, scale, minimum, bits, group, ints.shape[1])


def _check_kind(bits: int, group: int | None) -> None:
    if isinstance(bits, bool) or bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits!r}")
    if group is not None and (isinstance(group, bool) or group not in GROUP_SIZES):
        raise ValueError(f"group must be None or one of {GROUP_SIZES}, got {group!r}")


def _scales(low: Tensor, high: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Scale and minimum of groups whose values lie in [low, high]; scale 1 for zeros, never 0."""
    first, last = int_range(bits, True)
    tiny = torch.finfo(torch.float32).smallest_normal
    if symmetric:
        top = torch.maximum(-low, high)
        scale = torch.where(top == 0, 1.0, (top.double() / last).float().clamp(min=tiny))
        return scale, None
    low, high = low.clamp(max=0), high.clamp(min=0)  # 0 stays within the range, as a padding needs it
    scale = torch.where(high == low, 1.0, ((high.double() - low) / (last - first)).float().clamp(min=tiny))
    return scale, (low.double() - first * scale.double()).float()


def _rounded(groups: Tensor, scale: Tensor, minimum: Tensor | None, bits: int) -> Tensor:
    """Integers (R, G, group) of the values, in float64."""
    shifted = groups.double() if minimum is None else groups.double() - minimum.double()[..., None]
    return (shifted / scale.double()[..., None]).round().clamp(*int_range(bits, True))


def quantize_groups(
    weight: Tensor, bits: int, group: int | None = None, *, symmetric: bool = True, clip: str = "max"
) -> GroupTensor:
    """Quantize a weight with a scale per row and group of columns: ``q = clamp(round((w - m) / s))``.

    Parameters
    ----------
    weight : Tensor, shape (R, K)
        Float, finite.
    bits : int
        4 or 8.
    group : int, optional
        16, 32, 64, 128 or 256 columns; default: all of a row.
    symmetric : bool, default True
        ``m = 0``. Otherwise the integers span the smallest to the largest value of the group and 0.
    clip : {"max", "mse"}, default "max"
        Ranges that cover all values, or of each group the one of least squared error among 24.

    Returns
    -------
    GroupTensor

    Raises
    ------
    TypeError
        If `weight` is no float tensor.
    ValueError
        If it is no finite matrix, or for other options.

    Examples
    --------
    >>> w = torch.tensor([[0.0, 15.0], [-1.0, 2.0]])
    >>> quantize_groups(w, bits=4, symmetric=False).dequantize()[0].tolist()
    [0.0, 15.0]
    """
    _check_kind(bits, group)
    if not weight.is_floating_point():
        raise TypeError(f"weight must have a floating dtype, got {weight.dtype}")
    if weight.ndim != 2:
        raise ValueError(f"weight must have 2 dimensions, got {weight.ndim}")
    if clip not in ("max", "mse"):
        raise ValueError(f"clip must be 'max' or 'mse', got {clip!r}")
    if 0 in weight.shape:
        raise ValueError(f"weight must have elements, got shape {tuple(weight.shape)}")
    rows = max(1, (_CPU_CHUNK if weight.device.type == "cpu" else _CHUNK) // weight.shape[1])
    parts = [_quantize(each, bits, group, symmetric, clip) for each in weight.detach().split(rows)]
    if len(parts) == 1:
        return parts[0]
    minima = [each.minimum for each in parts if each.minimum is not None]
    data, scale = torch.cat([each.data for each in parts]), torch.cat([each.scale for each in parts])
    return replace(parts[0], data=data, scale=scale, minimum=torch.cat(minima) if minima else None)


def _quantize(weight: Tensor, bits: int, group: int | None, symmetric: bool, clip: str) -> GroupTensor:
    """As :func:`quantize_groups`, for a part of the rows."""
    w, k = weight.float(), weight.shape[1]
    if not bool(w.isfinite().all()):
        raise ValueError("weight must be finite, got inf or nan")
    size = group or k
    groups = torch.nn.functional.pad(w, (0, -k % size)).unflatten(1, (-1, size))  # (R, G, group)
    if symmetric and clip == "max":  # by the engine on a CPU
        found = quantize(groups.flatten(0, 1), bits, scale="row")
        assert found.scale is not None
        ints = found.ints().view(len(w), -1)[:, :k]
        return GroupTensor.from_ints(ints, found.scale.view(groups.shape[:2]), bits=bits, group=group)
    low, high = groups.amin(-1), groups.amax(-1)
    scale, minimum = _scales(low, high, bits, symmetric)
    if clip == "mse":
        padding = torch.arange(groups[0].numel(), device=w.device).view(groups[0].shape) >= k  # (G, group)
        scale, minimum = _least_error(groups, padding, low, high, bits, symmetric)
    ints = _rounded(groups, scale, minimum, bits).flatten(1)[:, :k].to(torch.int8)
    return GroupTensor.from_ints(ints, scale, minimum, bits=bits, group=group)


def _least_error(
    groups: Tensor, padding: Tensor, low: Tensor, high: Tensor, bits: int, symmetric: bool
) -> tuple[Tensor, Tensor | None]:
    """Scale and minimum of each group with the least squared error."""
    best, best_scale, best_minimum = None, low, None
    for step in range(_STEPS):
        share = 1 - 0.4 * step / _STEPS
        scale, minimum = _scales(low * share, high * share, bits, symmetric)
        values = _rounded(groups, scale, minimum, bits).float() * scale[..., None]
        values = values if minimum is None else values + minimum[..., None]
        error = (values - groups).masked_fill(padding, 0).square().sum(-1)
        if best is None:
            best, best_scale, best_minimum = error, scale, minimum
            continue
        better = error < best
        best, best_scale = torch.where(better, error, best), torch.where(better, scale, best_scale)
        if minimum is not None and best_minimum is not None:
            best_minimum = torch.where(better, minimum, best_minimum)
    return best_scale, best_minimum
