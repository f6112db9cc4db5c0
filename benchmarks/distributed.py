"""Layers, products and attention over the processes of torchrun: bytes, time and equality with one process.

Every row names what a rank sends in a call (of rings), its time (best of all rounds, the slowest rank) beside that on
one process, and whether the result is that of one process bit for bit, or its error. ``torch dense`` is torch's own
tensor parallelism. NCCL where each process has a GPU, else gloo, whose times on one machine say nothing.
Writes ``benchmarks/results/distributed_<backend>_<processes>.json``.
Run: ``torchrun --nproc-per-node N benchmarks/distributed.py [--quick] [--out FILE]``
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import magicube_cutlass as mc
import magicube_cutlass.distributed as md
import residual
import residual.distributed as rd
from magicube_cutlass.cli.environment import provenance

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]
Call = Callable[[], Any]


def finished(found: Any) -> None:
    """Wait for a result that a collective may still write."""
    local = found.to_local() if isinstance(found, DTensor) else found
    if isinstance(local, AsyncCollectiveTensor):
        local.wait()


class Bench:
    """Times calls on all ranks together."""

    def __init__(self, mesh: DeviceMesh, rounds: int) -> None:
        self.mesh, self.rounds = mesh, rounds
        cuda = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.dtype = torch.bfloat16 if cuda else torch.float32
        self.rows: list[Row] = []

    def random(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> Tensor:
        """The same numbers on all ranks."""
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.device, dtype or self.dtype)

    def cut(self, x: Tensor, placement: Placement) -> DTensor:
        """A DTensor of what every rank holds."""
        return distribute_tensor(x, self.mesh, [placement], src_data_rank=None)

    def milliseconds(self, call: Call) -> float:
        """Best round of the slowest rank."""
        best = float("inf")
        for _ in range(self.rounds + 1):  # the first one compiles
            dist.barrier()
            begin = time.perf_counter()
            finished(call())
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, 1e3 * (time.perf_counter() - begin))
        worst = torch.tensor([best], device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return float(worst)

    def add(self, group: str, name: str, shape: str, call: Call, alone: Call, exact: Tensor | None = None) -> None:
        """Measure a call beside that of one process; compare with it, or with `exact`."""
        finished(call())
        with md.WireBytes() as wire:
            found = call()
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        expected = alone()
        equal = torch.tensor([float(torch.equal(whole, expected))], device=self.device)
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        reference = (expected if exact is None else exact).double()
        error = float((whole.double() - reference).norm() / reference.norm())
        row = {
            "group": group, "case": name, "shape": shape, "bytes": wire.total, "calls": sum(wire.calls.values()),
            "ms": self.milliseconds(call), "ms of one process": self.milliseconds(alone),
            "equal": bool(equal.item()), "error": error,
        }  # fmt: skip
        self.rows.append(row)
        if dist.get_rank() == 0:
            state = "equal" if row["equal"] else f"error {error:.1e}"
            print(f"{group:<11}{name:<34}{shape:<22}{row['bytes']:>12}{row['ms']:>11.3f}"
                  f"{row['ms of one process']:>11.3f}  {state}", flush=True)  # fmt: skip


def mlp(bench: Bench, width: int, tokens: int) -> None:
    """Two layers in turn, tokens cut or on all ranks."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
    dense = dense.to(bench.device, bench.dtype).eval()
    sparse = copy.deepcopy(dense)
    mc.convert(sparse, mc.nn.SparseQuantConfig(sparsity=0.8))
    x, shape = bench.random(tokens, width, seed=1), f"{tokens} x {width} x {4 * width}"
    plans: dict[str, tuple[nn.Module, Placement, Any, Any]] = {
        "tokens on all ranks": (sparse, Replicate(), md.SparseColwise(), md.SparseRowwise()),
    }
    for chunks in (1, 4):
        for reduce in ("exact", "bfloat16", "int8") if chunks == 1 else ("exact",):
            first = md.SparseColwise(input_layouts=Shard(0), chunks=chunks)
            second = md.SparseRowwise(output_layouts=Shard(0), reduce=reduce, use_local_output=False)
            plans[f"tokens cut, {reduce}, {chunks} chunks"] = sparse, Shard(0), first, second
    plans["dense int8, tokens cut"] = (
        dense, Shard(0), md.QuantColwise(input_layouts=Shard(0)),
        md.QuantRowwise(output_layouts=Shard(0), use_local_output=False),
    )  # fmt: skip
    if 4 * width % bench.mesh.size() == 0:  # torch's styles take equal parts
        column: Any = ColwiseParallel(input_layouts=Shard(0))
        row: Any = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
        plans["torch dense, tokens cut"] = dense, Shard(0), column, row
    for name, (model, placement, first, second) in plans.items():
        made = parallelize_module(copy.deepcopy(model), bench.mesh, {"0": first, "2": second})
        given = x if placement == Replicate() else bench.cut(x, placement)
        bench.add("mlp", name, shape, partial(made, given), partial(model, x))


