"""``magicube info``: the content of an .smtx file, and its bytes in each format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from magicube_cutlass.checks import check_stride
from magicube_cutlass.cli.console import bytes_text, facts, output, working
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.smtx import read_smtx

BINS = 10
BAR = 40


def format_bytes(pattern: Pattern, stride: int) -> dict[str, int]:
    """Return the bytes of the matrix in each format, indices and values together."""
    (m, k), v = pattern.shape, pattern.vector_length
    padded = pattern.padded(stride).col_indices.shape[0]
    pointers = 2 * 8 * pattern.vector_rows  # row_start and row_end, int64
    sizes = {f"SR-BCRS int{bits}": pointers + padded * 4 + padded * v * bits // 8 for bits in (4, 8, 16)}
    # an element needs its own column in CSR, where SR-BCRS has one for V elements
    sizes["CSR int8"] = 4 * (m + 1) + pattern.nnz * (4 + 1)
    sizes["dense int8"] = m * k
    sizes["dense fp16"] = 2 * m * k
    return sizes


def histogram(lengths: torch.Tensor, bins: int = BINS) -> list[tuple[int, int, int]]:
    """Return ``(first, last, count)`` of row lengths in at most `bins` ranges of equal width."""
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // bins))
    counts = torch.bincount((lengths - low) // width).tolist()
    return [(low + i * width, min(low + (i + 1) * width - 1, high), count) for i, count in enumerate(counts)]


def _summary(pattern: Pattern, stride: int) -> dict[str, str]:
    lengths, padded = pattern.row_lengths, pattern.padded(stride).col_indices.shape[0]
    empty, mean = int((lengths == 0).sum()), pattern.vectors / max(1, pattern.vector_rows)
    longest = int(lengths.max()) if len(lengths) else 0
    return {
        "shape": f"{pattern.shape[0]} x {pattern.shape[1]}  ({pattern.vector_rows} vector rows of V = "
        f"{pattern.vector_length}; each row of the file is one vector row)",
        "vectors": f"{pattern.vectors}  (nnz {pattern.nnz})",
        "density": f"{pattern.density:.4f}  (sparsity {1 - pattern.density:.4f})",
        "row lengths": f"mean {mean:.1f}, longest {longest} ({longest / mean if mean else 0:.2f}x), {empty} empty",
        "padding": f"{padded - pattern.vectors} vectors at stride {stride} "
        f"({(padded - pattern.vectors) / max(1, padded):.1%} of what is stored)",
    }


def info(
    file: Annotated[Path, typer.Argument(metavar="FILE.smtx", help="An .smtx file, plain or gzipped.")],
    vector_length: Annotated[int, typer.Option(help="V: rows of the matrix in each row of the file.")] = 8,
    stride: Annotated[int, typer.Option(help="Vectors that a row of SR-BCRS is padded to: 16, 32 or 64.")] = 32,
) -> None:
    """Show shape, density, row lengths, and bytes in each format."""
    check_stride(stride)
    with working(f"reading {file.name}"):
        pattern = read_smtx(file, vector_length=vector_length)
        summary, sizes = _summary(pattern, stride), format_bytes(pattern, stride)
    console = output()
    console.print(facts(str(file), summary))
    bars = Table(title="vectors a row", title_justify="left", box=None, show_header=False)
    rows = histogram(pattern.row_lengths)
    most = max((count for *_, count in rows), default=1)
    for first, last, count in rows:
        bars.add_row(f"{first}-{last}", f"{count}", "█" * -(-count * BAR // most))
    console.print(bars)
    table = Table("format", "bytes", "", "of dense int8", title="size", title_justify="left", box=None)
    for name, size in sizes.items():
        table.add_row(name, str(size), bytes_text(size), f"{size / max(1, sizes['dense int8']):.2f}x")
    console.print(table)
