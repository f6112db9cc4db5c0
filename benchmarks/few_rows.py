"""Few rows times packed weights on a GPU, behind another kernel: each weight format beside torch's fp8 and bfloat16.

Weights are cold (rotated through more than 2.25 times the L2 cache) or warm. Every product is checked first.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness.gpu_results import gpu_arguments, results_file, rounded, save
from harness.gpu_timing import L2_ROUNDS, behind
from harness.machine import gpu_machine
from torch import Tensor

from cute_kernels import floats
from cute_kernels.few_rows.api import few_rows_product
from cute_kernels.few_rows.formats import FORMATS, PackedWeight, pack_weight
from cute_kernels.few_rows.product import ROWS, FewRowsConfig, choose_few_rows
from cute_kernels.jit.warmup import warmup

SHAPES = [(8192, 28672), (14336, 4096), (4096, 14336)]  # (K, N)
TOKENS = (1, 16, 32, 64)
TUNED = ("int4_g128", "mxfp4")
LAYERS = [
    ("e4m3", 0, "e4m3"), ("mxfp4", 0, "mxfp8"), ("int4", 128, "none"), ("int4", 32, "int8"), ("int8", 0, "none"),
    ("mxfp4", 0, "none"), ("e4m3", 0, "none"),
]  # fmt: skip
OTHERS = ("e2m1", "int4_g32", "int4_g32_min", "nvfp4", "int8", "e4m3")
# name -> groups, depth, split, resident, units, early
VARIANTS = {
    "g4": (4, 1, 1, 1, 2, 1),
    "g4e8": (4, 1, 1, 1, 2, 8),
    "g4u1": (4, 1, 1, 1, 1, 1),
    "g4s2": (4, 1, 2, 1, 2, 1),
    "g2x2": (2, 1, 1, 2, 2, 1),
    "g2x2e8": (2, 1, 1, 2, 2, 8),
    "g2x2u1": (2, 1, 1, 2, 1, 1),
    "g2x2s4": (2, 1, 4, 2, 2, 1),
    "g2x1": (2, 1, 1, 1, 2, 1),
    "d2x2": (2, 2, 1, 2, 2, 1),
    "d2x2s2": (2, 2, 2, 2, 2, 1),
    "d2x2s4": (2, 2, 4, 2, 2, 1),
    "d2x1s2": (2, 2, 2, 1, 2, 1),
    "g4d2": (4, 2, 1, 1, 2, 1),
    "g4d4s2": (4, 4, 2, 1, 2, 1),
}


def variants(name: str, m: int, n: int, k: int) -> dict[str, FewRowsConfig]:
    rows = next(each for each in ROWS if m <= each)
    found: dict[str, FewRowsConfig] = {}
    if rows == 32 and name == "mxfp4":
        return found
    for label, (groups, depth, split, resident, units, early) in VARIANTS.items():
        config = FewRowsConfig(name, rows, "bfloat16", "bfloat16", groups, depth, split, resident, units, early)
        ctas = -(-n // config.tile_n) * split
        fits = config.stages > depth and config.stages >= 2 and (k // 128) % units == 0
        fits = fits and config.stages * config.stage_bytes >= 4 * depth * rows * (config.tile_n + 4)
        if fits and 80 <= ctas <= 132 * 4 * resident:
            found[label] = config
    return found


def weight(name: str, n: int, k: int) -> tuple[PackedWeight, Callable[[Tensor], Tensor]]:
    """A random weight, and what multiplies by it in float32."""
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
    return pack_weight(codes, form, "bfloat16", scales, minimum=minimum), lambda x: x.float() @ dense.float().t()


def copies_for(size: int) -> int:
    return 1 + int(L2_ROUNDS * torch.cuda.get_device_properties(0).L2_cache_size / size)


def baselines(m: int, n: int, k: int) -> dict[str, list[Callable[[], object]]]:
    x, w = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
    found: dict[str, list[Callable[[], object]]] = {
        "bf16": [partial(torch.nn.functional.linear, x, w.clone()) for _ in range(copies_for(2 * n * k))]
    }
    one, few = torch.ones((), device="cuda"), w.to(torch.float8_e4m3fn)
    codes = x.to(torch.float8_e4m3fn)
    del w
    for fast in (True, False):
        rows = codes if m % 16 == 0 else torch.cat([codes.view(torch.uint8)] * 16).view(torch.float8_e4m3fn)
        call = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)
        try:
            call(codes, few.t())
            rows = codes
        except RuntimeError:
            pass
        found["fp8" + "fs"[not fast]] = [partial(call, rows, few.clone().t()) for _ in range(copies_for(n * k))]
    try:
        from harness.triton_w4 import w4_call, w4_weight

        packed, scales, exact = w4_weight(n, k)
        product = w4_call(x, n, k)
        error = check(product(packed, scales), x.float() @ exact.float().t())
        if error < 6e-3:
            more = copies_for(packed.nbytes)
            found["triton"] = [partial(product, packed.clone(), scales) for _ in range(more)]
        else:
            print(f"triton: error {error}")
    except Exception as error:
        print(f"triton: {type(error).__name__} {str(error)[:300]}")
    return found


def timed(calls: dict[str, list[Callable[[], object]]], cold: bool, rounds: int) -> dict[str, float]:
    found = behind({name: each if cold else each[0] for name, each in calls.items()}, rounds=rounds, replay=300.0)
    return {name: rounded(each.median) for name, each in found.items()}


def check(got: Tensor, exact: Tensor) -> float:
    return float((got.float() - exact).norm() / exact.norm())


def run(k: int, n: int, quick: bool, rows: list[dict[str, Any]]) -> None:
    packed: dict[str, tuple[PackedWeight, Callable[[Tensor], Tensor], list[PackedWeight]]] = {}
    for name in TUNED if quick else TUNED + OTHERS:
        try:
            one, exact = weight(name, n, k)
            more = [replace(one, data=one.data.clone()) for _ in range(copies_for(one.data.nbytes) - 1)]
            packed[name] = one, exact, [one, *more]
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:200]}")
    for m in TOKENS:
        calls = baselines(m, n, k)
        x = torch.randn(m, k, device="cuda").bfloat16()
        wrong = []
        for name, (one, exact, all_copies) in packed.items():
            truth = exact(x)
            tried = variants(name, m, n, k)
            if name not in TUNED:
                tried = {label: tried[label] for label in ("g2x2", "g2x2s4") if label in tried}
            tried["chosen"] = choose_few_rows(name, m, n, k)
            for label, config in tried.items():
                for pdl in (False, True) if label == "chosen" and name in TUNED else (False,):
                    title = f"{name}/{label}{'+pdl' if pdl else ''}"
                    try:
                        out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
                        few_rows_product(x, one, out=out, config=config)
                        torch.cuda.synchronize()
                        off = check(out, truth)
                        if not off < 6e-3:
                            wrong.append(f"{title} {off:.2g}")
                            continue
                        calls[title] = [
                            partial(few_rows_product, x, each, out=out, config=config, pdl=pdl) for each in all_copies
                        ]
                    except Exception as error:
                        wrong.append(f"{title} {type(error).__name__} {str(error)[:100]}")
        cold = timed(calls, True, 5)
        torch_names = [each for each in calls if "/" not in each]
        chosen = [each for each in calls if each.endswith("/chosen")]
        warm = timed({each: calls[each] for each in torch_names + chosen}, False, 5)
        fp8 = min(cold["fp8f"], cold["fp8s"])
        print(f"{m} x {k} x {n} cold:", *(f"{each} {cold[each]}" for each in torch_names), f"wrong: {wrong}")
        for name, (one, _, _) in packed.items():
            mine = {each.split("/")[1]: us for each, us in cold.items() if each.startswith(name + "/")}
            if not mine:
                continue
            best = min(mine, key=mine.__getitem__)
            share = one.data.nbytes / mine[best] / 1e6
            order = sorted(mine.items(), key=lambda entry: entry[1])[:7]
            text = f" {name}: {best} {mine[best]} us {fp8 / mine[best]:.2f}x {share:.2f} TB/s |"
            print(text, *(f"{label} {us}" for label, us in order))
            rows.append({"m": m, "k": k, "n": n, "weight": name, "bytes": one.data.nbytes, "cold": mine})
        print(" warm:", *(f"{each.replace('/chosen', '')} {us}" for each, us in warm.items()), flush=True)
        others = {each: cold[each] for each in torch_names}
        rows.append({"m": m, "k": k, "n": n, "weight": "torch", "cold": others, "warm": warm})


def layers(rows: list[dict[str, Any]]) -> None:
    """Whole layers, 4096 to 14336, from bfloat16: microseconds behind another kernel, and of the host."""
    from magicube_cutlass.nn import QuantLinear

    plain = torch.nn.Linear(4096, 14336, device="cuda", dtype=torch.bfloat16)
    made: dict[str, torch.nn.Module] = {"bf16": plain}
    for weight, group, act in LAYERS:
        options: dict[str, Any] = {"weight": weight, "act": act, **({"group_size": group} if group else {})}
        made[f"{weight} {group} {act}"] = QuantLinear.from_linear(plain, **options).eval().freeze()
    for m in (16, 64, 512):
        x = torch.randn(m, 4096, device="cuda").bfloat16()
        with torch.inference_mode():
            calls: dict[str, list[Callable[[], object]]] = {}
            hosts = {}
            for name, layer in made.items():
                try:
                    layer(x)
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    for _ in range(50):
                        layer(x)
                    hosts[name] = rounded((time.perf_counter() - start) / 50 * 1e6)
                    torch.cuda.synchronize()
                    calls[name] = [partial(layer, x)]
                except Exception as error:
                    print(f"layer {name}: {type(error).__name__} {str(error)[:300]}")
            us = timed(calls, False, 5)
        print(f"layers {m} (us, host):", *(f"{name}: {us[name]} {hosts[name]}," for name in us), flush=True)
        rows.append({"m": m, "layers": us, "host": hosts})


def main() -> None:
    args = gpu_arguments(__doc__, "int4_g128 and mxfp4 only")
    start = time.perf_counter()
    wanted = {
        config
        for k, n in SHAPES
        for m in TOKENS
        for name in (TUNED if args.quick else TUNED + OTHERS)
        for label, config in [*variants(name, m, n, k).items(), ("g2x2", choose_few_rows(name, m, n, k))]
        if name in TUNED or label.startswith("g2x2")
    }
    try:
        for _ in warmup(wanted, "sm_90a", jobs=os.cpu_count() or 1):
            pass
    except Exception as error:
        print(f"warmup: {type(error).__name__} {str(error)[:500]}")
    print(f"{len(wanted)} kernels compiled in {time.perf_counter() - start:.0f} s", flush=True)
    results: dict[str, Any] = {"machine": gpu_machine(), "unit": "us behind another kernel, median", "cases": []}
    gc.collect()
    gc.freeze()  # a capture collects garbage, and each would look at all of torch
    try:
        layers(results["cases"])
    except Exception as error:
        print(f"layers: {type(error).__name__} {str(error)[:500]}")
    for k, n in SHAPES:
        run(k, n, args.quick, results["cases"])
        save(results, args.out or results_file("few_rows"))
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
