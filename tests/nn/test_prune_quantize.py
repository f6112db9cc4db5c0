"""The example that prunes and quantizes a trained network, and the page on layers: both run and show what was measured."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "prune_quantize_mlp.py"
PAGE = ROOT / "docs" / "how-to" / "prune-and-quantize.md"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    spec = importlib.util.spec_from_file_location("prune_quantize_mlp", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "prune_quantize_mlp", module)
    spec.loader.exec_module(module)
    return module


def test_fine_tuning_wins_back_what_pruning_lost(
    tmp_path: Path, example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if line := example.missing():
        pytest.skip(line)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--quick", "--out", str(tmp_path)])
    example.main()
    shown = capsys.readouterr()
    assert "2 of 3 layers replaced" in shown.err and "static scales, frozen" in shown.out
    rows = {row["step"]: row for row in json.loads((tmp_path / "prune_quantize.json").read_text())["rows"]}
    accuracy = {step: row["accuracy"] for step, row in rows.items()}
    assert accuracy["float32"] > 0.7
    assert abs(accuracy["pruned, int8"] - accuracy["pruned, float32"]) < 0.02  # quantization alone costs little
    assert accuracy["fine-tuned, int8"] > max(accuracy["pruned, int8"], accuracy["float32"] - 0.05)
    assert abs(accuracy["static scales, frozen"] - accuracy["fine-tuned, int8"]) < 0.02
    assert rows["static scales, frozen"]["bytes"] < rows["float32"]["bytes"] / 15
    assert all(row["cpu ms"] > 0 for row in rows.values())


def test_the_full_run_loses_at_most_a_point_of_accuracy(example: ModuleType) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "prune_quantize.json").read_text())
    accuracy = {row["step"]: row["accuracy"] for row in results["rows"]}
    for step in ("fine-tuned, int8", "static scales, frozen"):
        assert accuracy[step] > accuracy["float32"] - 0.01
    assert example.render(results) in PAGE.read_text()


def test_missing_data_and_quick_figures_are_named(
    tmp_path: Path, example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAGICUBE_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--quick", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^no train-images-idx3-ubyte\.gz in .* MAGICUBE_DATA"):
        example.main()
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--quick", "--project"])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    assert "--project needs a full run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_page_s_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        scope: dict[str, object] = {}
        exec(block, scope)
        assert "y" in scope
