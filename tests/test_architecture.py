"""The page on the architecture links to files that exist, and its picture is drawn from the tested table."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.house import FOLDERS, PACKAGES, ROOT

PAGE = ROOT / "docs" / "explanation" / "architecture.md"


def test_every_link_and_path_exists() -> None:
    text = PAGE.read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 15
    missing = [link for link in links if not (PAGE.parent / link).exists()]
    for path in re.findall(r"`((?:cute_kernels|magicube_cutlass|tests|docs|benchmarks)/[^`*<]+)`", text):
        if not (ROOT / path).exists():
            missing.append(path)
    assert not missing


def test_the_picture_has_every_folder_of_the_table() -> None:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location(
        "draw_architecture", ROOT / "docs" / "explanation" / "draw_architecture.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = set(module.places(module.arrows()))
    wanted = {name for name in FOLDERS if name not in PACKAGES and not name.endswith(module.LEFT_OUT)}
    assert drawn == wanted - {"cute_kernels.device"}  # headers only
    text = (ROOT / "docs" / "explanation" / "architecture.svg").read_text()
    assert text.count("<!-- ") >= len(drawn) and all(f"<!-- {name.split('.')[1]} -->" in text for name in drawn)
