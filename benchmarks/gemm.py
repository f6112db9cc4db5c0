"""The dense integer product and its digits on a GPU against torch's dense products, all in one run.

Writes ``benchmarks/results/gemm_h200.json``, or the file that the GPU's name gives.  Times are microseconds a launch.
Run: ``PYTHONPATH=. python benchmarks/gemm.py [--quick] [--out FILE]``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness.gpu_data import compile_ahead, one_line
from harness.gpu_results import gpu_arguments, write_results
from harness.gpu_timing import Call, GpuTiming, measure
from harness.machine import gpu_machine
from torch import Tensor

from cute_kernels.convert.digits import Digits, columns_config, digits, rows_config
from cute_kernels.convert.pack import PackConfig
from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.gemm.api import explain_gemm, gemm
from cute_kernels.gemm.config import select_products
from cute_kernels.gemm.heuristics import choose
from cute_kernels.jit import current_arch
from cute_kernels.jit.warmup import Source

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (4096, 4096, 512),
    (2048, 2048, 2048),
    (1024, 1024, 1024),
    (3000, 3001, 2999),
    (64, 4096, 4096),
    (64, 4096, 14336),
    (256, 4096, 14336),
)  # (M, K, N)
QUICK = ((256, 512, 384),)
PLANES = {1: 1, 3: 2, 4: 2, 6: 3}  # terms -> digit planes of each operand
OUTS = {1: torch.float16, 3: torch.float16, 4: torch.float32, 6: torch.float32}
SIZES = (4096, 8192)


class Baseline(NamedTuple):
    """``error``: of the result, relative to the exact product of the real matrices, in the Frobenius norm."""

    call: Call
    error: float
    check: str
    kernel: str = ""


class Problem(NamedTuple):
    """Real matrices, normal, their product in float64, and three digits of each."""

    x: Tensor  # (M, K)
    y: Tensor  # (K, N)
    truth: Tensor  # (M, N)
    a: Digits
    b: Digits


def make_problem(m: int, k: int, n: int) -> Problem:
    generator = torch.Generator("cuda").manual_seed(m + k + n)
    x, y = (torch.randn(shape, generator=generator, device="cuda") for shape in ((m, k), (k, n)))
    a, b = digits(x, count=3, axis=1), digits(y, count=3, axis=0, transpose=True)
    return Problem(x, y, x.double() @ y.double(), a, b)


def error_of(got: Tensor, problem: Problem) -> float:
    return float((got.double() - problem.truth).norm() / problem.truth.norm())


def check_sums(got: Tensor, problem: Problem, terms: int) -> str:
    """Raise ``ArithmeticError`` unless ``got`` is the weighted sum of the digits' products, to a rounding."""
    a, b = problem.a, problem.b
    products = select_products(PLANES[terms], PLANES[terms], terms)
    exact = torch.zeros_like(problem.truth)
    for level in range(products.levels):
        for i, j in products.pairs(level):
            exact += (a.planes[i].double() @ b.planes[j].double()) * 2.0 ** (-8 * level)
    exact *= a.scale.double()[:, None] * b.scale.double()
    bound = torch.finfo(got.dtype).eps * exact.abs() + 2.0**-21 * exact.abs().max()
    wrong = ~((got.double() - exact).abs() <= bound)
    if bool(wrong.any()):
        raise ArithmeticError(f"{int(wrong.sum())} of {got.numel()} elements are wrong")
    return "each element within a rounding of the exact sum"


def ours(problem: Problem, terms: int, right: Callable[[Tensor], Tensor] = lambda plane: plane) -> Baseline:
    """The product of digits that are there; ``right`` lays out the planes of b."""
    count = PLANES[terms]
    a, b = problem.a.planes[:count], tuple(right(plane) for plane in problem.b.planes[:count])
    scales: dict[str, Any] = {"scale_a": problem.a.scale, "scale_b": problem.b.scale}
    out = torch.full(problem.truth.shape, torch.nan, dtype=OUTS[terms], device="cuda")
    call = partial(gemm, a, b, terms=terms, out=out, out_dtype=out.dtype, **scales)
    call()
    check = check_sums(out, problem, terms)
    return Baseline(call, error_of(out, problem), check, explain_gemm(a, b, terms=terms, out_dtype=out.dtype).kernel)


