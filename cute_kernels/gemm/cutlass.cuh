// Entry points of CUTLASS kernels whose types cutlass_library emits: D = A B^T, A (M, K) and B (N, K) int8, K-major, D int32.
//
// A host compiler would make a kernel's parameters; here thread 0 of each CTA makes them, in shared memory. So kernels with tensor
// maps among their parameters have no entry point: a map must lie in global, constant or parameter memory.
// Source: CUTLASS 4.2, gemm/device/gemm_universal_base.h and gemm_universal_adapter.h.
#pragma once

#include <cute/int_tuple.hpp>

namespace magicube {

// CUTLASS 2.x: a tile per CTA. kSmem: dynamic shared memory of the launch.
template <class Gemm, int kSmem>
__global__ void __launch_bounds__(Gemm::kThreadCount, 1)
cutlass_gemm_2x(const int8_t* a, int64_t pitch_a, const int8_t* b, int64_t pitch_b, int* out, int64_t pitch, int m, int n, int k) {
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

// CUTLASS 3.x without tensor maps: a persistent grid of gridDim.x CTAs. D is column-major there, so that operands trade places.
template <class Gemm, int kSmem>
__global__ void __launch_bounds__(Gemm::MaxThreadsPerBlock, 1)
cutlass_gemm_3x(const int8_t* a, int64_t pitch_a, const int8_t* b, int64_t pitch_b, int* out, int64_t pitch, int m, int n, int k) {
  using Params = typename Gemm::Params;
  using Mainloop = typename Gemm::CollectiveMainloop;
  using Epilogue = typename Gemm::CollectiveEpilogue;
  constexpr int kStorage = (Gemm::SharedStorageSize + 127) / 128 * 128;
  static_assert(kSmem >= kStorage + int(sizeof(Params)));
  extern __shared__ __align__(128) uint8_t shared[];
  auto& params = *reinterpret_cast<Params*>(shared + kStorage);
  if (threadIdx.x == 0) {
    typename Gemm::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = {n, m, k, 1};
    arguments.mainloop.ptr_A = b;
    arguments.mainloop.dA = {pitch_b, cute::_1{}, 0};
    arguments.mainloop.ptr_B = a;
    arguments.mainloop.dB = {pitch_a, cute::_1{}, 0};
    arguments.epilogue.thread.alpha = 1;
    arguments.epilogue.thread.beta = 0;
    arguments.epilogue.ptr_D = out;
    arguments.epilogue.dC = arguments.epilogue.dD = {cute::_1{}, pitch, 0};
    arguments.hw_info.sm_count = arguments.hw_info.max_active_clusters = gridDim.x;
    const auto& shape = arguments.problem_shape;
    params = Params{arguments.mode, shape, Mainloop::to_underlying_arguments(shape, arguments.mainloop, nullptr),
                    Epilogue::to_underlying_arguments(shape, arguments.epilogue, nullptr), arguments.hw_info,
                    Gemm::TileScheduler::to_underlying_arguments(shape, typename Gemm::TileShape{}, typename Gemm::ClusterShape{},
                                                                 arguments.hw_info, arguments.scheduler, nullptr)};
  }
  __syncthreads();
  Gemm()(params, reinterpret_cast<char*>(shared));
}

}  // namespace magicube
