"""How good the choice between the sparse and the dense kernel of a CPU is: both timed on random shapes, on one thread.

Half of the cases are linear layers from float32, as ``SparseQuantLinear`` runs them, half are products of integers, as
``spmm(allow_dense=True)`` runs them. Both kernels give the same bits, which is checked.
Writes ``benchmarks/results/cpu_choose_<instruction set>.json`` and prints the share of picks within 10% of the better.
Run: ``python benchmarks/cpu_choose.py [--cases N] [--seed S] [--out FILE]``
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from harness.timing import measure

import magicube_cutlass as mc
from cute_kernels.cpu import engine
from magicube_cutlass.autograd import compress
from magicube_cutlass.cli.environment import provenance
from magicube_cutlass.dispatch.cpu_linear import CpuLinear, LinearRecord
from magicube_cutlass.dispatch.dense_fallback import DenseCall, forecast

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
TOKENS = (1, 2, 4, 8, 16, 24, 32, 64, 128, 400)
SPARSITIES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LENGTHS = (8, 8, 8, 4, 2)  # V, most of them 8
MOST = 2**30  # multiply-adds of a case


class Case(NamedTuple):
    """A matrix (m, k) times k x n."""

    m: int
    k: int
    n: int
    sparsity: float
    vector_length: int


def cases(count: int, seed: int) -> list[Case]:
    """Different random cases."""
    draw, found = random.Random(seed), dict[Case, None]()
    while len(found) < count:
        case = Case(draw.choice(SIZES), draw.choice(SIZES), draw.choice(TOKENS), draw.choice(SPARSITIES),
                    draw.choice(LENGTHS))  # fmt: skip
        if case.m * case.k * case.n <= MOST:
            found[case] = None
    return list(found)


def matrix_of(case: Case) -> mc.SRBCRS:
    pattern = mc.random_pattern(case.m, case.k, case.sparsity, case.vector_length, seed=case.m + case.k)
    return compress(torch.randn(pattern.vectors, case.vector_length), pattern)


def layer_calls(case: Case) -> tuple[dict[str, Callable[[], torch.Tensor]], str]:
    """The product with float32 rows by both kernels, and the pick."""
    matrix, x = matrix_of(case), torch.randn(case.n, case.k)
    owner, calls = CpuLinear(matrix), dict[str, Callable[[], torch.Tensor]]()
    pick = "dense" if owner.is_dense(case.n) else "sparse"
    for name in ("sparse", "dense"):
        owner._choices[case.n] = name == "dense"
        calls[name] = partial(LinearRecord(matrix, owner, x, None, 8, None), x, None, matrix.scale, None)
    return calls, pick


def product_calls(case: Case) -> tuple[dict[str, Callable[[], torch.Tensor]], str]:
    """The product with integers, B column- or row-major by turns, by both kernels, and the pick."""
    matrix, x = matrix_of(case), torch.randn(case.n, case.k)
    b = mc.quantize(x.t() if case.n % 3 else x.t().contiguous(), bits=8, scale="column")
    predicted = forecast(matrix, b, torch.float32)
    assert predicted is not None
    dense = DenseCall(matrix, b, torch.float32)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "sparse": partial(mc.spmm, matrix, b),
        "dense": partial(dense, b.data, b.scale, None, None),
    }
    return calls, "dense" if predicted.dense_wins else "sparse"


def run_case(kind: str, case: Case, budget: float) -> dict[str, Any]:
    calls, pick = (layer_calls if kind == "layer" else product_calls)(case)
    if not torch.equal(calls["sparse"](), calls["dense"]()):
        raise ArithmeticError(f"{kind}, {case}: the kernels differ")
    us = {name: timing.best * 1e6 for name, timing in measure(calls, budget=budget).items()}
    return {"kind": kind, **case._asdict(), "us": us, "pick": pick, "ratio": us[pick] / min(us.values())}


def judge(rows: list[dict[str, Any]]) -> str:
    """How the picks compare with the better of both kernels."""
    near = sum(row["ratio"] <= 1.1 for row in rows)
    worst = max(row["ratio"] for row in rows)
    text = f"{near} of {len(rows)} picks within 10% of the better ({near / len(rows):.0%}), "
    return text + f"the worst takes {worst:.2f} times as long"


def main(
    count: Annotated[int, typer.Option("--cases", help="Cases of each kind.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the random cases.")] = 0,
    budget: Annotated[float, typer.Option(help="Seconds per kernel.")] = 0.05,
    out: Annotated[Path | None, typer.Option(help="Results file.")] = None,
) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)  # as in inference: a layer that keeps gradients hands out its results in columns
    torch.manual_seed(0)
    rows = [run_case(kind, case, budget) for kind in ("layer", "product") for case in cases(count, seed)]
    judged = {kind: judge([row for row in rows if row["kind"] == kind]) for kind in ("layer", "product")}
    for kind, text in judged.items():
        typer.echo(f"{kind}: {text}")
    setting = {"isa": engine.isa(), "threads": 1, "time": "us: best of all rounds", **judged}
    path = out or RESULTS / f"cpu_choose_{engine.isa()}.json"
    path.write_text(json.dumps({"machine": provenance(), "setting": setting, "results": rows}, indent=1) + "\n")
    typer.echo(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
