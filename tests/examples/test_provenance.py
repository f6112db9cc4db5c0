"""Results files name the commit, the versions and the clocks of the run; pages that quote them show date and commit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import magicube_cutlass
from magicube_cutlass.cli import environment

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from harness import machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
QUOTED = [
    pytest.param(page, RESULTS / name, id=f"{page.stem}-{name}")
    for page in PAGES
    for name in sorted(set(re.findall(r"[a-z0-9_]+\.json", page.read_text())))
    if (RESULTS / name).is_file()
]
# A script that writes a results file.
WRITES = re.compile(r"\.write_text\(|\b(?:write_results|save)\(")


def test_a_results_file_names_date_commit_versions_and_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment.provenance()
    today = datetime.now(UTC)
    assert found["date"] in (f"{today:%Y-%m-%d}", f"{today - timedelta(days=1):%Y-%m-%d}")
    assert found["magicube-cutlass"] == magicube_cutlass.__version__ and found["torch"] and found["threads"]
    assert re.fullmatch(r"\d+|unknown", found["cpu clock (MHz)"])
    assert "jit cache" not in found
    monkeypatch.setenv("MAGICUBE_COMMIT", "0123456789ab")
    assert environment.provenance()["commit"] == "0123456789ab"


def test_the_commit_is_that_of_the_library_s_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.delenv("MAGICUBE_COMMIT", raising=False)
    file = tmp_path / "package" / "__init__.py"
    file.parent.mkdir()
    file.touch()
    monkeypatch.setattr(magicube_cutlass, "__file__", str(file))
    assert environment.environment()["commit"] == "unknown"
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    assert environment.environment()["commit"] == git("rev-parse", "--short=12", "HEAD")
    file.write_text("changed")
    assert environment.environment()["commit"] == git("rev-parse", "--short=12", "HEAD") + "+"
    # a package that was installed below another tree is no part of it
    monkeypatch.setattr(magicube_cutlass, "__file__", str(tmp_path / "venv" / "package" / "__init__.py"))
    assert environment.environment()["commit"] == "unknown"


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tests/gpu", "tests/compensated"])
def test_every_script_that_writes_results_writes_where_they_are_from(folder: str) -> None:
    texts = {path.name: path.read_text() for path in (ROOT / folder).glob("*.py") if path.stem[:5] != "test_"}
    writers = {
        name for name, text in texts.items() if ("RESULTS" in text or "json.dumps" in text) and WRITES.search(text)
    }
    writers -= {
        "report.py",
        "README_table.py",
        "explorer_data.py",
        "encoder_training.py",
    }  # a helper, tables, checkpoints
    assert writers
    assert not [name for name in writers if not re.search(r"\b(?:provenance|gpu_machine)\(\)", texts[name])]


def test_the_head_of_a_gpu_s_results_has_its_clocks() -> None:
    text = (ROOT / "benchmarks" / "harness" / "machine.py").read_text()
    assert "provenance() | facts | _clocks()" in text
    for name in ("SM clock under load (MHz)", "SM clock limit (MHz)", "memory clock (MHz)"):
        assert name in text


def test_clocks_are_those_of_the_gpu_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """``nvidia-smi`` numbers all GPUs, torch the visible ones: the GPU is named by its UUID."""
    cuda = SimpleNamespace(
        current_device=lambda: 0, get_device_properties=lambda _: SimpleNamespace(uuid="ab-c"), synchronize=lambda: None
    )
    zeros = torch.zeros(1, 1)
    monkeypatch.setattr(machine, "torch", SimpleNamespace(cuda=cuda, randn=lambda *_, **__: zeros, bfloat16=None))
    monkeypatch.setattr(machine.time, "sleep", lambda _: None)
    monkeypatch.setattr(machine.shutil, "which", lambda _: "nvidia-smi")

    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert command[:2] == ["nvidia-smi", "--id=GPU-ab-c"]
        return SimpleNamespace(returncode=0, stdout=", ".join(map(str, range(len(machine._QUERIES)))) + "\n")

    monkeypatch.setattr(machine.subprocess, "run", run)
    assert machine._clocks() == {name: str(i) for i, name in enumerate(machine._QUERIES)}


@pytest.mark.parametrize(("page", "file"), QUOTED)
def test_a_page_that_quotes_a_results_file_shows_its_date_and_commit(page: Path, file: Path) -> None:
    machine, text = json.loads(file.read_text())["machine"], page.read_text()
    assert machine["date"] in text
    assert machine.get("commit", "not recorded").removesuffix("+") in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_date_of_a_measurement_has_its_commit_beside_it(page: Path) -> None:
    text = page.read_text().replace("\n", " ")
    runs = re.findall(r"20\d\d-\d\d-\d\d.{0,30}", text)
    assert [run for run in runs if not re.search(r"commit (?:[0-9a-f]{12}\b|not recorded)", run)] == []
