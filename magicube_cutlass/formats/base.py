"""Base of SR-BCRS and BCRS: values on a pattern, with a scale, and all methods that do not depend on the order."""

from __future__ import annotations

from abc import abstractmethod
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from cute_kernels.dtypes import ElementType, Integer, float_of
from cute_kernels.integers import check_bits, check_range, value_dtype
from magicube_cutlass.checks import (
    check_shape,
    check_tensor,
    check_vector_length,
    first_true,
    new_version_id,
    renamed_property,
)
from magicube_cutlass.formats import storage
from magicube_cutlass.formats.array_methods import ArrayMethods
from magicube_cutlass.formats.construct import beyond, check_result_dtype, indexable_view, moved
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.tracking import Stamp, is_current, stamp
from magicube_cutlass.quantization.float_operands import PACKED

if TYPE_CHECKING:
    from scipy.sparse import csr_array


class CompressedMatrix(ArrayMethods):
    """A sparse matrix of V x 1 vectors: base of :class:`SRBCRS` and :class:`BCRS`.

    `bits` is None if the values are no quantized integers: floats, which products read as they are, or results.
    """

    _VALUE_NDIM: ClassVar[int]  # dimensions of the values after the batch
    _INDICES: ClassVar[tuple[str, ...]]  # fields that hold index tensors
    _INTEGERS: ClassVar[tuple[str, ...]]  # integer fields that files store
    _PACKS: ClassVar[bool] = False  # whether the format has 4-bit values two per byte

    _formats: ClassVar[dict[str, Any]] = {}  # by name, so that one format makes another without importing it

    def __init_subclass__(cls) -> None:
        cls._formats[cls.__name__] = cls

    def __init__(
        self,
        shape: tuple[int, int],
        vector_length: int,
        values: Tensor,
        scale: Tensor | None,
        bits: int | None,
        signed: bool,
    ) -> None:
        self.shape = check_shape(shape)
        self.vector_length = vector_length
        self.values = values
        self.scale = scale
        self.bits = bits
        self.signed = signed
        self._single_use = False
        self._seen: Stamp | None = None  # the tensors at their last scan
        self._cache: dict[str, Any] = {}
        self._execution: dict[Any, Any] = {}  # copies for kernels, derived once; never copied along
        self._version_id = new_version_id()
        self.check_format()
        self._made = None if torch.compiler.is_compiling() else self._stamp()  # what was checked, until the first scan

    def __getstate__(self) -> dict[str, Any]:
        # what was derived holds kernels, which no copy can have
        fresh: dict[str, Any] = {"_cache": {}, "_execution": {}, "_seen": None, "_made": None}
        return {**self.__dict__, **fresh, "_version_id": new_version_id()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # fields of earlier versions: `_used_once` for `_single_use`, `_edition` for `_version_id`
        old = {"_single_use": state.pop("_used_once", False), "_version_id": new_version_id()}
        state.pop("_edition", None)
        self.__dict__.update(old | {"_seen": None, "_made": None} | state)

    @abstractmethod
    def _derive_pattern(self) -> Pattern:
        """Pattern of the index tensors."""

    @abstractmethod
    def _check_structure(self) -> None:
        """Check sizes, dtypes and devices of the index tensors; read no data."""

    @abstractmethod
    def _value_shape(self) -> tuple[int, ...]:
        """Shape of the values after the batch dimensions."""

    @abstractmethod
    def _check_layout(self) -> None:
        """Scan what the format adds to the pattern: pointers and padding."""

    @property
    def is_current(self) -> bool:
        """Whether the structure was scanned and no tensor was written or replaced since."""
        return is_current(self, self._seen)

    def _trust(self) -> Self:
        """This matrix, whose structure the library made, so that no scan is due."""
        self._seen, self._made = self._stamp(), None
        return self

    def _stamp(self) -> Stamp:
        return stamp(self, (*self._INDICES, "values"), live=("scale",))

    def refresh(self) -> None:
        """Scan the structure before its first product, and again after a write; then drop what was derived.

        Raises
        ------
        TypeError, ValueError
            As :meth:`check_format`.

        Examples
        --------
        >>> import torch, magicube_cutlass as mc
        >>> A = mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)
        >>> A.col_indices[0] = 99
        >>> A.refresh()
        Traceback (most recent call last):
        ValueError: col_indices must lie in [0, 16), got 99 at vector 0
        """
        made = self._made
        if made is not None and not self._cache and self._is_valid(made):
            self._seen, self._made = made, None
            return
        if is_current(self, self._seen):
            return
        if self._seen is not None or (made is not None and not is_current(self, made)):
            self._cache.clear()
            self._execution.clear()
            self._version_id = new_version_id()
        self._seen = None
        self.check_format()
        found = self._stamp()
        if not self._is_valid(found):
            self._scan()
        self._seen, self._made = found, None

    @abstractmethod
    def _is_valid(self, stamp: Stamp) -> bool:
        """Whether the engine finds the structure valid: one call, no error that says why not."""

    @abstractmethod
    def _scan(self) -> None:
        """Raise unless the index tensors name only vectors and columns that exist."""

    @property
    def pattern(self) -> Pattern:
        """Structure without values; cached."""
        if self._seen is not None and not torch.compiler.is_compiling() and not is_current(self, self._seen):
            self.refresh()
        if "pattern" not in self._cache:
            self._cache["pattern"] = self._derive_pattern()
        pattern: Pattern = self._cache["pattern"]
        return pattern

    @property
    def nnz(self) -> int:
        """Stored elements inside the matrix, as :attr:`Pattern.nnz`."""
        return self.pattern.nnz

    @property
    def density(self) -> float:
        """``nnz / (M K)``; 0 for an empty matrix."""
        return self.pattern.density

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of one unpacked value: int8 or uint8 for 4-bit integers, float8_e4m3fn for e2m1."""
        if self.bits is None:
            return torch.float8_e4m3fn if self.packed else self.values.dtype
        return value_dtype(self.bits, self.signed)

    @property
    def packed(self) -> bool:
        """Whether the values are e2m1, two per byte."""
        return self.values.dtype == PACKED

    @property
    def element_type(self) -> ElementType | None:
        """Element type as an operand; None for int32, int64, float32 and float64, which are results only."""
        return float_of(self.values.dtype) if self.bits is None else Integer(self.bits, self.signed)

    number = renamed_property("number", "element_type")
    used_once = renamed_property("used_once", "single_use")

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.values.device

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading dimensions of the values; () for a single matrix."""
        return tuple(self.values.shape[: -self._VALUE_NDIM])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def _tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in (*self._INDICES, "values", "scale")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("shape", "bits", "signed", *self._INTEGERS)}

    def _scaled_vectors(self, dequantize: bool) -> Tensor:
        vectors = self.vectors()
        if self.scale is None or not dequantize:
            return vectors
        scale = self.scale
        if scale.ndim:  # one per row: pick that of each stored element, rows beyond M take the last one's
            pattern, lanes = self.pattern, torch.arange(self.vector_length, device=self.device)
            rows = pattern.row_indices[:, None] * self.vector_length + lanes
            scale = scale[rows.clamp(max=max(self.shape[0] - 1, 0)), 0]
        return vectors.to(scale.dtype) * scale

    def to_dense(self, dequantize: bool = True) -> Tensor:
        """Return the matrix as a dense tensor.

        Parameters
        ----------
        dequantize : bool, default True
            Return ``scale * values`` if there is a scale; else values of :attr:`dtype`.

        Returns
        -------
        Tensor, shape (..., M, K)

        Examples
        --------
        >>> import torch, magicube_cutlass as mc
        >>> A = mc.SRBCRS.from_dense(torch.eye(2, 3, dtype=torch.int8), vector_length=2)
        >>> A.to_dense().tolist()
        [[1, 0, 0], [0, 1, 0]]
        """
        vectors, pattern, v = self._scaled_vectors(dequantize), self.pattern, self.vector_length
        batch, (m, k) = self.batch_shape, self.shape
        dense = torch.zeros(*batch, pattern.vector_rows, v, k, dtype=vectors.dtype, device=self.device)
        movable = indexable_view(dense).transpose(-1, -2)  # (*batch, R, K, V)
        movable[..., pattern.row_indices, pattern.col_indices, :] = indexable_view(vectors)
        return dense.view(*batch, pattern.vector_rows * v, k)[..., :m, :]

    def to_scipy(self, dequantize: bool = True) -> csr_array:
        """Return the matrix as a ``scipy.sparse.csr_array`` of every stored element, zeros of stored vectors included.

        Values as in :meth:`to_dense`; floats of 16 and fewer bits become float32, which scipy has.

        Raises
        ------
        ValueError
            For a batch of matrices.
        """
        from scipy.sparse import coo_array

        if self.batch_shape:
            raise ValueError(f"to_scipy needs a single matrix, got a batch of shape {self.batch_shape}")
        pattern, inside = self.pattern, ~beyond(self.pattern)
        values = self._scaled_vectors(dequantize)
        if float_of(values.dtype) is not None:
            values = values.float()
        values = indexable_view(values)[inside].view(values.dtype)
        rows = pattern.row_indices[:, None] * self.vector_length + torch.arange(self.vector_length, device=self.device)
        cols = pattern.col_indices[:, None].expand_as(rows)
        data, row, col = (tensor.detach().cpu().numpy() for tensor in (values, rows[inside], cols[inside]))
        return coo_array((data, (row, col)), shape=self.shape).tocsr()

    def to(self, device: torch.device | str) -> Self:
        """Return this matrix on `device`, without packed operands; itself if it is there."""
        there: dict[str, Any] = {name: moved(tensor, device) for name, tensor in self._tensors().items()}
        if all(there[name] is tensor for name, tensor in self._tensors().items()):
            return self
        found = type(self)(**there, **self._fields())
        found.single_use = self.single_use
        return found._trust() if self.is_current else found

    @property
    def single_use(self) -> bool:
        """Whether few products use this matrix; default False, copied by :meth:`to`.

        On a GPU such products use a kernel whose operand is packed in a tenth of the time. Setting it drops packed
        operands.
        """
        return self._single_use

    @single_use.setter
    def single_use(self, value: bool) -> None:
        if value != self._single_use:
            self._single_use = bool(value)
            self._execution.clear()  # with its cached calls
            self._version_id = new_version_id()

    def check_format(self, full: bool = False) -> None:
        """Check the matrix.

        Parameters
        ----------
        full : bool, default False
            Scan all data. Without it, as in constructors, no data is read and no device is waited for.

        Raises
        ------
        TypeError, ValueError
            If a dtype, size, layout or device is wrong; with `full` if indices, padding, scales or values are.
        """
        check_vector_length(self.vector_length)
        if not isinstance(self.signed, bool):
            raise TypeError(f"signed must be a bool, got {self.signed!r}")
        check_tensor("values", self.values)
        if self.bits is None:
            if not (self.packed and self._PACKS):
                check_result_dtype(self.values.dtype)
        else:
            check_bits(self.bits)
            check_tensor("values", self.values, dtype=self._stored_dtype(self.bits))
        self._check_structure()
        expected = self._value_shape()
        if self.values.shape[-self._VALUE_NDIM :] != expected:
            raise ValueError(
                f"values must have shape (*batch, {', '.join(map(str, expected))}), got {tuple(self.values.shape)}"
            )
        self._check_scale(full)
        for name, tensor in self._tensors().items():
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()} for {tuple(tensor.shape)}")
        if full:
            self._check_layout()
            pattern = self._derive_pattern()  # not the cached one, which may be older than the damage
            pattern.check_format(full=True)
            self._check_values(pattern)
            if self._seen is None:
                self._trust()

    @abstractmethod
    def _stored_dtype(self, bits: int) -> torch.dtype:
        """Dtype in which this format stores integers of this width."""

    def _check_scale(self, full: bool) -> None:
        if self.scale is None:
            return
        check_tensor("scale", self.scale, device=self.device)
        if not self.scale.is_floating_point():
            raise TypeError(f"scale must be a float tensor, got {self.scale.dtype}")
        if self.scale.shape not in ((), (self.shape[0], 1)):
            raise ValueError(f"scale must have shape () or ({self.shape[0]}, 1), got {tuple(self.scale.shape)}")
        if full:
            # NaN is legal: it marks a slice that held inf or nan before quantization
            bad = first_true((self.scale <= 0) | self.scale.isinf())
            if bad is not None:
                raise ValueError(f"scale must be positive and finite, got {float(self.scale.flatten()[bad])} at {bad}")

    def _check_values(self, pattern: Pattern) -> None:
        vectors = self.vectors()
        if self.bits == 12:  # the other widths fill their dtype
            check_range(vectors, self.bits, self.signed, "values")
        if self.shape[0] % self.vector_length:
            outside = indexable_view(vectors)[..., beyond(pattern)]
            if bool((outside != 0).any()):
                raise ValueError(f"values must be zero in rows beyond M = {self.shape[0]}, got a nonzero one")

    def save(self, path: str | PathLike[str]) -> None:
        """Write the matrix to a safetensors file."""
        storage.write(path, type(self).__name__, self.to("cpu")._tensors(), self._fields())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a file of :meth:`save` and scan it; `ValueError` for anything else."""
        with storage.Reader(path, cls.__name__) as stored:
            fields: dict[str, Any] = {name: stored.integer(name) for name in cls._INTEGERS}
            fields.update(shape=stored.shape("shape"), bits=stored.optional_integer("bits"))
            fields.update(signed=stored.boolean("signed"), scale=stored.optional_tensor("scale"))
            stored.expect_tensors({*cls._INDICES, "values"}, frozenset({"scale"}))
            tensors: dict[str, Any] = {name: stored.tensor(name) for name in (*cls._INDICES, "values")}
            matrix = cls(**tensors, **fields)
            matrix.check_format(full=True)
        return matrix._trust()

    def __repr__(self) -> str:
        kind = f"{'' if self.signed else 'u'}int{self.bits}"
        if self.bits is None:
            kind = str(self.dtype).removeprefix("torch.") if self.element_type is None else self.element_type.name
        scale = "none" if self.scale is None else "per row" if self.scale.ndim else "per tensor"
        batch = f"batch={self.batch_shape}, " if self.batch_shape else ""
        integers = ", ".join(f"{name}={getattr(self, name)}" for name in self._INTEGERS)
        return (
            f"{type(self).__name__}(shape={self.shape}, {batch}{integers}, values={kind}, scale={scale}, "
            f"nnz={self.nnz}, density={self.density:.4g}, bytes={self.nbytes}, device={self.device})"
        )
