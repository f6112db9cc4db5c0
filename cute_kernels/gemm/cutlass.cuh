// Entry point of CUTLASS kernels whose types cutlass_library emits: D = A B^T, A (M, K) and B (N, K) int8, K-major, D int32.
//
// A host compiler would make a kernel's parameters; here thread 0 of each CTA makes them, in shared memory. So kernels of CUTLASS 3.x
// have no entry point: their schedulers divide 128-bit integers, a trap on a GPU, and a tensor map must not lie there.
// Source: CUTLASS 4.2, gemm/device/gemm_universal_base.h and gemm_universal_adapter.h.
#pragma once

namespace magicube {

// CUTLASS 2.x: a tile per CTA. kSmem: dynamic shared memory of the launch.
template <class Gemm, int kSmem>
__global__ void __launch_bounds__(Gemm::kThreadCount, 1)
cutlass_gemm(const int8_t* a, int64_t pitch_a, const int8_t* b, int64_t pitch_b, int* out, int64_t pitch, int m, int n, int k) {
  static_assert(kSmem == sizeof(typename Gemm::SharedStorage));
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) uint8_t memory[sizeof(typename Gemm::Params)];
  auto& params = *reinterpret_cast<typename Gemm::Params*>(memory);
  if (threadIdx.x == 0) {
    const typename Gemm::EpilogueOutputOp::Params linear(1, 0);
    const typename Gemm::Arguments arguments(cutlass::gemm::GemmUniversalMode::kGemm, {m, n, k}, 1, linear, a, b, nullptr, out, 0, 0, 0,
                                             0, pitch_a, pitch_b, pitch, pitch);
    params = typename Gemm::Params(arguments, 1, 1);
  }
  __syncthreads();
  Gemm()(params, *reinterpret_cast<typename Gemm::SharedStorage*>(shared));
}

}  // namespace magicube
