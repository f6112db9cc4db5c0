"""Every matrix of the DLMC sample is multiplied once; rows picked at random are checked against int64."""

from pathlib import Path

import pytest
import torch

import magicube_cutlass as mc
from cute_kernels.integers import int_range, widen
from tests.helpers import data_folder

VECTORS = (2, 4, 8)
ROWS_CHECKED = 8


def matrices() -> list[Path]:
    folder = data_folder()
    return sorted((folder / "matrices").rglob("*.smtx.gz")) if folder else []


@pytest.mark.skipif(not matrices(), reason="no DLMC sample: set MAGICUBE_DATA to a folder that holds dlmc/matrices")
def test_every_matrix_of_the_sample_multiplies_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    found = matrices()
    assert len(found) == 287
    for i, path in enumerate(found):
        v, (left, right) = VECTORS[i % 3], mc.SPMM_PAIRS[i % len(mc.SPMM_PAIRS)]
        a = mc.SRBCRS.from_smtx(path, vector_length=v, bits=left, seed=i)
        low, high = int_range(right, True)
        b = mc.QuantTensor.from_ints(torch.randint(low, high + 1, (a.shape[1], 33), generator=generator), bits=right)
        c = mc.spmm(a, b, out_dtype=torch.int64)
        assert c.shape == (a.shape[0], 33)
        offsets, columns = a.pattern.row_offsets, a.pattern.col_indices.long()
        vectors, wide = widen(a.vectors()), widen(b.ints())
        for row in torch.randint(a.pattern.vector_rows, (ROWS_CHECKED,), generator=generator).tolist():
            begin, end = int(offsets[row]), int(offsets[row + 1])
            expected = vectors[begin:end].mT @ wide[columns[begin:end]]  # (V, 33)
            assert torch.equal(c[row * v : (row + 1) * v], expected), f"{path.name}, vector row {row}"
