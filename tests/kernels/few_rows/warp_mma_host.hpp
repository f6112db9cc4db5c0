// A warp's own products and matrix loads, mma.sync and ldmatrix, for the fibers of cluster_host.hpp, which includes this.
#pragma once

namespace cute {

// PTX ISA, mma.m16n8k16: lane (g, t) has rows g and g + 8 of A and D, column g of B.
template <int kKind>
struct HostWarpProduct {
  static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                  uint32_t b1, float c0, float c1, float c2, float c3) {
    auto& mine = host::self().fragments;
    mine.a = {a0, a1, a2, a3}, mine.b = {b0, b1};
    host::meet_warp();
    const int first = host::current / 32 * 32, lane = host::current % 32;
    const auto value = [&](const auto& words, int word, int half) {
      return host::read(reinterpret_cast<const uint8_t*>(&words[word]) + 2 * half, kKind, false);
    };
    const auto sum = [&](int row, int column, float from) {
      double total = from;
      for (int k = 0; k < 16; ++k) {
        const auto& left = host::fibers[first + row % 8 * 4 + k % 8 / 2]->fragments;
        const auto& right = host::fibers[first + column * 4 + k % 8 / 2]->fragments;
        total += value(left.a, k / 8 * 2 + row / 8, k % 2) * value(right.b, k / 8, k % 2);
      }
      return float(total);
    };
    const int row = lane / 4, column = lane % 4 * 2;
    const float found[4] = {sum(row, column, c0), sum(row, column + 1, c1), sum(row + 8, column, c2), sum(row + 8, column + 1, c3)};
    host::meet_warp();
    d0 = found[0], d1 = found[1], d2 = found[2], d3 = found[3];
    host::pause();
  }
};
// PTX ISA, ldmatrix.x4: lane l has word l % 4 of the row that lane 8 i + l / 4 names, for each matrix i.
using uint128_t = uint4;
struct SM75_U32x4_LDSM_N {
  static void copy(const uint128_t& from, uint32_t& d0, uint32_t& d1, uint32_t& d2, uint32_t& d3) {
    const int64_t at = reinterpret_cast<const uint8_t*>(&from) - host::own_cta().memory;
    host::require(at % 16 == 0 && at >= 0 && at + 16 <= host::smem_bytes, "ldmatrix: not aligned, or beyond shared memory");
    host::self().shuffled = uint64_t(&from);
    host::meet_warp();
    const int first = host::current / 32 * 32, lane = host::current % 32;
    uint32_t* const to[] = {&d0, &d1, &d2, &d3};
    for (int i = 0; i < 4; ++i) {
      *to[i] = reinterpret_cast<const uint32_t*>(host::fibers[first + 8 * i + lane / 4]->shuffled)[lane % 4];
    }
    host::meet_warp();
    host::pause();
  }
};
using SM80_16x8x16_F32F16F16F32_TN = HostWarpProduct<0>;
using SM80_16x8x16_F32BF16BF16F32_TN = HostWarpProduct<1>;

}  // namespace cute
