// Calls of the selected instruction set's kernels, checked for what would read out of bounds, without Python's lock.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "engine.hpp"
#include "structure_scan.hpp"

namespace magicube {
namespace {

#ifdef MAGICUBE_X86
// Linux saves the state of tiles only for a process that asked for them.
bool may_use_tiles() {
#ifdef __linux__
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

bool runs_here(const Engine& engine) {
  __builtin_cpu_init();
  if (&engine == &kAmx) return runs_here(kAvx512) && may_use_tiles();
  if (&engine == &kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
  }
  if (&engine == &kAvxVnni) return runs_here(kAvx2) && __builtin_cpu_supports("avxvnni");
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

const std::vector<const Engine*>& usable() {
  static const std::vector<const Engine*> found = [] {
    std::vector<const Engine*> each;
#ifdef MAGICUBE_X86
    for (const Engine* engine : {&kAmx, &kAvx512, &kAvxVnni, &kAvx2}) {
      if (runs_here(*engine)) each.push_back(engine);
    }
#endif
    each.push_back(&kPortable);
    return each;
  }();
  return found;
}

// The fastest instruction set, or the one that MAGICUBE_CPU names. Python holds its lock here, so no os.environ write races.
const Engine& selected() {
  const char* forced = std::getenv("MAGICUBE_CPU");
  if (forced == nullptr) return *usable().front();
  std::string names;
  for (const Engine* engine : usable()) {
    if (std::string(forced) == engine->name) return *engine;
    names += (names.empty() ? "'" : ", '") + std::string(engine->name) + "'";
  }
  throw std::invalid_argument("MAGICUBE_CPU must be one of [" + names + "] on this machine, got '" + forced + "'");
}

// Whether a product with up to three columns reads the masks of the sparse operand.
bool reads_masks() {
#ifdef MAGICUBE_X86
  const Engine* const engine = &selected();
  return (engine == &kAvx512 || engine == &kAmx) && __builtin_cpu_supports("avx512vbmi2");
#else
  return false;
#endif
}

int64_t serial_work = -1;  // of every engine, in place of their own, unless negative

constexpr int64_t kOpenMpShare = 8;  // less work is enough for threads that wake at once

int threads_for(int64_t work, int most) {
  if (most < 1) throw std::invalid_argument("threads must be at least 1, got " + std::to_string(most));
  const int64_t least = serial_work < 0 ? selected().serial_work : serial_work;
  return work >= least || (most > 1 && work >= least / kOpenMpShare && is_openmp_ready()) ? most : 1;
}

constexpr int64_t kMemoryBound = 8;           // columns of a product whose one pass over the other operand costs as much
constexpr int64_t kWorkPerEntry = 16;         // multiply-adds that cost as much as quantizing an entry
constexpr int64_t kWorkPerMaskEntry = 4;      // as compressing one
constexpr int64_t kWorkPerColumn = 1 << 14;   // as ordering a column

Out real_type(int type) {
  require(type >= static_cast<int>(Out::kFloat32), "rows must be floats");
  return static_cast<Out>(type);
}

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

struct Job {
  const Engine* engine;
  const void* args;
};

// Call a kernel of the selected instruction set without Python's lock.
template <auto Kernel, class Args>
void run_kernel(const Args& args, int threads, int64_t shared_bytes, int64_t local_bytes) {
  const Job job{&selected(), &args};
  nb::gil_scoped_release release;
  run_thread_group(threads, shared_bytes, local_bytes, [](const void* p, ThreadGroup& group) {
    const Job& j = *static_cast<const Job*>(p);
    (j.engine->*Kernel)(*static_cast<const Args*>(j.args), group);
  }, &job);
}

// Scales as Python gives them: one scale may stand for all rows or all columns.
struct GivenScales : Scales {
  bool one_row;
  bool one_column;
};

// Scales as kernels read them: one per row and per column.
class RepeatedScales {
 public:
  RepeatedScales(const GivenScales& given, int64_t rows, int64_t columns) : scales_(given) {
    if (given.one_row && rows > 0) scales_.rows = repeat(given.rows, rows, &rows_);
    if (given.one_column && columns > 0) scales_.columns = repeat(given.columns, columns, &columns_);
  }
  RepeatedScales(const RepeatedScales&) = delete;
  RepeatedScales& operator=(const RepeatedScales&) = delete;
  operator const Scales&() const { return scales_; }

 private:
  static const float* repeat(const float* scale, int64_t count, std::vector<float>* memory) {
    memory->assign(static_cast<size_t>(count), *scale);
    return memory->data();
  }

  Scales scales_;
  std::vector<float> rows_, columns_;
};

void spmm(SpmmArgs args, int most_threads) {
  require(args.a.vector_length >= 1 && args.a.vector_length <= kMaxVector, "vector_length must be in [1, 32]");
  require(args.a.stride == 16 || args.a.stride == 32 || args.a.stride == 64, "stride must be 16, 32 or 64");
  require(args.a.columns_total > 0 || args.a.plane_bytes == 0, "a matrix without columns has no values");
  require(args.a.columns_total < kMaxColumns, "the sparse operand must have fewer than 2^28 columns");
  const Job job{&selected(), &args};
  const int threads = threads_for(args.a.plane_bytes * args.a.digits() * args.b.digits() * std::max(args.n, kMemoryBound) * args.batch, most_threads);
  nb::gil_scoped_release release;
  args.parts = spmm_panel_parts(args, job.engine->spmm_parts);
  args.staged_panels = spmm_staged_panels(args, threads, job.engine->spmm_columns * args.parts);
  const int64_t own = threads > 1 && job.engine->spmm_alone ? spmm_own_bytes(args, job.engine->spmm_columns * args.parts) : 0;
  run_thread_group(threads, spmm_shared_bytes(args), spmm_local_bytes(args, job.engine->spmm_scratch_bytes) + own,
                   [](const void* p, ThreadGroup& group) {
    const Job& j = *static_cast<const Job*>(p);
    j.engine->spmm(*static_cast<const SpmmArgs*>(j.args), group);
  }, &job);
}

struct PreparedSddmm {
  SddmmArgs args;
  GivenScales scales;
};

void sddmm(const SddmmArgs& args, int most_threads) {
  require(args.vector_length >= 1 && args.vector_length <= kMaxVector, "vector_length must be in [1, 32]");
  require(args.stride == 16 || args.stride == 32 || args.stride == 64, "stride must be 16, 32 or 64");
  const int64_t digit_pairs = int64_t{args.x.digits()} * args.y.digits();
  const int threads = threads_for(args.out_batch * args.inner * args.batch * digit_pairs, most_threads);
  const int64_t dot_bytes = selected().dot_bytes;
  run_kernel<&Engine::sddmm>(args, threads, sddmm_shared_bytes(args, dot_bytes), sddmm_local_bytes(args, dot_bytes));
}

void attention(const AttentionArgs& args, int most_threads) {
  require(args.vector_length >= 1 && args.vector_length <= kMaxVector, "vector_length must be in [1, 32]");
  require(args.depth <= kExactRun && args.longest <= kExactRun, "the products must be exact in int32");
  require(args.patterns >= 1 && args.batch % args.patterns == 0, "a batch must be a multiple of the patterns");
  require(args.heads >= 1 && args.operand_bits <= 8 && args.softmax_bits <= 8, "an integer must fit a byte");
  const int64_t entries = args.stored / args.patterns * args.vector_length;
  const int threads = threads_for(args.batch * entries * (args.depth + args.width + kWorkPerEntry), most_threads);
  const Engine& engine = selected();
  const AttentionSizes sizes = attention_sizes(args, engine.spmm_columns, engine.spmm_scratch_bytes, engine.dot_bytes);
  run_kernel<&Engine::attention>(args, threads, sizes.matrices * sizes.matrix, sizes.thread);
}

int64_t slice_bytes(int scale_mode, int64_t columns, int64_t real_bytes, int threads) {
  require(scale_mode >= kScaleAll && scale_mode <= kScaleColumns, "scale_mode must be 0, 1 or 2");
  if (scale_mode == kScaleRows) return 0;
  return slice_shared_bytes(scale_mode == kScaleColumns ? columns : 1, real_bytes, threads);
}

int quantize(QuantizeArgs args, int most_threads) {
  uint8_t flags = 0;
  args.flags = &flags;
  const int threads = threads_for(kWorkPerEntry * args.rows * args.columns, most_threads);
  const int64_t shared_bytes = slice_bytes(args.scale_mode, args.columns, args.is_double ? 8 : 4, threads);
  run_kernel<&Engine::quantize>(args, threads, shared_bytes, 0);
  return flags;
}

int digits(DigitsArgs args, int most_threads) {
  require(args.count >= 1 && args.count <= 3 && (!args.exact || args.count == 2), "count must be 1, 2 or 3, 2 where exact");
  uint8_t flags = 0;
  args.flags = &flags;
  const int threads = threads_for(kWorkPerEntry * args.count * args.rows * args.columns, most_threads);
  const int64_t shared_bytes = slice_bytes(args.scale_mode, args.columns, 4, threads);
  run_kernel<&Engine::digits>(args, threads, shared_bytes, 0);
  return flags;
}

// `vectors`: all of them, of which the blocks were checked when they were packed.
void spmm_transposed(TransposedArgs args, int64_t vectors, int most_threads) {
  const int v = args.vector_length;
  require(v == 2 || v == 4 || v == 8 || v == 16 || v == 32, "vector_length must be 2, 4, 8, 16 or 32");
  require(args.rows >= 0 && args.inner >= 0 && args.n >= 0 && args.batch >= 0, "sizes must not be negative");
  args.pairs = (args.inner + v - 1) / v * v / 2;
  const int threads = threads_for(vectors * v * args.n * args.batch, most_threads);
  const int64_t panel_bytes = (args.pairs * kTransposedColumns * 2 * static_cast<int64_t>(sizeof(int16_t)) + 63) / 64 * 64;
  run_kernel<&Engine::spmm_transposed>(args, threads, 0, panel_bytes);
}

void compress(const CompressArgs& args, int most_threads) {
  const int threads = threads_for(kWorkPerMaskEntry * args.rows * args.columns, most_threads);
  require(args.vector_length >= 1 && args.vector_length <= kMaxVector, "vector_length must be in [1, 32]");
  require(args.stride == 16 || args.stride == 32 || args.stride == 64, "stride must be 16, 32 or 64");
  require(args.element_bytes == 1 || args.element_bytes == 2, "an element must have 1 or 2 bytes");
  run_kernel<&Engine::compress>(args, threads, 0, compress_local_bytes(args));
}

constexpr int64_t kWorkPerProbe = 2;  // a multiply-add of doubles

void require_matrix(const RealMatrix& x, const char* what) {
  require(x.rows >= 0 && x.columns >= 0 && x.stride >= 0 && (x.data != nullptr || x.rows * x.columns == 0), what);
}

void probe_right(const ProbeArgs& args, int most_threads) {
  require_matrix(args.b, "b must be a matrix with memory");
  const int threads = threads_for(kWorkPerProbe * kProbes * args.b.rows * args.b.columns, most_threads);
  run_kernel<&Engine::probe_right>(args, threads, probe_bytes(args.b.columns), probe_local_bytes(args.b.columns));
}

void judge(const JudgeArgs& args, int most_threads) {
  require_matrix(args.a, "a must be a matrix with memory");
  require_matrix(args.c, "c must be a matrix with memory");
  require(args.a.rows == args.c.rows, "a and c must have the same number of rows");
  const int64_t terms = args.a.columns > args.c.columns ? args.a.columns : args.c.columns;
  const int threads = threads_for(kWorkPerProbe * kProbes * args.a.rows * (args.a.columns + args.c.columns), most_threads);
  run_kernel<&Engine::judge>(args, threads, judge_shared_bytes(args), probe_local_bytes(terms));
}

void bound_sums(const BoundArgs& args, int most_threads) {
  for (const RealMatrix* x : {&args.a, &args.b, &args.c}) require_matrix(*x, "a, b and c must be matrices with memory");
  const int64_t entries = args.a.rows * args.a.columns + args.b.rows * args.b.columns + args.c.rows * args.c.columns;
  const int threads = threads_for(kWorkPerProbe * (args.w ? kFewProbes : 1) * entries, most_threads);
  run_kernel<&Engine::bound_sums>(args, threads, bound_shared_bytes(args), 0);
}

constexpr int64_t kMaxDirectInner = int64_t{1} << 17;  // 127^2 K < 2^31

void pack_digits(const PackArgs& args, int most_threads) {
  const int threads = threads_for(kWorkPerEntry * args.rows * args.columns, most_threads);
  run_kernel<&Engine::pack_digits>(args, threads, 0, 0);
}

void dense(const DenseArgs& args, int most_threads) {
  require(args.rows >= 0 && args.right.inner >= 0 && args.right.n >= 0, "sizes must be at least 0");
  require(args.row_step == 1 || args.column_step == 1, "rows or columns of the output must be contiguous");
  require(!args.right.group || args.out_type >= Out::kFloat32, "group scales need a float output");
  if (args.rows == 0 || args.right.n == 0) return;
  const int threads = threads_for(std::max(args.rows, kMemoryBound) * args.right.inner * args.right.n, most_threads);
  const int64_t row_bytes = args.left.factors ? (args.right.inner * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64 : 0;
  run_kernel<&Engine::dense>(args, threads, dense_shared_bytes(args, threads), row_bytes);
}

// The product of a weight with 8-bit rows that the call quantizes and returns, by the sparse or the dense kernel.
struct IntegerLinear {
  QuantizeArgs x;
  Sparse sparse;
  PackedRight right;
  bool is_dense;
  Out out_type;

  // `scale` and `bias` of the weight; results are column-major.
  void run(QuantizeArgs args, const float* scale, bool is_one, const float* bias, void* out, int threads) const {
    quantize(args, threads);
    const auto* const ints = static_cast<const int8_t*>(args.out);
    const auto* const x_scale = static_cast<const float*>(args.scale);
    if (is_dense) {
      const RepeatedScales repeated({{x_scale, scale, bias, 0, 0}, args.given_scale, is_one}, args.rows, right.n);
      return dense(DenseArgs{right, {ints, nullptr, args.columns, nullptr, 0.0, 0.0}, repeated, true, args.rows, 1, args.rows,
                             out, out_type}, threads);
    }
    const RepeatedScales repeated({{scale, x_scale, bias, 0, 0}, is_one, args.given_scale}, sparse.rows, args.rows);
    const Operand columns{static_cast<const uint8_t*>(args.out), 0, args.columns, true, 8, true};
    spmm(SpmmArgs{sparse, columns, repeated, out, out_type, args.rows, 1, {}, 1, 1}, threads);
  }
};

QuantizeArgs row_quantization(int64_t rows, int64_t columns, int64_t row_elements, bool given_scale) {
  return {nullptr, nullptr, nullptr, nullptr, rows, columns, row_elements, columns, 8, false, true, false, given_scale,
          given_scale ? kScaleAll : kScaleRows};
}

void probe_digits(const ProbeDigitsArgs& args, int most_threads) {
  const int threads = threads_for(2 * kWorkPerProbe * kProbes * args.rows * args.columns, most_threads);
  run_kernel<&Engine::probe_digits>(args, threads, 0, 2 * probe_local_bytes(args.columns));
}

void direct(const DirectArgs& args, int most_threads) {
  require(args.inner <= kMaxDirectInner, "int32 sums need at most 2^17 columns of A");
  require(args.rows >= 0 && args.inner >= 0 && args.n >= 0 && args.a_stride >= 0, "sizes must be at least 0");
  const int threads = threads_for(args.rows * args.inner * (args.n + 2 * kProbes), most_threads);
  run_kernel<&Engine::direct>(args, threads, direct_shared_bytes(args.rows), direct_local_bytes(args.inner));
}

// Float32 sums of kErrorBlock terms from rounded vectors are rounded at most kErrorBlock + 4 times.
double error_rounding(const DirectSums& sums) {
  constexpr double kSteps = (kErrorBlock + 4) * 0x1p-24;
  return 1.01 * kSteps / (1 - kSteps) * std::sqrt(sums.bound);
}

// Of an integer sum to float32 and of two products by scales, whose results may be subnormal.
double epilogue_rounding(const DirectArgs& args) {
  const double entries = static_cast<double>(args.rows) * static_cast<double>(args.n);
  return 3.001 * 0x1p-24 * std::sqrt(args.sums->norm) + 0x1p-149 * std::sqrt(entries) * (1 + args.largest_scale);
}

void order_columns_checked(const ReorderArgs& args, int64_t columns, int most_threads) {
  require(args.tiles >= 1 && args.window >= 1, "tiles and window must be at least 1");
  require(args.group >= 8 && args.group % 8 == 0, "group must be a multiple of 8");
  const int threads = threads_for(kWorkPerColumn * columns, most_threads);
  nb::gil_scoped_release release;
  run_thread_group(threads, 0, 0, [](const void* p, ThreadGroup& group) {
    order_columns(*static_cast<const ReorderArgs*>(p), group);
  }, &args);
}

}  // namespace
}  // namespace magicube
