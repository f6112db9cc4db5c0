"""e4m3 weights on a GPU behind another kernel: layers with scales per row and per 128 x 128 beside torch's fp8.

torch's products are of codes, with scales per tensor, row or 128 x 128; the layers quantize rows of bfloat16, or keep
them. Weights are cold (rotated through more than 2.25 times the L2 cache) or warm. Every product with scales is checked
first.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness.fp8_baselines import cloned, copies_for, host_us, relative_error, timed, torch_baselines
from harness.gpu_results import gpu_arguments, results_file, save
from harness.machine import gpu_machine
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.few_rows.product import choose_few_rows
from cute_kernels.jit.device import current_arch
from cute_kernels.jit.warmup import warmup
from magicube_cutlass.nn import QuantConfig, QuantLinear
from magicube_cutlass.nn.dense.blockwise import blockwise_gemm, refusal
from magicube_cutlass.nn.dense.product import quantize_act

SHAPES = [(4096, 14336), (14336, 4096), (8192, 28672)]  # (K, N)
TOKENS = (1, 16, 64)
MANY = (4096, 4096, 4096)  # (M, K, N)
MOST_ERROR = 6e-3  # relative: weights and results rounded to bfloat16
LAYERS = (("e4m3", "e4m3"), ("e4m3_b128", "e4m3"), ("e4m3_b128", "e4m3_g128"), ("e4m3_b128", "none"))


def scaled_calls(x: Tensor, plain: torch.nn.Linear) -> tuple[dict[str, list[Callable[[], Any]]], dict[str, float]]:
    """Calls on copies of the weight: torch's row-wise and blockwise products of codes, and layers from bfloat16.

    Those that torch or the toolchain refuses, and those whose result is wrong, are reported and left out. The second
    result is the relative errors.
    """
    w, (n, k) = plain.weight.detach(), plain.weight.shape
    calls: dict[str, list[Callable[[], Any]]] = {}
    exact: dict[str, Tensor] = {}  # product of the same codes, float32
    a, b = (mc.quantize(each, dtype="e4m3", scale="row") for each in (x, w))
    left, right = (each.data.view(torch.float8_e4m3fn) for each in (a, b))
    for fast in (True, False):
        name = "fp8 row-wise, fast" if fast else "fp8 row-wise"
        call = partial(torch._scaled_mm, scale_a=a.scale, scale_b=b.scale.t(), out_dtype=torch.bfloat16,
                       use_fast_accum=fast)  # fmt: skip
        calls[name] = [partial(call, left, each.t()) for each in cloned(right)]
        exact[name] = a.dequantize() @ b.dequantize().t()
    reason = refusal(n, k)
    if reason:
        print(f"fp8 blockwise: {reason}")
    else:
        rows, tiles = mc.quantize(x, dtype="e4m3_g128"), mc.quantize(w, dtype="e4m3_b128")
        scale = rows.scale.t().contiguous().t()
        calls["fp8 blockwise"] = [
            partial(blockwise_gemm, rows.data, scale, each, tiles.scale) for each in cloned(tiles.data)
        ]
        exact["fp8 blockwise"] = rows.dequantize() @ tiles.dequantize().t()
    for weight, act in LAYERS:
        config = QuantConfig(weight, act=act)
        made = [QuantLinear.from_linear(plain, config).eval().freeze() for _ in range(copies_for(n * k))]
        name, dense = f"layer {weight}, {act} rows: {made[0].explain().backend}", quantize_act(x, act, None)
        calls[name] = [partial(layer, x) for layer in made]
        exact[name] = (x.float() if dense is None else dense.dequantize()) @ made[0].dequantize().t()
    errors: dict[str, float] = {}
    for name, each in calls.items():
        try:
            errors[name] = relative_error(each[0](), exact[name])
        except (RuntimeError, ValueError) as refused:
            print(f"{name}: {type(refused).__name__} {str(refused)[:300]}")
    good = {name: each for name, each in calls.items() if errors.get(name, math.inf) < MOST_ERROR}
    if len(good) < len(calls):
        print("left out:", *(f"{name}, error {errors.get(name)};" for name in calls if name not in good))
    return good, errors


def run(m: int, k: int, n: int) -> dict[str, Any]:
    """One shape: e4m3 with scales per tensor, row, and tile, torch's products and layers, cold and warm, and host."""
    x = (torch.randn(m, k, device="cuda") * torch.randn(k, device="cuda").exp()).bfloat16()
    plain = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    found, errors = scaled_calls(x, plain)
    calls = torch_baselines(m, n, k) | found
    cold, warm = timed(calls, True), timed(calls, False)
    hosts = {name: host_us(each[0]) for name, each in calls.items()}
    fp8 = min(us for name, us in cold.items() if name.startswith("fp8"))
    print(f"{m} x {k} x {n}, cold (warm; host):")
    for name, us in cold.items():
        print(f"  {name} {us} us ({warm[name]}; {hosts[name]}), {fp8 / us:.2f} of fp8", flush=True)
    return {"m": m, "k": k, "n": n, "cold": cold, "warm": warm, "host": hosts, "errors": errors}


def main() -> None:
    args = gpu_arguments(__doc__, "one shape of few rows, and the one of many")
    shapes, start = SHAPES[:1] if args.quick else SHAPES, time.perf_counter()
    wanted = {choose_few_rows("e4m3_g128", m, n, k) for k, n in shapes for m in TOKENS}
    for _ in warmup(wanted, current_arch(), jobs=os.cpu_count() or 1):
        pass
    results: dict[str, Any] = {"machine": gpu_machine(), "unit": "us behind another kernel, median", "cases": []}
    gc.collect()
    gc.freeze()  # a capture collects garbage, and each would look at all of torch
    path = args.out or results_file("few_rows_e4m3")
    with torch.inference_mode():
        for case in (MANY, *((m, k, n) for k, n in shapes for m in TOKENS)):
            results["cases"].append(run(*case))
            save(results, path)
    print(f"wrote {path}, {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
