// A cluster of CTAs of sm_90a as fibers of one CPU thread, for the source of few_rows/product.cuh and scaled_gemm/small_m/kernel.cuh as it stands.
//
// Fibers run in random order and stop at random places. Bulk copies and TMA, and the products of WGMMA, happen at once or as late
// as the source's waits allow: a copy when nothing else can move on, a product at the wait that names it, from the registers and the
// shared memory of then. A missing wait, or a stage that is filled too early, changes results or fails.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "halves_host.hpp"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define CUTE_UNROLL

namespace cuda { namespace std = ::std; }

struct Index { unsigned x = 0, y = 0, z = 0; };
inline Index threadIdx, blockIdx, blockDim, gridDim;
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
template <class T> T __ldg(const T* at) { return *at; }
using std::max;
using std::min;

namespace host {

struct Failure : std::runtime_error { using runtime_error::runtime_error; };
inline void require(bool holds, const char* otherwise) { if (!holds) throw Failure(otherwise); }

// A product of a warp's 16 rows, as one lane starts it: where its registers are.
struct Product {
  const uint32_t* a[4];
  uint64_t b;
  std::vector<float*> sums;
  bool add, done;
  int kind;  // of its values; see `read`
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  int cta, thread, registers;
  uint64_t shuffled = 0;  // what its lane gives the others
  struct { std::array<uint32_t, 4> a; std::array<uint32_t, 2> b; } fragments;  // likewise, of a warp's own product
  bool started = false, over = false, fenced = false;
  std::vector<Product> open;
  std::vector<std::vector<Product>> groups;  // committed, the oldest first
  const char* waits_for = "";
  std::function<bool()> ready;  // whether it can move on; null: yes
};
// mbarrier: arrivals and bytes that are still to come in this phase, and phases that are over.
struct Barrier { int count, missing; int64_t bytes = 0; uint32_t phases = 0; };
struct Meeting { int count = 0, here = 0, round = 0; };
struct Copy { int cta; uint32_t barrier; int bytes; std::function<void()> perform; };
struct Range { const uint8_t* start; int64_t bytes; };

constexpr uint32_t kFirst = 1024;  // address of dynamic shared memory; the system has what is before
constexpr int kMost = 232448;  // bytes of shared memory of a CTA
struct Cta {
  alignas(1024) uint8_t memory[kMost];
  std::map<uint32_t, Barrier> barriers;
  Meeting named[16], warps[32];
  int free_registers = 0;
};

inline std::vector<std::unique_ptr<Fiber>> fibers;  // of all CTAs of a cluster
inline std::vector<std::unique_ptr<Cta>> ctas;
inline std::vector<Copy> copies;  // under way
inline std::vector<Range> readable;  // global memory
inline Meeting together;
inline ucontext_t scheduler;
inline int current, threads, smem_bytes;
inline bool copies_late, products_late;
inline uint64_t progress;
inline std::mt19937 random;
inline std::function<void()> body;
inline std::string wrong;

inline Fiber& self() { return *fibers[current]; }
inline Cta& own_cta() { return *ctas[self().cta]; }
inline void yield() { swapcontext(&self().context, &scheduler); }
inline void pause() {
  if (random() % 4 == 0) ++progress, yield();
}
template <class Over>
void wait(const char* what, Over over) {
  if (!over()) {
    self().waits_for = what, self().ready = std::ref(over);
    yield();
    self().ready = nullptr;
  }
  ++progress;
}
inline void meet(Meeting& meeting, int count, const char* what) {
  require(meeting.here == 0 || meeting.count == count, "a barrier with two counts");
  meeting.count = count;
  const int round = meeting.round;
  if (++meeting.here == count) meeting.here = 0, ++meeting.round;
  wait(what, [&] { return meeting.round != round; });
}
inline void meet_warp() { meet(own_cta().warps[self().thread / 32], 32, "warp"); }

inline uint8_t* shared_bytes(int cta, uint32_t address, int bytes) {
  require(address >= kFirst && address + bytes <= kFirst + smem_bytes, "shared memory: address beyond it");
  return ctas.at(cta)->memory + (address - kFirst);
}
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

inline Barrier& barrier_at(int cta, uint32_t at) {
  const auto found = ctas[cta]->barriers.find(at);
  require(found != ctas[cta]->barriers.end(), "mbarrier: not initialized");
  return found->second;
}
inline void settle(Barrier& barrier) {
  if (barrier.missing || barrier.bytes) return;
  barrier.missing = barrier.count, ++barrier.phases, ++progress;
}
inline void arrive(uint32_t at, int64_t bytes) {
  Barrier& barrier = barrier_at(self().cta, at);
  require(barrier.missing > 0, "mbarrier: more arrivals than it counts");
  --barrier.missing, barrier.bytes += bytes;
  settle(barrier);
}
inline void complete(const Copy& copy) {
  copy.perform();
  Barrier& barrier = barrier_at(copy.cta, copy.barrier);
  barrier.bytes -= copy.bytes;
  require(barrier.bytes >= 0, "mbarrier: more bytes than it expects");
  settle(barrier);
  ++progress;
}
inline void start(Copy copy) {
  barrier_at(copy.cta, copy.barrier);
  if (copies_late) copies.push_back(std::move(copy));
  else complete(copy);
  pause();
}
inline bool is_readable(const void* from, int64_t bytes) {
  const auto at = static_cast<const uint8_t*>(from);
  return std::any_of(readable.begin(), readable.end(), [&](const Range& range) {
    return at >= range.start && at + bytes <= range.start + range.bytes;
  });
}

// Values of a product: 0: float16, 1: bfloat16, else bytes: 2: e4m3, 3: e5m2 in A, 4: in B, 5: in both, 6: integers in both.
constexpr int kIntegers = 6;
inline double read(const void* from, int kind, bool of_b) {
  uint8_t byte;
  uint16_t half;
  std::memcpy(&byte, from, 1);
  if (kind < 2) std::memcpy(&half, from, 2);
  if (kind == 1) return value(__nv_bfloat16{half});
  if (kind == 0) return value(__half{half});
  if (kind == kIntegers) return int8_t(byte);
  if ((kind - 2) >> of_b & 1) return value(__half{uint16_t(byte << 8)});
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const double size = (byte & 127) == 127 ? NAN : std::ldexp(exponent ? 8 + mantissa : mantissa, (exponent ? exponent : 1) - 10);
  return byte & 128 ? -size : size;
}
// PTX ISA, wgmma.mma_async: register fragments of A and D, and B in rows of 128 bytes, swizzled. 32 bytes along K.
inline void multiply(int first, int group, int index) {
  const auto of = [&](int lane) -> Product& {
    Fiber& fiber = *fibers[first + lane];
    auto& from = group < 0 ? fiber.open : fiber.groups.at(group);
    require(index < int(from.size()), "wgmma: lanes of a warp start different products");
    return from[index];
  };
  Product& leader = of(0);
  const int columns = 2 * int(leader.sums.size()), size = leader.kind < 2 ? 2 : 1;
  const uint32_t from = uint32_t(leader.b & 0x3FFF) << 4, stride = uint32_t(leader.b >> 32 & 0x3FFF) << 4;
  require(leader.b >> 62 == 1, "wgmma: not swizzled by 128 bytes");
  std::vector<double> a(32 / size), b(columns * 32 / size);
  for (int n = 0; n < columns; ++n) {
    for (int byte = 0; byte < 32; byte += size) {
      const uint32_t at = swizzled(from + n / 8 * stride + n % 8 * 128 + byte);
      b[(n * 32 + byte) / size] = read(shared_bytes(fibers[first]->cta, at, size), leader.kind, true);
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int byte = 0; byte < 32; byte += size) {
      const uint32_t* const word = of(row % 8 * 4 + byte % 16 / 4).a[byte / 16 * 2 + row / 8];
      a[byte / size] = read(reinterpret_cast<const uint8_t*>(word) + byte % 4, leader.kind, false);
    }
    for (int n = 0; n < columns; ++n) {
      Product& to = of(row % 8 * 4 + n % 8 / 2);
      require(to.b == leader.b && to.add == leader.add, "wgmma: lanes of a warp disagree");
      float& sum = *to.sums[n / 8 * 4 + row / 8 * 2 + n % 2];
      int32_t& integer = reinterpret_cast<int32_t&>(sum);
      double total = !to.add ? 0.0 : leader.kind == kIntegers ? integer : sum;
      for (int k = 0; k < 32 / size; ++k) total += a[k] * b[n * (32 / size) + k];
      require(leader.kind != kIntegers || std::fabs(total) < 2147483648.0, "wgmma: int32 overflow");
      if (leader.kind == kIntegers) integer = int32_t(total);
      else sum = float(total);
    }
  }
  for (int lane = 0; lane < 32; ++lane) of(lane).done = true;
}

inline void enter() {
  try {
    body();
    require(self().open.empty() && self().groups.empty(), "wgmma: a thread ends with products under way");
  } catch (const std::exception& error) {
    wrong = "thread " + std::to_string(self().thread) + " of CTA " + std::to_string(self().cta) + ": " + error.what();
  }
  self().over = true, ++progress;
  yield();
}

inline void run_cluster(int split, unsigned first, unsigned y, int registers) {
  fibers.clear(), ctas.clear(), copies.clear(), together = {};
  for (int cta = 0; cta < split; ++cta) {
    ctas.push_back(std::make_unique<Cta>());
    std::memset(ctas.back()->memory, 0xFF, kMost);  // NaN, of all types
    for (int thread = 0; thread < threads; ++thread) {
      fibers.push_back(std::make_unique<Fiber>());
      Fiber& fiber = *fibers.back();
      fiber.cta = cta, fiber.thread = thread, fiber.registers = registers;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, enter, 0);
    }
  }
  std::vector<int> alive(fibers.size());
  for (int i = 0; i < int(alive.size()); ++i) alive[i] = i;
  while (!alive.empty() && wrong.empty()) {
    const uint64_t before = progress;
    std::shuffle(alive.begin(), alive.end(), random);
    for (int i : alive) {
      if (fibers[i]->ready && !fibers[i]->ready()) continue;
      current = i, threadIdx.x = fibers[i]->thread, blockIdx.x = first + fibers[i]->cta, blockIdx.y = y;
      fibers[i]->started = true;
      swapcontext(&scheduler, &fibers[i]->context);
      if (!wrong.empty()) return;
    }
    std::erase_if(alive, [](int i) { return fibers[i]->over; });
    if (before != progress || alive.empty()) continue;
    if (copies.empty()) {
      const Fiber& fiber = *fibers[alive[0]];
      std::set<std::string> causes;  // a thread may wait for one that waits for something else
      for (int i : alive) causes.insert(fibers[i]->waits_for);
      wrong = "thread " + std::to_string(fiber.thread) + " of CTA " + std::to_string(fiber.cta) + " waits for ever:";
      for (const std::string& cause : causes) wrong += " " + cause;
      return;
    }
    const size_t next = random() % copies.size();
    const Copy copy = std::move(copies[next]);
    copies.erase(copies.begin() + next);
    try { complete(copy); } catch (const Failure& failure) { wrong = failure.what(); }
  }
  if (!copies.empty()) wrong = "a CTA ends with copies under way";
  for (const auto& cta : ctas) {
    for (const auto& [at, barrier] : cta->barriers) {
      if (barrier.missing != barrier.count || barrier.bytes) wrong = "a barrier is left in mid-phase";
    }
    for (int i = smem_bytes; i < kMost; ++i) {
      if (cta->memory[i] != 0xFF) wrong = "shared memory: written beyond its end";
    }
  }
}

