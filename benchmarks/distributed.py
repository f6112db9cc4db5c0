"""Layers, products, checks and factorizations over several processes, each beside one process and beside torch.

Every row has what a rank sends, its times, those of one process, the efficiency ``alone / (ranks * time)``, and whether
the result is that of one process bit for bit, or its error. `torch` is a bfloat16 ``nn.Linear`` of the same size under
torch's own ColwiseParallel and RowwiseParallel (attention: ``scaled_dot_product_attention``; QR: ``torch.linalg.qr`` of
one process). Times: `ms`, per call of many between two waits; `single`, of one call between two waits; `host`, until
a call returns; on CUDA also kernels by kind, from torch's profiler. NCCL where each process has a GPU, else gloo,
whose times on one machine say nothing. A row that fails is recorded with its error.
Writes ``benchmarks/results/distributed_<backend>_<processes>.json`` after each row.
Run: ``torchrun --nproc-per-node N benchmarks/distributed.py [--quick] [--minutes M] [--out FILE]``
"""

from __future__ import annotations

import copy
import json
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
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
from magicube_cutlass.distributed.cost_model import LinearShape, cluster_of, product_seconds, traffic

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]
Call = Callable[[], Any]
KINDS = {
    "nccl": "exchange", "quantize": "quantize", "encode": "quantize", "spmm": "product", "gemm": "product",
    "attention": "product", "nvjet": "product", "wgmma": "product", "look": "check", "probe": "check",
    "verdict": "check", "digits": "digits"}  # fmt: skip
HEADER = ("case", "bytes", "ms", "single", "host", "alone", "eff", "torch", "torch alone", "torch eff", "result")


class Reference:
    """A call of torch over all processes and in one; times are taken once."""

    def __init__(self, name: str, call: Call, alone: Call) -> None:
        self.name, self.call, self.alone = name, call, alone
        self.times: tuple[float, float] | None = None


