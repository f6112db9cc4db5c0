"""Products on a GPU: operands aligned for the kernels, arguments in order, one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.convert.pack import pack_rows
from cute_kernels.cpu.engine import DenseOperand, batch_stride
from cute_kernels.dtypes import INTEGER_OUT
from cute_kernels.integers import fetch, store
from cute_kernels.jit import Kernel, LaunchCache, get_kernel
from cute_kernels.jit.device import device_of
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg
from cute_kernels.sddmm.heuristics import SddmmKernel, sddmm_config
from cute_kernels.spmm.heuristics import SpmmKernel, spmm_config
from magicube_cutlass.dispatch.cpu import is_cacheable
from magicube_cutlass.dispatch.plan import SpmmProblem
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.quantization.float_operands import DenseFloats
from magicube_cutlass.quantization.quant_tensor import QuantTensor

ALIGNMENT = 16  # bytes; what cp.async and the tensor copy move
_CACHED_LAUNCHES = 32  # sets of addresses per cached call
_NONE = ScaleArg(0, 0, 0)


def _is_ready(rows: Tensor, any_rows: bool = False) -> bool:
    """Whether a kernel reads these rows where they are. `any_rows`: it takes any pitch and alignment."""
    size = rows.element_size()
    steps = [s for s, n in zip(rows.stride()[:-1], rows.shape[:-1], strict=True) if n > 1]
    aligned = rows.data_ptr() % ALIGNMENT == 0 and all(step * size % ALIGNMENT == 0 for step in steps)
    repeated = rows.shape[-2] > 1 and rows.stride(-2) == 0  # one row for all: no pitch for the tensor copy
    if not (any_rows or (aligned and not repeated)) or (rows.shape[-1] > 1 and rows.stride(-1) != 1):
        return False
    try:
        batch_stride(rows)
    except ValueError:
        return False
    return True


def is_column_major_bytes(rows: Tensor, any_rows: bool = False) -> bool:
    """Return whether the operand is a column-major matrix of bytes, which :func:`to_row_major` copies."""
    return rows.ndim == 2 and rows.element_size() == 1 and rows.stride(0) == 1 and not _is_ready(rows, any_rows)


def to_row_major(rows: Tensor) -> Tensor:
    """Return a row-major copy of such an operand; torch would copy byte by byte."""
    with device_of(rows):
        return pack_rows(rows.view(torch.int8)).view(rows.dtype)[:, : rows.shape[1]]


def copies(dense: DenseOperand, dim: int, any_rows: bool = False) -> bool:
    """Return whether :func:`aligned_rows` copies the operand."""
    if dense.bits == 4 and dense.packed_dim != dim:
        return True
    return not _is_ready(dense.data if dim == -1 else dense.data.mT, any_rows)


def aligned_rows(dense: DenseOperand, dim: int, length: int, any_rows: bool = False) -> Tensor:
    """Return the operand with contiguous dimension `dim` and rows at multiples of 16 bytes, or anywhere if `any_rows`.

    A view if the operand is so already, else a copy: the only workspace of the products, as large as the operand.
    `length`: integers along the packed dimension.
    """
    data = dense.data
    if dense.bits == 4 and dense.packed_dim != dim:
        data = store(fetch(data, length, 4, dense.signed, dense.packed_dim), 4, dense.signed, dim)
    rows = data if dim == -1 else data.mT
    if _is_ready(rows, any_rows):
        return rows
    if is_column_major_bytes(rows):
        return to_row_major(rows)
    if rows.dtype == torch.uint16:
        rows = rows.view(torch.int16)  # torch has few operators on uint16
    step = ALIGNMENT // rows.element_size()
    width = -(-rows.shape[-1] // step) * step
    padded = rows.new_empty((*rows.shape[:-1], width))[..., : rows.shape[-1]]
    return padded.copy_(rows)


def _place(rows: Tensor, padded: bool = False) -> DenseArg:
    """``padded``: rows go on to a multiple of 16 bytes, in memory that was made for it."""
    size, width = rows.element_size(), rows.shape[-1]
    # torch may give a single row any stride; TMA needs a pitch of whole 16 bytes
    whole = -(-width * size // ALIGNMENT) * ALIGNMENT
    pitch = rows.stride(-2) * size if rows.shape[-2] > 1 else whole
    return DenseArg(rows.data_ptr(), pitch, batch_stride(rows) * size, whole if padded else width * size)


def _factor(factor: Tensor | None) -> ScaleArg:
    if factor is None:
        return _NONE
    return ScaleArg(factor.data_ptr(), min(factor.ndim, 1), factor.shape[-1] if factor.ndim > 1 else 0)


def spmm(
    kernel: str,
    matrix: list[Tensor],
    b: DenseOperand,
    inner: int,
    out: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    bias: Tensor | None,
    pdl: bool = False,
    padded: bool = False,
) -> None:
    """Compute ``out = (A B) * row_scale * col_scale + bias`` by the named kernel, on the current stream of A's device.

    `pdl`: the launch may start before the preceding kernel ends; that kernel wrote nothing of `matrix`, or the config
    has `a_just_written`. `padded`: the rows of B go on to a multiple of 16 bytes, in memory that was made for it.
    """
    if out.numel() == 0:
        return
    if inner == 0:
        _write_empty_sums(out, row_scale, col_scale, bias)
        return
    config = spmm_config(kernel)
    ready = aligned_rows(b, -1, inner, config.any_rows)
    batch = out.numel() // (out.shape[-1] * out.shape[-2])
    target = OutputArg(out.data_ptr(), batch, out.shape[-2], inner, out.shape[-1])
    with torch.cuda.device(out.device):
        config.launch(
            get_kernel(config),
            matrix,
            _place(ready, padded=padded or copies(b, -1, config.any_rows)),
            target,
            _factor(row_scale),
            _factor(col_scale),
            bias.data_ptr() if bias is not None else 0,
            pdl,
        )


class _Call:
    """A product with checked arguments: only addresses change; launches of known addresses are replayed.

    `early`: the kernel may start before the preceding one ends. Behind a kernel that lets it, that saves about 1 us;
    behind any other it costs 0.3 us.
    """

    def __init__(self, config: SpmmKernel | SddmmKernel, out: Tensor, early: bool) -> None:
        self.device, self.early = out.device, early
        self.like = out.new_empty(1).expand(out.shape)  # torch makes one like it in half the time of one by numbers
        with torch.cuda.device(self.device):
            self.kernel = get_kernel(config)
        self.replays = LaunchCache(_CACHED_LAUNCHES)

    def launch(self, kernel: Kernel, addresses: tuple[int, ...]) -> None:
        """Launch for operands at these addresses; null for an absent one."""
        raise NotImplementedError

    def run(self, addresses: tuple[int, ...]) -> None:
        """As :meth:`launch`, with the kernel of the call."""
        launches = self.replays.get(addresses)
        if launches is None:
            with torch.cuda.device(self.device):
                self.replays.record(addresses, lambda: self.launch(self.kernel, addresses))
        else:
            for each in launches:
                self.kernel.enqueue(each)


class SpmmCall(_Call):
    """SpMM for one matrix and fixed shapes, strides, dtypes and devices of the other arguments."""

    def __init__(
        self,
        config: SpmmKernel,
        copy: list[Tensor],
        row_scale: Tensor | None,
        b: Tensor,
        col_scale: Tensor | None,
        out: Tensor,
        inner: int,
        early: bool,
    ) -> None:
        self.config, self.copy, self.row_scale = config, copy, row_scale
        super().__init__(config, out, early)
        self.turns = is_column_major_bytes(b, config.any_rows)
        rows, columns = out.shape[-2], out.shape[-1]
        self.size = (out.numel() // (rows * columns), rows, inner, columns)
        self.place = _place(to_row_major(b) if self.turns else b, padded=self.turns)[1:]
        self.row_factor = _factor(row_scale)
        self.scaled, self.col_step = col_scale is not None, 0 if col_scale is None or col_scale.ndim == 0 else 1
        self.scale: Tensor | None = None  # the matrix's own, of which `row_scale` was made

    def __call__(self, b: Tensor, col_scale: Tensor | None, bias: Tensor | None, out: Tensor | None) -> Tensor | None:
        """The product, or None where B's address asks for a copy."""
        if self.turns:
            b = to_row_major(b)  # alive until the product was enqueued
        pointer = b.data_ptr()
        if pointer % ALIGNMENT and not self.config.any_rows:
            return None
        if out is None:
            out = torch.empty_like(self.like, memory_format=torch.contiguous_format)
        factor = col_scale.data_ptr() if self.scaled and col_scale is not None else 0
        self.run((pointer, out.data_ptr(), factor, 0 if bias is None else bias.data_ptr()))
        return out

    def launch(self, kernel: Kernel, addresses: tuple[int, ...]) -> None:
        b, out, col_scale, bias = addresses
        place, target = DenseArg(b, *self.place), OutputArg(out, *self.size)
        factor = ScaleArg(col_scale, self.col_step, 0) if col_scale else _NONE
        # the copy of A was made before an earlier call, so nothing is read too soon
        self.config.launch(kernel, self.copy, place, target, self.row_factor, factor, bias, pdl=self.early)


