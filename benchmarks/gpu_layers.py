"""Sparse quantized layers on a GPU, float16 to float16, beside dense layers: 90% zeros, from 1 to 4096 tokens.

Writes ``benchmarks/results/gpu_layers_h200.json``, or the file that the GPU's name gives.  Times are microseconds of a
whole layer in a CUDA graph: "behind" another kernel, "cold" with weights and inputs rotated through more than the
second-level cache as well, "loop" behind itself; "host" is the host's time of a call without a graph, "training host"
that of the forward pass of a layer that learns.  Outputs of ours are compared with the exact product of their integers
in the same run.
Run: ``PYTHONPATH=. python benchmarks/gpu_layers.py [--quick] [--out FILE]``
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from harness.gpu_results import gpu_arguments, results_file, rounded, save
from harness.gpu_timing import L2_ROUNDS, behind, replays
from harness.machine import gpu_machine
from torch import Tensor, nn

from magicube_cutlass.nn import SparseQuantLinear

LAYERS = ((4096, 4096), (14336, 4096))  # outputs and inputs
TOKENS = (1, 16, 64, 512, 4096)
DTYPES = (torch.float16, torch.bfloat16)
SPARSITY = 0.9
QUICK = (((512, 1024),), (1, 16, 100))
_HOST_CALLS, _HOST_ROUNDS = 50, 9

Layer = Callable[[Tensor], Tensor]


def fp8_layer(linear: nn.Linear) -> Layer:
    """A dense layer of e4m3 weights with scales of 1: a cast of the input and one product."""
    weight, one = linear.weight.detach().to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    bias = None if linear.bias is None else linear.bias.detach()

    def layer(x: Tensor) -> Tensor:
        rows = x.to(torch.float8_e4m3fn)
        out: Tensor = torch._scaled_mm(
            rows, weight.t(), scale_a=one, scale_b=one, bias=bias, out_dtype=x.dtype, use_fast_accum=True
        )
        return out

    return layer


def check(layer: SparseQuantLinear, x: Tensor) -> None:
    """Raise `ArithmeticError` unless the layer gives the exact product of its integers, scaled and rounded."""
    out, operand, weight = layer(x), layer._quantize(x), layer.matrix().to_dense().double()
    expected = operand.dequantize().double().mT @ weight.mT
    if layer.bias is not None:
        expected += layer.bias.double()
    worst = float(((out.double() - expected).abs() / expected.abs().clamp(min=1e-2)).max())
    limit = 2 * torch.finfo(x.dtype).eps
    if not worst <= limit:
        raise ArithmeticError(f"an output is off by {worst:.2e} of itself, at most {limit:.2e} is rounding")


def layers_of(linear: nn.Linear, x: Tensor) -> dict[str, Layer]:
    """Layers by name; those of ours were checked with `x`."""
    dynamic = SparseQuantLinear.from_linear(linear, SPARSITY).eval().freeze()
    static = SparseQuantLinear.from_linear(linear, SPARSITY, calibrate=[x]).eval().freeze()
    for layer in (dynamic, static):
        check(layer, x)
    found: dict[str, Layer] = {"linear": linear, "ours, dynamic": dynamic, "ours, static": static}
    if x.shape[0] % 16 == 0:
        found["fp8, static"] = fp8_layer(linear)
    return found


def host_time(layer: Layer, x: Tensor) -> float:
    """Microseconds of the host for a call; the GPU is not waited for."""
    seen = []
    for _ in range(_HOST_ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_HOST_CALLS):
            layer(x)
        seen.append((time.perf_counter() - start) / _HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return median(seen)


def training_hosts(out: int, inner: int, x: Tensor) -> dict[str, float]:
    """Host times of the forward pass of a layer that learns."""
    with torch.inference_mode(False), torch.enable_grad():
        linear, given = nn.Linear(inner, out, device="cuda", dtype=x.dtype), x.clone()
        layers: dict[str, Layer] = {"linear": linear, "ours, dynamic": SparseQuantLinear.from_linear(linear, SPARSITY)}
        for layer in layers.values():
            layer(given)
        return {name: rounded(host_time(layer, given)) for name, layer in layers.items()}


def run_case(out: int, inner: int, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Times of all layers of one shape."""
    torch.manual_seed(0)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    copies = 1 + int(L2_ROUNDS * l2 / (out * inner * SPARSITY / 8 + 2 * tokens * inner))  # ours is the smallest
    x = torch.randn(tokens, inner, device="cuda", dtype=dtype)
    models: list[dict[str, Layer]] = []
    xs = [x.clone() for _ in range(copies)]
    for _ in range(copies):
        models.append(layers_of(nn.Linear(inner, out, device="cuda", dtype=dtype).requires_grad_(False), x))
    calls = {name: (lambda layer=layer: layer(x)) for name, layer in models[0].items()}
    cold = {
        name: [lambda layer=each[name], own=own: layer(own) for each, own in zip(models, xs, strict=True)]
        for name in models[0]
    }
    one, after, swept = replays(calls), behind(calls), behind(cold)
    rows = {
        name: {
            "behind": rounded(after[name].median),
            "cold": rounded(swept[name].median),
            "loop": rounded(one[name].median),
            "host": rounded(host_time(models[0][name], x)),
        }
        for name in calls
    }
    hosts = training_hosts(out, inner, x)
    return {
        "shape": [out, inner, tokens], "dtype": str(dtype).removeprefix("torch."), "us": rows, "training host": hosts
    }  # fmt: skip


def main() -> None:
    args = gpu_arguments(__doc__, "one small layer, to see that it runs")
    layers, tokens = QUICK if args.quick else (LAYERS, TOKENS)
    results: dict[str, Any] = {
        "machine": gpu_machine(),
        "setting": {"sparsity": SPARSITY, "v": 8, "pair": "L8-R8", "bias": True, "frozen": True},
        "cases": [],
    }
    with torch.inference_mode():
        for out, inner in layers:
            for count in tokens:
                for dtype in DTYPES:
                    if (out, inner) != layers[0] and dtype != DTYPES[0]:
                        continue
                    case = run_case(out, inner, count, dtype)
                    results["cases"].append(case)
                    text = "  ".join(
                        f"{name} {us['behind']} ({us['cold']} cold, {us['loop']} loop, {us['host']} host)"
                        for name, us in case["us"].items()
                    )
                    print(f"  {out}x{inner}, {count} tokens, {case['dtype']}: {text}", flush=True)
                    save(results, args.out or results_file("gpu_layers"))


if __name__ == "__main__":
    main()
