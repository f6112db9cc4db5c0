"""Checkpoints of e4m3 weights: block-scaled ones in the layout of DeepSeek-V3, and those of compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from magicube_cutlass.hooks.compressed_tensors import load_compressed
from magicube_cutlass.hooks.fp8 import load_fp8
from magicube_cutlass.nn import QuantConfig, QuantLinear

IDS = torch.arange(12).view(2, 6)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


class Net(nn.Module):
    """Layers whose sizes are no multiples of 128."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up = nn.Embedding(20, 130), nn.Linear(130, 300)
        self.down, self.head = nn.Linear(300, 130, bias=False), nn.Linear(130, 10, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(x + self.down(self.up(x).relu()))


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> None:
    """A folder of safetensors files with a `quantization_config`."""
    (folder / "config.json").write_text(json.dumps({"hidden_size": 130, "quantization_config": config}))
    for i in range(shards):
        part = {key: each.contiguous() for key, each in list(tensors.items())[i::shards]}
        save_file(part, folder / f"model-{i}.safetensors")


def blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of 128 x 128, block by block, as a tool of that format makes them."""
    scale = torch.zeros(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    return (
        codes.float()
        * scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
    )


def checkpoint(name: str = "weight_scale_inv", dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Net]:
    """Tensors of a checkpoint with two quantized layers, and a float model with their values."""
    model = Net().eval()
    tensors = dict(model.state_dict())
    for layer in ("up", "down"):
        weight = getattr(model, layer).weight
        codes, scale = blocks(weight.detach())
        tensors[f"{layer}.weight"], tensors[f"{layer}.{name}"] = codes, scale.to(dtype)
        weight.data = dequantized(codes, scale.to(dtype))
    return tensors, model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("meta", "shards"), [(False, 1), (True, 3)])
def test_a_block_scaled_checkpoint_is_read_as_it_is(
    meta: bool, shards: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors, want = checkpoint(dtype=dtype)
    write(tmp_path, FP8, tensors, shards)
    with torch.device("meta" if meta else "cpu"):
        model = Net().eval()
    report = load_fp8(model, tmp_path)
    assert report.converted == ("up", "down") and type(model.head) is nn.Linear
    for layer, one in ((model.up, "up"), (model.down, "down")):
        assert isinstance(layer, QuantLinear) and layer.config == QuantConfig("e4m3_b128") and layer.frozen
        assert layer.qweight is not None and torch.equal(layer.qweight, tensors[f"{one}.weight"].view(torch.uint8))
        assert torch.equal(layer.dequantize(), getattr(want, one).weight)
    with torch.no_grad():
        found = model(IDS)
        assert 1e-4 < float((found - want(IDS)).norm() / want(IDS).norm()) < 0.05, "rows are quantized"
        exact = Net().eval()
        load_fp8(exact, tmp_path, act="none")
        assert torch.allclose(exact(IDS), want(IDS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"quant_method": "gptq"}, "got 'gptq', [128, 128] and 'dynamic'"),
        ({"weight_block_size": [64, 128]}, "got 'fp8', [64, 128] and 'dynamic'"),
        ({"weight_block_size": None}, "got 'fp8', None and 'dynamic'"),
        ({"activation_scheme": "static"}, "got 'fp8', [128, 128] and 'static'"),
    ],
)
def test_other_formats_are_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    write(tmp_path, FP8 | changes, checkpoint()[0])
    with pytest.raises(ValueError, match=r"quantization_config of config\.json must have quant_method 'fp8'") as found:
        load_fp8(Net(), tmp_path)
    assert match in str(found.value)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = checkpoint()[0]
    for change, match in (
        ({"up.weight_scale_inv": torch.ones(2, 3)}, r"up\.weight_scale_inv does not fit: scale must have shape \(3, 2\)"),
        ({"up.weight": torch.zeros(300, 130)}, r"up\.weight must be torch\.float8_e4m3fn, got torch\.float32"),
        ({"up.weight": torch.zeros(280, 130).to(torch.float8_e4m3fn)}, r"up must be a linear layer of \(280, 130\)"),
        ({"table.weight_scale_inv": torch.ones(1, 2), "table.weight": torch.zeros(20, 130).to(torch.float8_e4m3fn)},
         r"table must be a linear layer of \(20, 130\), got a Embedding"),
        ({"other.weight": torch.ones(1)}, r"model must have the tensors of the file, got 'other\.weight' besides"),
    ):  # fmt: skip
        write(tmp_path, FP8, tensors | change)
        with pytest.raises(ValueError, match=match):
            load_fp8(Net(), tmp_path)


def compressed(strategy: str, acts: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": acts}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


def acts(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": True, **more}


@pytest.mark.parametrize(
    ("given", "act"), [(acts("group", group_size=128), "e4m3_g128"), (acts("token"), "e4m3"), (None, "none")]
)
def test_blocks_of_compressed_tensors_are_read(given: dict[str, Any] | None, act: str, tmp_path: Path) -> None:
    tensors, want = checkpoint("weight_scale", torch.bfloat16)
    write(tmp_path, compressed("block", given, block_structure=[128, 128]), tensors)
    model = Net().eval()
    assert load_compressed(model, tmp_path).converted == ("up", "down")
    assert isinstance(model.up, QuantLinear) and model.up.config == QuantConfig("e4m3_b128", act=act)
    assert torch.equal(model.up.dequantize(), want.up.weight)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_channels_and_tensors_of_compressed_tensors_are_read(strategy: str, tmp_path: Path) -> None:
    tensors, model = dict(Net().state_dict()), Net()
    scale = tensors["up.weight"].abs().amax(1, keepdim=True) / 448
    scale = scale if strategy == "channel" else scale.amax().reshape(1)
    codes = (tensors["up.weight"] / scale).to(torch.float8_e4m3fn)
    write(tmp_path, compressed(strategy, acts("token")), tensors | {"up.weight": codes, "up.weight_scale": scale})
    assert load_compressed(model, tmp_path).converted == ("up",)
    assert isinstance(model.up, QuantLinear) and model.up.config == QuantConfig("e4m3")
    assert torch.equal(model.up.dequantize(), codes.float() * scale)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (compressed("block", None, block_structure=[64, 64]), r"weights must be 8-bit floats with a scale per tensor"),
        (compressed("group", None, group_size=128), r"weights must be 8-bit floats"),
        (compressed("channel", None, num_bits=4), r"weights must be 8-bit floats"),
        (compressed("channel", acts("group", group_size=128)), r"input_activations must be dynamic 8-bit floats"),
        (compressed("channel", acts("token", dynamic=False)), r"input_activations must be dynamic 8-bit floats"),
        (compressed("block", acts("group", group_size=64), block_structure=[128, 128]), r"input_activations must be"),
    ],
)
def test_other_floats_of_compressed_tensors_are_refused(config: dict[str, Any], match: str, tmp_path: Path) -> None:
    write(tmp_path, config, {})
    with pytest.raises(ValueError, match=match):
        load_compressed(Net(), tmp_path)
