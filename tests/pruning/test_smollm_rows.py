"""The rows of the language model of ``benchmarks/models.py``, for a small random one on made-up tokens."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
WORDS = 61
pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the wheel transformers")


def _windows(_: Any, part: str, length: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(part))
    return list(torch.randint(WORDS, (12 if part == "test" else 20, 1, min(length, 48)), generator=generator))


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from harness import smollm_rows, text_models

    monkeypatch.setattr(text_models, "wikitext_windows", _windows)
    return smollm_rows


def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_benchmark", ROOT / "benchmarks" / "models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _model() -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=WORDS, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def _runner(harness: ModuleType, **options: Any) -> Any:
    args = SimpleNamespace(
        device="cpu", windows=5, batch=2, written=3, train=(), steps=6, rate=None, fit=None, seconds=1e9,
        start=time.perf_counter(), runs="nowhere", measure=True,
    )  # fmt: skip
    return harness.SmolLM(SimpleNamespace(**{**vars(args), **options}), _model(), None)


def test_perplexity_does_not_depend_on_the_batches(harness: ModuleType) -> None:
    windows, model = _windows(None, "test"), _model()
    found = [harness.text.perplexity(model, harness.text.joined(windows, size)) for size in (1, 5)]
    with torch.no_grad():
        losses = [float(model(input_ids=each, labels=each).loss) for each in windows]
    assert found == pytest.approx([math.exp(sum(losses) / len(losses))] * 2, rel=1e-5)


def test_written_windows_begin_with_the_text_and_follow_the_seed(harness: ModuleType) -> None:
    windows, model = _windows(None, "valid"), _model()
    write = harness.text.written_windows
    found, again, other = (write(model, windows, 5, 2, prompt=8, seed=seed) for seed in (0, 0, 1))
    assert [each.shape for each in found] == [(1, 48)] * 5
    assert torch.equal(torch.cat(found), torch.cat(again)) and not torch.equal(torch.cat(found), torch.cat(other))
    for each in found:
        begins = torch.cat([window.unfold(1, 8, 1)[0] for window in windows])
        assert bool((begins == each[:, :8]).all(1).any())


def test_a_row_of_each_kind(harness: ModuleType) -> None:
    runner = _runner(harness, train=(0.5,))
    rows = runner.rows()
    names = ["float32", "W8A8", "W8A8 smooth", "W4 g32", "magnitude, uniform, 0.5", "obs + refit, output_energy, 0.5"]
    found = {name: rows[name]()["rows"][0] for name in [*names, "distilled, 0.5"]}
    assert found["W8A8"]["perplexity"] == pytest.approx(found["float32"]["perplexity"], rel=0.05)
    trained = found["distilled, 0.5"]
    assert trained["steps"] == trained["of"] == 6 and trained["start"]["zeros"] == pytest.approx(0.5, abs=0.02)
    assert trained["history"][0]["step"] == 0 and trained["history"][-1]["step"] == 6
    assert trained["texts"]["windows that the model wrote"] == 3 and trained["texts"]["of"] == 12
    for name in (names[-2], names[-1], "distilled, 0.5"):
        assert {"float32", "W8A8"} <= found[name].keys()


def test_steps_fit_the_time_and_the_run(harness: ModuleType) -> None:
    runner = _runner(harness, fit=0.5)
    first = runner.limits(runner.dense)
    assert first["steps"] == int(0.5 / runner.step_seconds) or first["steps"] == 1
    runner.args.seconds = time.perf_counter() - runner.args.start + harness.RESERVE + runner.step_seconds * 3.9
    runner.args.steps = 6
    assert runner.limits(runner.dense)["steps"] in (2, 3)
    runner.args.steps = 600
    with pytest.raises(RuntimeError, match="too few for a training of 600 steps"):
        runner.limits(runner.dense)


def test_runs_are_merged_and_the_last_row_of_a_name_counts(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    models = _benchmark()
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    for i, path in enumerate(paths[:2]):
        rows = [{"name": "float32", "perplexity": 20.0 + i}, {"name": f"row {i}"}]
        path.write_text(json.dumps({"smollm": {"device": "cuda", "texts": {"of": 304, "written": i}, "rows": rows}}))
    paths[2].write_text('{"machine": 1, "smollm": {"rows": []}}')
    arguments = ["models.py", "--model", "smollm", "--out", str(paths[2]), "--merge", *map(str, paths[:2])]
    monkeypatch.setattr(sys, "argv", arguments)
    models.main()
    found = json.loads(paths[2].read_text())
    assert found["machine"] == 1 and found["smollm"]["texts"] == {"of": 304, "written": 1}
    assert [row["name"] for row in found["smollm"]["rows"]] == ["float32", "row 0", "row 1"]
    assert found["smollm"]["rows"][0]["perplexity"] == 21.0


def test_a_row_that_fails_does_not_stop_the_others(harness: ModuleType, tmp_path: Path) -> None:
    from harness.dlmc_data import Journal

    models = _benchmark()

    def fail() -> None:
        raise RuntimeError("no kernel")

    rows = {"a1": fail, "a2": lambda: {"rows": [{"x": 1}]}, "b": lambda: {"rows": [{"x": 2}]}}
    journal, calls = Journal(tmp_path / "out.json", {}), []
    args = SimpleNamespace(rows=["b", "a*"], start=time.perf_counter(), seconds=1e9)
    state = models.measure(
        SimpleNamespace(rows=lambda: rows), journal, args, lambda: calls.append(len(journal.records))
    )
    assert state == "failed: a1" and list(journal.records) == ["b", "a2"] and calls == [1, 2]
