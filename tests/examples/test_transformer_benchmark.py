"""The latency benchmark of the sparse Transformer: what it compares, its limits of time, its tables and bars."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import transformer as script
from harness.transformer_baselines import DENSE, FLEX, LINEARS, Baseline, Case, baselines, names
from sparse_encoder import Shape


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def case_of(case: Case, dense_ms: float) -> dict[str, Any]:
    rows = [
        {"name": DENSE, "ms": dense_ms, "interval": 0.01, "error": 1e-3, "mode": "graph"},
        {"name": FLEX, "failure": "RuntimeError: no"},
        {"name": "8b-8b", "ms": 2.0, "interval": 0.25, "error": 1e-2, "mode": "graph"},
    ]
    fields = {name: getattr(case, name) for name in ("length", "heads", "batch", "sparsity")}
    return {**fields, "iterations": 256, "rows": rows}


def made_up(count: int) -> dict[str, Any]:
    machine = {"gpu": "none", "cpu": "a processor", "threads": "2", "torch": "2", "date": "today"}
    cases = [case_of(case, 3.0 + i) for i, case in enumerate(script.CASES[:count])]
    return {"machine": machine, "device": "cpu", "cases": cases, "skipped": ["8b-4b, L = 1: not done in 9 s"]}


def test_tables_show_rates_failures_gaps_and_what_was_skipped() -> None:
    text = script.render(made_up(3))
    assert f"| {DENSE} |  | 3.000 ± 0.010 | 4.000 ± 0.010 | 5.000 ± 0.010 |" in text
    assert f"| 8b-8b | {DENSE} | 2.000 ± 0.250 (1.50x) | 2.000 ± 0.250 (2.00x) | 2.000 ± 0.250 (2.50x) |" in text
    assert f"| {FLEX} | {DENSE} | failed | failed | failed |" in text and "\n### 4 heads, batch 8" in text
    assert (
        f"| 16b-8b | {DENSE} |  |  |  |" in text
        and "Broken off in the last run: 8b-4b, L = 1: not done in 9 s." in text
    )


def test_printed_speed_ups_stand_below_the_cases_they_are_of() -> None:
    four, eight = script.render(made_up(8)).split("### 8 heads, batch 8")
    assert "| Magicube, printed | vectorSparse fp16 | 1.43x to 1.63x |  | 1.62x to 1.92x |  |" in four
    assert f"| Magicube, printed | {DENSE} | 1.50x to 1.70x |  |  |  |" in four and "printed" not in eight


def test_lines_are_drawn_from_the_results_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "times.json"
    path.write_text(json.dumps(made_up(8)))
    monkeypatch.setattr(sys, "argv", ["x", "--plot", "--out", str(path)])
    script.main()
    assert path.with_suffix(".png").stat().st_size > 1000 and "\n### 8 heads, batch 8" in capsys.readouterr().out
    figures: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))
    script.draw(made_up(8), path)
    axes = figures[0].axes
    assert [each.get_title() for each in axes] == ["4096 tokens", "8192 tokens"]
    labels = [text.get_text() for text in axes[0].texts]
    lines = {label: list(line.get_ydata()) for label, line in zip(labels, axes[0].lines, strict=True)}
    assert lines["8b-8b"] == [2.0, 2.0]


def test_the_paper_s_cases_are_all_there() -> None:
    cases = {(c.length, c.heads, c.batch, c.sparsity) for c in script.CASES}
    assert cases == {(n, h, b, s) for n in (4096, 8192) for h in (4, 8) for b in (2, 8) for s in (0.9, 0.95)}
    assert script.ITERATIONS == 256 and script.CASES[0].shape().width == 256
    planned = script.plan(script.CASES)
    assert len(set(planned)) == len(planned) == len(script.CASES) * len(names())
    kinds = [LINEARS in name for _, name in planned[:32]]
    assert kinds == sorted(kinds) and {case for case, _ in planned[:32]} == set(script.CASES[:4])


def test_the_interval_is_that_of_the_mean() -> None:
    mean, half = script.interval([1.0, 3.0] * 50)
    assert mean == 2.0 and half == pytest.approx(1.96 * (100 / 99) ** 0.5 / 10)
    with pytest.raises(ValueError, match="times must be at least 2"):
        script.interval([1.0])


def run(out: Path, cases: int = 2, limit: float = 1e9, fresh: bool = False, again: tuple[str, ...] = ()) -> int:
    return script.measure_all(script.plan(script.CASES[:cases]), "cpu", out, limit, 3, fresh, again)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Case, str]]:
    """The rows that a made-up measurement was asked for."""
    asked: list[tuple[Case, str]] = []

    def fake(case: Case, name: str, device: str, iterations: int) -> dict[str, Any]:
        asked.append((case, name))
        return {"name": name, "ms": float(len(asked)), "interval": 0.1}

    monkeypatch.setattr(script, "run_baseline", fake)
    monkeypatch.setattr(script, "provenance", dict)
    return asked


def stored(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_runs_stop_in_time_and_add_up(
    tmp_path: Path, rows: list[tuple[Case, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "cases.json", script.run_baseline
    assert run(out, limit=script.SHORTEST - 1) == 16 and not rows
    assert script.render(stored(out)) == "no row is done"

    def interrupted(*of: Any) -> dict[str, Any]:
        if len(rows) == 5:
            raise KeyboardInterrupt
        return whole(*of)

    monkeypatch.setattr(script, "run_baseline", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(out)
    assert [len(case["rows"]) for case in stored(out)["cases"]] == [4, 2]
    monkeypatch.setattr(script, "run_baseline", whole)
    assert run(out) == 0
    assert sorted(rows, key=str) == sorted(set(script.plan(script.CASES[:2])) - {(script.CASES[1], DENSE)}, key=str)
    dense = [row["ms"] for case in stored(out)["cases"] for row in case["rows"] if row["name"] == DENSE]
    assert dense == [1.0, 1.0], "dense attention is measured once for both sparsities"
    assert run(out, 1, fresh=True) == 0 and len(rows) == 15 + 8
    assert len(stored(out)["cases"]) == 1


def test_parts_come_together_again(tmp_path: Path, rows: list[tuple[Case, str]]) -> None:
    planned = script.plan(script.CASES)
    parts = [script.part_of(planned, i, 3) for i in (1, 2, 3)]
    assert sorted((row for part in parts for row in part), key=str) == sorted(planned, key=str)
    assert max(map(len, parts)) - min(map(len, parts)) <= 2
    for part in parts:
        both = Counter((replace(case, sparsity=0.0), name) for case, name in part)
        assert set(both.values()) == {2}, "a row's sparsities stay together"
    files = tuple(tmp_path / f"{i}.json" for i in range(3))
    for part, path in zip(parts, files, strict=True):
        assert script.measure_all(part, "cpu", path, 1e9, 3, False) == 0
    once = len(rows)
    assert once == len(planned) - len(script.CASES) // 2, "dense attention is measured once for both sparsities"
    assert script.measure_all(planned, "cpu", tmp_path / "all.json", 0.0, 3, False, join=files) == 0
    assert len(rows) == once and len(stored(tmp_path / "all.json")["cases"]) == len(script.CASES)
    assert all(len(case["rows"]) == len(names()) for case in stored(tmp_path / "all.json")["cases"])


def test_rows_are_measured_again_in_the_place_of_those_that_are_there(
    tmp_path: Path, rows: list[tuple[Case, str]]
) -> None:
    out = tmp_path / "cases.json"
    assert run(out) == 0
    before, asked = stored(out)["cases"], len(rows)
    assert run(out, again=("16b", LINEARS)) == 0
    anew = {name for name in names() if "16b" in name or LINEARS in name}
    assert {name for _, name in rows[asked:]} == anew and len(rows) == asked + 2 * len(anew)
    for old, new in zip(before, stored(out)["cases"], strict=True):
        first, second = ({row["name"]: row["ms"] for row in case["rows"]} for case in (old, new))
        assert first.keys() == second.keys() and {name for name in first if first[name] != second[name]} == anew
    assert run(out, limit=script.SHORTEST - 1, again=("16b",)) > 0
    assert all(len(case["rows"]) == len(names()) for case in stored(out)["cases"]), "what was there stays"


def test_a_baseline_that_takes_too_long_is_broken_off_noted_and_left(
    tmp_path: Path, rows: list[tuple[Case, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole, tried = tmp_path / "cases.json", script.run_baseline, []

    def slow(case: Case, name: str, *of: Any) -> dict[str, Any]:
        if name != FLEX:
            return whole(case, name, *of)
        tried.append(case)
        try:
            time.sleep(60)
        except Exception:  # as compilers do
            return {"name": name, "failure": "swallowed"}
        return {"name": name, "failure": "awake"}

    monkeypatch.setattr(script, "run_baseline", slow)
    monkeypatch.setattr(script, "LONGEST", 0.2)
    monkeypatch.setattr(script, "SHORTEST", 0.1)
    begin = time.perf_counter()
    assert run(out) == 2 and len(tried) == 1, "it is not tried again in the same run"
    assert time.perf_counter() - begin < 30
    found = stored(out)
    assert found["skipped"] == [f"{FLEX}, {script.CASES[0]}: not done in 0 s"]
    assert all(FLEX not in [row["name"] for row in case["rows"]] for case in found["cases"])
    assert [len(case["rows"]) for case in found["cases"]] == [7, 7]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "a signal is left over"
    monkeypatch.setattr(script, "run_baseline", whole)
    assert run(out) == 0 and stored(out)["skipped"] == []


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(Case, "shape", lambda case: Shape(256, 10, case.length, 1, 2, 16))
    return Case(256, 2, 1, 0.5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_baselines_compute_what_they_should_and_failures_are_rows(small: Case) -> None:
    words = torch.randint(0, 256, (1, 256))
    found: dict[str, Callable[[], Baseline]] = baselines(small, words)
    assert list(found) == names() and len(found) == 8
    for name in (DENSE, FLEX, "8b-8b", "8b-8b + linear"):
        row = script.measured(name, found[name], words, 2)
        assert row["error"] <= 0.03 and row["ms"] > 0, row
    swapped = Baseline(found["8b-8b"]().net, found[DENSE]().exact)
    row = script.measured(FLEX, lambda: swapped, words, 2)
    assert "relative error must be at most" in row["failure"]


@pytest.mark.parametrize("name", ["8b-8b", "8b-8b + linear", FLEX])
def test_blocks_are_whole_graphs(small: Case, name: str) -> None:
    """As on a GPU, where torch compiles the blocks: no break around attention or a sparse layer."""
    words = torch.randint(0, 256, (2, 256))
    with torch.no_grad():
        net = baselines(small, words)[name]().net.float()
        expected = net.hidden(words)
        for block in net.blocks:
            block.compile(dynamic=False, fullgraph=True, backend="aot_eager")
        assert torch.equal(net.hidden(words), expected)
    torch.compiler.reset()


def test_what_cannot_run_here_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--quick"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["x", "--part", "4/3"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    monkeypatch.setattr(sys, "argv", ["x"])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        script.main()
    monkeypatch.setattr(sys, "argv", ["x", "--plot", "--out", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit, match=r"there is no .*none.json; a run on a GPU writes it"):
        script.main()
