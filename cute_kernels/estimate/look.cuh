// Errors of two products of digits, of kPlanes - 1 and of kPlanes digits per element, by 16 probes W before any product.
//
// Formula: with A = A_0 + A_1 + .. the parts of the digits and d_i A = A - A_0 - .. - A_{i-1}, likewise of B, the product of the
// levels i + j < r leaves out
//
//   E_r = A B - sum_{i+j<r} A_i B_j = sum_{i<r} A_i (d_{r-i} B) + (d_r A) B,
//
// in which no term is a difference of large numbers. The pass over B (look_right) computes V_i = (d_i B) W for i = 0..kPlanes. The
// pass over A (look_left) computes E_r W from them for both r, and A V_0 for the norm of A B. Beside the 16 probes runs their norm
// wbar: |d_i B| wbar, then sum_i |A_i| |d_{r-i} B| wbar + |d_r A| |B| wbar, which bounds what the sums themselves round.
//
// sm_80 and later; bound by FFMA. Sums are IEEE float32: chains of kChain columns, then kRunSteps * kStep / kChain chains of a warp;
// beyond that float64. look.py counts their roundings. Work: a CTA of 8 warps takes 32 rows; the warps take 16 columns each in
// turn, a lane two rows and eight probes of them. Pipeline: kStages stages per warp, filled by cp.async.
// look_left: the last CTA adds the records of all CTAs in their order, bounds both errors, and picks the product to run.
// Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1 (rounding of sums).
#pragma once

#include "convert/digits.cuh"

namespace magicube {

constexpr int kProbes = 16, kLookRows = 32, kLookWarps = 8, kLookThreads = 32 * kLookWarps;
constexpr int kStep = 16, kChain = 8, kRunSteps = 8;  // columns per step of a warp, per chain; steps between float64 sums
constexpr int kHalf = kProbes / 2, kOwnRows = 2;  // probes and rows of a lane
constexpr int kScratchPitch = kLookRows + 2;  // the two halves of a warp store to different banks
constexpr int kScratch = kLookWarps * kProbes * kScratchPitch;  // floats
constexpr int kTriangle = kProbes * (kProbes + 1) / 2;
// A record: both Gram matrices by their upper triangles, ||A V_0||^2, the squares of both bounds, scales out of range.
constexpr int kSums = 2 * kTriangle, kRecord = kSums + 4;
constexpr int kFactors = 1025;  // of shares 0/1024 to 1024/1024

// X (rows, columns) row-major, or X^T if C::kTransposed. `pitch`: elements from one row in memory to the next; `vector`: runs of
// four elements are 16-byte aligned.
struct LookMatrix {
  const float* x;
  int64_t pitch, rows, columns;
  bool vector;
};

// Input vectors (kInputs, pitch, 16) and bounds (kInputs, pitch); pitch is a multiple of 32.
struct LookVectors {
  const float *vectors, *bounds;
  int64_t pitch;
};

template <class C>
struct Look {
  static constexpr int kPlanes = C::kPlanes, kInputs = C::kLeft ? kPlanes + 1 : 1;
  static constexpr int kOutputs = C::kLeft ? 3 : kPlanes + 1;  // left: both errors, and A V_0
  static constexpr int kBounds = C::kLeft ? 2 : kPlanes + 1;
  static constexpr int kMatrixBytes = kLookRows * kStep * 4, kVectorBytes = kStep * kProbes * 4, kBoundBytes = kStep * 4;
  static constexpr int kStageBytes = kMatrixBytes + kInputs * (kVectorBytes + kBoundBytes);
  static constexpr int kRingBytes = C::kStages * kStageBytes * kLookWarps;
  static_assert(kRingBytes + kScratch * 4 == C::kSmemBytes, "the host has made room for them");

  // Sums of a lane: outputs and bounds of its rows and probes.
  struct Sums {
    float of[kOutputs][kOwnRows][kHalf], bound[kBounds][kOwnRows];
  };
  // A thread's sums over all columns: entries threadIdx.x and threadIdx.x + 256 of (row, probe); bounds in the first 32 threads.
  struct Totals {
    double of[kOutputs][kOwnRows], bound[kBounds];
  };

