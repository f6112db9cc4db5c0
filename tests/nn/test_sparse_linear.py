"""SparseQuantLinear: results, gradients, learning, state, copies, moves, files and compilers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.autograd import integer
from magicube_cutlass.dispatch import cpu_linear
from magicube_cutlass.nn import SparseQuantConfig, SparseQuantLinear, linear_op


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(inputs: int = 48, outputs: int = 40, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias)


def sparse(**options: Any) -> SparseQuantLinear:
    return SparseQuantLinear.from_linear(plain(), **({"sparsity": 0.6} | options))


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().double().norm() / want.detach().double().norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "v"), [(40, 8), (37, 8), (10, 16), (9, 1)])
def test_a_layer_is_the_pruned_linear_one_within_its_rounding(bias: bool, outputs: int, v: int) -> None:
    dense = plain(outputs=outputs, bias=bias)
    layer = SparseQuantLinear.from_linear(dense, 0.6, v)
    mask = mc.prune(dense.weight.detach(), 0.6, v)
    assert torch.equal(layer.pattern.to_dense(), mask)
    for shape in ((48,), (5, 48), (2, 3, 48), (0, 48), (1, 48)):
        x = normal(*shape)
        y, want = layer(x), nn.functional.linear(x, dense.weight * mask, dense.bias)
        assert y.shape == want.shape and y.dtype == torch.float32
        # half a step of each operand: rounding to 8 bits is off by at most 1/254 of a row's largest entry
        w = dense.weight * mask
        step = w.abs().amax(1) / 254 * x.abs().sum(-1, keepdim=True)
        step = step + x.abs().amax(-1, keepdim=True) / 254 * (w.abs().sum(1) + 48 * w.abs().amax(1) / 254)
        assert ((y - want).abs() <= 1.01 * step + 1e-6).all()


@pytest.mark.parametrize(("bits", "act_bits", "bound"), [(16, 16, 1e-4), (16, 8, 0.01), (8, 8, 0.02), (4, 4, 0.3)])
def test_more_bits_are_more_accurate(bits: int, act_bits: int, bound: float) -> None:
    layer = sparse(bits=bits, act_bits=act_bits)
    x = normal(64, 48)
    want = nn.functional.linear(x, layer.weight * layer.pattern.to_dense(), layer.bias)
    assert bound / 100 < relative(layer(x), want) < bound


def test_training_and_evaluation_compute_the_same() -> None:
    layer, x = sparse(), normal(7, 48)
    y = layer(x)
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    assert torch.equal(layer.freeze()(x), y) and layer.frozen and layer.weight is None


def test_layers_in_a_row_copy_no_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer returns is, transposed, the row-major operand of the next one's product."""
    first, second = sparse().eval(), SparseQuantLinear.from_linear(plain(40, 16), 0.9).eval()
    seen = []
    product = integer.spmm_op.early_spmm

    def watched(a: mc.SRBCRS, b: mc.QuantTensor, *options: Any) -> Tensor:
        seen.append(b.data)
        return product(a, b, *options)

    monkeypatch.setattr(integer.spmm_op, "early_spmm", watched)
    monkeypatch.setattr(cpu_linear.CpuLinear, "is_dense", lambda self, tokens: False)
    with torch.no_grad():
        y = second(first(normal(2, 3, 48)).relu())
    assert y.shape == (2, 3, 16)
    assert [data.is_contiguous() for data in seen] == [True]  # the first one quantizes its rows in the call


def test_gradients_are_those_of_the_masked_linear_layer() -> None:
    layer = sparse()
    x, g = normal(2, 7, 48).requires_grad_(), normal(2, 7, 40, seed=1)
    mask = layer.pattern.to_dense()
    want = nn.functional.linear(x, layer.weight * mask, layer.bias)
    inputs = (x, layer.weight, layer.bias)
    got = torch.autograd.grad(layer(x), inputs, g)
    for mine, true in zip(got, torch.autograd.grad(want, inputs, g), strict=True):
        assert mine.shape == true.shape and relative(mine, true) < 0.01
    assert not got[1][~mask].any()


