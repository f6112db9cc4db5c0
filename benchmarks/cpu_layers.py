"""``SparseQuantLinear`` on one CPU thread, from float32 to float32, beside float32 and torch's dynamic int8 layer.

Layers are frozen, with bias, of 0, 0.5 and 0.9 zeros; a call includes its Python. ``magicube bench`` prints the same
table for other shapes.
Writes ``benchmarks/results/cpu_layers_<instruction set>.json``, of which ``README_table.py`` makes a table, or
``cpu_layers_<instruction set>_alone.json``, of layers called one by one. On a CPU with AVX-512, all held to AVX2 by
``MAGICUBE_CPU=avx2 FBGEMM_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2``:
``cpu_layers_avx2_held.json``.
Run: ``python benchmarks/cpu_layers.py [--quick] [--alone] [--out FILE]``
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from cute_kernels.cpu import engine
from magicube_cutlass.bench import layers
from magicube_cutlass.cli.bench import layer_report, layer_table
from magicube_cutlass.cli.environment import provenance

RESULTS = Path(__file__).resolve().parent / "results"
HELD = ("FBGEMM_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")  # torch's instruction sets


def main(
    quick: Annotated[bool, typer.Option(help="Small shapes, to see that it runs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Results file.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds a baseline.")] = 0.4,
    alone: Annotated[bool, typer.Option(help="Each layer in a loop of its own: weights stay in caches.")] = False,
) -> None:
    if not engine.available():
        raise typer.BadParameter("the compiled CPU engine is missing: pip install .")
    torch.set_num_threads(1)
    shapes, tokens = (((64, 48),), (1, 16, 70)) if quick else (layers.SHAPES, layers.TOKENS)
    found = [
        times
        for shape in shapes
        for times in layers.time_layers(*shape, tokens, budget=0.005 if quick else budget, is_alone=alone)
    ]
    Console(width=160).print(layer_table(found))
    held = {name: os.environ[name] for name in HELD if name in os.environ}
    path = out or RESULTS / f"cpu_layers_{engine.isa()}{'_held' if held else ''}{'_alone' if alone else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    setting = {"load average": os.getloadavg()[0], **({"torch is held by": held} if held else {})}
    report = {"machine": provenance(), **layer_report(found, alone=alone, **setting)}
    path.write_text(json.dumps(report, indent=1) + "\n")
    typer.echo(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
