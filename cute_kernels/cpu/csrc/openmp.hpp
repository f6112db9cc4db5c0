// Jobs on the threads of torch's OpenMP, by the entry point that GCC's and LLVM's runtimes share.
//
// An operator of torch leaves its threads spinning for the next one, some milliseconds with GCC's runtime: they take a job at
// once, where a thread of our own would first have to wake and win a core from them. But OpenMP waits for each of its threads,
// even one whose core another process has. So the time that a call waited is measured, and for many times as long after it
// is_ready() is false: calls then use a ThreadPool, which waits for no thread that has not begun.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#ifndef _WIN32
#include <dlfcn.h>
#endif

#include "thread_pool.hpp"

namespace magicube {

class OpenMp {
 public:
  // Whether a call may use it now. A forked process has none of its parent's threads, and the runtime waits for them.
  static bool is_ready() {
    static const int before = forks();
    return is_wanted().load(std::memory_order_relaxed) && parallel() != nullptr && forks() == before &&
           now() >= avoided_until().load(std::memory_order_relaxed);
  }

  // Whether calls use it at all. Returns the value before.
  static bool want(bool value) { return is_wanted().exchange(value); }

  // Run the job on this thread and on `workers` others.
  static void run(int workers, const Job& job) {
    OpenMp call(workers, job);
    const int64_t begin = now();
    parallel()([](void* p) { static_cast<OpenMp*>(p)->run_thread(); }, &call, static_cast<unsigned>(workers + 1), 0);
    const int64_t waited = now() - begin - call.led_;
    if (waited > kShortWait) avoided_until().store(begin + call.led_ + (1 + kAvoided) * waited, std::memory_order_relaxed);
  }

 private:
  using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
  static constexpr int64_t kShortWait = 50'000;  // nanoseconds, as long as a thread takes to wake
  static constexpr int64_t kAvoided = 32;        // times as long as a call waited

  OpenMp(int workers, const Job& job) : caller_(pthread_self()) { team_.open(workers, job); }

  void run_thread() {
    if (!pthread_equal(pthread_self(), caller_)) return team_.take_part(ranks_.fetch_add(1, std::memory_order_relaxed) + 1);
    const int64_t begin = now();
    team_.lead();
    led_ = now() - begin;
  }

  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  static std::atomic<bool>& is_wanted() {
    static std::atomic<bool> value{true};
    return value;
  }

  static std::atomic<int64_t>& avoided_until() {
    static std::atomic<int64_t> time{0};
    return time;
  }

  // Of the runtime that torch has loaded; null without one.
  static Parallel parallel() {
#ifdef _WIN32
    return nullptr;
#else
    static const auto found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return found;
#endif
  }

  Team team_;
  const pthread_t caller_;
  std::atomic<int> ranks_{0};  // given to workers
  int64_t led_ = 0;            // nanoseconds that the caller was inside
};

}  // namespace magicube
