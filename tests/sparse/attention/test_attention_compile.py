"""Sparse attention as a torch operator: its checks, whole graphs, gradients through them, masks that come and go."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.library import opcheck

from magicube_cutlass import masks
from magicube_cutlass.attention import sparse_attention
from magicube_cutlass.attention import torch_op as operator
from magicube_cutlass.nn import SparseQuantAttention


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch.compiler.reset()


def whole(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def tensors(*sizes: int, depth: int = 16, grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, size, depth).requires_grad_(grad) for size in sizes]


@pytest.mark.parametrize(
    ("bits", "lse", "bias", "depth"),
    [((8, 8), True, None, 16), ((8, 8), False, (1, 24), 7), ((16, 4), True, (6, 24), 7), ((16, 4), False, None, 16)],
)
def test_opcheck_passes(bits: tuple[int, int], lse: bool, bias: tuple[int, int] | None, depth: int) -> None:
    heads = [masks.random(40, 0.4, keys=24, seed=seed) for seed in range(3)]
    names = " ".join(mask._named(mask._version_id) for mask in heads)
    q, k, v = (x.flatten(0, 1) for x in tensors(40, 24, 24, depth=depth))
    added = None if bias is None else torch.randn(bias)
    same = (names, list(bits), 0.25, True)
    opcheck(operator.sparse_attention.default, (q, k, v, added, *same, False, lse, ""))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    opcheck(
        operator.sparse_attention.default,
        (*leaves, None if added is None else added.requires_grad_(), *same, True, lse, ""),
    )
    grad, sums = torch.randn(6, 40, depth), torch.randn(6, 40) if lse else None
    given = None if added is None else added.detach()
    opcheck(operator.sparse_attention_backward.default, (grad, sums, q, k, v, given, *same))


def options() -> list[dict[str, Any]]:
    return [
        {}, {"return_lse": True, "causal": True}, {"softmax_bits": 16, "scale": 0.3}, {"qkv_bits": 4, "softmax_bits": 4},
        {"bias": torch.randn(24)}, {"bias": torch.randn(2, 1, 24), "nan_for_empty": True}, {"backend": "unfused"},
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(len(options())))
def test_the_call_is_one_graph_with_the_same_numbers(number: int) -> None:
    kinds = options()[number]
    for mask in (masks.random(40, 0.5, keys=24), [masks.random(40, 0.5, keys=24, seed=seed) for seed in range(3)]):

        def call(q: Tensor, k: Tensor, v: Tensor, mask: Any = mask) -> Any:
            return sparse_attention(2 * q, k, v, mask, **kinds)

        compiled, x = whole(call), tensors(40, 24, 24)
        found, expected = compiled(*x), call(*x)
        pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        for one, other in pairs:
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_a_graph_serves_any_batch() -> None:
    mask = masks.random(40, 0.5)
    compiled = torch.compile(sparse_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 5, 3):
        q, k, v = (torch.randn(batch, 4, 40, 16) for _ in range(3))
        assert torch.equal(compiled(q, k, v, mask), sparse_attention(q, k, v, mask))


def test_a_graph_follows_a_mask_that_is_replaced() -> None:
    kept: dict[str, Any] = {}
    compiled, x = whole(lambda q, k, v: sparse_attention(q, k, v, kept["mask"])), tensors(40, 40, 40)
    results = []
    for seed in range(3):
        kept["mask"] = masks.random(40, 0.5, seed=seed)
        results.append(compiled(*x))
        assert torch.equal(results[-1], sparse_attention(*x, kept["mask"]))
    assert not torch.equal(results[0], results[1])
    kept["mask"] = copy.deepcopy(kept["mask"])
    assert torch.equal(compiled(*x), results[2])


@pytest.mark.parametrize("lse", [False, True])
def test_gradients_of_a_graph_are_those_of_the_call(lse: bool) -> None:
    heads = [masks.random(40, 0.5, keys=24, seed=seed) for seed in range(3)]

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        found = sparse_attention(q, k, v, heads, bias=bias, return_lse=lse)  # type: ignore[call-overload]
        return sum((each.sin().sum() for each in (found if lse else [found])), torch.zeros(()))

    leaves = [*tensors(40, 24, 24, grad=True), torch.randn(2, 1, 24, requires_grad=True)]
    for wanted in (leaves, leaves[2:3]):
        ours, plain = (torch.autograd.grad(f(*leaves), wanted) for f in (whole(loss), loss))
        for one, other in zip(ours, plain, strict=True):
            assert one.any() and torch.equal(one, other)


def test_a_mask_that_nobody_holds_serves_its_backward_pass() -> None:
    x = tensors(40, 40, 40, grad=True)
    out = sparse_attention(*x, masks.random(40, 0.5))
    gc.collect()
    assert torch.autograd.grad(out.sum(), x[2])[0].any()


def test_an_operator_whose_mask_has_gone_says_so() -> None:
    mask = masks.random(40, 0.5)
    name = mask._named(mask._version_id)
    del mask
    gc.collect()
    q, k, v = (x.flatten(0, 1) for x in tensors(40, 40, 40))
    with pytest.raises(RuntimeError, match=f"pattern {name} must be alive"):
        operator.sparse_attention(q, k, v, None, name, [8, 8], 0.25, False, False, False, "")


def test_layers_that_share_a_mask_share_a_graph() -> None:
    mask, graphs = masks.local(40, 6), []

    def count(module: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(module)
        return module

    layers = [SparseQuantAttention(64, 4, mask).eval() for _ in range(3)]
    model = nn.Sequential(*layers).to(torch.bfloat16)
    assert model[0].masks[0] is model[2].masks[0]
    for layer in layers:
        layer.compile(fullgraph=True, backend=count, dynamic=False)
    x = torch.randn(2, 40, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        model(x)
    assert len(graphs) == 1


def test_a_module_trains_as_one_graph() -> None:
    torch.manual_seed(0)
    module, x, target = SparseQuantAttention(64, 4, masks.local(40, 6)), torch.randn(2, 40, 64), torch.randn(2, 40, 64)
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[1, 30:] = True
    twin = copy.deepcopy(module)
    for each in (whole(module), twin):
        (each(x, key_padding_mask=padding) - target).square().mean().backward()
    for ours, plain in zip(module.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and plain.grad is not None
        assert torch.allclose(ours.grad, plain.grad, rtol=1e-4, atol=1e-7)
