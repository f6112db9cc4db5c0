"""Whole models on a GPU in CUDA graphs: ours dense and sparse beside bfloat16 and torchao's int8 and fp8, in one run.

Models of transformers with **random weights** in the sizes of all-MiniLM-L6-v2 (6 layers of 384) and SmolLM2-135M (30
of 576), and one decoder layer of an 8B model (4096, 14336): times do not depend on the values. All products of the
layers are converted, embeddings and the head stay bfloat16, attention is torch's. Projections that read the same rows
are one product in our dense layers and in "bfloat16, fused", which shows what that alone is worth, and in "torch fp8,
fused", torch's e4m3 with scales per row and per token. Our dense layers also apply the activations that follow them,
and gate the outputs of gated MLPs: ``magicube_cutlass.nn.fuse``. "static MLP": the last layer of an MLP has a static
scale, and the one before writes its integers; "static": all have one; "smooth static": all have smooth scales, and
static ones but for the layers of SmolLM2 that keep a scale per row in ``models_static_smollm.json``.
``graph``: milliseconds of a replay, median, all ways in turns; ``eager``: of a call without a graph, host included.
``compiled`` ways are compiled by torch: an encoder whole, a decoder layer by layer, ours with
:func:`magicube_cutlass.nn.compile_options`. ``error``: relative error of the layers' output against bfloat16's.
``decode``: a step for each of the batch's sequences over 1,024 cached tokens.
Writes ``benchmarks/results/models_gpu_h200.json``, or the file that the GPU's name gives.
Run: ``PYTHONPATH=. python benchmarks/models_gpu.py [--quick] [--out FILE] [--only NAME ...]
[--without NAME ...] [--warm] [--profile]``
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness.gpu_results import RESULTS, results_file, rounded, save
from harness.gpu_timing import replays
from harness.machine import gpu_machine
from harness.model_baselines import fuse_float, use_float8
from harness.model_runner import STATIC_ALPHA, compile_blocks, fuse_integers
from torch import Tensor, nn

import magicube_cutlass as mc

CACHED = 1024
HOST_CALLS = 10
Config = mc.nn.QuantConfig | mc.nn.SparseQuantConfig
STATIC = {"ours int8, static MLP": True, "ours int8, static": False}  # whether other layers of them stay dynamic
SMOOTH_STATIC = "ours int8, smooth static"
WAYS: dict[str, Config] = {
    "ours int8": mc.nn.QuantConfig("int8"),
    **dict.fromkeys((*STATIC, SMOOTH_STATIC), mc.nn.QuantConfig("int8")),
    "ours int4 g128, int8 rows": mc.nn.QuantConfig("int4", group_size=128),
    "ours int4 g128": mc.nn.QuantConfig("int4", group_size=128, act="none"),
    "ours e4m3": mc.nn.QuantConfig("e4m3"),
    **{f"ours sparse {s:g}": mc.nn.SparseQuantConfig(sparsity=s, vector_length=8, bits=8) for s in (0.5, 0.7, 0.9)},
}
# Of what torchao recommends for compiling its ways; coordinate descent too takes more than 150 s for one layer.
AO_OPTIONS = {"force_fuse_int_mm_with_mul": True}
PROFILED = ("bfloat16", "bfloat16, fused", "ours int8", *STATIC, SMOOTH_STATIC, "ours int4 g128", "ours sparse 0.9")


@dataclass(frozen=True)
class Case:
    """A model and its input; ``cached``: tokens in the cache, 0 without one."""

    name: str
    model: str
    batch: int
    tokens: int
    cached: int = 0


CASES = (
    Case("MiniLM, 32 x 16 tokens", "minilm", 32, 16),
    Case("MiniLM, 256 x 16 tokens", "minilm", 256, 16),
    Case("MiniLM, 256 x 128 tokens", "minilm", 256, 128),
    Case("SmolLM2 prefill, 1,024 tokens", "smollm", 1, 1024),
    Case("SmolLM2 decode, batch 1", "smollm", 1, 1, CACHED),
    Case("SmolLM2 decode, batch 16", "smollm", 16, 1, CACHED),
    Case("SmolLM2 decode, batch 64", "smollm", 64, 1, CACHED),
    Case("8B decoder layer, 16 tokens", "layer8b", 1, 16),
    Case("8B decoder layer, 2,048 tokens", "layer8b", 1, 2048),
)
QUICK = (Case("quick encoder", "minilm-small", 2, 16), Case("quick decode", "smollm-small", 2, 1, 32))
# hidden, intermediate, heads, heads of K and V, layers
SIZES = {
    "minilm": (384, 1536, 12, 12, 6), "minilm-small": (64, 128, 4, 4, 2), "smollm": (576, 1536, 9, 3, 30),
    "smollm-small": (64, 128, 4, 2, 2), "layer8b": (4096, 14336, 32, 8, 1),
}  # fmt: skip


class FullCache:
    """Keys and values of a layer: `cached` tokens and one more, which each step writes anew."""

    def __init__(self, shape: tuple[int, int, int, int], like: Tensor) -> None:
        self.keys, self.values = like.new_ones(shape), like.new_ones(shape)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the last token and return all."""
        self.keys[:, :, -1:].copy_(keys)
        self.values[:, :, -1:].copy_(values)
        return self.keys, self.values


