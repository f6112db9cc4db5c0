"""``csrc/avx512.cpp`` on machines without AVX-512: its instructions are those of ``avx512_emulated.hpp``, the rest is its own."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.cpu import engine
from cute_kernels.cpu.arguments import OUT_TYPES, SparseOperand, address_of
from cute_kernels.cpu.calls import column_masks
from cute_kernels.cpu.dense import PackedRight, pack_right
from cute_kernels.cpu.direct import prepare_direct
from cute_kernels.cpu.estimate import PROBES, probe_right
from magicube_cutlass.dispatch.cpu import pack_operand
from magicube_cutlass.reference import at_vectors

SOURCES = Path(__file__).resolve().parents[3] / "cute_kernels" / "cpu" / "csrc"
ASSEMBLY = {  # and what takes its place
    'asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));': "sum = vpdpbusd(sum, left, right);",
    'asm volatile("" : "+v"(kept[0]), "+v"(kept[1]), "+v"(kept[2]), "+v"(kept[3]));': "",
    '__attribute__((target("avx512vbmi2"))) ': "",
    '__attribute__((target("amx-tile,amx-int8"), noinline)) ': "",
}
CALLS = """
#include "engine.hpp"
using namespace magicube;
namespace {
struct Job { const Engine* engine; const void* args; };
const Engine& engine_of(int emulated) { return emulated == 2 ? kAmx : emulated ? kAvx512 : kPortable; }
}
extern "C" void probe_right(int emulated, int threads, const RealMatrix* b, const float* w, const double* wbar, double* products,
                            double* bounds) {
  const ProbeArgs args{*b, w, wbar, products, bounds};
  const Job job{&engine_of(emulated), &args};
  run_thread_group(threads, probe_bytes(b->columns), probe_local_bytes(b->columns), [](const void* p, ThreadGroup& group) {
    const Job& j = *static_cast<const Job*>(p);
    j.engine->probe_right(*static_cast<const ProbeArgs*>(j.args), group);
  }, &job);
}
extern "C" void judge(int emulated, int threads, const RealMatrix* a, const RealMatrix* c, const double* products,
                      const double* bounds, const float* w, const double* wbar, JudgeSums* sums) {
  const JudgeArgs args{*a, *c, products, bounds, w, wbar, sums};
  const Job job{&engine_of(emulated), &args};
  const int64_t terms = a->columns > c->columns ? a->columns : c->columns;
  run_thread_group(threads, judge_shared_bytes(args), probe_local_bytes(terms), [](const void* p, ThreadGroup& group) {
    const Job& j = *static_cast<const Job*>(p);
    j.engine->judge(*static_cast<const JudgeArgs*>(j.args), group);
  }, &job);
}
extern "C" void direct(int emulated, int threads, const int8_t* packed, const int32_t* column_sums, const float* scale,
                       const float* vectors, const float* bounds, int64_t k, int64_t n, const float* a, int64_t m, float* out,
                       DirectSums* sums) {
  const DirectArgs args{{packed, column_sums, scale, vectors, bounds, 1.0, 1.0, k, n}, a, k, m, out, sums};
  const Job job{&engine_of(emulated), &args};
  run_thread_group(threads, direct_shared_bytes(m), direct_local_bytes(k), [](const void* p, ThreadGroup& group) {
    const Job& j = *static_cast<const Job*>(p);
    j.engine->direct(*static_cast<const DirectArgs*>(j.args), group);
  }, &job);
}
extern "C" void dense(int emulated, int threads, const int8_t* packed, const int32_t* column_sums, int64_t k, int64_t n,
                      int nibbles, const int8_t* a, const float* x, const float* x_scale, int64_t a_stride, int64_t m, const float* rows,
                      const float* columns, const float* bias, int64_t row_step, int64_t column_step, int out_type, void* out) {
  const DenseArgs args{{packed, column_sums, k, n, nibbles != 0}, {a, x, a_stride, x_scale, -128.0, 127.0}, {rows, columns, bias, 0, 0}, true, m,
                       row_step, column_step, out, static_cast<Out>(out_type)};
  const Job job{&engine_of(emulated), &args};
  run_thread_group(threads, dense_shared_bytes(args, threads), 0, [](const void* p, ThreadGroup& group) {
    const Job& j = *static_cast<const Job*>(p);
    j.engine->dense(*static_cast<const DenseArgs*>(j.args), group);
  }, &job);
}
extern "C" void spmm(int emulated, int threads, const int64_t* row_start, const int64_t* row_end, const int32_t* columns,
                     const uint8_t* planes, const int64_t* row_sums, int64_t plane_bytes, int64_t m, int64_t k, int vector_length,
                     int stride, int bits, int is_signed, const uint64_t* masks, const uint8_t* b, int64_t run_bytes, int along_inner, int b_bits, int64_t n,
                     const float* rows, const float* b_scales, const float* bias, int out_type, void* out) {
  const Sparse a{row_start, row_end, columns, planes, row_sums, plane_bytes, (m + vector_length - 1) / vector_length, m, k,
                 vector_length, stride, bits, is_signed != 0, masks};
  SpmmArgs args{a, {b, 0, run_bytes, along_inner != 0, b_bits, true}, {rows, b_scales, bias, 0, 0}, out,
                static_cast<Out>(out_type), n, 1, {}, 1, 1};
  const Job job{&engine_of(emulated), &args};
  args.parts = spmm_panel_parts(args, job.engine->spmm_parts);
  args.staged_panels = spmm_staged_panels(args, threads, job.engine->spmm_columns * args.parts);
  run_thread_group(threads, spmm_shared_bytes(args), spmm_local_bytes(args, job.engine->spmm_scratch_bytes),
                   [](const void* p, ThreadGroup& group) {
    const Job& j = *static_cast<const Job*>(p);
    j.engine->spmm(*static_cast<const SpmmArgs*>(j.args), group);
  }, &job);
}
extern "C" void sddmm(int emulated, int threads, const int64_t* row_start, const int64_t* row_end, const int32_t* columns,
                      int64_t blocks, int64_t m, int64_t n, int64_t k, int vector_length, const uint8_t* x, int x_bits,
                      const uint8_t* y, int y_bits, int64_t* out) {
  const Operand left{x, 0, k * x_bits / 8, true, x_bits, true}, right{y, 0, k * y_bits / 8, true, y_bits, true};
  const SddmmArgs args{left, right, row_start, row_end, columns, {}, out, blocks * vector_length * 32, Out::kInt64,
                       (m + vector_length - 1) / vector_length, m, n, k, 1, vector_length, 32};
  const Job job{&engine_of(emulated), &args};
  const int64_t dot_bytes = job.engine->dot_bytes;
  run_thread_group(threads, sddmm_shared_bytes(args, dot_bytes), sddmm_local_bytes(args, dot_bytes),
                   [](const void* p, ThreadGroup& group) {
    const Job& j = *static_cast<const Job*>(p);
    j.engine->sddmm(*static_cast<const SddmmArgs*>(j.args), group);
  }, &job);
}
extern "C" void attention(int emulated, int threads, const int64_t* row_start, const int64_t* row_end, const int32_t* columns,
                          int64_t stored, int64_t queries, int64_t keys, int64_t depth, int64_t width, int vector_length,
                          const float* q, const float* k, const float* v, const float* bias, float* out, float* lse) {
  const AttentionArgs args{{q, 0, queries * depth, depth}, {k, 0, keys * depth, depth}, {v, 0, keys * width, width},
                           row_start, row_end, columns, bias, 0, out, lse, Out::kFloat32, 2, 2, 1, queries, keys, depth, width,
                           stored, keys, vector_length, 8, 8, 0.3f, 1.0f, bias != nullptr};
  const Job job{&engine_of(emulated), &args};
  const Engine& e = *job.engine;
  const AttentionSizes sizes = attention_sizes(args, e.spmm_columns, e.spmm_scratch_bytes, e.dot_bytes);
  run_thread_group(threads, sizes.matrices * sizes.matrix, sizes.thread, [](const void* p, ThreadGroup& group) {
    const Job& j = *static_cast<const Job*>(p);
    j.engine->attention(*static_cast<const AttentionArgs*>(j.args), group);
  }, &job);
}
"""
AVX512, AMX = 1, 2  # instruction sets; 0 is the portable engine
COLUMNS = (1, 3, 15, 16, 17, 31, 33, 64, 65, 130)
pytestmark = pytest.mark.skipif(shutil.which("g++") is None or not engine.available(), reason="no g++ or no engine")


class RealMatrix(ctypes.Structure):
    """``magicube::RealMatrix``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "stride")),
        *((name, ctypes.c_bool) for name in ("is_double", "column_major")),
    )

    @classmethod
    def of(cls, x: Tensor) -> RealMatrix:
        by_columns = x.stride(1) != 1
        return cls(x.data_ptr(), *x.shape, x.stride(int(by_columns)), x.dtype == torch.float64, by_columns)


