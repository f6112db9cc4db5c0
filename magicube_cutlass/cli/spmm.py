"""``magicube spmm``: run one product on a file's pattern, check it, and time it against the dense product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicube_cutlass.cli.arguments import (
    BITS,
    Device,
    Json,
    LhsBits,
    MatrixFile,
    RhsBits,
    TensorName,
    VectorLength,
    check_choice,
    check_file,
    check_length,
    chosen_device,
    print_json,
)
from magicube_cutlass.cli.console import bytes_text, facts, output, working

if TYPE_CHECKING:
    from magicube_cutlass.bench.timing import Timing
    from magicube_cutlass.formats.pattern import Pattern


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


def _run(pattern: Pattern, n: int, bits: tuple[int, int], device: str, seed: int) -> dict[str, Any]:
    """Check and time one product on a pattern; return what was run and the times."""
    import torch

    from magicube_cutlass.bench.problems import (
        check_product,
        dense_baselines,
        exact_dtype,
        random_matrix,
        random_operand,
    )
    from magicube_cutlass.bench.timing import measure
    from magicube_cutlass.ops.spmm import spmm as multiply

    (m, k), dtype = pattern.shape, exact_dtype(pattern.shape[1], *bits)
    with working("building the operands"):
        lhs, rhs = random_matrix(pattern, bits[0], seed), random_operand(k, n, bits[1], seed + 1)
        left, right = lhs.to(device), rhs.to(device)
        baselines = {} if 0 in (m, k) else dense_baselines(left, right)
    with working("checking against the exact product"):
        check_product(lhs, rhs, multiply(left, right, out_dtype=dtype).cpu())
    with working("timing"):
        wait = torch.cuda.synchronize if device == "cuda" else None
        times = measure({"spmm": lambda: multiply(left, right, out_dtype=dtype), **baselines}, synchronize=wait)
    return {"bytes": lhs.nbytes, "dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads(),
            "times": times}  # fmt: skip


def spmm(
    file: MatrixFile,
    n: Annotated[int, typer.Option("--n", help="Columns of the dense operand.")] = 256,
    vector_length: VectorLength = None,
    lhs_bits: LhsBits = 8,
    rhs_bits: RhsBits = 8,
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the random values.")] = 0,
    tensor: TensorName = None,
    as_json: Json = False,
) -> None:
    """Multiply random values on the pattern with a random dense matrix; check and time it."""
    check_choice("lhs-bits", lhs_bits, BITS)
    check_choice("rhs-bits", rhs_bits, BITS)
    check_length(vector_length)
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    check_file(file)
    where = chosen_device(device)
    from magicube_cutlass.formats.files import read_pattern

    with working(f"reading {file.name}"):
        pattern = read_pattern(file, vector_length=vector_length, tensor=tensor).pattern
    found = _run(pattern, n, (lhs_bits, rhs_bits), where, seed)
    (m, k), times, product = pattern.shape, found["times"], f"L{lhs_bits}-R{rhs_bits}"
    seconds = times["spmm"].median
    if as_json:
        by_name = {name: {"median_ms": each.median * 1e3, "best_ms": each.best * 1e3, "runs": each.runs}
                   for name, each in times.items()}  # fmt: skip
        print_json({
            "file": str(file), "shape": [m, k], "vector_length": pattern.vector_length, "density": pattern.density,
            "product": product, "n": n, "device": where, "out_dtype": found["dtype"], "threads": found["threads"],
            "is_exact": True, "times": by_name,
        })  # fmt: skip
        return
    lines = {
        "matrix": f"{m} x {k}, V = {pattern.vector_length}, density {pattern.density:.4f}, "
        f"{bytes_text(found['bytes'])} as SR-BCRS",
        "product": f"{product}, n = {n}, {found['dtype']}, "
        + ("CUDA" if where == "cuda" else f"{found['threads']} threads"),
        "check": f"equal to the exact product on all {m} rows",
        "time": f"{seconds * 1e3:.3f} ms  (median of {times['spmm'].runs})",
        "useful": f"{2 * pattern.nnz * n / seconds / 1e9:.1f} Gop/s",
        "dense-equivalent": f"{2 * m * k * n / seconds / 1e9:.1f} Gop/s",
    }
    output().print(facts(str(file), lines | _dense_lines(times)))
