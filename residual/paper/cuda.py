"""Algorithm 1 by GPU kernels: passes over float32 that quantize, select and pack, and products that add corrections.

It takes float32 and shorter floats. All before the corrections is launches on memory whose size follows from shapes:
they are replayed, by a CUDA graph from the third call of a kind on. Then the host waits for the number of kept vectors.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.compensate import select
from cute_kernels.compensate.select import Found, Marks
from cute_kernels.compensate.split import Plane
from cute_kernels.dtypes import Integer
from cute_kernels.gemm.api import gemm
from cute_kernels.jit import workspace
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.machine import SAFE_RUN, Problem, ProblemTypes
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg, aligned
from cute_kernels.spmm.gather import GatherConfig, PackedGather
from cute_kernels.spmm.heuristics import choose_spmm
from magicube_cutlass.dispatch.machine import get_machine
from residual.cuda.verdict_words import Words, WordsPool
from residual.operand.decompose import refuse_nonfinite
from residual.paper.cpu import Reduction
from residual.paper.device_operand import DeviceOperand, values_of
from residual.paper.quantize import SAFE_SCALE, Quantized, Quantizer

_KINDS = 64  # of calls, whose launches a thread keeps
_ADDRESSES = 16  # of operands of a kind, likewise
Lap = Callable[[str], None]
Corrected = tuple[tuple[float, float], tuple[str, str]]  # densities and paths


class OutOfRange(Exception):
    """The scales of an operand need sums in float64."""


class _Begun(NamedTuple):
    """What was launched of a product before its corrections."""

    left: DeviceOperand
    right: DeviceOperand
    marks: tuple[Marks, Marks] | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All memory but the operands."""
        marks = self.marks or ()
        return (*self.left.tensors, *self.right.tensors, *(each for side in marks for each in side.tensors))

    def on(self, values: Sequence[Tensor], tensors: Sequence[Tensor]) -> _Begun:
        """Return the same of other operands in other memory, in the order of :attr:`tensors`."""
        rest = list(tensors)

        def take(count: int) -> list[Tensor]:
            taken = rest[:count]
            del rest[:count]
            return taken

        left = self.left.on(values[0], take(len(self.left.tensors)))
        right = self.right.on(values[1], take(len(self.right.tensors)))
        if self.marks is None:
            return _Begun(left, right, None)
        a, b = (
            Marks(side.amaxes.x, marks.across, marks.vector_length, *take(len(marks.tensors)))
            for side, marks in zip((left, right), self.marks, strict=True)
        )
        return _Begun(left, right, (a, b))


class _Kind:
    """Launches of calls of one kind, and what they made, without its memory."""

    def __init__(self) -> None:
        self.launches = workspace.Kept(_ADDRESSES, graph_after=2)
        self.made: _Begun | None = None


class _Threads(threading.local):
    """What one thread keeps."""

    def __init__(self) -> None:
        self.kinds: dict[Hashable, _Kind] = {}
        self.words = WordsPool()


_threads = _Threads()


def _levels(
    left: DeviceOperand, right: DeviceOperand, total: Tensor, reduction: Reduction, per_row: bool
) -> list[Tensor]:
    """Return what entries of A and of B are compared with, as `residual.paper.thresholds.kept_entries`."""
    threshold, (m, k), n = reduction.threshold, left.values.shape, right.values.shape[1]
    if threshold == 0:
        return [workspace.zeros((1,), torch.float32, total.device)] * 2
    if reduction.rule == "mean":
        sums = (
            select.slice_sums(left.values, of_columns=False).of_rows,
            select.slice_sums(right.values, of_rows=False).of_columns,
        )
        return select.find_levels(sums, (k, k) if per_row else (m * k, k * n), 2 * threshold, one=not per_row)
    found = select.slice_sums(total)
    return select.find_levels((found.of_rows, found.of_columns), (n, m), threshold, one=False)


def _mark(
    left: DeviceOperand, right: DeviceOperand, total: Tensor, reduction: Reduction, per_row: bool
) -> tuple[Marks, Marks]:
    """Mark the vectors of A and of B that stay."""
    levels = _levels(left, right, total, reduction, per_row)
    is_signed = reduction.rule == "example" and reduction.threshold != 0
    a, b = (
        select.mark(each.amaxes, axis, level, vector_length=reduction.vector_length, signed=is_signed)
        for axis, (each, level) in enumerate(zip((left, right), levels, strict=True))
    )
    return a, b


