"""What ranks check together of products with a chosen error."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import residual
import residual.distributed as rd
from residual.planning.ladder import Machine
from tests.distributed.checks import generator, raises
from tests.distributed.problems import spread

of_ranks = importlib.import_module("residual.distributed.matmul")  # the function has its name
LAYOUTS = {"rows": (Shard(0), Replicate()), "columns": (Replicate(), Shard(1)), "inner": (Shard(1), Shard(0)),
           "whole": (Replicate(), Replicate())}  # fmt: skip


def parts(mesh: DeviceMesh, layout: str, A: Tensor, B: Tensor) -> list[DTensor]:
    return [distribute_tensor(x, mesh, [p], src_data_rank=None) for x, p in zip((A, B), LAYOUTS[layout], strict=True)]


def error_of(A: Tensor, B: Tensor, C: Tensor) -> float:
    exact = A.double() @ B.double()
    return float((C.double() - exact).norm() / exact.norm()) if exact.norm() else float(C.norm())


def product_within(mesh: DeviceMesh, seed: int) -> tuple[int, int]:
    """A random product by a random layout: (returned, beyond the tolerance)."""
    rng = generator(seed)
    m, k, n = (int(torch.randint(1, 90, (), generator=rng)) for _ in range(3))
    A, B = spread(m, k, rng), spread(k, n, rng)
    layout = list(LAYOUTS)[seed % 4]
    tol = 10 ** -float(1 + 5.5 * torch.rand((), generator=rng))
    rungs = (None, ("direct", "full", "fp32"), ("direct", "three_digit"), ("full",))[seed // 4 % 4]
    reduce = ("exact", "bfloat16")[seed % 8 == 2]
    options: dict[str, Any] = {"tol": tol, "rungs": rungs, "seed": seed}
    try:
        C = rd.matmul(*parts(mesh, layout, A, B), reduce=reduce, **options).full_tensor()
    except residual.ToleranceError:
        return 0, 0
    return 1, int(error_of(A, B, C) > tol)


def check_tolerances(mesh: DeviceMesh, first: int = 0, count: int = 32) -> list[int]:
    """How many random products are within their tolerance, how many are not, and how many raised."""
    done = [product_within(mesh, seed) for seed in range(first, first + count)]
    within, missed = sum(a - b for a, b in done), sum(b for _, b in done)
    assert not missed and within > count // 4, (within, missed)
    return [within, missed, count - within - missed]


def check_digits_equal_one_process(mesh: DeviceMesh) -> None:
    A, B = torch.randn(37, 50, generator=generator(1)), torch.randn(50, 22, generator=generator(2))
    A[3, 0] = torch.inf
    for mode in ("direct", "full", "three_digit"):
        expected = residual.matmul(A, B, mode=mode)
        for layout in ("rows", "columns"):
            found = rd.matmul(*parts(mesh, layout, A, B), mode=mode)
            whole = found.full_tensor()
            assert not whole[3].isfinite().any() and not expected[3].isfinite().any()
            same = slice(4, None) if A.is_cuda else slice(None)  # one GPU without tol has NaN in all of row 3
            assert torch.equal(whole[same].nan_to_num(), expected[same].nan_to_num()), (mode, layout)
            assert torch.equal(whole[:3], expected[:3])
            assert found.placements == (Shard(0 if layout == "rows" else 1),)
    rows = rd.matmul(*parts(mesh, "inner", A[4:], B), mode="full", placements=[Shard(0)])
    assert rows.placements == (Shard(0),) and error_of(A[4:], B, rows.full_tensor()) < 1e-3


def check_reports_are_equal(mesh: DeviceMesh) -> None:
    A, B = torch.randn(64, 64, generator=generator(3)), torch.randn(64, 64, generator=generator(4))
    for layout in LAYOUTS:
        _, report = rd.matmul(
            *parts(mesh, layout, A, B), tol=1e-3, rungs=("direct", "full"), seed=None, return_report=True
        )
        every = [None] * mesh.size()
        dist.all_gather_object(every, report)
        assert all(each == report for each in every)
        plans = [each.plan for each in report.attempts]
        looked = mesh.device_type == "cuda" and layout in ("rows", "columns")  # at the operands, before any product
        assert plans == ["int8 direct", "int8 full"][looked:], (layout, plans)
        C = rd.matmul(*parts(mesh, layout, torch.zeros(5, 4), torch.ones(4, 3)), tol=1e-3)
        assert not C.full_tensor().any()  # nothing lies beyond the tolerance of a product that is zero


def check_parts_that_ranks_check_alone(mesh: DeviceMesh) -> None:
    """As on a GPU, whose passes check each rank's part: all within the tolerance, or all go on together."""
    rank, last = mesh.get_local_rank(), mesh.size() - 1
    A, B = torch.randn(64, 64, generator=generator(3)), torch.randn(64, 32, generator=generator(4))
    tolerances = []

    def start(problem: Any, plan: Any, options: Any) -> Any:
        tolerances.append(options.tol)
        C = residual.matmul(problem.A, problem.B, mode="full")
        missed = layout == "columns" and rank == last
        return None if missed else C, residual.Report("int8 full", 1e-4, 2e-4 * (rank + 1), 0.99, 3, ())

    for layout in ("rows", "columns"):
        with mock.patch.multiple(of_ranks, _can_check=lambda *_: True, _start=start):
            C, report = rd.matmul(*parts(mesh, layout, A, B), tol=1e-3, rungs=("direct", "full"), return_report=True)
        assert error_of(A, B, C.full_tensor()) < 1e-3
        every = [None] * mesh.size()
        dist.all_gather_object(every, report)
        assert all(each == report for each in every)
        if layout == "rows":  # the largest bound of any rank, wider than that of one by the number of ranks
            assert [each.plan for each in report.attempts] == ["int8 full"] and tolerances[0] * report.upper == (
                pytest.approx(1e-3 * 2e-4 * mesh.size()))  # fmt: skip
            assert (tolerances[0] < 1e-3) == (mesh.size() > 1)
        else:
            assert [each.plan for each in report.attempts] == ["int8 direct", "int8 full"]


