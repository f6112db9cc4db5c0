"""Sparse attention as the torch operator ``torch.ops.magicube.sparse_attention``, with straight-through gradients.

Arguments are those of :func:`magicube_cutlass.sparse_attention`, checked there. Tensors are (N, L, d); matrix ``i``
uses mask ``i % len(masks)``. Masks are passed by name, since derived data is cached on the object: a graph that calls
the operator needs its masks alive, in the process that made them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magicube_cutlass.attention import cpu_fused, gpu_fused, records, unfused
from magicube_cutlass.attention.unfused import Options
from magicube_cutlass.dispatch.register import register_op
from magicube_cutlass.formats.pattern import Pattern

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # dtypes that kernels read and write
_UNFUSED = ("unfused", "three")  # "three" in graphs of earlier versions


def _patterns(names: str) -> tuple[Pattern, ...]:
    """The live masks of these names."""
    return tuple(map(Pattern._alive, names.split()))


def _as_kernel_dtype(x: Tensor) -> Tensor:
    """`x` in a dtype of the kernels: float64 on a GPU becomes float32."""
    return x if x.dtype in _KERNEL_DTYPES or not x.is_cuda else x.float()


def fused_obstacle(
    q: Tensor, v: Tensor, masks: tuple[Pattern, ...], softmax_bits: int, qkv_bits: int, *, has_memory: bool = False
) -> str:
    """Return what the fused kernel does not support in the call; empty if it supports it.

    `has_memory`: the engine, which is asked first, can read the tensors.
    """
    if not q.is_cuda:
        found = cpu_fused.obstacle(q, masks, softmax_bits, qkv_bits)
        return found or ("" if has_memory else "views without memory of their own")
    return gpu_fused.kernel_obstacle(q, v, masks, softmax_bits, qkv_bits)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masks: tuple[Pattern, ...], options: Options, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp as of `unfused.forward`, by the fused kernel."""
    from cute_kernels.attention.fused import align_to_16_bytes

    d, head_dim = v.shape[2], gpu_fused.padded_head_dim(max(q.shape[2], v.shape[2]))
    assert head_dim is not None
    q, k, v = (gpu_fused.kernel_rows(x, head_dim) for x in (q, k, v))
    index = gpu_fused.index_of(q, k, masks, options.causal)
    out = torch.empty(q.shape, dtype=options.out_dtype, device=q.device)
    log_sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if lse else None
    if bias is not None:
        bias = align_to_16_bytes((bias[0] if bias.shape[0] == 1 else bias).contiguous())
    gpu_fused.launch(
        q, k, v, index, options.qkv_bits, scale=options.scale, bias=bias, softmax_bits=options.softmax_bits, out=out,
        lse=log_sums, nan_for_empty=options.nan_for_empty,
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
        kind = records.attention_kind(q, k, v, bias, patterns, choices)
        record = None if kind is None else records.attention_record(q, k, v, bias, patterns, kind, *choices)
    recorded = None if record is None else record(q, k, v, bias)
    if recorded is not None:
        return recorded if isinstance(recorded, tuple) else (recorded, q.new_empty(0, dtype=torch.float32))
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