  // Row of the tile: the i-th of the lanes with `pair`.
  __device__ __forceinline__ static int own_row(int pair, int i) { return C::kTransposed ? 2 * pair + i : pair + 16 * i; }

  // Start the copy of four elements, of which `valid` exist.
  __device__ __forceinline__ static void copy_four(uint32_t to, const float* from, int valid, bool vector) {
    if (vector) {
      cp_async(to, from, 4 * valid);
      return;
    }
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i < valid) copy_async_word(to + 4 * i, from + i);
      else store_shared(to + 4 * i, 0);
    }
  }

  // Start the copies of a step: X (32, 16) from `corner` and `column` on, swizzled, or (16, 32); vectors; bounds.
  __device__ __forceinline__ static void fetch(const LookMatrix& x, const LookVectors& v, int64_t corner, int64_t column,
                                               uint32_t stage) {
    const int lane = threadIdx.x % 32;
    if (column < x.columns) {
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int i = lane + 32 * j, quads = C::kTransposed ? kLookRows / 4 : kStep / 4;
        const int line = i / quads, run = i % quads;
        const int64_t first = (C::kTransposed ? column : corner) + line, across = (C::kTransposed ? corner : column) + 4 * run;
        const int64_t lines = C::kTransposed ? x.columns : x.rows, length = C::kTransposed ? x.rows : x.columns;
        const int valid = first < lines ? int(max(int64_t{0}, min(length - across, int64_t{4}))) : 0;
        const uint32_t to = C::kTransposed ? line * (kLookRows * 4) + run * 16 : swizzled<kStep * 4>(line, run);
        copy_four(stage + to, valid ? x.x + first * x.pitch + across : x.x, valid, x.vector);
      }
      const uint32_t vectors = stage + kMatrixBytes, bounds = vectors + kInputs * kVectorBytes;
      CUTE_UNROLL
      for (int g = 0; g < kInputs; ++g) {
        CUTE_UNROLL
        for (int j = 0; j < kVectorBytes / 512; ++j) {
          const int at = lane + 32 * j;
          cp_async(vectors + g * kVectorBytes + 16 * at, v.vectors + (g * v.pitch + column) * kProbes + 4 * at, 16);
        }
      }
      if (lane < 4 * kInputs) cp_async(bounds + 16 * lane, v.bounds + lane / 4 * v.pitch + column + lane % 4 * 4, 16);
    }
    cp_async_commit();
  }

  // An element's digit parts and what each number of digits leaves: rest[0] is the element.
  struct Parts {
    float part[kPlanes], rest[kPlanes + 1];

    __device__ __forceinline__ Parts(float x, const DigitScale& by, const DigitRule& rule) {
      rest[0] = x;
      take_digits<kPlanes>(x, by, rule, [&](int plane, uint32_t, float residual) {
        rest[plane + 1] = residual, part[plane] = rest[plane] - residual;
      });
    }
  };

  // Call add(output, input, factor) for the terms of all outputs; bounds have the same ones but the last output's.
  template <class Add>
  __device__ __forceinline__ static void for_each_term(const Parts& x, const Add& add) {
    if constexpr (C::kLeft) {
      CUTE_UNROLL
      for (int error = 0; error < 2; ++error) {
        const int digits = kPlanes - 1 + error;
        CUTE_UNROLL
        for (int i = 0; i < digits; ++i) add(error, digits - i, x.part[i]);
        add(error, 0, x.rest[digits]);
      }
      add(2, 0, x.rest[0]);
    } else {
      CUTE_UNROLL
      for (int i = 0; i <= kPlanes; ++i) add(i, 0, x.rest[i]);
    }
  }

  // Add a step in shared memory to `sums`. `by`: scales of the lane's rows; with !kLeft of the step's columns, in shared memory.
  __device__ __forceinline__ static void add_step(const uint8_t* stage, const DigitScale (&by)[kOwnRows], const float2* units,
                                                  const DigitRule& rule, Sums& sums) {
    const int lane = threadIdx.x % 32, pair = lane % 16, half = lane / 16;
    const uint8_t *vectors = stage + kMatrixBytes + half * kHalf * 4, *bounds = stage + kMatrixBytes + kInputs * kVectorBytes;
    CUTE_NO_UNROLL
    for (int chain = 0; chain < kStep; chain += kChain) {
      float part[kOutputs][kOwnRows][kHalf] = {};
      CUTE_NO_UNROLL
      for (int first = chain; first < chain + kChain; first += 4) {
        float x[kOwnRows][4];  // (row, column)
        if constexpr (C::kTransposed) {
          CUTE_UNROLL
          for (int c = 0; c < 4; ++c) {
            const float2 both = reinterpret_cast<const float2*>(stage + (first + c) * kLookRows * 4)[pair];
            x[0][c] = both.x, x[1][c] = both.y;
          }
        } else {
          CUTE_UNROLL
          for (int i = 0; i < kOwnRows; ++i) {
            const float4 four = *reinterpret_cast<const float4*>(stage + swizzled<kStep * 4>(own_row(pair, i), first / 4));
            x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
          }
        }
        CUTE_UNROLL
        for (int c = 0; c < 4; ++c) {
          float v[kInputs][kHalf], beside[kInputs];
          CUTE_UNROLL
          for (int g = 0; g < kInputs; ++g) {
            const auto* from = reinterpret_cast<const float4*>(vectors + g * kVectorBytes + (first + c) * kProbes * 4);
            const float4 low = from[0], high = from[1];
            v[g][0] = low.x, v[g][1] = low.y, v[g][2] = low.z, v[g][3] = low.w;
            v[g][4] = high.x, v[g][5] = high.y, v[g][6] = high.z, v[g][7] = high.w;
            beside[g] = reinterpret_cast<const float*>(bounds + g * kBoundBytes)[first + c];
          }
          DigitScale own{1.0f, 0.0f, 0.0f};
          if constexpr (!C::kLeft) own.inverse = units[first + c].x, own.unit = units[first + c].y;
          CUTE_UNROLL
          for (int i = 0; i < kOwnRows; ++i) {
            const Parts parts(x[i][c], C::kLeft ? by[i] : own, rule);
            for_each_term(parts, [&](int output, int input, float factor) {
              CUTE_UNROLL
              for (int p = 0; p < kHalf; ++p) part[output][i][p] = __fmaf_rn(factor, v[input][p], part[output][i][p]);
              if (output < kBounds) sums.bound[output][i] = __fmaf_rn(fabsf(factor), beside[input], sums.bound[output][i]);
            });
          }
        }
      }
      CUTE_UNROLL
      for (int o = 0; o < kOutputs; ++o) {
        CUTE_UNROLL
        for (int i = 0; i < kOwnRows; ++i) {
          CUTE_UNROLL
          for (int p = 0; p < kHalf; ++p) sums.of[o][i][p] = __fadd_rn(sums.of[o][i][p], part[o][i][p]);
        }
      }
    }
  }

  // Add the sums of all warps to the totals, in the order of the warps, and clear them.
  __device__ __forceinline__ static void flush(Sums& sums, Totals& totals, float* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pair = lane % 16, half = lane / 16;
    const auto at = [&](int of, int probe, int row) -> float& { return scratch[(of * kProbes + probe) * kScratchPitch + row]; };
    CUTE_UNROLL
    for (int o = 0; o < kOutputs; ++o) {
      CUTE_UNROLL
      for (int i = 0; i < kOwnRows; ++i) {
        CUTE_UNROLL
        for (int p = 0; p < kHalf; ++p) at(warp, half * kHalf + p, own_row(pair, i)) = sums.of[o][i][p], sums.of[o][i][p] = 0.0f;
      }
      __syncthreads();
      CUTE_UNROLL
      for (int e = 0; e < kOwnRows; ++e) {
        const int entry = threadIdx.x + e * kLookThreads;
        CUTE_UNROLL
        for (int w = 0; w < kLookWarps; ++w) totals.of[o][e] += at(w, entry % kProbes, entry / kProbes);
      }
      __syncthreads();
    }
    CUTE_UNROLL
    for (int b = 0; b < kBounds; ++b) {
      CUTE_UNROLL
      for (int i = 0; i < kOwnRows; ++i) {
        if (half == 0) at(warp, b, own_row(pair, i)) = sums.bound[b][i];
        sums.bound[b][i] = 0.0f;
      }
    }
    __syncthreads();
    CUTE_UNROLL
    for (int b = 0; b < kBounds; ++b) {
      CUTE_UNROLL
      for (int w = 0; w < kLookWarps; ++w) totals.bound[b] += at(w, b, lane);
    }
    __syncthreads();
  }

  // Totals of the 32 rows from `corner` on.
  __device__ __forceinline__ static Totals run(const LookMatrix& x, const LookVectors& v, const float* scales,
                                               const DigitRule& rule, int64_t corner, uint8_t* shared, float* scratch) {
    __shared__ float2 units[kLookWarps][kStep];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto scale_at = [&](int64_t at, int64_t end) { return at < end ? prepare_scale(__ldg(scales + at)) : DigitScale{}; };
    DigitScale by[kOwnRows] = {};
    if constexpr (C::kLeft) {
      CUTE_UNROLL
      for (int i = 0; i < kOwnRows; ++i) {
        by[i] = scale_at(corner + own_row(lane % 16, i), x.rows);
        by[i].bias_factor = 1.0f;  // others are out of range: discarded
      }
    }
    uint8_t* ring = shared + warp * C::kStages * kStageBytes;
    const int steps = int((x.columns + kLookWarps * kStep - 1) / (kLookWarps * kStep));
    const auto column_at = [&](int step) { return (int64_t{step} * kLookWarps + warp) * kStep; };
    Sums sums = {};
    Totals totals = {};
    CUTE_UNROLL
    for (int stage = 0; stage < C::kStages - 1; ++stage) {
      fetch(x, v, corner, column_at(stage), shared_address(ring + stage * kStageBytes));
    }
    int stage = 0, ahead = C::kStages - 1;
    for (int step = 0; step < steps; ++step) {
      const int64_t column = column_at(step);
      cp_async_wait<C::kStages - 2>();
      __syncwarp();  // the copies of all lanes are there, and all have read the stage that is filled next
      fetch(x, v, corner, column_at(step + C::kStages - 1), shared_address(ring + ahead * kStageBytes));
      if constexpr (!C::kLeft) {
        if (lane < kStep) {
          const DigitScale scale = scale_at(column + lane, x.columns);
          units[warp][lane] = make_float2(scale.inverse, scale.unit);
        }
        __syncwarp();
      }
      if (column < x.columns) add_step(ring + stage * kStageBytes, by, units[warp], rule, sums);
      stage = stage + 1 == C::kStages ? 0 : stage + 1, ahead = ahead + 1 == C::kStages ? 0 : ahead + 1;
      if ((step + 1) % kRunSteps == 0 || step + 1 == steps) flush(sums, totals, scratch);
    }
    cp_async_wait<0>();
    return totals;
  }
};

