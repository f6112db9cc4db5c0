"""What each idea of the SpMM kernels is worth, by switching it off: variants of one config on the same operands.

Writes ``benchmarks/results/ablation_h200.json``, or the file that the GPU's name gives.  Times are microseconds a
launch.  The pruned matrix is read from the folder ``MAGICUBE_DATA`` (or ``../shared/data``), which holds
``dlmc/matrices/<FILE>``; without it only the random matrix is measured.

``--sparsities`` measures Figures 11 to 13 of Li, Osawa, Hoefler, SC'22, instead, at each of them, and writes
``ablation_figures_<GPU>.json``; ``--matrices`` names files with ``{}`` for the sparsity, by default the printed one of
256 x 2304.  That has not run on a GPU.
Run: ``PYTHONPATH=. python benchmarks/ablation.py [--sparsities 0.5,0.7,0.8,0.9,0.95,0.98] [--matrices NAME ...]
[--out FILE]``; ``benchmarks/plots/gpu_plots.py`` draws the result of the run without ``--sparsities``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness.gpu_data import (
    OUT_NAME,
    Product,
    Shape,
    Widths,
    chosen,
    compile_ahead,
    make_product,
    uniform,
)
from harness.gpu_results import gpu_arguments, write_results
from harness.machine import gpu_machine
from harness.paper_studies import LENGTHS, figures, operands
from harness.studies import Sampled, Study, Variant, changed, print_study, run_study

import magicube_cutlass as mc
from cute_kernels.atoms import default_atom
from cute_kernels.dtypes import Integer
from cute_kernels.machine import ProblemTypes
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import SpmmKernel
from cute_kernels.spmm.panel import PanelConfig
from magicube_cutlass.dispatch.machine import get_machine

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = Path(__file__).resolve().parents[1]
NAME = "rn50/magnitude_pruning/{}/bottleneck_2_block_group3_1_1.smtx"
FILE = NAME.format("0.9")
N = 512
UNIFORM = Shape(4096, 4096, N, 0.9)
EIGHT = Widths(8, 8)


def gather_of(pattern: mc.Pattern, widths: Widths) -> GatherConfig:
    """The gather kernel: the chosen config where that is one, else its defaults."""
    config = chosen(pattern, N, widths)
    if isinstance(config, GatherConfig):
        return config
    atom = default_atom(
        ProblemTypes(
            pattern.vector_length, Integer(widths.left, widths.left_signed), Integer(widths.right, True), OUT_NAME
        ),
        get_machine(torch.cuda.current_device()).arch,
    )
    left, right = Integer(widths.left, widths.left_signed), Integer(widths.right, True)
    return GatherConfig(atom, pattern.vector_length, left, right, OUT_NAME, tile_n_bytes=64)


def panel_of(pattern: mc.Pattern, widths: Widths) -> PanelConfig:
    """The panel kernel: the chosen config where that is one, else its defaults."""
    config = chosen(pattern, N, widths)
    return config if isinstance(config, PanelConfig) else PanelConfig(*_kind(gather_of(pattern, widths)))


def _kind(config: SpmmKernel) -> tuple[Any, ...]:
    return config.atom, config.vector_length, config.a, config.b, config.out


def panel_studies(workload: str, pattern: mc.Pattern) -> Iterator[Study]:
    """Switches of the panel kernel, L8-R8."""
    base, key = panel_of(pattern, EIGHT), f"{EIGHT}"
    yield Study(
        "conflict-free access",
        "columns in the order that spares bank conflicts; swizzled rows",
        workload,
        (
            changed("bank order", base, key, ordered=True),
            changed("no bank order", base, key, ordered=False),
            changed("no swizzle", base, key, swizzle=False),
            changed("neither", base, key, swizzle=False, ordered=False),
        ),
    )
    yield Study(
        "prefetch, panel",
        "tiles of B in flight",
        workload,
        (
            Variant(f"chosen: {base.stages} x {base.tile} rows", base, key),
            *(
                changed(
                    f"{stages} x {tile} rows, window {window}",
                    base,
                    key,
                    tile_n_bytes=128,
                    stages=stages,
                    tile=tile,
                    tile_window=window,
                )
                for stages, tile, window in (
                    (1, 256, 1),  # no prefetch
                    (3, 512, 2),
                    (3, 256, 2),
                    (4, 256, 3),
                    (5, 256, 3),
                    (6, 256, 3),
                    (6, 256, 4),
                    (12, 128, 6),
                )
            ),
        ),
    )
    yield Study(
        "rows a warp, panel",
        "vector rows whose sums one warp keeps, and warps a block",
        workload,
        (
            Variant(f"chosen: {base.rows_per_warp} rows, {base.warps} warps", base, key),
            *(
                changed(f"{rows} rows, {warps} warps", base, key, rows_per_warp=rows, warps=warps)
                for rows, warps in ((1, 15), (2, 15), (1, 11), (2, 11), (2, 8), (1, 7), (2, 7), (4, 7))
            ),
        ),
    )


def gather_studies(workload: str, pattern: mc.Pattern) -> Iterator[Study]:
    """Switches of the gather kernel, L8-R8."""
    base, key = gather_of(pattern, EIGHT), f"{EIGHT}"
    yield Study(
        "prefetch, gather",
        "groups of gathered rows in flight",
        workload,
        tuple(changed(f"{stages} stages", base, key, stages=stages) for stages in (2, 3, 4, 6, 8)),
    )
    yield Study(
        "warps a row, gather",
        "warps that share one vector row",
        workload,
        (
            Variant(f"chosen: {base.split_k_warps} of {base.warps}", base, key),
            *(
                changed(f"{share} of {warps}", base, key, split_k_warps=share, warps=warps)
                for share, warps in ((1, 4), (2, 4), (4, 4), (1, 8), (8, 8))
            ),
        ),
    )
    yield Study(
        "strip, gather",
        "bytes of a gathered row",
        workload,
        tuple(changed(f"{size} bytes", base, key, tile_n_bytes=size) for size in (64, 128)),
    )


def width_studies(workload: str, pattern: mc.Pattern) -> Iterator[Study]:
    """4-bit operands: the same integers packed or as bytes, at the config that is chosen for each."""
    four, mixed = Widths(4, 4), Widths(8, 4)
    native = replace(chosen(pattern, N, four), atom="s4_m16n8k64")
    yield Study(
        "4-bit operands",
        "the same 4-bit integers stored packed and unpacked in registers, or stored as bytes",
        workload,
        (
            Variant("bytes (L8-R8)", chosen(pattern, N, EIGHT), "4-bit integers in L8-R8"),
            Variant("B packed (L8-R4)", chosen(pattern, N, mixed), "4-bit integers in L8-R4"),
            Variant("both packed (L4-R4)", chosen(pattern, N, four), "L4-R4"),
            Variant("both packed, 4-bit mma", native, "L4-R4"),
        ),
    )


def stack_studies(workload: str, patterns: dict[int, mc.Pattern]) -> Iterator[Study]:
    """Two digits of a short vector in one instruction or in one each, and neighbouring vector rows merged."""
    for widths in (Widths(16, 8, left_signed=False), Widths(12, 4)):
        for length in (4, 2):
            base = chosen(patterns[length], N, widths, length)
            key = f"{widths} V={length}"
            yield Study(
                f"digit stacking, {key}",
                "two digits of a vector in one instruction or in one each, or vector rows merged to 8 rows",
                workload,
                (
                    Variant("merged", chosen(patterns[length], N, widths), key),
                    changed("stacked", base, key, fuse_digits=True),
                    changed("apart", base, key, fuse_digits=False),
                ),
            )


def products_of(patterns: dict[int, mc.Pattern]) -> dict[str, Product]:
    """The operands that the studies name."""
    eight = patterns[8]
    found = {
        f"{EIGHT}": make_product(eight, N, EIGHT),
        "4-bit integers in L8-R8": make_product(eight, N, EIGHT, ints=(4, 4)),
        "4-bit integers in L8-R4": make_product(eight, N, Widths(8, 4), ints=(4, 4)),
        "L4-R4": make_product(eight, N, Widths(4, 4)),
    }
    for widths in (Widths(16, 8, left_signed=False), Widths(12, 4)):
        for length in (4, 2):
            found[f"{widths} V={length}"] = make_product(patterns[length], N, widths)
    return found


def data_file(name: str = FILE) -> Path | None:
    """A pruned matrix, gzipped or not, or None."""
    for root in (os.environ.get("MAGICUBE_DATA"), ROOT.parent / "shared" / "data"):
        for ending in ("", ".gz"):
            if root and (path := Path(root) / "dlmc" / "matrices" / (name + ending)).is_file():
                return path
    return None


def first_rows(pattern: mc.Pattern, rows: int) -> mc.Pattern:
    """The first ``rows`` vector rows."""
    offsets = pattern.row_offsets[: rows + 1]
    shape = (rows * pattern.vector_length, pattern.shape[1])
    return mc.Pattern(shape, pattern.vector_length, offsets, pattern.col_indices[: int(offsets[-1])])


def workloads() -> dict[str, dict[int, mc.Pattern]]:
    """Patterns by vector length; a row of the pruned matrix is a vector row."""
    found = {f"uniform {UNIFORM}": {length: uniform(UNIFORM, length) for length in (8, 4, 2)}}
    if (path := data_file()) is None:
        print(f"no {FILE} in the folder MAGICUBE_DATA: get it from the Deep Learning Matrix Collection")
        return found
    from magicube_cutlass.formats.smtx import read_smtx

    whole = {length: read_smtx(path, vector_length=length) for length in (8, 4, 2)}
    k, rows = whole[8].shape[1], whole[8].vector_rows
    few = {length: first_rows(pattern, 256 // length) for length, pattern in whole.items()}
    return {f"pruned ResNet-50, M=256, K={k}, N={N}": few,
            f"pruned ResNet-50, {rows} vector rows, K={k}, N={N}": whole, **found}  # fmt: skip


def studies(workload: str, patterns: dict[int, mc.Pattern]) -> list[Study]:
    """All studies of a workload; the panel kernel needs vector rows enough to fill a block."""
    found = [*gather_studies(workload, patterns[8])]
    if patterns[8].vector_rows >= 64:
        found += panel_studies(workload, patterns[8])
    return [*found, *width_studies(workload, patterns[8]), *stack_studies(workload, patterns)]


def figure_workloads(names: list[str], sparsities: str) -> dict[str, dict[int, mc.Pattern]]:
    """Patterns by vector length of each of the matrices ``names`` at each of the sparsities."""
    found = {}
    for name in (name.format(sparsity) for name in names for sparsity in sparsities.split(",")):
        if (path := data_file(name)) is None:
            raise SystemExit(f"no {name} in the folder MAGICUBE_DATA: see benchmarks/dlmc.py")
        found[name.removesuffix(".smtx")] = {length: mc.read_smtx(path, vector_length=length) for length in LENGTHS}
    return found


def main() -> None:
    args = gpu_arguments(
        __doc__,
        "",
        sparsities={"help": "measure Figures 11 to 13 at these, as 0.5,0.7"},
        matrices={"nargs": "+", "default": [NAME], "help": "of the figures, {} for the sparsity"},
    )
    start = time.perf_counter()
    if args.sparsities:
        arch = get_machine(torch.cuda.current_device()).arch
        found = figure_workloads(args.matrices, args.sparsities)
        todo = {
            name: (patterns, figures(name, patterns, arch, lambda pattern, widths: chosen(pattern, N, widths)))
            for name, patterns in found.items()
        }
    else:
        todo = {name: (patterns, studies(name, patterns)) for name, patterns in workloads().items()}
    configs = [v.config for _, compared in todo.values() for study in compared for v in study.variants if v.config]
    failed = compile_ahead(configs)
    results: dict[str, Any] = {
        "machine": gpu_machine(),
        "setting": {"out": OUT_NAME, "data": args.matrices if args.sparsities else FILE},
        "studies": [],
    }
    for name, (patterns, compared) in todo.items():
        print(f"\n{name}")
        products: Mapping[str, Product | Sampled] = operands(patterns, N) if args.sparsities else products_of(patterns)
        for study in compared:
            results["studies"].append(run_study(study, products, failed))
            print_study(results["studies"][-1])
        del products
        torch.cuda.empty_cache()
    write_results(results, args.out, "ablation_figures" if args.sparsities else "ablation", start)


if __name__ == "__main__":
    main()
