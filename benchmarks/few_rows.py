"""Few rows times packed weights on a GPU, behind another kernel: each weight format beside torch's fp8 and bfloat16.

Weights are cold (rotated through more than 2.25 times the L2 cache) or warm. Every product is checked first. With
``--act int8``, int8 rows by integer products, and beside them widened to bfloat16 (two launches), and from 256 rows on
also by torch on the decoded weight (four).
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.fp8_baselines import copies_for, host_us, relative_error, timed, torch_baselines
from harness.gpu_results import gpu_arguments, results_file, save
from harness.machine import gpu_machine
from torch import Tensor

from cute_kernels import floats
from cute_kernels.few_rows.api import few_rows_product
from cute_kernels.few_rows.decode import DecodeConfig, decode_weight
from cute_kernels.few_rows.formats import FORMATS, PackedWeight, pack_weight
from cute_kernels.few_rows.product import ROWS, FewRowsConfig, choose_few_rows
from cute_kernels.few_rows.product_int8 import (
    FewRowsInt8Config,
    choose_few_rows_int8,
    few_rows_int8_product,
    int8_candidates,
)
from cute_kernels.few_rows.widen import WidenConfig, widen_rows
from cute_kernels.jit.device import current_arch
from cute_kernels.jit.warmup import warmup
from magicube_cutlass.nn import QuantConfig, QuantLinear

SHAPES = [(8192, 28672), (14336, 4096), (4096, 14336)]  # (K, N)
TOKENS = (1, 16, 32, 64)
MOST_ERROR = 6e-3  # relative: weights and results rounded to bfloat16
WEIGHTS = ("int4_g128", "int4_g32", "int4_g32_min", "mxfp4", "nvfp4", "e2m1", "mxfp6", "int8", "e4m3", "e4m3_g128")
LAYER_TOKENS = (1, 16, 64, 512)
LAYERS: list[tuple[str, int | None, str]] = [
    ("e4m3", None, "e4m3"), ("mxfp4", None, "mxfp8"), ("int4", 128, "none"), ("int4", 32, "int8"),
    ("int8", None, "none"), ("mxfp4", None, "none"), ("e4m3", None, "none"), ("e4m3_b128", None, "e4m3"),
    ("e4m3_b128", None, "e4m3_g128"), ("e4m3_b128", None, "none"),
]  # fmt: skip
# name -> groups, depth, split, resident, units
VARIANTS = {
    "g4": (4, 1, 1, 1, 2),
    "g4u1": (4, 1, 1, 1, 1),
    "g4s2": (4, 1, 2, 1, 2),
    "g2x2": (2, 1, 1, 2, 2),
    "g2x2s4": (2, 1, 4, 2, 2),
    "g2x1": (2, 1, 1, 1, 2),
    "d2x2": (2, 2, 1, 2, 2),
    "d2x2s2": (2, 2, 2, 2, 2),
    "d2x2s4": (2, 2, 4, 2, 2),
    "d2x1s2": (2, 2, 2, 1, 2),
    "g4d2": (4, 2, 1, 1, 2),
}

INT8_TOKENS = (1, 16, 64, 128, 256, 512, 2048)
INT8_WEIGHTS = ("int4_g128", "int4_g64", "int4_g32", "int4", "int8_g128")
DECODED = 256  # rows from which the decoded weight is measured too


Weight = tuple[list[PackedWeight], Callable[[Tensor], Tensor]]  # copies, and what multiplies by them exactly


def configs(name: str, m: int, n: int, k: int, more: bool) -> dict[str, FewRowsConfig]:
    """The chosen config, and with `more` others that fit."""
    rows = next(each for each in ROWS if m <= each)
    found = {"chosen": choose_few_rows(name, m, n, k)}
    for label, (groups, depth, split, resident, units) in VARIANTS.items() if more else ():
        config = FewRowsConfig(name, rows, "bfloat16", "bfloat16", groups, depth, split, resident, units)
        ctas = -(-n // config.tile_n) * split
        fits = config.stages > depth and config.stages >= 2 and (k // 128) % units == 0
        fits = fits and config.stages * config.stage_bytes >= 4 * depth * rows * (config.tile_n + 4)
        if fits and 80 <= ctas <= 132 * 4 * resident:
            found[label] = config
    return found


def weight(name: str, n: int, k: int, act: str = "bfloat16") -> Weight:
    """Copies of a random weight packed for rows of `act`, and what multiplies by it in float32."""
    form, made = FORMATS[name], torch.Generator("cuda").manual_seed(1)
    groups = k // form.group if form.group else 0
    if form.codes.startswith("int"):
        top = 1 << (form.bits - 1)
        codes = torch.randint(-top, top, (n, k), generator=made, device="cuda", dtype=torch.int8)
        values = codes.float()
    else:
        codes = torch.randint(0, 1 << form.bits, (n, k), generator=made, device="cuda", dtype=torch.uint8)
        if form.codes == "e4m3":
            codes[(codes & 127) == 127] = 1
        values = floats.decode(codes, form.codes)
    scales = minimum = None
    if form.scale in ("half", "half_min", "sum"):
        scales = torch.rand(n, groups, generator=made, device="cuda") + 0.1
        values *= scales.repeat_interleave(form.group, 1)
        if form.scale == "half_min":
            minimum = torch.rand(n, groups, generator=made, device="cuda") - 0.5
            values += minimum.repeat_interleave(form.group, 1)
    elif form.group:
        low, high = (120, 130) if form.scale == "power" else (30, 70)
        scales = torch.randint(low, high, (n, groups), generator=made, device="cuda", dtype=torch.uint8)
        kind = "ue8m0" if form.scale == "power" else "e4m3"
        values *= floats.decode(scales, kind).repeat_interleave(form.group, 1)
    dense = values.bfloat16()
    del values
    one = pack_weight(codes, form, act, scales, minimum=minimum)
    copies = [one, *(replace(one, data=one.data.clone()) for _ in range(copies_for(one.data.nbytes) - 1))]
    return copies, lambda x: x.float() @ dense.float().t()


def int8_configs(name: str, m: int, n: int, k: int, more: bool) -> dict[str, FewRowsInt8Config]:
    """The chosen config, and with `more` others of as many rows."""
    chosen = choose_few_rows_int8(name, m, n, k)
    found = {"chosen": chosen}
    for config in int8_candidates(name, chosen.rows) if more else ():
        if config != chosen:
            found[f"g{config.groups}d{config.depth}s{config.split}"] = config
    return found


def baselines(m: int, n: int, k: int) -> dict[str, list[Callable[[], object]]]:
    """As :func:`torch_baselines`, and int4 by Triton."""
    found, x = torch_baselines(m, n, k), torch.randn(m, k, device="cuda").bfloat16()
    try:
        from harness.triton_w4 import w4_call, w4_weight

        packed, scales, exact = w4_weight(n, k)
        product = w4_call(x, n, k)
        error = relative_error(product(packed, scales), x.float() @ exact.float().t())
        if error < MOST_ERROR:
            more = copies_for(packed.nbytes)
            found["triton"] = [partial(product, packed.clone(), scales) for _ in range(more)]
        else:
            print(f"triton: error {error}")
    except Exception as error:
        print(f"triton: {type(error).__name__} {str(error)[:300]}")
    return found


def checked_calls(name: str, made: Weight, x: Tensor, more: bool) -> dict[str, list[Callable[[], object]]]:
    """Calls on copies of a weight, by config; those whose result is wrong are reported and left out."""
    copies, exact = made[0], made[1](x)
    one, m = copies[0], x.shape[0]
    n, k = one.shape
    found: dict[str, list[Callable[[], object]]] = {}
    for label, config in configs(name, m, n, k, more).items():
        out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
        few_rows_product(x, one, out=out, config=config)
        error = relative_error(out, exact)
        if error < MOST_ERROR:
            found[f"{name}/{label}"] = [partial(few_rows_product, x, each, out=out, config=config) for each in copies]
        else:
            print(f"{name}/{label}: error {error}")
    return found


def run(m: int, k: int, n: int, weights: dict[str, Weight], more: bool) -> dict[str, Any]:
    """One shape: every format beside torch's products."""
    calls, sizes = baselines(m, n, k), {}
    x = torch.randn(m, k, device="cuda").bfloat16()
    for name, made in weights.items():
        sizes[name] = made[0][0].data.nbytes
        calls |= checked_calls(name, made, x, more)
    cold, warm = timed(calls, True), timed(calls, False)
    fp8 = min(cold["fp8 fast"], cold["fp8"])
    print(
        f"{m} x {k} x {n}, cold (warm):", *(f"{each} {cold[each]} ({warm[each]})," for each in cold if "/" not in each)
    )
    for title, us in cold.items():
        name, _, label = title.partition("/")
        if label:
            rate = sizes[name] / us / 1e6
            print(f"  {title} {us} us ({warm[title]}), {fp8 / us:.2f} of fp8, {rate:.2f} TB/s", flush=True)
    return {"m": m, "k": k, "n": n, "bytes": sizes, "cold": cold, "warm": warm}


