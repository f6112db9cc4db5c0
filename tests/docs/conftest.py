"""The built pages, which ``make docs`` or the first test makes."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import PACKAGES, ROOT

BUILT = ROOT / "build" / "docs"


def is_current(folder: Path) -> bool:
    """Whether ``make docs`` ran after the last change of a page, an example or a docstring."""
    mark = folder / ".made"
    if not mark.exists():
        return False
    sources = [path for name in ("docs", "examples", *PACKAGES) for path in (ROOT / name).rglob("*") if path.is_file()]
    sources = [
        path
        for path in sources
        if "__pycache__" not in path.parts
        and path.suffix in (".py", ".md", ".rst", ".css", ".png", ".svg", ".ipynb", ".html", ".js", ".json")
    ]
    return max(path.stat().st_mtime for path in [*sources, ROOT / "CHANGELOG.md"]) < mark.stat().st_mtime


@pytest.fixture(scope="session")
def folder() -> Path:
    """The pages of ``make docs``, built here if it did not run since the last change; processes wait for each other."""
    pytest.importorskip("furo")
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT.parent / "docs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current(BUILT):
            command = [sys.executable, *["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs"], str(BUILT)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            (BUILT / ".made").touch()
    return BUILT
