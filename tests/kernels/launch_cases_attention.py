"""Sparse softmax and attention, for :mod:`launch_cases`."""

# ruff: noqa: B023 - a function of a loop's variables runs before the loop continues

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.attention import config as attention_config
from cute_kernels.attention import fused as attention
from cute_kernels.attention import quantize_qkv as attention_operands
from magicube_cutlass import masks
from tests.kernels.launch_cases_sparse import reals
from tests.kernels.launch_recorder import Recorder

REALS = (torch.float16, torch.float32, torch.bfloat16)


def softmax(recorder: Recorder) -> None:
    """Widths, lengths, strides and options take turns."""
    for i, (bits, v, stride) in enumerate(product((4, 8, 16), (1, 2, 4, 8, 16, 32), (16, 32, 64))):
        batch = ((), (2,), (2, 3))[i % 3]
        pattern = mc.random_pattern(90, 130, 0.7, v)
        values = reals(*batch, pattern.vectors, v).to((torch.float16, torch.float32, torch.bfloat16)[i % 3])
        scores = mc.SRBCRS.from_pattern(pattern, values, bits=None, stride=stride)
        bias = (None, reals(130), reals(*batch, 130))[i % 3]
        options: dict[str, Any] = {"scale": 0.25, "causal": i % 2 == 1, "bias": bias, "return_lse": i % 4 == 1}
        key = f"softmax {bits} bits, v{v}, stride {stride}, batch {list(batch)}"
        recorder.call(key, lambda: mc.sparse_softmax(scores, bits=bits, **options), values=scores.values, bias=bias)


