"""Products of tokens that are cut over ranks, on one GPU: quantized columns, what an all-gather leaves, rows' amaxes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import magicube_cutlass as mc
from cute_kernels.convert.quantize_transposed import amax_rows, quantize_transposed
from cute_kernels.jit.workspace import Kept
from magicube_cutlass.autograd.gpu_rows import multiply_columns
from magicube_cutlass.autograd.integer import quantized
from magicube_cutlass.distributed import SparseRowwise, cut_tokens, parallel
from magicube_cutlass.distributed.local_products import DensePart, LayerPart, SparsePart
from magicube_cutlass.distributed.peers import Peers
from magicube_cutlass.distributed.sharded import columns_of
from magicube_cutlass.distributed.slices import quantize_by_scale, quantize_slices
from magicube_cutlass.quantization.quant_tensor import QuantTensor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("m", "k", "n", "ranks"), [(64, 48, 5, 0), (61, 300, 96, 3), (256, 512, 2048, 0), (64, 300, 512, 2)]
)
def test_products_of_quantized_columns_are_contiguous_rows_with_the_same_bits(
    dtype: torch.dtype, m: int, k: int, n: int, ranks: int
) -> None:
    torch.manual_seed(n)
    A = mc.SRBCRS.from_dense(torch.randn(m, k) * (torch.rand(m, k) < 0.2), vector_length=8, scale="row").to("cuda")
    bias = torch.randn(m, device="cuda")
    x = torch.randn(max(ranks, 1), n, k, device="cuda")
    for scale in (None, torch.tensor(0.02, device="cuda")):
        ints = [quantize_transposed(part, scale) for part in x]
        by = scale if scale is not None else torch.cat([of_part for _, of_part in ints])
        columns = torch.stack([data for data, _ in ints]) if ranks else ints[0][0]
        products = []
        for data, of_part in ints:
            axis = 0 if of_part.ndim else None
            b = QuantTensor(data, of_part.mT if of_part.ndim else of_part, 8, True, axis, data.shape)
            products.append(mc.spmm(A, b, out_dtype=dtype, bias=bias).mT)
        expected = torch.cat(products)
        for _ in range(3):  # the last ones replay
            found = multiply_columns(A, columns, by, dtype, bias)
            assert found is not None and found.is_contiguous() and torch.equal(found, expected)
        whole = torch.zeros(len(expected) + 2, m, dtype=dtype, device="cuda")
        given = multiply_columns(A, columns, by, dtype, bias, whole[1:-1])
        assert given is not None and torch.equal(whole[1:-1], expected) and not whole[[0, -1]].any()


class _Mesh:
    """Stands for a mesh of two ranks, of which this process is one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def size(self) -> int:
        return 2

    def get_local_rank(self) -> int:
        return self.rank

    def get_group(self) -> str:
        return f"of two, {self.rank}"


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("rank", [0, 1])
def test_tokens_of_all_ranks_are_multiplied_where_an_all_gather_leaves_them(
    rank: int, kind: str, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(rank)
    tokens, inner, out = 48, 320, 200
    x = torch.randn(2 * tokens, inner, device="cuda", dtype=torch.bfloat16)
    act_scale, bias = torch.tensor(0.03, device="cuda") if static else None, torch.randn(out, device="cuda")
    dense = torch.randn(out, inner) * (torch.rand(out, inner) < 0.2)
    part: LayerPart
    if kind == "sparse":
        part = SparsePart(mc.SRBCRS.from_dense(dense, vector_length=8, scale="row").to("cuda"), (0, out))
    else:
        ints = quantized(dense.cuda(), 8, 1)
        assert ints.scale is not None
        part = DensePart(ints.data, ints.scale, (0, out))
    expected = part.run(x, bias, 8, act_scale)
    own, other = x[rank * tokens :][:tokens], x[(1 - rank) * tokens :][:tokens]

    def arrive(parts: list[torch.Tensor], mesh: _Mesh) -> Callable[[], None]:
        def finish() -> None:
            part._quantize_own(other, act_scale, parts[0][1 - rank], None if static else parts[1][1 - rank], Kept(1))

        return finish

    monkeypatch.setattr(cut_tokens, "peers_of", lambda _: None)
    monkeypatch.setattr(cut_tokens, "start_gather_in_place", arrive)
    for overlaps in (False, True, False):
        mesh: Any = _Mesh(rank)
        found = part.multiply_cut(own, act_scale, mesh, bias, overlaps)
        assert found is not None and torch.equal(found, expected)
    by = torch.full((tokens, 1), 0.05, device="cuda")
    wanted = part.multiply(quantize_by_scale(own, by, 8), torch.bfloat16, None)
    into = torch.zeros_like(wanted)
    assert torch.equal(part.multiply_floats(own, by, 8, torch.bfloat16), wanted)
    assert part.multiply_floats(own, by, 8, torch.bfloat16, None, into) is not None and torch.equal(into, wanted)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_scales_are_written_where_they_are_asked_for_though_integers_stay_in_place(kind: str) -> None:
    rows, weight = torch.randn(48, 320, device="cuda"), torch.randn(64, 320)
    part: LayerPart = SparsePart(mc.SRBCRS.from_dense(weight, vector_length=8, scale="row").to("cuda"), (0, 64))
    data = torch.empty(320, 48, dtype=torch.int8, device="cuda")
    if kind == "dense":
        ints = quantized(weight.cuda(), 8, 1)
        assert ints.scale is not None
        part, data = DensePart(ints.data, ints.scale, (0, 64)), data.view(48, 320)
    launches, wanted = Kept(4), rows.abs().amax(1, keepdim=True) / 127  # (48, 1)
    for scale in torch.zeros(4, 48, 1, device="cuda"):  # the first calls make what the last would replay
        part._quantize_own(rows, None, data, scale, launches)
        torch.testing.assert_close(scale, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 77), (300, 7168)])
