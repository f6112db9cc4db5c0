"""The kernels of 8.0 give the same integers on a newer GPU, 4-bit instructions included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def test_ptx_of_every_atom_gives_the_same_integers() -> None:
    from tests.gpu.portable import cases

    root = Path(__file__).resolve().parents[3]
    folders = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "MAGICUBE_ARCH": "compute_80", "PYTHONPATH": os.pathsep.join(folders)}
    run = subprocess.run([sys.executable, "-m", "tests.gpu.portable"], env=environment, cwd=root, capture_output=True,
                         text=True, check=False)  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert run.stdout.count(": equal\n") == len(cases()) >= 11
