"""The ``magicube`` command.  Only this package imports typer and rich, and the library does not import this package."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from magicube_cutlass.cli.bench import bench
from magicube_cutlass.cli.environment import collect_env
from magicube_cutlass.cli.info import info
from magicube_cutlass.cli.kernels import cache_app, warmup
from magicube_cutlass.cli.layout import layout
from magicube_cutlass.cli.spmm import spmm
from magicube_cutlass.cli.spy import spy
from magicube_cutlass.cli.tune import tune

app = typer.Typer(
    name="magicube",
    help="Inspect pruned matrices and run quantized sparse products on them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("info")(info)
app.command("spmm")(spmm)
app.command("bench")(bench)
app.command("spy")(spy)
app.command("layout")(layout)
app.command("collect-env")(collect_env)
app.command("warmup")(warmup)
app.command("tune")(tune)
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
        elif isinstance(error, (ValueError, TypeError, OSError)):
            text = str(error)
        else:
            raise
        print("magicube: error:", " ".join(text.split()), file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
