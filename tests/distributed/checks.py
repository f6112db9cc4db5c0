"""What ranks check together; every function runs on all of them."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

import magicube_cutlass as mc
import magicube_cutlass.distributed as md
from magicube_cutlass.distributed.attention import gathered_keys
from magicube_cutlass.distributed.collectives import chunk_bounds, start_gather
from magicube_cutlass.distributed.cost_model import LinearShape, traffic
from tests.distributed import problems
from tests.house import ROOT


def generator(seed: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def raises(kind: type[BaseException], call: Any, *arguments: Any, **options: Any) -> str:
    """The message of the error that a call raises."""
    try:
        call(*arguments, **options)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def check_shard_and_unshard(mesh: DeviceMesh) -> None:
    for seed in range(0, 21, 1 if mesh.size() == 2 else 2):  # every shape, one or two ways
        m, k, _ = problems.SHAPES[seed // 3]
        by, kind = ("rows", "nnz", "columns")[seed % 3], ("SRBCRS", "BCRS")[seed % 2]
        bits, v = ((8, 8), (4, 2), (16, 1), (8, 4))[seed % 4]
        A = problems.matrix(m, k, generator(seed), kind=kind, bits=bits, v=v, scaled=seed % 5 > 1)
        part = md.shard(A, mesh, by)
        start, stop = part.span
        rows = slice(None) if by == "columns" else slice(start, stop)
        columns = slice(start, stop) if by == "columns" else slice(None)
        assert torch.equal(part.local.to_dense(), A.to_dense()[rows, columns]), (m, k, kind, by)
        assert part.bounds[0] == 0 and part.bounds[-1] == (k if by == "columns" else m)
        whole = md.unshard(part)
        aligned = all(cut % v == 0 or cut == m for cut in part.bounds) or by == "columns"
        assert whole.equals(A) if aligned else torch.equal(whole.to_dense(), A.to_dense())


def check_nnz_balances(mesh: DeviceMesh) -> None:
    mask = torch.zeros(128, 64, dtype=torch.bool)
    mask[:16] = True  # an eighth of the rows has almost everything
    mask[16:, 0] = True
    A = mc.SRBCRS.from_dense(mask.to(torch.int8), vector_length=4)
    part = md.shard(A, mesh, "nnz")
    longest = int(A.pattern.row_lengths.max())
    assert part.local.pattern.vectors <= A.pattern.vectors / mesh.size() + longest


PER_MATRIX = 8


def products_of(mesh: DeviceMesh, seed: int) -> None:
    """Random products with one matrix, wherever the operands are cut, against those of one process."""
    rng = generator(seed)
    m, k = (int(torch.randint(1, 70, (), generator=rng)) for _ in range(2))
    by = ("rows", "nnz", "columns")[seed % 3]
    kind, bits, v = ("SRBCRS", "BCRS")[seed // 3 % 2], (8, 4, 16, 8)[seed // 6 % 4], (8, 1, 2, 4)[seed // 24 % 4]
    floats = seed % 5 != 0
    A = problems.matrix(m, k, rng, kind=kind, bits=bits, v=v, scaled=floats)
    part = md.shard(A, mesh, by, check=False)
    for i in range(PER_MATRIX):
        n, way = int(torch.randint(1, 70, (), generator=rng)), int(torch.randint(0, 2520, (), generator=rng))
        B = problems.activations(k, n, rng) if floats else problems.integers(k, n, rng)
        bias = torch.randn(m, generator=rng) if floats and way % 2 else None
        dtype = (torch.float32, torch.bfloat16, torch.float16)[way // 2 % 3] if floats else torch.int32
        q = mc.quantize(B, 8, "column") if floats else mc.QuantTensor.from_ints(B, bits=8)
        expected = mc.spmm(A, q, out_dtype=dtype, bias=bias)
        place = [Replicate(), Shard(1), Shard(0)][way // 6 % (3 if by == "columns" else 2)]
        wanted = [Replicate(), Shard(0), Shard(1)][way // 18 % (3 if by == "columns" else 2)]
        given = distribute_tensor(B, mesh, [place], src_data_rank=None)
        found = md.spmm(part, given, out_dtype=dtype, bias=bias, placements=[wanted])
        assert found.placements == (wanted,) and found.dtype == dtype and found.shape == expected.shape
        own, whole = found.to_local(), expected
        if i == 0:
            own = found.full_tensor()
        elif isinstance(wanted, Shard):
            bounds, rank = chunk_bounds(expected.shape[wanted.dim], mesh.size()), mesh.get_local_rank()
            whole = expected.narrow(wanted.dim, bounds[rank], bounds[rank + 1] - bounds[rank])
        assert torch.equal(own, whole), (seed, i, by, place, wanted)


def check_products(mesh: DeviceMesh, first: int = 0, count: int = 24) -> int:
    """How many random products, each equal to that of one process."""
    for seed in range(first, first + count // PER_MATRIX):
        products_of(mesh, seed)
    return count // PER_MATRIX * PER_MATRIX


def check_partial_sums(mesh: DeviceMesh) -> None:
    A, B = problems.matrix(40, 48, generator(1), scaled=False), problems.integers(48, 6, generator(2))
    part = md.shard(A, mesh, "columns")
    found = md.spmm(part, distribute_tensor(B, mesh, [Shard(0)]), placements=[Partial()])
    assert found.placements == (Partial(),) and found.dtype == torch.int32
    assert torch.equal(found.full_tensor(), mc.spmm(A, mc.QuantTensor.from_ints(B, bits=8)))
    ones = torch.ones(48, 6, dtype=torch.int8)
    of_sums = md.spmm(part, DTensor.from_local(ones, mesh, [Partial()], run_check=False)).full_tensor()
    assert torch.equal(of_sums, mc.spmm(A, mc.QuantTensor.from_ints(ones * mesh.size(), bits=8)))


def check_sddmm(mesh: DeviceMesh) -> None:
    for seed, (m, n, k) in enumerate(problems.SHAPES if mesh.size() == 2 else problems.SHAPES[mesh.size() % 2 :: 2]):
        rng = generator(seed)
        A = problems.matrix(m, n, rng, scaled=False, v=(8, 2, 1)[seed % 3])
        floats = seed % 2 == 0
        X, Y = ((problems.activations if floats else problems.integers)(rows, k, rng) for rows in (m, n))
        pair = [mc.quantize(x, 8, "row") if floats else mc.QuantTensor.from_ints(x, bits=8) for x in (X, Y)]
        expected = mc.sddmm(*pair, A.pattern).to_dense()
        for by in ("rows", "nnz", "columns")[seed % 2 :]:
            mask = md.shard(A, mesh, by, check=False)
            if by == "rows" and any(cut % A.vector_length and cut != m for cut in mask.bounds):
                continue  # zeros filled in are places of the mask
            x, y = (distribute_tensor(t, mesh, [p]) for t, p in ((X, Shard(0)), (Y, (Shard(0), Replicate())[seed % 2])))
            found = md.unshard(md.sddmm(x, y, mask))
            assert torch.equal(found.to_dense(), expected), (m, n, k, by)


def model(hidden: int = 52, *, static: bool = False) -> nn.Sequential:
    """Two converted layers; the cuts of the inner width lie inside of vectors."""
    torch.manual_seed(5)
    made = nn.Sequential(nn.Linear(40, hidden), nn.ReLU(), nn.Linear(hidden, 24)).eval()
    batches = [torch.randn(16, 40)] if static else None
    mc.convert(made, mc.nn.SparseQuantConfig(sparsity=0.5), calibrate=batches, progress=False)
    return made


def exchanged(call: Callable[[], Any]) -> tuple[dict[str, int], Any]:
    """Collectives of a call by name, and what it returns."""
    with CommDebugMode() as mode:
        found = call()
    counts = {str(op).split(".")[-1].strip("_"): count for op, count in mode.get_comm_counts().items()}
    return counts, found


def check_parallel_styles(mesh: DeviceMesh) -> None:
    for static in (False, True) if mesh.size() == 2 else (mesh.size() == 3,):
        for chunks, dim, shape in ((1, 0, (12, 40)), (3, 1, (2, 12, 40)), (1, 0, (5, 12, 40))):
            x = torch.randn(shape, generator=generator(3))
            with torch.no_grad():
                expected = model(static=static)(x)
                plan = {"0": md.SparseColwise(), "2": md.SparseRowwise()}
                found = parallelize_module(model(static=static), mesh, plan)(x)
                assert torch.equal(found, expected), (found - expected).abs().max()
                plan = {
                    "0": md.SparseColwise(input_layouts=Shard(dim), chunks=chunks),
                    "2": md.SparseRowwise(output_layouts=Shard(dim), use_local_output=False),
                }
                made = parallelize_module(model(static=static), mesh, plan)
                cut = distribute_tensor(x, mesh, [Shard(dim)])
                counts, found = exchanged(lambda made=made, cut=cut: made(cut))
                assert torch.equal(found.full_tensor(), expected)
                if mesh.size() > 1:
                    amax = 0 if static else 1
                    wanted = {"allgather_base": max(1, chunks - 1), "reduce_scatter_base": 1, "allreduce": amax}
                    assert counts == {name: n for name, n in wanted.items() if n}, counts
        for reduce, limit in (("bfloat16", 0.02), ("int8", 0.03)):
            for out, least in ((Replicate(), 1), (Shard(1), 1 << 22), (Shard(1), 1)):  # sums as a whole, and by blocks
                with torch.no_grad(), mock.patch("magicube_cutlass.distributed.peers.COPIED_BLOCK", least):
                    plan = {
                        "0": md.SparseColwise(),
                        "2": md.SparseRowwise(reduce=reduce, output_layouts=out, use_local_output=False),
                    }
                    found = parallelize_module(model(static=static), mesh, plan)(x).full_tensor()
                    error = (found - expected).norm() / expected.norm()
                assert 1e-5 < error < limit, (reduce, error)


def check_tokens_that_are_not_finite(mesh: DeviceMesh) -> None:
    """inf and NaN on one rank's inputs reach what they reach in one process."""
    x = torch.randn(6, 40, generator=generator(3))
    x[1, 3], x[2, 39], x[4, 20] = torch.inf, torch.nan, -torch.inf
    with torch.no_grad():
        expected = model()[0](x)
        layer = parallelize_module(model()[0], mesh, md.SparseRowwise(input_layouts=Replicate()))
        found = layer(x)
        assert torch.equal(found.isnan(), expected.isnan()) and expected.isnan().any(1).tolist()[1:5] == [
            True, True, False, True]  # fmt: skip
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def check_dense_styles(mesh: DeviceMesh) -> None:
    """Layers of ``nn.Linear`` or ``QuantLinear``, static scales too, equal ``QuantLinear`` of one process."""
    torch.manual_seed(6)
    dense = nn.Sequential(nn.Linear(40, 52), nn.ReLU(), nn.Linear(52, 24, bias=False)).eval()
    x, batches = torch.randn(12, 40, generator=generator(4)), [torch.randn(16, 40, generator=generator(5))]
    for kind in ("linear", "quant", "static"):
        alone, batch = copy.deepcopy(dense), batches
        for i in (0, 2):
            alone[i] = mc.nn.QuantLinear.from_linear(alone[i], calibrate=batch if kind == "static" else None)
            batch = [alone[:2](batches[0]).detach()]
        for dtype in (torch.float32, torch.bfloat16):
            given = x.to(dtype)
            for output, cut, chunks in ((Replicate(), None, 1), (Shard(0), Shard(0), 2)):
                plan = {"0": md.QuantColwise(input_layouts=cut or Replicate(), chunks=chunks),
                        "2": md.QuantRowwise(output_layouts=output, use_local_output=False)}  # fmt: skip
                modes = md.WireBytes() if kind == "quant" else nullcontext()  # the engine's calls are not for modes
                with torch.no_grad():
                    made = parallelize_module(copy.deepcopy(dense if kind == "linear" else alone), mesh, plan)
                    expected, exact = alone(given), dense(x)
                with torch.no_grad(), modes:
                    found = made(given if cut is None else distribute_tensor(given, mesh, [cut])).full_tensor()
                assert torch.equal(found, expected), (kind, dtype, cut, (found - expected).abs().max())
                assert kind == "static" or (found - exact).norm() < 0.03 * exact.norm()


