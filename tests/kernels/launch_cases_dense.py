"""Dense products of integers and floats, for :mod:`launch_cases`."""

# ruff: noqa: B023 - a function of a loop's variables runs before the loop continues

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels import floats
from cute_kernels.gemm import NATIVE_INT4
from cute_kernels.gemm import api as gemm
from cute_kernels.gemm import config as gemm_config
from cute_kernels.gemm import cuda as gemm_cuda
from cute_kernels.gemm import heuristics as gemm_heuristics
from cute_kernels.scaled_gemm import api as gemm_floats
from cute_kernels.scaled_gemm import config as gemm_floats_config
from cute_kernels.scaled_gemm import cuda as gemm_floats_cuda
from cute_kernels.scaled_gemm.sm100 import Tcgen05Config
from cute_kernels.scaled_gemm.small_m.config import candidates as small_m_candidates
from magicube_cutlass.nn.dense.few_rows import pack_few_rows
from magicube_cutlass.nn.dense.product import DenseProduct
from magicube_cutlass.quantization import float_tensor
from magicube_cutlass.quantization.group_tensor import quantize_groups
from tests import helpers
from tests.kernels.launch_cases_sparse import reals
from tests.kernels.launch_recorder import Recorder

FORMATS = tuple(floats.FORMATS)
# those that kernels multiply: without float32 scales
RECIPES = {name: (form, int(block), scale) for name, (form, block, scale) in float_tensor.RECIPES.items()
           if isinstance(block, int) and scale != "float32"}  # fmt: skip
OUTS = (torch.float32, torch.float16, torch.bfloat16)
#        M, N, K
SHAPES = [(128, 256, 512), (100, 130, 96), (1, 64, 64), (257, 1000, 1008), (2048, 2048, 256), (64, 8, 2048)]
TERMS = [
    (1, 1, None),
    (2, 1, None),
    (1, 2, 1),
    (2, 2, None),
    (2, 2, 4),
    (2, 2, 1),
    (3, 3, None),
    (3, 3, 3),
    (3, 1, None),
]


def planes(count: int, m: int, k: int, layout: str = "row") -> tuple[Tensor, ...]:
    """int8 (m, k) each; ``layout``: row, column or gaps, of rows that start anywhere."""
    made = []
    for seed in range(count):
        x = helpers.random_ints((m, k), 8, True, seed)
        if layout == "column":
            x = x.mT.contiguous().mT
        elif layout == "gaps":
            x = torch.nn.functional.pad(x, (3, 2))[:, 3:-2]
        made.append(x)
    return tuple(made)


def _multiply(recorder: Recorder, key: str, a: Any, b: Any, **options: Any) -> None:
    named = {f"a{i}": plane for i, plane in enumerate(a)} | {f"b{i}": plane for i, plane in enumerate(b)}
    named |= {name: each for name, each in options.items() if isinstance(each, Tensor)}
    recorder.call(f"gemm {key}", lambda: gemm.gemm(a, b, **options), **named)


