"""``magicube spmm``: run one product on a file's pattern, check it, and time it against the dense product."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

import magicube_cutlass as mc
from cute_kernels.integers import check_bits
from magicube_cutlass.bench.problems import check_product, dense_baselines, exact_dtype, random_matrix, random_operand
from magicube_cutlass.bench.timing import Timing, measure
from magicube_cutlass.cli.console import bytes_text, facts, output, working


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device must be 'cpu', got {device!r}") from None
    if kind != "cpu":
        raise ValueError(f"device must be 'cpu', got {device!r}; magicube_cutlass.spmm also multiplies CUDA tensors")


def _dense_lines(times: dict[str, Timing]) -> dict[str, str]:
    baselines = {name: timing for name, timing in times.items() if name != "spmm"}
    if not baselines:
        return {}
    name, best = min(baselines.items(), key=lambda item: item[1].median)
    ratio = best.median / times["spmm"].median
    return {
        "dense product": f"{best.median * 1e3:.3f} ms  ({name}, fastest of {', '.join(sorted(baselines))})",
        "ratio": f"{ratio:.2f}x  ({'sparse' if ratio >= 1 else 'dense'} is faster)",
    }


def spmm(
    file: Annotated[Path, typer.Argument(metavar="FILE.smtx", help="An .smtx file, plain or gzipped.")],
    n: Annotated[int, typer.Option("--n", help="Columns of the dense operand.")] = 256,
    vector_length: Annotated[int, typer.Option(help="V: rows of the matrix in each row of the file.")] = 8,
    lhs_bits: Annotated[int, typer.Option(help="Bits of the sparse operand: 4, 8, 12 or 16.")] = 8,
    rhs_bits: Annotated[int, typer.Option(help="Bits of the dense operand: 4, 8, 12 or 16.")] = 8,
    device: Annotated[str, typer.Option(help="Where to run: cpu.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the random values.")] = 0,
) -> None:
    """Multiply random values on the pattern with a random dense matrix; check and time it."""
    _check_device(device)
    check_bits(lhs_bits, "lhs-bits")
    check_bits(rhs_bits, "rhs-bits")
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    with working(f"reading {file.name}"):
        pattern = mc.read_smtx(file, vector_length=vector_length)
    (m, k), dtype = pattern.shape, exact_dtype(pattern.shape[1], lhs_bits, rhs_bits)
    with working("building the operands"):
        lhs, rhs = random_matrix(pattern, lhs_bits, seed), random_operand(k, n, rhs_bits, seed + 1)
        baselines = {} if 0 in (m, k) else dense_baselines(lhs, rhs)
    with working("checking against the exact product"):
        check_product(lhs, rhs, mc.spmm(lhs, rhs, out_dtype=dtype))
    with working("timing"):
        times = measure({"spmm": lambda: mc.spmm(lhs, rhs, out_dtype=dtype), **baselines})
    seconds = times["spmm"].median
    lines = {
        "matrix": f"{m} x {k}, V = {vector_length}, density {pattern.density:.4f}, {bytes_text(lhs.nbytes)} as SR-BCRS",
        "product": f"L{lhs_bits}-R{rhs_bits}, n = {n}, {str(dtype).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads",
        "check": f"equal to the exact product on all {m} rows",
        "time": f"{seconds * 1e3:.3f} ms  (median of {times['spmm'].runs})",
        "useful": f"{2 * pattern.nnz * n / seconds / 1e9:.1f} Gop/s",
        "dense-equivalent": f"{2 * m * k * n / seconds / 1e9:.1f} Gop/s",
    }
    output().print(facts(str(file), lines | _dense_lines(times)))
