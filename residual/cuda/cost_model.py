"""What each plan costs on a device: a few measured prices, and seconds from them as a pure function of the sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from residual.cuda.plans import GpuPlan


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


# From an H200's dense products (int8 1,283 TOPS, float16 730, float32 51), copies (4.3 TB/s);
# analysis (three short kernels, a copy, a wait) and gather are estimates.
H200 = Costs(
    call=1.5e-5, halves=3.75e-6, analysis=9e-5, analysis_k=2e-9, int8=1.56e-15, fp16=2.75e-15, fp32=3.9e-14,
    fp64=3.1e-14, sparse=1e-14, quantize=1.7e-12, digit=6e-13, out=1.5e-12, copy=1.9e-12, compress=2e-11, gather=4e-12,
)  # fmt: skip


class Sizes(NamedTuple):
    """``A`` (m, k) times ``B`` (k, n); ``prepared``: the digits of B exist; ``hot``: outlier columns; ``density``: of
    A' and B' together; ``sixteen_bit``: both are of one 16-bit float dtype."""

    m: int
    k: int
    n: int
    prepared: bool = False
    hot: int = 0
    density: float = 0.0
    sixteen_bit: bool = False


_CALLS = {"outlier": 4, "columns": 3, "sparse": 12}  # launches, as so many of a plain plan; these modes also wait


def cost(plan: GpuPlan, sizes: Sizes, prices: Costs) -> float:
    """Seconds of a plan, its quantization included; statistics and the check, alike for all, are not."""
    m, k, n = sizes.m, sizes.k, sizes.n
    macs, outputs, inputs = m * n * k, m * n, m * k + k * n
    if plan.mode == "fp16" and sizes.sixteen_bit:
        return prices.call / 20 + macs * prices.fp16
    if plan.mode == "fp16":
        rounded = m * k if sizes.prepared else inputs
        return prices.halves + macs * prices.fp16 + 0.75 * rounded * prices.copy
    if plan.mode == "fp32":
        return prices.call / 20 + macs * prices.fp32 + (inputs + outputs) * prices.copy
    if plan.mode == "fp64":
        return prices.call / 20 + macs * prices.fp64 + 3 * (inputs + outputs) * prices.copy
    entries = m * k if sizes.prepared else inputs
    planes = {"direct": 1, "centered": 1, "outlier": 1, "three_digit": 3}.get(plan.mode, 2)
    levels = {"direct": 1, "centered": 1, "outlier": 1, "full4": 3, "three_digit": 3}.get(plan.mode, 2)
    seconds = _CALLS.get(plan.mode, 1) * prices.call + plan.products * macs * prices.int8
    seconds += levels * outputs * prices.out + entries * (prices.quantize + (planes - 1) * prices.digit)
    if plan.mode == "centered":
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
