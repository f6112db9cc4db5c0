"""Layers, products, checks and factorizations over several processes, each beside one process and beside torch.

Every row has what a rank sends, its times, those of one process, the efficiency ``alone / (ranks * time)``, and whether
the result is that of one process bit for bit, or its error. `torch` is a bfloat16 ``nn.Linear`` of the same size under
torch's own ColwiseParallel and RowwiseParallel (attention: ``scaled_dot_product_attention``; QR: ``torch.linalg.qr`` of
one process). Times: `ms`, per call of many between two waits; `host`, until a call returns; on CUDA also `graph`, per
replay of a CUDA graph of the call, collectives included, and kernels by kind, from torch's profiler. NCCL where each
process has a GPU, else gloo, whose times on one machine say nothing. A row that fails is recorded with its error.
Writes ``benchmarks/results/distributed_<backend>_<processes>.json`` after each row.
Run: ``torchrun --nproc-per-node N benchmarks/distributed.py [--quick] [--minutes M] [--only GROUP] [--out FILE]``
"""

from __future__ import annotations

import copy
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from harness.kernel_times import kernel_times
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import magicube_cutlass as mc
import magicube_cutlass.distributed as md
import residual
import residual.distributed as rd
from magicube_cutlass.cli.environment import provenance
from magicube_cutlass.distributed import collectives
from magicube_cutlass.distributed.cost_model import LinearShape, cluster_of, layer_seconds

RESULTS = Path(__file__).resolve().parent / "results"
NO_GRAPHS = ("residual", "tsqr", "attention")  # decisions by numbers on the host
Row = dict[str, Any]
Call = Callable[[], Any]
HEADER = ("case", "bytes", "ms", "graph", "host", "alone", "eff", "graph eff", "torch", "eff", "graph eff", "result")


@dataclass
class Reference:
    """A call of torch over all processes and in one; times are taken once."""

    name: str
    call: Call
    alone: Call
    row: Row | None = None


