"""The dense product in place of the sparse one if it is predicted to be faster: ``spmm(..., allow_dense=True)``.

The constants of the GPU's cost models were measured on one H200; ``benchmarks/llm.py`` records predicted and measured
times. Those of a CPU are measured on it (:mod:`magicube_cutlass.dispatch.cpu_costs`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cute_kernels.cpu import dense as dense_engine
from cute_kernels.cpu import engine
from cute_kernels.dtypes import INTEGER_OUT
from cute_kernels.gemm.config import Products
from cute_kernels.gemm.cpu import packs_weights
from cute_kernels.gemm.heuristics import predict
from cute_kernels.integers import digit_count, fetch
from cute_kernels.machine import Machine, Problem, ProblemTypes
from magicube_cutlass.dispatch import cpu_costs
from magicube_cutlass.dispatch.machine import get_machine
from magicube_cutlass.quantization.float_operands import DenseFloats

if TYPE_CHECKING:
    from magicube_cutlass.formats.srbcrs import SRBCRS
    from magicube_cutlass.quantization.quant_tensor import QuantTensor

_LONGEST = (2**31 - 1) // 2**14  # products of two bytes that int32 sums without overflow
_ALIGNMENT = 16  # bytes; rows of the dense kernel start at multiples
_LAUNCH = 2000.0  # of a copy, between kernels of a CUDA graph
# On a CPU, beside the time of the kernels: nanoseconds that the Python of a dense call takes more than that of a sparse
# one, by the engine and by torch, and that a row of results written down their columns takes.
CPU_CALL, CPU_GEMM, CPU_ROW = 1500.0, 9000.0, 2.0
CPU_SHORT = 1.4  # time of vectors of fewer than 8 rows over that of 8, of the kernels of few columns
_MOVED = 3500.0  # bytes that a copy reads or writes


@dataclass(frozen=True)
class Forecast:
    """Predicted nanoseconds of the sparse and of the dense product."""

    sparse: float
    dense: float

    @property
    def dense_wins(self) -> bool:
        """Whether the dense product is predicted to be faster."""
        return self.dense < self.sparse

    def __str__(self) -> str:
        dense, sparse = self.dense / 1e3, self.sparse / 1e3
        if self.dense_wins:
            return f"dense would be faster: about {dense:.1f} us against {sparse:.1f} us; allow_dense=True takes it"
        return f"dense would not be faster: about {dense:.1f} us against {sparse:.1f} us"


def dense_cost(machine: Machine, m: int, problem: Problem, out: str) -> float:
    """Return the predicted nanoseconds of the int8 GEMM of a dense (`m`, K) matrix."""
    return 1e3 * problem.batch * predict(
        m, problem.n, problem.inner, Products(1, 1, 1), machine.arch, out=out, num_sms=machine.num_sms
    )  # fmt: skip


def copy_cost(size: int) -> float:
    """Return the predicted nanoseconds to repack `size` bytes before a product."""
    return _LAUNCH + 2 * size / _MOVED


def cpu_forecast(
    kind: ProblemTypes,
    m: int,
    digits: int,
    problem: Problem,
    cpu: cpu_costs.Processor | None = None,
    row_major: bool = False,
) -> Forecast:
    """Return the forecast for a CPU, by default this one with torch's threads.

    `digits`: of A times those of B. A `row_major` B is turned for the dense kernel, or packed in the call.
    """
    cpu = cpu or cpu_costs.Processor.here()
    costs, threads = cpu.costs, cpu.threads
    k, n, batch = problem.inner, problem.n, problem.batch
    out_bits = getattr(torch, kind.out).itemsize * 8
    sizes = problem.vectors, kind.vector_length, digits, batch, out_bits, cpu.panel_columns
    sparse = cpu_costs.predict(costs.sparse, cpu_costs.sparse_terms(m, k, n, *sizes), threads)
    is_integer = kind.out.startswith("int")
    if digits > 1 or batch > 1 or not cpu.packs_layers:
        terms = cpu_costs.dense_terms(m, k, n, batch, is_integer)
        by = CPU_CALL if cpu.packs_layers else CPU_GEMM
        return Forecast(sparse, by + cpu_costs.predict(costs.dense, terms, threads))
    if n <= cpu_costs.FEW:
        few, _ = costs.layer(m, k, problem.vectors * max(kind.vector_length, 4), n, threads)
        sparse = few * (CPU_SHORT if kind.vector_length < 8 else 1.0)
    if row_major:
        return Forecast(sparse, min(_row_major_costs(cpu, m, k, n, is_integer)))
    return Forecast(sparse, _column_major_cost(cpu, m, k, n, is_integer))


def _column_major_cost(cpu: cpu_costs.Processor, m: int, k: int, n: int, is_integer: bool) -> float:
    """Return the predicted nanoseconds of a matrix that was packed once times a column-major B."""
    if n <= cpu_costs.CLASSES[-1]:
        return CPU_CALL + CPU_ROW * m * (n > 1) + cpu.costs.layer(m, k, 0.0, n, cpu.threads)[1]
    return CPU_CALL + cpu_costs.predict(cpu.costs.dense, cpu_costs.dense_terms(m, k, n, 1, is_integer), cpu.threads)


def _row_major_costs(cpu: cpu_costs.Processor, m: int, k: int, n: int, is_integer: bool) -> tuple[float, float]:
    """Return the predicted nanoseconds of the same with a row-major B: where it is turned, and packed in the call."""
    turned = _column_major_cost(cpu, m, k, n, is_integer)
    turned += cpu_costs.predict(cpu.costs.turned, (1.0, float(k * n)), cpu.threads)
    terms = cpu_costs.packed_terms(m, k, n, is_integer)
    return turned, CPU_CALL + cpu_costs.predict(cpu.costs.packed, terms, cpu.threads)


def _are_bytes(bits: int, signed: bool) -> bool:
    """Whether such integers are int8 ones."""
    return bits == 4 or (bits == 8 and signed)


def forecast(matrix: SRBCRS, dense: QuantTensor | DenseFloats, out: torch.dtype) -> Forecast | None:
    """Return the predicted times of both products; None if the dense kernel does not support the operands."""
    if matrix.bits is None or isinstance(dense, DenseFloats):
        return None
    (m, inner), n, batch = matrix.shape, dense.shape[-1], dense.shape[:-2].numel()
    fitting = _are_bytes(matrix.bits, matrix.signed) and _are_bytes(dense.bits, dense.signed)
    if not fitting or inner > _LONGEST or min(m, n, inner, batch) == 0:
        return None
    from magicube_cutlass.dispatch import plan as plans

    kind, problem = plans.spmm_problem(matrix, dense.element_type, out, n, batch)
    if matrix.device.type == "cpu":
        if not engine.available():
            return None  # the reference has no cost model
        digits = digit_count(matrix.bits) * digit_count(dense.bits)
        row_major = dense.data.stride(-2) != 1 and inner > 1
        return cpu_forecast(kind, m, digits, problem, row_major=row_major)
    from cute_kernels.spmm.heuristics import choose_spmm, spmm_cost
    from magicube_cutlass.dispatch import cuda as gpu

    here = get_machine(matrix.device.index)
    chosen = choose_spmm(kind, here, replace(problem, n=plans.size_bucket(n), batch=min(batch, 2)))
    operand, size = engine.DenseOperand(dense.data, dense.bits, dense.signed, -2, dense.packed_dim), dense.shape.numel()
    sparse = spmm_cost(chosen, here, problem)
    if gpu.copies(operand, -1, chosen.any_rows):
        sparse += copy_cost(dense.data.nbytes)
    product = dense_cost(here, m, problem, kind.out)
    if dense.bits == 4:  # unpacked in several steps
        product += 4 * copy_cost(size)
    elif gpu.copies(operand, -2):
        product += copy_cost(size)
    return Forecast(sparse, product)


def dense_copy(matrix: SRBCRS) -> Tensor:
    """Return the matrix as dense int8 (M, K), rows at multiples of 16 bytes; cached on it."""
    found: Tensor | None = matrix._execution.get("dense")
    if found is None:
        m, k = matrix.shape
        padded = torch.empty(m, -(-k // _ALIGNMENT) * _ALIGNMENT, dtype=torch.int8, device=matrix.device)
        found = matrix._execution["dense"] = padded[:, :k].copy_(matrix.to_dense(dequantize=False))
    return found


def _factors(scale: Tensor | None) -> Tensor | None:
    """A scale as float32: (), or one per row or column."""
    if scale is None or scale.ndim == 0:
        return scale if scale is None else scale.float()
    return scale.float().flatten(-2)


def packed_right(matrix: SRBCRS) -> dense_engine.PackedRight:
    """Return the transpose of the matrix, (K, M), as the right operand of the CPU's dense kernel; cached on it."""
    found: dense_engine.PackedRight | None = matrix._execution.get("dense right")
    if found is None:
        ints = matrix.to_dense(dequantize=False).to(torch.int8)  # (M, K)
        found = matrix._execution["dense right"] = dense_engine.pack_right(ints.t())
    return found


