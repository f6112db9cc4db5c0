"""Quantized SpMM and SDDMM on the matrices of pruned networks: exact, and timed against the dense product.

Run: ``python examples/demo.py [--quick] [--out FOLDER]`` (or ``make demo``)
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from dlmc_data import find
from rich.console import Console
from rich.progress import track
from rich.table import Table

import magicube_cutlass as mc
from cute_kernels.integers import widen
from magicube_cutlass.bench.problems import check_product, dense_baselines, exact_dtype, random_matrix, random_operand
from magicube_cutlass.bench.timing import measure
from magicube_cutlass.cli.console import bytes_text

N = 256  # columns of SpMM's dense operand
SHORT = {"float32": "f32", "bfloat16": "bf16", "torch dynamic int8": "dyn8", "torch._int_mm": "int_mm",
         "torch._int_mm, column-major": "int_mm"}  # fmt: skip
INNER = 64  # inner size of SDDMM, a head of attention
VECTOR_LENGTHS = (2, 4, 8)
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Result:
    """One matrix, V and pair of precisions; milliseconds."""

    name: str
    pattern: mc.Pattern
    lhs_bits: int
    rhs_bits: int
    nbytes: int
    spmm: float
    dense: float
    baseline: str
    sddmm: float | None

    @property
    def ratio(self) -> float:
        """How many times faster than the dense product."""
        return self.dense / self.spmm


def check_sddmm(pattern: mc.Pattern, bits: int) -> tuple[mc.QuantTensor, mc.QuantTensor]:
    """Random operands of an SDDMM whose result equals the reference at every vector; raises if it does not."""
    (m, n), dtype = pattern.shape, exact_dtype(INNER, bits, bits)
    x, y = random_operand(m, INNER, bits, 3), random_operand(n, INNER, bits, 4)
    sampled = mc.sddmm(x, y, pattern, out_dtype=dtype)
    if not torch.equal(widen(sampled.vectors()), mc.reference.sddmm(x, y, pattern)):
        raise ArithmeticError(f"SDDMM of {pattern} with {bits} bits differs from the reference")
    return x, y


def run(path: Path, vector_length: int, lhs_bits: int, rhs_bits: int, budget: float) -> Result:
    """Format, SpMM, SDDMM, exact check, times."""
    pattern = mc.read_smtx(path, vector_length=vector_length)
    k = pattern.shape[1]
    lhs, rhs = random_matrix(pattern, lhs_bits, 1), random_operand(k, N, rhs_bits, 2)
    lhs.check_format(full=True)
    dtype = exact_dtype(k, lhs_bits, rhs_bits)
    check_product(lhs, rhs, mc.spmm(lhs, rhs, out_dtype=dtype))
    calls = {"spmm": lambda: mc.spmm(lhs, rhs, out_dtype=dtype), **dense_baselines(lhs, rhs)}
    if (lhs_bits, rhs_bits) in mc.SDDMM_PAIRS:
        x, y = check_sddmm(pattern, lhs_bits)
        sampled = exact_dtype(INNER, lhs_bits, rhs_bits)
        calls["sddmm"] = lambda: mc.sddmm(x, y, pattern, out_dtype=sampled)
    times = {name: timing.median * 1e3 for name, timing in measure(calls, budget=budget, min_runs=3).items()}
    dense, baseline = min((ms, name) for name, ms in times.items() if name not in ("spmm", "sddmm"))
    name = "/".join(path.parts[-4:-1]) + f" {pattern.vector_rows}x{k}" if "dlmc" in path.parts else path.stem
    return Result(name, pattern, lhs_bits, rhs_bits, lhs.nbytes, times["spmm"], dense, baseline, times.get("sddmm"))


def show(results: list[Result], console: Console) -> None:
    """The table of all results."""
    table = Table(title=f"n = {N}, SDDMM inner size {INNER}, {torch.get_num_threads()} threads; milliseconds")
    for header in ("matrix", "V", "density", "pair", "bytes", "spmm", "dense", "by", "ratio", "sddmm", "exact rows"):
        table.add_column(header, justify="left" if header == "matrix" else "right", no_wrap=True)
    last = ""
    for one in results:
        table.add_row(
            one.name if one.name != last else "",
            str(one.pattern.vector_length),
            f"{one.pattern.density:.3f}",
            f"L{one.lhs_bits}-R{one.rhs_bits}",
            bytes_text(one.nbytes),
            f"{one.spmm:.3f}",
            f"{one.dense:.3f}",
            SHORT.get(one.baseline, one.baseline),
            f"{one.ratio:.2f}x",
            "-" if one.sddmm is None else f"{one.sddmm:.3f}",
            f"all {one.pattern.shape[0]}",
        )
        last = one.name
    console.print(table)


def plot(results: list[Result], out: Path) -> str:
    """Speed against density; returns one line that says what became of it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: pip install 'magicube-cutlass[plots]'"
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for v, marker in zip(sorted({one.pattern.vector_length for one in results}), "os^D", strict=False):
        for pair, color in zip(sorted({(one.lhs_bits, one.rhs_bits) for one in results}), range(10), strict=False):
            points = [
                (one.pattern.density, one.ratio)
                for one in results
                if one.pattern.vector_length == v and (one.lhs_bits, one.rhs_bits) == pair
            ]
            if points:
                label = f"L{pair[0]}-R{pair[1]}, V = {v}"
                axes.scatter(*zip(*points, strict=True), marker=marker, color=f"C{color}", label=label)
    axes.axhline(1, color="0.5", linewidth=0.8)
    axes.set(
        xlabel="density", ylabel="times faster than the fastest dense product", yscale="log", title=f"SpMM, n = {N}"
    )
    axes.legend(fontsize=8)
    figure.savefig(out, dpi=130)
    return f"plot: {out}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two matrices and two precisions")
    parser.add_argument("--out", type=Path, default=ROOT / "demo-output")
    args = parser.parse_args()
    start, console = time.perf_counter(), Console(width=140)
    paths, source = find()
    console.print(source, soft_wrap=True)
    pairs, budget = (((8, 8), (4, 4)), 0.02) if args.quick else (mc.SPMM_PAIRS, 0.03)
    jobs = [(p, v, *pair) for p in (paths[:2] if args.quick else paths) for v in VECTOR_LENGTHS for pair in pairs]
    results = [run(*job, budget) for job in track(jobs, "running", console=Console(stderr=True), transient=True)]
    show(results, console)
    args.out.mkdir(parents=True, exist_ok=True)
    console.print(plot(results, args.out / "spmm.png"), soft_wrap=True)
    console.print(
        f"all {len(results)} cases equal the exact product (SpMM on all rows, SDDMM on every vector); "
        f"{time.perf_counter() - start:.0f} s",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
