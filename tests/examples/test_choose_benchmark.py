"""The benchmark of the choice of kernels: what it is judged by, and parts that come together again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import choose as script
from harness.gpu_data import Shape


def test_what_the_choice_is_judged_by_was_not_fitted_to() -> None:
    trials = script.plan(60)
    for widths in script.WIDTHS:
        fitted = {each.shape for each in trials if each.widths == widths and not each.held_out}
        held_out = {each.shape for each in trials if each.widths == widths and each.held_out}
        assert len(held_out) == (60 if widths == script.WIDTHS[0] else 12) and not fitted & held_out
        assert len(fitted) == len(held_out) + (len(script.TABLE) if widths == script.WIDTHS[0] else 3)
    report = json.loads((script.RESULTS / "choose_h200.json").read_text())
    seen: dict[tuple[object, ...], bool] = {}
    for case in report["cases"]:
        shape = (*case["widths"], *(case[name] for name in ("m", "k", "n", "sparsity")))
        assert seen.setdefault(shape, case["held_out"]) == case["held_out"], f"{shape} is both"


def test_parts_come_together(tmp_path: Path) -> None:
    cases = [{"held_out": True, "widths": [8, 8], "m": 256 * i} for i in range(4)]
    for part in range(2):
        (tmp_path / f"{part}.json").write_text(json.dumps({"multiprocessors": 132, "cases": cases[part::2]}))
    report = script.joined([tmp_path / "0.json", tmp_path / "1.json"])
    assert report["multiprocessors"] == 132
    assert sorted(report["cases"], key=lambda case: case["m"]) == cases


def test_a_matrix_as_large_as_one_to_fit_is_not_held_out(tmp_path: Path) -> None:
    found = []
    for name, columns in (("a", "0 1"), ("b", "2 3"), ("c", "1"), ("d", "3")):
        path = tmp_path / "rn50" / "magnitude_pruning" / "0.5" / f"{name}.smtx"
        path.parent.mkdir(parents=True, exist_ok=True)
        count = len(columns.split())
        path.write_text(f"1, 4, {count}\n0 {count}\n{columns}\n")
        found.append(script.Matrix.at(path))
    trials = script.matrix_trials(found)
    assert [(each.matrix.path.stem, each.held_out) for each in trials if each.matrix and each.shape.n == 256] == [
        ("a", False), ("b", False), ("c", True), ("d", True),
    ]  # fmt: skip
    assert [each.shape.n for each in trials] == [256, 128, 256, 512] * 2


def test_a_wrong_pick_counts() -> None:
    shape = Shape(4096, 4096, 512, 0.9)
    here = script.Trial(True, script.BASE, shape).problem
    machine = script.Machine("sm_90a", 132)
    widths = script.WIDTHS[0]
    configs = script.candidates(script.kind_of(widths), machine, here)
    pick = script.choose_spmm(script.kind_of(widths), machine, here)
    case = {"held_out": True, "widths": [8, 8], "m": 4096, "k": 4096, "n": 512, "vectors": here.vectors}
    case |= {"longest": here.longest, "us": {each.name: 10.0 for each in configs} | {pick.name: 15.0}}
    report = {"multiprocessors": 132, "cases": [case, {**case, "held_out": False}]}
    assert script.judge(report, widths) == (
        "L8-R8, 1 cases: 0 picks within 10% of the best, the worst takes 1.50 times as long; 0 picks were not timed"
    )
    real = {"multiprocessors": 132, "cases": [{**case, "matrix": "one"}]}
    assert "L8-R8, 0 cases: 0 picks" in script.judge(real, widths)
    assert script.judge(real, widths, matrices=True).startswith("L8-R8, matrices of DLMC, 1 cases: 0 picks")
    del case["us"][pick.name]
    assert "0 cases: 0 picks" in script.judge(report, widths) and "1 picks were not" in script.judge(report, widths)