def _check(left: DeviceOperand, right: DeviceOperand, found: tuple[Found, Found]) -> None:
    """Raise `ValueError` for inf and NaN, `OutOfRange` for scales beyond float32 arithmetic."""
    for name, each, side in zip("AB", (left, right), found, strict=True):
        if not side.most < math.inf:
            refuse_nonfinite(each.values, name)
    for each, side in zip((left, right), found, strict=True):
        high, bounded = each.amaxes.high, side.least < math.inf
        if side.most / high >= SAFE_SCALE or (bounded and side.least / high <= 1 / SAFE_SCALE):
            raise OutOfRange


def leading_product(
    A: Tensor, B: Tensor, hows: Sequence[Quantizer], lap: Lap
) -> tuple[Tensor, DeviceOperand, DeviceOperand]:
    """Return the product of leading integers, after its scales were checked, and the operands."""
    left, right = DeviceOperand(values_of(A), hows[0], False), DeviceOperand(values_of(B), hows[1], True)
    lap("quantize")
    words = _threads.words.take()
    words.arm(left)
    select.lay_out((left.amaxes, right.amaxes), None, words.tensor)
    _check(left, right, select.read_report(words.read(A.device)))
    product = torch.empty(A.shape[0], B.shape[1], dtype=torch.float32, device=A.device)
    _add_dense(product, left.leading, right.leading, beta=0.0)
    lap("product")
    return product, left, right


def corrected_product(
    A: Tensor, B: Tensor, hows: Sequence[Quantizer], reduction: Reduction, lap: Lap, in_steps: bool
) -> tuple[Tensor, Corrected]:
    """Return the product with its corrections, their densities and paths; `in_steps`: launch by launch, for `lap`."""
    values = values_of(A), values_of(B)
    product = torch.empty(A.shape[0], B.shape[1], dtype=torch.float32, device=A.device)
    words = _threads.words.take()
    words.arm(product)
    if in_steps:
        begun = _begin(values, product, words, hows, reduction, lap)
    else:
        begun = _replay(values, product, words, hows, reduction)
    numbers = words.read(A.device)
    lap("select")
    return product, _finish(product, begun, numbers, reduction, lap)


def correct_copy(
    total: Tensor, left: DeviceOperand, right: DeviceOperand, reduction: Reduction, per_row: bool, lap: Lap
) -> Corrected:
    """Add the corrections to a copy of the leading product, in place; return densities and paths."""
    words = _threads.words.take()
    words.arm(total)
    begun = _select(total, left, right, words, reduction, per_row)
    numbers = words.read(total.device)
    lap("select")
    return _finish(total, begun, numbers, reduction, lap)


def _begin(
    values: tuple[Tensor, Tensor],
    product: Tensor,
    words: Words,
    hows: Sequence[Quantizer],
    reduction: Reduction,
    lap: Lap,
) -> _Begun:
    """Launch all that does not depend on what is kept."""
    left, right = DeviceOperand(values[0], hows[0], False), DeviceOperand(values[1], hows[1], True)
    lap("quantize")
    _add_dense(product, left.leading, right.leading, beta=0.0)
    lap("product")
    return _select(product, left, right, words, reduction, hows[0].axis is not None)


def _select(
    total: Tensor, left: DeviceOperand, right: DeviceOperand, words: Words, reduction: Reduction, per_row: bool
) -> _Begun:
    """Launch the selection, and behind its report, while the host waits, the residuals that sparse products read."""
    marks = None if reduction.threshold == math.inf else _mark(left, right, total, reduction, per_row)
    select.lay_out((left.amaxes, right.amaxes), marks, words.tensor)
    if marks is not None and reduction.eta > 0:
        for operand in (left, right):
            _ = operand.sparse_residual
    return _Begun(left, right, marks)


def _replay(
    values: tuple[Tensor, Tensor], product: Tensor, words: Words, hows: Sequence[Quantizer], reduction: Reduction
) -> _Begun:
    """Launch as :func:`_begin`, by the launches of an earlier call where all addresses are equal."""
    A, B = values
    stream = torch._C._cuda_getCurrentRawStream(A.get_device())
    key = A.shape, A.stride(), B.shape, B.stride(), *hows, reduction, A.get_device(), stream
    kind = _threads.kinds.get(key)
    if kind is None:
        if len(_threads.kinds) >= _KINDS:
            _threads.kinds.clear()
        kind = _threads.kinds[key] = _Kind()
    made: list[_Begun] = []

    def launch() -> tuple[Tensor, ...]:
        made.append(_begin(values, product, words, hows, reduction, lambda step: None))
        return made[0].tensors

    addresses = A.data_ptr(), B.data_ptr(), product.data_ptr(), words.address
    tensors = kind.launches.run(0, addresses, A.device, launch)
    if kind.made is None:
        nothing = A.new_empty(0, 0)
        kind.made = made[0].on((nothing, nothing), [nothing] * len(tensors))
    return kind.made.on(values, tensors)


