"""Rates of Algorithm 1: Tables 3 and 4, Figure 7's shares of time, Figure 1's dense products."""

from __future__ import annotations

import ctypes
import math
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cute_kernels.gemm import api as dense
from magicube_cutlass.bench.timing import measure
from printed.accuracy import run

EIGEN_SOURCE = """
#include <Eigen/Dense>
#include <cstdlib>
template <typename T> void product(const T* a, const T* b, T* c, int n) {
  using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  Eigen::Map<Matrix>(c, n, n).noalias() = Eigen::Map<const Matrix>(a, n, n) * Eigen::Map<const Matrix>(b, n, n);
}
extern "C" void product_f32(const float* a, const float* b, float* c, int n) { product(a, b, c, n); }
extern "C" void product_f64(const double* a, const double* b, double* c, int n) { product(a, b, c, n); }
extern "C" void product_i32(const int* a, const int* b, int* c, int n) { product(a, b, c, n); }
"""
ROW_MAJOR, NO_TRANSPOSE, FIX_OFFSET = 101, 111, 173  # of cblas


def whole_calls(n: int, densities: tuple[float, ...], budget: float) -> dict[str, Any]:
    """Return seconds of whole calls, quantization and selection included, on uniform matrices, and their steps.

    ``mean`` at a threshold t keeps ``1 - t`` of a uniform matrix.
    """
    g = torch.Generator().manual_seed(n)
    A, B = (torch.rand(n, n, generator=g) for _ in "AB")
    options: dict[str, dict[str, Any]] = {
        f"{density:g}": {"threshold": 1 - density, "rule": "mean", "eta": 1.0, "scaling": "vector"}
        for density in densities
    }
    options |= {"Full": {"threshold": 0.0, "eta": 0.0}, "Origin": {"threshold": math.inf, "eta": 0.0}}
    reports: dict[str, Any] = {}

    def call(name: str) -> Callable[[], None]:
        def both() -> None:
            report = run(A, B, vector_length=1, **options[name])[1]
            seconds = sum(report.times.values())
            if name not in reports or seconds < reports[name]["seconds"]:
                reports[name] = {"seconds": seconds, "density": report.density, "steps": report.times}

        return both

    calls: dict[str, Callable[[], object]] = {name: call(name) for name in options}
    calls["float32"] = lambda: A @ B
    found: dict[str, float] = {}
    if n < 8192:
        found = {name: timing.best for name, timing in measure(calls, budget=budget, min_runs=2).items()}
    else:  # a product takes seconds: once each
        for name, one in calls.items():
            start = time.perf_counter()
            one()
            found[name] = time.perf_counter() - start
    return {"n": n, "seconds": found, "reports": reports}


BATCH = 10_000  # images of Table 7
LAYER_WAYS: dict[str, dict[str, Any]] = {
    "origin": {"threshold": math.inf},
    "density 0.01": {},  # a threshold that keeps about as much of both operands
    "threshold 1": {"threshold": 1.0},
    "threshold 0": {"threshold": 0.0},
}


