// SpMM, resident kernel, of few columns: C = row_scale * col_scale * (A B) + bias, A sparse.
//
// Architectures: sm_90a and later (bulk copies, clusters).
// Work: a cluster of kCluster CTAs multiplies a block of vector rows. Each CTA holds `tile` rows of B in shared memory for good, and
// has the records of these columns; its warps share them equally, whatever the lengths of the vector rows.
// Pipeline: a warp brings its records by bulk copies into kStages stages of kStageRecords, one mbarrier each. Every warp has
// as many, zeros behind the last ones, so that the first copies wait for no table. They are asked for behind B, or,
// in an early launch, before the wait for it.
// Results: partial sums go to shared memory and are added in the order of the warps, then of the CTAs.
// B: rows of any pitch and alignment; one whose rows do not start at multiples of 16 bytes is read byte by byte.
// Source: after Li, Osawa, Hoefler, SC'22, sections IV-A to IV-D.
#pragma once

#include "device/cluster.cuh"
#include "spmm/record.cuh"

namespace magicube {

// A dense operand in global memory; all numbers in bytes.
struct DenseRows {
  const uint8_t* data;
  int64_t pitch, batch, row;
  bool aligned;  // rows start at multiples of 16 bytes

  // Whether the rows of an N tile are contiguous, and lie in shared memory as they do here.
  template <class C>
  __device__ bool is_block() const { return aligned && pitch == C::kTileNBytes && row == C::kTileNBytes && pitch <= 16; }
};

// Shared memory of a CTA, in this order: rows of B, stages of records, partial sums, sums for the cluster, column scales, mbarriers of the
// stages and of B, first records.
template <class C>
struct ResidentMemory {
  static constexpr int kRecordBytes = 4 * Record<C>::kRecordWords, kStageBytes = C::kStageRecords * kRecordBytes;
  static_assert(kRecordBytes % 16 == 0, "a record must be whole 16-byte copies");
  static_assert(kRecordBytes == C::kRecordBytes, "host and device must agree");
  // Words of a lane that are summed: accumulators and offsets.
  static constexpr int kValues = sizeof(Accumulators<C>::value) / 4;
  static constexpr int kWords = kValues + (Accumulators<C>::kOffsets > 0 ? sizeof(Accumulators<C>::offset) / 4 : 0);
  static_assert(kWords == C::kSumWords, "host and device must agree");

  uint32_t base, stages_at, sums_at, barriers_at, scales_at, starts_at;
  int tile, block_rows;

  __device__ ResidentMemory(uint32_t from, int64_t rows_of_b, int64_t rows) : base(from), tile(int(rows_of_b)), block_rows(int(rows)) {
    stages_at = base + tile * C::kTileNBytes;
    sums_at = stages_at + C::kWarps * C::kStages * kStageBytes;
    scales_at = totals(C::kCluster > 1 ? block_rows : 0);
    barriers_at = scales_at + SpmmShape<C>::kTileN * 4;
    starts_at = of_b() + 8;
  }
  // Partial sums of a vector row from a warp: segments of vector rows follow each other as their warps do, so row + warp is unique.
  __device__ uint32_t sums(int row, int warp) const { return sums_at + (row + warp) * kWords * 128; }
  // Sum of a vector row of all warps; in a cluster only.
  __device__ uint32_t totals(int row) const { return sums_at + (block_rows + C::kWarps + row) * kWords * 128; }
  __device__ uint32_t of_b() const { return barriers_at + C::kWarps * C::kStages * 8; }
  __device__ uint32_t start(int row) const { return starts_at + 4 * row; }
};

// First of the `total` records that warp `warp` multiplies.
template <class C>
__device__ __forceinline__ int first_of_warp(int total, int warp) { return total * warp / C::kWarps; }
// The warp that multiplies the record before number `end` > 0.
template <class C>
__device__ __forceinline__ int warp_before(int total, int end) { return (end * C::kWarps - 1) / total; }

// The records of a warp, stage after stage.
template <class C>
struct RecordStream {
  using M = ResidentMemory<C>;
  const uint8_t* next;  // what is copied next
  uint32_t ring, barriers;
  int missing;          // records that no copy has asked for
  int stage = 0, left = 0;
  uint32_t parities = 0;