class DenseCall:
    """The dense product of one matrix with operands of fixed shapes, strides, dtypes and devices, checked before.

    Called like other cached calls: with B's data and scale, the bias, and the output or None. On a CPU a column-major B
    is multiplied by a matrix that was packed once; a row-major one is turned for it if that is predicted to be faster
    or there is a bias, and packed in the call otherwise, with the same bits.
    """

    def __init__(self, matrix: SRBCRS, dense: QuantTensor, out: torch.dtype, bias: Tensor | None = None) -> None:
        self.scale = matrix.scale
        self.bits, self.signed, self.packed_dim = dense.bits, dense.signed, dense.packed_dim
        self.dtype, self.sizes = out, (matrix.shape[0], *dense.shape[-2:])
        self.batch = dense.shape[:-2]
        self.turned: dense_engine.TurnedCall | None = None
        self.copy: Tensor | None = None
        data = dense.data
        self.by_engine = data.is_cpu and dense.bits == 8 and data.ndim == 2 and packs_weights()
        m, (k, n) = matrix.shape[0], data.shape[-2:]
        self.turns = data.stride(-2) != 1 and k > 1
        if self.by_engine and (not self.turns or bias is not None or _turns(m, k, n, out)):
            self.turned = dense_engine.TurnedCall(packed_right(matrix), n, k if self.turns else data.stride(1), out)
            # another shape, dtype or memory order of a scale or the bias is another call
            self.reads_scales = all(fits(*each) for each in ((matrix.scale, m), (dense.scale, n), (bias, m)))
        else:
            self.copy = dense_copy(matrix)

    def __call__(self, b: Tensor, col_scale: Tensor | None, bias: Tensor | None, out: Tensor | None) -> Tensor:
        m, k, n = self.sizes
        if self.turned is not None:
            lines = b.t().contiguous() if self.turns else b  # (N, K)
            if self.dtype in INTEGER_OUT:
                return self.turned(lines, None, None, None, out)
            if self.reads_scales:
                return self.turned(lines, col_scale, self.scale, bias, out)
            return self.turned(lines, as_read(col_scale, n), as_read(self.scale, m), as_read(bias, m), out)
        rows, columns = (None, None) if self.dtype in INTEGER_OUT else (self.scale, col_scale)
        if out is None:
            out = torch.empty(*self.batch, m, n, dtype=self.dtype, device=b.device)
        rows, columns = _factors(rows), _factors(columns)
        assert self.copy is not None
        if self.by_engine:
            return dense_engine.multiply(
                self.copy, dense_engine.pack_right(b), row_scale=_repeated(rows, m), col_scale=_repeated(columns, n),
                out_dtype=self.dtype, out=out,
            )  # fmt: skip
        from cute_kernels.gemm.api import gemm

        length = (k, n)[self.packed_dim] if self.bits == 4 else 0
        ints = fetch(b, length, self.bits, self.signed, self.packed_dim).view(torch.int8)  # (*batch, K, N)
        several = columns is not None and columns.ndim > 1
        added = None if bias is None else bias.float()[:, None].expand(m, n)  # (M, N)
        places = ints.reshape(-1, k, n), out.view(-1, m, n)
        scales = columns.expand(*self.batch, n).reshape(-1, n) if several and columns is not None else None
        for i, (each, target) in enumerate(zip(*places, strict=True)):
            factor = columns if scales is None else scales[i]
            gemm(self.copy, each, scale_a=rows, scale_b=factor, c=added, beta=float(added is not None), out=target,
                 out_dtype=self.dtype)  # fmt: skip
        return out


def _turns(m: int, k: int, n: int, out: torch.dtype) -> bool:
    """Whether a row-major B is turned in the call."""
    turned, packed = _row_major_costs(cpu_costs.Processor.here(), m, k, n, out in INTEGER_OUT)
    return turned <= packed


def fits(x: Tensor | None, size: int) -> bool:
    """Whether the engine reads a scale or a bias in place: float32, one or `size`, contiguous."""
    return x is None or (x.dtype is torch.float32 and (x.ndim == 0 or x.numel() == size) and x.is_contiguous())


def as_read(x: Tensor | None, size: int) -> Tensor | None:
    """A scale or a bias as the engine reads it; a copy only if it is another."""
    return x if fits(x, size) or x is None else x.detach().to(torch.float32).reshape(-1).expand(size).contiguous()


def _repeated(scale: Tensor | None, size: int) -> Tensor | None:
    """A scale or a bias as the dense kernel reads it: float32, (size,), contiguous."""
    return None if scale is None else scale.float().expand(size).contiguous()
