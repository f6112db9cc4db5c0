"""Weight formats of the few-rows product: one table, and packing into the order that the kernel reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.float_format import float_format

UNIT_ROWS, UNIT_K = 64, 128  # rows and k of a unit of packed weights
PAD_K = 256  # K is padded to a multiple of it
ACTS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_BIAS = {"bfloat16": 127, "float16": 15}  # of the exponent of the values that Tensor Cores multiply
_SHRINK = 9  # e4m3 block scales enter the product 2^9 too small
_SHRINK_INTEGERS = 6  # integers that become bfloat16 do so 2^6 too small


@dataclass(frozen=True)
class WeightFormat:
    """A decode function and a scale rule.

    Attributes
    ----------
    name : str
        Name.
    codes : str
        ``"int4"``, ``"int8"``, ``"e2m1"``, ``"e2m3"``, ``"e3m2"`` or ``"e4m3"``.
    scale : str
        ``"none"``, ``"power"`` (ue8m0), ``"e4m3"``, ``"half"`` (of the dtype of X, float16 for int8), ``"half_min"``
        (scale and minimum) or ``"sum"`` (float32, which multiplies the partial sum of a group; of integers and 64 rows
        of floats, its values).
    group : int
        k that share a scale; 0 without.
    """

    name: str
    codes: str
    scale: str = "none"
    group: int = 0

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return {"int8": 8, "e4m3": 8, "e2m3": 6, "e3m2": 6}.get(self.codes, 4)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a row of a unit."""
        size = {"none": 0, "power": 1, "e4m3": 1, "half": 2, "half_min": 4, "sum": 4}[self.scale]
        return size * (UNIT_K // self.group if self.group else 0)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit: codes, then scales."""
        return UNIT_ROWS * (UNIT_K * self.bits // 8 + self.scale_bytes)


_INTS, _GROUPS = ("int4", "int8"), (16, 32, 64)
FORMATS = {
    each.name: each
    for each in (
        *(WeightFormat(codes, codes) for codes in (*_INTS, "e2m1", "e2m3", "e3m2", "e4m3")),
        *(WeightFormat(f"{codes}_g{group}", codes, "half", group) for codes in _INTS for group in _GROUPS),
        *(WeightFormat(f"{codes}_g128", codes, "sum", 128) for codes in _INTS),
        *(WeightFormat(f"{codes}_g{each}_min", codes, "half_min", each) for codes in _INTS for each in (*_GROUPS, 128)),
        WeightFormat("e4m3_g128", "e4m3", "sum", 128),
        WeightFormat("mxfp4", "e2m1", "power", 32),
        WeightFormat("nvfp4", "e2m1", "e4m3", 16),
        WeightFormat("mxfp6", "e2m3", "power", 32),
        WeightFormat("mxfp6_e3m2", "e3m2", "power", 32),
    )
}


def takes_int8(form: WeightFormat) -> bool:
    """Return whether the product of int8 rows has a weight format: integers without minima, groups of 32 k or more."""
    return form.codes in _INTS and form.scale in ("none", "half", "sum") and form.group != 16


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight (N, K) in the order of the few-rows product.

    Attributes
    ----------
    format : WeightFormat
        Entry of :data:`FORMATS`.
    act : str
        ``"bfloat16"``, ``"float16"`` or ``"int8"``: dtype of X, which scales and the order of codes depend on.
    data : Tensor, shape (blocks, units, bytes)
        uint8; a block is 64 rows, a unit 128 k.
    row_scale : Tensor, shape (N,)
        float32: multiplies the results of a row.
    shape : tuple of int
        (N, K).
    """

    format: WeightFormat
    act: str
    data: Tensor
    row_scale: Tensor
    shape: tuple[int, int]


# Bits of a word's half that hold code `s e e m` of pair p, from bit 3 down. Pair 3 goes through a table.
_PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0))
_FACTOR, _FREE = 0x888, (0, 1, 3, 4)  # of pair 3 after a rotation by 6 bits


def _last_pair_table() -> list[int]:
    """What pair 3 of a half is for each code, before the rotation: bits 10, 11, 13 and 14 of the other half."""
    found = [0] * 16
    for index in range(16):
        bits = sum((index >> i & 1) << place for i, place in enumerate(_FREE))
        product = bits * _FACTOR
        # a rotation by 6 takes bit 10 to bit 0 of the next half
        found[(product >> 15 & 1) << 3 | product >> 6 & 7] = bits << 10
    return found


def _placed(codes: Tensor) -> Tensor:
    """Words (..., ) int64 of e2m1 codes (..., 4 pairs, 2 halves)."""
    words = torch.zeros(codes.shape[:-2], dtype=torch.int64, device=codes.device)
    table = torch.tensor(_last_pair_table(), dtype=torch.int64, device=codes.device)
    for half in range(2):
        for pair, places in enumerate(_PLACES):
            code = codes[..., pair, half].long()
            for source, target in zip((3, 2, 1, 0), places, strict=True):
                words |= (code >> source & 1) << (target + 16 * half)
        words |= table[codes[..., 3, half].long()] << (16 * (1 - half))
    return words


def _low_bits(codes: Tensor) -> Tensor:
    """Words of the lower two bits of codes (..., 8 pairs, 2 halves)."""
    places = 2 * torch.arange(8, device=codes.device)[:, None] + 16 * torch.arange(2, device=codes.device)
    return ((codes.long() & 3) << places).sum((-2, -1))


def _nibbles(codes: Tensor) -> Tensor:
    """Words of int4 codes q + 8: pair p in nibble p of each half."""
    words = torch.zeros(codes.shape[:-2], dtype=torch.int64, device=codes.device)
    for half in range(2):
        for pair in range(4):
            words |= (codes[..., pair, half].long() & 15) << (4 * pair + 16 * half)
    return words


def _bytes(codes: Tensor) -> Tensor:
    """Words of byte codes (..., 2 pairs, 2 halves): pair 0 in the upper bytes of the halves."""
    words = torch.zeros(codes.shape[:-2], dtype=torch.int64, device=codes.device)
    for half in range(2):
        for pair in range(2):
            words |= (codes[..., pair, half].long() & 255) << (16 * half + 8 * (1 - pair))
    return words


def _padded(x: Tensor, rows: int, columns: int, value: float = 0) -> Tensor:
    """`x` with rows and columns of `value` behind it."""
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]), value=value)


def _int8_words(codes: Tensor, bits: int) -> Tensor:
    """Bytes of units as the product of int8 rows reads them: a register has four k of a row.

    A word of int4 has those of two registers, 16 k apart: upper halves of bytes are k, lower halves k + 16.
    """
    blocks, units = codes.shape[0] // UNIT_ROWS, codes.shape[1] // UNIT_K
    # k = 32 step + 16 part + 4 t + i; row = 16 warp + 8 half_row + g
    split = codes.view(blocks, 4, 2, 8, units, 4, 2, 4, 4).permute(0, 4, 1, 2, 3, 7, 5, 6, 8)
    # (blocks, units, warp, half_row, g, t, step, part, i)
    if bits == 4:
        split = (split[..., 0, :] << 4 | split[..., 1, :] & 15)[..., None, :]
    split = split.reshape(blocks, units, 4, 2, 32, bits // 4, 4, 4)  # (.., lane, chunks of 16 bytes, words, i)
    return split.permute(0, 1, 5, 2, 3, 4, 6, 7).reshape(blocks, units, -1)


def pack_codes(codes: Tensor, form: WeightFormat, act: str = "bfloat16") -> Tensor:
    """Return codes in fragment order.

    Parameters
    ----------
    codes : Tensor, shape (R, K)
        uint8: e2m1 or e4m3 codes, q + 8 of int4 (q of int8 rows), or the byte of int8. R is a multiple of 64, K of
        256.
    form : WeightFormat
        Format.
    act : str
        Dtype of X.

    Returns
    -------
    Tensor, shape (R / 64, K / 128, bytes)
        uint8.
    """
    if act == "int8":
        return _int8_words(codes, form.bits)
    if form.bits == 6:  # sign and the upper three bits of the magnitude, then the lower two
        upper, lower = codes >> 2, codes
        parts = [_in_order(upper, 4, _placed, 4), _in_order(lower, 8, _low_bits, 2)]
        return torch.cat(parts, -1)
    make = {"int4": _nibbles, "e2m1": _placed}.get(form.codes, _bytes)
    return _in_order(codes, 16 // form.bits, make, 4)


def _in_order(codes: Tensor, pairs: int, make: Callable[[Tensor], Tensor], together: int) -> Tensor:
    """Bytes of units: `make` returns words of `pairs` pairs, of which a lane reads `together` at a time."""
    blocks, units = codes.shape[0] // UNIT_ROWS, codes.shape[1] // UNIT_K
    # k = 16 step + 8 part + 2 t + half; pair = 2 step + part; row = 16 warp + 8 half_row + g
    split = codes.view(blocks, 4, 2, 8, units, 16 // pairs, pairs, 4, 2)
    split = split.permute(0, 4, 1, 2, 3, 7, 5, 6, 8)  # (blocks, units, warp, half_row, g, t, words, pairs, 2)
    words = torch.cat([make(each) for each in split.split(max(1, (1 << 22) // (units * UNIT_K * UNIT_ROWS)))])
    words = words.view(blocks, units, 4, 2, 32, -1, together).permute(0, 1, 5, 2, 3, 4, 6)
    parts = [(words >> shift & 255).to(torch.uint8) for shift in (0, 8, 16, 24)]
    return torch.stack(parts, -1).reshape(blocks, units, -1)


def _normal_codes(scales: Tensor) -> Tensor:
    """Codes ``E M`` of five and three bits, ``2^(E - 9) (1 + M / 8)``, of e4m3 codes without sign; 0 for 0 and NaN."""
    code = torch.arange(128, device=scales.device)
    exponent, mantissa = code >> 3, code & 7
    shift = 3 - torch.log2(mantissa.clamp(min=1).float()).floor().long()  # of subnormal numbers M 2^-9
    low = (3 - shift) << 3 | (mantissa << shift & 7)
    table = torch.where(exponent == 0, low, (exponent + 2) << 3 | mantissa)
    table[0] = table[127] = 0
    return table.to(torch.uint8)[scales.long()]


def _power_of_two(x: Tensor) -> Tensor:
    """Largest power of two not above the largest finite magnitude of each row, (R, 1) float32; 1 for rows of zeros."""
    top = torch.where(x.isfinite(), x.abs(), 0.0).amax(1, keepdim=True)
    return torch.where(top > 0, torch.exp2(torch.frexp(top.double()).exponent - 1.0), 1.0)


def _scale_units(scales: Tensor, units: int) -> Tensor:
    """Scales (R, groups, bytes) as bytes of units: (blocks, units, bytes); single bytes of rows 8 apart take turns."""
    rows = scales.shape[0]
    if scales.shape[-1] == 1:
        split = scales.reshape(rows // UNIT_ROWS, 4, 2, 8, units, -1)
        return split.permute(0, 4, 1, 3, 5, 2).reshape(rows // UNIT_ROWS, units, -1)
    split = scales.reshape(rows // UNIT_ROWS, UNIT_ROWS, units, -1)
    return split.permute(0, 2, 1, 3).reshape(rows // UNIT_ROWS, units, -1)


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).view(*x.shape, -1)


def pack_weight(
    codes: Tensor,
    form: WeightFormat,
    act: str,
    scales: Tensor | None = None,
    *,
    minimum: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> PackedWeight:
    """Pack a weight for the few-rows product.

    Parameters
    ----------
    codes : Tensor, shape (N, K)
        int8 integers, or uint8 codes of e2m1 and e4m3.
    form : WeightFormat
        Format.
    act : str
        ``"bfloat16"``, ``"float16"`` or, for formats that :func:`takes_int8` names, ``"int8"``: dtype of X.
    scales : Tensor, shape (N, ceil(K / group)), optional
        float32 of integers and of e4m3_g128, uint8 bits of ue8m0 or e4m3.
    minimum : Tensor, shape (N, ceil(K / group)), optional
        float32, what the integer 0 stands for.
    row_scale : Tensor, shape (N,) or (), optional
        float32: multiplies the results of a row.

    Returns
    -------
    PackedWeight

    Raises
    ------
    ValueError
        If `act` is ``"int8"`` and that product does not have the format.

    Notes
    -----
    Scales are divided by a power of two per row, which the row's scale takes over, so that they fit the dtype of X. NaN
    codes of e4m3 and NaN block scales make the row's scale NaN, and so its results, as the product itself would.
    """
    if act == "int8" and not takes_int8(form):
        raise ValueError(f"form must have symmetric integers and groups of 32 to 128 for int8 rows, got {form.name!r}")
    n, k = codes.shape
    rows, columns = -(-n // UNIT_ROWS) * UNIT_ROWS, -(-k // PAD_K) * PAD_K
    units = columns // UNIT_K
    shrink = 2.0**_SHRINK_INTEGERS if form.codes in _INTS and act == "bfloat16" else 1.0
    found = torch.full((n,), shrink, dtype=torch.float64, device=codes.device)
    found = found if row_scale is None else found * row_scale.double()
    parts = []
    if form.scale != "none":
        assert scales is not None
        groups = columns // form.group
        if form.scale in ("half", "half_min", "sum"):
            minimum = None if minimum is None else minimum / shrink
            power = _power_of_two(scales if minimum is None else torch.cat([scales, minimum], 1))
            found = found * power[:, 0].double()
            half = torch.bfloat16 if act == "bfloat16" else torch.float16
            dtype = torch.float32 if form.scale == "sum" else half
            each = [_padded((x.double() / power).to(dtype), rows, groups) for x in (scales, minimum) if x is not None]
            parts.append(_as_bytes(torch.stack(each, -1)))
        elif form.scale == "power":
            top = torch.where(scales == 255, 0, scales).amax(1, keepdim=True).long()
            found = found * torch.exp2(top[:, 0].double() - 127)
            found[(scales == 255).any(1)] = torch.nan
            lifted = (scales.long() - top + 2 * _BIAS[act] - float_format(form.codes).bias).clamp(min=0)
            lifted[scales == 255] = 0
            parts.append(_padded(lifted.to(torch.uint8), rows, groups)[..., None])
        else:
            found = found * 2.0**_SHRINK
            found[((scales & 127) == 127).any(1)] = torch.nan
            negative = (scales > 127).repeat_interleave(form.group, 1)[:, :k]
            codes = torch.where(negative, codes ^ 8, codes)
            found_zero = ((scales & 127) == 0).repeat_interleave(form.group, 1)[:, :k]
            codes = codes.masked_fill(found_zero, 0)
            parts.append(_padded(_normal_codes(scales & 127), rows, groups)[..., None])
    zero = 0
    if act == "int8":
        codes = codes.view(torch.uint8)
        found = found / 16 if form.bits == 4 else found  # the kernel multiplies by 16 q
    elif form.codes == "int4":
        codes, zero = (codes + 8).to(torch.uint8), 8
    elif form.codes == "int8":
        codes = codes.view(torch.uint8)
    elif form.codes == "e4m3":
        nan = (codes & 127) == 127
        found[nan.any(1)] = torch.nan
        codes = codes.masked_fill(nan, 0)
    data = pack_codes(_padded(codes, rows, columns, zero), form, act)
    whole = torch.cat([data, *(_scale_units(part, units) for part in parts)], -1).contiguous()
    return PackedWeight(form, act, whole, found.float().contiguous(), (n, k))
