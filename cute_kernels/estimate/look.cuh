// Errors of two products of digits, of kPlanes - 1 and of kPlanes digits per element, by 16 probes W before any product.
//
// Formula: with A = A_0 + A_1 + .. the parts of the digits and d_i A = A - A_0 - .. - A_{i-1}, likewise of B, the product of the
// levels i + j < r leaves out
//
//   E_r = A B - sum_{i+j<r} A_i B_j = sum_{i<r} A_i (d_{r-i} B) + (d_r A) B,
//
// in which no term is a difference of large numbers. The pass over B (look_right) computes V_j = (d_j B) W for j = 0..kPlanes. The
// pass over A (look_left) computes E_r W from them for both r, and A V_0 for the norm of A B.
//
// All sums are of integers, by MMA of bytes, and exact: the digits; what they leave as an integer of 2^-fine of the scale, whose bytes
// are three or two digits more; probes and V_j as packed by look_pack.cuh. What is rounded off, and the products of the last digits,
// which are left out, is bounded: for a row of A of scale s by beta[r] sum |x| + s G[r], where beta and G are numbers of look_pack.cuh.
//
// sm_80 and later; bound by the split into digits. Work: a CTA of 8 warps takes 32 or 16 rows; kShare warps, four or all, share 16 rows
// and take steps of 32 columns in turn. Pipeline: the next step's elements are loaded to registers before a step is added. Sums of a
// warp are int32, for up to 65536 columns; then float64.
// look_left: the last CTA adds the records of all CTAs in a fixed order, bounds both errors, and picks the product to run.
#pragma once

#include "convert/digits.cuh"
#include "device/mma_bytes.cuh"
#include "estimate/look_choice.cuh"
#include "estimate/look_pack.cuh"

namespace magicube {

constexpr int kTileRows = 16;                     // rows of a warp
constexpr int kOwnRows = 2, kRun = 4, kRuns = 2;  // rows, columns per run, runs of a lane
constexpr int kPitch = kTileRows + 1;

// X (rows, columns) row-major, or X^T if C::kTransposed. `pitch`: elements from one row in memory to the next; `vector`: runs of
// four elements are 16-byte aligned.
struct LookMatrix {
  const float* x;
  int64_t pitch, rows, columns;
  bool vector;
};

using LookScratch = double[kLookWarps][kProbes][kPitch];

template <class C>
struct Look {
  static constexpr int kPlanes = C::kPlanes, kTail = tail_of(kPlanes);
  static constexpr int kShare = C::kShare, kTiles = kLookWarps / kShare, kRows = kTiles * kTileRows;  // warps of a tile; of a CTA
  static constexpr int kFine = C::kLeft ? left_fine(kPlanes) : right_fine(kPlanes), kRestBytes = C::kLeft ? 2 : 3;
  static constexpr int kBytes = kPlanes + kRestBytes;                        // of an element
  static constexpr int kPacked = C::kLeft ? kVectorDigits * (kPlanes + 1) : kProbeDigits;  // digits of the vectors
  static constexpr int kSumsOf = C::kLeft ? 11 : 3 * kPlanes + 4;
  static constexpr int kOutputs = C::kLeft ? 3 : kPlanes + 1;  // left: both errors, and A V_0

  using Values = float[kOwnRows][kRuns][kRun];
  using Accumulators = uint32_t[kSumsOf][2][4];  // (sum, probes / 8, fragment)
  // A thread's sums over all columns: entry threadIdx.x of (row, probe) of each tile; sums of |x| in the first kRows.
  struct Totals {
    double of[kOutputs][kTiles], size;
  };

  // Row of the tile: the i-th of the lanes of group g.
  __device__ __forceinline__ static int own_row(int g, int i) { return C::kTransposed ? 2 * g + i : g + 8 * i; }

