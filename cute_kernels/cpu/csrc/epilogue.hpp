// From exact integer totals to the output type: out = total * row_scale * column_scale + bias.
#pragma once

#include <cstdint>
#include <cstring>

#include "engine.hpp"

namespace {  // compiled once per instruction set

using magicube::Out;

inline int64_t element_bytes(Out type) { return type == Out::kInt64 ? 8 : type >= Out::kFloat16 ? 2 : 4; }

inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // stays a NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline uint16_t to_float16(float value) {  // round to nearest even, overflow to infinity, with subnormals
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {  // subnormal: adding 0.5 lets the FPU round at the right bit
    float shifted;
    std::memcpy(&shifted, &bits, 4);
    shifted += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &shifted, 4);
    return static_cast<uint16_t>(sign | (rounded - 0x3f000000u));
  }
  bits += 0xc8000000u + 0xfffu + ((bits >> 13) & 1u);
  return static_cast<uint16_t>(sign | (bits >> 13));
}

// Floats of a run in the output type.
inline void store_floats(const float* from, int64_t count, Out type, void* out, int64_t offset) {
  if (type == Out::kFloat32) {
    std::memcpy(static_cast<float*>(out) + offset, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(out) + offset;
  if (type == Out::kFloat16) {
    for (int64_t i = 0; i < count; ++i) to[i] = to_float16(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = to_bfloat16(from[i]);
  }
}

// Totals of a run as integers; false if the output type is a float.
template <class Total>
inline bool store_integers(const Total* totals, int64_t count, Out type, void* out, int64_t offset) {
  if (type == Out::kInt32) {
    int32_t* to = static_cast<int32_t*>(out) + offset;
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int32_t>(totals[i]);
  } else if (type == Out::kInt64) {
    int64_t* to = static_cast<int64_t*>(out) + offset;
    for (int64_t i = 0; i < count; ++i) to[i] = totals[i];
  } else {
    return false;
  }
  return true;
}

// One run of results of the same row. `row_scale` and `bias` belong to the row, `column_scales` to each result;
// null means absent.
template <class Total>
inline void write_run(const Total* totals, int64_t count, float row_scale, const float* column_scales, float bias,
                      Out type, void* out, int64_t offset) {
  if (store_integers(totals, count, type, out, offset)) return;
  float scaled[magicube::kPanel];  // count <= kPanel
  if (column_scales) {
    for (int64_t i = 0; i < count; ++i) scaled[i] = static_cast<float>(totals[i]) * row_scale * column_scales[i] + bias;
  } else {
    for (int64_t i = 0; i < count; ++i) scaled[i] = static_cast<float>(totals[i]) * row_scale + bias;
  }
  store_floats(scaled, count, type, out, offset);
}

}  // namespace
