"""The wheel of compiled kernels: built, installed, taken without a compiler, ignored if it is of another source."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import magicube_cutlass

pytest.importorskip("cuda.core", reason="needs the packages of the extra 'cuda'")

from cute_kernels.estimate.verdict import VerdictConfig
from cute_kernels.jit import ToolchainError, cache, compile_unit, shipped, toolchain

ROOT = Path(__file__).resolve().parents[3]
UNIT = VerdictConfig().translation_unit("sm_90a")  # a small kernel


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel with one kernel is installed."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    env = {**os.environ, "MAGICUBE_CACHE": str(tmp_path_factory.mktemp("cache")), "PYTHONPATH": str(ROOT)}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    settings = ["-C", "arch=sm_90a", "-C", f"match={UNIT.title}", "-C", "jobs=1"]
    for command in (
        [
            *pip,
            "wheel",
            "--no-build-isolation",
            "--no-deps",
            "-w",
            str(wheels),
            *settings,
            str(ROOT / "packages/cubins"),
        ],
        [
            *pip,
            "install",
            "--no-deps",
            "--no-index",
            "--find-links",
            str(wheels),
            "--target",
            str(site),
            "magicube-cutlass-cubins",
        ],
    ):
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return site


@pytest.fixture(autouse=True)
def installed(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The wheel is on the path, the user's cache is empty, and there is no compiler."""

    def missing() -> NoReturn:
        raise ToolchainError("no compiler")

    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("MAGICUBE_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_in_memory", {})
    monkeypatch.setattr(toolchain, "find", missing)
    shipped.find_wheel.cache_clear()
    yield
    shipped.find_wheel.cache_clear()


def test_a_shipped_kernel_needs_no_compiler_and_writes_nothing(tmp_path: Path, site: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*")}
    binary = cache.build(UNIT)
    assert (binary.title, binary.arch, binary.code[1:4]) == (UNIT.title, "sm_90a", b"ELF")
    assert binary.usage is not None and binary.usage.registers > 0
    assert not list(tmp_path.iterdir()) and before == {path: path.stat().st_mtime_ns for path in site.rglob("*")}
    assert shipped.describe_wheel() == "sm_90a 1"


def test_it_is_what_the_compiler_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cache.build(UNIT)
    monkeypatch.undo()
    assert compile_unit(UNIT) == found


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    wanted = tomllib.loads((ROOT / "packages/cubins/pyproject.toml").read_text())["build-system"]["requires"]
    assert project == magicube_cutlass.__version__ == shipped.VERSION
    assert wanted == [f"magicube-cutlass[cuda]=={project}"]


def test_other_kernels_still_ask_for_the_compiler() -> None:
    for unit in (VerdictConfig().translation_unit("sm_80"), UNIT.__class__(UNIT.source + "\n", UNIT.kernel, UNIT.arch)):
        with pytest.raises(ToolchainError, match="no compiler"):
            cache.build(unit)


@pytest.mark.parametrize("field", ["version", "source", "versions"])
def test_a_wheel_of_another_source_is_ignored_with_one_line(
    field: str, site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = json.loads((site / shipped.PACKAGE / shipped.MANIFEST).read_text())
    monkeypatch.setattr(shipped.json, "loads", lambda text: {**manifest, field: None if field == "versions" else "0"})
    with caplog.at_level(logging.WARNING, "magicube"):
        for _ in range(2):
            with pytest.raises(ToolchainError):
                cache.build(UNIT)
    assert len(caplog.records) == 1 and "compiled kernels in" in caplog.text and "are not used" in caplog.text


def test_a_damaged_kernel_is_no_kernel(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / shipped.PACKAGE
    folder.mkdir()
    for path in (site / shipped.PACKAGE).glob("*.*"):
        content = path.read_bytes()
        (folder / path.name).write_bytes(content[:-1] if path.suffix == cache.SUFFIX else content)
    monkeypatch.syspath_prepend(str(tmp_path))
    shipped.find_wheel.cache_clear()
    with pytest.raises(ToolchainError):
        cache.build(UNIT)
    assert shipped.find_wheel() is not None


def test_a_changed_header_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shipped.source_digest()
    for path in toolchain.KERNEL_HEADERS.rglob("*.cuh"):
        copy = tmp_path / path.relative_to(toolchain.KERNEL_HEADERS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(toolchain, "KERNEL_HEADERS", tmp_path)
    assert shipped.source_digest() == before
    copy.write_bytes(copy.read_bytes() + b"\n")
    assert shipped.source_digest() != before