def run_int8(m: int, k: int, n: int, name: str, pairs: tuple[Weight, Weight], more: bool) -> dict[str, Any]:
    """One shape and format of int8 rows, beside rows widened to bfloat16, by either product, and torch's products."""
    (copies, product), (widened, _) = pairs
    x = torch.randint(-127, 128, (m, k), device="cuda", dtype=torch.int8)
    scale, exact = torch.rand(m, device="cuda") + 0.5, product(x)
    exact *= scale[:, None]
    calls = baselines(m, n, k)
    calls.pop("triton", None)

    def by_widening(weight: PackedWeight, out: Tensor) -> Tensor:
        return few_rows_product(widen_rows(x, "bfloat16"), weight, row_scale=scale, out=out)

    def by_decoding(weight: PackedWeight, out: Tensor) -> Tensor:
        torch.mm(widen_rows(x, "bfloat16"), decode_weight(weight).t(), out=out)
        return out.mul_(scale[:, None])

    def checked(label: str, each: Callable[[PackedWeight, Tensor], Tensor], weights: list[PackedWeight]) -> None:
        out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
        each(weights[0], out)
        error = relative_error(out, exact)
        if error < MOST_ERROR:
            calls[f"{name}/{label}"] = [partial(each, weight, out) for weight in weights]
        else:
            print(f"{name}/{label}: error {error}")

    checked("widened", by_widening, widened)
    if m >= DECODED:
        checked("decoded", by_decoding, widened)
    for label, config in int8_configs(name, m, n, k, more).items():

        def by_integers(weight: PackedWeight, out: Tensor, config: FewRowsInt8Config = config) -> Tensor:
            return few_rows_int8_product(x, weight, row_scale=scale, out=out, config=config)

        checked(label, by_integers, copies)
    cold, warm = timed(calls, True), timed(calls, False)
    fp8, size = min(cold["fp8 fast"], cold["fp8"]), copies[0].data.nbytes
    print(
        f"{m} x {k} x {n}, cold (warm):", *(f"{each} {cold[each]} ({warm[each]})," for each in cold if "/" not in each)
    )
    for title in sorted((each for each in cold if "/" in each), key=lambda each: cold[each]):
        us, rate = cold[title], 2e-6 * m * n * k / cold[title]
        chosen = f" = {choose_few_rows_int8(name, m, n, k).name}" if title.endswith("/chosen") else ""
        print(
            f"  {title} {us} us ({warm[title]}), {fp8 / us:.2f} of fp8, {size / us / 1e6:.2f} TB/s, {rate:.0f} TOP/s"
            f"{chosen}"
        )
    return {"m": m, "k": k, "n": n, "act": "int8", "bytes": {name: size}, "cold": cold, "warm": warm}


