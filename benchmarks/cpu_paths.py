"""The engine's instruction sets on one CPU: whole layers, from float32 to float32, on one thread.

Layers of 0, 0.5 and 0.9 zeros run on each path that the machine has, by turns, and give the same bits on all.
Writes ``benchmarks/results/cpu_paths.json``, of which ``reader_tables.py`` makes a table.
Run: ``python benchmarks/cpu_paths.py [--quick] [--out FILE]``
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness.timing import measure
from torch import Tensor, nn

from cute_kernels.cpu import engine
from magicube_cutlass.bench import layers
from magicube_cutlass.cli.environment import provenance
from magicube_cutlass.nn import QuantLinear, SparseQuantLinear

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES, TOKENS = ((1536, 384), (384, 1536), (4096, 4096)), (1, 16, 64, 400)
TURNS = 3


def layer_calls(linear: nn.Linear, tokens: tuple[int, ...]) -> dict[tuple[float, int], Callable[[], Tensor]]:
    """Calls by the share of zeros and tokens, on the path of this moment, once each."""
    found = dict[tuple[float, int], Callable[[], Tensor]]()
    for zeros in layers.SPARSITIES:
        made = SparseQuantLinear.from_linear(linear, zeros) if zeros else QuantLinear.from_linear(linear)
        for count in tokens:
            x = torch.randn(count, linear.in_features, generator=torch.Generator().manual_seed(count))
            found[zeros, count] = partial(made.eval(), x)
    return found


def run_shape(out: int, inner: int, tokens: tuple[int, ...], budget: float) -> list[dict[str, Any]]:
    """Times of all paths for one shape, microseconds, the best of all turns."""
    linear, paths = nn.Linear(inner, out), engine.isas()[:-1]  # but the portable one
    made, us = dict[str, dict[tuple[float, int], Callable[[], Tensor]]](), dict[tuple[float, int], dict[str, float]]()
    results = dict[tuple[float, int], Tensor]()
    for path in paths * TURNS:
        os.environ["MAGICUBE_CPU"] = path
        if path not in made:
            made[path] = layer_calls(linear, tokens)
        for case, call in made[path].items():
            if not torch.equal(results.setdefault(case, call()), call()):
                raise ArithmeticError(f"{out} x {inner}, {case}: {path} differs from {paths[0]}")
            best = measure({"": call}, budget=budget / TURNS)[""].best * 1e6
            times = us.setdefault(case, {})
            times[path] = min(best, times.get(path, best))
    return [
        {"out": out, "in": inner, "zeros": zeros, "tokens": count, "us": times} for (zeros, count), times in us.items()
    ]


def main(
    quick: Annotated[bool, typer.Option(help="Small shapes, to see that it runs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Results file.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds a layer and path.")] = 0.1,
) -> None:
    if not engine.available():
        raise typer.BadParameter("the compiled CPU engine is missing: pip install .")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    shapes, tokens = (((64, 48),), (1, 16)) if quick else (SHAPES, TOKENS)
    rows = [row for shape in shapes for row in run_shape(*shape, tokens, 0.003 if quick else budget)]
    for row in rows:
        times = ", ".join(f"{path} {us:.0f}" for path, us in row["us"].items())
        typer.echo(f"{row['out']} x {row['in']}, {row['zeros']:g} zeros, {row['tokens']} tokens: {times} us")
    os.environ.pop("MAGICUBE_CPU", None)
    path = out or RESULTS / "cpu_paths.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    setting = {"threads": 1, "time": "us: best of all rounds", "load average": os.getloadavg()[0]}
    path.write_text(json.dumps({"machine": provenance(), "setting": setting, "results": rows}, indent=1) + "\n")
    typer.echo(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
