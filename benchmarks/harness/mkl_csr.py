"""MKL's product of a CSR matrix and a dense one in float32, through the library of the wheel ``mkl``."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

_NO_TRANSPOSE, _ROW_MAJOR, _GENERAL, _SEQUENTIAL = 10, 101, 20, 1
_CALLS = 1000  # how many products MKL is told to prepare for


class _Description(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("mode", ctypes.c_int), ("diagonal", ctypes.c_int))


def load(path: Path) -> ctypes.CDLL:
    """MKL on the calling thread alone."""
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.MKL_Set_Threading_Layer(_SEQUENTIAL)
    return library


class CsrProduct:
    """``C = A B``, A a scipy CSR matrix, B row-major float32 (K, N), after ``mkl_sparse_optimize`` for these calls.

    Row-major, as column-major B and C take 2 to 6 times as long (2048 x 1024, densities 0.5 to 0.02, 256 columns).
    """

    def __init__(self, library: ctypes.CDLL, a: Any, b: np.ndarray[Any, Any]) -> None:
        self._library, self._b = library, np.ascontiguousarray(b, np.float32)
        self.out = np.empty((a.shape[0], b.shape[1]), np.float32)
        self._arrays = a.indptr.astype(np.int32), a.indices.astype(np.int32), a.data.astype(np.float32)
        self._handle, self._description = ctypes.c_void_p(), _Description(_GENERAL, 0, 0)
        start, columns, values = (array.ctypes.data for array in self._arrays)
        self._call(
            "mkl_sparse_s_create_csr", ctypes.byref(self._handle), 0, *a.shape, ctypes.c_void_p(start),
            ctypes.c_void_p(start + 4), ctypes.c_void_p(columns), ctypes.c_void_p(values),
        )  # fmt: skip
        self._call("mkl_sparse_set_mm_hint", self._handle, _NO_TRANSPOSE, self._description, _ROW_MAJOR,
                   self._b.shape[1], _CALLS)  # fmt: skip
        self._call("mkl_sparse_optimize", self._handle)

    def __call__(self) -> np.ndarray[Any, Any]:
        n = self._b.shape[1]
        self._call(
            "mkl_sparse_s_mm", _NO_TRANSPOSE, ctypes.c_float(1), self._handle, self._description, _ROW_MAJOR,
            ctypes.c_void_p(self._b.ctypes.data), n, n, ctypes.c_float(0), ctypes.c_void_p(self.out.ctypes.data), n,
        )  # fmt: skip
        return self.out

    def __del__(self) -> None:
        if self._handle:
            self._library.mkl_sparse_destroy(self._handle)

    def _call(self, name: str, *args: object) -> None:
        if status := getattr(self._library, name)(*args):
            raise RuntimeError(f"{name} returned {status}")
