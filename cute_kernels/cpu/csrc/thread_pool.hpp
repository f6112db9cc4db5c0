// Worker threads that a calling thread keeps between its calls, which sleep between jobs, and those of torch's OpenMP.
//
// A job is a sequence of phases, separated by barriers; tickets distribute the pieces of a phase. One word holds the number of
// the job, its phase, the number of threads that may join, and how many are inside. A thread joins and leaves by changing that
// word, at any time: a worker that wakes late passes over the phases that are complete, and one that wakes after the job reads
// nothing of it. The caller therefore waits only for pieces that others hold, never for a thread that has not begun.
//
// Every calling thread has its own pool, so that concurrent calls never wait for each other's workers. A forked process has
// none of its parent's threads: the old pool is leaked there and a new one is started. On Linux workers stay off the core on which
// the caller begins a job.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#ifndef _WIN32
#include <dlfcn.h>
#endif

#include "engine.hpp"

namespace magicube {

// Number of forks since the engine was loaded.
inline int& forks() {
  static int count = 0;
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks(); });
  (void)registered;
  return count;
}

// What the threads of a job run, and their buffers.
struct Job {
  void (*body)(const void*, ThreadGroup&);
  const void* args;
  uint8_t* shared;
  uint8_t* local;
  int64_t local_bytes;  // per thread
};

// Threads inside one job at a time, by the word that they share.
class Team {
 public:
  static constexpr int kMostThreads = 1023;

  Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Open a job to the calling thread, of rank 0, and to ranks 1 to `workers`.
  void open(int workers, const Job& job) {
    const uint64_t number = number_of(word_.load(std::memory_order_relaxed)) + 1;
    job_ = job;
    tickets_[0].store(0, std::memory_order_relaxed);
    first_ = number << kNumberAt | static_cast<uint64_t>(workers + 1) << kSizeAt | 1;
    const std::lock_guard<std::mutex> lock(mutex_);
    word_.store(first_);
  }

  // Run the open job on the thread that opened it, until no other is inside.
  void lead() {
    Member caller(*this, 0, first_);
    job_.body(job_.args, caller);
    close();
  }

  // Run the open job, if there is one for this rank.
  void take_part(int rank) {
    uint64_t word = word_.load();
    if (join(word, rank)) run_member(rank, word);
  }

 protected:
  // From the lowest bit: threads inside, threads that may join (0: closed), phase, number of the job.
  static constexpr int kSizeAt = 10, kPhaseAt = 20, kNumberAt = 44;
  static constexpr uint64_t kLow10 = 1023, kLow24 = (1 << 24) - 1;
  static constexpr int kPauses = 1000;  // some ten microseconds, as long as a piece

  static uint64_t inside(uint64_t word) { return word & kLow10; }
  static uint64_t size_of(uint64_t word) { return word >> kSizeAt & kLow10; }
  static uint64_t phase_of(uint64_t word) { return word >> kPhaseAt & kLow24; }
  static uint64_t number_of(uint64_t word) { return word >> kNumberAt; }

  // Join the open job of `word`, updated; false if there is none, or not for this rank.
  bool join(uint64_t& word, int rank) {
    while (size_of(word) > static_cast<uint64_t>(rank)) {
      if (word_.compare_exchange_weak(word, word + 1)) return true;
    }
    return false;
  }

  // Run the job that this thread has joined at `word`.
  void run_member(int rank, uint64_t word) {
    Member member(*this, rank, word + 1);
    job_.body(job_.args, member);
    if (member.is_inside()) leave();
  }

  std::mutex mutex_;
  std::atomic<uint64_t> word_{0};

 private:
  class Member final : public ThreadGroup {
   public:
    Member(Team& team, int rank, uint64_t word) : team_(team), rank_(rank), entered_(word) {}

    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(size_of(entered_)); }
    uint8_t* shared() const override { return team_.job_.shared; }
    uint8_t* local() const override { return team_.job_.local ? team_.job_.local + team_.job_.local_bytes * rank_ : nullptr; }

    int64_t ticket() override {
      if (phase_ != phase_of(entered_)) return kNoTicket;
      return team_.tickets_[phase_ % 2].fetch_add(1, std::memory_order_relaxed);
    }

    bool barrier() override {
      if (phase_ == phase_of(entered_)) is_inside_ = team_.pass(entered_);
      phase_ = (phase_ + 1) & kLow24;
      return is_inside_;
    }

    bool is_inside() const { return is_inside_; }

