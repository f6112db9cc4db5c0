"""``magicube cache`` and ``magicube warmup``: compiled kernels on disk, and compilation before the first use."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import Annotated

import typer

from magicube_cutlass.cli.arguments import ARCHES, Arch, Json, check_choice, print_json
from magicube_cutlass.cli.console import bytes_text, output

cache_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@cache_app.callback()
def _show_help(context: typer.Context) -> None:
    """List or remove the compiled GPU kernels on disk."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@cache_app.command("ls")
def list_kernels(as_json: Json = False) -> None:
    """List the compiled kernels, newest first."""
    from cute_kernels.jit import cache

    entries = cache.entries()
    if as_json:
        found = [{"kernel": each.title, "arch": each.arch, "bytes": each.size, "date": f"{each.date:%Y-%m-%d %H:%M}"}
                 for each in entries]  # fmt: skip
        print_json({"folder": str(cache.directory()), "kernels": found})
        return
    console = output()
    if entries:
        from rich.markup import escape
        from rich.table import Table

        table = Table("kernel", "arch", "size", "date", box=None)
        for entry in entries:
            table.add_row(escape(entry.title), entry.arch, bytes_text(entry.size), f"{entry.date:%Y-%m-%d %H:%M}")
        console.print(table)
    total = bytes_text(sum(entry.size for entry in entries))
    console.print(f"{len(entries)} kernels, {total}, in {cache.directory()}")


@cache_app.command("clear")
def clear_kernels(as_json: Json = False) -> None:
    """Remove all compiled kernels."""
    from cute_kernels.jit import cache

    if as_json:
        print_json({"folder": str(cache.directory()), "removed": cache.clear()})
        return
    output().print(f"removed {cache.clear()} kernels from {cache.directory()}")


def _first_error(log: str) -> str:
    """The most informative line of a compiler log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if re.search(r"\berror:", line)), lines[0] if lines else "no message")


def warmup(
    arch: Arch,
    every: Annotated[bool, typer.Option("--all", help="Every variant, not only the default ones.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Compilers that run at a time.")] = min(os.cpu_count() or 1, 16),
    as_json: Json = False,
) -> None:
    """Compile the GPU kernels before their first use; needs no GPU."""
    check_choice("arch", arch, ARCHES)
    try:
        if find_spec("cuda") is None or find_spec("cuda.core") is None:
            raise ImportError(name="cuda.core")
        from cute_kernels import jit
        from cute_kernels.catalog import warm_configs
    except ImportError as error:
        raise ValueError(f"warmup needs {error.name}: pip install 'magicube-cutlass[cuda]'") from None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
    if as_json:
        print_json({"arch": arch, "kernels": total, "compiled": compiled})
        return
    output().print(f"{total} kernels for {arch}: {compiled} compiled, {total - compiled} in the cache already")
