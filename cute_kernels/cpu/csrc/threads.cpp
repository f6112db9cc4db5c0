// Threads, barriers and workspace of one engine call.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "engine.hpp"
#include "thread_pool.hpp"

namespace magicube {
namespace {

constexpr int64_t kSharedPanels = 1 << 20;  // bytes of staged panels, or
constexpr int64_t kPartsBytes = 1 << 18;    // half of the smallest L2
constexpr int64_t kAloneWork = 1 << 25;     // multiply-adds of a panel: at the end a thread waits for one at most
constexpr int64_t kWorkspaceShare = 8;      // 1/8 of the size of B, for several threads

struct Aligned {
  explicit Aligned(int64_t bytes)
      : data(bytes ? static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(bytes))) : nullptr) {
    if (bytes && !data) throw std::bad_alloc();
  }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  ~Aligned() { std::free(data); }
  uint8_t* data;
};

// The caller alone.
class Single final : public ThreadGroup {
 public:
  Single(uint8_t* shared, uint8_t* local) : shared_(shared), local_(local) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  int64_t ticket() override { return tickets_++; }
  uint8_t* shared() const override { return shared_; }
  uint8_t* local() const override { return local_; }

  bool barrier() override {
    tickets_ = 0;
    return true;
  }

 private:
  int64_t tickets_ = 0;
  uint8_t* shared_;
  uint8_t* local_;
};

const int kForksBefore = forks();  // starts the counter

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

int64_t spmm_panel_parts(const SpmmArgs& args, int64_t most) {
  return (args.a.columns_total + 1) * kPanel * args.b.digits() * most <= kPartsBytes ? most : 1;
}

int64_t spmm_staged_panels(const SpmmArgs& args, int threads, int64_t columns) {
  if (threads == 1 && args.turned) return 1;  // a row of such an output is whole in a panel
  const int64_t panels = (args.n + columns - 1) / columns * args.batch;
  const int64_t share = args.a.columns_total * args.n * args.batch * args.b.digits() / kWorkspaceShare;
  const int64_t bytes = threads == 1 ? kPartsBytes : std::max(kSharedPanels, share);
  return std::clamp(bytes / spmm_panel_bytes(args), int64_t{1}, std::max(panels, int64_t{1}));
}

int64_t spmm_panel_bytes(const SpmmArgs& args) { return (args.a.columns_total + 1) * kPanel * args.parts * args.b.digits(); }

int64_t spmm_row_bytes(const SpmmArgs& args) { return round_up(args.a.columns_total, 64) + 64; }

int64_t spmm_shared_bytes(const SpmmArgs& args) {
  constexpr int64_t kWords = 4 * kPanel;  // what panels of one column add, of which whole words of masks are read
  const int64_t panels = round_up(spmm_panel_bytes(args) * args.staged_panels, 64) + kWords;
  return args.columns.reals ? panels + args.n * spmm_row_bytes(args) + round_up(args.n * 4, 64) : panels;
}

int64_t spmm_local_bytes(const SpmmArgs& args, int64_t scratch_bytes) {
  const int64_t sums = int64_t{args.a.digits()} * args.b.digits() * args.a.vector_length * kPanel * 4;
  const int64_t totals = int64_t{args.a.vector_length} * kPanel * 8;
  return scratch_bytes + sums + totals;
}

int64_t spmm_own_bytes(const SpmmArgs& args, int64_t columns) {
  if (args.a.plane_bytes * args.a.digits() * args.b.digits() * columns > kAloneWork) return 0;
  return spmm_panel_bytes(args) + (args.columns.reals ? columns * spmm_row_bytes(args) : 0);
}

int64_t sddmm_staged_rows(const SddmmArgs& args, int64_t dot_bytes) {
  const int64_t row_bytes = round_up(args.inner, 64) * args.y.digits() * dot_bytes;
  int64_t rows = row_bytes ? kStagedBytes / row_bytes : args.n;
  if (rows < 16) rows = 16;
  return rows < args.n ? rows : args.n;
}

int64_t sddmm_shared_bytes(const SddmmArgs& args, int64_t dot_bytes) {
  return sddmm_staged_rows(args, dot_bytes) * round_up(args.inner, 64) * args.y.digits() * dot_bytes;
}

int64_t sddmm_local_bytes(const SddmmArgs& args, int64_t dot_bytes) {
  return round_up(args.inner, 64) * args.vector_length * args.x.digits() * dot_bytes;
}

AttentionSizes attention_sizes(const AttentionArgs& args, int64_t columns, int64_t scratch_bytes, int64_t dot_bytes) {
  constexpr int64_t kRows = 8;
  AttentionSizes s{};
  s.depth = round_up(args.depth, 64);
  s.panels = (args.width + columns - 1) / columns;
  s.keys = args.keys * s.depth * dot_bytes;
  s.key_scales = round_up(args.keys * 4, 64);
  s.values = s.panels * (args.keys + 1) * kPanel;
  s.maxima = round_up((args.keys + kKeyPiece - 1) / kKeyPiece * 4, 64);
  s.matrix = s.keys + s.key_scales + s.values + s.maxima;
  s.matrices = std::clamp(kSharedPanels / std::max(s.matrix, int64_t{1}), int64_t{1}, std::max(args.batch, int64_t{1}));
  const int64_t longest = round_up(args.longest, kKeyStep);
  s.queries = kRows * s.depth * dot_bytes;
  s.columns = s.numbers = round_up(longest * 4, 64);
  s.scores = kRows * longest * 4;
  s.weights = kRows * longest;
  s.sums = kRows * kPanel * 4;
  s.thread = scratch_bytes + s.queries + s.columns + 2 * s.numbers + 2 * s.scores + s.weights + s.sums;
  return s;
}