// The pass over B (K, N), with W (N, 16) and wbar (N): V (kPlanes + 1, y_pitch, 16) and |d_i B| wbar (kPlanes + 1, y_pitch); a CTA
// is a tile. `scales`: per column.
template <class C>
__global__ void __launch_bounds__(kLookThreads, 1)
look_right(const float* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const float* w, const float* wbar,
           int64_t w_pitch, const float* scales, float radix, float ahead0, float ahead1, float* y, float* y_bounds,
           int64_t y_pitch) {
  pdl_wait();
  using L = Look<C>;
  extern __shared__ __align__(16) uint8_t shared[];
  float* scratch = reinterpret_cast<float*>(shared + L::kRingBytes);
  const int64_t corner = int64_t{blockIdx.x} * kLookRows;
  const DigitRule rule{0.0f, radix, {ahead0, ahead1}, false};
  const auto totals = L::run({x, pitch, rows, columns, vector != 0}, {w, wbar, w_pitch}, scales, rule, corner, shared, scratch);
  CUTE_UNROLL
  for (int i = 0; i <= C::kPlanes; ++i) {
    CUTE_UNROLL
    for (int e = 0; e < kOwnRows; ++e) {
      const int entry = threadIdx.x + e * kLookThreads;
      y[(i * y_pitch + corner) * kProbes + entry] = float(totals.of[i][e]);
    }
    if (threadIdx.x < kLookRows) y_bounds[i * y_pitch + corner + threadIdx.x] = float(totals.bound[i]);
  }
}