  // Asks for the first `count` records, all stages at once.
  __device__ void open(const M& memory, const uint8_t* records, int count, int warp, int lane) {
    ring = memory.stages_at + warp * C::kStages * M::kStageBytes;
    barriers = memory.barriers_at + warp * C::kStages * 8;
    next = records;
    missing = count;
    if (lane == 0) {
      CUTE_UNROLL
      for (int to = 0; to < C::kStages; ++to) barrier_init(barriers + 8 * to, 1);
      barrier_fence();
    }
    CUTE_UNROLL
    for (int to = 0; to < C::kStages; ++to) {
      if (lane == 0) fill(to);
      next += M::kStageBytes;
      missing -= C::kStageRecords;
    }
    __syncwarp();
  }
  // Records of the current stage, waiting for the next one where none is left; their address.
  __device__ uint32_t wait() {
    if (left == 0) {
      barrier_wait(barriers + 8 * stage, parities >> stage & 1);
      left = C::kStageRecords;
    }
    return ring + stage * M::kStageBytes + (C::kStageRecords - left) * M::kRecordBytes;
  }
  // `count` of them have been multiplied.
  __device__ void release(int count, int lane) {
    left -= count;
    if (left > 0) return;
    __syncwarp();
    if (lane == 0) fill(stage);
    next += M::kStageBytes;
    missing -= C::kStageRecords;
    parities ^= 1u << stage;
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }

 private:
  __device__ void fill(int to) {
    const int bytes = (missing < C::kStageRecords ? missing : C::kStageRecords) * M::kRecordBytes;
    if (bytes <= 0) return;
    mbarrier_arrive_expect_tx(barriers + 8 * to, bytes);
    bulk_copy(ring + to * M::kStageBytes, next, bytes, barriers + 8 * to);
  }
};

// Bring `count` rows of B, from `from` on, of which `valid` bytes exist; zeros behind these.
template <class C>
__device__ void load_rows(uint32_t base, const uint8_t* from, const DenseRows& b, int count, int valid) {
  constexpr int kChunks = C::kTileNBytes / 16, kThreads = C::kWarps * 32;
  for (int i = threadIdx.x; i < count * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks, rest = valid - 16 * chunk, bytes = rest < 0 ? 0 : rest < 16 ? rest : 16;
    cp_async(base + swizzled<C::kTileNBytes, C::kSwizzle>(row, chunk), from + row * b.pitch + (bytes > 0 ? 16 * chunk : 0), bytes);
  }
}

// The same of rows of any alignment, byte by byte, without the zeros: columns that do not exist are multiplied, and not written.
// `meanwhile` is called once, when the first bytes are on their way.
template <class C, class Call>
__device__ void load_bytes(uint32_t base, const uint8_t* from, const DenseRows& b, int count, int valid, const Call& meanwhile) {
  constexpr int kThreads = C::kWarps * 32, kTogether = 8;  // rows of a thread whose loads are in flight together
  for (int byte = 0; byte < valid; byte += 4) {
    for (int first = 0; first < count || byte + first == 0; first += kTogether * kThreads) {
      uint32_t bytes[kTogether][4];
      CUTE_UNROLL
      for (int u = 0; u < kTogether; ++u) {
        const int row = first + u * kThreads + int(threadIdx.x);
        const uint8_t* const at = from + row * b.pitch + byte;
        CUTE_UNROLL
        for (int k = 0; k < 4; ++k) bytes[u][k] = row < count && byte + k < valid ? at[k] : 0;
      }
      if (byte + first == 0) meanwhile();
      CUTE_UNROLL
      for (int u = 0; u < kTogether; ++u) {
        const int row = first + u * kThreads + int(threadIdx.x);
        if (row >= count) break;
        const uint32_t word = bytes[u][0] | bytes[u][1] << 8 | bytes[u][2] << 16 | bytes[u][3] << 24;
        store_shared(base + swizzled<C::kTileNBytes, C::kSwizzle>(row, byte / 16) + byte % 16, word);
      }
    }
  }
}

// acc += the product of `count` records at `from`. Several at a time, so that their reads overlap.
template <class C>
__device__ __forceinline__ void add_records(Accumulators<C>& acc, uint32_t from, int count, uint32_t base, int lane) {
  constexpr int kBytes = ResidentMemory<C>::kRecordBytes, kTogether = C::kTogether;
  for (; count >= kTogether; count -= kTogether, from += kTogether * kBytes) {
    Record<C> records[kTogether];
    CUTE_UNROLL
    for (int i = 0; i < kTogether; ++i) records[i].read(from + i * kBytes, lane);
    CUTE_UNROLL
    for (int i = 0; i < kTogether; ++i) add_record(acc, records[i], base);
  }
  CUTE_NO_UNROLL
  for (; count > 0; --count, from += kBytes) {
    Record<C> one;
    one.read(from, lane);
    add_record(acc, one, base);
  }
}

template <class C>
__device__ __forceinline__ uint32_t* sum_word(Accumulators<C>& acc, int i) {
  using M = ResidentMemory<C>;
  return i < M::kValues ? &acc.value[0][0][0][0] + i : &acc.offset[0][0] + (i - M::kValues);
}

__device__ __forceinline__ int load_word(uint32_t from) {
  uint32_t word[1];
  load_shared(from, word);
  return int(word[0]);
}

template <class C>
__device__ __forceinline__ void store_sums(uint32_t to, Accumulators<C>& acc, int lane) {
  CUTE_UNROLL
  for (int i = 0; i < ResidentMemory<C>::kWords; ++i) store_shared(to + 128 * i + 4 * lane, *sum_word(acc, i));
}
template <class C>
__device__ __forceinline__ void add_word(Accumulators<C>& acc, int i, uint32_t word) {
  uint32_t& sum = *sum_word(acc, i);
  if constexpr (C::kFloat) sum = __float_as_uint(__uint_as_float(sum) + __uint_as_float(word));
  else sum += word;
}

// acc = the sums of all warps of vector row `row` of the block.
template <class C>
__device__ void sum_warps(Accumulators<C>& acc, const ResidentMemory<C>& memory, int row, int total, int lane) {
  acc.clear();
  const int start = load_word(memory.start(row)), end = load_word(memory.start(row + 1));
  if (start == end) return;
  const int last = warp_before<C>(total, end);
  for (int warp = warp_before<C>(total, start + 1); warp <= last; ++warp) {
    if (first_of_warp<C>(total, warp) == first_of_warp<C>(total, warp + 1)) continue;  // fewer records than warps
    const uint32_t from = memory.sums(row, warp) + 4 * lane;
    CUTE_UNROLL
    for (int i = 0; i < ResidentMemory<C>::kWords; ++i) add_word(acc, i, uint32_t(load_word(from + 128 * i)));
  }
}

// acc = the sums of all CTAs of the cluster.
template <class C>
__device__ void sum_cluster(Accumulators<C>& acc, const ResidentMemory<C>& memory, int row, int lane) {
  constexpr int kWords = ResidentMemory<C>::kWords;
  uint32_t words[C::kCluster][kWords];
  CUTE_UNROLL
  for (int rank = 0; rank < C::kCluster; ++rank) {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) words[rank][i] = cluster::load_of(memory.totals(row) + 128 * i + 4 * lane, rank);
  }
  acc.clear();
  CUTE_UNROLL
  for (int rank = 0; rank < C::kCluster; ++rank) {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) add_word(acc, i, words[rank][i]);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kWarps * 32, 1)