def check_error_on_all_ranks_or_none(mesh: DeviceMesh) -> None:
    A, B = torch.ones(8 * mesh.size(), 3), torch.ones(3, 2)
    A[:8] = torch.tensor([1e30, 2.0**-60, -1e30])  # only rank 0 has rows that cancel
    A[8:] = 1e-9
    text = raises(residual.ToleranceError, rd.matmul, *parts(mesh, "rows", A, B), tol=1e-3)
    every = [""] * mesh.size()
    dist.all_gather_object(every, text)
    assert len(set(every)) == 1 and "no rung met tol=0.001" in text


def check_a_rank_that_would_plan_otherwise(mesh: DeviceMesh) -> None:
    """Another processor, or other calls before: rank 0's rungs hold for all."""
    A, B = torch.randn(160, 160, generator=generator(5)), torch.randn(160, 160, generator=generator(6))
    if mesh.get_local_rank() == mesh.size() - 1:
        from residual import options

        before, options.machine_of = options.machine_of, lambda device: Machine(False, True)
        residual.matmul(A, B, tol=1e-2)  # a history of its own
    try:
        _, report = rd.matmul(*parts(mesh, "rows", A, B), tol=1e-2, return_report=True)
    finally:
        if mesh.get_local_rank() == mesh.size() - 1:
            options.machine_of = before
    every = [""] * mesh.size()
    dist.all_gather_object(every, report.plan)
    assert len(set(every)) == 1


def check_disagreement(mesh: DeviceMesh) -> None:
    """Tolerances and sizes that differ are named with both ranks and both values."""
    A, B = torch.ones(4, 4), torch.ones(4, 4)
    rank, last = mesh.get_local_rank(), mesh.size() - 1
    if last:
        tol = 1e-2 if rank == last else 1e-3
        text = raises(ValueError, rd.matmul, *parts(mesh, "whole", A, B), tol=tol)
        assert text.startswith("tol must be equal on all ranks") and f"on rank 0 and 0.01 on rank {last}" in text, text
        wide = torch.ones(4, 5 if rank == last else 4)
        text = raises(ValueError, rd.matmul, *parts(mesh, "whole", A, wide), tol=1e-2)
        assert text == f"columns_of_B must be equal on all ranks, got 4 on rank 0 and 5 on rank {last}"
    text = raises(
        ValueError, rd.matmul, *parts(mesh, "inner", A, B.index_fill(0, torch.tensor([0]), torch.nan)), tol=0.1
    )
    assert "got inf or nan on rank 0" in text
    cut = distribute_tensor(A, mesh, [Shard(0)])
    assert "use redistribute()" in raises(ValueError, rd.matmul, cut, cut, tol=0.1)
    assert "float64" in raises(NotImplementedError, rd.matmul, *parts(mesh, "rows", A.double(), B), tol=0.1)


