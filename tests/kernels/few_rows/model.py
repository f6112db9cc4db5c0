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
    shrink = 2.0**-6 if act == "bfloat16" else 1.0  # of integers
    for i in range(words.shape[-1]):
        word = words[..., i]
        if codes == "int4":
            found += [((_halves(word >> 4 * p) & 15).double() - 8) * shrink for p in range(4)]
        elif codes == "int8":
            for p in range(2):
                byte = _halves(word) >> (8 if p == 0 else 0) & 255
                found.append(((byte ^ 128).double() - 128) * shrink)
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
    raw = weight.data[..., size:]
    if form.scale in ("power", "e4m3"):  # (warp, g, groups, half)
        raw = raw.reshape(blocks, units, 4, 8, -1, 2).permute(0, 1, 2, 5, 3, 4)
    return _pairs(words, form.codes, weight.act), raw.reshape(blocks, units, 64, -1)


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


def integers(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Return what the product of int8 rows multiplies by: codes (N, K) int64, 16 q of int4, and scales of groups.

    Scales are (N, K / group) float64, of padded K; all of K is one group without any.
    """
    form, (n, k), (blocks, units, _) = weight.format, weight.shape, weight.data.shape
    size = 64 * 128 * form.bits // 8
    chunks = weight.data[..., :size].long().view(blocks, units, -1, 4, 2, 8, 4, 4, 4)
    # (.., chunk of 16 bytes, warp, half of rows, g, t, word, byte): PTX ISA, registers of an int8 A operand
    if form.bits == 4:  # a word: k = 32 word + 4 t + byte in the upper halves of bytes, 16 more in the lower
        words = chunks[:, :, 0]
        parts = torch.stack(
            [words & 0xF0, words << 4 & 0xF0], -3
        )  # (blocks, units, warp, half, g, t, part, word, byte)
        step_first = parts.permute(0, 2, 3, 4, 1, 7, 6, 5, 8)
    else:  # two words a step, the second 16 k further
        parts = chunks.view(blocks, units, 2, 4, 2, 8, 4, 2, 2, 4)
        step_first = parts.permute(0, 3, 4, 5, 1, 2, 7, 8, 6, 9)
    found = step_first.reshape(blocks * 64, units * 128)
    found = torch.where(found > 127, found - 256, found)
    raw = (
        weight.data[..., size:].reshape(blocks, units, 64, -1).permute(0, 2, 1, 3).reshape(blocks * 64, -1).contiguous()
    )
    if form.scale == "none":
        scales = torch.ones(n, 1, dtype=torch.float64, device=raw.device)
    else:
        scales = raw.view(torch.float32 if form.scale == "sum" else torch.float16)[:n].double()
    assert not bool(found[:, k:].any() | found[n:].any()), "padding is zero"
    return found[:n, :k], scales


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
    eps = torch.finfo(_DTYPES.get(act, torch.float16)).eps / 2  # scales beside int8 rows are float16
    groups = -(-k // form.group) if form.group else 0
    row_scale = torch.rand(n, generator=made) + 0.5
    if form.scale == "e4m3" or form.codes == "e4m3":
        row_scale = row_scale / 512  # results within float16
    if (
        act == "int8"
    ):  # |x| <= 128 and |q| <= top, so results without groups are at most 12 K: within float16 up to K = 5,400
        row_scale = row_scale / (8 << form.bits)  # 16 top

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


def _group_products(x: Tensor, weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Sum over groups of scale times exact sum, and of its magnitude, (M, N) float64; without scales of rows.

    Without groups, magnitudes are those of the sums of 128 k: no share of K has a larger sum.
    """
    codes, scales = integers(weight)
    k, group = codes.shape[1], weight.format.group or 128
    total = torch.zeros(x.shape[0], codes.shape[0], dtype=torch.float64, device=x.device)
    magnitude = torch.zeros_like(total)
    for i, start in enumerate(range(0, k, group)):
        part = slice(start, start + group)
        term = x[:, part].double() @ codes[:, part].double().t()  # sums below 2^53: exact
        term = term * scales[:, i if weight.format.group else 0]
        total, magnitude = total + term, magnitude + term.abs()
    return total, magnitude


def int8_product(x: Tensor, weight: PackedWeight, row_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return ``row_scale X W^T + bias`` of int8 rows in float64, (M, N)."""
    total, _ = _group_products(x, weight)
    total = total * weight.row_scale.double()
    total = total if row_scale is None else total * row_scale.double().reshape(-1, 1)
    return total if bias is None else total + bias.double()


def int8_limit(
    x: Tensor, weight: PackedWeight, row_scale: Tensor | None, bias: Tensor | None, out: torch.dtype
) -> Tensor:
    """Return a bound on the product's error, (M, N), if its result is finite in `out`.

    With u = 2^-24, a float32 sum of terms differs from theirs by at most u times the sum of their magnitudes per rounding
    (1.01: products of roundings). Sums of a group are below 2^24, so conversions are exact. Roundings: one FMA per group,
    7 additions of the shares of 4 CTAs and 2 warp groups, and the product with the row's scale. Without groups, sums are
    integers below 2^24, which is asserted: only the last of these rounds. Then one FMA adds the bias, and the output is
    rounded. A float16 result beyond 65504 is infinite: no bound holds there.
    """
    group, (_, k) = weight.format.group, weight.shape
    total, magnitude = _group_products(x, weight)
    assert group or not magnitude.numel() or float(magnitude.max()) < 1 << 24, "sums are not exact in float32"
    scales = weight.row_scale.double()
    scales = scales if row_scale is None else scales * row_scale.double().reshape(-1, 1)
    roundings, terms = (-(-k // group) + 8, magnitude) if group else (1, total.abs())
    sums = 2.0**-24 * 1.01 * roundings * terms * scales
    exact = int8_product(x, weight, row_scale, bias).abs()
    assert not exact.numel() or float(exact.max()) < torch.finfo(out).max, "beyond the output's range"
    sums = sums + 2.0**-24 * (exact + sums)
    rounding = torch.finfo(out).eps / 2 * (exact + sums) if out != torch.float32 else 0.0
    return sums + rounding + (2.0**-25 if out == torch.float16 else 0.0)
