"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.house import modules

# `magicube_cutlass.__main__` runs the command line
NAMES = [name for name in modules() if not name.endswith("__main__")]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_module_run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")
    monkeypatch.setenv("MAGICUBE_CACHE", str(tmp_path))
    if name.startswith("magicube_cutlass.hooks."):
        pytest.importorskip(name, reason="needs the package of the hook", exc_type=ImportError)
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert not found.failed
