"""Quantization on the CPU, with and without the compiled engine, against a dense product of its size, in one run.

Every matrix is (n, n) float32.  ``engine`` and ``torch`` give equal integers, which is checked first; ``share`` is the
engine's time over that of the fastest dense product of two such matrices: float32, bfloat16, torch's dynamic int8
linear layer or ``torch._int_mm``.
Writes ``benchmarks/results/cpu_quantize.json``.
Run: ``python benchmarks/cpu_quantize.py [--quick] [--out FILE]``
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from harness.timing import measure
from rich.console import Console
from rich.table import Table
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.convert.digits import digits
from cute_kernels.cpu import engine, extension
from magicube_cutlass.bench.problems import dense_baselines
from magicube_cutlass.cli.environment import provenance
from residual.operand.decompose import decompose

RESULTS = Path(__file__).resolve().parent / "results" / "cpu_quantize.json"
SIZES = (512, 1024, 2048)
SCALES: dict[int | None, Literal["tensor", "row", "column"]] = {None: "tensor", 1: "row", 0: "column"}
AXES = {"one scale": None, "a scale per row": 1, "a scale per column": 0}
Call = Callable[[], Any]


@contextmanager
def without_engine() -> Iterator[None]:
    """As where the extension was not compiled."""
    loaded, extension.ENGINE = extension.ENGINE, None
    try:
        yield
    finally:
        extension.ENGINE = loaded


def in_torch(call: Call) -> Any:
    with without_engine():
        return call()


def methods(x: Tensor) -> dict[str, Call]:
    """Every way to quantize, by name."""
    calls: dict[str, Call] = {}
    for kind, axis in AXES.items():
        turned = None if axis is None else 1 - axis
        for count in (1, 2, 3):
            calls[f"{count} digits, {kind}"] = lambda axis=axis, count=count: digits(x, count=count, axis=axis)  # type: ignore[misc]
        for rounding in ("trunc", "nearest"):
            calls[f"2 published digits, {rounding}, {kind}"] = lambda turned=turned, rounding=rounding: decompose(  # type: ignore[misc]
                x, 8, turned, rounding
            )
        calls[f"magicube_cutlass.quantize, {kind}"] = partial(mc.quantize, x, bits=8, scale=SCALES[axis])
    return calls


def tensors(result: Any) -> list[Tensor]:
    """The integers and scales of any method's result."""
    if isinstance(result, mc.QuantTensor):
        assert result.scale is not None
        return [result.data, result.scale]
    if hasattr(result, "planes"):
        return [*result.planes, result.scale]
    return [result.high, result.low, result.scale]


def check(calls: dict[str, Call]) -> None:
    """Raise ``ArithmeticError`` where the engine's integers are not torch's."""
    for name, call in calls.items():
        for mine, theirs in zip(tensors(call()), tensors(in_torch(call)), strict=True):
            if not torch.equal(mine, theirs):
                raise ArithmeticError(f"{name}: the engine and torch disagree")


def run_size(n: int, threads: int, budget: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, n, generator=generator)
    a, b = (torch.randint(-127, 128, (n, n), dtype=torch.int8, generator=generator) for _ in range(2))
    calls = methods(x)
    check(calls)
    dense = dense_baselines(mc.SRBCRS.from_dense(a), mc.QuantTensor.from_ints(b, bits=8))
    baselines = dict(dense)
    baselines |= {f"engine: {name}": call for name, call in calls.items()}
    baselines |= {f"torch: {name}": lambda call=call: in_torch(call) for name, call in calls.items()}  # type: ignore[misc]
    times = {name: timing.best * 1e3 for name, timing in measure(baselines, budget=budget).items()}
    fastest = min(dense, key=lambda name: times[name])
    product = times[fastest]
    rows = {
        name: {
            "engine_ms": times[f"engine: {name}"],
            "torch_ms": times[f"torch: {name}"],
            "share": times[f"engine: {name}"] / product,
        }
        for name in calls
    }
    return {"n": n, "threads": threads, "dense": fastest, "dense_ms": product, "methods": rows}


def show(result: dict[str, Any]) -> None:
    title = f"n = {result['n']}, threads: {result['threads']}, {result['dense']} {result['dense_ms']:.2f} ms"
    table = Table("method", "engine ms", "torch ms", "of the product", title=title)
    for name, row in result["methods"].items():
        table.add_row(name, f"{row['engine_ms']:.3f}", f"{row['torch_ms']:.2f}", f"{row['share']:.0%}")
    Console().print(table)


def main(
    quick: Annotated[bool, typer.Option(help="A small size, to see that it runs.")] = False,
    out: Annotated[Path, typer.Option(help="Results file.")] = RESULTS,
    budget: Annotated[float, typer.Option(help="Seconds a baseline.")] = 0.5,
) -> None:
    if not engine.available():
        raise typer.BadParameter("the compiled CPU engine is missing: pip install .")
    most = torch.get_num_threads()
    results = []
    for threads in sorted({1, min(2, most)}):
        torch.set_num_threads(threads)
        for n in (64,) if quick else SIZES:
            results.append(run_size(n, threads, 0.005 if quick else budget))
            show(results[-1])
    setting = {"input": "normal float32", "bits": 8, "time": "best of all rounds", "load average": os.getloadavg()[0]}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": provenance(), "setting": setting, "results": results}, indent=1) + "\n")
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
