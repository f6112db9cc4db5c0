"""A rank's part of a weight: its products with quantized tokens, their gradients, and its integers made anew."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cute_kernels.gemm.api import gemm
from cute_kernels.jit.workspace import Kept
from cute_kernels.operands import ALIGNMENT
from magicube_cutlass.autograd.gpu_rows import multiply_columns, sparse_rows
from magicube_cutlass.autograd.integer import (
    STRIDE,
    _check_values,
    _product,
    dense_of,
    gradient_of_values,
    quantize_vectors,
    quantized,
    spmm_of,
    through_transpose,
    times,
    vectors_at,
)
from magicube_cutlass.checks import has_dispatch_mode
from magicube_cutlass.dispatch.cpu_linear import kind_of
from magicube_cutlass.dispatch.register import register_op
from magicube_cutlass.distributed.collectives import all_reduce
from magicube_cutlass.distributed.cut_tokens import CutTokens
from magicube_cutlass.distributed.slices import (
    Slices,
    is_eager_on_gpu,
    largest,
    quantize_by_scale,
    quantize_slices,
    scaled,
    sum_dtype,
)
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.construct import Parts
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.nn.dense.product import DenseProduct
from magicube_cutlass.ops.spmm import early_spmm
from magicube_cutlass.quantization.group_tensor import GroupTensor


def _addresses(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if each is None else each.data_ptr() for each in tensors)


class LayerPart(ABC):
    """Rows or columns of a weight (out, in) as integers; tokens and products are rows."""

    sums_are_columns = False  # in memory, (out, tokens)
    bounds: tuple[int, ...]  # cuts of the outputs or inputs
    scale: Tensor | None  # (out, 1)
    shape: tuple[int, int]  # of this part

    def __init__(self) -> None:
        self._cuts: dict[Hashable, CutTokens | None] = {}  # by group and kind of this rank's tokens

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""

    @abstractmethod
    def with_tensors(self, tensors: Mapping[str, Any]) -> LayerPart:
        """Return the part with its tensors elsewhere."""

    @abstractmethod
    def remade(self, weight: Tensor, rowwise: bool, mesh: DeviceMesh) -> LayerPart:
        """Return the integers of another master; for columns, rows have the amax of all ranks."""

    @abstractmethod
    def run(self, x: Tensor, bias: Tensor | None, bits: int, act_scale: Tensor | None) -> Tensor:
        """Quantize tokens (tokens, K) by their own scales, and multiply as one process does: (tokens, out)."""

    @abstractmethod
    def gradient_of_input(self, grad: Tensor, dtype: torch.dtype, bits: int | None) -> Tensor:
        """Return ``grad A``, (tokens, K)."""

    @abstractmethod
    def gradient_of_weight(self, grad: Tensor, tokens: Slices, bits: int | None) -> Tensor:
        """Return ``grad^T tokens``, (out, K)."""

    @abstractmethod
    def _multiply(self, x: Slices, dtype: torch.dtype, bias: Tensor | None, out: Tensor | None) -> Tensor: ...

    @abstractmethod
    def _sums(self, x: Slices, dtype: torch.dtype, out: Tensor | None = None) -> Tensor: ...

    def check_input(self, x: Tensor) -> None:
        """Raise `ValueError` unless `x` has the inputs of this part."""
        if x.shape[-1:] != (self.shape[1],):
            raise ValueError(f"x must have {self.shape[1]} features on this rank, got shape {tuple(x.shape)}")

    def multiply(self, x: Slices, dtype: torch.dtype, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Return ``x A^T + bias`` of quantized tokens (tokens, K): (tokens, out); `out`: rows to write it to."""
        if x.data.numel() and self.shape[0]:
            found = self._multiply(x, dtype, bias, out)
        else:
            found = torch.zeros(x.data.shape[0], self.shape[0], dtype=dtype, device=x.data.device)
            found = found if bias is None else found + bias.to(dtype)
        return found if out is None or found is out else out.copy_(found)

    def multiply_floats(
        self,
        rows: Tensor,
        scale: Tensor,
        bits: int,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the same of float tokens (tokens, K) and their scales, (tokens, 1) or ()."""
        return self.multiply(quantize_by_scale(rows, scale, bits), dtype, bias, out)

    def multiply_cut(
        self, rows: Tensor, act_scale: Tensor | None, mesh: DeviceMesh, bias: Tensor | None, overlaps: bool
    ) -> Tensor | None:
        """Return the product of all ranks' tokens, (ranks tokens, out), from this rank's on a GPU, quantized to int8.

        Each rank quantizes its own into the memory where all ranks' are gathered. None where that has no kernels, the
        same on all ranks. `overlaps`: the product of this rank's own tokens runs beside the gather, as it always does
        beside copies.
        """
        served = is_eager_on_gpu(rows) and rows.numel() and self.shape[0] and rows.dtype != torch.float64
        if not served or (act_scale is not None and (act_scale.dtype != torch.float32 or act_scale.numel() != 1)):
            return None
        if not rows.is_contiguous() or rows.data_ptr() % ALIGNMENT:
            rows = rows.clone(memory_format=torch.contiguous_format)  # so that all ranks choose alike
        key = mesh.get_group(), rows.shape, rows.dtype, act_scale is None
        if key not in self._cuts:
            self._cuts[key] = self._cut_tokens(rows, act_scale, mesh)
        cut = self._cuts[key]
        if cut is None:
            return None
        rank, ranks = mesh.get_local_rank(), mesh.size()
        data, scale, start = cut.memory()
        self._quantize_own(rows, act_scale, data[rank], None if scale is None else scale[rank], cut.launches)
        finish = start()
        y = rows.new_empty(ranks, rows.shape[0], self.shape[0])  # (ranks, tokens, out)
        overlaps = overlaps or cut.by_copies
        pieces = [(rank, rank + 1), (0, rank), (rank + 1, ranks)] if overlaps else [(0, ranks)]
        for i, (first, last) in enumerate(pieces):
            if i == int(overlaps):
                finish()
            if first < last:
                by = act_scale if scale is None else scale[first:last].view(-1, 1)
                assert by is not None
                self._multiply_gathered(data[first:last], by, bias, y[first:last])
        return y.view(-1, self.shape[0])

    def _cut_tokens(self, rows: Tensor, act_scale: Tensor | None, mesh: DeviceMesh) -> CutTokens | None:
        """Where the integers of all ranks' tokens go; None without kernels for them."""
        return CutTokens(rows.shape, rows.shape[0], rows.device, act_scale is None, mesh)

    def _quantize_own(
        self, rows: Tensor, act_scale: Tensor | None, data: Tensor, scale: Tensor | None, launches: Kept
    ) -> None:
        """Write this rank's integers and scales."""
        from cute_kernels.convert.quantize import quantize

        def launch() -> tuple[Tensor, ...]:
            quantize(rows, bits=8, signed=True, axis=None if scale is None else 1, scale=act_scale, out=(data, scale))
            return ()

        launches.run(None, _addresses(rows, act_scale, data, scale), rows.device, launch)

    def _multiply_gathered(self, data: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Write the product of the tokens of some ranks, `data` (ranks, ...), to `out` (ranks, tokens, out)."""
        rows = data.view(-1, self.shape[1])  # (ranks tokens, K)
        self._multiply(Slices(rows, scale, 8), out.dtype, bias, out.view(-1, self.shape[0]))

    def sums(self, x: Slices, inner: int, out: Tensor | None = None) -> Tensor:
        """Return the unscaled sums (tokens, out) of this part of `inner` inputs; `out`: where to, on a GPU.

        `out` is of the memory order that :attr:`sums_are_columns` tells.
        """
        dtype = sum_dtype(inner, 8, x.bits)
        if not (x.data.numel() and self.shape[0]):
            return torch.zeros(x.data.shape[0], self.shape[0], dtype=dtype, device=x.data.device)
        return self._sums(x, dtype, out)

    def scale_sums(self, sums: Tensor, act_scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return complete sums (tokens, out) scaled as the kernels of one process do it."""
        scale = None if self.scale is None else self.scale.mT
        return scaled(sums, scale, act_scale, bias, dtype)

    def __repr__(self) -> str:
        return f"{self.shape[0]} x {self.shape[1]}"


def rows_of(product: Tensor, out: Tensor | None = None) -> Tensor:
    """The product (M, N) of a kernel as rows (N, M): contiguous on a GPU, by one launch; `out`: where to."""
    if not product.is_cuda or not product.is_contiguous() or product.element_size() not in (2, 4) or (
        torch.compiler.is_compiling() or has_dispatch_mode() or not product.numel()
    ):  # fmt: skip
        return product.mT
    from cute_kernels.convert.transpose import transpose

    if out is None or not out.is_contiguous():
        out = product.new_empty(product.shape[::-1])
    transpose(product, out)
    return out


def _serves(rows: Tensor, scale: Tensor | None) -> bool:
    from cute_kernels.convert.quantize_transposed import serves

    return serves(rows, scale)


class SparsePart(LayerPart):
    """Of a sparse weight."""

    sums_are_columns = True

    def __init__(self, matrix: SRBCRS | BCRS, bounds: tuple[int, ...]) -> None:
        super().__init__()
        matrix = matrix if isinstance(matrix, SRBCRS) else matrix.to_srbcrs()
        self.matrix, self.bounds = matrix, bounds
        self.scale, self.shape = matrix.scale, matrix.shape
        self.plain = matrix if matrix.scale is None else matrix._rows(matrix.pattern, matrix.vectors(), None)

    def tensors(self) -> dict[str, Tensor]:
        return self.matrix._tensors()

    def with_tensors(self, tensors: Mapping[str, Any]) -> SparsePart:
        made: Any = type(self.matrix)(**tensors, **self.matrix._fields())
        return SparsePart(made._trust(), self.bounds)

    def remade(self, weight: Tensor, rowwise: bool, mesh: DeviceMesh) -> SparsePart:
        pattern, bits = self.matrix.pattern, self.matrix.bits or 8
        values = _check_values(vectors_at(weight.detach(), pattern), pattern)
        shared = (lambda top: all_reduce(top, "max", mesh)) if rowwise else None
        ints, scale = quantize_vectors(values, pattern, bits, shared)
        return SparsePart(SRBCRS._from_parts(Parts(pattern, ints, scale), bits, True, STRIDE), self.bounds)

    def run(self, x: Tensor, bias: Tensor | None, bits: int, act_scale: Tensor | None) -> Tensor:
        if not (x.numel() and self.shape[0]):
            return self.multiply(Slices(x.to(torch.int8), None, 8), x.dtype, bias)
        if x.is_cuda and not torch.compiler.is_compiling():
            return sparse_rows(self.matrix, x, bias, act_scale, bits, None)
        return spmm_of(self.matrix, x.mT, None, bias, bits, 0, act_scale, None).mT

    def gradient_of_input(self, grad: Tensor, dtype: torch.dtype, bits: int | None) -> Tensor:
        return through_transpose(self.matrix, times(grad.mT, self.matrix.scale), dtype, bits).mT

    def gradient_of_weight(self, grad: Tensor, tokens: Slices, bits: int | None) -> Tensor:
        pattern = self.matrix.pattern
        return dense_of(gradient_of_values(grad.mT, tokens.operand().mT, pattern, bits), pattern)

    def _multiply(self, x: Slices, dtype: torch.dtype, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if is_eager_on_gpu(x.data) and x.data.dtype == torch.int8 and x.scale is not None and x.data.is_contiguous():
            from magicube_cutlass.dispatch.cuda import to_row_major

            found = multiply_columns(self.matrix, to_row_major(x.data.mT), x.scale, dtype, bias, out)
            if found is not None:
                return found
        return rows_of(_product(self.matrix, x.operand().mT, dtype, bias), out)

    def multiply_floats(
        self,
        rows: Tensor,
        scale: Tensor,
        bits: int,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if is_eager_on_gpu(rows) and bits == 8 and self.shape[0] and _serves(rows, scale):
            from cute_kernels.convert.quantize_transposed import quantize_transposed

            data, by = quantize_transposed(rows, scale)  # (K, tokens)
            found = multiply_columns(self.matrix, data, by, dtype, bias, out)
            if found is not None:
                return found
        return super().multiply_floats(rows, scale, bits, dtype, bias, out)

    def _cut_tokens(self, rows: Tensor, act_scale: Tensor | None, mesh: DeviceMesh) -> CutTokens | None:
        if rows.shape[0] % ALIGNMENT or not _serves(rows, act_scale):
            return None
        columns = torch.Size((rows.shape[1], rows.shape[0]))
        return CutTokens(columns, rows.shape[0], rows.device, act_scale is None, mesh)

    def _quantize_own(
        self, rows: Tensor, act_scale: Tensor | None, data: Tensor, scale: Tensor | None, launches: Kept
    ) -> None:
        from cute_kernels.convert.quantize_transposed import quantize_transposed

        def launch() -> tuple[Tensor, ...]:
            quantize_transposed(rows, act_scale, data, scale)
            return ()

        launches.run(None, _addresses(rows, act_scale, data, scale), rows.device, launch)

    def _multiply_gathered(self, data: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        found = multiply_columns(self.matrix, data, scale, out.dtype, bias, out.view(-1, self.shape[0]))
        assert found is not None  # the operands are of the kernels' kind

    def _sums(self, x: Slices, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        into = None if out is None else out.mT
        return early_spmm(self.plain, x._replace(scale=None).operand().mT, dtype, out=into).mT


class DensePart(LayerPart):
    """Of a dense weight of 8 bits."""

    def __init__(self, data: Tensor, scale: Tensor, bounds: tuple[int, ...]) -> None:
        super().__init__()
        self.data, self.scale, self.bounds = data, scale, bounds
        self.shape = data.shape[0], data.shape[1]
        self._whole: DenseProduct | None = None

    def tensors(self) -> dict[str, Tensor]:
        assert self.scale is not None
        return {"data": self.data, "scale": self.scale}

    def with_tensors(self, tensors: Mapping[str, Any]) -> DensePart:
        return DensePart(tensors["data"], tensors["scale"], self.bounds)

    def remade(self, weight: Tensor, rowwise: bool, mesh: DeviceMesh) -> DensePart:
        weight = weight.detach()
        made = quantize_slices(weight.float(), 8, largest(weight, mesh) if rowwise else None)
        assert made.scale is not None
        return DensePart(made.data, made.scale, self.bounds)

    def run(self, x: Tensor, bias: Tensor | None, bits: int, act_scale: Tensor | None) -> Tensor:
        if x.numel() and self.shape[0] and not torch.compiler.is_compiling():
            if self._whole is None:
                assert self.scale is not None
                self._whole = DenseProduct(GroupTensor(self.data, self.scale, None, 8, None, self.shape[1]), "int8")
            by_engine = self._whole.backend == "engine" and kind_of(x, bias, bits, act_scale) is not None
            if by_engine or self._whole.backend == "gemm":
                return self._whole(x, act_scale, bias)
        found = quantized(x, bits, 1 if act_scale is None else None, act_scale)
        return self.multiply(Slices(found.data, found.scale, bits), x.dtype, bias)

    def scale_sums(self, sums: Tensor, act_scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Scale by tokens first on a GPU, whose GEMM has them as rows, and by outputs first on a CPU."""
        if not sums.is_cuda or self.scale is None:
            return super().scale_sums(sums, act_scale, bias, dtype)
        return scaled(sums, act_scale, self.scale.mT, bias, dtype)

    def gradient_of_input(self, grad: Tensor, dtype: torch.dtype, bits: int | None) -> Tensor:
        return (grad.float() @ times(self.data, self.scale)).to(dtype)

    def gradient_of_weight(self, grad: Tensor, tokens: Slices, bits: int | None) -> Tensor:
        return grad.float().mT @ times(tokens.data, tokens.scale)

    def _multiply(self, x: Slices, dtype: torch.dtype, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if not x.data.is_cuda or torch.compiler.is_compiling():
            return self.scale_sums(self.sums(x, self.shape[1]), x.scale, bias, dtype)
        rows, columns = (None if each is None else each.reshape(-1) if each.ndim else each
                         for each in (x.scale, self.scale))  # fmt: skip
        found: Tensor = gemm(
            x.data, self.data.mT, scale_a=rows, scale_b=columns, bias=bias, out=out, out_dtype=dtype
        )  # fmt: skip
        return found

    def _sums(self, x: Slices, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        if out is not None:
            return gemm(x.data, self.data.mT, out_dtype=dtype, out=out)
        run: Any = _int8_sums if torch.compiler.is_compiling() else _gemm
        found: Tensor = run(x.data, self.data, dtype)
        return found


def _gemm(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums (tokens, out) of int8 rows, for graphs too."""
    return gemm(x, weight.mT, out_dtype=dtype)


def _fake_gemm(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


_int8_sums = register_op("magicube::int8_sums", _gemm, _fake_gemm)
