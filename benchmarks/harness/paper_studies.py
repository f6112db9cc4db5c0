"""Figures 11 to 13 of Li, Osawa, Hoefler, SC'22 (section V-A), as studies of one pruned matrix.

Figure 11 adds the ideas of SpMM one after the other on the gather kernel, whose structure is the printed one; Figure 12
is SpMM in every pair of widths with the kernels that are chosen; Figure 13 is SDDMM with and without prefetch.  Without
prefetch a warp has one stage.  No GPU has run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import magicube_cutlass as mc
from cute_kernels.atoms import default_atom
from cute_kernels.dtypes import SDDMM_PAIRS, SPMM_PAIRS, Integer
from cute_kernels.machine import ProblemTypes
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import SpmmKernel
from harness.gpu_data import OUT_NAME, Product, Widths, make_product
from harness.studies import Sampled, Study, Variant

LENGTHS = (8, 4, 2)
INNER = 256  # K of SDDMM
FIGURE_11 = (Widths(8, 8), Widths(8, 4), Widths(4, 4))
PAIRS = tuple(Widths(*pair) for pair in SPMM_PAIRS)
SAMPLED = tuple(Widths(*pair) for pair in SDDMM_PAIRS)


def _operands(length: int, widths: Widths, arch: str) -> tuple[str, int, Integer, Integer, str]:
    """What a config begins with."""
    types = ProblemTypes(length, Integer(widths.left, True), Integer(widths.right, True), OUT_NAME)
    return default_atom(types, arch), length, Integer(widths.left, True), Integer(widths.right, True), OUT_NAME


def figure_11(workload: str, length: int, arch: str) -> Iterator[Study]:
    """Conflict-free access, prefetch, and for 4-bit A the shuffled columns, each on top of those before."""
    for widths in FIGURE_11:
        whole, key = GatherConfig(*_operands(length, widths, arch)), f"{widths} V={length}"
        steps = [
            Variant("none", replace(whole, swizzle=False, stages=1, shuffle=widths.left > 4), key),
            Variant("conflict-free", replace(whole, stages=1, shuffle=widths.left > 4), key),
            Variant("and prefetch", replace(whole, shuffle=widths.left > 4), key),
            *([Variant("and shuffle", whole, key)] if widths.left == 4 else []),
        ]
        yield Study(f"Figure 11, {key}", "ideas of SpMM, one after the other", workload, tuple(steps))


def figure_12(workload: str, length: int, choose: Callable[[Widths], SpmmKernel]) -> Study:
    """Every pair of widths, with the kernel that ``choose`` gives."""
    variants = tuple(Variant(str(widths), choose(widths), f"{widths} V={length}") for widths in PAIRS)
    return Study(f"Figure 12, V={length}", "SpMM by widths", workload, variants)


def figure_13(workload: str, length: int, arch: str) -> Iterator[Study]:
    """SDDMM with and without prefetch, by widths."""
    for widths in SAMPLED:
        config, key = SddmmConfig(*_operands(length, widths, arch)), f"SDDMM {widths} V={length}"
        variants = Variant("no prefetch", replace(config, stages=1), key), Variant("prefetch", config, key)
        yield Study(f"Figure 13, {widths} V={length}", "SDDMM, tiles in flight", workload, variants)


def figures(
    workload: str,
    patterns: Mapping[int, mc.Pattern],
    arch: str,
    choose: Callable[[mc.Pattern, Widths], SpmmKernel],
) -> list[Study]:
    """The studies of a matrix; ``patterns`` by length of vectors."""
    found: list[Study] = []
    for length, pattern in patterns.items():
        found += figure_11(workload, length, arch)
        found.append(figure_12(workload, length, lambda widths, pattern=pattern: choose(pattern, widths)))  # type: ignore[misc]
        found += figure_13(workload, length, arch)
    return found


def operands(patterns: Mapping[int, mc.Pattern], n: int) -> dict[str, Product | Sampled]:
    """The operands that the studies name."""
    found: dict[str, Product | Sampled] = {}
    for length, pattern in patterns.items():
        found |= {f"{widths} V={length}": make_product(pattern, n, widths) for widths in PAIRS}
        found |= {f"SDDMM {widths} V={length}": Sampled(pattern, widths, INNER) for widths in SAMPLED}
    return found