def _finish(total: Tensor, begun: _Begun, numbers: list[float], reduction: Reduction, lap: Lap) -> Corrected:
    """Add the corrections to the product in place, lines 8 to 17; return densities and paths."""
    left, right, marks = begun
    found = select.read_report(numbers)
    _check(left, right, found)
    if marks is None:
        return (0.0, 0.0), ("none", "none")
    a, b = (_density(*each) for each in zip(marks, found, strict=True))
    if max(a, b) == 0:
        return (a, b), ("none", "none")
    if max(a, b) >= reduction.eta:
        _add_dense(total, left.leading, right.residual)
        _add_dense(total, left.residual, right.leading)
        lap("correct")
        return (a, b), ("gemm", "gemm")
    if a:
        _add_sparse(total, marks[0], found[0], right.sparse_residual, right, False, lap)
    if b:
        _add_sparse(total, marks[1], found[1], left.sparse_residual, left, True, lap)
    return (a, b), ("spmm" if a else "none", "spmm" if b else "none")


def _add_dense(total: Tensor, lhs: Quantized, rhs: Quantized, beta: float = 1.0) -> None:
    """Write `beta` times `total` plus the dequantized product of integers to `total`, float32 (M, N)."""
    scales = [side.scale.flatten() if side.scale.dim() else side.scale for side in (lhs, rhs)]
    gemm(
        lhs.integers, rhs.integers, scale_a=scales[0], scale_b=scales[1], out=total,
        c=total if beta else None, beta=beta, out_dtype=torch.float32,
    )  # fmt: skip


def _density(marks: Marks, found: Found) -> float:
    """Kept share of an operand, by entries."""
    absent = -marks.slices % marks.vector_length
    return (found.vectors * marks.vector_length - found.last * absent) / max(marks.x.numel(), 1)


def _add_sparse(
    total: Tensor,
    marks: Marks,
    found: Found,
    dense: Plane,
    other: DeviceOperand,
    turned: bool,
    lap: Lap,
) -> None:
    """Add what is kept of A times the residual of B; `turned`: the residual of A times what is kept of B."""
    packed = select.pack_marked(marks, found, truncate=other.truncate)
    lap("compress")
    multiply(total, packed, marks, _by_rows(dense, turned), dense.scales32, turned)
    lap("correct")


def _by_rows(plane: Plane, turned: bool) -> Tensor:
    """Return a residual as (K, columns), with contiguous rows."""
    return plane.integers.t() if turned else plane.integers


def multiply(total: Tensor, packed: PackedGather, marks: Marks, rhs: Tensor, rhs_scales: Tensor, turned: bool) -> None:
    """Add what is packed times int8 `rhs` (K, columns), contiguous rows, to `total`; if `turned`, its transpose."""
    rows, (inner, columns) = marks.slices, rhs.shape
    capacity = 1 << (len(packed.columns) - 1).bit_length()  # few capacities, so that few are chosen for
    with device_of(total):
        config = _config(
            marks.vector_length, total.device.index, turned, marks.words.shape[0], inner, capacity, columns
        )
        config.launch(
            get_kernel(config),
            packed,
            DenseArg(rhs.data_ptr(), rhs.stride(0) if inner > 1 else aligned(columns), 0, aligned(columns)),
            OutputArg(total.data_ptr(), 1, rows, inner, columns),
            _scales(marks.scales32),
            _scales(rhs_scales),
            0,
        )


def _scales(scales: Tensor) -> ScaleArg:
    return ScaleArg(scales.data_ptr(), int(len(scales) > 1), 0)


@lru_cache(maxsize=1024)
def _config(
    vector_length: int, device: int, turned: bool, vector_rows: int, inner: int, vectors: int, columns: int
) -> GatherConfig:
    """Return the config that adds to the output, or to its transpose, for about so many vectors."""
    int8 = Integer(8, True)
    longest = min(inner, SAFE_RUN, 4 * -(-vectors // vector_rows))  # int32 holds MAX_K products of integers below 128
    sizes = Problem(vector_rows, inner, vectors, longest, columns)
    found = choose_spmm(ProblemTypes(vector_length, int8, int8, "float32"), get_machine(device), sizes, None, True)
    assert isinstance(found, GatherConfig)
    return replace(found, accumulate=True, transposed=turned)
