"""Sparse attention in compiled graphs on a GPU, and operands that do not lie row after row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from magicube_cutlass import masks
from magicube_cutlass.attention import sparse_attention
from magicube_cutlass.attention import torch_op as operator
from magicube_cutlass.nn import SparseQuantAttention
from tests.gpu.sparse.test_gpu_attention import error, inputs, pipelines

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    "kinds", [{}, {"return_lse": True, "causal": True}, {"backend": "unfused"}, {"softmax_bits": 16}]
)
@pytest.mark.configs(pipelines())
def test_the_call_is_one_graph_with_the_same_numbers(kinds: dict[str, Any]) -> None:
    mask = masks.random(256, 0.8).to("cuda")
    q, k, v = (x.cuda() for x in inputs((2, 4), 256, 256, 64, torch.float16))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return sparse_attention(2 * q, k, v, mask, **kinds)

    found, expected = torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v)
    for one, other in zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]:
        assert torch.equal(one, other)


def test_gradients_of_a_graph_are_those_of_the_call() -> None:
    mask = masks.random(96, 0.7, keys=64).to("cuda")
    leaves = [x.cuda().requires_grad_() for x in inputs((2, 2), 96, 64, 32, torch.float32)]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, mask).square().sum()

    ours, plain = (torch.autograd.grad(f(*leaves), leaves) for f in (torch.compile(loss, fullgraph=True), loss))
    for one, other in zip(ours, plain, strict=True):
        assert error(one, other) < 1e-4  # floats are summed in any order, and one may round to another 16-bit integer


def test_opcheck_passes() -> None:
    mask = masks.random(64, 0.7).to("cuda")
    q, k, v = (x.cuda().requires_grad_() for x in inputs((4,), 64, 64, 64, torch.float16))
    same = (mask._named(mask._version_id), [8, 8], 0.125, False)
    opcheck(
        operator.sparse_attention.default,
        (q, k, v, None, *same, False, True, "fused"),
        test_utils=("test_schema", "test_faketensor"),
    )


@torch.no_grad()
def test_modules_run_as_graphs_that_torch_captures() -> None:
    mask = masks.random(256, 0.8)
    layers = [SparseQuantAttention(256, 4, mask) for _ in range(2)]
    model = torch.nn.Sequential(*layers).to("cuda", torch.float16).eval()
    assert layers[0].masks[0] is layers[1].masks[0]
    x = torch.randn(2, 256, 256, device="cuda", dtype=torch.float16)
    expected = model(x)  # derives what the graph will need
    run = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        y = run(x).clone()
        assert error(y, expected) < 5e-3  # a product of another kernel may round to other integers


@pytest.mark.parametrize("qkv_bits", [8, 4])
@torch.no_grad()
def test_operands_may_be_column_major(qkv_bits: int) -> None:
    mask = masks.random(256, 0.8).to("cuda")
    rows = [x.cuda() for x in inputs((1, 4), 256, 256, 64, torch.float16)]
    columns = [x.mT.contiguous().mT for x in rows]
    heads_inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in rows]
    for backend in ("fused", "unfused"):
        expected = sparse_attention(*rows, mask, backend=backend, qkv_bits=qkv_bits)
        for x in (columns, heads_inside):
            assert torch.equal(sparse_attention(*x, mask, backend=backend, qkv_bits=qkv_bits), expected)
