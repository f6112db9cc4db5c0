"""Files in ``.smtx`` format, the patterns of the Deep Learning Matrix Collection.

Three lines of text: ``rows, cols, nnz``; ``rows + 1`` row offsets; ``nnz`` column indices.
Source: Gale, Zaharia, Young, Elsen, "Sparse GPU Kernels for Deep Learning", SC'20.
"""

from __future__ import annotations

import gzip
import os
import zlib
from io import BufferedReader

import numpy as np
import torch
from numpy.typing import NDArray

from magicube_cutlass.checks import MAX_DIM, check_vector_length
from magicube_cutlass.formats.pattern import Pattern

__all__ = ["read_smtx", "write_smtx"]

_GZIP_MAGIC = b"\x1f\x8b"
_HEADER_ROOM = 256  # characters that the first line may take
_NUMBER_ROOM = 32  # characters that a number of the other lines may take with the blanks around it
_BLANK_ROOM = 4096  # characters for blank lines at the end
_CHUNK = 2**16
# A gzip file may unfold to so many characters, or to so many per byte; texts of DLMC unfold 3 times.
_UNFOLDED, _UNFOLDED_PER_BYTE = 2**24, 128


def read_smtx(path: str | os.PathLike[str], *, vector_length: int = 1) -> Pattern:
    """Read a pattern, plain or gzipped; each row of the file is one vector row, so ``M = rows * V``.

    Memory follows the size of the text, not the sizes that the header claims. Text longer than the header allows is not
    read to its end. A gzip file may hold 16 MiB of text, or 128 times its own size.

    Parameters
    ----------
    path : str or path-like
        File to read; columns may come in any order inside a row.
    vector_length : int, default 1
        V.

    Returns
    -------
    Pattern, shape (rows * V, cols)

    Raises
    ------
    ValueError
        If the file is malformed; the message has its name and the line.

    Examples
    --------
    >>> import tempfile, magicube_cutlass as mc
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open(f"{folder}/mask.smtx", "w") as file:
    ...         _ = file.write("2, 8, 3\\n0 2 3\\n1 5 0\\n")
    ...     mc.read_smtx(f"{folder}/mask.smtx", vector_length=4).shape
    (8, 8)
    """
    check_vector_length(vector_length)
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            rows, cols, nnz, lines = _read(file, vector_length)
        if len(lines) > 2:
            count = 4 + lines[2].count(b"\n")
            raise ValueError(f"line 4: a file has 3 lines, got {count}")
        offsets = _parse_integers(lines[0], 2, "row offsets", rows + 1)
        _check_offsets(offsets, nnz)
        columns = _parse_integers(lines[1] if len(lines) > 1 else b"", 3, "column indices", nnz)
        columns = _sorted_columns(offsets, columns, cols)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    shape = (rows * vector_length, cols)
    return Pattern(shape, vector_length, torch.from_numpy(offsets), torch.from_numpy(columns.astype(np.int32)))._trust()


def write_smtx(path: str | os.PathLike[str], pattern: Pattern) -> None:
    """Write a pattern, one row of the file per vector row; gzipped if the name ends in ``.gz``.

    The format has no vector length: read the file with the same V; M is rounded up to a multiple of V.

    Parameters
    ----------
    path : str or path-like
        File to write.
    pattern : Pattern
        Pattern.

    Examples
    --------
    >>> import tempfile, magicube_cutlass as mc
    >>> pattern = mc.random_pattern(64, 64, sparsity=0.9, vector_length=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mc.write_smtx(f"{folder}/mask.smtx", pattern)
    ...     mc.read_smtx(f"{folder}/mask.smtx", vector_length=8).equals(pattern)
    True
    """
    offsets, columns = pattern.row_offsets.cpu().numpy(), pattern.col_indices.cpu().numpy()
    header = f"{pattern.vector_rows}, {pattern.shape[1]}, {pattern.vectors}"
    text = "\n".join((header, " ".join(map(str, offsets.tolist())), " ".join(map(str, columns.tolist())), ""))
    name = os.fspath(path)
    data = text.encode("ascii")
    with open(name, "wb") as file:
        file.write(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)  # mtime 0: same bytes every time


