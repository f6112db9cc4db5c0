"""Results files as Markdown tables with their source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"


def results(name: str) -> dict[str, Any]:
    """Return one results file."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def source(*names: str) -> str:
    """Name file, machine, torch, date and commit of results files."""
    parts = []
    for name in names:
        machine = results(name)["machine"]
        chip = f"{machine['cpu']} with {machine['engine path']}" if machine["gpu"] == "none" else machine["gpu"]
        commit = machine.get("commit", "not recorded")
        commit = f"{commit.removesuffix('+')} and changes after it" if commit.endswith("+") else commit
        parts.append(f"`{name}.json` ({chip}, torch {machine['torch']}, {machine['date']}, commit {commit})")
    return "Source: " + ", ".join(parts) + "."


def run_line(run: dict[str, Any]) -> str:
    """Return date and commit of a results file's run; the oldest files do not name the commit."""
    date, commit = run["machine"]["date"], run["machine"].get("commit", "not recorded")
    return f"{date}, commit {commit.removesuffix('+')}{' and changes after it' * commit.endswith('+')}"


def machine_line(run: dict[str, Any]) -> str:
    """Return GPU, driver, torch, date and commit of a results file's run."""
    machine = run["machine"]
    return f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, {run_line(run)}"


def grid(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table: text to the left, numbers to the right."""
    columns = zip(*rows, strict=True)
    right = [all(cell == "-" or (cell[:1].isdigit() and " x " not in cell) for cell in column) for column in columns]
    lines = [head, ["---:" if is_right else "---" for is_right in right], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