   private:
    Team& team_;
    const int rank_;
    uint64_t entered_;    // the word when this thread joined its phase
    uint64_t phase_ = 0;  // of the code that this thread runs: complete, unless it is that of `entered_`
    bool is_inside_ = true;
  };

  // Leave the phase of `word` for the next one, of which it becomes the word; false if the job is over.
  bool pass(uint64_t& word) {
    const uint64_t before = word >> kPhaseAt;
    word = word_.load();
    for (;;) {
      if (inside(word) == 1) {  // the last thread: no piece of this phase is left
        const uint64_t next = word + (uint64_t{1} << kPhaseAt);
        const uint64_t wrapped = phase_of(next) ? next : next - (uint64_t{1} << kNumberAt);
        tickets_[phase_of(wrapped) % 2].store(0, std::memory_order_relaxed);
        if (!word_.compare_exchange_weak(word, wrapped)) continue;
        word = wrapped;
        notify();
        return true;
      }
      if (word_.compare_exchange_weak(word, word - 1)) break;
    }
    const uint64_t number = number_of(word);
    word = wait_until([before](uint64_t now) { return now >> kPhaseAt != before; });
    do {
      if (number_of(word) != number || size_of(word) == 0) return false;
    } while (!word_.compare_exchange_weak(word, word + 1));
    return true;
  }

  void leave() {
    word_.fetch_sub(1);
    notify();
  }

  // End the job once the caller alone is inside. The word keeps its phase: a thread that sleeps at a barrier of the job has been
  // woken, and may look at the word only now. With phase 0 again it would sleep on, and its thread could never be joined.
  void close() {
    for (;;) {
      uint64_t word = wait_until([](uint64_t now) { return inside(now) == 1; });
      if (word_.compare_exchange_strong(word, word >> kPhaseAt << kPhaseAt)) return;
    }
  }

  template <class Done>
  uint64_t wait_until(const Done& done) {
    uint64_t word = word_.load();
    for (int i = 0; i < kPauses && !done(word); ++i, word = word_.load()) {
#ifdef MAGICUBE_X86
      __builtin_ia32_pause();
#endif
    }
    if (done(word)) return word;
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    changed_.wait(lock, [&] { return done(word = word_.load()); });
    sleepers_.fetch_sub(1);
    return word;
  }

  void notify() {
    if (sleepers_.load() == 0) return;
    { const std::lock_guard<std::mutex> lock(mutex_); }  // a thread between its look at the word and its sleep
    changed_.notify_all();
  }

  std::condition_variable changed_;  // of threads inside a job that wait for the word to change
  std::atomic<int> sleepers_{0};     // of changed_
  std::atomic<int64_t> tickets_[2] = {{0}, {0}};  // of even phases, of odd ones
  uint64_t first_ = 0;               // the word of the job when it was opened
  Job job_{};                        // written while no thread is inside
};

// A team with workers of its own, asleep between jobs.
class ThreadPool : public Team {
 public:
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
        workers_.emplace_back([this, rank] { work(rank); });
      }
    } catch (const std::system_error&) {
      return static_cast<int>(workers_.size());
    }
    return wanted;
  }

  // Run the job on this thread and on those of `workers` workers that come in time.
  void run(int workers, const Job& job) {
    leave_core_to_caller();
    open(workers, job);
    wake_.notify_all();
    lead();
  }

 private:
  void work(int rank) {
    for (uint64_t seen = 0;;) {
      uint64_t word = 0;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] {
          word = word_.load();
          return stopping_ || (number_of(word) != seen && size_of(word) > static_cast<uint64_t>(rank));
        });
        if (stopping_) return;
      }
      if (!join(word, rank)) continue;
      seen = number_of(word);
      run_member(rank, word);
    }
  }

  // Keep workers off the core that the caller is on: a worker that wakes there runs only when the system takes the caller's turn,
  // while the other cores, busy as they may be, would give it a share.
  void leave_core_to_caller() {
#ifdef __linux__
    const int core = sched_getcpu();
    if (core == core_ && workers_.size() == kept_off_) return;
    cpu_set_t others;
    if (core < 0 || core >= CPU_SETSIZE || sched_getaffinity(0, sizeof others, &others) != 0) return;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) == 0) return;
    for (std::thread& worker : workers_) pthread_setaffinity_np(worker.native_handle(), sizeof others, &others);
    core_ = core, kept_off_ = workers_.size();
#endif
  }

  int core_ = -1;        // of the caller, at its last job
  size_t kept_off_ = 0;  // workers that stay off it
  std::condition_variable wake_;  // of workers without a job
  bool stopping_ = false;         // guarded by the mutex
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

// Jobs on the threads of torch's OpenMP, by the entry point that GCC's and LLVM's runtimes share.
//
// An operator of torch leaves its threads spinning for the next one, some milliseconds with GCC's runtime: they take a job at
// once, where a thread of our own would first have to wake and win a core from them. But OpenMP waits for each of its threads,
// even one whose core another process has. So the time that a call waited is measured, and for many times as long after it
// is_ready() is false: calls then use a ThreadPool, which waits for no thread that has not begun.
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