class Decoder(nn.Module):
    """The layers of a decoder between embedding and head; no mask: causal, or one token that sees the whole cache."""

    def __init__(self, model: Any, embed: bool) -> None:
        super().__init__()
        self.embed = model.embed_tokens if embed else None
        self.layers, self.norm, self.rotary = model.layers, model.norm, model.rotary_emb

    def forward(self, x: Tensor, positions: Tensor, caches: list[FullCache] | None) -> Tensor:
        hidden = x if self.embed is None else self.embed(x)
        angles = self.rotary(hidden, position_ids=positions)
        for i, layer in enumerate(self.layers):
            cache = caches[i] if caches else None
            out = layer(hidden, attention_mask=None, position_embeddings=angles, past_key_values=cache)
            hidden = out[0] if isinstance(out, tuple) else out
        found: Tensor = self.norm(hidden)
        return found if self.embed is None else nn.functional.linear(found, self.embed.weight)


class Encoder(nn.Module):
    """An encoder without a mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed, self.layers = model.embeddings, model.encoder.layer

    def forward(self, x: Tensor, positions: Tensor, caches: None) -> Tensor:
        hidden = self.embed(input_ids=x, position_ids=positions)
        for layer in self.layers:
            out = layer(hidden, None)
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden


def build(name: str, device: str, dtype: torch.dtype) -> nn.Module:
    """A model with random weights."""
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    hidden, inter, heads, shared, layers = SIZES[name]
    torch.manual_seed(0)
    sizes = {
        "hidden_size": hidden, "intermediate_size": inter, "num_attention_heads": heads, "num_hidden_layers": layers,
        "max_position_embeddings": 4096, "attn_implementation": "sdpa",
    }  # fmt: skip
    if name.startswith("minilm"):
        return Encoder(BertModel(BertConfig(**sizes)).to(device, dtype).eval())
    vocabulary = 49152 if name.startswith("smollm") else 32
    config = LlamaConfig(**sizes, num_key_value_heads=shared, vocab_size=vocabulary)
    return Decoder(LlamaModel(config).to(device, dtype).eval(), name.startswith("smollm"))


def inputs(case: Case, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[FullCache] | None]:
    """Tokens or hidden states, positions, and the caches of the layers."""
    hidden, _, heads, shared, layers = SIZES[case.model]
    positions = torch.arange(case.tokens, device=device)[None] + case.cached
    x = torch.randint(0, 1000, (case.batch, case.tokens), device=device)
    if case.model == "layer8b":
        x = torch.randn(case.batch, case.tokens, hidden, device=device, dtype=dtype)
    caches = None
    if case.cached:
        shape = (case.batch, shared, case.cached + 1, hidden // heads)
        caches = [FullCache(shape, torch.empty(0, device=device, dtype=dtype)) for _ in range(layers)]
    return x, positions, caches


def baselines() -> dict[str, Callable[[Any], object]]:
    """torchao's ways, where it is installed."""
    if importlib.util.find_spec("torchao") is None:
        return {}
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int8DynamicActivationInt8WeightConfig,
        PerRow,
        quantize_,
    )

    def by(config: Any) -> Callable[[Any], object]:
        config.set_inductor_config = False  # it would hold for all ways: AO_OPTIONS, for its own
        return lambda model: quantize_(model.layers, config)

    return {
        "torchao int8": by(Int8DynamicActivationInt8WeightConfig()),
        "torchao fp8": by(Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())),
    }


