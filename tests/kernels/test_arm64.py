"""The portable engine on arm64: built by a cross compiler, run in an emulator, against int64 sums."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "cute_kernels" / "cpu" / "csrc"
CHECK = Path(__file__).with_name("arm64_check.cpp")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
OPTIONS = (
    "-std=c++17",
    "-O3",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-ffp-contract=off",
    f"-I{SOURCES}",
    f"-I{ROOT / 'cute_kernels'}",
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"needs {COMPILER} (Debian: g++-aarch64-linux-gnu)"),
]


def compile_for_arm64(*arguments: str) -> None:
    done = subprocess.run([COMPILER, *OPTIONS, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"needs {EMULATOR} (Debian: qemu-user)")
def test_products_on_arm64_are_exact(tmp_path: Path) -> None:
    program = str(tmp_path / "check")
    sources = (str(SOURCES / "portable.cpp"), str(SOURCES / "threads.cpp"), str(CHECK))
    compile_for_arm64(*sources, "-static", "-pthread", "-o", program)
    done = subprocess.run([EMULATOR, program], capture_output=True, text=True, check=False, timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 12 and all(line.endswith("equal") for line in lines), (
        done.stdout + done.stderr
    )


def test_the_bindings_compile_for_arm64() -> None:
    nanobind = pytest.importorskip("nanobind")
    headers = (sysconfig.get_path("include"), nanobind.include_dir())
    # of this machine's Python, whose types have the sizes of those of arm64
    compile_for_arm64(*(f"-isystem{each}" for each in headers), "-fsyntax-only", str(SOURCES / "bindings.cpp"))