def check_attention(mesh: DeviceMesh) -> None:
    masks = [mc.masks.local(96, 24), mc.random_pattern(96, 96, 0.7, 8), mc.masks.local(96, 8), mc.masks.local(96, 40)]
    q, k, v = torch.randn(3, 2, 4, 96, 16, generator=generator(5))
    masks = [mask.to(q.device) for mask in masks]
    q, k, v = q * 3, k * torch.exp(torch.randn(96, 1, generator=generator(6))), v * 2
    for mask in (masks[0], masks):
        for options in ({}, {"bias": torch.randn(96, generator=generator(7)), "backend": "unfused"}):
            expected = mc.sparse_attention(q, k, v, mask, **options)
            for dim in (1, 0, 2) if mask is masks[0] else (1, 2):
                cut = [distribute_tensor(x, mesh, [Shard(dim)]) for x in (q, k, v)]
                counts, found = exchanged(lambda cut=cut: md.sparse_attention(*cut, mask, **options))  # noqa: B023
                whole = found.full_tensor()  # by all ranks, before one may fail
                assert torch.equal(whole, expected), (dim, len(options))
                if mesh.size() > 1:
                    wanted = {"allgather_base": 2} if dim == 2 else {}
                    assert counts == wanted, counts
    x = distribute_tensor(q, mesh, [Shard(2)])
    assert "causal" in raises(NotImplementedError, md.sparse_attention, x, x, x, masks[0], causal=True)
    if mesh.size() > 1:
        odd = distribute_tensor(q[..., :90, :], mesh, [Shard(2)])
        text = raises(
            ValueError, md.sparse_attention, odd, odd, odd, mc.masks.local(90, 24, vector_length=32).to(q.device)
        )
        assert "divides the cuts" in text


