"""``magicube info``: the pattern of a matrix in a file, and its bytes in each format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magicube_cutlass.cli.arguments import (
    STRIDES,
    Json,
    MatrixFile,
    Stride,
    TensorName,
    VectorLength,
    check_choice,
    check_file,
    check_length,
    print_json,
)
from magicube_cutlass.cli.console import bytes_text, facts, output, working

if TYPE_CHECKING:
    import torch

    from magicube_cutlass.formats.files import FilePattern
    from magicube_cutlass.formats.pattern import Pattern

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
    counts = ((lengths - low) // width).bincount().tolist()
    return [(low + i * width, min(low + (i + 1) * width - 1, high), count) for i, count in enumerate(counts)]


def figures(found: FilePattern, stride: int) -> dict[str, object]:
    """Return what ``--json`` prints: sizes, lengths, padding, fill-in, histogram and bytes."""
    pattern = found.pattern
    lengths, padded = pattern.row_lengths, pattern.padded(stride).col_indices.shape[0]
    return {
        "shape": list(pattern.shape),
        "vector_length": pattern.vector_length,
        "vector_rows": pattern.vector_rows,
        "vectors": pattern.vectors,
        "nnz": pattern.nnz,
        "density": pattern.density,
        "elements": found.elements,
        "element_density": found.elements / max(1, pattern.shape[0] * pattern.shape[1]),
        "row_length_mean": pattern.vectors / max(1, pattern.vector_rows),
        "row_length_max": int(lengths.max()) if len(lengths) else 0,
        "empty_rows": int((lengths == 0).sum()),
        "stride": stride,
        "padding": padded - pattern.vectors,
        "histogram": histogram(lengths),
        "bytes": format_bytes(pattern, stride),
    }


def _summary(pattern: Pattern, of: dict[str, object], file_is_smtx: bool) -> dict[str, str]:
    mean, longest = pattern.vectors / max(1, pattern.vector_rows), of["row_length_max"]
    padding, per_row = int(str(of["padding"])), "; each row of the file is one vector row" if file_is_smtx else ""
    found = {
        "shape": f"{pattern.shape[0]} x {pattern.shape[1]}  ({pattern.vector_rows} vector rows of V = "
        f"{pattern.vector_length}{per_row})",
        "vectors": f"{pattern.vectors}  (nnz {pattern.nnz})",
        "density": f"{pattern.density:.4f}  (sparsity {1 - pattern.density:.4f})",
        "row lengths": f"mean {mean:.1f}, longest {longest} ({int(str(longest)) / mean if mean else 0:.2f}x), "
        f"{of['empty_rows']} empty",
        "padding": f"{padding} vectors at stride {of['stride']} "
        f"({padding / max(1, padding + pattern.vectors):.1%} of what is stored)",
    }
    if of["elements"] != of["nnz"]:
        found["fill-in"] = (
            f"{of['elements']} elements (density {of['element_density']:.4f}) fill {pattern.nnz} places of vectors"
        )
    return found


def info(
    file: MatrixFile,
    vector_length: VectorLength = None,
    stride: Stride = 32,
    tensor: TensorName = None,
    as_json: Json = False,
) -> None:
    """Show shape, density, row lengths, and bytes in each format."""
    check_choice("stride", stride, STRIDES)
    check_length(vector_length)
    check_file(file)
    from magicube_cutlass.formats.files import read_pattern

    with working(f"reading {file.name}"):
        found = read_pattern(file, vector_length=vector_length, tensor=tensor)
        of = figures(found, stride)
    if as_json:
        print_json({"file": str(file), **of})
        return
    from rich.table import Table

    pattern, sizes = found.pattern, format_bytes(found.pattern, stride)
    console = output()
    console.print(facts(str(file), _summary(pattern, of, ".smtx" in file.suffixes)))
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