class Bench:
    """Times calls on all ranks together."""

    def __init__(self, mesh: DeviceMesh, out: Path, seconds: float, rounds: int) -> None:
        self.mesh, self.out, self.rounds = mesh, out, rounds
        self.end = time.monotonic() + seconds
        self.cuda = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.alone_times: dict[Any, float] = {}
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

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def milliseconds(self, call: Call, budget: float = 4.0) -> tuple[float, float, float]:
        """Best rounds of the slowest rank: per call of many, of one call, and until one call returns."""
        best = [float("inf")] * 3
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
            best = [min(pair) for pair in zip(best, (each, single, returned - start), strict=True)]
            spent = self.agreed(time.monotonic() - begin)
            if i:
                many = max(1, min(20, int(0.02 / max(self.agreed(best[0]), 1e-6))))
            if spent > budget and i:
                break
        return self.agreed(1e3 * best[0]), self.agreed(1e3 * best[1]), self.agreed(1e3 * best[2])

    def kernels(self, call: Call) -> dict[str, float]:
        """Milliseconds of kernels by kind, of one call on this rank."""
        if not self.cuda:
            return {}
        from torch.profiler import ProfilerActivity, profile

        dist.barrier()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(3):
                call()
            self.wait()
        found: dict[str, float] = {}
        for event in seen.key_averages():
            spent = event.self_device_time_total / 3e3
            kind = next((kind for word, kind in KINDS.items() if word in event.key.lower()), "elementwise")
            if spent:
                found[kind] = round(found.get(kind, 0.0) + spent, 4)
        return found

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
                if torch_call.times is None:
                    torch_call.times = self.milliseconds(torch_call.call)[0], self.milliseconds(torch_call.alone)[0]
                row |= {"torch": torch_call.name, "torch ms": torch_call.times[0],
                        "torch ms of one process": torch_call.times[1],
                        "torch efficiency": torch_call.times[1] / torch_call.times[0] / self.mesh.size()}  # fmt: skip
            if model_ms is not None:
                row["ms by the model"] = model_ms
            row["kernels"] = self.kernels(call)
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
        ms, single, host = self.milliseconds(call)
        if key is None or key not in self.alone_times:
            self.alone_times[key] = self.milliseconds(alone)[0]
        return {
            "bytes": wire.total, "calls": sum(wire.calls.values()), "ms": ms, "ms of a single call": single,
            "ms of the host": host, "ms of one process": self.alone_times[key],
            "efficiency": self.alone_times[key] / ms / self.mesh.size(), "equal": equal, "error": error,
        }  # fmt: skip

    def finish(self, row: Row) -> None:
        """Print a row and write all of them."""
        self.rows.append(row)
        if dist.get_rank():
            return
        if "ms" in row:
            state = "equal" if row["equal"] else f"error {row['error']:.1e}"
            numbers = [row["ms"], row["ms of a single call"], row["ms of the host"], row["ms of one process"]]
            text = "".join(f"{each:>9.3f}" for each in numbers) + f"{row['efficiency']:>6.2f}"
            if "torch ms" in row:
                text += "".join(f"{row[name]:>9.3f}" for name in ("torch ms", "torch ms of one process"))
                text += f"{row['torch efficiency']:>6.2f}"
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
    ranks = bench.mesh.size()
    cluster = cluster_of(ranks)
    sent = sum(traffic(style, layer, tokens, ranks, **options) for style, layer in layers)
    return 1e3 * (sum(product_seconds(layer, tokens, ranks, cluster) for _, layer in layers) + sent / cluster.link)


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
    for chunks in (1, 2, 4):
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
    for sparsity in (*sparsities, 0.0):
        if sparsity:
            model, name = copy.deepcopy(dense), f"{sparsity:g}"
            mc.convert(model, mc.nn.SparseQuantConfig(sparsity=sparsity), progress=False)
            alone: Call = partial(model, x)
            first, second = md.SparseColwise, md.SparseRowwise
        else:
            model, name, first, second = dense, "dense int8", md.QuantColwise, md.QuantRowwise  # type: ignore[assignment]
            quant = [
                mc.nn.QuantLinear.from_linear(copy.deepcopy(layer)) for layer in dense if isinstance(layer, nn.Linear)
            ]
            alone = partial(nn.Sequential(quant[0], nn.ReLU(), quant[1]).to(bench.device).eval(), x)
        layers = [("colwise", LinearShape("up", hidden, width, 1 - sparsity)),
                  ("rowwise", LinearShape("down", width, hidden, 1 - sparsity))]  # fmt: skip
        cases: list[tuple[bool, Any, int]] = [
            (False, "exact", 1), (False, "bfloat16", 1), (True, "exact", 1), (True, "bfloat16", 1),
            (True, "bfloat16", 2), (True, "int8", 1),
        ]  # fmt: skip
        for tokens_cut, reduce, chunks in cases:
            placed: dict[str, Any] = {"input_layouts": Shard(0)} if tokens_cut else {}
            placed_out: dict[str, Any] = {"output_layouts": Shard(0)} if tokens_cut else {}
            plan = {"0": first(chunks=chunks, **placed),
                    "2": second(reduce=reduce, use_local_output=False, **placed_out)}  # fmt: skip
            made = parallelize_module(copy.deepcopy(model), bench.mesh, plan)
            case = f"{name}, {'cut' if tokens_cut else 'all'}, {reduce}, {chunks} chunks"
            bench.add(case, shape, partial(made, cut if tokens_cut else x), alone, key=("mlp", tokens, name),
                      torch_call=reference[tokens_cut],
                      model_ms=layer_ms(bench, layers, tokens, cut_tokens=tokens_cut, reduce=reduce))  # fmt: skip


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
    norm = A.double().norm()

    def error(Q: Tensor, R: Tensor) -> Tensor:
        return ((Q.double() @ R.double() - A.double()).norm() / norm)[None]

    by_torch = partial(torch.linalg.qr, A)
    variants: tuple[tuple[str, dict[str, Any]], ...] = (("int8 digits", {}), ("float32", {"product": torch.matmul}))
    for name, options in variants:
        Q, R = rd.qr(part, **options)
        found = float(error(Q.full_tensor(), R.to_local()))
        reference = Reference("torch.linalg.qr of one process", by_torch, by_torch)
        cut, whole = partial(rd.qr, part, **options), partial(residual.qr, A, **options)
        call, alone = (lambda cut=cut: cut()[1].to_local().abs()), (lambda whole=whole: whole()[1].abs())
        bench.add(f"{name}, error {found:.0e}", f"{m} x {n}", call, alone, torch_call=reference)


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
    for backend in ("fused", "unfused"):
        for name, dim in (("heads", 1), ("queries", 2)):
            cut = [bench.cut(x, Shard(dim)) for x in (q, k, v)]
            call = partial(attend, *cut, mask, backend=backend)
            alone = partial(mc.sparse_attention, q, k, v, mask, backend=backend)
            bench.add(f"{name}, {backend}", f"{heads} x {length} x 64", call, alone, key=("attention", backend),
                      torch_call=reference)  # fmt: skip


def main(
    quick: Annotated[bool, typer.Option(help="Small sizes, to see that it runs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Results file.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where each process has a GPU.")] = None,
    minutes: Annotated[float, typer.Option(help="Rows that begin later are skipped.")] = 7.0,
) -> None:
    mesh = md.init_mesh(device, timeout=timedelta(seconds=90))
    torch.set_num_threads(1)
    big = mesh.device_type == "cuda" and not quick
    path = out or RESULTS / f"distributed_{dist.get_backend()}_{mesh.size()}.json"
    bench = Bench(mesh, path, 60 * minutes, rounds=8 if big else 1)
    if dist.get_rank() == 0:
        print(f"{mesh.size()} processes, {dist.get_backend()}, {bench.device}; ms unless said otherwise")
        print(f"{'group':<10}{HEADER[0]:<34}{HEADER[1]:>11}" + "".join(
            f"{name[:8]:>{6 if 'eff' in name else 9}}" for name in HEADER[2:-1]) + "  result  kernels")  # fmt: skip
    groups: list[Call] = [
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
            try:
                group()
            except Exception as error:
                traceback.print_exc()
                bench.finish({"group": bench.group, "case": "all", "error text": f"{type(error).__name__}: {error}"})
            if bench.cuda:
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
