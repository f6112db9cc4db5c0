"""Dense quantized weights in the formats of the few-rows product."""

from __future__ import annotations

from torch import Tensor

from cute_kernels import floats
from cute_kernels.few_rows.formats import FORMATS, PackedWeight, pack_weight, takes_int8
from cute_kernels.few_rows.product_int8 import MAX_K
from magicube_cutlass.quantization.float_tensor import RECIPES, ScaledFloatTensor
from magicube_cutlass.quantization.group_tensor import GroupTensor

_WHOLE = 128  # k of the largest group that the kernel has
# k of the smallest group whose int8 rows are multiplied as such. A group takes two instructions per sum to add: on an
# H100, 4096 to 14336, int4 in groups of 64 takes 0.74 to 0.87 of the time of widened rows for 1 to 2,048 rows, of 32
# 0.88 to 0.90 up to 16 rows and 1.01 to 1.05 from 64 on (few_rows_int8_h100.json).
_INT8_GROUP = 64


def few_rows_format(weight: GroupTensor | ScaledFloatTensor) -> str | None:
    """Return the name of the entry of :data:`cute_kernels.few_rows.formats.FORMATS` for a weight (M, K), None if none.

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.quantization.group_tensor import quantize_groups
    >>> few_rows_format(quantize_groups(torch.ones(8, 64), bits=4, group=32))
    'int4_g32'
    """
    if isinstance(weight, GroupTensor):
        name = f"int{weight.bits}"
        if weight.minimum is not None:
            return f"{name}_g{min(weight.group or _WHOLE, _WHOLE)}_min"
        return name if weight.group is None else f"{name}_g{min(weight.group, _WHOLE)}"
    if weight.transposed or weight.data.ndim != 2:
        return None
    if isinstance(weight.block, tuple):
        return "e4m3_g128" if weight.dtype == "e4m3" else None
    if weight.block is None:
        return weight.dtype if weight.dtype in FORMATS else None
    kind = (weight.dtype, weight.block, weight.scale_dtype)
    found = next((name for name, recipe in RECIPES.items() if recipe == kind), None)
    return found if found in FORMATS else None


def takes_int8_rows(weight: GroupTensor | ScaledFloatTensor) -> bool:
    """Return whether int8 rows are multiplied with a weight (M, K) as integers.

    Symmetric integers with scales per row, or of groups of 64 or more. There is one rule for all numbers of rows: on an
    H100, 4096 to 14336, int4 in groups of 128, the product of integers takes 13.9, 16.0, 20.2, 38.7 and 274 us for 16,
    64, 128, 256 and 2,048 rows, that of widened rows 16.7, 21.0, 34.8, 66.2 and 487. Nor is the weight decoded for many
    rows: 2,048 are multiplied at 879 TOP/s, and torch's bfloat16 product there at 783.

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.quantization.group_tensor import quantize_groups
    >>> [takes_int8_rows(quantize_groups(torch.ones(8, 64), bits=4, group=group)) for group in (32, 64, None)]
    [False, True, True]
    """
    name = few_rows_format(weight)
    if name is None or not takes_int8(FORMATS[name]):
        return False
    group = FORMATS[name].group
    return group >= _INT8_GROUP if group else int(weight.shape[1]) <= MAX_K


def _groups(x: Tensor | None, group: int | None, k: int) -> Tensor | None:
    """Scales of groups of at most 128: those of larger ones repeated."""
    if x is None or (group is not None and group <= _WHOLE):
        return x
    count = -(-k // _WHOLE)
    return x.expand(-1, count) if group is None else x.repeat_interleave(group // _WHOLE, 1)[:, :count]


def pack_few_rows(weight: GroupTensor | ScaledFloatTensor, act: str) -> PackedWeight:
    """Pack a weight (M, K) that has a format.

    Parameters
    ----------
    weight : GroupTensor or ScaledFloatTensor, shape (M, K)
        Weight on any device.
    act : str
        ``"bfloat16"``, ``"float16"`` or ``"int8"``: dtype of the rows.

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.quantization.group_tensor import quantize_groups
    >>> pack_few_rows(quantize_groups(torch.ones(8, 64), bits=4, group=32), "float16").data.shape
    torch.Size([1, 2, 4608])
    """
    name = few_rows_format(weight)
    assert name is not None
    form, k = FORMATS[name], int(weight.shape[1])
    if isinstance(weight, GroupTensor):
        if form.scale == "none":
            return pack_weight(weight.ints(), form, act, row_scale=weight.scale.reshape(-1))
        scales, minimum = _groups(weight.scale, weight.group, k), _groups(weight.minimum, weight.group, k)
        return pack_weight(weight.ints(), form, act, scales, minimum=minimum)
    codes = floats.unpack(weight.data, k, weight.dtype)  # (M, K)
    if form.scale == "none":
        return pack_weight(codes, form, act, row_scale=weight.scale.reshape(-1) if weight.scale.ndim else weight.scale)
    scales = weight.scale
    if isinstance(weight.block, tuple):  # the rows of a tile share its scales
        scales = scales.repeat_interleave(weight.block[0], 0)[: len(codes)]
    return pack_weight(codes, form, act, scales, row_scale=weight.tensor_scale)
