"""Catalog of the shipped kernels, for warm-up and tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product

from cute_kernels.dtypes import SDDMM_PAIRS, SPMM_PAIRS, Integer
from cute_kernels.jit.warmup import Source
from cute_kernels.machine import MMA_COLUMNS, Machine, Problem, ProblemTypes
from cute_kernels.sddmm.heuristics import SddmmKernel, choose_sddmm
from cute_kernels.spmm.heuristics import SpmmKernel, choose_spmm

NUM_SMS = {"sm_80": 108, "sm_89": 142, "sm_90a": 132, "sm_100a": 148, "sm_120a": 170}
_WEIGHTS = (
    (256, 512), (384, 384), (512, 512), (768, 768), (1024, 1024), (2048, 2048), (4096, 4096), (1536, 384), (384, 1536),
    (3072, 768), (768, 3072), (4096, 1024), (1024, 4096), (14336, 4096), (4096, 14336),
)  # fmt: skip
_COLUMNS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def default_configs(all: bool = False, arch: str = "sm_90a") -> Iterator[SpmmKernel | SddmmKernel]:
    """Yield the SpMM and SDDMM kernels that :func:`magicube_cutlass.spmm` and ``sddmm`` use.

    Parameters
    ----------
    all : bool, default False
        Every vector length, signedness and output dtype. Default: V = 8, signed, float16 and int32.
    arch : str, default "sm_90a"
        Target architecture.

    Yields
    ------
    SpmmKernel or SddmmKernel

    Examples
    --------
    >>> next(default_configs()).name
    'spmm_gather-s8_m16n8k32-v8-s16xs16-float16-b64s4w4r4'
    """
    machine = Machine(arch, 132)
    lengths = (1, 2, 4, 8, 16, 32) if all else (8,)
    outs = ("float16", "int32", "bfloat16", "float32", "int64") if all else ("float16", "int32")
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


def weight_configs(arch: str) -> Iterator[SpmmKernel]:
    """Yield the SpMM kernels of 8-bit weights of common sizes: V = 8, density 0.05 to 0.3, float32, float16 and int32.

    Those of a layer too, which write the transpose.

    Parameters
    ----------
    arch : str
        Target architecture.
    """
    machine, signed = Machine(arch, NUM_SMS.get(arch, 132)), Integer(8, True)
    for out, (m, k), n, density in product(("float32", "float16", "int32"), _WEIGHTS, _COLUMNS, (0.05, 0.1, 0.3)):
        rows, longest = m // 8, int(1.3 * density * k) + 8
        sizes = Problem(rows, k, int(density * rows * k), longest, n)
        for transposes in (False, True) if out == "float16" else (False,):
            yield choose_spmm(ProblemTypes(8, signed, signed, out), machine, sizes, transposes=transposes)


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
    from cute_kernels.attention.blocks import tiles as attention_tiles
    from cute_kernels.attention.blocks.config import BLOCK_ARCH
    from cute_kernels.convert import dense_to_sparse as compress
    from cute_kernels.convert import digits, quantize, quantize_transposed, transpose
    from cute_kernels.double_sums import row_sums
    from cute_kernels.estimate import config as probes
    from cute_kernels.estimate import look, statistics, verdict
    from cute_kernels.layout import column_order as ordering

    others = (quantize, transpose, compress, ordering, softmax)
    sums = (probes, statistics, look, row_sums)
    by_arch = (each.default_configs(arch) for each in (attention, attention_operands, digits, quantize_transposed))
    verdicts = [verdict.VerdictConfig()]
    tiles = attention_tiles.default_configs() if arch == BLOCK_ARCH else []
    return chain(
        default_configs(all, arch),
        weight_configs(arch),
        *by_arch,
        *(each.default_configs() for each in (*others, *sums)),
        verdicts,
        tiles,
    )


def named_configs() -> dict[str, SpmmKernel | SddmmKernel]:
    """Return the configs of :func:`default_configs` by name."""
    return {config.name: config for config in default_configs()}
