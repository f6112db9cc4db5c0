"""Layers that read the same rows as one product: which ones, what it returns, and what changes of a layer do."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.nn import QuantConfig, QuantLinear, fuse_projections, to_dense
from magicube_cutlass.nn.dense.product import DenseProduct

FORMATS: list[dict[str, Any]] = [
    {"weight": "int8"},
    {"weight": "int4", "group_size": 32, "symmetric": False},
    {"weight": "int4", "group_size": 64, "act": "none"},
    {"weight": "e4m3"},
    {"weight": "e4m3_b128"},
    {"weight": "mxfp4"},
]


class Attention(nn.Module):
    """Queries, keys, values, a gated MLP; `spoils`: changes the rows between the projections."""

    def __init__(self, bias: bool = True, spoils: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(64, n, bias) for n in (128, 256, 72))
        self.o, self.gate, self.up = nn.Linear(72, 64, bias), nn.Linear(64, 128, bias), nn.Linear(64, 128, bias)
        self.down, self.act, self.spoils = nn.Linear(128, 64, bias), nn.SiLU(), spoils

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        weight = self.q(x).mean(-1, keepdim=True)
        weight = weight + self.k(x).mean(-1, keepdim=True)
        if self.spoils:
            x += 1
        x = x + self.o(weight * self.v(x))
        return x + self.down(self.act(self.gate(x)) * self.up(x))


GROUPS = (("q", "k", "v"), ("gate", "up"))


def made(seed: int = 0, bias: bool = True, spoils: bool = False, **options: Any) -> tuple[Attention, Tensor]:
    model = Attention(bias, spoils).eval()
    mc.convert(model, QuantConfig(**options), freeze=True, progress=False)
    return model, torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(seed))


def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Outputs of each product from now on."""
    seen: list[int] = []
    call = DenseProduct.__call__

    def counted(self: DenseProduct, *arguments: Any) -> Tensor:
        seen.append(self.shape[0])
        return call(self, *arguments)

    monkeypatch.setattr(DenseProduct, "__call__", counted)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_one_product_returns_the_numbers_of_each(
    options: dict[str, Any], bias: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, x = made(bias=bias, **options)
    want, state = model(x), copy.deepcopy(model.state_dict())
    assert fuse_projections(model, x) == GROUPS
    seen = products(monkeypatch)
    for given in (x, x.bfloat16(), x[:0], x[0, 0]):
        assert torch.equal(model(given), made(bias=bias, **options)[0](given))
    assert seen[:4] == [456, 64, 256, 64]
    with torch.inference_mode():
        assert torch.equal(model(x), want)
    after = model.state_dict()
    save_model(model, tmp_path / "model.safetensors")
    loaded = Attention(bias)
    mc.convert(loaded, QuantConfig(**options), freeze=True, progress=False)
    load_model(loaded, tmp_path / "model.safetensors")
    assert torch.equal(loaded.eval()(x), want)
    assert after.keys() == state.keys() and all(torch.equal(after[name], state[name]) for name in state)
    assert model.q._joint.held is None and model.q.explain().text.startswith("one product for 3 layers")


@torch.no_grad()
def test_a_layer_called_alone_or_with_other_rows_gets_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    other, (plain, _) = torch.randn(3, 64), made()
    fuse_projections(model, x)
    seen = products(monkeypatch)
    model.q(x)
    assert torch.equal(model.k(other), plain.k(other)) and torch.equal(model.v(x), plain.v(x))
    model.q(x)
    x += 1
    assert torch.equal(model.k(x), plain.k(x)) and len([n for n in seen if n == 456]) == 4


@torch.no_grad()
def test_rows_that_change_between_the_calls_are_not_shared() -> None:
    model, x = made(spoils=True)
    assert fuse_projections(model, x) == (("q", "k"), ("gate", "up"))


@torch.no_grad()
def test_layers_that_differ_or_serve_twice_stay_alone() -> None:
    model, x = made()
    model.k = QuantLinear(64, 256, weight="int4").eval().freeze()
    model.up = QuantLinear(64, 128, bias=False).eval().freeze()
    assert fuse_projections(model, x) == ()
    model, x = made()
    model.gate = QuantLinear.from_quantized(model.gate.stored_weight(), model.gate.bias, QuantConfig(activation="silu"))
    model.v = model.k
    model.o = QuantLinear(256, 64).eval().freeze()
    assert fuse_projections(model, x) == ()
    model, x = made(weight="e4m3_b128")
    model.q, model.v = model.v, model.q  # 72 rows would end within a tile
    model.o = QuantLinear(128, 64).eval().freeze()
    assert fuse_projections(model, x) == (("gate", "up"),)
    with pytest.raises(ValueError, match="model must have frozen QuantLinear layers, got none"):
        fuse_projections(Attention(), x)


@torch.no_grad()
def test_nvfp4_is_joined_if_its_tensor_scales_are_equal() -> None:
    model, x = made(weight="nvfp4")
    assert fuse_projections(model, x) == ()
    model.up.tensor_scale = model.gate.tensor_scale.clone()
    assert fuse_projections(model, x) == GROUPS[1:]


@torch.no_grad()
def test_moves_states_and_scales_of_a_layer_join_again_or_part(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    fuse_projections(model, x)
    other = Attention()
    for each in other.parameters():
        each.normal_()
    mc.convert(other, QuantConfig(), freeze=True, progress=False)
    seen = products(monkeypatch)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(x), other.eval()(x)) and 456 in seen
    seen.clear()
    mc.nn.calibrate(model, [x], progress=False)
    mc.nn.calibrate(other, [x], progress=False)
    seen.clear()
    assert torch.equal(model(x), other(x)) and 456 in seen
    model.v.act_scale, other.v.act_scale = (each.v.act_scale * 2 for each in (model, other))
    assert torch.equal(model(x), other(x)) and model.q._joint is None  # seen at the call of v
    assert model.gate._joint is not None
    model.double()
    assert torch.equal(model(x.double()), other.double()(x.double()))
    model.gate.load_state_dict(QuantLinear(64, 128).double().state_dict())
    assert not model.gate.frozen and model(x.double()).shape == x.shape and model.up._joint is None


@torch.no_grad()
def test_copies_and_pickles_are_joined_among_themselves() -> None:
    model, x = made()
    fuse_projections(model, x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for each in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert each.q._joint.layers == (each.q, each.k, each.v) and each.q._joint is not model.q._joint
        assert torch.equal(each(x), model(x))
        assert each.q.qweight.untyped_storage().data_ptr() == each.k.qweight.untyped_storage().data_ptr()


def test_gradients_reach_the_input() -> None:
    model, x = made()
    plain, _ = made()
    fuse_projections(model, x)
    given, same = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(given).square().sum().backward()
    plain(same).square().sum().backward()
    assert torch.allclose(given.grad, same.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.q(given)
    assert model.k(given).requires_grad


@torch.no_grad()
def test_float_layers_and_activations_come_back() -> None:
    model, x = made()
    fuse_projections(model, x)
    assert mc.nn.fuse_activations(model, x) == {"gate": "silu"}
    plain, _ = made()
    assert torch.allclose(model(x), plain(x), rtol=1e-5, atol=1e-6)
    assert len(to_dense(model)) == 7 and torch.allclose(model(x), plain(x), rtol=0.1, atol=0.1)


class Blocks(nn.Module):
    """Two blocks, each compiled."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((first, second))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


@pytest.mark.parametrize("options", FORMATS[:3], ids=str)
def test_graphs_hold_one_product_and_blocks_share_them(options: dict[str, Any]) -> None:
    model = Blocks(made(**options)[0], copy.deepcopy(made(**options)[0]))
    x = made()[1]
    want = model(x)
    assert len(fuse_projections(model, x)) == 4
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    try:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        with torch.no_grad():
            assert torch.equal(model(x), want) and torch.equal(model(x), want)
        text = str(graphs[0].graph)
        assert len(graphs) == 1 and text.count("target=torch.ops.magicube.quant_linear") == 4
        model.blocks[0].to(torch.float64)
        with torch.no_grad(), pytest.raises(Exception, match="other tensors than were joined"):
            model.blocks[0](x)
        model.blocks[0].eval()
        with torch.no_grad():
            assert torch.allclose(model(x), want)
            exported = torch.export.export(model, (x,))
            assert torch.allclose(exported.module()(x), want)
        assert str(exported.graph).count("target=torch.ops.magicube.quant_linear") == 8
    finally:
        torch._dynamo.reset()
