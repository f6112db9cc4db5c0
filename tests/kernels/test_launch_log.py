"""The launches that a GPU would get are those of ``launch_log.json``.

A change of host code that means to leave them alone leaves the log alone; one that changes them rewrites it with
``python -m tests.kernels.launch_recorder --update``, and the commit shows which calls it is about.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.core", reason="needs the packages of the extra 'cuda'")

from tests.kernels import launch_recorder  # needs them

ROOT = Path(__file__).resolve().parents[2]


def test_every_call_launches_what_the_log_says(tmp_path: Path) -> None:
    # A process of its own: torch is patched there, and no other test has filled a cache.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAGICUBE_")}
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.launch_recorder"]
    found = subprocess.run(command, cwd=ROOT, env=clean | own, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-20_000:] + found.stderr[-5_000:]


def test_the_log_has_every_kind_of_gpu_and_many_calls() -> None:
    log = launch_recorder.read(launch_recorder.LOG.read_text())
    for arch in launch_recorder.MACHINES:
        calls = [launches for key, launches in log.items() if key.startswith(f"{arch} ")]
        assert len(calls) > 300 and sum(map(bool, calls)) > 0.9 * len(calls)
    assert launch_recorder.read(launch_recorder.write(log)) == log


def test_a_difference_names_the_call_and_both_launches() -> None:
    before = {"sm_90a a": ["kernel grid 1x1x1: B+0"], "sm_90a b": []}
    after = {"sm_90a a": ["kernel grid 2x1x1: B+0"], "sm_90a c": []}
    lines = launch_recorder.differences(before, after)
    assert lines[0] == "@@ sm_90a a" and "-kernel grid 1x1x1: B+0" in lines and "+kernel grid 2x1x1: B+0" in lines
    assert lines[-2:] == ["@@ sm_90a b (no such call now)", "@@ sm_90a c (new call)"]
    assert launch_recorder.differences(before, before) == []
