"""How good the choice of a kernel is: every config that it weighs, timed on random shapes and on DLMC's matrices.

Writes ``benchmarks/results/choose_h200.json``: microseconds of each config for each case, behind another kernel.  The
cost model may be fitted to the cases with ``held_out`` false; ``--judge`` judges it by the others, on any machine.
Matrices are those of ``dlmc.py``, of the folder ``MAGICUBE_DATA`` (or ``../shared/data``).  Several GPUs share the
work: a process each with ``--part 1/N`` to ``N/N`` and an ``--out`` of its own, then ``--join`` of those files.
Run: ``PYTHONPATH=. python benchmarks/choose.py [--cases N] [--part I/N] [--join FILE ...] [--out FILE] [--judge]``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from harness.dlmc_data import Matrix, of_length, sample
from harness.gpu_data import OUT_NAME, Shape, Widths, check, compile_ahead, make_product, one_line, uniform
from harness.gpu_timing import Call, behind
from harness.machine import gpu_machine
from rich.progress import track

import magicube_cutlass as mc
from cute_kernels.dtypes import Integer
from cute_kernels.machine import Machine, Problem, ProblemTypes
from cute_kernels.spmm.heuristics import candidates, choose_spmm
from magicube_cutlass.dispatch.machine import get_machine
from magicube_cutlass.dispatch.plan import size_bucket

RESULTS = Path(__file__).resolve().parent / "results"
BASE = Widths(8, 8)
WIDTHS = (BASE, Widths(16, 8), Widths(16, 16), Widths(8, 4), Widths(4, 4))
VECTOR_LENGTH = 8
ROWS = (128, 256, 512, 1024, 2048, 4096, 8192, 11008, 14336)
INNER = (512, 1024, 2048, 2304, 4096, 8192, 11008)
COLUMNS = (16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096)
TABLE = (
    Shape(4096, 4096, 512, 0.9), Shape(4096, 4096, 4096, 0.9), Shape(4096, 4096, 4096, 0.8),
    Shape(4096, 4096, 512, 0.7), Shape(4096, 4096, 256, 0.9), Shape(2048, 2048, 256, 0.9),
    Shape(256, 2304, 512, 0.9), Shape(256, 2304, 512, 0.7), Shape(4096, 4096, 512, 0.98),
    Shape(14336, 4096, 512, 0.9),
)  # fmt: skip
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
PER_GROUP = 2  # matrices of a model, method and sparsity: one to fit, one held out
MATRIX_COLUMNS = (256, 128, 512)  # the matrices take turns in the last two
MOST_WORK = 2**37  # M K N of a case, so that the run stays short


def shapes(count: int, seed: int, known: Collection[Shape] = ()) -> list[Shape]:
    """Different random shapes, none of them ``known``."""
    draw = random.Random(seed)
    found: dict[Shape, None] = {}
    while len(found) < count:
        shape = Shape(draw.choice(ROWS), draw.choice(INNER), draw.choice(COLUMNS), draw.choice(SPARSITIES))
        if shape.m * shape.k * shape.n <= MOST_WORK and shape not in known:
            found[shape] = None
    return list(found)


@dataclass(frozen=True)
class Trial:
    """A product to be timed; ``held_out``: the cost model may not be fitted to it."""

    held_out: bool
    widths: Widths
    shape: Shape
    matrix: Matrix | None = None

    @cached_property
    def pattern(self) -> mc.Pattern:
        if self.matrix is None:
            return uniform(self.shape, VECTOR_LENGTH)
        return of_length(mc.read_smtx(self.matrix.path), VECTOR_LENGTH)

    @property
    def problem(self) -> Problem:
        return problem(self.pattern, self.shape.n)


def plan(cases: int) -> list[Trial]:
    """Random shapes: ``cases`` of L8-R8 to fit, as many others held out, and a fifth of both for each other widths.

    The shapes of the results' table are among those to fit.
    """
    found = []
    for place, widths in enumerate(WIDTHS):
        count, table = (cases, TABLE) if place == 0 else (-(-cases // 5), TABLE[:3])
        fitted = [*table, *shapes(count, 2 * place + 1, table)]
        held_out = shapes(count, 2 * place + 2, fitted)
        found += [Trial(False, widths, shape) for shape in fitted] + [Trial(True, widths, shape) for shape in held_out]
    return found


def matrix_trials(matrices: Sequence[Matrix]) -> list[Trial]:
    """L8-R8 products of each matrix with two B; the first matrix of each group is to fit, the others held out.

    Those that have as many rows, columns and vectors as one to fit are to fit too.
    """
    seen: set[object] = set()
    found = []
    for place, matrix in enumerate(matrices):
        pattern = of_length(mc.read_smtx(matrix.path), VECTOR_LENGTH)
        group, sizes = (matrix.model, matrix.method, matrix.target), (*pattern.shape, pattern.vectors)
        held_out = group in seen and sizes not in seen
        seen |= {group} if held_out else {group, sizes}
        sparsity = 1 - pattern.vectors / (pattern.vector_rows * pattern.shape[1])
        for n in (MATRIX_COLUMNS[0], MATRIX_COLUMNS[1 + place % 2]):
            found.append(Trial(held_out, BASE, Shape(*pattern.shape, n, sparsity), matrix))
    return found


def kind_of(widths: Widths) -> ProblemTypes:
    return ProblemTypes(VECTOR_LENGTH, Integer(widths.left, True), Integer(widths.right, True), OUT_NAME)


def problem(pattern: mc.Pattern, n: int) -> Problem:
    longest = int(pattern.row_lengths.max())
    return Problem(pattern.vector_rows, pattern.shape[1], pattern.vectors, longest, size_bucket(n))


def run_case(trial: Trial, machine: Machine) -> dict[str, Any]:
    """Times of every candidate; each output was poisoned, and compared in every element."""
    shape, widths = trial.shape, trial.widths
    here = trial.problem
    product = make_product(trial.pattern, shape.n, widths)
    calls: dict[str, Call] = {}
    failures: dict[str, str] = {}
    for config in candidates(kind_of(widths), machine, here):
        out = product.poisoned()
        try:
            mc.spmm(product.lhs, product.rhs, out=out, config=config)
            check(product, out)
        except Exception as error:  # a failure is a result too
            failures[config.name] = one_line(error)
            continue
        calls[config.name] = partial(mc.spmm, product.lhs, product.rhs, out=out, config=config)
    times = {name: timing.median for name, timing in behind(calls, rounds=7, replay=100.0).items()}
    row = {"held_out": trial.held_out, "widths": [widths.left, widths.right], "m": shape.m, "k": shape.k, "n": shape.n}
    row |= {"sparsity": shape.sparsity, "vectors": here.vectors, "longest": here.longest}
    row |= {} if trial.matrix is None else {"matrix": trial.matrix.name}
    return {**row, "us": times, "failures": failures}


def judge(report: dict[str, Any], widths: Widths, arch: str = "sm_90a", matrices: bool = False) -> str:
    """How the picks of the present cost model compare with the best of the timed configs, on the cases held out.

    ``matrices``: on DLMC's instead of the random ones.
    """
    machine = Machine(arch, report["multiprocessors"])
    ratios, untimed = [], 0
    for case in report["cases"]:
        if not case["held_out"] or case["widths"] != [widths.left, widths.right] or ("matrix" in case) != matrices:
            continue
        here = Problem(
            -(-case["m"] // VECTOR_LENGTH),
            case["k"],
            case["vectors"],
            case["longest"],
            size_bucket(case["n"]),
        )
        pick = case["us"].get(choose_spmm(kind_of(widths), machine, here).name)
        if pick is None:
            untimed += 1
        else:
            ratios.append(pick / min(case["us"].values()))
    near = sum(ratio <= 1.1 for ratio in ratios)
    what = f"{widths}, matrices of DLMC" if matrices else str(widths)
    return (
        f"{what}, {len(ratios)} cases: {near} picks within 10% of the best, the worst takes "
        f"{max(ratios, default=1):.2f} times as long; {untimed} picks were not timed"
    )


def joined(paths: Sequence[Path]) -> dict[str, Any]:
    """One report of the parts that several processes made."""
    reports = [json.loads(path.read_text()) for path in paths]
    return {**reports[0], "cases": [case for report in reports for case in report["cases"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=60, help="cases of L8-R8 to fit, and as many held out")
    parser.add_argument("--part", default="1/1", help="which part of the cases, of how many")
    parser.add_argument("--join", type=Path, nargs="+", default=[], help="time nothing, make one file of these")
    parser.add_argument("--out", type=Path, default=RESULTS / "choose_h200.json")
    parser.add_argument("--judge", action="store_true", help="time nothing, judge the choice by the file")
    arguments = parser.parse_args()
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", arguments.part)
    if found is None or int(found[1]) > int(found[2]):
        parser.error(f"--part must be I/N with 1 <= I <= N, got {arguments.part}")
    if arguments.join:
        arguments.out.write_text(json.dumps(joined(arguments.join), indent=1) + "\n")
    if arguments.judge or arguments.join:
        report = json.loads(arguments.out.read_text())
        print(*(judge(report, widths) for widths in WIDTHS), judge(report, BASE, matrices=True), sep="\n")
        return
    machine = get_machine(torch.cuda.current_device())
    trials = [*plan(arguments.cases), *matrix_trials(sample(PER_GROUP))][int(found[1]) - 1 :: int(found[2])]
    configs = (config for each in trials for config in candidates(kind_of(each.widths), machine, each.problem))
    compile_ahead(configs)
    cases: list[dict[str, Any]] = []
    facts = {"machine": gpu_machine(), "unit": "us", "multiprocessors": machine.num_sms}
    for trial in track(trials, "timing"):
        cases.append(run_case(trial, machine))
        torch.cuda.empty_cache()
        arguments.out.write_text(json.dumps(facts | {"cases": cases}, indent=1) + "\n")
    print(f"{len(cases)} cases in {arguments.out}")


if __name__ == "__main__":
    main()
