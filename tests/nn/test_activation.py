"""Activations of QuantLinear: layers of every kind, and modules that layers take over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import magicube_cutlass as mc
from cute_kernels.cpu import extension
from cute_kernels.cpu.linear import FUNCTIONS
from cute_kernels.gemm.epilogue import activate
from magicube_cutlass.nn import QuantConfig, QuantLinear, fuse_activations, to_dense
from magicube_cutlass.nn.dense.activation import MODULES

NAMES = [each for each in FUNCTIONS if each is not None]
FORMATS: list[dict[str, Any]] = [
    {"weight": "int8"},
    {"weight": "int4", "group_size": 32, "symmetric": False},
    {"weight": "int8", "act": "none"},
    {"weight": "mxfp4"},
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(inputs: int = 96, outputs: int = 70) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs)
    with torch.no_grad():
        linear.weight *= 4  # outputs from -8 to 8
    return linear


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_a_layer_activates_its_product_and_learns_through_it(options: dict[str, Any], name: Any) -> None:
    dense, x = plain(), normal(2, 5, 96)
    linear = QuantLinear.from_linear(dense, **options)
    layer = QuantLinear.from_linear(copy.deepcopy(dense), **options, activation=name)
    g = normal(2, 5, 70, seed=1)
    given, same = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = layer(given), activate(linear(same), name)
    assert torch.equal(y, want)
    got = torch.autograd.grad(y, (given, layer.weight, layer.bias), g)
    for mine, true in zip(got, torch.autograd.grad(want, (same, linear.weight, linear.bias), g), strict=True):
        assert torch.equal(mine, true)
    layer.eval()
    with torch.no_grad():
        assert torch.allclose(layer(x), want, rtol=1e-6, atol=1e-6)
        assert torch.equal(layer.freeze()(x), layer(x)) and layer(x[:0]).shape == (0, 5, 70)
        assert layer(x.bfloat16()).dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("options", FORMATS[:2], ids=str)
def test_activations_survive_states_files_copies_and_are_named(options: dict[str, Any], tmp_path: Path) -> None:
    layer, x = QuantLinear.from_linear(plain(), **options, activation="gelu").eval().freeze(), normal(5, 96)
    want, other = layer(x), QuantLinear(96, 70)
    other.load_state_dict(layer.state_dict())
    save_model(layer, tmp_path / "layer.safetensors")
    third = QuantLinear(96, 70)
    load_model(third, tmp_path / "layer.safetensors")
    again = QuantLinear.from_quantized(layer.product().weight, layer.bias, layer.config)
    for each in (other, third, copy.deepcopy(layer), again):
        assert torch.equal(each(x), want) and each.config == layer.config
    other.load_state_dict(QuantLinear(96, 70).state_dict())
    assert other.config.activation is None
    found = layer.explain()
    assert found.facts["activation"] == "gelu" and "gelu" in found.text and "activation=gelu" in repr(layer)
    assert "in its epilogue" in found.text or not extension.available()
    assert "gelu by torch" in QuantLinear(96, 70, weight="mxfp4", activation="gelu").explain().text


def test_states_of_layers_before_there_were_activations_load() -> None:
    layer = QuantLinear(96, 70).freeze()
    state = layer.state_dict()
    text = bytes(state["_extra_state"].tolist()).replace(b', "activation": null', b"")
    assert b"activation" not in text
    state["_extra_state"] = torch.tensor(list(text), dtype=torch.uint8)
    other = QuantLinear(96, 70, weight="int4")
    other.load_state_dict(state)
    assert other.config == layer.config


@pytest.mark.parametrize("name", NAMES)
def test_graphs_activate(name: Any) -> None:
    layer, x = QuantLinear.from_linear(plain(), activation=name), normal(5, 96)
    try:
        y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(y, layer(x))
        layer.eval().freeze()
        with torch.no_grad():
            assert torch.allclose(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), y, 1e-6, 1e-6)
        exported = torch.export.export(layer, (x,)).module()
        assert torch.allclose(exported(x), y, 1e-6, 1e-6)
    finally:
        torch._dynamo.reset()


def test_other_activations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"activation must be one of \(None, 'relu', .*\), got 'tanh'"):
        QuantConfig(activation="tanh")


@pytest.mark.parametrize("name", NAMES)
def test_smooth_scales_count_the_activation(name: Any) -> None:
    alone = nn.Sequential(QuantLinear.from_linear(plain()), MODULES[name](), QuantLinear.from_linear(plain(70, 8)))
    fused = nn.Sequential(QuantLinear.from_linear(plain(), activation=name), QuantLinear.from_linear(plain(70, 8)))
    batches = [normal(16, 96) * torch.linspace(0.1, 9, 96)]
    mine = mc.nn.smooth(fused, batches, alpha="auto", progress=False)
    want = mc.nn.smooth(alone, batches, alpha="auto", progress=False)
    assert mine.keys() == {"0", "1"} and want.keys() == {"0", "2"}
    assert torch.equal(mine["0"], want["0"]) and torch.allclose(mine["1"], want["2"], rtol=1e-4)


class Parts(nn.Module):
    """What must be fused, and what must not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Sequential(nn.Linear(32, 64)), nn.GELU("tanh")
        self.twice, self.shared = nn.Linear(64, 32), nn.ReLU()  # one module for two layers
        self.also = nn.Linear(32, 32)
        self.read, self.gate = nn.Linear(32, 32), nn.SiLU()  # its input is read again
        self.real, self.after_real = nn.Linear(32, 32), nn.ReLU()
        self.dropped, self.dropout, self.after_dropout = nn.Linear(32, 32), nn.Dropout(0.1), nn.GELU()
        self.mixed, self.both = nn.Linear(32, 32), nn.ReLU(inplace=True)  # also called with another input
        self.clamped, self.after_clamp = nn.Linear(32, 32), nn.ReLU()
        self.conv, self.after_conv = nn.Conv1d(4, 8, 3), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.also(self.shared(self.twice(self.act(self.up(x))))))
        y = self.read(x)
        x = x + y + self.gate(y)
        x = self.after_real(self.real(x)) + self.after_dropout(self.dropout(self.dropped(x)))
        x = self.both(self.mixed(x)) + self.both(x + 1)
        x = self.after_clamp(self.clamped(x).clamp(-99, 99))
        return self.after_conv(self.conv(x.reshape(-1, 4, 8)))