@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 48), (48,)])
@pytest.mark.parametrize("static", [False, True])
def test_the_step_of_a_gpu_is_that_of_a_cpu(shape: tuple[int, ...], static: bool) -> None:
    """`GpuProduct` needs no GPU: its forward and backward passes are the library's products."""
    layer = sparse(**({"calibrate": [normal(8, 48)]} if static else {}))
    found = []
    for is_gpu in (False, True):
        x = normal(*shape, seed=1).requires_grad_()
        if is_gpu:
            y = linear_op.run_gpu_product(x, layer.weight, layer.bias, layer.act_scale, layer.matrix(), layer.config)
        else:
            y = layer(x)
        assert layer.weight is not None and layer.bias is not None
        found.append([y.detach(), *torch.autograd.grad(y, (x, layer.weight, layer.bias), normal(*y.shape, seed=2))])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_a_layer_learns_and_its_integers_follow() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(256, 32), mc.prune(torch.randn(16, 32), 0.5, 8)
    target = torch.randn(16, 32) * mask
    layer = SparseQuantLinear.from_linear(nn.Linear(32, 16), mask=mask)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(80):
        loss = (layer(x) - x @ target.mT).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 2e-3 * losses[0]
    assert relative(layer.eval().matrix().to_dense(), target) < 0.05


def test_integers_are_made_once_a_change() -> None:
    layer, x = sparse(), normal(5, 48)
    layer(x)
    made = layer.matrix()
    layer(x), layer.eval(), layer(x)
    assert layer.matrix() is made
    with torch.no_grad():
        layer.weight.mul_(-4)
    assert torch.equal(layer.matrix().to_dense(), -4 * made.to_dense())
    layer.weight = nn.Parameter(torch.ones(40, 48))
    assert torch.allclose(layer.matrix().to_dense(), layer.pattern.to_dense().float())


def test_pruning_anew_keeps_the_master_and_brings_weights_back() -> None:
    layer, x = sparse(sparsity=0.9), normal(5, 48)
    before = layer.weight.detach().clone()
    layer.prune_(0.2)
    assert layer.pattern.density == pytest.approx(0.8, abs=0.01) and torch.equal(layer.weight, before)
    want = nn.functional.linear(x, layer.weight * layer.pattern.to_dense(), layer.bias)
    assert relative(layer(x), want) < 0.02
    mask = torch.zeros(40, 48, dtype=torch.bool)
    mask[3, 5] = True
    layer.prune_(mask=mask)
    assert layer.pattern.vectors == 1 and layer.config.sparsity == pytest.approx(1 - 8 / (40 * 48))
    layer.prune_(mask=mc.random_pattern(40, 48, 0.5, 4))
    assert layer.config.vector_length == 4 and layer(x).shape == (5, 40)
    with pytest.raises(RuntimeError, match="prune_ needs the master weight"):
        layer.freeze().prune_(0.5)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("into_frozen", [False, True])
def test_a_state_dict_goes_round_and_brings_pattern_kind_and_options(frozen: bool, into_frozen: bool) -> None:
    layer, x = sparse(bits=4, act_bits=16, calibrate=[normal(9, 48)]), normal(5, 48)
    layer = layer.freeze() if frozen else layer
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = SparseQuantLinear(48, 40, config=SparseQuantConfig(0.95, 4, 8))
    other = other.freeze() if into_frozen else other
    other(x)
    result = other.load_state_dict(torch.load(file))
    assert not result.missing_keys and not result.unexpected_keys
    assert other.frozen is frozen and other.config == layer.config and other.pattern.equals(layer.pattern)
    assert torch.equal(other.act_scale, layer.act_scale) and torch.equal(other(x), layer(x))


def test_the_state_of_a_linear_layer_loads_and_the_pattern_stays() -> None:
    layer = sparse()
    pattern, dense = layer.pattern, nn.Linear(48, 40)
    result = layer.load_state_dict(dense.state_dict(), strict=False)
    assert "row_offsets" in result.missing_keys and layer.pattern.equals(pattern)
    x = normal(5, 48)
    want = nn.functional.linear(x, dense.weight * pattern.to_dense(), dense.bias)
    assert relative(layer(x), want) < 0.02