// What the choice takes beside the sums.
struct LookLimits {
  double rounding[2];  // of the sums of E_r W, relative to their bounds
  double floor;  // what numbers below the range of float32 lose
  double product[2];  // rounding of the products, relative to C
  double allowed;  // tol / (1 + tol)
};

// Number of `scales` that this thread sees to be NaN or out of [least, most].
__device__ __forceinline__ double out_of_range(const float* scales, int64_t count, float least, float most) {
  int found = 0;
  for (int64_t i = int64_t{blockIdx.x} * kLookThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kLookThreads) {
    const float scale = scales[i];
    found += scale >= least && scale <= most ? 0 : 1;
  }
  return found;
}

// Upper bound of the largest eigenvalue of a Gram matrix of trace 1: lambda^32 <= trace(G^32). All threads take part.
__device__ __forceinline__ double largest_share(double (&gram)[kProbes][kProbes + 1], double (&other)[kProbes][kProbes + 1],
                                                double* warp_sums) {
  const int i = threadIdx.x / kProbes, j = threadIdx.x % kProbes;
  auto *from = &gram, *to = &other;
  for (int power = 0; power < 4; ++power) {
    double sum = 0.0;
    for (int k = 0; k < kProbes; ++k) sum += (*from)[i][k] * (*from)[k][j];
    (*to)[i][j] = sum;
    __syncthreads();
    auto* const swapped = from;
    from = to, to = swapped;
  }
  double sum = (*from)[i][j] * (*from)[i][j];
  CUTE_UNROLL
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0;
  for (int warp = 0; warp < kLookWarps; ++warp) sum += warp_sums[warp];
  __syncthreads();  // they may be written again
  for (int root = 0; root < 5; ++root) sum = sqrt(sum);
  return min(sum * (1.0 + 1e-12), 1.0);
}