def whole(problem: Problem, terms: int) -> Baseline:
    """From the real matrices: digits of both, and the product."""
    out = torch.full(problem.truth.shape, torch.nan, dtype=OUTS[terms], device="cuda")

    def call() -> Tensor:
        a = digits(problem.x, count=PLANES[terms], axis=1)
        b = digits(problem.y, count=PLANES[terms], axis=0, transpose=True)
        options: dict[str, Any] = {"scale_a": a.scale, "scale_b": b.scale, "out": out, "out_dtype": out.dtype}
        return gemm(a.planes, b.planes, terms=terms, **options)

    call()
    return Baseline(call, error_of(out, problem), "error against float64")


def exact_int32(problem: Problem, backend: str | None = None) -> Baseline:
    a, b = problem.a.planes[0], problem.b.planes[0]
    out = torch.empty(problem.truth.shape, dtype=torch.int32, device="cuda")
    return _int32(partial(gemm, a, b, out=out, backend=backend), problem)


def _int32(call: Callable[[], Tensor], problem: Problem) -> Baseline:
    got = call()
    exact = problem.a.planes[0].double() @ problem.b.planes[0].double()
    if not torch.equal(got.double(), exact):
        raise ArithmeticError("integers differ")
    scaled = exact * problem.a.scale.double()[:, None] * problem.b.scale.double()
    return Baseline(call, error_of(scaled, problem), "equal in every element")


def torch_product(problem: Problem, dtype: torch.dtype, tf32: bool = False) -> Baseline:
    x, y = problem.x.to(dtype), problem.y.to(dtype)

    def call() -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        return x @ y

    return Baseline(call, error_of(call(), problem), "error against float64")


def torch_fp8(problem: Problem) -> Baseline:
    x, y = problem.x.to(torch.float8_e4m3fn), problem.y.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    call = partial(torch._scaled_mm, x, y, scale_a=one, scale_b=one, out_dtype=torch.float16, use_fast_accum=True)
    return Baseline(call, error_of(call(), problem), "error against float64")


def torch_int8(problem: Problem) -> Baseline:
    a, b = problem.a.planes[0].contiguous(), problem.b.planes[0].t().contiguous().t()
    return _int32(partial(torch._int_mm, a, b), problem)


def baselines(problem: Problem, cutlass: bool) -> dict[str, Callable[[], Baseline]]:
    counts = {terms: "1 product" if terms == 1 else f"{terms} products" for terms in PLANES}
    products: dict[str, Callable[[], Baseline]] = {
        name: partial(ours, problem, terms) for terms, name in counts.items()
    }
    if cutlass:
        products["CUTLASS, int32"] = partial(exact_int32, problem, "cutlass")
    return products | {
        "1 product, int32": partial(exact_int32, problem),
        "1 product, b row by row": partial(ours, problem, 1, lambda plane: plane.contiguous()),
        "3 products from float32": partial(whole, problem, 3),
        "torch fp16": partial(torch_product, problem, torch.float16),
        "torch bf16": partial(torch_product, problem, torch.bfloat16),
        "torch tf32": partial(torch_product, problem, torch.float32, True),
        "torch fp32": partial(torch_product, problem, torch.float32),
        "torch fp8": partial(torch_fp8, problem),
        "torch int8, b column by column": partial(torch_int8, problem),
    }


def row(name: str, baseline: Baseline, timing: GpuTiming, operations: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": name,
        "us": timing.median,
        "behind_us": timing.behind,
        "quartiles": timing.quartiles,
        "cold_us": timing.cold,
        "launch_us": timing.launch,
        "enqueue_us": timing.enqueue,
        "mode": timing.mode,
        "tops": operations / timing.median / 1e6,
        "error": baseline.error,
        "check": baseline.check,
    }
    return found | ({"kernel": baseline.kernel} if baseline.kernel else {})


def run_shape(m: int, k: int, n: int, cutlass: bool) -> dict[str, Any]:
    """All of ours and torch's products of one shape, timed in the same rounds; ``tops`` counts 2 M N K, once."""
    problem = make_problem(m, k, n)
    made: dict[str, Baseline] = {}
    rows: list[dict[str, Any]] = []
    for name, make in baselines(problem, cutlass).items():
        try:
            made[name] = make()
            torch.cuda.synchronize()
        except Exception as error:  # whatever a baseline raises is a result of the benchmark
            rows.append({"name": name, "failure": one_line(error)})
    times = measure({name: baseline.call for name, baseline in made.items()}, rounds=15, samples=9)
    rows = [row(name, baseline, times[name], 2 * m * n * k) for name, baseline in made.items()] + rows
    print(f"\n{m} x {k} x {n}")
    for each in rows:
        if "failure" in each:
            print(f"  {each['name']:32} failed: {each['failure'][:100]}")
        else:
            print(
                f"  {each['name']:32} {each['us']:9.1f} us {each['behind_us']:9.1f} behind {each['tops']:7.0f} Tops  "
                f"error {each['error']:.1e}",
                flush=True,
            )
    return {"shape": [m, k, n], "products": rows}