  // Elements of a lane: columns 4t..4t+3 and 16+4t..16+4t+3 of its rows. `kWhole`: the step is within the matrix and its runs are
  // aligned; otherwise zero beyond the matrix.
  template <bool kWhole>
  __device__ __forceinline__ static void load(const LookMatrix& m, int64_t corner, int64_t column, Values& to) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int64_t row = corner + own_row(g, 0);
    CUTE_UNROLL
    for (int run = 0; run < kRuns; ++run) {
      const int64_t first = column + 16 * run + kRun * t;
      if constexpr (kWhole && C::kTransposed) {
        CUTE_UNROLL
        for (int c = 0; c < kRun; ++c) {
          const float2 both = __ldg(reinterpret_cast<const float2*>(m.x + (first + c) * m.pitch + row));
          to[0][run][c] = both.x, to[1][run][c] = both.y;
        }
      } else if constexpr (kWhole) {
        CUTE_UNROLL
        for (int i = 0; i < kOwnRows; ++i) {
          const float4 four = __ldg(reinterpret_cast<const float4*>(m.x + (corner + own_row(g, i)) * m.pitch + first));
          to[i][run][0] = four.x, to[i][run][1] = four.y, to[i][run][2] = four.z, to[i][run][3] = four.w;
        }
      } else {
        CUTE_UNROLL
        for (int i = 0; i < kOwnRows; ++i) {
          const int64_t own = corner + own_row(g, i);
          CUTE_UNROLL
          for (int c = 0; c < kRun; ++c) {
            const int64_t at = C::kTransposed ? (first + c) * m.pitch + own : own * m.pitch + first + c;
            to[i][run][c] = own < m.rows && first + c < m.columns ? __ldg(m.x + at) : 0.0f;
          }
        }
      }
    }
  }

  // Digits and bytes of the rest of four elements, byte by byte: out (kBytes,), an element a byte.
  __device__ __forceinline__ static void split_run(const float (&x)[kRun], const DigitScale (&by)[kRun], const DigitRule& rule,
                                                   uint32_t (&out)[kBytes]) {
    constexpr float kRound = 0x1.8p23f, kFactor = float(1ull << kFine);
    uint32_t words[kPlanes + 1][kRun];  // (digit, element)
    CUTE_UNROLL
    for (int c = 0; c < kRun; ++c) {
      float rest = 0.0f;
      take_digits<kPlanes>(x[c], by[c], rule, [&](int plane, uint32_t digit, float residual) {
        words[plane][c] = digit, rest = residual;
      });
      // The integer in the low bits, less half of 2^23 that the constant brings.
      words[kPlanes][c] = __float_as_uint(__fadd_rn(__fmul_rn(rest, by[c].inverse * kFactor), kRound)) - 0x400000u;
    }
    const auto low = [](const uint32_t (&w)[kRun]) {
      return __byte_perm(__byte_perm(w[0], w[1], 0x0040), __byte_perm(w[2], w[3], 0x0040), 0x5410);
    };
    CUTE_UNROLL
    for (int plane = 0; plane < kPlanes; ++plane) out[plane] = low(words[plane]);
    const uint32_t(&w)[kRun] = words[kPlanes];
    const uint32_t front = __byte_perm(w[0], w[1], 0x5140), back = __byte_perm(w[2], w[3], 0x5140);  // bytes 0, 0, 1, 1
    out[kBytes - 1] = __byte_perm(front, back, 0x5410), out[kBytes - 2] = __byte_perm(front, back, 0x7632);
    if constexpr (kRestBytes == 3) {
      out[kPlanes] = __byte_perm(__byte_perm(w[0], w[1], 0x0062), __byte_perm(w[2], w[3], 0x0062), 0x5410);
    }
  }

