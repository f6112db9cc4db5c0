"""Layers of a language model on a GPU: SpMM at 70% and 90% sparsity against dense products, from decoding to prefill.

Writes ``benchmarks/results/llm_h200.json``, or the file that the GPU's name gives, again after every layer.  Times are
microseconds a launch in a CUDA graph; every product of ours was compared with the exact result in the same run.
``predicted`` is what ``allow_dense`` goes by, ``dense_us`` what the dense product takes with the same B, its copy
included.  Run: ``PYTHONPATH=. python benchmarks/llm.py [--quick] [--out FILE]``
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from harness.gpu_baselines import BASELINES, Baseline, calls_of, gemm_configs, prepare
from harness.gpu_data import (
    OUT,
    Product,
    Shape,
    Widths,
    check,
    chosen,
    compile_ahead,
    make_product,
    narrowed,
    one_line,
    ran,
)
from harness.gpu_data import uniform as pattern_of
from harness.gpu_results import gpu_arguments, results_file, rounded, save
from harness.gpu_timing import Call, replays
from harness.machine import gpu_machine

import magicube_cutlass as mc
from cute_kernels.jit.warmup import Source
from magicube_cutlass.dispatch.dense_fallback import DenseCall, forecast

LAYERS = ((4096, 4096), (11008, 4096), (4096, 11008), (14336, 4096))  # rows and columns of the weight
COLUMNS = (1, 4, 8, 16, 64, 256, 2048, 8192)  # tokens
SPARSITIES = (0.9, 0.7)
PAIRS = (Widths(8, 8), Widths(8, 4), Widths(4, 4))
DENSE = ("dense fp16", "dense int8", "dense fp8", "magicube dense int8")
QUICK = (((512, 1024),), (1, 16, 256))


def configs(layers: tuple[tuple[int, int], ...], columns: tuple[int, ...]) -> Iterator[Source]:
    """Every kernel that the run will use."""
    for m, k in layers:
        for sparsity in SPARSITIES:
            pattern = pattern_of(Shape(m, k, max(columns), sparsity), 8)
            yield from (chosen(pattern, n, widths) for widths in PAIRS for n in columns)
    yield from gemm_configs()


def checked(product: Product, call: Callable[..., object]) -> Call:
    """``call`` into an output, after comparing it with the exact result in every element."""
    out = product.poisoned()
    call(out=out)
    check(product, out)
    return partial(call, out=out)


def ours(product: Product, widths: Widths, sparsity: float) -> dict[str, Any]:
    """The row of a pair; for L8-R8 with this library's dense product on the same operands, and what was forecast."""
    row: dict[str, Any] = {"pair": str(widths), "sparsity": sparsity}
    lhs, rhs = product.lhs, product.rhs
    try:
        call = checked(product, partial(mc.spmm, lhs, rhs))
        row["kernel"] = ran(lhs).split(", ")[-1]
        row["us"] = rounded(replays({"ours": call})["ours"].median)
        predicted = forecast(lhs, rhs, OUT)
        if predicted is not None and widths == PAIRS[0]:
            row["predicted"] = {"sparse": rounded(predicted.sparse / 1e3), "dense": rounded(predicted.dense / 1e3)}
            call = checked(product, partial(DenseCall(lhs, rhs, OUT), rhs.data, rhs.scale, None))
            row["dense_us"] = rounded(replays({"ours": call})["ours"].median)
    except Exception as error:  # a failure of ours is a result too
        row["failure"] = one_line(error)
    return row


def dense_times(product: Product) -> dict[str, Any]:
    """Times of the dense products, errors beside them, or why there is none."""
    makers: dict[str, Callable[[], Baseline]] = {name: partial(BASELINES[name], product) for name in DENSE}
    baselines, failures, errors = prepare(makers)
    times = replays(calls_of(baselines))
    found: dict[str, Any] = {name: rounded(timing.median) for name, timing in times.items()}
    return found | {"errors": {name: rounded(error) for name, error in errors.items()}, "failures": failures}


def run_layer(layer: tuple[int, int], columns: tuple[int, ...]) -> list[dict[str, Any]]:
    """One case for each number of columns."""
    m, k = layer
    cases: dict[int, dict[str, Any]] = {n: {"shape": [m, k, n], "ours": []} for n in columns}
    for sparsity in SPARSITIES:
        pattern = pattern_of(Shape(m, k, max(columns), sparsity), 8)
        for widths in PAIRS:
            whole = make_product(pattern, max(columns), widths)
            for n in columns:
                product = narrowed(whole, n)
                cases[n]["ours"].append(ours(product, widths, sparsity))
                if widths == PAIRS[0] and "dense" not in cases[n]:
                    cases[n]["dense"] = dense_times(product)
                del product
            del whole
            torch.cuda.empty_cache()
    return list(cases.values())


def print_case(case: dict[str, Any]) -> None:
    own = "  ".join(f"{row['pair']} {row['sparsity']:g} {row.get('us', 'failed')}" for row in case["ours"])
    dense = "  ".join(f"{name} {case['dense'].get(name, '-')}" for name in DENSE)
    print(f"  {'x'.join(map(str, case['shape']))}: {own}  |  {dense}", flush=True)
    for row in case["ours"]:
        if "failure" in row:
            print(f"    {row['pair']} {row['sparsity']:g} failed: {row['failure'][:200]}")
    for name, text in case["dense"]["failures"].items():
        print(f"    {name} failed: {text[:200]}")


def main() -> None:
    args = gpu_arguments(__doc__, "one small layer, to see that it runs")
    layers, columns = QUICK if args.quick else (LAYERS, COLUMNS)
    start = time.perf_counter()
    failed = compile_ahead(configs(layers, columns))
    results: dict[str, Any] = {
        "machine": gpu_machine(),
        "setting": {"pattern": "uniform", "v": 8, "out": "float16", "b": "row-major for ours, column-major for dense",
                    "us": "median over 7 rounds of the mean launch in a CUDA graph of about 100 us"},
        "compile_failures": sorted(set(failed.values())),
        "cases": [],
    }  # fmt: skip
    for layer in layers:
        found = run_layer(layer, columns)
        for case in found:
            print_case(case)
        results["cases"] += found
        save(results, args.out or results_file("llm"))
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
