"""The paper's QR rows and its LeNet run from the command line, small, and say what the page renders."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def script(name: str, *args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


def quick(name: str, folder: Path, result: str) -> dict[str, Any]:
    done = script(name, "--quick", "--out", folder)
    assert done.returncode == 0, done.stderr
    if importlib.util.find_spec("matplotlib"):
        assert (folder / f"{result}.png").stat().st_size > 0
    return json.loads((folder / f"{result}.json").read_text())


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_qr_table(tmp_path: Path) -> None:
    found = quick("qr_table.py", tmp_path, "qr_table")
    errors = {(row["way"], row["distribution"]): row["error"] for row in found["rows"]}
    for kind in {row["distribution"] for row in found["rows"]}:
        for bits in ("int4", "int8"):
            assert errors[f"{bits} full, explicit", kind] < errors[f"{bits} origin, explicit", kind]
            assert errors[f"{bits} full, wy", kind] < errors[f"{bits} full, explicit", kind]
        assert errors["tol 1e-06, wy", kind] < 1e-5
    assert all(row["backward error"] <= 1e-15 for row in found["refinements"])


@pytest.mark.long
def test_lenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if line := load("lenet_fashion_mnist", monkeypatch).missing():
        pytest.skip(line)
    found = quick("lenet_fashion_mnist.py", tmp_path, "lenet")
    accuracy = {(row["way"], row["layers"]): row["accuracy"] for row in found["rows"]}
    assert accuracy["float32", "fc1+fc2"] > 0.7
    for (way, layers), value in accuracy.items():
        if way.startswith("tol") or way == "int8, threshold 0":
            assert abs(value - accuracy["float32", layers]) <= 0.02, way
    densities = {row["way"]: row["densities"] for row in found["rows"]}
    assert densities["int8, origin"]["conv"] == [0, 0] != densities["int8, threshold 0"]["conv"]


def refusal(name: str, *args: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """What an example's process would end with, which imports torch for seconds: run in this one."""
    monkeypatch.setattr(sys, "argv", [name, *args])
    with pytest.raises(SystemExit) as end:
        load(name, monkeypatch).main()
    return end.value.code


def test_lenet_without_data_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGICUBE_DATA", str(tmp_path))
    line = refusal("lenet_fashion_mnist", "--quick", "--out", str(tmp_path), monkeypatch=monkeypatch)
    assert isinstance(line, str) and "\n" not in line  # a text ends a process with 1
    assert "train-images-idx3-ubyte.gz" in line and "MAGICUBE_DATA" in line


@pytest.mark.parametrize("name", ["qr_table", "lenet_fashion_mnist"])
def test_quick_figures_never_reach_the_project(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(name, "--quick", "--project", monkeypatch=monkeypatch) == 2
    assert "--project needs a full run" in capsys.readouterr().err


def test_the_page_shows_the_results_files(monkeypatch: pytest.MonkeyPatch) -> None:
    page, folder = (ROOT / "docs" / "lab" / "residual.md").read_text(), ROOT / "benchmarks" / "results"
    for name, pattern in (
        ("qr_table", "qr_table.json"),
        ("lenet_fashion_mnist", "lenet.json"),
    ):
        found = sorted(folder.glob(pattern))
        assert found
        for path in found:
            assert load(name, monkeypatch).render(json.loads(path.read_text())) in page, path.name


def test_the_page_of_printed_values_shows_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("paper_residual")
    text = script.PAGE.read_text()
    results = json.loads((script.RESULTS / "paper_residual_cpu.json").read_text())
    made = script.tables(results, script.RESULTS)
    assert len(made) == 15
    for mark, table in made.items():
        assert f"<!-- {mark}: benchmarks/paper_residual.py writes this -->\n{table}\n<!-- end {mark} -->" in text, mark
    assert {section["commit"] in text for section in results["sections"].values()} == {True}
    assert set(results["sections"]) == set(script.SECTIONS)


def test_a_section_is_replaced_between_its_marks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, page = load("report", monkeypatch), tmp_path / "page.md"
    page.write_text("before\n<!-- a: made -->\nold\n<!-- end a -->\nafter\n")
    report.replace_section("a", "new\nlines", page)
    assert page.read_text() == "before\n<!-- a: made -->\nnew\nlines\n<!-- end a -->\nafter\n"
    with pytest.raises(ValueError, match=r"page\.md must have one line '<!-- b:"):
        report.replace_section("b", "new", page)