def cached_spmm(
    problem: SpmmProblem,
    kernel: str,
    packed: list[Tensor],
    scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    early: bool,
) -> SpmmCall | None:
    """Return the call for these operands, or None if B, its scale or the bias is copied at each call."""
    dense, inner = problem.dense, problem.matrix.shape[1]
    given = DenseOperand(dense.data, dense.bits, dense.signed, -2, problem.packed_dim)
    packed_rows, config = dense.bits == 4 and problem.packed_dim != -1, spmm_config(kernel)
    copied = copies(given, -1, config.any_rows) and (packed_rows or not is_column_major_bytes(dense.data))
    if out.numel() == 0 or inner == 0 or copied:
        return None
    col_scale = None if problem.out_dtype in INTEGER_OUT else dense.scale
    if not is_cacheable(scale, problem.row_scale, col_scale, bias):
        return None
    call = SpmmCall(config, packed, problem.row_scale, dense.data, col_scale, out, inner, early)
    call.scale = scale
    return call


def _write_empty_sums(out: Tensor, row_scale: Tensor | None, col_scale: Tensor | None, bias: Tensor | None) -> None:
    """Result of empty sums: zero, NaN if a scale is, plus the bias."""
    out.zero_()
    if row_scale is not None:
        out.mul_(row_scale[:, None] if row_scale.ndim else row_scale)
    if col_scale is not None:
        out.mul_(col_scale.unsqueeze(-2) if col_scale.ndim else col_scale)
    if bias is not None:
        out.add_(bias[:, None])


