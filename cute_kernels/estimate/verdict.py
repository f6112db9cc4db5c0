"""Verdict on a product that was picked on the GPU: its error bound, after the product, for whoever reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from cute_kernels.estimate.look import LookState
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel

WORDS = 16  # float64 of a verdict
_UNIT = 1.01 * 2.0**-24  # unit roundoff of float32, with room for products of several
_VALUE = 2 * _UNIT  # scales of row and column


@dataclass(frozen=True)
class VerdictConfig(KernelConfig):
    """Config of the verdict's kernel."""

    kernel_header = "estimate/verdict.cuh"
    kernel_entry = "verdict"
    name = "verdict"

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 256


class Verdict(NamedTuple):
    """What is known of a product.

    Attributes
    ----------
    planes : int
        Digits per element of the product that was computed, 0 for none.
    error : float
        Estimate of the relative error; for none, of the more accurate product.
    noise : float
        Part of `upper` that the probes' rounding takes.
    norm : float
        ``||C||_F``, rounded down; for none, the estimate of ``||A B||_F``.
    upper : float
        Bound of the relative error; infinite for none.
    predicted : tuple of (float, float, float)
        Estimate, bound and noise of the error of either product before it, relative to the estimate of ``||A B||_F``.
    out_of_range : int
        Scales of slices that the passes do not serve.
    """

    planes: int
    error: float
    noise: float
    norm: float
    upper: float
    predicted: tuple[tuple[float, float, float], tuple[float, float, float]]
    out_of_range: int


def product_rounding(planes: int) -> float:
    """Return the bound of what the epilogue rounds, relative to C, if its levels do not cancel."""
    return _VALUE + planes * _UNIT


def start_verdict(state: LookState, warps: tuple[int, int], planes: int, shape: tuple[int, int], out: Tensor) -> None:
    """Start the verdict on the product that `state` picked; one launch that does not wait for the GPU.

    Parameters
    ----------
    state : LookState
        Written by the pass over A and by the picked product.
    warps : tuple of int
        Warps of the products of `planes` - 1 and of `planes` digits, as ``gated_gemm`` returns them.
    planes : int
        Digits per element of the pass.
    shape : tuple of int
        (M, N).
    out : Tensor, shape (16,)
        float64, on the GPU or pinned; see :func:`read_verdict`.
    """
    lost = math.prod(shape) * 2.0**-148
    with device_of(state.record):
        get_kernel(VerdictConfig()).launch(
            (1, 1, 1),
            (
                state.record.data_ptr(), state.gate.data_ptr(), *warps, planes - 2,
                *map(np.float64, (_VALUE, (planes - 1) * _UNIT, planes * _UNIT, lost)), out.data_ptr(),
            ),
            pdl=True,
        )  # fmt: skip


def accepts(numbers: list[float], tol: float) -> bool:
    """Return whether a verdict's numbers say that a product was computed within `tol`.

    Examples
    --------
    >>> numbers = [1.0, 2.0, 0.5, 0.1, 0.2, 0.05, 10.0, 0, 1, 0.01, 0.005, 9.9, 0.03, 0, 0, 1]
    >>> accepts(numbers, 0.05), accepts(numbers, 0.02)
    (True, False)
    """
    return not numbers[7] and numbers[8] >= 0 and numbers[12] <= tol


def read_verdict(numbers: list[float]) -> Verdict:
    """Return the verdict of its 16 numbers.

    Examples
    --------
    >>> found = read_verdict([1.0, 2.0, 0.5, 0.1, 0.2, 0.05, 10.0, 0, 1, 0.01, 0.005, 9.9, 0.03, 0, 0, 1])
    >>> found.planes, found.predicted[0]
    (2, (0.1, 0.2, 0.05))
    """
    low, low_bound, low_noise, high, high_bound, high_noise, size, out_of_range, *found = numbers
    picked, error, noise, norm, upper = found[:5]
    first, second = (low, low_bound, low_noise), (high, high_bound, high_noise)
    if size > 0:
        first, second = ((e / size, b / size, n / size) for e, b, n in (first, second))
    return Verdict(int(picked) + 1, error, noise, norm, upper, (first, second), int(out_of_range))