def heads(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [reals(*shape, seed=seed).to(dtype) for seed in range(3)]


def whole(recorder: Recorder) -> None:
    """Attention as it is called: fused and in three products, with masks of one head and of each."""
    shapes = [(2, 4, 256, 64), (1, 2, 200, 32), (3, 128, 128), (512, 48), (2, 2, 96, 17), (8, 16, 512, 64)]
    options: list[dict[str, Any]] = [
        {}, {"causal": True}, {"softmax_bits": 4, "qkv_bits": 4}, {"softmax_bits": 16}, {"qkv_bits": 16, "softmax_bits": 16},
        {"return_lse": True, "nan_for_empty": True}, {"backend": "unfused", "causal": True}, {"backend": "unfused", "softmax_bits": 4, "qkv_bits": 4},
        {"backend": "unfused", "qkv_bits": 16, "return_lse": True},
    ]  # fmt: skip
    for i, (shape, option) in enumerate(product(shapes, options)):
        if i >= 45 and option.get("backend") != "unfused" and i % 2:
            continue
        *batch, queries, _ = shape
        kind = (8, 8, 4, 16)[i % 4] if option.get("backend") == "unfused" else 8
        mask: Any = masks.random(queries, sparsity=0.8, vector_length=kind, seed=i)
        if len(batch) > 1 and i % 3 == 2:
            mask = [masks.random(queries, sparsity=0.8, vector_length=kind, seed=i + head) for head in range(batch[-1])]
        bias = (None, None, reals(queries), reals(*batch, queries))[i % 4]
        q, k, v = heads(shape, REALS[i % 3])
        text = ", ".join(f"{name} {value}" for name, value in option.items())
        for again in ("", ", again"):
            recorder.call(f"attention {list(shape)}, {REALS[i % 3]}, {text}{again}",
                          lambda: mc.sparse_attention(q, k, v, mask, bias=bias, **option),
                          q=q, k=k, v=v, bias=bias)  # fmt: skip


def blocks(recorder: Recorder) -> None:
    """Masks of whole blocks, which have a kernel of their own on sm_90a."""
    for i, (head, length) in enumerate(((64, 512), (128, 500), (64, 64))):
        seen = (torch.arange(-(-length // 64))[:, None] + torch.arange(-(-length // 64))) % 3 != i
        mask = mc.Pattern.from_dense(seen.repeat_interleave(64, 0).repeat_interleave(64, 1)[:length, :length], 8)
        q, k, v = heads((24, length, head), REALS[i])
        bias, option = (None, reals(length), None)[i], {"causal": i == 1, "return_lse": i == 1}
        recorder.call(f"attention at blocks, {head}, {length}", lambda: mc.sparse_attention(q, k, v, mask, bias=bias, **option),
                      q=q, k=k, v=v, bias=bias)  # fmt: skip


def backward(recorder: Recorder) -> None:
    """Gradients of attention."""
    for i, (shape, bits) in enumerate(product(((2, 64, 32), (1, 2, 90, 24)), (8, 4))):
        q, k, v = (x.requires_grad_() for x in heads(shape, (torch.float32, torch.float16)[i % 2]))
        mask, bias = masks.random(shape[-2], sparsity=0.7), reals(shape[-2]).requires_grad_()

        def run() -> Any:
            out = mc.sparse_attention(q, k, v, mask, softmax_bits=bits, qkv_bits=bits, bias=bias)
            return torch.autograd.grad(out.sum(), (q, k, v, bias))

        recorder.call(f"gradients of attention {list(shape)}, {bits} bits", run, q=q, k=k, v=v, bias=bias)


def fused(recorder: Recorder) -> None:
    """The fused kernels with given configs and scales."""
    configs: list[Any] = [attention_config.GatherAttention(head) for head in attention_config.HEADS]
    if recorder.arch in attention.PANEL_ARCHES:
        configs += [attention_config.PanelAttention(64)]
    for config, (i, lse) in product(configs, enumerate((False, True, False))):
        batch, queries, keys, head = 4, 200, 256, config.head
        mask = masks.random(queries, 0.8, keys=keys)
        q = reals(batch, queries, head).to(torch.int8)
        k, v = (reals(batch, keys, head, seed=seed).to(torch.int8) for seed in (1, 2))
        scales = (
            [torch.tensor(0.5), reals(batch), reals(batch, queries)][i],
            [torch.tensor(1.0), reals(batch), reals(batch, keys)][i],
        )
        column = [torch.tensor(0.5), reals(batch), reals(batch, head)][i]
        bias = (None, reals(keys), reals(batch, keys))[i]
        alike = torch.ones(batch, dtype=torch.int32) if i == 2 else None
        out, sums = torch.zeros(batch, queries, head, dtype=REALS[i]), torch.zeros(batch, queries) if lse else None

        def run() -> None:  # fmt: skip
            index = attention.make_index(
                [(mask.row_offsets, mask.col_indices)] * 2, q.shape[1], k.shape[1], batch=4, head_dim=config.head,
                causal=alike is not None, config=config,
            )  # fmt: skip
            attention.fused_attention(q, k, v, index, scale=0.125, q_scale=scales[0], k_scale=scales[1], v_scale=column,
                             keys_alike=alike, bias=bias, out=out, lse=sums, softmax_bits=8 if sums is None else 4)  # fmt: skip

        recorder.call(f"attend with {config.name}, {i}", run, q=q, k=k, v=v, q_scale=scales[0], k_scale=scales[1],
                      v_scale=column, bias=bias, alike=alike, out=out, lse=sums)  # fmt: skip
    for dtype, head, bits in product(REALS, attention_config.HEADS, (8, 4)):
        q, k, v = reals(3, 70, head).to(dtype), *(reals(3, 90, head, seed=seed).to(dtype) for seed in (1, 2))
        recorder.call(f"encode_operands of {dtype}, {head}, {bits} bits",
                      lambda: attention_operands.encode_operands(q, k, v, bits=bits), q=q, k=k, v=v)  # fmt: skip


def record(recorder: Recorder) -> None:
    """All of them."""
    for family in (softmax, whole, blocks, backward, fused):
        family(recorder)
