"""The literature's protocol: pruned networks' matrices, V = 2, 4, 8, against dense products and others'.

``--device cuda`` (default) writes ``benchmarks/results/dlmc_h200.json``, or the file that the GPU's name gives.  Times
are microseconds a launch in a CUDA graph, operands in the L2 cache where they fit; every product that is timed was
compared with the exact result in the same run.  Dense products are timed once for a shape.  ``--device cpu`` times the
engine (``harness/cpu_dlmc.py``) and writes ``benchmarks/results/dlmc_cpu.json``.

Matrices are read from the folder ``MAGICUBE_DATA`` (or ``../shared/data``), which holds ``dlmc/matrices``; ``--folder``
names another, ``--list`` a file of their names.  A finished matrix is kept in a ``.jsonl`` beside the results: the same
command goes on after it, ``--fresh`` starts again.  ``--pairs`` multiplies every matrix in each of Table IV's widths.
``--figures`` measures Figures 14 and 15 of Li, Osawa, Hoefler, SC'22, instead: V = 8, N or K = 256, each of these
widths, dense fp8 (cuBLASLt, as int8) and cuSPARSE's Blocked-ELL too; it writes ``dlmc_figures_<GPU>.json``.
Run: ``PYTHONPATH=. python benchmarks/dlmc.py [--device cpu] [--per-group 2] [--pairs all] [--figures] [--fresh]
[--list FILE] [--folder DIR] [--seconds 150] [--out FILE]``; ``benchmarks/plots/gpu_plots.py`` draws the GPU's result,
``benchmarks/paper_magicube.py`` writes the page of the CPU's.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from harness import cpu_dlmc
from harness.dlmc_data import Journal, Matrix, Record, facts, listed, of_length, pairs_of, sample
from harness.gpu_baselines import (
    Baseline,
    blocked_ell,
    blocked_ell_half,
    calls_of,
    csr_half,
    dense_half,
    gemm_configs,
    own_floats,
    prepare,
    torch_bsr,
)
from harness.gpu_data import Shape, Widths, chosen, chosen_for, compile_ahead, make_product, one_line, uniform
from harness.gpu_dlmc import (
    DENSE,
    DenseTimes,
    checked_spmm,
    run_sddmm,
    spmm_products,
    spmm_row,
    timed,
)
from harness.gpu_results import gpu_arguments, results_file, rounded, save
from harness.gpu_sddmm import chosen_sddmm
from harness.gpu_timing import replays
from harness.machine import gpu_machine

import magicube_cutlass as mc
from cute_kernels.dtypes import FLOATS, SDDMM_PAIRS, SPMM_PAIRS
from cute_kernels.jit.warmup import Source

VECTORS = (8, 4, 2)
COLUMNS = (128, 256, 512)
INNERS = (128, 256)
BASE = Widths(8, 8)
PAIRS = tuple(Widths(*pair) for pair in SPMM_PAIRS if pair != (8, 8))
FLOAT_PAIRS = (("float16", "float16"), ("e4m3", "e4m3"), ("e4m3", "float16"))
SAMPLED = (BASE, *(Widths(*pair) for pair in SDDMM_PAIRS if pair != (8, 8)))
SUBSET = "magnitude_pruning"  # the method whose first matrices get all pairs and other libraries' products
FIGURES = 256  # N of Figure 14, K of Figure 15
BLOCKED_ELL = {"Blocked-ELL int8 8": blocked_ell, "Blocked-ELL fp16 8": blocked_ell_half}
BREAK_EVEN = ((512, 512, 512), (2048, 512, 512), (1024, 1024, 512), (2048, 2048, 512), (4096, 4096, 512),
              (4096, 4096, 4096))  # fmt: skip
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
SKEWED = (Shape(2048, 2048, 256, 0.9), Shape(4096, 4096, 512, 0.9), Shape(4096, 4096, 4096, 0.9),
          Shape(14336, 4096, 512, 0.9))  # fmt: skip


def skewed(shape: Shape) -> mc.Pattern:
    """As many vectors as the uniform pattern has, the longest vector row five times the shortest."""
    return mc.random_pattern(shape.m, shape.k, shape.sparsity, 8, "skewed", seed=shape.m + shape.k)


def like(pattern: mc.Pattern) -> mc.Pattern:
    """A uniform pattern of the same shape and as many vectors."""
    places = max(pattern.vector_rows * pattern.shape[1], 1)
    return mc.random_pattern(*pattern.shape, 1 - pattern.vectors / places, pattern.vector_length, seed=1)


@cache
def swept(m: int, k: int, vector_length: int, sparsity: float) -> mc.Pattern:
    """A uniform pattern on the GPU; a sparser one is part of a denser one."""
    rows = m // vector_length
    order = torch.rand(rows * k, device="cuda", generator=torch.Generator("cuda").manual_seed(m + k)).argsort()
    mask = torch.zeros(rows * k, dtype=torch.bool, device="cuda")
    mask[order[: round((1 - sparsity) * rows * k)]] = True
    return mc.Pattern.from_vector_mask(mask.view(rows, k), m, vector_length)


def all_configs(
    patterns: dict[Matrix, mc.Pattern], first: list[Matrix], tops: list[Matrix], pairs: tuple[Widths, ...] | None
) -> Iterator[Source]:
    """Every kernel that the run will use."""
    yield from gemm_configs()
    for matrix, pattern in patterns.items():
        for v in VECTORS:
            there = of_length(pattern, v)
            yield from (chosen(there, n, widths) for widths in pairs or (BASE,) for n in COLUMNS)
            on_gpu, sampled = there.to("cuda"), sampled_pairs(pairs, matrix in tops, v)
            yield from (chosen_sddmm(on_gpu, widths, inner) for widths in sampled for inner in INNERS)
    for matrix in first:
        yield chosen(like(of_length(patterns[matrix], 8)), COLUMNS[-1], BASE)
    for matrix in tops:
        given = of_length(patterns[matrix], 8)
        yield from (chosen(given, COLUMNS[-1], widths) for widths in PAIRS)
        yield from (chosen_for(given, COLUMNS[1], FLOATS[a], FLOATS[b]) for a, b in FLOAT_PAIRS)
    for sizes in BREAK_EVEN:
        for v in VECTORS:
            yield from (chosen(swept(*sizes[:2], v, sparsity), sizes[2], BASE) for sparsity in SPARSITIES)
    for shape in SKEWED:
        yield from (chosen(pattern, shape.n, BASE) for pattern in (uniform(shape, 8), skewed(shape)))


def spmm_rows(
    pattern: mc.Pattern, columns: tuple[int, ...], widths: Widths, dense: DenseTimes
) -> Iterator[dict[str, Any]]:
    """Rows of one matrix with every number of ``columns``; L8-R8 times the dense products that are missing."""
    m, k = pattern.shape
    for product in spmm_products(pattern, columns, widths):
        n = product.rhs.shape[-1]
        try:
            times = timed({"ours": checked_spmm(product)})["ours"]
            row = spmm_row(product, times, dense.of((m, k, n), product))
        except Exception as error:  # a failure of ours is a result too
            row = {"v": pattern.vector_length, "n": n, "failure": one_line(error)}
        yield {"pair": str(widths), **row}


def sampled_pairs(pairs: tuple[Widths, ...] | None, is_top: bool, v: int) -> tuple[Widths, ...]:
    """Pairs of SDDMM: those of ``pairs`` that it has, else L8-R8, with the others for a top matrix at V = 8."""
    if pairs is None:
        return SAMPLED if is_top and v == VECTORS[0] else (BASE,)
    return tuple(widths for widths in SAMPLED if widths in pairs)


def run_matrix(pattern: mc.Pattern, dense: DenseTimes, pairs: tuple[Widths, ...] | None, is_top: bool) -> Record:
    """Both products of one file's pattern."""
    found: Record = {"spmm": [], "sddmm": []}
    for v in VECTORS:
        there = of_length(pattern, v)
        for widths in pairs or (BASE,):
            found["spmm"] += spmm_rows(there, COLUMNS, widths, dense)
        on_gpu = there.to("cuda")
        for inner in INNERS:
            found["sddmm"] += run_sddmm(on_gpu, inner, sampled_pairs(pairs, is_top, v), dense)
    return found