  // Call add(sum, byte of X, digit of the vectors) for all products; look at sum_of for what a sum is worth.
  template <class Add>
  __device__ __forceinline__ static void for_each_product(const Add& add) {
    if constexpr (C::kLeft) {
      add(0, 0, 0), add(1, 0, 1);  // A V_0
      CUTE_UNROLL
      for (int i = 0; i < kPlanes; ++i) {  // products of one sum are far from each other
        CUTE_UNROLL
        for (int error = 0; error < 2; ++error) {
          const int r = kPlanes - 1 + error;
          CUTE_UNROLL
          for (int d = 0; d < kVectorDigits; ++d) add(2 + 3 * error + d, i, kVectorDigits * (r - i) + d);
        }
        if (i == 0) add(8, kPlanes, 0), add(9, kPlanes, 1), add(10, kPlanes, 2);  // (d_P A) V_0
      }
      add(1, 1, 0), add(9, kPlanes + 1, 0), add(10, kPlanes + 1, 1);
    } else {
      CUTE_UNROLL
      for (int byte = 0; byte < kPlanes; ++byte) {
        CUTE_UNROLL
        for (int d = 0; d < kProbeDigits; ++d) add(3 * byte + d, byte, d);
      }
      CUTE_UNROLL
      for (int byte = 0; byte < kRestBytes; ++byte) {
        CUTE_UNROLL
        for (int d = 0; d < kProbeDigits; ++d) {
          if (byte + d < 4) add(3 * kPlanes + byte + d, kPlanes + byte, d);
        }
      }
    }
  }

  // Add a step of the vectors' digits (kPacked, 32 lanes).
  __device__ __forceinline__ static void add_step(const Values& x, const DigitScale (&by)[kOwnRows][kRuns][kRun],
                                                  const DigitRule& rule, const uint4 (&vectors)[kPacked], Accumulators& sums) {
    uint32_t bytes[kBytes][4];  // (byte, fragment)
    CUTE_UNROLL
    for (int run = 0; run < kRuns; ++run) {
      CUTE_UNROLL
      for (int i = 0; i < kOwnRows; ++i) {
        uint32_t found[kBytes];
        split_run(x[i][run], by[i][run], rule, found);
        CUTE_UNROLL
        for (int b = 0; b < kBytes; ++b) bytes[b][2 * run + i] = found[b];
      }
    }
    for_each_product([&](int sum, int byte, int digit) {
      const uint4& v = vectors[digit];
      if (byte <= kPlanes) {  // the digits and the leading byte of the rest
        mma_bytes<true>(sums[sum][0], bytes[byte], v.x, v.y), mma_bytes<true>(sums[sum][1], bytes[byte], v.z, v.w);
      } else {
        mma_bytes<false>(sums[sum][0], bytes[byte], v.x, v.y), mma_bytes<false>(sums[sum][1], bytes[byte], v.z, v.w);
      }
    });
  }

  // The same number by an addition, of which an SM does four times as many as conversions.
  __device__ __forceinline__ static double exact(int x) {
    return __longlong_as_double(0x4330000000000000ll | (uint32_t(x) ^ 0x80000000u)) - (0x1p52 + 0x1p31);
  }

  // 2^-exponent.
  __device__ __forceinline__ static double less(int exponent) { return __longlong_as_double((1023ll - exponent) << 52); }

  // Output of one entry from its sums, in units of the first digits; rights from the last one on: V_j = V_{j+1} + ...
  template <class Sum>
  __device__ __forceinline__ static void outputs_of(const Sum& sum, double (&out)[kOutputs]) {
    if constexpr (C::kLeft) {
      const double rest = sum(8) * less(kTail + 6) + sum(9) * less(kTail + 14) + sum(10) * less(kTail + 22);
      CUTE_UNROLL
      for (int error = 0; error < 2; ++error) {
        const int level = 8 * (kPlanes - 1 + error), at = 2 + 3 * error;
        out[error] = sum(at) * less(level) + sum(at + 1) * less(level + 8) + sum(at + 2) * less(level + 16) + rest;
      }
      out[2] = sum(0) + sum(1) * less(8);
    } else {
      out[kPlanes] = 0.0;
      CUTE_UNROLL
      for (int level = 3; level >= 0; --level) out[kPlanes] += sum(3 * kPlanes + level) * less(kTail + 5 + 8 * level);
      CUTE_UNROLL
      for (int plane = kPlanes - 1; plane >= 0; --plane) {
        out[plane] = out[plane + 1];
        CUTE_UNROLL
        for (int d = kProbeDigits - 1; d >= 0; --d) out[plane] += sum(3 * plane + d) * less(8 * (plane + d));
      }
    }
  }

