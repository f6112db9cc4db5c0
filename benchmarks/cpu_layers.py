"""``SparseQuantLinear`` on one CPU thread, from float32 to float32, beside float32 and torch's dynamic int8 layer.

Layers are frozen, with bias, of 0, 0.5 and 0.9 zeros; a call includes its Python. Each output is compared for equality
with the int64 product of the quantized operands, scaled in float32. torch's layer is not exact without VNNI: its sums
saturate unless activations have 7 bits.
Writes ``benchmarks/results/cpu_layers_<instruction set>.json``.
Run: ``python benchmarks/cpu_layers.py [--quick] [--out FILE]``
"""

from __future__ import annotations

import json
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness.timing import measure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import magicube_cutlass as mc
from cute_kernels.cpu import engine
from cute_kernels.gemm.cpu import dense_backend
from magicube_cutlass.cli.environment import provenance

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES = ((384, 384), (1536, 384), (384, 1536), (4096, 4096))  # out, in
TOKENS = (1, 2, 4, 16, 64, 400)
SPARSITIES = (0.0, 0.5, 0.9)
MOST = 2**31  # multiply-adds of a product


def dynamic(linear: nn.Linear) -> nn.Module:
    """The layer of torch with int8 weights that quantizes its input."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.ao.quantization.quantize_dynamic(nn.Sequential(linear), {nn.Linear}, dtype=torch.qint8)
    return made


def check(layer: mc.nn.SparseQuantLinear, x: Tensor, name: str) -> None:
    """Raise `ArithmeticError` unless the layer gives the exact product of its integers, scaled."""
    matrix, q = layer.matrix(), mc.quantize(x, bits=8, axis=1)
    assert matrix.scale is not None and q.scale is not None and layer.bias is not None
    total = q.ints().long() @ matrix.to_dense(dequantize=False).long().mT  # (tokens, out)
    expected = total.float() * matrix.scale.flatten() * q.scale + layer.bias
    if not torch.equal(layer(x), expected):
        raise ArithmeticError(f"{name}: the layer is not the exact product")


def run_shape(out: int, inner: int, tokens: tuple[int, ...], budget: float) -> list[dict[str, Any]]:
    torch.manual_seed(out + inner)
    linear, rows = nn.Linear(inner, out), []
    layers = {
        f"ours, {zeros:g}": mc.nn.SparseQuantLinear.from_linear(linear, zeros).eval().freeze() for zeros in SPARSITIES
    }
    calls = {"float32": nn.Linear(inner, out), "torch dynamic int8": dynamic(linear), **layers}
    for count in tokens:
        if count * out * inner > MOST:
            continue
        x = torch.randn(count, inner)
        for name, layer in layers.items():
            check(layer, x, f"{out} x {inner}, {count} tokens, {name}")
        bound = {name: partial(call, x) for name, call in calls.items()}
        times = measure(bound, budget=budget)
        best, middle = (
            {name: getattr(each, kind) * 1e6 for name, each in times.items()} for kind in ("best", "median")
        )
        rows.append({"out": out, "in": inner, "tokens": count, "us": best, "median_us": middle})
    return rows


def show(results: list[dict[str, Any]]) -> None:
    names = list(results[0]["us"])
    table = Table("out x in", "tokens", *names, "0 / best", "dynamic / 0.9")
    for row in results:
        us = row["us"]
        best = min(us["float32"], us["torch dynamic int8"])
        shares = f"{us['ours, 0'] / best:.2f}", f"{us['torch dynamic int8'] / us['ours, 0.9']:.2f}"
        table.add_row(
            f"{row['out']} x {row['in']}", str(row["tokens"]), *(f"{us[name]:.1f}" for name in names), *shares
        )
    Console(width=120).print(table)


def main(
    quick: Annotated[bool, typer.Option(help="Small shapes, to see that it runs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Results file.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds a baseline.")] = 0.4,
) -> None:
    if not engine.available():
        raise typer.BadParameter("the compiled CPU engine is missing: pip install .")
    torch.set_num_threads(1)
    shapes, tokens = (((64, 48),), (1, 16, 70)) if quick else (SHAPES, TOKENS)
    results = []
    with torch.inference_mode():
        for shape in shapes:
            results += run_shape(*shape, tokens, 0.005 if quick else budget)
    show(results)
    setting = {
        "isa": engine.isa(),
        "dense product": dense_backend(),
        "threads": 1,
        "time": "us: best of all rounds",
        "load average": os.getloadavg()[0],
    }
    path = out or RESULTS / f"cpu_layers_{engine.isa()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": provenance(), "setting": setting, "results": results}, indent=1) + "\n")
    typer.echo(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
