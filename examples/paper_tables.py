"""The tables and figures of the residual-compensation paper, computed again: examples, errors, densities, rates.

Writes ``benchmarks/results/paper_tables.json`` (``..._cuda.json``), ``docs/images/paper_tables.png`` and the tables of
``docs/residual.md``.  Source: Gu, arXiv 2403.06924, Figures 6 to 8, Tables 3 to 5.
Run: ``python examples/paper_tables.py [--quick] [--device cuda] [--out FOLDER]``
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paper_render import draw, render
from report import RESULTS, ROOT, replace_section, write_results
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.gemm import api as dense
from magicube_cutlass.bench.timing import measure
from magicube_cutlass.cli.environment import provenance
from residual import decompose
from residual.paper.gemm import PaperReport, gemm
from residual.paper.thresholds import crossover_density, kept_entries, synchronize

THRESHOLDS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, math.inf)
LITERAL = (0.0, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3, 1e-2, math.inf)  # equation 14 compares with sums of n products
DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
SPARSE = 0.1  # the threshold of the error table
STEP_RUNS = 9


def distributions(n: int, seed: int = 0) -> dict[str, Callable[[], Tensor]]:
    """Makers of ``n x n`` float32 matrices; each call goes on in its stream of random numbers."""
    g = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(n, n, generator=g)

    return {
        "uniform(0, 1)": lambda: torch.rand(n, n, generator=g),
        "normal(10, 3)": lambda: 10 + 3 * normal(),
        "exponential(1)": lambda: torch.empty(n, n).exponential_(generator=g),
        "chi-square(1)": lambda: normal().square(),
        "normal(0, 1)": normal,
    }


def run(A: Tensor, B: Tensor, **options: Any) -> tuple[Tensor, PaperReport]:
    """The product and its report."""
    found = gemm(A, B, return_report=True, **options)
    assert isinstance(found, tuple)
    return found


def relative(result: Tensor, truth: Tensor) -> float:
    """Relative Frobenius error."""
    return float((result.double() - truth).norm() / truth.norm())


def worked_example() -> dict[str, Any]:
    """A 3 x 3 product of our own in the printed example's conventions: 64 / max, truncation, equation 14."""
    A = torch.tensor([[2.0, 0.5, -1.0], [0.25, 1.0, 0.0], [-0.75, 0.125, 1.5]])
    B = torch.tensor([[1.0, 0.0, 0.5], [-0.3, 0.8, 0.0], [0.2, -0.6, 0.4]])
    threshold = 0.3
    a, b = (decompose(x, rounding="trunc", levels=64) for x in (A, B))
    product = dense.gemm(a.high, b.high)
    dequantized = product.double() * a.scale * b.scale
    truth = A.double() @ B.double()
    rules = {}
    for rule in ("eq14", "example"):
        result, report = run(A, B, levels="2^(N-2)", rule=rule, threshold=threshold, eta=1.0)
        rules[rule] = {
            "averages of rows": dequantized.abs().mean(1).tolist(),
            "averages of columns": dequantized.abs().mean(0).tolist(),
            "A kept": (a.high * kept_entries(A, dequantized, threshold, rule, False, 1)).tolist(),
            "B kept": (b.high * kept_entries(B.T, dequantized.T, threshold, rule, False, 1).T).tolist(),
            "error": relative(result, truth),
            "densities": [report.density_a, report.density_b],
        }
    direct = relative(run(A, B, levels="2^(N-2)", threshold=math.inf)[0], truth)
    return {
        "threshold": threshold, "A": A.tolist(), "B": B.tolist(), "A_int8": a.high.tolist(), "B_int8": b.high.tolist(),
        "C_quant": product.tolist(), "direct error": direct, "rules": rules,
    }  # fmt: skip


def errors_by_threshold(n: int, device: str, console: Console) -> list[dict[str, Any]]:
    """Figures 6 and 8: error and density of A' by threshold, distribution, width and rule."""
    found = []
    jobs = [(name, bits, rule) for name in distributions(1) for bits in (4, 8) for rule in ("mean", "eq14")]
    for name, bits, rule in track(jobs, "errors by threshold", console=console, transient=True):
        maker = distributions(n)[name]
        A, B = maker().to(device), maker().to(device)
        truth = A.double() @ B.double()
        points = []
        for threshold in THRESHOLDS if rule == "mean" else LITERAL:
            result, report = run(A, B, bits=bits, rule=rule, threshold=threshold, eta=0.0)
            shown = "inf" if threshold == math.inf else threshold
            points.append({"threshold": shown, "error": relative(result, truth), "density": report.density})
        found.append({"distribution": name, "bits": bits, "rule": rule, "points": points})
    return found


