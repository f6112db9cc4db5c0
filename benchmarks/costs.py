"""What is paid once for a matrix on a GPU: compressing, compiling its kernel, copying into fragment order; memory.

Writes ``benchmarks/results/costs_h200.json``, or the file that the GPU's name gives.  Run:
``PYTHONPATH=. python benchmarks/costs.py [--quick] [--out FILE]``
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from harness.gpu_data import OUT, Shape, Widths, check, chosen, make_product, one_line, uniform
from harness.gpu_results import gpu_arguments, results_file, rounded, save
from harness.gpu_timing import replays
from harness.machine import gpu_machine
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels import jit
from cute_kernels.dtypes import Integer
from cute_kernels.operands import Vectors
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import SpmmKernel
from magicube_cutlass.dispatch.dense_fallback import dense_copy

SHAPES = (Shape(4096, 4096, 512, 0.9), Shape(4096, 4096, 512, 0.7), Shape(256, 2304, 512, 0.9))
QUICK = (Shape(256, 512, 128, 0.9),)
EIGHT = Widths(8, 8)


def waited(call: Callable[[], object], rounds: int = 9) -> dict[str, float]:
    """Microseconds until the result is there, the host's work included: of the first call, and the others' median."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
        del result
    return {"first_us": rounded(times[0]), "us": rounded(median(times[1:]))}


def compressing(lhs: mc.SRBCRS) -> dict[str, Any]:
    """From a dense int8 matrix, and from a float one that is quantized; the first is compared with ``lhs``."""
    ints = lhs.to_dense(dequantize=False)
    again = mc.SRBCRS.from_dense(ints, vector_length=lhs.vector_length, bits=8)
    dense = lhs.to_dense(dequantize=False)
    if not torch.equal(again.to_dense(dequantize=False), dense):
        raise ArithmeticError("the compressed matrix is not the one that was compressed")
    floats = ints.to(OUT)
    return {
        "from dense int8": waited(lambda: mc.SRBCRS.from_dense(ints, vector_length=lhs.vector_length, bits=8)),
        "from dense float16, quantized": waited(
            lambda: mc.SRBCRS.from_dense(floats, vector_length=lhs.vector_length, bits=8)
        ),
    }


def compiling(config: SpmmKernel) -> dict[str, float]:
    """Seconds for a kernel that no cache has, and for one that the disk has; neither is launched."""
    unit, before = config.translation_unit(jit.current_arch()), os.environ.get("MAGICUBE_CACHE")
    times = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MAGICUBE_CACHE"] = folder
        try:
            for _ in range(2):
                start = time.perf_counter()
                jit.build(unit)
                times.append(time.perf_counter() - start)
        finally:
            if before is None:
                del os.environ["MAGICUBE_CACHE"]
            else:
                os.environ["MAGICUBE_CACHE"] = before
    return {"compile_s": rounded(times[0]), "from_disk_s": rounded(times[1])}


def copying(lhs: mc.SRBCRS, config: SpmmKernel) -> dict[str, Any]:
    """The execution copy of a kernel: time and bytes."""
    pattern = lhs.pattern
    assert lhs.bits is not None
    vectors = Vectors(pattern.row_offsets, pattern.col_indices, lhs.vectors(), Integer(lhs.bits, lhs.signed))
    copy: Callable[[], tuple[Tensor, ...]] = partial(config.pack, vectors, lhs.shape[1])
    return {"kernel": config.name, **waited(copy), "bytes": sum(tensor.nbytes for tensor in copy())}


def memory(lhs: mc.SRBCRS) -> dict[str, int]:
    """Bytes of the formats; CSR: int32 indices and an int8 value an element."""
    m, k = lhs.shape
    return {"SR-BCRS": lhs.nbytes, "CSR int8": 5 * lhs.nnz + 4 * (m + 1), "dense int8": m * k, "dense fp16": 2 * m * k}


def dense_copying(lhs: mc.SRBCRS) -> dict[str, Any]:
    """The copy of ``allow_dense``."""

    def make() -> Tensor:
        lhs._execution.pop("dense", None)
        return dense_copy(lhs)

    found = {**waited(make), "bytes": dense_copy(lhs).untyped_storage().nbytes()}
    del lhs._execution["dense"]
    return found


def run_shape(shape: Shape) -> dict[str, Any]:
    """All costs of one matrix, V = 8, L8-R8; beside them, what one product takes."""
    pattern = uniform(shape, 8)
    product = make_product(pattern, shape.n, EIGHT)
    config = chosen(pattern, shape.n, EIGHT)
    gather = GatherConfig(config.atom, 8, config.a, config.b, config.out)
    case: dict[str, Any] = {"shape": [shape.m, shape.k, shape.n], "sparsity": shape.sparsity}
    steps: dict[str, Callable[[], Any]] = {
        "compile": lambda: compiling(config),
        "compress": lambda: compressing(product.lhs),
        "copies": lambda: [copying(product.lhs, each) for each in dict.fromkeys((config, gather))],
        "dense_copy": lambda: dense_copying(product.lhs),
        "memory": lambda: memory(product.lhs),
        "product_us": lambda: product_time(shape),
    }
    for name, step in steps.items():
        try:
            case[name] = step()
        except Exception as error:  # a failure of ours is a result too
            case[name] = {"failure": one_line(error)}
        print(f"  {name}: {case[name]}", flush=True)
    return case


def product_time(shape: Shape) -> float:
    product = make_product(uniform(shape, 8), shape.n, EIGHT)
    out = product.poisoned()
    mc.spmm(product.lhs, product.rhs, out=out)
    check(product, out)
    call = partial(mc.spmm, product.lhs, product.rhs, out=out)
    return rounded(replays({"ours": call})["ours"].median)


def main() -> None:
    args = gpu_arguments(__doc__, "one small matrix, to see that it runs")
    start = time.perf_counter()
    results: dict[str, Any] = {
        "machine": gpu_machine(),
        "setting": {"v": 8, "pair": str(EIGHT), "us": "median until the result is there, the host's work included"},
        "cases": [],
    }
    for shape in QUICK if args.quick else SHAPES:
        print(shape)
        results["cases"].append(run_shape(shape))
        save(results, args.out or results_file("costs"))
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
