"""Random products of every kind, computed with a tolerance and compared with float64.

Run: ``python -m tests.compensated.random_products FILE [COUNT]`` writes a summary of COUNT (2,000) products to FILE; with
``cuda`` behind it, of products on a GPU, each called three times; those of ``direct`` are foreseen from the second on.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from magicube_cutlass.cli.environment import provenance
from residual.error.predict import Forecast
from residual.execute import checked as call
from residual.execute.checked import ToleranceError
from residual.matmul import matmul
from residual.operand.operand import prepare
from residual.planning.cost_model import Costs, costs_of
from residual.planning.plan import MODES

LARGEST = 1500
_CHEAP = Costs(1e-9, 2.5e-10, 1e-9, 1e-12, 1e-13, 1e-11, 1e-11, 4e-11, 1e-13, *[1e-12] * 6)  # digits for nothing
_STATED = 0.01  # of all calls may miss their tolerance


def _positive(m: int, k: int, n: int, draw: Callable[[tuple[int, ...]], Tensor]) -> tuple[Tensor, Tensor]:
    return draw((m, k)), draw((k, n))


def _outliers(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    a, b = torch.randn(m, k), torch.randn(k, n)
    share, size = random.uniform(0.001, 0.01), random.uniform(20, 100)
    for columns in (a.mT, b) if random.random() < 0.3 else (a.mT,):
        columns[torch.rand(k) < share] *= size
    return a, b


def _low_rank(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    rank = random.randint(1, 8)
    return torch.randn(m, rank) @ torch.randn(rank, k), torch.randn(k, rank) @ torch.randn(rank, n)


def _zeros(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    a, b = torch.randn(m, k), torch.randn(k, n)
    share = random.choice((0.1, 0.5, 0.95, 1.0))
    a[torch.rand(m) < share], b[:, torch.rand(n) < share], a[:, torch.rand(k) < share / 2] = 0, 0, 0
    return a, b


def _powers(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    rows, columns = torch.randint(-119, 1, (m, 1)), torch.randint(-30, 31, (n,))
    return torch.ldexp(torch.randn(m, k), rows), torch.ldexp(torch.randn(k, n), columns)


def _cancelling(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    u, v = torch.randn(m, k), torch.randn(k, n)
    left = 10.0 ** random.uniform(-5, -0.5) * torch.randn(k, n)
    order = torch.randperm(2 * k)
    return torch.cat([u, u], 1)[:, order], torch.cat([v, left - v], 0)[order]


def _student(shape: tuple[int, ...]) -> Tensor:
    return torch.distributions.StudentT(torch.tensor(2.0)).sample(shape)


KINDS: dict[str, Callable[[int, int, int], tuple[Tensor, Tensor]]] = {
    "uniform": lambda *s: _positive(*s, torch.rand),
    "normal(10, 3)": lambda *s: _positive(*s, lambda shape: 10 + 3**0.5 * torch.randn(shape)),
    "exponential": lambda *s: _positive(*s, lambda shape: -torch.rand(shape).clamp(min=1e-30).log()),
    "chi-square": lambda *s: _positive(*s, lambda shape: torch.randn(shape).square()),
    "Poisson": lambda *s: _positive(*s, lambda shape: torch.poisson(torch.full(shape, 4.0))),
    "standard normal": lambda *s: _positive(*s, torch.randn),
    "outlier columns": _outliers,
    "Student t2": lambda *s: _positive(*s, _student),
    "low rank": _low_rank,
    "zero lines": _zeros,
    "powers of two": _powers,
    "cancelling": _cancelling,
}


@dataclass(frozen=True)
class Outcome:
    """What became of one product.

    ``error``: by float64, of a result that was returned; ``plain``: of a float32 product in its stead, where none was.
    """

    kind: str
    shape: tuple[int, int, int]
    tol: float
    options: str
    plan: str
    attempts: int
    predicted: float
    estimated: float
    error: float | None
    plain: float | None

    @property
    def needless(self) -> bool:
        """Whether it was refused although a float32 product is twice as good as asked for."""
        return self.plain is not None and " auto " in self.options and self.plain < self.tol / 2

    @property
    def missed(self) -> bool:
        return self.error is not None and not self.error <= self.tol


def _size() -> int:
    if random.random() < 0.75:
        return random.randint(1, LARGEST)
    return min(LARGEST, round(math.exp(random.uniform(0, math.log(LARGEST)))))


def true_error(A: Tensor, B: Tensor, C: Tensor) -> float:
    """Relative Frobenius error of C against float64, as it is where the product is zero: 0 or infinite."""
    truth = A.double() @ B.double()
    off, size = float((C.double() - truth).norm()), float(truth.norm())
    return off / size if size else (0.0 if off == 0 else math.inf)


def one(seed: int) -> Outcome:
    """The product of this number."""
    random.seed(seed)
    torch.manual_seed(seed)
    kind = random.choice(list(KINDS))
    m, k, n = _size(), _size(), _size()
    A, B = KINDS[kind](m, k, n)
    dtype = random.choice([torch.float32] * 8 + [torch.float64, torch.bfloat16])
    if dtype != torch.float32 and kind != "powers of two":
        A, B = A.to(dtype), B.to(dtype)
    tol = 10.0 ** random.uniform(-6, -1)
    mode = random.choice(["auto"] * 2 * len(MODES) + list(MODES))
    bits = random.choice([None] * 5 + [4])
    on_failure = random.choice(["raise", "fp32"])
    prices = random.choice([costs_of(A.device), _CHEAP])
    held = prepare(B) if random.random() < 0.2 else None
    out = torch.float64 if A.dtype == torch.float64 else torch.float32
    blind = random.random() < 0.25  # every plan is predicted to be good, so that the check alone stands guard
    forecast = (lambda self, plan: 0.0) if blind else Forecast.error
    options = f"{A.dtype} {mode} {bits} {on_failure}{' prepared' if held else ''}{' blind' if blind else ''}"
    with patch.object(call, "costs_of", lambda device: prices), patch.object(Forecast, "error", forecast):
        try:
            C, report = matmul(
                A, B, tol=tol, mode=mode, bits=bits, on_failure=on_failure, prepared=held, seed=seed, out_dtype=out,
                return_report=True,
            )  # fmt: skip
            error, plain = true_error(A, B, C), None
        except ToleranceError as failure:
            report, error, plain = failure.report, None, true_error(A, B, A.float() @ B.float())
    shape = (m, A.shape[1], n)
    return Outcome(kind, shape, tol, options, report.plan, len(report.attempts), report.predicted_error,
                   report.estimated_error, error, plain)  # fmt: skip


def outcomes(count: int, first: int = 0) -> Iterator[Outcome]:
    """So many products, one number after the other."""
    return (one(first + i) for i in range(count))


def foreseen(seed: int) -> Iterator[Outcome]:
    """The product of this number on a GPU, in sizes whose launches are kept; ``direct`` is foreseen but in the first."""
    from residual.execute import fast_path as kept

    random.seed(seed)
    torch.manual_seed(seed)
    kind = random.choice(list(KINDS))
    m, k, n = random.randint(1100, 2500), random.randint(1100, 2500), random.randint(64, 2500)
    with torch.device("cuda"):
        A, B = KINDS[kind](m, k, n)
    if random.random() < 0.3:
        A, B = A.mT.contiguous().mT, B.mT.contiguous().mT
    tol, mode = 10.0 ** random.uniform(-5, -1), random.choice(("direct", "full", "full4"))
    bits, held = random.choice([None] * 5 + [4]), prepare(B) if random.random() < 0.2 else None
    run, ways = kept._run_foreseen, list[str]()

    def counted(*args: Any, **options: Any) -> Any:
        ways.append("foreseen")
        return run(*args, **options)

    for turn in range(3):
        error, plain = None, None
        ways.clear()
        with patch.object(kept, "_run_foreseen", counted):
            try:
                error = true_error(A, B, matmul(A, B, tol=tol, mode=mode, bits=bits, prepared=held))
            except ToleranceError:
                plain = math.inf
        options = f"{mode} {bits} call {turn}{' prepared' if held else ''}"
        plan = f"{mode}, {'foreseen' if ways else 'read'}"
        yield Outcome(kind, (m, A.shape[1], n), tol, options, plan, 1, math.nan, math.nan, error, plain)
        if error is None:
            return


def summary(found: list[Outcome]) -> dict[str, object]:
    """Counts, by kind and by plan, and every miss."""
    returned = [each for each in found if each.error is not None]
    raised = [each for each in found if each.error is None]
    kinds = {
        kind: {
            "products": len(own := [each for each in found if each.kind == kind]),
            "returned": sum(each.error is not None for each in own),
            "missed": sum(each.missed for each in own),
            "largest error / tol": max((each.error / each.tol for each in own if each.error is not None), default=0.0),
        }
        for kind in KINDS
    }
    return {
        "products": len(found),
        "returned": len(returned),
        "missed": sum(each.missed for each in found),
        "stated probability of a miss": _STATED,
        "raised": len(raised),
        "raised, mode auto": sum(" auto " in each.options for each in raised),
        "raised, on_failure fp32": sum(" fp32" in each.options for each in raised),
        "raised needlessly": sum(each.needless for each in found),
        "attempts": dict(sorted(Counter(each.attempts for each in found).items())),
        "plans": dict(Counter(each.plan for each in returned).most_common()),
        "kinds": kinds,
        "misses": [each.__dict__ for each in found if each.missed],
    }


def main() -> None:
    path, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    start, found = time.perf_counter(), list[Outcome]()
    on_gpu = sys.argv[3:] == ["cuda"]
    for outcome in (each for seed in range(count) for each in foreseen(seed)) if on_gpu else outcomes(count):
        found.append(outcome)
        if len(found) % 100 == 0:
            misses = sum(each.missed for each in found)
            print(f"{len(found)} products, {misses} missed, {time.perf_counter() - start:.0f} s", flush=True)
    result = {"machine": provenance(), "seconds": round(time.perf_counter() - start), **summary(found)}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
