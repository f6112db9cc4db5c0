"""Checkpoints of compressed-tensors: packed as that package packs, read and written without loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.hooks.compressed_tensors import load_compressed, pack_int32, save_compressed, unpack_int32
from magicube_cutlass.nn import QuantConfig, QuantLinear


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.head = nn.Embedding(20, 64), nn.Linear(64, 96), nn.Linear(96, 10, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.up(self.table(ids)).relu())


IDS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 8, 37])
def test_integers_are_packed_as_the_package_does(bits: int, columns: int) -> None:
    low = -(2 ** (bits - 1))
    ints = torch.randint(low, -low, (5, columns), generator=torch.Generator().manual_seed(columns), dtype=torch.int8)
    packed = pack_int32(ints, bits)
    assert packed.dtype == torch.int32 and torch.equal(unpack_int32(packed, bits, columns), ints)
    helpers = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized.helpers", reason="needs compressed-tensors"
    )
    assert torch.equal(helpers.unpack_from_int32(packed, bits, torch.Size(ints.shape)), ints)
    if columns % 8 == 0:
        assert torch.equal(helpers.pack_to_int32(ints, bits), packed)


@pytest.mark.parametrize(
    "config",
    [QuantConfig(), QuantConfig("int8", 32), QuantConfig("int4", 32), QuantConfig("int4", act="none")],
    ids=str,
)
@pytest.mark.parametrize("meta", [False, True])
def test_a_checkpoint_goes_round(config: QuantConfig, meta: bool, tmp_path: Path) -> None:
    model = Net().eval()
    mc.convert(model, {"head": None, "*": config}, freeze=True)
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    written = save_compressed(model, tmp_path)
    assert written["ignore"] == ["head"] and json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 64
    with torch.device("meta" if meta else "cpu"):
        other = Net().eval()
    report = load_compressed(other, tmp_path)
    assert report.converted == ("up",) and isinstance(other.up, QuantLinear)
    with torch.no_grad():
        assert torch.equal(other(IDS), model(IDS))
    assert (other.up.config.weight, other.up.config.act) == (config.weight, config.act)


def test_zero_points_become_minima(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    ints = torch.randint(-8, 8, (96, 64), generator=generator, dtype=torch.int8)
    zero = torch.randint(-8, 8, (96, 2), generator=generator, dtype=torch.int8)
    scale = torch.rand(96, 2, generator=generator).bfloat16()
    state: dict[str, Tensor] = {key: each for key, each in Net().state_dict().items() if key != "up.weight"}
    state |= {
        "up.weight_packed": pack_int32(ints, 4), "up.weight_shape": torch.tensor([96, 64]), "up.weight_scale": scale,
        "up.weight_zero_point": pack_int32(zero.t().contiguous(), 4).t().contiguous(),
    }  # fmt: skip
    save_file(state, tmp_path / "model.safetensors")
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    model = Net()
    load_compressed(model, tmp_path, act="int8")
    assert isinstance(model.up, QuantLinear) and model.up.config.act == "int8"
    want = (ints.float() - zero.repeat_interleave(32, 1)) * scale.float().repeat_interleave(32, 1)
    assert torch.allclose(model.up.dequantize(), want, atol=1e-5)


def test_what_the_formats_cannot_hold_is_refused(tmp_path: Path) -> None:
    for plan, text in (
        ({"up": QuantConfig(), "head": QuantConfig("int4")}, "frozen QuantLinear layers of one config, got 2"),
        (QuantConfig("nvfp4"), "layers must be symmetric integers"),
        (QuantConfig("int4", 32, symmetric=False), "layers must be symmetric integers"),
    ):
        model = Net()
        mc.convert(model, plan, freeze=True)
        with pytest.raises(ValueError, match=text):
            save_compressed(model, tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(ValueError, match=r"compressed-tensors with one group, got 'gptq' with 0"):
        load_compressed(Net(), tmp_path)


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    """By its own reader of this format, which dequantizes."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    mc.convert(model, {"lm_head": None, "*": QuantConfig("int4", group_size=32, act="none")}, freeze=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    save_compressed(model, tmp_path)
    assert "model.layers.0.mlp.up_proj.weight_packed" in load_file(tmp_path / "model.safetensors")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        want, got = model(ids).logits, other(ids).logits
    assert float((got - want).norm() / want.norm()) < 1e-3
