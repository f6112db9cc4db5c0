"""Catalog of the shipped kernels, for warm-up and tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product

from cute_kernels.dtypes import SDDMM_PAIRS, SPMM_PAIRS, Integer
from cute_kernels.jit.warmup import Source
from cute_kernels.machine import MMA_COLUMNS, Machine, Problem, ProblemTypes
from cute_kernels.sddmm.heuristics import SddmmKernel, choose_sddmm
from cute_kernels.spmm.heuristics import SpmmKernel, choose_spmm


def default_configs(
    all: bool = False, arch: str = "sm_90a", outs: tuple[str, ...] = ("float16", "int32")
) -> Iterator[SpmmKernel | SddmmKernel]:
    """Yield the SpMM and SDDMM kernels that :func:`magicube_cutlass.spmm` and ``sddmm`` use.

    Parameters
    ----------
    all : bool, default False
        Every vector length, signedness and output dtype. Default: V = 8, signed, and `outs`.
    arch : str, default "sm_90a"
        Target architecture.
    outs : tuple of str, default ("float16", "int32")
        Output dtypes.

    Yields
    ------
    SpmmKernel or SddmmKernel

    Examples
    --------
    >>> next(default_configs()).name
    'spmm_gather-s8_m16n8k32-v8-s16xs16-float16-b64s2w8r8'
    """
    machine = Machine(arch, 132)
    lengths = (1, 2, 4, 8, 16, 32) if all else (8,)
    outs = ("float16", "int32", "bfloat16", "float32", "int64") if all else outs
    signs = tuple(product((True, False), repeat=2)) if all else ((True, True),)
    for v, out, (lhs_signed, rhs_signed) in product(lengths, outs, signs):
        for a, b in SPMM_PAIRS if v >= MMA_COLUMNS else ():  # shorter vectors are merged to 8 rows
            for rows in (32, 512):
                kind = ProblemTypes(v, Integer(a, lhs_signed), Integer(b, rhs_signed), out)
                yield choose_spmm(kind, machine, Problem(rows, 4096, 410 * rows, 512, 512))
        for x, y in SDDMM_PAIRS:
            for rows in (0, 512):
                kind, vectors = ProblemTypes(v, Integer(x, lhs_signed), Integer(y, rhs_signed), out), 410 * rows
                yield choose_sddmm(kind, machine, stride=32, inner=256, vector_rows=rows, vectors=vectors, columns=4096)


def warm_configs(all: bool, arch: str) -> Iterator[Source]:
    """Return every config that ``magicube warmup`` compiles.

    Parameters
    ----------
    all : bool
        As for :func:`default_configs`.
    arch : str
        Target architecture.
    """
    from cute_kernels.attention import fused as attention
    from cute_kernels.attention import quantize_qkv as attention_operands
    from cute_kernels.attention import sparse_softmax as softmax
    from cute_kernels.convert import dense_to_sparse as compress
    from cute_kernels.convert import digits, quantize, quantize_transposed, transpose
    from cute_kernels.estimate import config as probes
    from cute_kernels.estimate import look, remainder_probes, statistics, verdict
    from cute_kernels.layout import column_order as ordering

    others = (quantize, quantize_transposed, transpose, compress, ordering, softmax)
    sums = (probes, remainder_probes, statistics, look)
    by_arch = (each.default_configs(arch) for each in (attention, attention_operands, digits))
    verdicts = [verdict.VerdictConfig()]
    outs = ("float32", "float16", "int32")  # float32 is the output of scaled operands, if none is named
    return chain(default_configs(all, arch, outs), *by_arch, *(each.default_configs() for each in (*others, *sums)), verdicts)


def named_configs() -> dict[str, SpmmKernel | SddmmKernel]:
    """Return the configs of :func:`default_configs` by name."""
    return {config.name: config for config in default_configs()}