struct Launch { int grid_x, grid_y, split, threads, smem_bytes, resident; unsigned seed; int late; };

// The clusters of a grid, one after the other. Returns what is wrong, or null.
inline const char* run(const Launch& launch, std::vector<Range> ranges, std::function<void()> kernel) {
  threads = launch.threads, smem_bytes = launch.smem_bytes, readable = std::move(ranges), body = std::move(kernel);
  copies_late = launch.late & 1, products_late = launch.late & 2;
  random.seed(launch.seed), wrong.clear(), blockDim.x = threads, gridDim.x = launch.grid_x, gridDim.y = launch.grid_y;
  if (smem_bytes > kMost || launch.resident * (smem_bytes + 1024) > 233472) return "shared memory: more than there is";
  const int registers = std::min(255, 65536 / launch.resident / threads) / 8 * 8;
  for (int y = 0; y < launch.grid_y; ++y) {
    for (int x = 0; x < launch.grid_x && wrong.empty(); x += launch.split) run_cluster(launch.split, x, y, registers);
  }
  return wrong.empty() ? nullptr : wrong.c_str();
}

}  // namespace host

inline void __syncthreads() { host::meet(host::own_cta().named[0], host::threads, "__syncthreads"); }
inline void __syncwarp() { host::meet_warp(); }
inline float2 __half22float2(__half2 x) { return {float(host::value(x.x)), float(host::value(x.y))}; }
template <class T> T __shfl_xor_sync(unsigned lanes, T x, int step) {
  host::require(lanes == ~0u && sizeof x <= 8, "a shuffle of other lanes or of more than 8 bytes");
  std::memcpy(&host::self().shuffled, &x, sizeof x);
  host::meet_warp();
  std::memcpy(&x, &host::fibers[host::current ^ step]->shuffled, sizeof x);
  host::meet_warp();
  return x;
}
template <class T> T __shfl_sync(unsigned lanes, T x, int from, int width) {
  host::require(lanes == ~0u && sizeof x <= 8 && from < width, "a shuffle of other lanes or of more than 8 bytes");
  std::memcpy(&host::self().shuffled, &x, sizeof x);
  host::meet_warp();
  std::memcpy(&x, &host::fibers[host::current / width * width + from]->shuffled, sizeof x);
  host::meet_warp();
  return x;
}