def integers(recorder: Recorder, arch: str) -> None:
    """Numbers of planes and terms, shapes, layouts and epilogues take turns."""
    layouts = list(product(("row", "column", "gaps"), ("column", "row", "gaps")))
    for i, ((count_a, count_b, terms), (m, n, k)) in enumerate(product(TERMS, SHAPES)):
        lies_a, lies_b = layouts[i % 2 and i % 9]
        a, b = planes(count_a, m, k, lies_a), planes(count_b, k, n, lies_b)
        out, floating = OUTS[i % 3], i % 4 != 0 or count_a * count_b > 1
        options: dict[str, Any] = {
            "terms": terms,
            "out_dtype": out if floating else (torch.int32, torch.int64)[i % 8 == 0],
        }
        if floating:
            options["shift"] = (8, 4)[i % 2]
            options["scale_a"] = (None, 0.5, reals(m), reals(m).half(), torch.tensor(2.0))[i % 5]
            options["scale_b"] = (reals(n), None, 0.25)[i % 3]
            options["bias"] = reals(n) if i % 2 else None
        if floating and i % 3 == 1:
            c = (reals(m, n), reals(m, n).half(), reals(n, m).mT)[i % 9 // 3]
            options |= {"alpha": 1.5, "beta": 0.5, "c": c}
        if i % 7 == 3:
            options["out"] = torch.zeros(m, n + 5, dtype=options["out_dtype"])[:, :n]
        _multiply(
            recorder,
            f"{count_a}x{count_b} {terms}, {m}x{n}x{k}, {lies_a}, {lies_b}, {options['out_dtype']}",
            a,
            b,
            **options,
        )
    for out, (m, n, count) in product((torch.int64, torch.float32, torch.float16), ((16, 24, 1), (40, 16, 2))):
        if count == 1 or out.is_floating_point:
            a, b = planes(count, m, 140_000), planes(count, 140_000, n, "column")
            bias = reals(n) if out.is_floating_point else None
            _multiply(recorder, f"of long sums, {count} planes, {m}x{n}, {out}", a, b, out_dtype=out, bias=bias)
    for k in (512, 140_000):
        a, b, scale = planes(1, 16, k), planes(1, k, 24, "column"), torch.tensor(0.1)
        options = {"activation": "gelu", "out_scale": scale, "out_dtype": torch.int8, "scale_a": reals(16)}
        _multiply(recorder, f"that ends in integers, K = {k}", a, b, **options)
    for m, n, k in ((0, 8, 8), (8, 8, 0)):
        _multiply(recorder, f"empty {m}x{n}x{k}", planes(1, m, k), planes(1, k, n))


def integers_by_config(recorder: Recorder, arch: str) -> None:
    """Each config of the kernel selection."""
    for count, terms in ((1, 1), (2, 3), (3, 6)):
        a, b = planes(count, 300, 512), planes(count, 512, 520, "column")
        out = torch.zeros(300, 520)
        for config in gemm_heuristics.candidates(gemm_config.select_products(count, count, terms), arch):

            def run() -> Tensor:
                call = gemm._check(
                    a, b, terms, 8, None, None, 1.0, 0.0, None, None, None, None, False, out, torch.float32
                )
                return gemm_cuda.gemm_cuda(call, out, config)

            recorder.call(f"gemm with {config.name}", run, a0=a[0], b0=b[0], out=out)
    for k in (512, 333):
        a, b = planes(1, 300, k), planes(1, k, 520, "column")
        recorder.call(f"gemm by CUTLASS, K = {k}", lambda: gemm.gemm(a[0], b[0], backend="cutlass"), a0=a[0], b0=b[0])
    if arch == "sm_80":
        for k in (512, 333, 140_001):
            ints = helpers.random_ints((300, k), 4, True), helpers.random_ints((k, 520), 4, True)
            left, right = gemm.Int4Matrix.from_ints(ints[0], 1), gemm.Int4Matrix.from_ints(ints[1], 0)
            recorder.call(
                f"gemm of packed integers, K = {k}",
                lambda: gemm.gemm(left, right, config=NATIVE_INT4, out_dtype=torch.int64),
                a0=left.data,
                b0=right.data,
            )


def operand(dtype: str, rows: int, k: int, kind: str = "", gaps: int = 0) -> gemm_floats.FloatOperand:
    """Any codes; ``kind``: scales, none, one, rows, tiles, or of blocks (of RECIPES)."""
    size = floats.packed_bytes(k, dtype)
    codes = helpers.random_ints((rows, size + gaps), 8, False)[:, :size]
    scales: dict[str, Any] = {}
    if kind == "tiles":
        scales["tiles"] = reals(-(-rows // 128), -(-k // 128))
    elif kind in ("rows", "one"):
        scales["scale"] = reals(rows) if kind == "rows" else torch.tensor(0.5)
    elif kind:
        _, block, scale = RECIPES[kind]
        blocks = helpers.random_ints((rows, -(-k // block)), 8, False)
        scales = {"blocks": blocks, "block": block, "scale_dtype": scale}
    return gemm_floats.FloatOperand(codes, dtype, k, **scales)


def _multiply_floats(recorder: Recorder, key: str, a: Any, b: Any, **options: Any) -> None:
    named = {
        "a": a.packed_data,
        "b": b.packed_data,
        "scale_a": a.scale,
        "scale_b": b.scale,
        "blocks_a": a.blocks,
        "blocks_b": b.blocks,
    }
    named |= {"tiles_a": a.tiles, "tiles_b": b.tiles}
    named |= {name: each for name, each in options.items() if isinstance(each, Tensor)}
    recorder.call(f"gemm_floats {key}", lambda: gemm_floats.scaled_gemm(a, b, **options), **named)


def small_floats(recorder: Recorder, arch: str) -> None:
    """Every pair of formats with few rows and many; scales and epilogues take turns; blocks and tiles."""
    shapes = [(8, 512, 1024), (200, 384, 512), (64, 1000, 256), (1, 100, 160), (33, 256, 2048), (256, 512, 192)]
    for i, ((left, right), few) in enumerate(product(product(FORMATS, FORMATS), (0, 1))):
        m, n, k = shapes[(i // 2 * 2 + few) % 6]
        a, b = (
            operand(left, m, k, ("", "one", "rows")[i % 3], 16 * (i % 5 == 3)),
            operand(right, n, k, ("rows", "")[i % 2]),
        )
        options: dict[str, Any] = {"out_dtype": OUTS[i % 3], "fast_accum": i % 4 == 1, "alpha": 0.5}
        if i % 4 == 2:
            options |= {"c": reals(m, n), "beta": 2.0, "bias": reals(n).half()}
        _multiply_floats(recorder, f"{left} x {right}, {m}x{n}x{k}, {OUTS[i % 3]}", a, b, **options)
    recipes = [*RECIPES, "tiles"]
    for i, ((kind, other), m) in enumerate(product(product(recipes, recipes), (8, 48, 300))):
        tiled = "tiles" in (kind, other)
        if (i % 2 and kind != other) or (tiled and kind != other):
            continue
        names = ["e4m3" if each == "tiles" else RECIPES[each][0] for each in (kind, other)]
        if RECIPES.get(kind, ("", 0, ""))[1:] != RECIPES.get(other, ("", 0, ""))[1:]:
            continue
        a, b = operand(names[0], m, 512, kind), operand(names[1], 384, 512, other)
        _multiply_floats(recorder, f"{kind} x {other}, {m} rows", a, b, out_dtype=OUTS[i % 3])
    for m, k in ((0, 64), (5, 33), (300, 77)):
        _multiply_floats(recorder, f"odd {m}x{k}", operand("e4m3", m, k), operand("e2m1", 40, k))
    for kind, name in (("", "e2m1"), ("tiles", "e4m3"), ("mxfp4", "e2m1")):  # large enough to be decoded first
        a, b = (operand(name, 2048, 2048, kind) for _ in range(2))
        _multiply_floats(recorder, f"large {name} {kind}", a, b, out_dtype=torch.float16)
    if arch == "sm_90a":
        groups, tiles = mc.quantize(reals(200, 512), dtype="e4m3_g128"), mc.quantize(reals(520, 512), dtype="e4m3_b128")
        named = {"a": groups.data, "b": tiles.data, "scales_a": groups.scale, "scales_b": tiles.scale}
        recorder.call("matmul e4m3_g128 x e4m3_b128", lambda: float_tensor.matmul(groups, tiles.mT), **named)
        blocks, right = mc.quantize(reals(200, 512), dtype="mxfp8"), mc.quantize(reals(520, 512), dtype="mxfp4")
        folded = partial(float_tensor.matmul, blocks, right.mT, fold_scales=True)
        recorder.call("matmul mxfp8 x mxfp4, folded", folded, **named)
    column = replace(operand("e4m3", 64, 128), packed_data=helpers.random_ints((128, 64), 8, False).mT)
    _multiply_floats(recorder, "column by column", column, operand("e5m2", 40, 128))


def floats_by_config(recorder: Recorder, arch: str) -> None:
    """Each config of the kernel selection."""
    a, b, out = operand("e4m3", 200, 512), operand("e2m1", 384, 512), torch.zeros(200, 384)
    few, few_out = operand("e4m3", 30, 512), torch.zeros(30, 384)
    configs = gemm_floats_config.candidates(a.format, b.format, arch)
    for config in configs:
        _with(recorder, config, a, b, out)
    if arch == "sm_90a":
        for rows in (8, 16, 32):
            for small in small_m_candidates(rows, few.format, b.format):
                _with(recorder, small, replace(few, packed_data=few.packed_data[:rows]), b, few_out[:rows])
        for kind in ("", "mxfp8"):
            x, y = operand("e4m3", 16, 512, kind), operand("e2m1", 384, 512, "mxfp4")
            _multiply_floats(recorder, f"few rows of {kind or 'e4m3'} x mxfp4", x, y, out=few_out[:16])


def _with(recorder: Recorder, config: Any, a: Any, b: Any, out: Tensor) -> None:
    def run() -> Tensor:
        call = gemm_floats.check(a, b, 1.0, 0.0, None, None, out, torch.float32, False)
        return gemm_floats_cuda.scaled_gemm_cuda(call, out, config)

    recorder.call(f"gemm_floats with {config.name} for {a.rows} rows", run, a=a.packed_data, b=b.packed_data, out=out)


def tcgen05(recorder: Recorder) -> None:
    """Products by the instructions of sm_100a, where they are asked for."""
    with patch.dict(os.environ, {"MAGICUBE_TCGEN05": "1"}):
        for i, (left, right) in enumerate(product(FORMATS, FORMATS)):
            m, n, k = ((200, 384, 512), (64, 1000, 256), (2048, 2048, 256))[i % 3]
            a, b = operand(left, m, k, ("", "rows")[i % 2]), operand(right, n, k)
            _multiply_floats(recorder, f"{left} x {right} by tcgen05, {m}x{n}x{k}", a, b, out_dtype=OUTS[i % 3])
        for kind in RECIPES:
            name = RECIPES[kind][0]
            a, b = operand(name, 300, 512, kind), operand(name, 384, 512, kind)
            _multiply_floats(recorder, f"{kind} by tcgen05", a, b, c=reals(300, 384), beta=1.0, bias=reals(384))
        a, b = operand("e2m1", 300, 512), operand("e4m3", 384, 512)
        for rows in (128, 256):
            _with(recorder, Tcgen05Config("float32", pair_rows=rows), a, b, torch.zeros(300, 384))


def quantized(recorder: Recorder) -> None:
    """FloatTensors as operands."""
    for recipe in RECIPES:
        a = mc.quantize(reals(64, 256), dtype=recipe)
        b = mc.quantize(reals(256, 96), dtype=recipe, scale="column")
        recorder.call(f"gemm_floats of {recipe} tensors", lambda: gemm_floats.scaled_gemm(a.operand(), b.operand()),
                      a=a.data, b=b.data, blocks_a=a.scale, blocks_b=b.scale)  # fmt: skip


def layers_of_few_rows(recorder: Recorder) -> None:
    """Layers with int8 rows and 4- or 8-bit weights: multiplied as integers, or widened."""
    kinds = [(4, 128, True), (4, None, True), (8, 64, True), (4, 32, True), (4, 128, False)]
    for i, (bits, group, symmetric) in enumerate(kinds):
        weight = quantize_groups(reals(264, 512), bits=bits, group=group, symmetric=symmetric)
        made = recorder.run(lambda: DenseProduct(weight, "int8"))
        dtype, bias, given = OUTS[1 + i % 2], reals(264), torch.tensor(0.5) if i % 3 == 1 else None
        packed_for = torch.int8 if made.backend == "few_rows_int8" else dtype
        made._few[packed_for] = pack_few_rows(weight, str(packed_for).removeprefix("torch."))
        for rows in (1, 40, 300):
            x = reals(rows, 512).to(dtype)
            for again in ("", ", again"):
                kind = f"int{bits}, groups of {group}{'' if symmetric else ' with minima'}"
                key = f"layer of {kind}, {made.backend}, {rows} rows of {dtype}{again}"
                recorder.call(key, lambda: made(x, given, bias), x=x, bias=bias, act_scale=given)


def record(recorder: Recorder) -> None:
    """All of them."""
    integers(recorder, recorder.arch)
    integers_by_config(recorder, recorder.arch)
    small_floats(recorder, recorder.arch)
    floats_by_config(recorder, recorder.arch)
    quantized(recorder)
    if recorder.arch == "sm_90a":
        layers_of_few_rows(recorder)
    if recorder.arch == "sm_100a":
        tcgen05(recorder)
