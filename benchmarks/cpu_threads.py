"""Two CPU threads beside one, while 0, 1 and 2 other processes keep cores busy.

A job is one sparse product of int8, of about 0.3 and 20 ms on one thread. Calls of one and of two threads alternate,
with a pause before each. The short job has too little work for a second thread unless `--always` is given.
Each result is compared for equality with the int64 product.
Writes ``benchmarks/results/cpu_threads_<instruction set>.json``.
Run: ``python benchmarks/cpu_threads.py [--quick] [--always] [--out FILE]``
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.cpu import engine
from cute_kernels.cpu.extension import load_extension
from magicube_cutlass.cli.environment import provenance

RESULTS = Path(__file__).resolve().parent / "results"
BUSY = (0, 1, 2)
JOBS = {"0.3 ms": (3e-4, 300), "20 ms": (2e-2, 40)}  # seconds on one thread, turns
PAUSE = 5e-4  # seconds between calls
INNER = 512  # columns of A


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that never sleep."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3 if count else 0.0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def timed(call: Callable[[], Tensor], threads: int) -> float:
    torch.set_num_threads(threads)
    time.sleep(PAUSE)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def job_of(seconds: float) -> Callable[[], Tensor]:
    """A product that takes one thread about as long, checked."""
    generator = torch.Generator().manual_seed(0)
    b = torch.randint(-128, 128, (INNER, 512), dtype=torch.int8, generator=generator)
    B = mc.QuantTensor.from_ints(b, bits=8)
    rows = 64
    while True:
        a = torch.randint(-128, 128, (rows, INNER), dtype=torch.int8, generator=generator)
        a *= (torch.rand(rows // 8, INNER, generator=generator) < 0.2).repeat_interleave(8, 0)
        A, out = mc.SRBCRS.from_dense(a, vector_length=8), torch.empty(rows, 512, dtype=torch.int32)

        def call(A: mc.SRBCRS = A, out: Tensor = out) -> Tensor:
            return mc.spmm(A, B, out=out)

        best = min(timed(call, 1) for _ in range(5))
        if best >= 0.9 * seconds:
            break
        rows = max(rows + 8, round(rows * min(8.0, seconds / best) / 8) * 8)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        if not torch.equal(call().long(), a.long() @ b.long()):
            raise ArithmeticError(f"{threads} threads: not the exact product")
    return call


def run_job(call: Callable[[], Tensor], turns: int) -> dict[str, Any]:
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(turns):
        for threads, found in times.items():
            found.append(timed(call, threads))
    row: dict[str, Any] = {}
    for threads, found in times.items():
        row[f"median_ms_{threads}"] = statistics.median(found) * 1e3
        row[f"p95_ms_{threads}"] = sorted(found)[len(found) * 95 // 100] * 1e3
    row["speedup"] = row["median_ms_1"] / row["median_ms_2"]
    return row


def show(results: list[dict[str, Any]]) -> None:
    table = Table("job", "busy processes", "one thread, median / p95 ms", "two threads, median / p95 ms", "speedup")
    for row in results:
        cells = (f"{row[f'median_ms_{n}']:.2f} / {row[f'p95_ms_{n}']:.2f}" for n in (1, 2))
        table.add_row(row["job"], str(row["busy"]), *cells, f"{row['speedup']:.2f}")
    Console(width=110).print(table)


def main(
    quick: Annotated[bool, typer.Option(help="Few turns, to see that it runs.")] = False,
    always: Annotated[bool, typer.Option(help="Start the second thread for any job.")] = False,
    out: Annotated[Path | None, typer.Option(help="Results file.")] = None,
) -> None:
    if not engine.available():
        raise typer.BadParameter("the compiled CPU engine is missing: pip install .")
    before = load_extension().set_serial_work(0) if always else None
    results = []
    for name, (seconds, turns) in JOBS.items():
        call = job_of(seconds / 20 if quick else seconds)
        for busy in BUSY:
            with busy_processes(busy):
                results.append({"job": name, "busy": busy, **run_job(call, 3 if quick else turns)})
    show(results)
    if before is not None:
        load_extension().set_serial_work(before)
    setting = {"isa": engine.isa(), "always": always, "pause (s)": PAUSE, "load average": os.getloadavg()[0]}
    path = out or RESULTS / f"cpu_threads_{engine.isa()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": provenance(), "setting": setting, "results": results}, indent=1) + "\n")
    typer.echo(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
