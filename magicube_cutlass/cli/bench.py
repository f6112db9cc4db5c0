"""``magicube bench``: linear layers of given shapes on this CPU, beside those of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from cute_kernels.cpu import engine
from cute_kernels.gemm.cpu import dense_backend
from magicube_cutlass.bench import layers
from magicube_cutlass.bench.layers import LayerTimes
from magicube_cutlass.cli.console import output, working
from magicube_cutlass.cli.environment import provenance

_WIDTH = 200  # columns of the table at least: a row that is cut says nothing


def layer_table(found: Sequence[LayerTimes]) -> Table:
    """Return the times as a table, in microseconds."""
    title = f"whole layers, us, best of all rounds; engine path {engine.isa()}, {torch.get_num_threads()} thread(s)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("out x in", "tokens", *found[0].us, "best baseline", "speed-up of ours"):
        table.add_column(name, no_wrap=True, justify="left" if name == "best baseline" else "right")
    for times in found:
        ours = " / ".join(f"{times.speed_up(name):.2f}" for name in times.us if name.startswith(layers.OURS))
        us = [f"{each:.1f}" for each in times.us.values()]
        table.add_row(f"{times.out} x {times.inner}", str(times.tokens), *us, times.baseline, ours)
    return table


def layer_report(found: Sequence[LayerTimes], **setting: object) -> dict[str, Any]:
    """Return the content of a results file but where it is from."""
    given = {"isa": engine.isa(), "dense product": dense_backend(), "threads": torch.get_num_threads(),
             "time": "us: best of all rounds", **setting}  # fmt: skip
    return {"setting": given, "results": [layers.as_row(times) for times in found]}


def _shape(text: str) -> tuple[int, int]:
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if sizes is None:
        raise ValueError(f"shape must be OUTxIN with sizes of at least 1, such as 1536x384, got {text!r}")
    return int(sizes[1]), int(sizes[2])


def bench(
    shape: Annotated[list[str] | None, typer.Option(help="OUTxIN of a layer; may be repeated.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Rows of the input; may be repeated.")] = None,
    sparsity: Annotated[
        list[float] | None, typer.Option(min=0.0, max=1.0, help="Share of zeros; may be repeated.")
    ] = None,
    vector_length: Annotated[int, typer.Option(help="V: rows of a stored vector.")] = 8,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch and of the engine.")] = 1,
    budget: Annotated[float, typer.Option(min=0.0, help="Seconds per layer and number of tokens.")] = 0.2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
) -> None:
    """Time linear layers on this CPU, float32 to float32, and check that ours are exact."""
    if not engine.available():
        raise typer.BadParameter("the compiled CPU engine is missing: pip install .")
    shapes = [_shape(text) for text in shape] if shape else layers.SHAPES
    before = torch.get_num_threads()
    found: list[LayerTimes] = []
    torch.set_num_threads(threads)
    try:
        for out, inner in shapes:
            with working(f"timing {out} x {inner}"):
                found += layers.time_layers(
                    out, inner, tokens or layers.TOKENS, sparsity or layers.SPARSITIES, vector_length, budget
                )
        if not found:
            raise ValueError("tokens must give products of at most 2^31 multiply-adds, got none")
        if as_json:
            typer.echo(json.dumps({"machine": provenance(), **layer_report(found)}, indent=1))
        else:
            console = output()
            console.width = max(console.width, _WIDTH)
            console.print(layer_table(found))
    finally:
        torch.set_num_threads(before)