def test_a_damaged_state_is_refused() -> None:
    layer, other = sparse(), SparseQuantLinear(48, 40)
    state = layer.state_dict()
    state["col_indices"][3] = 48
    with pytest.raises(RuntimeError, match=r"pattern: col_indices must lie in \[0, 48\), got 48 at vector 3"):
        other.load_state_dict(state)
    frozen = sparse().freeze().state_dict()
    frozen["values"] = frozen["values"][1:].clone()
    with pytest.raises(RuntimeError, match="pattern: values must have shape"):
        SparseQuantLinear(48, 40).load_state_dict(frozen)
    state = sparse().state_dict()
    state["_extra_state"] = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="pattern: stored must hold the options of a SparseQuantLinear"):
        SparseQuantLinear(48, 40).load_state_dict(state)


@pytest.mark.parametrize("frozen", [False, True])
def test_safetensors_hold_a_model(tmp_path: Path, frozen: bool) -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(SparseQuantLinear(48, 40, config=SparseQuantConfig(0.8)), nn.ReLU(), nn.Linear(40, 3))

    first, x = model(), normal(5, 48)
    if frozen:
        first[0].freeze()
    save_model(first, str(tmp_path / "model.safetensors"))
    second = model()
    load_model(second, str(tmp_path / "model.safetensors"))
    assert torch.equal(second(x), first(x)) and second[0].frozen is frozen
    if frozen:
        assert (tmp_path / "model.safetensors").stat().st_size < first[0].compressed_bytes + 3 * 41 * 4 + 1500


