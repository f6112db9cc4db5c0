// Sparse attention: softmax(scale Q K^T + bias) V at a pattern, by products of quantized integers, in one pass.
//
// Rows of K are staged as those of an SDDMM, V as panels of an SpMM. A thread takes a vector row: up to eight of its queries are
// multiplied by its keys, the softmax of the scores is quantized and multiplied by V while all of it is in L2. Scores are rounded
// to float16 as those of the SDDMM; the exponential uses operations that every instruction set rounds alike.
// Source: Li, Osawa, Hoefler, SC'22, section V-C and figure 16.
#pragma once

#include "engine.hpp"
#include "epilogue.hpp"
#include "quantize.hpp"
#include "sddmm.hpp"
#include "spmm.hpp"

namespace {  // compiled once per instruction set

using magicube::AttentionArgs;
using magicube::AttentionSizes;
using magicube::FloatRows;
using magicube::kKeyPiece;
using magicube::kKeyStep;

constexpr int32_t kInfinity = Bits<float>::kInfinity;
constexpr int32_t kNotANumber = 0x7fffffff;  // above every other key

// The float16 nearest to x, as float32: to even, with subnormals, overflow to infinity.
inline float through_float16(float x) {
  const int32_t bits = magnitude(x), sign = bits_of(x) ^ bits;
  const int32_t normal = static_cast<int32_t>((static_cast<uint32_t>(bits) + 0xfffu + ((bits >> 13) & 1)) & ~0x1fffu);
  const int32_t finite = select(bits < 0x38800000, bits_of(from_bits<float>(bits) + 0.5f - 0.5f), normal);  // or steps of 2^-24
  const int32_t near = select(bits >= 0x477ff000, kInfinity, finite);  // 65520, half a step above the largest one
  return from_bits<float>(select(bits > kInfinity, bits, near) | sign);
}

// Bits of a float in the order of integers, with NaN above all.
inline int32_t key_of(float x) {
  const int32_t bits = bits_of(x);
  return select(magnitude(x) > kInfinity, kNotANumber, bits ^ ((bits >> 31) & 0x7fffffff));
}

// Scores of one query from its totals; returns the key of the largest one. Separate functions: compilers honor `restrict` on
// parameters.
template <bool Biased>
__attribute__((noinline)) int32_t scores_of(const int32_t* __restrict totals, int64_t count, int32_t offset, float scale,
                                            const float* __restrict key_scales, const float* __restrict bias, float* __restrict out) {
  int32_t largest = key_of(-INFINITY);
  for (int64_t j = 0; j < count; ++j) {
    float s = through_float16(static_cast<float>(minus(totals[j], offset)) * scale * key_scales[j]);
    if (Biased) s += bias[j];
    out[j] = s;
    const int32_t key = key_of(s);
    largest = key > largest ? key : largest;
  }
  return largest;
}

// e = exp(s - shift) in place, and u = round(high e) of a step of keys; returns the sum of u.
__attribute__((noinline)) int32_t weights_of(float* __restrict s, float shift, float high, uint8_t* __restrict out) {
  int32_t total = 0;
  for (int j = 0; j < kKeyStep; ++j) {
    const float e = exponential(s[j] - shift);
    const int32_t u = bits_of(e * high + kShift) - bits_of(kShift);
    s[j] = e;
    out[j] = static_cast<uint8_t>(u);
    total += u;
  }
  return total;
}

// Sum of whole steps of floats: lanes first, so that every instruction set adds in the same order.
inline float sum_of(const float* __restrict x, int64_t count) {
  float lanes[kKeyStep] = {}, sum = 0.0f;
  for (int64_t j = 0; j < count; j += kKeyStep) {
    for (int i = 0; i < kKeyStep; ++i) lanes[i] += x[j + i];
  }
  for (int i = 0; i < kKeyStep; ++i) sum += lanes[i];
  return sum;
}

template <class Micro>
class Attention {
 public:
  using Dot = typename Micro::Dot;

