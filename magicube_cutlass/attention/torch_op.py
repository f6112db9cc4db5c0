"""``torch.ops.magicube.sparse_attention``: attention as a torch operator, with a fake and straight-through gradients.

Arguments are those of :func:`magicube_cutlass.sparse_attention`, checked there; tensors are (N, L, d), matrix i follows
mask ``i % len(masks)``.  Masks go by their names, since what is derived of a mask is kept on the object: a graph that
calls the operator needs them alive, and finds them in the process that made it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magicube_cutlass.attention import unfused as three
from magicube_cutlass.attention.unfused import Options
from magicube_cutlass.dispatch.register import register_op
from magicube_cutlass.formats.pattern import Pattern

_OUT = (torch.float16, torch.bfloat16, torch.float32)  # what kernels read and write
_FUSED_DEPTHS = (32, 64, 128)


def _patterns(names: str) -> tuple[Pattern, ...]:
    return tuple(map(Pattern._alive, names.split()))


def _depth(d: int) -> int | None:
    """The depth to which the fused kernel's operands are filled up."""
    return next((depth for depth in _FUSED_DEPTHS if depth >= d), None)


def _readable(x: Tensor) -> Tensor:
    """``x`` as the GPU's kernels read it: float64 as float32."""
    return x if x.dtype in _OUT or not x.is_cuda else x.float()


def _obstacle(q: Tensor, v: Tensor, masks: tuple[Pattern, ...], softmax_bits: int, qkv_bits: int) -> str:
    """Why the fused kernel cannot take the call; nothing where it can."""
    if not q.is_cuda:
        return f"it runs on a GPU, and q is on {q.device}"
    from cute_kernels.attention import fused as attention

    if qkv_bits > 8:
        return f"it takes operands of 4 and 8 bits, got qkv_bits={qkv_bits}"
    depth = _depth(max(q.shape[-1], v.shape[-1]))
    length = masks[0].vector_length
    if depth is None or not attention.supports(
        q.device, head_dim=depth, vector_length=length, softmax_bits=softmax_bits
    ):
        return (f"it takes depths up to {_FUSED_DEPTHS[-1]}, vectors of 8 and softmax_bits of 4 and 8, got "
                f"{max(q.shape[-1], v.shape[-1])}, {length} and {softmax_bits}")  # fmt: skip
    return ""


def _fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masks: tuple[Pattern, ...], options: Options, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """As :func:`magicube_cutlass.attention.unfused.forward`, by the fused kernel."""
    from cute_kernels.attention import fused as attention
    from cute_kernels.attention.quantize_qkv import encode_operands

    d, depth = v.shape[2], _depth(max(q.shape[2], v.shape[2]))
    assert depth is not None
    q, k, v = (x if x.shape[2] == depth else torch.nn.functional.pad(x, (0, depth - x.shape[2])) for x in (q, k, v))
    q, k, v = (attention.align_to_16_bytes(x.contiguous()) for x in (q, k, v))
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    key = ("attention", batch, depth, options.causal, *map(id, masks[1:]))
    known = masks[0]._cache.get(key)
    if known is None:
        arrays = [(mask.row_offsets, mask.col_indices) for mask in masks]
        index = attention.make_index(arrays, queries, keys, batch=batch, head_dim=depth, causal=options.causal)
        known = masks[0]._cache[key] = (masks[1:], index)  # holds the masks, so that no other one takes their ids
    out = torch.empty((batch, queries, depth), dtype=options.out_dtype, device=q.device)
    sums = torch.empty((batch, queries), dtype=torch.float32, device=q.device) if lse else None
    if bias is not None:
        bias = attention.align_to_16_bytes((bias[0] if bias.shape[0] == 1 else bias).contiguous())
    ints = encode_operands(q, k, v, bits=options.qkv_bits)  # and nothing else between it and its reader
    attention.fused_attention(
        ints.q, ints.k, ints.v, known[1], scale=options.scale, q_scale=ints.q_scale, k_scale=ints.k_scale,
        keys_alike=ints.keys_alike, v_scale=ints.v_scale, bias=bias, ready=ints.ready,
        softmax_bits=options.softmax_bits, out=out, lse=sums, nan_for_empty=options.nan_for_empty,
    )  # fmt: skip
    return out[..., :d], sums


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    masks: str,
    bits: list[int],
    scale: float,
    causal: bool,
    nan_for_empty: bool,
    with_lse: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Output (N, Lq, dv) of q's dtype and log-sum-exp (N, Lq), (0,) unless ``with_lse``.

    ``bits``: of the softmax, of Q, K and V; ``bias``: float32 (1 or N, Lk); ``impl``: "fused", "three" or "".
    """
    patterns, dtype = _patterns(masks), q.dtype
    q, k, v = map(_readable, (q, k, v))
    options = Options(bits[0], bits[1], scale, causal, nan_for_empty, q.dtype if q.dtype in _OUT else torch.float32)
    obstacle = "" if impl == "unfused" else _obstacle(q, v, patterns, *bits)
    if impl == "fused" and obstacle:
        raise NotImplementedError(f"impl='fused' cannot take this call: {obstacle}; impl='unfused' can")
    if impl == "unfused" or obstacle:
        out, lse = three.forward(q, k, v, bias, three.heads_of(patterns), options, with_lse)
        out, lse = out[:, : q.shape[1]], None if lse is None else lse[:, : q.shape[1]]
    else:
        out, lse = _fused(q, k, v, bias, patterns, options, with_lse)
    return out.to(dtype).contiguous(), q.new_empty(0, dtype=torch.float32) if lse is None else lse.contiguous()


def _fake_forward(q: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Tensor]:
    sums = q.new_empty(q.shape[:2] if with_lse else (0,), dtype=torch.float32)
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2])), sums


def _gradients(
    grad: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    masks: str,
    bits: list[int],
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of q, k and v, in their dtype, and of the bias, float32, (0,) without one; from the three products."""
    heads, dtype = three.heads_of(_patterns(masks)), q.dtype
    options = Options(bits[0], bits[1], scale, causal, False, torch.float32)
    if grad is None:
        grad = q.new_zeros(*q.shape[:2], v.shape[2])
    q, k, v, grad = map(_readable, (q, k, v, grad))
    found = three.backward(q, k, v, bias, heads, options, grad, grad_lse)
    of_bias = q.new_empty(0, dtype=torch.float32) if bias is None else found.bias.sum_to_size(bias.shape).contiguous()
    return found.q.to(dtype).contiguous(), found.k.to(dtype).contiguous(), found.v.to(dtype).contiguous(), of_bias


def _fake_gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_bias = q.new_empty((0,) if bias is None else bias.shape, dtype=torch.float32)
    return q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape), of_bias


attend = register_op("magicube::sparse_attention", _forward, _fake_forward)
sparse_attention_backward = register_op("magicube::sparse_attention_backward", _gradients, _fake_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options, ctx.with_lse = inputs[4:8], inputs[9]
    ctx.masks = _patterns(inputs[4])  # the caller may have no other use of them
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    found = sparse_attention_backward(grad, grad_lse if ctx.with_lse else None, *ctx.saved_tensors, *ctx.options)
    wanted = [g if needed else None for g, needed in zip(found, ctx.needs_input_grad[:4], strict=True)]
    return (*wanted, *[None] * 7)


def _no_second(*_: Any) -> None:
    raise RuntimeError("sparse_attention has no second derivative: its gradients cannot be differentiated")


torch.library.register_autograd("magicube::sparse_attention", _backward, setup_context=_save)
torch.library.register_autograd("magicube::sparse_attention_backward", _no_second)
