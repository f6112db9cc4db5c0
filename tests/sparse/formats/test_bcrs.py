"""BCRS: round trips and the corruptions its scan must find."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.pattern import Pattern
from tests.helpers import Case, cases, pattern_of, random_mask

SETTINGS = settings(max_examples=60)


@SETTINGS
@given(cases())
def test_dense_integers_survive_the_round_trip(case: Case) -> None:
    matrix = BCRS.from_dense(case.ints, vector_length=case.vector_length, bits=case.bits, signed=case.signed)
    matrix.check_format(full=True)
    assert torch.equal(matrix.to_dense(), case.ints)
    assert torch.equal(matrix.to_srbcrs(case.stride).to_bcrs().values, matrix.values)
    if case.ints.dtype != torch.uint16:  # numpy to torch comparison below goes through int64
        assert torch.equal(torch.from_numpy(matrix.to_scipy().toarray()), case.ints)


@SETTINGS
@given(cases())
def test_mask_keeps_exactly_its_vectors(case: Case) -> None:
    matrix = BCRS.from_mask(case.ints, case.mask, vector_length=case.vector_length, bits=case.bits, signed=case.signed)
    assert torch.equal(matrix.pattern.to_dense(), case.kept)
    assert torch.equal(matrix.to_dense(), case.ints)


def test_four_bit_values_are_not_packed() -> None:
    matrix = BCRS.from_dense(torch.full((8, 3), -8), bits=4)
    assert matrix.values.dtype == torch.int8 and matrix.values.shape == (3, 8)
    assert bool((matrix.values == -8).all())


def test_batched_result_keeps_its_values() -> None:
    pattern = Pattern.from_dense(random_mask(10, 12, 0.3), 4)
    vectors = torch.randn(2, 3, pattern.vectors, 4)
    matrix = BCRS.from_pattern(pattern, vectors, bits=None)
    assert matrix.batch_shape == (2, 3) and matrix.to_dense().shape == (2, 3, 10, 12)
    assert torch.equal(matrix.to_srbcrs(16).to_dense(), matrix.to_dense())
    with pytest.raises(ValueError, match=r"to_scipy needs a single matrix, got a batch of shape \(2, 3\)"):
        matrix.to_scipy()


def test_half_precision_reaches_scipy_as_float32() -> None:
    pattern = pattern_of([[0, 2]], 3, vector_length=2)
    matrix = BCRS.from_pattern(pattern, torch.ones(2, 2, dtype=torch.bfloat16), bits=None)
    assert matrix.to_scipy().toarray().tolist() == [[1, 0, 1], [1, 0, 1]]


def test_repr_names_kind_and_scale() -> None:
    matrix = BCRS.from_dense(torch.ones(8, 4, dtype=torch.int8), signed=False)
    assert repr(matrix).startswith("BCRS(shape=(8, 4), vector_length=8, values=uint8, scale=none, nnz=32, density=1,")


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("row_offsets", 0, 1, "row_offsets must go from 0 to 5"),
        ("row_offsets", 2, 4, "row_offsets must go from 0 to 5"),
        ("row_offsets", 1, 6, "row_offsets must not decrease, got 6 then 5 at 2"),
        ("col_indices", 1, -2, r"col_indices must lie in \[0, 9\), got -2 at vector 1"),
        ("col_indices", 4, 9, r"col_indices must lie in \[0, 9\), got 9 at vector 4"),
        ("col_indices", 1, 0, "increase inside a vector row, got 0 then 0 in vector row 0"),
        ("values", (0, 0), 3000, r"values must lie in \[-2048, 2047\]"),
        ("values", (4, 3), 1, "values must be zero in rows beyond M = 7"),
        ("scale", (), 0.0, "scale must be positive and finite, got 0.0 at 0"),
    ],
)
def test_full_check_finds_planted_corruption(field: str, index: object, value: float, message: str) -> None:
    pattern = pattern_of([[0, 1], [3, 5, 7]], 9, vector_length=4)
    pattern = Pattern((7, 9), 4, pattern.row_offsets, pattern.col_indices)
    matrix = BCRS.from_pattern(pattern, torch.full((5, 4), 2), bits=12, scale=torch.tensor(0.5))
    matrix.check_format(full=True)
    getattr(matrix, field)[index] = value
    with pytest.raises(ValueError, match=message):
        matrix.check_format(full=True)
