"""What the examples that make tables share: the results file, Markdown, and the section of a page that shows it."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "lab" / "residual.md"


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where results go."""
    parser.add_argument("--out", type=Path, help="folder for results and picture; default: a new temporary one")
    parser.add_argument(
        "--project", action="store_true", help="measure, and write results, picture and page of the project"
    )
    parser.add_argument(
        "--render", action="store_true", help="compute nothing, draw and write the page from the results"
    )


def choose_output(parser: argparse.ArgumentParser, args: argparse.Namespace, quick: bool) -> None:
    """Set ``args.out`` to a temporary folder unless an option names another; None stands for the project."""
    if args.project and quick:
        parser.error("--project needs a full run: figures of a quick one do not belong in the project")
    if args.out is None and not (args.project or args.render):
        args.out = Path(tempfile.mkdtemp(prefix="magicube-"))


def machine_line(results: dict[str, Any]) -> str:
    """What measured it, in one line."""
    found = results["machine"]
    where = found["gpu"] if results.get("device", "cpu") == "cuda" else f"{found['cpu']}, threads: {found['threads']}"
    return f"{where}, torch {found['torch']}, {found['date']}, commit {found.get('commit', 'not recorded')}"


def write_results(path: Path, results: dict[str, Any]) -> None:
    """``results`` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its first column to the left, the others to the right."""
    lines = [list(headers), ["---", *["---:"] * (len(headers) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace_section(name: str, text: str, page: Path = PAGE) -> None:
    """Put ``text`` between the marks ``<!-- name ... -->`` and ``<!-- end name -->`` of a page.

    Raises ``ValueError`` where the page lacks the marks.
    """
    lines = page.read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(f"<!-- {name}:")]
    ends = [i for i, line in enumerate(lines) if line == f"<!-- end {name} -->"]
    if len(starts) != 1 or len(ends) != 1 or ends[0] < starts[0]:
        raise ValueError(f"{page.name} must have one line '<!-- {name}: ...' before one '<!-- end {name} -->'")
    page.write_text("\n".join([*lines[: starts[0] + 1], text, *lines[ends[0] :]]) + "\n")


def data_folder(name: str) -> Path:
    """Where the folder ``name`` of real data would be: under ``MAGICUBE_DATA``, or beside the project."""
    return Path(os.environ.get("MAGICUBE_DATA", ROOT.parent / "shared" / "data")) / name