  // Sums of the four warps of each tile, in their order.
  __device__ __forceinline__ static Totals gather(const Accumulators& sums, const float (&size)[kOwnRows], LookScratch& scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    double found[2][4][kOutputs];  // (probes / 8, fragment, output)
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      CUTE_UNROLL
      for (int f = 0; f < 4; ++f) outputs_of([&](int sum) { return exact(int(sums[sum][half][f])); }, found[half][f]);
    }
    Totals totals = {};
    CUTE_UNROLL
    for (int o = 0; o < kOutputs; ++o) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        CUTE_UNROLL
        for (int f = 0; f < 4; ++f) scratch[warp][8 * half + 2 * t + f % 2][own_row(g, f / 2)] = found[half][f][o];
      }
      __syncthreads();
      CUTE_UNROLL
      for (int e = 0; e < kTiles; ++e) {  // entry e: row threadIdx.x / 16 of tile e
        CUTE_UNROLL
        for (int w = 0; w < kShare; ++w) totals.of[o][e] += scratch[kShare * e + w][threadIdx.x % kProbes][threadIdx.x / kProbes];
      }
      __syncthreads();
    }
    if constexpr (C::kLeft) {
      CUTE_UNROLL
      for (int i = 0; i < kOwnRows; ++i) {
        double sum = size[i];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (t == 0) scratch[warp][0][own_row(g, i)] = sum;
      }
      __syncthreads();
      for (int w = 0; w < kShare; ++w) totals.size += scratch[kShare * (lane % kRows / kTileRows) + w][0][lane % kTileRows];
      __syncthreads();
    }
    return totals;
  }

  // Totals of the 32 rows from `corner` on. `packed` (steps, kPacked, 32): the vectors. `scales`: per row, if kLeft; `units`: of the
  // columns otherwise.
  __device__ __forceinline__ static Totals run(const LookMatrix& m, const uint4* packed, const float* scales, const float2* units,
                                               const DigitRule& rule, int64_t corner, LookScratch& scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int64_t tile = corner + warp / kShare * kTileRows, steps = (m.columns + kStep - 1) / kStep;
    DigitScale by[kOwnRows][kRuns][kRun] = {};
    if constexpr (C::kLeft) {
      CUTE_UNROLL
      for (int i = 0; i < kOwnRows; ++i) {
        const int64_t row = tile + own_row(g, i);
        DigitScale own = row < m.rows ? prepare_scale(__ldg(scales + row)) : DigitScale{};
        own.bias_factor = 1.0f;  // others are out of range: discarded
        CUTE_UNROLL
        for (int c = 0; c < kRuns * kRun; ++c) by[i][c / kRun][c % kRun] = own;
      }
    }
    Accumulators sums = {};
    float size[kOwnRows] = {};
    const auto add_steps = [&](auto whole, int64_t first, int64_t last) {
      constexpr bool kWhole = decltype(whole)::value;
      Values next;
      if (first < last) load<kWhole>(m, tile, first * kStep, next);
      for (int64_t step = first; step < last; step += kShare) {
        Values x;
        CUTE_UNROLL
        for (int e = 0; e < kOwnRows * kRuns * kRun; ++e) x[e / 8][e / 4 % 2][e % 4] = next[e / 8][e / 4 % 2][e % 4];
        uint4 vectors[kPacked];
        CUTE_UNROLL
        for (int d = 0; d < kPacked; ++d) vectors[d] = __ldg(packed + (step * kPacked + d) * 32 + lane);
        if constexpr (!C::kLeft) {
          CUTE_UNROLL
          for (int run = 0; run < kRuns; ++run) {
            const auto* from = reinterpret_cast<const float4*>(units + step * kStep + 16 * run + kRun * t);
            CUTE_UNROLL
            for (int c = 0; c < kRun; c += 2) {
              const float4 two = __ldg(from + c / 2);
              by[0][run][c] = {1.0f, two.x, two.y}, by[0][run][c + 1] = {1.0f, two.z, two.w};
              by[1][run][c] = by[0][run][c], by[1][run][c + 1] = by[0][run][c + 1];
            }
          }
        }
        if (step + kShare < last) load<kWhole>(m, tile, (step + kShare) * kStep, next);
        if constexpr (C::kLeft) {
          CUTE_UNROLL
          for (int e = 0; e < kOwnRows * kRuns * kRun; ++e) size[e / 8] += fabsf(x[e / 8][e / 4 % 2][e % 4]);
        }
        add_step(x, by, rule, vectors, sums);
      }
    };
    // Steps within the matrix, then the others.
    const int64_t whole = m.vector && tile + kTileRows <= m.rows ? m.columns / kStep : 0, own = warp % kShare;
    add_steps(cuda::std::true_type{}, own, whole);
    add_steps(cuda::std::false_type{}, own + max(int64_t{0}, (whole - own + kShare - 1) / kShare) * kShare, steps);
    return gather(sums, size, scratch);
  }
};

