"""``magicube spy``: a picture of a pattern, with its vector rows and strides."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicube_cutlass.cli.arguments import (
    ENDINGS,
    STRIDES,
    Json,
    Stride,
    TensorName,
    VectorLength,
    check_choice,
    check_file,
    check_length,
    print_json,
)
from magicube_cutlass.cli.console import output, working

if TYPE_CHECKING:
    import numpy as np

    from magicube_cutlass.formats.pattern import Pattern

PIXELS = 1024  # most cells drawn a side; larger patterns are drawn in tiles
LINES = 64  # vector rows beyond which lines between them would cover the picture
MASKS = ("local", "strided", "global_tokens", "random", "bigbird")


def _plots() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("spy needs matplotlib: pip install 'magicube-cutlass[plots]'") from None
    return Figure


def stride_cells(pattern: Pattern, stride: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return one cell per vector: 0 empty, 1 and 2 alternating per stride; tiles take their maximum."""
    import torch

    rows, columns = pattern.row_indices, pattern.col_indices.long()
    position = torch.arange(pattern.vectors, device="cpu") - pattern.row_offsets[:-1][rows]
    tall, wide = (max(1, -(-size // PIXELS)) for size in (pattern.vector_rows, pattern.shape[1]))
    height, width = max(1, -(-pattern.vector_rows // tall)), max(1, -(-pattern.shape[1] // wide))
    cells = torch.zeros(height * width, dtype=torch.float64, device="cpu")
    cells.scatter_reduce_(0, rows // tall * width + columns // wide, 1 + (position // stride % 2).double(), "amax")
    return cells.view(height, width).numpy()


def draw_pattern(pattern: Pattern, stride: int, title: str, out: Path) -> None:
    """Draw a pattern beside the lengths of its vector rows and their padding."""
    figure = _plots()(figsize=(11, 6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    rows, v = pattern.vector_rows, pattern.vector_length
    import numpy as np
    from matplotlib.colors import ListedColormap

    colors = ListedColormap(["white", "tab:blue", "tab:orange"])
    extent = (0, max(1, pattern.shape[1]), max(1, rows), 0)  # matplotlib warns about empty axes
    left.imshow(
        stride_cells(pattern, stride),
        cmap=colors,
        vmin=0,
        vmax=2,
        extent=extent,
        aspect="auto",
        interpolation="nearest",
    )
    if rows <= LINES:
        left.hlines(range(rows + 1), 0, pattern.shape[1], color="0.8", linewidth=0.5)
    left.set(xlabel="column", ylabel=f"vector row ({v} rows each)")
    left.set_title(f"vectors, color changes every stride of {stride}", fontsize=9)
    lengths, height = pattern.row_lengths.numpy(), np.arange(rows) + 0.5
    padding = -lengths % stride
    right.barh(height, lengths, height=1.0, color="tab:blue", label="stored")
    right.barh(height, padding, left=lengths, height=1.0, color="0.8", label="padding")
    longest = int((lengths + padding).max()) if rows else 0
    if longest // stride <= LINES:
        right.vlines(range(0, longest + 1, stride), 0, rows, color="black", linewidth=0.4)
    right.set(xlabel="vectors")
    right.set_title("strides of each vector row", fontsize=9)
    right.legend(fontsize=8, loc="lower right")
    m, k = pattern.shape
    figure.suptitle(f"{title}: {m} x {k}, V = {v}, density {pattern.density:.3f}", fontsize=10)
    figure.savefig(out, dpi=130)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def parse_mask(text: str, vector_length: int) -> Pattern:
    """Return the mask of ``NAME:QUERIES:KEY=NUMBER,...``; `ValueError` for other names, keys and numbers."""
    name, queries, options = [*text.split(":"), "", ""][:3]
    if name not in MASKS:
        raise ValueError(f"mask must begin with one of {', '.join(MASKS)}, got {name!r}")
    from magicube_cutlass import masks

    try:
        pairs = {key: _number(value) for key, value in (one.split("=") for one in options.split(",") if one)}
        made: Pattern = getattr(masks, name)(int(queries), vector_length=vector_length, **pairs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"mask {text!r}: {error}") from None
    return made


def spy(
    out: Annotated[Path, typer.Option("--out", "-o", help="Output image; the extension selects the format.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help=f"A matrix: {', '.join(ENDINGS)}.", show_default=False)
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:QUERIES:KEY=NUMBER,...",
            help=f"An attention mask instead, such as local:512:window=32,causal=1: {', '.join(MASKS)}.",
        ),
    ] = None,
    vector_length: VectorLength = None,
    stride: Stride = 32,
    tensor: TensorName = None,
    as_json: Json = False,
) -> None:
    """Draw the pattern of a file or of an attention mask with its vector rows and strides."""
    check_choice("stride", stride, STRIDES)
    check_length(vector_length)
    if (file is None) == (mask is None):
        raise ValueError("spy draws a file or a --mask: give one of them")
    if file is not None:
        check_file(file)
    _plots()  # before the work, so that a missing package is an error at once
    from magicube_cutlass.formats.files import read_pattern

    name = file.name if file is not None else str(mask)
    with working(f"drawing {name}"):
        if file is None:
            pattern = parse_mask(str(mask), vector_length or 8)
        else:
            pattern = read_pattern(file, vector_length=vector_length, tensor=tensor).pattern
        draw_pattern(pattern, stride, name, out)
    if as_json:
        print_json({"out": str(out), "shape": list(pattern.shape), "density": pattern.density})
    else:
        output().print(f"wrote {out}")