  Attention(const AttentionArgs& args, const AttentionSizes& sizes, ThreadGroup& group)
      : args_(args), sizes_(sizes), group_(group), high_(static_cast<double>((1 << (args.operand_bits - 1)) - 1)) {
    uint8_t* at = group.local();
    const auto take = [&at](int64_t bytes) { return at += bytes, at - bytes; };
    scratch_ = take(Micro::kScratchBytes);
    queries_ = reinterpret_cast<Dot*>(take(sizes.queries));
    columns_ = reinterpret_cast<int32_t*>(take(sizes.columns));
    key_scales_ = reinterpret_cast<float*>(take(sizes.numbers));
    bias_ = reinterpret_cast<float*>(take(sizes.numbers));
    totals_ = reinterpret_cast<int32_t*>(take(sizes.scores));
    scores_ = reinterpret_cast<float*>(take(sizes.scores));
    weights_ = take(sizes.weights);
    sums_ = reinterpret_cast<int32_t*>(take(sizes.sums));
    std::memset(queries_, 0, static_cast<size_t>(sizes.queries));
  }

  // Matrices [first, first + count); false if the call is over.
  bool run(int64_t first, int64_t count) const {
    const int64_t all = pieces() * count, rows = vector_rows() * count;
    for (int64_t t = group_.ticket(); t < all; t = group_.ticket()) {
      const int64_t slot = t / pieces(), j0 = t % pieces() * kKeyPiece;
      stage_keys(slot, first + slot, j0, lesser(j0 + kKeyPiece, args_.keys));
    }
    if (!group_.barrier()) return false;
    for (int64_t t = group_.ticket(); t < all; t = group_.ticket()) {
      const int64_t slot = t / pieces(), j0 = t % pieces() * kKeyPiece;
      stage_values(slot, first + slot, j0, lesser(j0 + kKeyPiece, args_.keys));
    }
    if (!group_.barrier()) return false;
    for (int64_t t = group_.ticket(); t < rows; t = group_.ticket()) {
      const int64_t slot = t / vector_rows();
      run_row(slot, first + slot, t % vector_rows());
    }
    return group_.barrier();
  }

 private:
  static constexpr int kRows = kTileRows;
  static constexpr int kColumns = Micro::kColumns, kSums = kColumns * Micro::kParts;  // of a panel; of a row of sums
  static constexpr int kOffset = Micro::kOffset ? 128 : 0;

  int64_t pieces() const { return (args_.keys + kKeyPiece - 1) / kKeyPiece; }
  int64_t vector_rows() const { return (args_.queries + args_.vector_length - 1) / args_.vector_length; }
  int64_t panel_bytes() const { return (args_.keys + 1) * kPanel; }

  uint8_t* matrix(int64_t slot) const { return group_.shared() + slot * sizes_.matrix; }
  Dot* keys(int64_t slot) const { return reinterpret_cast<Dot*>(matrix(slot)); }
  float* scales_of_keys(int64_t slot) const { return reinterpret_cast<float*>(matrix(slot) + sizes_.keys); }
  uint8_t* panels(int64_t slot) const { return matrix(slot) + sizes_.keys + sizes_.key_scales; }
  int32_t* maxima(int64_t slot) const { return reinterpret_cast<int32_t*>(panels(slot) + sizes_.values); }

  const float* rows_of(const FloatRows& x, int64_t index) const {
    return x.data + index / args_.heads * x.group + index % args_.heads * x.head;
  }

  // Quantized rows of K with their scales, and the amax of these rows of V.
  void stage_keys(int64_t slot, int64_t index, int64_t j0, int64_t j1) const {
    const DenseLeft rows{nullptr, rows_of(args_.k, index), args_.k.row, nullptr, -high_ - 1, high_};
    const float* const values = rows_of(args_.v, index);
    int32_t absmax = 0;
    for (int64_t j = j0; j < j1; ++j) {
      Dot* const to = keys(slot) + j * sizes_.depth;
      scales_of_keys(slot)[j] = quantize_row(rows, j, args_.depth, kOffset, to);
      std::memset(to + args_.depth, 0, static_cast<size_t>(sizes_.depth - args_.depth) * sizeof(Dot));
      const int32_t bits = row_absmax(values + j * args_.v.row, args_.width);
      absmax = bits > absmax ? bits : absmax;
    }
    maxima(slot)[j0 / kKeyPiece] = absmax;
  }

