"""What choosing costs: ``residual.matmul(tol=...)`` against the fastest mode that meets the tolerance, and the check.

For each size, kind of data and tolerance: milliseconds of ``mode="auto"``, of every mode with the same ``tol`` that
does not refuse, of the same modes without a check where their error by float64 meets it, and of torch's float32
product.  ``regret`` is auto's time over that of the fastest baseline that gives the same assurance, a checked mode or
float32; ``regret, unchecked``: over that of the fastest one whose error is small enough, which nobody knows beforehand.
``regret, first call``: of a call that knows nothing of those before, so that it takes statistics.
For each size and mode also the time with and without a check.  Times are medians of whole calls from float32 inputs,
host included, in a loop: baselines take turns of two calls, of which the second counts.  No price or constant was
fitted to the data.

Writes ``benchmarks/results/auto_<device>.json`` as it goes; kernels that no cache has yet are compiled on the way.
Run: ``PYTHONPATH=. python benchmarks/auto.py [--device cpu] [--quick] [--seconds S] [--out FILE]``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accuracy import RESULTS, Draw, again, once, settle
from harness.machine import gpu_machine
from torch import Tensor

from magicube_cutlass.cli.environment import provenance
from residual.execute.checked import Report, ToleranceError
from residual.execute.measure_costs import measure_costs
from residual.matmul import matmul
from residual.operand.operand import prepare
from residual.planning import history as habits
from residual.planning.cost_model import Costs, Sizes, cost, costs_of
from residual.planning.plan import MODES, plans_of

TOLERANCES = (3e-2, 3e-3, 3e-4, 1e-5)
_ROUNDS, _FEWEST = 15, 3
_CHECKED = ("direct", "centred", "full", "full4", "three_digit")
Call = Callable[[], Any]


def _laplace(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    draw = torch.distributions.Laplace(torch.tensor(0.0, device=device), torch.tensor(1.0, device=device))
    return draw.sample((n, n)), draw.sample((n, n))


def _shifted(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return 3 + torch.randn(n, n, device=device), 0.2 * torch.rand(n, n, device=device) - 0.05


def _relu(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(n, n, device=device).relu(), torch.randn(n, n, device=device) / n**0.5


def _channels(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Activations with a few large channels, as language models have them."""
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    a[:, torch.randperm(n, device=device)[: max(1, n // 500)]] *= 30
    return a, b


def _lognormal(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(n, n, device=device).exp(), torch.randn(n, n, device=device)


KINDS: dict[str, Draw] = {
    "Laplace": _laplace,
    "shifted normal x shifted uniform": _shifted,
    "ReLU of normal": _relu,
    "0.2% channels of 30": _channels,
    "lognormal x normal": _lognormal,
}


def medians(baselines: dict[str, Call], device: torch.device, budget: float) -> dict[str, float]:
    """Median milliseconds; the order rotates by one a round.  Past ``budget`` seconds and three rounds none begins.

    A baseline that refuses its tolerance once is none: near the bound the probes decide.
    """
    seen = {name: list[float]() for name in baselines}
    start = time.perf_counter()
    for turn in range(_ROUNDS + 1):  # the first one warms up
        if turn > _FEWEST and time.perf_counter() - start > budget:
            break
        names = list(seen)
        shift = turn % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            try:
                seen[name].append(again(baselines[name], device))
            except ToleranceError:
                del seen[name]
    return {name: median(times[1:]) for name, times in seen.items()}


def errors_of(a: Tensor, b: Tensor) -> dict[str, float]:
    """Relative Frobenius errors of every mode without a check, and of torch's float32, by float64."""
    truth = a.double() @ b.double()
    size = float(truth.norm())
    calls: dict[str, Call] = {mode: partial(matmul, a, b, mode=mode) for mode in MODES}
    calls["torch fp32"] = partial(torch.matmul, a, b)
    return {name: float((call().double() - truth).norm()) / size for name, call in calls.items()}


def fastest(times: dict[str, float]) -> tuple[str, float]:
    """Of baselines, by name; ``("none", inf)`` where there is none."""
    return min(times.items(), key=lambda found: found[1], default=("none", float("inf")))


def regrets(auto: float, times: dict[str, float], errors: dict[str, float], tol: float) -> dict[str, Any]:
    """Auto's time over the best baselines'; ``times`` are named ``mode, checked``, ``mode`` and ``torch fp32``."""
    single = {"torch fp32": times["torch fp32"]} if errors["torch fp32"] <= tol else {}
    same = {name: ms for name, ms in times.items() if name.endswith(", checked")} | single
    known = {name: ms for name, ms in times.items() if errors.get(name, float("inf")) <= tol}
    (best, ms), (oracle, least) = fastest(same), fastest(known)
    return {"best": best, "regret": auto / ms, "best, unchecked": oracle, "regret, unchecked": auto / least}


def first_call(call: Call, device: torch.device) -> float:
    """Milliseconds of a call that knows nothing of those before."""
    habits.forget()
    return once(call, device)


def run_case(kind: str, n: int, tol: float, device: torch.device, budget: float) -> dict[str, Any]:
    """Auto and its baselines on one problem."""
    torch.manual_seed(n + 1)
    habits.forget()  # of other data
    a, b = KINDS[kind](n, device)
    errors = errors_of(a, b)
    report: Report | None = None
    try:
        report = matmul(a, b, tol=tol, return_report=True)[1]
    except ToleranceError as refusal:
        return {"kind": kind, "n": n, "tol": tol, "refused": refusal.report.plan}
    baselines: dict[str, Call] = {"auto": partial(matmul, a, b, tol=tol), "torch fp32": partial(torch.matmul, a, b)}
    baselines |= {f"{mode}, checked": partial(matmul, a, b, mode=mode, tol=tol) for mode in MODES}
    baselines |= {mode: partial(matmul, a, b, mode=mode) for mode in MODES if errors[mode] <= tol}
    first = median(first_call(baselines["auto"], device) for _ in range(_FEWEST))
    try:
        settle(baselines["auto"])
    except ToleranceError:
        return {"kind": kind, "n": n, "tol": tol, "refused": "at times"}
    settled = (habits.known() or ("fp32",))[0]  # by sizes alone, where statistics are not worth their time
    times = medians(baselines, device, budget)
    if "auto" not in times:
        return {"kind": kind, "n": n, "tol": tol, "refused": "at times"}
    found = regrets(times["auto"], times, errors, tol)
    found["regret, first call"] = regrets(first, times, errors, tol)["regret"]
    print(f"{n:6} {tol:7g} {kind:34} {report.plan:18} {times['auto']:8.3f} ms, {found['regret']:.2f} of "
          f"{found['best']}, {found['regret, unchecked']:.2f} of {found['best, unchecked']}", flush=True)  # fmt: skip
    return {
        "kind": kind, "n": n, "tol": tol, "plan": report.plan, "attempts": len(report.attempts),
        "predicted": report.predicted_error, "estimated": report.estimated_error, "plan in the loop": settled, **found,
        "first call": first, "ms": times, "errors": errors,
    }  # fmt: skip


def run_check(n: int, device: torch.device, budget: float) -> dict[str, Any]:
    """Milliseconds of modes with and without a check, B prepared or not, and the share of the checked call."""
    torch.manual_seed(n)
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    baselines: dict[str, Call] = {}
    for mode in _CHECKED:
        for label, held in (("", None), (", prepared", prepare(b, mode=mode))):
            baselines[mode + label] = partial(matmul, a, b, mode=mode, prepared=held)
            baselines[mode + label + ", checked"] = partial(matmul, a, b, mode=mode, prepared=held, tol=0.5)
    times = medians(baselines, device, budget)
    shares = {name: 1 - times[name] / times[f"{name}, checked"] for name in times if f"{name}, checked" in times}
    print(f"{n:6} the check's share: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()), flush=True)
    return {"n": n, "ms": times, "share": shares}


def by_prices(n: int, prices: Costs) -> dict[str, float]:
    """Milliseconds that the prices expect of each plan, to be held against the measured ones."""
    return {str(plan): 1e3 * cost(plan, Sizes(n, n, n), prices) for plan in plans_of("auto", (8,))}


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Worst and middle regret of all cases."""
    found = {}
    for name in ("regret", "regret, first call", "regret, unchecked"):
        values = [case[name] for case in cases if name in case]
        if values:
            found[name] = {"worst": max(values), "median": median(values), "above 1.25": sum(x > 1.25 for x in values)}
    return {**found, "cases": len(cases)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a few small cases, to see that it runs")
    parser.add_argument("--seconds", type=float, default=110, help="no case begins later; cases share them evenly")
    parser.add_argument("--out", type=Path, help="the results file")
    args = parser.parse_args()
    device, start = torch.device(args.device), time.perf_counter()
    gpu = device.type == "cuda"
    sizes = (160,) if args.quick else (2048, 4096, 8192) if gpu else (1024,)
    name = torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "_") if gpu else "cpu"
    path = args.out or RESULTS / f"auto_{name}.json"
    if not args.quick:
        measure_costs(device, save=False)
    prices = costs_of(device)
    result: dict[str, Any] = {"machine": gpu_machine() if gpu else provenance(), "costs": vars(prices), "checks": [],
                              "cases": [], "left out": []}  # fmt: skip
    result["by prices"] = {str(n): by_prices(n, prices) for n in sizes}
    jobs: list[tuple[str, Callable[[float], dict[str, Any]]]] = []
    for n in sizes:
        jobs.append((f"check, n = {n}", lambda budget, n=n: run_check(n, device, budget)))  # type: ignore[misc]
        for kind in list(KINDS)[:: 4 if args.quick else 1]:
            for tol in TOLERANCES[:: 3 if args.quick else 1]:
                run = lambda budget, kind=kind, n=n, tol=tol: run_case(kind, n, tol, device, budget)  # noqa: E731
                jobs.append((f"{kind}, n = {n}, tol = {tol:g}", run))
    for done, (label, job) in enumerate(jobs):
        left = args.seconds - (time.perf_counter() - start)
        if left <= 0:
            result["left out"].append(label)
        else:
            result["checks" if label.startswith("check") else "cases"].append(job(0.5 * left / (len(jobs) - done)))
        result["summary"], result["seconds"] = summary(result["cases"]), round(time.perf_counter() - start)
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{json.dumps(result.get('summary'))}\n{path}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
