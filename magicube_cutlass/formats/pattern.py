"""The structure of a sparse matrix of column vectors, without values.

Rows are grouped in vector rows of ``V`` consecutive rows; a nonzero is a ``V x 1`` vector.  Everything here is torch
ops on the tensors' own device, so a pattern on a GPU never passes through the host.
Source: Li, Osawa, Hoefler, SC'22, section IV-A (SR-BCRS).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from magicube_cutlass.checks import (
    check_shape,
    check_stride,
    check_tensor,
    check_vector_length,
    first_true,
    new_version_id,
    vector_rows,
)
from magicube_cutlass.formats import storage
from magicube_cutlass.formats.tracking import Stamp, is_current, is_valid, real_tensors, stamp


class Padded(NamedTuple):
    """A pattern with vector rows padded to multiples of a stride; positions count vectors."""

    row_start: Tensor  # int64 (R,), a multiple of the stride
    row_end: Tensor  # int64 (R,), row_start + length
    col_indices: Tensor  # int32 (padded vectors,), -1 in the padding
    slots: Tensor  # int64 (vectors,), where each vector went


class Transposed(NamedTuple):
    """The transposed pattern, and the place of each stored element in it."""

    pattern: Pattern
    positions: Tensor  # int64 (vectors, V): flat index into the transpose's (vectors, V); -1 for rows beyond M


class Merged(NamedTuple):
    """A pattern of longer vectors that holds every stored element, and the place of each vector in it."""

    pattern: Pattern
    positions: Tensor  # int64 (vectors,): its longer vector
    parts: Tensor  # int64 (vectors,): which part of that vector, counted in the shorter ones


@dataclass(frozen=True, eq=False, repr=False)
class Pattern:
    """Which V x 1 vectors of a matrix are stored.

    Parameters
    ----------
    shape : tuple of int
        (M, K); M need not be a multiple of V.
    vector_length : int
        V: 1, 2, 4, 8, 16 or 32.
    row_offsets : Tensor, shape (R + 1,)
        int64, R = ceil(M / V); vector row r holds vectors ``row_offsets[r]:row_offsets[r + 1]``.
    col_indices : Tensor, shape (vectors,)
        int32, strictly increasing in each vector row.

    Raises
    ------
    TypeError, ValueError
        As :meth:`check_format`.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> mc.Pattern.from_dense(torch.eye(8, 16, dtype=torch.bool), vector_length=8)
    Pattern(shape=(8, 16), vector_length=8, vectors=8, nnz=64, density=0.5, device=cpu)
    """

    shape: tuple[int, int]
    vector_length: int
    row_offsets: Tensor
    col_indices: Tensor
    _cache: dict[Any, Any] = field(default_factory=dict, init=False)
    _version_id: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_shape(self.shape))
        object.__setattr__(self, "_version_id", new_version_id())
        self.check_format()
        if not torch.compiler.is_compiling():
            self._cache["made"] = self._stamp()  # what was checked

    @property
    def is_current(self) -> bool:
        """Whether the indices were scanned and not written since."""
        return is_current(self, self._cache.get("seen"))

    def _trust(self) -> Self:
        """This pattern, which the library made, so that no scan is due."""
        self._cache["seen"] = self._stamp()
        return self

    def _stamp(self) -> Stamp:
        return stamp(self, ("row_offsets", "col_indices"))

    def refresh(self) -> None:
        """Scan the indices before their first use, and again after a write; then drop what was derived."""
        made = self._cache.get("made")
        if made is not None and len(self._cache) == 1 and is_valid(self, made, 1, None, True):
            self._cache["seen"] = made
            return
        if self.is_current:
            return
        if "seen" in self._cache or (made is not None and not is_current(self, made)):
            self._cache.clear()
            object.__setattr__(self, "_version_id", new_version_id())
        self.check_format()
        found = self._stamp()
        if not is_valid(self, found, 1, None, True):
            self._check_offsets()
            self._check_columns()
        self._cache["seen"] = found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}, "_version_id": new_version_id()}  # what was derived holds kernels

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.pop("_edition", None)  # field of earlier versions
        self.__dict__.update({"_version_id": new_version_id()} | state)

    @classmethod
    def from_dense(cls, mask: Tensor, vector_length: int = 8) -> Pattern:
        """Return the vectors with a true element in `mask`, bool (M, K)."""
        check_vector_length(vector_length)
        check_tensor("mask", mask, dtype=torch.bool, ndim=2)
        rows = mask.shape[0]
        count = vector_rows(rows, vector_length)
        if rows % vector_length and mask.numel():
            mask = torch.nn.functional.pad(mask, (0, 0, 0, count * vector_length - rows))
        return cls.from_vector_mask(mask.reshape(count, vector_length, mask.shape[1]).any(1), rows, vector_length)

    @classmethod
    def from_vector_mask(cls, mask: Tensor, rows: int, vector_length: int) -> Pattern:
        """Return the pattern of a ``rows x K`` matrix that stores the vectors set in `mask`, bool (R, K)."""
        check_vector_length(vector_length)
        count = vector_rows(rows, vector_length)
        check_tensor("mask", mask, dtype=torch.bool, ndim=2, length=count)
        offsets = torch.zeros(count + 1, dtype=torch.int64, device=mask.device)
        torch.cumsum(mask.sum(1), 0, out=offsets[1:])
        columns = mask.nonzero()[:, 1].to(torch.int32)
        return cls((rows, mask.shape[1]), vector_length, offsets, columns)._trust()

    @classmethod
    def from_indices(cls, rows: Tensor, cols: Tensor, shape: Sequence[int], vector_length: int) -> Pattern:
        """Return the vectors that hold given elements.

        Parameters
        ----------
        rows, cols : Tensor, shape (n,)
            int64 coordinates, in any order.
        shape : sequence of int
            (M, K).
        vector_length : int
            V.

        `ValueError` for an index outside `shape`.
        """
        check_vector_length(vector_length)
        m, k = check_shape(shape)
        check_tensor("rows", rows, dtype=torch.int64, ndim=1)
        check_tensor("cols", cols, dtype=torch.int64, ndim=1, length=rows.shape[0], device=rows.device)
        for name, index, size in (("rows", rows, m), ("cols", cols, k)):
            bad = first_true((index < 0) | (index >= size))
            if bad is not None:
                raise ValueError(f"{name}[{bad}] must lie in [0, {size}), got {int(index[bad])}")
        return cls._from_keys(torch.unique(rows // vector_length * k + cols), (m, k), vector_length)

    @classmethod
    def _from_keys(cls, keys: Tensor, shape: tuple[int, int], vector_length: int) -> Pattern:
        """Pattern of sorted unique ``vector row * K + column``."""
        edges = torch.arange(vector_rows(shape[0], vector_length) + 1, device=keys.device) * shape[1]
        columns = (keys % max(shape[1], 1)).to(torch.int32)
        return cls(shape, vector_length, torch.searchsorted(keys, edges), columns)._trust()

    @property
    def vectors(self) -> int:
        """Number of stored vectors."""
        return self.col_indices.shape[0]

    @property
    def vector_rows(self) -> int:
        """R = ceil(M / V)."""
        return vector_rows(self.shape[0], self.vector_length)

    @property
    def nnz(self) -> int:
        """Stored elements inside the matrix: ``vectors * V`` without those beyond M."""
        if "nnz" not in self._cache:
            beyond = self.vector_rows * self.vector_length - self.shape[0]
            last = int(self.row_lengths[-1]) if beyond else 0
            self._cache["nnz"] = self.vectors * self.vector_length - beyond * last
        return int(self._cache["nnz"])

    @property
    def density(self) -> float:
        """``nnz / (M K)``; 0 for an empty matrix."""
        return self.nnz / max(self.shape[0] * self.shape[1], 1)

    @property
    def row_lengths(self) -> Tensor:
        """Vectors per vector row, int64 (R,)."""
        return self.row_offsets.diff()

    @property
    def row_indices(self) -> Tensor:
        """Vector row of each vector, int64 (vectors,); cached."""
        if "row_indices" not in self._cache:
            ids = torch.arange(self.vector_rows, device=self.device)
            self._cache["row_indices"] = ids.repeat_interleave(self.row_lengths, output_size=self.vectors)
        indices: Tensor = self._cache["row_indices"]
        return indices

    @property
    def device(self) -> torch.device:
        """Device of the index tensors."""
        return self.col_indices.device

    def to_dense(self) -> Tensor:
        """Return bool (M, K), whole vectors set."""
        stored = torch.zeros(self.vector_rows, self.shape[1], dtype=torch.bool, device=self.device)
        stored[self.row_indices, self.col_indices] = True
        return stored.repeat_interleave(self.vector_length, 0)[: self.shape[0]]

    def to(self, device: torch.device | str) -> Pattern:
        """Return this pattern on `device`; itself if it is there."""
        offsets, columns = self.row_offsets.to(device), self.col_indices.to(device)
        if columns is self.col_indices and offsets is self.row_offsets:
            return self
        moved = Pattern(self.shape, self.vector_length, offsets, columns)
        return moved._trust() if self.is_current else moved

    def padded(self, stride: int) -> Padded:
        """Return the pattern with vector rows padded to multiples of `stride` (16, 32 or 64); cached."""
        check_stride(stride)
        if ("padded", stride) not in self._cache:
            lengths, rows = self.row_lengths, self.row_indices
            ends = torch.cumsum((lengths + stride - 1) // stride * stride, 0)
            total = int(ends[-1]) if self.vector_rows else 0
            start = torch.cat((ends.new_zeros(1), ends))[:-1]
            slots = torch.arange(self.vectors, device=self.device) + (start - self.row_offsets[:-1])[rows]
            columns = torch.full((total,), -1, dtype=torch.int32, device=self.device)
            columns[slots] = self.col_indices
            self._cache["padded", stride] = Padded(start, start + lengths, columns, slots)
        result: Padded = self._cache["padded", stride]
        return result

    def _constant(self, edition: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(self, *arguments)``, a constant of this version for a compiler."""
        with real_tensors():
            return function(self, *arguments)

    def _named(self, edition: str) -> str:
        """The version, by which an operator finds this pattern while it is alive."""
        _LIVING[edition] = self
        return edition

    # What torch.compiler.assume_constant_result sets; calling that imports the compiler, a second of waiting.
    _constant.__dict__["_dynamo_marked_constant"] = True
    _named.__dict__["_dynamo_marked_constant"] = True

    @staticmethod
    def _alive(name: str) -> Pattern:
        """The live pattern of this name; `RuntimeError` if there is none."""
        found = _LIVING.get(name)
        if found is None:
            raise RuntimeError(f"pattern {name} must be alive where a graph uses it, got none of that name in here")
        return found

    def transpose(self) -> Pattern:
        """Return the pattern, in vectors of the same length, of the transpose of every stored element; cached."""
        return self.transpose_map().pattern

    def transpose_map(self) -> Transposed:
        """Return the transposed pattern and the place of each stored element in it; cached."""
        if "transpose" not in self._cache:
            (m, k), v = self.shape, self.vector_length
            columns = self.col_indices.to(torch.int64)[:, None]  # (vectors, 1)
            rows = self.row_indices[:, None] * v + torch.arange(v, device=self.device)  # (vectors, V)
            inside = rows < m
            keys, vector = torch.unique((columns // v * m + rows)[inside], return_inverse=True)
            positions = torch.full_like(rows, -1)
            positions[inside] = vector * v + (columns % v).expand_as(rows)[inside]
            self._cache["transpose"] = Transposed(Pattern._from_keys(keys, (k, m), v), positions)
        result: Transposed = self._cache["transpose"]
        return result

    def merge_map(self, vector_length: int) -> Merged:
        """Return the pattern of longer vectors: consecutive vector rows become one.

        A longer vector is stored if one of its parts is, so their number does not grow. `ValueError` if `vector_length`
        is no multiple of V.
        """
        check_vector_length(vector_length)
        times, k = vector_length // self.vector_length, self.shape[1]
        if vector_length % self.vector_length:
            raise ValueError(f"vector_length must be a multiple of {self.vector_length}, got {vector_length}")
        rows = self.row_indices
        keys, positions = torch.unique(rows // times * k + self.col_indices, return_inverse=True)
        return Merged(Pattern._from_keys(keys, self.shape, vector_length), positions, rows % times)

    def equals(self, other: Pattern) -> bool:
        """Return whether both have the same shape, vector length and vectors; False across devices."""
        return (
            (self.shape, self.vector_length, self.device) == (other.shape, other.vector_length, other.device)
            and torch.equal(self.row_offsets, other.row_offsets)
            and torch.equal(self.col_indices, other.col_indices)
        )

    def check_format(self, full: bool = False) -> None:
        """Check the pattern.

        Parameters
        ----------
        full : bool, default False
            Scan the indices. Without it no data is read and no device is waited for.

        Raises
        ------
        TypeError, ValueError
            If a dtype, size or device is wrong; with `full` if the indices are.
        """
        check_vector_length(self.vector_length)
        check_tensor("col_indices", self.col_indices, dtype=torch.int32, ndim=1)
        check_tensor(
            "row_offsets",
            self.row_offsets,
            dtype=torch.int64,
            ndim=1,
            length=self.vector_rows + 1,
            device=self.device,
        )
        if full:
            self._check_offsets()
            self._check_columns()
            if "seen" not in self._cache:
                self._trust()

    def _check_offsets(self) -> None:
        offsets = self.row_offsets
        if int(offsets[0]) != 0 or int(offsets[-1]) != self.vectors:
            raise ValueError(
                f"row_offsets must go from 0 to {self.vectors} (the length of col_indices), "
                f"got {int(offsets[0])} to {int(offsets[-1])}"
            )
        bad = first_true(offsets[1:] < offsets[:-1])
        if bad is not None:
            raise ValueError(
                f"row_offsets must not decrease, got {int(offsets[bad])} then {int(offsets[bad + 1])} at {bad + 1}"
            )

    def _check_columns(self) -> None:
        columns, k = self.col_indices, self.shape[1]
        bad = first_true((columns < 0) | (columns >= k))
        if bad is not None:
            raise ValueError(f"col_indices must lie in [0, {k}), got {int(columns[bad])} at vector {bad}")
        rows = torch.searchsorted(self.row_offsets, torch.arange(self.vectors, device=self.device), right=True) - 1
        bad = first_true((columns[1:] <= columns[:-1]) & (rows[1:] == rows[:-1]))
        if bad is not None:
            raise ValueError(
                f"col_indices must increase inside a vector row, got {int(columns[bad])} then "
                f"{int(columns[bad + 1])} in vector row {int(rows[bad])}"
            )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the pattern to a safetensors file."""
        tensors = {"row_offsets": self.row_offsets, "col_indices": self.col_indices}
        storage.write(path, "Pattern", tensors, {"shape": self.shape, "vector_length": self.vector_length})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Pattern:
        """Read a file of :meth:`save`; `ValueError` for anything else."""
        with storage.Reader(path, "Pattern") as stored:
            shape, vector_length = stored.shape("shape"), stored.integer("vector_length")
            stored.expect_tensors({"row_offsets", "col_indices"})
            pattern = cls(shape, vector_length, stored.tensor("row_offsets"), stored.tensor("col_indices"))
            pattern.check_format(full=True)
        return pattern._trust()

    def __repr__(self) -> str:
        return (
            f"Pattern(shape={self.shape}, vector_length={self.vector_length}, vectors={self.vectors}, nnz={self.nnz}, "
            f"density={self.density:.4g}, device={self.device})"
        )


_LIVING: WeakValueDictionary[str, Pattern] = WeakValueDictionary()  # patterns that operators use by name
