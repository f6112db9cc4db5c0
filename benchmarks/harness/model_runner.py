"""A pretrained model in 8 bits and pruned, and the training of a pruned copy: what ``models.py`` does with each."""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import magicube_cutlass as mc
from harness.dlmc_data import Record

LAYERS = {"minilm": "encoder.*", "smollm": "model.layers.*"}
RATES = {0.3: 4e-4, 0.5: 8e-4, 0.7: 8e-4, 0.9: 1.6e-3}  # the best of 3 by the cosine on held-out sentences
V = 8


def quantized(model: nn.Module, layers: str, device: str, calibrate: Sequence[Any] | None = None) -> nn.Module:
    """A copy with W8A8 layers that keep the vectors that are not 0, with dynamic scales or, calibrated, static ones."""
    new, configs = copy.deepcopy(model), {}
    for name, layer in new.named_modules():
        if type(layer) is nn.Linear and fnmatchcase(name, layers):
            rows = layer.weight.detach().unflatten(0, (-1, V))  # (M / V, V, K)
            zeros = 1 - float((rows != 0).any(1).double().mean())
            configs[name] = mc.nn.SparseQuantConfig(sparsity=zeros, vector_length=V, bits=8)
    mc.convert(new, {**configs, "*": None}, calibrate=calibrate, freeze=True, progress=False)
    return new.to(device).eval()


STATIC_ALPHA = 0.7  # of smooth scales below static ones: the least perplexity of 0.5 to 0.8 on 38 windows


def smoothed(model: nn.Module, layers: str, data: Sequence[Any], static: bool = False) -> nn.Module:
    """A copy with dense W8A8 layers whose smooth scales the data chose, and static ones where they fit."""
    new, config = copy.deepcopy(model), mc.nn.QuantConfig("int8")
    smooth: Any = STATIC_ALPHA if static else "auto"
    calibrate = data if static else None
    mc.convert(
        new, {layers: config, "*": None}, data=data, smooth=smooth, calibrate=calibrate, freeze=True, progress=False
    )
    return new.eval()


def as_on_gpu(model: nn.Module, batch: dict[str, Any], blocks: Sequence[nn.Module]) -> nn.Module:
    """The model as ``models_gpu.py`` times it: float parameters in bfloat16, folded, fused, `blocks` compiled."""
    for each in model.parameters():  # buffers stay: frequencies of positions need float32
        each.data = each.data.to(torch.bfloat16)
    mc.nn.fold_smooth(model, batch)
    mc.nn.fuse(model, batch)
    compile_blocks(blocks, mc.nn.compile_options())
    return model


def compile_blocks(blocks: Iterable[nn.Module], options: dict[str, Any] | None = None) -> None:
    """Have torch compile modules one by one; all ways share the code of a layer."""
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # a layer's index is not a constant of its graph
    torch._dynamo.config.recompile_limit = 64
    for block in blocks:
        block.compile(options=options)


def dynamic_layers(model: nn.Module) -> list[str]:
    """Names of the dense quantized layers without a static scale."""
    return [n for n, each in model.named_modules() if isinstance(each, mc.nn.QuantLinear) and each.act_scale is None]


def fuse_integers(model: nn.Module, data: Sequence[dict[str, Any]], only_last: bool = True) -> None:
    """Give static scales to the last layers of MLPs, or to all, and have the layers before the last write integers."""
    mc.nn.calibrate(model, data, max_ratio=float("inf"), progress=False)
    fused = mc.nn.fuse(model, data[0])
    last = {*fused.quantization.values(), *fused.glu.values()}
    if not last:
        raise ValueError("model must have layers that read another layer's output or gated outputs, got none")
    for name, layer in model.named_modules():
        if only_last and isinstance(layer, mc.nn.QuantLinear) and name not in last:
            layer.act_scale = None


