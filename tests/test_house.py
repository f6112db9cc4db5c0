"""The layout of the packages: folders, circles, headers, names, lengths, docstrings and public signatures."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from tests import house

# Names that several modules of a package may define.
SHARED_NAMES = {
    "main",
    "convert",
    "default_configs",
    "choose",
    "candidates",
    "spmm",
    "sddmm",
    "plan_spmm",
    "cached_spmm",
    "MagicubeConfig",  # of each hook: what the package it serves is given
    "matmul",  # those of `distributed` have the names of what they do on one process
    "qr",
    "solve",
    "sparse_attention",
}
# What is undocumented or too long; an entry that no longer holds is an error.
UNDOCUMENTED: dict[str, int] = dict.fromkeys(house.PACKAGES, 0)
LONG: set[str] = set()
CROWDED = ["cute_kernels/cpu/csrc: 34 files, level 2"]  # a header per operation, a source per instruction set
MAX_LINES = 60


def test_folders_import_only_what_is_allowed() -> None:
    assert not house.wrong_arrows(house.file_graph())


def test_every_folder_is_in_the_table() -> None:
    folders = {house.folder_of(module) for module in house.modules()}
    assert folders <= set(house.FOLDERS), folders - set(house.FOLDERS)


def test_the_table_has_no_circle() -> None:
    table = {folder: dict.fromkeys(targets, 0) for folder, targets in house.FOLDERS.items()}
    faces = set(house.PACKAGES)
    # the command line and residual use the faces, which import everything
    inner = {a: {b: 0 for b in targets if b not in faces} for a, targets in table.items() if a not in faces}
    assert not house.circles(inner)


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = house.file_graph()
    faces = set(house.PACKAGES)
    assert not house.circles({a: {b: 0 for b in targets if b not in faces} for a, targets in graph.items()})


def test_headers_include_own_folder_device_or_an_allowed_folder() -> None:
    assert not house.wrong_includes()


def test_at_most_15_files_a_folder_and_two_levels() -> None:
    assert house.crowded() == CROWDED


def test_every_documented_module_names_its_public_objects() -> None:
    for page in sorted(house.REFERENCE.glob("*.rst")):
        for name in re.findall(r"automodule:: (\S+)", page.read_text()):
            module = importlib.import_module(name)
            own = {
                key
                for key, value in vars(module).items()
                if getattr(value, "__module__", None) == name and not key.startswith("_")
            }
            assert own <= set(module.__all__), (name, own - set(module.__all__))
            assert all(hasattr(module, key) for key in module.__all__)


def test_no_public_name_twice_in_a_package() -> None:
    for package in house.PACKAGES:
        twice = {name for name, where in house.public_definitions(package).items() if len(where) > 1}
        assert twice <= SHARED_NAMES, (package, twice - SHARED_NAMES)


def test_functions_keep_their_line_budget() -> None:
    assert {name for name, lines in house.lengths() if lines > MAX_LINES} == LONG


def test_public_names_have_docstrings() -> None:
    missing = house.undocumented()
    counts = {package: sum(name.startswith(f"{package}.") for name in missing) for package in house.PACKAGES}
    assert counts == UNDOCUMENTED, "\n".join(missing)


def test_public_names_have_examples() -> None:
    pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")
    objects = house.public_objects()
    assert set(house.public_faces()) <= set(objects)  # the reference documents the faces
    missing = {name for name, value in objects.items() if ">>>" not in (value.__doc__ or "")}
    assert not missing, missing


def test_public_signatures_are_those_of_the_snapshot() -> None:
    """A deliberate change is taken over by ``python -m tests.house --update``."""
    assert house.public_faces() == json.loads(house.FACES.read_text())


def test_planted_breaches_are_seen(tmp_path: Path) -> None:
    for folder in ("cute_kernels/gemm", "cute_kernels/spmm", "magicube_cutlass/ops", "residual"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "cute_kernels" / "gemm" / "a.py").write_text("def f():\n    from cute_kernels.spmm import b\n")
    (tmp_path / "cute_kernels" / "spmm" / "b.py").write_text("import cute_kernels.gemm.a\n")
    (tmp_path / "cute_kernels" / "gemm" / "k.cuh").write_text('#include "spmm/x.cuh"\n#include "bare.cuh"\n')
    for i in range(16):
        (tmp_path / "magicube_cutlass" / "ops" / f"f{i}.py").write_text("class Twice:\n    pass\n")
    (tmp_path / "residual" / "long.py").write_text("def f():\n" + "    x = 1\n" * 61)
    graph = house.file_graph(tmp_path)
    assert house.wrong_arrows(graph) == [
        "cute_kernels.gemm.a:2: cute_kernels.gemm -> cute_kernels.spmm",
        "cute_kernels.spmm.b:1: cute_kernels.spmm -> cute_kernels.gemm",
    ]
    assert house.circles(graph) == [{"cute_kernels.gemm.a", "cute_kernels.spmm.b"}]
    assert len(house.wrong_includes(tmp_path)) == 2
    assert house.crowded(tmp_path) == ["magicube_cutlass/ops: 16 files, level 1"]
    assert len(house.public_definitions("magicube_cutlass", tmp_path)["Twice"]) == 16
    assert [name for name, lines in house.lengths(tmp_path) if lines > MAX_LINES] == ["residual.long.f"]
    assert "residual.long.f" in house.undocumented(tmp_path)
