"""``magicube cache`` and ``magicube warmup``: compiled kernels on disk, and compilation before the first use."""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from magicube_cutlass.cli.console import bytes_text, output

cache_app = typer.Typer(help="List or remove the compiled GPU kernels on disk.", no_args_is_help=True)


@cache_app.command("ls")
def list_kernels() -> None:
    """List the compiled kernels, newest first."""
    from cute_kernels.jit import cache

    entries = cache.entries()
    console = output()
    if entries:
        table = Table("kernel", "arch", "size", "date", box=None)
        for entry in entries:
            table.add_row(escape(entry.title), entry.arch, bytes_text(entry.size), f"{entry.date:%Y-%m-%d %H:%M}")
        console.print(table)
    total = bytes_text(sum(entry.size for entry in entries))
    console.print(f"{len(entries)} kernels, {total}, in {cache.directory()}")


@cache_app.command("clear")
def clear_kernels() -> None:
    """Remove all compiled kernels."""
    from cute_kernels.jit import cache

    output().print(f"removed {cache.clear()} kernels from {cache.directory()}")


def _first_error(log: str) -> str:
    """The most informative line of a compiler log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if re.search(r"\berror:", line)), lines[0] if lines else "no message")


def warmup(
    arch: Annotated[str, typer.Option(help="The GPUs to compile for, such as sm_80 or sm_90a.")],
    every: Annotated[bool, typer.Option("--all", help="Every variant, not only the default ones.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Compilers that run at a time.")] = min(os.cpu_count() or 1, 16),
) -> None:
    """Compile the GPU kernels before their first use; needs no GPU."""
    from cute_kernels import jit
    from cute_kernels.catalog import warm_configs

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    compiled = total = 0
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(f"compiling for {arch}", total=None)
            for warmed in jit.warmup(warm_configs(every, arch), arch, jobs):
                compiled, total = compiled + (not warmed.cached), warmed.total
                progress.update(task, completed=warmed.done, total=total)
    except jit.CompileError as error:
        message = f"{error.unit.title} does not compile for {arch}: {_first_error(error.log)}"
        raise typer.BadParameter(message) from error
    except jit.ToolchainError as error:
        raise typer.BadParameter(str(error)) from error
    output().print(f"{total} kernels for {arch}: {compiled} compiled, {total - compiled} in the cache already")
