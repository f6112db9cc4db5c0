"""``csrc/avx512.cpp`` and ``avx_vnni.cpp`` as a library of machines without them.

The instructions of the first are those of ``avx512_emulated.hpp``, the one of the second is a loop.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[3] / "cute_kernels" / "cpu" / "csrc"
ASSEMBLY = {  # and what takes its place
    'asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));': "sum = vpdpbusd(sum, left, right);",
    'asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(dense), "m"(*reinterpret_cast<const int32_t*>(four)));': (
        "dot_bytes(sum, dense, _mm512_set1_epi32(four_bytes(four)));"
    ),
    'asm("vpermb %1, %2, %0" : "=v"(quads) : "v"(k), "v"(order));': "quads = vpermb(order, k);",
    'asm("" : "+v"(sum[r][q]));': "{}",
    '__builtin_cpu_supports("avx512vbmi")': "emulated::has_vbmi",
    'asm("vpcompressb %1, %0%{%2%}%{z%}" : "=v"(kept) : "v"(bytes), "Yk"(mask));': (
        "kept = _mm512_maskz_compress_epi8(mask, bytes);"
    ),
    'asm volatile("" : "+v"(kept[0]), "+v"(kept[1]), "+v"(kept[2]), "+v"(kept[3]));': "",
    '__attribute__((target("amx-tile,amx-int8")))': "",
}
VPDPBUSD = 'asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(left), "xm"(right));'
IN_A_LOOP = """
  int32_t sums[sizeof sum / 4];
  uint8_t a[sizeof sum];
  int8_t b[sizeof sum];
  std::memcpy(sums, &sum, sizeof sum), std::memcpy(a, &left, sizeof sum), std::memcpy(b, &right, sizeof sum);
  for (unsigned i = 0; i < sizeof sum; ++i) sums[i / 4] += a[i] * b[i];
  std::memcpy(&sum, sums, sizeof sum);
"""
CALLS = """
#include <immintrin.h>
#include "engine.hpp"
using namespace magicube;
namespace {
struct Job { const Engine* engine; const void* args; };
const Engine& engine_of(int emulated) {
  const Engine* const engines[] = {&kPortable, &kAvx512, &kAmx, &kAvxVnni};
  return *engines[emulated];
}
}
extern "C" void set_vbmi(int has_vbmi) { emulated::has_vbmi = has_vbmi != 0; }
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
  const int64_t own = threads > 1 && job.engine->spmm_alone ? spmm_own_bytes(args, job.engine->spmm_columns * args.parts) : 0;
  run_thread_group(threads, spmm_shared_bytes(args), spmm_local_bytes(args, job.engine->spmm_scratch_bytes) + own,
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


def build_emulated_engine(folder: Path) -> ctypes.CDLL:
    """The engine's AVX-512, AVX-VNNI and portable builds as a library of this machine."""
    shutil.copy(Path(__file__).with_name("avx512_emulated.hpp"), folder / "immintrin.h")
    found = 0
    for name in ("avx512.cpp", "avx512_few.hpp", "amx.hpp"):
        source = (SOURCES / name).read_text()
        for assembly, replacement in ASSEMBLY.items():
            found += source.count(assembly)
            source = source.replace(assembly, replacement)
        (folder / name).write_text(source)
    assert found == len(ASSEMBLY)
    flags = [
        "g++",
        "-std=c++17",
        "-O1",
        "-w",
        "-ffp-contract=off",
        "-DMAGICUBE_X86",
        "-fPIC",
        "-fno-gnu-unique",
        "-pthread",
    ]
    flags.append(f"-I{SOURCES}")
    (folder / "own").mkdir()  # beside the compiler's own immintrin.h
    vnni, vnni_object = folder / "own" / "avx_vnni.cpp", folder / "avx_vnni.o"
    source = (SOURCES / vnni.name).read_text()
    assert source.count(VPDPBUSD) == 1
    vnni.write_text(source.replace(VPDPBUSD, IN_A_LOOP))
    subprocess.run([*flags, "-mavx2", "-mfma", "-mf16c", "-c", str(vnni), "-o", str(vnni_object)], check=True)
    (folder / "calls.cpp").write_text(CALLS)
    files = [
        folder / "avx512.cpp",
        folder / "calls.cpp",
        vnni_object,
        SOURCES / "portable.cpp",
        SOURCES / "threads.cpp",
    ]
    library = folder / "engine.so"
    subprocess.run([*flags, "-shared", f"-I{folder}", *map(str, files), "-o", str(library), "-ldl"], check=True)
    return ctypes.CDLL(str(library))
