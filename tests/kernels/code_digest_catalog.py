"""Catalog of kernel configs whose machine code is guarded, by keys that name the problem and no identifier.

A key survives renames of Python and C++ names. Where kernel selection makes the config, the key is the problem that
selection gets, so that a change of the selection is a change of the entry.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Protocol

from cute_kernels.attention import heuristics as attention_heuristics
from cute_kernels.attention import quantize_qkv as attention_operands
from cute_kernels.attention.blocks.config import BLOCK_ARCH, block_config
from cute_kernels.attention.blocks.tiles import TilesConfig
from cute_kernels.attention.config import GatherAttention, PanelAttention
from cute_kernels.attention.sparse_softmax import SoftmaxConfig
from cute_kernels.compensate.select import SelectConfig
from cute_kernels.compensate.split import SplitConfig
from cute_kernels.convert import quantize_transposed, transpose
from cute_kernels.convert.dense_to_sparse import CompressConfig
from cute_kernels.convert.digits import DigitsConfig, columns_config
from cute_kernels.convert.pack import PackConfig
from cute_kernels.convert.quantize import QuantizeConfig
from cute_kernels.double_sums import row_sums
from cute_kernels.estimate import statistics
from cute_kernels.estimate.config import ProbeConfig, double_configs
from cute_kernels.estimate.look import LookConfig
from cute_kernels.estimate.verdict import VerdictConfig
from cute_kernels.few_rows.decode import DecodeConfig
from cute_kernels.few_rows.encode_e4m3 import EncodeConfig, encode_config
from cute_kernels.few_rows.product import choose_few_rows
from cute_kernels.few_rows.product_int8 import choose_few_rows_int8
from cute_kernels.few_rows.widen import WidenConfig
from cute_kernels.gemm.config import select_products
from cute_kernels.gemm.cutlass import CONFIG as CUTLASS
from cute_kernels.gemm.heuristics import candidates as gemm_candidates
from cute_kernels.gemm.heuristics import choose as choose_gemm
from cute_kernels.jit.compiler import Unit
from cute_kernels.layout.column_order import ColumnOrderConfig
from cute_kernels.ranks import scaled_sums
from cute_kernels.scaled_gemm import sm100
from cute_kernels.scaled_gemm.config import OperandFormat, ScaledGemmConfig
from cute_kernels.scaled_gemm.config import choose as choose_float_gemm
from cute_kernels.scaled_gemm.cuda import choose_config
from cute_kernels.scaled_gemm.dequantize import DequantizeConfig, fold_config
from cute_kernels.scaled_gemm.small_m.config import ReorderConfig
from cute_kernels.scaled_gemm.tcgen05 import MMA_KINDS
from tests.kernels.code_digest_sparse import sddmm_entries, spmm_entries

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from harness.tma_box_probe import BoxProbeConfig

ARCHES = ("sm_80", "sm_90a", "sm_100a")
_TMA_ARCHES = ("sm_90a", "sm_100a")


class Config(Protocol):
    """The part of a kernel config that an entry needs."""

    @property
    def threads(self) -> int:
        """Threads of a CTA."""

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""

    def translation_unit(self, arch: str) -> Unit:
        """The translation unit for `arch`."""


Entry = tuple[str, Config]


def catalog(arch: str) -> dict[str, Config]:
    """Return every guarded config of `arch` by its key.

    Raises
    ------
    ValueError
        If two entries have one key.
    """
    found: dict[str, Config] = {}
    families = (
        spmm_entries, sddmm_entries, _gemm, _gemm_floats, _gemm_floats_helpers, _few_rows, _compensate, _digits, _quantize, _sparse_helpers,
        _softmax, _statistics, _probes, _look, _attention, _attention_operands,
    )  # fmt: skip
    for key, config in chain.from_iterable(family(arch) for family in families):
        if key in found:
            raise ValueError(f"key must be unique, got {key!r} twice")
        found[key] = config
    return found


def _gemm(arch: str) -> Iterator[Entry]:
    """Dense integer GEMM: tiles, digit products, outputs and sources of C."""
    for planes_a, planes_b, terms, m, out, source in (
        (1, 1, None, 8192, "int32", "none"),
        (1, 1, None, 512, "float16", "float16"),
        (1, 1, None, 64, "float32", "float32"),
        (1, 1, None, 4096, "int64", "int64"),
        (2, 1, None, 2048, "bfloat16", "none"),
        (2, 2, 3, 4096, "float32", "none"),
        (2, 2, 4, 2048, "float32", "float32"),
        (3, 3, None, 4096, "float32", "none"),
        (3, 3, None, 64, "float32", "none"),
    ):
        terms_of = select_products(planes_a, planes_b, terms)
        config = choose_gemm(m, 4096, 4096, terms_of, arch, out=out, source=source)
        key = f"gemm/planes={planes_a}x{planes_b} terms={terms or 'all'} m={m} out={out} c={source}"
        yield key, config.side_by_side
        if m == 512 or terms == 3:
            yield f"{key} pairs", config
    for activation, m, out in ((None, 4096, "int8"), ("gelu", 4096, "int8"), ("silu", 512, "bfloat16")):
        config = replace(choose_gemm(m, 1536, 384, select_products(1, 1, None), arch, out=out), activation=activation)
        yield f"gemm/m={m} out={out} activation={activation or 'none'}", config.side_by_side
    yield "gemm/transposed plane", PackConfig("pack_transposed")
    yield "gemm/strided plane", PackConfig("pack_strided")
    yield "gemm/CUTLASS", CUTLASS
    if arch == "sm_90a":
        config = choose_gemm(1024, 3072, 576, select_products(1, 1, None), arch, out="bfloat16", glu=True)
        yield "gemm/m=1024 out=bfloat16 glu", replace(config.side_by_side, activation="silu")
        for planes in (1, 2):
            portable = gemm_candidates(select_products(planes, planes, None), "sm_80")[0]
            yield f"gemm/planes={planes}x{planes} warps", replace(portable, out="float16")
        for planes, m in ((1, 4096), (2, 4096), (2, 64), (3, 4096)):
            config = choose_gemm(m, 4096, 4096, select_products(planes, planes, None), arch, out="float32")
            yield f"gated gemm/planes={planes}x{planes} m={m}", replace(config.side_by_side, gated=True)


_KINDS = {
    "e4m3": OperandFormat("e4m3"),
    "e5m2": OperandFormat("e5m2"),
    "e3m2": OperandFormat("e3m2"),
    "e2m3": OperandFormat("e2m3"),
    "e2m1": OperandFormat("e2m1"),
    "bf16": OperandFormat("bfloat16"),
    "mxe4m3": OperandFormat("e4m3", 32, "ue8m0"),
    "mxe2m1": OperandFormat("e2m1", 32, "ue8m0"),
    "nvfp4": OperandFormat("e2m1", 16, "e4m3"),
    "tiled e4m3": OperandFormat("e4m3", tiles=True),
    "tiled e2m1": OperandFormat("e2m1", tiles=True),
    "e4m3 rows of 128": OperandFormat("e4m3", 128, "float32"),
}


def _gemm_floats(arch: str) -> Iterator[Entry]:
    """Dense float GEMM: formats, block scales, tile scales, small M."""
    for a, b, m, out, source, fast in (
        ("e4m3", "e4m3", 4096, "float16", "none", False),
        ("e4m3", "e5m2", 256, "float32", "float32", False),
        ("e5m2", "e2m1", 512, "float16", "none", False),
        ("e3m2", "e2m3", 256, "float16", "none", False),
        ("mxe4m3", "mxe4m3", 128, "bfloat16", "none", False),
        ("mxe4m3", "nvfp4", 128, "float16", "none", False),
        *(("nvfp4", "nvfp4", m, "bfloat16", "none", False) for m in (8192, 8)),
        ("tiled e4m3", "tiled e4m3", 4096, "bfloat16", "none", False),
        ("tiled e4m3", "tiled e2m1", 128, "float32", "none", False),
        ("e4m3 rows of 128", "tiled e4m3", 4096, "bfloat16", "none", False),
        ("e4m3", "e4m3", 8192, "bfloat16", "none", True),
        ("e4m3", "e4m3", 8, "bfloat16", "none", False),
        ("e4m3", "e2m1", 16, "float16", "none", False),
        ("e5m2", "e2m1", 64, "float16", "float16", False),
        ("mxe4m3", "nvfp4", 16, "bfloat16", "none", False),
        *((x, "mxe2m1", m, "float32", "none", False) for x, m in (("mxe4m3", 64), ("mxe4m3", 16), ("e4m3", 16))),
    ):
        if arch != "sm_90a" and (fast or m <= 64 or a == "e4m3 rows of 128"):
            continue  # one kernel for every size, none for scales of 128
        config = choose_config(m, 4096, 8192, _KINDS[a], _KINDS[b], arch, fast=fast, out=out, source=source)
        key = f"gemm floats/{a} x {b} m={m} out={out} c={source}{' fast' if fast else ''}"
        yield key, config
        if isinstance(config, ScaledGemmConfig) and config.adjacent and m >= 4096:
            yield f"{key} pairs", replace(config, adjacent=0)  # of other N
    if arch == "sm_90a":
        narrow = choose_float_gemm(64, 512, 16384, _KINDS["bf16"], _KINDS["bf16"], arch)
        yield "gemm floats/bf16 x bf16 m=64 n=512 k=16384 out=float32 c=none", narrow
        pair = _KINDS["mxe4m3"], _KINDS["nvfp4"]
        yield "gemm floats/mxe4m3 x nvfp4 warps", ScaledGemmConfig("mma", *pair, "float16", promote=False)
    if arch == "sm_100a":
        for kind, m, out, source in (
            *((kind, 4096, "float16", "none") for kind in MMA_KINDS),
            ("f8f6f4", 1024, "bfloat16", "none"),
            ("f8f6f4", 128, "float32", "bfloat16"),
        ):
            native = sm100.choose(m, 4096, kind, out, source, 132)
            yield f"gemm floats/tensor memory {kind} m={m} out={out} c={source}", native
        for rows in (128, 256):
            yield f"gemm floats/tensor memory of two CTAs, {rows} rows", sm100.Tcgen05Config("float16", pair_rows=rows)


def _gemm_floats_helpers(arch: str) -> Iterator[Entry]:
    """Passes over the operands of the dense float GEMM, and the probe of a TMA box."""
    for kind, bits in (("nvfp4", 16), ("mxe4m3", 16), ("e2m1", 8)):
        yield f"decode/{kind} to {bits} bits", DequantizeConfig(_KINDS[kind], bits == 16)
    if arch == "sm_90a":
        yield from ((f"fold/{x}", fold_config(_KINDS[x], x == "mxe4m3", 4096)) for x in ("mxe4m3", "mxe2m1"))
        for kind, bits, how in (("e4m3", 4, ""), ("e5m2", 8, ""), ("nvfp4", 4, " wide"), ("mxe4m3", 8, " in blocks")):
            key = f"small M order/{kind} for {bits} bits{how}"
            yield key, ReorderConfig(_KINDS[kind], bits, how == " wide", how == " in blocks")
    if arch in _TMA_ARCHES:
        yield "tensor memory/box of 128x128 bytes", BoxProbeConfig(128 * 128)


def _few_rows(arch: str) -> Iterator[Entry]:
    """Few rows and packed weights: formats, scale rules, and passes over the rows."""
    if arch == "sm_90a":
        for name, m, act, out in (
            ("int4_g128", 16, "bfloat16", "bfloat16"),
            ("int4_g128", 64, "bfloat16", "bfloat16"),
            ("int4_g32_min", 1, "float16", "float16"),
            ("mxfp4", 16, "bfloat16", "float32"),
            ("nvfp4", 32, "float16", "float16"),
            ("mxfp6_e3m2", 16, "bfloat16", "bfloat16"),
            ("e2m3", 8, "float16", "float16"),
            ("int8", 64, "bfloat16", "bfloat16"),
            ("e4m3", 1, "bfloat16", "bfloat16"),
            ("e4m3_g128", 16, "bfloat16", "bfloat16"),
            ("e4m3_g128", 64, "float16", "float16"),
        ):
            yield f"few rows/{name} m={m} {act} out={out}", choose_few_rows(name, m, 4096, 14336, act, out)
        for name, m, n, out in (
            ("int4_g128", 16, 14336, "bfloat16"), ("int4_g128", 64, 14336, "bfloat16"), ("int4_g128", 128, 14336, "float16"),
            ("int4_g128", 16, 28672, "bfloat16"), ("int4_g128", 64, 4096, "bfloat16"), ("int4_g64", 32, 4096, "float32"),
            ("int8_g64", 128, 14336, "float16"), ("int8_g128", 64, 14336, "bfloat16"), ("int4", 128, 4096, "bfloat16"),
        ):  # fmt: skip
            yield f"few rows/{name} m={m} n={n} int8 out={out}", choose_few_rows_int8(name, m, n, 8192, out)
    if arch != "sm_80":  # no conversion to e4m3
        yield "few rows/rows to e4m3", EncodeConfig("encode_e4m3_rows", "bfloat16")
        yield "few rows/few long rows to e4m3", encode_config("encode_e4m3_rows", "bfloat16", 16, 14336)
        yield "few rows/rows to mxfp8", EncodeConfig("encode_mxfp8_rows", "float32")
        yield "few rows/rows to e4m3 by 128", EncodeConfig("encode_e4m3_groups", "bfloat16")
        yield "few rows/rows to nvfp4", EncodeConfig("encode_nvfp4_rows", "float16")
    yield from ((f"few rows/integers to {act}", WidenConfig(act)) for act in ("bfloat16", "float16"))
    for name, act in (
        ("int4_g128", "bfloat16"),
        ("int8_g32_min", "float16"),
        ("nvfp4", "bfloat16"),
        ("mxfp6", "float16"),
        ("e4m3_g128", "bfloat16"),
    ):
        yield f"few rows/dense {name} {act}", DecodeConfig(name, act)


def _digits(arch: str) -> Iterator[Entry]:
    """Digit planes of real matrices, scales per row and per column."""
    for x, planes in (("float32", 2), ("float32", 3), ("bfloat16", 1)):
        yield f"digits/rows {x} planes={planes}", DigitsConfig("digits_rows", x, planes)
    for x, planes, rows in (("float32", 2, 4096), ("float32", 3, 8192), ("bfloat16", 2, 8192)):
        yield f"digits/columns {x} planes={planes} length={rows}", columns_config(x, planes, arch, rows)


def _compensate(arch: str) -> Iterator[Entry]:
    for step in ("amax", "leading", "residual"):
        for turned in (False, True) if step != "amax" else (False,):
            yield f"compensate/{step}{' transposed' * turned}", SplitConfig(step, 0, step != "amax", turned)
    for kernel in ("magnitude_sums", "levels", "layout_groups"):
        yield f"compensate/{kernel}", SelectConfig(kernel)
    for across in (False, True):
        slices = "columns" if across else "rows"
        yield f"compensate/marks of {slices}", SelectConfig("mark_entries", 8, across, one=True)
        yield f"compensate/groups of {slices}", SelectConfig("fill_groups", 8, across, truncate=True)


def _quantize(arch: str) -> Iterator[Entry]:
    """Quantization: every kernel, all input types, widths, signs and roundings."""
    for lines, x in (("slices", "float32"), ("slices", "float16"), ("columns", "bfloat16"), ("columns", "float64")):
        yield f"quantize/amax of {lines} {x}", QuantizeConfig(f"absmax_{lines}", x)
    for lines, x, bits in (
        ("slices", "float16", 4), ("slices", "bfloat16", 16),
        ("rows", "float32", 4), ("rows", "float16", 8), ("rows", "bfloat16", 8),
        ("columns", "float32", 16), ("columns", "bfloat16", 4),
    ):  # fmt: skip
        yield f"quantize/{lines} {x} s{bits}", QuantizeConfig(f"encode_{lines}", x, bits)
    for x, bits in (("float32", 8), ("float16", 4), ("bfloat16", 16)):
        yield f"quantize/short rows {x} s{bits}", QuantizeConfig("encode_short_rows", x, bits, steps=2)
    yield from ((f"transpose/{8 * other.size} bits", other) for other in transpose.default_configs())
    for each in quantize_transposed.default_configs(arch):
        yield f"quantize/{each.name.removeprefix('quantize-encode_').replace('-', ' ', 1)}", each
    yield from ((f"ranks/{sums.name}", sums) for sums in scaled_sums.two_rank_configs())
    yield "quantize/rows float32 u8", QuantizeConfig("encode_rows", "float32", 8, False)
    yield "quantize/rows float16 s12 truncated", QuantizeConfig("encode_rows", "float16", 12, truncate=True)
    yield "quantize/columns float64 u4 truncated", QuantizeConfig("encode_columns", "float64", 4, False, True)


def _sparse_helpers(arch: str) -> Iterator[Entry]:
    """Dense to SR-BCRS, and the order of a vector row's columns."""
    yield "compress/offsets", CompressConfig("layout_rows")
    for value, warps, real, checked, masked in (
        ("int8_t", 8, False, True, True), ("uint16_t", 1, True, False, False),
        ("uint32_t", 8, True, False, True), ("int64_t", 8, False, True, False),
    ):  # fmt: skip
        tags = f"{' float' if real else ''}{' checked' if checked else ''}{' masked' if masked else ''}"
        config = CompressConfig("mark", value, warps, real=real, checked=checked, masked=masked)
        yield f"compress/mark {value} warps={warps}{tags}", config
    for value, warps, bits, masked, nibbles in (
        ("int8_t", 8, 8, True, False), ("int16_t", 8, 16, False, False),
        ("int8_t", 8, 4, False, False), ("uint8_t", 1, 4, False, True),
    ):  # fmt: skip
        tags = f"{' masked' if masked else ''}{' packed' if nibbles else ''}"
        config = CompressConfig("fill", value, warps, masked=masked, bits=bits, nibbles=nibbles)
        yield f"compress/fill {value} bits={bits} warps={warps}{tags}", config
    yield "column order/default", ColumnOrderConfig()