// The pass over B (K, N), with the probes of look_pack.cuh: V (kPlanes + 1, y_pitch, 16) and its norms (kPlanes + 1, y_pitch), rounded
// up; a CTA is a tile.
template <class C>
__global__ void __launch_bounds__(kLookThreads, 1)
look_right(const float* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const uint4* w, const float2* units,
           const double* numbers, float radix, float ahead0, float ahead1, float* y, float* norms, int64_t y_pitch) {
  pdl_wait();
  using L = Look<C>;
  __shared__ LookScratch scratch;
  const int64_t corner = int64_t{blockIdx.x} * L::kRows;
  const DigitRule rule{0.0f, radix, {ahead0, ahead1}, false};
  const auto totals = L::run({x, pitch, rows, columns, vector != 0}, w, nullptr, units, rule, corner, scratch);
  const double unit = numbers[0] * 65536.0;
  CUTE_UNROLL
  for (int j = 0; j <= C::kPlanes; ++j) {
    CUTE_UNROLL
    for (int e = 0; e < L::kTiles; ++e) {
      const int64_t row = corner + kTileRows * e + threadIdx.x / kProbes;
      const float value = float(totals.of[j][e] * unit);
      y[(j * y_pitch + row) * kProbes + threadIdx.x % kProbes] = value;
      float square = value * value;
      CUTE_UNROLL
      for (int other = kProbes / 2; other > 0; other /= 2) square += __shfl_xor_sync(~0u, square, other);
      if (threadIdx.x % kProbes == 0) norms[j * y_pitch + row] = sqrtf(square) * (1.0f + 0x1p-20f);
    }
  }
}

