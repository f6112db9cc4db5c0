"""``magicube layout``: thread and value of each operand element of an MMA atom, and the bank conflicts of a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicube_cutlass.cli.arguments import Json, check_choice, print_json
from magicube_cutlass.cli.console import facts, output, working

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from cute_kernels.atoms import Atom

INCHES = 0.36  # of a cell
AXES = {"A": ("m", "k"), "B": ("n", "k"), "C": ("m", "n")}


def _atom(name: str) -> Atom:
    try:
        from cute_kernels.atoms import atom, atoms
    except ImportError:
        raise ValueError("layout needs pycute: pip install 'magicube-cutlass[cuda]'") from None
    check_choice("atom", name, [each.name for each in atoms()], "magicube layout --list")
    return atom(name)


def _figure(columns: int, rows: int) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("layout -o needs matplotlib: pip install 'magicube-cutlass[plots]'") from None
    return Figure(figsize=(INCHES * columns + 0.8, INCHES * rows + 1.0), layout="constrained")


def cells(entry: Atom, operand: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return int64 (rows, columns) each: the thread of an element, -1 if all hold it, and its value index."""
    import numpy as np

    layout, (rows, columns) = entry.layout(operand), entry.extent(operand)
    thread, value = (np.empty((rows, columns), dtype=np.int64) for _ in range(2))
    shared = operand == "B" and entry.b_shared
    for t in range(1 if shared else entry.threads):
        for v in range(entry.values(operand)):
            at = layout(t, v)
            thread[at % rows, at // rows], value[at % rows, at // rows] = -1 if shared else t, v
    return thread, value


def _colors(thread: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A color per lane: one hue for the four lanes of a row, in four strengths; white where all hold it."""
    import numpy as np
    from matplotlib.colors import hsv_to_rgb

    strength = np.where(thread < 0, 0, 0.2 + 0.12 * (thread % 4))
    return hsv_to_rgb(np.stack([thread // 4 % 8 / 8, strength, np.ones(thread.shape)], axis=-1))


def draw_layout(entry: Atom, operand: str, out: Path) -> None:
    """Draw the operand as a grid of elements, labelled with thread and value and colored by thread."""
    import numpy as np

    thread, value = cells(entry, operand)
    rows, columns = thread.shape
    figure = _figure(columns, rows)
    axes = figure.subplots()
    axes.imshow(_colors(thread), aspect="equal", interpolation="nearest")
    for row, column in np.ndindex(rows, columns):
        holder = f"T{thread[row, column]}" if thread[row, column] >= 0 else "all"
        axes.text(column, row, f"{holder}\nV{value[row, column]}", ha="center", va="center", fontsize=5)
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="0.6", linewidth=0.4)
    axes.tick_params(which="minor", length=0)
    axes.set_xticks(range(0, columns, 4))
    axes.set_yticks(range(0, rows, 4))
    down, along = AXES[operand]
    axes.set(xlabel=along, ylabel=down)
    axes.set_title(f"{entry.name}, operand {operand} ({rows} x {columns}): {entry.layout(operand)}", fontsize=8)
    figure.savefig(out, dpi=150)


def describe(entry: Atom) -> dict[str, str]:
    """Return the fields of the atom and what follows from them, by name."""
    from cute_kernels.layout.fragments import column_order, fragment_order, gather_order, k_run

    m, n, k = entry.shape
    what = "floats" if entry.floating else "integers"
    stored = "" if entry.bits == entry.mma_bits else f", from {entry.bits}-bit storage"
    return {
        "shape": f"{m} x {n} x {k} of {entry.mma_bits}-bit {what}{stored}, {entry.threads} threads",
        "native on": ", ".join(f"sm_{arch}" for arch in entry.archs),
        **{f"operand {operand}": f"(thread, value) -> {entry.layout(operand)}" for operand in AXES},
        "SpMM, operand A": f"k -> gathered row  {gather_order(entry)}",
        "SpMM, rows of A": f"m -> column of the dense matrix  {column_order(entry.bits)}",
        "SpMM, operand B": f"(thread, value) -> row * {k} + gathered row  {fragment_order(entry)}",
        "SDDMM": f"k -> k in memory  {k_run(entry)}",
        "structs": ", ".join(entry.structs.values()),
    }


def conflicts(name: str) -> list[dict[str, str | int]]:
    """Return one row per shared-memory access of the kernel config of this name."""
    configs = _configs()
    check_choice("config", name, list(configs), "magicube layout --list")
    from cute_kernels.layout.bank_conflicts import report

    return [
        {"access": found.name, "kind": found.kind, "instructions": found.instructions,
         "wavefronts": found.wavefronts, "ideal": found.ideal, "conflicts": found.conflicts}
        for found in report(configs[name].smem_accesses())
    ]  # fmt: skip


def _configs() -> dict[str, Any]:
    try:
        from cute_kernels.catalog import named_configs
    except ImportError as error:
        raise ValueError(f"layout needs {error.name}: pip install 'magicube-cutlass[cuda]'") from None
    return dict(named_configs())


def conflict_table(name: str, rows: list[dict[str, str | int]]) -> Table:
    """Return the rows of :func:`conflicts` as a table."""
    from rich.table import Table

    table = Table(title=name, title_justify="left", box=None)
    for heading in ("access", "kind"):
        table.add_column(heading)
    for heading in ("instructions", "wavefronts", "ideal", "conflicts"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table


def _list_names(as_json: bool) -> None:
    try:
        from cute_kernels.atoms import atoms
    except ImportError:
        raise ValueError("layout needs pycute: pip install 'magicube-cutlass[cuda]'") from None
    found = {"atoms": [each.name for each in atoms()], "configs": list(_configs())}
    if as_json:
        print_json(found)
        return
    for kind, names in found.items():
        typer.echo(f"{kind}:")
        for name in names:
            typer.echo(f"  {name}")


def layout(
    atom: Annotated[str | None, typer.Argument(metavar="[ATOM]", help="An mma atom, such as s8_m16n8k32.")] = None,
    operand: Annotated[str, typer.Option(help="The operand to draw: A, B or C.")] = "A",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output image; the extension selects the format.")
    ] = None,
    smem: Annotated[str | None, typer.Option(metavar="CONFIG", help="Bank conflicts of this kernel config.")] = None,
    names: Annotated[bool, typer.Option("--list", help="List the atoms and the kernel configs.")] = False,
    as_json: Json = False,
) -> None:
    """Show an atom's layouts, draw one (-o), or show the bank conflicts of a kernel (--smem)."""
    check_choice("operand", operand, tuple(AXES))
    if names:
        _list_names(as_json)
        return
    if (atom is None) == (smem is None):
        raise ValueError("give either an ATOM or --smem CONFIG")
    if smem is not None:
        rows = conflicts(smem)
        if as_json:
            print_json({"config": smem, "accesses": rows})
        else:
            output().print(conflict_table(smem, rows))
        return
    assert atom is not None
    entry = _atom(atom)
    if out is None:
        if as_json:
            print_json({"atom": entry.name, **describe(entry)})
        else:
            output().print(facts(entry.name, describe(entry)))
        return
    with working(f"drawing {atom}"):
        draw_layout(entry, operand, out)
    output().print(f"wrote {out}")
