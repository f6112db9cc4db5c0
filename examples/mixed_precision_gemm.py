"""All 25 pairs of small floats in one dense product: error, bytes and time, as heat maps.

Normal matrices, a scale per row of the left one and a column of the right one.  Errors are computed here; so are
times where there is a GPU, else those of ``benchmarks/results/floats_h200.json`` are drawn.
Run: ``python examples/mixed_precision_gemm.py [--size N] [--out PICTURE]``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from report import RESULTS
from rich.console import Console
from rich.table import Table

import magicube_cutlass as mc
from cute_kernels.floats import FORMATS
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor, matmul

Grid = dict[tuple[str, str], float]
LAUNCHES = 20


def microseconds(a: ScaledFloatTensor, b: ScaledFloatTensor) -> float:
    """Of one product among ``LAUNCHES`` on the current GPU."""
    matmul(a, b, out_dtype=torch.float16)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(LAUNCHES):
        matmul(a, b, out_dtype=torch.float16)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / LAUNCHES


def measure(n: int, device: str) -> dict[str, Grid]:
    """Relative error in the Frobenius norm, bytes of both operands and, on a GPU, microseconds."""
    generator = torch.Generator(device).manual_seed(0)
    x, y = (torch.randn(n, n, generator=generator, device=device) for _ in range(2))
    truth = x.double() @ y.double()
    lefts = {name: mc.quantize(x, dtype=name, scale="row") for name in FORMATS}
    rights = {name: mc.quantize(y, dtype=name, scale="column") for name in FORMATS}
    found: dict[str, Grid] = {"relative error": {}, "megabytes": {}}
    for pair in ((left, right) for left in FORMATS for right in FORMATS):
        a, b = lefts[pair[0]], rights[pair[1]]
        found["relative error"][pair] = float((matmul(a, b).double() - truth).norm() / truth.norm())
        found["megabytes"][pair] = (a.nbytes + b.nbytes) / 1e6
        if device == "cuda":
            found.setdefault("microseconds", {})[pair] = microseconds(a, b)
    return found


def known_times() -> tuple[str, Grid]:
    """A title and times from the results file; nothing where it is absent."""
    path = RESULTS / "floats_h200.json"
    if not path.exists():
        return "", {}
    results = json.loads(path.read_text())
    m, k, n = results["pairs"]["shape"]
    times = {tuple(row["name"].split(" x ")): row["us"] for row in results["pairs"]["products"] if "us" in row}
    return f"microseconds, {m} x {k} x {n}, {results['machine']['gpu']}", times


def show(title: str, grid: Grid, console: Console) -> None:
    """The grid as a table, left formats down and right ones across."""
    table = Table("", *FORMATS, title=title)
    for left in FORMATS:
        table.add_row(left, *(f"{grid[left, right]:.3g}" for right in FORMATS))
    console.print(table)


def draw(grids: dict[str, Grid], path: Path) -> str:
    """One heat map a grid."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: pip install 'magicube-cutlass[plots]'"
    figure = Figure(figsize=(5 * len(grids), 4.6), layout="constrained")
    for axes, (title, grid) in zip(figure.subplots(1, len(grids), squeeze=False).flat, grids.items(), strict=True):
        cells = [[grid[left, right] for right in FORMATS] for left in FORMATS]
        axes.imshow(cells, cmap="viridis_r")
        middle = (min(map(min, cells)) + max(map(max, cells))) / 2
        for i, row in enumerate(cells):
            for j, value in enumerate(row):
                color = "white" if value > middle else "black"
                axes.text(j, i, f"{value:.3g}", ha="center", va="center", color=color, fontsize=9)
        axes.set_xticks(range(len(FORMATS)), list(FORMATS))
        axes.set_yticks(range(len(FORMATS)), list(FORMATS))
        axes.set(title=title, xlabel="right", ylabel="left")
    figure.savefig(path, dpi=100)
    return f"plot: {path}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, help="rows and columns; 4096 on a GPU, else 1024")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-output") / "mixed_precision_gemm.png", help="the picture"
    )
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = args.size or (4096 if device == "cuda" else 1024)
    grids = {f"{name}, n = {size}": grid for name, grid in measure(size, device).items()}
    title, times = known_times()
    if device == "cpu" and len(times) == len(FORMATS) ** 2:
        grids[title] = times
    console = Console()
    for name, grid in grids.items():
        show(name, grid, console)
    console.print(draw(grids, args.out), soft_wrap=True)


if __name__ == "__main__":
    main()
