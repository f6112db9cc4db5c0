"""Sparse attention of quantized integers keeps its accuracy: the paper's Table V on two tasks that attention decides.

An encoder learns associative recall, or Fashion-MNIST pixel by pixel: without attention, with dense attention in
float32, and under masks of 8 x 1 vectors at sparsities of 0.9 and 0.95. Each masked one is then quantized, its softmax
and its Q, K, V to 16b-8b, 8b-8b, 8b-4b and 4b-4b, and fine-tuned straight-through. Quantized encoders train and are
tested by :func:`magicube_cutlass.sparse_attention`. A call trains the stages of one task and one seed and goes on where
an earlier one stopped; ``--table`` makes ``benchmarks/results/attention_accuracy.json`` of all that is in the folder,
and the table of ``docs/lab/transformer.md``; the large sizes have ``attention_accuracy_large.json``.
Source: Li, Osawa, Hoefler, SC'22, section V-C, Table V.
Run: ``python examples/attention_accuracy.py --task recall --seed 0 [--device cuda] [--length 1024]``, then ``--table``
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from attention_tasks import NoAttention, Reader, Task, pixels, reading_mask, recall
from encoder_training import Plan, Trainer
from report import RESULTS, ROOT, machine_line, markdown, replace_section, write_results
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress
from safetensors.torch import load_file
from sparse_encoder import Attention, dense, masked, quantized

from magicube_cutlass.cli.environment import provenance

SPARSITIES = (0.9, 0.95)
PAIRS = ((16, 8), (8, 8), (8, 4), (4, 4))  # bits of the softmax and of Q, K and V
LENGTHS = {"recall": (256, 1024), "pixels": (196, 784)}
QUIET = Progress(disable=True)


@dataclass(frozen=True)
class Stage:
    """One line of the table; ``start``: the stage whose weights it goes on from."""

    name: str
    sparsity: float | None = None  # of the attention mask; None for all words
    bits: tuple[int, int] | None = None
    start: str | None = None

    def attention(self, task: Task, seed: int) -> Attention:
        """Attention of this stage's encoder."""
        if self.sparsity is None:
            return NoAttention if self.name == "no attention" else dense
        mask = reading_mask(task.shape.length, self.sparsity, seed)
        return masked(mask) if self.bits is None else quantized(mask, *self.bits)


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    layers: int
    heads: int
    counts: tuple[int, int]  # sequences to train and to test with
    steps: int
    tuning: int  # steps of fine-tuning
    batch: int
    rate: float


SIZES = {
    "recall": Size(2, 2, (100_000, 2000), 2000, 150, 64, 2e-3),
    "pixels": Size(3, 2, (60_000, 10_000), 3000, 150, 128, 2e-3),
}


def stages() -> list[Stage]:
    """In the order in which they can be trained."""
    found = [Stage("no attention"), Stage("dense fp32")]
    found += [Stage(f"sparse {sparsity:g} fp32", sparsity) for sparsity in SPARSITIES]
    for sparsity in SPARSITIES:
        for bits in PAIRS:
            name = f"sparse {sparsity:g} {bits[0]}b-{bits[1]}b"
            found.append(Stage(name, sparsity, bits, f"sparse {sparsity:g} fp32"))
    return found


def chosen_stages(names: str | None) -> list[Stage]:
    """Those whose names hold one of the parts in `names`, "a,b"; all without; ``ValueError`` for a part of none."""
    every = stages()
    parts = [""] if names is None else [part.strip() for part in names.split(",")]
    for part in parts:
        if not any(part in stage.name for stage in every):
            raise ValueError(f"stage must be parts of {[stage.name for stage in every]}, got {part!r}")
    return [stage for stage in every if any(part in stage.name for part in parts)]


@dataclass(frozen=True)
class Run:
    """What the stages of a task and a seed share."""

    task: Task
    size: Size
    seed: int
    folder: Path
    deadline: float  # a time of time.perf_counter()

    def path(self, stage: str, suffix: str = ".safetensors") -> Path:
        return self.folder / f"{stage.replace(' ', '_')}{suffix}"

    def setting(self) -> dict[str, Any]:
        """What the stored stages depend on."""
        size = {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self.size).items()}
        return {"task": self.task.corpus.name, "length": self.task.shape.length, "seed": self.seed, **size}


def keep_setting(run: Run) -> None:
    """Write the setting beside the stages; ``ValueError`` where those that are there have another one."""
    path = run.folder / "setting.json"
    if not path.is_file():
        write_results(path, run.setting())
    known = json.loads(path.read_text())
    for name, value in run.setting().items():
        if known.get(name) != value:
            raise ValueError(f"{name} must be {known.get(name)} as for the stages in {run.folder}, got {value}; "
                             "--folder names another folder")  # fmt: skip