def run_pairs(pattern: mc.Pattern, dense: DenseTimes) -> list[dict[str, Any]]:
    """The other pairs of widths, V = 8, against the dense products of L8-R8."""
    return [row for widths in PAIRS for row in spmm_rows(of_length(pattern, 8), COLUMNS[-1:], widths, dense)]


def run_others(pattern: mc.Pattern, n: int) -> list[dict[str, Any]]:
    """Products of floats at V = 8: ours, dense, and other libraries' of the same elements as CSR or blocks as dense."""
    product = make_product(of_length(pattern, 8), n, BASE)
    makers: dict[str, Callable[[], Baseline]] = {
        **{f"magicube {a} x {b}": partial(own_floats, product, a, b) for a, b in FLOAT_PAIRS},
        "dense fp16": partial(dense_half, product, torch.float16),
        "CSR fp16": partial(csr_half, product),
        "BSR fp16 16": partial(torch_bsr, product, 16),
        "BSR fp16 32": partial(torch_bsr, product, 32),
    }
    return other_rows(makers, n)


def other_rows(makers: dict[str, Callable[[], Baseline]], n: int) -> list[dict[str, Any]]:
    """A row of each baseline, or why there is none."""
    baselines, failures, errors = prepare(makers)
    rows: list[dict[str, Any]] = []
    for name, times in timed(calls_of(baselines), rounds=5).items():
        rows.append({"name": name, "n": n, "error": rounded(errors[name]), **times.row()})
    return rows + [{"name": name, "n": n, "failure": text} for name, text in failures.items()]


