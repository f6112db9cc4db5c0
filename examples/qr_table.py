"""QR through quantized products: the rows of the paper's Table 6, and what compact WY and a chosen error make of them.

With ``--project`` it writes ``benchmarks/results/qr_table.json``, ``docs/images/qr_table.png`` and the table of
``docs/lab/residual.md``.
Source: Gu, arXiv 2403.06924, Table 6.  Run: ``python examples/qr_table.py [--quick] [--out FOLDER] [--project]``
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from report import (
    RESULTS,
    ROOT,
    add_output_options,
    choose_output,
    machine_line,
    markdown,
    replace_section,
    write_results,
)
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track
from torch import Tensor

from magicube_cutlass.bench.figures import DENSE, FOURTH, OURS, label_points, log_ticks, note, panels, save_figure
from magicube_cutlass.cli.environment import provenance
from residual.linalg.qr import qr
from residual.linalg.solve import solve
from residual.matmul import matmul

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (128, 200, 256)
PAPER = {"scaling": "tensor", "rounding": "trunc", "rule": "mean"}
KINDS = {"origin": math.inf, "full": 0.0, "sparse": 0.1}  # thresholds
MODES = ("direct", "full", "three_digit")
TOLERANCES = (1e-2, 1e-4, 1e-6)


def matrices(n: int) -> dict[str, Tensor]:
    """The four distributions of Table 6."""
    g = torch.Generator().manual_seed(n)
    normal = torch.randn(n, n, generator=g)
    return {
        "uniform(0, 1)": torch.rand(n, n, generator=g),
        "normal(10, 3)": 10 + 3 * normal,
        "exponential(4)": torch.empty(n, n).exponential_(4, generator=g),
        "chi-square(1)": torch.randn(n, n, generator=g).square(),
    }


def loss(A: Tensor, factors: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """``||A - QR|| / ||A||`` and ``||Q^T Q - I|| / sqrt(n)``, Frobenius norms."""
    q, r = (factor.double() for factor in factors)
    gram = q.T @ q - torch.eye(q.shape[1], dtype=torch.float64)
    return float((A.double() - q @ r).norm() / A.double().norm()), float(gram.norm()) / math.sqrt(q.shape[1])


def chosen(**options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """A product by :func:`residual.matmul`."""

    def product(x: Tensor, y: Tensor) -> Tensor:
        found = matmul(x, y, **options)
        assert isinstance(found, Tensor)
        return found

    return product


def ways() -> dict[str, tuple[str, dict[str, Any]]]:
    """Method and options by name: the paper's with explicit reflectors and with blocks, then ours."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for bits in (4, 8):
        for kind, threshold in KINDS.items():
            for method in ("explicit", "wy"):
                found[f"int{bits} {kind}, {method}"] = method, {"bits": bits, "threshold": threshold, **PAPER}
    found |= {f"{mode}, wy": ("wy", {"product": chosen(mode=mode, bits=8)}) for mode in MODES}
    found |= {f"tol {tol:g}, wy": ("wy", {"product": chosen(tol=tol, on_failure="fallback")}) for tol in TOLERANCES}
    return found | {"float32, wy": ("wy", {"product": torch.matmul})}


def rows(sizes: tuple[int, ...], console: Console) -> list[dict[str, Any]]:
    """Every way on every matrix."""
    jobs = [(n, way) for n in sizes for way in ways()]
    found = []
    for n, way in track(jobs, "factorizations", console=console, transient=True):
        method, options = ways()[way]
        for name, A in matrices(n).items():
            start = time.perf_counter()
            factors = qr(A, method=method, **options)
            seconds = time.perf_counter() - start
            error, skew = loss(A, factors)
            kind = {"n": n, "distribution": name, "way": way, "seconds": seconds}
            found.append({**kind, "error": error, "orthogonality": skew})
    return found


def refinements(n: int) -> list[dict[str, Any]]:
    """Systems solved to float64 accuracy from quantized factors."""
    found = []
    for name, A in matrices(n).items():
        b = A.double().sum(1)
        for factorization in ("qr", "lu"):
            for kind, threshold in (("direct", math.inf), ("full", 0.0)):
                _, report = solve(A.double(), b, factorization=factorization, threshold=threshold, restart=n)
                how = {"distribution": name, "factorization": factorization, "product": f"int8 {kind}"}
                counts = {"refinements": report.refinements, "iterations": report.iterations}
                found.append({"n": n, **how, **counts, "backward error": report.backward_error})
    return found


