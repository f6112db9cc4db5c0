"""SpMM and SDDMM on a GPU against other libraries, all in one run.

Writes ``benchmarks/results/spmm_h200.json``, or the file that the GPU's name gives.  Times are microseconds a launch.
Run: ``PYTHONPATH=. python benchmarks/spmm.py [--quick] [--out FILE]``; ``plots/gpu_plots.py`` draws the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import blocked_ell
from harness.gpu_baselines import BASELINES, Baseline, calls_of, prepare
from harness.gpu_data import (
    OUT,
    Product,
    Shape,
    Widths,
    check,
    chosen,
    compile_ahead,
    make_product,
    one_line,
    ran,
    uniform,
)
from harness.gpu_results import gpu_arguments, write_results
from harness.gpu_sddmm import run_sddmm, sddmm_configs
from harness.gpu_timing import Call, GpuTiming, measure, ratio
from harness.machine import gpu_machine

import magicube_cutlass as mc
from cute_kernels.dtypes import SPMM_PAIRS
from cute_kernels.jit.warmup import Source

RESULTS = Path(__file__).resolve().parent / "results"
VECTOR_LENGTH = 8
BASE = Widths(8, 8)
SQUARE = 4096
FULL = (Shape(SQUARE, SQUARE, 512, 0.9), Shape(SQUARE, SQUARE, SQUARE, 0.9))  # every pair and vector length
SHAPES = (
    Shape(SQUARE, SQUARE, 512, 0.7),
    FULL[0],
    Shape(SQUARE, SQUARE, 512, 0.98),
    Shape(SQUARE, SQUARE, SQUARE, 0.7),
    Shape(SQUARE, SQUARE, SQUARE, 0.8),
    FULL[1],
    Shape(SQUARE, SQUARE, 256, 0.9),
    Shape(2048, 2048, 256, 0.9),
    Shape(256, 2304, 512, 0.7),
    Shape(256, 2304, 512, 0.9),
    Shape(14336, SQUARE, 512, 0.9),
)
QUICK = (Shape(256, 512, 256, 0.9),)
SDDMM_INNER = (256, 128)


def variants(shape: Shape) -> list[tuple[Widths, int]]:
    """Widths and vector lengths of ours for a shape; L8-R8 with V = 8 comes first."""
    found = [(BASE, VECTOR_LENGTH)]
    if shape in FULL:
        pairs = (Widths(*pair) for pair in SPMM_PAIRS)
        found += [(widths, VECTOR_LENGTH) for widths in pairs if widths != BASE]
        found += [(BASE, 4), (BASE, 2)]
    return found


def configs(shapes: tuple[Shape, ...]) -> list[Source]:
    """Every kernel that the run will use."""
    return [
        chosen(uniform(shape, length), shape.n, widths)
        for shape in shapes
        for widths, length in variants(shape)
    ]  # fmt: skip


def prepare_ours(shape: Shape) -> tuple[dict[str, Product], dict[str, Call], dict[str, str]]:
    """Products, calls and failures by name; each output was poisoned, and compared in every element."""
    products: dict[str, Product] = {}
    calls: dict[str, Call] = {}
    failures: dict[str, str] = {}
    for widths, length in variants(shape):
        name = f"{widths} V={length}"
        try:
            product = make_product(uniform(shape, length), shape.n, widths)
            out = product.poisoned()
            mc.spmm(product.lhs, product.rhs, out=out)
            check(product, out)
        except Exception as error:  # a failure of ours is a result too
            failures[name] = one_line(error)
            continue
        products[name] = product
        calls[name] = partial(mc.spmm, product.lhs, product.rhs, out=out)
    return products, calls, failures


def timing_row(timing: GpuTiming, base: GpuTiming) -> dict[str, Any]:
    """``us``: median a launch in a graph; ``behind_us``: behind another kernel; ``speed_up``: of the first of ours."""
    return {
        "us": timing.median,
        "behind_us": timing.behind,
        "quartiles": timing.quartiles,
        "cold_us": timing.cold,
        "launch_us": timing.launch,
        "enqueue_us": timing.enqueue,
        "mode": timing.mode,
        "launches": timing.launches,
        "speed_up": ratio(timing, base),
        "behind_speed_up": timing.behind / base.behind,
    }


def our_rows(
    products: dict[str, Product], failures: dict[str, str], times: dict[str, GpuTiming], first: str
) -> list[dict[str, Any]]:
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    rows: list[dict[str, Any]] = [{"name": name, "failure": text} for name, text in failures.items()]
    for name, product in products.items():
        moved = product.moved_bytes()
        rows.append(
            {
                "name": name,
                "kernel": ran(product.lhs),
                **timing_row(times[name], times[first]),
                "tops": product.operations / times[name].median / 1e6,
                "moved_MB": moved / 1e6,
                "cached": moved < cache,
                "check": "equal in every element",
            }
        )
    return rows


def baseline_rows(
    baselines: dict[str, Baseline],
    failures: dict[str, str],
    errors: dict[str, float],
    times: dict[str, GpuTiming],
    first: str,
) -> list[dict[str, Any]]:
    """Rows of the baselines that ran, then of those that did not."""
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "data": baseline.data,
            **({"note": baseline.note} if baseline.note else {}),
            **timing_row(times[name], times[first]),
            "error": errors[name],
        }
        for name, baseline in baselines.items()
    ]
    return rows + [{"name": name, "failure": text} for name, text in failures.items()]


def run_shape(shape: Shape) -> dict[str, Any]:
    """All of ours and all baselines for one shape, timed in the same rounds."""
    start = time.perf_counter()
    products, calls, our_failures = prepare_ours(shape)
    first = f"{BASE} V={VECTOR_LENGTH}"
    if first not in products:
        raise ArithmeticError(f"{shape}: {our_failures[first]}")
    makers: dict[str, Callable[[], Baseline]] = {
        name: partial(make, products[first]) for name, make in BASELINES.items()
    }
    baselines, failures, errors = prepare(makers)
    times = measure(calls | calls_of(baselines))
    result: dict[str, Any] = {
        "shape": [shape.m, shape.k, shape.n],
        "sparsity": shape.sparsity,
        "ours": our_rows(products, our_failures, times, first),
        "rivals": baseline_rows(baselines, failures, errors, times, first),
    }
    print(f"\n{shape}  ({time.perf_counter() - start:.1f} s)")
    print_rows(result["ours"] + result["rivals"])
    return result


def print_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if "failure" in row:
            print(f"  {row['name']:22} failed: {row['failure'][:150]}")
            continue
        extra = row.get("kernel") or f"{row['data']}; error {row['error']:.1e}"
        mode = "" if row["mode"] == "graph" else " [stream]"
        print(
            f"  {row['name']:22} {row['us']:9.2f} us  behind {row['behind_us']:9.2f}  cold {row['cold_us']:8.1f}  "
            f"launch {row['launch_us']:8.1f}  enqueue {row['enqueue_us']:7.1f}  x{row['speed_up']:6.2f}  {extra}{mode}",
            flush=True,
        )


def main() -> None:
    args = gpu_arguments(__doc__, "one small shape, to see that it runs")
    shapes, size = (QUICK, 512) if args.quick else (SHAPES, SQUARE)
    start = time.perf_counter()
    compile_ahead([*configs(shapes), *sddmm_configs(size, SDDMM_INNER)])
    results: dict[str, Any] = {
        "machine": gpu_machine() | {"cuSPARSE": blocked_ell.version()},
        "setting": {
            "pattern": "uniform",
            "out": str(OUT).removeprefix("torch."),
            "scales": "one of A, one per column of B, applied in the kernel",
            "us": "median over rounds of the mean launch in a CUDA graph; buffers stay in the L2 cache where cached",
            "behind_us": "the same with an elementwise kernel between launches, less that kernel's own time",
        },
        "spmm": [],
        "sddmm": [],
    }
    for shape in shapes:
        results["spmm"].append(run_shape(shape))
        torch.cuda.empty_cache()
    for inner in SDDMM_INNER:
        case = run_sddmm(size, inner, timing_row)
        results["sddmm"].append(case)
        print(f"\nSDDMM {size}x{size} inner {inner}")
        print_rows(case["ours"] + case["rivals"])
    write_results(results, args.out, "spmm", start)


if __name__ == "__main__":
    main()
