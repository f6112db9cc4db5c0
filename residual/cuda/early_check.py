"""The error of a product of one digit an entry, measured on a GPU before the product is there.

Its sums are exact, so ``A B - C`` follows from the digits, all but the rounding of C to float32, an entry by a few last
places of its own; products of more digits add sums that may cancel, and are not foreseen.  Two passes, over B and over
A, measure it by the check's vectors (``estimate/remainder_probes``).  The host looks at what they say while the product
is computed.  The norm of C, which the error is relative to, is summed by the product's own kernel.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache

import torch
from torch import Tensor

from residual.cuda.check import FAR_SCALES
from residual.cuda.operand import GpuOperand
from residual.cuda.plans import GpuPlan
from residual.cuda.products import of_digits
from residual.error.estimate import ErrorEstimate, relative_bound
from residual.error.factor import bound_of
from residual.error.probes import PROBES

# Of C, relative to it: an entry is rounded as a sum, times one scale, and times the other.
ROUNDING = 2.0**-20
# Of the squared norm of AB as the vectors see it, over that of C: beyond, for any product, once in 10**9 draws at most.
_PLAUSIBLE = (1 / 40, 6.0)
_RANGE = 2.0**90  # of an entry's square, within which float32 holds the sums of them


class _Squares(threading.local):
    """Where a product leaves the squares of its results: memory of the host that a GPU writes to."""

    def __init__(self, room: int) -> None:
        self.sums = torch.zeros(room, dtype=torch.float32, pin_memory=True, device="cpu")


@lru_cache
def _squares(device: int) -> _Squares:
    from cute_kernels.gemm.cuda import sum_of_squares_size

    return _Squares(sum_of_squares_size(torch.device("cuda", device)))


@lru_cache(maxsize=256)
def can_check_early(plan: GpuPlan, k: int, device: torch.device) -> bool:
    """Whether this device's kernels tell the error of a plan's product of float32 over k, and its norm."""
    if plan.mode != "direct" or device.type != "cuda":
        return False
    from cute_kernels.gemm.config import select_products
    from cute_kernels.gemm.cuda import can_emit_sum_of_squares

    with torch.cuda.device(device):
        return can_emit_sum_of_squares(k, select_products(1, 1, 1), device)


def is_read_at_once(x: Tensor) -> bool:
    """Whether a pass over a matrix is one launch, of rows or columns one after the other."""
    from cute_kernels.estimate.probes import is_single_launch

    flat = x.stride(1) == 1 or x.stride(0) == 1 or 1 in x.shape
    return flat and is_single_launch(x.shape, x.dtype, x.device)


def start(left: GpuOperand, right: GpuOperand, plan: GpuPlan, w: Tensor) -> Tensor:
    """Start digits, both passes and the product (M, N), which is returned; ``w``: W^T (16, N and room)."""
    from cute_kernels.estimate import probes, remainder_probes

    product = torch.empty(left.given.shape[0], right.given.shape[0], device=w.device, dtype=torch.float32)
    squares = _squares(w.device.index).sums
    squares.numpy().fill(0.0)
    probes.arm_result()
    a, b = left.digits(plan.bits, 1), right.digits(plan.bits, 1)
    vectors = remainder_probes.probe_remainder(right.given.mT, w, b.scale, plan.bits)
    remainder_probes.start_remainder_estimate(left.given, vectors, a.scale, b.scale, plan.bits, FAR_SCALES)
    of_digits(plan, left, right, product, squares)
    return product


def finish(product: Tensor, sure: float) -> tuple[ErrorEstimate | None, bool]:
    """What the passes say of the product that this thread has started last, and whether a line is far from one.

    None where they say nothing.  Waits for the GPU, for the product last.
    """
    from cute_kernels.estimate import probes
    from cute_kernels.estimate.remainder_probes import TF32_MARGIN

    device = product.device
    sums = probes.wait_result(device)
    error, bound = (TF32_MARGIN * each for each in bound_of(sums.gram, 0.0, sure))
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
