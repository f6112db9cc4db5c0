"""Tables and picture of the language model's perplexity, from made-up rows."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.docs.test_pictures import check
from tests.house import ROOT

pytest.importorskip("matplotlib")


def _section() -> dict[str, Any]:
    machine = {"gpu": "GPU X", "cpu": "CPU Y", "torch": "2", "date": "2026-01-01", "commit": "abc"}
    rows: list[dict[str, Any]] = [{"name": "float32", "perplexity": 20.0}, {"name": "W8A8", "perplexity": 20.5}]

    def add(name: str, sparsity: float, value: float, **more: Any) -> None:
        products = {"float32": {"perplexity": value}, "W8A8": {"perplexity": 1.02 * value}}
        rows.append({"name": f"{name}, {sparsity}", "sparsity": sparsity, **products, **more})

    for sparsity, value in ((0.1, 21.0), (0.2, 21.8), (0.3, 26.0), (0.5, 60.0)):
        add("obs + refit, output_energy", sparsity, value)
    add("magnitude, uniform", 0.3, 300.0)
    history = [{"step": 0, "perplexity": 61.0}, {"step": 600, "perplexity": 24.0}]
    add("distilled", 0.5, 21.0, steps=600, rate=5e-4, seconds=45.2, start={"seconds": 8.1}, history=history)
    texts = {"WikiText-2 test, windows": 304, "of": 304}
    return {"device": "cuda", "machine": machine, "texts": texts, "rows": rows}


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "plots")
    return importlib.import_module("smollm_plots")


def test_the_tables(plots: Any) -> None:
    text = plots.render_language({"smollm": _section()})
    assert "| SmolLM2-135M, 304 of 304 windows of 1,024 | perplexity | over float32 |" in text
    assert "| W8A8 | 20.500 | +2.50% |" in text
    assert "| OBS + refit, by layer, W8A8 | 21.42 | 22.24 | 26.52 | 61.20 |" in text
    assert "| **distilled**, float32 | - | - | - | 21.00 |" in text
    assert "| 0.5 | 600 | 0.0005 | 8 | 45 | 61.00 | 24.00 |" in text
    assert "within 10% of dense float32 (perplexity at most 22.00): magnitude: none in float32, none in W8A8;" in text
    assert "OBS + refit, by layer: 0.2 in float32, 0.1 in W8A8; distilled: 0.5 in float32, 0.5 in W8A8." in text
    assert text.endswith("SmolLM2: GPU X, torch 2, 2026-01-01, commit abc.")


def test_formats_alone_make_one_table(plots: Any) -> None:
    section = _section()
    section["rows"] = section["rows"][:2]
    text = plots.render_language({"smollm": section | {"device": "cpu"}})
    assert text.count("| --- |") == 1 and text.endswith("SmolLM2: CPU Y, torch 2, 2026-01-01, commit abc.")


def test_the_picture(plots: Any) -> None:
    check(plots.draw_language({"smollm": _section()}))