  float scale_of_values(int64_t slot) const {
    int32_t absmax = 0;
    for (int64_t i = 0; i < pieces(); ++i) absmax = maxima(slot)[i] > absmax ? maxima(slot)[i] : absmax;
    return scale_of<float>(absmax, high_);
  }

  // Rows of the panels of V; with the first ones the row that padding columns multiply by zero.
  void stage_values(int64_t slot, int64_t index, int64_t j0, int64_t j1) const {
    const double inverse = inverse_of(scale_of_values(slot));
    const float* const values = rows_of(args_.v, index);
    alignas(64) uint8_t bytes[kKeyPiece * kColumns] = {};
    for (int64_t p = 0; p < sizes_.panels; ++p) {
      const int64_t n0 = p * kColumns, width = lesser(kColumns, args_.width - n0);
      for (int64_t j = j0; j < j1; ++j) {
        round_row<true>(values + j * args_.v.row + n0, inverse, -high_ - 1, high_, width, kOffset, bytes + (j - j0) * kColumns);
      }
      uint8_t* const panel = panels(slot) + p * panel_bytes() + kPanel;
      if (j0 == 0) std::memset(panel - kPanel, 0, kPanel);
      Micro::place(bytes, kColumns, j1 - j0, true, panel + j0 * kPanel);
    }
  }

  void run_row(int64_t slot, int64_t index, int64_t vector_row) const {
    const int64_t pattern = index % args_.patterns, at = pattern * vector_rows() + vector_row, begin = args_.row_start[at];
    const int64_t count = args_.row_end[at] - begin, steps = (count + kKeyStep - 1) / kKeyStep;
    const float* const bias = args_.bias ? args_.bias + index * args_.bias_matrix : nullptr;
    for (int64_t j = 0; j < steps * kKeyStep; ++j) {
      const int32_t column = args_.columns[begin + j], key = column < 0 ? -1 : static_cast<int32_t>(column - pattern * args_.keys);
      columns_[j] = key;
      if (key < 0) continue;
      key_scales_[j] = scales_of_keys(slot)[key];
      if (bias) bias_[j] = bias[key];
    }
    const float values_scale = scale_of_values(slot);
    const int rows = args_.vector_length < kRows ? args_.vector_length : kRows;
    for (int v = 0; v < args_.vector_length; v += rows) {
      const int64_t query = vector_row * args_.vector_length + v;
      if (query >= args_.queries) break;
      run_queries(slot, index, query, rows, lesser(rows, args_.queries - query), count, steps * kKeyStep, values_scale);
    }
  }

  // `rows` queries of a tile, of which `inside` exist.
  void run_queries(int64_t slot, int64_t index, int64_t query, int rows, int64_t inside, int64_t count, int64_t padded,
                   float values_scale) const {
    float q_scales[kRows], results[kRows];
    int32_t offsets[kRows] = {};
    const DenseLeft reals{nullptr, rows_of(args_.q, index), args_.q.row, nullptr, -high_ - 1, high_};
    for (int64_t r = 0; r < inside; ++r) {
      Dot* const to = queries_ + r * sizes_.depth;
      q_scales[r] = quantize_row(reals, query + r, args_.depth, 0, to) * args_.scale;
      for (int64_t i = 0; kOffset && i < args_.depth; ++i) offsets[r] += kOffset * static_cast<int8_t>(to[i]);
    }
    if (count > 0) {
      Micro::dots({queries_, sizes_.depth, static_cast<int>(inside), keys(slot), sizes_.depth, columns_, count, sizes_.depth, true,
                   true, totals_, padded});
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* const scores = scores_ + r * padded;
      const int64_t seen = r >= inside ? 0 : args_.causal ? first_not_below(columns_, 0, count, query + r + 1) : count;
      int32_t largest = key_of(-INFINITY);
      if (seen > 0) {
        const int32_t* const totals = totals_ + r * padded;
        largest = args_.bias ? scores_of<true>(totals, seen, offsets[r], q_scales[r], key_scales_, bias_, scores)
                             : scores_of<false>(totals, seen, offsets[r], q_scales[r], key_scales_, nullptr, scores);
      }
      for (int64_t j = seen; j < padded; ++j) scores[j] = -INFINITY;
      float* const lse = r < inside && args_.lse ? args_.lse + index * args_.queries + query + r : nullptr;
      results[r] = softmax(scores, padded, largest, rows, r, lse) * values_scale;
    }
    multiply(slot, (index * args_.queries + query) * args_.width, rows, inside, count, results);
  }