namespace cute {
template <int... I> using int_sequence = std::integer_sequence<int, I...>;
template <int N> using make_int_sequence = std::make_integer_sequence<int, N>;

union GmmaDescriptor {
  uint64_t desc_ = 0;
  struct {
    uint64_t start_address_ : 14, : 2, leading_byte_offset_ : 14, : 2, stride_byte_offset_ : 14, : 16, layout_type_ : 2;
  } bitfield;
  operator uint64_t() const { return desc_; }
};

inline void warpgroup_arrive() { host::meet_warp(), host::self().fenced = true; }
inline void warpgroup_commit_batch() {
  auto& fiber = host::self();
  fiber.groups.push_back(std::move(fiber.open)), fiber.open.clear(), fiber.fenced = false;
}
template <int kPending> void warpgroup_wait() {
  auto& fiber = host::self();
  host::meet_warp();
  if (fiber.thread % 32 == 0) {
    for (int group = 0; group < int(fiber.groups.size()) - kPending; ++group) {
      for (int i = 0; i < int(fiber.groups[group].size()); ++i) {
        if (!fiber.groups[group][i].done) host::multiply(host::current, group, i);
      }
    }
  }
  host::meet_warp();
  if (int(fiber.groups.size()) > kPending) fiber.groups.erase(fiber.groups.begin(), fiber.groups.end() - kPending);
}
template <class T> void warpgroup_fence_operand(T&) {}
}  // namespace cute

