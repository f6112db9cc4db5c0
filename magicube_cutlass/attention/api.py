"""Public call of sparse attention: checks the arguments and calls the torch operator."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from cute_kernels.watch import watched
from magicube_cutlass.attention import cpu_fused, records, torch_op
from magicube_cutlass.attention.softmax import check_key_bias, check_scale, check_softmax_bits
from magicube_cutlass.checks import is_transformed, transform_error
from magicube_cutlass.formats.pattern import Pattern

QKV_BITS = (4, 8, 16)
_RECORDED = (None, "fused")  # what records are of
Backend = Literal["fused", "unfused"]


class AttentionOptions(TypedDict, total=False):
    """Options of :func:`sparse_attention`, documented there."""

    softmax_bits: int
    qkv_bits: int
    scale: float | None
    causal: bool
    bias: Tensor | None
    backend: Backend | None
    nan_for_empty: bool
    impl: str | None


def check_masks(mask: Pattern | Sequence[Pattern], q: Tensor, keys: int) -> tuple[Pattern, ...]:
    """Return the masks as a tuple; raise unless they fit `q` and the number of keys."""
    masks = (mask,) if isinstance(mask, Pattern) else tuple(mask) if isinstance(mask, (list, tuple)) else ()
    if not masks or not all(isinstance(one, Pattern) for one in masks):
        raise TypeError(f"mask must be a Pattern or a list of one per head, got {type(mask).__name__}")
    if not isinstance(mask, Pattern):
        heads = q.shape[-3] if q.ndim > 2 else None
        if len(masks) != heads:
            raise ValueError(
                f"mask must have as many patterns as q of shape {tuple(q.shape)} has heads, got {len(masks)}"
            )
    for number, one in enumerate(masks):
        name = "mask" if isinstance(mask, Pattern) else f"mask[{number}]"
        if not torch.compiler.is_compiling():
            one.refresh()
        if one.shape != (q.shape[-2], keys):
            raise ValueError(f"{name} must have shape ({q.shape[-2]}, {keys}) for q and k, got {one.shape}")
        if one.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {one.device}")
        if one.vector_length != masks[0].vector_length:
            raise ValueError(f"{name} must have vectors of {masks[0].vector_length} like the first one, "
                             f"got {one.vector_length}")  # fmt: skip
    return masks


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless Q, K and V have matching dtypes, devices and shapes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} must be a float tensor, got {getattr(x, 'dtype', type(x).__name__)}")
        if not torch.compiler.is_compiling() and is_transformed(x):
            raise transform_error(name)
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
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Pattern | Sequence[Pattern],
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@watched("magicube_cutlass.sparse_attention")
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
    backend: Backend | None = None,
    nan_for_empty: bool = False,
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute quantized attention over the keys that a sparse mask keeps.

    ``softmax(scale Q K^T + bias) V`` by products of quantized integers. Q and K have per-row scales, V has one scale
    per matrix; the fused kernels of a GPU may share scales among similar keys, and have a scale for each 64 values of V
    at masks of whole 64 x 64 blocks (sm_90a). The softmax is quantized as in :func:`sparse_softmax`. Implements section
    V-C of [1]_.

    Gradients of all four tensors, of first order, come from the unfused products at the quantized values; each rounding
    counts as the identity (straight-through). The call is one operator of a compiled graph (``fullgraph=True``), which
    needs its masks alive.

    Parameters
    ----------
    q : Tensor, shape (..., Lq, d)
        Floats. A GPU reads float64 as float32, with its range.
    k : Tensor, shape (..., Lk, d)
        Like `q`.
    v : Tensor, shape (..., Lk, dv)
        Like `q`.
    mask : Pattern or sequence of Pattern, shape (Lq, Lk)
        Pattern of all matrices, see :mod:`magicube_cutlass.masks`, or one per head (dimension -3 of `q`).
    softmax_bits : int, default 8
        Width of the softmax: 4, 8 or 16, unsigned.
    qkv_bits : int, default 8
        Width of Q, K and V: 4, 8 or 16, signed.
    scale : float, optional
        Positive scale of the logits. Default: ``1 / sqrt(d)``.
    causal : bool, default False
        Exclude the elements of the mask with ``j > i``.
    bias : Tensor, shape (..., Lk), optional
        Floats added to the logits per key; -inf excludes a key. Leading dimensions broadcast to those of `q`.
    backend : {"fused", "unfused"}, optional
        One kernel, or the three products of the paper. Default: fused if a kernel supports the call. On a CPU it gives
        the integers of the three products, but for ties in the rounding of the exponential.
    nan_for_empty : bool, default False
        Queries without keys give NaN instead of zeros.
    return_lse : bool, default False
        Return the log-sum-exp of the logits too.
    impl : str, optional
        Deprecated name of `backend`; ``"three"`` is ``"unfused"``.

    Returns
    -------
    out : Tensor, shape (..., Lq, dv)
        Dtype of `q`. Non-finite rows of `q` or `k` give NaN for the queries that use them; a non-finite `v` gives NaN
        for its matrix, or for the queries that use its scale.
    lse : Tensor, shape (..., Lq)
        float32, -inf for a query without keys; only with `return_lse`.

    Raises
    ------
    TypeError
        If a dtype or type is not supported.
    ValueError
        If a shape, device or option is wrong.
    NotImplementedError
        If ``backend="fused"`` does not support the call, or the device has no kernel.

    See Also
    --------
    sparse_softmax : Quantized softmax of a sparse matrix.

    References
    ----------
    .. [1] Li, Osawa, Hoefler, SC'22, section V-C and figure 16.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> q, k, v = torch.randn(3, 2, 64, 32, generator=torch.Generator().manual_seed(0))
    >>> mask = mc.masks.local(64, 16)
    >>> mc.sparse_attention(q, k, v, mask).shape
    torch.Size([2, 64, 32])
    >>> dense = (q @ k.mT / 32**0.5).masked_fill(~mask.to_dense(), -torch.inf).softmax(-1) @ v
    >>> bool((mc.sparse_attention(q, k, v, mask) - dense).abs().max() < 0.05)
    True
    """
    kind = None
    if impl is not None:
        backend = renamed_backend(impl)
    if backend in _RECORDED and not torch.compiler.is_compiling():
        choices = (softmax_bits, qkv_bits, scale, type(scale), causal, nan_for_empty, return_lse)
        kind = records.attention_kind(q, k, v, bias, mask, choices)
        known = None if kind is None else records.known_record(mask, kind)
        found = None if known is None else known(q, k, v, bias)
        if found is not None:
            return found
    check_tensors(q, k, v)
    check_softmax_bits(softmax_bits, "softmax_bits")
    if qkv_bits not in QKV_BITS:
        raise ValueError(f"qkv_bits must be one of {QKV_BITS}, got {qkv_bits!r}")
    check_backend(backend)
    masks = check_masks(mask, q, k.shape[-2])
    logit_scale = 1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else check_scale(scale)
    batch = q.shape[:-2]
    flat = None
    if bias is not None:
        check_key_bias(bias, k.shape[-2], q.device)
        flat = cpu_fused.flat_bias(bias, batch)
    if 0 in (*q.shape, *v.shape):
        out, lse = _without_keys(q, v, nan_for_empty)
        return (out, lse) if return_lse else out
    options = (softmax_bits, qkv_bits, logit_scale, causal, nan_for_empty, return_lse)
    if kind is not None:
        kind = records.attention_kind(q, k, v, bias, mask, choices)  # a written mask was scanned again
    record = None if kind is None else records.attention_record(q, k, v, bias, masks, kind, *options)
    found = None if record is None else record(q, k, v, bias)
    if found is not None:
        return found
    matrices = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]  # (N, L, d)
    names, bits = " ".join([one._named(one._version_id) for one in masks]), [softmax_bits, qkv_bits]
    out, lse = torch_op.sparse_attention(
        *matrices, flat, names, bits, logit_scale, causal, nan_for_empty, return_lse, backend or ""
    )
    out = out.reshape(*batch, q.shape[-2], v.shape[-1])
    return (out, lse.reshape(*batch, q.shape[-2])) if return_lse else out


def check_backend(backend: object) -> None:
    """Raise `ValueError` unless `backend` is None, "fused" or "unfused"."""
    if backend not in (None, "fused", "unfused"):
        raise ValueError(f"backend must be None, 'fused' or 'unfused', got {backend!r}")


def renamed_backend(impl: str) -> Backend:
    """Return the backend that the deprecated argument `impl` of a caller's caller names."""
    new = {"three": "unfused"}.get(impl, impl)
    check_backend(new)
    if not torch.compiler.is_compiling():
        warnings.warn(f"impl={impl!r} is deprecated; use backend={new!r}", DeprecationWarning, stacklevel=3)
    return new  # type: ignore[return-value]


def _without_keys(q: Tensor, v: Tensor, nan_for_empty: bool) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp of a call without queries, keys or columns."""
    empty = math.nan if nan_for_empty else 0.0
    return q.new_full((*q.shape[:-1], v.shape[-1]), empty), torch.full(q.shape[:-1], -math.inf, device=q.device)
