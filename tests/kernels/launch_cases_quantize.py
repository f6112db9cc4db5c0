"""Real matrices that become integers, and the checks of products, for :mod:`launch_cases`."""

# ruff: noqa: B023 - a function of a loop's variables runs before the loop continues

from __future__ import annotations

from contextlib import suppress
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import magicube_cutlass as mc
import residual
from cute_kernels.convert import digits as gemm_digits
from cute_kernels.convert import quantize
from cute_kernels.double_sums import row_sums
from cute_kernels.estimate import look, probe_squares, probes, statistics, verdict
from cute_kernels.gemm import cuda as gemm_cuda
from magicube_cutlass.ops import torch_ops as library
from residual.cuda import sixteen_bit
from tests.helpers import SCALES
from tests.kernels.launch_cases_sparse import reals
from tests.kernels.launch_fakes import array
from tests.kernels.launch_recorder import Recorder

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
REALS = DTYPES[:3]
BOUNDS = (2.0**-30, 2.0**30)
RULE = statistics.StatisticsRule(8, (64, 32, 16), (0.01, 0.03, 0.1, 0.3), 30, 16, 16)


def turned(x: Tensor) -> Tensor:
    """The same numbers, column by column."""
    return x.mT.contiguous().mT


def integers(recorder: Recorder) -> None:
    """Widths, scales, dtypes, layouts and sizes: short rows, long ones, few and many."""
    shapes = [(64, 100), (3, 40, 256), (4, 70_000), (5000, 24), (1, 1), (2, 3, 17, 96), (700, 1024)]
    for i, (bits, axis, dtype) in enumerate(product((4, 8, 12, 16), (None, 0, 1), DTYPES)):
        for shape in (shapes[i % 7], shapes[(i + 3) % 7]):
            signed, x = i % 5 != 2, reals(*shape).abs().to(dtype)
            x = turned(x) if i % 6 == 5 else x
            options: dict[str, Any] = {
                "rounding": ("nearest", "trunc")[i % 7 == 1],
                "nonfinite": ("raise", "propagate")[i % 2],
            }
            key = f"quantize {list(shape)} of {dtype} to {bits} bits, axis {axis}"
            recorder.call(key, lambda: mc.quantize(x, bits, SCALES[axis], signed, **options), x=x)
    gaps = reals(64, 130)[:, 1:100]
    for axis in (None, 0, 1):
        recorder.call(f"quantize rows with gaps, axis {axis}", lambda: mc.quantize(gaps, 8, SCALES[axis]), x=gaps)
        for clip in ("mse", 99.0):
            x = reals(48, 96)
            recorder.call(
                f"quantize clipped by {clip}, axis {axis}",
                lambda: mc.quantize(x, 8, SCALES[axis], clip=clip),
                x=x,
            )
        for dtype in DTYPES:
            x = reals(40, 64).to(dtype)
            recorder.call(f"the operator of {dtype}, axis {axis}", lambda: library.quantize(x, 4, axis), x=x)
    x, scale = reals(40, 64), torch.tensor(0.5)
    recorder.call("quantize by a scale", lambda: library.quantize_by(x, scale, 8), x=x, scale=scale)
    recorder.call("quantize nothing", lambda: mc.quantize(reals(0, 8), 8, "row"))
    for columns, factor in product((64, 70_000), (1.0, 0.125)):
        both = reals(6, columns), reals(6, columns, seed=1)
        recorder.call(f"quantize two of {columns} columns, {factor}",
                      lambda: quantize.quantize_rows_of_two(*both, bits=8, factor=factor), x=both[0], y=both[1])  # fmt: skip
    uneven = reals(6, 64), reals(9, 64)
    recorder.call(
        "quantize two unlike", lambda: quantize.quantize_rows_of_two(*uneven, bits=4), x=uneven[0], y=uneven[1]
    )


