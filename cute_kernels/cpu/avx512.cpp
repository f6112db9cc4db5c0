// The engine on AVX512-VNNI: vpdpbusd multiplies unsigned by signed bytes, four k a 32-bit lane.
//
// The dense operand is staged in offset form (unsigned). A signed digit of the sparse operand is the signed side; for an
// unsigned digit the dense bytes become signed again (x ^ 0x80) and the sparse digit is the unsigned side.
#include <immintrin.h>

#include "quantize.hpp"
#include "sddmm.hpp"
#include "spmm.hpp"

namespace {

struct Avx512 {
  static constexpr bool kOffset = true;
  static constexpr int kQuadBytes = magicube::kPanel * kQuad;  // [vector q][lane][column][k]

  // Lane l of vector q holds columns 16 l + 4 q and the three after it: what the unpacks below leave.
  static int column_of(int chunk) { return chunk % 4 * 16 + chunk / 4 * 4; }

  static __m512i row(const uint8_t* panel, int32_t column) {  // padding meets a zero value
    return _mm512_load_si512(panel + int64_t{column < 0 ? 0 : column} * kPanel);
  }

  static void gather(const uint8_t* panel, const int32_t* columns, int groups, bool, uint8_t* quads) {
    for (int g = 0; g < groups; ++g, columns += kQuad, quads += kQuadBytes) {
      const __m512i k0 = row(panel, columns[0]), k1 = row(panel, columns[1]);      // (64)
      const __m512i k2 = row(panel, columns[2]), k3 = row(panel, columns[3]);      // (64)
      const __m512i low01 = _mm512_unpacklo_epi8(k0, k1), high01 = _mm512_unpackhi_epi8(k0, k1);  // (4, 8, 2)
      const __m512i low23 = _mm512_unpacklo_epi8(k2, k3), high23 = _mm512_unpackhi_epi8(k2, k3);  // (4, 8, 2)
      _mm512_store_si512(quads, _mm512_unpacklo_epi16(low01, low23));         // (4, 4, 4)
      _mm512_store_si512(quads + 64, _mm512_unpackhi_epi16(low01, low23));    // (4, 4, 4)
      _mm512_store_si512(quads + 128, _mm512_unpacklo_epi16(high01, high23));  // (4, 4, 4)
      _mm512_store_si512(quads + 192, _mm512_unpackhi_epi16(high01, high23));  // (4, 4, 4)
    }
  }

  template <bool Signed>
  static __m512i multiply_add(__m512i sum, __m512i sparse, __m512i dense) {
    return Signed ? _mm512_dpbusd_epi32(sum, dense, sparse) : _mm512_dpbusd_epi32(sum, sparse, dense);
  }

  template <bool Signed>
  static __m512i dense_side(__m512i bytes) {
    return Signed ? bytes : _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(0x80)));
  }

  template <int Rows, bool Signed>
  static void strip_rows(const uint8_t* quads, int groups, const uint8_t* values, int stride, int vector_length,
                         int32_t* sums) {
    __m512i sum[Rows][4];
    for (int r = 0; r < Rows; ++r) {
      for (int q = 0; q < 4; ++q) sum[r][q] = _mm512_load_si512(sums + r * kPanel + q * 16);
    }
    while (groups > 0) {
      const int here = groups < stride / kQuad ? groups : stride / kQuad;
      for (int g = 0; g < here; ++g, quads += kQuadBytes) {
        __m512i b[4];
        for (int q = 0; q < 4; ++q) b[q] = dense_side<Signed>(_mm512_load_si512(quads + q * 64));
        for (int r = 0; r < Rows; ++r) {
          int32_t four;
          std::memcpy(&four, values + r * stride + g * kQuad, 4);
          const __m512i a = _mm512_set1_epi32(four);
          for (int q = 0; q < 4; ++q) sum[r][q] = multiply_add<Signed>(sum[r][q], a, b[q]);
        }
      }
      values += stride * vector_length;
      groups -= here;
    }
    for (int r = 0; r < Rows; ++r) {
      for (int q = 0; q < 4; ++q) _mm512_store_si512(sums + r * kPanel + q * 16, sum[r][q]);
    }
  }

  template <bool Signed>
  static void strip_signed(const uint8_t* quads, int groups, const uint8_t* values, int stride, int vector_length,
                           int rows, int32_t* sums) {
    if (rows == 4) return strip_rows<4, Signed>(quads, groups, values, stride, vector_length, sums);
    if (rows == 2) return strip_rows<2, Signed>(quads, groups, values, stride, vector_length, sums);
    strip_rows<1, Signed>(quads, groups, values, stride, vector_length, sums);
  }

  static void strip(const uint8_t* quads, int groups, const uint8_t* values, int stride, int vector_length, int rows,
                    bool a_signed, int32_t* sums) {
    if (a_signed) return strip_signed<true>(quads, groups, values, stride, vector_length, rows, sums);
    strip_signed<false>(quads, groups, values, stride, vector_length, rows, sums);
  }

  // Sixteen lanes of each of four vectors to four totals.
  static __m128i totals(const __m512i* sum) {
    const __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[0], sum[1]), _mm512_unpackhi_epi32(sum[0], sum[1]));
    const __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[2], sum[3]), _mm512_unpackhi_epi32(sum[2], sum[3]));
    const __m512i both = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  }

  template <int Rows, bool Signed>
  static void dot_rows(const uint8_t* x, int64_t pitch, const uint8_t* const* y, int64_t k0, int64_t count,
                       int32_t part[4][4]) {
    __m512i sum[Rows][4];
    for (int i = 0; i < Rows; ++i) {
      for (int j = 0; j < 4; ++j) sum[i][j] = _mm512_setzero_si512();
    }
    for (int64_t k = 0; k < count; k += 64) {
      __m512i right[4];
      for (int j = 0; j < 4; ++j) right[j] = dense_side<Signed>(_mm512_load_si512(y[j] + k0 + k));
      for (int i = 0; i < Rows; ++i) {
        const __m512i left = _mm512_load_si512(x + i * pitch + k);
        for (int j = 0; j < 4; ++j) sum[i][j] = multiply_add<Signed>(sum[i][j], left, right[j]);
      }
    }
    for (int i = 0; i < Rows; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(part[i]), totals(sum[i]));
  }

  static void dots(const uint8_t* x, int64_t pitch, int rows, const uint8_t* const* y, int64_t k0, int64_t count,
                   bool x_signed, bool, int32_t part[4][4]) {
    for (int i = 0; i < rows;) {  // a last vector row may be cut to three rows
      const int here = rows - i == 4 ? 4 : rows - i >= 2 ? 2 : 1;
      const uint8_t* at = x + i * pitch;
      if (here == 4) x_signed ? dot_rows<4, true>(at, pitch, y, k0, count, part + i) : dot_rows<4, false>(at, pitch, y, k0, count, part + i);
      else if (here == 2) x_signed ? dot_rows<2, true>(at, pitch, y, k0, count, part + i) : dot_rows<2, false>(at, pitch, y, k0, count, part + i);
      else x_signed ? dot_rows<1, true>(at, pitch, y, k0, count, part + i) : dot_rows<1, false>(at, pitch, y, k0, count, part + i);
      i += here;
    }
  }
};

}  // namespace

namespace magicube {
const Engine kAvx512 = {"avx512", &spmm<Avx512>, &sddmm<Avx512>, &quantize};
}
