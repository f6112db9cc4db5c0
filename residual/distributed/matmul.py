"""``residual.matmul`` of DTensors: parts are multiplied where they lie, one tolerance holds for the whole product."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from magicube_cutlass.distributed.collectives import (
    all_reduce,
    check_agreement,
    check_mesh,
    chunk_bounds,
    gather,
    reduce_scatter,
    sizes_of,
)
from magicube_cutlass.distributed.slices import as_dtensor
from residual.distributed.sums import ProductSize, left_of_inner, of_own_part, of_rows, verdict
from residual.error.estimate import ErrorEstimate
from residual.error.factor import CONFIDENCE, bound_factor, confidence
from residual.error.probes import PROBES, Probes, draw
from residual.execute.products import execute
from residual.operand.nonfinite import fill
from residual.operand.operand import Digits, Operand, check_operand, operands_for, real_dtype
from residual.options import OnFailure, Options, check_options
from residual.planning.ladder import FLOATS, MODES, Demand, Rung
from residual.report import EMPTY, Attempt, Report, attempt_of, tolerance_error

_NAMES = (*MODES, *FLOATS)
_MOST_RUNGS = 8
_LAYOUTS = {
    (Shard(0), Replicate()): "rows",
    (Replicate(), Shard(1)): "columns",
    (Shard(1), Shard(0)): "inner",
    (Replicate(), Replicate()): "whole",
}
Reduce = Literal["exact", "bfloat16"]


class _Problem(NamedTuple):
    """A product over ranks, the same on all of them but for its local parts."""

    A: Tensor
    B: Tensor
    mesh: DeviceMesh
    layout: str
    sizes: ProductSize
    out_dtype: torch.dtype
    probes: Probes  # of this rank's columns


class _Part(NamedTuple):
    """A rank's part of a product and its sums."""

    product: Tensor
    sums: Tensor | None


def matmul(
    A: DTensor,
    B: DTensor,
    *,
    tol: float | None = None,
    mode: str = "auto",
    bits: int | None = None,
    out_dtype: torch.dtype | None = None,
    seed: int | None = 0,
    rungs: Sequence[str] | None = None,
    on_failure: OnFailure = "raise",
    reduce: Reduce = "exact",
    placements: Sequence[Placement] | None = None,
    return_report: bool = False,
) -> DTensor | tuple[DTensor, Report]:
    """Return ``C ~ A B`` with ``||AB - C||_F <= tol ||AB||_F`` over all ranks.

    Each rank multiplies what it holds, and measures it by the probes of one seed; an all-reduce of 2 KB per rung gives
    all ranks the same numbers, from which all decide alike: they return or raise together. Rungs and seed are those of
    rank 0, whatever the others would choose. What the reduction of sums rounds counts as error. Rows or columns of
    float32 on sm_90 GPUs are first checked by the passes of one process, rank by rank, and one all-reduce of 32 bytes
    decides whether all are within `tol`.

    Parameters
    ----------
    A : DTensor, shape (M, K)
        float32, float16, bfloat16 or short integers on a mesh of one dimension.
    B : DTensor, shape (K, N)
        Likewise, on the mesh of `A`. Placements of A and B: ``Shard(0)``, ``Replicate()`` (rows); ``Replicate()``,
        ``Shard(1)`` (columns); ``Shard(1)``, ``Shard(0)`` (inner); or both ``Replicate()``.
    tol, mode, bits, out_dtype, seed, rungs, on_failure
        As in :func:`residual.matmul`.
    reduce : {"exact", "bfloat16"}, default "exact"
        What sums of the inner layout travel as; ``"bfloat16"`` is tried first, and float32 if it misses `tol`.
    placements : sequence of Placement, optional
        Of the inner layout's product: ``Replicate()`` (default) or ``Shard(0)``.
    return_report : bool, default False
        Return ``(C, Report)``.

    Returns
    -------
    DTensor, shape (M, N)
        ``Shard(0)`` for rows, ``Shard(1)`` for columns; without a gradient.

    Raises
    ------
    RuntimeError
        Without a process group.
    TypeError, ValueError
        As :func:`residual.matmul`; for another mesh or placement; for sizes, options or a tolerance that differ
        between ranks.
    NotImplementedError
        For float64, and for a gradient.
    ToleranceError
        On all ranks, if no rung met `tol`.

    Examples
    --------
    >>> from torch.distributed.tensor import distribute_tensor
    >>> from magicube_cutlass.distributed import init_mesh
    >>> mesh = init_mesh("cpu")
    >>> A, B = torch.randn(64, 64), torch.randn(64, 64)
    >>> parts = distribute_tensor(A, mesh, [Shard(0)]), distribute_tensor(B, mesh, [Replicate()])
    >>> C, report = matmul(*parts, tol=1e-4, return_report=True)
    >>> report.plan, report.upper <= 1e-4, C.placements
    ('fp32', True, (Shard(dim=0),))
    """
    options = check_options(tol, mode, bits, out_dtype, seed, rungs, on_failure)
    if reduce not in ("exact", "bfloat16"):
        raise ValueError(f"reduce must be 'exact' or 'bfloat16', got {reduce!r}")
    layout, mesh = _layout(A, B)
    a, b = (check_operand(name, x.to_local().detach()) for name, x in (("A", A), ("B", B)))
    sizes = ProductSize(A.shape[0], A.shape[1], B.shape[1])
    wanted = placements[0] if placements else _default(layout)
    if wanted != _default(layout) and not (layout == "inner" and wanted == Shard(0)):
        raise ValueError(f"placements must be {_default(layout)} for {layout} of A and B, got {wanted}")
    result = options.result_dtype(a, b)
    if torch.float64 in (real_dtype(a), real_dtype(b), result):
        raise NotImplementedError(f"A, B and C must not be float64 over ranks, got {a.dtype}, {b.dtype} and {result}")
    plan, chosen, alone = _agree(a, b, mesh, layout, sizes, options, reduce, result)
    probes = draw(sizes.n, a.device, chosen)
    if layout == "columns":
        bounds, rank = chunk_bounds(sizes.n, mesh.size()), mesh.get_local_rank()
        probes = Probes(*(each[bounds[rank] : bounds[rank + 1]] for each in probes))
    problem = _Problem(a, b, mesh, layout, sizes, result, probes)
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        found = _on_each_rank(problem, plan, options._replace(seed=chosen)) if alone else None
        product, report = found or _climb(problem, plan, options, reduce, first=2 if alone else 0)
        if layout == "inner" and wanted == Replicate():
            product = gather(product, sizes_of(chunk_bounds(sizes.m, mesh.size())), mesh)
    C = as_dtensor(product, mesh, wanted, (sizes.m, sizes.n))
    return (C, report) if return_report else C