def main_int8(names: list[str], quick: bool, more: bool, path: Path | None) -> None:
    """Int8 rows: formats by `names`, with `more` other configs too."""
    shapes, start = SHAPES[-1:] if quick else SHAPES, time.perf_counter()
    wanted: set[Any] = {WidenConfig("bfloat16"), *(DecodeConfig(name, "bfloat16") for name in names)}
    for k, n in shapes:
        for m in INT8_TOKENS:
            for name in names:
                wanted |= {choose_few_rows(name, m, n, k), *int8_configs(name, m, n, k, more).values()}
    for _ in warmup(wanted, current_arch(), jobs=os.cpu_count() or 1):
        pass
    results: dict[str, Any] = {"machine": gpu_machine(), "unit": "us behind another kernel, median", "cases": []}
    gc.collect()
    gc.freeze()  # a capture collects garbage, and each would look at all of torch
    path = path or results_file("few_rows_int8")
    with torch.inference_mode():
        for k, n in shapes:
            for name in names:
                pairs = weight(name, n, k, "int8"), weight(name, n, k)
                for m in INT8_TOKENS:
                    results["cases"].append(run_int8(m, k, n, name, pairs, more))
                    save(results, path)
    print(f"wrote {path}, {time.perf_counter() - start:.0f} s in all")


