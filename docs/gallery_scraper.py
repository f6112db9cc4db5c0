"""Collects the figures of gallery examples, which are made without pyplot."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakSet

from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst

from magicube_cutlass.bench.figures import save_figure

_shown: WeakSet[Figure] = WeakSet()


def figures(_block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Write the new figures of a code block and return the reST that shows them."""
    paths = []
    for value in list(block_vars["example_globals"].values()):
        if isinstance(value, Figure) and value not in _shown:
            _shown.add(value)
            path = str(next(block_vars["image_path_iterator"]))
            save_figure(value, Path(path))
            paths.append(path)
    text: str = figure_rst(paths, gallery_conf["src_dir"])
    return text
