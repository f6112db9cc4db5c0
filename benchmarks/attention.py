"""Sparse attention on a GPU against torch's dense attention and FlexAttention, all in one run.

Eight matrices of four heads, 64 entries a row, random 8 x 1 masks, and random 128 x 128 blocks as FlexAttention's;
operands of ours are quantized before, except where the name says otherwise.  Writes
``benchmarks/results/attention_h200.json``, or the file that the GPU's name gives.
Times are microseconds a launch.
Run: ``PYTHONPATH=. python benchmarks/attention.py [--quick] [--out FILE]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from harness.gpu_data import compile_ahead, one_line
from harness.gpu_results import gpu_arguments, results_file, rounded, save
from harness.gpu_timing import Call, GpuTiming, measure, ratio
from harness.machine import gpu_machine
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.attention import fused as attention
from magicube_cutlass.attention import sparse_attention

BATCH, HEADS, DEPTH = 8, 4, 64
MATRICES = BATCH * HEADS
BLOCK = 128  # of FlexAttention's mask
CASES = ((4096, 0.9), (4096, 0.95), (8192, 0.9), (8192, 0.95))
QUICK = ((1024, 0.9),)
CHECKED = 2  # matrices compared with float64
FIRST = "fused 8b-8b"
BLOCKS = f"{BLOCK} x {BLOCK} blocks"  # the same for FlexAttention and ours


@dataclass(frozen=True)
class Data:
    """Float operands (matrices, L, d) in float16, the mask, and the exact result of the first matrices, float64."""

    length: int
    q: Tensor
    k: Tensor
    v: Tensor
    pattern: mc.Pattern
    expected: Tensor

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, heads, L, d)"""
        shape = (BATCH, HEADS, self.length, DEPTH)
        return self.q.view(shape), self.k.view(shape), self.v.view(shape)