def check_keys_have_the_scales_of_one_process(mesh: DeviceMesh) -> None:
    """Integers and scales of gathered keys: per key, or, as the fused kernel of a GPU gives them, per matrix."""
    k, v = torch.randn(2, 6, 45, 24, generator=generator(11))
    k[1, 2] *= 9  # a key that would make the scale of its matrix too coarse
    k[2], k[3, 44, 1], k[4, 0, 0], v[5, 7] = 0, torch.nan, torch.inf, torch.inf
    parts = [distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).to_local() for x in (k, v)]
    for may_share in (False, True):
        keys = gathered_keys(*parts, 45, mesh, may_share=may_share)
        assert keys.alike.tolist() == [may_share and i in (0, 2, 4, 5) for i in range(6)]
        for i in range(6):
            alike = bool(keys.alike[i])
            found = mc.quantize(k[i].reshape(1, -1) if alike else k[i], 8, "row", nonfinite="propagate")
            assert torch.equal(keys.k[i], found.ints().view(45, 24)), (may_share, i)
            assert torch.equal(keys.k_scale[i].nan_to_num(), found.scale.expand(45, 1).nan_to_num())
            found = mc.quantize(v[i].reshape(1, -1), 8, "row", nonfinite="propagate")
            assert torch.equal(keys.v[i], found.ints().view(45, 24)) or i == 5
            assert torch.equal(keys.v_scale[i].nan_to_num(), found.scale.nan_to_num())
    many = torch.randn(4096, 5, generator=generator(9)) * torch.exp(4 * torch.randn(4096, 1, generator=generator(10)))
    part = distribute_tensor(many, mesh, [Shard(0)]).to_local()
    floats, _ = gathered_keys(part, part, 4096, mesh, may_share=False).floats()
    again, sent = mc.quantize(floats, 8, "row"), mc.quantize(many, 8, "row")
    assert torch.equal(again.ints(), sent.ints()) and torch.equal(again.scale, sent.scale)  # each, to its last bit