spmm_resident(const int32_t* starts, const uint8_t* records, const int32_t* order, const uint8_t* b, int64_t b_pitch,
              int64_t b_batch, int64_t b_row, int64_t b_aligned, void* out, const float* row_scale, int64_t row_scale_stride,
              const float* col_scale, int64_t col_scale_stride, int64_t col_scale_batch, const float* bias, int64_t rows,
              int64_t vector_rows, int64_t n, int64_t inner, int64_t tile, int64_t block_rows, int64_t warp_records,
              int64_t vector_stores, int64_t early) {
  using S = SpmmShape<C>;
  using M = ResidentMemory<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  const int rank = C::kCluster == 1 ? 0 : int(cluster::rank());
  const int64_t block = blockIdx.x / C::kCluster;
  const uint32_t tiles = uint32_t((n + S::kTileN - 1) / S::kTileN);  // a 64-bit division is a call
  const int64_t n_tile = blockIdx.y % tiles, batch = blockIdx.y / tiles;
  const M memory(shared_address(shared), tile, block_rows);

  const int32_t* const own = starts + (block * C::kCluster + rank) * (block_rows + 1);  // (block_rows + 1,)
  const int64_t block_row = block * block_rows;
  const auto vector_row_of = [&](int row) -> int64_t { return order ? order[block_row + row] : block_row + row; };
  const int mine = rank + C::kCluster * warp;  // first vector row that this warp writes
  const int64_t first_row = mine < block_rows ? vector_row_of(mine) : vector_rows;
  const int start = threadIdx.x <= block_rows ? own[threadIdx.x] : 0;
  if (threadIdx.x == 0) {
    barrier_init(memory.of_b(), 1);
    barrier_fence();
  }
  __syncwarp();

  RecordStream<C> stream;
  const int64_t unit = (block * C::kCluster + rank) * C::kWarps + warp;
  const auto open = [&] { stream.open(memory, records + unit * warp_records * M::kRecordBytes, int(warp_records), warp, lane); };
  if (early) open();  // the kernel before, which may still run, wrote nothing of A
  pdl_wait();
  const DenseRows dense{b, b_pitch, b_batch, b_row, b_aligned != 0};
  const int64_t n0 = n_tile * S::kTileN, at_byte = n_tile * C::kTileNBytes, row0 = rank * tile;
  const int count = int(row0 + tile < inner ? tile : row0 < inner ? inner - row0 : 0);
  const int valid = int(b_row - at_byte < C::kTileNBytes ? b_row - at_byte : C::kTileNBytes);
  const uint8_t* const from = b + batch * b_batch + row0 * b_pitch + at_byte;
  const bool is_block = dense.is_block<C>();
  if (dense.aligned) {
    if (!is_block) {
      load_rows<C>(memory.base, from, dense, count, valid);
    } else if (threadIdx.x == 0) {
      mbarrier_arrive_expect_tx(memory.of_b(), count * C::kTileNBytes);
      if (count > 0) bulk_copy(memory.base, from, count * C::kTileNBytes, memory.of_b());
    }
    if (!early) open();  // behind B, which is nearer
  } else {
    load_bytes<C>(memory.base, from, dense, count, valid, [&] {
      if (!early) open();
    });
  }
  const bool staged = col_scale && col_scale_stride == 1;
  if (staged && threadIdx.x < S::kTileN && n0 + threadIdx.x < n) {
    copy_async_word(memory.scales_at + 4 * threadIdx.x, col_scale + batch * col_scale_batch + n0 + threadIdx.x);
  }
  cp_async_commit();
  if (threadIdx.x <= block_rows) store_shared(memory.start(threadIdx.x), uint32_t(start));
  if (lane < (C::kVector + 7) / 8 && first_row * C::kVector + 8 * lane < rows) {
    if (row_scale_stride > 0) touch(row_scale + first_row * C::kVector + 8 * lane);
    if (bias) touch(bias + first_row * C::kVector + 8 * lane);
  }
  cp_async_wait<0>();
  __syncthreads();
  if (is_block) barrier_wait(memory.of_b(), 0);
  const int total = load_word(memory.start(int(block_rows)));
  const int begin = first_of_warp<C>(total, warp), end = first_of_warp<C>(total, warp + 1);

  Accumulators<C> acc;
  if (begin < end) {
    int row = 0;  // of the first record
    for (int i = lane; i < block_rows; i += 32) row += load_word(memory.start(i + 1)) <= begin;
    row = int(__reduce_add_sync(~0u, uint32_t(row)));
    for (int at = begin; at < end; ++row) {
      const int row_end = load_word(memory.start(row + 1)), stop = row_end < end ? row_end : end;
      if (stop <= at) continue;  // no records
      acc.clear();
      while (at < stop) {
        const uint32_t from = stream.wait();
        const int some = stream.left < stop - at ? stream.left : stop - at;
        add_records(acc, from, some, memory.base, lane);
        stream.release(some, lane);
        at += some;
      }
      store_sums(memory.sums(row, warp), acc, lane);
    }
  }
  __syncthreads();
  if constexpr (C::kCluster > 1) {
    for (int row = warp; row < block_rows; row += C::kWarps) {
      sum_warps(acc, memory, row, total, lane);
      store_sums(memory.totals(row), acc, lane);
    }
    cluster::sync();
  }

  const float* const scales = reinterpret_cast<const float*>(shared + (memory.scales_at - memory.base));
  const SpmmOperands operands{row_scale, staged ? scales - n0 : col_scale, bias, out, rows, n, row_scale_stride, col_scale_stride,
                              staged ? 0 : col_scale_batch, vector_stores != 0};
  for (int row = mine; row < block_rows; row += C::kCluster * C::kWarps) {
    const int64_t vector_row = row == mine ? first_row : vector_row_of(row);
    if (vector_row >= vector_rows) continue;
    if constexpr (C::kCluster == 1) sum_warps(acc, memory, row, total, lane);
    else sum_cluster(acc, memory, row, lane);
    write_accumulators<TotalOf<C>>(operands, acc, batch, vector_row, n0, lane);
  }
  if constexpr (C::kCluster > 1) cluster::sync();  // others read this CTA's shared memory
}

}  // namespace magicube
