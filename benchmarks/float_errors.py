"""What small floats lose, against integers of 4 and 8 bits: of a matrix and of a product, on six kinds of data.

Errors are relative to float64, in the Frobenius norm; ``bits`` are those of codes and scales per element.
Runs on the CPU, writes ``benchmarks/results/float_errors.json`` and prints the tables of ``docs/lab/floats.md``.
Run: ``PYTHONPATH=. python benchmarks/float_errors.py [--size N] [--out FILE]``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accuracy import KINDS
from rich.console import Console
from rich.table import Table
from torch import Tensor

import magicube_cutlass as mc
from magicube_cutlass.cli.environment import provenance
from magicube_cutlass.quantization.float_tensor import RECIPES, ScaledFloatTensor

RESULTS = Path(__file__).resolve().parent / "results"
# name -> arguments of quantize; rows of a and columns of b have a scale each unless blocks do
WAYS: dict[str, dict[str, Any]] = {
    "int8, rows": {"bits": 8},
    "int4, rows": {"bits": 4},
    **{f"{name}, rows": {"dtype": name} for name in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")},
    "e4m3, tensor": {"dtype": "e4m3", "scale": "tensor"},
    "e4m3, 128 x 128": {"dtype": "e4m3", "scale": "tensor", "block": (128, 128)},
    "e2m1, 128 x 128": {"dtype": "e2m1", "scale": "tensor", "block": (128, 128)},
    **{name: {"dtype": name} for name in RECIPES},
}


def relative(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


def stored_bits(x: Any) -> float:
    """Of codes and scales, an element."""
    size = x.nbytes if isinstance(x, ScaledFloatTensor) else x.data.nbytes + x.scale.nbytes
    return 8 * size / x.shape.numel()


def errors(a: Tensor, b: Tensor, options: dict[str, Any]) -> dict[str, float]:
    """Of the right matrix, and of the product of both quantized matrices in float64."""
    left, right = (mc.quantize(x, **({"scale": "row" if axis else "column"} | options)) for x, axis in ((a, 1), (b, 0)))
    product = left.dequantize().double() @ right.dequantize().double()
    matrix = relative(left.dequantize(), a.double())
    return {"bits": stored_bits(left), "matrix": matrix, "product": relative(product, a.double() @ b.double())}


def show(rows: list[dict[str, Any]], figure: str) -> None:
    """A table of one figure, as Markdown cells."""
    table = Table(title=f"relative error of the {figure}")
    for heading in ("", "bits", *KINDS):
        table.add_column(heading)
    for way in WAYS:
        found = {row["kind"]: row for row in rows if row["way"] == way}
        bits = found[next(iter(KINDS))]["bits"]
        table.add_row(way, f"{bits:.2f}", *(f"{found[kind][figure]:.1e}" for kind in KINDS))
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of the matrices")
    parser.add_argument("--out", type=Path, default=RESULTS / "float_errors.json", help="the results file")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for kind, draw in KINDS.items():
        torch.manual_seed(0)
        a, b = draw(args.size, torch.device("cpu"))
        rows += [{"kind": kind, "way": way, **errors(a, b, options)} for way, options in WAYS.items()]
    for figure in ("matrix", "product"):
        show(rows, figure)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": provenance(), "size": args.size, "errors": rows}, indent=1) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