def _layout(A: object, B: object) -> tuple[str, DeviceMesh]:
    for name, x in (("A", A), ("B", B)):
        if not isinstance(x, DTensor):
            raise TypeError(f"{name} must be a DTensor, got {type(x).__name__}; use residual.matmul for tensors")
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name} must need no gradient over ranks; use torch.no_grad()")
    assert isinstance(A, DTensor) and isinstance(B, DTensor)
    mesh = check_mesh(A.device_mesh)
    if B.device_mesh != mesh:
        raise ValueError(f"B must be on the mesh of A, {mesh}, got {B.device_mesh}")
    if A.ndim != 2 or B.ndim != 2 or A.shape[1] != B.shape[0]:
        raise ValueError(f"B must have {A.shape[-1]} rows to match A of shape {tuple(A.shape)}, got {tuple(B.shape)}")
    pair = A.placements[0], B.placements[0]
    if pair not in _LAYOUTS:
        names = "; ".join(f"{a}, {b}" for a, b in _LAYOUTS)
        raise ValueError(f"A and B must have placements {names}, got {pair[0]}, {pair[1]}; use redistribute()")
    return _LAYOUTS[pair], mesh


def _default(layout: str) -> Placement:
    return {"rows": Shard(0), "columns": Shard(1)}.get(layout, Replicate())