// Bound both errors from the sums of all CTAs and pick the first product that is predicted to be within the tolerance.
// `record` (8): error, bound and the part of the bound that the probes' rounding takes, of both; the norm of A B; scales out of
// range. `gate`: levels of the picked product, minus 1; -1 for none.
__device__ __forceinline__ void choose(const double (&sums)[kRecord], double* scratch, const LookLimits& limits,
                                       const double* factors, int first, double* record, int* gate) {
  using Gram = double[kProbes][kProbes + 1];
  Gram& gram = *reinterpret_cast<Gram*>(scratch);
  Gram& other = *reinterpret_cast<Gram*>(scratch + sizeof(Gram) / 8);
  double* warp_sums = scratch + 2 * sizeof(Gram) / 8;
  const int i = threadIdx.x / kProbes, j = threadIdx.x % kProbes, low = min(i, j), high = max(i, j);
  const double infinity = __longlong_as_double(0x7ff0000000000000ll), size = sqrt(sums[kSums] / kProbes);
  int picked = -1;
  for (int r = 1; r >= 0; --r) {
    const double* of = sums + r * kTriangle;
    double trace = 0.0;
    for (int k = 0; k < kProbes; ++k) trace += of[k * (k + 1) / 2 + k];
    const double norm = sqrt(trace), rounding = r == 0 ? limits.rounding[0] : limits.rounding[1];
    const double noise = rounding * sqrt(sums[kSums + 1 + r]) + limits.floor + 0x1p-52 * norm;
    gram[i][j] = of[high * (high + 1) / 2 + low] / trace;
    __syncthreads();
    double share = largest_share(gram, other, warp_sums);
    const double relative = noise / norm, spread = (sqrt(share) + relative) / (1.0 - relative);
    share = relative < 1.0 && spread < 1.0 ? spread * spread : 1.0;
    const double factor = factors[r * kFactors + int(ceil(share * (kFactors - 1)))];
    double bound = factor * (norm + noise) / 4.0;  // sqrt(kProbes)
    if (!(bound < infinity)) bound = infinity;
    const double total = bound + (r == 0 ? limits.product[0] : limits.product[1]) * size;
    if (sums[kSums + 3] == 0.0 && total <= limits.allowed * size) picked = first + r;
    if (threadIdx.x == 0) record[3 * r] = norm / 4.0, record[3 * r + 1] = bound, record[3 * r + 2] = factor * noise / 4.0;
    __syncthreads();  // the matrices may be written again
  }
  if (threadIdx.x == 0) record[6] = size, record[7] = sums[kSums + 3], *gate = picked;
}

