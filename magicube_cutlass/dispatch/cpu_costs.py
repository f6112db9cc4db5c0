"""Costs of products on this CPU, measured once per processor, build, engine path and dense product.

The sparse product takes a time per call, per group of 4 vectors of 8 rows and 64 columns, per result or staged byte of
B, and per conversion of a result to 16 bits. The dense one takes a time per call, per product of two bytes, per element
of an operand and per result. A row-major B is turned for it, or packed in the call, where rows of A are staged in place
of columns of B: both are measured. Layers, whose input the call quantizes, have kernels for few tokens: for each number
of them in `CLASSES` a layer takes a time per call, per stored element, per output and per input feature.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cute_kernels.cpu import engine, extension, linear
from cute_kernels.cpu.dense import TurnedCall, multiply, pack_right
from cute_kernels.gemm.cpu import dense_backend, packs_weights
from magicube_cutlass.dispatch import measured
from magicube_cutlass.formats.generate import random_pattern
from magicube_cutlass.formats.srbcrs import SRBCRS

log = logging.getLogger("magicube")

_ROOM = "cpu"
HALF = 0.65  # time of half a panel of 64 columns over that of a whole one
_BUDGET = 0.15  # seconds; two rounds are always made
Costs = tuple[float, ...]
_Product = tuple[Costs, Callable[[], object]]  # terms, and the call that takes them
# M, K, N, the share of zeros of A and the output: each term of the models is the largest one of some product.
_SPARSE = (
    (16, 64, 64, 0.0, torch.int32),
    (256, 256, 64, 0.0, torch.int32),
    (512, 512, 128, 0.9, torch.int32),
    (1024, 1024, 128, 0.99, torch.int32),
    (512, 64, 64, 0.95, torch.float16),
)
CLASSES = (1, 2, 4, 8, 16, 32, 64)  # tokens of a layer; others take the time of the next class, or of several
STRIP = 16  # columns of B that the sparse kernel multiplies at once beyond the last class; 32 of them with AVX-512
FEW = 16  # tokens, or columns of B, up to which kernels keep the sums in registers
# M, K, zeros
_LAYERS = ((64, 64, 0.5), (512, 512, 0.9), (512, 512, 0.5), (2048, 64, 0.5), (64, 2048, 0.5), (1024, 1024, 0.5))
_DENSE = ((16, 64, 64), (128, 128, 128), (384, 384, 384), (1024, 512, 64), (512, 32, 512))
_TURNED = ((64, 64), (64, 512), (512, 256))  # K, N


@dataclass(frozen=True)
class CpuCosts:
    """Nanoseconds of the terms on one thread; the defaults are those of a Xeon with AVX512-VNNI."""

    sparse: Costs = (5000.0, 13.3, 0.3, 0.1)  # call; group; result or staged byte; conversion to 16 bits
    # call; product; element of an operand; result; and what a float result takes beside an integer one: call, result
    dense: Costs = (10000.0, 4e-3, 0.0, 1.5, 10000.0, 1.5)
    # of each class: call, stored element, output, input feature of a sparse layer; the same of a dense one
    layers: tuple[Costs, ...] = tuple(2 * (5000.0, 5e-3 * n, 0.3 * n, 0.3 * n) for n in CLASSES)
    # where B is packed in the call: call; product; byte of B, of A; result; and beside: call, result of floats
    packed: Costs = (20000.0, 4e-3, 0.2, 0.0, 1.5, 10000.0, 1.5)
    turned: Costs = (3000.0, 0.8)  # the transpose of B: call, byte

    def layer(self, m: int, k: int, stored: float, tokens: int, threads: int) -> tuple[float, float]:
        """Return the predicted nanoseconds of a layer of `stored` elements, and of a dense one."""
        place = next((i for i, most in enumerate(CLASSES) if tokens <= most), len(CLASSES) - 1)
        costs, size = self.layers[place], CLASSES[place]
        whole = 1.0 if tokens <= size else -(-tokens // STRIP) * STRIP / size  # strips count past the last class
        share = tokens / size
        call, element, *ends = costs[:4]
        # Weights are measured in L2. From memory one sums no faster than it reads, and the sparse one has masks too.
        sparse = predict((call, max(element, costs[5]), *ends), (1.0, stored * whole, m * whole, k * whole), threads)
        return sparse, predict(costs[4:], (1.0, m * k * share, m * share, k * share), threads)


@dataclass(frozen=True)
class Processor:
    """A CPU as forecasts read it."""

    costs: CpuCosts
    threads: int
    packs_layers: bool  # whether layers of few tokens have kernels of their own
    panel_columns: int  # columns of B that the engine multiplies at once

    @classmethod
    def here(cls) -> Processor:
        """Return this CPU with torch's threads, measured once."""
        return cls(get_costs(), torch.get_num_threads(), packs_weights(), panel_columns())