def layers(m: int) -> dict[str, Any]:
    """Whole layers, 4096 to 14336, from bfloat16: microseconds behind another kernel, and of the host."""
    plain = torch.nn.Linear(4096, 14336, device="cuda", dtype=torch.bfloat16)
    made: dict[str, torch.nn.Module] = {"nn.Linear": plain}
    for weight, group, act in LAYERS:
        config = QuantConfig(weight, group_size=group, act=act)
        name = f"{weight}{f'_g{group}' if group else ''}, {act} rows"
        made[name] = QuantLinear.from_linear(plain, config).eval().freeze()
    x = torch.randn(m, 4096, device="cuda").bfloat16()
    hosts = {name: host_us(partial(layer, x)) for name, layer in made.items()}
    us = timed({name: [partial(layer, x)] for name, layer in made.items()}, False)
    print(f"layers, {m} tokens, us (host):", *(f"{name} {us[name]} ({hosts[name]})," for name in us), flush=True)
    return {"layer": [4096, 14336], "m": m, "warm": us, "host": hosts}


def main() -> None:
    args = gpu_arguments(
        __doc__,
        "one shape",
        configs={"action": "store_true", "help": "other configs beside the chosen"},
        act={"choices": ("none", "int8"), "default": "none", "help": "rows of bfloat16, or of int8"},
        weights={"nargs": "*", "default": INT8_WEIGHTS, "help": "weights beside int8 rows"},
    )
    if args.act == "int8":
        main_int8(args.weights, args.quick, args.configs, args.out)
        return
    shapes, start = SHAPES[-1:] if args.quick else SHAPES, time.perf_counter()
    wanted = {
        config
        for k, n in shapes
        for m in TOKENS
        for name in WEIGHTS
        for config in configs(name, m, n, k, args.configs).values()
    }
    for _ in warmup(wanted, current_arch(), jobs=os.cpu_count() or 1):
        pass
    results: dict[str, Any] = {"machine": gpu_machine(), "unit": "us behind another kernel, median", "cases": []}
    gc.collect()
    gc.freeze()  # a capture collects garbage, and each would look at all of torch
    path = args.out or results_file("few_rows")
    with torch.inference_mode():
        for m in LAYER_TOKENS:
            results["cases"].append(layers(m))
        for k, n in shapes:
            weights = {name: weight(name, n, k) for name in WEIGHTS}
            for m in TOKENS:
                results["cases"].append(run(m, k, n, weights, args.configs))
                save(results, path)
    print(f"wrote {path}, {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
