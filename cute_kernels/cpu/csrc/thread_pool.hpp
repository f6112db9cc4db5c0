// Worker threads that a calling thread keeps between its calls, used without an OpenMP runtime. Workers spin briefly for the
// next call, since waking a parked thread can take longer than a small product, and then park.
//
// Every calling thread has its own pool, so that concurrent calls never wait for each other's workers. A forked process has
// none of its parent's threads: the old pool is leaked there and a new one is started.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace magicube {

// Spin, long enough for most barriers, then yield the core between polls.
template <class Done>
void spin_until(const Done& done) {
  constexpr int kSpins = 2000;
  for (int spin = 0; !done(); ++spin) {
    if (spin > kSpins) std::this_thread::yield();
  }
}

// Number of forks since the engine was loaded.
inline int& forks() {
  static int count = 0;
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks(); });
  (void)registered;
  return count;
}

class ThreadPool {
 public:
  using Job = void (*)(void* context, int rank);

  ThreadPool() = default;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  ~ThreadPool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  // Start workers up to `wanted`; returns how many exist, fewer if the system has no more threads.
  int provide(int wanted) {
    workers_.reserve(static_cast<size_t>(wanted));
    try {
      while (static_cast<int>(workers_.size()) < wanted) {
        const int rank = static_cast<int>(workers_.size()) + 1;
        workers_.emplace_back([this, rank, seen = calls_.load()] { work(rank, seen); });
      }
    } catch (const std::system_error&) {
      return static_cast<int>(workers_.size());
    }
    return wanted;
  }

  // Run job(context, rank) for rank 0 on this thread and for ranks 1..workers on the workers; returns when all have.
  void run(int workers, Job job, void* context) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
      context_ = context;
      active_ = workers;
      running_.store(workers, std::memory_order_relaxed);
      calls_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job(context, 0);
    spin_until([this] { return running_.load(std::memory_order_acquire) == 0; });
  }

 private:
  static constexpr std::chrono::microseconds kSpinTime{500};

  void spin_for_call(uint64_t seen) const {
    const auto until = std::chrono::steady_clock::now() + kSpinTime;
    do {
      for (int spin = 0; spin < 64; ++spin) {
        if (calls_.load(std::memory_order_acquire) != seen) return;
#ifdef MAGICUBE_X86
        __builtin_ia32_pause();
#endif
      }
    } while (std::chrono::steady_clock::now() < until);
  }

  void work(int rank, uint64_t seen) {
    for (;;) {
      spin_for_call(seen);
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || calls_.load(std::memory_order_relaxed) != seen; });
      if (stopping_) return;
      seen = calls_.load(std::memory_order_relaxed);
      if (rank > active_) continue;  // run() does not wait for this worker
      const Job job = job_;
      void* const context = context_;
      lock.unlock();
      job(context, rank);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> calls_{0};  // changed by the owner under the mutex, which guards the next four members
  bool stopping_ = false;
  Job job_ = nullptr;
  void* context_ = nullptr;
  int active_ = 0;
  std::atomic<int> running_{0};
  std::vector<std::thread> workers_;
};

// ThreadPool of the calling thread; destroyed with the thread.
class ThreadLocalPool {
 public:
  static ThreadPool& get() {
    thread_local ThreadLocalPool own;
    if (!own.pool_ || own.forks_ != forks()) {
      own.pool_ = new ThreadPool;  // a pool from before a fork is leaked: its threads cannot be joined
      own.forks_ = forks();
    }
    return *own.pool_;
  }

 private:
  ThreadLocalPool() = default;
  ~ThreadLocalPool() {
    if (forks_ == forks()) delete pool_;
  }

  ThreadPool* pool_ = nullptr;
  int forks_ = 0;
};

}  // namespace magicube
