"""The engine's threads by themselves: short jobs of two phases, by pools that end at once and by a runtime of OpenMP."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import cute_kernels.cpu
from tests.kernels.estimate.cta_host import has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")
BODY = r"""
#include <cstdio>

#include "thread_pool.hpp"
using namespace magicube;

struct Args {
  std::atomic<int> pieces[2] = {0, 0};
  std::atomic<int> ranks = 0;  // a bit each
};

static void body(const void* args, ThreadGroup& group) {
  auto& own = const_cast<Args&>(*static_cast<const Args*>(args));
  if (own.ranks.fetch_or(1 << group.rank()) >> group.rank() & 1) std::puts("two threads of one rank");
  for (int phase = 0; phase < 2; ++phase) {
    for (int64_t t = group.ticket(); t < 4; t = group.ticket()) ++own.pieces[phase];
    if (phase == 0 && !group.barrier()) return;
  }
}

static bool is_complete(const Args& args) { return args.pieces[0] == 4 && args.pieces[1] == 4; }
"""
POOLS = r"""
int main() {
  for (int i = 0; i < 5000; ++i) {
    ThreadPool pool;
    const int workers = pool.provide(1 + i % 3);
    for (int job = 0; job < 5; ++job) {
      const Args args;
      pool.run(workers, Job{body, &args, nullptr, nullptr, 0});
      if (!is_complete(args)) return std::puts("pieces are missing"), 1;
    }
  }
  std::puts("ended");
}
"""
CORES = r"""
static std::atomic<int> found{0};  // 1: a worker may run on the caller's core; 2: it may not
static int core = -1;

static void look(const void*, ThreadGroup& group) {
  if (group.rank() == 0) {  // leave time to the worker
    for (int i = 0; i < 100000 && found == 0; ++i) sched_yield();
    return;
  }
  cpu_set_t own;
  sched_getaffinity(0, sizeof own, &own);
  found = CPU_ISSET(core, &own) ? 1 : 2;
}

int main() {
  cpu_set_t all;
  sched_getaffinity(0, sizeof all, &all);
  if (CPU_COUNT(&all) < 2) return std::puts("ended"), 0;
  ThreadPool pool;
  pool.provide(1);
  for (int begin = 0; begin < CPU_SETSIZE; ++begin) {  // wherever the caller is
    if (!CPU_ISSET(begin, &all)) continue;
    for (int i = 0; i < 200; ++i) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(begin, &one);
      sched_setaffinity(0, sizeof one, &one);  // moves the caller there
      sched_setaffinity(0, sizeof all, &all);
      core = sched_getcpu(), found = 0;
      pool.run(1, Job{look, nullptr, nullptr, nullptr, 0});
      if (sched_getcpu() == core && found == 1) return std::puts("a worker is on the caller's core"), 1;
    }
  }
  std::puts("ended");
}
"""
OPENMP = r"""
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

static int given = 3;                        // threads that the runtime has
static std::chrono::milliseconds delay{0};   // until the last of them has a core

// The runtime's: it waits for all threads.
extern "C" void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (int i = 1; i < given && i < static_cast<int>(threads); ++i) {
    others.emplace_back([=] {
      if (i + 1 == given) std::this_thread::sleep_for(delay);
      run(data);
    });
  }
  run(data);
  for (std::thread& other : others) other.join();
}

static bool is_run(int workers) {
  const Args args;
  OpenMp::run(workers, Job{body, &args, nullptr, nullptr, 0});
  return is_complete(args);
}

int main() {
  if (!OpenMp::is_ready()) return std::puts("the runtime is not found"), 1;
  for (int i = 0; i < 2000; ++i) {
    given = 1 + i % 3;  // 1: a call inside a parallel region
    if (!is_run(2)) return std::puts("pieces are missing"), 1;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  if (!OpenMp::is_ready()) return std::puts("threads in time are avoided"), 1;
  const pid_t child = fork();
  if (child == 0) _exit(OpenMp::is_ready() ? 1 : 0);
  int status = 1;
  if (waitpid(child, &status, 0) != child || status != 0) return std::puts("a fork has the threads of its parent"), 1;
  if (!OpenMp::want(false) || OpenMp::is_ready() || OpenMp::want(true)) return std::puts("unwanted, it is ready"), 1;
  delay = std::chrono::milliseconds(20);
  if (!OpenMp::is_ready() || !is_run(2)) return std::puts("pieces are missing behind a late thread"), 1;
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  if (OpenMp::is_ready()) return std::puts("late threads are waited for again"), 1;
  std::puts("ended");
}
"""


@pytest.mark.parametrize("source", [POOLS, CORES, OPENMP], ids=["pools", "cores", "openmp"])
def test_short_jobs_end_with_all_their_pieces(tmp_path: Path, source: str) -> None:
    """A pool's worker that wakes at the barrier when the job is over must return: else the pool's end waits for it.

    Workers stay off the core that the caller is on, wherever it moves.

    Threads of OpenMP that come late, or are fewer, change no result; late ones are then avoided for some time.
    """
    (tmp_path / "jobs.cpp").write_text(BODY + source)
    program, includes = tmp_path / "jobs", Path(cute_kernels.cpu.__file__).parent / "csrc"
    command = ["g++", "-std=c++20", "-O2", "-pthread", "-rdynamic", f"-I{includes}", str(tmp_path / "jobs.cpp")]
    subprocess.run([*command, "-ldl", "-o", str(program)], check=True)
    assert subprocess.run([program], check=False, capture_output=True, text=True, timeout=120).stdout == "ended\n"