#include "warp_mma_host.hpp"

namespace cute {
namespace SM90::GMMA {
enum class ScaleOut { Zero, One };
enum class Major { K, MN };
enum class LayoutType { INTERLEAVE, B128, B64, B32 };

template <int kColumns, int kKind>
struct HostProduct {
  static void put(host::Product& product, float& sum) { product.sums.push_back(&sum); }
  static void put(host::Product& product, uint32_t& sum) { product.sums.push_back(reinterpret_cast<float*>(&sum)); }
  static void put(host::Product& product, ScaleOut scale) { product.add = scale == ScaleOut::One; }
  template <class... Rest>
  static void fma(const uint32_t& a0, const uint32_t& a1, const uint32_t& a2, const uint32_t& a3, uint64_t b, Rest&&... rest) {
    auto& fiber = host::self();
    host::require(fiber.fenced, "wgmma: no warpgroup_arrive before it");
    host::Product product{{&a0, &a1, &a2, &a3}, b, {}, true, false, kKind};
    (put(product, rest), ...);
    host::require(product.sums.size() == kColumns / 2, "wgmma: registers of the sums");
    fiber.open.push_back(std::move(product));
    if (host::products_late) return;
    host::meet_warp();
    if (fiber.thread % 32 == 0) host::multiply(host::current, -1, int(fiber.open.size()) - 1);
    host::meet_warp();
  }
};
#define HOST_PRODUCTS(N)                                                             \
  template <Major, Major> using MMA_64x##N##x16_F32F16F16_RS = HostProduct<N, 0>;    \
  template <Major, Major> using MMA_64x##N##x16_F32BF16BF16_RS = HostProduct<N, 1>;  \
  template <int = 0> using MMA_64x##N##x32_F32E4M3E4M3_RS_TN = HostProduct<N, 2>;    \
  template <int = 0> using MMA_64x##N##x32_F32E5M2E4M3_RS_TN = HostProduct<N, 3>;    \
  template <int = 0> using MMA_64x##N##x32_F32E4M3E5M2_RS_TN = HostProduct<N, 4>;    \
  template <int = 0> using MMA_64x##N##x32_F32E5M2E5M2_RS_TN = HostProduct<N, 5>;    \
  using MMA_64x##N##x32_S32S8S8_RS_TN = HostProduct<N, host::kIntegers>;             \
  struct MMA_64x##N##x32_S32S8S8_SS_TN;
HOST_PRODUCTS(8) HOST_PRODUCTS(16) HOST_PRODUCTS(32) HOST_PRODUCTS(64)
#undef HOST_PRODUCTS
using MMA_64x128x32_S32S8S8_RS_TN = HostProduct<128, host::kIntegers>;
// Of the other kernels in the headers: names alone.
#define HOST_NAMES(N)                                                                                                     \
  template <int = 0> struct MMA_64x##N##x32_F32E4M3E4M3_SS_TN; template <int = 0> struct MMA_64x##N##x32_F32E4M3E5M2_SS_TN; \
  template <int = 0> struct MMA_64x##N##x32_F32E5M2E4M3_SS_TN; template <int = 0> struct MMA_64x##N##x32_F32E5M2E5M2_SS_TN; \
  template <Major, Major> struct MMA_64x##N##x16_F32BF16BF16_SS; struct MMA_64x##N##x32_S32S8S8_SS_TN;
HOST_NAMES(64) HOST_NAMES(96) HOST_NAMES(128) HOST_NAMES(192) HOST_NAMES(256)
#undef HOST_NAMES
}  // namespace SM90::GMMA
}  // namespace cute

