"""SDDMM on a GPU against the dense product and torch's sampled product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.dtypes import Integer
from cute_kernels.jit.warmup import Source
from cute_kernels.sddmm.heuristics import SddmmKernel, sddmm_config
from harness.gpu_baselines import Baseline, calls_of, prepare
from harness.gpu_data import OUT, Shape, Widths, one_line, random_ints, uniform
from harness.gpu_timing import Call, GpuTiming, measure
from magicube_cutlass.dispatch.plan import plan_sddmm, size_bucket
from magicube_cutlass.reference import at_vectors

PAIRS = (Widths(8, 8), Widths(16, 16), Widths(4, 4))
VECTOR_LENGTH, STRIDE, SPARSITY = 8, 32, 0.9


def chosen_sddmm(pattern: mc.Pattern, widths: Widths, inner: int) -> SddmmKernel:
    """The config that ``mc.sddmm`` takes for float16 output; ``pattern`` on the GPU."""
    kinds = Integer(widths.left, True), Integer(widths.right, True)
    name, _ = plan_sddmm(pattern, STRIDE, kinds, OUT, size_bucket(inner), None)
    return sddmm_config(name)


def _pattern(size: int) -> mc.Pattern:
    return uniform(Shape(size, size, 0, SPARSITY), VECTOR_LENGTH).to("cuda")


def sddmm_configs(size: int, inners: tuple[int, ...]) -> list[Source]:
    """Every kernel that :func:`run_sddmm` will use."""
    pattern = _pattern(size)
    return [chosen_sddmm(pattern, widths, inner) for widths in PAIRS for inner in inners]


def _operand(rows: int, inner: int, bits: int, seed: int) -> mc.QuantTensor:
    ints = random_ints((rows, inner), bits, True, seed)
    scale = (1 / (ints.double().square().mean().sqrt() * inner**0.25)).float()
    return mc.QuantTensor.from_ints(ints, bits=bits, scale=scale)


def checked_sddmm(
    widths: Widths, inner: int, pattern: mc.Pattern
) -> tuple[Call, mc.QuantTensor, mc.QuantTensor, Tensor]:
    """The call, checked in every element, its operands, and the whole exact product in float64 (M, N)."""
    m, n = pattern.shape
    x, y = _operand(m, inner, widths.left, 1), _operand(n, inner, widths.right, 2)
    exact = x.ints().double() @ y.ints().double().T
    assert x.scale is not None and y.scale is not None
    expected = at_vectors((exact.float() * x.scale * y.scale).to(OUT), pattern)
    # the product makes its output: leave NaN in the block of memory that it will probably get
    slots = pattern.padded(STRIDE).col_indices.numel() * VECTOR_LENGTH
    poison = torch.full((slots,), torch.nan, dtype=OUT, device="cuda")
    del poison
    got = mc.sddmm(x, y, pattern, out_dtype=OUT).vectors()
    if not torch.equal(got, expected):
        raise ArithmeticError(f"{int((got != expected).sum())} of {got.numel()} elements are wrong")
    return partial(mc.sddmm, x, y, pattern, out_dtype=OUT), x, y, exact


def _csr(pattern: mc.Pattern, dtype: torch.dtype) -> Tensor:
    """The pattern's elements as CSR, all zero."""
    v = pattern.vector_length
    lengths = pattern.row_lengths.repeat_interleave(v)  # (M,)
    start = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    rows = pattern.row_indices.view(-1)
    order = torch.argsort(torch.cat([rows * v + i for i in range(v)]), stable=True)
    columns = pattern.col_indices.repeat(v)[order]
    return torch.sparse_csr_tensor(start.int(), columns, torch.zeros(len(columns), dtype=dtype, device=columns.device),
                                   size=pattern.shape)  # fmt: skip


def _baselines(
    pattern: mc.Pattern, x: mc.QuantTensor, y: mc.QuantTensor, exact: Tensor
) -> dict[str, Callable[[], Baseline]]:
    """Makers by name; operands are those of L8-R8."""
    assert x.scale is not None and y.scale is not None
    scale = float(x.scale) * float(y.scale)

    def dense(dtype: torch.dtype) -> Baseline:
        left, right = x.dequantize().to(dtype), y.dequantize().to(dtype).T
        return Baseline(lambda: left @ right, exact * scale, "all elements")

    def dense_int8() -> Baseline:
        left, right = x.ints(), y.ints().T
        return Baseline(lambda: torch._int_mm(left, right), exact, "all elements", "int32 output")

    def sampled(dtype: torch.dtype) -> Baseline:
        csr = _csr(pattern, dtype)
        left, right = x.dequantize().to(dtype), y.dequantize().to(dtype).T
        sampled = torch.masked_select(exact * scale, pattern.to_dense())

        def call() -> Tensor:
            return torch.sparse.sampled_addmm(csr, left, right, beta=0.0).values()

        return Baseline(call, sampled, "the pattern's elements, CSR")

    return {
        "dense fp16": lambda: dense(torch.float16),
        "dense int8": dense_int8,
        "sampled_addmm fp16": lambda: sampled(torch.float16),
        "sampled_addmm fp32": lambda: sampled(torch.float32),
    }


def run_sddmm(size: int, inner: int, row: Callable[[GpuTiming, GpuTiming], dict[str, Any]]) -> dict[str, Any]:
    """A mask of (size, size) at :data:`SPARSITY`, V = 8; ``row`` makes a results row of two timings."""
    pattern = _pattern(size)
    calls: dict[str, Call] = {}
    ours: list[dict[str, Any]] = []
    makers: dict[str, Callable[[], Baseline]] = {}
    for widths in PAIRS:
        try:
            calls[str(widths)], x, y, exact = checked_sddmm(widths, inner, pattern)
        except Exception as error:  # a failure of ours is a result too
            ours.append({"name": str(widths), "failure": one_line(error)})
            continue
        if widths == PAIRS[0]:
            makers = _baselines(pattern, x, y, exact)
    baselines, failures, errors = prepare(makers)
    times = measure(calls | calls_of(baselines))
    first = next(iter(calls), None)
    if first is None:
        return {"shape": [size, size], "inner": inner, "sparsity": SPARSITY, "ours": ours, "rivals": []}
    for widths in PAIRS:
        if (name := str(widths)) in calls:
            tops = 2 * pattern.nnz * inner / times[name].median / 1e6
            kernel = chosen_sddmm(pattern, widths, inner).name
            ours.append(
                {"name": name, "kernel": kernel, **row(times[name], times[first]), "tops": tops,
                 "check": "equal in every element"}
            )  # fmt: skip
    rows = [
        {"name": name, "data": baseline.data, **row(times[name], times[first]), "error": errors[name]}
        for name, baseline in baselines.items()
    ]
    rows += [{"name": name, "failure": text} for name, text in failures.items()]
    return {"shape": [size, size], "inner": inner, "sparsity": SPARSITY, "ours": ours, "rivals": rows}
