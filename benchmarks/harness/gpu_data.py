"""Random products on the GPU for the benchmarks: operands, the exact result, the chosen kernel, compiling ahead."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels import jit
from cute_kernels.dtypes import ElementType, Integer
from cute_kernels.integers import int_range
from cute_kernels.jit import Unit
from cute_kernels.jit.warmup import Source
from cute_kernels.machine import MMA_COLUMNS, ProblemTypes
from cute_kernels.spmm.heuristics import SpmmKernel, choose_spmm
from magicube_cutlass.dispatch.machine import get_machine
from magicube_cutlass.dispatch.plan import problem, size_bucket

OUT = torch.float16
OUT_NAME = "float16"


@dataclass(frozen=True)
class Shape:
    """C = A B with A (M, K), B (K, N); ``sparsity`` is the share of A's vectors that are zero."""

    m: int
    k: int
    n: int
    sparsity: float

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n} {self.sparsity:g}"


@dataclass(frozen=True)
class Widths:
    """Bits and signs of the two operands."""

    left: int
    right: int
    left_signed: bool = True

    def __str__(self) -> str:
        return f"L{self.left}{'' if self.left_signed else 'u'}-R{self.right}"


@dataclass(frozen=True)
class Product:
    """``expected``: float16 (M, N), the exact integers rounded once to float32, scaled there, rounded to float16."""

    lhs: mc.SRBCRS
    rhs: mc.QuantTensor
    expected: Tensor

    def poisoned(self) -> Tensor:
        """An output that no product leaves as it is."""
        return torch.full_like(self.expected, torch.nan)

    @property
    def operations(self) -> int:
        """Multiplications and additions of the stored elements."""
        return 2 * self.lhs.nnz * self.rhs.shape[-1]

    def moved_bytes(self) -> int:
        """Bytes of the kernel's copy of A, of B and of C: what one launch has to touch at least once."""
        copies = [value for value in self.lhs._execution.values() if isinstance(value, list)]
        tensors = [*(copies[0] if copies else []), self.rhs.data, self.expected]
        return sum(tensor.nbytes for tensor in tensors)


def random_ints(shape: tuple[int, ...], bits: int, signed: bool, seed: int) -> Tensor:
    """Uniform integers of the whole range, int32, on the GPU; a generator of its own, so that graphs do not matter."""
    low, high = int_range(bits, signed)
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, device="cuda", dtype=torch.int32)


@lru_cache
def uniform(shape: Shape, vector_length: int) -> mc.Pattern:
    """The random pattern of a shape, on the CPU."""
    return mc.random_pattern(shape.m, shape.k, shape.sparsity, vector_length, "uniform", seed=shape.m + shape.k)


def make_product(pattern: mc.Pattern, n: int, widths: Widths, ints: tuple[int, int] | None = None) -> Product:
    """Random operands with scales: one of A, one per column of B; results are of the order of 1.

    ``ints``: widths of the random integers where they are to be narrower than the operands.
    """
    left_bits, right_bits = ints or (widths.left, widths.right)
    pattern = pattern.to("cuda")
    vectors = random_ints((pattern.vectors, pattern.vector_length), left_bits, widths.left_signed, 1)
    dense = random_ints((pattern.shape[1], n), right_bits, True, 2)
    sums = max(pattern.vectors / max(pattern.vector_rows, 1), 1.0) ** 0.5
    left = (1 / vectors.double().square().mean().sqrt()).float()
    columns = torch.linspace(0.5, 1.5, n, device="cuda", dtype=torch.float64)[None]
    right = (columns / (dense.double().square().mean().sqrt() * sums)).float()
    lhs = mc.SRBCRS.from_pattern(pattern, vectors, bits=widths.left, signed=widths.left_signed, scale=left)
    rhs = mc.QuantTensor.from_ints(dense, bits=widths.right, scale=right)
    # float64 holds the integers exactly: 2^15 * 2^15 * K stays below 2^53
    exact = lhs.to_dense(dequantize=False).double() @ dense.double()  # (M, N)
    return Product(lhs, rhs, (exact.float() * left * right).to(OUT))


def narrowed(product: Product, n: int) -> Product:
    """The product of the same A and the first ``n`` columns of B; what was derived of A is shared."""
    scale = product.rhs.scale
    assert scale is not None
    ints = product.rhs.ints()[:, :n].contiguous()
    rhs = mc.QuantTensor.from_ints(ints, bits=product.rhs.bits, scale=scale[:, :n].contiguous())
    return Product(product.lhs, rhs, product.expected[:, :n].contiguous())


def check(product: Product, out: Tensor) -> None:
    """Raise ``ArithmeticError`` unless ``out`` equals the expected result in every element."""
    wrong = out != product.expected
    if bool(wrong.any()):
        row, column = (int(x) for x in wrong.nonzero()[0])
        raise ArithmeticError(
            f"{int(wrong.sum())} of {out.numel()} elements are wrong, first ({row}, {column}): "
            f"{float(out[row, column])}, expected {float(product.expected[row, column])}"
        )


def ran(lhs: mc.SRBCRS) -> str:
    """Name of the kernel that the one product with ``lhs`` used."""
    plans = [value[0] for value in lhs._execution.values() if isinstance(value, tuple)]
    return ", ".join(plans)


def chosen(pattern: mc.Pattern, n: int, widths: Widths, vector_length: int | None = None) -> SpmmKernel:
    """The config that ``mc.spmm`` takes for float16 output, or the best one for vectors of this length."""
    return chosen_for(pattern, n, Integer(widths.left, widths.left_signed), Integer(widths.right, True), vector_length)


def chosen_for(
    pattern: mc.Pattern, n: int, left: ElementType, right: ElementType, vector_length: int | None = None
) -> SpmmKernel:
    """As :func:`chosen`, for operands of any kind."""
    length = vector_length or max(pattern.vector_length, MMA_COLUMNS)
    sizes = problem(pattern, length, size_bucket(n), 1)
    here = get_machine(torch.cuda.current_device())
    return choose_spmm(ProblemTypes(length, left, right, OUT_NAME), here, sizes)


def one_line(error: BaseException) -> str:
    """An exception for a results file: what it says first, and of a compiler's log the first error; no folders."""
    text = str(error)
    found = re.search(r"^.*\berror\b.*$", text, re.MULTILINE)
    message = " ".join((found[0] if found else text).split())
    return f"{type(error).__name__}: {re.sub(r'(?:/[^/ ]+)+/', '', message)[:300]}"


def _build(unit: Unit) -> str | None:
    try:
        jit.build(unit)
    except Exception as error:  # compile_ahead prints it
        return one_line(error)
    return None


def compile_ahead(configs: Iterable[Source]) -> dict[Source, str]:
    """Compile all kernels into the cache, one process per core; return the error text of those that failed."""
    start = time.perf_counter()
    arch = jit.current_arch()
    unique = list(dict.fromkeys(configs))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(unique), os.cpu_count() or 1), mp_context=context) as pool:
        errors = list(pool.map(_build, [config.translation_unit(arch) for config in unique]))
    failed = {config: error for config, error in zip(unique, errors, strict=True) if error}
    print(f"kernels compiled in {time.perf_counter() - start:.1f} s, {len(failed)} failed", flush=True)
    return failed