def _read(file: BufferedReader, vector_length: int) -> tuple[int, int, int, list[bytes]]:
    """Return the header's three numbers, and one to three pieces of text: lines 2 and 3, and all after them."""
    is_gzip = file.peek(2)[:2] == _GZIP_MAGIC
    stream = gzip.GzipFile(fileobj=file) if is_gzip else file
    size = os.fstat(file.fileno()).st_size
    limit = max(_UNFOLDED, _UNFOLDED_PER_BYTE * size) if is_gzip else None
    try:
        rows, cols, nnz = _parse_header(stream.readline(_HEADER_ROOM + 1), vector_length)
        room = _NUMBER_ROOM * (rows + 1 + nnz) + _BLANK_ROOM
        text, is_whole = _read_text(stream, room if limit is None else min(room, limit))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"truncated or corrupt gzip data ({error})") from error
    line = 2 + text.count(b"\n")
    if not is_whole and limit is not None and limit < room:
        raise ValueError(
            f"line {line}: text must have at most {limit} characters for {size} bytes of gzip data, got more; "
            "decompress the file first"
        )
    if not is_whole:
        raise ValueError(
            f"line {line}: the text goes on beyond {room} characters after the header, too many for {rows + 1} row "
            f"offsets and {nnz} column indices"
        )
    return rows, cols, nnz, text.rstrip().split(b"\n", 2)


def _read_text(stream: BufferedReader | gzip.GzipFile, room: int) -> tuple[bytes, bool]:
    """Return the remaining text, at most `room` characters, and whether that is all."""
    text = bytearray()
    while chunk := stream.read(_CHUNK):
        text += chunk
        if len(text) > room:
            del text[room:]
            return bytes(text), False
    return bytes(text), True


def _parse_header(line: bytes, vector_length: int) -> tuple[int, int, int]:
    if len(line) > _HEADER_ROOM:
        raise ValueError(f"line 1: header must be at most {_HEADER_ROOM} characters")
    tokens = line.replace(b",", b" ").split()
    # 19 digits cover int64; longer ones are refused here, before int() takes quadratic time on them
    if len(tokens) != 3 or not all(token.isdigit() and len(token) <= 19 for token in tokens):
        shown = line[:60].rstrip().decode("ascii", "backslashreplace")
        raise ValueError(f"line 1: header must be 'rows, cols, nnz' in digits, got {shown!r}")
    rows, cols, nnz = (int(token) for token in tokens)
    if rows * vector_length > MAX_DIM or cols > MAX_DIM:
        raise ValueError(
            f"line 1: rows * vector_length and cols must be at most {MAX_DIM}, got {rows} * {vector_length} and {cols}"
        )
    if nnz > rows * cols:
        raise ValueError(f"line 1: nnz must be at most rows * cols = {rows * cols}, got {nnz}")
    return rows, cols, nnz


def _parse_integers(line: bytes, number: int, what: str, count: int) -> NDArray[np.int64]:
    """The ``count`` nonnegative integers of a line."""
    if line.translate(None, b"0123456789 \t\r\v\f"):
        bad = next(token for token in line.split() if not token.isdigit())
        shown = bad[:20].decode("ascii", "backslashreplace")
        raise ValueError(f"line {number}: {what} must be nonnegative integers, got {shown!r}")
    # numpy parses text at a tenth of the cost of int(); a number beyond int64 saturates and fails later checks
    values = np.fromstring(line, dtype=np.int64, sep=" ") if line.strip() else np.zeros(0, dtype=np.int64)
    if len(values) != count:
        raise ValueError(f"line {number}: expected {count} {what}, got {len(values)}")
    return values


def _check_offsets(offsets: NDArray[np.int64], nnz: int) -> None:
    if offsets[0] != 0 or offsets[-1] != nnz:
        raise ValueError(f"line 2: row offsets must go from 0 to nnz = {nnz}, got {offsets[0]} to {offsets[-1]}")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        at = int(falls[0])
        raise ValueError(f"line 2: row offsets must not decrease, got {offsets[at]} then {offsets[at + 1]} at row {at}")


def _sorted_columns(offsets: NDArray[np.int64], columns: NDArray[np.int64], cols: int) -> NDArray[np.int64]:
    """``columns`` in increasing order inside each row, checked for range and duplicates."""
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    outside = np.flatnonzero(columns >= cols)
    if len(outside):
        at = int(outside[0])
        raise ValueError(f"line 3: column index {columns[at]} of row {rows[at]} must lie in [0, {cols})")
    keys = rows * cols + columns
    if np.all(keys[1:] > keys[:-1]):
        return columns
    keys.sort()
    repeats = np.flatnonzero(keys[1:] == keys[:-1])
    if len(repeats):
        row, column = divmod(int(keys[repeats[0]]), cols)
        raise ValueError(f"line 3: column index {column} appears twice in row {row}")
    return keys % cols