def trainer(stage: Stage, run: Run) -> Trainer | None:
    """The stage as its checkpoint has it, or about to begin; None where the one that it starts from is not done."""
    size = run.size
    torch.manual_seed(run.seed)
    net = Reader(run.task, stage.attention(run.task, run.seed))
    plan = Plan(size.steps, size.batch, size.rate, seed=run.seed)
    if stage.start is not None:
        if not run.path(stage.start, ".json").is_file():
            return None
        plan = replace(plan, steps=size.tuning, rate=0.1 * size.rate)
        stored = load_file(run.path(stage.start))
        prefix = "model."
        net.load_state_dict({n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)})
    made = Trainer(net.to(run.task.corpus.train[0].device), run.task.corpus, plan)
    if run.path(stage.name).is_file():
        made.load(run.path(stage.name))
    return made


def measure(stage: Stage, run: Run) -> dict[str, Any] | None:
    """The stage's results; None where the time was over before, or where it has nothing to start from."""
    done, path = run.path(stage.name, ".json"), run.path(stage.name)
    if done.is_file():
        return json.loads(done.read_text())
    made = trainer(stage, run)
    if made is None or time.perf_counter() >= run.deadline:
        return None
    notes = made.state.notes
    if stage.start is not None and "before" not in notes:
        notes["before"] = made.accuracy(QUIET, stage.name)
    if not made.run(QUIET, stage.name, run.deadline, path):
        return None
    mask = None if stage.sparsity is None else reading_mask(run.task.shape.length, stage.sparsity, run.seed)
    result = {
        "stage": stage.name, "accuracy": made.accuracy(QUIET, stage.name), "before tuning": notes.get("before"),
        "density": 1.0 if mask is None else round(mask.density, 4), "loss": made.state.loss, "steps": made.state.step,
        "seconds": round(made.state.seconds, 2), "device": made.device.type, "machine": provenance(),
    }  # fmt: skip
    if stage.start is None:
        made.state.result = {"accuracy": result["accuracy"]}  # without the optimizer's numbers
        made.save(path)
    else:
        path.unlink()
    write_results(done, result)
    return result


def merged(folder: Path) -> list[dict[str, Any]]:
    """One entry a task and length of `folder`: its setting, and lines with mean, spread and values of all seeds."""
    found: dict[tuple[str, int], dict[int, Path]] = {}
    for path in sorted(folder.glob("*/setting.json")):
        setting = json.loads(path.read_text())
        found.setdefault((setting["task"], setting["length"]), {})[setting["seed"]] = path.parent
    tasks = []
    for (task, length), seeds in sorted(found.items(), reverse=True):
        setting = json.loads((next(iter(seeds.values())) / "setting.json").read_text())
        del setting["seed"]
        rows = []
        for stage in stages():
            paths = {seed: at / f"{stage.name.replace(' ', '_')}.json" for seed, at in sorted(seeds.items())}
            seen = {seed: json.loads(path.read_text()) for seed, path in paths.items() if path.is_file()}
            if not seen:
                continue
            values = [one["accuracy"] for one in seen.values()]
            before = [one["before tuning"] for one in seen.values() if one["before tuning"] is not None]
            rows.append({
                "stage": stage.name, "density": mean(one["density"] for one in seen.values()), "seeds": list(seen),
                "mean": mean(values), "spread": stdev(values) if len(values) > 1 else None, "accuracies": values,
                "before tuning": mean(before) if before else None, "steps": next(iter(seen.values()))["steps"],
                "seconds": mean(one["seconds"] for one in seen.values()),
                "machines": sorted({json.dumps(machine_of(one)) for one in seen.values()}),
            })  # fmt: skip
        tasks.append({**setting, "task": task, "length": length, "rows": rows})
    return tasks


def machine_of(result: dict[str, Any]) -> dict[str, str]:
    """Where, when and with what a stage was trained."""
    return {name: result["machine"].get(name, "none") for name in ("commit", "date", "torch", "gpu", "cpu")}


def distances(task: dict[str, Any]) -> str:
    """How far 8b-8b is from dense float32, in points: a sentence; empty until both are there."""
    means = {row["stage"]: 100 * row["mean"] for row in task["rows"]}
    found = [
        f"{means[name] - means['dense fp32']:+.2f} at {sparsity:g}"
        for sparsity in SPARSITIES
        if "dense fp32" in means and (name := f"sparse {sparsity:g} 8b-8b") in means
    ]
    return f"Points of {task['task']} from dense fp32 to 8b-8b: {', '.join(found)}. " if found else ""