def sddmm(
    kernel: str,
    pattern: list[Tensor],
    x: DenseOperand,
    y: DenseOperand,
    shape: tuple[int, int, int],
    out: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> None:
    """Compute ``out = (X Y^T) * row_scale * col_scale`` at the vectors of a pattern; all of `out` is written."""
    if out.numel() == 0:
        return
    m, n, k = shape
    ready_x, ready_y = aligned_rows(x, -1, m), aligned_rows(y, y.inner_dim, n)
    batch = out.numel() // (out.shape[-1] * out.shape[-2] * out.shape[-3])
    target = OutputArg(out.data_ptr(), batch, m, k, n)
    config = sddmm_config(kernel)
    with torch.cuda.device(out.device):
        config.launch(
            get_kernel(config),
            pattern,
            _place(ready_x),
            _place(ready_y),
            target,
            _factor(row_scale),
            _factor(col_scale),
        )


class SddmmCall(_Call):
    """SDDMM for one pattern and fixed shapes, strides and dtypes of the operands and their scales.

    `steps`: from the scale of a row to the next in X and Y, 0 for one scale, None for none.
    """

    def __init__(
        self,
        kernel: str,
        pattern: list[Tensor],
        operands: tuple[Tensor, Tensor],
        sizes: tuple[int, int, int],
        steps: tuple[int | None, int | None],
        result: SRBCRS,
        early: bool,
    ) -> None:
        values = result.values
        self.config, self.pattern, self.steps = sddmm_config(kernel), pattern, steps
        super().__init__(self.config, values, early)
        self.result = result.with_values(self.like)  # the caller's own is not held
        m, n, k = sizes
        self.size = (values[..., :1, :1, :1].numel(), m, k, n)
        self.places = _place(operands[0])[1:], _place(operands[1])[1:]

    def __call__(self, x: Tensor, y: Tensor, row_scale: Tensor | None, col_scale: Tensor | None) -> SRBCRS | None:
        """The product, or None where the address of X or Y asks for a copy."""
        at_x, at_y = x.data_ptr(), y.data_ptr()
        if at_x % ALIGNMENT or at_y % ALIGNMENT:
            return None
        out = torch.empty_like(self.like, memory_format=torch.contiguous_format)
        x_step, y_step = self.steps
        factor_x = 0 if row_scale is None or x_step is None else row_scale.data_ptr()
        factor_y = 0 if col_scale is None or y_step is None else col_scale.data_ptr()
        self.run((at_x, at_y, out.data_ptr(), factor_x, factor_y))
        return self.result.with_values(out)

    def launch(self, kernel: Kernel, addresses: tuple[int, ...]) -> None:
        x, y, out, *factors = addresses
        places = DenseArg(x, *self.places[0]), DenseArg(y, *self.places[1])
        row_scale, col_scale = (
            ScaleArg(each, step, 0) if each and step is not None else _NONE
            for each, step in zip(factors, self.steps, strict=True)
        )
        # the pattern's arrays were made before an earlier call
        target = OutputArg(out, *self.size)
        self.config.launch(kernel, self.pattern, *places, target, row_scale, col_scale, pdl=self.early)


def sddmm_call(
    kernel: str,
    pattern: list[Tensor],
    x: QuantTensor | DenseFloats,
    y: QuantTensor | DenseFloats,
    inner_y: int,
    sizes: tuple[int, int, int],
    result: SRBCRS,
    early: bool,
) -> SddmmCall | None:
    """Return the call for these operands, or None if an operand or a scale is copied at each call."""
    if result.values.numel() == 0:
        return None
    for each, dim in ((x, -1), (y, inner_y)):
        if copies(DenseOperand(each.data, each.bits, each.signed, dim, each.packed_dim), dim):
            return None
    scaled = result.values.dtype.is_floating_point
    row_scale, col_scale = (each.scale if scaled else None for each in (x, y))
    if not is_cacheable(None, None, row_scale, None) or not is_cacheable(None, None, col_scale, None):
        return None
    steps = tuple(None if scale is None else min(scale.ndim, 1) for scale in (row_scale, col_scale))
    rows = x.data, y.data if inner_y == -1 else y.data.mT
    return SddmmCall(kernel, pattern, rows, sizes, (steps[0], steps[1]), result, early)
