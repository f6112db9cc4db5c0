"""The ``magicube`` command.  Only this package imports typer and rich, and the library does not import this package.

Commands import torch inside of their bodies, so that help, versions and typing errors answer without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from magicube_cutlass import __version__
from magicube_cutlass.cli.bench import bench
from magicube_cutlass.cli.convert import convert
from magicube_cutlass.cli.environment import collect_env
from magicube_cutlass.cli.explore import explore
from magicube_cutlass.cli.info import info
from magicube_cutlass.cli.kernels import cache_app, warmup
from magicube_cutlass.cli.layout import layout
from magicube_cutlass.cli.plan_parallel import plan_parallel
from magicube_cutlass.cli.spmm import spmm
from magicube_cutlass.cli.spy import spy
from magicube_cutlass.cli.tune import tune

app = typer.Typer(
    name="magicube",
    help="Inspect pruned matrices and run quantized sparse products on them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes 0.1 s to import, plain help none
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"magicube {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Inspect pruned matrices and run quantized sparse products on them."""


_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "info": (info, "Shape, density, row lengths, bytes in each format."),
    "explore": (explore, "Open a page: will it be faster?"),
    "spmm": (spmm, "Check and time one product on a file's pattern."),
    "bench": (bench, "Time linear layers beside those of torch and scipy."),
    "convert": (convert, "Prune and quantize the weights of a model's file."),
    "plan-parallel": (plan_parallel, "Choose parallel styles for a model's layers on GPUs."),
    "spy": (spy, "Draw the pattern of a file or of an attention mask."),
    "layout": (layout, "Show an MMA atom, or a kernel's bank conflicts."),
    "collect-env": (collect_env, "Print versions and paths for a bug report."),
    "warmup": (warmup, "Compile the GPU kernels before their first use."),
    "tune": (tune, "Fit kernel selection to this GPU."),
}
for _name, (_function, _help) in _COMMANDS.items():
    app.command(_name, short_help=_help)(_function)
app.add_typer(cache_app, name="cache")

# BadParameter -> UsageError -> ClickException; typer has its own copy of click from 0.25 on, so not through click
_ClickError = typer.BadParameter.__mro__[2]


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    given = list(sys.argv[1:] if args is None else args)
    try:
        code = app(given or ["--help"], prog_name="magicube", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if isinstance(error, _ClickError):
            text = error.format_message()  # type: ignore[attr-defined]
            if text.startswith("No such command") and "mean" not in text:
                text += " `magicube --help` lists them."
        elif isinstance(error, (ValueError, TypeError, OSError)):
            text = str(error)
        else:
            raise
        print("magicube: error:", " ".join(text.split()), file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
