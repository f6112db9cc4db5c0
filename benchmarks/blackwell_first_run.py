"""The float product of sm_100a and sm_103a on the first chip it meets: small steps first, each in a process of its own.

A step that fails ends the run, because the later ones rest on it; one that hangs is ended.
docs/lab/blackwell.md says what each tells.  Writes ``benchmarks/results/blackwell_first_run.json``, or ``--out``.
Run: ``PYTHONPATH=. python benchmarks/blackwell_first_run.py [--step NAME] [--all] [--rehearse] [--out FILE]``;
``--rehearse`` takes the steps on the CPU, where other code multiplies: it tries this script, not the kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness.gpu_timing import Call, measure
from harness.machine import gpu_machine
from harness.tma_box_probe import FILL, probe_box
from torch import Tensor

from cute_kernels import floats
from cute_kernels.floats import FORMATS
from cute_kernels.scaled_gemm.api import FloatOperand, check, explain_scaled_gemm, scaled_gemm
from cute_kernels.scaled_gemm.config import OperandFormat
from cute_kernels.scaled_gemm.cuda import scaled_gemm_cuda
from cute_kernels.scaled_gemm.sm100 import PackedMatrix, Tcgen05Config, candidates, map_parameters, mma_kind
from cute_kernels.scaled_gemm.tcgen05 import MMA_KINDS
from magicube_cutlass.cli.environment import provenance

RESULTS = Path(__file__).resolve().parent / "results"
SECONDS = 180  # of a step, its compiles included
PAIRS = [(OperandFormat(a), OperandFormat(b)) for a in FORMATS for b in FORMATS]
MX = {name: OperandFormat(name, 32, "ue8m0") for name in FORMATS}
NV = OperandFormat("e2m1", 16, "e4m3")
SCALED = [(MX["e4m3"], MX["e4m3"]), (MX["e3m2"], MX["e2m1"]), (MX["e2m1"], MX["e2m1"]), (NV, NV)]
UNSCALED = (("e4m3", "e4m3"), ("e4m3", "e2m1"), ("e2m1", "e2m1"))
TIMED = [*((OperandFormat(a), OperandFormat(b)) for a, b in UNSCALED), *SCALED]
SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (16, 8192, 28672))  # (M, K, N)


class Finding(NamedTuple):
    """One thing that a step tried."""

    name: str
    ok: bool
    detail: str = ""


def matrix(kind: OperandFormat, values: Tensor, blocks: Tensor | None = None) -> FloatOperand:
    """The operand with these values, which the format has, and these factors of blocks, all ones by default."""
    codes = floats.pack(floats.encode(values.float(), kind.dtype), kind.dtype)
    scales: dict[str, Any] = {}
    if kind.block:
        factors = torch.ones(values.shape[0], values.shape[1] // kind.block) if blocks is None else blocks
        encoded = floats.encode(factors.float().to(values.device), kind.scale)
        scales = {"blocks": encoded, "block": kind.block, "scale_dtype": kind.scale}
    return FloatOperand(codes, kind.dtype, values.shape[1], **scales)


def integers(kind: OperandFormat, rows: int, k: int, seed: int, device: str) -> FloatOperand:
    """Integers of -2 to 2, and factors 1/2, 1 or 2."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randint(-2, 3, (rows, k), generator=generator, device=device)
    blocks = None
    if kind.block:
        blocks = 2.0 ** torch.randint(-1, 2, (rows, k // kind.block), generator=generator, device=device)
    return matrix(kind, values, blocks)


def product(a: FloatOperand, b: FloatOperand, config: Tcgen05Config | None = None, **options: Any) -> Tensor:
    """By the kernel in question; raises ``RuntimeError`` where another one would do it."""
    plan = explain_scaled_gemm(a, b)
    if a.device.type == "cuda" and not isinstance(plan.config, Tcgen05Config):
        raise RuntimeError(f"{plan.kernel} was chosen: {plan.refused or 'not a chip of sm_100a or sm_103a'}")
    if config is None or a.device.type == "cpu":
        return scaled_gemm(a, b, **options)
    out = torch.full((a.rows, b.rows), torch.nan, device=a.device)
    return scaled_gemm_cuda(check(a, b, 1.0, 0.0, None, None, out, out.dtype, False), out, config)


def exact(a: FloatOperand, b: FloatOperand) -> Tensor:
    return a.values(torch.float64) @ b.values(torch.float64).t()


def compared(name: str, got: Tensor, truth: Tensor) -> Finding:
    """Whether all is equal, and where the first differences are."""
    wrong = (got.double() != truth).nonzero()
    if not len(wrong):
        return Finding(name, True)
    places = [tuple(place) for place in wrong[:3].tolist()]
    values = [(float(got[place]), float(truth[place])) for place in places]
    return Finding(name, False, f"{len(wrong)} of {got.numel()} differ, first {places}: (got, expected) {values}")


def try_boxes(device: str) -> Iterator[Finding]:
    """What the copy engine writes, and which count of bytes lets waiters go."""
    if device == "cpu":
        yield Finding("no copy engine", True, "skipped in a rehearsal")
        return
    plain = MMA_KINDS["f8f6f4"]
    for dtype in FORMATS:
        bits = FORMATS[dtype].bits
        known = torch.randint(1 << bits, (200, 256), device=device).to(torch.uint8)
        packed = floats.pack(known, dtype)
        parameters = map_parameters("a", PackedMatrix(dtype, 256, 200, packed.data_ptr(), packed.stride(0)), plain, 128)
        counts = {"packed": 128 * 16 * bits, "unpacked": 128 * 128, "packed and a chunk more": 128 * 16 * bits + 16}
        got: dict[str, bool] = {}
        for name, count in counts.items():
            found, got[name] = probe_box(parameters, packed, 128, 96, count)
        expected = torch.zeros((128, 128), dtype=torch.uint8, device=device)
        half = floats.pad16(packed, dtype)[96:, 128:]
        expected[: len(half)] = half
        chunks = torch.arange(8, device=device) ^ (torch.arange(128, device=device) % 8)[:, None]  # 16 bytes, swizzled
        plain_order = found.view(128, 8, 16).gather(1, chunks[..., None].expand(-1, -1, 16)).view(128, 128)
        yield compared(f"{dtype}: codes", floats.unpad16(plain_order, dtype), floats.unpad16(expected, dtype).double())
        gaps = plain_order.view(-1, 16)[:, 2 * bits :]
        detail = f"gaps hold {sorted(set(gaps.flatten().tolist()))}, were {FILL}; " if bits < 8 else ""
        lets_go = [name for name, over in got.items() if over]
        yield Finding(f"{dtype}: counted bytes", got["packed"] and not got["packed and a chunk more"],
                      f"{detail}waiters go at: {', '.join(lets_go) or 'none'}")  # fmt: skip


def places(a: OperandFormat, b: OperandFormat, device: str, swapped: bool) -> tuple[Tensor, Tensor]:
    """Which (row, k) of one operand each result reads, the other being the identity: int (128, 128) both."""
    index, eye = torch.arange(128, device=device), torch.eye(128, device=device)
    read = []
    for ramp in (index[:, None], index[None]):  # row, then k
        found = torch.zeros(128, 128, dtype=torch.int64, device=device)
        for bit in range(7):
            values = (ramp >> bit & 1).float().expand(128, 128)
            left, right = (values, eye) if swapped else (eye, values)
            found |= product(matrix(a, left), matrix(b, right)).round().to(torch.int64) << bit
        read.append(found)
    return read[0], read[1]


def try_identities(device: str) -> Iterator[Finding]:
    """Identity times a matrix whose entries name their places, for every format on either side."""
    index = torch.arange(128, device=device)
    for dtype in FORMATS:
        for swapped in (False, True):
            varied, fixed = OperandFormat(dtype), OperandFormat("e4m3")
            pair = (varied, fixed) if swapped else (fixed, varied)
            row, k = places(*pair, device, swapped)
            # D = I B^T: D[m, n] is B[n, m]; D = A I: D[m, n] is A[m, n].
            rows, ks = (index[:, None], index[None]) if swapped else (index[None], index[:, None])
            wrong = ((row != rows) | (k != ks)).nonzero()
            detail = "" if not len(wrong) else ", ".join(
                f"D[{m}, {n}] is [{int(row[m, n])}, {int(k[m, n])}]" for m, n in wrong[:6].tolist()
            )  # fmt: skip
            yield Finding(f"{dtype} as {'a' if swapped else 'b'}", not len(wrong), detail)


def try_pairs(device: str) -> Iterator[Finding]:
    """Small integers, one part of k and several, one tile."""
    for a, b in PAIRS:
        for m, k, n in ((128, 128, 64), (128, 1024, 128)):
            x, y = integers(a, m, k, 1, device), integers(b, n, k, 2, device)
            yield compared(f"{a.name} x {b.name}, {m} x {k} x {n}", product(x, y), exact(x, y))


def try_factors(device: str) -> Iterator[Finding]:
    """Factors of blocks: none but ones, then one block at a time with a factor of its own a row, then all."""
    for a, b in SCALED:
        kind, k = mma_kind(a, b).name, 512
        ones = torch.ones(128, k, device=device)
        x, y = matrix(a, ones), matrix(b, ones)
        yield compared(f"{kind} {a.dtype} x {b.dtype}: ones", product(x, y), exact(x, y))
        own = 2.0 ** (torch.arange(128, device=device) // 2 % 8)
        for block in range(k // a.block):
            alone = torch.zeros(128, k, device=device)
            alone[:, block * a.block : (block + 1) * a.block] = 1.0
            factors = own[:, None].expand(128, k // a.block).contiguous()
            x, y = matrix(a, alone, factors), matrix(b, ones, factors.flip(0))
            yield compared(f"{kind} {a.dtype} x {b.dtype}: block {block}", product(x, y), exact(x, y))
        for m, n, depth in ((128, 128, 256), (300, 200, 1152)):
            x, y = integers(a, m, depth, 1, device), integers(b, n, depth, 2, device)
            yield compared(f"{kind} {a.dtype} x {b.dtype}: {m} x {depth} x {n}", product(x, y), exact(x, y))


def try_shapes(device: str) -> Iterator[Finding]:
    """Odd sizes, rings that go round, several tiles a block, every width of tile."""
    large = (300, 260) if device == "cpu" else (5000, 9000)
    for m, k, n in ((1, 128, 1), (3, 16, 5), (130, 208, 257), (129, 8192, 65), (*large[:1], 384, large[1])):
        for a, b in (("e4m3", "e5m2"), ("e2m1", "e3m2")):
            depth = k if a == "e4m3" else -(-k // 128) * 128
            x, y = integers(OperandFormat(a), m, depth, 1, device), integers(OperandFormat(b), n, depth, 2, device)
            for config in candidates("f8f6f4"):
                got = product(x, y, config)
                yield compared(f"{a} x {b}, {m} x {depth} x {n}, {config.tile_n} columns", got, exact(x, y))


def try_two_ctas(device: str) -> Iterator[Finding]:
    """Tiles that two CTAs share: one tile and part of it, rings that go round, several tiles a pair."""
    for m, k, n in ((256, 128, 256), (130, 384, 70), (600, 4096, 700)):
        x, y = integers(OperandFormat("e4m3"), m, k, 1, device), integers(OperandFormat("e2m1"), n, k, 2, device)
        for rows, columns in ((128, 128), (128, 256), (256, 64), (256, 128), (256, 256)):
            config = Tcgen05Config("float32", tile_n=columns, pair_rows=rows)
            yield compared(f"{m} x {k} x {n}, tiles of {rows} x {columns}", product(x, y, config), exact(x, y))


def try_outputs(device: str) -> Iterator[Finding]:
    """Output types, scales of rows and columns, c and bias; rows that start at multiples of 16 bytes, and not."""
    generator = torch.Generator(device).manual_seed(3)
    for n in (256, 251):
        x, y = integers(OperandFormat("e2m1"), 140, 256, 1, device), integers(OperandFormat("e4m3"), n, 256, 2, device)
        rows, bias = (torch.randn(size, generator=generator, device=device) for size in (140, n))
        c = torch.randn(140, n, generator=generator, device=device).half()
        truth = 0.5 * exact(x, y) * rows.double()[:, None] - 2 * c.double() + bias.double()
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            options: dict[str, Any] = {"alpha": 0.5, "beta": -2.0, "c": c, "bias": bias, "out_dtype": dtype}
            got = product(replace(x, scale=rows), y, **options)
            error = float(((got.double() - truth).abs() / (truth.abs() + 1)).max())
            yield Finding(f"{dtype}, {n} columns", error < 2 * torch.finfo(dtype).eps + 2.0**-18, f"error {error:.1e}")


def normal(kind: OperandFormat, rows: int, k: int, seed: int, device: str) -> FloatOperand:
    """The format's nearest to normal numbers."""
    real = torch.randn(rows, k, generator=torch.Generator(device).manual_seed(seed), device=device)
    return matrix(kind, floats.decode(floats.encode(real, kind.dtype), kind.dtype))


def try_accuracy(device: str) -> Iterator[Finding]:
    """Numbers of all magnitudes against float64: how many bits the sums keep is not documented."""
    for a, b in (*PAIRS[:7], *SCALED):
        x, y = normal(a, 256, 4096, 1, device), normal(b, 256, 4096, 2, device)
        size = x.values(torch.float64).abs() @ y.values(torch.float64).abs().t()
        error = float(((product(x, y).double() - exact(x, y)).abs() / size).max())
        yield Finding(f"{a.name} x {b.name}", error < 2.0**-10, f"error {error:.1e} of the sum of magnitudes, K 4096")


def try_speed(device: str) -> Iterator[Finding]:
    """Microseconds of each width of tile, beside torch's fp8 product."""
    for m, k, n in ((128, 256, 128),) if device == "cpu" else SHAPES:
        calls: dict[str, Call] = {}
        for a, b in TIMED:
            x, y = integers(a, m, k, 1, device), integers(b, n, k, 2, device)
            for config in candidates(mma_kind(a, b).name):
                calls[f"{a.name} x {b.name}, {config.tile_n} columns"] = partial(product, x, y, config)
        if device == "cpu":
            yield from (Finding(name, call() is not None, "not timed in a rehearsal") for name, call in calls.items())
            continue
        operands = [integers(OperandFormat("e4m3"), size, k, 1, device) for size in (m, n)]
        e4m3 = [floats.to_torch(each.packed_data, "e4m3") for each in operands]
        one = torch.ones((), device=device)
        calls["torch fp8"] = partial(torch._scaled_mm, e4m3[0], e4m3[1].t(), one, one, out_dtype=torch.float32)
        for name, timing in measure(calls, rounds=7, samples=5).items():
            yield Finding(f"{m} x {k} x {n}, {name}", True, f"{timing.median:.1f} us")


STEPS: dict[str, Callable[[str], Iterator[Finding]]] = {
    "boxes": try_boxes,
    "identities": try_identities,
    "pairs": try_pairs,
    "factors": try_factors,
    "shapes": try_shapes,
    "outputs": try_outputs,
    "accuracy": try_accuracy,
    "two CTAs": try_two_ctas,
    "speed": try_speed,
}


def run_step(name: str, device: str) -> dict[str, Any]:
    """One step in a process of its own: its findings, and why it ended early if it did."""
    command = [sys.executable, __file__, "--step", name, *(["--rehearse"] if device == "cpu" else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        said, ended = done.stdout, "" if done.returncode == 0 else done.stderr.strip()[-600:]
    except subprocess.TimeoutExpired as late:
        said, ended = (late.stdout or b"").decode(), f"no end in {SECONDS} s: a barrier that nobody arrives at?"
    findings = [Finding(*json.loads(line)) for line in said.splitlines() if line.startswith("[")]
    ok = not ended and bool(findings) and all(finding.ok for finding in findings)
    return {"step": name, "ok": ok, "ended": ended, "findings": [finding._asdict() for finding in findings]}


def tell(result: dict[str, Any]) -> None:
    print(f"{result['step']}: {'as expected' if result['ok'] else 'NOT as expected'} {result['ended']}", flush=True)
    bad = [finding for finding in result["findings"] if not finding["ok"]]
    for finding in bad or [finding for finding in result["findings"] if finding["detail"]]:
        print(f"  {finding['name']}: {finding['detail']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", choices=STEPS, help="this step, in this process, a line of JSON a finding")
    parser.add_argument("--all", action="store_true", help="go on after a step that fails")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, by torch.matmul")
    parser.add_argument("--out", type=Path, default=RESULTS / "blackwell_first_run.json", help="the results file")
    args = parser.parse_args()
    device = "cpu" if args.rehearse else "cuda"
    os.environ["MAGICUBE_TCGEN05"] = "1"
    if device == "cuda" and (not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10):
        raise SystemExit("this needs a GPU of compute capability 10.0 or 10.3 (or --rehearse)")
    if args.step:
        for finding in STEPS[args.step](device):
            print(json.dumps(finding), flush=True)
        return
    results: list[dict[str, Any]] = []
    for name in STEPS:
        results.append(run_step(name, device))
        tell(results[-1])
        if not (results[-1]["ok"] or args.all):
            break
    facts = {
        "machine": provenance() if device == "cpu" else gpu_machine(),
        "rehearsal": device == "cpu",
        "steps": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"wrote {args.out}")
    if not all(result["ok"] for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
