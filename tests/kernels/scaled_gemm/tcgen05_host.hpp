// A multiprocessor of sm_100a as threads of the CPU, for the source of scaled_gemm/sm100.cuh as it stands.
//
// Every thread of a block is one here, and so are those of a pair of blocks that share tiles. The copy engine and the Tensor Cores are threads too, which work through queues
// behind random delays, as the hardware does things later than it is told to. Who waits for what never comes is told.
#pragma once

#include "../gemm/epilogue_host.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define CUTE_UNROLL

namespace cuda { namespace std = ::std; }

struct Index { int x = 0; };
inline thread_local Index threadIdx, blockIdx;
inline thread_local uint32_t cta;  // of a pair
inline Index blockDim, gridDim;

struct __half {};
struct __nv_bfloat16 {};
struct uint4 { uint32_t x, y, z, w; };
struct uint2 { uint32_t x, y; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
template <class T> T __ldg(const T* at) { return *at; }
inline float __uint_as_float(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
inline uint32_t __float_as_uint(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline __half __float2half_rn(float) { return {}; }
inline __nv_bfloat16 __float2bfloat16_rn(float) { return {}; }
using std::min;

namespace host {

constexpr auto kSlice = std::chrono::milliseconds(100);
inline int patience = 0;  // slices in which nothing has moved on anywhere

// What went wrong first; all threads leave when there is something.
struct Failure : std::runtime_error { using runtime_error::runtime_error; };
inline std::mutex mutex;  // of this, and of the barriers in shared memory
inline std::string wrong;
inline std::atomic<bool> failed;
inline std::atomic<uint64_t> progress;
inline void fail(const std::string& why) {
  std::unique_lock lock(mutex);
  if (!failed) wrong = why;
  failed = true;
}

// Waits until `over`, a condition that the lock guards; throws where another thread has failed or nothing moves on.
template <class Over>
void wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, const std::string& who, Over over) {
  uint64_t seen = progress;
  for (int slices = 0; !over(); ++slices) {
    if (failed) throw Failure("another thread has failed");
    if (seen != progress) seen = progress, slices = 0;
    if (slices == patience) throw Failure(who + " waits for ever");
    changed.wait_for(lock, kSlice);
  }
}

class Meeting {
  int count_, here_ = 0, round_ = 0;
  std::mutex own_;
  std::condition_variable changed_;

 public:
  explicit Meeting(int count) : count_(count) {}
  void meet() {
    std::unique_lock lock(own_);
    const int round = round_;
    if (++here_ == count_) {
      here_ = 0, ++round_, ++progress;
      changed_.notify_all();
    } else {
      wait(lock, changed_, "a thread at a meeting", [&] { return round_ != round; });
    }
  }
};
inline std::unique_ptr<Meeting> pair, block[2];  // of either CTA
inline std::vector<std::unique_ptr<Meeting>> warps[2];
inline std::vector<uint32_t> exchanged[2];  // a word a thread

// mbarrier: arrivals and bytes that are still to come, and the number of phases that are over.
struct Barrier { int count = 0, missing = 0; int64_t bytes = 0; uint32_t phases = 0; };
inline std::map<uint32_t, Barrier> barriers;
inline std::condition_variable phase_over;
inline void settle(Barrier& barrier) {
  if (barrier.missing || barrier.bytes) return;
  barrier.missing = barrier.count, ++barrier.phases, ++progress;
  phase_over.notify_all();
}
inline void arrive(uint32_t at, int64_t expected = 0) {
  std::unique_lock lock(mutex);
  Barrier& barrier = barriers.at(at);
  if (barrier.missing == 0) throw Failure("a barrier has more arrivals than it counts");
  --barrier.missing, barrier.bytes += expected;
  settle(barrier);
}

// Sometimes takes its time.
inline void dawdle(std::mt19937& random, int most) {
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
}

inline thread_local std::mt19937 mood;  // a thread's own

// Something that works later than it is told to, in order.
class Engine {
  std::deque<std::function<void()>> tasks_;
  std::mutex own_;
  std::condition_variable told_;
  bool over_ = false;
  std::thread thread_;

 public:
  explicit Engine(unsigned seed) : thread_([this, seed] {
    std::mt19937 random(seed);
    while (true) {
      std::function<void()> task;
      {
        std::unique_lock lock(own_);
        told_.wait(lock, [&] { return over_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      dawdle(random, 300);
      try {
        task();
      } catch (const Failure& failure) {
        fail(failure.what());
      }
    }
  }) {}
  void enqueue(std::function<void()> task) {
    std::unique_lock lock(own_);
    tasks_.push_back(std::move(task));
    told_.notify_one();
  }
  ~Engine() {
    {
      std::unique_lock lock(own_);
      over_ = true;
      told_.notify_one();
    }
    thread_.join();
  }
};
inline std::unique_ptr<Engine> copies, products;

inline float tensor_memory[2][128][512];  // of either CTA
inline uint32_t factors[32][512];  // the same in all quarters

inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline double value(uint32_t code, int exponent, int mantissa, int bias) {
  const int width = exponent + mantissa;
  const uint32_t e = code >> mantissa & ((1u << exponent) - 1), f = code & ((1u << mantissa) - 1);
  const double size = e ? std::ldexp(1 + std::ldexp(f, -mantissa), int(e) - bias) : std::ldexp(f, 1 - bias - mantissa);
  return code >> width & 1 ? -size : size;
}
// By the format's number in an instruction, and code.
inline const std::vector<std::vector<double>> values = [] {
  const int formats[6][3] = {{4, 3, 7}, {5, 2, 15}, {}, {2, 3, 1}, {3, 2, 3}, {2, 1, 1}};
  std::vector<std::vector<double>> all(8);
  for (int format : {0, 1, 3, 4, 5}) {
    const auto& [exponent, mantissa, bias] = formats[format];
    for (int code = 0; code < 1 << (1 + exponent + mantissa); ++code) all[format].push_back(value(code, exponent, mantissa, bias));
  }
  return all;
}();
inline int width(int format) { return format < 2 ? 8 : format < 5 ? 6 : 4; }

}  // namespace host

inline void __syncthreads() { host::block[cta]->meet(); }
inline void __syncwarp() { host::warps[cta][threadIdx.x / 32]->meet(); }
// Of a warp that is together, and stays so: elect.sync.
inline bool elect_one() {
  __syncwarp();
  return threadIdx.x % 32 == 0;
}
// What thread `from` of the CTA passes for x, a word or smaller.
template <class T> T word_of(T x, unsigned from) {
  static_assert(sizeof(T) <= 4);
  std::memcpy(&host::exchanged[cta][threadIdx.x], &x, sizeof(T));
  __syncwarp();
  T theirs;
  std::memcpy(&theirs, &host::exchanged[cta][from], sizeof(T));
  __syncwarp();
  return theirs;
}
template <class T> T __shfl_sync(unsigned, T x, int lane) { return word_of(x, threadIdx.x / 32 * 32 + lane); }
inline uint32_t __shfl_xor_sync(unsigned, uint32_t x, int bit) { return word_of(x, threadIdx.x ^ bit); }

namespace cute {
struct float_e4m3_t {};
struct float_e2m1_t {};
struct float_ue8m0_t {};
struct float_ue4m3_t {};
namespace UMMA { enum class Major { K, MN }; }
}  // namespace cute

namespace magicube {
using namespace cute;

alignas(1024) inline uint8_t shared[1 << 18], odd_shared[1 << 18];
constexpr uint32_t kOdd = 1 << 24;  // of an address: in the odd CTA of a pair
inline uint8_t& byte_at(uint32_t address) { return (address & kOdd ? odd_shared : shared)[address & ~kOdd]; }

// Boxes of 128 elements of rows `pitch` bytes apart; `bits`: of an element, sixteen of which take sixteen bytes.
struct TmaDescriptor {
  const uint8_t* start;
  int64_t bits, inner, rows, pitch, box;
};

inline uint32_t shared_address(const void* at) { return uint32_t(static_cast<const uint8_t*>(at) - shared) | cta * kOdd; }

inline void barrier_init(uint32_t barrier, int arrivals) {
  std::unique_lock lock(host::mutex);
  host::barriers[barrier] = {arrivals, arrivals};
}
inline void barrier_fence() {}
inline void barrier_arrive(uint32_t barrier) { host::arrive(barrier); }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) { host::arrive(barrier, bytes); }
inline void barrier_wait(uint32_t at, uint32_t parity) {
  std::unique_lock lock(host::mutex);
  const host::Barrier& barrier = host::barriers.at(at);
  host::wait(lock, host::phase_over, "thread " + std::to_string(threadIdx.x) + " at barrier " + std::to_string(at),
             [&] { return (barrier.phases & 1) != parity; });
  lock.unlock();
  if (threadIdx.x % 32 == 7) host::dawdle(host::mood, 500);  // a warp does not stay together by itself
}

inline void tma_load_2d(uint32_t to, const TmaDescriptor* map, int x, int y, uint32_t at) {
  host::copies->enqueue([=, map = *map] {
    const int64_t group = 2 * map.bits;  // bytes of sixteen elements
    for (int64_t row = 0; row < map.box; ++row) {
      for (int64_t byte = 0; byte < 8 * group; ++byte) {
        const int64_t from = x * map.bits / 8 + byte;
        const bool there = y + row < map.rows && from * 8 < map.inner * map.bits;
        byte_at(host::swizzled(uint32_t(to + row * 128 + byte / group * 16 + byte % group))) =
            there ? map.start[(y + row) * map.pitch + from] : 0;
      }
    }
    std::unique_lock lock(host::mutex);
    host::Barrier& barrier = host::barriers.at(at);
    barrier.bytes -= map.box * 8 * group;
    host::settle(barrier);
  });
}

namespace cluster {
inline uint32_t rank() { return cta; }
inline void sync() { host::pair->meet(); }
inline void arrive_at(uint32_t barrier, uint32_t rank) { host::arrive((barrier & ~kOdd) | rank * kOdd); }
}  // namespace cluster

template <int kStages>
struct GemmPipelineState {
  int stage = 0;
  uint32_t parity = 0;
  void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

namespace warp_group {
inline void fence_proxy_async_shared() {}
}  // namespace warp_group

namespace tensor_memory {
inline uint64_t smem_descriptor(uint32_t address) { return address >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 46 | 2ull << 61; }
template <int kColumns, int> void allocate(uint32_t* address) {
  static_assert(kColumns <= 512);
  *address = 0;
}
template <int kColumns, int> void deallocate(uint32_t) {}
inline void fence_before_sync() {}
inline void fence_after_sync() {}
template <int kCtas> void commit_arrive(uint32_t barrier) {
  if (!elect_one()) return;
  host::products->enqueue([=] {
    host::arrive(barrier);
    if (kCtas == 2) host::arrive(barrier ^ kOdd);
  });
}
inline void tma_load_2d_pair(uint32_t to, const TmaDescriptor* map, int x, int y, uint32_t at) {
  tma_load_2d(to, map, x, y, at & ~kOdd);
}
inline void copy_scales(uint32_t to, uint32_t from) {
  if (!elect_one()) return;
  host::products->enqueue([=] {
    for (int lane = 0; lane < 32; ++lane) std::memcpy(&host::factors[lane][to], shared + from + 16 * lane, 16);
  });
}
// Sixteen values of kBits lie in sixteen bytes of a row; each takes a byte of tensor memory.
template <int kBits> void copy_operand(uint32_t to, uint64_t descriptor) {
  if (!elect_one()) return;
  host::products->enqueue([=] {
    const uint32_t start = uint32_t(descriptor & 0x3FFF) << 4, stride = uint32_t(descriptor >> 32 & 0x3FFF) << 4;
    for (int row = 0; row < 128; ++row) {
      uint8_t bytes[32];
      for (int k = 0; k < 32; ++k) {
        const int bit = k / 16 * 128 + k % 16 * kBits;
        const auto byte = [&](int i) { return shared[host::swizzled(start + row / 8 * stride + row % 8 * 128 + i)]; };
        const uint32_t word = byte(bit / 8) | (bit / 8 + 1 < 32 ? byte(bit / 8 + 1) << 8 : 0);
        bytes[k] = word >> bit % 8 & ((1u << kBits) - 1);
      }
      std::memcpy(&host::tensor_memory[0][row][to], bytes, 32);
    }
  });
}
inline void load_fragment(uint32_t from, uint32_t (&to)[32]) {
  const uint32_t lane = from >> 16, column = from & 0xFFFF;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (lane / 32 != uint32_t(threadIdx.x / 32 % 4) || lane % 16) throw host::Failure("a warp reads lanes of another");
  if (threadIdx.x % 32 == 0) host::dawdle(host::mood, 8000);  // the tile after the next waits for this one
  __syncwarp();
  for (int i = 0; i < 32; ++i) {
    to[i] = __float_as_uint(host::tensor_memory[cta][lane + g + i / 2 % 2 * 8][column + i / 4 * 8 + 2 * t + i % 2]);
  }
}
}  // namespace tensor_memory

// One instruction, later. kFactors: of a row, of kCodes codes; 0: none.
template <int kFactors, bool kPacked>
struct HostMma {
  static constexpr int kCodes = kPacked ? 64 : 32;

  static void operand(uint64_t descriptor, int rows, int format, std::vector<double>& to, uint32_t owner = 0) {
    const uint32_t start = uint32_t(descriptor & 0x3FFF) << 4, stride = uint32_t(descriptor >> 32 & 0x3FFF) << 4;
    const int bits = kPacked ? 4 : host::width(format);
    const size_t before = to.size();
    to.resize(before + size_t(rows) * kCodes);
    for (int row = 0; row < rows; ++row) {
      const auto byte = [&](int i) { return byte_at(host::swizzled(start + row / 8 * stride + row % 8 * 128 + i) | owner * kOdd); };
      for (int k = 0; k < kCodes; ++k) {
        const int bit = kPacked ? 4 * k : k / 16 * 128 + k % 16 * bits;
        const uint32_t word = byte(bit / 8) | (bit / 8 + 1 < 32 ? byte(bit / 8 + 1) << 8 : 0);
        to[before + row * kCodes + k] = host::values[kPacked ? 5 : format].at(word >> bit % 8 & ((1u << bits) - 1));
      }
    }
  }
  static void scale(std::vector<double>& values, int rows, uint32_t column, uint32_t first, bool power) {
    for (int row = 0; row < rows; ++row) {
      for (int k = 0; k < kCodes; ++k) {
        const uint32_t word = host::factors[row % 32][column + row / 32];
        const uint32_t code = word >> 8 * (first + k * kFactors / kCodes) & 255;
        values[row * kCodes + k] *= power ? std::ldexp(1.0, int(code) - 127) : host::values[0][code];
      }
    }
  }
  static void copied(uint32_t column, int rows, int format, std::vector<double>& to) {
    to.resize(size_t(rows) * kCodes);
    for (int row = 0; row < rows; ++row) {
      uint8_t bytes[32];
      std::memcpy(bytes, &host::tensor_memory[0][row][column], 32);
      for (int k = 0; k < kCodes; ++k) to[row * kCodes + k] = host::values[format].at(bytes[k]);
    }
  }
  static void mma(uint64_t a, uint64_t b, uint32_t to, bool add, uint32_t i, uint32_t of_a, uint32_t of_b, bool is_copied = false) {
    const int m = (i >> 24 & 31) << 4, n = (i >> 17 & 63) << 3;
    std::vector<double> left, right;
    if (is_copied) copied(uint32_t(a), m, i >> 7 & 7, left);
    else operand(a, m, i >> 7 & 7, left);
    operand(b, n, i >> 10 & 7, right);
    if constexpr (kFactors > 0) {
      scale(left, m, of_a, i >> 29 & 3, i >> 23 & 1);
      scale(right, n, of_b, i >> 4 & 3, i >> 23 & 1);
    }
    for (int row = 0; row < m; ++row) {
      for (int column = 0; column < n; ++column) {
        double sum = 0;
        for (int k = 0; k < kCodes; ++k) sum += left[row * kCodes + k] * right[column * kCodes + k];
        float& at = host::tensor_memory[0][row][to + column];
        at = float(add ? at + sum : sum);
      }
    }
  }
  static void fma(uint64_t a, uint64_t b, uint32_t to, uint32_t add, uint64_t instruction, uint32_t of_a = 0,
                  uint32_t of_b = 0) {
    if (!elect_one()) return;
    host::products->enqueue([=] { mma(a, b, to, add, uint32_t(instruction >> 32), of_a, of_b); });
  }
};

// A in tensor memory, a byte a value.
struct HostMmaFromMemory {
  static void fma(uint32_t a, uint64_t b, uint32_t to, uint32_t add, uint64_t instruction) {
    if (!elect_one()) return;
    host::products->enqueue([=] { HostMma<0, false>::mma(a, b, to, add, uint32_t(instruction >> 32), 0, 0, true); });
  }
};

// Of two CTAs: each has half of the rows of either operand.  Of 128 rows of the product, a CTA's 64 are in lanes 0 to 63
// with the left half of the columns, and in lanes 64 to 127 with the right half.
struct HostMmaPair {
  static void fma(uint64_t a, uint64_t b, uint32_t to, uint32_t add, uint64_t instruction) {
    if (!elect_one()) return;
    if (cta) throw host::Failure("the odd CTA issues a product");
    host::products->enqueue([=] {
      const uint32_t i = uint32_t(instruction >> 32);
      const int m = (i >> 24 & 31) << 4, n = (i >> 17 & 63) << 3, half = m == 128 ? n / 2 : n;
      std::vector<double> left, right;
      for (uint32_t owner = 0; owner < 2; ++owner) {
        HostMma<0, false>::operand(a, m / 2, i >> 7 & 7, left, owner);
        HostMma<0, false>::operand(b, n / 2, i >> 10 & 7, right, owner);
      }
      for (int row = 0; row < m; ++row) {
        for (int column = 0; column < n; ++column) {
          double sum = 0;
          for (int k = 0; k < 32; ++k) sum += left[row * 32 + k] * right[column * 32 + k];
          float& at = host::tensor_memory[row / (m / 2)][row % (m / 2) + column / half * 64][to + column % half];
          at = float(add ? at + sum : sum);
        }
      }
    });
  }
};
}  // namespace magicube

namespace cute {
using SM100_MMA_F8F6F4_2x1SM_SS = magicube::HostMmaPair;
template <class A, class B, class C, int M, int N, UMMA::Major, UMMA::Major>
using SM100_MMA_F8F6F4_TS = magicube::HostMmaFromMemory;
using SM100_MMA_F8F6F4_SS = magicube::HostMma<0, false>;
template <class A, class B, class C, class S, int M, int N, UMMA::Major, UMMA::Major>
using SM100_MMA_MXF8F6F4_SS = magicube::HostMma<1, false>;
template <class A, class B, class C, class S, int M, int N, int kBlock, UMMA::Major, UMMA::Major>
using SM100_MMA_MXF4_SS = magicube::HostMma<64 / kBlock, true>;
}  // namespace cute

namespace host {

// Runs a kernel's blocks, or pairs of them, one after the other; returns what went wrong.
template <class Kernel>
const char* run(int blocks, int threads, unsigned seed, int slices, Kernel kernel, int ctas = 1) {
  wrong.clear(), failed = false, patience = slices;
  blockDim.x = threads, gridDim.x = blocks;
  for (int index = 0; index < blocks && !failed; index += ctas) {
    std::fill_n(&tensor_memory[0][0][0], 2 * 128 * 512, NAN);
    std::memset(factors, 0xFF, sizeof factors);
    std::memset(magicube::shared, 0xA5, sizeof magicube::shared);
    std::memset(magicube::odd_shared, 0xA5, sizeof magicube::odd_shared);
    barriers.clear();
    pair = std::make_unique<Meeting>(ctas * threads);
    for (int own = 0; own < ctas; ++own) {
      block[own] = std::make_unique<Meeting>(threads);
      warps[own].clear();
      for (int warp = 0; warp < threads / 32; ++warp) warps[own].push_back(std::make_unique<Meeting>(32));
      exchanged[own].assign(threads, 0);
    }
    copies = std::make_unique<Engine>(seed), products = std::make_unique<Engine>(seed + 1);
    std::vector<std::thread> all;
    for (int thread = 0; thread < ctas * threads; ++thread) {
      all.emplace_back([=] {
        cta = thread / threads, threadIdx.x = thread % threads, blockIdx.x = index + cta;
        mood.seed(seed + thread);
        try {
          kernel();
        } catch (const Failure& failure) {
          fail(failure.what());
        }
      });
    }
    for (auto& thread : all) thread.join();
    copies.reset(), products.reset();
    for (const auto& [at, barrier] : barriers) {
      if (barrier.missing != barrier.count || barrier.bytes) fail("a barrier is left in mid-phase");
    }
  }
  return wrong.c_str();
}

}  // namespace host