@pytest.fixture(scope="module")
def emulated_engine(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The engine's AVX-512 and portable builds as a library of this machine."""
    folder = tmp_path_factory.mktemp("avx512")
    shutil.copy(Path(__file__).with_name("avx512_emulated.hpp"), folder / "immintrin.h")
    shutil.copy(SOURCES / "avx512.cpp", folder)
    found = 0
    for name in ("avx512_few.hpp", "amx.hpp"):
        source = (SOURCES / name).read_text()
        for assembly, replacement in ASSEMBLY.items():
            found += source.count(assembly)
            source = source.replace(assembly, replacement)
        (folder / name).write_text(source)
    assert found == len(ASSEMBLY)
    (folder / "calls.cpp").write_text(CALLS)
    files = [folder / "avx512.cpp", folder / "calls.cpp", SOURCES / "portable.cpp", SOURCES / "threads.cpp"]
    flags = [
        "-std=c++17",
        "-O1",
        "-w",
        "-ffp-contract=off",
        "-DMAGICUBE_X86",
        "-shared",
        "-fPIC",
        "-fno-gnu-unique",
        "-pthread",
    ]
    library = folder / "engine.so"
    command = ["g++", *flags, f"-I{folder}", f"-I{SOURCES}", *map(str, files), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(x.data_ptr()) for x in tensors]


def operands(m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + 7 * k + 31 * n)
    A, B, W = (torch.randn(*shape, generator=generator) for shape in ((m, k), (k, n), (n, PROBES)))
    return A, B, W, torch.linalg.vector_norm(W.double(), dim=1)


@pytest.mark.parametrize("n", COLUMNS)
def test_direct_has_the_bits_of_the_portable_engine(emulated_engine: ctypes.CDLL, n: int) -> None:
    for m in (1, 2, 3, 4, 5, 6, 7, 49):
        for k in (1, 4, 5, 66, 130):
            A, B, W, wbar = operands(m, k, n)
            A[0], B[:, 0] = 5.0, -5.0  # digits 127 and -127
            right = prepare_direct(B, W, wbar)
            results = []
            for emulated, threads in ((0, 1), (AVX512, 1), (AVX512, 2), (AMX, 2)):
                out, sums = torch.empty(m, n), torch.empty(PROBES * PROBES + 2, dtype=torch.float64)
                emulated_engine.direct(
                    emulated, threads,
                    *pointers(right.packed, right.column_sums, right.scale, right.vectors, right.bounds),
                    ctypes.c_int64(k), ctypes.c_int64(n), *pointers(A), ctypes.c_int64(m), *pointers(out, sums),
                )  # fmt: skip
                results.append((out, sums))
            assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[1][1], results[2][1])
            assert torch.equal(results[3][0], results[1][0]) and torch.equal(results[3][1], results[1][1])
            (_, plain), (_, found) = results[:2]
            eta = 68 * 2.0**-24 * math.sqrt(float(plain[-2]))
            energies = [float(each[: -2 : PROBES + 1].sum()) for each in (plain, found)]
            assert abs(math.sqrt(energies[0]) - math.sqrt(energies[1])) <= 2 * eta
            assert bool(torch.isclose(found[-2:], plain[-2:], rtol=1e-5, atol=0).all())
            assert bool(torch.isclose(found[-1:], plain[-1:], rtol=1e-13, atol=0).all())


