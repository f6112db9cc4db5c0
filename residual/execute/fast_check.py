"""The error of a product of one digit an entry, measured on a GPU before the product is there.

Its sums are exact, so ``A B - C`` follows from the digits, all but the rounding of C to float32, an entry by a few last
places of its own; products of more digits add sums that may cancel, and are not foreseen.  Two passes, over B and over
A, measure it by the check's vectors (``estimate/remainder_probes``).  The host looks at what they say while the product
is computed.  The norm of C, which the error is relative to, is summed by the product's own kernel.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residual.error.estimate import ErrorEstimate, bound_of, relative_bound
from residual.error.probes import FAR_SCALES, PROBES
from residual.execute.products import of_digits
from residual.operand.operand import Operand, operand
from residual.planning.plan import Plan

if TYPE_CHECKING:
    from cute_kernels.jit.workspace import Kept

# Of C, relative to it: an entry is rounded as a sum, times one scale, and times the other.
ROUNDING = 2.0**-20
# Of the squared norm of AB as the vectors see it, over that of C: beyond, for any product, once in 10**9 draws at most.
_PLAUSIBLE = (1 / 40, 6.0)
_RANGE = 2.0**90  # of an entry's square, within which float32 holds the sums of them


class _Squares(threading.local):
    """Where a product leaves the squares of its results: memory of the host that a GPU writes to."""

    def __init__(self, room: int) -> None:
        self.sums = torch.zeros(room, dtype=torch.float32, pin_memory=True)


@lru_cache
def _squares(device: int) -> _Squares:
    from cute_kernels.gemm.cuda import sum_of_squares_size

    return _Squares(sum_of_squares_size(torch.device("cuda", device)))


@lru_cache(maxsize=256)
def can_foresee(plan: Plan, k: int, device: torch.device) -> bool:
    """Whether this device's kernels tell the error of a plan's product of float32 over k, and its norm."""
    if plan.mode != "direct" or device.type != "cuda":
        return False
    from cute_kernels.gemm.config import select_products
    from cute_kernels.gemm.cuda import can_emit_sum_of_squares

    with torch.cuda.device(device):
        return can_emit_sum_of_squares(k, select_products(1, 1, 1), device)


def rests_of(right: Operand, B: Tensor, plan: Plan, w: Tensor, kept: dict[object, Tensor]) -> Tensor:
    """What the pass over a prepared B leaves, kept in ``kept`` beside the vectors ``w`` that it is of."""
    from cute_kernels.estimate.remainder_probes import probe_remainder

    key = "rest", plan.bits
    if key not in kept:
        kept[key] = probe_remainder(B, w, right.digits(plan.bits, 1).scale, plan.bits)
    return kept[key]


def start(
    A: Tensor, B: Tensor, right: Operand | None, plan: Plan, w: Tensor, rests: Tensor | None, kind: Hashable, kept: Kept
) -> Tensor:
    """Start digits, both passes, and the product (M, N), which is returned; ``rests``: of a prepared B."""
    from cute_kernels.estimate import probes, remainder_probes

    product = torch.empty(A.shape[0], B.shape[1], device=A.device)
    squares = _squares(A.device.index).sums
    squares.numpy().fill(0.0)
    probes.arm_result()
    held: tuple[Tensor, ...] = ()
    if right is not None:
        digits = right.digits(plan.bits, 1)
        held = (*digits.planes, digits.scale)

    def launch() -> tuple[Tensor, ...]:
        left, columns = operand(A, waits=False), right or operand(B.mT, waits=False)
        a, b = left.digits(plan.bits, 1), columns.digits(plan.bits, 1)
        vectors = remainder_probes.probe_remainder(B, w, b.scale, plan.bits) if rests is None else rests
        remainder_probes.start_remainder_estimate(A, vectors, a.scale, b.scale, plan.bits, FAR_SCALES)
        of_digits(plan, left, columns, product, squares)
        return ()

    written = (product, probes.result_buffer(), squares, *(() if rests is None else (rests,)))
    places = tuple(x.data_ptr() for x in (A, B, w, *written, *held))
    kept.run(("foreseen", kind), places, A.device, launch)
    return product


def finish(product: Tensor, sure: float) -> tuple[ErrorEstimate | None, bool]:
    """What the passes say of the product that this thread has started last, and whether a line is far from one.

    None where they say nothing.  Waits for the GPU, for the product last.
    """
    from cute_kernels.estimate import probes
    from cute_kernels.estimate.remainder_probes import TF32_MARGIN

    device = product.device
    sums = probes.wait_result(device)
    error, bound = bound_of(sums.gram, TF32_MARGIN, sure)
    torch.cuda.current_stream(device).synchronize()
    result = float(_squares(device.index).sums.numpy().sum(dtype="float64"))
    spread = result / product.numel()
    if sums.out_of_range or not 1 / _RANGE < spread < _RANGE:
        return None, sums.out_of_range > 0
    least, most = _PLAUSIBLE
    if not least < sums.product / PROBES / result < most:
        return None, False
    norm = math.sqrt(result)
    return ErrorEstimate(error / norm, relative_bound(bound, norm) + ROUNDING, sure), False
