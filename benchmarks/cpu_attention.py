"""Sparse attention and SDDMM on one CPU thread beside torch's dense attention with the same mask.

1,024 tokens, d = 64, one head, 90% zeros. torch's `scaled_dot_product_attention` takes the mask as bool and as float,
in float32 and bfloat16. Our attention is compared with the three products in the same run.
Writes ``benchmarks/results/cpu_attention_<isa>.json``.  Run: ``python benchmarks/cpu_attention.py [--out FILE]``
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from torch.nn import functional

import magicube_cutlass as mc
from cute_kernels.cpu import engine
from magicube_cutlass.cli.environment import provenance

RESULTS = Path(__file__).resolve().parent / "results"
TOKENS, DEPTH, SPARSITY = 1024, 64, 0.9
ROUNDS = 15
_CLOSE = 1e-2  # relative: of weights whose rounding differs


def calls() -> dict[str, Callable[[], object]]:
    """Calls by name, on the same data."""
    q, k, v = torch.randn(3, 1, TOKENS, DEPTH)
    mask = mc.masks.random(TOKENS, SPARSITY)
    kept = mask.to_dense()[None, None]
    added = torch.zeros(kept.shape).masked_fill(~kept, -torch.inf)
    query, key = mc.quantize(q[0], 8, "row"), mc.quantize(k[0], 8, "row")
    ours, steps = mc.sparse_attention(q, k, v, mask), mc.sparse_attention(q, k, v, mask, backend="unfused")
    error = float((ours - steps).norm() / steps.norm())
    if not error < _CLOSE:
        raise ArithmeticError(f"attention in one pass is off by {error:.2e} of the three products, at most {_CLOSE:g}")
    found: dict[str, Callable[[], object]] = {
        "sparse_attention": lambda: mc.sparse_attention(q, k, v, mask),
        "sparse_attention, three products": lambda: mc.sparse_attention(q, k, v, mask, backend="unfused"),
        "sddmm, float32 out": lambda: mc.sddmm(query, key, mask, out_dtype=torch.float32),
        "sddmm, float16 out": lambda: mc.sddmm(query, key, mask, out_dtype=torch.float16),
    }
    for dtype in (torch.float32, torch.bfloat16):
        dense = partial(functional.scaled_dot_product_attention, *(x[None].to(dtype) for x in (q, k, v)))
        for name, attn_mask in (("bool", kept), ("float", added.to(dtype))):
            found[f"torch, {str(dtype).removeprefix('torch.')}, {name} mask"] = partial(dense, attn_mask=attn_mask)
    return found


def main(out: Annotated[Path | None, typer.Option(help="Results file.")] = None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    seen: dict[str, list[float]] = {}
    with torch.inference_mode():
        made = calls()
        for _ in range(ROUNDS + 1):
            for name, call in made.items():
                start = time.perf_counter()
                call()
                seen.setdefault(name, []).append((time.perf_counter() - start) * 1e6)
    rows = [{"call": name, "us": min(each[1:]), "median_us": median(each[1:])} for name, each in seen.items()]
    for row in rows:
        typer.echo(f"{row['call']:34s} {row['us']:9.1f} us, median {row['median_us']:9.1f}")
    setting = {
        "isa": engine.isa(), "threads": 1, "tokens": TOKENS, "d": DEPTH, "sparsity": SPARSITY, "v": 8,
        "us": f"the best of {ROUNDS} interleaved rounds",
    }  # fmt: skip
    path = out or RESULTS / f"cpu_attention_{engine.isa()}.json"
    path.write_text(json.dumps({"machine": provenance(), "setting": setting, "results": rows}, indent=1) + "\n")
    typer.echo(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