// The pass over A (M, K), with V and the numbers of look_pack.cuh; persistent CTAs. `parts` (CTAs, kRecord); `tickets`, of all
// CTAs and of each group, are 0 before and after. `scales`: per row; `other_scales`: of B's columns. `factors` (2, 1025): see look.py.
template <class C>
__global__ void __launch_bounds__(kLookThreads, 1)
look_left(const float* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const uint4* v, const double* numbers,
          const float* scales, float radix, float ahead0, float ahead1, const float* other_scales, int64_t other_count,
          float least, float most, double floor, double product0, double product1, double allowed, const double* factors,
          double* parts, double* record, int* gate, uint32_t* tickets) {
  pdl_wait();
  using L = Look<C>;
  using Values = double[2][kProbes][L::kRows + 1];  // of both errors
  static_assert(sizeof(Values) <= sizeof(LookScratch), "the scratch holds them");
  static_assert(kRecord * 8 + sizeof(ChoiceScratch) <= sizeof(LookScratch), "the scratch holds the sums and what the choice takes");
  __shared__ LookScratch scratch;
  __shared__ double others[4][kLookWarps];
  Values& values = *reinterpret_cast<Values*>(&scratch);
  const DigitRule rule{0.0f, radix, {ahead0, ahead1}, false};
  const int i = threadIdx.x / kProbes, j = threadIdx.x % kProbes, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  double gram[2] = {}, more[4] = {};
  const int far = out_of_range(scales, rows, other_scales, other_count, least, most);
  for (int64_t corner = int64_t{blockIdx.x} * L::kRows; corner < rows; corner += int64_t{gridDim.x} * L::kRows) {
    const auto totals = L::run({x, pitch, rows, columns, vector != 0}, v, scales, nullptr, rule, corner, scratch);
    const auto unit_of = [&](int row) { return corner + row < rows ? __ldg(scales + corner + row) * numbers[0] : 0.0; };
    double unit[L::kTiles];  // entry e is row i + 16 e, probe j
    CUTE_UNROLL
    for (int e = 0; e < L::kTiles; ++e) unit[e] = unit_of(i + kTileRows * e);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int e = 0; e < L::kTiles; ++e) values[r][j][i + kTileRows * e] = totals.of[r][e] * unit[e];
    }
    __syncthreads();
    for (int row = 0; row < L::kRows; ++row) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) gram[r] += values[r][i][row] * values[r][j][row];
    }
    __syncthreads();
    if (threadIdx.x < L::kRows && totals.size > 0.0) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const double bound = numbers[1 + r] * totals.size + numbers[3 + r] * __ldg(scales + corner + lane);
        more[1 + r] += bound * bound;
      }
    }
    CUTE_UNROLL
    for (int e = 0; e < L::kTiles; ++e) {
      const double product = totals.of[2][e] * unit[e];
      more[0] += product * product;
    }
  }
  more[3] = far;
  CUTE_UNROLL
  for (int s = 0; s < 4; ++s) {
    CUTE_UNROLL
    for (int other = 16; other > 0; other /= 2) more[s] += __shfl_xor_sync(~0u, more[s], other);
    if (lane == 0) others[s][warp] = more[s];
  }
  __syncthreads();
  double* to = parts + int64_t{blockIdx.x} * kRecord;
  if (i <= j) to[j * (j + 1) / 2 + i] = gram[0], to[kTriangle + j * (j + 1) / 2 + i] = gram[1];
  if (threadIdx.x < 4) {
    double sum = 0.0;
    for (int w = 0; w < kLookWarps; ++w) sum += others[threadIdx.x][w];
    to[kSums + threadIdx.x] = sum;
  }
  // Two levels, for an SM reads some 40 bytes a cycle: the last CTA of a group adds its records, the last such CTA their sums.
  const int ctas = gridDim.x, groups = (ctas + kGroup - 1) / kGroup, group = blockIdx.x / kGroup;
  double* const of_group = parts + int64_t{group} * kGroup * kRecord;
  if (!comes_last(tickets + 1 + group, min(ctas - group * kGroup, kGroup))) return;
  add_records(of_group, 1, min(ctas - group * kGroup, kGroup), of_group);
  if (!comes_last(tickets, groups)) return;
  double* sums = reinterpret_cast<double*>(&scratch);  // (kRecord,), then what the choice takes
  add_records(parts, kGroup, groups, sums);
  __syncthreads();
  const LookLimits limits{floor, {product0, product1}, allowed};
  auto& choice = *reinterpret_cast<ChoiceScratch*>(sums + kRecord);
  choose(*reinterpret_cast<const double(*)[kRecord]>(sums), choice, limits, factors, C::kPlanes - 2, record, gate);
}

}  // namespace magicube
