"""What a warm call takes on one CPU thread beside the engine's product: Python, allocation, dispatch.

The product is timed by the same arguments, without the call around it. Small operands, so that the call is most of the
time. Writes ``benchmarks/results/cpu_calls.json``.
Run: ``python benchmarks/cpu_calls.py [--out FILE]``
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import magicube_cutlass as mc
from cute_kernels.cpu import engine, extension
from magicube_cutlass.cli.environment import provenance
from magicube_cutlass.nn import SparseQuantLinear

RESULTS = Path(__file__).resolve().parent / "results"
ENTRIES = (
    "spmm",
    "sddmm",
    "attention",
    "sparse_linear",
    "linear",
    "integer_linear",
    "dense",
    "quantize",
)  # of the extension
CALLS, ROUNDS = 1000, 9


@contextmanager
def recorded(entries: list[Callable[[], object]]) -> Iterator[None]:
    """Collect the calls of the extension in the body, to be repeated with the same arguments."""
    module = extension.load_extension()
    before = {name: getattr(module, name) for name in ENTRIES}

    def watch(run: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Any, **options: Any) -> object:
            entries.append(lambda: run(*args, **options))
            return run(*args, **options)

        return call

    for name, run in before.items():
        setattr(module, name, watch(run))
    try:
        yield
    finally:
        for name, run in before.items():
            setattr(module, name, run)


def shortest(call: Callable[[], object]) -> float:
    """Microseconds of a call, the best of several rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - start) / CALLS)
    return best * 1e6


def products() -> dict[str, Callable[[], object]]:
    """Calls by name."""
    weight, x = torch.randn(64, 64), torch.randn(16, 64)
    a = mc.SRBCRS.from_mask(weight, weight.abs() > 1, vector_length=8, bits=8, scale="row")
    b, one = mc.quantize(x.t(), bits=8, scale="column"), mc.quantize(x.t(), bits=8)
    q = mc.quantize(torch.randn(64, 16), bits=8, scale="row")
    pattern = a.pattern
    heads_q, heads_k, heads_v = torch.randn(3, 1, 64, 32)
    mask = mc.masks.local(64, 8)

    found: dict[str, Any] = {
        "spmm": lambda: mc.spmm(a, b),
        "spmm, per-tensor B": lambda: mc.spmm(a, one),
        "sddmm": lambda: mc.sddmm(q, q, pattern),
        "sparse_attention": lambda: mc.sparse_attention(heads_q, heads_k, heads_v, mask),
    }
    for sparsity in (0.9, 0.0):
        for kind in ("dynamic", "static"):
            for trains in (False, True):
                made = SparseQuantLinear.from_linear(
                    torch.nn.Linear(64, 64), sparsity, calibrate=[x] if kind == "static" else None
                ).train(trains)
                name = f"layer, {sparsity:g}, {kind}, {'training' if trains else 'eval'}"
                found[name] = lambda made=made: made(x)
    return found


def main(out: Annotated[Path, typer.Option(help="Results file.")] = RESULTS / "cpu_calls.json") -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    warm, cold = products(), products()  # a prepared call holds the function that it found
    for name, call in warm.items():
        row: dict[str, Any] = {"call": name}
        with torch.set_grad_enabled(name.endswith("training")), torch.inference_mode(name.endswith("eval")):
            call()
            row["us"] = shortest(call)
            entries: list[Callable[[], object]] = []
            with recorded(entries):
                result = cold[name]()  # kept, as the memory that is written again
            row["product_us"] = sum(shortest(entry) for entry in entries)
            row["beside_us"] = row["us"] - row["product_us"]
            del result
        rows.append(row)
        typer.echo(f"{name:32s} " + ", ".join(f"{key} {value:.1f}" for key, value in row.items() if key != "call"))
    linear, x = torch.nn.Linear(64, 64), torch.randn(16, 64)
    with torch.inference_mode():
        rows.append({"call": "torch.nn.Linear", "us": shortest(lambda: linear(x))})
    typer.echo(f"torch.nn.Linear {rows[-1]['us']:.1f} us")
    setting = {"isa": engine.isa(), "threads": 1, "time": f"us: best of {ROUNDS} rounds of {CALLS} calls"}
    out.write_text(json.dumps({"machine": provenance(), "setting": setting, "results": rows}, indent=1) + "\n")
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
