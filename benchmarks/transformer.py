"""Latency of the sparse Transformer's encoder against torch's dense one and FlexAttention, as the paper's Figure 17.

Inference of 4 layers, heads of 64 entries, from words to classes; all have the same weights in float16, blocks
compiled by torch, and one CUDA graph, alone in the memory.  ``16b-8b`` and the like: quantized attention (softmax bits
- bits of Q, K, V) over random 8 x 1 vectors; ``+ linear``: linear layers pruned to 0.9 in 8 x 1 vectors of 8 bits too.
FlexAttention has random 128 x 128 blocks of the same sparsity, dense attention all keys.
Writes ``benchmarks/results/transformer_h200.json`` (the name is the GPU's), again after each row; rows that are there
are not measured again, so that runs of ``--seconds`` add up.  What takes too long, as a compiler may, is broken off,
noted as skipped, and left to the next run.  Several GPUs share the work: a process each with ``--part 1/N`` to ``N/N``
and an ``--out`` of its own, then a run that joins the files.  Milliseconds; the interval is of the mean, 95%.
Run: ``PYTHONPATH=. python benchmarks/transformer.py [--quick] [--seconds S] [--fresh] [--again PARTS] [--part I/N]
[--join FILE ...] [--plot] [--out FILE]``
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch
from harness.gpu_data import one_line
from harness.gpu_results import results_file, save
from harness.machine import gpu_machine
from harness.transformer_baselines import (
    DENSE,
    FLEX,
    LINEARS,
    VOCABULARY,
    Baseline,
    Case,
    baselines,
    names,
    relative_error,
)
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from report import ROOT, machine_line, markdown, replace_section
from sparse_encoder import Encoder

from magicube_cutlass.cli.environment import provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ITERATIONS, WARM = 256, 10
LONGEST, SHORTEST = 40.0, 10.0  # seconds: of a baseline before it is broken off, and without which none is begun
MARGINS = (0.02, 0.1)  # relative error that stands for a mistake: of float16, of integers

# Li, Osawa, Hoefler, SC'22, section V-C, A100, 4 heads: speed-ups of Magicube over a baseline, by (length, sparsity).
VECTOR_SPARSE, PRINTED_HEADS = "vectorSparse fp16", 4
PRINTED = {
    VECTOR_SPARSE: {(4096, 0.9): "1.43x to 1.63x", (8192, 0.9): "1.62x to 1.92x"},
    DENSE: {(4096, 0.9): "1.50x to 1.70x"},
}

# The ends of the range come first, for a run that is stopped.
CASES = [
    Case(length, heads, batch, sparsity)
    for heads, batch in ((4, 8), (8, 8), (4, 2), (8, 2))
    for length in (4096, 8192)
    for sparsity in (0.9, 0.95)
]
QUICK = [Case(256, 4, 1, 0.9)]


class Overtime(BaseException):
    """The time of a baseline is over; no ``Exception``, which a compiler would take for one of its own."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises :class:`Overtime` inside once ``seconds`` are over; in the main thread only."""

    def stop(*_: object) -> None:
        raise Overtime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)  # again, should one be lost in a finalizer
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:  # the signal may have come at the very end
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def interval(times: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95% interval, the times taken for independent and many."""
    if len(times) < 2:
        raise ValueError(f"times must be at least 2, got {len(times)}")
    return fmean(times), 1.96 * stdev(times) / math.sqrt(len(times))


def graphed(net: Encoder, words: Tensor) -> tuple[Callable[[], object], str]:
    """A call of ``net``, as a CUDA graph where one can hold it, and how it is launched."""
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                net(words)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                net(words)
        except RuntimeError as error:
            torch.cuda.synchronize()
            return lambda: net(words), f"stream, no graph: {one_line(error)}"
    return graph.replay, "graph"


@torch.no_grad()
def times(call: Callable[[], object], device: str, iterations: int) -> list[float]:
    """Milliseconds of each of ``iterations`` calls: between events on a GPU, by the clock on a CPU."""
    for _ in range(min(WARM, iterations)):
        call()
    if device == "cpu":
        found = []
        for _ in range(iterations):
            begin = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - begin))
        return found
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(marks)]


def measured(name: str, make: Callable[[], Baseline], words: Tensor, iterations: int) -> dict[str, Any]:
    """One row: error first, then time; what a baseline raises is a result too."""
    device = words.device.type
    torch._dynamo.reset()  # torch keeps few graphs of one piece of code
    try:
        baseline = make()
        if device == "cuda":
            for block in baseline.net.blocks:
                block.compile(dynamic=False)
        error = relative_error(baseline, words)
        limit = MARGINS[0] if name in (DENSE, FLEX) else MARGINS[1]
        if not error <= limit:
            raise ArithmeticError(f"relative error must be at most {limit}, got {error:.3g}")
        net, mode = baseline.net, "eager"
        del baseline
        call: Callable[[], object] = lambda: net(words)  # noqa: E731
        if device == "cuda":
            call, mode = graphed(net, words)
        mean, half = interval(times(call, device, iterations))
    except Exception as failure:  # whatever a baseline raises is a result of the benchmark
        return {"name": name, "failure": one_line(failure)}
    figures = {"ms": float(f"{mean:.4g}"), "interval": float(f"{half:.2g}"), "error": float(f"{error:.3g}")}
    return {"name": name, **figures, "mode": mode}


def run_baseline(case: Case, name: str, device: str, iterations: int) -> dict[str, Any]:
    """The row of one baseline, alone in the memory."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(1)
    words = torch.randint(0, VOCABULARY, (case.batch, case.length)).to(device)
    row = measured(name, baselines(case, words)[name], words, iterations)
    if device == "cuda":
        torch.cuda.synchronize()  # a GPU that has failed for good ends the run, and is no result of those that follow
    return row


def render(results: dict[str, Any]) -> str:
    """One table per number of heads and batch: times, speed-ups over the named baseline, and printed ones."""
    if not results["cases"]:
        return "no row is done"
    parts = [f"Measured on {machine_line(results)}; ms, mean of {results['cases'][0]['iterations']} iterations."]
    if results["skipped"]:
        parts.append(f"Broken off in the last run: {'; '.join(results['skipped'])}.")
    for heads, batch in dict.fromkeys((case["heads"], case["batch"]) for case in results["cases"]):
        cases = [case for case in results["cases"] if (case["heads"], case["batch"]) == (heads, batch)]
        body = []
        for name in names():
            cells = []
            for case in cases:
                known = {row["name"]: row for row in case["rows"]}
                row, base = known.get(name, {}), known.get(DENSE, {})
                if "ms" not in row:
                    cells.append("failed" if row else "")
                    continue
                rate = f" ({base['ms'] / row['ms']:.2f}x)" if "ms" in base and name != DENSE else ""
                cells.append(f"{row['ms']:.3f} ± {row['interval']:.3f}{rate}")
            body.append([name, "" if name == DENSE else DENSE, *cells])
        for base, printed in PRINTED.items() if heads == PRINTED_HEADS else ():
            cells = [printed.get((case["length"], case["sparsity"]), "") for case in cases]
            body.append(["Magicube, printed", base, *cells])
        headers = ["encoder", "compared with", *(f"L = {case['length']}, {case['sparsity']:g}" for case in cases)]
        parts.append(f"### {heads} heads, batch {batch}\n\n{markdown(headers, body)}")
    return "\n\n".join(parts)


def figure_of(results: dict[str, Any]) -> Figure:
    """Latency over that of torch in float16, by sparsity: a panel per length, the largest batch and number of heads."""
    from magicube_cutlass.bench.figures import COLORS, MARKERS, label_ends, note, panels

    heads, batch = (max(case[key] for case in results["cases"]) for key in ("heads", "batch"))
    heads = min(heads, *(case["heads"] for case in results["cases"] if case["batch"] == batch))
    cases = [case for case in results["cases"] if (case["heads"], case["batch"]) == (heads, batch)]
    lengths = sorted({case["length"] for case in cases})
    figure, areas = panels(1, len(lengths), (5.8 * len(lengths), 4.6))
    figure.suptitle(f"Encoder of 4 layers, inference, {heads} heads, batch {batch}")
    note(figure, machine_line(results))
    shown = [name for name in names() if LINEARS not in name]
    labels = []
    for axes, length in zip(areas, lengths, strict=True):
        found = sorted((case for case in cases if case["length"] == length), key=lambda case: case["sparsity"])
        ends = {}
        for i, name in enumerate(shown):
            rows = [(case["sparsity"], row) for case in found for row in case["rows"] if row["name"] == name]
            points = [(sparsity, row["ms"]) for sparsity, row in rows if row.get("ms")]  # others failed
            if points:
                axes.plot(*zip(*points, strict=True), f"{MARKERS[i]}-", color=COLORS[i])
                ends[name] = (*points[-1], COLORS[i])
        axes.set(xlabel="sparsity of the mask (share)", ylabel="latency (ms)", title=f"{length} tokens", ylim=(0, None))
        labels.append(ends)
    for axes, ends in zip(areas, labels, strict=True):
        label_ends(axes, ends)
    return figure


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture."""
    from magicube_cutlass.bench import figures

    figures.save_figure(figure_of(results), path)


def plan(cases: list[Case]) -> list[tuple[Case, str]]:
    """Dense and quantized attention first, four cases at a time, then the compiler's own, then the linear layers."""
    kinds = [[name for name in names() if name != FLEX and LINEARS not in name], [FLEX]]
    kinds.append([name for name in names() if LINEARS in name])
    groups = [cases[i : i + 4] for i in range(0, len(cases), 4)]
    return [(case, name) for group in groups for kind in kinds for case in group for name in kind]


Known = dict[Case, dict[str, Any]]  # the fields of a results file


def find(known: Known, case: Case, name: str) -> dict[str, Any] | None:
    """The row of this name, or None; keys that dense attention does not leave out make no sparsity another case."""
    for other, one in known.items():
        if other == case or (name == DENSE and replace(other, sparsity=case.sparsity) == case):
            for row in one["rows"]:
                if row["name"] == name:
                    found: dict[str, Any] = row
                    return found
    return None


def in_time(case: Case, name: str, device: str, iterations: int, seconds: float) -> dict[str, Any] | None:
    """The row of one baseline, or None where it is not done in ``seconds``."""
    try:
        with limited(seconds):
            return run_baseline(case, name, device, iterations)
    except Overtime:
        return None


def part_of(rows: list[tuple[Case, str]], part: int, parts: int) -> list[tuple[Case, str]]:
    """The rows of one of ``parts`` processes, from 1; those of a name at several sparsities stay together."""
    kinds = list(dict.fromkeys((replace(case, sparsity=0.0), name) for case, name in rows))
    own = set(kinds[part - 1 :: parts])
    return [(case, name) for case, name in rows if (replace(case, sparsity=0.0), name) in own]


def measure_all(
    rows: list[tuple[Case, str]],
    device: str,
    out: Path,
    limit: float,
    iterations: int,
    fresh: bool,
    again: tuple[str, ...] = (),
    join: tuple[Path, ...] = (),
) -> int:
    """Measures what is not in ``out`` until ``limit`` seconds are over; returns how many of ``rows`` are left.

    ``again``: parts of names whose rows are measured anew, in the place of those that are there; ``join``: other files
    of results, whose rows go into ``out``.
    """
    begin = time.perf_counter()
    torch._dynamo.config.recompile_limit = 64  # every kind of module counts, and every layer of integers
    results: dict[str, Any] = {"machine": {}, "device": device, "cases": [], "skipped": []}
    results["machine"] = gpu_machine() if device == "cuda" else provenance()
    known: Known = {}
    for path in (*([out] if out.is_file() and not fresh else []), *join):
        for one in json.loads(path.read_text())["cases"]:
            for row in one["rows"]:
                add(results, known, Case(*(one[key] for key in Case.__dataclass_fields__)), row, one["iterations"])
    slow, left = set(), 0
    for case, name in rows:
        old = any(part in name for part in again)
        row = None if old else find(known, case, name)
        if row is None:
            seconds = min(LONGEST, limit - (time.perf_counter() - begin))
            if seconds >= SHORTEST and name not in slow:
                row = in_time(case, name, device, iterations, seconds)
                if row is None:
                    slow.add(name)
                    results["skipped"].append(f"{name}, {case}: not done in {seconds:.0f} s")
                print(
                    case, *(f"{key}={value}" for key, value in (row or {name: "skipped"}).items()), sep="  ", flush=True
                )
        if row is None:
            left += 1
        else:
            add(results, known, case, row, iterations)
        save(results, out)
    return left


def add(results: dict[str, Any], known: Known, case: Case, row: dict[str, Any], iterations: int) -> None:
    """Put ``row`` into its case, in the place of the one of its name."""
    if case not in known:
        known[case] = {**asdict(case), "iterations": iterations, "rows": []}
        results["cases"].append(known[case])
    rows = known[case]["rows"]
    known[case]["rows"] = rows = [each for each in rows if each["name"] != row["name"]]
    rows.append(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short sequence, also on a CPU; needs --out")
    parser.add_argument("--seconds", type=float, default=150.0, help="limit of the whole run")
    parser.add_argument("--fresh", action="store_true", help="forget the rows of the results file")
    parser.add_argument("--again", default="", help="parts of names, between commas, to measure anew")
    parser.add_argument("--part", default="1/1", help="which part of the rows, of how many; the others are left alone")
    parser.add_argument("--join", type=Path, nargs="+", default=[], help="results files whose rows are put in")
    parser.add_argument("--out", type=Path, help="the results file")
    parser.add_argument("--plot", action="store_true", help="measure nothing, draw and write the page")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    part = tuple(int(x) for x in args.part.split("/")) if re.fullmatch(r"\d+/\d+", args.part) else (0, 0)
    if not 1 <= part[0] <= part[1]:
        parser.error(f"--part must be I/N with 1 <= I <= N, got {args.part}")
    if args.quick and args.out is None:
        parser.error("--quick needs --out: its figures do not belong in the project")
    if device == "cpu" and not (args.quick or args.plot):
        raise SystemExit("this benchmark needs a CUDA device; --quick runs without")
    out = args.out or (ROOT / "benchmarks" / "results" / "transformer_h200.json" if args.plot else None)
    out = out or results_file("transformer")
    if not args.plot:
        iterations = 3 if device == "cpu" else ITERATIONS
        again = tuple(part for part in args.again.split(",") if part)
        rows = part_of(plan(QUICK if args.quick else CASES), *part)
        left = measure_all(rows, device, out, args.seconds, iterations, args.fresh, again, tuple(args.join))
        print(f"\nwrote {out}" + (f"; {left} rows are left, the same command goes on" if left else ""))
    if not out.is_file():
        raise SystemExit(f"there is no {out}; a run on a GPU writes it")
    results = json.loads(out.read_text())
    text = render(results)
    print(text)
    if args.plot and results["cases"]:
        draw(results, out.with_suffix(".png") if args.out else ROOT / "docs" / "images" / "transformer.png")
        if args.out is None:
            text += "\n\n![latency of the encoders](../images/transformer.png)"
            replace_section("transformer_latency", text, ROOT / "docs" / "lab" / "transformer.md")


if __name__ == "__main__":
    main()
