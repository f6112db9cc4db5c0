"""The prices of a device, by measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor

from magicube_cutlass.dispatch import measured
from residual.planning import cost_model
from residual.planning.cost_model import _NEVER, Costs, _device_name
from residual.planning.plan import Plan

_NAP = 2_000_000  # cycles of a GPU, a millisecond: longer than the host takes to enqueue a call


def _device_seconds(call: Callable[[], object], device: torch.device, repeats: int = 5, calls: int = 4) -> float:
    """What a call's kernels take, best of several runs: they are enqueued while the GPU sleeps, so the host is out."""
    if device.type != "cuda":
        return _seconds(call, device)
    call()
    best = math.inf
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_NAP * calls)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e-3 / calls)
    return best


def _seconds(call: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Of a call, best of several runs; on a GPU of some calls in a row."""
    best, calls = math.inf, 8 if device.type == "cuda" else 1
    for _ in range(repeats + 1):  # the first one warms up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def measure_costs(device: torch.device | str = "cpu", *, size: int | None = None, save: bool = True) -> Costs:
    """Measure the prices that ``residual.matmul(tol=...)`` plans with, and use them from now on.

    Takes some seconds.  They are kept per user, device and number of threads in the folder ``costs`` beside the
    compiled kernels (``MAGICUBE_CACHE``), mode 0700, written atomically; what cannot be written holds for this process.

    Args:
        device: of torch, ``"cpu"`` or a CUDA one.
        size: of the square matrices to measure with; default 1024 on a CPU, 4096 on a GPU.
        save: whether to keep them on disk.

    Raises:
        ValueError: ``size`` is below 128.
    """
    where = torch.device(device)
    n = size or (4096 if where.type == "cuda" else 1024)
    if n < 128:
        raise ValueError(f"size must be at least 128, got {n}")
    prices = _measure(where, n)
    name = _device_name(where)
    cost_model._measured[name] = prices
    if save:
        measured.save("costs", name, asdict(prices))
    return prices


def _look_seconds(a: Tensor, b: Tensor, device: torch.device, generator: torch.Generator) -> float:
    """Of the statistics of rows ``a`` and columns ``b``, on a GPU besides the check's passes."""
    from residual.error.predict import forecast, forecast_of, start_look
    from residual.error.probes import Check
    from residual.operand.operand import operand

    if device.type != "cuda":
        return _seconds(lambda: forecast(operand(a), operand(b), 8, False, generator), device)

    def passes(tops: bool) -> None:
        left, right = operand(a, waits=False), operand(b, waits=False)
        product = Check(left, right, generator, fresh=True).begin(tops)
        if tops:
            look = start_look(left, right, product, 8, 0)
            forecast_of(look, look.result(), 8)
        torch.cuda.synchronize(device)

    return max(_seconds(lambda: passes(True), device) - _seconds(lambda: passes(False), device), 0.0)


def _measure(device: torch.device, n: int) -> Costs:
    from cute_kernels.gemm.api import gemm
    from residual.execute.products import execute
    from residual.operand.operand import Operand, operand

    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(n, n, device=device, generator=generator)
    y = torch.randn(n, n, device=device, generator=generator).mT
    small = x[:32, :32]
    order = torch.arange(n, device=device)

    def fresh(lines: Tensor) -> Operand:
        return operand(lines, waits=device.type == "cpu")  # as calls do

    def run(plan: Plan, a: Tensor, b: Tensor) -> Tensor:
        return execute(plan, fresh(a), fresh(b), order, torch.float32)

    left, right = operand(x), operand(y)

    def halves() -> Tensor:
        return torch.mm(left.half, right.half.mT, out_dtype=torch.float32)

    byte = left.digits(8, 1).planes[0]
    macs, entries = n**3, n * n
    call = _seconds(lambda: run(Plan("direct", 8), small, small), device)
    one = _device_seconds(lambda: gemm(byte, byte.mT), device)
    scaled = _device_seconds(lambda: execute(Plan("direct", 8), left, right, order, torch.float32), device)
    quantize = _device_seconds(lambda: fresh(x).digits(8, 1), device)
    two = _device_seconds(lambda: fresh(x).digits(8, 2), device)
    copy = _device_seconds(x.clone, device)
    gather = _device_seconds(lambda: torch.cat([plane[:, order[::2]] for plane in (byte, byte)], 1), device)
    low = _look_seconds(x[:, :64], y[:, :64], device, generator)
    slope = max(_look_seconds(x, y, device, generator) - low, 0.0) / (n - 64)
    light = Plan("sparse", 8, 1 / 2)
    dense_part = _device_seconds(lambda: execute(Plan("full", 8), left, right, order, torch.float32), device)
    cross = max(_device_seconds(lambda: run(light, x, y), device) - dense_part, 0.0)
    stored = sum(float((s.digits(8, 1).planes[0].abs() >= light.threshold).float().mean()) for s in (left, right))
    tiny = 1e-18
    sparse = cross / 2 / max(stored * macs, 1.0)  # half of it for the product, half for the compression
    return Costs(
        call=call,
        halves=_seconds(lambda: run(Plan("fp16"), small, small), device) if device.type == "cuda" else _NEVER,
        analysis=max(low - 64 * slope, tiny),
        analysis_k=max(slope, tiny),
        int8=max(one / macs, tiny),
        fp16=_device_seconds(halves, device) / macs if device.type == "cuda" else _NEVER,
        fp32=_device_seconds(lambda: x @ y.mT, device) / macs,
        fp64=_device_seconds(lambda: x.double() @ y.mT.double(), device) / macs,
        sparse=max(sparse, tiny),
        quantize=max(quantize / entries, tiny),
        digit=max((two - quantize) / entries, tiny),
        out=max((scaled - one) / entries, tiny),
        copy=max(copy / entries, tiny),
        compress=max(cross / 2 / (2 * entries), tiny),
        gather=max(gather / entries, tiny),
    )
