"""A sparse Transformer with quantized attention keeps its accuracy: one table, as the paper's Table V.

An encoder is trained on ListOps, or on texts byte by byte: dense in float32 and in float16, and with attention masks of
8 x 1 vectors at sparsities of 0.9 and 0.95 in float32.  Each sparse one is then quantized, its softmax and its Q, K, V
to 16b-8b, 8b-8b and 8b-4b, and fine-tuned straight-through.  Checkpoints hold every stage: a run that was stopped goes
on where it was, and finished stages are not trained again.  Writes ``sparse_transformer.json`` into the folder of
``--out``.  ListOps shows little of attention: ``attention_accuracy.py`` has the tasks of the docs' table.  The tiny
size uses one thread of a CPU.
Source: Li, Osawa, Hoefler, SC'22, section V-C, Table V; Tay et al., arXiv 2011.04006, for the tasks.
Run: ``python examples/sparse_transformer.py --out FOLDER [--size tiny] [--task bytes --texts FOLDER] [--stop-after S]``
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from encoder_training import Corpus, Plan, Trainer, load_bytes, load_listops, stored_state
from listops import TINY, ListOps
from report import machine_line, markdown, write_results
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress
from safetensors.torch import load_file
from sparse_encoder import Encoder, Shape, attention_mask, dense, masked, quantized
from torch import nn

import magicube_cutlass as mc
from magicube_cutlass.cli.environment import provenance
from magicube_cutlass.nn import SparseQuantConfig

SPARSITIES = (0.9, 0.95)
PAIRS = ((16, 8), (8, 8), (8, 4))  # bits of the softmax and of Q, K and V


@dataclass(frozen=True)
class Stage:
    """One line of the table; ``start``: the stage whose weights it goes on from."""

    name: str
    sparsity: float | None = None  # of the attention mask; None for all words
    bits: tuple[int, int] | None = None
    half: bool = False
    start: str | None = None


@dataclass(frozen=True)
class Size:
    """How much is trained, and the limit of a stage's time, in seconds."""

    lists: ListOps
    length: int
    layers: int
    depth: int
    counts: tuple[int, int]  # sequences to train and to test with
    steps: int
    tuning: int  # steps of fine-tuning
    batch: int
    rate: float
    seconds: float

    def shape(self, corpus: Corpus, heads: int) -> Shape:
        return Shape(corpus.vocabulary, corpus.classes, self.length, self.layers, heads, self.depth)


SIZES = {
    "tiny": Size(TINY, 256, 2, 16, (4000, 200), 200, 8, 16, 4e-3, math.inf),
    "full": Size(ListOps(), 2048, 4, 64, (24_000, 2000), 2500, 300, 32, 5e-4, 450.0),
}


def stages() -> list[Stage]:
    """In the order in which they can be trained."""
    found = [Stage("dense fp32"), Stage("dense fp16", half=True)]
    found += [Stage(f"sparse {sparsity:g} fp32", sparsity) for sparsity in SPARSITIES]
    for sparsity in SPARSITIES:
        for bits in PAIRS:
            name = f"sparse {sparsity:g} {bits[0]}b-{bits[1]}b"
            found.append(Stage(name, sparsity, bits, start=f"sparse {sparsity:g} fp32"))
    return found


def chosen_stages(names: str | None) -> list[Stage]:
    """Those whose names hold one of the parts in ``names``, "a,b"; all without; ``ValueError`` for a part of none."""
    every = stages()
    if names is None:
        return every
    parts = [part.strip() for part in names.split(",")]
    for part in parts:
        if not any(part in stage.name for stage in every):
            raise ValueError(f"stages must be parts of {[stage.name for stage in every]}, got {part!r}")
    return [stage for stage in every if any(part in stage.name for part in parts)]


def encoder(stage: Stage, shape: Shape) -> Encoder:
    """Untrained."""
    torch.manual_seed(0)
    if stage.sparsity is None:
        return Encoder(shape, dense)
    mask = attention_mask(shape.length, stage.sparsity)
    if stage.bits is None:
        return Encoder(shape, masked(mask))
    return Encoder(shape, quantized(mask, *stage.bits))


