"""cuSPARSE's SpMM on Blocked-ELL matrices of int8 or float16, through the library that torch has loaded."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

_R32F, _R16F, _R8I, _R32I = 0, 2, 3, 10  # cudaDataType
_INDEX_32I = 2
_COLUMN_MAJOR, _ROW_MAJOR = 1, 2
_ALGORITHM = 13  # CUSPARSE_SPMM_BLOCKED_ELL_ALG1
_DTYPES = {_R32F: torch.float32, _R16F: torch.float16, _R8I: torch.int8, _R32I: torch.int32}
_NAMES = {_R32F: "float32", _R16F: "float16", _R8I: "int8", _R32I: "int32"}


class CusparseError(RuntimeError):
    """A call of cuSPARSE failed: which, and the library's own name of the status."""


@dataclass(frozen=True)
class Blocks:
    """Square blocks, the same number in every row of blocks.

    ``columns``: int32 (block rows, blocks a row), increasing; ``values``: int8 or float16 (block rows, blocks a
    row, b, b).
    """

    columns: Tensor
    values: Tensor
    inner: int

    @property
    def size(self) -> int:
        return int(self.values.shape[-1])

    @property
    def rows(self) -> int:
        return int(self.columns.shape[0]) * self.size

    def dense(self) -> Tensor:
        """(M, K), of the values' dtype."""
        count, b = self.columns.shape[0], self.size
        dense = torch.zeros(count, self.inner // b, b, b, dtype=self.values.dtype, device=self.values.device)
        index = self.columns.long()[:, :, None, None].expand_as(self.values)
        return dense.scatter_(1, index, self.values).transpose(1, 2).reshape(self.rows, self.inner)


@dataclass(frozen=True)
class Form:
    """One way to ask for the product: dtype of C, of the sums, order of B and C, order of the block's values."""

    out: int
    compute: int
    order: int
    by_rows: bool  # the values of one row of A follow each other, else those of a block
    operands: int = _R8I

    def __str__(self) -> str:
        order = "row" if self.order == _ROW_MAJOR else "column"
        return f"C {_NAMES[self.out]}, sums {_NAMES[self.compute]}, B and C {order}-major"


def forms() -> list[Form]:
    """All ways that are worth trying, those first that cuSPARSE 12 has; it prints a line for each that it lacks."""
    types = ((_R32I, _R32I), (_R32F, _R32F), (_R8I, _R32I))
    return [
        Form(out, compute, order, by_rows)
        for (out, compute), order, by_rows in product(types, (_COLUMN_MAJOR, _ROW_MAJOR), (True, False))
    ]


def half_forms() -> list[Form]:
    """Ways to ask for the product of float16 matrices, sums in float32."""
    return [
        Form(_R16F, _R32F, order, by_rows, _R16F)
        for order, by_rows in product((_ROW_MAJOR, _COLUMN_MAJOR), (False, True))
    ]


def _library() -> ctypes.CDLL:
    torch.cuda.current_blas_handle()
    library = ctypes.CDLL("libcusparse.so.12")
    library.cusparseGetErrorName.restype = ctypes.c_char_p
    return library


def version() -> str:
    """The library's version."""
    library, numbers = _library(), []
    for part in range(3):
        number = ctypes.c_int()
        library.cusparseGetProperty(part, ctypes.byref(number))
        numbers.append(str(number.value))
    return ".".join(numbers)


class BlockedEllProduct:
    """``C = A B`` in one form; calling it launches on torch's current stream and returns C, (M, N).

    Raises :class:`CusparseError` where cuSPARSE does not have that form.
    """

    def __init__(self, blocks: Blocks, b: Tensor, form: Form) -> None:
        self._lib, self._form = _library(), form
        n = b.shape[1]
        row_major = form.order == _ROW_MAJOR
        self._columns = blocks.columns.contiguous()
        values = blocks.values.transpose(1, 2) if form.by_rows else blocks.values
        self._values = values.contiguous()
        self._b = b.contiguous() if row_major else b.T.contiguous().T
        shape = (blocks.rows, n) if row_major else (n, blocks.rows)
        out = torch.full(shape, -77, dtype=_DTYPES[form.out], device=b.device)  # -77: poison
        self.out = out if row_major else out.T
        self._handle, self._a, self._right, self._c = (ctypes.c_void_p() for _ in range(4))
        number = ctypes.c_float if form.compute == _R32F else ctypes.c_int32
        self._alpha, self._beta = number(1), number(0)
        self._call("cusparseCreate", ctypes.byref(self._handle))
        long = ctypes.c_int64
        self._call(
            "cusparseCreateBlockedEll", ctypes.byref(self._a), long(blocks.rows), long(blocks.inner), long(blocks.size),
            long(blocks.columns.shape[1] * blocks.size), _pointer(self._columns), _pointer(self._values), _INDEX_32I, 0,
            form.operands,
        )  # fmt: skip
        for place, tensor, kind in ((self._right, self._b, form.operands), (self._c, self.out, form.out)):
            leading = tensor.stride(0) if row_major else tensor.stride(1)
            self._call(
                "cusparseCreateDnMat", ctypes.byref(place), long(tensor.shape[0]), long(n), long(leading),
                _pointer(tensor), kind, form.order,
            )  # fmt: skip
        needed = ctypes.c_size_t()
        self._call("cusparseSpMM_bufferSize", *self._operands(), ctypes.byref(needed))
        self._workspace = torch.empty(max(needed.value, 1), dtype=torch.uint8, device=b.device)
        self()
        torch.cuda.synchronize()

    def _operands(self) -> tuple[object, ...]:
        return (
            self._handle, 0, 0, ctypes.byref(self._alpha), self._a, self._right, ctypes.byref(self._beta), self._c,
            self._form.compute, _ALGORITHM,
        )  # fmt: skip

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._lib, name)(*args)
        if status:
            raise CusparseError(f"{name}: {self._lib.cusparseGetErrorName(status).decode()}")

    def __call__(self) -> Tensor:
        self._call("cusparseSetStream", self._handle, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        self._call("cusparseSpMM", *self._operands(), _pointer(self._workspace))
        return self.out


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def right_result(form: Form, exact: Tensor) -> Tensor:
    """What a form gives for the exact integers (float64): the integers, saturated where C is int8."""
    return exact.clamp(-128, 127) if form.out == _R8I else exact
