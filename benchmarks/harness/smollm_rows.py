"""SmolLM2-135M in 8 and 4 bits, pruned, and distilled: the rows of the language model in ``models.py``."""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import magicube_cutlass as mc
from harness import text_models as text
from harness.dlmc_data import Record
from harness.model_runner import Runner, as_on_gpu, dynamic_layers, quantized, smoothed

SPARSITIES = (0.1, 0.2, 0.3, 0.5, 0.7)
FORMATS: dict[str, dict[str, Any]] = {
    "W8A8": {},
    "W4": {"weight": "int4", "group_size": 32, "symmetric": False},
    "e4m3": {"weight": "e4m3"},
}
RESERVE = 8.0  # of the seconds of a run, for the evaluation after the last training
LENGTH = 512  # tokens of a window of calibration and training
HELD_OUT = 12  # windows, the last of WikiText-2 valid
CALIBRATION = 64  # windows, the first of WikiText-2 valid
RATES = {0.1: 2e-4, 0.2: 2e-4, 0.3: 3e-4, 0.5: 5e-4, 0.7: 8e-4}  # not tuned


def last_logits(output: Any, batch: Any) -> Tensor:
    """A vector per sample; the mean over all tokens of 49,152 logits would take longer than a block."""
    return nn.functional.normalize(output.logits[:, -1].float(), dim=-1)


