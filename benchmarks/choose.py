"""How good the choice of a kernel is: every config that it weighs, timed on random shapes.

Writes ``benchmarks/results/choose_h200.json``: microseconds of each config for each case.  The cost model may be fitted
to the cases with ``held_out`` false; ``--judge`` judges it by the others, on any machine.
Run: ``PYTHONPATH=. python benchmarks/choose.py [--cases N] [--out FILE] [--judge]``.
"""

from __future__ import annotations

import argparse
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_data import OUT_NAME, Shape, Widths, check, compile_ahead, make_product, one_line, uniform
from gpu_timing import Call, replays
from machine import gpu_machine
from rich.progress import track

import magicube_cutlass as mc
from cute_kernels.numbers import Integer
from magicube_cutlass import kernels
from magicube_cutlass.plans import rounded

RESULTS = Path(__file__).resolve().parent / "results"
WIDTHS = Widths(8, 8)
VECTOR_LENGTH = 8
KIND = kernels.Kind(VECTOR_LENGTH, Integer(8, True), Integer(8, True), OUT_NAME)
ROWS = (128, 256, 512, 1024, 2048, 4096, 8192, 11008, 14336)
INNER = (512, 1024, 2048, 2304, 4096, 8192, 11008)
COLUMNS = (16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096)
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
MOST_WORK = 2**37  # M K N of a case, so that the run stays short


def shapes(count: int, seed: int) -> list[Shape]:
    """Different random shapes."""
    draw = random.Random(seed)
    found: dict[Shape, None] = {}
    while len(found) < count:
        shape = Shape(draw.choice(ROWS), draw.choice(INNER), draw.choice(COLUMNS), draw.choice(SPARSITIES))
        if shape.m * shape.k * shape.n <= MOST_WORK:
            found[shape] = None
    return list(found)


def problem(shape: Shape) -> kernels.Problem:
    pattern = uniform(shape, VECTOR_LENGTH)
    longest = int(pattern.row_lengths.max())
    return kernels.Problem(pattern.vector_rows, shape.k, pattern.vectors, longest, rounded(shape.n))


def run_case(shape: Shape, machine: kernels.Machine) -> dict[str, Any]:
    """Times of every candidate; each output was poisoned, and compared in every element."""
    here = problem(shape)
    product = make_product(uniform(shape, VECTOR_LENGTH), shape.n, WIDTHS)
    calls: dict[str, Call] = {}
    failures: dict[str, str] = {}
    for config in kernels.candidates(KIND, machine, here):
        out = product.poisoned()
        try:
            mc.spmm(product.lhs, product.rhs, out=out, config=config)
            check(product, out)
        except Exception as error:  # a failure is a result too
            failures[config.name] = one_line(error)
            continue
        calls[config.name] = partial(mc.spmm, product.lhs, product.rhs, out=out, config=config)
    times = {name: timing.median for name, timing in replays(calls, rounds=5).items()}
    row = {"m": shape.m, "k": shape.k, "n": shape.n, "sparsity": shape.sparsity, "vectors": here.vectors}
    return {**row, "longest": here.longest, "us": times, "failures": failures}


def judge(report: dict[str, Any], arch: str = "sm_90a") -> str:
    """How the picks of the present cost model compare with the best of the timed configs, on the cases held out."""
    machine = kernels.Machine(arch, report["multiprocessors"])
    ratios, untimed = [], 0
    for case in report["cases"]:
        if not case["held_out"]:
            continue
        here = kernels.Problem(
            -(-case["m"] // VECTOR_LENGTH),
            case["k"],
            case["vectors"],
            case["longest"],
            rounded(case["n"]),
        )
        pick = case["us"].get(kernels.choose_spmm(KIND, machine, here).name)
        if pick is None:
            untimed += 1
        else:
            ratios.append(pick / min(case["us"].values()))
    near = sum(ratio <= 1.1 for ratio in ratios)
    return (
        f"{len(ratios)} cases: {near} picks within 10% of the best, the worst takes {max(ratios, default=1):.2f} "
        f"times as long; {untimed} picks were not timed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=60, help="cases to fit, and as many held out")
    parser.add_argument("--out", type=Path, default=RESULTS / "choose_h200.json")
    parser.add_argument("--judge", action="store_true", help="time nothing, judge the choice by the file")
    arguments = parser.parse_args()
    if arguments.judge:
        print(judge(json.loads(arguments.out.read_text())))
        return
    machine = kernels.machine(torch.cuda.current_device())
    sets = [(False, shapes(arguments.cases, seed=1)), (True, shapes(arguments.cases, seed=2))]
    everything = [(held, shape) for held, chosen in sets for shape in chosen]
    compile_ahead(config for _, shape in everything for config in kernels.candidates(KIND, machine, problem(shape)))
    cases: list[dict[str, Any]] = []
    facts = {"machine": gpu_machine(), "unit": "us", "multiprocessors": machine.multiprocessors}
    for held, shape in track(everything, "timing"):
        cases.append({"held_out": held, **run_case(shape, machine)})
        torch.cuda.empty_cache()
        arguments.out.write_text(json.dumps(facts | {"cases": cases}, indent=1) + "\n")
    print(f"{len(cases)} cases in {arguments.out}")


if __name__ == "__main__":
    main()
