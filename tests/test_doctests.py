"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.house import modules

# `magicube_cutlass.__main__` runs the command line
NAMES = [name for name in modules() if not name.endswith("__main__")]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_module_run(name: str) -> None:
    pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert not found.failed


# Exports whose docstring has no example yet; an entry that has one is an error.
WITHOUT_EXAMPLE = {"read_smtx"}


def test_the_public_faces_have_examples() -> None:
    """Everything that ``magicube_cutlass`` exports has an example, but for what is listed."""
    missing = set()
    face = importlib.import_module("magicube_cutlass")
    for name in face.__all__:
        value = getattr(face, name)
        if callable(value) and ">>>" not in (value.__doc__ or ""):
            missing.add(name)
    assert missing == WITHOUT_EXAMPLE
