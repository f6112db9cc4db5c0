"""``residual.matmul`` on a GPU against torch's products, all in one run: float32, float16 and bfloat16 operands.

Writes ``benchmarks/results/compensated_h200.json``, or the file that the GPU's name gives.  Times are microseconds of
whole checked calls in a loop, the wait for the verdict included: ``loop_us`` of float32, ``sixteen_bit_us`` of 16-bit
operands and output; ``gpu_us``: of the launches alone in a CUDA graph, behind an elementwise kernel.
Run: ``PYTHONPATH=. python benchmarks/compensated.py [--quick] [--out FILE] [--profile]``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from harness.gpu_data import compile_ahead
from harness.gpu_results import gpu_arguments, rounded, write_results
from harness.gpu_timing import behind
from harness.machine import gpu_machine
from torch import Tensor

import residual
from cute_kernels.convert.digits import columns_config, rows_config
from cute_kernels.estimate import look, verdict
from cute_kernels.estimate.config import double_configs
from cute_kernels.gemm.config import select_products
from cute_kernels.gemm.heuristics import candidates
from cute_kernels.jit import current_arch
from cute_kernels.jit.warmup import Source
from residual.cuda import passes, sixteen_bit
from residual.options import check_options

SIZES = (1024, 2048, 4096, 8192)
TOLERANCES = (2e-2, 1e-3)
SIXTEEN_BIT = {torch.float16: 1e-3, torch.bfloat16: 1e-2}  # tolerance by dtype
ROUNDS = 9


def loop(calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median over rounds of the mean time of a call in a loop, in microseconds; the order is rotated."""
    counts: dict[str, int] = {}
    for name, call in calls.items():
        for _ in range(10):  # its launches become a graph
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        counts[name] = max(3, min(200, int(0.05 / (time.perf_counter() - start))))
    seen: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(counts[name]):
                calls[name]()
            torch.cuda.synchronize()
            seen[name].append((time.perf_counter() - start) / counts[name] * 1e6)
    return {name: rounded(median(found)) for name, found in seen.items()}


def float_product(A: Tensor, B: Tensor, tf32: bool) -> Callable[[], Tensor]:
    def call() -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        return A @ B

    return call


def checked_call(A: Tensor, B: Tensor | residual.PreparedOperand, tol: float) -> Callable[[], Tensor]:
    return lambda: residual.matmul(A, B, tol=tol)


def started(A: Tensor, B: Tensor, tol: float, held: residual.PreparedOperand | None) -> Callable[[], object]:
    """The launches of a checked call; nobody reads the verdict."""
    options = check_options(tol)
    if sixteen_bit.serves(A, B, held, options):
        return lambda: sixteen_bit.start(A, B, held, options)
    known = None if held is None else held.passes
    rungs = passes.rungs_to_pick(A, B, options)
    return lambda: passes.start_picked(A, B, options, rungs, known)


