"""Consoles of the commands: results on stdout, progress on stderr, so that a pipe gets results only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def output() -> Console:
    """Return a console on the current stdout, which tests replace."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner on stderr while the body runs; silent if stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield


def facts(title: str, rows: dict[str, str]) -> Table:
    """Return a two-column table of names and values."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def bytes_text(count: int) -> str:
    """Return a size with a unit: 1.2 MiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