def compiled(model: Any, options: dict[str, Any] | None = None) -> nn.Module:
    """The model compiled by torch: an encoder whole, a decoder layer by layer."""
    compile_blocks([model] if isinstance(model, Encoder) else model.layers, options)
    return model


def weight_bytes(model: Any) -> int:
    """Bytes of the layers' parameters and buffers."""
    found = {}
    for module in model.layers.modules():
        for each in (*module._parameters.values(), *module._buffers.values()):
            for part in parts(each):
                found[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(found.values())


def parts(tensor: Any) -> list[Tensor]:
    """The plain tensors that a tensor is made of, torchao's of several."""
    if type(tensor) in (Tensor, nn.Parameter):
        return [tensor]
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return [part for name in names for part in parts(getattr(tensor, name))]


def converted(name: str, config: Config, batch: dict[str, Any]) -> Callable[[Any], object]:
    """What converts the layers of a model by a config, and fuses dense ones with what is around them."""

    def make(model: Any) -> None:
        if name == SMOOTH_STATIC:
            smooth_static(model, batch)
            return
        mc.convert(model.layers, config, freeze=True, progress=False)
        if isinstance(config, mc.nn.QuantConfig):
            if name in STATIC:
                fuse_integers(model, [batch], only_last=STATIC[name])
            else:
                mc.nn.fuse(model, batch)

    return make


def more_tokens(x: Tensor) -> dict[str, Tensor]:
    """Random tokens or hidden states like `x`, 1,024 of one sequence, and their positions."""
    positions = torch.arange(CACHED, device=x.device)[None]
    if x.is_floating_point():
        return {"x": torch.randn(1, CACHED, x.shape[-1], device=x.device, dtype=x.dtype), "positions": positions}
    return {"x": torch.randint(0, 1000, (1, CACHED), device=x.device), "positions": positions}


def smooth_static(model: Any, batch: dict[str, Any]) -> None:
    """Give the layers smooth and static scales as :func:`harness.model_runner.smoothed` does, and fuse them."""
    if isinstance(model, Encoder):
        raise ValueError("smooth scales of an encoder have no measured quality beside static ones")
    plan = {"layers.*": mc.nn.QuantConfig("int8"), "*": None}
    data = [batch | {"caches": None, **more_tokens(batch["x"])} for _ in range(4)]
    mc.convert(model, plan, data=data, smooth=STATIC_ALPHA, calibrate=data, freeze=True, progress=False)
    if len(model.layers) == SIZES["smollm"][-1]:
        rows = json.loads((RESULTS / "models_static_smollm.json").read_text())["smollm"]["rows"]
        (row,) = (each for each in rows if each["name"] == "W8A8 smooth static")
        for each in row["layers with a scale per row"]:
            model.get_submodule(each.removeprefix("model.")).act_scale = None
    mc.nn.fold_smooth(model, batch)
    mc.nn.fuse(model, batch)


def models(dense: nn.Module, batch: dict[str, Any], fast: bool, without: list[str]) -> dict[str, nn.Module]:
    """Every way to run a model but those `without` names; what fails is told and left out."""
    found: dict[str, nn.Module] = {"bfloat16": dense}
    makers: dict[str, Callable[[Any], object]] = (baselines() if fast else {}) | {"bfloat16, fused": fuse_float}
    makers |= {"torch fp8, fused": use_float8} if fast else {}
    makers |= {name: converted(name, config, batch) for name, config in WAYS.items()}
    for name, make in makers.items():
        if any(part in name for part in without):
            continue
        model = copy.deepcopy(dense)
        try:
            make(model)
        except (RuntimeError, ValueError, ImportError, NotImplementedError, AssertionError) as error:
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        found[name] = compiled(model.eval(), AO_OPTIONS) if name.startswith("torchao") else model.eval()
    if fast and "compiled" not in without:
        plain = [name for name in found if not name.startswith("torchao")]
        for name in plain:
            options = mc.nn.compile_options() if name.startswith("ours") else None
            found[f"{name}, compiled"] = compiled(copy.deepcopy(found[name]), options)
    return found


def eager(call: Callable[[], object]) -> float:
    """Milliseconds of a call, host included."""
    seen = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        torch.cuda.synchronize()
        seen.append((time.perf_counter() - start) / HOST_CALLS * 1e3)
    return median(seen)


def profile(call: Callable[[], object]) -> list[dict[str, Any]]:
    """The kernels that take the most time, microseconds a call."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    rows = [(each.self_device_time_total / 3, each.count // 3, each.key) for each in found.key_averages()]
    return [
        {"us": rounded(us), "calls": count, "name": name[:100]} for us, count, name in sorted(rows)[::-1][:10] if us
    ]


def run_case(case: Case, found: dict[str, nn.Module], device: str, timed: bool, with_profile: bool) -> dict[str, Any]:
    """Errors of every way, and times."""
    given = inputs(case, device, torch.bfloat16)
    torch._dynamo.reset()  # sizes of an earlier case would stay open
    calls: dict[str, Callable[[], Tensor]] = {name: partial(model, *given) for name, model in found.items()}
    rows: dict[str, dict[str, Any]] = {}
    exact = calls["bfloat16"]().float()
    for name in list(calls):
        try:
            error = float((calls[name]().float() - exact).norm() / exact.norm())
        except (RuntimeError, ValueError, NotImplementedError) as problem:
            print(f"  {name}: {type(problem).__name__}: {str(problem).splitlines()[0][:200]}")
            del calls[name]
            continue
        rows[name] = {"error": rounded(error), "weight_bytes": weight_bytes(found[name])}
    if timed:
        for name, timing in replays(calls, rounds=9, replay=2000.0, warm=0.1).items():
            rows[name] |= {
                "graph": rounded(timing.median / 1e3),
                "eager": rounded(eager(calls[name])),
                "mode": timing.mode,
            }
            if with_profile and name.removesuffix(", compiled") in PROFILED:
                rows[name]["kernels"] = profile(calls[name])
    return {"case": case.name, "batch": case.batch, "tokens": case.tokens, "cached": case.cached, "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, also on a CPU; needs --out")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of the cases, in the order to run")
    parser.add_argument("--warm", action="store_true", help="fill torch's compilation cache; no times")
    parser.add_argument("--without", nargs="*", default=[], help="parts of the names of ways that are left out")
    parser.add_argument("--profile", action="store_true", help="with the kernels that take the most time")
    parser.add_argument("--out", type=Path, help="the results file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not (args.quick and args.out):
        raise SystemExit("no GPU here: --quick --out FILE runs small models without times")
    out = args.out or results_file("models_gpu")
    results: dict[str, Any] = {"machine": gpu_machine() if device == "cuda" else {}, "weights": "random", "cases": []}
    made: tuple[str, dict[str, nn.Module]] = ("", {})
    with torch.inference_mode():
        cases = QUICK if args.quick else [case for part in args.only for case in CASES if part in case.name]
        for case in cases:
            if made[0] != case.model:
                start = time.perf_counter()
                batch = dict(zip(("x", "positions", "caches"), inputs(case, device, torch.bfloat16), strict=True))
                dense = build(case.model, device, torch.bfloat16)
                made = case.model, models(dense, batch, device == "cuda", args.without)
                print(f"{case.model}: {len(made[1])} ways made in {time.perf_counter() - start:.0f} s", flush=True)
            found = run_case(case, made[1], device, device == "cuda" and not args.warm, args.profile)
            if args.warm:
                continue
            results["cases"].append(found)
            print(case.name)
            for name, row in found["ways"].items():
                print(
                    "  " + f"{name:24}" + "  ".join(f"{key} {row[key]}" for key in row if key != "kernels"), flush=True
                )
                for each in row.get("kernels", ()):
                    print(f"      {each['us']:9} us {each['calls']:4} x {each['name']}")
            save(results, out)


if __name__ == "__main__":
    main()
