"""The passes that bound errors of digit products before any product: their source on the CPU against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cute_kernels.convert.digits import Digits, digits
from cute_kernels.estimate import look
from cute_kernels.estimate.look import LookLimits, LookProbes, LookState, padded_length
from tests.kernels.estimate.cta_host import HostKernels, has_compiler

HEADERS = ("estimate/look.cuh", "estimate/look_choice.cuh", "estimate/look_pack.cuh", "convert/digits.cuh")
pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("look"), HEADERS)


@pytest.fixture
def host(kernels: HostKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostKernels]:
    """The passes run on the CPU, by at most three CTAs."""
    monkeypatch.setattr(look, "get_kernel", kernels.get)
    monkeypatch.setattr(look, "device_of", lambda _: nullcontext())
    monkeypatch.setattr(look, "num_sms", lambda _: 3)
    kernels.seed, kernels.late = 0, False
    yield kernels


class Twin(NamedTuple):
    """Both passes in float64, for `r` of planes - 1 and planes."""

    vectors: Tensor  # (planes + 1, K, 16)
    errors: tuple[Tensor, Tensor]  # E_r W, (M, 16)
    size: Tensor  # A B W, (M, 16)


def parts_of(x: Tensor, found: Digits, scale: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the digits' parts of `x` and what each number of digits leaves, float64."""
    parts = [plane.double() * scale.double() * 2.0 ** (-8 * i) for i, plane in enumerate(found.planes)]
    rest = [x.double()]
    for part in parts:
        rest.append(rest[-1] - part)
    return parts, rest


def twin(a: Tensor, b: Tensor, probes: LookProbes, planes: int) -> Twin:
    """The passes over A (M, K) and B (K, N) by their definition."""
    left, right = digits(a, 8, planes, axis=1), digits(b, 8, planes, axis=0)
    w = probes.vectors[: b.shape[1]].double()
    _, rest_b = parts_of(b, right, right.scale)
    parts_a, rest_a = parts_of(a, left, left.scale[:, None])
    vectors, errors = torch.stack([x @ w for x in rest_b]), []
    for r in (planes - 1, planes):
        pairs = zip([*parts_a[:r], rest_a[r]], [*range(r, 0, -1), 0], strict=True)
        errors.append(torch.stack([x @ vectors[i] for x, i in pairs]).sum(0))
    return Twin(vectors, (errors[0], errors[1]), a.double() @ vectors[0])


def unpacked(found: look.LookVectors, k: int) -> Tensor:
    """Return V_j (planes + 1, K, 16) of the digits and the unit."""
    steps, inputs = found.packed.shape[:2]
    words = found.packed.view(torch.int8).reshape(steps, inputs, 3, 8, 4, 2, 2, 4).double()  # g, t, vectors, run, entry
    digits = words.permute(1, 0, 6, 4, 7, 5, 3, 2).reshape(
        inputs, 32 * steps, 16, 3
    )  # entries: run, t; vectors: half, g
    values = digits @ torch.tensor([1.0, 2.0**-8, 2.0**-16], dtype=torch.float64)
    return (values * found.numbers[0] * 2.0 ** (-8.0 * torch.arange(inputs)[:, None, None]))[:, :k]


def draw(n: int, seed: int = 3) -> LookProbes:
    w = torch.zeros(padded_length(n), 16)
    w[:n] = torch.randn(n, 16, generator=torch.Generator().manual_seed(seed))
    return LookProbes(w, torch.linalg.vector_norm(w, dim=1) * (1 + 2.0**-20))


def random(m: int, n: int, seed: int) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed))


def placed(x: Tensor, layout: str) -> Tensor:
    """The same numbers: rows, columns, or rows that start anywhere."""
    if layout == "column":
        return x.mT.contiguous().mT
    if layout == "gaps":
        return torch.nn.functional.pad(x, (3, 2))[:, 3:-2]
    return x


