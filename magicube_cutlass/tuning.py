"""Measured constants of the cost models for this GPU: ``magicube tune``.

Products of random shapes are timed with every candidate config. The constants of ``PanelModel``, ``GatherModel`` and
``ResidentModel`` are fitted to one half of the shapes and tested on the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from cute_kernels.dtypes import Integer
from cute_kernels.machine import Machine, Problem, ProblemTypes
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import SpmmKernel, candidates, spmm_cost
from cute_kernels.spmm.panel import PanelConfig
from cute_kernels.spmm.resident import ResidentConfig
from magicube_cutlass.dispatch.machine import _numbers, _with_numbers

_MODELS: dict[type, str] = {PanelConfig: "panel", GatherConfig: "gather", ResidentConfig: "resident"}
KIND = ProblemTypes(8, Integer(8, True), Integer(8, True), "float16")
_ROWS = (128, 256, 512, 1024, 2048, 4096, 8192, 14336)
_INNER = (512, 1024, 2048, 4096, 8192)
_COLUMNS = (16, 64, 128, 256, 512, 1024, 2048)
_SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
_MOST_WORK = 2**36  # M K N of a shape, so that the run stays short
_NEAR = 1.1  # a pick at most this much slower than the best config counts as near it


@dataclass(frozen=True)
class Case:
    """A product, and the nanoseconds of each config that was timed for it."""

    problem: Problem
    times: dict[SpmmKernel, float]


@dataclass(frozen=True)
class Verdict:
    """Quality of kernel selection: cases, cases within 10% of the best config, and the worst ratio."""

    cases: int
    near: int
    worst: float

    def __str__(self) -> str:
        return (
            f"{self.near} of {self.cases} picks within 10% of the best, the worst takes {self.worst:.2f} times as long"
        )


def judge(cases: Sequence[Case], machine: Machine) -> Verdict:
    """Return how close the selected configs are to the fastest ones of each case."""
    ratios = []
    for case in cases:
        pick = min(case.times, key=lambda config: spmm_cost(config, machine, case.problem))
        ratios.append(case.times[pick] / min(case.times.values()))
    return Verdict(len(ratios), sum(ratio <= _NEAR for ratio in ratios), max(ratios, default=1.0))


def _fitted(machine: Machine, name: str, samples: list[tuple[SpmmKernel, Problem, float, float]]) -> Machine:
    """The machine with one cost model fitted to samples of (config, problem, time, best time of the problem)."""
    if not samples:
        return machine
    import numpy as np
    from scipy.optimize import least_squares

    model = getattr(machine, name)
    start = np.log(_numbers(model))
    weights = np.array([min(1.0, (best / time) ** 1.5) for _, _, time, best in samples])
    logs = np.log([time for _, _, time, _ in samples])

    def residuals(numbers: Any) -> Any:
        tried = replace(machine, **{name: _with_numbers(model, np.exp(numbers).tolist())})
        return weights * (np.log([spmm_cost(config, tried, problem) for config, problem, _, _ in samples]) - logs)

    found = least_squares(residuals, start, loss="soft_l1", f_scale=0.1, max_nfev=30)
    return replace(machine, **{name: _with_numbers(model, np.exp(found.x).tolist())})


def fit(cases: Sequence[Case], machine: Machine) -> Machine:
    """Return the machine with its cost models fitted to the times of `cases`."""
    samples: dict[str, list[tuple[SpmmKernel, Problem, float, float]]] = {name: [] for name in _MODELS.values()}
    for case in cases:
        best = min(case.times.values())
        for config, time in case.times.items():
            samples[_MODELS[type(config)]].append((config, case.problem, time, best))
    for name, found in samples.items():
        machine = _fitted(machine, name, found)
    return machine


def shapes(count: int, seed: int) -> list[tuple[int, int, int, float]]:
    """Return distinct random (M, K, N, sparsity)."""
    draw = random.Random(seed)
    found: dict[tuple[int, int, int, float], None] = {}
    while len(found) < count:
        m, k, n = draw.choice(_ROWS), draw.choice(_INNER), draw.choice(_COLUMNS)
        if m * k * n <= _MOST_WORK:
            found[m, k, n, draw.choice(_SPARSITIES)] = None
    return list(found)


def _nanoseconds(call: Callable[[], object]) -> float:
    """Nanoseconds of a launch in a CUDA graph: median over replays of 10 launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e5)
    return median(times[1:])


def _problem(shape: tuple[int, int, int, float]) -> tuple[Any, Problem]:
    from magicube_cutlass.dispatch.plan import problem, size_bucket
    from magicube_cutlass.formats.generate import random_pattern

    m, k, n, sparsity = shape
    pattern = random_pattern(m, k, sparsity, KIND.vector_length, seed=m + k)
    return pattern, problem(pattern, KIND.vector_length, size_bucket(n), 1)


def wanted(count: int, machine: Machine) -> dict[SpmmKernel, None]:
    """Return every kernel that :func:`time_cases` times."""
    chosen = [shape for seed in (1, 2) for shape in shapes(count, seed)]
    return {config: None for shape in chosen for config in candidates(KIND, machine, _problem(shape)[1])}


def time_cases(count: int, seed: int, machine: Machine) -> Iterator[Case]:
    """Yield `count` cases of random shapes, timed on the current GPU."""
    from magicube_cutlass.formats.srbcrs import SRBCRS
    from magicube_cutlass.ops.spmm import spmm
    from magicube_cutlass.quantization.quant_tensor import QuantTensor

    for shape in shapes(count, seed):
        pattern, sizes = _problem(shape)
        on_gpu = pattern.to("cuda")
        values = torch.randint(-128, 128, (pattern.vectors, KIND.vector_length), device="cuda", dtype=torch.int32)
        scale = torch.tensor(0.01, device="cuda")
        a = SRBCRS.from_pattern(on_gpu, values, bits=8, scale=scale)
        dense = torch.randint(-128, 128, (shape[1], shape[2]), device="cuda", dtype=torch.int32)
        b = QuantTensor.from_ints(dense, bits=8, scale=scale)
        out = torch.empty(shape[0], shape[2], dtype=torch.float16, device="cuda")
        product = partial(spmm, a, b, out=out)
        times = {each: _nanoseconds(partial(product, config=each)) for each in candidates(KIND, machine, sizes)}
        yield Case(sizes, times)
