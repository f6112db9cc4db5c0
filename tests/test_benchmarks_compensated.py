"""The benchmarks of compensated products run, quickly, and their results hold what the plots and tables need."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from cute_kernels.cpu import engine
from residual.planning.ladder import MODES
from tests.test_examples import script

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
def test_accuracy_covers_every_mode_and_kind_and_draws_them(tmp_path: Path) -> None:
    out, picture = tmp_path / "accuracy.json", tmp_path / "accuracy.png"
    script("benchmarks/accuracy.py", "--device", "cpu", "--quick", "--seconds", 2, "--out", out)
    cases = json.loads(out.read_text())["cases"]
    assert len({case["kind"] for case in cases}) == 6
    for case in cases:
        errors = {row["name"]: row["error"] for row in case["rows"]}
        assert {*MODES, "torch fp32", "torch bf16"} <= set(errors) and all(row["ms"] > 0 for row in case["rows"])
        assert errors["three_digit"] < errors["full"] < errors["direct"]
        planned = {name: float(name.removesuffix(", prepared").split()[1]) for name in errors if name.startswith("tol")}
        assert planned and all(errors[name] <= tol for name, tol in planned.items())
    if importlib.util.find_spec("matplotlib"):
        script("benchmarks/plots/accuracy_plot.py", out, picture)
        assert picture.stat().st_size > 0


@pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")
def test_quantization_is_compared_with_a_dense_product(tmp_path: Path) -> None:
    out = tmp_path / "quantize.json"
    script("benchmarks/cpu_quantize.py", "--quick", "--out", out)
    for result in json.loads(out.read_text())["results"]:
        assert result["dense"] and result["dense_ms"] > 0 and len(result["methods"]) == 18
        for row in result["methods"].values():
            assert 0 < row["share"] == row["engine_ms"] / result["dense_ms"]


@pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")
def test_checked_cpu_products_are_compared_with_float32(tmp_path: Path) -> None:
    out = tmp_path / "direct.json"
    script("benchmarks/cpu_direct.py", "--quick", "--out", out)
    for row in json.loads(out.read_text())["results"]:
        assert (
            set(row["us"]) == {"torch float32", "direct", "prepare", "judge", "probes"} and min(row["us"].values()) > 0
        )
        assert 0.5 * row["error"] < row["measured_error"] < 2 * row["error"]


@pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")
def test_layers_are_compared_with_those_of_torch(tmp_path: Path) -> None:
    out = tmp_path / "layers.json"
    script("benchmarks/cpu_layers.py", "--quick", "--out", out)
    for row in json.loads(out.read_text())["results"]:
        names = {"float32", "torch dynamic int8", "ours, 0", "ours, 0.5", "ours, 0.9"}
        names |= {"bfloat16"} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set()
        assert set(row["us"]) == set(row["median_us"]) == names and min(row["us"].values()) > 0


@pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")
def test_instruction_sets_are_timed_beside_each_other(tmp_path: Path) -> None:
    out = tmp_path / "paths.json"
    script("benchmarks/cpu_paths.py", "--quick", "--out", out)
    rows = json.loads(out.read_text())["results"]
    vectors = set(engine.isas()[:-1])
    assert {(row["zeros"], row["tokens"]) for row in rows} == {
        (z, n) for z in (0, 0.5, 0.9) for n in (1, 16) if vectors
    }
    assert all(set(row["us"]) == vectors and min(row["us"].values()) > 0 for row in rows)


@pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")
@pytest.mark.long
def test_two_threads_are_compared_with_one_under_load(tmp_path: Path) -> None:
    out = tmp_path / "threads.json"
    script("benchmarks/cpu_threads.py", "--quick", "--always", "--out", out)
    rows = json.loads(out.read_text())["results"]
    assert [(row["job"], row["busy"]) for row in rows] == [(job, n) for job in ("0.3 ms", "20 ms") for n in (0, 1, 2)]
    for row in rows:
        assert row["speedup"] == row["median_ms_1"] / row["median_ms_2"] > 0


@pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")
@pytest.mark.long
def test_the_papers_values_stand_beside_ours(tmp_path: Path) -> None:
    script("benchmarks/paper_residual.py", "--quick", "--out", tmp_path)
    found = json.loads((tmp_path / "paper_residual_cpu.json").read_text())
    wrong = found["example"]["wrong entries of 18"]
    assert all(count == 0 for key, count in wrong.items() if key.startswith("example "))
    assert min(count for key, count in wrong.items() if not key.startswith("example ")) > 0
    assert found["example"]["printed lambda"]["B_int8"][0][0] == 63  # as printed
    for row in found["figures 6 and 8"]:
        densities = [point["density"] for point in row["points"]]
        assert densities == sorted(densities, reverse=True) and row["full"] < row["origin"]
    for name in ("table 3", "table 4"):
        assert all(seconds > 0 for row in found[name] for seconds in row["seconds"].values())
    (layer,) = found["layers"]
    assert set(layer["seconds"]) == {"float32", *layer["densities"]} and layer["densities"]["origin"] == [0, 0]
    assert 0 < max(layer["densities"]["density 0.01"]) < 0.1 < min(layer["densities"]["threshold 0"])
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "paper_residual.png").stat().st_size > 0
