"""The few-rows kernel's reading of a packed weight in integer arithmetic, and random weights of each format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import floats
from cute_kernels.few_rows.formats import FORMATS, PackedWeight, pack_weight

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_MANTISSA = {"bfloat16": 7, "float16": 10}
_BIAS = {"bfloat16": 127, "float16": 15}


def _as_floats(bits: Tensor, act: str) -> Tensor:
    """float64 of the low 16 bits, read as floats of `act`."""
    signed = torch.where(bits & 0x8000 != 0, (bits & 0xFFFF) - 0x10000, bits & 0xFFFF).to(torch.int16)
    return signed.view(_DTYPES[act]).double()


def _halves(word: Tensor) -> Tensor:
    return torch.stack([word & 0xFFFF, word >> 16 & 0xFFFF], -1)  # (..., 2)


def _rotated(word: Tensor, bits: int) -> Tensor:
    return (word << bits | word >> (32 - bits)) & 0xFFFFFFFF


def _pairs(words: Tensor, codes: str, act: str) -> Tensor:
    """Values (..., pairs, 2) of words (..., words), each times 2^-lift, as the kernel decodes them."""
    found = []
    for i in range(words.shape[-1]):
        word = words[..., i]
        if codes == "int4":
            found += [(_halves(word >> 4 * p) & 15).double() - 8 for p in range(4)]
        elif codes == "int8":
            for p in range(2):
                byte = _halves(word) >> (8 if p == 0 else 0) & 255
                found.append((byte & 127).double() - (byte & 128).double())
        elif codes == "e4m3":
            for p in range(2):
                byte = _halves(word) >> (8 if p == 0 else 0) & 255
                bits = (byte & 128) << 8 | (byte & 127) << (_MANTISSA[act] - 3)
                found.append(_as_floats(bits, act))
        elif i < 4:
            turned = _rotated(word, 6)
            last = (turned & 0x001B001B) * 0x888 & 0xFFFFFFFF
            for masked in (word, word << 3, turned, last):
                bits = masked & 0x81C081C0
                if codes != "e2m1":
                    low, up = words[..., 4 + len(found) // 8], 4 - 2 * (len(found) % 8)
                    bits = bits | (low << up if up >= 0 else low >> -up) & 0x00300030
                shift = (3 if act == "float16" else 0) + (codes == "e3m2")
                if shift:
                    bits = bits & 0x80008000 | bits << shift & (0x01F001F0 << shift)
                found.append(_as_floats(_halves(bits), act))
    return torch.stack(found, -2)


def _units(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Codes as pairs (blocks, units, 64, 4, 16, 2) and scale bytes (blocks, units, 64, bytes)."""
    form, (blocks, units, _) = weight.format, weight.data.shape
    size = 64 * 128 * form.bits // 8
    flat = weight.data[..., :size].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    chunks = [flat[..., start : start + 1024] for start in range(0, flat.shape[-1], 1024)]  # 4 or 2 words of each lane
    words = torch.cat([each.reshape(blocks, units, 64, 4, -1) for each in chunks], -1)  # (warp, half, g), t, words
    return _pairs(words, form.codes, weight.act), weight.data[..., size:].reshape(blocks, units, 64, -1)


