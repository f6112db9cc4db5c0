"""GGUF files: blocks are read without requantizing, and a loaded model gets the file's integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import magicube_cutlass as mc
from magicube_cutlass.nn import QuantEmbedding, QuantLinear
from magicube_cutlass.quantization.group_tensor import GroupTensor

gguf = pytest.importorskip("gguf", reason="needs gguf")
hook = pytest.importorskip("magicube_cutlass.hooks.gguf")

KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K")


def encoded(kind: str, rows: int, columns: int, seed: int = 0) -> Any:
    """Blocks of random bytes with finite scales."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    count = 1 if kind in ("Q4_0", "Q8_0") else 2
    scales = generator.normal(size=(rows, columns // values, count)).astype(np.float16)
    blocks[..., : 2 * count] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def write(path: Path, tensors: dict[str, tuple[str, Any]]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (kind, data) in tensors.items():
        raw = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_weights_are_compared_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_CHUNK", 16)
    stored = mc.nn.quantize_weight(torch.randn(64, 32), mc.nn.QuantConfig("int4", 32))
    weight = stored.dequantize()
    assert hook._matching(weight, stored, None) is stored
    weight[63, 31] += 1
    assert hook._matching(weight, stored, None) is None


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_read_without_requantizing(kind: str, tmp_path: Path) -> None:
    data, path = encoded(kind, 7, 512), tmp_path / "x.gguf"
    write(path, {"a.weight": (kind, data), "norm.weight": ("F32", np.arange(5, dtype=np.float32))})
    found = hook.read_gguf(path)
    weight = found["a.weight"]
    want = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).copy())
    assert isinstance(weight, GroupTensor) and weight.shape == (7, 512) and weight.group == 32
    assert weight.bits == (8 if kind == "Q8_0" else 4) and (weight.minimum is None) is (kind in ("Q4_0", "Q8_0"))
    if kind in ("Q4_0", "Q8_0"):
        assert torch.equal(weight.dequantize(), want)
    else:  # minimum = m + 8 d is rounded once
        largest = weight.scale.abs().amax() * 16 + weight.minimum.abs().amax()
        assert float((weight.dequantize() - want).abs().max()) <= 2.0**-23 * float(largest)
    assert torch.equal(found["norm.weight"], torch.arange(5.0))
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    layer = QuantLinear.from_quantized(weight)
    with torch.no_grad():
        assert float((layer(x) - x @ want.t()).norm() / (x @ want.t()).norm()) < 0.02


def test_other_formats_become_floats_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write(path, {"a.weight": ("Q5_0", encoded("Q8_0", 2, 64)[:, : 2 * 22])})
    found = hook.read_gguf(path)["a.weight"]
    assert isinstance(found, torch.Tensor) and found.shape == (2, 64)
    (tmp_path / "y.gguf").write_bytes(b"no such file" * 10)
    with pytest.raises(ValueError, match=r"(?i)gguf"):
        hook.read_gguf(tmp_path / "y.gguf")


def test_a_loaded_model_gets_the_integers_of_its_file(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    block, tensors = model.model.layers[0], {}
    names = {
        "blk.0.attn_q": block.self_attn.q_proj, "blk.0.attn_k": block.self_attn.k_proj, "blk.0.ffn_up": block.mlp.up_proj,
        "blk.0.ffn_down": block.mlp.down_proj, "token_embd": model.model.embed_tokens,
    }  # fmt: skip
    for i, (name, layer) in enumerate(names.items()):
        rows, columns = layer.weight.shape
        kind = "Q8_0" if name == "token_embd" else "Q4_1" if i % 2 else "Q4_0"
        data = encoded(kind, rows, columns, seed=i)
        tensors[f"{name}.weight"] = (kind, data)
        values = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).copy())
        if name.endswith(("_q", "_k")):  # a file holds the two halves of each head interleaved
            heads = 4 if name.endswith("_q") else 2
            values = values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        layer.weight.data.copy_(values)
    tensors["blk.0.attn_v.weight"] = ("Q4_0", encoded("Q4_0", 32, 64, seed=9))  # not what the model has
    write(tmp_path / "x.gguf", tensors)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        want = model(ids).logits
        report = hook.take_gguf(model, tmp_path / "x.gguf", embeddings=True)
        got = model(ids).logits
    notes = {row.name.removeprefix("model.layers.0."): row.note for row in report.rows}
    assert notes["self_attn.v_proj"] == "left: the file's tensor has other values"
    assert notes["mlp.gate_proj"] == "left: no quantized tensor of this name in the file"
    assert notes["input_layernorm"] == "left: a LlamaRMSNorm" and len(report.converted) == 6
    assert isinstance(model.lm_head, QuantLinear) and isinstance(model.model.embed_tokens, QuantEmbedding)
    assert model.lm_head.config == mc.nn.QuantConfig("int8", group_size=32)
    assert float((got - want).norm() / want.norm()) < 0.05
