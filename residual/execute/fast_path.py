"""Products whose plan is known before, on a GPU: their launches are kept, and little else is done.

The numbers are those of any other call; what it saves is the host's time, which binds small products.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residual.error.estimate import ErrorEstimate
from residual.error.probes import FAR_SCALES, PROBES, confidence, estimate_of
from residual.execute.fast_check import can_foresee, finish, rests_of, start
from residual.execute.products import of_digits
from residual.operand.operand import HALF_RANGE, Operand, operand
from residual.planning.history import Kind, habit_of
from residual.planning.plan import COUNTS, Plan
from residual.planning.search import HALF

if TYPE_CHECKING:
    from cute_kernels.estimate.probes import Comparison
    from cute_kernels.jit.workspace import Kept
    from residual.options import Request

REST = 32  # calls of a kind and plan that go the long way after one whose check did not pass
_KINDS = 256
_SPARES = 8  # sizes of vectors that are drawn ahead, 64 bytes of a GPU's memory for each of their entries
_MODES = (*COUNTS, "fp16")
READS = 16  # of so many calls of a kind and plan whose errors can be foreseen one reads the product
_resting: dict[tuple[Kind, Plan], int] = {}
_calls: dict[tuple[Kind, Plan], int] = {}
_spare: dict[tuple[int, torch.device, int], Tensor] = {}


@lru_cache
def _steps() -> tuple[Kept, Kept]:
    """Of the product, and of the check."""
    from cute_kernels.jit.workspace import Kept  # needs the CUDA wheels

    return Kept(_KINDS), Kept(_KINDS)


def plain(A: Tensor, B: Tensor, right: Operand | None, request: Request) -> Tensor | None:
    """The product without a check, or None where the call is none of those that are kept; see :func:`attempt`."""
    all_single = A.dtype == B.dtype == request.out_dtype == torch.float32
    if request.mode not in COUNTS or not all_single or not (_is_flat(A) and _is_flat(B)):
        return None
    if right is not None and _is_changed(right):
        return None
    from cute_kernels.jit.device import device_of

    with device_of(A):
        return _multiplied(A, B, right, Plan(request.mode, request.bits or 8))[0]


def attempt(
    A: Tensor, B: Tensor, right: Operand | None, request: Request, kind: Kind, generator: torch.Generator
) -> tuple[Tensor | None, int]:
    """The product by the plan that calls like this one come to, if its check passes, and how many attempts failed.

    None and 0 where no attempt was made, or none that says anything: another way has to be gone.
    ``right``: the columns of B where they are prepared.
    """
    if not takes(A, B, request):
        return None, 0
    return attempt_known(A, B, right, request, kind, generator)


def attempt_known(
    A: Tensor, B: Tensor, right: Operand | None, request: Request, kind: Kind, generator: torch.Generator
) -> tuple[Tensor | None, int]:
    """:func:`attempt` of a call that is known to be one of those that :func:`takes`."""
    plan = _plan(right, request, kind)
    if plan is None:
        return None, 0
    assert request.tol is not None
    if not _can_foresee(plan, A) or _comes_to_read(kind, plan):
        product, sums = _run(A, B, right, plan, generator)
        found, far = estimate_of(sums, product.numel(), confidence(0), request.tol), sums.out_of_range > 0
    else:
        product, found, far = _run_foreseen(A, B, right, plan, generator)
    if not far and found is not None and found.upper <= request.tol:
        return product, 0
    if len(_resting) >= _KINDS:
        _resting.clear()
    _resting[kind, plan] = REST
    # Digits of lines that are far from one, or not finite, were no attempt; halves of such lines were a wrong one.
    meant = found is not None and math.isfinite(found.relative) and not (far and plan.bits)
    return None, int(meant)


def _comes_to_read(kind: Kind, plan: Plan) -> bool:
    """Whether this call reads the product for its check, as the first one does and each sixteenth after it."""
    if len(_calls) >= _KINDS:
        _calls.clear()
    count = _calls[kind, plan] = _calls.get((kind, plan), -1) + 1
    return count % READS == 0


def takes(A: Tensor, B: Tensor, request: Request) -> bool:
    """Whether calls of these sizes, layouts and options may take the short way, whatever the tensors hold."""
    if request.mode not in (*COUNTS, "auto") or not A.dtype == B.dtype == request.out_dtype == torch.float32:
        return False
    return request.seed is None and _is_probed_at_once(A) and _is_probed_at_once(B)


def _plan(right: Operand | None, request: Request, kind: Kind) -> Plan | None:
    """The plan to run, or None where none is known or it has to rest."""
    if right is not None and (_is_changed(right) or _probes_of(right) is None):
        return None
    habit = habit_of(kind) if request.mode == "auto" else None
    plan = Plan(request.mode, request.bits or 8) if habit is None else habit.plan
    if plan.mode not in _MODES:
        return None
    resting = _resting.get((kind, plan), 0)
    if resting:
        _resting[kind, plan] = resting - 1
        return None
    return plan if habit is None else habit.take()


def _is_changed(right: Operand) -> bool:
    """Whether a line of a prepared B was: it is far from one, or holds inf or NaN."""
    return right.exponent is not None or right.broken is not None


def _is_flat(x: Tensor) -> bool:
    """Whether the kernels read a float32 matrix as it lies: rows or columns one after the other."""
    return x.stride(1) == 1 or x.stride(0) == 1 or 1 in x.shape


def _is_probed_at_once(x: Tensor) -> bool:
    """Whether a pass of the check is one launch."""
    from cute_kernels.estimate.probes import is_single_launch

    return _is_flat(x) and is_single_launch(x.shape, x.dtype, x.device)


def _probes_of(right: Operand) -> tuple[Tensor, Tensor] | None:
    """``W^T`` and ``(B W)^T`` that a prepared B keeps, once a check has made them."""
    made = right.kept.get("probes")
    return (made["w"], made["single"]) if isinstance(made, dict) and "single" in made else None


def _run(
    A: Tensor, B: Tensor, right: Operand | None, plan: Plan, generator: torch.Generator
) -> tuple[Tensor, Comparison]:
    """The product (M, N) by a plan, and what its probes say of it."""
    from cute_kernels.estimate.probes import arm_result, wait_result
    from cute_kernels.jit.device import device_of

    with device_of(A):
        made = None if right is None else _probes_of(right)
        w, inner = (_vectors(B.shape[1], A.device, generator), None) if made is None else made
        with _nothing_left_behind(A.device):
            arm_result()
            if plan.bits:
                product, scales = _multiplied(A, B, right, plan)
                _compare(A, B, product, plan, w, inner, scales)
            else:
                product = _of_halves(A, B, right, w, inner)
            if made is None:
                _draw_ahead(w, B.shape[1], generator)
            return product, wait_result(A.device)


def _can_foresee(plan: Plan, A: Tensor) -> bool:
    return can_foresee(plan, A.shape[1], A.device)


def _run_foreseen(
    A: Tensor, B: Tensor, right: Operand | None, plan: Plan, generator: torch.Generator
) -> tuple[Tensor, ErrorEstimate | None, bool]:
    """As :func:`_run`, with the error measured before the product; what it is, and whether a line is far from one."""
    from cute_kernels.jit.device import device_of

    with device_of(A):
        w, rests = None, None
        if right is not None:
            made = right.kept["probes"]
            w, rests = made["w"], rests_of(right, B, plan, made["w"], made)
        else:
            w = _vectors(B.shape[1], A.device, generator)
        with _nothing_left_behind(A.device):
            product = start(A, B, right, plan, w, rests, _kind(A, B, plan, right is not None), _steps()[0])
            if right is None:
                _draw_ahead(w, B.shape[1], generator)
            return product, *finish(product, confidence(0))


@contextmanager
def _nothing_left_behind(device: torch.device) -> Iterator[None]:
    """Wait for the GPU where an answer is not taken, so that nobody takes it for his."""
    try:
        yield
    except BaseException:
        torch.cuda.current_stream(device).synchronize()
        raise


def _vectors(n: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """``W^T`` (16, N and room), drawn by now or before."""
    from cute_kernels.estimate.probes import padded

    spare = _spare.pop(_place(n, device), None)
    return torch.randn(PROBES, padded(n), device=device, generator=generator) if spare is None else spare


def _draw_ahead(w: Tensor, n: int, generator: torch.Generator) -> None:
    """Draw the vectors of the next call of this size where this one's were, once the GPU is done with them.

    They so lie where launches that are kept expect them, whatever is allocated between two calls.
    """
    if len(_spare) >= _SPARES:
        _spare.clear()
    _spare[_place(n, w.device)] = w.normal_(generator=generator)


def _place(n: int, device: torch.device) -> tuple[int, torch.device, int]:
    """Vectors are there for the stream alone that has drawn them."""
    return n, device, torch._C._cuda_getCurrentRawStream(device.index)


def _kind(A: Tensor, B: Tensor, plan: Plan, prepared: bool) -> Hashable:
    """All that launches depend on but addresses."""
    return plan, A.shape, A.stride(), B.shape, B.stride(), A.device, prepared


def _multiplied(A: Tensor, B: Tensor, right: Operand | None, plan: Plan) -> tuple[Tensor, Sequence[Tensor]]:
    """The product by digits, and the scales that were made for it."""
    product = torch.empty(A.shape[0], B.shape[1], device=A.device)
    held: tuple[Tensor, ...] = ()
    if right is not None:
        digits = right.digits(plan.bits, COUNTS[plan.mode][0])
        held = (*digits.planes, digits.scale)

    def launch() -> tuple[Tensor, ...]:
        sides = operand(A, waits=False), right or operand(B.mT, waits=False)
        assert of_digits(plan, *sides, product) is product
        return tuple(made.scale for side in sides if side is not right for made in side.made.values())

    places = tuple(x.data_ptr() for x in (A, B, product, *held))
    return product, _steps()[0].run(_kind(A, B, plan, right is not None), places, A.device, launch)


def _compare(
    A: Tensor, B: Tensor, product: Tensor, plan: Plan, w: Tensor, inner: Tensor | None, scales: Sequence[Tensor]
) -> None:
    """Start the check of a product of digits; ``inner``: ``(B W)^T`` where it is known, ``scales``: to look at."""
    from cute_kernels.estimate import probes

    def launch() -> tuple[Tensor, ...]:
        outer = probes.probe(A, probes.probe(B, w) if inner is None else inner)  # (16, M and room)
        probes.start_comparison(product, w, outer, tuple(scales), FAR_SCALES)
        return ()

    read = (A, B, product, w, probes.result_buffer(), *scales, *(() if inner is None else (inner,)))
    places = tuple(x.data_ptr() for x in read)
    _steps()[1].run(_kind(A, B, plan, inner is not None), places, A.device, launch)


def _of_halves(A: Tensor, B: Tensor, right: Operand | None, w: Tensor, inner: Tensor | None) -> Tensor:
    """The product in float16 with sums in float32, by torch; and the start of its check, whose passes come first.

    They leave A and B in float16 on their way, where they can.
    """
    from cute_kernels.estimate import probes

    by_passes = probes.can_emit_float16(A) and (inner is not None or probes.can_emit_float16(B))

    def look(x: Tensor, by: Tensor, lines: str) -> tuple[Tensor, ...]:
        """``(X by)^T``, the lines' largest magnitudes, and perhaps halves."""
        return (probes.probe_with_float16 if by_passes else probes.probe_with_absmax)(x, by, lines)

    def launch() -> tuple[Tensor, ...]:
        made = () if inner is not None else look(B, w, "columns")
        return (*look(A, made[0] if inner is None else inner, "rows"), *made)

    places = tuple(x.data_ptr() for x in (A, B, w, *(() if inner is None else (inner,))))
    found = _steps()[1].run((_kind(A, B, HALF, inner is not None), by_passes), places, A.device, launch)
    of_a, of_b = found[: 2 + by_passes], found[2 + by_passes :]  # products, magnitudes, perhaps halves
    left = of_a[2] if by_passes else A.half()
    halves = right.half.mT if right is not None else of_b[2] if by_passes else B.half()
    product = torch.mm(left, halves, out_dtype=torch.float32)  # before anything else that can wait
    columns = of_b[1] if right is None else right.top
    probes.start_comparison(product, w, of_a[0], (of_a[1], columns), HALF_RANGE)
    return product
