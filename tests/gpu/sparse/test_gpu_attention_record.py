"""Replayed calls of sparse attention on a GPU: the results of the operator, whatever was called before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import magicube_cutlass as mc
from magicube_cutlass.attention import gpu_fused, records
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.tracking import RECORDS

pytestmark = pytest.mark.gpu

L, HEADS = 256, 3


def mask_of(kind: str) -> Pattern:
    if kind == "blocks":
        blocks = torch.rand(L // 64, L // 64, generator=torch.Generator().manual_seed(1)) < 0.5
        return Pattern.from_dense(blocks.repeat_interleave(64, 0).repeat_interleave(64, 1), 8).to("cuda")
    return mc.masks.random(L, 0.8, seed=1, device="cuda")


def of_gpu(mask: Pattern) -> list[gpu_fused.GpuAttention]:
    return [each for each in mask._cache.get(RECORDS, {}).values() if isinstance(each, gpu_fused.GpuAttention)]


@pytest.mark.parametrize("bias", ["none", "one", "each"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["blocks", "vectors"])
def test_records_have_the_results_of_the_operator(
    kind: str, dtype: torch.dtype, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    mask = mask_of(kind)
    sets = []
    for _ in range(3):
        q, k, v = (torch.randn(2, HEADS, L, 64, device="cuda", dtype=dtype) for _ in range(3))
        added = {"none": None, "one": torch.randn(L, device="cuda"), "each": torch.randn(2, HEADS, L, device="cuda")}
        sets.append((q, k, v, added[bias]))
    options: dict[str, Any] = {"return_lse": True, "causal": bias == "one", "softmax_bits": 4 if bias == "each" else 8}
    with monkeypatch.context() as patch:
        patch.setattr(records, "attention_kind", lambda *_: None)
        expected = [mc.sparse_attention(*s[:3], mask, bias=s[3], **options) for s in sets]
    assert not of_gpu(mask)
    for _ in range(3):  # recorded, then replayed, then replayed among other addresses
        for s, (out, lse) in zip(sets, expected, strict=True):
            found, of_found = mc.sparse_attention(*s[:3], mask, bias=s[3], **options)
            assert torch.equal(found, out) and torch.equal(of_found, lse)
    assert len(of_gpu(mask)) == 1


def test_operands_that_need_a_copy_and_gradients_go_to_the_operator() -> None:
    mask = mask_of("vectors")
    x = torch.randn(HEADS, L, 64, device="cuda", dtype=torch.float16)
    plain = mc.sparse_attention(x, x, x, mask)
    flat = torch.empty(HEADS * L * 64 + 1, device="cuda", dtype=torch.float16)
    odd = flat[1:].view(HEADS, L, 64).copy_(x)  # no multiple of 16 bytes
    assert torch.equal(mc.sparse_attention(odd, x, x, mask), plain)
    turned = x.mT.contiguous().mT
    assert torch.equal(mc.sparse_attention(x, turned, x, mask), plain)
    assert len(of_gpu(mask)) == 1
    learns = x.clone().requires_grad_()
    out = mc.sparse_attention(learns, x, x, mask)
    assert torch.equal(out, plain)
    out.sum().backward()
    assert learns.grad is not None and bool(learns.grad.isfinite().all())


def test_a_written_mask_is_read_again() -> None:
    mask = mask_of("vectors")
    x = torch.randn(HEADS, L, 64, device="cuda", dtype=torch.float16)
    mc.sparse_attention(x, x, x, mask)
    columns = mask.col_indices
    begin, end = int(mask.row_offsets[0]), int(mask.row_offsets[1])
    free = next(c for c in range(L) if c not in set(columns[begin:end].tolist()))
    columns[begin:end] = torch.tensor(
        sorted([free, *columns[begin + 1 : end].tolist()]), dtype=columns.dtype, device="cuda"
    )
    found = mc.sparse_attention(x, x, x, mask)
    again = Pattern.from_dense(mask.to_dense(), 8)
    assert torch.equal(found, mc.sparse_attention(x, x, x, again))


def test_a_warm_call_in_a_graph() -> None:
    mask = mask_of("vectors")
    x = torch.randn(HEADS, L, 64, device="cuda", dtype=torch.float16)
    for _ in range(3):
        expected = mc.sparse_attention(x, x, x, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mc.sparse_attention(x, x, x, mask)
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)