def render(results: dict[str, Any]) -> str:
    """Both tables as Markdown: error (orthogonality), and GMRES steps."""
    found = {(row["way"], row["distribution"], row["n"]): row for row in results["rows"]}
    names = list(dict.fromkeys(row["way"] for row in results["rows"]))
    kinds = list(dict.fromkeys(row["distribution"] for row in results["rows"]))
    n = max(row["n"] for row in results["rows"])
    parts = [f"Measured on {machine_line(results)}."]
    for size in dict.fromkeys(row["n"] for row in results["rows"]):
        body = []
        for name in names:
            cells = [found[name, kind, size] for kind in kinds]
            ms = sum(cell["seconds"] for cell in cells) / len(cells) * 1e3
            body.append([name, *(f"{c['error']:.1e} ({c['orthogonality']:.1e})" for c in cells), f"{ms:.0f}"])
        title = f"### Table 6's rows, n = {size}: ||A - QR|| / ||A|| (||Q^T Q - I|| / sqrt n), mean milliseconds"
        parts.append(f"{title}\n\n{markdown(['way', *kinds, 'ms'], body)}")
    body = []
    for row in results["refinements"]:
        counts = str(row["refinements"]), str(row["iterations"]), f"{row['backward error']:.1e}"
        body.append([row["distribution"], row["factorization"], row["product"], *counts])
    headers = ["matrix", "factors", "product", "refinements", "GMRES steps", "backward error"]
    parts.append(f"### `residual.solve`, n = {n}, tol 1e-15\n\n{markdown(headers, body)}")
    return "\n\n".join(parts)


def figure_of(results: dict[str, Any]) -> Figure:
    """Error against time at the largest n for two distributions, in compact WY form."""
    n = max(row["n"] for row in results["rows"])
    kinds = list(dict.fromkeys(row["distribution"] for row in results["rows"]))[:2]
    figure, areas = panels(1, 2, (12.0, 5.0))
    figure.suptitle(f"QR by quantized products, compact WY form, n = {n}")
    note(figure, machine_line(results))
    labels = []
    for axes, kind in zip(areas, kinds, strict=True):
        names = []
        for row in results["rows"]:
            if (row["n"], row["distribution"]) == (n, kind) and row["way"].endswith(", wy"):
                name = row["way"].removesuffix(", wy")
                color = DENSE if name.startswith("int4") else OURS if name.startswith("int8") else FOURTH
                point = (row["seconds"] * 1e3, row["error"])
                axes.plot(*point, "o", color=color)
                names.append((*point, name, color))
        axes.margins(0.2, 0.1)
        axes.set(xscale="log", yscale="log", xlabel="time (ms)", ylabel="||A - QR|| / ||A|| (ratio)", title=kind)
        log_ticks(axes.xaxis)
        labels.append(names)
    for axes, names in zip(areas, labels, strict=True):
        label_points(axes, names)
    return figure


def draw(results: dict[str, Any], path: Path) -> str:
    """Draw the picture; return one line that says what became of it."""
    try:
        return save_figure(figure_of(results), path)
    except ImportError:
        return "no plot: pip install 'magicube-cutlass[plots]'"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="n = 32")
    add_output_options(parser)
    args = parser.parse_args()
    choose_output(parser, args, args.quick)
    console = Console(stderr=True)
    path = (args.out or RESULTS) / "qr_table.json"
    if not args.render:
        sizes = (32,) if args.quick else SIZES
        found = {"machine": provenance(), "rows": rows(sizes, console), "refinements": refinements(max(sizes))}
        write_results(path, found)
    results = json.loads(path.read_text())
    text = render(results)
    Console(width=150).print(Markdown(text))
    console.print(draw(results, (args.out or ROOT / "docs" / "images") / "qr_table.png"), soft_wrap=True)
    if args.out is None:
        replace_section("qr-table", text)


if __name__ == "__main__":
    main()
