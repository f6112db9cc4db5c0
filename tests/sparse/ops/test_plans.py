"""What a kernel is given of a matrix: short vectors merged into those that fill the instruction."""

import pytest
import torch

pytest.importorskip("pycute")

import magicube_cutlass as mc
from magicube_cutlass.dispatch.plan import _vectors, problem, spmm_problem
from tests.helpers import random_ints


@pytest.mark.parametrize(("v", "longer"), [(1, 8), (2, 8), (4, 8), (8, 16), (8, 8)])
@pytest.mark.parametrize(("bits", "signed"), [(4, True), (8, False), (16, True), (16, False)])
def test_merged_vectors_are_the_same_matrix(v: int, longer: int, bits: int, signed: bool) -> None:
    pattern = mc.random_pattern(43, 60, 0.7, v, seed=2)
    values = random_ints((pattern.vectors, v), bits, signed).long()
    values[(pattern.row_indices[:, None] * v + torch.arange(v)) >= 43] = 0
    matrix = mc.SRBCRS.from_pattern(pattern, values, bits=bits, signed=signed)
    got = _vectors(matrix, longer)
    again = mc.SRBCRS.from_pattern(
        mc.Pattern((43, 60), longer, got.row_offsets, got.columns), got.values, bits=bits, signed=signed
    )
    assert torch.equal(again.to_dense(), matrix.to_dense())
    assert (*got.element_type, got.values.shape[1]) == (bits, signed, longer)


def test_the_choice_sees_merged_vectors_on_a_gpu_alone() -> None:
    pattern = mc.random_pattern(4096, 1024, 0.9, 2, seed=3)
    sizes = problem(pattern, 8, 512, 1)
    merged = pattern.merge_map(8).pattern
    assert (sizes.vector_rows, sizes.vectors) == (512, merged.vectors)
    assert sizes.longest == int(merged.row_lengths.max())
    assert sizes.vectors < 0.9 * pattern.vectors
    matrix = mc.SRBCRS.from_pattern(pattern, torch.ones(pattern.vectors, 2, dtype=torch.int64), bits=8)
    kind, here = spmm_problem(matrix, (8, True), torch.int32, 512, 1)
    assert kind.vector_length == 2 and here.vectors == pattern.vectors
