"""``magicube bench``: linear layers of given shapes on this machine, beside those of torch and scipy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicube_cutlass.cli.arguments import Device, Json, VectorLength, check_length, chosen_device, print_json
from magicube_cutlass.cli.console import output, working
from magicube_cutlass.cli.environment import provenance

if TYPE_CHECKING:
    from rich.table import Table

    from magicube_cutlass.bench.layers import LayerTimes


def _print_whole(table: Table) -> None:
    """Print a table as wide as it is: a row that is cut says nothing."""
    from rich.measure import Measurement

    console = output()
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    console.width = max(console.width, needed)
    console.print(table)


def layer_table(found: Sequence[LayerTimes]) -> Table:
    """Return the times as a table, in microseconds."""
    import torch
    from rich.table import Table

    from cute_kernels.cpu import engine
    from magicube_cutlass.bench import layers

    title = f"whole layers, us, best of all rounds; engine path {engine.isa()}, {torch.get_num_threads()} thread(s)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("out x in", "tokens", *found[0].us, "best baseline", "speed-up of ours"):
        table.add_column(name, no_wrap=True, justify="left" if name == "best baseline" else "right")
    for times in found:
        names = dict.fromkeys(times.baseline_of(name) for name in times.us if name.startswith(layers.OURS))
        best = " / ".join(names) or times.baseline
        ours = " / ".join(f"{times.speed_up(name):.2f}" for name in times.us if name.startswith(layers.OURS))
        us = [f"{each:.1f}" for each in times.us.values()]
        table.add_row(f"{times.out} x {times.inner}", str(times.tokens), *us, best, ours)
    return table


def layer_report(found: Sequence[LayerTimes], **setting: object) -> dict[str, Any]:
    """Return the content of a results file but where it is from."""
    import torch

    from cute_kernels.cpu import engine
    from cute_kernels.gemm.cpu import dense_backend
    from magicube_cutlass.bench import layers

    given = {"isa": engine.isa(), "dense product": dense_backend(), "threads": torch.get_num_threads(),
             "time": "us: best of all rounds", **setting}  # fmt: skip
    return {"setting": given, "results": [layers.as_row(times) for times in found]}


def _shape(text: str) -> tuple[int, int]:
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if sizes is None:
        raise ValueError(f"shape must be OUTxIN with sizes of at least 1, such as 1536x384, got {text!r}")
    return int(sizes[1]), int(sizes[2])


def _replay(folder: Path, budget: float, as_json: bool) -> None:
    """Time the calls of a trace."""
    from magicube_cutlass.bench.replay import replay

    with working(f"replaying {folder}"):
        found = replay(folder, budget)
    if as_json:
        print_json({"machine": provenance(), "results": [each._asdict() for each in found]})
        return
    from rich.table import Table

    from cute_kernels.watch import short

    table = Table(title="calls of the trace, us", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("operator", "operands", "median", "best", "note"):
        table.add_column(name, justify="right" if name in ("median", "best") else "left")
    for each in found:
        times = ["" if us is None else f"{us:.1f}" for us in (each.us, each.best_us)]
        operands = ", ".join(short(value) for value in each.operands.values())
        table.add_row(each.operator.rpartition(".")[2], operands, *times, each.note)
    _print_whole(table)


def bench(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]", help="Replay the calls that MAGICUBE_TRACE=FOLDER recorded.", show_default=False
        ),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="OUTxIN of a layer; may be repeated.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Rows of the input; may be repeated.")] = None,
    sparsity: Annotated[
        list[float] | None, typer.Option(min=0.0, max=1.0, help="Share of zeros; may be repeated.")
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="Dense weights: int8, int4-g128, mxfp4:none, ...; may be repeated."),
    ] = None,
    vector_length: VectorLength = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch and of the engine.")] = 1,
    budget: Annotated[float, typer.Option(min=0.0, help="Seconds per layer and number of tokens.")] = 0.2,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Time linear layers on this machine, float32 to float32, and check that ours are exact; or replay a trace.

    A format is of weights, with a group size and a format of activations (none: weight-only) if these are given; with
    one, layers of zeros are timed only if a sparsity is given too.
    """
    if folder is not None:
        if not folder.is_dir():
            raise FileNotFoundError(f"No such folder: {str(folder)!r}")
        _replay(folder, budget, as_json)
        return
    shapes = [_shape(text) for text in shape] if shape else []
    check_length(vector_length)
    chosen = chosen_device(device)
    import torch

    from cute_kernels.cpu import engine
    from magicube_cutlass.bench import layers

    if chosen == "cpu" and not engine.available():
        raise typer.BadParameter("the compiled CPU engine is missing: pip install .")
    zeros = sparsity or (() if formats else layers.SPARSITIES)
    before = torch.get_num_threads()
    found: list[LayerTimes] = []
    torch.set_num_threads(threads)
    try:
        for out, inner in shapes or layers.SHAPES:
            with working(f"timing {out} x {inner}"):
                found += layers.time_layers(
                    out, inner, tokens or layers.TOKENS, zeros, vector_length or 8, budget, device=chosen,
                    has_sparse_baselines=True, formats=formats or (),
                )  # fmt: skip
        if not found:
            raise ValueError("tokens must give products of at most 2^31 multiply-adds, got none")
        if as_json:
            print_json({"machine": provenance(), **layer_report(found, device=chosen)})
        else:
            _print_whole(layer_table(found))
    finally:
        torch.set_num_threads(before)