def check_bytes_equal_the_model(mesh: DeviceMesh) -> None:
    """Bytes of each style as counted on the wire, and by the model that plans layers."""
    ranks, tokens = mesh.size(), 13
    for static in (False, True) if ranks == 2 else (ranks == 4,):
        made = model(64, static=static)
        x = torch.randn(tokens, 40, generator=generator(8))
        for cut_tokens in (False, True):
            for reduce in ("exact", "bfloat16", "int8"):
                plan = {
                    "0": md.SparseColwise(input_layouts=Shard(0) if cut_tokens else Replicate()),
                    "2": md.SparseRowwise(output_layouts=Shard(0) if cut_tokens else Replicate(), reduce=reduce,
                                          input_layouts=Shard(-1), use_local_output=False),
                }  # fmt: skip
                layers = parallelize_module(copy.deepcopy(made), mesh, plan)
                given = distribute_tensor(x, mesh, [Shard(0)]) if cut_tokens else x
                with torch.no_grad(), md.WireBytes() as wire:
                    layers(given)
                options = {"cut_tokens": cut_tokens, "static": static}
                up, down = LinearShape("up", 64, 40), LinearShape("down", 24, 64)
                expected = traffic("colwise", up, tokens, ranks, **options)
                expected += traffic("rowwise", down, tokens, ranks, reduce=reduce, **options)
                assert mesh.get_local_rank() or wire.total == expected, (ranks, options, reduce, wire.by_kind, expected)
                if reduce == "exact":  # sums of int32, activations of int8, and the amax of tokens in floats
                    floats = sum(n for dtype, n in wire.by_dtype.items() if dtype.is_floating_point)
                    assert floats == (0 if static or ranks == 1 else 2 * (ranks - 1) * tokens * 4 // ranks), floats


def check_a_gather_of_views(mesh: DeviceMesh) -> None:
    rank, ranks = mesh.get_local_rank(), mesh.size()
    base = [torch.arange(48, dtype=torch.int8).view(4, 12) + r for r in range(ranks)]
    scales = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + r for r in range(ranks)]
    views = [
        each[1 + r % 2 :][:2] for r, each in enumerate(base)
    ]  # whose first byte lies at another place on each rank
    found = start_gather([views[rank], scales[rank]], [2] * ranks, mesh)()
    assert torch.equal(found[0], torch.cat(views)) and torch.equal(found[1], torch.cat(scales))


