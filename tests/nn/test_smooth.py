"""Smooth scales: exact in effect, applied by the engine, chosen by the output of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.nn import QuantConfig, QuantLinear
from magicube_cutlass.nn.dense.smooth import ALPHAS


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def plain() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 40, bias=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_smoothed_layer_is_that_of_its_smoothed_input(dtype: torch.dtype) -> None:
    x = normal(7, 96).to(dtype)
    x[:, 3] *= 100
    layer = QuantLinear.from_linear(plain().to(dtype)).eval()
    mc.nn.smooth(layer, [x], progress=False)
    assert layer.smooth is not None and layer.weight is not None
    y, inputs = layer(x), (x * layer.smooth.reciprocal()).to(dtype)
    other = QuantLinear.from_linear(nn.Linear(96, layer.out_features, bias=False))
    other.weight = nn.Parameter(layer.weight.detach().float() * layer.smooth)
    assert torch.equal(y, other.eval()(inputs))
    assert torch.equal(layer.freeze()(x), y)


def test_layers_that_read_the_same_rows_have_one_scale_and_one_product() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.q, self.k, self.v = plain(), *(nn.Linear(40, n) for n in (16, 32, 48))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return torch.cat([self.q(y), self.k(y), self.v(y)], -1)

    model, x = Heads().eval(), normal(50, 96)
    with torch.no_grad():
        model.k.weight[:, 7] *= 50
        want = model(x)
        mc.convert(model, QuantConfig("int8"), data=[x], smooth=0.5, freeze=True, progress=False)
        top = plain()(x).abs().amax(0)
    weights = torch.stack([each.weight.abs().amax(0) for each in (Heads().q, Heads().k, Heads().v)])  # (layers, in)
    assert model.q.smooth.shape == (40,) and torch.equal(model.q.smooth, model.k.smooth)
    assert torch.equal(model.q.smooth, model.v.smooth) and model.first.smooth.shape == (96,)
    assert weights.shape == (3, 40) and bool((model.q.smooth[7] < 0.3 * (top / weights.amax(0)).sqrt()[7]).all())
    with torch.no_grad():
        assert float((model(x) - want).norm() / want.norm()) < 1e-2
        assert mc.nn.fuse_projections(model, x) == (("q", "k", "v"),)
        assert float((model(x) - want).norm() / want.norm()) < 1e-2


class GemmaRMSNorm(nn.Module):
    """Multiplies by 1 + w: its weight times a factor is another norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(96) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (96,)) * (1 + self.weight)


class Block(nn.Module):
    """Norms read by quantized layers alone, by something else too, by layers of other scales, and of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.shared, self.two = nn.RMSNorm(96), nn.LayerNorm(96), nn.LayerNorm(96)
        self.gemma, self.act = GemmaRMSNorm(), nn.SiLU()
        for name in ("q", "k", "of_shared", "first", "second", "of_gemma"):
            setattr(self, name, nn.Linear(96, 96))
        for norm in (self.alone, self.shared, self.two):
            nn.init.normal_(norm.weight, 1.0, 0.2)
        nn.init.normal_(self.two.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.alone(x)
        x = x + self.q(y) * self.k(y)
        y = self.shared(x)
        x = y + self.of_shared(y)
        y = self.two(x)
        x = x + self.first(y) + self.act(self.second(y))
        return x + self.of_gemma(self.gemma(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_norms_that_quantized_layers_alone_read_take_their_smooth_scale(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Block().eval().to(dtype), normal(50, 96).to(dtype)
    x[:, 3] *= 30
    want = model(x).float()
    mc.convert(model, QuantConfig("int8"), data=[x], smooth=0.5, freeze=True, calibrate=[x], progress=False)
    other = copy.deepcopy(model)
    other.second.smooth = other.second.smooth * 2
    before = model(x).float()
    norms = {n: each.clone() for n, each in model.state_dict().items() if n.startswith(("shared", "gemma"))}
    assert mc.nn.fold_smooth(model, x) == {"alone": ("q", "k"), "two": ("first", "second")}
    assert model.q.smooth is None and model.second.smooth is None and model.of_shared.smooth is not None
    assert all(torch.equal(model.state_dict()[n], each) for n, each in norms.items())
    got = model(x).float()
    assert float((got - before).norm() / want.norm()) < (1e-3 if dtype == torch.float32 else 2e-2)
    assert float((got - want).norm() / want.norm()) < 2e-2
    assert mc.nn.fold_smooth(model, x) == {} and torch.equal(model(x).float(), got)
    again = Block().eval().to(dtype)
    mc.convert(again, QuantConfig("int8"), freeze=True, progress=False)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x).float(), got)
    assert mc.nn.fold_smooth(other, x) == {"alone": ("q", "k")}
    tied = Block().eval().to(dtype)
    mc.convert(tied, QuantConfig("int8"), data=[x], smooth=0.5, freeze=True, progress=False)
    tied.shared.weight = tied.alone.weight
    assert mc.nn.fold_smooth(tied, x) == {"two": ("first", "second")}
    with pytest.raises(ValueError, match="model must have QuantLinear layers, got none: see convert"):
        mc.nn.fold_smooth(Block(), x)
    unfrozen = Block().eval().to(dtype)
    mc.convert(unfrozen, QuantConfig("int8"), data=[x], smooth=0.5, progress=False)
    assert mc.nn.fold_smooth(unfrozen, x) == {}


@torch.no_grad()
def test_a_norm_that_the_model_returns_is_not_folded() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.q = nn.LayerNorm(96), nn.Linear(96, 40)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.norm(x)
            return y, self.q(y)

    model, x = Two().eval(), normal(50, 96)
    want = model(x)[0]
    mc.convert(model, QuantConfig("int8"), data=[x], smooth=0.5, freeze=True, progress=False)
    assert mc.nn.fold_smooth(model, x) == {} and torch.equal(model(x)[0], want)


def test_alpha_is_chosen_by_the_output() -> None:
    x = normal(50, 96)
    x[:, 3] *= 100
    model = nn.Sequential(plain(), nn.ReLU())
    want = model(x).detach()
    mc.convert(model, QuantConfig("int8"), progress=False)
    errors = {}
    for alpha in ALPHAS:
        if alpha is not None:
            mc.nn.smooth(model, [x], alpha=alpha, progress=False)
        errors[alpha] = float((model(x).detach() - want).square().sum())
    found = mc.nn.smooth(model, [x], alpha="auto", progress=False)
    assert float((model(x).detach() - want).square().sum()) == min(errors.values()) < 0.3 * errors[None] and list(
        found
    ) == ["0"]
    whole = torch.randint(-126, 127, (40, 96), generator=torch.Generator().manual_seed(1)).float()
    whole[:, 0] = 127.0
    model[0].weight.data = whole  # integers: without a scale nothing is rounded
    assert mc.nn.smooth(model, [whole], alpha="auto", progress=False) == {} and model[0].smooth is None
    with pytest.raises(ValueError, match=r"alpha must lie in \[0, 1\] or be 'auto', got 2"):
        mc.nn.smooth(model, [x], alpha=2)