namespace magicube {
using namespace cute;

// `inner` elements of `size` bytes in each of `rows`, `pitch` bytes apart; a box is `box_bytes` of `box` rows.
struct TmaDescriptor {
  const uint8_t* start;
  int64_t size, inner, rows, pitch, box_bytes, box, swizzle;
};

inline uint8_t* dynamic_shared() { return host::own_cta().memory; }
inline uint32_t shared_address(const void* at) { return host::kFirst + uint32_t(static_cast<const uint8_t*>(at) - dynamic_shared()); }
inline int warp_of_block() { return threadIdx.x / 32; }
template <int kRowBytes>
uint32_t swizzled(uint32_t row, uint32_t chunk) {
  static_assert(kRowBytes == 128);
  return host::swizzled(row * 128 + chunk * 16);
}
inline void prefetch_tensor_map(const TmaDescriptor*) {}
inline void prefetch_l2(const void* at) { host::require(host::is_readable(at, 4), "prefetch: beyond the array"); }
inline void pdl_wait() {}

inline void barrier_init(uint32_t at, int arrivals) {
  host::shared_bytes(host::self().cta, at, 8);
  host::require(at % 8 == 0, "mbarrier: not aligned");
  host::require(host::own_cta().barriers.emplace(at, host::Barrier{arrivals, arrivals}).second, "mbarrier: initialized twice");
}
inline void barrier_fence() {}
inline void barrier_arrive(uint32_t at) { host::arrive(at, 0), host::pause(); }
inline void mbarrier_arrive_expect_tx(uint32_t at, uint32_t bytes) { host::arrive(at, bytes); }
inline void barrier_wait(uint32_t at, uint32_t parity) {
  const host::Barrier& barrier = host::barrier_at(host::self().cta, at);
  host::wait("mbarrier", [&] { return (barrier.phases & 1) != parity; });
  host::pause();
}
inline void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  const int cta = host::self().cta;
  host::require((to | uintptr_t(from) | bytes) % 16 == 0, "bulk copy: not aligned to 16 bytes");
  host::require(host::is_readable(from, bytes), "bulk copy: beyond the weights");
  uint8_t* const at = host::shared_bytes(cta, to, bytes);
  host::start({cta, barrier, bytes, [=] { std::memcpy(at, from, bytes); }});
}
inline void tma_load_5d(uint32_t, const TmaDescriptor*, int, int, uint32_t) { throw host::Failure("a box of five sizes"); }
inline void tma_load_2d(uint32_t to, const TmaDescriptor* map, int x, int y, uint32_t barrier) {
  const int cta = host::self().cta, bytes = int(map->box * map->box_bytes);
  host::require(to % 128 == 0 && (map->swizzle == 0 || map->box_bytes == 128), "TMA: not aligned to 128 bytes");
  host::shared_bytes(cta, to, bytes);
  host::start({cta, barrier, bytes, [=, map = *map] {
    for (int64_t row = 0; row < map.box; ++row) {
      for (int64_t byte = 0; byte < map.box_bytes; ++byte) {
        const int64_t from = x * map.size + byte;
        const uint32_t at = uint32_t(to + row * map.box_bytes + byte);
        const bool there = y + row < map.rows && from < map.inner * map.size;
        *host::shared_bytes(cta, map.swizzle ? host::swizzled(at) : at, 1) = there ? map.start[(y + row) * map.pitch + from] : 0;
      }
    }
  }});
}

