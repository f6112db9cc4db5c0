// The worker threads that one calling thread keeps between its calls, as OpenMP runtimes do, where there is no such runtime
// to ask: they look out for the next call for a moment, since to wake a parked thread can take longer than a small product,
// and then park.
//
// Every caller has its own, so that calls from several threads at once never wait for each other's workers. A process
// made by fork has none of its parent's threads: their owner is forgotten there and new ones are started.
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

// Waits for a moment, which is what a barrier mostly takes, then gives the core away between looks.
template <class Done>
void spin_until(const Done& done) {
  constexpr int kSpins = 2000;
  for (int spin = 0; !done(); ++spin) {
    if (spin > kSpins) std::this_thread::yield();
  }
}

// Forks between the process that loaded the engine and this one.
inline int& forks() {
  static int count = 0;
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks(); });
  (void)registered;
  return count;
}

class Pool {
 public:
  using Job = void (*)(void* context, int rank);

  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  // Workers there are, at most `wanted`: fewer when the system has no more threads to give.
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

  // Runs job(context, rank) for rank 0 on this thread and for ranks 1..workers on the workers; returns when all have.
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
  static constexpr std::chrono::microseconds kLookout{500};

  void look_out(uint64_t seen) const {
    const auto until = std::chrono::steady_clock::now() + kLookout;
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
      look_out(seen);
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
  std::atomic<uint64_t> calls_{0};  // changed by the owner, under the mutex, which guards the next four
  bool stopping_ = false;
  Job job_ = nullptr;
  void* context_ = nullptr;
  int active_ = 0;
  std::atomic<int> running_{0};
  std::vector<std::thread> workers_;
};

// The pool of the calling thread, which ends with it.
class OwnPool {
 public:
  static Pool& get() {
    thread_local OwnPool own;
    if (!own.pool_ || own.forks_ != forks()) {
      own.pool_ = new Pool;  // one from before a fork is left as it is: its threads cannot be joined here
      own.forks_ = forks();
    }
    return *own.pool_;
  }

 private:
  OwnPool() = default;
  ~OwnPool() {
    if (forks_ == forks()) delete pool_;
  }

  Pool* pool_ = nullptr;
  int forks_ = 0;
};

}  // namespace magicube
