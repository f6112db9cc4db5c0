"""Checked products on the CPU engine against the float32 product of torch, in one run.

``direct`` multiplies int8 digits by a prepared operand and measures its own error; ``prepare`` makes that operand.
``judge`` bounds the error of a float32 product by probes, after ``probes`` of its right operand. The bits of ``direct``
and the error that it measures are checked first.
Writes ``benchmarks/results/cpu_direct.json``.
Run: ``python benchmarks/cpu_direct.py [--quick] [--out FILE]``
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness.timing import measure
from rich.console import Console
from rich.table import Table

from cute_kernels.convert.digits import digits
from cute_kernels.cpu import engine
from cute_kernels.cpu.direct import direct, prepare_direct
from cute_kernels.cpu.estimate import PROBES, judge, probe_right
from magicube_cutlass.cli.environment import provenance

RESULTS = Path(__file__).resolve().parent / "results" / "cpu_direct.json"
SHAPES = ((16, 64, 64), (64, 64, 16), (256, 256, 256), (1024, 1024, 1024))  # M, K, N


def run_shape(shape: tuple[int, int, int], threads: int, budget: float) -> dict[str, Any]:
    m, k, n = shape
    generator = torch.Generator().manual_seed(k)
    A, B, W = (torch.randn(*size, generator=generator) for size in ((m, k), (k, n), (n, PROBES)))
    wbar = torch.linalg.vector_norm(W.double(), dim=1)
    right, (BW, bound), C = prepare_direct(B, W, wbar), probe_right(B, W, wbar), A @ B
    found, lhs, rhs = direct(A, right), digits(A, count=1), digits(B, count=1, axis=0)
    sums = lhs.planes[0].double() @ rhs.planes[0].double()  # (M, N), exact
    if not torch.equal(found.out, sums.float() * lhs.scale[:, None] * rhs.scale):
        raise ArithmeticError(f"{shape}: the engine and torch disagree")
    calls = {
        "torch float32": lambda: A @ B,
        "direct": lambda: direct(A, right),
        "prepare": lambda: prepare_direct(B, W, wbar),
        "judge": lambda: judge(A, BW, bound, C, W, wbar),
        "probes": lambda: probe_right(B, W, wbar),
    }
    times = {name: timing.best * 1e6 for name, timing in measure(calls, budget=budget).items()}
    error = float((A.double() @ B.double() - found.out.double()).norm() / found.norm**0.5)
    measured = (found.energy / PROBES / found.norm) ** 0.5
    row = {"shape": shape, "threads": threads, "us": times, "error": error, "measured_error": measured}
    if not 0.5 * error < measured < 2 * error:
        raise ArithmeticError(f"{shape}: the error is {error:.2e}, the probes measure {measured:.2e}")
    return row


def show(results: list[dict[str, Any]]) -> None:
    table = Table("M x K x N", "threads", *(f"{name} us" for name in results[0]["us"]), "check of float32")
    for row in results:
        times = row["us"]
        share = (times["judge"] + times["probes"]) / times["torch float32"]
        table.add_row(
            "x".join(map(str, row["shape"])), str(row["threads"]), *(f"{t:.1f}" for t in times.values()), f"{share:.0%}"
        )
    Console().print(table)


def main(
    quick: Annotated[bool, typer.Option(help="Small shapes, to see that it runs.")] = False,
    out: Annotated[Path, typer.Option(help="Results file.")] = RESULTS,
    budget: Annotated[float, typer.Option(help="Seconds a baseline.")] = 1.0,
) -> None:
    if not engine.available():
        raise typer.BadParameter("the compiled CPU engine is missing: pip install .")
    most = torch.get_num_threads()
    results = []
    for threads in sorted({1, min(2, most)}):
        torch.set_num_threads(threads)
        results += [run_shape(shape, threads, 0.005 if quick else budget) for shape in SHAPES[: 2 if quick else None]]
    torch.set_num_threads(most)
    show(results)
    setting = {
        "isa": engine.isa(),
        "input": "normal float32",
        "time": "best of all rounds",
        "load average": os.getloadavg()[0],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": provenance(), "setting": setting, "results": results}, indent=1) + "\n")
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
