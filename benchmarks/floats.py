"""The dense product of small floats on a GPU against torch's products, all in one run.

Writes ``benchmarks/results/floats_h200.json``, or the file that the GPU's name gives.  Times are microseconds a launch.
Run: ``PYTHONPATH=. python benchmarks/floats.py [--quick] [--out FILE]``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness.gpu_data import compile_ahead, one_line
from harness.gpu_results import gpu_arguments, write_results
from harness.gpu_timing import Call, GpuTiming, measure
from harness.machine import gpu_machine
from torch import Tensor

from cute_kernels import floats
from cute_kernels.floats import FORMATS
from cute_kernels.jit import current_arch
from cute_kernels.scaled_gemm.api import FloatOperand, check, explain_scaled_gemm, scaled_gemm
from cute_kernels.scaled_gemm.config import OperandFormat, ScaledGemmConfig, candidates
from cute_kernels.scaled_gemm.cuda import choose_config, scaled_gemm_cuda
from cute_kernels.scaled_gemm.dequantize import DequantizeConfig, dequantized_format
from cute_kernels.scaled_gemm.small_m.config import ROWS, ReorderConfig, SmallMConfig, supports_small_m
from cute_kernels.scaled_gemm.small_m.config import candidates as small_m_candidates

RESULTS = Path(__file__).resolve().parent / "results"
OUT = torch.float16
SHAPES = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16, 8192, 28672),
    (32, 8192, 28672),
    (64, 8192, 28672),
    (1, 4096, 14336),
    (64, 4096, 14336),
    (16, 14336, 4096),
    (64, 14336, 4096),
)  # (M, K, N)
TUNED = ((64, 8192, 28672), (16, 8192, 28672), (64, 4096, 4096), (1024, 1024, 1024), (4096, 4096, 4096))  # every kernel
TUNED_PAIRS = ("e4m3 x e4m3", "e4m3 x e2m1")
ALL_PAIRS = (4096, 4096, 4096)
QUICK = ((128, 512, 384),)
MX = {name: OperandFormat(name, 32, "ue8m0") for name in FORMATS}
NV = OperandFormat("e2m1", 16, "e4m3")
TILED = OperandFormat("e4m3", tiles=True)
OURS: dict[str, tuple[OperandFormat, OperandFormat, bool]] = {
    "e4m3 x e4m3": (OperandFormat("e4m3"), OperandFormat("e4m3"), False),
    "e4m3 x e4m3, fast sums": (OperandFormat("e4m3"), OperandFormat("e4m3"), True),
    "e4m3 x e2m1": (OperandFormat("e4m3"), OperandFormat("e2m1"), False),
    "e4m3 x e2m1, fast sums": (OperandFormat("e4m3"), OperandFormat("e2m1"), True),
    "e4m3 x e2m3": (OperandFormat("e4m3"), OperandFormat("e2m3"), False),
    "e2m1 x e2m1": (OperandFormat("e2m1"), OperandFormat("e2m1"), False),
    "e4m3 x e4m3, factors of 128 x 128": (TILED, TILED, False),
    "mxfp8 x mxfp4": (MX["e4m3"], MX["e2m1"], False),
    "mxfp8 x mxfp4, folded": (MX["e4m3"], MX["e2m1"], False),
    "mxfp8 x mxfp8, folded": (MX["e4m3"], MX["e4m3"], False),
    "e4m3 x mxfp4, folded": (OperandFormat("e4m3"), MX["e2m1"], False),
    "nvfp4 x nvfp4": (NV, NV, False),
}


def tried(m: int, a: OperandFormat, b: OperandFormat) -> list[ScaledGemmConfig | SmallMConfig]:
    """The kernels that are chosen from for m rows, and others of the same template."""
    out = str(OUT).removeprefix("torch.")
    found = [replace(each, out=out).side_by_side for each in candidates(a, b, current_arch())]
    first, small = found[0], next(each for each in found if each.tile_m == 64)
    if first.decoders:
        left, right = (dequantized_format(kind, a.block > 0 or b.block > 0) for kind in (a, b))
        before = candidates(left, right, current_arch())
        others = [replace(first, decoders=1), replace(small, decoders=2), replace(small, stages=3), *before]
    else:
        others = [replace(small, resident=1, stages=6), replace(first, promote=False)]
    if not supports_small_m(m, a, b, current_arch()):
        return [*found, *others]
    return [*found, *others, *small_m_candidates(next(rows for rows in ROWS if m <= rows), a, b)]


class Baseline(NamedTuple):
    """``error``: relative to the float64 product of the decoded operands, in the Frobenius norm; ``bytes``: of both."""

    call: Call
    error: float
    bytes: int
    kernel: str


def operand(kind: OperandFormat, rows: int, k: int, seed: int) -> FloatOperand:
    """Packed values of normal numbers, and scales near 1."""
    generator = torch.Generator("cuda").manual_seed(seed)
    spread = FORMATS[kind.dtype].largest / 4 if kind.bits < 8 else 1.0
    codes = []
    for first in range(0, rows, 4096):
        real = torch.randn(min(4096, rows - first), k, generator=generator, device="cuda") * spread
        codes.append(floats.pack(floats.encode(real, kind.dtype, saturate=True), kind.dtype))
    scales: dict[str, Any] = {}
    if kind.block:
        numbers = 2.0 ** torch.randint(-2, 3, (rows, -(-k // kind.block)), generator=generator, device="cuda").float()
        scales = {"blocks": floats.encode(numbers, kind.scale), "block": kind.block, "scale_dtype": kind.scale}
    if kind.tiles:
        scales = {"tiles": torch.rand(-(-rows // 128), -(-k // 128), generator=generator, device="cuda") + 0.5}
    return FloatOperand(torch.cat(codes), kind.dtype, k, **scales)


def operand_bytes(x: FloatOperand) -> int:
    return x.packed_data.nbytes + sum(each.nbytes for each in (x.blocks, x.tiles) if each is not None)


def error_of(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


def scaling(k: int, *kinds: OperandFormat) -> float:
    """What keeps results near 1."""
    spread = [FORMATS[kind.dtype].largest / 4 if kind.bits < 8 else 1.0 for kind in kinds]
    return 1 / (spread[0] * spread[1] * k**0.5)


def truth_of(a: FloatOperand, b: FloatOperand, alpha: float) -> Tensor:
    """The product in float64, a few thousand columns at a time."""
    left = a.values(torch.float64)
    parts = []
    for first in range(0, b.rows, 4096):
        last = min(first + 4096, b.rows)
        part = FloatOperand(
            b.packed_data[first:last], b.dtype, b.k, None, None if b.blocks is None else b.blocks[first:last], b.block,
            b.scale_dtype, None if b.tiles is None else b.tiles[first // 128 : -(-last // 128)],
        )  # fmt: skip
        parts.append(left @ part.values(torch.float64).t())
    return torch.cat(parts, 1) * alpha


def ours(
    a: FloatOperand,
    b: FloatOperand,
    truth: Tensor,
    alpha: float,
    fast: bool,
    config: ScaledGemmConfig | SmallMConfig | None = None,
    fold: bool = False,
) -> Baseline:
    """The product, compared with the exact one; raises ``ArithmeticError`` where it is off."""
    out = torch.full((a.rows, b.rows), torch.nan, dtype=OUT, device="cuda")
    call: Callable[[], Tensor] = partial(
        scaled_gemm, a, b, alpha=alpha, out=out, out_dtype=OUT, fast_accum=fast, fold_scales=fold
    )
    if config is not None:
        call = partial(scaled_gemm_cuda, check(a, b, alpha, 0.0, None, None, out, OUT, fast), out, config)
    call()
    error = error_of(out, truth)
    if not error < 1e-2:
        raise ArithmeticError(f"relative error {error:.1e}")
    name = decoded = ""
    if config is not None:
        name = config.name
    else:
        plan = explain_scaled_gemm(a, b, out_dtype=OUT, fast_accum=fast, fold_scales=fold)
        name, decoded = plan.kernel, " and ".join(plan.decoded + plan.folded)
    kernel = f"{name}, {decoded} decoded before" if decoded else name
    return Baseline(call, error, operand_bytes(a) + operand_bytes(b), kernel)


def torch_fp8(a: FloatOperand, b: FloatOperand, truth: Tensor, alpha: float, fast: bool) -> Baseline:
    x, y = floats.to_torch(a.packed_data, "e4m3"), floats.to_torch(b.packed_data, "e4m3").t()
    scale, one = torch.tensor(alpha, device="cuda"), torch.ones((), device="cuda")
    call = partial(torch._scaled_mm, x, y, scale_a=scale, scale_b=one, out_dtype=OUT, use_fast_accum=fast)
    return Baseline(call, error_of(call(), truth), a.packed_data.nbytes + b.packed_data.nbytes, "torch._scaled_mm")


def torch_bf16(a: FloatOperand, b: FloatOperand, truth: Tensor, alpha: float) -> Baseline:
    x, y = (a.values() * alpha).bfloat16(), b.values().bfloat16().t()
    return Baseline(lambda: x @ y, error_of(x @ y, truth), 2 * (x.numel() + y.numel()), "torch.matmul")


def baselines(shape: tuple[int, int, int], every: bool) -> Iterator[tuple[str, Callable[[], Baseline]]]:
    """Names and makers of the products of one shape; ``every``: all kernels of two pairs instead."""
    m, k, n = shape
    pairs = {name: each for name, each in OURS.items() if not every or name in TUNED_PAIRS}
    made: dict[OperandFormat, tuple[FloatOperand, FloatOperand]] = {}
    for name, (left, right, fast) in pairs.items():
        for kind in (left, right):
            made.setdefault(kind, (operand(kind, m, k, 1), operand(kind, n, k, 2)))
        a, b, alpha = made[left][0], made[right][1], scaling(k, left, right)
        truth = truth_of(a, b, alpha)
        if every:
            for config in tried(m, left, right):
                yield f"{name}, {config.name}", partial(ours, a, b, truth, alpha, fast, config)
            continue
        yield name, partial(ours, a, b, truth, alpha, fast, fold=name.endswith("folded"))
        if name == "e4m3 x e4m3":
            for quick in (True, False):
                yield f"torch fp8{', fast sums' if quick else ''}", partial(torch_fp8, a, b, truth, alpha, quick)
            yield "torch bf16", partial(torch_bf16, a, b, truth, alpha)


def row(name: str, baseline: Baseline, timing: GpuTiming, operations: int) -> dict[str, Any]:
    return {
        "name": name,
        "us": timing.median,
        "quartiles": timing.quartiles,
        "cold_us": timing.cold,
        "launch_us": timing.launch,
        "mode": timing.mode,
        "tflops": operations / timing.median / 1e6,
        "TB/s": baseline.bytes / timing.median / 1e6,
        "bytes": baseline.bytes,
        "error": baseline.error,
        "kernel": baseline.kernel,
    }


def timed(made: dict[str, Baseline], shape: tuple[int, int, int], failures: list[dict[str, Any]]) -> dict[str, Any]:
    """All in the same rounds."""
    m, k, n = shape
    times = measure({name: baseline.call for name, baseline in made.items()}, rounds=11, samples=5)
    rows = [row(name, baseline, times[name], 2 * m * n * k) for name, baseline in made.items()]
    print(f"\n{m} x {k} x {n}")
    for each in rows:
        figures = f"{each['us']:9.1f} us {each['tflops']:7.0f} Tflops {each['TB/s']:6.2f} TB/s"
        print(f"  {each['name'][-82:]:82} {figures}  error {each['error']:.1e}", flush=True)
    for each in failures:
        print(f"  {each['name'][-82:]:82} failed: {each['failure'][:120]}", flush=True)
    return {"shape": list(shape), "products": rows + failures}


def run_shape(shape: tuple[int, int, int], every: bool = False) -> dict[str, Any]:
    made: dict[str, Baseline] = {}
    failures: list[dict[str, Any]] = []
    for name, make in baselines(shape, every):
        try:
            made[name] = make()
            torch.cuda.synchronize()
        except Exception as error:  # whatever a baseline raises is a result of the benchmark
            failures.append({"name": name, "failure": one_line(error)})
    return timed(made, shape, failures)


def run_pairs(shape: tuple[int, int, int]) -> dict[str, Any]:
    """All 25 pairs of formats."""
    m, k, n = shape
    lefts = {name: operand(OperandFormat(name), m, k, 1) for name in FORMATS}
    rights = {name: operand(OperandFormat(name), n, k, 2) for name in FORMATS}
    made = {}
    for left, a in lefts.items():
        for right, b in rights.items():
            alpha = scaling(k, OperandFormat(left), OperandFormat(right))
            made[f"{left} x {right}"] = ours(a, b, truth_of(a, b, alpha), alpha, False)
    return timed(made, shape, [])


def configs(
    shapes: tuple[tuple[int, int, int], ...], quick: bool
) -> list[ScaledGemmConfig | SmallMConfig | ReorderConfig | DequantizeConfig]:
    """Every kernel that the run will use."""
    arch, out = current_arch(), str(OUT).removeprefix("torch.")
    found: list[ScaledGemmConfig | SmallMConfig | ReorderConfig | DequantizeConfig] = [
        ReorderConfig(OperandFormat(a), bits) for a in FORMATS for bits in (4, 8)
    ]
    found += [ReorderConfig(MX["e4m3"], 4, True), ReorderConfig(NV, 4, True)]
    found += [ReorderConfig(kind, bits, False, True) for kind in (OperandFormat("e4m3"), MX["e4m3"]) for bits in (4, 8)]
    small = [OperandFormat(name) for name in FORMATS if FORMATS[name].bits < 8]
    found += [DequantizeConfig(kind, False) for kind in small]
    found += [DequantizeConfig(kind, True) for kind in (MX["e4m3"], MX["e2m1"], NV)]
    for name, (a, b, fast) in OURS.items():
        fold = name.endswith("folded")
        found += [choose_config(m, n, k, a, b, arch, fast=fast, fold=fold, out=out) for m, k, n in shapes]
    for m, _, _ in QUICK if quick else TUNED:
        for left, right in (OURS[name][:2] for name in TUNED_PAIRS):
            found += [replace(config, out=out) for config in tried(m, left, right)]
    m, k, n = shapes[0] if quick else ALL_PAIRS
    formats = [OperandFormat(name) for name in FORMATS]
    found += [choose_config(m, n, k, a, b, arch, out=out) for a in formats for b in formats]
    return found


def main() -> None:
    args = gpu_arguments(__doc__, "one small shape, to see that it runs")
    shapes = QUICK if args.quick else SHAPES
    start = time.perf_counter()
    compile_ahead(configs(shapes, args.quick))
    results: dict[str, Any] = {
        "machine": gpu_machine(),
        "setting": {
            "data": "codes of normal numbers, scales of blocks 1/4 to 4, output float16",
            "us": "median over rounds of the mean launch in a CUDA graph",
            "error": "relative to the float64 product of the decoded operands, Frobenius norm",
        },
        "products": [run_shape(shape) for shape in shapes],
        "pairs": run_pairs(shapes[0] if args.quick else ALL_PAIRS),
        "kernels": [],
    }
    for shape in QUICK if args.quick else TUNED:
        write_results(results, args.out, "floats", start)  # of a run that is stopped, what it had
        results["kernels"].append(run_shape(shape, every=True))
    write_results(results, args.out, "floats", start)


if __name__ == "__main__":
    main()
