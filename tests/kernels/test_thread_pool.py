"""The engine's thread pool by itself: short jobs of two phases, whose pools end at once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import cute_kernels.cpu
from tests.kernels.estimate.cta_host import has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")
SOURCE = r"""
#include "thread_pool.hpp"

#include <cstdio>
using namespace magicube;

struct Args {
  std::atomic<int> pieces[2] = {0, 0};
};

static void body(const void* args, ThreadGroup& group) {
  auto& pieces = const_cast<Args*>(static_cast<const Args*>(args))->pieces;
  for (int phase = 0; phase < 2; ++phase) {
    for (int64_t t = group.ticket(); t < 4; t = group.ticket()) ++pieces[phase];
    if (phase == 0 && !group.barrier()) return;
  }
}

int main() {
  for (int i = 0; i < 5000; ++i) {
    ThreadPool pool;
    const int workers = pool.provide(1 + i % 3);
    for (int job = 0; job < 5; ++job) {
      const Args args;
      pool.run(workers, Job{body, &args, nullptr, nullptr, 0});
      if (args.pieces[0] != 4 || args.pieces[1] != 4) return std::puts("pieces are missing"), 1;
    }
  }
  std::puts("ended");
}
"""


def test_a_pool_ends_behind_a_job_whose_phases_a_worker_missed(tmp_path: Path) -> None:
    """A worker that wakes at the barrier when the job is over must return: else the pool's end waits for it forever."""
    (tmp_path / "pools.cpp").write_text(SOURCE)
    program, includes = tmp_path / "pools", Path(cute_kernels.cpu.__file__).parent / "csrc"
    subprocess.run(
        ["g++", "-std=c++20", "-O2", "-pthread", f"-I{includes}", str(tmp_path / "pools.cpp"), "-o", str(program)],
        check=True,
    )
    assert subprocess.run([program], check=False, capture_output=True, text=True, timeout=120).stdout == "ended\n"
