"""SpMM of few columns: rows of B of 16, 32 and 64 bytes, records of A on their way, results that fill no strip."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import magicube_cutlass as mc
from cute_kernels.jit import get_kernel
from cute_kernels.jit.kernel import recording
from cute_kernels.machine import SHARED_BYTES, Problem, ProblemTypes
from cute_kernels.spmm.heuristics import SpmmKernel, candidates
from cute_kernels.spmm.panel import PanelConfig
from magicube_cutlass.ops.spmm import early_spmm
from tests.gpu.problems import HERE, PANELS, check_spmm, dense, gather, kind, panel, resident, sparse, spmm

pytestmark = pytest.mark.gpu

COLUMNS = (1, 2, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 60, 64, 65)
PAIRS = [(8, 8), (8, 4), (4, 4), (16, 8), (16, 16), (12, 4)]
SIZES = {8: (16, 32, 64), 4: (16, 32, 64), 16: (32, 64)}  # bytes of a row of B, by the width of its elements


def knobs() -> list[SpmmKernel]:
    """Every width of a row with every number of records, of each pair; few warps and short tiles."""
    found: list[SpmmKernel] = []
    for i, (left, right) in enumerate(PAIRS):
        of = kind((8, 2, 4, 1, 8, 16)[i], (left, True), (right, i % 2 == 0))
        for size in SIZES[right]:
            found.append(gather(of, tile_n_bytes=size, split_k_warps=2))
            if PANELS:
                found += [
                    panel(of, tile_n_bytes=size, a_stages=records, rows_per_warp=1 + records % 2)
                    for records in (0, 3, 8)
                ]
                found.append(panel(of, tile_n_bytes=size, a_stages=4, cluster=2, tile=512))
                held = [
                    resident(of, tile_n_bytes=size, cluster=cluster, warps=warps, together=together)
                    for cluster, warps, together in ((1, 3, 2), (2, 16, 4), (4, 5, 1))
                ]
                found += [each for each in held if each.smem_bytes <= SHARED_BYTES]
    return found


@pytest.mark.parametrize("config", knobs(), ids=lambda config: config.name)
def test_every_width_of_a_row_is_exact(config: SpmmKernel) -> None:
    torch.manual_seed(1)
    v, left, right = config.vector_length, config.a, config.b
    for k, n in ((2112, 16), (1331, 16), (520, 9), (700, 33), (260, 100)):
        check_spmm(sparse(150, k, v, left, sparsity=0.8, empty=True), dense((k, n), right), config)
    check_spmm(sparse(90, 600, v, left, sparsity=0.1, extreme=True), dense((2, 600, 16), right, extreme=True), config)


KINDS = [kind(8, (left, True), (right, True), "float32") for left, right in PAIRS]
FITTING = [
    each
    for of, n in product(KINDS, (16, 32, 64))
    for each in candidates(of, HERE, Problem(vector_rows=40, inner=4096, vectors=40 * 900, longest=1000, n=n))
]


@pytest.mark.skipif(not PANELS, reason="needs bulk copies and clusters")
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.configs([resident(kind(8, (4, True), out="float32"), cluster=cluster) for cluster in (1, 2)])
def test_rows_are_read_where_they_are(cluster: int, early: bool) -> None:
    """Any pitch and alignment, uneven vector rows, a launch that starts early; nothing but the product is launched."""
    torch.manual_seed(4)
    config, bias = resident(kind(8, (4, True), out="float32"), cluster=cluster), torch.randn(333, device="cuda")
    mask = (torch.rand(42, 2000) < torch.rand(42, 1) ** 4).repeat_interleave(8, 0)[:333]
    A = mc.SRBCRS.from_mask(torch.randn(333, 2000), mask, vector_length=8, bits=4, scale="row").cuda()
    aligned = [(16, 16, 0), (9, 48, 16)]
    others = [(16, 16, 8), (8, 8, 0), (7, 24, 8), (4, 4, 0), (12, 12, 0), (1, 1, 0), (1, 3, 5), (5, 5, 1), (40, 41, 2)]
    for n, pitch, first in (*aligned, *others):
        memory = torch.randint(-128, 128, (2000 * pitch + first,), dtype=torch.int8, device="cuda")
        rows = memory.as_strided((2000, n), (pitch, 1), first)
        B = mc.QuantTensor(rows, torch.rand(1, n, device="cuda") + 0.5, 8, True, 0, torch.Size((2000, n)))
        arguments = (A, B, torch.float32, bias, None, None, config, False, early)
        first_call = early_spmm(*arguments)  # packs A
        recording.launches = []
        try:
            got = early_spmm(*arguments)
            assert [each[0].name for each in recording.launches] == [get_kernel(config).name]
        finally:
            recording.launches = None
        assert torch.equal(got, first_call)
        want = mc.spmm(A, B, out_dtype=torch.float32, bias=bias, config=gather(kind(8, (4, True), out="float32")))
        assert torch.equal(got, want), (n, pitch, first)


def test_few_columns_are_read_as_what_they_are() -> None:
    """Rows of B as long as they are, and records ahead in every panel kernel."""
    assert {(each.b.bits, each.tile_n_bytes) for each in FITTING} >= {(8, 16), (8, 32), (8, 64), (4, 16), (16, 32)}
    assert all(each.a_stages >= 3 for each in FITTING if isinstance(each, PanelConfig))


@pytest.mark.parametrize("of", KINDS, ids=lambda of: f"{of.lhs.bits}x{of.rhs.bits}")
@pytest.mark.configs(FITTING)
def test_every_number_of_columns_with_scales_and_a_bias(of: ProblemTypes) -> None:
    torch.manual_seed(2)
    left, right = of.lhs, of.rhs
    mask, bias = mc.random_pattern(264, 1024, 0.5, 8, seed=3).to_dense(), torch.randn(264)
    A = mc.SRBCRS.from_mask(torch.randn(264, 1024), mask, vector_length=8, bits=left.bits, scale="row")
    for n, axis in product(COLUMNS, (None, 0)):
        b = dense((1024, n), right)
        scale = torch.rand(1, n) + 0.5 if axis == 0 else torch.tensor(0.7)
        B = mc.QuantTensor(b.data, scale, b.bits, b.signed, axis, b.shape)
        for out in (torch.float16, torch.float32):
            got = spmm(A, B, out, bias=bias)
            here = mc.spmm(A, B, out_dtype=out, bias=bias)
            assert torch.allclose(got.float(), here.float(), rtol=2e-3 if out == torch.float16 else 1e-5, atol=1e-2), n
    whole = sparse(264, 1024, 8, left, sparsity=0.5)
    for n in COLUMNS:
        check_spmm(whole, dense((1024, n), right))
        check_spmm(whole, dense((1024, n), right), offset=1)