def prune(net: nn.Module, sparsity: float) -> None:
    """Pruned and quantized linear layers in the blocks of ``net``, 8 x 1 vectors of 8 bits, in place."""
    mc.convert(net, {"head": None, "*": SparseQuantConfig(sparsity, vector_length=8, bits=8, act_bits=8)})


@dataclass(frozen=True)
class Run:
    """What the stages share."""

    corpus: Corpus
    shape: Shape
    size: Size
    linear: float | None
    checkpoints: Path
    deadline: float  # a time of time.perf_counter()
    progress: Progress

    def path(self, name: str) -> Path:
        return self.checkpoints / f"{name.replace(' ', '_')}.safetensors"


def keep_setting(run: Run) -> None:
    """Write beside the checkpoints what they depend on; ``ValueError`` where those that are there depend on another."""
    path = run.checkpoints / "setting.json"
    sizes = {"steps": run.size.steps, "tuning": run.size.tuning, "batch": run.size.batch, "rate": run.size.rate}
    setting = {"task": run.corpus.name, "train": len(run.corpus.train[1]), "linear": run.linear, **sizes}
    setting |= asdict(run.shape)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")  # another process may read or write the file
        part.write_text(json.dumps(setting) + "\n")
        os.replace(part, path)
    known = json.loads(path.read_text())
    for name, value in setting.items():
        if known.get(name) != value:
            raise ValueError(f"{name} must be {known.get(name)} as for the checkpoints in {run.checkpoints}, got "
                             f"{value}; --checkpoints names another folder")  # fmt: skip


def trainer(stage: Stage, run: Run) -> Trainer | None:
    """The stage as its checkpoint has it, or about to begin; None where the one that it starts from is not done."""
    size = run.size
    plan = Plan(size.steps, size.batch, size.rate, stage.half, size.seconds)
    net = encoder(stage, run.shape)
    if stage.start is not None:
        plan = replace(plan, steps=size.tuning, rate=0.1 * size.rate)
        before = stored_state(run.path(stage.start))
        if before is None or not before.result:
            return None
        stored = load_file(run.path(stage.start))
        prefix = "model."
        net.load_state_dict({n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)})
        if run.linear is not None:
            prune(net, run.linear)
    made = Trainer(net.to(run.corpus.train[0].device), run.corpus, plan)
    if run.path(stage.name).is_file():
        made.load(run.path(stage.name))
    return made


def measure(stage: Stage, run: Run) -> dict[str, Any] | None:
    """The stage's line; None where the time was over before, or where it has nothing to start from."""
    known = stored_state(run.path(stage.name))
    if known is not None and known.result:
        return known.result
    made = trainer(stage, run)
    if made is None or time.perf_counter() >= run.deadline:
        return None
    path, notes = run.path(stage.name), made.state.notes
    if stage.start is not None and "before" not in notes:
        notes["before"] = made.accuracy(run.progress, stage.name)
    if not made.run(run.progress, stage.name, run.deadline, path):
        return None
    density = 1.0 if stage.sparsity is None else attention_mask(run.shape.length, stage.sparsity).density
    made.state.result = {
        "stage": stage.name, "density": round(density, 4), "accuracy": made.accuracy(run.progress, stage.name),
        "before tuning": notes.get("before"), "loss": made.state.loss, "steps": made.state.step,
        "seconds": round(made.state.seconds, 2),
    }  # fmt: skip
    made.save(path)
    return made.state.result