def check_errors(mesh: DeviceMesh) -> None:
    A = problems.matrix(40, 48, generator(1))
    part, rank, last = md.shard(A, mesh), mesh.get_local_rank(), mesh.size() - 1
    x = distribute_tensor(torch.randn(48, 6), mesh, [Replicate()])
    if last:
        other = problems.matrix(40, 48, generator(2)) if rank == last else A
        text = raises(ValueError, md.shard, other, mesh)
        assert "_of_A must be equal on all ranks, got" in text and "on rank 0 and" in text and f"on rank {last}" in text
        longer = problems.matrix(48 if rank == last else 40, 48, generator(2))
        text = raises(ValueError, md.shard, longer, mesh)
        assert text == f"rows_of_A must be equal on all ranks, got 40 on rank 0 and 48 on rank {last}", text
        grid = init_device_mesh(mesh.device_type, (1, mesh.size()), mesh_dim_names=("dp", "tp"))
        assert "use mesh['tp']" in raises(ValueError, md.shard, A, grid)
        away = DTensor.from_local(x.to_local(), DeviceMesh(mesh.device_type, [rank]), [Replicate()])
        assert "B must be on the mesh of the matrix" in raises(ValueError, md.spmm, part, away)
    assert "B must be a DTensor" in raises(TypeError, md.spmm, part, x.to_local())
    assert "B must have shape (48, n)" in raises(ValueError, md.spmm, part, x[:40])
    assert "bits must be 8 or 16" in raises(ValueError, md.spmm, part, x, bits=4)
    cut = distribute_tensor(torch.randn(48, 6), mesh, [Shard(0)])
    assert "use B.redistribute()" in raises(NotImplementedError, md.spmm, part, cut)
    assert "by must be" in raises(ValueError, md.shard, A, mesh, "blocks")
    layer = model()[0]
    assert "applied to a Linear or QuantLinear" in raises(TypeError, parallelize_module, layer, mesh, md.QuantColwise())
    grouped = mc.nn.QuantLinear(64, 8, weight="int4", group_size=32)
    assert "int8 weights with scales per row" in raises(
        ValueError, parallelize_module, grouped, mesh, md.QuantRowwise())  # fmt: skip
    cut_layer = parallelize_module(layer, mesh, md.SparseColwise())
    assert "features on this rank" in raises(ValueError, cut_layer, torch.randn(3, 41))


def check_the_example(mesh: DeviceMesh) -> None:
    """``examples/distributed_mlp.py``, but for its command line, which test_distributed_long runs."""
    compare = runpy.run_path(str(ROOT / "examples" / "distributed_mlp.py"))["compare"]
    rows = compare(mesh, 96, 24, 1)
    assert [row[-1] for row in rows[:3]] == ["equal"] * 3 and len(rows) == 5, rows
    assert all(row[-1] == "equal" or float(row[-1].split()[1]) < 0.02 for row in rows[3:]), rows


DEFAULT = [
    check_shard_and_unshard, check_nnz_balances, check_products, check_partial_sums, check_sddmm, check_parallel_styles,
    check_tokens_that_are_not_finite, check_dense_styles, check_attention, check_keys_have_the_scales_of_one_process,
    check_bytes_equal_the_model, check_a_gather_of_views, check_errors,
    check_the_example,
]  # fmt: skip