class Bench:
    """Times calls on all ranks together."""

    def __init__(self, mesh: DeviceMesh, out: Path, seconds: float, rounds: int, graphs: bool) -> None:
        self.mesh, self.out, self.rounds, self.graphs = mesh, out, rounds, graphs
        self.end = time.monotonic() + seconds
        self.cuda = mesh.device_type == "cuda"
        self.wait = torch.cuda.synchronize if self.cuda else lambda: None
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.alone_times: dict[Any, tuple[float, float | None]] = {}
        self.rows: list[Row] = []
        self.group = ""

    def random(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> Tensor:
        """The same numbers on all ranks."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=torch.float32).to(dtype or self.dtype)

    def cut(self, x: Tensor, placement: Placement) -> DTensor:
        """A DTensor of what every rank holds."""
        return distribute_tensor(x, self.mesh, [placement], src_data_rank=None)

    def agreed(self, value: float, op: Any = dist.ReduceOp.MAX) -> float:
        """One number for all ranks."""
        number = torch.tensor([value], device=self.device, dtype=torch.float64)
        dist.all_reduce(number, op)
        return float(number)

    def milliseconds(self, call: Call, budget: float = 3.0) -> tuple[float, float]:
        """Best rounds of the slowest rank: per call of many, and until one call returns."""
        best = [float("inf")] * 2
        many, begin = 1, time.monotonic()
        for i in range(self.rounds + 2):  # the first ones compile
            dist.barrier()
            self.wait()
            start = time.perf_counter()
            call()
            returned = time.perf_counter()
            self.wait()
            single = time.perf_counter() - start
            for _ in range(many):
                call()
            self.wait()
            each = (time.perf_counter() - start - single) / many
            best = [min(pair) for pair in zip(best, (each, returned - start), strict=True)]
            spent = self.agreed(time.monotonic() - begin)
            if i:
                many = max(1, min(20, int(0.02 / max(self.agreed(best[0]), 1e-6))))
            if spent > budget and i:
                break
        return self.agreed(1e3 * best[0]), self.agreed(1e3 * best[1])

    def graphed(self, call: Call) -> float | None:
        """Milliseconds of a CUDA graph of a warm call; None without CUDA, or for a call that waits for the device."""
        if not self.cuda or not self.graphs or self.group in NO_GRAPHS:
            return None
        graph = torch.cuda.CUDAGraph()
        self.wait()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        return self.milliseconds(graph.replay, 2.0)[0]

    def add(
        self, case: str, shape: str, call: Call, alone: Call, *, key: Any = None, torch_call: Reference | None = None,
        exact: Tensor | None = None, tol: float | None = None, model_ms: float | None = None,
    ) -> None:  # fmt: skip
        """Measure a call beside one process and torch; compare with one process, or with `exact`."""
        row: Row = {"group": self.group, "case": case, "shape": shape}
        if self.agreed(time.monotonic() - self.end) > 0:
            return self.finish({**row, "skipped": "no time left"})
        try:
            row |= self.measured(call, alone, key, exact, tol)
            if torch_call is not None:
                if torch_call.row is None:
                    times = self.times(torch_call.call, torch_call.alone)
                    torch_call.row = {"torch": torch_call.name, **{f"torch {name}": ms for name, ms in times.items()}}
                row |= torch_call.row
            if model_ms is not None:
                row["ms by the model"] = model_ms
            dist.barrier()
            row["kernels"] = kernel_times(call) if self.cuda else {}
        except Exception as error:  # the next row may run
            row["error text"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        return self.finish(row)

    def measured(self, call: Call, alone: Call, key: Any, exact: Tensor | None, tol: float | None) -> Row:
        """Bytes, equality and times."""
        call()
        with md.WireBytes() as wire:
            found = call()
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        expected = alone()
        equal = self.agreed(float(torch.equal(whole, expected)), dist.ReduceOp.MIN) > 0
        reference = (expected if exact is None else exact).double()
        error = self.agreed(float((whole.double() - reference).norm() / reference.norm()))
        del whole, expected, reference, found
        if tol is not None and error > tol:
            raise ArithmeticError(f"error {error:.3g} is beyond the tolerance {tol:g}")
        sent = {"bytes": wire.total, "calls": sum(wire.calls.values())}
        return sent | self.times(call, alone, key) | {"equal": equal, "error": error}

    def times(self, call: Call, alone: Call, key: Any = None) -> Row:
        """Times of a call and of one process, whose graph is taken too where the call has one."""
        ms, host = self.milliseconds(call)
        graph = self.graphed(call)
        if key is None or key not in self.alone_times:
            self.alone_times[key] = self.milliseconds(alone)[0], self.graphed(alone)
        one, one_graph = self.alone_times[key]
        found: Row = {"ms": ms, "ms of the host": host, "ms of one process": one,
                      "efficiency": one / ms / self.mesh.size()}  # fmt: skip
        if graph and one_graph:
            found |= {"ms of a graph": graph, "ms of a graph of one process": one_graph,
                      "efficiency of graphs": one_graph / graph / self.mesh.size()}  # fmt: skip
        return found

    def finish(self, row: Row) -> None:
        """Print a row and write all of them."""
        self.rows.append(row)
        if dist.get_rank():
            return
        if "ms" in row:
            state = "equal" if row["equal"] else f"error {row['error']:.1e}"
            names = ("ms", "ms of a graph", "ms of the host", "ms of one process", "efficiency", "efficiency of graphs",
                     "torch ms", "torch efficiency", "torch efficiency of graphs")  # fmt: skip
            text = "".join(f"{row[name]:>9.3f}" if name in row else f"{'-':>9}" for name in names)
            line = f"{row['group']:<10}{row['case']:<34}{row['bytes']:>11}{text}  {state}"
            print(line, row.get("kernels", ""), flush=True)
        else:
            text = next((row[name] for name in ("skipped", "error text", "us") if name in row), "")
            print(f"{row['group']:<10}{row['case']:<34}{text}", flush=True)
        machine = provenance()
        if self.cuda:
            machine["gpu"] = torch.cuda.get_device_name()
        setting = {
            "backend": dist.get_backend(), "processes": self.mesh.size(),
            "ms": "per call of up to 20 between two waits, best round, slowest rank", "kernels": "ms of rank 0",
        }  # fmt: skip
        self.out.write_text(json.dumps({"machine": machine, "setting": setting, "results": self.rows}, indent=1) + "\n")


def layer_ms(bench: Bench, layers: list[tuple[str, LinearShape]], tokens: int, **options: Any) -> float:
    """Milliseconds of layers by the model of bytes and times."""
    cluster = cluster_of(bench.mesh.size())
    return 1e3 * sum(layer_seconds(style, layer, tokens, cluster, **options) for style, layer in layers)


def torch_layers(bench: Bench, dense: nn.Module, plan: dict[str, Any], x: Tensor, given: Any) -> Reference:
    made = parallelize_module(copy.deepcopy(dense), bench.mesh, plan)
    return Reference("bfloat16 nn.Linear" if bench.cuda else "nn.Linear", partial(made, given), partial(dense, x))


def spmm(bench: Bench, out: int, inner: int, tokens: int) -> None:
    """One layer of 0.9 zeros, outputs cut: tokens on all ranks, or cut and gathered as int8 or as floats."""
    bench.group = "spmm"
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(inner, out, bias=False)).to(bench.device, bench.dtype).eval()
    sparse = copy.deepcopy(dense)
    mc.convert(sparse, mc.nn.SparseQuantConfig(sparsity=0.9), progress=False)
    x, shape = bench.random(tokens, inner, seed=1), f"{out} x {inner} x {tokens}"
    cut, up = bench.cut(x, Shard(0)), LinearShape("up", out, inner, 0.1)
    column: Any = ColwiseParallel()
    of_torch = torch_layers(bench, dense, {"0": column}, x, x)
    column = ColwiseParallel(input_layouts=Shard(0))
    of_torch_cut = torch_layers(bench, dense, {"0": column}, x, cut)

    def layer(**options: Any) -> nn.Module:
        style = md.SparseColwise(use_local_output=False, **options)
        return parallelize_module(copy.deepcopy(sparse), bench.mesh, {"0": style})

    alone, key = partial(sparse, x), ("spmm", tokens)
    bench.add("X on all ranks", shape, partial(layer(), x), alone, key=key, torch_call=of_torch,
              model_ms=layer_ms(bench, [("colwise", up)], tokens, cut_tokens=False))  # fmt: skip
    for chunks in (1, 2):
        call = partial(layer(input_layouts=Shard(0), chunks=chunks), cut)
        bench.add(f"X cut, int8 gather, {chunks} chunks", shape, call, alone, key=key, torch_call=of_torch_cut,
                  model_ms=layer_ms(bench, [("colwise", up)], tokens))  # fmt: skip
    whole = layer()

    def gathered() -> Tensor:
        sizes = [x.shape[0] // bench.mesh.size()] * bench.mesh.size()
        return whole(collectives.gather(cut.to_local(), sizes, bench.mesh))

    if tokens % bench.mesh.size() == 0:
        bench.add("X cut, gather of floats", shape, gathered, alone, key=key, torch_call=of_torch_cut)


def mlp(bench: Bench, width: int, hidden: int, tokens: int, sparsities: tuple[float, ...]) -> None:
    """Two layers in turn, tokens cut or on all ranks."""
    bench.group = "mlp"
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
    dense = dense.to(bench.device, bench.dtype).eval()
    x, shape = bench.random(tokens, width, seed=1), f"{tokens} x {width} x {hidden}"
    cut, reference = bench.cut(x, Shard(0)), []
    for tokens_cut in (False, True):
        column: Any = ColwiseParallel(input_layouts=Shard(0) if tokens_cut else Replicate())
        row: Any = RowwiseParallel(output_layouts=Shard(0) if tokens_cut else Replicate(), use_local_output=False)
        divides = hidden % bench.mesh.size() == 0  # torch's styles take equal parts
        plan = {"0": column, "2": row}
        reference.append(torch_layers(bench, dense, plan, x, cut if tokens_cut else x) if divides else None)
    for sparsity, static in product((*sparsities, 0.0), (False, True)):
        model, first, second = copy.deepcopy(dense), md.SparseColwise, md.SparseRowwise
        name = f"{sparsity:g}" if sparsity else "dense int8"
        if not sparsity:
            first, second = md.QuantColwise, md.QuantRowwise  # type: ignore[assignment]
        for i, given in ((0, x), (2, dense[:2](x))):
            linear: Any = dense[i]
            seen = [given] if static else None  # of which static scales are made
            if sparsity:
                model[i] = mc.nn.SparseQuantLinear.from_linear(linear, sparsity, calibrate=seen).eval()
            else:
                model[i] = mc.nn.QuantLinear.from_linear(linear, calibrate=seen)
        name += ", static" * static
        alone = partial(model, x)
        layers = [("colwise", LinearShape("up", hidden, width, 1 - sparsity)),
                  ("rowwise", LinearShape("down", width, hidden, 1 - sparsity))]  # fmt: skip
        kinds: list[tuple[bool, Any]] = [(True, "bfloat16")]
        kinds += [] if static else [(True, "exact"), (False, "bfloat16"), (False, "exact")]
        for tokens_cut, reduce in kinds:
            placed: dict[str, Any] = {"input_layouts": Shard(0)} if tokens_cut else {}
            placed_out: dict[str, Any] = {"output_layouts": Shard(0)} if tokens_cut else {}
            plan = {"0": first(**placed),
                    "2": second(reduce=reduce, use_local_output=False, **placed_out)}  # fmt: skip
            made = parallelize_module(copy.deepcopy(model), bench.mesh, plan)
            case = f"{name}, {'cut' if tokens_cut else 'all'}, {reduce}"
            predicted = layer_ms(bench, layers, tokens, cut_tokens=tokens_cut, static=static, reduce=reduce)
            bench.add(case, shape, partial(made, cut if tokens_cut else x), alone, key=("mlp", tokens, name),
                      torch_call=reference[tokens_cut], model_ms=predicted)  # fmt: skip


def tolerances(bench: Bench, size: int, tol: float) -> None:
    """One product with a chosen error by each layout, beside the error that it has, and the all-reduce of its check."""
    bench.group = "residual"
    A, B = (bench.random(size, size, seed=seed, dtype=torch.float32) for seed in (4, 5))
    exact = A.double() @ B.double()
    linear = nn.Sequential(nn.Linear(size, size, bias=False)).to(bench.device, bench.dtype)
    column: Any = ColwiseParallel()
    x = A.to(bench.dtype)
    reference = torch_layers(bench, linear, {"0": column}, x, x) if size % bench.mesh.size() == 0 else None
    pairs: tuple[tuple[str, Placement, Placement], ...] = (
        ("rows", Shard(0), Replicate()), ("columns", Replicate(), Shard(1)), ("inner", Shard(1), Shard(0)),
    )  # fmt: skip
    for layout, of_a, of_b in pairs:
        call = partial(rd.matmul, bench.cut(A, of_a), bench.cut(B, of_b), tol=tol)
        alone = partial(residual.matmul, A, B, tol=tol)
        bench.add(f"{layout}, tol {tol:g}", f"{size}^3", call, alone, key=("residual", size, tol), exact=exact, tol=tol,
                  torch_call=reference)  # fmt: skip
    sums = torch.ones(262, dtype=torch.float64, device=bench.device)
    us = 1e3 * bench.milliseconds(partial(dist.all_reduce, sums))[0]
    bench.finish({"group": "residual", "case": "all-reduce of the check", "bytes": sums.nbytes, "us": us})


def tall(bench: Bench, m: int, n: int) -> None:
    """QR of a tall matrix whose rows are cut."""
    bench.group = "tsqr"
    A = bench.random(m, n, seed=9, dtype=torch.float32)
    part = bench.cut(A, Shard(0))
    call, by_torch = partial(rd.qr, part, product=torch.matmul), partial(torch.linalg.qr, A)
    Q, R = call()
    error = float((Q.full_tensor().double() @ R.to_local().double() - A.double()).norm() / A.double().norm())
    reference = Reference("torch.linalg.qr of one process", by_torch, by_torch)
    bench.add(f"float32, error {error:.0e}", f"{m} x {n}", lambda: call()[1].to_local().abs(),
              lambda: torch.abs(residual.qr(A, product=torch.matmul)[1]), torch_call=reference)  # fmt: skip


def attention(bench: Bench, heads: int, length: int) -> None:
    """Heads cut, and queries cut."""
    bench.group = "attention"
    q, k, v = (bench.random(1, heads, length, 64, seed=seed, dtype=torch.float32) for seed in (6, 7, 8))
    mask = mc.masks.local(length, length // 8).to(bench.device)
    attend: Any = md.sparse_attention
    low = [x.to(bench.dtype) for x in (q, k, v)]
    parts = [bench.cut(x, Shard(1)).to_local().contiguous() for x in low]
    dense: Any = torch.nn.functional.scaled_dot_product_attention
    reference = Reference("scaled_dot_product_attention, heads cut", partial(dense, *parts), partial(dense, *low))
    alone = partial(mc.sparse_attention, q, k, v, mask)
    for name, dim in (("heads", 1), ("queries", 2)):
        call = partial(attend, *(bench.cut(x, Shard(dim)) for x in (q, k, v)), mask)
        bench.add(name, f"{heads} x {length} x 64", call, alone, key="attention", torch_call=reference)


def main(
    quick: Annotated[bool, typer.Option(help="Small sizes, to see that it runs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Results file.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where each process has a GPU.")] = None,
    graphs: Annotated[bool, typer.Option(help="Time CUDA graphs of the layers too.")] = True,
    minutes: Annotated[float, typer.Option(help="Rows that begin later are skipped.")] = 7.0,
    only: Annotated[str | None, typer.Option(help="Groups with this in their name, such as spmm.")] = None,
) -> None:
    mesh = md.init_mesh(device, timeout=timedelta(seconds=90))
    torch.set_num_threads(1)
    big = mesh.device_type == "cuda" and not quick
    path = out or RESULTS / f"distributed_{dist.get_backend()}_{mesh.size()}.json"
    bench = Bench(mesh, path, 60 * minutes, 8 if big else 1, graphs)
    if dist.get_rank() == 0:
        print(f"{mesh.size()} processes, {dist.get_backend()}, {bench.device}; ms unless said otherwise")
        print(f"{'group':<10}{HEADER[0]:<34}{HEADER[1]:>11}" + "".join(
            f"{name:>{9}}"[:9] for name in HEADER[2:-1]) + "  result  kernels")  # fmt: skip
    groups: list[partial[None]] = [
        partial(spmm, bench, *((14336, 4096, 8192) if big else (96, 64, 24))),
        partial(mlp, bench, *((4096, 14336, 8192) if big else (64, 112, 24)), (0.8, 0.9)),
        partial(tolerances, bench, *((16384, 1e-6) if big else (96, 1e-4))),
        partial(attention, bench, *((32, 4096) if big else (4, 96))),
        partial(tall, bench, *((1_000_000, 256) if big else (400, 16))),
        partial(mlp, bench, *((4096, 14336, 256) if big else (64, 112, 8)), (0.9,)),
        partial(tolerances, bench, *((8192, 1e-2) if big else (64, 1e-2))),
    ]
    with torch.no_grad():
        for group in groups:
            if only and only not in group.func.__name__:
                continue
            try:
                group()
            except Exception as error:
                bench.finish({"group": bench.group, "case": "all", "error text": f"{type(error).__name__}: {error}"})
            if bench.cuda:
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