def compare_patterns(name: str, n: int, one: mc.Pattern, uniform_one: mc.Pattern) -> dict[str, Any]:
    """Times of two patterns of as many vectors; ``ratio``: of ``one`` to the uniform one."""
    row: dict[str, Any] = {"name": name, "n": n, "vectors": [one.vectors, uniform_one.vectors]}
    try:
        calls = {
            label: checked_spmm(make_product(pattern, n, BASE))
            for label, pattern in (("given", one), ("uniform", uniform_one))
        }
        times = replays(calls, rounds=11)
    except Exception as error:  # a failure of ours is a result too
        return row | {"failure": one_line(error)}
    given, even = times["given"].median, times["uniform"].median
    return row | {"us": rounded(given), "uniform_us": rounded(even), "ratio": rounded(given / even)}


def run_break_even(sizes: tuple[int, int, int], v: int, dense: DenseTimes) -> dict[str, Any]:
    """Ours against dense at every sparsity, uniform patterns, and the break-even sparsity."""
    points = []
    for sparsity in SPARSITIES:
        (row,) = spmm_rows(swept(*sizes[:2], v, sparsity), sizes[2:], BASE, dense)
        point: dict[str, Any] = {"sparsity": sparsity}
        point |= {key: row[key] for key in ("us", "kernel", "failure") if key in row}
        ratios: dict[str, float] = {key: row[key] for key in (f"times {name}" for name in DENSE) if key in row}
        points.append(point | ratios | ({"times the best": min(ratios.values())} if ratios else {}))
    return {
        "shape": list(sizes),
        "v": v,
        "break_even": {what: meeting(points, f"times {what}") for what in (*DENSE, "the best")},
        "points": points,
    }


def meeting(points: list[dict[str, Any]], key: str) -> float | str | None:
    """The sparsity from which on ours is the faster one, between the measured ones on a line through the ratios.

    "always" and "never" where all of the measured ones say so, None where nothing was measured.
    """
    known = [(point["sparsity"], point[key]) for point in points if key in point]
    slower = [i for i, (_, ratio) in enumerate(known) if ratio < 1]
    if not known:
        return None
    if not slower:
        return "always"
    if slower[-1] == len(known) - 1:
        return "never"
    (below, low), (above, high) = known[slower[-1]], known[slower[-1] + 1]
    return rounded(below + (above - below) * (1 - low) / (high - low))


def measure(
    matrix: Matrix,
    pattern: mc.Pattern,
    groups: tuple[list[Matrix], list[Matrix]],
    dense: DenseTimes,
    pairs: tuple[Widths, ...] | None,
) -> Record:
    """All measurements of a matrix; ``groups``: the first matrices of their groups, and those that get more of them."""
    first, tops = groups
    seen = len(dense.rows)
    found = {"matrices": [facts(matrix, pattern)]} | run_matrix(pattern, dense, pairs, matrix in tops)
    if matrix in first:
        given = of_length(pattern, 8)
        found["skew"] = [compare_patterns(matrix.name, COLUMNS[-1], given, like(given))]
    if matrix in tops:
        found["spmm"] += run_pairs(pattern, dense) if pairs is None else []
        found["others"] = run_others(pattern, COLUMNS[1])
    torch.cuda.empty_cache()
    return found | {"dense": list(dense.rows.values())[seen:]}


def measure_figures(matrix: Matrix, pattern: mc.Pattern, dense: DenseTimes) -> Record:
    """What Figures 14 and 15 show of a matrix."""
    seen, there = len(dense.rows), of_length(pattern, 8)
    found: Record = {"matrices": [facts(matrix, pattern)]}
    found["spmm"] = [row for pair in (BASE, *PAIRS) for row in spmm_rows(there, (FIGURES,), pair, dense)]
    found["sddmm"] = list(run_sddmm(there.to("cuda"), FIGURES, SAMPLED, dense))
    product = make_product(there, FIGURES, BASE)
    found["others"] = other_rows({name: partial(make, product, 8) for name, make in BLOCKED_ELL.items()}, FIGURES)
    torch.cuda.empty_cache()
    return found | {"dense": list(dense.rows.values())[seen:]}