def test_largest_magnitudes_of_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda").to(dtype)
    if shape[0] > 4:
        x[1, 3], x[2, 0], x[3] = torch.nan, -torch.inf, 0
    found = amax_rows(x).view(torch.float32)
    expected = x.float().abs().amax(1, keepdim=True)
    assert torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1))
    wide = torch.full((shape[0], shape[1] + 1), 1e30, device="cuda").to(dtype)
    wide[:, 1:] = x
    assert torch.equal(amax_rows(wide[:, 1:]).view(torch.float32).nan_to_num(-1), expected.nan_to_num(-1))


class _Handle:
    """Stands for barriers."""

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """Wait for nobody."""


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("rank", [0, 1])
def test_exact_sums_of_ranks_equal_one_process(
    rank: int, kind: str, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(rank)
    tokens, inner, out = 96, 320, 200
    x, half = torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16), inner // 2
    bias, ints = torch.randn(out, device="cuda") if biased else None, quantize_slices(x, 8)
    weight = torch.randn(out, inner) * (torch.rand(out, inner) < 0.2)
    cuts = ((0, half), (half, inner))
    whole: LayerPart
    parts: list[LayerPart]
    if kind == "sparse":
        A = mc.SRBCRS.from_dense(weight, vector_length=8, scale="row").to("cuda")
        whole, parts = SparsePart(A, (0, inner)), [SparsePart(columns_of(A, *cut), (0, half, inner)) for cut in cuts]
    else:
        found = quantized(weight.cuda(), 8, 1)
        assert found.scale is not None
        whole = DensePart(found.data, found.scale, (0, inner))
        parts = [DensePart(found.data[:, a:b].contiguous(), found.scale, (0, half, inner)) for a, b in cuts]
    expected = whole.multiply(ints, torch.bfloat16, bias)
    memory = [torch.zeros(4 * tokens * out, dtype=torch.int8, device="cuda") for _ in parts]
    own, other = parts[rank], parts[1 - rank]
    theirs = memory[1 - rank].view(torch.int32)
    theirs = theirs.view(out, tokens).mT if other.sums_are_columns else theirs.view(tokens, out)
    other.sums(ints.inner(*cuts[1 - rank]), inner, theirs)
    peers = Peers.__new__(Peers)
    peers.rank, peers.ranks = rank, 2
    monkeypatch.setattr(peers, "memory", lambda use, size: (memory, _Handle()))
    monkeypatch.setattr(parallel, "peers_of", lambda _: peers)
    mesh: Any = _Mesh(rank)
    layer: Any = SimpleNamespace(part=own, mesh=mesh, bias_value=bias)
    style = SparseRowwise(output_layouts=Shard(0))
    summed = style._scaled_sums(layer, ints.inner(*cuts[rank]), torch.bfloat16)
    assert summed is not None and torch.equal(summed, expected[rank * tokens // 2 :][: tokens // 2])