class Runner:
    """A model, its data, and how a pruned copy is trained towards it."""

    name: str
    args: argparse.Namespace
    dense: nn.Module
    sources: dict[str, int]
    training: dict[str, Any]  # options of the distillation
    rates = RATES
    step_seconds = 0.0  # of the last training
    embed: Callable[[Any, Any], Tensor] | None = None

    def calibration(self) -> list[dict[str, Tensor]]:
        """Batches that prune and smooth."""
        raise NotImplementedError

    def training_data(self) -> list[dict[str, Tensor]]:
        """Batches of the training, none of them held out."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Numbers on held-out text."""
        raise NotImplementedError

    def quality(self, model: nn.Module) -> dict[str, Any]:
        """Numbers on the test set, in float32 and in W8A8."""
        raise NotImplementedError

    def rows(self) -> dict[str, Callable[[], Record]]:
        """What is measured, by name."""
        raise NotImplementedError

    @property
    def layers(self) -> str:
        """Pattern of the layers that are pruned and quantized."""
        return LAYERS[self.name]

    def pruned(self, sparsity: float, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
        """A pruned copy, and how it was made."""
        model, start, cpu = copy.deepcopy(self.dense), time.perf_counter(), time.process_time()
        report = mc.prune_model(
            model, sparsity, self.calibration(), vector_length=V, progress=False, embed=self.embed, **options
        )
        facts = {"sparsity": sparsity, "zeros": round(report.sparsity, 4), **options}
        facts["cpu seconds"] = round(time.process_time() - cpu, 1)
        return model, facts | {"seconds": round(time.perf_counter() - start, 1)}

    def one_shot(self, sparsity: float, **options: Any) -> Record:
        """The row of a pruned copy."""
        model, facts = self.pruned(sparsity, **options)
        return {"rows": [facts | self.quality(model)]}

    def checkpoint(self, sparsity: float) -> Path:
        """Where the state of a distillation lies."""
        return Path(self.args.runs) / f"{self.name}_{sparsity}.pt"

    def start(self, sparsity: float) -> tuple[nn.Module, dict[str, Any]]:
        """What a training starts from."""
        return self.pruned(sparsity, method="obs", refit=True, allocation="output_energy")

    def limits(self, model: nn.Module) -> dict[str, Any]:
        """Steps and seconds of a training that is measured at once."""
        return {}

    def fit(self, model: nn.Module, sparsity: float, **options: Any) -> mc.pruning.DistillReport:
        """Train a pruned model, with the options of a run."""
        defaults = {"steps": self.args.steps, "seconds": self.args.seconds, "evaluate": self.evaluate}
        options = {**defaults, "progress": sys.stderr.isatty(), **self.training, **options}
        options.setdefault("evaluate_every", max(options["steps"] // 8, 1))
        rate = self.args.rate or self.rates.get(sparsity, RATES[0.3])
        return mc.distill(model, self.dense, self.training_data(), lr=rate, embed=self.embed, **options)

    def train(self, sparsity: float) -> None:
        """Train for ``--seconds``, from the start or from the checkpoint."""
        start = self.checkpoint(sparsity).with_suffix(".start.pt")
        start.parent.mkdir(parents=True, exist_ok=True)
        if start.is_file():
            model = copy.deepcopy(self.dense)
            model.load_state_dict(torch.load(start, map_location=self.args.device)["student"])
        else:
            model, facts = self.start(sparsity)
            torch.save({"student": model.state_dict(), "facts": facts, "texts": self.sources}, start)
        report = self.fit(model, sparsity, checkpoint=self.checkpoint(sparsity), save_every=50)
        times = f"{report.seconds:.0f} s, {report.cpu_seconds:.0f} s of processors"
        print(f"{sparsity}: {report.step} of {report.steps} steps, {times}, {report.history[-2:]}", flush=True)

    def distilled(self, sparsity: float) -> Record:
        """The row of a training, as far as it has come."""
        state = torch.load(self.checkpoint(sparsity), map_location=self.args.device, weights_only=True)
        model = copy.deepcopy(self.dense)
        model.load_state_dict(state["student"])
        history = [each for each in state["history"] if "loss" not in each]
        facts = {"sparsity": sparsity, "steps": state["step"], "of": state["options"]["steps"]}
        facts |= {"rate": state["options"]["lr"], "seconds": round(state["seconds"]), "history": history}
        begin = torch.load(self.checkpoint(sparsity).with_suffix(".start.pt"), weights_only=True)
        facts |= {"cpu seconds": round(state["cpu_seconds"]), "start": begin["facts"], "texts": begin["texts"]}
        return {"rows": [facts | self.quality(model.eval())]}

    def trained(self, sparsity: float) -> Record:
        """The row of a training that is run now, without a checkpoint."""
        model, facts = self.start(sparsity)
        before = {"step": 0, "seconds": 0.0, **self.evaluate(model)}
        report = self.fit(model, sparsity, **self.limits(model))
        self.step_seconds = report.seconds / report.step
        rate = self.args.rate or self.rates.get(sparsity, RATES[0.3])
        row = {"sparsity": sparsity, "steps": report.step, "of": report.steps, "rate": rate}
        row |= {"seconds": round(report.seconds, 1), "cpu seconds": round(report.cpu_seconds), "start": facts}
        row["history"] = [before, *(each for each in report.history if "loss" not in each)]
        row["losses"] = [round(each["loss"], 4) for each in report.history if "loss" in each]
        row["texts"] = dict(self.sources)
        return {"rows": [row | self.quality(model.eval())]}


def merged(sections: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One section of the results of several runs on one machine; of rows of one name the last."""
    rows = {row["name"]: row for section in sections for row in section["rows"]}
    texts = {key: each for section in sections for key, each in section["texts"].items() if each}
    return {**sections[0], "texts": texts, "rows": [*rows.values()]}
