"""The CPU engine: integer SpMM and SDDMM on SR-BCRS and quantization in C++17, one build for each instruction set.

The path is chosen at run time: ``avx512`` (AVX512-VNNI), ``avx2`` or ``portable``.  ``MAGICUBE_CPU`` forces one and
``MAGICUBE_ENGINE`` names another build of the extension (a sanitizer build, say).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from cute_kernels.integers import digit_count

OUT_TYPES = {torch.int32: 0, torch.int64: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}
_SERIAL_WORK = 1 << 21  # multiply-adds below which starting a thread costs more than it saves
_WORK_OF_ENTRY = 16  # multiply-adds that quantizing an entry is worth


@cache
def _extension() -> ModuleType | None:
    name, place = "cute_kernels.cpu._engine", os.environ.get("MAGICUBE_ENGINE")
    if place:
        loader = importlib.machinery.ExtensionFileLoader(name, place)
        spec = importlib.util.spec_from_file_location(name, place, loader=loader)
        if spec is None:
            raise ImportError(f"MAGICUBE_ENGINE={place} is no extension module")
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def available() -> bool:
    """Whether the compiled engine is there; without it the products fall back to the int64 reference."""
    return _extension() is not None


def _loaded() -> ModuleType:
    module = _extension()
    if module is None:
        raise RuntimeError("the compiled CPU engine is missing; reinstall with a C++17 compiler: pip install .")
    return module


def isas() -> list[str]:
    """Names of the engine paths that this machine can run, fastest first; empty without the extension."""
    return list(_loaded().paths()) if available() else []


def isa() -> str:
    """The engine path in use.  Raises ``ValueError`` when ``MAGICUBE_CPU`` names one that cannot run here."""
    usable, forced = isas(), os.environ.get("MAGICUBE_CPU")
    if forced is None:
        return usable[0] if usable else "reference"
    if forced not in usable:
        raise ValueError(f"MAGICUBE_CPU must be one of {usable} on this machine, got {forced!r}")
    return forced


@dataclass(frozen=True)
class SparseOperand:
    """The sparse operand as the engine reads it.

    ``planes``: (digits, blocks, V, stride) bytes; ``row_sums``: (digits, R, V) int64, the sums of each row's digits.
    """

    row_start: Tensor
    row_end: Tensor
    col_indices: Tensor
    planes: Tensor
    row_sums: Tensor
    rows: int
    columns: int
    bits: int
    signed: bool


@dataclass(frozen=True)
class DenseOperand:
    """A dense integer operand ``(*batch, outer, inner)`` or its transpose, in storage form.

    ``inner_dim`` (-1 or -2) is the dimension that is summed over; ``packed_dim`` the one along which 4-bit integers
    are packed.
    """

    data: Tensor
    bits: int
    signed: bool
    inner_dim: int
    packed_dim: int


def row_sums(planes: Tensor, row_start: Tensor, signed: bool) -> Tensor:
    """Sums of each row's digits: ``planes`` (digits, blocks, V, stride) uint8 -> (digits, R, V) int64."""
    digits, blocks, v, stride = planes.shape
    sums = planes.sum(-1, dtype=torch.int64)  # (digits, blocks, V)
    if signed:  # the top digit alone has a sign
        sums[-1] = planes[-1].view(torch.int8).sum(-1, dtype=torch.int64)
    first = row_start // stride  # (R,)
    owner = torch.searchsorted(first, torch.arange(blocks, device=planes.device), right=True) - 1  # (blocks,)
    out = torch.zeros(digits, row_start.numel(), v, dtype=torch.int64, device=planes.device)
    return out.index_add_(1, owner, sums)


def run_dim(dense: DenseOperand) -> int:
    """The dimension (-1 or -2) along which the operand is contiguous.  Raises ``ValueError`` when there is none."""
    stride = dense.data.stride()
    if dense.bits == 4:
        if stride[dense.packed_dim] != 1 and dense.data.shape[dense.packed_dim] > 1:
            raise ValueError(f"a 4-bit operand must be contiguous along its packed dimension, got strides {stride}")
        return dense.packed_dim
    for dim in (-1, -2):
        if stride[dim] == 1 or dense.data.shape[dim] == 1:
            return dim
    raise ValueError(f"a dense operand must be row- or column-major, got strides {stride}: call .contiguous()")


def batch_stride(data: Tensor) -> int:
    """Elements from one matrix of the batch to the next.  Raises ``ValueError`` when no single step does it."""
    sizes, strides = data.shape[:-2], data.stride()[:-2]
    steps = [(n, s) for n, s in zip(sizes, strides, strict=True) if n != 1]
    for (_, outer), (n, inner) in pairwise(steps):
        if outer != n * inner:
            raise ValueError(f"the batch dimensions of an operand must collapse to one, got strides {data.stride()}")
    return steps[-1][1] if steps else 0


def _form(dense: DenseOperand) -> tuple[int, int, bool, int, bool]:
    """What the engine is told of an operand besides its address."""
    run, size = run_dim(dense), dense.data.element_size()
    across = -3 - run  # the other one of -1 and -2
    steps = batch_stride(dense.data) * size, dense.data.stride(across) * size
    return (*steps, run == dense.inner_dim, dense.bits, dense.signed)


