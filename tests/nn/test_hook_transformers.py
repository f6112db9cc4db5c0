"""Models of transformers: quantized as they load, saved and loaded bit for bit, refused without the hook, trained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from magicube_cutlass.nn import QuantConfig, QuantLinear, SparseQuantConfig, SparseQuantLinear

transformers = pytest.importorskip("transformers", reason="needs transformers: the extra 'transformers'")
hook = pytest.importorskip("magicube_cutlass.hooks.transformers")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "use-with-other-libraries.md"
IDS = torch.arange(12)[None]
FOUR = QuantConfig("int4", group_size=32)
PLANS: list[Any] = [
    FOUR,
    {"lm_head": None, "*": QuantConfig()},
    {"*gate*": SparseQuantConfig(0.5), "*up*": QuantConfig("nvfp4"), "*": QuantConfig("int4", 32, False)},
]


def model() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, tie_word_embeddings=True, attention_bias=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    model().save_pretrained(path)
    return path


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@torch.no_grad()
def logits(found: Any) -> Tensor:
    y: Tensor = found(IDS).logits
    return y


def layers(found: Any) -> list[Any]:
    return [each for each in found.modules() if isinstance(each, (QuantLinear, SparseQuantLinear))]


@pytest.mark.parametrize("plan", PLANS, ids=["int4", "int8 but the head", "mixed"])
def test_a_model_is_quantized_saved_and_loaded_bit_for_bit(plan: Any, folder: Path, tmp_path: Path) -> None:
    config = hook.MagicubeConfig(plan)
    first = load(folder, quantization_config=config, dtype=torch.float32)
    want, y = logits(model()), logits(first)
    assert len(layers(first)) == (14 if "lm_head" in str(plan) else 15) and all(each.frozen for each in layers(first))
    assert 1e-4 < float((y - want).norm() / want.norm()) < 0.35
    first.save_pretrained(tmp_path)
    second, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(second), y) and len(layers(second)) == len(layers(first))
    assert torch.equal(second.generate(IDS, max_new_tokens=4), first.generate(IDS, max_new_tokens=4))
    short = load(tmp_path, dtype=torch.bfloat16)
    pairs = list(zip(layers(short), layers(first), strict=True))
    assert all(torch.equal(mine.scale, other.scale) for mine, other in pairs)
    assert short.model.embed_tokens.weight.dtype == torch.bfloat16


def test_without_the_hook_loading_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder, quantization_config=hook.MagicubeConfig(), dtype=torch.float32).save_pretrained(tmp_path)
    auto = transformers.quantizers.auto
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "magicube")
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "magicube")
    with pytest.raises(RuntimeError, match=r"(?i)mismatch"):
        load(tmp_path)


def test_static_scales_set_after_loading_are_saved(folder: Path, tmp_path: Path) -> None:
    first = load(folder, quantization_config=hook.MagicubeConfig(), dtype=torch.float32)
    mc.nn.calibrate(first, [{"input_ids": IDS}], progress=False)
    first.save_pretrained(tmp_path)
    second = load(tmp_path)
    assert all(each.act_scale is not None for each in layers(second))
    assert torch.equal(logits(second), logits(first))


def test_a_converted_model_is_adopted_and_saved(tmp_path: Path) -> None:
    first = model()
    with pytest.raises(ValueError, match="model must have frozen layers only, got 0 of 0"):
        hook.adopt(first)
    mc.convert(first, {"*gate*": SparseQuantConfig(0.7), "*": QuantConfig()}, freeze=True)
    y = logits(first)
    hook.adopt(first).save_pretrained(tmp_path)
    second = load(tmp_path)
    assert torch.equal(logits(second), y) and any(isinstance(each, SparseQuantLinear) for each in layers(second))
    dense = second.dequantize()
    assert not layers(dense) and float((logits(dense) - y).norm() / y.norm()) < 0.05


def test_masters_are_kept_for_training_and_saved(folder: Path, tmp_path: Path) -> None:
    config = hook.MagicubeConfig(FOUR, skip=["lm_head"], freeze=False)
    first = load(folder, quantization_config=config, dtype=torch.float32).train()
    before = first.model.layers[0].mlp.up_proj.weight.detach().clone()
    assert first.hf_quantizer.is_qat_trainable and not any(each.frozen for each in layers(first))
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=2, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(first, arguments, train_dataset=data).train()
    assert not torch.equal(first.model.layers[0].mlp.up_proj.weight, before)
    first.eval().save_pretrained(tmp_path / "saved")
    second = load(tmp_path / "saved")
    assert len(layers(second)) == 14 and torch.equal(logits(second), logits(first))


def test_configs_survive_json_and_bad_ones_are_named() -> None:
    config = hook.MagicubeConfig({"a.*": SparseQuantConfig(0.3), "b": None, "*": FOUR}, skip=["head"])
    again = hook.MagicubeConfig(**config.to_dict())
    assert again.patterns() == config.patterns() == {
        "head": None, "a.*": SparseQuantConfig(0.3), "b": None, "*": FOUR,
    }  # fmt: skip
    with pytest.raises(ValueError, match="plan must hold configs or None, got 8"):
        hook.MagicubeConfig({"*": 8})
    with pytest.raises(ValueError, match="plan must hold the options of a layer"):
        hook.MagicubeConfig({"*": {"weights": "int8"}})


def test_the_page_s_code_runs(folder: Path, tmp_path: Path) -> None:
    for name in ("torchao.quantization", "peft"):
        pytest.importorskip(name, reason="the page needs transformers, torchao and peft")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    scope: dict[str, Any] = {"folder": folder, "saved": tmp_path}
    exec(blocks[0], scope)
    assert torch.equal(logits(scope["again"]), logits(scope["model"]))
    for block in blocks[1:]:
        exec(block, scope)
    assert len(layers(load(tmp_path))) == 15 and isinstance(layers(scope["model"])[0], QuantLinear)
