"""``sparse_attention``: arguments are checked here, then handed to the torch operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from magicube_cutlass.attention import torch_op as operator
from magicube_cutlass.attention.sparse_softmax import check_key_bias, check_scale, check_softmax_bits
from magicube_cutlass.formats.pattern import Pattern

QKV_BITS = (4, 8, 16)
Impl = Literal["fused", "three"]


def _masks(mask: Pattern | Sequence[Pattern], q: Tensor, keys: int) -> tuple[Pattern, ...]:
    masks = (mask,) if isinstance(mask, Pattern) else tuple(mask) if isinstance(mask, (list, tuple)) else ()
    if not masks or not all(isinstance(one, Pattern) for one in masks):
        raise TypeError(f"mask must be a Pattern or a list of one for each head, got {type(mask).__name__}")
    if not isinstance(mask, Pattern):
        heads = q.shape[-3] if q.ndim > 2 else None
        if len(masks) != heads:
            raise ValueError(
                f"mask must have as many patterns as q of shape {tuple(q.shape)} has heads, got {len(masks)}"
            )
    for number, one in enumerate(masks):
        name = "mask" if isinstance(mask, Pattern) else f"mask[{number}]"
        if one.shape != (q.shape[-2], keys):
            raise ValueError(f"{name} must have shape ({q.shape[-2]}, {keys}) for q and k, got {one.shape}")
        if one.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {one.device}")
        if one.vector_length != masks[0].vector_length:
            raise ValueError(f"{name} must have vectors of {masks[0].vector_length} like the first one, "
                             f"got {one.vector_length}")  # fmt: skip
    return masks


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} must be a float tensor, got {getattr(x, 'dtype', type(x).__name__)}")
        if x.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dimensions, got shape {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must be {q.dtype} like q, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {x.device}")
        if x.shape[:-2] != q.shape[:-2]:
            raise ValueError(f"{name} must have the leading dimensions of q, {tuple(q.shape[:-2])}, got "
                             f"{tuple(x.shape[:-2])}")  # fmt: skip
    if q.shape[-1] < 1:
        raise ValueError(f"q must have a depth of at least 1, got shape {tuple(q.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have the depth of q, {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v must have as many rows as k, {k.shape[-2]}, got {v.shape[-2]}")
    if q.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"q is on {q.device}: only CPU and CUDA tensors have a kernel")


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Pattern | Sequence[Pattern],
    *,
    softmax_bits: int = 8,
    qkv_bits: int = 8,
    scale: float | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
    impl: Impl | None = None,
    nan_for_empty: bool = False,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Pattern | Sequence[Pattern],
    *,
    softmax_bits: int = 8,
    qkv_bits: int = 8,
    scale: float | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
    impl: Impl | None = None,
    nan_for_empty: bool = False,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Pattern | Sequence[Pattern],
    *,
    softmax_bits: int = 8,
    qkv_bits: int = 8,
    scale: float | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
    impl: Impl | None = None,
    nan_for_empty: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(scale Q K^T + bias) V`` over the keys that ``mask`` keeps, by products of quantized integers.

    ``q``: float (..., Lq, d), ``k``: (..., Lk, d), ``v``: (..., Lk, dv), of one dtype; a GPU reads float64 as float32,
    with its range.  ``mask``: a pattern of shape (Lq, Lk), see :mod:`magicube_cutlass.masks`, or a list of one for each
    head, the dimension before the last two.
    ``softmax_bits``: 4, 8 or 16, unsigned; ``qkv_bits``: 4, 8 or 16, signed.  Q and K are quantized with a scale a row,
    V with a scale a matrix, the softmax as :func:`sparse_softmax` says.
    ``scale``: default ``1 / sqrt(d)``.  ``causal`` leaves out the elements of the mask with j > i, one by one.
    ``bias``: float (..., Lk), added to the logits of a key, -inf leaves it out; its leading dimensions go with q's.
    ``impl``: ``"fused"``, one kernel on a GPU; ``"three"``, the three products of the paper; default: fused where there
    is a kernel for the call.  ``nan_for_empty``: NaN rather than zeros where a query has no key.
    Inf or nan in a row of q or k gives NaN for the queries that meet it, in v for its whole matrix.
    Returns (..., Lq, dv) of q's dtype; with ``return_lse`` also ``log sum exp`` of the logits, float32 (..., Lq).
    Gradients, of all four tensors and once, come from the three products at the quantized values, each rounding taken
    for the identity.
    The call is one operator of a compiled graph (``fullgraph=True``), which finds its masks as long as they are alive.
    Raises ``TypeError``/``ValueError`` that name the argument, ``NotImplementedError`` for what ``impl="fused"`` cannot
    take.  Source: Li, Osawa, Hoefler, SC'22, section V-C and figure 16.
    """
    _check_tensors(q, k, v)
    check_softmax_bits(softmax_bits, "softmax_bits")
    if qkv_bits not in QKV_BITS:
        raise ValueError(f"qkv_bits must be one of {QKV_BITS}, got {qkv_bits!r}")
    if impl not in (None, "fused", "three"):
        raise ValueError(f"impl must be None, 'fused' or 'three', got {impl!r}")
    masks = _masks(mask, q, k.shape[-2])
    factor = 1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else check_scale(scale)
    batch = q.shape[:-2]
    if bias is not None:
        check_key_bias(bias, k.shape[-2], q.device)
        bias = _flat_bias(bias, batch)
    if 0 in (*q.shape, *v.shape):
        out, lse = _without_keys(q, v, nan_for_empty)
    else:
        rows = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
        names, bits = " ".join([one._named(one._version_id) for one in masks]), [softmax_bits, qkv_bits]
        out, lse = operator.attend(*rows, bias, names, bits, factor, causal, nan_for_empty, return_lse, impl or "")
    out = out.reshape(*batch, q.shape[-2], v.shape[-1])
    return (out, lse.reshape(*batch, q.shape[-2])) if return_lse else out


def _without_keys(q: Tensor, v: Tensor, nan_for_empty: bool) -> tuple[Tensor, Tensor]:
    """The result where nothing comes out, or where there are no keys."""
    empty = math.nan if nan_for_empty else 0.0
    return q.new_full((*q.shape[:-1], v.shape[-1]), empty), torch.full(q.shape[:-1], -math.inf, device=q.device)


def _flat_bias(bias: Tensor, batch: torch.Size) -> Tensor:
    """float32 (1, Lk), or (N, Lk) where it differs along the leading dimensions."""
    if bias.shape[:-1].numel() == 1:
        return bias.to(torch.float32).reshape(1, -1)
    try:
        wide = bias.expand(*batch, bias.shape[-1])
    except RuntimeError:
        raise ValueError(f"bias must go with the leading dimensions {tuple(batch)} of q, got shape "
                         f"{tuple(bias.shape)}") from None  # fmt: skip
    return wide.to(torch.float32).reshape(-1, bias.shape[-1])