def limits_for(tol: float, factor: float = 1.5) -> LookLimits:
    factors = torch.full((2, look.FACTORS), factor, dtype=torch.float64)
    return LookLimits(tol, factors, (2.0**-22, 2.0**-21))


def state(ctas: int = 3) -> LookState:
    return LookState(
        torch.full((ctas, look.RECORD), torch.nan, dtype=torch.float64), torch.full((8,), torch.nan, dtype=torch.float64),
        torch.zeros(64), torch.zeros(4, dtype=torch.int32),
    )  # fmt: skip


SHAPES = [(1, 1, 1), (33, 130, 20), (70, 17, 300), (5, 1100, 33), (129, 64, 128)]


@pytest.mark.parametrize("layout", ["row", "column", pytest.param("gaps", marks=pytest.mark.long)])
@pytest.mark.parametrize("share", [4, 8])
@pytest.mark.parametrize("planes", [2, 3])
def test_the_source_is_within_its_own_bound_of_float64(planes: int, share: int, layout: str, host: HostKernels) -> None:
    for i, (m, k, n) in enumerate(SHAPES):
        host.seed = i
        a, b, probes = placed(random(m, k, i), layout), placed(random(k, n, i + 9), layout), draw(n)
        left, right = digits(a, 8, planes, axis=1), digits(b, 8, planes, axis=0)
        exact = twin(a, b, probes, planes)
        found = look.look_right(b, probes, right.scale, planes, share=share)
        largest = float(exact.vectors[0].norm())
        for j, (mine, vectors) in enumerate(zip(unpacked(found, k), exact.vectors, strict=True)):
            assert float((mine - vectors).norm()) <= 1e-5 * float(vectors.norm()) + 1e-6 * 2.0 ** (-8 * j) * largest
        assert not found.packed.view(torch.int8).reshape(-1, planes + 1, 3, 512)[-(-k // 32) :].any()
        memory = state()
        look.look_left(a, found, left.scale, right.scale, limits_for(1e-2), memory, share=share)
        record = memory.record.tolist()
        assert not memory.tickets.any() and record[7] == 0.0
        assert record[6] == pytest.approx(float(exact.size.norm()) / 4, rel=1e-4)
        for r in range(2):
            noise, error = record[3 * r + 2] / 1.5, float(exact.errors[r].norm()) / 4
            assert abs(record[3 * r] - error) <= noise
            assert noise <= 3e-3 * error or (m, k, n) == (1, 1, 1)
            assert record[3 * r + 1] == pytest.approx(1.5 * record[3 * r] + record[3 * r + 2], rel=1e-12)


@pytest.mark.parametrize("planes", [pytest.param(2, marks=pytest.mark.long), 3])
def test_results_do_not_depend_on_the_order_of_threads(planes: int, host: HostKernels) -> None:
    m, k, n = 45, 1037, 77
    a, b, probes, results = random(m, k, 1), random(k, n, 2), draw(n), []
    left, right = digits(a, 8, planes, axis=1), digits(b, 8, planes, axis=0)
    errors = twin(a, b, probes, planes).errors
    for seed in range(3):
        host.seed, memory = seed, state()
        found = look.look_right(b, probes, right.scale, planes)
        look.look_left(a, found, left.scale, right.scale, limits_for(1e-2), memory)
        grams = [y.mT @ y for y in errors]
        upper = torch.triu_indices(16, 16)
        order = torch.argsort(upper[1] * 16 + upper[0])
        triangles = torch.cat([gram[upper[0][order], upper[1][order]] for gram in grams])
        sums = memory.parts[0]  # of the only group
        for of, wanted in zip(sums[: 2 * 136].reshape(2, 136), triangles.reshape(2, 136), strict=True):
            assert float((of - wanted).norm()) <= 1e-4 * float(wanted.norm())
        results.append(torch.cat([memory.record, memory.gate.double(), *(x.double().flatten() for x in found)]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("ctas", [16, 17, 35])
def test_records_of_several_groups_are_added_once(
    ctas: int, host: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "num_sms", lambda _: 40)
    m, k, n, planes, memory = 16 * ctas, 32, 24, 2, state(40)
    a, b, probes = random(m, k, 1), random(k, n, 2), draw(n)
    left, right = digits(a, 8, planes, axis=1), digits(b, 8, planes, axis=0)
    exact, found = twin(a, b, probes, planes), look.look_right(b, probes, right.scale, planes)
    for _ in range(2):
        look.look_left(a, found, left.scale, right.scale, limits_for(1e-2), memory)
        record = memory.record.tolist()
        assert not memory.tickets.any() and memory.parts[ctas:].isnan().all()
        assert record[6] == pytest.approx(float(exact.size.norm()) / 4, rel=1e-4)
        for r in range(2):
            assert abs(record[3 * r] - float(exact.errors[r].norm()) / 4) <= record[3 * r + 2] / 1.5


@pytest.mark.parametrize("planes", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "kind", ["outlier columns", "outlier entries", "zero columns", "graded", "clamped", "integers"]
)
def test_the_bound_holds_for_data_of_many_sizes(kind: str, planes: int, host: HostKernels) -> None:
    m, k, n = 40, 150, 70
    a, b = random(m, k, 5), random(k, n, 6)
    if kind == "outlier columns":
        a[:, ::37] *= 300.0
        b[:, ::13] *= 1000.0
    elif kind == "outlier entries":
        a[::7, 3] = b[5, ::11] = 1e4
    elif kind == "zero columns":
        a[::3], b[:, ::2] = 0.0, 0.0
        a, b = a * 1e-5, b * 1e-4
    elif kind == "graded":
        a = a * torch.logspace(0, -6, k)
        b = b * torch.logspace(-3, 3, k)[:, None]
    elif kind == "clamped":  # second digits that would be 128
        a = (torch.randint(-90, 90, (m, k)) + 127.49 / 255).float()
        b = (torch.randint(-90, 90, (k, n)) + 0.4999).float()
        a[:, 0], b[0] = 127.0, 127.0
    else:
        a, b = a.mul(20).round(), b.mul(20).round()
    probes = draw(n)
    left, right = digits(a, 8, planes, axis=1), digits(b, 8, planes, axis=0)
    errors, memory = twin(a, b, probes, planes).errors, state()
    found = look.look_right(b, probes, right.scale, planes)
    look.look_left(a, found, left.scale, right.scale, limits_for(1e-2), memory)
    for r in range(2):
        error, noise = float(errors[r].norm()) / 4, float(memory.record[3 * r + 2]) / 1.5
        assert abs(float(memory.record[3 * r]) - error) <= noise
        assert noise <= 0.05 * error or kind in ("graded", "integers")


@pytest.mark.parametrize("planes", [2, 3])
def test_the_pass_over_a_picks_the_first_product_within_the_tolerance(planes: int, host: HostKernels) -> None:
    m, k, n = 64, 256, 48
    a, b, probes = random(m, k, 1), random(k, n, 2), draw(n)
    left, right = digits(a, 8, planes, axis=1), digits(b, 8, planes, axis=0)
    found = look.look_right(b, probes, right.scale, planes)
    memory = state()

    def picked(tol: float) -> int:
        look.look_left(a, found, left.scale, right.scale, limits_for(tol), memory)
        return int(memory.gate[:1].view(torch.int32))

    picked(1.0)
    first, second = (float(memory.record[3 * r + 1] / memory.record[6]) for r in (0, 1))
    for total, below, above in ((first + 2.0**-22, planes - 1, planes - 2), (second + 2.0**-21, -1, planes - 1)):
        tol = total / (1 - total)
        assert (picked(0.999 * tol), picked(1.001 * tol)) == (below, above)


def test_factors_follow_the_share_of_the_largest_eigenvalue(host: HostKernels) -> None:
    k, n, planes = 128, 200, 2
    factors = torch.linspace(1.0, 2.0, look.FACTORS, dtype=torch.float64).repeat(2, 1)
    narrow = torch.zeros(k, n)
    narrow[0], narrow[1] = 127.0, random(1, n, 2)[0]  # one digit leaves a single row
    for a, b in ((random(40, k, 1), random(k, n, 2)), (torch.ones(40, k), narrow)):
        probes = draw(n)
        left, right = digits(a, 8, planes, axis=1), digits(b, 8, planes, axis=0)
        memory = state()
        found = look.look_right(b, probes, right.scale, planes)
        look.look_left(a, found, left.scale, right.scale, LookLimits(0.1, factors, (0.0, 0.0)), memory)
        y = twin(a, b, probes, planes).errors[0]
        share = float(torch.linalg.matrix_power(y.mT @ y / y.square().sum(), 32).trace()) ** (1 / 32)
        error, bound, noise, *_ = memory.record.tolist()
        factor = (bound - noise) / error
        relative = noise / (bound - noise)
        wanted = min(((math.sqrt(min(share, 1.0)) + relative) / (1 - relative)) ** 2, 1.0)
        assert factor == pytest.approx(1 + math.ceil(wanted * 1024) / 1024, abs=2e-3)


def test_slices_out_of_range_are_counted_and_nothing_is_picked(host: HostKernels) -> None:
    m, k, n, planes = 40, 64, 50, 2
    for value in (math.inf, math.nan, 1e30, 1e-30):
        a, b, probes = random(m, k, 1), random(k, n, 2), draw(n)
        a[3] = a[3] * 1e-30 if value == 1e-30 else a[3]
        a[3, 5] = value
        b[7, 2] = value if value != 1e-30 else b[7, 2]
        left, right = digits(a, 8, planes, axis=1), digits(b, 8, planes, axis=0)
        memory = state()
        found = look.look_right(b, probes, right.scale, planes)
        look.look_left(a, found, left.scale, right.scale, limits_for(0.5), memory)
        assert int(memory.gate[:1].view(torch.int32)) == -1 and not memory.tickets.any()
        assert memory.record[7] == (1 if value == 1e-30 else 2)


def test_zeros_have_no_error(host: HostKernels) -> None:
    a, b, probes = torch.zeros(40, 64), random(64, 50, 2), draw(50)
    left, right = digits(a, 8, 2, axis=1), digits(b, 8, 2, axis=0)
    memory = state()
    found = look.look_right(b, probes, right.scale, 2)
    look.look_left(a, found, left.scale, right.scale, limits_for(0.5), memory)
    assert memory.record[0] == memory.record[3] == memory.record[6] == 0
    assert int(memory.gate[:1].view(torch.int32)) == -1  # the size of AB is unknown


@pytest.mark.parametrize("bad", ["dtype", "strides"])
def test_what_the_passes_do_not_read_is_refused(bad: str, host: HostKernels) -> None:
    x = random(8, 8, 0).double() if bad == "dtype" else random(8, 16, 0)[:, ::2]
    with pytest.raises((TypeError, ValueError), match="x must"):
        look.look_right(x, draw(8), torch.ones(8), 2)


def test_vectors_of_two_digits_are_those_that_three_products_leave() -> None:
    """The formula: AB less the products of the levels below r is what the pass measures."""
    a, b, probes = random(20, 30, 5), random(30, 25, 6), draw(25)
    for planes in (2, 3):
        left, right = digits(a, 8, planes, axis=1), digits(b, 8, planes, axis=0)
        parts_a, _ = parts_of(a, left, left.scale[:, None])
        parts_b, _ = parts_of(b, right, right.scale)
        w = probes.vectors[:25].double()
        for r, measured in zip((planes - 1, planes), twin(a, b, probes, planes).errors, strict=True):
            product = sum((parts_a[i] @ parts_b[j] for i in range(r) for j in range(r - i)), torch.zeros(20, 25))
            assert torch.allclose((a.double() @ b.double() - product) @ w, measured, rtol=1e-6, atol=1e-12)
