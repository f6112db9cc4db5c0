"""What each plan costs on a device: a few measured prices, and seconds from them as a pure function of the sizes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from magicube_cutlass import measured
from residual.plans import Plan


@dataclass(frozen=True)
class Costs:
    """Prices in seconds.

    ``call``: a plan's launches; ``halves``: those of the plan in float16, torch's; ``analysis``: statistics of both
    operands besides what the check needs anyway, of which ``analysis_k`` is for each column of k; ``int8``, ``fp16``,
    ``fp32``, ``fp64``, ``sparse``: a multiplication and addition, the last for a stored entry of the sparse operand;
    ``quantize``, ``digit``: an entry's leading digit and each further one; ``out``: an output for each level of digits;
    ``copy``: an entry read and written; ``compress``: an entry of a matrix made sparse; ``gather``: a byte of a chosen
    column of k, copied beside others.
    """

    call: float
    halves: float
    analysis: float
    analysis_k: float
    int8: float
    fp16: float
    fp32: float
    fp64: float
    sparse: float
    quantize: float
    digit: float
    out: float
    copy: float
    compress: float
    gather: float

    def sharing(self, calls: int, kept: bool = False) -> Costs:
        """The same, with statistics that so many calls share, and launches that are ``kept`` from call to call."""
        shared = replace(self, analysis=self.analysis / calls, analysis_k=self.analysis_k / calls)
        return replace(shared, call=self.call * _KEPT, halves=self.halves * _HALVES_KEPT) if kept else shared


# Of a plan's launches, where they are kept by their addresses. Those of halves cannot be, and take turns with the
# check's, which then are: the host no longer runs ahead while these are made.
_KEPT, _HALVES_KEPT = 0.4, 2.8
_NEVER = 1e-6  # price of products in halves where they are no plan
# One thread of a Xeon with AVX512-VNNI, by measure_costs in a virtual machine.
_CPU = Costs(
    call=5.5e-4, halves=_NEVER, analysis=2.3e-3, analysis_k=3.2e-6, int8=5.5e-12, fp16=_NEVER, fp32=1.7e-11,
    fp64=3.8e-11, sparse=1e-10, quantize=1.4e-9, digit=2.4e-10, out=1.4e-9, copy=4.5e-10, compress=8e-9, gather=6.5e-9,
)  # fmt: skip
# Not by measure_costs, but from an H200's dense products (int8 1,283 TOPS, float16 730, float32 51), copies (4.3 TB/s);
# analysis (three short kernels, a copy, a wait) and gather are estimates.
_H200 = Costs(
    call=1.5e-5, halves=3.75e-6, analysis=9e-5, analysis_k=2e-9, int8=1.56e-15, fp16=2.75e-15, fp32=3.9e-14,
    fp64=3.1e-14, sparse=1e-14, quantize=1.7e-12, digit=6e-13, out=1.5e-12, copy=1.9e-12, compress=2e-11, gather=4e-12,
)  # fmt: skip


class Sizes(NamedTuple):
    """``A`` (m, k) times ``B`` (k, n); ``prepared``: the digits of B exist; ``hot``: outlier columns; ``density``: of
    A' and B' together."""

    m: int
    k: int
    n: int
    prepared: bool = False
    hot: int = 0
    density: float = 0.0


_CALLS = {"outlier": 4, "columns": 3, "sparse": 12}  # launches, as so many of a plain plan; these modes also wait


def cost(plan: Plan, sizes: Sizes, prices: Costs) -> float:
    """Seconds of a plan, its quantization included; statistics and the check, alike for all, are not."""
    m, k, n = sizes.m, sizes.k, sizes.n
    macs, outputs, inputs = m * n * k, m * n, m * k + k * n
    if plan.mode == "fp16":
        rounded = m * k if sizes.prepared else inputs
        return prices.halves + macs * prices.fp16 + 0.75 * rounded * prices.copy
    if plan.mode == "fp32":
        return prices.call / 20 + macs * prices.fp32 + (inputs + outputs) * prices.copy
    if plan.mode == "fp64":
        return prices.call / 20 + macs * prices.fp64 + 3 * (inputs + outputs) * prices.copy
    entries = m * k if sizes.prepared else inputs
    planes = {"direct": 1, "centred": 1, "outlier": 1, "three_digit": 3}.get(plan.mode, 2)
    levels = {"direct": 1, "centred": 1, "outlier": 1, "full4": 3, "three_digit": 3}.get(plan.mode, 2)
    seconds = _CALLS.get(plan.mode, 1) * prices.call + plan.products * macs * prices.int8
    seconds += levels * outputs * prices.out + entries * (prices.quantize + (planes - 1) * prices.digit)
    if plan.mode == "centred":
        seconds += (2 * entries + outputs) * prices.copy
    elif plan.mode == "outlier":
        seconds += sizes.hot * outputs * prices.fp32 + (entries + outputs) * prices.copy
    elif plan.mode == "columns":
        seconds += 2 * plan.share * inputs * prices.gather + outputs * prices.copy
    elif plan.mode == "sparse":
        seconds += sizes.density * macs * prices.sparse + inputs * prices.compress + 4 * outputs * prices.copy
    return seconds


def analysis(sizes: Sizes, prices: Costs) -> float:
    """Seconds of the statistics; those of a prepared B exist."""
    return (prices.analysis + sizes.k * prices.analysis_k) * (0.5 if sizes.prepared else 1)


_gpu_name = lru_cache(torch.cuda.get_device_name)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return _gpu_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def _load(name: str) -> Costs | None:
    """What was measured for this user, or None where there is no sound file of theirs."""
    found = measured.load("costs", name)
    if not isinstance(found, dict) or set(found) != {field.name for field in fields(Costs)}:
        return None
    try:
        prices = {key: float(value) for key, value in found.items()}
    except (ValueError, TypeError):
        return None
    return Costs(**prices) if all(0 < value < math.inf for value in prices.values()) else None


@lru_cache
def _known(name: str, gpu: bool, threads: int) -> Costs:
    found = _load(name)
    if found is not None or gpu:
        return found or _H200
    shared = {
        key: value if key in ("call", "halves", "analysis") else value / threads for key, value in asdict(_CPU).items()
    }
    return Costs(**shared)


_measured: dict[str, Costs] = {}
_NAP = 2_000_000  # cycles of a GPU, a millisecond: longer than the host takes to enqueue a call


def costs_of(device: torch.device) -> Costs:
    """The prices of a device: measured ones, else those shipped for a CPU with VNNI or an H200."""
    name = _device_name(device)
    return _measured.get(name) or _known(name, device.type == "cuda", torch.get_num_threads())


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
    _measured[name] = prices
    if save:
        measured.save("costs", name, asdict(prices))
    return prices


def _look_seconds(a: Tensor, b: Tensor, device: torch.device, generator: torch.Generator) -> float:
    """Of the statistics of rows ``a`` and columns ``b``, on a GPU besides the check's passes."""
    from residual.check import Check
    from residual.predict import forecast, forecast_of, start_look
    from residual.prepare import operand

    if device.type != "cuda":
        return _seconds(lambda: forecast(operand(a), operand(b), 8, False, generator), device)

    def passes(tops: bool) -> None:
        left, right = operand(a, waits=False), operand(b, waits=False)
        product = Check(left, right, generator, fresh=True).begin(tops)
        if tops:
            look = start_look(left, right, product, 8, 0)
            forecast_of(look, look.tables(), 8)
        torch.cuda.synchronize(device)

    return max(_seconds(lambda: passes(True), device) - _seconds(lambda: passes(False), device), 0.0)


def _measure(device: torch.device, n: int) -> Costs:
    from cute_kernels.gemm import gemm
    from residual.plans import execute
    from residual.prepare import Operand, operand

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
