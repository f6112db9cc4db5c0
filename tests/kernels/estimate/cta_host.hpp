// A CTA of CUDA threads as fibers of one CPU thread, for the source of kernels as it stands.
//
// Fibers run in random order between barriers. Asynchronous copies happen at once or as late as the source allows, so that both a
// missing wait and a stage that is filled too early change the results.
//
// Most of a test's time is g++ reading headers: this file includes neither <functional>, <memory>, <random> nor <string>.
#pragma once

#undef _FORTIFY_SOURCE  // its longjmp takes another stack for an error

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define CUTE_UNROLL
#define CUTE_NO_UNROLL
#define __noinline__

namespace cuda { namespace std = ::std; }

struct Index { unsigned x = 0, y = 0, z = 0; };
inline Index threadIdx, blockIdx, blockDim, gridDim;

struct __half {};
struct __nv_bfloat16 {};
struct double2 { double x, y; };
struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
template <class T> T __ldg(const T* at) { return *at; }
template <class T> T __ldcg(const T* at) { return *at; }
inline float __uint_as_float(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
inline uint32_t __float_as_uint(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }
inline double __longlong_as_double(long long x) { double y; std::memcpy(&y, &x, 8); return y; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __expf(float x) { return std::exp2(x * 1.44269504f); }
inline int __float2int_rn(float x) {
  return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : x <= -0x1p31f ? INT32_MIN : int(std::nearbyint(x));
}
float __fdiv_ru(float, float);
float __fmul_ru(float, float);
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
inline int __double2int_rn(double x) { return int(std::nearbyint(x)); }
inline float __double2float_ru(double x) { const float y = float(x); return double(y) < x ? std::nextafter(y, INFINITY) : y; }
inline float __fsqrt_ru(float x) { return __double2float_ru(std::sqrt(double(x))); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
inline int atomicAdd(int* at, int x) { const int was = *at; *at += x; return was; }
inline uint32_t atomicMax(uint32_t* at, uint32_t x) { const uint32_t was = *at; *at = x > was ? x : was; return was; }
inline int atomicOr(int* at, int x) { const int was = *at; *at |= x; return was; }
inline uint32_t atomicAdd(uint32_t* at, uint32_t x) { const uint32_t was = *at; *at += x; return was; }
inline void __threadfence() {}
inline void __threadfence_system() {}
using std::ceil;
using std::fabs;
using std::fma;
using std::max;
using std::min;
using std::sqrt;
inline float sqrtf(float x) { return std::sqrt(x); }
inline double fmax(double x, double y) { return std::fmax(x, y); }
inline float fabsf(float x) { return std::fabs(x); }
inline float fmaxf(float x, float y) { return std::fmax(x, y); }
inline float fminf(float x, float y) { return std::fmin(x, y); }
inline __half __float2half_rn(float) { return {}; }
inline __nv_bfloat16 __float2bfloat16_rn(float) { return {}; }

namespace magicube {
alignas(1024) inline uint8_t shared[1 << 18];
}

namespace host {

struct Barrier { int count = 0, round = 0; };
struct Copy { uint8_t* to; const uint8_t* from; int valid, size; };
struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf here;  // where it goes on: a jump makes no system call, unlike swapcontext
  std::vector<std::vector<Copy>> groups;  // of copies that have not happened yet
  std::vector<Copy> open;
  const Barrier* waits_at = nullptr;
  int round = 0;  // of that barrier, when it came there
  bool started = false, over = false;
};
// The fibers' stacks, one after the other. Most of their pages are never written, so nothing fills them.
struct Stacks {
  static constexpr size_t kBytes = 1 << 18;
  char* start;
  explicit Stacks(int count) : start(static_cast<char*>(std::malloc(count * kBytes))) {}
  ~Stacks() { std::free(start); }
};
// splitmix64
struct Random {
  uint64_t state;
  uint64_t operator()() {
    uint64_t x = state += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
  }
  void shuffle(std::vector<int>& x) {
    for (size_t i = x.size(); i > 1; --i) std::swap(x[i - 1], x[(*this)() % i]);
  }
};
inline std::vector<Fiber> fibers;
inline jmp_buf scheduler;
inline int current = 0;
inline Barrier block, warps[32];
inline uint64_t exchanged[1024];
inline bool late = false;
inline void (*body)(void*) = nullptr;
inline void* arguments = nullptr;
inline uint64_t progress = 0;

[[noreturn]] inline void fail(const char* what) {
  std::fputs(what, stderr);
  std::abort();
}
inline void yield() {
  if (!_setjmp(fibers[current].here)) _longjmp(scheduler, 1);
}
inline void resume(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.here, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}
inline void meet(Barrier& barrier, int threads) {
  Fiber& self = fibers[current];
  self.round = barrier.round;
  if (++barrier.count == threads) {
    barrier.count = 0, ++barrier.round, ++progress;
  } else {
    self.waits_at = &barrier;
    yield();
    self.waits_at = nullptr;
  }
}
inline bool is_ready(const Fiber& fiber) { return !fiber.waits_at || fiber.waits_at->round != fiber.round; }
inline void perform(const Copy& copy) {
  std::memset(copy.to, 0, copy.size);
  std::memcpy(copy.to, copy.from, copy.valid);
}
inline void copy(uint32_t to, const void* from, int valid, int size) {
  const Copy one{magicube::shared + to, static_cast<const uint8_t*>(from), valid, size};
  if (size == 16 && (to % 16 || reinterpret_cast<uintptr_t>(from) % 16)) host::fail("unaligned copy");
  if (late) fibers[current].open.push_back(one);
  else perform(one);
}
inline void start() {
  body(arguments);
  fibers[current].over = true, ++progress;
  yield();
}

// Run `threads` threads of each CTA, CTA after CTA in random order. Returns what is wrong, or null.
template <class Kernel>
const char* run(int blocks, int threads, unsigned seed, bool copies_late, Kernel kernel) {
  Random random{seed};
  const Stacks stacks(threads);
  late = copies_late, gridDim.x = blocks, blockDim.x = threads;
  body = [](void* kernel) { (*static_cast<Kernel*>(kernel))(); }, arguments = &kernel;
  std::vector<int> order(blocks), alive(threads);
  for (int i = 0; i < blocks; ++i) order[i] = i;
  random.shuffle(order);
  for (int b : order) {
    std::memset(magicube::shared, 0xff, sizeof(magicube::shared));
    block = {};
    for (auto& warp : warps) warp = {};
    fibers.clear();
    fibers.resize(threads);
    alive.resize(threads);
    for (int t = 0; t < threads; ++t) {
      alive[t] = t;
      ucontext_t& context = fibers[t].context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks.start + t * Stacks::kBytes, context.uc_stack.ss_size = Stacks::kBytes;
      makecontext(&context, start, 0);
    }
    while (!alive.empty()) {
      const uint64_t before = progress;
      random.shuffle(alive);
      for (int t : alive) {
        if (!is_ready(fibers[t])) continue;
        current = t, threadIdx.x = t, blockIdx.x = b;
        resume(fibers[t]);
      }
      alive.erase(std::remove_if(alive.begin(), alive.end(), [](int t) { return fibers[t].over; }), alive.end());
      if (before == progress) return "threads wait at different barriers";
    }
    for (const Fiber& fiber : fibers) {
      for (const auto& group : fiber.groups) {
        if (!group.empty()) return "a thread ends with copies on their way";
      }
    }
  }
  return nullptr;
}

}  // namespace host

inline void __syncthreads() { host::meet(host::block, blockDim.x); }
inline void __syncwarp() { host::meet(host::warps[threadIdx.x / 32], 32); }
template <class T> T __shfl_xor_sync(unsigned, T x, int bit) {
  static_assert(sizeof(T) <= 8);
  const unsigned own = threadIdx.x;
  std::memcpy(&host::exchanged[own], &x, sizeof(T));
  __syncwarp();
  T theirs;
  std::memcpy(&theirs, &host::exchanged[own ^ bit], sizeof(T));
  __syncwarp();
  return theirs;
}

// What `of` makes of the values of all lanes of a warp, in their order.
template <class T, class Of>
T of_warp(T x, Of of) {
  const unsigned own = threadIdx.x, first = own / 32 * 32;
  std::memcpy(&host::exchanged[own], &x, sizeof(T));
  __syncwarp();
  T values[32];
  for (unsigned lane = 0; lane < 32; ++lane) std::memcpy(&values[lane], &host::exchanged[first + lane], sizeof(T));
  __syncwarp();
  return of(values, own % 32);
}
template <class T> T __shfl_up_sync(unsigned, T x, int step) {
  return of_warp(x, [step](const T* all, unsigned lane) { return all[lane < unsigned(step) ? lane : lane - step]; });
}
template <class T> T __shfl_sync(unsigned, T x, int from) {
  return of_warp(x, [from](const T* all, unsigned) { return all[from]; });
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t x) {
  return of_warp(x, [](const uint32_t* all, unsigned) { uint32_t y = 0; for (int i = 0; i < 32; ++i) y = max(y, all[i]); return y; });
}
inline uint32_t __reduce_add_sync(unsigned, uint32_t x) {
  return of_warp(x, [](const uint32_t* all, unsigned) { uint32_t y = 0; for (int i = 0; i < 32; ++i) y += all[i]; return y; });
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t x) {
  return of_warp(x, [](const uint32_t* all, unsigned) { uint32_t y = 0; for (int i = 0; i < 32; ++i) y |= all[i]; return y; });
}

namespace magicube {

inline uint32_t shared_address(const void* at) { return uint32_t(static_cast<const uint8_t*>(at) - shared); }
inline void cp_async(uint32_t to, const void* from, int valid) { host::copy(to, from, valid, 16); }
template <int kBytes> void copy_async_run(uint32_t to, const void* from, int valid) { host::copy(to, from, valid, kBytes); }
inline void copy_async_word(uint32_t to, const void* from) { host::copy(to, from, 4, 4); }
inline void store_shared(uint32_t to, uint32_t word) { std::memcpy(shared + to, &word, 4); }
inline void cp_async_commit() {
  auto& fiber = host::fibers[host::current];
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}
template <int kPending>
void cp_async_wait() {
  auto& groups = host::fibers[host::current].groups;
  while (int(groups.size()) > kPending) {
    for (const auto& copy : groups.front()) host::perform(copy);
    groups.erase(groups.begin());
  }
}
template <int kRowBytes>
uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + ((chunk ^ (row / (128 / kRowBytes) % (kRowBytes / 16))) * 16);
}
// The lanes of a warp meet twice: after they have stored their fragments, and after they have read the others'.
template <bool kSigned>
void mma_bytes(uint32_t (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static uint32_t fragments[1024][6];
  const unsigned own = threadIdx.x, first = own / 32 * 32, g = own % 32 / 4, t = own % 4;
  std::memcpy(fragments[own], a, 16);
  fragments[own][4] = b0, fragments[own][5] = b1;
  __syncwarp();
  for (int f = 0; f < 4; ++f) {
    const unsigned row = g + f / 2 * 8, column = 2 * t + f % 2;
    int64_t total = int32_t(sum[f]);
    for (unsigned k = 0; k < 32; ++k) {
      const unsigned lane = k % 16 / 4, half = k / 16, shift = 8 * (k % 4);
      const uint32_t left = fragments[first + row % 8 * 4 + lane][2 * half + row / 8] >> shift & 255;
      const auto right = int8_t(fragments[first + column * 4 + lane][4 + half] >> shift);
      total += (kSigned ? int8_t(left) : int(left)) * int64_t{right};
    }
    if (total != int32_t(total)) host::fail("a sum leaves the range of int32");
    sum[f] = uint32_t(total);
  }
  __syncwarp();
}
inline void pdl_wait() {}
inline float reciprocal_of_normal(float x) { return 1.0f / x; }
inline float tanh_of(float x) { return std::tanh(x); }
inline float at_least(float x, float low) { return x < low ? low : x; }
inline uint32_t group_reduce_max(uint32_t x, int, uint32_t*) { return x; }
namespace cluster {
inline unsigned size() { return 1; }
inline unsigned rank() { return 0; }
inline void sync() {}
inline void arrive() {}
inline void wait() {}
inline uint32_t load_of(uint32_t, int) { return 0; }
}  // namespace cluster

}  // namespace magicube
