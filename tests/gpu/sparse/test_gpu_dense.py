"""``spmm(..., allow_dense=True)`` on a GPU: the dense kernel's results, and when it is taken."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from magicube_cutlass.dispatch import dense_fallback as dense_product
from magicube_cutlass.dispatch.dense_fallback import DenseCall, Forecast, forecast
from tests.gpu.problems import dense, guarded, sparse

pytestmark = pytest.mark.gpu

BYTES = ((8, True), (4, True), (4, False))


@pytest.fixture
def dense_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense product is expected to be faster wherever it is possible."""
    real = dense_product.forecast

    def eager(*arguments: object) -> Forecast | None:
        found = real(*arguments)  # type: ignore[arg-type]
        return found and replace(found, dense=0.0)

    monkeypatch.setattr(dense_product, "forecast", eager)


def kept(a: mc.SRBCRS) -> list[DenseCall]:
    return [call for call in a._execution.get("records", {}).values() if isinstance(call, DenseCall)]


@pytest.mark.usefixtures("dense_wins")
@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize(("left", "right"), list(itertools.product(BYTES, BYTES)))
def test_integers_equal_the_reference(left: tuple[int, bool], right: tuple[int, bool], layout: str) -> None:
    for (m, k, n), batch in (((50, 301, 67), ()), ((129, 1024, 128), (3,)), ((8, 40, 1), ())):
        a, b = sparse(m, k, 8, left, extreme=True), dense((*batch, k, n), right, layout, extreme=True)
        there = a.to("cuda")
        out, memory = guarded((*batch, m, n), torch.int32)
        mc.spmm(there, b.to("cuda"), out=out, allow_dense=True)
        assert kept(there)
        assert torch.equal(out.cpu().long(), mc.reference.spmm(a, b))
        assert bool((memory[: out.storage_offset()] == memory[0]).all())


@pytest.mark.usefixtures("dense_wins")
@pytest.mark.parametrize("out", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_floats_are_those_of_the_sparse_kernel(out: torch.dtype, biased: bool) -> None:
    """Both scale the exact sum in float32, three roundings at most, and round to the output."""
    torch.manual_seed(0)
    plain, ints = sparse(100, 700, 8, (8, True)), dense((2, 700, 72), (8, True)).ints()
    for rows, columns in itertools.product((False, True), (False, True)):
        left = torch.rand(100, 1) + 0.5 if rows else torch.tensor(0.01)
        right = (torch.rand(2, 1, 72) + 0.5) / 128 if columns else torch.tensor(0.007)
        a = mc.SRBCRS.from_pattern(plain.pattern, plain.vectors(), bits=8, scale=left).to("cuda")
        b = mc.QuantTensor.from_ints(ints, bits=8, scale=right).to("cuda")
        bias = torch.randn(100, device="cuda") if biased else None
        got = mc.spmm(a, b, out_dtype=out, bias=bias, allow_dense=True)
        assert kept(a)
        expected = mc.spmm(a, b, out_dtype=out, bias=bias)
        exact = (mc.reference.spmm(plain, b.to("cpu")).double() * left * right).cuda()
        shift = torch.zeros(100, 1).to(exact) if bias is None else bias.double()[:, None]
        # of float32's three roundings, of one to the output, and of float16's smallest numbers
        bound = (2.0**-22 + torch.finfo(out).eps / 2) * (exact.abs() + shift.abs()) + 2.0**-25
        assert bool(((got.double() - exact - shift).abs() <= bound).all())
        assert bool(((got.double() - expected.double()).abs() <= 2 * bound).all())


@pytest.mark.usefixtures("dense_wins")
def test_a_graph_replays_the_dense_product_with_new_data() -> None:
    a, b = sparse(64, 512, 8, (8, True)).to("cuda"), dense((512, 96), (8, True)).to("cuda")
    out = torch.empty(64, 96, dtype=torch.int32, device="cuda")
    mc.spmm(a, b, out=out, allow_dense=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mc.spmm(a, b, out=out, allow_dense=True)
    for seed in range(3):
        torch.manual_seed(seed)
        b.data.copy_(dense((512, 96), (8, True)).data)
        out.fill_(-1)
        graph.replay()
        assert torch.equal(out.cpu().long(), mc.reference.spmm(a.to("cpu"), b.to("cpu")))


def test_a_full_matrix_is_multiplied_as_a_dense_one_and_a_thin_one_is_not() -> None:
    def product(sparsity: float) -> tuple[mc.SRBCRS, mc.QuantTensor, Tensor]:
        a = sparse(2048, 2048, 8, (8, True), sparsity=sparsity).to("cuda")
        b = dense((2048, 512), (8, True)).to("cuda")
        return a, b, mc.spmm(a, b, allow_dense=True)

    full, b, got = product(0.0)
    assert kept(full) and "dense would be faster" in mc.explain(full, b)
    assert torch.equal(got, mc.spmm(full, b))
    thin, b, got = product(0.95)
    assert not kept(thin) and "dense would not be faster" in mc.explain(thin, b)
    assert torch.equal(got, mc.spmm(thin, b))


def test_b_that_is_copied_first_counts_against_the_product_that_copies() -> None:
    a = sparse(256, 1024, 8, (8, True)).to("cuda")
    row, column = (forecast(a, dense((1024, 256), (8, True), layout).to("cuda"), torch.int32)
                   for layout in ("row", "column"))  # fmt: skip
    assert row is not None and column is not None
    assert row.dense > column.dense
    assert row.sparse < column.sparse
