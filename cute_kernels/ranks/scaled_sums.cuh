// Sums over ranks of int32 matrices, read where they lie, scaled to rows: out[n, m] = sum_r part_r[n, m] * first * second + bias[m].
//
// Roundings are those of the epilogues of one GPU: the sum to float32, each product, and the last product and the bias at once.
// Architectures: sm_80 and later. Bound by what travels from other GPUs.
// Work: a CTA has a tile of 64 x 64 entries. Pipeline: loads of 16 bytes of all ranks are in flight together; results pass through
// shared memory, so that rows are written 16 bytes at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
#include <cute/config.hpp>

#include "device/copy.cuh"

namespace magicube {

constexpr int kSumsTile = 64, kSumsThreads = 256, kSumsRun = 4;  // entries of a side; of a load

// Parts (tokens, outputs): rows `pitch` apart, or columns if C::kColumns. first, second: null, or scales with steps from an output and
// from a token to the next. bias (outputs,) or null. vector_loads, vector_stores: whether runs of a part and of out are aligned.
template <class C>
__global__ void __launch_bounds__(kSumsThreads)
scaled_sums(const int* part0, const int* part1, const int* part2, const int* part3, const int* part4, const int* part5,
            const int* part6, const int* part7, int64_t pitch, int64_t tokens, int64_t outputs, const float* first,
            int64_t first_output, int64_t first_token, const float* second, int64_t second_output, int64_t second_token,
            const float* bias, void* out, int64_t vector_loads, int64_t vector_stores) {
  pdl_wait();
  using Out = typename C::Out;
  constexpr int kVec = 16 / int(sizeof(Out)), kLines = kSumsThreads * kSumsRun / kSumsTile;  // lines of a pass
  __shared__ __align__(16) Out tile[kSumsTile][kSumsTile + kVec];                            // (token, output)
  const int* const parts[8] = {part0, part1, part2, part3, part4, part5, part6, part7};
  const int64_t across = (outputs + kSumsTile - 1) / kSumsTile;
  const int64_t output0 = blockIdx.x % across * kSumsTile, token0 = blockIdx.x / across * kSumsTile;
  const int64_t lines = C::kColumns ? outputs : tokens, length = C::kColumns ? tokens : outputs;
  const int64_t line0 = C::kColumns ? output0 : token0, along0 = C::kColumns ? token0 : output0;
  const int run = int(threadIdx.x) % (kSumsTile / kSumsRun) * kSumsRun;
  CUTE_UNROLL
  for (int pass = 0; pass < kSumsTile / kLines; ++pass) {
    const int own = pass * kLines + int(threadIdx.x) / (kSumsTile / kSumsRun);
    const int64_t line = line0 + own, along = along0 + run;
    if (line >= lines || along >= length) continue;
    int sum[kSumsRun] = {};
    CUTE_UNROLL
    for (int r = 0; r < C::kRanks; ++r) {
      const int* from = parts[r] + line * pitch + along;
      if (vector_loads && along + kSumsRun <= length) {
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        sum[0] += int(four.x), sum[1] += int(four.y), sum[2] += int(four.z), sum[3] += int(four.w);
      } else {
        CUTE_UNROLL
        for (int i = 0; i < kSumsRun; ++i) sum[i] += along + i < length ? from[i] : 0;
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kSumsRun; ++i) {
      if (along + i >= length) continue;
      const int64_t output = C::kColumns ? line : along + i, token = C::kColumns ? along + i : line;
      float x = static_cast<float>(sum[i]);
      if (first) x = __fmul_rn(x, first[output * first_output + token * first_token]);
      const float by = second ? second[output * second_output + token * second_token] : 1.0f;
      x = bias ? __fmaf_rn(x, by, bias[output]) : __fmul_rn(x, by);
      tile[token - token0][output - output0] = static_cast<Out>(x);
    }
  }
  __syncthreads();
  constexpr int kRuns = kSumsTile / kVec;
  for (int i = threadIdx.x; i < kSumsTile * kRuns; i += kSumsThreads) {
    const int row = i / kRuns, column = i % kRuns * kVec;
    const int64_t token = token0 + row, output = output0 + column;
    if (token >= tokens || output >= outputs) continue;
    Out* to = static_cast<Out*>(out) + token * outputs + output;
    if (vector_stores) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&tile[row][column]);
    } else {
      for (int e = 0; e < kVec && output + e < outputs; ++e) to[e] = tile[row][column + e];
    }
  }
}

}  // namespace magicube