def panel_columns() -> int:
    """Return the columns of B that the engine multiplies at once."""
    return int(extension.load_extension().panel_columns())


def sparse_terms(
    m: int,
    k: int,
    n: int,
    vectors: int,
    vector_length: int,
    digits: int,
    batch: int,
    out_bits: int,
    columns: int | None = None,
) -> Costs:
    """Return the terms of the engine's product; `digits`: of A times those of B; `columns`: of a panel."""
    columns = columns or panel_columns()
    whole, rest = divmod(n, columns)
    panels = whole + (rest > 0) * (HALF if columns == 64 and rest <= 32 else 1.0)
    width, results = panels * columns * batch, m * n * batch
    group = max(vector_length, 4) / 8 * digits
    return 1.0, width / 64 * vectors / 4 * group, results + width * k, results * float(out_bits == 16)


def dense_terms(m: int, k: int, n: int, batch: int, is_integer: bool) -> Costs:
    """Return the terms of the dense product."""
    sizes = float(batch), float(batch * m * k * n), float(batch * (m + n) * k), float(batch * m * n)
    return *sizes, *((0.0, 0.0) if is_integer else (sizes[0], sizes[3]))


def packed_terms(m: int, k: int, n: int, is_integer: bool) -> Costs:
    """Return the terms of the dense product that packs B in the call."""
    sizes = 1.0, float(m * k * n), float(k * n), float(m * k), float(m * n)
    return *sizes, *((0.0, 0.0) if is_integer else (1.0, sizes[4]))


def predict(costs: Costs, terms: Costs, threads: int) -> float:
    """Return the predicted nanoseconds; threads share all but the time per call."""
    call, *work = (cost * term for cost, term in zip(costs, terms, strict=True))
    return call + sum(work) / threads


def fit_costs(terms: Sequence[Costs], times: Sequence[float]) -> Costs:
    """Return the costs, at least 0, with the least sum of squared relative errors."""
    rows = np.array(terms) / np.array(times)[:, None]  # (products, terms)
    used = list(range(rows.shape[1]))
    while True:
        found = np.linalg.lstsq(rows[:, used], np.ones(len(rows)), rcond=None)[0]
        if min(found) >= 0 or len(used) == 1:
            break
        del used[int(found.argmin())]
    costs = np.zeros(rows.shape[1])
    costs[used] = np.maximum(found, 0.0)
    return tuple(costs.tolist())


def processor() -> str:
    """Return the name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _normal(rows: int, columns: int) -> Tensor:
    """Return normal numbers within 3.7, the same each time: the time of a dense product on AVX2 depends on its rows."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(rows, columns, generator=generator, device="cpu").clamp_(-3.7, 3.7)


def _integers(rows: int, columns: int) -> Tensor:
    """Return int8 rows, the same each time: normal, but each fourth uniform, which takes 1.4 times as long on AVX2."""
    generator = torch.Generator("cpu").manual_seed(0)
    found = _normal(rows, columns).mul_(34).to(torch.int8)
    found[3::4] = torch.randint(-128, 128, found[3::4].shape, generator=generator, device="cpu", dtype=torch.int8)
    return found