def exact(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """float64 attention of the first matrices; ``seen``: bool (L, L), or None for all."""
    found = []
    for i in range(CHECKED):
        logits = q[i].double() @ k[i].double().mT / math.sqrt(DEPTH)
        if seen is not None:
            logits.masked_fill_(~seen, -torch.inf)
        found.append(torch.softmax(logits, 1) @ v[i].double())
    return torch.stack(found)


def make_data(length: int, sparsity: float) -> Data:
    torch.manual_seed(length)
    q, k, v = (torch.randn(MATRICES, length, DEPTH, device="cuda", dtype=torch.float16) for _ in range(3))
    pattern = mc.random_pattern(length, length, sparsity, 8, seed=length).to("cuda")
    return Data(length, q, k, v, pattern, exact(q, k, v, pattern.to_dense()))


def quantized(x: Tensor, over: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """int8, and a scale for each of what is not in ``over``."""
    scale = x.float().abs().amax(over, keepdim=True) / 127
    return torch.round(x.float() / scale).to(torch.int8), scale.flatten(1).squeeze(1).contiguous()


def fused(data: Data, pattern: mc.Pattern, keyed: bool) -> tuple[Callable[[], Tensor], str]:
    """The call and the kernel's name; ``keyed``: a scale for each query and key, otherwise one for each matrix."""
    over = (2,) if keyed else (1, 2)
    (q, q_scale), (k, k_scale), (v, v_scale) = (
        quantized(data.q, over),
        quantized(data.k, over),
        quantized(data.v, (1, 2)),
    )
    arrays = [(pattern.row_offsets, pattern.col_indices)]
    index = attention.make_index(arrays, data.length, data.length, batch=MATRICES, head_dim=DEPTH)
    out = torch.full_like(data.q, torch.nan)

    def call() -> Tensor:
        attention.fused_attention(
            q, k, v, index, scale=1 / math.sqrt(DEPTH), q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out
        )
        return out

    return call, replace(index.config, key_scale=keyed).name


def of_floats(data: Data, pattern: mc.Pattern, backend: Literal["fused", "unfused"]) -> Callable[[], Tensor]:
    """Everything from float operands on: quantization of Q, K and V, then one kernel or three."""
    q, k, v = data.heads()
    return lambda: sparse_attention(q, k, v, pattern, backend=backend).reshape(data.q.shape)


def dense(data: Data) -> Callable[[], Tensor]:
    q, k, v = data.heads()
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v).view_as(data.q)


def flex(data: Data, sparsity: float) -> tuple[Callable[[], Tensor], Tensor]:
    """The call, and which keys are seen, bool (L, L): random blocks of the same sparsity, each row of blocks alike."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    blocks = data.length // BLOCK
    count = max(1, round((1 - sparsity) * blocks))
    order = torch.rand(blocks, blocks, device="cuda", generator=torch.Generator("cuda").manual_seed(7)).argsort(1)
    chosen = order[:, :count].sort(1).values.to(torch.int32)
    columns = torch.zeros(1, 1, blocks, blocks, dtype=torch.int32, device="cuda")
    columns[0, 0, :, :count] = chosen
    seen = torch.zeros(blocks, blocks, dtype=torch.bool, device="cuda").scatter_(1, chosen.long(), True)
    none = torch.zeros(1, 1, blocks, dtype=torch.int32, device="cuda")
    mask = BlockMask.from_kv_blocks(
        none, torch.zeros_like(columns), torch.full_like(none, count), columns, BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, h, i, j: seen[i // BLOCK, j // BLOCK], seq_lengths=(data.length, data.length),
    )  # fmt: skip
    run = torch.compile(flex_attention, dynamic=False)
    q, k, v = data.heads()
    wide = seen.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return lambda: run(q, k, v, block_mask=mask).view_as(data.q), wide


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Of the first matrices, in the Frobenius norm."""
    return float((out[:CHECKED].double() - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Baseline:
    """A call, what it is compared with, and a note for the results."""

    call: Callable[[], Tensor]
    expected: Tensor
    note: str


def baselines(data: Data, sparsity: float) -> dict[str, Callable[[], Baseline]]:
    """Makers by name; ours first."""

    call_flex, seen = flex(data, sparsity)
    of_blocks = exact(data.q, data.k, data.v, seen)
    blocks, kept = mc.Pattern.from_dense(seen, 8), f"{BLOCK} x {BLOCK} blocks, {float(seen.float().mean()):.3g} kept"

    def ours(pattern: mc.Pattern, expected: Tensor, keyed: bool) -> Baseline:
        call, name = fused(data, pattern, keyed)
        return Baseline(call, expected, name)

    return {
        FIRST: lambda: ours(data.pattern, data.expected, False),
        "fused 8b-8b, scales of keys": lambda: ours(data.pattern, data.expected, True),
        "fused 8b-8b from float16": lambda: Baseline(
            of_floats(data, data.pattern, "fused"), data.expected, "quantization included"
        ),
        "three kernels 8b-8b from float16": lambda: Baseline(
            of_floats(data, data.pattern, "unfused"), data.expected, "likewise"
        ),
        "SDPA fp16": lambda: Baseline(dense(data), exact(data.q, data.k, data.v, None), "dense"),
        f"{BLOCKS}, fused 8b-8b": lambda: ours(blocks, of_blocks, False),
        f"{BLOCKS}, fused 8b-8b, scales of keys": lambda: ours(blocks, of_blocks, True),
        f"{BLOCKS}, fused 8b-8b from float16": lambda: Baseline(of_floats(data, blocks, "fused"), of_blocks, kept),
        f"{BLOCKS}, FlexAttention fp16": lambda: Baseline(call_flex, of_blocks, kept),
    }


def row(name: str, baseline: Baseline, error: float, timing: GpuTiming, base: GpuTiming) -> dict[str, Any]:
    return {
        "name": name,
        "note": baseline.note,
        "us": rounded(timing.median),
        "quartiles": [rounded(x) for x in timing.quartiles],
        "cold_us": rounded(timing.cold),
        "mode": timing.mode,
        "times_ours": round(ratio(timing, base), 3),
        "error": float(f"{error:.3g}"),
    }


def run_case(length: int, sparsity: float) -> dict[str, Any]:
    """All baselines for one length and sparsity, timed in the same rounds."""
    data = make_data(length, sparsity)
    found: dict[str, Baseline] = {}
    errors: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for name, make in baselines(data, sparsity).items():
        try:
            baseline = make()
            errors[name] = relative_error(baseline.call(), baseline.expected)
            torch.cuda.synchronize()
        except Exception as error:  # whatever a baseline raises is a result of the benchmark
            rows.append({"name": name, "failure": one_line(error)})
            continue
        found[name] = baseline
    calls: dict[str, Call] = {name: baseline.call for name, baseline in found.items()}
    times = measure(calls, rounds=15, replay=400.0, samples=5)
    rows = [row(name, found[name], errors[name], times[name], times[FIRST]) for name in found] + rows
    print(f"\nL = {length}, sparsity {sparsity}")
    for each in rows:
        print("  ", *(f"{key}={value}" for key, value in each.items() if key != "quartiles"), flush=True)
    return {"length": length, "sparsity": sparsity, "vectors": data.pattern.vectors, "rows": rows}


def main() -> None:
    args = gpu_arguments(__doc__, "one short sequence, to see that it runs")
    shapes = [replace(config, key_scale=keyed) for config in attention.default_configs() for keyed in (False, True)]
    for config, text in compile_ahead([config for config in shapes if config.head == DEPTH]).items():
        print(f"{config} does not compile: {text}")
    results: dict[str, Any] = {
        "machine": gpu_machine(),
        "setting": {
            "shape": f"batch {BATCH}, {HEADS} heads, d = {DEPTH}, one random 8 x 1 mask for all",
            "us": "median over rounds of the mean launch in a CUDA graph",
            "error": f"relative, Frobenius, of {CHECKED} matrices against float64 with the same mask",
        },
        "cases": [],
    }
    out = args.out or results_file("attention")
    for length, sparsity in QUICK if args.quick else CASES:
        results["cases"].append(run_case(length, sparsity))
        save(results, out)
        torch.cuda.empty_cache()
    print(f"\nwrote {out}")


if __name__ == "__main__":
    main()
