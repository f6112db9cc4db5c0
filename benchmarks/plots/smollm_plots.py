"""Perplexity of SmolLM2 by format and by sparsity, one-shot and distilled: tables and a picture of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from magicube_cutlass.bench.figures import COLORS, MARKERS, OTHER, label_ends, log_ticks, note, panels

KINDS = {
    "magnitude": "magnitude, uniform",
    "OBS + refit": "obs + refit, uniform",
    "OBS + refit, by layer": "obs + refit, output_energy",
    "distilled": "distilled",
}
LIMIT = 0.1  # of the perplexity in float32, that is said of each kind


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; columns after the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


Points = dict[float, Mapping[str, Any]]  # rows by sparsity


def points_of(section: Mapping[str, Any]) -> dict[str, Points]:
    """Rows of each kind by sparsity."""
    found: dict[str, Points] = {}
    for kind, name in KINDS.items():
        own = {row["sparsity"]: row for row in section["rows"] if row["name"].rpartition(", ")[0] == name}
        if own:
            found[kind] = dict(sorted(own.items()))
    return found


def _base(section: Mapping[str, Any]) -> float:
    found: float = next(row["perplexity"] for row in section["rows"] if row["name"] == "float32")
    return found


def _head(section: Mapping[str, Any]) -> str:
    counts = section["texts"]
    return f"SmolLM2-135M, {counts['WikiText-2 test, windows']} of {counts['of']} windows of 1,024"


def render_formats(section: Mapping[str, Any]) -> str:
    """Perplexity of the dense formats."""
    base, rows = _base(section), [row for row in section["rows"] if "perplexity" in row]
    cells = [[row["name"], f"{row['perplexity']:.3f}", f"{100 * (row['perplexity'] / base - 1):+.2f}%"] for row in rows]
    return grid([_head(section), "perplexity", "over float32"], cells)


def render_sparse(section: Mapping[str, Any]) -> str:
    """Perplexity by method and sparsity, in float32 and with W8A8 on top."""
    kinds = points_of(section)
    sparsities = sorted({sparsity for own in kinds.values() for sparsity in own})
    rows = []
    for kind, own in kinds.items():
        for product in ("float32", "W8A8"):
            cells = [f"{own[s][product]['perplexity']:.2f}" if s in own else "-" for s in sparsities]
            rows.append([f"**{kind}**, {product}" if kind == "distilled" else f"{kind}, {product}", *cells])
    return grid(["SmolLM2-135M, 8 x 1 vectors, perplexity", *map(str, sparsities)], rows)


def render_trainings(section: Mapping[str, Any]) -> str:
    """What a distillation took, and what it gave on held-out text."""
    rows = []
    for sparsity, row in points_of(section).get("distilled", {}).items():
        before, after = (row["history"][i]["perplexity"] for i in (0, -1))
        took = [f"{row['start']['seconds']:.0f}", f"{row['seconds']:.0f}"]
        rows.append([str(sparsity), f"{row['steps']:,}", f"{row['rate']:g}", *took, f"{before:.2f}", f"{after:.2f}"])
    head = [
        "SmolLM2-135M distilled on a GPU",
        "steps",
        "rate",
        "pruning, s",
        "training, s",
        "held-out perplexity before",
    ]
    return grid([*head, "after"], rows)


def render_limit(section: Mapping[str, Any]) -> str:
    """The largest measured sparsity of each kind that stays within the limit, in float32 and in W8A8."""
    limit, parts = (1 + LIMIT) * _base(section), []
    for kind, own in points_of(section).items():
        largest = []
        for product in ("float32", "W8A8"):
            fits = [sparsity for sparsity, row in own.items() if row[product]["perplexity"] <= limit]
            largest.append(f"{max(fits)} in {product}" if fits else f"none in {product}")
        parts.append(f"{kind}: {', '.join(largest)}")
    return (
        f"Largest measured sparsity within {LIMIT:.0%} of dense float32 (perplexity at most {limit:.2f}): "
        f"{'; '.join(parts)}."
    )


def machine_of(section: Mapping[str, Any]) -> str:
    """Where the rows were measured."""
    machine = section["machine"]
    place = machine["cpu"] if section["device"] == "cpu" else machine["gpu"]
    return f"{place}, torch {machine['torch']}, {machine['date']}, commit {machine['commit']}"


def render_language(results: Mapping[str, Any]) -> str:
    """All that the page says of the quality of SmolLM2."""
    section = results["smollm"]
    parts = [render_formats(section)]
    if points_of(section):
        parts.append(render_sparse(section))
        if "distilled" in points_of(section):
            parts.append(render_trainings(section))
        parts.append(render_limit(section))
    return "\n\n".join([*parts, f"SmolLM2: {machine_of(section)}."])


def draw_language(results: Mapping[str, Any]) -> Figure:
    """Perplexity with W8A8 by sparsity: one-shot and distilled, with the dense model and the limit."""
    section = results["smollm"]
    figure, (axes,) = panels(size=(8.4, 4.8))
    base, ends, values = _base(section), {}, []
    for (kind, own), color, marker in zip(points_of(section).items(), COLORS, MARKERS, strict=False):
        points = [(sparsity, row["W8A8"]["perplexity"]) for sparsity, row in own.items()]
        axes.plot(*zip(*points, strict=True), f"{marker}-", color=color)
        values += [value for _, value in points]
        ends[kind] = (*points[-1], color)
    for value, name, color in ((base, "float32, dense", "black"), ((1 + LIMIT) * base, f"+{LIMIT:.0%}", OTHER)):
        axes.axhline(value, color=color, linewidth=1, linestyle="--")
        ends[name] = (0.0, value, color)
    axes.set(xlabel="sparsity in 8 x 1 vectors (share of zeros)", ylabel="perplexity (WikiText-2 test)", yscale="log")
    axes.set_ylim(0.9 * base, 1.2 * max([2 * base, *values]))
    log_ticks(axes.yaxis)
    axes.set_title(f"SmolLM2-135M, W8A8, {section['texts']['WikiText-2 test, windows']} windows of 1,024 tokens")
    note(figure, machine_of(section))
    label_ends(axes, ends)
    return figure
