"""Rows that a graph quantizes itself: the library's integers but for ties, and products of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magicube_cutlass.autograd.integer import quantized
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
