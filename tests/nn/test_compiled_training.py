"""Compiled and exported layers: a training step as one graph, shared graphs, sizes that vary, no fake tensors kept."""

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import magicube_cutlass as mc


def pair(grad_bits: int | None = 16, calibrate: bool = False) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    # ReLU, whose gradient has no rounding: that of GELU depends on the memory layout, by a last bit.
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32, bias=False))
    config = mc.nn.SparseQuantConfig(sparsity=0.5, vector_length=8, grad_bits=grad_bits)
    mc.convert(model, config)
    if calibrate:
        mc.nn.calibrate(model, [torch.randn(16, 64)], progress=False)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("grad_bits", "calibrate"), [(16, False), (None, False), (8, True)])
def test_a_training_step_is_one_graph(backend: str, grad_bits: int | None, calibrate: bool) -> None:
    model, plain = pair(grad_bits, calibrate)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(3):  # the integers follow the weight without another trace
        inputs = [torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(step)) for _ in range(2)]
        losses = []
        for run, x, optimizer in zip((compiled, plain), inputs, optimizers, strict=True):
            x.requires_grad_()
            optimizer.zero_grad()
            loss = run(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        pairs = [tuple(losses), (inputs[0].grad, inputs[1].grad)]
        pairs += zip(model.parameters(), plain.parameters(), strict=True)
        for one, other in pairs:
            assert one is not None and other is not None
            # Integer gradients are exact; float products depend on the memory layout, by last bits.
            bound = {} if grad_bits is None else {"rtol": 0.0, "atol": 0.0}
            torch.testing.assert_close(one, other, **bound)


def test_a_copy_is_a_layer_of_its_own() -> None:
    model, other = pair()
    first, second = model[0], other[0]  # type: ignore[index]
    assert first._number != second._number
    with torch.no_grad():
        second.weight.mul_(2)
    x = torch.randn(3, 64)
    run = torch.compile(second, fullgraph=True, backend="eager")
    assert torch.equal(run(x), second(x)) and not torch.equal(run(x), first(x))


def test_an_exported_layer_takes_many_sizes_and_leaves_no_fake_tensor() -> None:
    model, plain = pair()
    model.eval().requires_grad_(False)
    x = torch.randn(5, 64)
    expected = plain(x).detach()
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("b", min=2, max=64)},))
    for rows in (x, x[:2], x.repeat(4, 1)):
        assert torch.equal(program.module()(rows), plain(rows).detach())
    assert torch.equal(model(x), expected)  # reads what the export has cached
    assert torch.equal(model.train().requires_grad_(True)(x).detach(), expected)