def _scaled(weight: PackedWeight, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Codes times scales of groups, (N, K) float64; `rounded` is applied where such a product is rounded to 16 bits."""
    form, act, (n, k) = weight.format, weight.act, weight.shape
    values, raw = _units(weight)
    blocks, units = values.shape[:2]
    lift = {"e2m1": _BIAS[act] - 1, "e2m3": _BIAS[act] - 1, "e3m2": _BIAS[act] - 3, "e4m3": _BIAS[act] - 7}.get(
        form.codes, 0
    )
    values = values.permute(0, 2, 1, 4, 3, 5)  # (blocks, 64, units, pairs, t, 2)
    values = values.reshape(blocks, 64, units, 8, 2, 4, 2).flatten(3)  # k = 16 step + 8 part + 2 t + half
    group = form.group or 128

    def spread(x: Tensor) -> Tensor:  # (blocks, units, 64, groups) -> (blocks, 64, units, 128)
        return x.permute(0, 2, 1, 3).repeat_interleave(group, -1)

    if form.scale in ("none", "sum"):
        values = values * 2.0**lift
        if form.scale == "sum":
            values = values * spread(raw.contiguous().view(torch.float32).double())
    elif form.scale == "power":
        values = rounded(values * spread(_as_floats(raw.long() << _MANTISSA[act], act)))
    elif form.scale == "e4m3":
        bits = (raw.long() << (_MANTISSA[act] - 3)) + (_BIAS[act] + lift - 18 << _MANTISSA[act])
        values = rounded(values * spread(_as_floats(bits, act)))
    else:
        scales = raw.contiguous().view(_DTYPES[act]).double()
        if form.scale == "half":
            values = rounded(values * spread(scales))
        else:
            values = rounded(values * spread(scales[..., 0::2]) + spread(scales[..., 1::2]))
    found = values.reshape(blocks * 64, units * 128)
    # beyond K, where X is zero, a minimum may stand
    assert form.scale == "half_min" or not bool(found[:, k:].any() | found[n:].any()), "padding is zero"
    return found[:n, :k]


def decode(weight: PackedWeight) -> Tensor:
    """Return what the kernel multiplies by, (N, K) float64; the results' rounding is not in it."""
    dtype = _DTYPES[weight.act]
    return _scaled(weight, lambda x: x.to(dtype).double()) * weight.row_scale.double()[:, None]


def dense(weight: PackedWeight) -> Tensor:
    """Return the decoded matrix (N, K) in its dtype: float32 arithmetic, rounded once."""
    values = _scaled(weight, lambda x: x).float()  # of at most 53 bits before
    return (values * weight.row_scale[:, None]).to(_DTYPES[weight.act])


@dataclass(frozen=True)
class Sample:
    """A packed weight, what it stands for (N, K) and by how much the kernel's weight may differ, float64."""

    weight: PackedWeight
    truth: Tensor
    slack: Tensor


def sample(name: str, n: int, k: int, act: str = "bfloat16", seed: int = 0, device: str = "cpu") -> Sample:
    """Return a random weight; the codes are all of the format's but NaN."""
    form, made = FORMATS[name], torch.Generator().manual_seed(seed)
    eps = torch.finfo(_DTYPES[act]).eps / 2
    groups = -(-k // form.group) if form.group else 0
    row_scale = torch.rand(n, generator=made) + 0.5
    if form.scale == "e4m3" or form.codes == "e4m3":
        row_scale = row_scale / 512  # results within float16

    def spread(x: Tensor) -> Tensor:
        return x.double().repeat_interleave(form.group, 1)[:, :k]

    scales = minimum = None
    if form.codes in ("int4", "int8"):
        top = 1 << (form.bits - 1)
        codes = torch.randint(-top, top, (n, k), generator=made, dtype=torch.int8)
        values = codes.double()
    else:
        codes = torch.randint(0, 1 << form.bits, (n, k), generator=made, dtype=torch.uint8)
        if form.codes == "e4m3":
            codes[(codes & 127) == 127] = 1
        values = floats.decode(codes, form.codes, out_dtype=torch.float64)
    truth, slack = values, torch.zeros_like(values)
    if form.scale in ("half", "half_min", "sum"):
        scales = torch.randn(n, groups, generator=made).exp() * 0.01
        truth = values * spread(scales)
        slack = truth.abs() * 2 * eps
        if form.scale == "half_min":
            minimum = torch.randn(n, groups, generator=made) * 0.03
            slack = eps * (truth.abs() + spread(minimum).abs() + (truth + spread(minimum)).abs())
            truth = truth + spread(minimum)
        slack = slack * 1.01 + 2.0**-24 * truth.abs().amax(1, keepdim=True)
    elif form.scale == "power":
        scales = torch.randint(100, 130, (n, groups), generator=made, dtype=torch.uint8)
        truth = values * spread(floats.decode(scales, "ue8m0", out_dtype=torch.float64))
        lost = 2.0 ** (-22 if form.codes == "e3m2" else -24)  # as float16; small scales beside the row's largest
        slack = slack + lost * torch.exp2(scales.double().amax(1, keepdim=True) - 127)
    elif form.scale == "e4m3":
        scales = torch.randint(0, 127, (n, groups), generator=made, dtype=torch.uint8)
        truth = values * spread(floats.decode(scales, "e4m3", out_dtype=torch.float64))
    given = [x if x is None else x.to(device) for x in (scales, minimum, row_scale)]
    weight = pack_weight(codes.to(device), form, act, given[0], minimum=given[1], row_scale=given[2])
    factor = row_scale.double()[:, None]
    return Sample(weight, (truth * factor).to(device), (slack * factor).to(device))