def _operand(dense: DenseOperand) -> object:
    return _loaded().Operand(dense.data.data_ptr(), *_form(dense))


def _scales(left: Tensor | None, right: Tensor | None, bias: Tensor | None) -> object:
    pointers = [0 if t is None else t.data_ptr() for t in (left, right, bias)]
    steps = [t.shape[-1] if t is not None and t.ndim > 1 else 0 for t in (left, right)]
    return _loaded().Scales(*pointers, *steps)


def _threads(work: int) -> int:
    return torch.get_num_threads() if work >= _SERIAL_WORK else 1


class SpmmCall:
    """:func:`spmm` for one sparse operand and one form of the others: to place pointers is all that a call has to do.

    The other tensors of a call must have the shapes, strides and dtypes of those given here.
    """

    def __init__(self, a: SparseOperand, b: DenseOperand, out: Tensor) -> None:
        _, blocks, v, stride = a.planes.shape
        self._kept = a  # its tensors are pointed to
        self._sparse = _loaded().Sparse(
            row_start=a.row_start.data_ptr(),
            row_end=a.row_end.data_ptr(),
            columns=a.col_indices.data_ptr(),
            planes=a.planes.data_ptr(),
            row_sums=a.row_sums.data_ptr(),
            plane_bytes=blocks * v * stride,
            vector_rows=a.row_start.numel(),
            rows=a.rows,
            columns_total=a.columns,
            vector_length=v,
            stride=stride,
            bits=a.bits,
            is_signed=a.signed,
        )
        n, batch = out.shape[-1], out.shape[:-2].numel()
        self._b, self._out = _form(b), (OUT_TYPES[out.dtype], n, batch)
        self._work = blocks * v * stride * n * batch * a.planes.shape[0] * -(-b.bits // 8)  # products of digits

    def __call__(self, b: Tensor, out: Tensor, left: Tensor | None, right: Tensor | None, bias: Tensor | None) -> None:
        """As :func:`spmm`."""
        engine = _loaded()
        operand, scales = engine.Operand(b.data_ptr(), *self._b), _scales(left, right, bias)
        engine.spmm(isa(), self._sparse, operand, scales, out.data_ptr(), *self._out, _threads(self._work))


def spmm(
    a: SparseOperand, b: DenseOperand, out: Tensor, left: Tensor | None, right: Tensor | None, bias: Tensor | None
) -> None:
    """``out = (A B) * left * right + bias``; ``out`` (*batch, M, N) contiguous, of a dtype in :data:`OUT_TYPES`.

    ``left``: (M,) float32, ``right``: (N,) or (batch, N) float32, ``bias``: (M,) float32, each contiguous or None.
    """
    SpmmCall(a, b, out)(b.data, out, left, right, bias)


def sddmm(
    x: DenseOperand,
    y: DenseOperand,
    row_start: Tensor,
    row_end: Tensor,
    col_indices: Tensor,
    out: Tensor,
    shape: tuple[int, int, int],
    left: Tensor | None,
    right: Tensor | None,
) -> None:
    """``out`` (batch, blocks, V, stride), zero on entry, gets ``(X Y^T) * left * right`` at the pattern's vectors.

    ``shape`` is (M, N, K); ``left``: (M,) or (batch, M), ``right``: (N,) or (batch, N) float32, contiguous or None.
    """
    batch, blocks, v, stride = out.shape
    m, n, k = shape
    threads = _threads(blocks * v * stride * k * batch * digit_count(x.bits) * digit_count(y.bits))
    _loaded().sddmm(
        path=isa(),
        x=_operand(x),
        y=_operand(y),
        row_start=row_start.data_ptr(),
        row_end=row_end.data_ptr(),
        columns=col_indices.data_ptr(),
        scales=_scales(left, right, None),
        out=out.data_ptr(),
        out_batch=blocks * v * stride,
        out_type=OUT_TYPES[out.dtype],
        vector_rows=row_start.numel(),
        rows=m,
        n=n,
        inner=k,
        batch=batch,
        vector_length=v,
        stride=stride,
        threads=threads,
    )


NEGATIVE, NONFINITE = 1, 2


def quantize(
    x: Tensor, out: Tensor, scale: Tensor, *, bits: int, signed: bool, truncate: bool, given: bool, mode: int
) -> int:
    """One pass over ``x`` (rows, columns), row-major float32 or float64: integers to ``out``, scales to ``scale``.

    ``mode``: 0 one scale, 1 one a row, 2 one a column; ``given`` scales are read instead of computed.  Returns flags:
    :data:`NEGATIVE` when an entry is below zero, :data:`NONFINITE` when one is inf or NaN.
    """
    rows, columns = x.shape
    return int(
        _loaded().quantize(
            path=isa(),
            x=x.data_ptr(),
            out=out.data_ptr(),
            scale=scale.data_ptr(),
            rows=rows,
            columns=columns,
            row_elements=x.stride(0),
            out_row_bytes=out.stride(0) * out.element_size(),
            bits=bits,
            is_double=x.dtype == torch.float64,
            is_signed=signed,
            truncate=truncate,
            given_scale=given,
            scale_mode=mode,
            threads=_threads(_WORK_OF_ENTRY * rows * columns),
        )
    )


def digits(
    x: Tensor,
    count: int,
    axis: int | None,
    *,
    high: float,
    radix: float,
    ahead: tuple[float, float] = (0.0, 0.0),
    power: bool = False,
    exact: bool = False,
    truncate: bool = False,
    limit: float = 0.0,
) -> tuple[tuple[Tensor, ...], Tensor, int]:
    """Digit planes of ``x`` (rows, columns) float32, their scale and the flags, in two passes over ``x`` at most.

    ``axis``: 1 for a scale a row, 0 a column, None one.  ``high``: what the largest magnitude becomes; ``radix``: steps
    of a digit in one of the digit before it.  The operations are those of ``_split`` in ``gemm_digits.py`` (``ahead``
    and ``power`` as there), or with ``exact`` those of :func:`residual.decompose` (two digits, ``truncate`` or to
    nearest, cut to ``limit``), where scales are float64.
    Returns int8 planes that lie as ``x`` does where one of its dimensions is contiguous, the scale (rows,), (columns,)
    or (), and :data:`NONFINITE` or 0.
    """
    if x.stride(1) != 1 and x.shape[1] > 1:
        if x.stride(0) == 1 or x.shape[0] == 1:
            turned = None if axis is None else 1 - axis
            planes, scale, flags = digits(
                x.t(), count, turned, high=high, radix=radix, ahead=ahead, power=power, exact=exact, truncate=truncate,
                limit=limit,
            )  # fmt: skip
            return tuple(plane.t() for plane in planes), scale, flags
        x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty(count, rows, columns, dtype=torch.int8)
    size = () if axis is None else (x.shape[1 - axis],)
    scale = torch.empty(size, dtype=torch.float64 if exact else torch.float32)
    flags = _loaded().digits(
        path=isa(),
        x=x.data_ptr(),
        planes=out.data_ptr(),
        scale=scale.data_ptr(),
        rows=rows,
        columns=columns,
        row_elements=x.stride(0),
        out_row_bytes=columns,
        plane_bytes=rows * columns,
        count=count,
        exact=exact,
        high=high,
        radix=radix,
        ahead0=ahead[0],
        ahead1=ahead[1],
        power=power,
        truncate=truncate,
        limit=limit,
        scale_mode={None: 0, 1: 1, 0: 2}[axis],
        threads=_threads(_WORK_OF_ENTRY * count * rows * columns),
    )
    return tuple(out.unbind(0)), scale, int(flags)


_WORK_OF_COLUMN = 1 << 14  # multiply-adds that ordering one is worth


def spread_slots(until: Tensor, first: Tensor, order: Tensor, group: int, window: int, slots: Tensor) -> None:
    """Fill ``slots``; shapes as in ``layout/column_order.cuh``."""
    rows, tiles = until.shape[:2]
    threads = _threads(_WORK_OF_COLUMN * order.numel())
    _loaded().spread_slots(
        until.data_ptr(), first.data_ptr(), order.data_ptr(), rows, tiles, group, window, slots.data_ptr(), threads
    )


def _rows_of(x: Tensor) -> Tensor:
    """``x`` (M, K) with contiguous rows."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def compress(ints: Tensor, mask: Tensor, vector_length: int, stride: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The vectors with a true element in ``mask``, their values zero where it is false.

    ``ints``: (M, K) of one or two bytes an entry; ``mask``: bool (M, K); neither empty.  Returns ``row_start`` and
    ``row_end``, int64 (R,), ``col_indices``, int32, and the values (blocks, V, stride) of the dtype of ``ints``.
    """
    ints, mask = _rows_of(ints), _rows_of(mask)
    m, k = ints.shape
    count = -(-m // vector_length)
    lengths = torch.empty(count, dtype=torch.int64)

    def run(lengths: Tensor | None, starts: Tensor | None, columns: Tensor | None, values: Tensor | None) -> None:
        addresses = [0 if t is None else t.data_ptr() for t in (lengths, starts, columns, values)]
        _loaded().compress(
            isa(), mask.data_ptr(), ints.data_ptr(), m, k, mask.stride(0), ints.stride(0) * ints.element_size(),
            ints.element_size(), vector_length, stride, *addresses, _threads(4 * m * k),
        )  # fmt: skip

    run(lengths, None, None, None)
    starts = torch.zeros(count + 1, dtype=torch.int64)
    torch.cumsum((lengths + stride - 1) // stride * stride, 0, out=starts[1:])
    total = int(starts[-1])
    columns = torch.empty(total, dtype=torch.int32)
    values = torch.empty(total // stride, vector_length, stride, dtype=ints.dtype)
    run(None, starts, columns, values)
    start = starts[:-1]
    return start, start + lengths, columns, values