@pytest.mark.parametrize("frozen", [False, True])
def test_copies_stand_alone(frozen: bool) -> None:
    layer, x = sparse(), normal(5, 48)
    layer = layer.freeze() if frozen else layer
    before = layer(x)
    other = copy.deepcopy(layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    third = torch.load(file, weights_only=False)
    with torch.no_grad():
        (layer.scale if frozen else layer.weight).zero_()
        layer.bias.zero_()
    layer._forget()
    assert torch.equal(other(x), before) and torch.equal(third(x), before) and not layer(x).any()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_change_of_dtype_keeps_the_scales(frozen: bool) -> None:
    layer, x = sparse(calibrate=[normal(9, 48)]).eval(), normal(5, 48)
    want = layer(x)
    layer = layer.freeze() if frozen else layer
    for dtype, bound in ((torch.float64, 1e-6), (torch.bfloat16, 0.02), (torch.float16, 0.02)):
        moved = copy.deepcopy(layer).to(dtype)
        y = moved(x.to(dtype))
        assert y.dtype == dtype and relative(y.float(), want) < bound
        assert moved.act_scale.dtype == torch.float32
        assert moved.scale is None or torch.equal(moved.scale, layer.scale)


def test_a_frozen_layer_passes_gradients_to_its_input_alone() -> None:
    layer = sparse().freeze()
    x, g = normal(5, 48).requires_grad_(), normal(5, 40, seed=1)
    assert not any(each.requires_grad for each in layer.parameters())
    (got,) = torch.autograd.grad(layer(x), x, g)
    assert relative(got, g @ layer.matrix().to_dense()) < 1e-4


def test_compressed_bytes_are_those_of_the_frozen_layer() -> None:
    for bits in (4, 8, 16):
        layer = sparse(bits=bits)
        expected = layer.compressed_bytes
        layer.freeze()
        state = [t for name, t in layer.state_dict().items() if name != "_extra_state"]
        assert expected == layer.compressed_bytes == sum(t.nbytes for t in state)
    assert expected < plain().weight.nbytes


@pytest.fixture
def compiled() -> Iterator[Callable[[nn.Module], Callable[..., Tensor]]]:
    """Makes one graph of a model.  Layers share the code of one forward, and torch bounds the graphs of one code."""
    yield lambda model: torch.compile(model, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [{}, {"bits": 4, "act_bits": 4}, {"calibrate": [normal(9, 48)]}], ids=list)
@torch.no_grad()
def test_a_compiled_layer_is_one_graph(options: dict[str, Any], compiled: Callable[..., Any]) -> None:
    layer = sparse(**options).eval()
    run = compiled(layer)
    for shape in ((5, 48), (2, 3, 48)):
        x = normal(*shape)
        assert torch.equal(run(x), layer(x))
    model = nn.Sequential(layer, nn.ReLU(), SparseQuantLinear.from_linear(plain(40, 24), 0.5)).eval()
    assert torch.allclose(compiled(model)(normal(6, 48)), model(normal(6, 48)), atol=1e-6)


@torch.no_grad()
def test_a_compiled_layer_is_one_operator_with_contiguous_rows() -> None:
    layer, names = sparse().eval(), []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        names[:] = [str(node.target) for node in graph.graph.nodes if "magicube" in str(node.target)]
        return graph.forward

    run = torch.compile(layer, backend=backend, fullgraph=True)
    for x in (normal(5, 48), normal(48, 5).mT, normal(2, 3, 48).double(), normal(0, 48)):
        torch._dynamo.reset()
        y = run(x)
        assert torch.equal(y, layer(x)) and y.is_contiguous()
        assert names == ["magicube.sparse_linear_rows"]
    torch._dynamo.reset()


@torch.no_grad()
def test_compiled_layers_of_one_size_do_not_share_a_graph_and_follow_training(compiled: Callable[..., Any]) -> None:
    first, second = sparse().eval(), SparseQuantLinear.from_linear(plain(), mask=sparse().pattern).eval()
    x = normal(5, 48)
    run, other = compiled(first), compiled(second)
    assert torch.equal(run(x), first(x))
    second.weight = nn.Parameter(normal(40, 48, seed=3))
    second.eval()
    assert torch.equal(other(x), second(x)) and relative(second(x), first(x)) > 0.5
    first.train()
    first.weight.mul_(-2)
    first.eval()
    assert torch.equal(run(x), first(x))
    first.prune_(0.2)
    first.eval()
    assert torch.equal(run(x), first(x))


def test_a_compiled_model_trains_as_a_plain_one() -> None:
    layer = sparse()
    run = torch.compile(layer, backend="aot_eager")
    x, g = normal(5, 48).requires_grad_(), normal(5, 40, seed=1)
    for _ in range(2):
        inputs = (x, layer.weight, layer.bias)
        pairs = zip(torch.autograd.grad(run(x), inputs, g), torch.autograd.grad(layer(x), inputs, g), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        with torch.no_grad():
            layer.weight.mul_(-2)  # integers of the former weight would be off by far more


def test_a_layer_without_integers_is_not_compiled_silently(compiled: Callable[..., Any]) -> None:
    layer = copy.deepcopy(sparse().eval())
    with torch.no_grad(), pytest.raises(Exception, match=r"Observed exception|needs its integers"):
        compiled(layer)(normal(5, 48))
    with torch.no_grad():
        layer(normal(5, 48))
        assert torch.equal(compiled(layer)(normal(5, 48)), layer(normal(5, 48)))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"linear must be a torch\.nn\.Linear, got Conv2d"):
        SparseQuantLinear.from_linear(nn.Conv2d(1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sparsity must lie in \[0, 1\], got 1\.5"):
        sparse(sparsity=1.5)
    with pytest.raises(ValueError, match=r"vector_length must be one of .* got 3"):
        sparse(vector_length=3)
    for name in ("bits", "act_bits", "grad_bits"):
        with pytest.raises(ValueError, match=f"{name} must be one of .* got 5"):
            sparse(**{name: 5})
    with pytest.raises(ValueError, match=r"x must have 48 features, got shape \(2, 40\)"):
        sparse()(torch.ones(2, 40))
    with pytest.raises(TypeError, match=r"x must be a float tensor, got torch\.int64"):
        sparse()(torch.ones(2, 48).long())
    with pytest.raises(ValueError, match=r"mask must have shape \(40, 48\) like the weight, got \(48, 40\)"):
        sparse(mask=torch.ones(48, 40, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask must be torch\.bool"):
        sparse(mask=torch.ones(40, 48))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="linear must have a parameter as its weight, got a Tensor"):
        SparseQuantLinear.from_linear(normed)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("far", [10**6, -5, 2**31 - 1])
def test_a_state_that_is_refused_leaves_the_layer_as_it_was(frozen: bool, far: int) -> None:
    torch.manual_seed(0)
    source, layer = (SparseQuantLinear.from_linear(nn.Linear(64, 32), sparsity=0.5) for _ in range(2))
    state = {name: tensor.clone() for name, tensor in (source.freeze() if frozen else source).state_dict().items()}
    state["col_indices"][3] = far
    x = torch.randn(3, 64)
    before, kept = layer(x), {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match=rf"pattern: col_indices must lie in \[0, 64\), got {far} at vector 3"):
        layer.load_state_dict(state)
    after = layer.state_dict()
    assert after.keys() == kept.keys() and all(torch.equal(after[name], kept[name]) for name in kept)
    assert torch.equal(layer(x), before)
