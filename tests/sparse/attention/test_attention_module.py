"""The attention module: the numbers of torch's own, its weights, its mask on the way through copies and devices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from magicube_cutlass import masks
from magicube_cutlass.nn.attention import SparseQuantAttention

EMBED, HEADS, LENGTH = 64, 4, 40


def close(ours: torch.Tensor, expected: torch.Tensor, bound: float = 5e-3) -> None:
    found = ((ours - expected).norm() / expected.norm()).item()
    assert found < bound, found


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_a_converted_module_computes_what_torch_does(batch_first: bool, bias: bool, causal: bool) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(EMBED, HEADS, bias=bias, batch_first=batch_first).eval()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.2)
    mask = masks.local(LENGTH, 9)
    ours = SparseQuantAttention.from_attention(plain, mask, softmax_bits=16, qkv_bits=16, causal=causal)
    assert not ours.training
    x, y = torch.randn(3, LENGTH, EMBED), torch.randn(3, LENGTH, EMBED)
    left_out = ~mask.to_dense() | (torch.ones(LENGTH, LENGTH).triu(1) > 0 if causal else False)
    padding = torch.zeros(3, LENGTH, dtype=torch.bool)
    padding[1, 20:23] = True
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    for arguments in ((x, x, x), (x, y, y), (x, y, x)):
        for kinds in ({}, {"key_padding_mask": padding}):
            with torch.no_grad():
                expected = plain(*arguments, attn_mask=left_out, need_weights=False, **kinds)[0]
            close(ours(*arguments, **kinds), expected)
    if batch_first:
        assert torch.equal(ours(x), ours(x, x, x)) and torch.equal(ours(x, y), ours(x, y, y))
        close(ours(x[0]), ours(x)[0])


def test_masks_of_heads_and_bias() -> None:
    torch.manual_seed(0)
    heads = [masks.random(LENGTH, 0.5, keys=24, seed=seed) for seed in range(HEADS)]
    module = SparseQuantAttention(EMBED, HEADS, heads, softmax_bits=16, qkv_bits=16)
    x, y, bias = torch.randn(2, LENGTH, EMBED), torch.randn(2, 24, EMBED), torch.randn(2, 24)
    q, k, v = (p(z).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p, z in
               ((module.q_proj, x), (module.k_proj, y), (module.v_proj, y)))  # fmt: skip
    dense = torch.stack([mask.to_dense() for mask in heads])
    added = bias[:, None, None].masked_fill(~dense, -torch.inf)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added).nan_to_num(0.0)
    close(module(x, y, bias=bias), module.out_proj(expected.transpose(1, 2).flatten(2)))


def test_it_trains() -> None:
    torch.manual_seed(0)
    module = SparseQuantAttention(EMBED, HEADS, masks.local(LENGTH, 6))
    x, target = torch.randn(4, LENGTH, EMBED), torch.randn(4, LENGTH, EMBED)
    optimizer, losses = torch.optim.Adam(module.parameters(), 3e-3), []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters() if p is not module.k_proj.bias
    )
    assert losses[-1] < 0.9 * losses[0], losses


def test_it_is_copied_saved_and_cast() -> None:
    module = SparseQuantAttention(EMBED, HEADS, masks.bigbird(LENGTH, window=4, tokens=2, random_keys=3)).eval()
    x = torch.randn(2, LENGTH, EMBED)
    expected = module(x)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(x), expected) and twin.masks[0] is not module.masks[0]
    other = SparseQuantAttention(EMBED, HEADS, module.masks[0])
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), expected)
    assert set(module.state_dict()) == {f"{p}_proj.{n}" for p in ("q", "k", "v", "out") for n in ("weight", "bias")}
    half = copy.deepcopy(module).to(torch.bfloat16)
    assert half.masks[0].col_indices.dtype == torch.int32
    close(half(x.bfloat16()).float(), expected, 0.05)
    assert module.to("meta").masks[0].device.type == "cpu"
    assert "density" in repr(twin)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda m: SparseQuantAttention(10, 4, m), ValueError, "num_heads must divide embed_dim = 10, got 4"),
        (lambda m: SparseQuantAttention(8, 2, [m]), ValueError, "each of the 2 heads, got 1"),
        (
            lambda m: SparseQuantAttention.from_attention(nn.Linear(2, 2), m),
            TypeError,
            "MultiheadAttention, got Linear",
        ),
        (
            lambda m: SparseQuantAttention.from_attention(nn.MultiheadAttention(8, 2, kdim=4), m),
            NotImplementedError,
            "got kdim=4, vdim=8",
        ),
        (
            lambda m: SparseQuantAttention.from_attention(nn.MultiheadAttention(8, 2, add_zero_attn=True), m),
            NotImplementedError,
            "add_bias_kv or add_zero_attn",
        ),
    ],
)
def test_mistakes_are_named(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make(masks.local(8, 1))
