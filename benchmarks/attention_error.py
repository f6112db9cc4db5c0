"""Error of sparse attention against float64 attention with the same mask, on a CPU, for every precision pair.

Inputs: standard normal ones, and ones as projections of a trained model have them (``real``: neighbouring tokens alike,
a channel of K and one of V several times the others, V with means, logits of a wider spread).  An error is
``|O - O_64| / |O_64|`` in the Frobenius norm over 2 x 3 heads; ``float16`` is dense attention of torch in float16.
Writes ``benchmarks/results/attention_error.json``.  Run: ``PYTHONPATH=. python benchmarks/attention_error.py``.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor

import magicube_cutlass as mc
from magicube_cutlass import masks
from magicube_cutlass.attention import sparse_attention
from magicube_cutlass.cli.environment import provenance

PAIRS = ((16, 16), (16, 8), (8, 8), (8, 4), (4, 4))
DEPTH = 64
RESULTS = Path(__file__).parent / "results" / "attention_error.json"


def inputs(kind: str, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K, V of shape (2, 3, length, DEPTH)."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, length, DEPTH) for _ in range(3))
    if kind == "real":
        q, k, v = ((x + x.roll(1, -2) + x.roll(2, -2)) / math.sqrt(3) for x in (q, k, v))
        k[..., 1] *= 4
        v[..., 2] *= 3
        q, v = q * 1.8, v + torch.randn(DEPTH)
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Dense attention with the mask, in ``dtype``."""
    s = q.to(dtype) @ k.to(dtype).mT * DEPTH**-0.5
    return torch.softmax(s.masked_fill(~visible, -math.inf), -1) @ v.to(dtype)


def mask_of(name: str, length: int) -> mc.Pattern:
    """One of the masks of the table."""
    if name == "bigbird":
        return masks.bigbird(length, window=length // 32, tokens=8, random_keys=length // 64)
    return masks.random(length, float(name.split()[1]))


def rows(length: int) -> list[dict[str, object]]:
    """One row for each kind of inputs and mask."""
    found = []
    for kind in ("normal", "real"):
        q, k, v = inputs(kind, length)
        for name in ("random 0.9", "random 0.95", "bigbird"):
            mask = mask_of(name, length)
            visible = mask.to_dense()
            truth = exact(q, k, v, visible)
            errors = {"float16": exact(q, k, v, visible, torch.float16)}
            for softmax_bits, qkv_bits in PAIRS:
                ours = sparse_attention(q, k, v, mask, softmax_bits=softmax_bits, qkv_bits=qkv_bits)
                errors[f"{softmax_bits}b-{qkv_bits}b"] = ours
            row: dict[str, object] = {"inputs": kind, "mask": name, "length": length, "density": round(mask.density, 4)}
            found.append(
                row | {n: float(f"{(x.double() - truth).norm() / truth.norm():.3g}") for n, x in errors.items()}
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = rows(options.length)
    options.out.write_text(json.dumps({"machine": provenance(), "depth": DEPTH, "errors": found}, indent=1) + "\n")
    for row in found:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
