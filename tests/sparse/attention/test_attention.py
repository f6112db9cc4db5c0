"""Sparse attention on a CPU: against float64, with a bound on the error for every precision pair."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from magicube_cutlass import masks
from magicube_cutlass.attention import records, sparse_attention, sparse_softmax
from magicube_cutlass.attention import torch_op as operator

PAIRS = [(16, 8), (8, 8), (8, 4), (4, 4)]
LENGTH, DEPTH = 256, 64


def inputs(kind: str, queries: int = LENGTH, keys: int = LENGTH, depth: int = DEPTH) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K, V of 2 x 3 heads.

    ``real``: as projections of a trained model have them: a few channels of K and V much larger, V with means, neighbours
    alike, logits of a spread of 2.
    """
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, queries, depth), torch.randn(2, 3, keys, depth), torch.randn(2, 3, keys, depth)
    if kind == "real":
        q, k, v = ((x + x.roll(1, -2) + x.roll(2, -2)) / math.sqrt(3) for x in (q, k, v))
        k[..., 1] *= 4
        v[..., 2] *= 3
        v, q = v + torch.randn(depth), q * 1.8
    return q, k, v


def exact(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, bias: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention in float64 and log-sum-exp; ``kept``: bool, to broadcast."""
    s = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        s = s + bias.double().unsqueeze(-2)
    s = s.masked_fill(~kept, -math.inf)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v.double(), torch.logsumexp(s, -1)


def error(ours: Tensor, expected: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((ours.double() - expected).norm() / expected.norm())


def test_the_teaching_form_is_the_call() -> None:
    q, k, v = (x[0, 0] for x in inputs("random"))
    mask = masks.random(LENGTH, 0.9)
    Q, K, V = mc.quantize(q, 8, scale="row"), mc.quantize(k, 8, scale="row"), mc.quantize(v, 8)
    S = mc.sddmm(Q, K, mask, out_dtype=torch.float16)
    assert isinstance(S, mc.SRBCRS)
    P = sparse_softmax(S, bits=8, scale=DEPTH**-0.5)
    by_hand = mc.spmm(P, V, out_dtype=torch.float32)
    # float16 of the logits before and after the scale may differ in the last place
    assert error(sparse_attention(q, k, v, mask), by_hand.double()) < 2e-3


# Relative Frobenius errors; measured ones are at most 0.8 of these.
BOUNDS = {
    "random": {(16, 8): 0.015, (8, 8): 0.017, (8, 4): 0.28, (4, 4): 0.31},
    "real": {(16, 8): 0.015, (8, 8): 0.017, (8, 4): 0.28, (4, 4): 0.31},
}


@pytest.mark.parametrize(("softmax_bits", "qkv_bits"), PAIRS)
@pytest.mark.parametrize("kind", list(BOUNDS))
def test_error_against_float64_attention(kind: str, softmax_bits: int, qkv_bits: int) -> None:
    q, k, v = inputs(kind)
    bound = BOUNDS[kind][softmax_bits, qkv_bits]
    for mask in (masks.random(LENGTH, 0.9), masks.bigbird(LENGTH, window=16, tokens=4, random_keys=8)):
        ours = sparse_attention(q, k, v, mask, softmax_bits=softmax_bits, qkv_bits=qkv_bits)
        found = error(ours, exact(q, k, v, mask.to_dense())[0])
        assert 0.3 * bound < found < bound, f"{found:.4f}"


def seen(q: Tensor, k: Tensor, v: Tensor, bits: int) -> list[Tensor]:
    """The numbers that the integers stand for."""
    matrices = v.reshape(-1, v.shape[-2] * v.shape[-1])
    return [
        mc.quantize(q, bits, scale="row").dequantize(),
        mc.quantize(k, bits, scale="row").dequantize(),
        mc.quantize(matrices, bits, scale="row").dequantize().view_as(v),
    ]


@pytest.mark.parametrize("v", [1, 4, 8, 32])
@pytest.mark.parametrize(("queries", "keys", "depth"), [(64, 64, 32), (61, 100, 7), (100, 33, 40), (9, 200, 1)])
def test_any_size_depth_and_vector_length(queries: int, keys: int, depth: int, v: int) -> None:
    for bits in (4, 8, 16):
        q, k, values = inputs("random", queries, keys, depth)
        mask = masks.random(queries, 0.6, keys=keys, vector_length=v, seed=v)
        ours, lse = sparse_attention(q, k, values, mask, softmax_bits=16, qkv_bits=bits, return_lse=True)
        expected, sums = exact(*seen(q, k, values, bits), mask.to_dense())
        assert ours.shape == expected.shape and lse.shape == ours.shape[:-1]
        assert error(ours, expected) < 2e-3  # what is left: float16 logits, a softmax of 16 bits
        assert torch.allclose(lse.double(), sums, atol=5e-3)


@pytest.mark.parametrize("sizes", [(64, 64), (50, 90), (90, 50)])
def test_causality_is_exact_inside_the_vectors_of_the_diagonal(sizes: tuple[int, int]) -> None:
    q, k, v = inputs("random", *sizes)
    tril = torch.ones(sizes, dtype=torch.bool).tril()
    for mask in (masks.local(sizes[0], 12, keys=sizes[1]), masks.random(sizes[0], 0.3, keys=sizes[1], causal=True)):
        kept = mask.to_dense()
        assert bool((kept & ~tril).any())
        ours, lse = sparse_attention(q, k, v, mask, softmax_bits=16, causal=True, return_lse=True)
        expected, sums = exact(*seen(q, k, v, 8), kept & tril)
        assert error(ours, expected) < 2e-3
        assert torch.allclose(lse.double(), sums, atol=5e-3)
        moved = v.clone()
        moved[..., 20:, :] = moved[..., 20:, :].flip(-2)  # the same scale
        again = sparse_attention(q, k, moved, mask, softmax_bits=16, causal=True)
        assert torch.equal(again[..., :20, :], ours[..., :20, :]), "an earlier query saw a later key"


def test_each_head_follows_its_own_mask() -> None:
    q, k, v = inputs("random", 60, 44)
    heads = [masks.random(60, sparsity, keys=44, seed=seed) for seed, sparsity in enumerate((0.5, 0.9, 0.2))]
    for causal in (False, True):
        bias = torch.randn(2, 1, 44)
        options: dict[str, Any] = {"causal": causal, "softmax_bits": 16, "bias": bias}
        ours, lse = sparse_attention(q, k, v, heads, return_lse=True, **options)
        for h, mask in enumerate(heads):
            options["bias"] = bias[:, 0]
            alone, sums = sparse_attention(q[:, h], k[:, h], v[:, h], mask, return_lse=True, **options)
            assert torch.equal(ours[:, h], alone) and torch.equal(lse[:, h], sums)


def test_a_list_of_the_same_masks_in_another_order_is_another_mask() -> None:
    q, k, v = inputs("random", 32, 32)
    a, b, c = (masks.random(32, 0.5, seed=seed) for seed in range(3))
    first = sparse_attention(q, k, v, [a, b, c])
    second = sparse_attention(q, k, v, [a, c, b])
    assert torch.equal(first[:, 0], second[:, 0]) and not torch.equal(first[:, 1], second[:, 1])
    assert torch.equal(sparse_attention(q, k, v, [a, b, c]), first)


@pytest.mark.parametrize("shape", [(70,), (1, 1, 70), (2, 1, 70), (3, 70), (2, 3, 70)])
def test_a_bias_is_added_to_the_logits_of_a_key(shape: tuple[int, ...]) -> None:
    q, k, v = inputs("random", 40, 70)
    bias = 2 * torch.randn(shape, dtype=torch.float64)
    bias[..., ::5] = -math.inf
    mask = masks.random(40, 0.4, keys=70)
    ours = sparse_attention(q, k, v, mask, bias=bias, softmax_bits=16, scale=0.2)
    expected, _ = exact(*seen(q, k, v, 8), mask.to_dense(), bias, scale=0.2)
    assert error(ours, expected) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_result_has_the_dtype_of_q_and_the_layout_does_not_matter(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs("random", 48, 48))
    mask = masks.random(48, 0.5)
    ours = sparse_attention(q, k, v, mask, softmax_bits=16)
    assert ours.dtype == dtype
    assert error(ours, exact(*seen(q, k, v, 8), mask.to_dense())[0]) < (6e-3 if dtype == torch.bfloat16 else 2e-3)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(sparse_attention(*views, mask, softmax_bits=16), ours)
    columns = [x.mT.contiguous().mT for x in (q, k, v)]
    assert torch.equal(sparse_attention(*columns, mask, softmax_bits=16), ours)


def test_queries_without_keys_are_zero_or_nan_and_empty_tensors_pass() -> None:
    q, k, v = inputs("random", 24, 8)
    mask = masks.local(24, 0, keys=8)
    ours, lse = sparse_attention(q, k, v, mask, return_lse=True)
    assert not ours[..., 8:, :].any() and (lse[..., 8:] == -math.inf).all() and ours[..., :8, :].all()
    nan = sparse_attention(q, k, v, mask, nan_for_empty=True)
    assert nan[..., 8:, :].isnan().all() and torch.equal(nan[..., :8, :], ours[..., :8, :])
    for n, m in ((0, 8), (8, 0), (0, 0)):
        q, k, v = (torch.randn(2, size, 4) for size in (n, m, m))
        out, lse = sparse_attention(q, k, v, masks.local(n, 1, keys=m), return_lse=True)
        assert out.shape == (2, n, 4) and not out.any() and (lse == -math.inf).all()
    assert sparse_attention(torch.randn(0, 8, 4), *[torch.randn(0, 8, 4)] * 2, masks.local(8, 1)).shape == (0, 8, 4)


def test_nan_in_a_row_reaches_the_queries_that_use_it() -> None:
    q, k, v = inputs("random", 32, 32)
    mask = masks.local(32, 3)
    q[0, 0, 5, 3], k[1, 2, 9, 0] = math.nan, math.inf
    met = sparse_attention(q, k, v, mask).isnan().any(-1)
    assert met[0, 0].nonzero().flatten().tolist() == [5]
    assert met[1, 2].nonzero().flatten().tolist() == mask.to_dense()[:, 9].nonzero().flatten().tolist()
    assert int(met.sum()) == 1 + int(mask.to_dense()[:, 9].sum())


def gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, run: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, bias)]
    out, lse = run(*leaves)
    torch.manual_seed(1)
    weights, more = torch.randn(out.shape), torch.randn(lse.shape)
    ((out * weights).sum() + (lse * more).masked_fill(lse == -math.inf, 0).sum()).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize(
    ("softmax_bits", "qkv_bits", "straight", "true"),
    [(16, 16, 1e-3, 1e-3), (16, 8, 1e-3, 0.02), (8, 8, 0.01, 0.02), (8, 4, 0.01, 0.4), (4, 4, 0.2, 0.4)],
)
def test_gradients_are_those_of_dense_attention(softmax_bits: int, qkv_bits: int, straight: float, true: float) -> None:
    """Within ``straight`` at the quantized values, where only the softmax's rounding is left, ``true`` at the inputs."""
    q, k, v = inputs("random", 60, 90, 15)
    bias = torch.randn(2, 1, 90)
    heads = [masks.random(60, 0.7, keys=90, seed=seed) for seed in range(3)]
    options: dict[str, Any] = {"softmax_bits": softmax_bits, "qkv_bits": qkv_bits, "return_lse": True}
    for mask, dense, causal in (
        (heads[0], heads[0].to_dense(), False),
        (heads, torch.stack([m.to_dense() for m in heads]) & torch.ones(60, 90, dtype=torch.bool).tril(), True),
    ):
        ours = gradients(
            q, k, v, bias, lambda *x, m=mask, c=causal: sparse_attention(*x[:3], m, bias=x[3], causal=c, **options)
        )
        for at, bound in ((seen(q, k, v, qkv_bits), straight), ((q, k, v), true)):
            expected = gradients(*at, bias, lambda *x, d=dense: exact(*x[:3], d, x[3]))
            assert [g.shape for g in ours] == [g.shape for g in expected]
            found = [error(g, e.double()) for g, e in zip(ours, expected, strict=True)]
            assert max(found) < bound, found


def test_gradients_flow_where_they_are_wanted_and_once() -> None:
    q, k, v = (x.half().requires_grad_(n == 1) for n, x in enumerate(inputs("random", 32, 32)))
    out = sparse_attention(q, k, v, masks.local(32, 4))
    (grad,) = torch.autograd.grad(out.float().square().sum(), k, create_graph=True)
    assert grad.dtype == torch.float16 and grad.shape == k.shape and grad.any()
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_a_step_against_the_gradient_lowers_the_loss() -> None:
    q, k, v = inputs("random", 64, 64, 16)
    mask, target = masks.random(64, 0.7), torch.randn(2, 3, 64, 16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    losses = []
    for _ in range(5):
        loss = (sparse_attention(*leaves, mask) - target).square().mean()
        losses.append(loss.item())
        for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            leaf.data -= 300 * grad
    assert all(b < a for a, b in pairwise(losses)), losses


def fake_kernel(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The fused kernel's interface, and that of its quantization, in torch operators; the calls that it got."""
    attention = pytest.importorskip("cute_kernels.attention.fused", reason="needs the wheel nvidia-cutlass")
    calls: list[dict[str, Any]] = []

    def make_index(patterns: Any, queries: int, keys: int, *, batch: int, head_dim: int, causal: bool) -> Any:
        dense = torch.stack([mc.Pattern((queries, keys), 8, *arrays).to_dense() for arrays in patterns])
        assert batch % len(dense) == 0 and head_dim in (32, 64, 128)
        seen = dense.repeat(batch // len(dense), 1, 1) & (torch.ones(queries, keys).tril() > 0 if causal else True)
        return SimpleNamespace(config=None, seen=seen)

    def attend(q: Tensor, k: Tensor, v: Tensor, index: Any, **options: Any) -> None:
        for x in (q, k, v):
            assert x.dtype == torch.int8 and x.is_contiguous() and x.ndim == 3
        for name, length in (("q_scale", q), ("k_scale", k)):
            assert options[name].shape == length.shape[:2] and options[name].dtype == torch.float32
        assert options["v_scale"].shape == options["keys_alike"].shape == q.shape[:1]
        assert len(options["ready"]) == len(q)
        reals = [x.double() * options[f"{n}_scale"].view(len(x), -1, 1) for n, x in (("q", q), ("k", k), ("v", v))]
        out, lse = exact(*reals, index.seen, options["bias"], options["scale"])
        options["out"].copy_(out)
        if options["lse"] is not None:
            options["lse"].copy_(lse)
        calls.append(options)

    def encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        found = mc.quantize(x, bits, scale="row", nonfinite="propagate")
        assert found.scale is not None
        return found.ints(), found.scale

    def encode_all(q: Tensor, k: Tensor, v: Tensor, *, bits: int) -> Any:
        assert all(x.is_contiguous() for x in (q, k, v))
        rows = [(ints, scale[..., 0]) for ints, scale in (encode(x, bits) for x in (q, k))]
        values, scale = encode(v.reshape(len(v), -1), bits)
        each = torch.zeros(len(k), dtype=torch.int32)
        ready = torch.ones((len(q), 24), dtype=torch.int32)
        return operands.Operands(*rows[0], *rows[1], each, values.view(v.shape), scale[:, 0], ready)

    operands = pytest.importorskip("cute_kernels.attention.quantize_qkv")
    monkeypatch.setattr(operands, "encode_operands", encode_all)
    monkeypatch.setattr(attention, "make_index", make_index)
    monkeypatch.setattr(attention, "fused_attention", attend)
    monkeypatch.setattr(operator, "fused_obstacle", lambda *_: "")
    monkeypatch.setattr(records, "attention_kind", lambda *_: None)  # the engine's call takes nothing
    return calls


@pytest.mark.parametrize("qkv_bits", [8, 4])
@pytest.mark.parametrize("depth", [64, 40, 7])
def test_the_fused_kernel_gets_what_its_interface_says(
    monkeypatch: pytest.MonkeyPatch, depth: int, qkv_bits: int
) -> None:
    calls = fake_kernel(monkeypatch)
    q, k, v = inputs("random", 61, 44, depth)
    heads = [masks.random(61, 0.4, keys=44, seed=seed) for seed in range(3)]
    for number, (mask, bias) in enumerate([(heads[0], None), (heads, torch.randn(44)), (heads, torch.randn(2, 3, 44))]):
        options: dict[str, Any] = {"bias": bias, "causal": number == 2, "qkv_bits": qkv_bits, "return_lse": True}
        fused, lse = sparse_attention(q, k, v, mask, backend="fused", **options)
        other, sums = sparse_attention(q, k, v, mask, backend="unfused", softmax_bits=16, **options)
        assert len(calls) == number + 1
        assert error(fused, other.double()) < 3e-3
        assert torch.allclose(lse, sums, atol=6e-3)
        assert calls[-1]["bias"] is None or calls[-1]["bias"].shape in ((44,), (6, 44))
    columns = [x[:1, :1].mT.contiguous().mT for x in (q, k, v)]  # as a sparse layer writes them
    assert torch.equal(
        sparse_attention(*columns, heads[0], backend="fused", qkv_bits=qkv_bits),
        sparse_attention(q[:1, :1], k[:1, :1], v[:1, :1], heads[0], backend="fused", qkv_bits=qkv_bits),
    )


def test_the_fused_form_has_the_gradients_of_the_three_products(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kernel(monkeypatch)
    q, k, v = (x.requires_grad_() for x in inputs("random", 40, 40))
    mask, grads = masks.random(40, 0.5), []
    for backend in ("fused", "unfused"):
        out = sparse_attention(q, k, v, mask, backend=backend)  # type: ignore[arg-type]
        grads.append(torch.autograd.grad(out.sin().sum(), (q, k, v)))
    assert all(error(a, b.double()) < 0.02 for a, b in zip(*grads, strict=True))


def bad_calls() -> list[tuple[type[Exception], str, dict[str, Any]]]:
    heads = [masks.local(8, 1)] * 3
    return [
        (TypeError, r"k must be torch.float32 like q, got torch.float16", {"k": torch.randn(2, 8, 4).half()}),
        (TypeError, "q must be a float tensor, got torch.int64", {"q": torch.ones(2, 8, 4, dtype=torch.int64)}),
        (ValueError, r"v must have at least 2 dimensions, got shape \(4,\)", {"v": torch.randn(4)}),
        (ValueError, r"k must have the leading dimensions of q, \(2,\), got \(3,\)", {"k": torch.randn(3, 8, 4)}),
        (ValueError, "k must have the depth of q, 4, got 5", {"k": torch.randn(2, 8, 5)}),
        (ValueError, "v must have as many rows as k, 8, got 9", {"v": torch.randn(2, 9, 4)}),
        (ValueError, "q must have a depth of at least 1", {"q": torch.randn(2, 8, 0), "k": torch.randn(2, 8, 0)}),
        (ValueError, r"mask must have shape \(8, 8\) for q and k, got \(8, 9\)", {"mask": masks.local(8, 1, keys=9)}),
        (ValueError, r"mask must have as many patterns .* got 3", {"mask": heads}),
        (TypeError, "mask must be a Pattern or a list", {"mask": torch.ones(8, 8, dtype=torch.bool)}),
        (ValueError, r"softmax_bits must be one of \(4, 8, 16\), got 12", {"softmax_bits": 12}),
        (ValueError, r"qkv_bits must be one of \(4, 8, 16\), got 5", {"qkv_bits": 5}),
        (ValueError, r"scale must be positive and finite, got -1", {"scale": -1}),
        (ValueError, "bias must have one number for each of the 8 keys", {"bias": torch.randn(7)}),
        (ValueError, r"bias must broadcast to the leading dimensions \(2,\)", {"bias": torch.randn(3, 8)}),
        (TypeError, "bias must be a float tensor, got torch.bool", {"bias": torch.ones(8, dtype=torch.bool)}),
        (ValueError, "backend must be None, 'fused' or 'unfused', got 'four'", {"backend": "four"}),
        (
            NotImplementedError,
            "backend='fused' does not support softmax_bits=16, qkv_bits=8 on a CPU, only 4 and 8; use backend='unfused'",
            {"backend": "fused", "softmax_bits": 16},
        ),
    ]


@pytest.mark.parametrize(("kind", "message", "change"), bad_calls(), ids=lambda x: x if isinstance(x, str) else "")
def test_mistakes_are_named(kind: type[Exception], message: str, change: dict[str, Any]) -> None:
    call = {name: torch.randn(2, 8, 4) for name in ("q", "k", "v")} | {"mask": masks.local(8, 1)} | change
    with pytest.raises(kind, match=message):
        sparse_attention(call.pop("q"), call.pop("k"), call.pop("v"), call.pop("mask"), **call)


def test_structures_are_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.requires_grad_() for x in inputs("random", 32, 32))
    mask = masks.random(32, 0.5)
    sparse_attention(q, k, v, mask).sum().backward()
    heads = [masks.random(32, 0.5, seed=seed) for seed in range(3)]
    sparse_attention(q, k, v, heads).sum().backward()
    monkeypatch.setattr(mc.Pattern, "__init__", lambda *_, **__: pytest.fail("a pattern was derived again"))
    sparse_attention(q, k, v, mask).sum().backward()
    sparse_attention(q, k, v, heads).sum().backward()
    with pytest.raises(BaseException, match="a pattern was derived again"):
        sparse_attention(q[:1], k[:1], v[:1], [*heads[:2], mask]).sum().backward()


def test_the_former_name_of_the_unfused_form_is_deprecated() -> None:
    q, mask = torch.randn(2, 8, 4), masks.local(8, 1)
    with pytest.warns(DeprecationWarning, match="impl='three' is deprecated; use backend='unfused'"):
        former = sparse_attention(q, q, q, mask, impl="three")
    assert torch.equal(former, sparse_attention(q, q, q, mask, backend="unfused"))
