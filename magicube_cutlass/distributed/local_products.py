"""Integers of a layer's part and its products with quantized tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cute_kernels.gemm.api import gemm
from magicube_cutlass.autograd.gpu_rows import sparse_rows
from magicube_cutlass.autograd.integer import _product, quantized, spmm_of
from magicube_cutlass.distributed.products import Slices, sum_dtype
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.ops.spmm import early_spmm


class LayerPart(ABC):
    """Rows or columns of a weight (out, in) as integers."""

    bounds: tuple[int, ...]  # cuts of the outputs or inputs
    scale: Tensor | None  # (out, 1)
    shape: tuple[int, int]  # of this part

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""

    @abstractmethod
    def with_tensors(self, tensors: Mapping[str, Any]) -> LayerPart:
        """Return the part with its tensors elsewhere."""

    @abstractmethod
    def run(self, x: Tensor, bias: Tensor | None, bits: int, act_scale: Tensor | None) -> Tensor:
        """Quantize tokens (tokens, K) by their own scales, and multiply: (tokens, out)."""

    @abstractmethod
    def _multiply(self, x: Slices, dtype: torch.dtype, bias: Tensor | None) -> Tensor: ...

    @abstractmethod
    def _sums(self, x: Slices, dtype: torch.dtype) -> Tensor: ...

    def check_input(self, x: Tensor) -> None:
        """Raise `ValueError` unless `x` has the inputs of this part."""
        if x.shape[-1:] != (self.shape[1],):
            raise ValueError(f"x must have {self.shape[1]} features on this rank, got shape {tuple(x.shape)}")

    def multiply(self, x: Slices, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """Return ``x A^T + bias`` of quantized tokens (tokens, K): (tokens, out)."""
        if not (x.data.numel() and self.shape[0]):
            empty = torch.zeros(x.data.shape[0], self.shape[0], dtype=dtype, device=x.data.device)
            return empty if bias is None else empty + bias.to(dtype)
        return self._multiply(x, dtype, bias)

    def sums(self, x: Slices, inner: int) -> Tensor:
        """Return the unscaled sums (tokens, out) of this part of `inner` inputs."""
        dtype = sum_dtype(inner, 8, x.bits)
        if not (x.data.numel() and self.shape[0]):
            return torch.zeros(x.data.shape[0], self.shape[0], dtype=dtype, device=x.data.device)
        return self._sums(x, dtype)

    def __repr__(self) -> str:
        return f"{self.shape[0]} x {self.shape[1]}"


class SparsePart(LayerPart):
    """Of a sparse weight."""

    def __init__(self, matrix: SRBCRS | BCRS, bounds: tuple[int, ...]) -> None:
        matrix = matrix if isinstance(matrix, SRBCRS) else matrix.to_srbcrs()
        self.matrix, self.bounds = matrix, bounds
        self.scale, self.shape = matrix.scale, matrix.shape
        self.plain = matrix if matrix.scale is None else matrix._rows(matrix.pattern, matrix.vectors(), None)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the format."""
        return self.matrix._tensors()

    def with_tensors(self, tensors: Mapping[str, Any]) -> SparsePart:
        """Return the part with its tensors elsewhere."""
        made: Any = type(self.matrix)(**tensors, **self.matrix._fields())
        return SparsePart(made._trust(), self.bounds)

    def run(self, x: Tensor, bias: Tensor | None, bits: int, act_scale: Tensor | None) -> Tensor:
        """Multiply by the call of a layer of one process."""
        if not (x.numel() and self.shape[0]):
            return self.multiply(Slices(x.to(torch.int8), None, 8), x.dtype, bias)
        if x.is_cuda and not torch.compiler.is_compiling():
            return sparse_rows(self.matrix, x, bias, act_scale, bits, None)
        return spmm_of(self.matrix, x.mT, None, bias, bits, 0, act_scale, None).mT

    def _multiply(self, x: Slices, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        return _product(self.matrix, x.operand().mT, dtype, bias).mT

    def _sums(self, x: Slices, dtype: torch.dtype) -> Tensor:
        return early_spmm(self.plain, x._replace(scale=None).operand().mT, dtype).mT


class DensePart(LayerPart):
    """Of a dense weight of 8 bits."""

    def __init__(self, data: Tensor, scale: Tensor | None, bounds: tuple[int, ...]) -> None:
        self.data, self.scale, self.bounds = data, scale, bounds
        self.shape = data.shape[0], data.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Return data and scale."""
        return {"data": self.data} if self.scale is None else {"data": self.data, "scale": self.scale}

    def with_tensors(self, tensors: Mapping[str, Any]) -> DensePart:
        """Return the part with its tensors elsewhere."""
        return DensePart(tensors["data"], tensors.get("scale"), self.bounds)

    def run(self, x: Tensor, bias: Tensor | None, bits: int, act_scale: Tensor | None) -> Tensor:
        """Quantize, and multiply."""
        found = quantized(x, bits, 1 if act_scale is None else None, act_scale)
        return self.multiply(Slices(found.data, found.scale, bits), x.dtype, bias)

    def _multiply(self, x: Slices, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        rows, columns = (None if each is None else each.reshape(-1) if each.ndim else each
                         for each in (x.scale, self.scale))  # fmt: skip
        return self._gemm(x, dtype, scale_a=rows, scale_b=columns, bias=bias)

    def _sums(self, x: Slices, dtype: torch.dtype) -> Tensor:
        return self._gemm(x, dtype)

    def _gemm(self, x: Slices, dtype: torch.dtype, **options: Any) -> Tensor:
        if x.bits != 8:
            raise ValueError(f"act_bits must be 8 for dense layers, got {x.bits}")
        found: Tensor = gemm(x.data, self.data.mT, out_dtype=dtype, **options)
        return found