def products(bench: Bench, m: int, k: int, n: int) -> None:
    """One SpMM by each cut."""
    pattern = mc.random_pattern(m, k, 0.8, 8)
    dense = bench.random(m, k, seed=2, dtype=torch.float32) * pattern.to_dense().to(bench.device)
    A = mc.SRBCRS.from_dense(dense, vector_length=8, scale="row")
    x = bench.random(k, n, seed=3, dtype=torch.float32)

    def alone() -> Tensor:
        return mc.spmm(A, mc.quantize(x, 8, "column"))

    for by, placement in (("rows", Shard(1)), ("nnz", Shard(1)), ("columns", Shard(0))):
        part, given = md.shard(A, bench.mesh, by), bench.cut(x, placement)  # type: ignore[arg-type]
        call = partial(md.spmm, part, given)
        bench.add(
            "spmm", f"{by}, B {placement}", f"{m} x {k} x {n}", call, lambda: mc.spmm(A, mc.quantize(x, 8, "column"))
        )


def tolerances(bench: Bench, size: int) -> None:
    """One product with a chosen error by each layout, beside the error that it has."""
    A, B = (bench.random(size, size, seed=seed, dtype=torch.float32) for seed in (4, 5))
    exact = A.double() @ B.double()
    pairs: tuple[tuple[str, Placement, Placement], ...] = (
        ("rows", Shard(0), Replicate()), ("columns", Replicate(), Shard(1)), ("inner", Shard(1), Shard(0)),
    )  # fmt: skip
    for tol in (1e-2, 1e-4):
        for layout, of_a, of_b in pairs:
            call = partial(rd.matmul, bench.cut(A, of_a), bench.cut(B, of_b), tol=tol)
            alone = partial(residual.matmul, A, B, tol=tol)
            bench.add("residual", f"{layout}, tol {tol:g}", f"{size}^3", call, alone, exact)
            assert bench.rows[-1]["error"] <= tol


def attention(bench: Bench, heads: int, length: int) -> None:
    """Heads cut, and queries cut."""
    q, k, v = (bench.random(1, heads, length, 64, seed=seed, dtype=torch.float32) for seed in (6, 7, 8))
    mask = mc.masks.local(length, length // 8).to(bench.device)
    attend: Any = md.sparse_attention
    for backend in ("fused", "unfused"):
        for name, dim in (("heads", 1), ("queries", 2)):
            cut = [bench.cut(x, Shard(dim)) for x in (q, k, v)]
            call = partial(attend, *cut, mask, backend=backend)
            alone = partial(mc.sparse_attention, q, k, v, mask, backend=backend)
            bench.add("attention", f"{name}, {backend}", f"{heads} x {length} x 64", call, alone)


def main(
    quick: Annotated[bool, typer.Option(help="Small sizes, to see that it runs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Results file.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where each process has a GPU.")] = None,
) -> None:
    mesh = md.init_mesh(device)
    torch.set_num_threads(1)
    big = mesh.device_type == "cuda" and not quick
    bench = Bench(mesh, rounds=10 if big else 2)
    if dist.get_rank() == 0:
        print(f"{mesh.size()} processes, {dist.get_backend()}; bytes a rank sends, ms, ms of one process, result")
    with torch.no_grad():
        for width, tokens in ((4096, 8192), (4096, 256)) if big else ((64, 24),):
            mlp(bench, width, tokens)
        products(bench, *((8192, 8192, 4096) if big else (64, 48, 12)))
        tolerances(bench, 8192 if big else 96)
        attention(bench, *((32, 4096) if big else (4, 96)))
    if dist.get_rank() == 0:
        machine = provenance()
        if mesh.device_type == "cuda":
            machine["gpu"] = torch.cuda.get_device_name()
        setting = {
            "backend": dist.get_backend(),
            "processes": mesh.size(),
            "time": "ms: best round of the slowest rank",
        }
        path = out or RESULTS / f"distributed_{dist.get_backend()}_{mesh.size()}.json"
        path.write_text(json.dumps({"machine": machine, "setting": setting, "results": bench.rows}, indent=1) + "\n")
        print(f"wrote {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
