// Operands of warp groups in shared memory (sm_90a).
#pragma once

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include "device/copy.cuh"

namespace magicube {

// Shared memory descriptor of K-major rows of kRowBytes, swizzled by TMA.
template <int kRowBytes>
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address) {
  static_assert(kRowBytes == 64 || kRowBytes == 128, "a row is as wide as a swizzle");
  GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ = address >> 4;
  descriptor.bitfield.leading_byte_offset_ = 1;
  descriptor.bitfield.stride_byte_offset_ = 8 * kRowBytes >> 4;
  descriptor.bitfield.layout_type_ = uint8_t(kRowBytes == 128 ? SM90::GMMA::LayoutType::B128 : SM90::GMMA::LayoutType::B64);
  return descriptor;
}

}  // namespace magicube