def check_digits(x: Tensor, found: Digits, axis: int) -> str:
    """Raise ``ArithmeticError`` unless the digits' value is within a step of the last digit of ``x``."""
    value = sum(
        (p.double() * 2.0 ** (-8 * i) for i, p in enumerate(found.planes)), torch.zeros_like(x, dtype=torch.float64)
    )
    steps = (value - x.double() / found.scale.double().unsqueeze(axis)).abs().max() * 2.0 ** (8 * len(found.planes) - 8)
    if not float(steps) <= 1 + 2**-7:
        raise ArithmeticError(f"digits are {float(steps)} steps off")
    return f"at most {float(steps):.2f} steps of the last digit off"


def run_digits(size: int) -> dict[str, Any]:
    """Rates of the digit kernels, bytes read and written counted once, beside a copy."""
    calls: dict[str, Call] = {}
    facts: dict[str, dict[str, Any]] = {}
    source = torch.randn(size, size, device="cuda")
    target = torch.empty_like(source)
    calls["copy"] = partial(target.copy_, source)
    facts["copy"] = {"bytes": 2 * source.nbytes, "check": ""}
    for dtype in (torch.float32, torch.float16):
        x = source.to(dtype)
        for count in (1, 2, 3):
            for axis, transpose in ((1, False), (0, True)):
                name = f"{REAL_DTYPES[dtype]}, {count} digit{'s' * (count > 1)}, {'columns' if transpose else 'rows'}"
                calls[name] = partial(digits, x, count=count, axis=axis, transpose=transpose)
                check = check_digits(x, digits(x, count=count, axis=axis, transpose=transpose), axis)
                facts[name] = {"bytes": x.nbytes + count * x.numel(), "check": check}
    times = measure(calls, rounds=15, samples=9)
    rows = [
        {"name": name, "us": times[name].median, "TB/s": facts[name]["bytes"] / times[name].median / 1e6, **facts[name]}
        for name in calls
    ]
    print(f"\ndigits of {size} x {size}")
    for each in rows:
        print(f"  {each['name']:32} {each['us']:9.1f} us {each['TB/s']:6.2f} TB/s", flush=True)
    return {"size": size, "kernels": rows}


def configs(shapes: tuple[tuple[int, int, int], ...]) -> list[Source]:
    """Every kernel that the run will use."""
    arch = current_arch()
    found: list[Source] = [PackConfig("pack_transposed"), PackConfig("pack_strided")]
    for count in (1, 2, 3):
        for source, size in product(("float32", "float16"), (4096, 8192)):
            found += [rows_config(source, count, size), columns_config(source, count, arch, size)]
    for m, k, n in shapes:
        chosen = [choose(m, n, k, select_products(1, 1, 1), arch)]
        for terms, planes in PLANES.items():
            out = str(OUTS[terms]).removeprefix("torch.")
            chosen.append(choose(m, n, k, select_products(planes, planes, terms), arch, out=out))
        found += [config if n % 32 else config.side_by_side for config in chosen]
    return found


def main() -> None:
    cutlass = {"action": "store_true", "help": "time CUTLASS's own int8 kernel too; compile it for a minute"}
    args = gpu_arguments(__doc__, "one small shape, to see that it runs", cutlass=cutlass)
    shapes = QUICK if args.quick else SHAPES
    start = time.perf_counter()
    compile_ahead(configs(shapes))
    results: dict[str, Any] = {
        "machine": gpu_machine(),
        "setting": {
            "data": "normal; a scale per row of a, a column of b; output float16 for 1 and 3 products, else float32",
            "us": "median over rounds of the mean launch in a CUDA graph",
            "behind_us": "the same behind an elementwise kernel, whose own time is taken off",
            "error": "relative to the float64 product of the float32 matrices, Frobenius norm",
        },
        "products": [],
        "digits": [],
    }
    for shape in shapes:
        results["products"].append(run_shape(*shape, args.cutlass))
        torch.cuda.empty_cache()
    for size in (512,) if args.quick else SIZES:
        results["digits"].append(run_digits(size))
    write_results(results, args.out, "gemm", start)


if __name__ == "__main__":
    main()