def check_residual_styles(mesh: DeviceMesh) -> None:
    torch.manual_seed(7)
    first, second = residual.ResidualLinear(40, 50, tol=1e-3), residual.ResidualLinear(50, 24, tol=1e-3)
    x = torch.randn(12, 40, generator=generator(8))
    exact = torch.nn.functional.linear(
        torch.nn.functional.linear(x.double(), first.weight.double(), first.bias.double()).relu(), second.weight.double(),
        second.bias.double(),
    )  # fmt: skip
    for reduce in ("exact", "bfloat16"):
        model = torch.nn.Sequential(
            residual.ResidualLinear.from_linear(as_linear(first), tol=5e-3), torch.nn.ReLU(),
            residual.ResidualLinear.from_linear(as_linear(second), tol=5e-3),
        )  # fmt: skip
        plan = {"0": rd.ResidualColwise(), "2": rd.ResidualRowwise(reduce=reduce)}
        with torch.no_grad():
            y = parallelize_module(model, mesh, plan)(x)
        assert (y - exact).norm() < 1e-2 * exact.norm()


def as_linear(layer: residual.ResidualLinear) -> torch.nn.Linear:
    made = torch.nn.Linear(layer.weight.shape[1], layer.weight.shape[0])
    made.weight, made.bias = layer.weight, layer.bias
    return made


def check_tall(mesh: DeviceMesh) -> None:
    for m, n in ((64, 8), (9, 8), (8, 8), (3, 1), (2, 2)):
        A = torch.randn(m, n, generator=generator(m))
        cut = distribute_tensor(A, mesh, [Shard(0)])
        Q, R = rd.qr(cut, product=torch.matmul)
        q, r = Q.full_tensor(), R.to_local()
        assert (q @ r - A).norm() < 1e-5 * A.norm() and (q.T @ q - torch.eye(n)).norm() < 1e-4
        assert not r.tril(-1).any() and Q.placements == (Shard(0),) and R.placements == (Replicate(),)
        Q, R = rd.qr(cut)  # int8 digits
        assert (Q.full_tensor() @ R.to_local() - A).norm() < 1e-2 * A.norm()
        B = torch.randn(m, 2, generator=generator(m + 1))
        right = distribute_tensor(B, mesh, [Shard(0)])
        x = rd.lstsq(cut, right)
        expected = torch.linalg.lstsq(A.double(), B.double()).solution
        assert (x - expected).norm() < 1e-8 * expected.norm(), (m, n)
        every = [x] * mesh.size()
        dist.all_gather_object(every, x)
        assert all(torch.equal(each.to(x.device), x) for each in every)
    for A in (torch.zeros(64, 8), torch.ones(64, 8), torch.randn(64, 3, generator=generator(8)) @ torch.ones(3, 8)):
        Q, R = rd.qr(distribute_tensor(A, mesh, [Shard(0)]), block=3, product=torch.matmul)  # less than full rank
        q, r = Q.full_tensor(), R.to_local()
        assert (q @ r - A).norm() <= 1e-5 * A.norm() and (q.T @ q - torch.eye(8)).norm() < 1e-4
    A, b = torch.randn(30, 30, generator=generator(9)), torch.randn(30, generator=generator(10))
    x = rd.solve(distribute_tensor(A, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Shard(0)]))
    assert (A.double() @ x - b.double()).norm() <= 1.01e-14 * (A.double().norm() * x.norm() + b.norm())
    zero = distribute_tensor(torch.zeros(6, 6), mesh, [Shard(0)])
    assert "singular" in raises(ArithmeticError, rd.solve, zero, distribute_tensor(b[:6], mesh, [Shard(0)]))


DEFAULT = [check_tolerances, check_digits_equal_one_process, check_reports_are_equal,
           check_parts_that_ranks_check_alone,
           check_error_on_all_ranks_or_none, check_a_rank_that_would_plan_otherwise, check_disagreement,
           check_residual_styles, check_tall]  # fmt: skip
