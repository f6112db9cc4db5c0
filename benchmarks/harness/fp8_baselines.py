"""torch's bfloat16 and fp8 products on copies of a weight that the L2 cache does not hold, and their times."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from harness.gpu_results import rounded
from harness.gpu_timing import L2_ROUNDS, behind


def copies_for(size: int) -> int:
    return 1 + int(L2_ROUNDS * torch.cuda.get_device_properties(0).L2_cache_size / size)


def torch_baselines(m: int, n: int, k: int) -> dict[str, list[Callable[[], object]]]:
    """torch's bfloat16 product, and fp8 of given codes with a scale per tensor."""
    x, w = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
    found: dict[str, list[Callable[[], object]]] = {
        "bf16": [partial(torch.nn.functional.linear, x, w.clone()) for _ in range(copies_for(2 * n * k))]
    }
    one, few, codes = torch.ones((), device="cuda"), w.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn)
    for fast in (True, False):
        rows = torch.cat([codes.view(torch.uint8)] * 16).view(torch.float8_e4m3fn)  # for a torch that takes whole 16
        call = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)
        try:
            call(codes, few.t())
            rows = codes
        except RuntimeError:
            pass
        found["fp8 fast" if fast else "fp8"] = [partial(call, rows, few.clone().t()) for _ in range(copies_for(n * k))]
    return found


def cloned(x: Tensor) -> list[Tensor]:
    return [x, *(x.clone() for _ in range(copies_for(x.nbytes) - 1))]


def timed(calls: dict[str, list[Callable[[], object]]], cold: bool) -> dict[str, float]:
    """Microseconds behind another kernel, on rotated copies of the weights or on one."""
    found = behind({name: each if cold else each[0] for name, each in calls.items()}, rounds=7, replay=300.0)
    return {name: rounded(each.median) for name, each in found.items()}


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.float() - exact).norm() / exact.norm())


def host_us(call: Callable[[], object]) -> float:
    """Microseconds of the host for a call, without a graph."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        call()
    found = rounded((time.perf_counter() - start) / 50 * 1e6)
    torch.cuda.synchronize()
    return found
