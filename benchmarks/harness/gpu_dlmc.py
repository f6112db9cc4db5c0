"""Products of the Deep Learning Matrix Collection's matrices on a GPU, with float16 output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import magicube_cutlass as mc
from harness.gpu_baselines import Baseline, dense_fp8, dense_half, dense_int8, own_dense
from harness.gpu_data import OUT, Product, Widths, check, make_product, narrowed, one_line, ran
from harness.gpu_results import rounded
from harness.gpu_sddmm import checked_sddmm, chosen_sddmm
from harness.gpu_timing import Call, GraphReplays, behind, replays

DENSE: dict[str, Callable[[Product], Baseline]] = {
    "dense fp16": partial(dense_half, dtype=torch.float16),
    "dense int8": dense_int8,
    "dense fp8": dense_fp8,
    "magicube dense int8": own_dense,
}


@dataclass(frozen=True)
class Times:
    """Launches of one call in a loop, and behind another kernel."""

    loop: GraphReplays
    behind: GraphReplays

    def row(self) -> dict[str, Any]:
        return {"us": rounded(self.loop.median), "behind_us": rounded(self.behind.median), "mode": self.loop.mode}


def timed(calls: Mapping[str, Call], rounds: int = 7) -> dict[str, Times]:
    """Time calls in turn, in a loop and behind another kernel."""
    if not calls:
        return {}
    loops, after = replays(calls, rounds=rounds), behind(calls, rounds=rounds, replay=100.0)
    return {name: Times(loops[name], after[name]) for name in calls}


def checked_spmm(product: Product) -> Call:
    """The call of ours, after checking that it gives the exact result in every element of a poisoned output."""
    out = product.poisoned()
    mc.spmm(product.lhs, product.rhs, out=out)
    check(product, out)
    return partial(mc.spmm, product.lhs, product.rhs, out=out)


def spmm_products(pattern: mc.Pattern, columns: tuple[int, ...], widths: Widths) -> Iterator[Product]:
    """Products of one random matrix with B of each number of ``columns``."""
    widest = make_product(pattern, max(columns), widths)
    yield from (narrowed(widest, n) for n in columns)


class DenseTimes:
    """Times of the dense products, each measured once for a shape; their errors and failures."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], dict[str, Any]] = {}

    def of(self, shape: tuple[int, int, int], product: Product) -> dict[str, Any]:
        """The row of a shape (M, K, N); ``product``: operands of that shape."""
        if shape not in self.rows:
            row: dict[str, Any] = {"shape": list(shape)}
            baselines: dict[str, Baseline] = {}
            for name, make in DENSE.items():
                try:
                    baselines[name] = make(product)
                    row[f"{name} error"] = rounded(baselines[name].error())
                except Exception as error:  # a baseline that cannot is a result
                    baselines.pop(name, None)
                    row[f"{name} failure"] = one_line(error)
            for name, times in timed({name: baseline.call for name, baseline in baselines.items()}).items():
                row[name], row[f"{name} behind"] = rounded(times.loop.median), rounded(times.behind.median)
            self.rows[shape] = row
        return self.rows[shape]


def sddmm_as_product(x: mc.QuantTensor, y: mc.QuantTensor, exact: torch.Tensor) -> Product:
    """X Y^T, all of it, as the product of dense operands that baselines take; ``exact``: the integers in float64."""
    assert x.scale is not None and y.scale is not None
    lhs = mc.SRBCRS.from_dense(x.ints(), vector_length=8, bits=x.bits)
    lhs.scale = x.scale
    return Product(lhs, y.mT, (exact.float() * x.scale * y.scale).to(OUT))


def spmm_row(product: Product, times: Times, dense: dict[str, Any]) -> dict[str, Any]:
    us, lhs = times.loop.median, product.lhs
    row: dict[str, Any] = {"v": lhs.vector_length, "n": product.rhs.shape[-1], "kernel": ran(lhs).split(", ")[-1],
                           "tops": rounded(product.operations / us / 1e6)}  # fmt: skip
    return row | times.row() | compared(times, dense)


def sddmm_row(pattern: mc.Pattern, inner: int, widths: Widths, times: Times, dense: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"v": pattern.vector_length, "inner": inner,
                           "tops": rounded(2 * pattern.nnz * inner / times.loop.median / 1e6),
                           "kernel": chosen_sddmm(pattern, widths, inner).name}  # fmt: skip
    return row | times.row() | compared(times, dense)


def compared(times: Times, dense: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast as the dense products ours is, in a loop and behind another kernel."""
    there = [name for name in DENSE if name in dense]
    found = {f"times {name}": rounded(dense[name] / times.loop.median) for name in there}
    return found | {f"behind: times {name}": rounded(dense[f"{name} behind"] / times.behind.median) for name in there}


def run_sddmm(
    pattern: mc.Pattern, inner: int, pairs: tuple[Widths, ...], dense: DenseTimes
) -> Iterator[dict[str, Any]]:
    """Rows of the pairs, the first of which is L8-R8; ``pattern`` on the GPU."""
    m, n = pattern.shape
    for widths in pairs:
        try:
            call, x, y, exact = checked_sddmm(widths, inner, pattern)
            if (m, inner, n) not in dense.rows:
                dense.of((m, inner, n), sddmm_as_product(x, y, exact))
            row = sddmm_row(pattern, inner, widths, timed({"ours": call})["ours"], dense.rows[m, inner, n])
        except Exception as error:  # a failure of ours is a result too
            row = {"v": pattern.vector_length, "inner": inner, "failure": one_line(error)}
        yield {"pair": str(widths), **row}
