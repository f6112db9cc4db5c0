"""Wrong arguments and files: each named case must raise the error that says what was wrong."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.sparse
import torch

from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.generate import prune, random_pattern
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.smtx import read_smtx
from magicube_cutlass.formats.srbcrs import SRBCRS
from tests.helpers import pattern_of

INTS = torch.ones(8, 4, dtype=torch.int8)
MASK = torch.ones(8, 4, dtype=torch.bool)
PATTERN = pattern_of([[0, 3], [2]], 5)
ARRAY: Any = INTS.numpy()
LIST: Any = [[1]]
WORD: Any = "other"
OFFSETS, COLUMNS = PATTERN.row_offsets, PATTERN.col_indices


def pattern(**changes: Any) -> Pattern:
    fields = {"shape": (16, 5), "vector_length": 8, "row_offsets": OFFSETS, "col_indices": COLUMNS}
    return Pattern(**{**fields, **changes})


def srbcrs(**changes: Any) -> SRBCRS:
    padded = PATTERN.padded(16)
    fields: dict[str, Any] = {
        "row_start": padded.row_start,
        "row_end": padded.row_end,
        "col_indices": padded.col_indices,
        "values": torch.zeros(2, 8, 16, dtype=torch.int8),
        "shape": (16, 5),
        "vector_length": 8,
        "stride": 16,
        "bits": 8,
    }
    return SRBCRS(**{**fields, **changes})


def bcrs(**changes: Any) -> BCRS:
    values = torch.zeros(3, 8, dtype=torch.int8)
    fields: dict[str, Any] = {"row_offsets": OFFSETS, "col_indices": COLUMNS, "values": values, "shape": (16, 5)}
    return BCRS(**{**fields, "vector_length": 8, "bits": 8, **changes})


def on_mask(**changes: Any) -> SRBCRS:
    return SRBCRS.from_mask(**{"values": INTS, "mask": MASK, "vector_length": 8, "bits": 8, **changes})


def indices(rows: list[int], cols: list[int], vector_length: int = 8) -> Pattern:
    return Pattern.from_indices(torch.tensor(rows), torch.tensor(cols), (8, 4), vector_length)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a buffer with gaps."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


def repeated_place() -> torch.Tensor:
    """100 + 100 at one place, as int8."""
    values = torch.tensor([100, 100], dtype=torch.int8)
    return torch.sparse_coo_tensor(torch.zeros(2, 2, dtype=torch.int64), values, (1, 1), check_invariants=True)


def per_row() -> SRBCRS:
    return SRBCRS.from_dense(torch.ones(8, 4), scale="row")


Case = tuple[Callable[[], object], type[Exception], str]

PATTERN_CASES: dict[str, Case] = {
    "vector length 3": (
        lambda: pattern(vector_length=3),
        ValueError,
        r"vector_length must be one of \(1, 2, 4, 8, 16, 32\), got 3",
    ),
    "vector length true": (
        lambda: pattern(vector_length=True),
        ValueError,
        "vector_length must be one of .*, got True",
    ),
    "shape of one": (lambda: pattern(shape=(16,)), ValueError, r"shape must have 2 dimensions, got 1: \(16,\)"),
    "shape negative": (
        lambda: pattern(shape=(16, -5)),
        ValueError,
        r"shape must hold sizes in \[0, 2147483647\], got \(16, -5\)",
    ),
    "shape too large for int32 columns": (lambda: pattern(shape=(16, 2**31)), ValueError, "shape must hold sizes in"),
    "shape of floats": (lambda: pattern(shape=(16.0, 5)), TypeError, r"shape must hold two integers, got \(16.0, 5\)"),
    "offsets int32": (
        lambda: pattern(row_offsets=OFFSETS.int()),
        TypeError,
        "row_offsets must be torch.int64, got torch.int32",
    ),
    "offsets a list": (lambda: pattern(row_offsets=[0, 2, 3]), TypeError, "row_offsets must be a tensor, got list"),
    "offsets too few": (lambda: pattern(shape=(17, 5)), ValueError, "row_offsets must have 4 entries, got 3"),
    "offsets in two dimensions": (
        lambda: pattern(row_offsets=OFFSETS[None]),
        ValueError,
        r"row_offsets must have 1 dimensions, got 2 \(shape \(1, 3\)\)",
    ),
    "offsets elsewhere": (
        lambda: pattern(row_offsets=OFFSETS.to("meta")),
        ValueError,
        "row_offsets must be on cpu like the other tensors, got meta",
    ),
    "columns int64": (
        lambda: pattern(col_indices=COLUMNS.long()),
        TypeError,
        "col_indices must be torch.int32, got torch.int64",
    ),
    "mask of ints": (lambda: Pattern.from_dense(INTS), TypeError, "mask must be torch.bool, got torch.int8"),
    "mask in one dimension": (
        lambda: Pattern.from_dense(MASK[0]),
        ValueError,
        r"mask must have 2 dimensions, got 1 \(shape \(4,\)\)",
    ),
    "mask sparse": (
        lambda: Pattern.from_dense(MASK.to_sparse()),
        TypeError,
        "mask must be a dense .* got layout torch.sparse_coo",
    ),
    "vector mask of other height": (
        lambda: Pattern.from_vector_mask(MASK, 8, 8),
        ValueError,
        "mask must have 1 entries, got 8",
    ),
    "row index at M": (lambda: indices([0, 8], [1, 1]), ValueError, r"rows\[1\] must lie in \[0, 8\), got 8"),
    "column index negative": (lambda: indices([0], [-1]), ValueError, r"cols\[0\] must lie in \[0, 4\), got -1"),
    "row and column counts differ": (lambda: indices([0], [1, 2]), ValueError, "cols must have 1 entries, got 2"),
    "padding to stride 8": (lambda: PATTERN.padded(8), ValueError, r"stride must be one of \(16, 32, 64\), got 8"),
    "sparsity above 1": (lambda: prune(INTS, 1.5, 8), ValueError, r"sparsity must lie in \[0, 1\], got 1.5"),
    "sparsity nan": (
        lambda: random_pattern(8, 8, float("nan"), 8),
        ValueError,
        r"sparsity must lie in \[0, 1\], got nan",
    ),
    "weight of bools": (lambda: prune(MASK, 0.5, 8), TypeError, "weight must be float or integer, got torch.bool"),
    "weight with nan": (lambda: prune(torch.full((2, 2), float("nan")), 0.5, 2), ValueError, "weight must be finite"),
    "weight in three dimensions": (
        lambda: prune(INTS[None], 0.5, 8),
        ValueError,
        "weight must have 2 dimensions, got 3",
    ),
    "unknown pruning": (
        lambda: prune(INTS, 0.5, 8, WORD),
        ValueError,
        "method must be 'magnitude' or 'random', got 'other'",
    ),
    "unknown distribution": (lambda: random_pattern(8, 8, 0.5, 8, WORD), ValueError, "got 'other'"),
    "pattern of negative size": (
        lambda: random_pattern(-8, 8, 0.5, 8),
        ValueError,
        r"shape must hold sizes in .*, got \(-8, 8\)",
    ),
}

MATRIX_CASES: dict[str, Case] = {
    "stride 8": (lambda: srbcrs(stride=8), ValueError, r"stride must be one of \(16, 32, 64\), got 8"),
    "stride that columns do not fill": (
        lambda: srbcrs(stride=64),
        ValueError,
        "col_indices must have a multiple of stride = 64 entries, got 32",
    ),
    "bits 5": (lambda: srbcrs(bits=5), ValueError, r"bits must be one of \(4, 8, 12, 16\), got 5"),
    "signed as a number": (lambda: srbcrs(signed=1), TypeError, "signed must be a bool, got 1"),
    "values of another width": (lambda: srbcrs(bits=16), TypeError, "values must be torch.int16, got torch.int8"),
    "values of the other sign": (lambda: srbcrs(signed=False), TypeError, "values must be torch.uint8, got torch.int8"),
    "int8 results": (
        lambda: srbcrs(bits=None),
        TypeError,
        "values without bits must be one of int32, .* got torch.int8; give bits",
    ),
    "values not packed": (
        lambda: srbcrs(bits=4, values=torch.zeros(2, 8, 16, dtype=torch.uint8)),
        ValueError,
        r"values must have shape \(\*batch, 2, 8, 8\), got \(2, 8, 16\)",
    ),
    "values a block short": (
        lambda: srbcrs(values=torch.zeros(1, 8, 16, dtype=torch.int8)),
        ValueError,
        r"values must have shape \(\*batch, 2, 8, 16\), got \(1, 8, 16\)",
    ),
    "values in one dimension": (lambda: srbcrs(values=INTS[0]), ValueError, r"values must have shape .*, got \(4,\)"),
    "values with gaps": (
        lambda: srbcrs(values=strided(torch.zeros(2, 8, 16, dtype=torch.int8))),
        ValueError,
        "values must be contiguous, got strides",
    ),
    "row_start with gaps": (lambda: srbcrs(row_start=strided(OFFSETS[:2])), ValueError, "row_start must be contiguous"),
    "row_start too long": (lambda: srbcrs(row_start=OFFSETS), ValueError, "row_start must have 2 entries, got 3"),
    "row_end int32": (
        lambda: srbcrs(row_end=OFFSETS[:2].int()),
        TypeError,
        "row_end must be torch.int64, got torch.int32",
    ),
    "row_end elsewhere": (
        lambda: srbcrs(row_end=OFFSETS[:2].to("meta")),
        ValueError,
        "row_end must be on cpu .*, got meta",
    ),
    "columns int64": (
        lambda: srbcrs(col_indices=COLUMNS.long()),
        TypeError,
        "col_indices must be torch.int32, got torch.int64",
    ),
    "scale a number": (lambda: srbcrs(scale=0.5), TypeError, "scale must be a tensor, got float"),
    "scale of ints": (
        lambda: srbcrs(scale=torch.tensor(1)),
        TypeError,
        "scale must be a float tensor, got torch.int64",
    ),
    "scale per row without its dimension": (
        lambda: srbcrs(scale=torch.ones(16)),
        ValueError,
        r"scale must have shape \(\) or \(16, 1\), got \(16,\)",
    ),
    "scale per column": (lambda: bcrs(scale=torch.ones(1, 5)), ValueError, r"scale must have shape .* got \(1, 5\)"),
    "scale elsewhere": (
        lambda: bcrs(scale=torch.tensor(1.0, device="meta")),
        ValueError,
        "scale must be on cpu .*, got meta",
    ),
    "bcrs values packed": (
        lambda: bcrs(bits=4, values=torch.zeros(3, 4, dtype=torch.uint8)),
        TypeError,
        "values must be torch.int8, got torch.uint8",
    ),
    "bcrs a vector short": (
        lambda: bcrs(values=INTS[:2]),
        ValueError,
        r"values must have shape \(\*batch, 3, 8\), got \(2, 4\)",
    ),
    "bcrs offsets too long": (lambda: bcrs(shape=(8, 5)), ValueError, "row_offsets must have 2 entries, got 3"),
    "bcrs to stride 20": (lambda: bcrs().to_srbcrs(20), ValueError, r"stride must be one of \(16, 32, 64\), got 20"),
}

CONSTRUCTOR_CASES: dict[str, Case] = {
    "dense of bools": (lambda: SRBCRS.from_dense(MASK), TypeError, "dense must have an integer dtype, got torch.bool"),
    "dense complex": (lambda: SRBCRS.from_dense(INTS.to(torch.complex64)), TypeError, "dense must have an integer dtype, got torch.complex64"),
    "dense in three dimensions": (lambda: SRBCRS.from_dense(INTS[None]), ValueError, "dense must have 2 dimensions, got 3"),
    "dense of numpy": (lambda: SRBCRS.from_dense(ARRAY), TypeError, "dense must be a tensor, got ndarray"),
    "dense over 4 bits": (lambda: SRBCRS.from_dense(INTS * 8, bits=4), ValueError, r"dense must lie in \[-8, 7\] for signed 4-bit integers, got values in \[8, 8\]"),
    "dense negative unsigned": (lambda: SRBCRS.from_dense(-INTS, signed=False), ValueError, r"dense must lie in \[0, 255\]"),
    "dense bits 6": (lambda: SRBCRS.from_dense(INTS, bits=6), ValueError, "bits must be one of .*, got 6"),
    "dense scale per column": (lambda: SRBCRS.from_dense(INTS.float(), scale="column"), ValueError, r"scale must be 'tensor' or 'row', got 'column': a scale per column"),
    "dense float with nan": (lambda: SRBCRS.from_dense(torch.full((2, 2), float("nan"))), ValueError, "finite|nan"),
    "mask of another shape": (lambda: on_mask(mask=MASK[:4]), ValueError, r"mask must have the shape of values \(8, 4\), got \(4, 4\)"),
    "mask of ints": (lambda: on_mask(mask=INTS), TypeError, "mask must be torch.bool, got torch.int8"),
    "mask elsewhere": (lambda: on_mask(mask=MASK.to("meta")), ValueError, "mask must be on cpu .*, got meta"),
    "masked values out of range": (lambda: on_mask(values=INTS.long() * 999), ValueError, r"values must lie in \[-128, 127\]"),
    "vectors of another count": (
        lambda: SRBCRS.from_pattern(PATTERN, torch.zeros(2, 8), bits=None),
        ValueError,
        r"vectors must have shape \(\*batch, 3, 8\), got \(2, 8\)",
    ),
    "float vectors with bits": (lambda: SRBCRS.from_pattern(PATTERN, torch.zeros(3, 8), bits=8), TypeError, "vectors must have an integer dtype, got torch.float32"),
    "int16 vectors without bits": (lambda: BCRS.from_pattern(PATTERN, torch.zeros(3, 8).short(), bits=None), TypeError, "values without bits must be one of .* got torch.int16"),
    "vectors elsewhere": (lambda: SRBCRS.from_pattern(PATTERN, torch.zeros(3, 8, device="meta"), bits=None), ValueError, "vectors must be on cpu .*, got meta"),
    "scipy from a dense array": (lambda: SRBCRS.from_scipy(INTS.numpy()), TypeError, "matrix must be a scipy.sparse matrix or array, got ndarray"),
    "scipy in one dimension": (lambda: SRBCRS.from_scipy(scipy.sparse.coo_array([1, 0, 2])), ValueError, "matrix must have 2 dimensions, got 1"),
    "scipy of bools": (lambda: SRBCRS.from_scipy(scipy.sparse.csr_array(MASK.numpy())), TypeError, "values must be integer or float, got torch.bool"),
    "torch sparse from a dense tensor": (lambda: SRBCRS.from_torch_sparse(INTS), TypeError, "tensor must have layout sparse COO, CSR, CSC or BSR, got torch.strided"),
    "torch sparse in three dimensions": (lambda: SRBCRS.from_torch_sparse(INTS[None].to_sparse()), ValueError, "tensor must have 2 dimensions, got 3"),
    "torch sparse with dense columns": (lambda: SRBCRS.from_torch_sparse(INTS.to_sparse(1)), ValueError, "tensor must have 2 sparse dimensions, got 1"),
    "torch sparse from a list": (lambda: SRBCRS.from_torch_sparse(LIST), TypeError, "tensor must be a torch tensor, got list"),
    "repeated places that overflow": (
        lambda: SRBCRS.from_torch_sparse(repeated_place()),
        ValueError,
        r"values must lie in \[-128, 127\] .* got values in \[200, 200\]",
    ),
    "transpose with a scale per row": (lambda: per_row().transpose(), ValueError, r"transpose needs one scale .* shape \(8, 1\).*quantize with scale='tensor'"),
    "batch to scipy": (lambda: SRBCRS.from_pattern(PATTERN, torch.zeros(2, 3, 8), bits=None).to_scipy(), ValueError, r"to_scipy needs a single matrix, got a batch of shape \(2,\)"),
}  # fmt: skip

CASES = {
    f"{group}: {name}": case
    for group, cases in (("pattern", PATTERN_CASES), ("matrix", MATRIX_CASES), ("constructor", CONSTRUCTOR_CASES))
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_bad_argument_is_named(name: str) -> None:
    call, kind, message = CASES[name]
    with pytest.raises(kind, match=message):
        call()


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "line 1: header must be 'rows, cols, nnz' in digits, got ''"),
    "header of two": (b"2, 9\n0 0 0\n", "line 1: header must be .* got '2, 9'"),
    "header of four": (b"2, 9, 3, 1\n0 2 3\n1 8 0\n", "line 1: header must be .* got '2, 9, 3, 1'"),
    "header negative": (b"-2, 9, 3\n", "line 1: header must be .* got '-2, 9, 3'"),
    "header of words": (b"two, 9, 3\n", "line 1: header must be .* got 'two, 9, 3'"),
    "header not ascii": (b"\xff\xfe2, 9, 3\n", r"line 1: header must be .* got '\\\\xff\\\\xfe2, 9, 3'"),
    "header of a thousand digits": (b"9" * 1000 + b", 9, 3\n", "line 1: header must be"),
    "too many rows": (b"3000000000, 9, 3\n", r"line 1: rows \* vector_length .* at most 2147483647, got 3000000000 \* 1 and 9"),
    "too many columns": (b"2, 3000000000, 3\n", "line 1: .* at most 2147483647, got 2 .* and 3000000000"),
    "more nonzeros than places": (b"2, 9, 19\n", r"line 1: nnz must be at most rows \* cols = 18, got 19"),
    "a trillion nonzeros": (b"2, 9, 1000000000000\n0 2 3\n1 8 0\n", "line 1: nnz must be at most .*, got 1000000000000"),
    "no offsets": (b"2, 9, 3", "line 2: expected 3 row offsets, got 0"),
    "offset missing": (b"2, 9, 3\n0 3\n1 8 0\n", "line 2: expected 3 row offsets, got 2"),
    "offset too many": (b"2, 9, 3\n0 1 2 3\n1 8 0\n", "line 2: expected 3 row offsets, got 4"),
    "offset negative": (b"2, 9, 3\n0 -2 3\n1 8 0\n", "line 2: row offsets must be nonnegative integers, got '-2'"),
    "offset not an integer": (b"2, 9, 3\n0 2.0 3\n1 8 0\n", "line 2: row offsets must be nonnegative integers, got '2.0'"),
    "first offset not 0": (b"2, 9, 3\n1 2 3\n1 8 0\n", "line 2: row offsets must go from 0 to nnz = 3, got 1 to 3"),
    "last offset not nnz": (b"2, 9, 3\n0 2 4\n1 8 0\n", "line 2: row offsets must go from 0 to nnz = 3, got 0 to 4"),
    "offsets decrease": (b"3, 9, 3\n0 3 2 3\n1 8 0\n", "line 2: row offsets must not decrease, got 3 then 2 at row 1"),
    "offset beyond int64": (b"2, 9, 3\n0 99999999999999999999 3\n1 8 0\n", "line 2: row offsets must not decrease"),
    "no columns": (b"2, 9, 3\n0 2 3\n", "line 3: expected 3 column indices, got 0"),
    "column missing": (b"2, 9, 3\n0 2 3\n1 8\n", "line 3: expected 3 column indices, got 2"),
    "column at the edge": (b"2, 9, 3\n0 2 3\n1 9 0\n", r"line 3: column index 9 of row 0 must lie in \[0, 9\)"),
    "column negative": (b"2, 9, 3\n0 2 3\n1 -1 0\n", "line 3: column indices must be nonnegative integers, got '-1'"),
    "column beyond int64": (b"2, 9, 3\n0 2 3\n1 99999999999999999999 0\n", "line 3: column index 9223372036854775807 of row 0"),
    "column twice": (b"2, 9, 3\n0 2 3\n8 8 0\n", "line 3: column index 8 appears twice in row 0"),
    "null byte": (b"2, 9, 3\n0 2 3\n1 \x008 0\n", r"line 3: column indices must be nonnegative integers, got '\\x008'"),
    "fourth line": (b"2, 9, 3\n0 2 3\n1 8 0\n1.0 2.0 3.0\n", "line 4: a file has 3 lines, got 4"),
    "gzip truncated": (gzip.compress(b"2, 9, 3\n0 2 3\n1 8 0\n")[:-9], "truncated or corrupt gzip data"),
    "gzip with a wrong checksum": (gzip.compress(b"2, 9, 3\n0 2 3\n1 8 0\n")[:-8] + bytes(8), "truncated or corrupt gzip data"),
    "gzip header only": (b"\x1f\x8b", "truncated or corrupt gzip data"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_malformed_smtx_is_refused_with_file_and_line(tmp_path: Path, name: str) -> None:
    data, message = FILES[name]
    path = tmp_path / "bad.smtx"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_smtx(path)
    assert str(caught.value).startswith(str(path))


def test_vector_length_counts_in_the_limit_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "tall.smtx"
    path.write_bytes(b"100000000, 9, 0\n")
    with pytest.raises(ValueError, match=r"got 100000000 \* 32 and 9"):
        read_smtx(path, vector_length=32)