def multiply_emulated(
    library: ctypes.CDLL, emulated: int, threads: int, left: Tensor, right: PackedRight, out: Tensor, static: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:  # fmt: skip
    """``out`` by the engine's dense product: of int8, or of float32 rows that it quantizes."""

    def pointer(x: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if x is None else x.data_ptr())

    reals, (k, n) = left.is_floating_point(), right.shape
    library.dense(
        emulated, threads, *pointers(right.packed, right.column_sums), ctypes.c_int64(k), ctypes.c_int64(n),
        int(right.packed.dtype == torch.uint8), pointer(None if reals else left), pointer(left if reals else None), pointer(static),
        *map(ctypes.c_int64, (left.stride(0), left.shape[0])), *map(pointer, scales), *map(ctypes.c_int64, out.stride()),
        OUT_TYPES[out.dtype], pointer(out),
    )  # fmt: skip


@pytest.mark.parametrize("n", COLUMNS)
def test_dense_products_are_exact(emulated_engine: ctypes.CDLL, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for m in (1, 2, 5, 6, 7, 13, 49, 100):
        for k in (1, 4, 5, 66, 390):
            a, b = (torch.randint(-128, 128, size, generator=generator, dtype=torch.int8) for size in ((m, k), (k, n)))
            a[0], b[:, 0] = -128, -128
            right, expected = pack_right(b), a.long() @ b.long()
            for emulated, threads in ((AVX512, 1), (AVX512, 2), (AMX, 1), (AMX, 2)):
                for dtype in (torch.int32, torch.int64):
                    for out in (torch.empty(m, n, dtype=dtype), torch.empty(n, m, dtype=dtype).t()):
                        multiply_emulated(emulated_engine, emulated, threads, a, right, out, None, (None, None, None))
                        assert torch.equal(out.long(), expected)
    k = 2**17 - 1
    a, b = torch.full((7, k), -128, dtype=torch.int8), torch.full((k, n), 127, dtype=torch.int8)
    a[1], b[:, -1] = 127, -128
    right, out = pack_right(b), torch.empty(7, n, dtype=torch.int32)
    for emulated in (AVX512, AMX):
        multiply_emulated(emulated_engine, emulated, 1, a, right, out.zero_(), None, (None, None, None))
        assert torch.equal(out.long(), a.long() @ b.long())


@pytest.mark.parametrize("n", COLUMNS)
def test_dense_products_by_nibbles_are_exact(emulated_engine: ctypes.CDLL, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for m in (1, 2, 5, 6, 7, 13, 49, 100):
        for k in (1, 4, 5, 66, 390, 1030):
            a = torch.randint(-128, 128, (m, k), generator=generator, dtype=torch.int8)
            b = torch.randint(-8, 8, (k, n), generator=generator, dtype=torch.int8)
            a[0], b[:, 0] = -128, -8
            right, expected = pack_right(b, bits=4), a.long() @ b.long()
            for threads in (1, 2):
                for out in (torch.empty(m, n, dtype=torch.int32), torch.empty(n, m, dtype=torch.int32).t()):
                    multiply_emulated(emulated_engine, 1, threads, a, right, out, None, (None, None, None))
                    assert torch.equal(out.long(), expected)


def multiply_sparse_emulated(
    library: ctypes.CDLL, emulated: int, threads: int, a: SparseOperand, b: Tensor, out: Tensor,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:  # fmt: skip
    """``out`` by the engine's sparse product with int8 or int16 columns of ``b`` (K, N)."""
    _, blocks, v, stride = a.planes.shape
    along = b.stride(0) == 1
    library.spmm(
        emulated, threads, *pointers(a.row_start, a.row_end, a.col_indices, a.planes, a.row_sums),
        *map(ctypes.c_int64, (blocks * v * stride, a.rows, a.columns)), v, stride, a.bits, int(a.signed),
        ctypes.c_void_p(None if a.masks is None else a.masks.data_ptr()), *pointers(b),
        ctypes.c_int64(b.stride(int(along)) * b.element_size()), int(along), 8 * b.element_size(), ctypes.c_int64(b.shape[1]),
        *(ctypes.c_void_p(address_of(scale)) for scale in scales), OUT_TYPES[out.dtype], *pointers(out),
    )  # fmt: skip


@pytest.mark.parametrize("n", (1, 2, 7, 16, 31, 64, 65, 200))
def test_sparse_products_are_exact(emulated_engine: ctypes.CDLL, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for v in (1, 2, 4, 8, 16):
        for m, k, a_type, b_type in (
            (41, 70, torch.int8, torch.int8),
            (16, 390, torch.int8, torch.int16),
            (9, 33, torch.int16, torch.int8),
        ):
            a, b = (
                torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max + 1, size, generator=generator).to(kind)
                for kind, size in ((a_type, (m, k)), (b_type, (k, n)))
            )
            a *= (torch.rand(m, k, generator=generator) < 0.4).to(a_type)
            a[0], b[:, 0] = torch.iinfo(a_type).min, torch.iinfo(b_type).min
            matrix = mc.SRBCRS.from_dense(a, vector_length=v, bits=8 * a.element_size())
            assert matrix.bits is not None
            sparse = SparseOperand(*pack_operand(matrix), m, k, matrix.bits, True)
            expected = a.long() @ b.long()
            for right in (b, b.t().contiguous().t()):
                for threads in (1, 2):
                    out = torch.empty(m, n, dtype=torch.int64)
                    multiply_sparse_emulated(emulated_engine, 1, threads, sparse, right, out, (None, None, None))
                    assert torch.equal(out, expected)
            rows, columns, bias = (torch.rand(size, generator=generator) for size in (m, n, m))
            found = []
            for emulated in (0, 1):
                out = torch.empty(m, n)
                multiply_sparse_emulated(emulated_engine, emulated, 1, sparse, b, out, (rows, columns, bias))
                found.append(out)
            assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("n", (1, 2, 3, 16))
@pytest.mark.parametrize("signed", (True, False))
def test_sparse_products_with_few_columns_are_exact(emulated_engine: ctypes.CDLL, n: int, signed: bool) -> None:
    generator = torch.Generator().manual_seed(n)
    for v in (1, 2, 4, 8, 16):
        for m, k, bits in ((41, 70, 8), (16, 64, 4), (9, 700, 8)):
            low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
            dtype = torch.int8 if signed else torch.uint8
            a = torch.randint(low, high, (m, k), generator=generator).to(dtype)
            a *= torch.rand(m, k, generator=generator) < 0.3
            a[0], b = high - 1, torch.randint(-128, 128, (k, n), generator=generator, dtype=torch.int8)
            b[:, 0] = -128
            matrix = mc.SRBCRS.from_dense(a, vector_length=v, bits=bits, signed=signed)
            sparse = SparseOperand(*pack_operand(matrix), m, k, bits, matrix.signed)
            masked, expected = replace(sparse, masks=column_masks(sparse)), a.long() @ b.long()
            assert masked.masks is not None
            for each in (sparse, masked):
                for right in (b, b.t().contiguous().t()):
                    for dtype in (torch.int32, torch.float32):
                        out = torch.empty(m, n, dtype=dtype)
                        multiply_sparse_emulated(emulated_engine, 1, 1, each, right, out, (None, None, None))
                        assert torch.equal(out.long(), expected)


@pytest.mark.parametrize("v", (1, 2, 4, 8, 32))
def test_sampled_products_are_exact(emulated_engine: ctypes.CDLL, v: int) -> None:
    generator = torch.Generator().manual_seed(v)
    for m, n, k, types in ((35, 70, 5, (8, 8)), (16, 33, 130, (16, 8)), (9, 40, 64, (8, 16))):
        x, y = (
            torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), size, generator=generator).to(
                getattr(torch, f"int{bits}")
            )
            for bits, size in zip(types, ((m, k), (n, k)), strict=True)
        )
        x[0], y[0] = -(2 ** (types[0] - 1)), -(2 ** (types[1] - 1))
        pattern = mc.random_pattern(m, n, 0.5, v, seed=v)
        padded, sizes = pattern.padded(32), map(ctypes.c_int64, (pattern.padded(32).col_indices.numel() // 32, m, n, k))
        expected = mc.SRBCRS.from_pattern(pattern, at_vectors(x.long() @ y.long().mT, pattern), bits=None).values
        head = (*pointers(padded.row_start, padded.row_end, padded.col_indices), *sizes, v)
        for threads in (1, 2):
            out = torch.zeros_like(expected)
            emulated_engine.sddmm(1, threads, *head, *pointers(x), types[0], *pointers(y), types[1], *pointers(out))
            assert torch.equal(out, expected)


@pytest.mark.parametrize("v", (1, 2, 4, 8, 32))
def test_attention_has_the_bits_of_the_portable_engine(emulated_engine: ctypes.CDLL, v: int) -> None:
    generator = torch.Generator().manual_seed(v)
    for queries, keys, depth, width in ((35, 70, 5, 3), (16, 300, 64, 64), (9, 40, 70, 130)):
        mask = mc.random_pattern(queries, keys, 0.4, v, seed=v)
        padded, sizes = mask.padded(32), (mask.padded(32).col_indices.numel(), queries, keys, depth, width)
        head = (*pointers(padded.row_start, padded.row_end, padded.col_indices), *map(ctypes.c_int64, sizes), v)
        shapes = (2, queries, depth), (2, keys, depth), (2, keys, width), (keys,)
        operands = [torch.randn(shape, generator=generator) for shape in shapes]
        operands[0][0, 3, 1], operands[1][1, 5] = math.nan, 0.0
        for given in (operands, operands[:3]):
            results = []
            for emulated, threads in ((0, 1), (1, 1), (1, 2)):
                out, lse = torch.empty(2, queries, width), torch.empty(2, queries)
                bias = pointers(given[3]) if len(given) > 3 else [ctypes.c_void_p(None)]
                emulated_engine.attention(emulated, threads, *head, *pointers(*given[:3]), *bias, *pointers(out, lse))
                results.append(torch.cat((out, lse[..., None]), -1).nan_to_num(7.0))
            assert bool((results[0] == 7.0).any()) and all(torch.equal(each, results[0]) for each in results[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quantized_rows_have_the_bits_of_the_portable_engine(emulated_engine: ctypes.CDLL, dtype: torch.dtype) -> None:
    m, k, n = 53, 130, 75
    generator = torch.Generator().manual_seed(1)
    x, b = (
        torch.randn(m, k, generator=generator),
        torch.randint(-128, 128, (k, n), generator=generator, dtype=torch.int8),
    )
    x[3, 2], x[4] = float("nan"), 0.0
    columns, bias = torch.rand(n, generator=generator), torch.randn(n, generator=generator)
    right = pack_right(b)
    for static in (None, torch.tensor(0.01)):
        results = []
        for emulated, threads in ((0, 1), (1, 1), (1, 2)):
            out = torch.empty(m, n, dtype=dtype)
            multiply_emulated(emulated_engine, emulated, threads, x, right, out, static, (None, columns, bias))
            results.append(out.nan_to_num())
        assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(1, 1, 1), (2, 3, 4), (25, 70, 33), (50, 20, 130)])
def test_judge_agrees_with_the_portable_engine(
    emulated_engine: ctypes.CDLL, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    A, B, W, wbar = operands(*size)
    C = (A @ B + 1).to(dtype)
    A, B = A.to(dtype), B.to(dtype)
    BW, bound = probe_right(B, W, wbar)
    for view in (lambda x: x, lambda x: x.t().contiguous().t()):
        operands_in_order = [view(x) for x in (A, B, C)]
        matrices = [RealMatrix.of(x) for x in operands_in_order]
        results = []
        for emulated, threads in ((0, 1), (1, 1), (1, 2)):
            products, bounds, sums = (
                torch.empty_like(BW),
                torch.empty_like(bound),
                torch.empty(261, dtype=torch.float64),
            )
            emulated_engine.probe_right(
                emulated, threads, ctypes.byref(matrices[1]), *pointers(W, wbar, products, bounds)
            )
            emulated_engine.judge(
                emulated, threads, ctypes.byref(matrices[0]), ctypes.byref(matrices[2]),
                *pointers(BW, bound, W, wbar, sums),
            )  # fmt: skip
            results.append(torch.cat([products.view(-1), bounds, sums]))
        assert torch.equal(results[1], results[2])
        limit = torch.cat([bound.repeat_interleave(PROBES), bound, results[0][-4:-3].expand(256), results[0][-5:]])
        assert bool(((results[1] - results[0]).abs() <= 1e-13 * limit).all())
