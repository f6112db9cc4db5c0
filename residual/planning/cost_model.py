"""What each plan costs on a device: a few measured prices, and seconds from them as a pure function of the sizes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from magicube_cutlass.dispatch import measured
from residual.planning.plan import Plan


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


def costs_of(device: torch.device) -> Costs:
    """The prices of a device: measured ones, else those shipped for a CPU with VNNI or an H200."""
    name = _device_name(device)
    return _measured.get(name) or _known(name, device.type == "cuda", torch.get_num_threads())
