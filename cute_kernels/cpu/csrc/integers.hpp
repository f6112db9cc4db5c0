// Stored integers to digit planes of bytes: the C++ counterpart of integers.py.
//
// A staged byte is in offset form, value + 128, if its digit is signed and the engine multiplies unsigned by signed bytes. The
// driver subtracts the offset with the row sums of the other operand.
#pragma once

#include <cstdint>
#include <cstring>

#include "engine.hpp"

namespace {  // compiled once per instruction set

using magicube::Operand;

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

// Load `count` integers of one run from position `start` (even for 4 bits); digit i goes to out + i * digit_bytes.
inline void load_digits(const uint8_t* run, int bits, bool is_signed, int64_t start, int64_t count, uint8_t flip,
                        uint8_t* __restrict out, int64_t digit_bytes) {
  if (bits == 8) {
    const uint8_t* source = run + start;
    if (!flip) {
      std::memcpy(out, source, static_cast<size_t>(count));
      return;
    }
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(source[i] ^ flip);
    return;
  }
  if (bits == 4) {
    const uint8_t* source = run + start / 2;
    const uint16_t extend = is_signed ? 0x0808 : 0, flips = static_cast<uint16_t>(flip * 0x0101);
    const auto pair = [=](int byte) {  // low nibble to the low byte, high nibble to the high one
      const int nibbles = (byte | byte << 4) & 0x0f0f;
      return static_cast<uint16_t>((nibbles | (nibbles & extend) * 30) ^ flips);  // 8 * 30 = 0xf0 extends the sign
    };
    for (int64_t i = 0; i < count / 2; ++i) {
      const uint16_t both = pair(source[i]);
      std::memcpy(out + 2 * i, &both, 2);  // little-endian
    }
    if (count % 2) out[count - 1] = static_cast<uint8_t>(pair(source[count / 2]));
    return;
  }
  const uint16_t* source = reinterpret_cast<const uint16_t*>(run) + start;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t value = source[i];
    out[i] = static_cast<uint8_t>(value & 255);
    out[i + digit_bytes] = static_cast<uint8_t>((value >> 8) ^ flip);
  }
}

using Bytes = uint8_t __attribute__((vector_size(16)));
#ifdef __clang__
inline Bytes low_pairs(Bytes x, Bytes y) { return __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
inline Bytes high_pairs(Bytes x, Bytes y) { return __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31); }
#else
inline Bytes low_pairs(Bytes x, Bytes y) { return __builtin_shuffle(x, y, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}); }
inline Bytes high_pairs(Bytes x, Bytes y) { return __builtin_shuffle(x, y, Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}); }
#endif

// Transpose 16 bytes of each of up to 16 runs: 16 slices with a byte of each run, zeros for absent runs, of which the first
// `written` (16 or 8) are written. Four rounds interleave the first half of the vectors with the second.
inline void transpose_sixteen(const uint8_t* from, int64_t run_bytes, int64_t runs, uint8_t* out, int64_t slice_bytes, size_t written) {
  Bytes x[16] = {}, y[16];
  for (int64_t i = 0; i < runs; ++i) std::memcpy(&x[i], from + i * run_bytes, sizeof x[i]);
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      y[2 * i] = low_pairs(x[i], x[i + 8]);
      y[2 * i + 1] = high_pairs(x[i], x[i + 8]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) x[i] = y[i];
  }
  for (int i = 0; i < 16; ++i) {
    if (written == 16) std::memcpy(out + i * slice_bytes, &x[i], 16);
    else std::memcpy(out + i * slice_bytes, &x[i], 8);
  }
}

// Bytes of `width` runs from `at0` on as slices, as far as blocks of 16 slices reach; returns how many slices that are. A slice
// is written up to a multiple of 16 bytes, or 8.
inline int64_t stage_bytes(const Operand& op, const uint8_t* data, int64_t slice0, int64_t slices, int64_t at0, int64_t width,
                           uint8_t flip, uint8_t* out, int64_t slice_bytes) {
  const int64_t most = slice_bytes >= 16 ? slice_bytes / 16 * 16 : slice_bytes / 8 * 8;
  if (op.bits != 8 || width > most) return 0;
  const int64_t count = slices / 16 * 16;
  for (int64_t i = 0; i < count; i += 16) {
    for (int64_t j = 0; j < width; j += 16) {
      transpose_sixteen(data + (at0 + j) * op.run_bytes + slice0 + i, op.run_bytes, lesser(16, width - j), out + i * slice_bytes + j,
                        slice_bytes, most == 8 ? 8 : 16);
    }
    for (int64_t k = i; flip && k < i + 16; ++k) {
      for (int64_t j = 0; j < width; ++j) out[k * slice_bytes + j] ^= flip;
    }
  }
  return count;
}

// Stage `slices` x `width` integers so that slice i, digit d starts at out + d * digit_bytes + i * slice_bytes. Slices are runs
// of the operand if `along_runs`, else they cross its runs.
inline void stage(const Operand& op, const uint8_t* data, bool along_runs, int64_t slice0, int64_t slices, int64_t at0,
                  int64_t width, uint8_t flip, uint8_t* out, int64_t slice_bytes, int64_t digit_bytes) {
  if (along_runs) {
    constexpr int64_t kAhead = 16;  // runs are far apart: hardware prefetchers do not follow them
    for (int64_t i = 0; i < slices; ++i) {
      if (i + kAhead < slices) __builtin_prefetch(data + (slice0 + i + kAhead) * op.run_bytes + at0 * op.bits / 8);
      load_digits(data + (slice0 + i) * op.run_bytes, op.bits, op.is_signed, at0, width, flip, out + i * slice_bytes,
                  digit_bytes);
    }
    return;
  }
  constexpr int64_t kTile = 64;  // slices are transposed in tiles, so that scattered bytes stay in cache
  constexpr int64_t kPiece = kTile + 1;
  uint8_t piece[magicube::kMaxDigits * kPiece];
  for (int64_t i0 = stage_bytes(op, data, slice0, slices, at0, width, flip, out, slice_bytes); i0 < slices; i0 += kTile) {
    const int64_t count = lesser(kTile, slices - i0);
    const int64_t skip = op.bits == 4 ? (slice0 + i0) & 1 : 0;  // a packed run is read from an even position
    for (int64_t j = 0; j < width; ++j) {
      load_digits(data + (at0 + j) * op.run_bytes, op.bits, op.is_signed, slice0 + i0 - skip, count + skip, flip, piece,
                  kPiece);
      for (int d = 0; d < op.digits(); ++d) {
        uint8_t* to = out + d * digit_bytes + i0 * slice_bytes + j;
        for (int64_t i = 0; i < count; ++i) to[i * slice_bytes] = piece[d * kPiece + skip + i];
      }
    }
  }
}

}  // namespace