def _agree(
    a: Tensor,
    b: Tensor,
    mesh: DeviceMesh,
    layout: str,
    sizes: ProductSize,
    options: Options,
    reduce: str,
    out: torch.dtype,
) -> tuple[tuple[Rung, ...], int, bool]:
    """Compare the call between ranks; return rank 0's rungs and seed, and whether each rank can check its own part."""
    double_size = sizes.m * sizes.k * sizes.n
    halves = a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16)
    demand = Demand(options.tol or 0.0, double_size, False, halves, options.on_failure == "fallback")
    own = options.rungs_at(a.device, demand)[:_MOST_RUNGS]
    seed = int.from_bytes(os.urandom(7), "little") if options.seed is None else options.seed
    codes = [float(_NAMES.index(rung.mode) * 100 + rung.bits) for rung in own]
    words = [float(seed >> 32), float(seed & 0xFFFFFFFF)]
    bad = float(layout == "inner" and not all(bool(torch.isfinite(x).all()) for x in (a, b) if x.is_floating_point()))
    fields = (options.mode, options.bits, options.on_failure, options.rungs, layout, reduce, str(out), str(a.dtype))
    hashed = int.from_bytes(hashlib.sha256(repr(fields).encode()).digest()[:6], "little")
    every = check_agreement(
        mesh, bad, float(_can_check(layout, a, b, options)), *words, *codes, *[-1.0] * (_MOST_RUNGS - len(codes)),
        rows_of_A=sizes.m, columns_of_A=sizes.k, columns_of_B=sizes.n, tol=options.tol or 0.0, options=hashed,
    )  # fmt: skip
    for rank, found in enumerate(every):
        if found[0]:
            raise ValueError(f"A and B must be finite where K is cut, got inf or nan on rank {rank}")
    _, _, high, low, *rest = every[0]
    rungs = tuple(Rung(_NAMES[int(code) // 100], int(code) % 100) for code in rest if code >= 0)
    return rungs, (int(high) << 32) + int(low), all(found[1] for found in every)


def _can_check(layout: str, a: Tensor, b: Tensor, options: Options) -> bool:
    """Return whether the passes of one process serve this rank's rows or columns: float32 on an sm_90 GPU."""
    if layout not in ("rows", "columns") or not (a.is_cuda and a.numel() and b.numel()) or options.tol is None:
        return False
    from residual.cuda import passes  # kernels of their own

    return bool(passes.rungs_to_pick(a, b, options))


def _start(problem: _Problem, plan: tuple[Rung, ...], options: Options) -> tuple[Tensor | None, Report]:
    """Return this rank's part by the passes of one process, None where it misses the tolerance, and its report."""
    from residual.cuda import passes

    if not passes.planes_of(plan):
        return None, EMPTY
    made = passes.start_picked(problem.A, problem.B, options, plan).outcome()
    return made.product, made.report


def _on_each_rank(problem: _Problem, plan: tuple[Rung, ...], options: Options) -> tuple[Tensor, Report] | None:
    """Return the product if each rank's part is within the tolerance, else None on all ranks: one all-reduce.

    Parts within `tol` make a whole within it. Each of n bounds fails with a probability of 1 / n of what one may, so
    that all hold together with the confidence of one.
    """
    assert options.tol is not None
    n = problem.mesh.size()
    wider = max(bound_factor(PROBES, 1 - (1 - confidence(i)) / n) / bound_factor(PROBES, confidence(i)) for i in (0, 1))
    product, report = _start(problem, plan, options._replace(tol=options.tol / wider))
    names = [str(rung) for rung in plan]
    rung = names.index(report.plan) if report.plan in names else 0
    own = [float(product is None), report.estimated_error, report.upper * wider, float(rung)]
    numbers = torch.tensor(own, dtype=torch.float64, device=problem.A.device).nan_to_num(nan=torch.inf)
    missed, error, upper, last = all_reduce(numbers, "max", problem.mesh).tolist()
    if missed or product is None:
        return None
    attempt = Attempt(names[int(last)], error, upper)
    return product, Report(attempt.plan, error, upper, CONFIDENCE, plan[int(last)].products, (attempt,))


def _climb(
    problem: _Problem, rungs: tuple[Rung, ...], options: Options, reduce: str, first: int
) -> tuple[Tensor, Report]:
    """Return the product of the first rung within the tolerance; raise on all ranks alike. `first`: bounds before."""
    (left, a), (right, b) = operands_for(rungs[0], problem.A, problem.B.mT)
    ways = [(rung, "exact") for rung in rungs]
    if problem.layout == "inner" and reduce != "exact":
        ways = [(rungs[0], reduce), *ways]
    found: list[tuple[Attempt, ErrorEstimate]] = []
    tol, probed = options.tol, None
    for i, (rung, sent) in enumerate(ways):
        if problem.layout == "inner" and probed is None and tol is not None:
            probed = reduce_scatter(left_of_inner(left.exact, right.exact.mT, problem.probes), problem.mesh)
        digits = (a, b) if rung == rungs[0] else (None, None)
        part = _part(problem, rung, left, right, digits, sent, probed, tol is not None)
        if tol is None or part.sums is None:
            return part.product, Report(str(rung), 0.0, 0.0, 0.0, rung.products, ())
        extra = problem.mesh.size() + 1 if problem.layout == "inner" else 0
        estimate = verdict(part.sums, problem.mesh, problem.sizes, extra, confidence(first + i))
        found.append((attempt_of(rung, estimate), estimate))
        attempts = tuple(attempt for attempt, _ in found)
        report = Report(str(rung), estimate.relative, estimate.upper, CONFIDENCE, rung.products, attempts)
        if estimate.accepts(tol):
            return part.product, report
    assert tol is not None
    raise tolerance_error(tol, found, report, problem.out_dtype, options.on_failure == "fallback")


def _part(
    problem: _Problem,
    rung: Rung,
    left: Operand,
    right: Operand,
    digits: tuple[Digits | None, Digits | None],
    sent: str,
    probed: Tensor | None,
    judged: bool,
) -> _Part:
    """Return this rank's part of the product by a rung, and its sums."""
    m, n = left.given.shape[0], right.given.shape[0]
    inner = problem.layout == "inner"
    dtype = torch.float32 if inner else problem.out_dtype
    if m and n and left.given.shape[1]:
        made = execute(rung, left, right, dtype, *digits)
    else:
        made = torch.zeros(m, n, dtype=dtype, device=problem.A.device)
    if inner:
        made = reduce_scatter(made.bfloat16() if sent == "bfloat16" else made, problem.mesh).to(problem.out_dtype)
        if not judged:
            return _Part(made, None)
        assert probed is not None
        return _Part(made, of_rows(probed, made, problem.probes))
    sums = None
    if judged:
        sums = of_own_part(left.exact, right.exact.mT, made, problem.probes)
        if problem.layout == "whole" and problem.mesh.get_local_rank():
            sums = torch.zeros_like(sums)  # rank 0 speaks for all
    product = fill(made, left, right) if made.numel() else made
    return _Part(product, sums)
