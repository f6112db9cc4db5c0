"""LoRA adapters of PEFT train beside quantized layers, whose integers stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import magicube_cutlass as mc
from magicube_cutlass.nn import QuantConfig, SparseQuantConfig

peft = pytest.importorskip("peft", reason="needs peft: the extra 'peft'")
hook = pytest.importorskip("magicube_cutlass.hooks.peft")


def quantized() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    mc.convert(model, {"0": QuantConfig("int4", group_size=32), "2": SparseQuantConfig(0.5)}, freeze=True)
    return model


def adapted(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(target_modules=["0", "2"], r=4, lora_alpha=8)
    return peft.get_peft_model(model, hook.with_quantized_layers(config))


def test_adapters_train_and_integers_stay(tmp_path: Path) -> None:
    base, x, target = quantized(), torch.randn(64, 32), torch.randn(64, 8)
    state = {name: each.clone() for name, each in base.state_dict().items()}
    with torch.no_grad():
        want = base(x)
    model = adapted(base)
    assert all("lora" in name for name, each in model.named_parameters() if each.requires_grad)
    with torch.no_grad():
        assert torch.equal(model(x), want)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.02)
    losses = []
    for _ in range(30):
        loss = (model(x) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    model.save_pretrained(tmp_path)
    after = model.eval()(x).detach()
    again = peft.PeftModel.from_pretrained(quantized(), tmp_path, config=model.peft_config["default"]).eval()
    assert torch.equal(again(x), after)
    with model.disable_adapter():
        assert torch.equal(model(x).detach(), want)
    with pytest.raises(NotImplementedError, match="adapters cannot be merged into integers"):
        model.merge_and_unload()
    kept = {name.replace("base_layer.", ""): each for name, each in base.state_dict().items()}
    assert all(torch.equal(kept[name], each) for name, each in state.items())