def test_second_derivatives_are_refused() -> None:
    model, _ = pair()
    x = torch.randn(3, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    (gradient,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.square().sum().backward()


def test_a_second_derivative_is_refused_where_torch_takes_zero_for_what_a_graph_lacks() -> None:
    model, _ = pair()
    a, half = mc.SRBCRS.from_dense(torch.randn(16, 64)), mc.SRBCRS.from_dense(torch.randn(16, 64), dtype="float16")
    pattern, other = a.pattern, torch.randn(64, 24)
    for call, shape, dtype in (
        (model, (3, 64), torch.float32),
        (lambda x: mc.autograd.spmm(a, x), (64, 3), torch.float32),
        (lambda x: mc.autograd.spmm(half, x), (64, 3), torch.float16),
        (lambda x: mc.autograd.sddmm(x, other, pattern), (16, 24), torch.float32),
    ):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.functional.hessian(lambda x, call=call: call(x).float().square().sum(), x)
        (gradient,) = torch.autograd.grad(call(x).float().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.grad(gradient.sum(), x, allow_unused=True)


def test_transforms_are_refused_by_name_and_leave_nothing_behind() -> None:
    model, plain = pair()
    x, a = torch.randn(3, 5, 64), mc.SRBCRS.from_dense(torch.randn(16, 64), vector_length=8, bits=8)
    layer = model[0]  # type: ignore[index]

    def of_weight(weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,)).sum()

    for call in (
        lambda: torch.func.vmap(model)(x),
        lambda: torch.func.grad(lambda each: model(each).sum())(x),
        lambda: torch.func.grad(of_weight)(layer.weight.detach()),
        lambda: torch.func.vmap(lambda each: mc.quantize(each, bits=8).data)(x),
        lambda: torch.func.vmap(lambda each: mc.autograd.spmm(a, each))(x.mT),
        lambda: torch.func.vmap(lambda each: mc.spmm(a, each))(x.mT.half()),
    ):
        with pytest.raises(NotImplementedError, match=r"torch\.func transform"):
            call()
    assert torch.equal(model(x), plain(x))


def test_quantize_is_part_of_a_graph() -> None:
    def values(x: Tensor, axis: int | None) -> tuple[Tensor, Tensor | None]:
        scale: Literal["tensor", "row", "column"] = "tensor" if axis is None else "row" if axis else "column"
        q = mc.quantize(x, bits=8, scale=scale)
        return q.ints(), q.scale

    compiled, x = torch.compile(values, fullgraph=True, backend="aot_eager"), torch.randn(6, 10)
    for given, axis in ((x, None), (x, 0), (x, 1), (x.mT.contiguous().mT, 1)):
        for found, expected in zip(compiled(given, axis), values(given, axis), strict=True):
            assert found is not None and expected is not None and torch.equal(found, expected)
    old = torch.compile(lambda x: mc.quantize(x, bits=8, axis=1).ints(), fullgraph=True, backend="aot_eager")
    assert torch.equal(old(x), values(x, 1)[0])  # without the warning
    x[2, 3] = torch.inf
    _, scale = compiled(x, 1)
    assert scale is not None and scale.isnan().flatten().tolist() == [False, False, True, False, False, False]
    with pytest.raises(Exception, match="signed must be True in a compiled graph"):
        torch.compile(lambda x: mc.quantize(x.abs(), bits=8, signed=False).data, fullgraph=True, backend="eager")(x)


def test_a_process_that_ends_with_compiled_layers_alive_prints_nothing() -> None:
    code = """
import torch
import magicube_cutlass as mc
model = torch.nn.Sequential(torch.nn.Linear(64, 48))
mc.convert(model, mc.nn.SparseQuantConfig(sparsity=0.5, vector_length=8))
torch.compile(model.eval(), fullgraph=True, backend="eager")(torch.randn(2, 64))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == ("", "")


def frozen(count: int) -> list[mc.nn.SparseQuantLinear]:
    """Frozen layers with other stored vectors each."""
    torch.manual_seed(0)
    layers = [mc.nn.SparseQuantLinear.from_linear(nn.Linear(256, 40), 0.5) for _ in range(count)]
    return [layer.eval().freeze() for layer in layers]


@torch.no_grad()
def test_frozen_layers_compiled_one_by_one_share_a_graph() -> None:
    layers, x = frozen(12), torch.randn(5, 256)
    seen: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        seen.append([str(node.target) for node in graph.graph.nodes if "magicube" in str(node.target)])
        return graph.forward

    torch._dynamo.reset()
    assert len({layer.values.shape for layer in layers if layer.values is not None}) > 1  # sizes are not the reason
    for layer in layers:
        assert torch.equal(torch.compile(layer, backend=backend, fullgraph=True)(x), layer(x))
    assert seen == [["magicube.sparse_frozen_rows"]]
    torch._dynamo.reset()


@torch.no_grad()
def test_a_compiled_frozen_layer_follows_its_tensors_and_may_go() -> None:
    (layer, other), x = frozen(2), torch.randn(5, 256)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    first = run(x)
    assert torch.equal(first, layer(x))
    layer.load_state_dict(other.state_dict())
    y = run(x)  # before the layer has made its matrix
    assert torch.equal(y, other(x)) and not torch.equal(y, first)
    twin, shallow = copy.deepcopy(layer), copy.copy(layer)
    assert torch.equal(torch.compile(twin, backend="aot_eager", fullgraph=True)(x), y)
    assert torch.equal(torch.compile(shallow, backend="aot_eager", fullgraph=True)(x), y)
    del shallow
    assert torch.equal(run(x), y)  # its own layer is still there
    gone = weakref.ref(layer)
    del layer, run
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
