"""SRBCRS: every constructor against the dense matrix, the layout, and every planted corruption."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from cute_kernels.integers import widen
from magicube_cutlass.checks import STRIDES, VECTOR_LENGTHS
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.generate import random_pattern
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.smtx import write_smtx
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.quantization.quantize import quantize
from tests.helpers import SCALES, Case, cases, pattern_of, random_ints, random_mask

SETTINGS = settings(max_examples=60)
BATCHES = [(), (3,), (2, 0), (2, 3)]


def build(case: Case) -> SRBCRS:
    return SRBCRS.from_dense(case.ints, **case.options)


@SETTINGS
@given(cases())
def test_dense_integers_survive_the_round_trip(case: Case) -> None:
    matrix = build(case)
    matrix.check_format(full=True)
    assert torch.equal(matrix.to_dense(), case.ints)
    assert matrix.dtype == case.ints.dtype
    assert matrix.pattern.equals(Pattern.from_dense(case.ints != 0, case.vector_length))


@SETTINGS
@given(cases())
def test_mask_keeps_exactly_its_vectors_and_zeroes_the_rest(case: Case) -> None:
    everywhere = random_ints(tuple(case.ints.shape), case.bits, case.signed, seed=7)
    matrix = SRBCRS.from_mask(everywhere, case.mask, **case.options)
    matrix.check_format(full=True)
    assert torch.equal(matrix.pattern.to_dense(), case.kept)
    assert torch.equal(widen(matrix.to_dense()), widen(everywhere) * case.mask)
    empty = SRBCRS.from_mask(torch.zeros_like(everywhere), case.mask, **case.options)
    assert torch.equal(empty.pattern.to_dense(), case.kept)


@SETTINGS
@given(cases())
def test_conversions_to_other_formats_and_back_lose_nothing(case: Case) -> None:
    matrix = build(case)
    for back in (
        SRBCRS.from_bcrs(matrix.to_bcrs(), case.stride),
        matrix.to_bcrs().to_srbcrs(case.stride),
        SRBCRS.from_scipy(matrix.to_scipy(), **case.options),
        SRBCRS.from_pattern(matrix.pattern, matrix.vectors(), bits=case.bits, signed=case.signed, stride=case.stride),
    ):
        back.check_format(full=True)
        for name, tensor in matrix._tensors().items():
            assert torch.equal(getattr(back, name), tensor), name


@SETTINGS
@given(cases())
def test_transpose_is_the_transposed_matrix(case: Case) -> None:
    transposed = build(case).transpose()
    transposed.check_format(full=True)
    assert torch.equal(transposed.to_dense(), case.ints.T)
    assert torch.equal(transposed.transpose().to_dense(), case.ints)


@SETTINGS
@given(cases())
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_torch_sparse_layouts_agree_with_dense(case: Case) -> None:
    wide = widen(case.ints)
    layouts = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]
    tensors = [wide.to_sparse(layout=layout) for layout in layouts]
    if wide.numel() and wide.shape[0] % 2 == 0 and wide.shape[1] % 3 == 0:
        tensors.append(wide.to_sparse_bsr((2, 3)))
    for tensor in tensors:
        matrix = SRBCRS.from_torch_sparse(tensor, **case.options)
        matrix.check_format(full=True)
        assert torch.equal(matrix.to_dense(), case.ints), tensor.layout


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_values_are_row_major_in_each_stride(bits: int, stride: int) -> None:
    pattern = random_pattern(21, 90, 0.4, 4, "skewed")
    vectors = random_ints((pattern.vectors, 4), bits, True)
    vectors[pattern.row_indices == 5, 1:] = 0  # beyond row 21
    matrix = SRBCRS.from_pattern(pattern, vectors, bits=bits, stride=stride)
    for row in range(pattern.vector_rows):
        for lane in range(4):
            for i, vector in enumerate(range(int(pattern.row_offsets[row]), int(pattern.row_offsets[row + 1]))):
                block, k = divmod(int(matrix.row_start[row]) + i, stride)
                value = int(vectors[vector, lane])
                if bits == 4:
                    byte = int(matrix.values[block, lane, k // 2])
                    assert (byte >> (4 * (k % 2))) & 0xF == value & 0xF
                else:
                    assert int(matrix.values[block, lane, k]) == value


@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("bits", [4, 8, 12, 16])
def test_floats_are_quantized_as_the_quantizer_does(bits: int, axis: int | None) -> None:
    weight = torch.randn(19, 33, generator=torch.Generator().manual_seed(0)) * random_mask(19, 33, 0.3)
    expected = quantize(weight, bits, scale=SCALES[axis])
    matrix = SRBCRS.from_dense(weight, vector_length=4, bits=bits, scale=SCALES[axis])
    matrix.check_format(full=True)
    assert torch.equal(matrix.to_dense(dequantize=False), expected.ints())
    assert torch.equal(matrix.to_dense(), expected.dequantize())
    assert torch.equal(matrix.pattern.to_dense(), Pattern.from_dense(weight != 0, 4).to_dense())
    same = SRBCRS.from_mask(weight, weight != 0, vector_length=4, bits=bits, scale=SCALES[axis])
    assert torch.equal(same.values, matrix.values) and torch.equal(same.to_dense(), matrix.to_dense())


@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_floats_are_quantized_as_dense_ones(axis: int | None) -> None:
    weight = torch.randn(20, 33, generator=torch.Generator().manual_seed(1)) * random_mask(20, 33, 0.3)
    dense = SRBCRS.from_dense(weight, scale=SCALES[axis])
    for tensor in (weight.to_sparse(), weight.to_sparse_csr(), weight.to_sparse_bsr((4, 3))):
        assert torch.equal(SRBCRS.from_torch_sparse(tensor, scale=SCALES[axis]).to_dense(), dense.to_dense())
    from_scipy = SRBCRS.from_scipy(dense.to_scipy(dequantize=True), scale=SCALES[axis])
    assert torch.allclose(from_scipy.to_dense(), dense.to_dense(), rtol=1e-5)


def test_element_that_rounds_to_zero_stays_stored() -> None:
    weight = torch.tensor([[1.0, 1e-9]])
    matrix = SRBCRS.from_dense(weight, vector_length=1, bits=8)
    assert matrix.nnz == 2 and matrix.to_dense(dequantize=False).tolist() == [[127, 0]]


def test_scale_per_row_reaches_its_own_rows_when_the_last_vector_row_is_short() -> None:
    weight = torch.diag(torch.tensor([1.0, 10.0, 100.0, 1000.0, 1e-3]))
    matrix = SRBCRS.from_dense(weight, vector_length=4, scale="row")
    assert matrix.scale is not None and matrix.scale.shape == (5, 1)
    assert torch.allclose(matrix.to_dense(), weight)
    assert torch.allclose(torch.from_numpy(matrix.to_scipy().toarray()), weight)


def test_repeated_places_are_summed_before_the_range_check() -> None:
    index, values = torch.tensor([[0, 0, 2], [1, 1, 0]]), torch.tensor([100, -90, 3], dtype=torch.int8)
    tensor = torch.sparse_coo_tensor(index, values, (3, 2), check_invariants=True)
    matrix = SRBCRS.from_torch_sparse(tensor, vector_length=2)
    assert matrix.to_dense().tolist() == [[0, 10], [0, 0], [3, 0]]


def test_explicit_zeros_of_sparse_inputs_stay_stored() -> None:
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[0, 5], [1, 2]]), torch.tensor([0, 3]), (6, 4), check_invariants=True
    )
    assert SRBCRS.from_torch_sparse(tensor, vector_length=2).nnz == 4


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32])
def test_batched_results_keep_their_values(dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    pattern = random_pattern(13, 40, 0.7, 8)
    vectors = torch.randint(-99, 99, (*batch, pattern.vectors, 8)).to(dtype)
    matrix = SRBCRS.from_pattern(pattern, vectors, bits=None)
    matrix.check_format(full=True)
    dense = matrix.to_dense()
    assert matrix.batch_shape == batch and dense.shape == (*batch, 13, 40) and dense.dtype == dtype
    beyond = pattern.row_indices[:, None] * 8 + torch.arange(8) >= 13
    assert torch.equal(matrix.vectors(), vectors.masked_fill(beyond, 0))
    assert torch.equal(dense != 0, (dense != 0) & pattern.to_dense())
    assert torch.equal(matrix.transpose().to_dense(), dense.mT)
    assert torch.equal(matrix.to_bcrs().to_dense(), dense)


def test_caller_keeps_its_vectors_beyond_the_matrix() -> None:
    pattern = pattern_of([[0]], 1, vector_length=2)
    short = Pattern((1, 1), 2, pattern.row_offsets, pattern.col_indices)
    vectors = torch.tensor([[5, 6]], dtype=torch.int8)
    assert SRBCRS.from_pattern(short, vectors, bits=8).vectors().tolist() == [[5, 0]]
    assert vectors.tolist() == [[5, 6]]


@pytest.mark.parametrize("vector_length", VECTOR_LENGTHS)
def test_smtx_rows_become_vector_rows_with_the_whole_range(
    vector_length: int, tmp_path: pytest.TempPathFactory
) -> None:
    path = f"{tmp_path}/a.smtx"
    write_smtx(path, random_pattern(40, 64, 0.5, 1))
    matrix = SRBCRS.from_smtx(path, vector_length=vector_length, bits=4, signed=False)
    matrix.check_format(full=True)
    assert matrix.shape == (40 * vector_length, 64)
    assert sorted(set(matrix.ints().flatten().tolist())) == list(range(16))
    assert torch.equal(matrix.values, SRBCRS.from_smtx(path, vector_length=vector_length, bits=4, signed=False).values)


def test_pattern_rebuilt_from_pointers_is_the_pattern_it_came_from() -> None:
    matrix = SRBCRS.from_dense(random_ints((50, 70), 8, True) * random_mask(50, 70, 0.2))
    assert matrix._derive_pattern().equals(matrix.pattern)
    assert matrix.pattern is matrix.pattern


def test_execution_cache_is_not_copied() -> None:
    matrix = SRBCRS.from_dense(torch.eye(8, dtype=torch.int8))
    matrix._execution["x"] = 1
    assert matrix.to("cpu") is matrix
    assert matrix.to("meta")._execution == {}


def test_a_matrix_used_once_stays_so_elsewhere_and_forgets_its_copies() -> None:
    matrix = SRBCRS.from_dense(torch.eye(8, dtype=torch.int8))
    matrix._execution["x"], edition = 1, matrix._version_id
    matrix.single_use = False
    assert matrix._execution == {"x": 1} and matrix._version_id == edition, "nothing has changed"
    matrix.single_use = True
    assert matrix._execution == {} and matrix._version_id != edition
    assert (
        matrix.to("meta").single_use and copy.copy(matrix).single_use and matrix.with_values(matrix.values).single_use
    )
    assert not SRBCRS.from_dense(torch.eye(8, dtype=torch.int8)).single_use


def test_bytes_and_repr_count_every_tensor() -> None:
    matrix = SRBCRS.from_dense(torch.ones(8, 4), vector_length=8, bits=4, stride=16, scale="row")
    assert matrix.nbytes == 8 + 8 + 16 * 4 + 8 * 16 // 2 + 8 * 4
    assert repr(matrix) == (
        "SRBCRS(shape=(8, 4), vector_length=8, stride=16, values=int4, scale=per row, nnz=32, density=1, "
        "bytes=176, device=cpu)"
    )


# Corruptions: a matrix with vector rows of 3, 0, 40 and 32 vectors, the last one cut by M.  Each entry changes one tensor
# in place; the scan must name it.
def corruptible(scale: Tensor | None = None) -> SRBCRS:
    pattern = pattern_of([[0, 4, 9], [], list(range(5, 45)), list(range(32))], 50)
    pattern = Pattern((30, 50), 8, pattern.row_offsets, pattern.col_indices)
    scale = torch.ones(30, 1) if scale is None else scale
    return SRBCRS.from_pattern(pattern, torch.full((75, 8), 7), bits=12, scale=scale)


def put(name: str, *writes: tuple[object, float]) -> Callable[[SRBCRS], None]:
    def plant(matrix: SRBCRS) -> None:
        tensor: Tensor = getattr(matrix, name)
        for index, value in writes:
            tensor[index] = value  # type: ignore[index]

    return plant


CORRUPTIONS = {
    "first row_start not 0": (put("row_start", (0, 32)), r"row_start\[0\] must be 0, got 32"),
    "row_start negative": (put("row_start", (1, -32)), r"row_start\[1\] must lie in \[0, 128\], got -32"),
    "row_start huge": (put("row_start", (1, 2**62)), r"row_start\[1\] must lie in \[0, 128\], got 46116"),
    "row_start off the stride": (
        put("row_start", (1, 33)),
        r"row_start\[1\] must be a multiple of stride = 32, got 33",
    ),
    "row_start decreasing": (put("row_start", (1, 128)), r"row_start must not decrease, got 128 then 32"),
    "row_end before row_start": (put("row_end", (2, 31)), r"row_end\[2\] must be at least row_start\[2\] = 32, got 31"),
    "rows overlap": (
        put("row_end", (0, 33)),
        r"vector row 0 must end by 32, where the next one starts, got row_end 33",
    ),
    "row past its padding": (put("row_end", (3, 129)), r"vector row 3 must end by 128"),
    "padding of a whole stride": (put("row_end", (2, 60)), r"vector row 2 must be padded to 32 vectors, got 64"),
    "row longer than said": (put("row_end", (0, 2)), r"col_indices must be -1 in the padding, got 9 at 2"),
    "row shorter than said": (put("row_end", (0, 4)), r"col_indices must lie in \[0, 50\), got -1 at vector 3"),
    "column negative": (put("col_indices", (1, -1)), r"col_indices must lie in \[0, 50\), got -1 at vector 1"),
    "column at K": (put("col_indices", (2, 50)), r"col_indices must lie in \[0, 50\), got 50 at vector 2"),
    "columns unsorted": (put("col_indices", (1, 20)), r"increase inside a vector row, got 20 then 9 in vector row 0"),
    "columns twice": (put("col_indices", (40, 12)), r"increase inside a vector row, got 12 then 12 in vector row 2"),
    "padding index not -1": (put("col_indices", (5, 0)), r"col_indices must be -1 in the padding, got 0 at 5"),
    "padding value": (put("values", ((0, 2, 9), 1)), r"values must be zero in the padding"),
    "value over 12 bits": (put("values", ((0, 0, 0), 2048)), r"values must lie in \[-2048, 2047\]"),
    "value under 12 bits": (put("values", ((0, 0, 0), -2049)), r"values must lie in \[-2048, 2047\]"),
    "value beyond M": (put("values", ((3, 6, 0), 1)), r"values must be zero in rows beyond M = 30"),
    "scale zero": (put("scale", ((4, 0), 0.0)), r"scale must be positive and finite, got 0.0 at 4"),
    "scale negative": (put("scale", ((4, 0), -1.0)), r"scale must be positive and finite, got -1.0 at 4"),
    "scale infinite": (put("scale", ((4, 0), float("inf"))), r"scale must be positive and finite, got inf at 4"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_full_check_finds_planted_corruption(name: str) -> None:
    plant, message = CORRUPTIONS[name]
    matrix = corruptible()
    matrix.check_format(full=True)
    plant(matrix)
    matrix.check_format()
    with pytest.raises(ValueError, match=message):
        matrix.check_format(full=True)


def test_full_check_finds_a_nonzero_nibble_in_the_padding() -> None:
    matrix = SRBCRS.from_dense(torch.ones(8, 3, dtype=torch.int8), bits=4)
    matrix.values[0, 0, 1] |= 0x10  # vector 3, the first of the padding
    with pytest.raises(ValueError, match="values must be zero in the padding"):
        matrix.check_format(full=True)


def test_full_check_finds_columns_without_rows() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    columns = torch.full((32,), -1, dtype=torch.int32)
    values = torch.zeros(1, 8, 32, dtype=torch.int8)
    matrix = SRBCRS(empty, empty, columns, values, shape=(0, 4), vector_length=8, bits=8)
    with pytest.raises(ValueError, match="col_indices must be empty without vector rows, got 32"):
        matrix.check_format(full=True)


def test_nan_scale_is_legal() -> None:
    corruptible(scale=torch.tensor(float("nan"))).check_format(full=True)


def test_bcrs_and_srbcrs_agree_on_every_field_of_the_source() -> None:
    weight = torch.randn(20, 33, generator=torch.Generator().manual_seed(3))
    a, b = SRBCRS.from_dense(weight, scale="row"), BCRS.from_dense(weight, scale="row")
    assert (a.shape, a.bits, a.signed, a.vector_length) == (b.shape, b.bits, b.signed, b.vector_length)
    assert torch.equal(a.to_dense(), b.to_dense())
