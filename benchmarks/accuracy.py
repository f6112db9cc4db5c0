"""Error against time: ``residual.matmul`` in every mode and with tolerances, and torch's own products, in one run.

Six kinds of data, square matrices; errors are by float64, times are of whole calls from float inputs, host included,
in a loop: baselines take turns of two calls, of which the second counts.
Writes ``benchmarks/results/accuracy_<device>.json``; ``benchmarks/plots/accuracy_plot.py`` draws it.
Run: ``PYTHONPATH=. python benchmarks/accuracy.py [--device cpu] [--quick] [--seconds S] [--out FILE]``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness.machine import gpu_machine
from torch import Tensor

from magicube_cutlass.cli.environment import provenance
from residual.matmul import matmul, prepare
from residual.planning.ladder import MODES
from residual.report import ToleranceError

RESULTS = Path(__file__).resolve().parent / "results"
_FEWEST_ROUNDS = 3
TOLERANCES = (2e-2, 1e-3, 1e-4, 1e-5, 1e-6)
Draw = Callable[[int, torch.device], tuple[Tensor, Tensor]]


def _normal(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(n, n, device=device), torch.randn(n, n, device=device)


def _uniform(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.rand(n, n, device=device), torch.rand(n, n, device=device)


def _exponential(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    a, b = _uniform(n, device)
    return -a.clamp_(min=1e-30).log(), -b.clamp_(min=1e-30).log()


def _outliers(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    a, b = _normal(n, device)
    a[:, torch.rand(n, device=device) < 0.005] *= 50
    return a, b


def _student(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    draw = torch.distributions.StudentT(torch.tensor(2.0, device=device))
    return draw.sample((n, n)), draw.sample((n, n))


def _rows(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    a, b = _normal(n, device)
    return torch.ldexp(a, torch.randint(-20, 21, (n, 1), device=device)), b


KINDS: dict[str, Draw] = {
    "normal": _normal,
    "uniform": _uniform,
    "exponential": _exponential,
    "0.5% outlier columns of 50": _outliers,
    "Student t2": _student,
    "normal, rows scaled by 2^-20 to 2^20": _rows,
}


@contextmanager
def precision(name: str) -> Iterator[None]:
    """float32 products of torch in this precision; raises ``RuntimeError`` where torch does not know it."""
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision
    backend.fp32_precision = name
    try:
        yield
    finally:
        backend.fp32_precision = before


def _in_dtype(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    return (a.to(dtype) @ b.to(dtype)).float()


def _in_precision(name: str, a: Tensor, b: Tensor) -> Tensor:
    with precision(name):
        return a @ b


def _fp8(a: Tensor, b: Tensor) -> Tensor:
    """A scale per row and a column, as ours."""
    top = torch.finfo(torch.float8_e4m3fn).max
    left, right = a.abs().amax(1, keepdim=True) / top, b.abs().amax(0, keepdim=True) / top
    codes_a, codes_b = (a / left).to(torch.float8_e4m3fn), (b / right).mT.contiguous().to(torch.float8_e4m3fn).mT
    return torch._scaled_mm(codes_a, codes_b, scale_a=left, scale_b=right, out_dtype=torch.bfloat16)


def torch_baselines(a: Tensor, b: Tensor) -> dict[str, Callable[[], Tensor]]:
    """torch's products of the same float32 inputs, conversions included."""
    found: dict[str, Callable[[], Tensor]] = {
        "torch fp32": partial(torch.matmul, a, b),
        "torch bf16": partial(_in_dtype, torch.bfloat16, a, b),
    }
    if a.is_cuda:
        found["torch tf32"] = partial(_in_precision, "tf32", a, b)
        found["torch fp16"] = partial(_in_dtype, torch.float16, a, b)
        found["torch fp8, row scales"] = partial(_fp8, a, b)
        found["cuBLAS emulated bf16x9"] = partial(_in_precision, "bf16x9", a, b)
    return found


