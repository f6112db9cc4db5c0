"""Sparse attention as the torch operator ``torch.ops.magicube.sparse_attention``, with straight-through gradients.

Arguments are those of :func:`magicube_cutlass.sparse_attention`, checked there. Tensors are (N, L, d); matrix ``i``
uses mask ``i % len(masks)``. Masks are passed by name, since derived data is cached on the object: a graph that calls
the operator needs its masks alive, in the process that made them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magicube_cutlass.attention import cpu_fused, unfused
from magicube_cutlass.attention.unfused import Options
from magicube_cutlass.dispatch.register import register_op
from magicube_cutlass.formats.pattern import Pattern

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # dtypes that kernels read and write
_FUSED_HEAD_DIMS = (32, 64, 128)
_UNFUSED = ("unfused", "three")  # "three" in graphs of earlier versions


def _patterns(names: str) -> tuple[Pattern, ...]:
    """The live masks of these names."""
    return tuple(map(Pattern._alive, names.split()))


def _padded_head_dim(d: int) -> int | None:
    """Head dimension to which the operands of the fused kernel are padded, None if `d` is too large."""
    return next((head_dim for head_dim in _FUSED_HEAD_DIMS if head_dim >= d), None)


def _as_kernel_dtype(x: Tensor) -> Tensor:
    """`x` in a dtype of the kernels: float64 on a GPU becomes float32."""
    return x if x.dtype in _KERNEL_DTYPES or not x.is_cuda else x.float()


def kernel_rows(x: Tensor, head_dim: int) -> Tensor:
    """Return rows (N, L, d) as the fused kernels read them: (N, L, head_dim), contiguous, aligned."""
    from cute_kernels.attention.fused import align_to_16_bytes

    padded = x if x.shape[2] == head_dim else torch.nn.functional.pad(x, (0, head_dim - x.shape[2]))
    return align_to_16_bytes(padded.contiguous())


def fused_obstacle(
    q: Tensor, v: Tensor, masks: tuple[Pattern, ...], softmax_bits: int, qkv_bits: int, *, has_memory: bool = False
) -> str:
    """Return what the fused kernel does not support in the call; empty if it supports it.

    `has_memory`: the engine, which is asked first, can read the tensors.
    """
    if not q.is_cuda:
        found = cpu_fused.obstacle(q, masks, softmax_bits, qkv_bits)
        return found or ("" if has_memory else "views without memory of their own")
    from cute_kernels.attention import fused as attention

    if qkv_bits > 8:
        return f"qkv_bits={qkv_bits}, only 4 and 8"
    widest = max(q.shape[-1], v.shape[-1])
    head_dim, length = _padded_head_dim(widest), masks[0].vector_length
    if head_dim is None or not attention.supports_attention(
        q.device, head_dim=head_dim, vector_length=length, softmax_bits=softmax_bits
    ):
        return (f"head_dim={widest}, vector_length={length}, softmax_bits={softmax_bits}: it needs head_dim <= "
                f"{_FUSED_HEAD_DIMS[-1]}, vector_length=8 and softmax_bits 4 or 8")  # fmt: skip
    return ""


def _fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masks: tuple[Pattern, ...], options: Options, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp as of `unfused.forward`, by the fused kernel."""
    from cute_kernels.attention import fused as attention
    from cute_kernels.attention.blocks.config import BlockAttention
    from cute_kernels.attention.blocks.tiles import encode_tiles, tile_attention
    from cute_kernels.attention.quantize_qkv import encode_operands

    d, head_dim = v.shape[2], _padded_head_dim(max(q.shape[2], v.shape[2]))
    assert head_dim is not None
    q, k, v = (kernel_rows(x, head_dim) for x in (q, k, v))
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    key = ("attention", batch, head_dim, options.causal, *[mask._version_id for mask in masks[1:]])
    cached = masks[0]._cache.get(key)
    if cached is None:
        arrays = [(mask.row_offsets, mask.col_indices) for mask in masks]
        index = attention.make_index(arrays, queries, keys, batch=batch, head_dim=head_dim, causal=options.causal)
        cached = masks[0]._cache[key] = index
    out = torch.empty((batch, queries, head_dim), dtype=options.out_dtype, device=q.device)
    log_sums = torch.empty((batch, queries), dtype=torch.float32, device=q.device) if lse else None
    if bias is not None:
        bias = attention.align_to_16_bytes((bias[0] if bias.shape[0] == 1 else bias).contiguous())
    softmax: dict[str, Any] = {"scale": options.scale, "bias": bias, "softmax_bits": options.softmax_bits, "out": out,
                               "lse": log_sums, "nan_for_empty": options.nan_for_empty}  # fmt: skip
    if isinstance(cached.config, BlockAttention):
        tiles = encode_tiles(k, v, bits=options.qkv_bits)
        tile_attention(q, tiles, cached, bits=options.qkv_bits, **softmax)
    else:
        ints = encode_operands(q, k, v, bits=options.qkv_bits)  # no launch between it and its reader
        attention.fused_attention(
            ints.q, ints.k, ints.v, cached, q_scale=ints.q_scale, k_scale=ints.k_scale, keys_alike=ints.keys_alike,
            v_scale=ints.v_scale, ready=ints.ready, **softmax,
        )  # fmt: skip
    return out[..., :d], log_sums


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
    """Run the forward pass: output (N, Lq, dv) in q's dtype, and log-sum-exp (N, Lq), (0,) unless `with_lse`.

    `bits`: of the softmax; of Q, K and V. `bias`: float32 (1 or N, Lk). `impl`: "fused", "unfused" or "".
    """
    patterns, dtype = _patterns(masks), q.dtype
    record = None
    if impl not in _UNFUSED:
        choices = (bits[0], bits[1], scale, causal, nan_for_empty, with_lse)
        kind = cpu_fused.attention_kind(q, k, v, bias, patterns, choices)
        record = None if kind is None else cpu_fused.attention_record(q, k, v, bias, patterns, kind, *choices)
    if record is not None:
        found = record(q, k, v, bias)
        return found if isinstance(found, tuple) else (found, q.new_empty(0, dtype=torch.float32))
    q, k, v = map(_as_kernel_dtype, (q, k, v))
    options = Options(
        bits[0], bits[1], scale, causal, nan_for_empty, q.dtype if q.dtype in _KERNEL_DTYPES else torch.float32
    )
    obstacle = "" if impl in _UNFUSED else fused_obstacle(q, v, patterns, *bits)
    if impl == "fused" and obstacle:
        raise NotImplementedError(f"backend='fused' does not support {obstacle}; use backend='unfused'")
    if impl in _UNFUSED or obstacle:
        out, lse = unfused.forward(q, k, v, bias, unfused.heads_of(patterns), options, with_lse)
        out, lse = out[:, : q.shape[1]], None if lse is None else lse[:, : q.shape[1]]
    else:
        out, lse = _fused(q, k, v, bias, patterns, options, with_lse)
    return out.to(dtype).contiguous(), q.new_empty(0, dtype=torch.float32) if lse is None else lse.contiguous()


