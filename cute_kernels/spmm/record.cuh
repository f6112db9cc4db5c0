// SpMM: a record, one group of a vector row whose rows of B are in shared memory. What the panel and the resident kernel share.
//
// Architectures: sm_90a and later.
// Memory: values of the vectors in fragment order, then 16 bits per slot: the swizzled offset of its row of B, in units of 16 bytes.
#pragma once

#include "spmm/common.cuh"

namespace magicube {

// One record in registers: offsets of the rows of B in shared memory, and values.
template <class C>
struct Record {
  using S = SpmmShape<C>;
  static constexpr int kSlots = S::Shape::kK;
  static constexpr int kSlotLanes = (kSlots + 31) / 32;
  static constexpr int kRecordWords = int(S::kGroupWords) + kSlots / 2;

  uint32_t place[kSlotLanes];  // units of 16 bytes, swizzled
  SparseFragment<C> values;

  // A record: values in fragment order, then 16-bit offsets.
  __device__ void load(const uint32_t* record, int lane) {
    const uint16_t* places = reinterpret_cast<const uint16_t*>(record + S::kGroupWords);
    CUTE_UNROLL
    for (int i = 0; i < kSlotLanes; ++i) place[i] = __ldg(places + 32 * i + lane % kSlots);
    values.load(record, lane);
  }
  // As load, from shared memory.
  __device__ void read(uint32_t at, int lane) {
    CUTE_UNROLL
    for (int i = 0; i < kSlotLanes; ++i) place[i] = load_shared_half(at + S::kGroupWords * 4 + 2 * (32 * i + lane % kSlots));
    values.read(at, lane);
  }
};

template <class C>
__device__ void add_record(Accumulators<C>& acc, const Record<C>& group, uint32_t base) {
  using S = SpmmShape<C>;
  using Group = Record<C>;
  CUTE_UNROLL
  for (int chunk = 0; chunk < S::kChunks; chunk += S::kStep) {
    uint32_t raw[S::kStep][S::Units::kMatrices];
    CUTE_UNROLL
    for (int c = 0; c < S::kStep; ++c) {
      // The swizzle is an XOR of the chunk number with the row number.
      if constexpr (Group::kSlots % 32 == 0) {
        CUTE_UNROLL
        for (int i = 0; i < Group::kSlotLanes; ++i) {
          load_transposed((base + group.place[i] * 16) ^ ((chunk + c) * 16), raw[c] + 4 * i);
        }
      } else {
        static_assert(Group::kSlots == 16, "a group must have 16 slots or a multiple of 32");
        load_transposed_pair((base + group.place[0] * 16) ^ ((chunk + c) * 16), raw[c]);
      }
    }
    acc.add(group.values, chunk, raw);
  }
}

}  // namespace magicube
