// Multistage TMA pipeline (sm_90+): the producer fills a ring of kStages tiles, the consumer warps release them; the
// same in all CTAs of a cluster. Shared memory: kStages tiles, then a full and an empty mbarrier per stage.
#pragma once

#include "device/cluster.cuh"

namespace magicube {

template <class C, int kBytes>
struct TmaPipeline {
  uint32_t base;

  __device__ uint32_t full(int stage) const { return base + kBytes + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return base + kBytes + 8 * (C::kStages + stage); }

  // Initialize, by all threads of the cluster: one thread produces, kWarps warps of each CTA consume.
  __device__ void open() const {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < C::kStages; ++stage) {
        barrier_init(full(stage), 1);
        barrier_init(empty(stage), C::kWarps * C::kCluster);
      }
      barrier_fence();
    }
    if constexpr (C::kCluster == 1) __syncthreads();
    else cluster::sync_relaxed();
  }

  // Drain: wait until all CTAs of the cluster, which arrive at this CTA's mbarriers, have released every stage.
  // parities: phase of each stage's fills.
  __device__ void close(uint32_t parities) const {
    if constexpr (C::kCluster == 1) return;
    for (int stage = 0; stage < C::kStages; ++stage) barrier_wait(empty(stage), (parities >> stage & 1) ^ 1);
  }

  // Consumer release: a warp arrives at the empty barrier of all CTAs that fill this stage.
  __device__ void release(int stage, int lane) const {
    if constexpr (C::kCluster == 1) {
      if (lane == 0) barrier_arrive(empty(stage));
    } else {
      if (lane < C::kCluster) cluster::arrive_at(empty(stage), lane);
    }
  }
};

// Stage of a tile, and the phase bit of each stage.
template <class C>
struct PipelineState {
  int stage = 0;
  uint32_t parities = 0;

  __device__ uint32_t parity() const { return parities >> stage & 1; }
  __device__ void advance() {
    parities ^= 1u << stage;
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
  __device__ int before(int tiles) const { return stage >= tiles ? stage - tiles : stage + C::kStages - tiles; }
};

}  // namespace magicube
