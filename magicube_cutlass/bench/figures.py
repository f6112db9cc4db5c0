"""Style of every plot: colors that color-blind readers tell apart, direct labels that do not overlap, units on axes.

Needs matplotlib: ``pip install 'magicube-cutlass[plots]'``. Colors are those of Okabe and Ito.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

OURS, DENSE, OTHER, FOURTH, FIFTH = "#0072B2", "#D55E00", "#6B7280", "#009E73", "#CC79A7"
COLORS = (OURS, DENSE, FOURTH, FIFTH, "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dv<>P"
SIZE = 11  # points; legible at half size
DPI = 130
_STYLE: dict[Any, Any] = {
    "font.size": SIZE,
    "axes.titlesize": SIZE + 1,
    "axes.labelsize": SIZE,
    "xtick.labelsize": SIZE - 1,
    "ytick.labelsize": SIZE - 1,
    "legend.fontsize": SIZE - 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E7EB",
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "figure.facecolor": "white",
}


def panels(rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.0, 4.2)) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``rows * columns`` panels in this style, `size` in inches, and its axes."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewFigure

    with mpl.rc_context(_STYLE):
        figure = NewFigure(figsize=size, layout="constrained", dpi=DPI)
        FigureCanvasAgg(figure)
        axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    return figure, axes


def log_ticks(axis: Any) -> None:
    """Label a logarithmic axis at 1, 2 and 5 times the powers of ten, as plain numbers."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_formatter(NullFormatter())


def spread(places: list[float], gap: float) -> list[float]:
    """Return `places` moved apart to distances of at least `gap`, in their order, as near as a sweep gets them."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = [places[i] for i in order]
    for _ in range(200):
        done = True
        for i in range(len(moved) - 1):
            lack = gap - (moved[i + 1] - moved[i])
            if lack > 1e-6:
                moved[i] -= lack / 2
                moved[i + 1] += lack / 2
                done = False
        if done:
            break
    found = [0.0] * len(places)
    for rank, i in enumerate(order):
        found[i] = moved[rank]
    return found


def label_ends(axes: Axes, ends: Mapping[str, tuple[float, float, str]], size: int = SIZE - 1) -> None:
    """Write names at the right edge, level with their points ``(x, y, color)`` and apart from each other.

    Titles and notes come before, since they move the points.
    """
    figure = axes.figure
    figure.canvas.draw()
    points = [axes.transData.transform(end[:2]) for end in ends.values()]
    box = axes.get_window_extent()
    places = spread([float(point[1]) for point in points], gap=1.25 * size * figure.dpi / 72)
    for (name, (_, _, color)), y in zip(ends.items(), places, strict=True):
        text = axes.text(1.02, (y - box.y0) / box.height, name, transform=axes.transAxes, color=color, fontsize=size)
        text.set(va="center", ha="left", clip_on=False)


def label_points(axes: Axes, points: Iterable[tuple[float, float, str, str]], size: int = SIZE - 2) -> None:
    """Write names beside points ``(x, y, name, color)``, where neither text nor point is in the way."""
    figure = axes.figure
    figure.canvas.draw()
    found = list(points)
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    marks = [axes.transData.transform(point[:2]) for point in found]
    area = axes.get_window_extent()
    taken: list[Bbox] = []
    ways = [(0.5, 0.5), (-0.5, -0.5), (0.5, -0.5), (-0.5, 0.5), (0.5, 0.0), (-0.5, 0.0), (0.0, 0.5), (0.0, -0.5)]
    for x, y, name, color in found:
        text = axes.annotate(name, (x, y), (0, 0), textcoords="offset points", fontsize=size, color=color)
        for distance, (right, up) in ((far, way) for far in (4, 7, 14, 24) for way in ways):
            text.set_position((2 * right * distance, 2 * up * distance))
            text.set(ha={0.5: "left", -0.5: "right"}.get(right, "center"))
            text.set(va={0.5: "bottom", -0.5: "top"}.get(up, "center"))
            box = text.get_window_extent(renderer).padded(1)
            inside = area.x0 <= box.x0 and box.x1 <= area.x1 and area.y0 <= box.y0 and box.y1 <= area.y1
            free = not any(box.overlaps(other) for other in taken)
            if inside and free and not any(box.padded(3).contains(*mark) for mark in marks):
                taken.append(box)
                break
        else:
            text.remove()


def note(figure: Figure, text: str) -> None:
    """Write the source of the data below the panels."""
    figure.supxlabel(text, fontsize=SIZE - 3, color=OTHER, x=0.01, ha="left")


def save_figure(figure: Figure, path: Path) -> str:
    """Write the picture and return a line that names it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata={"Software": None} if path.suffix == ".png" else None)
    return f"plot: {path}"


def _texts(figure: Figure) -> list[tuple[str, Bbox]]:
    from matplotlib.text import Text

    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    hidden: set[int] = set()  # labels of ticks outside of their panel, which matplotlib does not draw
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.majorTicks, *axis.minorTicks):
            if not low <= tick.get_loc() <= high:
                hidden |= {id(tick.label1), id(tick.label2)}
    found: list[Any] = [text for text in figure.findobj(Text) if id(text) not in hidden and text.get_visible()]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in found if text.get_text().strip()]


def overlaps(figure: Figure) -> list[str]:
    """Return pairs of texts that overlap, and texts that leave the figure, as matplotlib places them."""
    texts = _texts(figure)
    wrong = []
    for i, (name, box) in enumerate(texts):
        inner = box.padded(-1)
        wrong += [f"{name!r} and {other!r}" for other, rest in texts[i + 1 :] if inner.overlaps(rest.padded(-1))]
        if box.x0 < -1 or box.y0 < -1 or box.x1 > figure.bbox.x1 + 1 or box.y1 > figure.bbox.y1 + 1:
            wrong.append(f"{name!r} leaves the figure")
    return wrong
