"""Attention in one call of the engine: the bits of the three products, on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.cpu import extension
from magicube_cutlass import masks
from magicube_cutlass.attention import cpu_fused, sparse_attention
from magicube_cutlass.formats.tracking import RECORDS

pytestmark = pytest.mark.skipif(not extension.available(), reason="no engine")
SHIFT = 1.5 * 2**23


@pytest.fixture(params=[(isa, threads) for isa in extension.isas() for threads in (1, 2)], ids=str)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An instruction set, with one thread or with two for any work."""
    isa, threads = request.param
    monkeypatch.setenv("MAGICUBE_CPU", isa)
    before, work = torch.get_num_threads(), extension.load_extension().set_serial_work(0)
    torch.set_num_threads(threads)
    yield isa
    torch.set_num_threads(before)
    extension.load_extension().set_serial_work(work)


def exponential(x: Tensor) -> Tensor:
    """The engine's exponential, operation by operation; zero where no weight and no sum holds a bit of it."""
    vanishes, x = x < -87.0, x.clamp(min=-87.0)
    shifted = x * 1.44269504088896341 + SHIFT
    n = shifted - SHIFT
    r = x - n * 0.693359375 - n * -2.12194440e-4
    p = torch.full_like(x, 1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + factor
    p = p * (r * r) + r + 1.0
    return (p * (n.nan_to_num(0.0).to(torch.int32) + 127 << 23).view(torch.float32)).masked_fill(vanishes, 0.0)


def both(
    monkeypatch: pytest.MonkeyPatch, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Result and log-sum-exp of the engine's call, and of three products with the engine's exponential."""
    found = sparse_attention(q, k, v, mask, backend="fused", return_lse=True, **options)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "exp_", lambda x: x.copy_(exponential(x)))
        return found, sparse_attention(q, k, v, mask, backend="unfused", return_lse=True, **options)


def same_bits(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Assert equal results; sums of exponentials are added in another order."""
    assert found[0].dtype == expected[0].dtype and found[0].shape == expected[0].shape
    assert torch.equal(found[0].isnan(), expected[0].isnan())
    assert torch.equal(found[0].nan_to_num(7.0), expected[0].nan_to_num(7.0))
    assert torch.allclose(found[1], expected[1], rtol=1e-6, atol=1e-6, equal_nan=True)


def tensors(queries: int, keys: int, depth: int, width: int, *batch: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries + 7 * keys + 31 * depth)
    sizes = ((queries, depth), (keys, depth), (keys, width))
    q, k, v = (torch.randn(*batch, *size, generator=generator) for size in sizes)
    return q, k, v


@pytest.mark.parametrize("v", [1, 2, 4, 8, 16, 32])
def test_it_has_the_bits_of_three_products(monkeypatch: pytest.MonkeyPatch, path: str, v: int) -> None:
    for queries, keys, depth, width in (
        (64, 64, 32, 32),
        (61, 100, 7, 33),
        (100, 33, 70, 64),
        (9, 200, 1, 5),
        (3, 300, 64, 1),
    ):
        mask = masks.random(queries, 0.6, keys=keys, vector_length=v, seed=v)
        operands = tensors(queries, keys, depth, width, 2, 3)
        for softmax_bits, qkv_bits, causal in ((8, 8, False), (4, 8, True), (8, 4, False), (4, 4, True)):
            options: dict[str, Any] = {"softmax_bits": softmax_bits, "qkv_bits": qkv_bits, "causal": causal}
            same_bits(*both(monkeypatch, *operands, mask, **options))


def test_rows_longer_than_a_chunk_and_dense_masks(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    for keys in (255, 256, 257, 700):
        mask = masks.from_mask(torch.ones(20, keys, dtype=torch.bool))
        same_bits(*both(monkeypatch, *tensors(20, keys, 40, 70), mask, scale=1.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_and_layouts(monkeypatch: pytest.MonkeyPatch, path: str, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in tensors(40, 48, 24, 16, 2, 3))
    mask, heads = masks.random(40, 0.5, keys=48), [masks.random(40, 0.5, keys=48, seed=seed) for seed in range(3)]
    for chosen in (mask, heads):
        expected = both(monkeypatch, q, k, v, chosen)
        same_bits(*expected)
        by_heads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        columns = [x.mT.contiguous().mT for x in (q, k, v)]
        wide = [torch.cat((x, x), -1)[..., : x.shape[-1]] for x in (q, k, v)]
        for given in (by_heads, columns, wide):
            same_bits(sparse_attention(*given, chosen, return_lse=True), expected[1])
        deep = [x[:, None, None].expand(2, 2, 1, *x.shape[1:]) for x in (q, k, v)]
        out, lse = sparse_attention(*deep, chosen, return_lse=True)
        assert out.shape == (2, 2, 1, 3, 40, 16) and lse.shape == (2, 2, 1, 3, 40)
        for copy in (0, 1):
            same_bits((out[:, copy, 0], lse[:, copy, 0]), expected[1])


@pytest.mark.parametrize("shape", [(48,), (1, 1, 48), (2, 1, 48), (2, 3, 48)])
def test_biases_and_keys_left_out(monkeypatch: pytest.MonkeyPatch, path: str, shape: tuple[int, ...]) -> None:
    q, k, v = tensors(40, 48, 24, 16, 2, 3)
    bias = torch.randn(shape, dtype=torch.float64)
    bias[..., ::3] = -math.inf
    for mask in (masks.random(40, 0.5, keys=48), masks.local(40, 0, keys=48)):  # the second leaves queries without keys
        for nan in (False, True):
            same_bits(*both(monkeypatch, q, k, v, mask, bias=bias, nan_for_empty=nan, causal=nan))


def test_extreme_numbers(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    mask = masks.random(40, 0.5, keys=48)
    for factor in (1e-38, 1e-30, 1e-8, 1e-3, 1e-2, 30.0, 1e3, 1e25):  # subnormal logits to infinite ones
        q, k, v = tensors(40, 48, 24, 16)
        same_bits(*both(monkeypatch, q * factor, k, v, mask))
        same_bits(*both(monkeypatch, q, k, v * factor, mask))
    for place, value in ((0, math.nan), (1, math.inf), (1, -math.inf), (2, math.nan)):
        operands = tensors(40, 48, 24, 16, 3)
        operands[place][1, 5, 3] = value
        found, expected = both(monkeypatch, *operands, mask)
        assert found[0].isnan().any()
        same_bits(found, expected)
    operands = tensors(40, 48, 24, 16)
    bias = torch.zeros(48)
    bias[int(mask.col_indices[0])] = math.inf
    same_bits(*both(monkeypatch, *operands, mask, bias=bias))
    zeros = [torch.zeros_like(x) for x in operands]
    same_bits(*both(monkeypatch, *zeros, mask))


def test_weights_differ_from_those_of_torch_in_ties_of_rounding_alone(path: str) -> None:
    q, k, v = tensors(256, 256, 64, 64)
    mask = masks.random(256, 0.9)
    fused, unfused = (sparse_attention(q, k, v, mask, backend=backend) for backend in ("fused", "unfused"))  # type: ignore[arg-type]
    assert float((fused != unfused).float().mean()) < 0.01
    assert float((fused - unfused).norm() / unfused.norm()) < 1e-4


def test_gradients_take_the_same_forward_pass(path: str) -> None:
    operands = tensors(40, 48, 24, 16, 2, 3)
    mask = masks.random(40, 0.5, keys=48)
    learning = [x.clone().requires_grad_() for x in operands]
    out = sparse_attention(*learning, mask)
    assert out.requires_grad and torch.equal(out, sparse_attention(*operands, mask))
    expected = sparse_attention(*learning, mask, backend="unfused")
    grads = [torch.autograd.grad(x.square().sum(), learning) for x in (out, expected)]
    for ours, theirs in zip(*grads, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-3


def test_other_calls_take_three_products() -> None:
    q, k, v = tensors(16, 16, 8, 8)
    mask = masks.local(16, 3)
    for options in ({"softmax_bits": 16}, {"qkv_bits": 16}, {"backend": "unfused"}):
        assert torch.equal(sparse_attention(q, k, v, mask, **options), sparse_attention(  # type: ignore[call-overload]
            q, k, v, mask, **{**options, "backend": "unfused"}))  # fmt: skip
    assert RECORDS not in mask._cache or not [each for each in mask._cache[RECORDS].values()
                                              if isinstance(each, cpu_fused.CpuAttention)]  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"backend='fused' does not support torch.float64 on a CPU"):
        sparse_attention(q.double(), k.double(), v.double(), mask, backend="fused")


def records(mask: mc.Pattern) -> int:
    return sum(isinstance(each, cpu_fused.CpuAttention) for each in mask._cache.get(RECORDS, {}).values())


def test_a_record_sees_masks_and_biases_change() -> None:
    q, k, v = tensors(32, 32, 8, 8, 2)
    heads = [masks.random(32, 0.5, seed=seed) for seed in range(2)]
    bias = torch.zeros(32)
    for place in (0, 1):
        first = sparse_attention(q, k, v, heads, bias=bias)
        assert torch.equal(sparse_attention(q, k, v, heads, bias=bias), first) and records(heads[0]) == 1
        bias[3] += 1
        assert not torch.equal(sparse_attention(q, k, v, heads, bias=bias), first) and records(heads[0]) == 1
        bias[3] -= 1
        starts = heads[place].row_offsets[:-1].long()
        heads[place].col_indices[starts] = 0  # sorted still: the first key of each vector row
        second = sparse_attention(q, k, v, heads, bias=bias)
        assert not torch.equal(second[place], first[place]) and torch.equal(second[1 - place], first[1 - place])
        assert torch.equal(second, sparse_attention(q, k, v, heads, bias=bias, backend="unfused"))
