"""Pictures of the pages: texts do not overlap, axes have units, small texts stay legible, colors differ in gray."""

from __future__ import annotations

import importlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.house import ROOT

pytest.importorskip("matplotlib")
IMAGES = ROOT / "docs" / "images"
LEGIBLE = 8  # points, of the smallest text


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("examples", "benchmarks", "benchmarks/plots"):
        monkeypatch.syspath_prepend(ROOT / folder)
    return importlib.import_module("all_plots")


def check(figure: Any) -> None:
    """Texts apart and inside, axis names with units in brackets, and no text smaller than legible."""
    from matplotlib.text import Text

    from magicube_cutlass.bench.figures import overlaps

    assert not overlaps(figure)
    for axes in figure.axes:
        assert axes.get_xlabel() and axes.get_ylabel()
        assert "(" in axes.get_xlabel() and ("(" in axes.get_ylabel() or " x " in axes.get_ylabel())
    texts = [text for text in figure.findobj(Text) if text.get_text().strip()]
    assert min(text.get_fontsize() for text in texts) >= LEGIBLE


@pytest.mark.parametrize("picture", sorted(path.name for path in IMAGES.glob("*.png")))
def test_texts_are_apart_and_axes_have_units(picture: str, plots: Any) -> None:
    check(plots.figure_of(picture))  # so every picture of the pages is one that is drawn here


def test_overlaps_are_seen() -> None:
    from magicube_cutlass.bench.figures import label_points, overlaps, panels

    figure, (axes,) = panels()
    axes.set(xlabel="time (s)", ylabel="error (ratio)", xlim=(0, 1), ylim=(0, 1))
    assert not overlaps(figure)
    axes.text(0.5, 0.5, "one")
    axes.text(0.51, 0.5, "two")
    axes.text(0.95, 0.2, "a text that is longer than the place it has in the figure", in_layout=False)
    wrong = overlaps(figure)
    assert "'one' and 'two'" in wrong and any("leaves the figure" in line for line in wrong)
    with pytest.raises(AssertionError):
        check(figure)

    figure, (axes,) = panels()
    axes.plot([0.5, 0.51, 0.52], [0.5, 0.5, 0.5], "o")
    label_points(axes, [(0.5 + i / 100, 0.5, f"point {i}", "black") for i in range(3)])
    assert len([text for text in axes.texts if text.get_text()]) == 3 and not overlaps(figure)


def test_colors_differ_for_those_who_see_no_colors() -> None:
    from matplotlib.colors import to_rgb

    from magicube_cutlass.bench import figures

    gray = sorted(
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), to_rgb(color), strict=True)) for color in figures.COLORS[:3]
    )
    assert all(b - a > 0.03 for a, b in pairwise(gray))
    assert len(set(figures.MARKERS)) == len(figures.MARKERS)  # and each line has a marker of its own


def test_a_picture_is_the_same_each_time(tmp_path: Path) -> None:
    from magicube_cutlass.bench.figures import panels, save_figure

    for name in ("a.png", "b.png"):
        figure, (axes,) = panels()
        axes.plot([1, 2], [1, 2])
        save_figure(figure, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