FUSED = {"up.0": "gelu_tanh", "twice": "relu", "also": "relu", "conv": "silu"}
PLAN: dict[str, Any] = {"real": None, "*": QuantConfig()}


def parts() -> nn.Module:
    torch.manual_seed(0)
    model = Parts()
    mc.convert(model, PLAN, kinds=("linear", "conv"), freeze=True, progress=False)
    return model


@torch.no_grad()
def test_modules_become_part_of_layers_where_nothing_changes() -> None:
    model, x = parts(), normal(4, 32)
    want = model.eval()(x)
    model.train()
    assert fuse_activations(model, x) == FUSED and model.training
    model.eval()
    for name in ("act", "shared", "after_conv"):
        assert type(model.get_submodule(name)) is nn.Identity
    for name in ("gate", "after_real", "after_dropout", "both", "after_clamp"):
        assert type(model.get_submodule(name)) is not nn.Identity
    assert float((model(x) - want).norm() / want.norm()) < 1e-2  # the next layer may round to a neighbour
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert fuse_activations(model, x) == {}


@pytest.mark.parametrize("copies", [False, True])
def test_fused_modules_are_put_back(copies: bool) -> None:
    model, x = parts().eval(), normal(4, 32)
    fuse_activations(model, x)
    model = copy.deepcopy(model) if copies else model
    to_dense(model)
    fresh = Parts().eval()
    assert repr(model) == repr(fresh) and model.state_dict().keys() == fresh.state_dict().keys()
    other = parts().eval()
    to_dense(other)
    assert torch.equal(model(x), other(x))


def test_activations_of_a_config_follow_the_dense_layer() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 8), nn.Sequential(nn.Conv1d(4, 4, 3))), normal(2, 4, 32)
    mc.convert(model, QuantConfig(activation="silu"), kinds=("linear", "conv"), progress=False)
    want = model(x).detach()
    to_dense(model)
    assert [type(each).__name__ for each in model[0].children()] == ["Linear", "SiLU"]
    assert float((model(x).detach() - want).norm() / want.norm()) < 0.02


def test_states_go_between_fused_and_other_models() -> None:
    plain_model, fused, x = parts().eval(), parts().eval(), normal(4, 32)
    want = plain_model(x)
    fuse_activations(fused, x)
    y = fused(x)
    assert plain_model.state_dict().keys() == fused.state_dict().keys()
    plain_model.load_state_dict(fused.state_dict())
    assert torch.equal(plain_model(x), want)
    fused.load_state_dict(plain_model.state_dict())
    assert torch.equal(fused(x), y)


def bert() -> tuple[Any, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers", reason="needs transformers: the extra 'transformers'")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    return transformers.BertModel(config).eval(), {"input_ids": torch.arange(12).view(2, 6)}


def test_a_bert_is_fused_saved_and_loaded(tmp_path: Path) -> None:
    model, batch = bert()
    hook = pytest.importorskip("magicube_cutlass.hooks.transformers")
    mc.convert(model, {"encoder.*": QuantConfig(), "*": None}, freeze=True, progress=False)
    with torch.no_grad():
        want = model(**batch).last_hidden_state
        assert set(fuse_activations(model, batch)) == {f"encoder.layer.{i}.intermediate.dense" for i in (0, 1)}
        got = model(**batch).last_hidden_state
        assert float((got - want).norm() / want.norm()) < 1e-2
        hook.adopt(model).save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        stored = loaded.config.quantization_config.layers["encoder.layer.0.intermediate.dense"]
        assert stored["config"]["activation"] is None
        assert torch.equal(loaded(**batch).last_hidden_state, want)
        fuse_activations(loaded, batch)
        assert torch.equal(loaded(**batch).last_hidden_state, got)


def _adapters(model: nn.Sequential) -> None:
    peft = pytest.importorskip("peft", reason="needs peft: the extra 'peft'")
    hook = pytest.importorskip("magicube_cutlass.hooks.peft")
    peft.get_peft_model(model, hook.with_quantized_layers(peft.LoraConfig(target_modules=["0"], r=4)))


def _compressed(model: nn.Sequential) -> None:
    hook = pytest.importorskip("magicube_cutlass.hooks.compressed_tensors")
    hook.save_compressed(model, "unused")


def _parallel(model: nn.Sequential) -> None:
    from magicube_cutlass.distributed.parallel import QuantColwise

    QuantColwise()._layer(model[0], None)  # type: ignore[arg-type]


@pytest.mark.parametrize("use", [_adapters, _compressed, _parallel])
def test_what_cannot_keep_an_activation_refuses_it(use: Callable[[nn.Sequential], None]) -> None:
    model = nn.Sequential(nn.Linear(32, 16))
    mc.convert(model, QuantConfig(activation="relu"), freeze=True, progress=False)
    with pytest.raises(ValueError, match="activation"):
        use(model)