def digits(recorder: Recorder) -> None:
    """Digit planes by rows, columns and of one scale, in both layouts."""
    shapes = [(64, 100), (300, 4100), (5000, 40), (1, 16)]
    for i, (count, axis, transpose, dtype) in enumerate(product((1, 2, 3), (None, 0, 1), (False, True), REALS)):
        shape = shapes[i % 4]
        x = reals(*shape).to(dtype)
        x = turned(x) if i % 5 == 4 else x
        options = {"axis": axis, "transpose": transpose, "exponent_scale": i % 3 == 1}
        bits = (8, 4, 5)[i % 3]
        key = f"digits {count} of {bits} bits, {list(shape)}, {dtype}, axis {axis}{', transposed' if transpose else ''}"
        for again in ("", ", again"):
            recorder.call(key + again, lambda: gemm_digits.digits(x, bits, count, **options), x=x)


def vectors(count: int) -> Tensor:
    """(16, padded) float32."""
    return reals(probes.PROBES, probes.padded(count))


def checks(recorder: Recorder) -> None:
    """Passes with sixteen vectors, and what compares them."""
    shapes = [(1, 1), (33, 71), (256, 4096), (1000, 1004), (5000, 132)]
    for (m, n), dtype, flip in product(shapes, REALS, (False, True)):
        x, w = reals(m, n).to(dtype), vectors(n)
        x = turned(x) if flip else x
        key = f"probe {m}x{n} of {dtype}{', turned' if flip else ''}"
        for again in ("", ", again"):
            recorder.call(key + again, lambda: probes.probe(x, w), x=x, w=w)
        for lines in ("rows", "columns"):
            recorder.call(f"{key}, {lines}", lambda: probes.probe_with_absmax(x, w, lines), x=x, w=w)
        y, copy, scale = vectors(m), torch.empty_like(x, dtype=torch.float16), reals(1)
        copies = (copy, scale) if dtype == torch.float32 else ()

        def squares() -> None:
            tiles = probe_squares.probe_tiles(m, x.dtype, x.device.index)
            probe_squares.launch_probe_squares(x, w, y, torch.zeros(tiles, 2, dtype=torch.float64), *copies)

        if dtype != torch.float32 or n % 4 == 0:
            recorder.call(f"{key}, squares", squares, x=x, w=w, y=y, copy=copy, scale=scale)
        if flip:
            continue
        p, scales = vectors(m), tuple(reals(size) for size in (m, n))
        for some in ((), scales[:1], scales):
            recorder.call(f"compare {m}x{n} of {dtype}, {len(some)} scales",
                          lambda: probes.compare(x, w, p, some, BOUNDS).out_of_range, c=x, w=w, product=p)  # fmt: skip
    for (m, n), flip in product(shapes, (False, True)):
        x, v, norms = reals(m, n), reals(n, 16).double(), reals(n).double()
        x = turned(x) if flip else x
        recorder.call(f"row sums {m}x{n}{', turned' if flip else ''}", lambda: row_sums.sum_rows(x, v, norms).squares,
                      x=x, v=v, n=norms)  # fmt: skip


def looks(recorder: Recorder) -> None:
    """Passes that pick a product on the GPU, the gated products, and the verdict."""
    for (m, k, n), planes in product(((33, 71, 20), (300, 512, 520), (5000, 96, 300)), (2, 3)):
        a, b = reals(m, k), turned(reals(k, n)) if planes == 3 else reals(k, n)
        scale_a, scale_b, width = reals(m), reals(n), look.padded_length(n)
        draw = look.LookProbes(reals(width, look.PROBES), reals(width))
        factors = reals(2, look.FACTORS).double()
        lefts = tuple(torch.zeros(m, k, dtype=torch.int8) for _ in range(planes))
        rights = tuple(turned(torch.zeros(k, n, dtype=torch.int8)) for _ in range(planes))

        def run() -> Tensor:
            found = look.look_right(b, draw, scale_b, planes)
            state = look.state_for(a.device, 4 + 16 * 148)
            look.look_left(a, found, scale_a, scale_b, look.LookLimits(1e-3, factors, (2.0**-22, 2.0**-21)), state)
            warps, out = (8, 8), torch.empty(m, n, device=a.device)
            if recorder.arch == "sm_90a":
                few, all = (gemm_cuda.gated_gemm(lefts[:i], rights[:i], (scale_a, scale_b), out, state.gate)
                            for i in (planes - 1, planes))  # fmt: skip
                warps = few, all
            words = torch.empty(verdict.WORDS, dtype=torch.float64, device=a.device)
            verdict.start_verdict(state, warps, planes, (m, n), words)
            return words

        recorder.call(f"look at {m}x{k}x{n}, {planes} planes", run, a=a, b=b, scale_a=scale_a, scale_b=scale_b,
                      w=draw.vectors, wbar=draw.norms, factors=factors)  # fmt: skip