namespace cluster {
inline uint32_t rank() { return host::self().cta; }
inline void sync() { host::meet(host::together, int(host::fibers.size()), "cluster barrier"); }
inline void tma_load_2d_multicast(uint16_t, uint32_t, const TmaDescriptor*, int, int, uint32_t) { throw host::Failure("multicast"); }
inline void tma_load_5d_multicast(uint16_t, uint32_t, const TmaDescriptor*, int, int, uint32_t) { throw host::Failure("multicast"); }
inline void arrive_at(uint32_t, uint32_t) { throw host::Failure("remote arrival"); }
inline uint32_t load_of(uint32_t, uint32_t) { throw host::Failure("remote word"); }
inline float4 load_four_of(uint32_t from, uint32_t rank) {
  for (int i = 0; i < host::threads; ++i) {
    const auto& fiber = *host::fibers.at(rank * host::threads + i);
    host::require(fiber.started && !fiber.over, "shared memory of a CTA that has not started or has ended");
  }
  float4 found;
  host::require(from % 16 == 0, "shared memory: not aligned");
  std::memcpy(&found, host::shared_bytes(int(rank), from, 16), 16);
  host::pause();
  return found;
}
}  // namespace cluster

namespace warp_group {
inline void named_barrier_sync(int barrier, int threads) {
  host::require(barrier > 0 && barrier < 16 && threads % 32 == 0, "named barrier: number or count");
  host::meet(host::own_cta().named[barrier], threads, "named barrier");
}
inline void named_barrier_arrive(int, int) { throw host::Failure("named barrier: arrival"); }
inline void fence_proxy_async_shared() {}
// A warp gives registers back to the CTA, or waits until there are enough.
template <int kRegisters> void setmaxnreg_dec() {
  host::require(kRegisters >= 24 && kRegisters % 8 == 0 && kRegisters <= host::self().registers, "setmaxnreg.dec");
  host::own_cta().free_registers += host::self().registers - kRegisters, host::self().registers = kRegisters, ++host::progress;
}
template <int kRegisters> void setmaxnreg_inc() {
  const int more = kRegisters - host::self().registers;
  host::require(kRegisters <= 256 && kRegisters % 8 == 0 && more >= 0, "setmaxnreg.inc");
  auto& cta = host::own_cta();
  host::wait("setmaxnreg", [&] { return cta.free_registers >= more; });
  cta.free_registers -= more, host::self().registers = kRegisters;
}
}  // namespace warp_group

}  // namespace magicube