def _sparse_products() -> Iterator[tuple[Costs, Callable[[], object]]]:
    """Terms and calls of the engine."""
    from magicube_cutlass.dispatch.cpu import pack_operand

    for m, k, n, zeros, out_dtype in _SPARSE:
        pattern = random_pattern(m, k, zeros, 8, seed=0)
        matrix = SRBCRS.from_pattern(pattern, torch.ones(pattern.vectors, 8, dtype=torch.int8, device="cpu"), bits=8)
        start, end, columns, planes, sums = pack_operand(matrix)
        a = engine.SparseOperand(start, end, columns, planes, sums, m, k, 8, True)
        b = torch.ones(k, n, dtype=torch.int8, device="cpu")
        operand = engine.DenseOperand(b, 8, True, -2, -1)
        scale = None if out_dtype == torch.int32 else torch.ones(m, device="cpu")
        call = engine.SpmmCall(a, operand, torch.Size((m, n)), out_dtype, scale, None)
        terms = sparse_terms(m, k, n, pattern.vectors, 8, 1, 1, out_dtype.itemsize * 8)
        yield terms, partial(call, b, None, None, None)


def _dense_products() -> Iterator[_Product]:
    """Terms and calls of the dense product, with integer and with scaled float results."""
    from cute_kernels.gemm.api import gemm

    by_engine = packs_weights()
    for m, k, n in _DENSE:
        a, b = torch.ones(m, k, dtype=torch.int8, device="cpu"), _integers(n, k).t()
        right = pack_right(a.t()) if by_engine else None  # the matrix is packed once
        for out_dtype, scale in ((torch.int32, None), (torch.float32, torch.ones(m, device="cpu"))):
            out = torch.empty(m, n, dtype=out_dtype, device="cpu")
            run: Callable[[], object] = partial(gemm, a, b, scale_a=scale, out=out, out_dtype=out_dtype)
            if right is not None:
                run = partial(TurnedCall(right, n, k, out_dtype), b.t(), None, scale, None)
            yield dense_terms(m, k, n, 1, scale is None), run


def _packed_products() -> Iterator[_Product]:
    """Terms and calls of the dense product that packs B."""
    for m, k, n in _DENSE:
        a, b = _integers(m, k), _integers(k, n)
        for out_dtype, scale in ((torch.int32, None), (torch.float32, torch.ones(m, device="cpu"))):
            out = torch.empty(m, n, dtype=out_dtype, device="cpu")
            yield packed_terms(m, k, n, scale is None), partial(_packed_product, a, b, scale, out)


def _packed_product(a: Tensor, b: Tensor, scale: Tensor | None, out: Tensor) -> None:
    multiply(a, pack_right(b), row_scale=scale, out_dtype=out.dtype, out=out)


def _turned_operands() -> Iterator[_Product]:
    """Terms and calls of a transpose."""
    for shape in _TURNED:
        x = torch.ones(shape, dtype=torch.int8, device="cpu")
        yield (1.0, float(x.numel())), x.t().contiguous


def _layer_products() -> Iterator[tuple[_Product, _Product]]:
    """Sparse and dense layers: all of a class before the next."""
    from magicube_cutlass.dispatch.cpu import pack_operand

    weights = []
    for m, k, zeros in _LAYERS:
        pattern = random_pattern(m, k, zeros, 8, seed=0)
        matrix = SRBCRS.from_pattern(pattern, torch.ones(pattern.vectors, 8, dtype=torch.int8, device="cpu"), bits=8)
        start, end, columns, planes, sums = pack_operand(matrix)
        operand = engine.SparseOperand(start, end, columns, planes, sums, m, k, 8, True)
        weights.append(
            (operand, pack_right(torch.ones(m, k, dtype=torch.int8, device="cpu").t()), float(pattern.vectors * 8))
        )
    for tokens in CLASSES:
        for operand, right, stored in weights:
            sparse = linear.pack_left(operand, tokens)
            (m, k), x = sparse.shape, _normal(tokens, sparse.shape[1])
            runs = [
                partial(linear.LinearCall(weight, tokens, k, 8, torch.float32), x, None, None, None)
                for weight in (sparse, right)
            ]
            terms = (1.0, stored, float(m), float(k)), (1.0, float(m * k), float(m), float(k))
            yield (terms[0], runs[0]), (terms[1], runs[1])