def _softmax(arch: str) -> Iterator[Entry]:
    """Sparse softmax: widths, causality, bias, fragment order, vector lengths."""
    for x, v, stride, bits, causal, bias, atom in (
        ("float16", 8, 32, 8, True, False, "s8_m16n8k32"),
        ("float16", 8, 32, 16, True, False, "s8_m16n8k32"),
        ("float16", 8, 32, 4, False, False, "int4_as_int8_m16n8k32"),
        ("float32", 4, 32, 16, False, True, "s8_m16n8k32"),
        ("float32", 32, 64, 8, False, True, ""),
        ("bfloat16", 2, 16, 4, True, True, ""),
    ):
        tags = f"{' causal' if causal else ''}{' bias' if bias else ''}{' fragments' if atom else ''}"
        config = SoftmaxConfig(x, v, stride, bits, causal, bias, atom)
        yield f"softmax/{x} V={v} stride={stride} u{bits}{tags}", config


def _statistics(arch: str) -> Iterator[Entry]:
    """Statistics of operands for the planner."""
    kernels = {"sample_lines": "sample", "measure_lines": "measure", "meet_lines": "combine"}
    for config in statistics.default_configs():
        yield f"statistics/{kernels[config.kernel]} {config.x}", config


def _probes(arch: str) -> Iterator[Entry]:
    """Random probes, their comparison, and probes of what digits leave out."""
    for transposed, x, amax, groups in (
        (False, "float32", "", 1), (False, "float16", "rows", 1), (True, "float32", "rows", 2), (True, "bfloat16", "", 1),
    ):  # fmt: skip
        config = ProbeConfig("probe_transposed" if transposed else "probe", x, amax, groups)
        key = f"probe/{'transposed ' if transposed else ''}{x} groups={groups}"
        yield f"{key}{f' amax of {amax}' if amax else ''}", config
    compared = ("compare_rows", "float32", 1), ("compare_rows", "float16", 2), ("sum_comparison", "float32", 1)
    for kernel, x, groups in compared:
        yield f"probe/{kernel.removesuffix('_rows')} {x} groups={groups}", ProbeConfig(kernel, x, groups=groups)
    for config in double_configs() if arch == "sm_90a" else ():
        yield f"probe/{config.name}", config