def profile(call: Callable[[], object]) -> dict[str, float]:
    """Return microseconds of each kernel of a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(20):
            call()
        torch.cuda.synchronize()
    found = {each.key: rounded(each.device_time_total / 20) for each in seen.key_averages()}
    return {name.split("<")[0].split("::")[-1]: us for name, us in found.items() if us}


def checked_plan(name: str, A: Tensor, right: Tensor | residual.PreparedOperand, tol: float, truth: Tensor) -> str:
    """Return plan, error and bound of a call; raise if the error is beyond either."""
    C, report = residual.matmul(A, right, tol=tol, return_report=True)
    error = float((C.double() - truth).norm() / truth.norm())
    if not error <= min(tol, report.upper):
        raise ArithmeticError(f"{name}: error {error:.2e}, reported {report.upper:.2e}")
    return f"{report.plan}, error {error:.2e}, bound {report.upper:.2e}"


def sixteen_bit_calls(A: Tensor, B: Tensor, plans: dict[str, str]) -> dict[str, Callable[[], Tensor]]:
    """Return the calls of 16-bit operands, checked against float64."""
    calls: dict[str, Callable[[], Tensor]] = {}
    for dtype, tol in SIXTEEN_BIT.items():
        kind, a, b = str(dtype).removeprefix("torch."), A.to(dtype), B.to(dtype)
        truth = a.double() @ b.double()
        calls[f"torch {kind}"] = float_product(a, b, False)
        for prepared, right in (("", b), (", prepared", residual.prepare(b, tol=tol))):
            name = f"{kind}, {tol:g}{prepared}"
            plans[name] = checked_plan(name, a, right, tol, truth)
            calls[name] = checked_call(a, right, tol)
            if not torch.equal(calls[name](), residual.matmul(a, right, tol=tol, return_report=True)[0]):
                raise ArithmeticError(f"{name}: another product without a report")
    return calls


def run_size(n: int, with_profile: bool) -> dict[str, Any]:
    """All calls of one size, checked against float64 and timed in the same rounds."""
    generator = torch.Generator("cuda").manual_seed(n)
    A, B = (torch.randn(n, n, generator=generator, device="cuda") for _ in range(2))
    truth = A.double() @ B.double()
    calls: dict[str, Callable[[], Tensor]] = {
        "torch float32": float_product(A, B, False),
        "torch tf32": float_product(A, B, True),
    }
    gpu: dict[str, float] = {}
    profiles: dict[str, dict[str, float]] = {}
    plans: dict[str, str] = {}
    for tol in TOLERANCES:
        held = residual.plan(B, tol=tol).right
        assert held is not None
        for kind, right in (("", B), (", prepared", held)):
            name = f"{tol:g}{kind}"
            calls[name] = checked_call(A, right, tol)
            plans[name] = checked_plan(name, A, right, tol, truth)
            launches = started(A, B, tol, held if kind else None)
            gpu[name] = rounded(behind({name: launches})[name].median)
            if with_profile:
                profiles[name] = profile(calls[name])
    del truth
    times = loop(calls)
    torch.backends.cuda.matmul.allow_tf32 = False
    short = sixteen_bit_calls(A, B, plans)
    row: dict[str, Any] = {"n": n, "loop_us": times, "gpu_us": gpu, "sixteen_bit_us": loop(short), "plans": plans}
    if with_profile:
        row["kernels_us"] = profiles
    print(f"\nn = {n}")
    for name, us in (*times.items(), *row["sixteen_bit_us"].items()):
        print(f"  {name:28} {us:9.1f} us  gpu {gpu.get(name, float('nan')):8.1f}  {plans.get(name, '')}", flush=True)
    for name, kernels in profiles.items():
        print(f"  {name}: " + "; ".join(f"{kernel} {us}" for kernel, us in kernels.items()))
    return row


def configs() -> list[Source]:
    """Every kernel that the checked calls will use."""
    found: list[Source] = [*look.default_configs(), verdict.VerdictConfig(), *double_configs()]
    for planes in (2, 3):
        for n in SIZES:
            found += [rows_config("float32", planes, n), columns_config("float32", planes, current_arch(), n)]
    for planes in (1, 2, 3):
        tiles = candidates(select_products(planes, planes, None), current_arch())
        found += [replace(each, out="float32", gated=True).side_by_side for each in tiles]
    return found


def main() -> None:
    args = gpu_arguments(
        __doc__, "one small size", profile={"action": "store_true", "help": "print each kernel's time"}
    )
    start = time.perf_counter()
    compile_ahead(configs())
    results: dict[str, Any] = {
        "machine": gpu_machine(),
        "setting": {"data": "normal", "us": "median over rounds of the mean call in a loop"},
        "sizes": [run_size(n, args.profile) for n in (SIZES[:1] if args.quick else SIZES)],
    }
    write_results(results, args.out, "compensated", start)


if __name__ == "__main__":
    main()