def _shortest_times(products: Sequence[Callable[[], object]]) -> list[float]:
    """Return the shortest nanoseconds of each on one thread, in rounds, without the time that other processes take."""
    start, times, rounds = time.perf_counter(), [float("inf")] * len(products), 0
    while rounds < 2 or time.perf_counter() - start < _BUDGET:
        for i, run in enumerate(products):
            run()  # the caches hold the operands of another product
            begin, started = time.thread_time(), time.perf_counter()
            run()
            taken = time.thread_time() - begin
            if taken <= 0:  # one reading of some million on a virtual machine: no time has passed
                taken = time.perf_counter() - started
            times[i] = min(times[i], taken * 1e9)
        rounds += 1
    return times


def measure_costs() -> CpuCosts:
    """Return the costs of this CPU by the times of a few products on one thread, in about 0.2 s."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        makers = [_sparse_products, _dense_products]
        if packs_weights():
            makers += [_packed_products, _turned_operands]
        sets, layers = [list(make()) for make in makers], list(_layer_products())
        runs = [run for each in (*sets, *layers) for _, run in each]
        times = iter(_shortest_times(runs))
    finally:
        torch.set_num_threads(threads)
    products = [fit_costs([terms for terms, _ in each], [next(times) for _ in each]) for each in sets]
    pairs = [(next(times), next(times)) for _ in layers]
    count, found = len(_LAYERS), []
    for i in range(0, len(layers), count):
        part, taken = layers[i : i + count], pairs[i : i + count]
        sparse, dense = (fit_costs([layer[j][0] for layer in part], [each[j] for each in taken]) for j in (0, 1))
        found.append((*sparse, *dense))
    costs = CpuCosts(products[0], products[1], tuple(found))
    return costs if len(products) == 2 else replace(costs, packed=products[2], turned=products[3])


def _lists(costs: CpuCosts) -> list[list[float]]:
    """The costs as a file holds them."""
    return [list(each) for each in (costs.sparse, costs.dense, costs.packed, costs.turned, *costs.layers)]


def _load(name: str) -> CpuCosts | None:
    found = measured.load(_ROOM, name)
    lengths = [len(each) for each in _lists(CpuCosts())]
    if not isinstance(found, list) or len(found) != len(lengths):
        return None
    for each, length in zip(found, lengths, strict=True):
        if not isinstance(each, list) or len(each) != length:
            return None
        if not all(isinstance(cost, float) and 0 <= cost < 1e9 for cost in each):
            return None
    sparse, dense, packed, turned, *layers = (tuple(each) for each in found)
    return CpuCosts(sparse, dense, tuple(layers), packed, turned)


@cache
def _build() -> str:
    """Digest of the engine and of this model: the costs of another build are not those of this one."""
    files = Path(str(extension.load_extension().__file__)), Path(__file__)
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=4).hexdigest()


@cache
def _get(isa: str, backend: str) -> CpuCosts:
    name = f"{processor()} {isa} {backend} {_build()}"
    found = _load(name)
    if found is None:
        start = time.perf_counter()
        found = measure_costs()
        seconds, path = time.perf_counter() - start, measured.path_of(_ROOM, name)
        log.info("measured the times of products on %s in %.2f s; kept in %s", name, seconds, path)
        measured.save(_ROOM, name, _lists(found))
    return found


def get_costs() -> CpuCosts:
    """Return the costs for the engine path of this moment, measured if they are not on disk."""
    if extension.ENGINE is None:
        return CpuCosts()
    return _get(engine.isa(), "engine" if packs_weights() else dense_backend())
