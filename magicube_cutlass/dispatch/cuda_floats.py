"""Products of a sparse matrix and floats on a GPU as one record: quantization and product, replayed by addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.convert import quantize as kernels
from cute_kernels.convert.quantize_transposed import quantize_transposed, serves
from cute_kernels.convert.transpose import transpose
from cute_kernels.cpu.engine import DenseOperand
from cute_kernels.jit import workspace
from cute_kernels.jit.workspace import Kept
from cute_kernels.spmm.heuristics import spmm_config
from magicube_cutlass.dispatch import cuda
from magicube_cutlass.dispatch.plan import SpmmProblem
from magicube_cutlass.formats.tracking import is_current, stamp

_REPLAYS = 32  # sets of addresses per record
_BITS = 8


def is_column_major(x: Tensor) -> bool:
    """Return whether `x` (K, N) is quantized by rows of its transpose: the output of a layer's linear predecessor."""
    return x.mT.is_contiguous()


def can_record(x: Tensor, bits: int, act_scale: Tensor | None) -> bool:
    """Return whether all that a call runs for `x` (K, N) are kernels of the library, with no copy by torch."""
    if x.ndim != 2 or x.numel() == 0 or x.dtype == torch.float64 or bits != _BITS:
        return False
    if act_scale is not None and (act_scale.dtype != torch.float32 or act_scale.numel() != 1):
        return False
    return is_column_major(x) or (x.is_contiguous() and x.shape[1] % cuda.ALIGNMENT == 0)


class QuantizedSpmm:
    """``A q(x) + bias`` for one matrix and one shape, memory layout and dtype of x (K, N); x needs no gradient.

    Parameters
    ----------
    problem : SpmmProblem
        A checked product of the matrix and the quantized `x`.
    kernel : str
        Its config.
    packed : list of Tensor
        What the kernel reads of the matrix.
    axis : int or None
        0 for per-column scales of x, None for a given one.
    bias : Tensor, shape (M,), optional
        As the caller holds it.
    x : Tensor, shape (K, N)
        For its kind.
    by_rows : bool, default False
        Calls have the transpose of x, contiguous (..., K), and return that of the product, contiguous (..., M).
    """

    def __init__(
        self,
        problem: SpmmProblem,
        kernel: str,
        packed: list[Tensor],
        axis: int | None,
        bias: Tensor | None,
        x: Tensor,
        by_rows: bool = False,
    ) -> None:
        self.bias = bias
        self._seen = stamp(self, ("bias",))
        self._float_bias = problem.bias  # float32: another tensor than `bias` if that is not
        self._kernel, self._transposes = kernel, by_rows and not spmm_config(kernel).transposed
        self._packed, self._row_scale = packed, problem.row_scale
        self._inner, self._swap, self._by_rows = x.shape[0], is_column_major(x), by_rows
        self._axis = axis if axis is None or not self._swap else 1 - axis
        self._device = x.device
        shape = problem.matrix.shape[0], x.shape[1]
        # torch makes one like it in half the time of one by numbers
        self._like = x.new_empty(1).expand(shape[::-1] if by_rows else shape)  # (M, N), or (N, M)
        self._replays = Kept(_REPLAYS)

    def __call__(self, x: Tensor, bias: Tensor | None, act_scale: Tensor | None) -> Tensor | None:
        """Return the product, or None if the bias is another one or was written to."""
        if bias is not self.bias or not is_current(self, self._seen):
            return None
        out = torch.empty_like(self._like, memory_format=torch.contiguous_format)
        addresses = x.data_ptr(), out.data_ptr(), 0 if act_scale is None else act_scale.data_ptr()
        self._replays.run(None, addresses, self._device, lambda: self._launch(x, act_scale, out))
        return out.view(*x.shape[:-1], out.shape[1]) if self._by_rows and x.ndim != 2 else out

    def _launch(self, x: Tensor, act_scale: Tensor | None, out: Tensor) -> tuple[Tensor, ...]:
        given = None if act_scale is None else act_scale.reshape(())
        if self._by_rows:
            x, out = x.reshape(-1, self._inner).mT, out.mT  # (K, N), (M, N)
        product = workspace.empty(tuple(out.shape), out.dtype, out.device) if self._transposes else out  # (M, N)
        rows = x.mT if self._swap else x
        transposes = self._swap and (given is not None or self._axis == 1) and serves(rows, given)
        if transposes:
            data, scale = quantize_transposed(rows, given)
        else:
            data, scale = kernels.quantize(rows, bits=_BITS, signed=True, axis=self._axis, scale=given)
            data = data.mT if self._swap else data  # (K, N)
        factor = scale.reshape(()) if self._axis is None else scale.reshape(-1)
        dense = DenseOperand(data, _BITS, True, -2, -1)
        cuda.spmm(
            self._kernel, self._packed, dense, self._inner, product, self._row_scale, factor, self._float_bias,
            pdl=True, padded=transposes,
        )  # fmt: skip
        if self._transposes:
            transpose(product, out.mT)
        return ()


class QuantizedColumnsSpmm:
    """``(A X * scale + bias)^T`` for one matrix and one shape and memory layout of quantized columns: contiguous rows.

    Parameters
    ----------
    problem : SpmmProblem
        A checked product of the matrix and int8 columns (K, N), or (P, K, N), those of P ranks.
    kernel : str
        Its config.
    packed : list of Tensor
        What the kernel reads of the matrix.
    bias : Tensor, shape (M,), optional
        As the caller holds it.
    """

    def __init__(self, problem: SpmmProblem, kernel: str, packed: list[Tensor], bias: Tensor | None) -> None:
        self.bias = bias
        self._seen = stamp(self, ("bias",))
        self._float_bias, self._row_scale = problem.bias, problem.row_scale
        self._kernel, self._packed, self._transposes = kernel, packed, not spmm_config(kernel).transposed
        shape = *problem.dense.shape[:-2], problem.n, problem.matrix.shape[0]
        self._like = torch.empty(1, dtype=problem.out_dtype, device=problem.matrix.device).expand(shape)  # (..., N, M)
        self._replays = Kept(_REPLAYS)

    def __call__(self, x: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor | None:
        """Return the product of columns `x` (..., K, N) and their scales () or (... N, 1) as rows (... N, M).

        None if the bias is another one. `out`: contiguous rows to write it to. Rows of `x` are padded to 16 bytes.
        """
        if bias is not self.bias or not is_current(self, self._seen):
            return None
        if out is None:
            out = torch.empty_like(self._like, memory_format=torch.contiguous_format)
        addresses = x.data_ptr(), out.data_ptr(), scale.data_ptr()
        self._replays.run(None, addresses, out.device, lambda: self._launch(x, scale, out))
        return out.view(-1, out.shape[-1])

    def _launch(self, x: Tensor, scale: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        rows = out.view(self._like.shape)  # (..., N, M)
        product = rows.mT  # (..., M, N)
        if self._transposes:
            product = workspace.empty(tuple(product.shape), out.dtype, out.device)
        factor = scale.reshape(x.shape[:-2] + x.shape[-1:]) if scale.ndim else scale
        cuda.spmm(
            self._kernel, self._packed, DenseOperand(x, _BITS, True, -2, -1), x.shape[-2], product, self._row_scale,
            factor, self._float_bias, pdl=True, padded=True,
        )  # fmt: skip
        if self._transposes:
            pairs = zip(product, rows, strict=True) if x.ndim > 2 else [(product, rows)]
            for each, to in pairs:
                transpose(each, to)
        return ()
