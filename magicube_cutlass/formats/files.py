"""Patterns of matrices in files: .smtx, .mtx, .npz, .npy and .safetensors, also those that this library wrote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from magicube_cutlass.checks import check_vector_length
from magicube_cutlass.formats import storage
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.smtx import read_smtx
from magicube_cutlass.formats.srbcrs import SRBCRS

__all__ = ["FilePattern", "read_pattern"]

_OWN: dict[str, Any] = {"Pattern": Pattern, "SRBCRS": SRBCRS, "BCRS": BCRS}


class FilePattern(NamedTuple):
    """The pattern of a file, and the number of elements that the file stores inside its vectors."""

    pattern: Pattern
    elements: int


def read_pattern(
    path: str | os.PathLike[str], *, vector_length: int | None = None, tensor: str | None = None
) -> FilePattern:
    """Read the vectors of a matrix in a file; the name's ending selects the format.

    Parameters
    ----------
    path : str or path-like
        ``.smtx`` (each row is one vector row), ``.mtx``, ``.npz`` of scipy or numpy, ``.npy``, or ``.safetensors``; the
        first two also with ``.gz``. Of dense matrices the nonzero elements count.
    vector_length : int, optional
        V. Default: that of a file of this library, else 8.
    tensor : str, optional
        Name of the matrix in a file of several.

    Returns
    -------
    FilePattern

    Raises
    ------
    ValueError
        If the file is malformed, or has several matrices and `tensor` names none of them.

    Examples
    --------
    >>> import tempfile, numpy, magicube_cutlass.formats.files as files
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     numpy.save(f"{folder}/mask.npy", numpy.eye(16))
    ...     found = files.read_pattern(f"{folder}/mask.npy", vector_length=4)
    >>> found.pattern.nnz, found.elements
    (64, 16)
    """
    name = os.fspath(path)
    plain = name.removesuffix(".gz")
    if vector_length is not None:
        check_vector_length(vector_length)
    length = vector_length or 8
    if plain.endswith(".smtx"):
        pattern = read_smtx(name, vector_length=length)
        return FilePattern(pattern, pattern.nnz)
    try:
        if plain.endswith(".mtx"):
            return _of_scipy(_read_market(name), length)
        if name.endswith(".npz"):
            return _of_npz(name, length, tensor)
        if name.endswith(".npy"):
            return _of_dense(torch.from_numpy(_nonzero(np.load(name, allow_pickle=False))), length)
        if name.endswith(".safetensors"):
            return _of_safetensors(name, vector_length, tensor)
    except (ValueError, TypeError, KeyError, EOFError) as error:
        text = str(error)
        raise ValueError(text if text.startswith(name) else f"{name}: {text}") from error
    raise ValueError(f"file must end in .smtx, .mtx, .npz, .npy or .safetensors, got {Path(name).name!r}")


def _read_market(name: str) -> Any:
    from scipy.io import mmread

    return mmread(name)


def _nonzero(values: Any) -> Any:
    if values.ndim != 2:
        raise ValueError(f"must hold a matrix, got an array of shape {values.shape}")
    if values.dtype == object:
        raise ValueError("must hold numbers, got objects")
    return values != 0


def _of_dense(mask: Tensor, length: int) -> FilePattern:
    return FilePattern(Pattern.from_dense(mask, length), int(mask.sum()))


def _of_scipy(matrix: Any, length: int) -> FilePattern:
    if isinstance(matrix, np.ndarray):
        return _of_dense(torch.from_numpy(_nonzero(matrix)), length)
    coo = matrix.tocoo()
    coo.sum_duplicates()
    rows, cols = (torch.from_numpy(np.asarray(each, dtype=np.int64)) for each in (coo.row, coo.col))
    return FilePattern(Pattern.from_indices(rows, cols, coo.shape, length), coo.nnz)


def _one_of(names: list[str], wanted: str | None) -> str:
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted not in names:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise ValueError(f"tensor must be one of {shown}, got {wanted!r}")
    return str(wanted)


def _of_npz(name: str, length: int, wanted: str | None) -> FilePattern:
    with np.load(name, allow_pickle=False) as stored:
        names = list(stored.keys())
        if "format" in names and wanted is None:
            from scipy.sparse import load_npz

            return _of_scipy(load_npz(name), length)
        return _of_dense(torch.from_numpy(_nonzero(stored[_one_of(names, wanted)])), length)


def _of_safetensors(name: str, length: int | None, wanted: str | None) -> FilePattern:
    kind, shapes = storage.contents(name)
    if kind in _OWN:
        stored = _OWN[kind].load(name)
        pattern = stored if isinstance(stored, Pattern) else stored.pattern
        if length not in (None, pattern.vector_length):
            return _of_dense(pattern.to_dense(), length or 8)
        return FilePattern(pattern, pattern.nnz)
    matrices = sorted(key for key, shape in shapes.items() if len(shape) == 2)
    if not matrices:
        raise ValueError(f"must hold a matrix, got {len(shapes)} tensors of other shapes")
    values = storage.tensor(name, _one_of(matrices, wanted))
    # floats of 8 bits have no comparison
    return _of_dense((values.float() if values.is_floating_point() else values) != 0, length or 8)