def render(results: dict[str, Any], file: str = "attention_accuracy") -> str:
    """The table as Markdown: two columns a task, mean and standard deviation of the seeds."""
    tasks = results["tasks"]
    body = []
    for stage in stages():
        line = [stage.name]
        for task in tasks:
            row = next((row for row in task["rows"] if row["stage"] == stage.name), None)
            if row is None:
                line += ["", ""]
                continue
            spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
            line += ["" if row["before tuning"] is None else f"{100 * row['before tuning']:.2f}"]
            line += [f"{100 * row['mean']:.2f}{spread}"]
        if any(line[1:]):
            body.append(line)
    names = [f"{task['task']}, L = {task['length']}" for task in tasks]
    headers = ["attention", *(part for name in names for part in (f"{name}: before tuning (%)", f"{name} (%)"))]
    counts = {len(row["seeds"]) for task in tasks for row in task["rows"]}
    seeds = " to ".join(map(str, sorted({min(counts), max(counts)})))
    head = f"Measured on {machine_line(results)}; mean ± standard deviation of {seeds} seeds "
    head += f"([results](../../benchmarks/results/{file}.json)). " + "".join(map(distances, tasks))
    return f"{head.rstrip()}\n\n{markdown(headers, body)}"


def results_name(tasks: list[dict[str, Any]]) -> str:
    """Results file, and section of the page, of these tasks: the large sizes have their own."""
    large = {task["length"] >= min(long for _, long in LENGTHS.values()) for task in tasks}
    if len(large) > 1:
        raise ValueError(f"folder must hold small or large sizes, got {[task['length'] for task in tasks]}")
    return "attention_accuracy_large" if large == {True} else "attention_accuracy"


def write_table(args: argparse.Namespace) -> None:
    """Merge the folder, unless ``--render`` keeps the results files, and write the page."""
    names = ["attention_accuracy", "attention_accuracy_large"]
    if not args.render:
        tasks = merged(args.folder)
        if not tasks:
            sys.exit(f"folder must hold trained stages, got {args.folder}")
        names = [results_name(tasks)]
        path = (args.out or RESULTS) / f"{names[0]}.json"
        stored = [json.loads(path.read_text()) for path in args.folder.glob("*/*.json") if path.name != "setting.json"]
        last = max(stored, key=lambda one: one["machine"]["date"])
        gpu = last["machine"].get("gpu", "none") != "none"
        device = last.get("device", "cuda" if gpu else "cpu")  # stages of a first version do not say it
        write_results(path, {"machine": last["machine"], "device": device, "tasks": tasks})
    for name in names:
        text = render(json.loads(((args.out or RESULTS) / f"{name}.json").read_text()), name)
        Console(width=150).print(Markdown(text))
        if args.out is None:
            replace_section(name, text, ROOT / "docs" / "lab" / "transformer.md")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=LENGTHS, default="recall")
    parser.add_argument("--length", type=int, help="words of recall, 256 or 1024; pixels of an image, 196 or 784")
    parser.add_argument("--seed", type=int, default=0, help="of weights, masks, batches and sequences")
    parser.add_argument("--stage", metavar="PARTS", help="stages with these parts in their names: 'dense,0.9 8b-8b'")
    parser.add_argument("--steps", type=int, help="of training; fine-tuning in proportion")
    parser.add_argument("--batch", type=int, help="sequences a step")
    parser.add_argument("--test", type=int, help="the first sequences of the test only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "attention_accuracy")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS", help="save and stop then")
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--table", action="store_true", help="train nothing: merge the folder, write table and page")
    parser.add_argument("--render", action="store_true", help="only write the page from the results file")
    parser.add_argument("--out", type=Path, help="folder for the results file; the page stays as it is")
    args = parser.parse_args()
    args.length = LENGTHS[args.task][0] if args.length is None else args.length
    return args


def sized(args: argparse.Namespace) -> Size:
    """The size, as the options change it."""
    size = SIZES[args.task]
    if args.steps is not None:
        size = replace(size, steps=args.steps, tuning=max(1, round(size.tuning * args.steps / size.steps)))
    if args.batch is not None:
        size = replace(size, batch=args.batch)
    return size if args.test is None else replace(size, counts=(size.counts[0], args.test))


def train(args: argparse.Namespace) -> list[str]:
    """Trains the stages; returns the names of those that are not done."""
    begin, size = time.perf_counter(), sized(args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.task == "recall":
        task = recall(args.length, size.counts, size.layers, size.heads, args.seed)
    else:
        task = pixels(math.isqrt(args.length), size.counts, size.layers, size.heads)
    task = replace(task, corpus=task.corpus.to(torch.device(args.device)))
    folder = args.folder / f"{args.task}-{task.shape.length}-seed{args.seed}"
    run = Run(task, size, args.seed, folder, begin + args.stop_after)
    keep_setting(run)
    missing = []
    for stage in chosen_stages(args.stage):
        row = measure(stage, run)
        if row is None:
            missing.append(stage.name)
            continue
        spent = f"{row['steps']} steps in {row['seconds']:.0f} s, {time.perf_counter() - begin:.0f} s in all"
        print(f"{folder.name}: {stage.name:22} {row['accuracy']:7.2%}  {spent}", flush=True)
    return missing


def main() -> None:
    args = options()
    if args.table or args.render:
        return write_table(args)
    try:
        missing = train(args)
    except ValueError as error:
        sys.exit(str(error))
    if missing:
        print(f"not done yet, the same command goes on: {', '.join(missing)}")
    return None


if __name__ == "__main__":
    main()
