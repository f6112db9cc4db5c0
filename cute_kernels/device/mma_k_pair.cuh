// Two m16n8k16 MMAs of 16-bit floats along k as one k = 32 atom: a group of 32 gathered rows is one atom, as for
// 8-bit operands, and a lane's part of the sparse operand is whole words at any element width.
#pragma once

#include <cute/atom/mma_traits_sm80.hpp>

namespace magicube {

template <class Half>
struct MmaKPair {
  using DRegisters = float[4];
  using ARegisters = uint32_t[8];
  using BRegisters = uint32_t[4];
  using CRegisters = float[4];

  CUTE_HOST_DEVICE static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t const& a0, uint32_t const& a1,
                                   uint32_t const& a2, uint32_t const& a3, uint32_t const& a4, uint32_t const& a5,
                                   uint32_t const& a6, uint32_t const& a7, uint32_t const& b0, uint32_t const& b1,
                                   uint32_t const& b2, uint32_t const& b3, float const& c0, float const& c1,
                                   float const& c2, float const& c3) {
    Half::fma(d0, d1, d2, d3, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3);
    Half::fma(d0, d1, d2, d3, a4, a5, a6, a7, b2, b3, d0, d1, d2, d3);
  }
};

}  // namespace magicube

namespace cute {

template <class Half>
struct MMA_Traits<magicube::MmaKPair<Half>> : MMA_Traits<Half> {
  using Shape_MNK = Shape<_16, _8, _32>;
  using ALayout = Layout<Shape<Shape<_4, _8>, Shape<_2, _2, _2, _2>>, Stride<Stride<_32, _1>, Stride<_16, _8, _128, _256>>>;
  using BLayout = Layout<Shape<Shape<_4, _8>, Shape<_2, _2, _2>>, Stride<Stride<_16, _1>, Stride<_8, _64, _128>>>;
};

}  // namespace cute
