// Verdict on a product of digits that look.cuh has picked and a gated kernel of gemm/wgmma.cuh has computed.
//
// Formula: ||A B - C|| <= e = bound + value ||C|| + level || (sum_l |S_l| 2^(-shift l)) s ||, the last two terms the rounding of the
// epilogue; relative to A B at most e / (||C|| - e). The sums of squares are those of the product's warps, in float32: both are
// widened by kMargin.
//
// sm_80 and later. Work: one CTA. The results may lie in pinned memory: the last word is written after all others.
#pragma once

#include "device/copy.cuh"

namespace magicube {

constexpr int kVerdictThreads = 256, kGateHeader = 4;  // words before the sums of a gated product
constexpr double kMargin = 0x1p-8;  // relative, of sums of squares whose chains have up to 2^15 additions

// `record` and `gate`: see look.cuh. `warps`: of the two products, which have `first` + 1 and `first` + 2 levels. `value`, `level`:
// see above, the latter per product. `lost`: what squares below the range of float32 lose. `out` (16): the record; then levels - 1
// of the product, or -1 for none; estimate and noise of the relative error; norm of C; bound of the relative error; 0, 0, 1.
template <class C>
__global__ void __launch_bounds__(kVerdictThreads)
verdict(const double* record, const float* gate, int64_t warps0, int64_t warps1, int64_t first, double value, double level0,
        double level1, double lost, double* out) {
  pdl_wait();
  __shared__ double sums[2][kVerdictThreads / 32];
  const int picked = *reinterpret_cast<const int*>(gate), r = picked > int(first) ? 1 : 0;
  const double infinity = __longlong_as_double(0x7ff0000000000000ll);
  double found[2] = {}, looked[8];  // the record is on its way with the gate
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) looked[i] = record[i];
  const int64_t warps = picked < 0 ? 0 : r == 0 ? warps0 : warps1;
  for (int64_t warp = threadIdx.x; warp < warps; warp += kVerdictThreads) {
    const float2 both = reinterpret_cast<const float2*>(gate + kGateHeader)[warp];
    found[0] += both.x, found[1] += both.y;
  }
  CUTE_UNROLL
  for (int s = 0; s < 2; ++s) {
    CUTE_UNROLL
    for (int lane = 16; lane > 0; lane /= 2) found[s] += __shfl_xor_sync(~0u, found[s], lane);
    if (threadIdx.x % 32 == 0) sums[s][threadIdx.x / 32] = found[s];
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  double squares = 0.0, levels = 0.0;
  for (int warp = 0; warp < kVerdictThreads / 32; ++warp) squares += sums[0][warp], levels += sums[1][warp];
  const double size = looked[6], norm = picked < 0 ? size : sqrt(squares * (1.0 - kMargin));
  double upper = infinity;
  if (picked >= 0) {
    const double level = (r == 0 ? level0 : level1) * sqrt(levels * (1.0 + kMargin) + lost);
    const double error = (r == 0 ? looked[1] : looked[4]) + value * norm * (1.0 + kMargin) + level;
    if (norm < infinity && error < norm) upper = error / (norm - error);
  }
  const bool of_first = picked >= 0 && r == 0;  // none: the more accurate one
  for (int i = 0; i < 8; ++i) out[i] = looked[i];
  out[8] = picked, out[9] = (of_first ? looked[0] : looked[3]) / norm,
  out[10] = (of_first ? looked[2] : looked[5]) / norm, out[11] = norm, out[12] = upper;
  out[13] = out[14] = 0.0;
  __threadfence_system();
  *reinterpret_cast<volatile double*>(out + 15) = 1.0;
}

}  // namespace magicube
