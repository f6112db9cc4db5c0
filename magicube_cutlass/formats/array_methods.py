"""What users of scipy and torch expect of a matrix: ``A @ x``, ``A.T``, slices of rows, copies, comparison, conversion.

Products are made above this folder: the package's operators enter :data:`OPERATORS` when it loads.
"""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from magicube_cutlass.checks import vector_rows

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from magicube_cutlass.formats.pattern import Pattern

__all__ = ["OPERATORS", "ArrayMethods", "TransposedMatrix"]

OPERATORS: dict[str, Callable[..., Any]] = {}  # by name: "matmul"


def _matmul(A: object, x: object) -> Any:
    if "matmul" not in OPERATORS:
        sys.modules[__name__.partition(".")[0]].autograd  # noqa: B018  # loads the package
    return OPERATORS["matmul"](A, x)


class ArrayMethods(ABC):
    """Base of the sparse matrices with the methods of arrays."""

    shape: tuple[int, int]
    vector_length: int
    values: Tensor
    scale: Tensor | None
    bits: int | None

    @property
    @abstractmethod
    def pattern(self) -> Pattern:
        """Structure without values."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """Return this matrix on `device`."""

    @abstractmethod
    def to_dense(self, dequantize: bool = True) -> Tensor:
        """Return the matrix as a dense tensor."""

    @abstractmethod
    def to_scipy(self, dequantize: bool = True) -> csr_array:
        """Return the matrix as a ``scipy.sparse.csr_array``."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def _fields(self) -> dict[str, Any]: ...

    @abstractmethod
    def _rows(self, pattern: Pattern, vectors: Tensor, scale: Tensor | None) -> Self:
        """A matrix of this kind with other rows."""

    @abstractmethod
    def vectors(self) -> Tensor:
        """Return the values in pattern order."""

    def __matmul__(self, x: Any) -> Tensor:
        """Return ``A @ x``, x (..., K, N) or (K,), as a tensor.

        Floats are quantized with per-column scales, to 8 bits, or to 16 if A has 12 or 16; for A of floats they are
        cast to its dtype, or to e4m3. Integers are taken as they are. A gradient of a float `x` is that of
        :func:`magicube_cutlass.autograd.spmm`.
        """
        found: Tensor = _matmul(self, x)
        return found

    @property
    def T(self) -> TransposedMatrix[Self]:
        """The transpose for products, a view: ``A.T @ x`` fills nothing in on a CPU."""
        return TransposedMatrix(self)

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Return this matrix on a CUDA device, the current one by default."""
        if device is None:
            return self.to("cuda")
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device)

    def cpu(self) -> Self:
        """Return this matrix on the CPU; itself if it is there."""
        return self.to("cpu")

    def clone(self) -> Self:
        """Return a copy that shares no memory with this matrix."""
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in self._tensors().items()}
        return type(self)(**copies, **self._fields())

    def equals(self, other: object) -> bool:
        """Return whether both have the same kind, shape, structure, values and scale; False across devices.

        Examples
        --------
        >>> import torch, magicube_cutlass as mc
        >>> A = mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)
        >>> A.equals(A.clone()), A.equals(A[:8]), A.equals(A.to_bcrs())
        (True, True, False)
        """
        if type(other) is not type(self) or self._fields() != other._fields():
            return False
        mine, theirs = self._tensors(), other._tensors()
        return mine.keys() == theirs.keys() and all(_equal(each, theirs[name]) for name, each in mine.items())

    def to_torch_sparse(self, dequantize: bool = True) -> Tensor:
        """Return a torch tensor of layout CSR with every stored element, zeros of stored vectors included.

        Values as in :meth:`to_scipy`.

        Raises
        ------
        ValueError
            For a batch of matrices.

        Examples
        --------
        >>> import torch, magicube_cutlass as mc
        >>> A = mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)
        >>> A.to_torch_sparse().layout, A.to_torch_sparse().values().numel()
        (torch.sparse_csr, 64)
        """
        found = self.to_scipy(dequantize)
        offsets, columns = (torch.from_numpy(each).long() for each in (found.indptr, found.indices))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            csr = torch.sparse_csr_tensor(
                offsets, columns, torch.from_numpy(found.data), self.shape, check_invariants=False, device="cpu"
            )
            return csr.to(self.values.device)

    def __getitem__(self, rows: slice) -> Self:
        """Return consecutive rows, ``A[10:20]``, as a matrix of their own.

        Rows from a multiple of V on keep their vectors. Others are cut into vectors anew, which can fill in zeros.

        Raises
        ------
        TypeError
            For another index than a slice.
        ValueError
            For a step other than 1, or a batch of matrices.

        Examples
        --------
        >>> import torch, magicube_cutlass as mc
        >>> A = mc.SRBCRS.from_dense(torch.eye(16, dtype=torch.int8), vector_length=8)
        >>> A[8:].shape, A[8:].nnz, A[4:12].nnz
        ((8, 16), 64, 128)
        """
        if not isinstance(rows, slice):
            raise TypeError(f"rows must be a slice of rows such as A[8:16], got {type(rows).__name__}")
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"rows must have step 1, got {step}")
        vectors = self.vectors()
        if vectors.ndim > 2:
            raise ValueError(f"A[rows] needs a single matrix, got a batch of {tuple(vectors.shape[:-2])}")
        stop = max(start, stop)
        scale = self.scale if self.scale is None or self.scale.ndim == 0 else self.scale[start:stop].clone()
        pattern, found = _rows_of(self.pattern, vectors, start, stop)
        return self._rows(pattern, found, scale)


def _equal(x: Tensor, y: Tensor) -> bool:
    if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
        return False
    if x.dtype.is_floating_point and x.element_size() == 1 and x.ndim:
        x, y = x.view(torch.uint8), y.view(torch.uint8)
    return torch.equal(x, y)


def _rows_of(pattern: Pattern, vectors: Tensor, start: int, stop: int) -> tuple[Pattern, Tensor]:
    """Pattern and vectors (vectors, V) of rows `start` to `stop`."""
    from magicube_cutlass.formats.construct import indexable_view

    v, k, rows = pattern.vector_length, pattern.shape[1], stop - start
    first, last = start // v, vector_rows(stop, v)
    begin, end = (int(pattern.row_offsets[each]) for each in (first, max(first, last)))
    lanes = torch.arange(v, device=vectors.device)
    row = pattern.row_indices[begin:end, None] * v + lanes - start  # (vectors, V)
    values = indexable_view(vectors)[begin:end]
    inside = (row >= 0) & (row < rows)
    keys = row.div(v, rounding_mode="floor") * k + pattern.col_indices[begin:end, None].long()  # (vectors, V)
    places, at = torch.unique(keys[inside], return_inverse=True)
    made = type(pattern)._from_keys(places, (rows, k), v)
    found = values.new_zeros(made.vectors, v)
    found[at, row[inside] % v] = values[inside]
    return made, found.view(vectors.dtype)


_M = TypeVar("_M", bound=ArrayMethods)


class TransposedMatrix(Generic[_M]):
    """The transpose (K, M) of a sparse matrix (M, K) in products; a view that holds the matrix.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> A = mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)
    >>> A.T.shape, A.T.T is A
    ((16, 8), True)
    >>> (A.T @ torch.ones(8, 2, dtype=torch.int8)).sum().item()
    16
    """

    def __init__(self, matrix: _M) -> None:
        self._matrix = matrix

    @property
    def T(self) -> _M:
        """The matrix itself."""
        return self._matrix

    @property
    def shape(self) -> tuple[int, int]:
        """(K, M)."""
        return self._matrix.shape[1], self._matrix.shape[0]

    def to_dense(self, dequantize: bool = True) -> Tensor:
        """Return the transpose as a dense tensor, a view of that of the matrix."""
        return self._matrix.to_dense(dequantize).mT

    def __matmul__(self, x: Any) -> Tensor:
        """Return ``A.T @ x``, x (..., M, N) or (M,), as ``A @ x``; it has no gradient."""
        found: Tensor = _matmul(self, x)
        return found

    def __repr__(self) -> str:
        return f"TransposedMatrix({self._matrix!r})"