  // Quantized softmax of a row of scores into the weights; returns its scale.
  float softmax(float* scores, int64_t padded, int32_t largest, int rows, int64_t r, float* lse) const {
    const bool is_number = largest < kInfinity;
    const float shift = largest > key_of(-INFINITY) && is_number ? from_bits<float>(largest ^ ((largest >> 31) & 0x7fffffff)) : 0.0f;
    const auto high = static_cast<float>((1 << args_.softmax_bits) - 1);
    int32_t total = 0;
    for (int64_t j = 0; j < padded; j += kKeyStep) {
      uint8_t* const to = weights_ + j * rows + r * kKeyStep;
      if (is_number) total += weights_of(scores + j, shift, high, to);
      else std::memset(to, 0, kKeyStep);
    }
    if (lse) *lse = !is_number ? NAN : total > 0 ? shift + __builtin_logf(sum_of(scores, padded)) : -INFINITY;
    return !is_number ? NAN : total > 0 ? 1.0f / static_cast<float>(total) : args_.empty;
  }

  // The weights times V, scaled.
  void multiply(int64_t slot, int64_t out, int rows, int64_t inside, int64_t count, const float* scales) const {
    constexpr int64_t kMost = int64_t{Micro::kChunkGroups} * kQuad;
    static_assert(kMost % kKeyStep == 0, "a chunk has whole steps");
    for (int64_t p = 0; p < sizes_.panels; p += Micro::kParts) {
      const int64_t n0 = p * kColumns, width = lesser(kSums, args_.width - n0);
      const uint8_t* const panel = panels(slot) + p * panel_bytes() + kPanel;
      if (count == 0) std::memset(sums_, 0, static_cast<size_t>(rows) * kSums * sizeof(int32_t));
      for (int64_t at = 0; at < count; at += kMost) {
        Micro::row_tile({panel, panel_bytes(), width, columns_ + at, lesser(kMost, count - at), weights_ + at * rows, kKeyStep, rows, rows, false,
                         true, at == 0, sums_, scratch_});
      }
      for (int64_t r = 0; r < inside; ++r) {
        write_run(sums_ + r * kSums, width, 0, scales[r], nullptr, 0.0f, args_.out_type, args_.out, out + r * args_.width + n0);
      }
    }
  }

  const AttentionArgs& args_;
  const AttentionSizes sizes_;
  ThreadGroup& group_;
  const double high_;  // largest integer of Q, K and V
  uint8_t *scratch_, *weights_;                 // weights: (steps, rows, kKeyStep)
  Dot* queries_;                                // (kRows, depth)
  int32_t *columns_, *totals_, *sums_;          // totals: (rows, padded)
  float *key_scales_, *bias_, *scores_;
};

template <class Micro>
void attention(const AttentionArgs& args, ThreadGroup& group) {
  const AttentionSizes sizes = magicube::attention_sizes(args, Micro::kColumns, Micro::kScratchBytes, sizeof(typename Micro::Dot));
  const Attention<Micro> work(args, sizes, group);
  for (int64_t first = 0; first < args.batch; first += sizes.matrices) {
    if (!work.run(first, lesser(sizes.matrices, args.batch - first))) return;
  }
}

}  // namespace