// The pass over A (M, K), with V and the bounds of look_right; persistent CTAs. `parts` (CTAs, kRecord); `ticket` is 0 before and
// after. `scales`: per row; `other_scales`: of B's columns. `factors` (2, 1025): see look.py.
template <class C>
__global__ void __launch_bounds__(kLookThreads, 1)
look_left(const float* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const float* v, const float* bounds,
          int64_t v_pitch, const float* scales, float radix, float ahead0, float ahead1, const float* other_scales,
          int64_t other_count, float least, float most, double rounding0, double rounding1, double floor, double product0,
          double product1, double allowed, const double* factors, double* parts, double* record, int* gate, uint32_t* ticket) {
  pdl_wait();
  using L = Look<C>;
  using Values = double[kProbes][kLookRows + 1];
  static_assert(sizeof(Values) <= kScratch * 4 && (kRecord + 3 * kProbes * kProbes) * 8 <= kScratch * 4, "scratch holds either");
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ double others[4][kLookWarps];
  __shared__ uint32_t arrived;
  float* scratch = reinterpret_cast<float*>(shared + L::kRingBytes);
  Values& values = *reinterpret_cast<Values*>(scratch);
  const DigitRule rule{0.0f, radix, {ahead0, ahead1}, false};
  const int i = threadIdx.x / kProbes, j = threadIdx.x % kProbes, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  double gram[2] = {}, more[4] = {};
  for (int64_t corner = int64_t{blockIdx.x} * kLookRows; corner < rows; corner += int64_t{gridDim.x} * kLookRows) {
    const auto totals = L::run({x, pitch, rows, columns, vector != 0}, {v, bounds, v_pitch}, scales, rule, corner, shared, scratch);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int e = 0; e < kOwnRows; ++e) values[j][i + 16 * e] = totals.of[r][e];  // entry e is row i + 16 e, probe j
      __syncthreads();
      for (int row = 0; row < kLookRows; ++row) gram[r] += values[i][row] * values[j][row];
      __syncthreads();
      if (threadIdx.x < kLookRows) more[1 + r] += totals.bound[r] * totals.bound[r];
      more[0] += totals.of[2][r] * totals.of[2][r];
    }
  }
  more[3] = out_of_range(scales, rows, least, most) + out_of_range(other_scales, other_count, least, most);
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
  __threadfence();  // the record is visible before the ticket
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicAdd(ticket, 1u);
  __syncthreads();
  if (arrived + 1 != gridDim.x) return;
  __threadfence();
  double* sums = reinterpret_cast<double*>(scratch);  // (kRecord,), then the matrices of choose()
  for (int column = threadIdx.x; column < kRecord; column += kLookThreads) {
    double sum = 0.0;
#pragma unroll 8
    for (int block = 0; block < int(gridDim.x); ++block) sum += __ldcg(parts + int64_t{block} * kRecord + column);
    sums[column] = sum;
  }
  __syncthreads();
  const LookLimits limits{{rounding0, rounding1}, floor, {product0, product1}, allowed};
  choose(*reinterpret_cast<const double(*)[kRecord]>(sums), sums + kRecord, limits, factors, C::kPlanes - 2, record, gate);
  if (threadIdx.x == 0) *ticket = 0;
}

}  // namespace magicube