def samples(recorder: Recorder) -> None:
    """Statistics of two operands."""
    for i, (m, k, n) in enumerate(((1, 1, 1), (33, 71, 20), (256, 4096, 130), (70, 9001, 16))):
        for left, right in ((torch.float32, torch.float32), (torch.float16, torch.float32)):
            a, b = reals(m, k).to(left), reals(n, k, seed=1).to(right)
            product_of = reals(16, 96)
            sides: list[Any] = [
                statistics.SlicedOperand(x.mT.contiguous().mT if i % 2 else x, x.float().abs().amax(1)) for x in (a, b)
            ]

            def look() -> Any:
                first = statistics.start_statistics(sides[0], sides[1], product_of, RULE, 17)
                first.result()
                return statistics.start_statistics(sides[0], first.samples[1], product_of, RULE, -1)

            recorder.call(f"look at {m}x{k}x{n}, {left}, {right}", look, A=sides[0].x, B=sides[1].x, tops_a=sides[0].absmax,
                          tops_b=sides[1].absmax, product=product_of)  # fmt: skip


def compensated(recorder: Recorder) -> None:
    """Products of residuals, by each mode, checked ones too."""
    a, b = reals(96, 160), reals(160, 80, seed=1)
    modes = ("direct", "centered", "full", "full4", "three_digit")
    for mode, bits in product(modes, (8, 4)):
        for again in ("", ", again", ", once more"):
            recorder.call(
                f"matmul {mode}, {bits} bits{again}",
                lambda: residual.matmul(a, b, mode=mode, bits=bits),
                A=a,
                B=b,
            )
    for mode, dtype in product(("direct", "full"), REALS):
        x, y = a.to(dtype), turned(b).to(dtype)
        recorder.call(f"matmul {mode} of {dtype}, turned", lambda: residual.matmul(x, y, mode=mode), A=x, B=y)
    for threshold, scaling, eta in product((0.0, 0.5, torch.inf), ("tensor", "vector"), (0.1, 1.0)):
        options: dict[str, Any] = {"threshold": threshold, "scaling": scaling, "eta": eta, "bits": 8 if eta < 1 else 4}
        recorder.call(f"residual.gemm {options}", lambda: residual.gemm(a, b, **options), A=a, B=b)