def _fake_forward(q: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of `_forward`."""
    log_sums = q.new_empty(q.shape[:2] if with_lse else (0,), dtype=torch.float32)
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2])), log_sums


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
    """Gradients of q, k and v in their dtype, and of the bias in float32, (0,) without one."""
    heads, dtype = unfused.heads_of(_patterns(masks)), q.dtype
    options = Options(bits[0], bits[1], scale, causal, False, torch.float32)
    if grad is None:
        grad = q.new_zeros(*q.shape[:2], v.shape[2])
    q, k, v, grad = map(_as_kernel_dtype, (q, k, v, grad))
    found = unfused.backward(q, k, v, bias, heads, options, grad, grad_lse)
    bias_grad = q.new_empty(0, dtype=torch.float32) if bias is None else found.bias.sum_to_size(bias.shape).contiguous()
    return found.q.to(dtype).contiguous(), found.k.to(dtype).contiguous(), found.v.to(dtype).contiguous(), bias_grad


def _fake_gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes and dtypes of `_gradients`."""
    bias_grad = q.new_empty((0,) if bias is None else bias.shape, dtype=torch.float32)
    return q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape), bias_grad


sparse_attention = register_op("magicube::sparse_attention", _forward, _fake_forward)
sparse_attention_backward = register_op("magicube::sparse_attention_backward", _gradients, _fake_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the tensors and the masks for the backward pass."""
    ctx.save_for_backward(*inputs[:4])
    ctx.options, ctx.with_lse = inputs[4:8], inputs[9]
    ctx.masks = _patterns(inputs[4])  # keeps them alive
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments of the operator."""
    grads = sparse_attention_backward(grad, grad_lse if ctx.with_lse else None, *ctx.saved_tensors, *ctx.options)
    needed_grads = [g if needed else None for g, needed in zip(grads, ctx.needs_input_grad[:4], strict=True)]
    return (*needed_grads, *[None] * 7)


def _no_second_derivative(*_: Any) -> None:
    """Refuse to differentiate the gradients."""
    raise RuntimeError("sparse_attention has no second derivative: its gradients cannot be differentiated")


torch.library.register_autograd("magicube::sparse_attention", _backward, setup_context=_save)
torch.library.register_autograd("magicube::sparse_attention_backward", _no_second_derivative)
