"""Draw ``docs/explanation/architecture.svg``: the folders of the packages and the imports between them.

A folder imports folders below it. Only arrows that do not follow from others are drawn (transitive reduction).

Run: ``PYTHONPATH=. python docs/explanation/draw_architecture.py [OUT]``; needs matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from tests.house import FOLDERS, PACKAGES, file_graph, folder_of

COLORS = {"residual": "#dcead1", "magicube_cutlass": "#d5e3f3", "cute_kernels": "#f6e3cd"}
LEFT_OUT = ("._api", "._moved", ".__main__", ".explain", ".explanation", ".watch")  # faces, reports
WIDTH, HEIGHT, STEP = 1.75, 0.42, 1.0


def arrows() -> dict[str, set[str]]:
    """Return folder -> imported folders of the same package, all of them allowed."""
    found: dict[str, set[str]] = {}
    for module, targets in file_graph().items():
        a = folder_of(module)
        if a in PACKAGES or a.endswith(LEFT_OUT):
            continue
        found.setdefault(a, set())
        for b in map(folder_of, targets):
            if a != b and b not in PACKAGES and not b.endswith(LEFT_OUT) and a.split(".")[0] == b.split(".")[0]:
                assert b in FOLDERS[a], f"{a} -> {b} is not allowed"
                found[a].add(b)
    return found


def below(graph: dict[str, set[str]], folder: str) -> set[str]:
    """Return everything that `folder` imports, directly or not."""
    found: set[str] = set()
    for each in graph[folder]:
        found |= {each} | below(graph, each)
    return found


def level(graph: dict[str, set[str]], folder: str) -> int:
    """Return the longest chain of imports below `folder`."""
    return max((1 + level(graph, each) for each in graph[folder]), default=0)


def places(graph: dict[str, set[str]]) -> dict[str, tuple[float, float]]:
    """Return the center of each folder's box: a column per package, a row per level."""
    found = {}
    for column, package in enumerate(reversed(PACKAGES)):
        rows: dict[int, list[str]] = {}
        for name in sorted(graph):
            if name.split(".")[0] == package:
                rows.setdefault(level(graph, name), []).append(name)
        for y, names in rows.items():
            for i, name in enumerate(names):
                found[name] = (column * 6.6 + (i - (len(names) - 1) / 2) * 2.05, y * STEP)
    return found


def draw(out: Path) -> None:
    """Draw the picture into `out`; its extension selects the format."""
    graph = arrows()
    where = places(graph)
    figure = Figure(figsize=(17, 9))
    axes = figure.add_axes((0, 0, 1, 1))
    for a, targets in sorted(graph.items()):
        direct = {b for b in targets if not any(b in below(graph, other) for other in targets if other != b)}
        for b in sorted(direct):
            (x0, y0), (x1, y1) = where[a], where[b]
            axes.annotate("", (x1, y1 + HEIGHT / 2), (x0, y0 - HEIGHT / 2),
                          arrowprops={"arrowstyle": "->", "color": "#7b8494", "lw": 1.2})  # fmt: skip
    for name, (x, y) in where.items():
        package, _, leaf = name.partition(".")
        box = FancyBboxPatch((x - WIDTH / 2, y - HEIGHT / 2), WIDTH, HEIGHT, boxstyle="round,pad=0.02",
                             facecolor=COLORS[package], edgecolor="#5b6470", zorder=3)  # fmt: skip
        axes.add_patch(box)
        axes.text(x, y, leaf, ha="center", va="center", fontsize=13, zorder=4)
    top = max(y for _, y in where.values()) + 0.9
    for column, package in enumerate(reversed(PACKAGES)):
        axes.text(column * 6.6, top, package, ha="center", va="center", fontsize=17, color="#3d4450")
        if column:
            axes.annotate("", (column * 6.6 - 2.2, top), (column * 6.6 - 4.4, top),
                          arrowprops={"arrowstyle": "->", "color": "#3d4450", "lw": 2})  # fmt: skip
    xs = [x for x, _ in where.values()]
    axes.set_xlim(min(xs) - 1.3, max(xs) + 1.3)
    axes.set_ylim(-0.6, top + 0.5)
    axes.axis("off")
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("architecture.svg"))
