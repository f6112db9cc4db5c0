"""Pattern: structure from masks and indices, padding, transposition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from magicube_cutlass import random_pattern
from magicube_cutlass.checks import STRIDES
from magicube_cutlass.formats.pattern import Pattern
from tests.helpers import Case, cases, pattern_of

SETTINGS = settings(max_examples=60)


@SETTINGS
@given(cases())
def test_dense_mask_becomes_whole_vectors(case: Case) -> None:
    pattern = Pattern.from_dense(case.mask, case.vector_length)
    pattern.check_format(full=True)
    assert torch.equal(pattern.to_dense(), case.kept)
    assert pattern.nnz == int(case.kept.sum())
    assert pattern.density == pytest.approx(int(case.kept.sum()) / max(case.mask.numel(), 1))


@SETTINGS
@given(cases())
def test_indices_in_any_order_give_the_same_pattern_as_the_mask(case: Case) -> None:
    rows, cols = case.mask.nonzero().flip(0).T
    from_indices = Pattern.from_indices(rows.repeat(2), cols.repeat(2), case.mask.shape, case.vector_length)
    assert from_indices.equals(Pattern.from_dense(case.mask, case.vector_length))


@SETTINGS
@given(cases())
def test_padding_keeps_every_vector_and_starts_rows_on_the_stride(case: Case) -> None:
    pattern = Pattern.from_dense(case.mask, case.vector_length)
    start, end, columns, slots = pattern.padded(case.stride)
    expected: list[int] = []
    for row in range(pattern.vector_rows):
        assert int(start[row]) == len(expected) and len(expected) % case.stride == 0
        own = pattern.col_indices[pattern.row_offsets[row] : pattern.row_offsets[row + 1]].tolist()
        assert int(end[row]) == len(expected) + len(own)
        expected += own + [-1] * (-len(own) % case.stride)
    assert columns.tolist() == expected
    assert torch.equal(columns[slots], pattern.col_indices)


@SETTINGS
@given(cases())
def test_transpose_holds_the_transpose_of_every_stored_element(case: Case) -> None:
    pattern = Pattern.from_dense(case.mask, case.vector_length)
    transposed = pattern.transpose()
    transposed.check_format(full=True)
    assert transposed.equals(Pattern.from_dense(case.kept.T, case.vector_length))


def test_transpose_map_points_at_the_transposed_place() -> None:
    pattern = pattern_of([[0, 3], [2]], 5, vector_length=2)
    target, positions = pattern.transpose_map()
    elements = torch.zeros(target.vectors * 2, dtype=torch.int64)
    elements[positions.flatten()] = torch.arange(1, 7)
    dense = torch.zeros(5, 4, dtype=torch.int64)
    for vector, (row, col) in enumerate(zip(target.row_indices.tolist(), target.col_indices.tolist(), strict=True)):
        for lane in range(2):
            if row * 2 + lane < 5:
                dense[row * 2 + lane, col] = elements[vector * 2 + lane]
    assert dense.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 5, 6], [3, 4, 0, 0], [0, 0, 0, 0]]


def test_rows_beyond_the_matrix_are_not_counted() -> None:
    pattern = Pattern.from_dense(torch.ones(9, 3, dtype=torch.bool), 8)
    assert (pattern.vectors, pattern.vector_rows, pattern.nnz, pattern.density) == (6, 2, 27, 1.0)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_smallest_shapes_work_in_every_method(shape: tuple[int, int]) -> None:
    pattern = Pattern.from_dense(torch.ones(shape, dtype=torch.bool), 8)
    assert pattern.to_dense().shape == shape
    assert pattern.transpose().shape == shape[::-1]
    assert pattern.density == (1.0 if pattern.vectors else 0.0)
    for stride in STRIDES:
        assert len(pattern.padded(stride).col_indices) == (stride if pattern.vectors else 0)


def test_derived_copies_are_made_once() -> None:
    pattern = pattern_of([[0, 3], [2]], 5)
    assert pattern.padded(32) is pattern.padded(32)
    assert pattern.padded(32) is not pattern.padded(16)
    assert pattern.transpose() is pattern.transpose()
    assert pattern.row_indices is pattern.row_indices


@pytest.mark.parametrize(("v", "longer"), [(1, 8), (2, 8), (4, 8), (8, 32), (8, 8), (1, 32)])
@pytest.mark.parametrize("shape", [(45, 70), (64, 33), (3, 5), (0, 7), (9, 0)])
def test_merged_vector_rows_hold_every_vector_once(v: int, longer: int, shape: tuple[int, int]) -> None:
    pattern = random_pattern(*shape, 0.8, v, seed=1)
    merged, positions, parts = pattern.merge_map(longer)
    merged.check_format(full=True)
    assert merged.shape == shape and merged.vector_length == longer and merged.vectors <= pattern.vectors
    rows = merged.row_indices[positions] * (longer // v) + parts
    assert torch.equal(rows, pattern.row_indices) and torch.equal(merged.col_indices[positions], pattern.col_indices)
    assert set(positions.tolist()) == set(range(merged.vectors))


def test_merging_asks_for_a_multiple() -> None:
    with pytest.raises(ValueError, match="vector_length must be a multiple of 8, got 4"):
        pattern_of([[0, 3], [2]], 5).merge_map(4)


def test_equality_sees_shape_vector_length_and_columns() -> None:
    pattern = pattern_of([[0, 3], [2]], 5)
    assert pattern.equals(pattern_of([[0, 3], [2]], 5))
    assert not pattern.equals(pattern_of([[0, 3], [2]], 6))
    assert not pattern.equals(pattern_of([[0, 3], [1]], 5))
    assert not pattern.equals(pattern_of([[0], [2, 3]], 5))
    assert not pattern.equals(pattern_of([[0, 3], [2]], 5, vector_length=4))


def test_to_the_same_device_is_the_same_object() -> None:
    pattern = pattern_of([[0, 3], [2]], 5)
    assert pattern.to("cpu") is pattern
    assert pattern.to("meta").device == torch.device("meta")


def test_cheap_check_reads_no_data() -> None:
    Pattern.from_dense(torch.ones(8, 8, dtype=torch.bool)).to("meta").check_format()


def test_repr_says_shape_and_density() -> None:
    assert repr(pattern_of([[0, 3], []], 4)) == (
        "Pattern(shape=(16, 4), vector_length=8, vectors=2, nnz=16, density=0.25, device=cpu)"
    )
