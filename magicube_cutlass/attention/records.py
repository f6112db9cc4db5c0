"""Records of sparse attention, one per kind of operands, kept on the first mask: of the engine or the fused kernels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from magicube_cutlass.attention import cpu_fused, gpu_fused
from magicube_cutlass.checks import has_dispatch_mode, is_transformed
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.tracking import NO_RECORDS, RECORDS, is_current, keep_record

AttentionRecord = cpu_fused.CpuAttention | gpu_fused.GpuAttention

_TENSORS = (Tensor, Parameter)


def attention_kind(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Pattern | Sequence[Pattern], options: tuple[object, ...]
) -> Hashable | None:
    """Return what a record depends on; None for arguments that no record takes, or if a gradient is wanted.

    Parameters
    ----------
    q, k, v, bias, mask
        As for :func:`magicube_cutlass.sparse_attention`.
    options : tuple
        The other arguments.
    """
    versions: tuple[str, ...] = ()  # of a list of masks
    if not isinstance(mask, Pattern):
        if type(mask) not in (list, tuple) or not mask:
            return None
        for one in mask:
            if not isinstance(one, Pattern):
                return None
            versions += (one._version_id,)
    if has_dispatch_mode() or not (q.is_cpu or q.is_cuda):
        return None
    learns = torch.is_grad_enabled()
    for x in (q, k, v) if bias is None else (q, k, v, bias):
        if type(x) not in _TENSORS or x.device != q.device or is_transformed(x) or (learns and x.requires_grad):
            return None
        if x.is_neg() or x._is_zerotensor():
            return None
    of_bias = None if bias is None else (bias.shape, bias.dtype)
    of_q, of_k, of_v = (q.shape, q.stride(), q.dtype), (k.shape, k.stride(), k.dtype), (v.shape, v.stride(), v.dtype)
    return of_q, of_k, of_v, of_bias, versions, options, q.get_device()


def known_record(mask: Pattern | Sequence[Pattern], kind: Hashable) -> AttentionRecord | None:
    """Return the record of a kind, whose masks were not written since, or None."""
    first = mask if isinstance(mask, Pattern) else mask[0]
    found: AttentionRecord | None = first._cache.get(RECORDS, NO_RECORDS).get(kind)
    if found is None:
        return None
    for one in found.masks:
        if not is_current(one, one._cache.get("seen")):
            return None
    return found


def attention_record(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masks: Sequence[Pattern], kind: Hashable,
    softmax_bits: int, qkv_bits: int, scale: float, causal: bool, nan_for_empty: bool, with_lse: bool,
) -> AttentionRecord | None:  # fmt: skip
    """Return the record for checked arguments, made at the first call of a kind; None if there is none for them.

    Parameters
    ----------
    q, k, v : Tensor, shape (..., L, d)
        No dimension of zero.
    bias, masks, softmax_bits, qkv_bits, scale, causal, nan_for_empty, with_lse
        As for :func:`magicube_cutlass.sparse_attention`.
    kind : hashable
        Of :func:`attention_kind`.
    """
    of_gpu = q.is_cuda
    if of_gpu:
        served = gpu_fused.is_recordable(q, k, v, bias, masks, softmax_bits, qkv_bits)
    else:
        served = not cpu_fused.obstacle(q, masks, softmax_bits, qkv_bits)
    if not served:
        return None
    found = known_record(masks, kind)
    if found is None:
        make = gpu_fused.GpuAttention if of_gpu else cpu_fused.CpuAttention
        found = make(q, k, v, bias, masks, softmax_bits, qkv_bits, scale, causal, nan_for_empty, with_lse)
        keep_record(masks[0]._cache, kind, found)
    return found