def our_baselines(a: Tensor, b: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Every mode, with and without a prepared B, and tolerances."""
    held = {mode: prepare(b, mode=mode) for mode in ("auto", "direct", "full")}
    found: dict[str, Callable[[], Any]] = {}
    for mode in MODES:
        found[mode] = partial(matmul, a, b, mode=mode)
    for mode in ("direct", "full"):
        found[f"{mode}, prepared"] = partial(matmul, a, held[mode], mode=mode)
        found[f"{mode}, checked"] = partial(matmul, a, b, mode=mode, tol=0.5)
    for tol in TOLERANCES:
        found[f"tol {tol:g}"] = partial(matmul, a, b, tol=tol)
        found[f"tol {tol:g}, prepared"] = partial(matmul, a, held["auto"], tol=tol)
    return found


def once(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call on an idle device, until its result is there."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def again(call: Callable[[], object], device: torch.device) -> float:
    """As :func:`once`, right behind another call: in a loop, caches and the allocator are as the last one left them."""
    call()
    return once(call, device)


def measured(
    baselines: dict[str, Callable[[], Tensor]], device: torch.device, rounds: int, budget: float
) -> dict[str, float]:
    """Median milliseconds; the order rotates by one a round.  Past ``budget`` seconds and three rounds none begins."""
    names, seen = list(baselines), {name: list[float]() for name in baselines}
    for name in names:
        baselines[name]()  # kernels compile
    start = time.perf_counter()
    for turn in range(rounds):
        if turn >= _FEWEST_ROUNDS and time.perf_counter() - start > budget:
            break
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            seen[name].append(again(baselines[name], device))
    return {name: median(times) for name, times in seen.items()}


def errors_of(baselines: dict[str, Callable[[], Tensor]], truth: Tensor) -> tuple[dict[str, float], dict[str, str]]:
    """Relative Frobenius errors, and what failed and why."""
    errors, failures = {}, {}
    size = float(truth.norm())
    for name, call in baselines.items():
        try:
            errors[name] = float((call().double() - truth).norm()) / size
        except (RuntimeError, ValueError, TypeError, NotImplementedError, ToleranceError) as error:
            failures[name] = str(error).splitlines()[0][:160]
    return errors, failures


def regrets(times: dict[str, float], errors: dict[str, float]) -> dict[str, float]:
    """For each tolerance, time of the planned product over that of the fastest one of its baselines that meets it."""
    fixed = [name for name in errors if name in (*MODES, "torch fp32")]
    found = {}
    for tol in TOLERANCES:
        meeting = [times[name] for name in fixed if errors[name] <= tol]
        if meeting and f"tol {tol:g}" in times:
            found[f"{tol:g}"] = times[f"tol {tol:g}"] / min(meeting)
    return found


def run(kind: str, n: int, device: torch.device, rounds: int, budget: float) -> dict[str, Any]:
    """All baselines on one kind of data of one size."""
    torch.manual_seed(n)
    a, b = KINDS[kind](n, device)
    truth = a.double() @ b.double()
    baselines = torch_baselines(a, b) | our_baselines(a, b)
    errors, failures = errors_of(baselines, truth)
    del truth
    times = measured({name: baselines[name] for name in errors}, device, rounds, budget)
    plans = {}
    for tol in TOLERANCES:
        if f"tol {tol:g}" in errors:
            report = matmul(a, b, tol=tol, seed=0, return_report=True)[1]
            plans[f"tol {tol:g}"] = {
                "plan": report.plan, "estimated": report.estimated_error, "upper": report.upper,
                "attempts": len(report.attempts),
            }  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"name": name, "ms": times[name], "error": errors[name], **plans.get(name, {})} for name in errors
    ]
    print(f"\n{kind}, n = {n}")
    for row in sorted(rows, key=lambda row: row["ms"]):
        print(f"  {row['name']:24} {row['ms']:9.3f} ms  error {row['error']:.1e}  {row.get('plan', '')}", flush=True)
    return {"kind": kind, "n": n, "rows": rows, "failures": failures, "regret": regrets(times, errors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one small size, to see that it runs")
    parser.add_argument("--seconds", type=float, default=120, help="about; half of it for timing, shared by all cases")
    parser.add_argument("--out", type=Path, help="the results file")
    args = parser.parse_args()
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    sizes = (128,) if args.quick else (1024, 2048, 4096, 8192) if gpu else (1024, 2048)
    rounds = 3 if args.quick else 15 if gpu else 5
    budget = args.seconds / 2 / len(KINDS) / len(sizes)
    start = time.perf_counter()
    name = torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "_") if gpu else "cpu"
    result: dict[str, Any] = {
        "machine": gpu_machine() if gpu else provenance(),
        "cases": [run(kind, n, device, rounds, budget) for n in sizes for kind in KINDS],
    }
    result["seconds"] = round(time.perf_counter() - start)
    path = args.out or RESULTS / f"accuracy_{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{path}, {result['seconds']} s")


if __name__ == "__main__":
    main()
