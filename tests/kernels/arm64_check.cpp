// The portable engine against int64 sums: dense and sparse products, SDDMM and rounded rows. Prints a line a check; exits
// with 1 if one fails.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "engine.hpp"

using namespace magicube;

namespace {

uint64_t state = 1;
int random_byte() {  // both ends of the range are likely
  state = state * 6364136223846793005u + 1442695040888963407u;
  const int value = static_cast<int>(state >> 33) % 300 - 150;
  return value < -128 ? -128 : value > 127 ? 127 : value;
}

// Memory aligned to 64 bytes.
template <class T>
T* room(int64_t count) {
  void* const data = std::aligned_alloc(64, (static_cast<size_t>(count) * sizeof(T) + 127) / 64 * 64);
  std::memset(data, 0, static_cast<size_t>(count) * sizeof(T));
  return static_cast<T*>(data);
}

std::vector<int8_t> random_bytes(int64_t count) {
  std::vector<int8_t> found(static_cast<size_t>(count));
  for (auto& each : found) each = static_cast<int8_t>(random_byte());
  return found;
}

template <auto Kernel, class Args>
void run(const Args& args, int threads, int64_t shared_bytes, int64_t local_bytes) {
  run_thread_group(threads, shared_bytes, local_bytes, [](const void* p, ThreadGroup& group) {
    (kPortable.*Kernel)(*static_cast<const Args*>(p), group);
  }, &args);
}

int64_t dot(const int8_t* a, int64_t a_step, const int8_t* b, int64_t b_step, int64_t count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += int64_t{a[i * a_step]} * b[i * b_step];
  return sum;
}

bool dense(int64_t m, int64_t k, int64_t n, int threads) {
  const auto a = random_bytes(m * k), b = random_bytes(k * n);
  const int64_t panels = (n + kPanel - 1) / kPanel, quads = (k + kQuad - 1) / kQuad;
  auto* const packed = room<int8_t>(panels * quads * kPanel * kQuad);
  auto* const sums = room<int32_t>(panels * kPanel);
  run<&Engine::pack_digits>(PackArgs{b.data(), k, n, n, 1, packed, sums}, threads, 0, 0);
  std::vector<int32_t> out(static_cast<size_t>(m * n));
  const DenseArgs args{{packed, sums, k, n}, {a.data(), nullptr, k, nullptr, 0, 0}, {}, false, m, n, 1, out.data(), Out::kInt32};
  run<&Engine::dense>(args, threads, dense_shared_bytes(args, threads), 0);
  for (int64_t i = 0; i < m * n; ++i) {
    if (out[static_cast<size_t>(i)] != dot(&a[static_cast<size_t>(i / n * k)], 1, &b[static_cast<size_t>(i % n)], n, k)) return false;
  }
  return true;
}

// Vector row r of a pattern has every (r + 2)-th column.
struct Pattern {
  Pattern(int64_t vector_rows, int64_t columns, int64_t stride) {
    for (int64_t r = 0; r < vector_rows; ++r) {
      start.push_back(static_cast<int64_t>(index.size()));
      for (int64_t c = r % 3; c < columns; c += r + 2) index.push_back(static_cast<int32_t>(c));
      end.push_back(static_cast<int64_t>(index.size()));
      while (static_cast<int64_t>(index.size()) % stride) index.push_back(-1);
    }
  }
  std::vector<int64_t> start, end;
  std::vector<int32_t> index;
};

bool sparse(int64_t vector_rows, int v, int64_t k, int64_t n, int stride, int threads) {
  const Pattern pattern(vector_rows, k, stride);
  const int64_t m = vector_rows * v, positions = static_cast<int64_t>(pattern.index.size());
  std::vector<int8_t> values(static_cast<size_t>(positions * v)), whole(static_cast<size_t>(m * k));
  std::vector<int64_t> row_sums(static_cast<size_t>(m));
  for (int64_t r = 0; r < vector_rows; ++r) {
    for (int64_t p = pattern.start[static_cast<size_t>(r)]; p < pattern.end[static_cast<size_t>(r)]; ++p) {
      for (int j = 0; j < v; ++j) {
        const auto value = static_cast<int8_t>(random_byte());
        values[static_cast<size_t>(p / stride * stride * v + j * stride + p % stride)] = value;
        whole[static_cast<size_t>((r * v + j) * k + pattern.index[static_cast<size_t>(p)])] = value;
        row_sums[static_cast<size_t>(r * v + j)] += value;
      }
    }
  }
  const auto b = random_bytes(k * n);
  std::vector<int32_t> out(static_cast<size_t>(m * n));
  const Sparse a{pattern.start.data(), pattern.end.data(), pattern.index.data(), reinterpret_cast<const uint8_t*>(values.data()),
                 row_sums.data(), positions * v, vector_rows, m, k, v, stride, 8, true, nullptr};
  SpmmArgs args{a, {reinterpret_cast<const uint8_t*>(b.data()), k * n, n, false, 8, true}, {}, out.data(), Out::kInt32, n, 1, {}, 1, 1};
  args.parts = spmm_panel_parts(args, kPortable.spmm_parts);
  args.staged_panels = spmm_staged_panels(args, threads, kPortable.spmm_columns * args.parts);
  run<&Engine::spmm>(args, threads, spmm_shared_bytes(args), spmm_local_bytes(args, kPortable.spmm_scratch_bytes));
  for (int64_t i = 0; i < m * n; ++i) {
    if (out[static_cast<size_t>(i)] != dot(&whole[static_cast<size_t>(i / n * k)], 1, &b[static_cast<size_t>(i % n)], n, k)) return false;
  }
  return true;
}

bool sampled(int64_t vector_rows, int v, int64_t n, int64_t inner, int stride, int threads) {
  const Pattern pattern(vector_rows, n, stride);
  const int64_t m = vector_rows * v, positions = static_cast<int64_t>(pattern.index.size());
  const auto x = random_bytes(m * inner), y = random_bytes(n * inner);
  std::vector<int32_t> out(static_cast<size_t>(positions * v));
  const auto rows = [&](const std::vector<int8_t>& of) {
    return Operand{reinterpret_cast<const uint8_t*>(of.data()), 0, inner, true, 8, true};
  };
  const SddmmArgs args{rows(x), rows(y), pattern.start.data(), pattern.end.data(), pattern.index.data(), {}, out.data(),
                       positions * v, Out::kInt32, vector_rows, m, n, inner, 1, v, stride};
  run<&Engine::sddmm>(args, threads, sddmm_shared_bytes(args, kPortable.dot_bytes), sddmm_local_bytes(args, kPortable.dot_bytes));
  for (int64_t r = 0; r < vector_rows; ++r) {
    for (int64_t p = pattern.start[static_cast<size_t>(r)]; p < pattern.end[static_cast<size_t>(r)]; ++p) {
      for (int j = 0; j < v; ++j) {
        const int64_t column = pattern.index[static_cast<size_t>(p)];
        const int64_t want = dot(&x[static_cast<size_t>((r * v + j) * inner)], 1, &y[static_cast<size_t>(column * inner)], 1, inner);
        if (out[static_cast<size_t>(p / stride * stride * v + j * stride + p % stride)] != want) return false;
      }
    }
  }
  return true;
}

bool rounded(int64_t rows, int64_t columns, int threads) {
  std::vector<float> x(static_cast<size_t>(rows * columns)), scale(static_cast<size_t>(rows));
  for (auto& each : x) each = static_cast<float>(random_byte()) / 7 + static_cast<float>(random_byte()) / 900;
  std::vector<int8_t> out(x.size());
  uint8_t flags = 0;
  const QuantizeArgs args{x.data(), out.data(), scale.data(), &flags, rows, columns, columns, columns, 8, false, true, false, false,
                          kScaleRows};
  run<&Engine::quantize>(args, threads, 0, 0);
  for (int64_t i = 0; i < rows; ++i) {
    float most = 0;
    for (int64_t j = 0; j < columns; ++j) most = std::fmax(most, std::fabs(x[static_cast<size_t>(i * columns + j)]));
    if (scale[static_cast<size_t>(i)] != static_cast<float>(static_cast<double>(most) / 127)) return false;
    const double inverse = 1 / static_cast<double>(scale[static_cast<size_t>(i)]);
    for (int64_t j = 0; j < columns; ++j) {
      const auto at = static_cast<size_t>(i * columns + j);
      const double q = std::nearbyint(static_cast<double>(x[at]) * inverse);
      if (out[at] != static_cast<int>(q < -128 ? -128 : q > 127 ? 127 : q)) return false;
    }
  }
  return true;
}

int failures = 0;
void report(const char* what, int threads, bool holds) {
  std::printf("%s, %d threads: %s\n", what, threads, holds ? "equal" : "DIFFERENT");
  failures += !holds;
}

}  // namespace

int main() {
  for (const int threads : {1, 2}) {
    report("dense 7 x 130 x 67", threads, dense(7, 130, 67, threads));
    report("dense 53 x 33 x 129", threads, dense(53, 33, 129, threads));
    report("sparse 24 x 97 x 70, V 8", threads, sparse(3, 8, 97, 70, 16, threads));
    report("sparse 20 x 200 x 5, V 4", threads, sparse(5, 4, 200, 5, 32, threads));
    report("sddmm 24 x 50, K 77, V 8", threads, sampled(3, 8, 50, 77, 32, threads));
    report("rounding 9 x 131", threads, rounded(9, 131, threads));
  }
  return failures ? 1 : 0;
}