class SmolLM(Runner):
    """Rows of the language model."""

    name = "smollm"
    rates = RATES
    embed = staticmethod(last_logits)

    def __init__(self, args: argparse.Namespace, model: nn.Module | None = None, tokenizer: Any = None) -> None:
        self.args, self.device = args, args.device
        if model is None:
            model, tokenizer = text.load_smollm()
        self.dense = model.to(self.device)
        is_gpu = torch.device(self.device).type == "cuda"
        self.batch = args.batch or (8 if is_gpu else 1)  # windows of 1,024 tokens
        weights = mc.pruning.LossWeights(embedding=0, similarity=0, logits=1)
        autocast = torch.bfloat16 if is_gpu else None
        self.training = {"weights": weights, "warmup": 20, "cache_bytes": 0, "autocast": autocast}
        windows = text.wikitext_windows(tokenizer, "test")
        chosen = windows[:: -(-len(windows) // args.windows)] if args.windows else windows
        self.windows = text.joined(chosen, self.batch)
        valid = text.wikitext_windows(tokenizer, "valid", LENGTH)
        self.valid, self.held_out = valid[:-HELD_OUT], text.joined(valid[-HELD_OUT:], 2 * self.batch)
        self.sources = {"WikiText-2 test, windows": len(chosen), "of": len(windows)}
        self.sources |= {"WikiText-2 valid, windows of 512": len(self.valid), "windows that the model wrote": 0}
        self.train_batches: list[dict[str, Tensor]] | None = None

    def batches(self, windows: list[Tensor]) -> list[dict[str, Tensor]]:
        """Windows of 512 tokens as keyword arguments of the model."""
        return [{"input_ids": each.to(self.device)} for each in text.joined(windows, 2 * self.batch)]

    def calibration(self) -> list[dict[str, Tensor]]:
        return self.batches(self.valid[:CALIBRATION])

    def training_data(self) -> list[dict[str, Tensor]]:
        """WikiText-2 valid, and ``--written`` windows that the dense model wrote after beginnings of its windows."""
        if self.train_batches is None:
            start, written = time.perf_counter(), []
            if self.args.written:
                written = text.written_windows(self.dense, self.valid, self.args.written, 64 * self.batch)
                print(f"{len(written)} windows written in {time.perf_counter() - start:.1f} s", flush=True)
            self.sources["windows that the model wrote"] = len(written)
            windows = [*self.valid, *written]
            random.Random(0).shuffle(windows)
            self.train_batches = self.batches(windows)
        return self.train_batches

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"perplexity": round(text.perplexity(model, self.held_out, self.device), 3)}

    def limits(self, model: nn.Module) -> dict[str, Any]:
        """``--fit``: as many steps as the first training can take in this time.

        A training for which ``--seconds`` leave less time has fewer steps, so that its schedule is whole, or none.
        """
        args = self.args
        if args.fit:
            self.step_seconds = self.trial(model)
            args.steps, args.fit = max(1, int(args.fit / self.step_seconds)), None
            print(f"{self.step_seconds:.4f} s a step, {args.steps} steps", flush=True)
        left = args.seconds - (time.perf_counter() - args.start) - RESERVE
        steps = max(1, min(args.steps, int(left / self.step_seconds))) if self.step_seconds else args.steps
        if steps < args.steps / 4:
            raise RuntimeError(f"{left:.0f} s are too few for a training of {args.steps} steps")
        return {"steps": steps, "seconds": max(left, 1)}

    def trial(self, model: nn.Module) -> float:
        """Seconds a step takes, by ten of a copy."""
        trial, start = copy.deepcopy(model), 0.0
        for steps in (3, 10):  # the first ones load kernels
            start = time.perf_counter()
            self.fit(trial, 0.5, steps=steps, evaluate=None)
            float(next(trial.parameters()).detach().flatten()[0])  # waits for the GPU
        return (time.perf_counter() - start) / 10

    def made(self, kind: str) -> nn.Module:
        """A copy of the model in one of the formats."""
        if kind == "float32":
            return self.dense
        weight, *rest = kind.split()
        if "fused" in rest:
            model = self.made(kind.removesuffix(" fused"))
            batch = {"input_ids": self.valid[0].to(self.device), "use_cache": False}
            return as_on_gpu(model, batch, [*model.get_submodule("model.layers").children()])
        if "smooth" in rest:
            return smoothed(self.dense, self.layers, self.batches(self.valid[:8]), static="static" in rest)
        model = copy.deepcopy(self.dense)
        plan = {self.layers: mc.nn.QuantConfig(**FORMATS[weight]), "*": None}
        batches = self.batches(self.valid[:8])
        static = batches if rest == ["static"] else None
        mc.convert(model, plan, calibrate=static, freeze=True, progress=False)
        return model

    def measured(self, model: nn.Module) -> dict[str, Any]:
        """Perplexity on the windows of the test set, and what it took."""
        start, cpu = time.perf_counter(), time.process_time()
        found = round(text.perplexity(model, self.windows, self.device), 3)
        return {
            "perplexity": found,
            "evaluation s": round(time.perf_counter() - start, 1),
            "cpu s": round(time.process_time() - cpu, 1),
        }

    def quality(self, model: nn.Module) -> dict[str, Any]:
        return {"float32": self.measured(model), "W8A8": self.measured(quantized(model, self.layers, self.device))}

    def format(self, kind: str) -> Record:
        """The row of a dense format."""
        model = self.made(kind)
        facts = {"layers with a scale per row": dynamic_layers(model)} if "static" in kind else {}
        return {"rows": [self.measured(model) | facts]}

    def rows(self) -> dict[str, Callable[[], Record]]:
        kinds = ["float32", "W8A8", "W8A8 smooth", "W8A8 static", "W8A8 smooth static", "W8A8 smooth static fused"]
        kinds += ["W4 g32", "e4m3"]
        found: dict[str, Callable[[], Record]] = {kind: partial(self.format, kind) for kind in kinds}
        for sparsity in SPARSITIES:
            own = {"method": "magnitude", "refit": False, "allocation": "uniform"}
            found[f"magnitude, uniform, {sparsity}"] = partial(self.one_shot, sparsity, **own)
        for allocation in ("uniform", "output_energy"):
            for sparsity in SPARSITIES:
                own = {"method": "obs", "refit": True, "allocation": allocation}
                found[f"obs + refit, {allocation}, {sparsity}"] = partial(self.one_shot, sparsity, **own)
        for sparsity in self.args.train or SPARSITIES:
            if self.args.train:
                found[f"distilled, {sparsity}"] = partial(self.trained, sparsity)
            elif self.checkpoint(sparsity).is_file():
                found[f"distilled, {sparsity}"] = partial(self.distilled, sparsity)
        return found
