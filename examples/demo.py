"""Ten lines on this machine: exact sparse products, their time beside the fastest dense one, and a chosen error.

Runs on the GPU if there is one. Run: ``python examples/demo.py [--quick] [--out FOLDER] [--render]`` (or ``make demo``)
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING

import torch
from dlmc_data import find
from torch import Tensor

import magicube_cutlass as mc
import residual
from cute_kernels.cpu.engine import isa
from cute_kernels.integers import widen
from magicube_cutlass.bench import figures
from magicube_cutlass.bench.problems import check_product, dense_baselines, exact_dtype, random_matrix, random_operand
from magicube_cutlass.bench.timing import measure
from magicube_cutlass.cli.console import bytes_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, COLUMNS = (1024, 256) if DEVICE == "cpu" else (4096, 4096)  # square A, columns of B
DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
SHOWN = 0.1  # the density of the line on speed
INNER = 64  # inner size of SDDMM, an attention head
LAUNCHES = 20
Call = Callable[[], object]
Point = tuple[float, float, float, str]  # density, ms of ours, ms of the fastest dense product, its name


def check_matrix(path: Path, vector_length: int, lhs_bits: int, rhs_bits: int) -> None:
    """Raise unless SpMM, and SDDMM where the pair has it, equal int64 arithmetic in every element."""
    pattern = mc.read_smtx(path, vector_length=vector_length)
    (m, k), seed = pattern.shape, vector_length
    lhs, rhs = random_matrix(pattern, lhs_bits, seed), random_operand(k, COLUMNS % 1000, rhs_bits, seed + 1)
    dtype = exact_dtype(k, lhs_bits, rhs_bits)
    check_product(lhs, rhs, mc.spmm(lhs.to(DEVICE), rhs.to(DEVICE), out_dtype=dtype).cpu())
    if (lhs_bits, rhs_bits) in mc.SDDMM_PAIRS:
        x, y = random_operand(m, INNER, lhs_bits, 3), random_operand(k, INNER, rhs_bits, 4)
        dtype = exact_dtype(INNER, lhs_bits, rhs_bits)
        sampled = mc.sddmm(x.to(DEVICE), y.to(DEVICE), pattern.to(DEVICE), out_dtype=dtype)
        if not torch.equal(widen(sampled.vectors()).cpu(), mc.reference.sddmm(x, y, pattern)):
            raise ArithmeticError(f"SDDMM of {pattern} with {lhs_bits} bits differs from the reference")


def gpu_baselines(dense: Tensor, right: Tensor) -> Iterator[tuple[str, Call]]:
    """Yield the dense products of the same matrices on a GPU, where this torch and this GPU have them."""
    halves = dense.half(), right.half()
    yield "dense fp16", lambda: halves[0] @ halves[1]
    columns = right.t().contiguous().t()
    yield "dense int8", lambda: torch._int_mm(dense, columns)
    if torch.cuda.get_device_capability() >= (8, 9):
        left8, right8 = dense.float().to(torch.float8_e4m3fn), columns.float().to(torch.float8_e4m3fn)
        one = torch.ones((), device=DEVICE)
        yield "dense fp8", lambda: torch._scaled_mm(left8, right8, one, one, out_dtype=torch.float16)


def milliseconds(calls: dict[str, Call], budget: float) -> dict[str, float]:
    """Return the best time of each call on a CPU, which other work does not lengthen, and a median on a GPU."""
    if DEVICE == "cpu":
        return {name: timing.best * 1e3 for name, timing in measure(calls, budget=budget).items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(6):  # the first warms up
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(LAUNCHES):
                call()
            end.record()
            end.synchronize()
            if turn:
                found[name].append(float(begin.elapsed_time(end)) / LAUNCHES)
    return {name: median(times) for name, times in found.items()}


def time_pattern(pattern: mc.Pattern, budget: float) -> tuple[Point, mc.SRBCRS]:
    """Return density and times of an 8-bit product and of the fastest dense product, and the matrix."""
    lhs, rhs = random_matrix(pattern, 8, 1), random_operand(pattern.shape[1], COLUMNS, 8, 2)
    a, b = lhs.to(DEVICE), rhs.to(DEVICE)
    calls: dict[str, Call] = {"magicube": lambda: mc.spmm(a, b)}
    if DEVICE == "cpu":
        calls |= dense_baselines(lhs, rhs)
    else:
        calls |= dict(gpu_baselines(a.to_dense(dequantize=False), b.ints()))
    times = milliseconds(calls, budget)
    ours = times.pop("magicube")
    dense, name = min((ms, name) for name, ms in times.items())
    return (pattern.density, ours, dense, name), lhs


def break_even(points: list[Point]) -> float | None:
    """Return the density at which ours takes as long as the fastest dense product; None if it is faster at all."""
    for (d0, a0, b0, _), (d1, a1, b1, _) in pairwise(points):
        if a0 < b0 and a1 >= b1:
            return d0 + (d1 - d0) * (b0 - a0) / ((b0 - a0) + (a1 - b1))
    return None if points[-1][1] < points[-1][2] else points[0][0]


def figure_of(points: list[Point], machine: str) -> Figure:
    """How long against the best dense product, by density, with the break-even marked."""
    figure, (axes,) = figures.panels(size=(7.6, 4.6))
    density, ours, dense, _ = zip(*points, strict=True)
    even = break_even(points)
    figure.suptitle(f"8-bit sparse product, {SIZE} x {SIZE} x {COLUMNS}, V = 8")
    figures.note(figure, machine)
    axes.set(xlabel="density (share of stored elements)", ylabel="time (ms)")
    axes.set_title(f"faster than dense below density {even:.2f}" if even else "faster than dense at every density here")
    axes.plot(density, ours, "o-", color=figures.OURS)
    axes.plot(density, dense, "s--", color=figures.DENSE)
    axes.set_ylim(0)
    if even:
        axes.axvline(even, color=figures.OTHER, linewidth=1, linestyle=":")
    last = points[-1]
    ends = {"magicube": (last[0], last[1], figures.OURS), "fastest dense": (last[0], last[2], figures.DENSE)}
    figures.label_ends(axes, ends)
    return figure


def chosen_error() -> str:
    """Multiply dense matrices with ``tol=1e-3`` and compare with float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=generator).to(DEVICE) for _ in range(2))
    product, report = residual.matmul(a, b, tol=1e-3, return_report=True)
    exact = a.double() @ b.double()
    error = float((product - exact).norm() / exact.norm())
    return f"residual.matmul(tol=1e-3), n = {SIZE}: {report.plan}, bound {report.upper:.1e}, measured {error:.1e}"


