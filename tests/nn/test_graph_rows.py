"""Rows that a graph quantizes itself: the library's integers but for ties, and products of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.autograd.integer import quantized
from magicube_cutlass.dispatch import graph_sums
from magicube_cutlass.nn import QuantLinear
from magicube_cutlass.nn.dense import linear_op


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 40)


@pytest.mark.parametrize("static", [False, True])
def test_rows_are_quantized_in_a_graph_as_by_the_library_but_for_ties(static: bool) -> None:
    x = normal(300, 777)
    x[3], x[4, 5], x[5] = 0, torch.inf, 1e30
    given = torch.tensor(0.01) if static else None
    found, scale = linear_op.quantized_rows(x, given)
    want = quantized(x, 8, None if static else 1, given)
    assert want.scale is not None and bool(((scale == want.scale.reshape(scale.shape)) | scale.isnan()).all())
    assert scale.isnan().nonzero().tolist() == ([] if static else [[4]])
    finite = torch.arange(300) != 4
    off = (found.int() - want.data.int())[finite].abs()
    assert int(off.max()) <= 1 and int(off.sum()) < 100


def test_integers_in_a_graph_are_saturated_and_even_at_ties_and_zero_for_nan() -> None:
    x = torch.tensor([[torch.nan, -torch.nan, torch.inf, -torch.inf, 1e30, -1e30, -0.0, 0.5, 1.5, -0.5, -1.5, 126.5]])
    want = [0, 0, 127, -128, 127, -128, 0, 0, 2, 0, -2, 126]
    assert linear_op.quantized_rows(x, torch.tensor(1.0))[0].tolist() == [want]
    every = torch.arange(-128.0, 128.0)[None] * 0.03
    assert linear_op.quantized_rows(every, torch.tensor(0.03))[0].tolist() == [list(range(-128, 128))]


@pytest.mark.parametrize(("rows", "inputs"), [(2048, 1025), (2047, 1025), (2048, 1024)])
def test_many_wide_rows_are_quantized_by_a_kernel_in_a_graph(rows: int, inputs: int) -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    x = normal(rows, inputs)
    try:
        run = torch.compile(linear_op.quantized_rows, backend=backend, fullgraph=True)
        found, scale = run(x, None)
        torch._dynamo.reset()
        torch.compile(linear_op.quantized_rows, backend=backend, fullgraph=True, dynamic=True)(x, None)
    finally:
        torch._dynamo.reset()
    many = rows >= 2048 and inputs > 1024
    assert ["magicube.quantize" in each for each in graphs] == [many, False]
    want = quantized(x, 8, 1)
    assert want.scale is not None and torch.equal(scale, want.scale.reshape(-1))
    assert not many or torch.equal(found, want.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_integers_are_multiplied_as_the_layer_does(dtype: torch.dtype) -> None:
    layer = QuantLinear.from_linear(plain().to(dtype)).eval().freeze()
    assert layer.qweight is not None and layer.scale is not None
    x = normal(7, 96).to(dtype)
    rows = quantized(x, 8, 1)
    assert rows.scale is not None
    y = linear_op.quant_linear_rows(
        rows.data, rows.scale.reshape(-1), layer.qweight, layer.scale, layer.bias, None, "", False, dtype
    )
    assert y.dtype == dtype and torch.allclose(y, layer(x), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-5)
    given = rows.data, rows.scale.reshape(-1), layer.qweight, layer.scale, layer.bias, None, "", False, dtype
    assert all(torch.equal(linear_op.quant_linear_rows(*given), y) for _ in range(20))  # at addresses of before


def added(layer: QuantLinear, activation: str = "") -> Any:
    """A function that multiplies rows (2, 5, in) of integers by a weight, and adds r."""

    def run(x: Tensor, scale: Tensor, r: Tensor, more: Any = 0.0) -> Tensor:
        assert layer.qweight is not None and layer.scale is not None
        rows = x.view(-1, x.shape[-1])
        y = linear_op.quant_linear_rows(
            rows, scale, layer.qweight, layer.scale, layer.bias, None, activation, False, torch.bfloat16
        )
        y = y.view(*x.shape[:-1], -1)
        if isinstance(more, torch.dtype):
            return r + y.view(more)
        return (r + y) * more if more else r + y

    return run


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How many sums each compiled graph has moved."""
    found: list[int] = []
    move = graph_sums.add_in_epilogues

    def count(graph: torch.fx.Graph) -> int:
        found.append(move(graph))
        return found[-1]

    monkeypatch.setattr(graph_sums, "add_in_epilogues", count)
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        yield found
    torch._dynamo.reset()


@torch.inference_mode()
def test_a_sum_that_ends_a_graph_is_part_of_the_product_before_it(counts: list[int]) -> None:
    layer = QuantLinear.from_linear(plain().to(torch.bfloat16)).eval().freeze()
    run = torch.compile(added(layer), options=mc.nn.compile_options(), dynamic=True)
    for tokens in (2, 3):
        x = torch.randint(-128, 128, (tokens, 5, 96), dtype=torch.int8)
        scale, r = torch.rand(5 * tokens) * 0.01, normal(tokens, 5, 40).to(torch.bfloat16)
        exact = (x.float().view(-1, 96) @ layer.dequantize().t() * scale[:, None] + layer.bias.float()).view(r.shape)
        got = run(x, scale, r)
        assert got.dtype == torch.bfloat16 and torch.allclose(got.float(), exact + r.float(), rtol=2**-8, atol=1e-5)
        assert not torch.equal(got, added(layer)(x, scale, r))  # which rounds twice
    assert counts == [1]


@torch.inference_mode()
def test_other_sums_stay_where_they_are(counts: list[int]) -> None:
    layer = QuantLinear.from_linear(plain().to(torch.bfloat16)).eval().freeze()
    x, scale = torch.randint(-128, 128, (2, 5, 96), dtype=torch.int8), torch.rand(10) * 0.01
    r = normal(2, 5, 40).to(torch.bfloat16)
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (added(layer, "relu"), (x, scale, r)),  # the activation would see r
        (added(layer), (x, scale, r[:1])),  # is broadcast
        (added(layer), (x, scale, r.float())),
        (added(layer), (x, scale, r, 2.0)),  # something reads the sum
        (lambda *given: added(layer)(*given, torch.int16), (x, scale, r.view(torch.int16))),  # bits, not numbers
    ]
    for function, given in cases:
        torch._dynamo.reset()
        got = torch.compile(function, options=mc.nn.compile_options())(*given)
        assert torch.allclose(got, function(*given), rtol=2**-7, atol=1e-5)
    assert counts == [0] * len(cases)