def threshold_of_a_percent(x: Tensor, w: Tensor) -> float:
    """Return the threshold of the rule ``mean`` that keeps at most about 1% of both operands."""
    found = (torch.quantile(y.flatten()[:: y.numel() // 50_000 + 1], 0.99) / (2 * y.mean()) for y in (x.abs(), w.abs()))
    return max(map(float, found))


def layer_rates(n: int, budget: float, batch: int = BATCH) -> dict[str, Any]:
    """Return seconds of a fully connected layer's product, ``(batch, n)`` by ``(n, n)``, in float32 and paper mode.

    Activations are ``max(x, 0)`` of normal x, weights are normal; int8, one lambda per matrix, rule ``mean``, as
    ``examples/lenet_fashion_mnist.py`` has them.
    """
    g = torch.Generator().manual_seed(n)
    x, w = torch.randn(batch, n, generator=g).relu_(), torch.randn(n, n, generator=g)
    sparse = threshold_of_a_percent(x, w)
    densities: dict[str, tuple[float, float]] = {}

    def call(name: str) -> Callable[[], None]:
        options = {"threshold": sparse, **LAYER_WAYS[name], "rule": "mean", "vector_length": 1}

        def product() -> None:
            report = run(x, w, **options)[1]
            densities[name] = report.density_a, report.density_b

        return product

    calls: dict[str, Callable[[], object]] = {"float32": lambda: x @ w}
    calls |= {name: call(name) for name in LAYER_WAYS}
    found = {name: timing.best for name, timing in measure(calls, budget=budget, min_runs=2).items()}
    return {"n": n, "batch": batch, "seconds": found, "densities": densities}


def shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return Figure 7: shares of a call's time by step, of the calls of Table 4."""
    found = []
    for row in rows:
        for name, report in row["reports"].items():
            steps = report["steps"]
            parts = {
                "quant": steps["quantize"],
                "xxmm": steps["product"] + steps["correct"],
                "reduce": steps["select"],
                "package": steps["compress"] + steps["combine"],
            }
            total = sum(parts.values())
            found.append({"n": row["n"], "call": name, "shares": {part: t / total for part, t in parts.items()}})
    return found


def dense_rates(sizes: tuple[int, ...], budget: float, mkl: Path | None, eigen: Path | None) -> list[dict[str, Any]]:
    """Return Figure 1 (c): GOPS of dense products by precision and library on this CPU."""
    libraries = [_torch_calls]
    if mkl is not None:
        libraries.append(lambda a, b: _mkl_calls(a, b, ctypes.CDLL(str(mkl), mode=ctypes.RTLD_GLOBAL)))
    if eigen is not None:
        built = _build_eigen(eigen)
        libraries.append(lambda a, b: _eigen_calls(a, b, built))
    rows = []
    for n in sizes:
        g = torch.Generator().manual_seed(n)
        a, b = (torch.randint(-63, 64, (n, n), dtype=torch.int8, generator=g) for _ in "ab")
        calls: dict[str, Callable[[], object]] = {}
        for library in libraries:
            calls |= library(a, b)
        times = measure(calls, budget=budget, min_runs=2)
        rows.append({"n": n, "GOPS": {name: 2e-9 * n**3 / timing.best for name, timing in times.items()}})
    return rows


def _torch_calls(a: Tensor, b: Tensor) -> dict[str, Callable[[], object]]:
    single, double = (a.float(), b.float()), (a.double(), b.double())
    found: dict[str, Callable[[], object]] = {
        "torch float64": lambda: double[0] @ double[1],
        "torch float32": lambda: single[0] @ single[1],
        "torch int8 (oneDNN)": lambda: torch._int_mm(a, b),
        "ours int8": lambda: dense.gemm(a, b),
    }
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        del found["torch int8 (oneDNN)"]  # a scalar loop without VNNI
        layer = torch.ao.nn.quantized.dynamic.Linear(a.shape[1], a.shape[1], bias_=False)
        found["torch dynamic int8"] = lambda: layer(single[0])
    return found


def _addresses(*arrays: Any) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(array.ctypes.data) for array in arrays]


def _mkl_calls(a: Tensor, b: Tensor, library: ctypes.CDLL) -> dict[str, Callable[[], object]]:
    n = a.shape[0]
    x8, y8 = (a + 64).to(torch.uint8).numpy(), b.numpy()
    x, y, c = a.float().numpy(), b.float().numpy(), np.empty((n, n), np.float32)
    c8, offset = np.empty((n, n), np.int32), np.zeros(1, np.int32)
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    int8, single = library.cblas_gemm_s8u8s32, library.cblas_sgemm

    def product_int8() -> None:  # row-major: the left operand is unsigned
        px, py, pc, po = _addresses(x8, y8, c8, offset)
        int8(ROW_MAJOR, NO_TRANSPOSE, NO_TRANSPOSE, FIX_OFFSET, n, n, n, one, px, n, ctypes.c_int8(0), py, n,
             ctypes.c_int8(0), zero, pc, n, po)  # fmt: skip

    def product_single() -> None:
        px, py, pc = _addresses(x, y, c)
        single(ROW_MAJOR, NO_TRANSPOSE, NO_TRANSPOSE, n, n, n, one, px, n, py, n, zero, pc, n)

    product_int8()
    if not np.array_equal(c8, x8.astype(np.float64) @ y8.astype(np.float64)):
        raise ArithmeticError("MKL's int8 product is not the exact one")
    return {"MKL float32": product_single, "MKL int8": product_int8}


def _build_eigen(include: Path) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp())
    (folder / "product.cpp").write_text(EIGEN_SOURCE)
    command = ["c++", "-O3", "-march=native", "-shared", "-fPIC", f"-I{include}", "product.cpp", "-o", "product.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "product.so"))


def _eigen_calls(a: Tensor, b: Tensor, library: ctypes.CDLL) -> dict[str, Callable[[], object]]:
    def call(kind: str, dtype: type) -> Callable[[], None]:
        x: Any = a.numpy().astype(dtype)
        y: Any = b.numpy().astype(dtype)
        c: Any = np.empty(a.shape, dtype)
        product = getattr(library, f"product_{kind}")
        return lambda: product(*_addresses(x, y, c), a.shape[0])

    return {
        "Eigen float64": call("f64", np.float64),
        "Eigen float32": call("f32", np.float32),
        "Eigen int32": call("i32", np.int32),
    }
