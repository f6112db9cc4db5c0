"""Products made to fool a check, and their exact error in integers of any length."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residual.matmul import matmul
from residual.report import ToleranceError

Pair = tuple[Tensor, Tensor]


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def _size(most: int = 6) -> int:
    return random.randint(1, most)


def _absorbed(dtype: torch.dtype, most: int) -> Pair:
    middle = 2.0 ** -random.uniform(1, most)
    A = torch.tensor([[1.0, middle, -1.0]], dtype=dtype) * 2.0 ** random.randint(-20, 20)
    return A, torch.ones(3, _size(3), dtype=dtype)


def _tail(dtype: torch.dtype) -> Pair:
    m, k, n = _size(), random.randint(3, 120), _size()
    A, B = 10.0 ** -random.uniform(0, 14) * _randn(m, k, dtype=dtype), _randn(k, n, dtype=dtype)
    A[:, 0], A[:, -1], B[-1] = 1, -1, B[0]
    return A, B


def _stagnating(dtype: torch.dtype, unit: float, noisy: bool) -> Pair:
    m, k, n = _size(4), random.choice((64, 256, 700)), _size(4)
    A = torch.full((m, k), random.uniform(0.3, 1.0) * unit, dtype=dtype)
    A[:, 0] = 1
    B = torch.ones(k, n, dtype=dtype)
    if noisy:
        A, B = A * torch.rand(m, k, dtype=dtype), torch.rand(k, n, dtype=dtype)
        A[:, 0] += 1
    return A, B


def _cancelling() -> Pair:
    m, k, n = _size(), random.randint(2, 60), _size()
    u, v = _randn(m, k), _randn(k, n)
    rest = 10.0 ** -random.uniform(0, 8) * _randn(k, n)
    order = torch.randperm(2 * k)
    return torch.cat([u, u], 1)[:, order], torch.cat([v, rest - v], 0)[order]


def _huge_column(against: float) -> Pair:
    m, k, n = _size(), random.randint(2, 60), _size()
    A, B, j = _randn(m, k), _randn(k, n), random.randrange(k)
    A[:, j] *= 10.0 ** random.uniform(3, 15)
    B[j] *= against
    return A, B


def _rank_one(orthogonal: bool) -> Pair:
    m, k, n = _size(), random.randint(2, 40), _size()
    v, w = _randn(k), _randn(k)
    if orthogonal:
        w = w - v * (v @ w) / (v @ v)
    return torch.outer(_randn(m), v), torch.outer(w, _randn(n))


def _graded(by_k: bool) -> Pair:
    m, k, n = _size(), random.randint(2, 30), _size()
    A, B = _randn(m, k), _randn(k, n)
    if by_k:
        step = 10.0 ** torch.linspace(0, random.uniform(1, 25), k)
        return A / step, B * step[:, None]
    return A * 10.0 ** -torch.linspace(0, random.uniform(1, 30), m)[:, None], B


def _needles() -> Pair:
    m, k, n = _size(12), random.randint(2, 80), _size(12)
    A, B = _randn(m, k), _randn(k, n)
    A[torch.rand(m, k) < 0.05] *= 10.0 ** random.uniform(2, 12)
    B[torch.rand(k, n) < 0.8] = 0
    return A, B


def _scaled(dtype: torch.dtype, a: float, b: float) -> Pair:
    m, k, n = _size(), random.randint(1, 40), _size()
    return _randn(m, k, dtype=dtype) * a, _randn(k, n, dtype=dtype) * b


def _far_apart() -> Pair:
    m, k, n = _size(), random.randint(1, 6), _size()
    a, b = (10.0 ** torch.empty(shape, dtype=torch.float64).uniform_(-300, 150) for shape in ((m, k), (k, n)))
    a[torch.rand(m, k) < 0.4] = 0
    b[torch.rand(k, n) < 0.4] = 0
    return a, b


def _integers(low: int, high: int, dtype: torch.dtype) -> Pair:
    m, k, n = _size(), random.randint(1, 40), _size()
    return torch.randint(low, high, (m, k)).to(dtype), torch.randint(low, high, (k, n)).to(dtype)


def _large_integers() -> Pair:
    base = 2 ** random.randint(50, 62)
    A = torch.tensor([[base + random.randint(-3, 3), -base, random.randint(-5, 5)]])
    return A, torch.ones(3, _size(3), dtype=torch.int64)


def _mixed() -> Pair:
    A, B = _tail(torch.float32)
    return (A, B.double()) if random.random() < 0.5 else (A.double(), B)


def _small() -> Pair:
    k = _size(3)
    return _randn(_size(3), k), _randn(k, _size(3))


def _zeros() -> Pair:
    m, k, n = _size(), random.randint(1, 40), _size()
    A, B = _randn(m, k), _randn(k, n)
    A[torch.rand(m) < 0.5], B[:, torch.rand(n) < 0.5] = 0, 0
    A[:, torch.rand(k) < 0.5] = 0
    return A, B


def _alternating() -> Pair:
    m, k, n = _size(4), 2 * random.randint(1, 100), _size(4)
    A = torch.ones(m, k)
    A[:, ::2] = -1
    return A * random.uniform(0.1, 10), torch.ones(k, n) * random.uniform(0.1, 10) + random.choice((0, 1e-7)) * _randn(
        k, n
    )


def _student() -> Pair:
    draw = torch.distributions.StudentT(torch.tensor(random.uniform(0.5, 2.0))).sample
    return draw((_size(), 50)), draw((50, _size()))


def _halves(dtype: torch.dtype) -> Pair:
    A, B = random.choice((_tail(torch.float32), _stagnating(torch.float32, 2.0**-10, True), _cancelling()))
    return A.to(dtype), B.to(dtype)


FAMILIES: dict[str, Callable[[], Pair]] = {
    "absorbed": lambda: _absorbed(torch.float32, 60),
    "absorbed, float64": lambda: _absorbed(torch.float64, 90),
    "tail": lambda: _tail(torch.float32),
    "tail, float64": lambda: _tail(torch.float64),
    "stagnating": lambda: _stagnating(torch.float32, 2.0**-25, False),
    "stagnating, random": lambda: _stagnating(torch.float32, 2.0**-25, True),
    "stagnating, float64": lambda: _stagnating(torch.float64, 2.0**-54, False),
    "cancelling": _cancelling,
    "huge column, zeros": lambda: _huge_column(0.0),
    "huge column, tiny row": lambda: _huge_column(10.0 ** -random.uniform(3, 20)),
    "rank one": lambda: _rank_one(False),
    "rank one, orthogonal": lambda: _rank_one(True),
    "graded rows": lambda: _graded(False),
    "graded k": lambda: _graded(True),
    "needles": _needles,
    "denormals": lambda: _scaled(torch.float32, 10.0 ** -random.uniform(36, 44), 10.0 ** random.uniform(-4, 6)),
    "denormals, float64": lambda: _scaled(torch.float64, 10.0 ** -random.uniform(300, 320), 10.0 ** random.uniform(-9, 9)),
    "near overflow": lambda: _scaled(torch.float32, 10.0 ** random.uniform(18, 38), 10.0 ** random.uniform(-20, 1)),
    "near overflow, float64": lambda: _scaled(torch.float64, 10.0 ** random.uniform(150, 305), 10.0 ** random.uniform(-20, 3)),
    "far apart, float64": _far_apart,
    "one to three": _small,
    "float64": lambda: _scaled(torch.float64, 1.0, 1.0),
    "float16": lambda: _halves(torch.float16),
    "bfloat16": lambda: _halves(torch.bfloat16),
    "bytes": lambda: _integers(-128, 128, torch.int8),
    "int64": lambda: _integers(-(10**9), 10**9, torch.int64),
    "int64 above 2^53": _large_integers,
    "mixed dtypes": _mixed,
    "zero slices": _zeros,
    "alternating": _alternating,
    "Student's t": _student,
}  # fmt: skip

LADDERS = (
    None,
    None,
    ("direct", "fp32"),
    ("direct", "full", "three_digit", "fp32", "fp64"),
    ("fp32", "fp64"),
    ("fp64",),
)


@dataclass(frozen=True)
class Call:
    """A hostile call and what came of it; `error` is exact, None if it was refused."""

    family: str
    tol: float
    options: dict[str, Any]
    plan: str
    error: float | None

    @property
    def missed(self) -> bool:
        return self.error is not None and not self.error <= self.tol


def _integers_of(x: Tensor) -> tuple[np.ndarray, int]:
    """Python integers and an exponent: ``x = integers * 2**exponent``, exactly."""
    if not x.is_floating_point():
        return np.array(x.tolist(), dtype=object), 0
    mantissa, exponent = np.frexp(x.double().numpy())
    whole = (mantissa * 2.0**53).astype(np.int64)
    least = int(exponent.min()) if exponent.size else 0
    shift = np.vectorize(lambda value, by: int(value) << int(by), otypes=[object])
    return shift(whole, exponent - least), least - 53


def exact_error(A: Tensor, B: Tensor, C: Tensor) -> float:
    """Relative Frobenius error of finite C; 0 or infinite where AB is zero."""
    if not bool(torch.isfinite(C).all()):
        return math.inf
    (a, ea), (b, eb), (c, ec) = map(_integers_of, (A, B, C))
    truth, least = a @ b, min(ea + eb, ec)
    truth = truth * (1 << (ea + eb - least))
    off = truth - c * (1 << (ec - least))
    above, below = sum(int(x) ** 2 for x in off.flat), sum(int(x) ** 2 for x in truth.flat)
    if not below:
        return math.inf if above else 0.0
    return math.sqrt(float(Fraction(above, below)))


def draw(number: int) -> tuple[str, Tensor, Tensor, dict[str, Any]]:
    """The call of this number: its family, operands and options."""
    random.seed(number)
    torch.manual_seed(number)
    family = list(FAMILIES)[number % len(FAMILIES)]
    A, B = FAMILIES[family]()
    options: dict[str, Any] = {
        "tol": 10.0 ** random.uniform(-15, math.log10(0.5)),
        "rungs": random.choice(LADDERS),
        "seed": number,
        "on_failure": random.choice(("raise", "fallback")),
        "out_dtype": random.choice((None, None, torch.float64)),
    }
    return family, A, B, options


def run(number: int, device: str = "cpu", flow: str = "auto", rungs: tuple[str, ...] | None = None) -> Call:
    """Make the call of this number, with a report and, as other bounds may suffice then, without; the larger error.

    `rungs`: instead of those of the call.
    """
    family, A, B, options = draw(number)
    A, B, options = A.to(device), B.to(device), {**options, "flow": flow}
    if rungs is not None:
        options["rungs"] = rungs
    plan, products = "", list[Tensor]()
    try:
        C, report = matmul(A, B, return_report=True, **options)
        plan = report.plan
        products.append(C.cpu())
    except ToleranceError as failure:
        plan = failure.report.plan
    try:
        C = matmul(A, B, **options).cpu()
        products += [] if any(torch.equal(C, other) for other in products) else [C]
    except ToleranceError:
        pass
    errors = [exact_error(A.cpu(), B.cpu(), C) for C in products]
    return Call(family, options["tol"], options, plan, max(errors, default=None))


def calls(
    count: int, first: int = 0, device: str = "cpu", flow: str = "auto", rungs: tuple[str, ...] | None = None
) -> Iterator[Call]:
    """So many calls, one number after the other."""
    return (run(number, device, flow, rungs) for number in range(first, first + count))


def main(count: int = 20_000, first: int = 10**6) -> None:
    """Make calls and print how many were returned, and the largest error over its tolerance."""
    made = list(calls(count, first))
    returned = [each for each in made if each.error is not None]
    missed = [each for each in returned if each.missed]
    worst = max((each.error / each.tol for each in returned if each.error is not None), default=0.0)
    print(f"{count} calls: {len(returned)} returned, {count - len(returned)} refused, {len(missed)} beyond tol")
    print(f"largest error: {worst:.2f} of its tol")
    for each in missed:
        print(each)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