def _look(arch: str) -> Iterator[Entry]:
    """Errors of digit products before the product, and the verdict after it."""
    for side, planes, transposed in (("left", 2, False), ("left", 3, True), ("right", 2, True), ("right", 3, False)):
        tags = f"{' transposed' if transposed else ''}"
        yield f"look/{side} planes={planes}{tags}", LookConfig(f"look_{side}", planes, transposed)
    yield from (("look/probes", LookConfig("look_probes")), ("look/vectors planes=3", LookConfig("look_vectors", 3)))
    yield "look/verdict", VerdictConfig()
    yield from ((f"look/double {each.name}", each) for each in row_sums.default_configs())


def _attention(arch: str) -> Iterator[Entry]:
    """Fused sparse attention: head sizes, key scales, bias, logs of sums, outputs."""
    for head, out, scale, bias, lse in (
        (32, "float16", True, False, False), (64, "float16", True, False, False),
        (64, "float16", False, False, False), (128, "bfloat16", True, True, True), (64, "float32", False, True, True),
    ):  # fmt: skip
        tags = f"{' key scales' if scale else ''}{' bias' if bias else ''}{' lse' if lse else ''}"
        yield f"attention/gather head={head} out={out}{tags}", GatherAttention(head, out, scale, bias, lse)
    problem = attention_heuristics.AttentionProblem(
        batch=8, vector_rows=512, keys=4096, vectors=512 * 400, reach=4096.0
    )
    yield "attention/head=64 batch=8 rows=512 keys=4096", attention_heuristics.choose(64, arch, 132, problem)
    if arch not in _TMA_ARCHES:
        return
    for out, scale, bias, lse in (
        ("float16", True, False, False), ("float32", True, True, False),
        ("bfloat16", True, True, True),
    ):  # fmt: skip
        tags = f"{' key scales' if scale else ''}{' bias' if bias else ''}{' lse' if lse else ''}"
        config = PanelAttention(64, out, scale, bias, lse, rows_per_warp=2 if lse else 3)
        yield f"attention/panel head=64 out={out}{tags}", config
    yield "attention/panel head=64 cluster=2", PanelAttention(64, cluster=2)
    if arch != BLOCK_ARCH:
        return
    for head, out, scale, bias, lse in (
        (64, "float16", False, False, False), (64, "float16", True, False, False), (64, "float32", True, True, True),
        (128, "bfloat16", True, False, False), (128, "float16", False, True, True),
    ):  # fmt: skip
        tags = f"{' key scales' if scale else ''}{' bias' if bias else ''}{' lse' if lse else ''}"
        config = replace(block_config(head), out=out, key_scale=scale, bias=bias, lse=lse)
        yield f"attention/blocks head={head} out={out}{tags}", config

    for head, source, added in ((64, "float16", False), (64, "float32", True), (128, "bfloat16", False)):
        config = replace(block_config(head), key_scale=True, source=source, out=source, bias=added, lse=added)
        yield f"attention/blocks of {source} head={head}{' bias lse' if added else ''}", config


def _attention_operands(arch: str) -> Iterator[Entry]:
    """Q, K and V as integers."""
    for x, head, bits in (("float16", 64, 8), ("float32", 128, 8), ("bfloat16", 64, 4)):
        yield f"attention operands/{x} head={head} s{bits}", attention_operands.choose(x, head, bits, arch)
        if arch == BLOCK_ARCH:
            yield f"attention tiles/{x} head={head} s{bits}", TilesConfig(x, head, bits)
