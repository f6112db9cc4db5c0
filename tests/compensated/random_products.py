"""Random products of every kind, computed with a tolerance and compared with float64.

Run: ``python -m tests.compensated.random_products FILE [COUNT] [cuda]`` writes a summary of COUNT (2,000) products to
FILE; with ``cuda`` of products on a GPU, whose float32 check is guarded.
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

import torch
from torch import Tensor

from magicube_cutlass.cli.environment import provenance
from residual.matmul import matmul, prepare
from residual.planning.ladder import MODES
from residual.report import ToleranceError

LARGEST = 1500
_STATED = 0.01  # of all calls may miss their tolerance


Draw = Callable[[int, int, int], tuple[Tensor, Tensor]]


def _positive(draw: Callable[[tuple[int, ...]], Tensor]) -> Draw:
    return lambda m, k, n: (draw((m, k)), draw((k, n)))


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


KINDS: dict[str, Draw] = {
    "uniform": _positive(torch.rand),
    "normal(10, 3)": _positive(lambda shape: 10 + 3**0.5 * torch.randn(shape)),
    "exponential": _positive(lambda shape: -torch.rand(shape).clamp(min=1e-30).log()),
    "chi-square": _positive(lambda shape: torch.randn(shape).square()),
    "Poisson": _positive(lambda shape: torch.poisson(torch.full(shape, 4.0))),
    "standard normal": _positive(torch.randn),
    "outlier columns": _outliers,
    "Student t2": _positive(_student),
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


LADDERS = (None, None, ("direct", "full", "three_digit", "fp32"), ("direct", "fp32"), ("full", "fp32", "fp64"))


def one(seed: int, device: str = "cpu") -> Outcome:
    """The product of this number."""
    random.seed(seed)
    torch.manual_seed(seed)
    kind = random.choice(list(KINDS))
    m, k, n = _size(), _size(), _size()
    A, B = (x.to(device) for x in KINDS[kind](m, k, n))
    dtype = random.choice([torch.float32] * 8 + [torch.float64, torch.bfloat16])
    if dtype != torch.float32 and kind != "powers of two":
        A, B = A.to(dtype), B.to(dtype)
    tol = 10.0 ** random.uniform(-6, -1)
    mode = random.choice(["auto"] * 2 * len(MODES) + list(MODES))
    bits = random.choice([None] * 5 + [4])
    on_failure: Any = random.choice(["raise", "fallback"])
    rungs = random.choice(LADDERS) if mode == "auto" else None
    held = prepare(B, mode=mode, bits=bits, seed=seed) if random.random() < 0.2 else None
    out = torch.float64 if A.dtype == torch.float64 else torch.float32
    options = f"{A.dtype} {mode} {bits} {on_failure} {rungs}{' prepared' if held else ''}"
    try:
        C, report = matmul(
            A, B if held is None else held, tol=tol, mode=mode, bits=bits, rungs=rungs, seed=seed, out_dtype=out,
            on_failure=on_failure, return_report=True,
        )  # fmt: skip
        error, plain = true_error(A, B, C), None
    except ToleranceError as failure:
        report, error, plain = failure.report, None, true_error(A, B, A.float() @ B.float())
    shape = (m, A.shape[1], n)
    return Outcome(kind, shape, tol, options, report.plan, len(report.attempts), report.estimated_error, error, plain)


def outcomes(count: int, first: int = 0, device: str = "cpu") -> Iterator[Outcome]:
    """So many products, one number after the other."""
    return (one(first + i, device) for i in range(count))


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
        "raised, on_failure fallback": sum(" fallback" in each.options for each in raised),
        "raised needlessly": sum(each.needless for each in found),
        "attempts": dict(sorted(Counter(each.attempts for each in found).items())),
        "plans": dict(Counter(each.plan for each in returned).most_common()),
        "kinds": kinds,
        "misses": [each.__dict__ for each in found if each.missed],
    }


def main() -> None:
    path, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    start, found = time.perf_counter(), list[Outcome]()
    device = "cuda" if sys.argv[3:] == ["cuda"] else "cpu"
    for outcome in outcomes(count, device=device):
        found.append(outcome)
        if len(found) % 100 == 0:
            misses = sum(each.missed for each in found)
            print(f"{len(found)} products, {misses} missed, {time.perf_counter() - start:.0f} s", flush=True)
    result = {"machine": provenance(), "seconds": round(time.perf_counter() - start), **summary(found)}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
