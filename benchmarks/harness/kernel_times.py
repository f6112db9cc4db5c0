"""Times of the kernels of a call by kind, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "nccl": "exchange", "quantize": "quantize", "encode": "quantize", "spmm": "product", "gemm": "product",
    "attention": "product", "nvjet": "product", "wgmma": "product", "look": "check", "probe": "check",
    "verdict": "check", "digits": "digits"}  # fmt: skip
_CALLS = 3


def kernel_times(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of kernels by kind, of one call on this device; waiting for other ranks counts."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(_CALLS):
            call()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in seen.key_averages():
        spent = event.self_device_time_total / (1e3 * _CALLS)
        kind = next((kind for word, kind in KINDS.items() if word in event.key.lower()), "elementwise")
        if spent:
            found[kind] = round(found.get(kind, 0.0) + spent, 4)
    return found