def lines(quick: bool, folder: Path) -> Iterator[str]:
    """Yield the ten lines."""
    start, budget = time.perf_counter(), 0.05 if quick else 0.25
    chip = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {isa()}, {torch.get_num_threads()} threads"
    machine = f"{chip}; torch {torch.__version__}, magicube-cutlass {mc.__version__}"
    yield f"machine     {machine}"
    paths, source = find()
    yield f"matrices    {source}"
    paths = paths[:2] if quick else paths
    kinds = [(2, 8, 8), (4, 8, 8), *((8, *pair) for pair in (((8, 8), (4, 4)) if quick else mc.SPMM_PAIRS))]
    for path in paths:
        for kind in kinds:
            check_matrix(path, *kind)
    count = len(paths) * len(kinds)
    yield f"exact       {count} products of {len(kinds)} kinds, SpMM and SDDMM: every element equals int64 arithmetic"
    densities = DENSITIES[::2] if quick else DENSITIES
    found = [time_pattern(mc.random_pattern(SIZE, SIZE, 1 - d, 8, seed=1), budget) for d in densities]
    points = [point for point, _ in found]
    (_, ours, dense, name), shown = next(pair for pair, d in zip(found, densities, strict=True) if d >= SHOWN)
    ratio = f"{dense / ours:.2f} times faster than" if ours <= dense else f"{ours / dense:.2f} times slower than"
    yield f"speed       {1 - shown.density:.0%} zeros: {ours:.2f} ms, {ratio} {name} ({dense:.2f} ms, fastest dense)"
    even = break_even(points)
    yield f"break-even  {f'density {even:.2f}' if even else f'above density {points[-1][0]:.2f}'}, of {SIZE} x {SIZE}"
    timed = [time_pattern(mc.read_smtx(path, vector_length=8), budget)[0] for path in paths]
    ratios = [point[2] / point[1] for point in timed]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    yield f"real        {len(ratios)} matrices above: {geometric_mean(ratios):.2f} times the speed of dense ({spread})"
    sizes = (bytes_text(n) for n in (shown.nbytes, SIZE * SIZE, 4 * SIZE * SIZE))
    yield "bytes       {}; dense int8 {}, float32 {}".format(*sizes)
    yield f"tolerance   {chosen_error()}"
    try:
        picture = figures.save_figure(figure_of(points, machine), folder / "demo.png").removeprefix("plot: ")
    except ImportError:
        picture = "none: pip install 'magicube-cutlass[plots]'"
    yield f"picture     {picture}"
    yield f"next        docs/tutorials/first-product.md; this took {time.perf_counter() - start:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two matrices, two precisions, fewer densities")
    parser.add_argument("--out", type=Path, help="folder of the picture; default: a new temporary one")
    parser.add_argument("--render", action="store_true", help="write the picture to demo-output")
    args = parser.parse_args()
    folder = args.out or (ROOT / "demo-output" if args.render else Path(tempfile.mkdtemp(prefix="magicube-demo-")))
    for line in lines(args.quick, folder):
        print(line, flush=True)


if __name__ == "__main__":
    main()
