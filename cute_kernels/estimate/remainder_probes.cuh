// Error of a product of digits, one per element, estimated by 16 probes W before the product is computed.
//
// With dA and dB the remainders of A and B: A B - (A - dA) (B - dB) = A dB + dA (B - dB). The pass over B computes u = B W
// and v = dB W; the pass over A computes A u and A v + dA (u - v). Sums of digits are exact, so the rounding of the product
// to float32 alone is not seen.
//
// sm_80 and later; memory-bound. Work and pipeline: those of estimate/probes.cuh. All products are tf32 with truncated
// elements: each factor loses at most 2^-10 of itself, and the estimate is within 1%. A u gives the norm of A B. Source: Gu,
// arXiv 2403.06924.
#pragma once

#include "convert/digits.cuh"
#include "estimate/probe_compare.cuh"

namespace magicube {

// Sums of X W, and of products with remainders.
struct RemainderParts {
  ProbeParts whole, remainder;
};

// Compute the sums of a tile into shared memory. For B, with per-column scales: u and v. For A (C::kLhs), with per-row scales and
// `vectors` u and v: A u, and what the product of digits leaves out.
template <class C>
__device__ __forceinline__ void remainder_tile(const ProbeMatrix<float>& x, const float* vectors, int64_t pitch,
                                          const float* scales, const DigitRule& rule, int64_t tile, uint8_t* shared) {
  using Runs = ProbeRuns<float, C::kTransposed>;
  using Atom = cute::SM80_16x8x8_F32TF32TF32F32_TN;
  using Tile = ProbeTile<C::kGroups>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  DigitScale by[4];  // of a lane's four rows, or of its four columns
  const auto factors_at = [&](int64_t at, int64_t end) { return at < end ? prepare_scale(__ldg(scales + at)) : DigitScale{}; };
  if constexpr (C::kLhs) {
    const int64_t corner = tile * Tile::kRows + warp / Tile::kSplits * kWarpRows;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) by[i] = factors_at(corner + (C::kTransposed ? g * kRun + i : g + 8 * i), x.rows);
  }
  const ProbeVectors of_v(vectors + kProbes * pitch, pitch, int(x.columns));
  float sums[kTiles][4] = {}, remainder[kTiles][4] = {};
  const auto add = [](float(&sum)[4], const float(&w)[4], float first, float second) {
    Atom::fma(sum[0], sum[1], sum[2], sum[3], __float_as_uint(w[0]), __float_as_uint(w[1]), __float_as_uint(w[2]),
              __float_as_uint(w[3]), __float_as_uint(first), __float_as_uint(second), sum[0], sum[1], sum[2], sum[3]);
  };
  walk_tile<C, C::kTransposed>(x, vectors, pitch, tile, shared, [&](const Runs& here, const float4(&u_here)[2], int at,
                                                                  int64_t, int) {
    float4 v_here[2];
    if constexpr (C::kLhs) of_v.load(at, v_here);
    if constexpr (!C::kLhs) {
      const DigitScale own = factors_at(at + lane % kDepth, x.columns);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        by[i].inverse = __shfl_sync(~0u, own.inverse, t * kRun + i), by[i].unit = __shfl_sync(~0u, own.unit, t * kRun + i);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) by[i].bias_factor = 1.0f;  // others are out of range: discarded
    CUTE_UNROLL
    for (int i = 0; i < kRun; i += 2) {
      float u[4], less[4], v[4];  // elements i and i + 1 of both halves of the probes
      CUTE_UNROLL
      for (int c = 0; c < 4; ++c) {
        const auto entry = [&](const float4(&of)[2]) {
          const float4& four = of[c % 2];
          return i == 0 ? (c / 2 == 0 ? four.x : four.y) : c / 2 == 0 ? four.z : four.w;
        };
        u[c] = entry(u_here), less[c] = u[c];
        if constexpr (C::kLhs) v[c] = entry(v_here), less[c] -= v[c];
      }
      CUTE_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        float digit_remainder[2];  // remainders of both elements
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          take_digits<1>(here.at(tile, i + c), by[C::kLhs ? tile : i + c], rule,
                         [&](int, uint32_t, float remainder) { digit_remainder[c] = remainder; });
        }
        add(sums[tile], u, here.at(tile, i), here.at(tile, i + 1));
        add(remainder[tile], less, digit_remainder[0], digit_remainder[1]);
        if constexpr (C::kLhs) add(remainder[tile], v, here.at(tile, i), here.at(tile, i + 1));
      }
    }
  });
  static_assert(sizeof(RemainderParts) == C::kPartsBytes, "smem_bytes of the host must hold the parts");
  RemainderParts& parts = *reinterpret_cast<RemainderParts*>(shared);
  parts.whole.template put<C::kTransposed>(sums);
  parts.remainder.template put<C::kTransposed>(remainder);
}

// Emit u and v (2, 16, y_pitch); a CTA is a tile.
template <class C>
__global__ void __launch_bounds__(kProbeThreads)
probe_rest(const float* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const float* w, int64_t w_pitch,
           const float* scales, float radix, float* y, int64_t y_pitch) {
  pdl_wait();
  using Tile = ProbeTile<C::kGroups>;
  extern __shared__ __align__(16) uint8_t shared[];
  const ProbeMatrix<float> matrix{x, pitch, rows, columns, vector != 0};
  remainder_tile<C>(matrix, w, w_pitch, scales, {0.0f, radix, {}, false}, blockIdx.x, shared);
  __syncthreads();
  const RemainderParts& parts = *reinterpret_cast<const RemainderParts*>(shared);
  const int64_t corner = int64_t{blockIdx.x} * Tile::kRows;
  for (int i = threadIdx.x; i < 2 * Tile::kSums; i += kProbeThreads) {
    const int probe = i / Tile::kRows, row = i % Tile::kRows;
    const ProbeParts& of = probe < kProbes ? parts.whole : parts.remainder;
    if (corner + row < y_pitch) y[probe * y_pitch + corner + row] = of.sum<C::kGroups>(probe % kProbes, row);
  }
}

// estimate_tiles of A u and of what the product leaves out; `vectors`: u and v, `row_scales`: the scales of A's rows.
template <class C>
__global__ void __launch_bounds__(kProbeThreads)
judge_rest(const float* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const float* vectors, int64_t w_pitch,
           const float* row_scales, const float* col_scales, int64_t col_count, float radix, float least, float most, double* out) {
  pdl_wait();
  extern __shared__ __align__(16) uint8_t shared[];
  const RemainderParts& parts = *reinterpret_cast<const RemainderParts*>(shared);
  const ProbeMatrix<float> matrix{x, pitch, rows, columns, vector != 0};
  estimate_tiles<C>(
      rows, shared, row_scales, rows, col_scales, col_count, least, most, out,
      [&](int64_t tile) {
        remainder_tile<C>(matrix, vectors, w_pitch, row_scales, {0.0f, radix, {}, false}, tile, shared);
        return 0.0;
      },
      [&](int probe, int row, int64_t) {
        return ProbeValues{parts.whole.template sum<C::kGroups>(probe, row), 0.0,
                           parts.remainder.template sum<C::kGroups>(probe, row)};
      });
}

}  // namespace magicube