def render(results: dict[str, Any]) -> str:
    """The table as Markdown."""
    task, shape = results["task"], results["shape"]
    body = []
    for one in results["rows"]:
        before = "" if one["before tuning"] is None else f"{one['before tuning']:.2%}"
        size = f"{one['density']:.3f}", f"{one['steps']:,}", f"{one['seconds']:.0f}", f"{one['loss']:.3f}"
        body.append([one["stage"], size[0], before, f"{one['accuracy']:.2%}", *size[1:]])
    headers = ["encoder", "density of the mask", "before fine-tuning", "accuracy", "steps", "s", "last batch's loss"]
    head = (
        f"{task['name']}: {task['train']:,} sequences to train and {task['test']:,} to test with, of up to "
        f"{shape['length']:,} words; {shape['layers']} layers, {shape['heads']} heads of {shape['depth']} entries, "
        f"batches of {results['batch']}. The commonest class is {task['commonest']:.2%} of the test's."
    )
    linear = results["linear"]
    if linear is not None:
        head += f" Linear layers of the quantized stages: pruned to {linear:g}, 8 bits."
    return f"Measured on {machine_line(results)}; {head}\n\n{markdown(headers, body)}"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--task", choices=("listops", "bytes"), default="listops")
    parser.add_argument("--texts", type=Path, help="folder of train/<class>/*.txt and test/<class>/*.txt, for bytes")
    parser.add_argument("--heads", type=int, choices=(4, 8), help="default 4; tiny has 2")
    parser.add_argument("--linear", type=float, metavar="SPARSITY", help="prune and quantize linear layers as well")
    parser.add_argument("--stages", metavar="PARTS", help="stages with these parts in their names: 'fp32,0.9 8b-8b'")
    parser.add_argument("--steps", type=int, help="of training; fine-tuning in proportion")
    parser.add_argument("--seconds", type=float, help="limit of a stage's training")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS", help="save and stop then")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoints", type=Path, help="default: the folder stages in --out")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results file")
    args = parser.parse_args()
    if args.task == "bytes" and args.texts is None:
        parser.error("--task bytes needs --texts, a folder as the IMDb reviews have it: train/pos/*.txt and so on")
    return args


def sized(args: argparse.Namespace) -> Size:
    """The size, as the options change it."""
    size = SIZES[args.size]
    if args.steps is not None:
        size = replace(size, steps=args.steps, tuning=max(1, round(size.tuning * args.steps / size.steps)))
    return size if args.seconds is None else replace(size, seconds=args.seconds)


def load(args: argparse.Namespace, size: Size, progress: Progress) -> Corpus:
    if args.task == "bytes":
        return load_bytes(args.texts, size.counts, size.length, progress)
    return load_listops(size.lists, size.counts, size.length, progress)


def train(args: argparse.Namespace, path: Path, progress: Progress) -> list[str]:
    """Writes the results file after each stage; returns the names of the stages that are not done."""
    begin, size = time.perf_counter(), sized(args)
    if args.size == "tiny":
        torch.set_num_threads(1)  # several gain little by products so small, and on a busy machine they wait
    corpus = load(args, size, progress).to(torch.device(args.device))
    shape = size.shape(corpus, args.heads or (2 if args.size == "tiny" else 4))
    default = args.out / "stages"
    run = Run(corpus, shape, size, args.linear, args.checkpoints or default, begin + args.stop_after, progress)
    keep_setting(run)
    labels = corpus.test[1]
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    results = {
        "machine": provenance(), "device": args.device.split(":")[0], "size": args.size, "batch": size.batch,
        "task": {"name": corpus.name, "train": len(corpus.train[1]), "test": len(labels),
                 "commonest": round(int(labels.bincount().max()) / len(labels), 4)},
        "shape": {"length": shape.length, "layers": shape.layers, "heads": shape.heads, "depth": shape.depth},
        "linear": args.linear, "rows": rows,
    }  # fmt: skip
    for stage in chosen_stages(args.stages):
        row = measure(stage, run)
        if row is None:
            missing.append(stage.name)
            continue
        rows.append(row)
        write_results(path, results)
    return missing


def main() -> None:
    args, console = options(), Console(stderr=True)
    path = args.out / "sparse_transformer.json"
    try:
        with Progress(console=console) as progress:
            missing = train(args, path, progress)
    except ValueError as error:
        sys.exit(str(error))
    if missing:
        console.print(f"not done yet, the same command goes on: {', '.join(missing)}", soft_wrap=True)
    if not path.is_file():
        sys.exit(f"no stage is done, and there is no {path}")
    Console(width=150).print(Markdown(render(json.loads(path.read_text()))))


if __name__ == "__main__":
    main()