int64_t compress_mask_bytes(int64_t columns) { return round_up(columns, 64); }

int64_t compress_local_bytes(const CompressArgs& args) {  // a mask, and its columns plus one
  return compress_mask_bytes(args.columns) + (args.lengths ? 0 : round_up((args.columns + 1) * 4, 64));
}

int64_t slice_maxima_bytes(int64_t slices, int64_t real_bytes) { return round_up(slices * real_bytes, 64); }

int64_t slice_shared_bytes(int64_t slices, int64_t real_bytes, int threads) {
  constexpr int64_t kFactorBytes = 16;  // four floats or two doubles per slice
  return slice_maxima_bytes(slices, real_bytes) * threads + round_up(slices * kFactorBytes, 64);
}

int64_t sum_block(int64_t terms) {  // ceil(sqrt(terms)), at least 1
  auto block = static_cast<int64_t>(std::sqrt(static_cast<double>(terms)));
  while (block * block < terms) ++block;
  return block > 0 ? block : 1;
}

int64_t block_pitch(int64_t terms) { return round_up(sum_block(terms), 8) + 8; }  // not a power of two

int64_t probe_bytes(int64_t rows) { return round_up(rows * kProbes * 8, 64); }

int64_t probe_local_bytes(int64_t terms) { return kGroupRows * block_pitch(terms) * 8; }

int64_t judge_chunk_rows(int64_t rows) { return round_up(sum_block(rows), kGroupRows); }

int64_t judge_shared_bytes(const JudgeArgs& args) {
  const int64_t chunk_rows = judge_chunk_rows(args.a.rows), chunks = (args.a.rows + chunk_rows - 1) / chunk_rows;
  return probe_bytes(args.c.columns) + round_up(chunks * static_cast<int64_t>(sizeof(JudgeSums)), 64);
}

int64_t bound_shared_bytes(const BoundArgs& args) {
  int64_t chunks = 0;
  for (const RealMatrix* x : {&args.a, &args.b, &args.c}) {
    chunks += ((args.w == nullptr && x->column_major ? x->columns : x->rows) + kBoundRows - 1) / kBoundRows;
  }
  return round_up(chunks * static_cast<int64_t>(sizeof(BoundSums)) + (args.w ? args.b.rows * kFewProbes * 8 : 0), 64);
}

int64_t digit_pitch(int64_t inner) { return round_up(inner, 64) + 64; }  // rows a power of two apart would share cache sets

int64_t direct_shared_bytes(int64_t rows) {
  const int64_t chunk_rows = judge_chunk_rows(rows), chunks = (rows + chunk_rows - 1) / chunk_rows;
  return round_up(chunks * static_cast<int64_t>(sizeof(DirectSums)), 64);
}

int64_t staged_bytes(int64_t rows, int64_t inner, int64_t groups) {
  // A byte for the digit; for its share of an Excess two, and of a start. Memory is aligned to 64 bytes, and so is its size.
  return round_up(round_up(rows, 4) * (digit_pitch(inner) * 4 + groups * 4), 64);
}

int64_t direct_local_bytes(int64_t inner) { return staged_bytes(kDirectRows, inner, 1); }

int64_t dense_shared_bytes(const DenseArgs& args, int threads) {
  const int64_t most = kMostBlockRows * threads, rows = args.rows < most ? args.rows : most;
  return round_up(rows * 4, 64) + staged_bytes(rows, args.right.inner, args.right.groups());
}

void ask_for_large_pages(void* memory, int64_t bytes) {
#ifdef __linux__
  constexpr uintptr_t kPage = 1 << 21;
  const auto begin = reinterpret_cast<uintptr_t>(memory), first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1: pages that were touched before, as those of a heap
  if (first >= last) return;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // may be refused
  madvise(reinterpret_cast<void*>(first), last - first, kCollapse);
#else
  (void)memory, (void)bytes;
#endif
}

void run_thread_group(int threads, int64_t shared_bytes, int64_t local_bytes, void (*body)(const void*, ThreadGroup&),
              const void* args) {
  threads = std::min(threads, Team::kMostThreads);
  const Aligned shared(shared_bytes);
  const Aligned local(local_bytes * threads);
  const Job job{body, args, shared.data, local.data, local_bytes};
  if (threads > 1 && OpenMp::is_ready()) return OpenMp::run(threads - 1, job);
  const int workers = threads > 1 ? ThreadLocalPool::get().provide(threads - 1) : 0;
  if (workers == 0) {
    Single single(shared.data, local.data);
    return body(args, single);
  }
  ThreadLocalPool::get().run(workers, job);
}

bool is_openmp_ready() { return OpenMp::is_ready(); }
bool want_openmp(bool value) { return OpenMp::want(value); }

}  // namespace magicube
