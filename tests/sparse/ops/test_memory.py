"""Products need memory in proportion to their operands, whatever the sizes of their shapes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import magicube_cutlass as mc
from cute_kernels.cpu import calls, engine
from cute_kernels.integers import int_range

# The peak is that of the process: each measurement has one of its own. Prints MiB of growth.
MEASURE = """
import resource, torch
import magicube_cutlass as mc
torch.set_num_threads(2)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
K = 2**24
warm = mc.SRBCRS.from_dense(torch.eye(8, 64, dtype=torch.int8), vector_length=8)
mc.spmm(warm, mc.QuantTensor.from_ints(torch.ones(64, 1, dtype=torch.int8), bits=8))
pattern = mc.Pattern((8, K), 8, torch.tensor([0, 1]), torch.tensor([K - 1], dtype=torch.int32))
A = mc.SRBCRS.from_pattern(pattern, torch.ones(1, 8, dtype=torch.int8), bits=8)
B = mc.QuantTensor.from_ints(torch.ones(K, 1, dtype=torch.int8), bits=8)
before = peak()
for _ in range(2):
    assert mc.spmm(A, B, out_dtype=torch.int64).tolist() == [[1]] * 8
print(peak() - before)
"""


def test_a_single_nonzero_in_many_columns_needs_little_memory() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64  # B has 16 MiB; a panel of all its rows has 1024


@pytest.mark.parametrize("isa", engine.isas())
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [4, 8, 12, 16])
@pytest.mark.parametrize("n", [1, 70])
@pytest.mark.parametrize("vectors", [0, 40])
def test_products_without_the_unused_rows_of_the_dense_operand_are_exact(
    isa: str, signed: bool, bits: int, n: int, vectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGICUBE_CPU", isa)
    monkeypatch.setattr(calls, "_LARGE_PANEL", 0)
    m, k = 56, 3001
    columns = torch.randint(0, k, (vectors,)).unique().sort().values
    rows = torch.tensor([0, 0, len(columns) // 2, *[len(columns)] * 5])  # the first and the last vector rows are empty
    values = torch.randint(-128, 128, (len(columns), 8))
    A = mc.SRBCRS.from_pattern(mc.Pattern((m, k), 8, rows, columns.int()), values, bits=16)
    low, high = int_range(bits, signed)
    for batch, order in (((), "row"), ((3,), "row"), ((), "column")):
        ints = torch.randint(low, high + 1, (*batch, k, n))
        ints = ints.mT.contiguous().mT if order == "column" else ints
        B = mc.QuantTensor.from_ints(ints, bits=bits, signed=signed)
        expected = mc.reference.spmm(A, B)
        for _ in range(2):  # the second call is a cached one
            assert torch.equal(mc.spmm(A, B, out_dtype=torch.int64), expected)