def checked(recorder: Recorder) -> None:
    """Products with a tolerance that the GPU finds met, call after call, and one that it finds missed."""

    def meet(arguments: list[Any], error: float = 0.0) -> None:
        sums = array(arguments[2], np.float64, probes.SUMS)  # of errors, and of AB and C by vectors, of C, far ones
        sums[:] = *error * np.eye(probes.PROBES).ravel(), 16e12, 16e12, 1e12, 0.0  # float32 may judge

    def miss(arguments: list[Any]) -> None:
        meet(arguments, 16e12)

    def leave_squares(arguments: list[Any]) -> None:
        if arguments[-1]:
            array(arguments[-1], np.float32, 1)[0] = 1e12

    met = {"sum_comparison": meet, "gemm-wgmma": leave_squares}
    for m, k, n in ((320, 256, 272), (1000, 71, 130), (2048, 64, 2048)):
        a, b = reals(m, k), reals(k, n, seed=1)
        for mode, call in product(("direct", "full", "auto"), range(4)):
            options: dict[str, Any] = {"tol": 0.1, "mode": mode, "on_failure": "fallback"}
            key = f"matmul {mode} {m}x{k}x{n} with tol, call {call}"
            recorder.call(key, lambda: residual.matmul(a, b, **options), answers=met, A=a, B=b)
        prepared = recorder.call(f"prepare {k}x{n}", lambda: residual.prepare(b, mode="direct"), B=b)
        for call in range(3):
            key = f"matmul of prepared {m}x{k}x{n} with tol, call {call}"
            options = {"tol": 0.1, "mode": "direct"}
            recorder.call(key, lambda: residual.matmul(a, prepared, **options), answers=met, A=a, B=b)
    for m, k, n in ((320, 256, 272), (1000, 71, 130)):
        a, b = reals(m, k).half(), turned(reals(k, n, seed=1).half())
        held = recorder.call(f"prepare float16 {k}x{n}", lambda: residual.prepare(b), B=b)
        for right, call in product((b, held), range(2)):
            key = f"matmul of float16 {m}x{k}x{n} with tol{'' if right is b else ', prepared'}, call {call}"
            recorder.call(key, lambda: residual.matmul(a, right, tol=0.1), answers=met, A=a, B=b)
    with patch.object(sixteen_bit, "_LEAST_MULTIPLICATIONS", dict.fromkeys((False, True), 0)):
        for (m, k, n), flip in product(((320, 256, 272), (1000, 72, 136)), (False, True)):
            a, b = reals(m, k), reals(k, n, seed=1)
            a, b = (turned(a), turned(b)) if flip else (a, b)
            tags = f"{m}x{k}x{n}{', turned' if flip else ''}"
            held = recorder.call(f"prepare {tags} for float16", lambda: residual.prepare(b, tol=1e-3), B=b)
            for right, call in product((b, held), range(2)):
                key = f"matmul in float16 {tags} with tol{'' if right is b else ', prepared'}, call {call}"
                recorder.call(key, lambda: residual.matmul(a, right, tol=1e-3), answers=met, A=a, B=b)
    a, b = reals(320, 256), reals(256, 280, seed=1)

    def refused(mode: str) -> None:
        with suppress(residual.ToleranceError):
            residual.matmul(a, b, tol=0.1, mode=mode, on_failure="fallback")

    for mode in ("direct", "auto"):
        key = f"matmul {mode} with tol missed"
        recorder.call(key, lambda: refused(mode), answers={"sum_comparison": miss}, A=a, B=b)


def measured(recorder: Recorder) -> None:
    """Products whose error is bounded on the GPU: nine launches, five of a prepared operand."""
    a, b = reals(320, 256), turned(reals(256, 272, seed=1))

    def judge(picked: int) -> dict[str, Any]:
        def write(arguments: list[Any]) -> None:
            words = array(arguments[-1], np.float64, verdict.WORDS)
            words[:] = *[1e-6, 2e-6, 1e-9] * 2, 1.0, 0.0, picked, 1e-6, 1e-9, 1.0, 2e-6, 0.0, 0.0, 1.0

        return {"verdict": write}

    for tol, planes in ((1e-2, 1), (1e-2, 2), (1e-4, 3)):
        options: dict[str, Any] = {"tol": tol}
        for call in range(2):
            recorder.call(f"matmul measured, {tol}, {planes} planes, call {call}", lambda: residual.matmul(a, b, **options),
                          answers=judge(planes - 1), A=a, B=b)  # fmt: skip
        plan = recorder.call(f"plan measured, {tol}, {planes} planes", lambda: residual.plan(b, **options), B=b)
        recorder.call(
            f"matmul measured of a plan, {tol}, {planes} planes", lambda: plan(a), answers=judge(planes - 1), A=a, B=b
        )


def record(recorder: Recorder) -> None:
    """All of them."""
    if recorder.arch == "sm_90a":
        measured(recorder)
    for family in (integers, digits, checks, looks, samples, compensated, checked):
        family(recorder)