def errors_by_scaling(n: int, device: str) -> list[dict[str, Any]]:
    """Direct, sparse and full products under each scaling and rounding."""
    found = []
    for name, maker in distributions(n).items():
        A, B = maker().to(device), maker().to(device)
        truth = A.double() @ B.double()
        for bits in (4, 8):
            for scaling, rounding in (("tensor", "trunc"), ("vector", "trunc"), ("vector", "nearest")):
                options: dict[str, Any] = {"bits": bits, "scaling": scaling, "rounding": rounding, "eta": 0.0}
                direct, _ = run(A, B, threshold=math.inf, **options)
                sparse, report = run(A, B, threshold=SPARSE, rule="mean", **options)
                full, _ = run(A, B, threshold=0, **options)
                names = {"direct": direct, "sparse": sparse, "full": full}
                errors = {kind: relative(result, truth) for kind, result in names.items()}
                kind = {"distribution": name, "bits": bits, "scaling": scaling, "rounding": rounding}
                found.append({**kind, "errors": errors, "density": report.density})
    return found


def rates(n: int, device: torch.device, budget: float) -> dict[str, Any]:
    """Tables 3 and 4: milliseconds, the fastest run, of the products of int8 operands by density and V."""
    g = torch.Generator().manual_seed(1)
    planes = [torch.randint(-127, 128, (n, n), dtype=torch.int8, generator=g).to(device) for _ in range(4)]
    a, a0, b, b0 = planes
    x, y = a.float(), b.float()

    def waited(call: Callable[[], Tensor]) -> Callable[[], None]:
        def both() -> None:
            call()
            synchronize(device)

        return both

    calls = {
        "float32": waited(lambda: x @ y),
        "direct": waited(lambda: dense.gemm(a, b, out_dtype=torch.float32)),
        "full": waited(lambda: dense.gemm((a, a0), (b, b0), terms=3, out_dtype=torch.float32)),
    }
    left, right = mc.QuantTensor.from_ints(a0.T, bits=8), mc.QuantTensor.from_ints(b0, bits=8)
    for v in (1, 8):
        for density in DENSITIES:
            masks = [(torch.rand(n // v, n, generator=g) < density).repeat_interleave(v, 0).to(device) for _ in "AB"]
            thin = mc.SRBCRS.from_mask(a, masks[0], vector_length=v, bits=8)
            thick = mc.SRBCRS.from_mask(b.T, masks[1], vector_length=v, bits=8)

            def corrected(thin: mc.SRBCRS = thin, thick: mc.SRBCRS = thick) -> Tensor:
                total = dense.gemm(a, b).float()
                total.add_(mc.spmm(thin, right, out_dtype=torch.int32), alpha=2.0**-8)
                return total.add_(mc.spmm(thick, left, out_dtype=torch.int32).T.contiguous(), alpha=2.0**-8)

            calls[f"sparse V={v} {density}"] = waited(corrected)
    times = {name: timing.best * 1e3 for name, timing in measure(calls, budget=budget, min_runs=3).items()}
    return {"n": n, "ms": times}


def steps(n: int, device: str) -> list[dict[str, Any]]:
    """Figure 7: where the time of one call goes; the fastest call of each kind."""
    maker = distributions(n)["exponential(1)"]
    A, B = maker().to(device), maker().to(device)
    kinds = {"direct": (math.inf, None), "sparse": (2.0, 1.0), "dense": (2.0, 0.0), "full": (0.0, 0.0)}
    found = []
    for kind, (threshold, eta) in kinds.items():
        reports = [run(A, B, rule="mean", threshold=threshold, eta=eta)[1] for _ in range(STEP_RUNS + 1)][1:]
        best = min(reports, key=lambda report: sum(report.times.values()))
        times = {step: seconds * 1e3 for step, seconds in best.times.items()}
        found.append({"n": n, "kind": kind, "threshold": str(threshold), "density": best.density, "ms": times})
    return found


def collect(device: str, quick: bool, console: Console) -> dict[str, Any]:
    """Everything, as it goes to the results file."""
    where, n = torch.device(device), 128 if quick else 1024
    sizes = (128,) if quick else (1024, 2048) if device == "cpu" else (4096, 8192)
    return {
        "machine": provenance(),
        "device": where.type,
        "n": n,
        "worked example": worked_example(),
        "errors by threshold": errors_by_threshold(n, device, console),
        "errors by scaling": errors_by_scaling(n, device),
        "rates": [rates(size, where, 0.02 if quick else 0.5) for size in track(sizes, "rates", console=console)],
        "eta": {str(v): crossover_density(where, v) for v in (1, 8)},
        "steps": [row for size in sizes for row in steps(size, device)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="n = 128; nothing of the project is written")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="folder for the results file and the plot; needed with --quick")
    parser.add_argument("--render", action="store_true", help="measure nothing, only draw and write the page")
    args = parser.parse_args()
    if args.quick and args.out is None:
        parser.error("--quick needs --out: its figures do not belong in the project")
    console = Console(stderr=True)
    suffix = "" if args.device == "cpu" else f"_{args.device}"
    path = (args.out or RESULTS) / f"paper_tables{suffix}.json"
    if not args.render:
        write_results(path, collect(args.device, args.quick, console))
    results = json.loads(path.read_text())
    text = render(results)
    Console(width=150).print(Markdown(text))
    plot = (args.out or ROOT / "docs" / "images") / f"paper_tables{suffix}.png"
    console.print(draw(results, plot), soft_wrap=True)
    if args.out is None:
        replace_section(f"paper-tables{suffix}", text)


if __name__ == "__main__":
    main()
