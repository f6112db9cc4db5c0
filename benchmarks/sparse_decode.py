"""Few tokens times a half-empty weight on a GPU, behind another kernel: SpMM beside torch's fp8 and our dense e2m1.

Operands are given quantized, results are in bfloat16. Weights are cold (rotated through more than 2.25 times the L2
cache) or warm. Every product is compared with that of the decoded operands first.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness.fp8_baselines import cloned, copies_for, relative_error, timed, torch_baselines
from harness.gpu_results import gpu_arguments, results_file, save
from harness.machine import gpu_machine
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels import floats
from cute_kernels.few_rows.api import few_rows_product
from cute_kernels.few_rows.formats import FORMATS, pack_weight

SHAPES = [(14336, 4096), (4096, 14336)]  # outputs, inputs
TOKENS = (1, 16)
SPARSITIES = (0.5, 0.7, 0.9)
VECTOR_LENGTH = 8
MOST_ERROR = 4e-3  # relative: results rounded to bfloat16
INTEGERS = {"L4-R8": (4, 8), "L8-R8": (8, 8), "L4-R4": (4, 4)}
FLOATS = ("e4m3", "e2m1")  # of the weight; tokens are float16
Calls = dict[str, list[Callable[[], Any]]]


def dense_e2m1(w: Tensor, x: Tensor) -> tuple[Calls, dict[str, float]]:
    """Our few-rows product of a dense e2m1 weight (M, K) without group scales, and its error."""
    codes = floats.encode(6 * w / w.abs().amax(1, keepdim=True), "e2m1", saturate=True)  # (M, K)
    weight, rows = pack_weight(codes, FORMATS["e2m1"], "bfloat16"), x.t().contiguous().bfloat16()
    calls: list[Callable[[], Any]] = [
        partial(few_rows_product, rows, replace(weight, data=each)) for each in cloned(weight.data)
    ]
    exact = rows.float() @ floats.decode(codes, "e2m1").float().t()
    return {"dense e2m1": calls}, {"dense e2m1": relative_error(calls[0](), exact)}


def sparse(w: Tensor, x: Tensor) -> tuple[Calls, dict[str, float], dict[str, int]]:
    """SpMM of a pruned weight (M, K) and tokens (K, N) in each pair of formats: calls, errors, and bytes of A."""
    calls: Calls = {}
    errors: dict[str, float] = {}
    sizes: dict[str, int] = {}
    pairs: dict[str, tuple[mc.SRBCRS, Any, Tensor]] = {}
    for name, (bits, of_tokens) in INTEGERS.items():
        B = mc.quantize(x, bits=of_tokens)
        pairs[name] = (mc.SRBCRS.from_dense(w, vector_length=VECTOR_LENGTH, bits=bits, scale="row"), B, B.dequantize())
    for dtype in FLOATS:
        A = mc.SRBCRS.from_dense(w, vector_length=VECTOR_LENGTH, dtype=dtype, scale="row")
        pairs[f"{dtype} x float16"] = (A, x.half(), x.half().float())
    for name, (A, B, tokens) in pairs.items():
        copies = [A, *(A.clone() for _ in range(copies_for(A.nbytes) - 1))]
        calls[name] = [partial(mc.spmm, each, B, out_dtype=torch.bfloat16) for each in copies]
        errors[name] = relative_error(calls[name][0](), A.to_dense().float() @ tokens.float())
        sizes[name] = A.nbytes
    return calls, errors, sizes


def run(m: int, k: int, tokens: int, sparsity: float) -> dict[str, Any]:
    """One shape: baselines, the dense e2m1 weight and each sparse pair, weights cold and warm."""
    w, x = torch.randn(m, k, device="cuda"), torch.randn(k, tokens, device="cuda")
    pruned = w * mc.prune(w, sparsity=sparsity, vector_length=VECTOR_LENGTH)
    dense, errors = dense_e2m1(w, x)
    calls, found, sizes = sparse(pruned, x)
    errors |= found
    wrong = {name: each for name, each in errors.items() if not each < MOST_ERROR}
    if wrong:
        raise SystemExit(f"{m} x {k} x {tokens}, {sparsity}: relative errors above {MOST_ERROR}: {wrong}")
    calls = torch_baselines(tokens, m, k) | dense | calls
    cold, warm = timed(calls, True), timed(calls, False)
    fp8 = min(us for name, us in cold.items() if name.startswith("fp8"))
    print(f"{m} x {k} x {tokens}, {sparsity:.0%} zeros, cold (warm):")
    for name, us in cold.items():
        print(f"  {name} {us} us ({warm[name]}), {fp8 / us:.2f} of fp8", flush=True)
    case = {"m": m, "k": k, "tokens": tokens, "sparsity": sparsity, "vector_length": VECTOR_LENGTH}
    return case | {"cold": cold, "warm": warm, "errors": errors, "bytes": sizes}


def main() -> None:
    args = gpu_arguments(__doc__, "one shape")
    start = time.perf_counter()
    results: dict[str, Any] = {"machine": gpu_machine(), "unit": "us behind another kernel, median", "cases": []}
    gc.collect()
    gc.freeze()  # a capture collects garbage, and each would look at all of torch
    path = args.out or results_file("sparse_decode")
    torch.manual_seed(0)
    with torch.inference_mode():
        for m, k in SHAPES[:1] if args.quick else SHAPES:
            for sparsity in SPARSITIES:
                for tokens in TOKENS:
                    results["cases"].append(run(m, k, tokens, sparsity))
                    save(results, path)
    print(f"wrote {path}, {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