def figure_configs(patterns: dict[Matrix, mc.Pattern]) -> Iterator[Source]:
    """Every kernel of :func:`measure_figures`."""
    yield from gemm_configs()
    for pattern in patterns.values():
        there = of_length(pattern, 8)
        yield from (chosen(there, FIGURES, pair) for pair in (BASE, *PAIRS))
        yield from (chosen_sddmm(there.to("cuda"), pair, FIGURES) for pair in SAMPLED)


def run_gpu(matrices: list[Matrix], args: Namespace, start: float) -> None:
    """Measure, each matrix once; the second matrices of the groups come last."""
    named = pairs_of(args.pairs)
    pairs = None if named is None else tuple(Widths(*pair) for pair in named)
    dense = DenseTimes()
    out, end = args.out or results_file("dlmc_figures" if args.figures else "dlmc"), start + args.seconds
    results: dict[str, Any] = {
        "machine": gpu_machine(),
        "setting": {"out": "float16", "pattern": "a row of the file is a vector row", "seed": 0,
                    "check": "every product of ours equal in every element, others by the error that is given",
                    "us": "median over 7 rounds of the mean launch in a CUDA graph of about 100 us",
                    "behind_us": "likewise, with an elementwise kernel after each launch, whose time is taken off"},
        "compile_failures": [],
        "matrices": [], "spmm": [], "sddmm": [], "others": [], "skew": [], "break_even": [], "dense": [],
    }  # fmt: skip
    head = {key: results["machine"].get(key) for key in ("commit", "torch", "gpu")}
    journal = Journal(out, head | {"pairs": args.pairs, "figures": args.figures}, args.fresh)
    for record in journal.records.values():
        dense.rows |= {tuple(row["shape"]): row for row in record.get("dense", [])}
    patterns = {matrix: mc.read_smtx(matrix.path) for matrix in matrices if matrix.name not in journal.records}
    first = list({(m.model, m.method, m.target): m for m in reversed(matrices)}.values())
    tops = [matrix for matrix in first if matrix.method == SUBSET]
    print(f"{len(patterns)} of {len(matrices)} matrices read, {time.perf_counter() - start:.1f} s", flush=True)
    left = [matrix for matrix in first if matrix in patterns], [matrix for matrix in tops if matrix in patterns]
    configs = figure_configs(patterns) if args.figures else all_configs(patterns, *left, pairs)
    results["compile_failures"] = sorted(set(compile_ahead(configs).values()))
    if not args.figures:
        made = [(f"5:1, {x}", x.n, skewed(x), uniform(x, 8)) for x in SKEWED]
        journal("skew", lambda: {"skew": [compare_patterns(*each) for each in made]})
        journal("break_even", lambda: break_even_record(dense))
    for count, (matrix, pattern) in enumerate(patterns.items()):
        if time.perf_counter() > end:
            print(f"no time for {len(patterns) - count} matrices: run the same command again")
            break
        whole = partial(measure, matrix, pattern, (first, tops), dense, pairs)
        journal(matrix.name, partial(measure_figures, matrix, pattern, dense) if args.figures else whole)
        print(f"  {matrix.name}, {end - time.perf_counter():.0f} s left", flush=True)
    journal.add_to(results)
    save(results, out)


def break_even_record(dense: DenseTimes) -> Record:
    """Every shape of :data:`BREAK_EVEN` at every length of vectors."""
    rows = [run_break_even(sizes, v, dense) for sizes in BREAK_EVEN for v in VECTORS]
    return {"break_even": rows, "dense": list(dense.rows.values())}


def main() -> None:
    args = gpu_arguments(
        __doc__,
        "",
        device={"choices": ("cuda", "cpu"), "default": "cuda"},
        per_group={"type": int, "default": 2, "help": "matrices of each model, method and sparsity"},
        matrices={"type": int, "help": "no more matrices than this, to see that it runs"},
        seconds={"type": float, "default": 150.0, "help": "no matrix is begun after this time"},
        pairs={"help": "pairs of widths for every matrix: 'all', or some as L8-R8,L16-R4"},
        figures={"action": "store_true", "help": "on a GPU: Figures 14 and 15, all pairs and baselines"},
        fresh={"action": "store_true", "help": "measure finished matrices again"},
        list={"type": Path, "help": "a file that names the matrices, one a line"},
        folder={"type": Path, "help": "the folder of the matrices"},
        mkl={"type": Path, "help": "on a CPU: libmkl_rt of the wheel mkl"},
    )
    start = time.perf_counter()
    matrices = listed(args.list, args.folder) if args.list else sample(args.per_group, root=args.folder)
    run = cpu_dlmc.run_cpu if args.device == "cpu" else run_gpu
    run(matrices[: args.matrices], args, start)
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
