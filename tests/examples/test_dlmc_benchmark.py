"""The DLMC benchmark: which matrices and widths it takes, that it goes on where it stopped, and the engine's part."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")
pytest.importorskip("scipy")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import dlmc
import paper_magicube
from harness import dlmc_tables
from harness.blocked_ell import Blocks, half_forms
from harness.dlmc_data import Journal, listed, pairs_of, sample
from harness.gpu_data import Widths

import magicube_cutlass as mc
from cute_kernels.cpu import engine

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("rn50/magnitude_pruning/0.5/one", "rn50/magnitude_pruning/0.9/two", "transformer/random_pruning/0.9/three")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three matrices of odd shapes, one with empty rows."""
    for seed, name in enumerate(NAMES):
        path = tmp_path / "matrices" / f"{name}.smtx"
        path.parent.mkdir(parents=True)
        pattern = mc.random_pattern(13 + seed, 70, float(name.split("/")[2]), 1, "uniform", seed=seed)
        mc.write_smtx(path, pattern)
    return tmp_path / "matrices"


def test_matrices_come_from_a_folder_or_a_list(folder: Path, tmp_path: Path) -> None:
    assert [matrix.name for matrix in sample(1, root=folder)] == list(NAMES)
    names = tmp_path / "names.txt"
    names.write_text(f"{NAMES[2]}.smtx\n\n{NAMES[0]}\n")
    found = listed(names, folder)
    assert [(matrix.name, matrix.target) for matrix in found] == [(NAMES[2], 0.9), (NAMES[0], 0.5)]
    names.write_text(f"{NAMES[2]}.smtx\nrn50/none/0.5/absent.smtx\n")
    with pytest.raises(SystemExit, match=r"1 of the matrices .* first rn50/none/0.5/absent.smtx"):
        listed(names, folder)


def test_pairs_are_those_of_table_iv() -> None:
    assert pairs_of(None) is None and pairs_of("L16-R4,L8-R8") == ((16, 4), (8, 8))
    assert pairs_of("all") == mc.SPMM_PAIRS
    with pytest.raises(SystemExit, match="got 'L8-R16'"):
        pairs_of("L8-R8,L8-R16")


def test_pairs_of_sddmm_are_those_that_it_has() -> None:
    pairs = tuple(Widths(*pair) for pair in mc.SPMM_PAIRS)
    assert dlmc.sampled_pairs(pairs, False, 2) == dlmc.SAMPLED
    assert dlmc.sampled_pairs((Widths(16, 8),), True, 8) == ()
    assert dlmc.sampled_pairs(None, True, 8) == dlmc.SAMPLED and dlmc.sampled_pairs(None, True, 4) == (dlmc.BASE,)


def test_a_run_goes_on_after_its_last_whole_record(tmp_path: Path) -> None:
    out, made = tmp_path / "r.json", []

    def record(name: str) -> dict[str, Any]:
        made.append(name)
        return {"matrices": [{"name": name}], "spmm": [{"us": 1.0}], "dense": [{"shape": [1]}]}

    journal = Journal(out, {"commit": "a"})
    for name in "xy":
        journal(name, lambda name=name: record(name))
    with journal.path.open("a") as file:
        file.write('{"record": "z", "matri')  # stopped while it wrote
    again = Journal(out, {"commit": "a"})
    for name in "xyz":
        again(name, lambda name=name: record(name))
    assert made == ["x", "y", "z"]
    results: dict[str, Any] = {"matrices": [], "spmm": [], "dense": []}
    Journal(out, {"commit": "a"}).add_to(results)
    assert [row["name"] for row in results["matrices"]] == ["x", "y", "z"]
    assert [row["matrix"] for row in results["spmm"]] == [0, 1, 2] and results["dense"] == 3 * [{"shape": [1]}]
    with pytest.raises(SystemExit, match="another commit"):
        Journal(out, {"commit": "b"})
    assert not Journal(out, {"commit": "b"}, fresh=True).records and not Journal(out, {"commit": "b"}).records


@pytest.mark.long
@pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")
def test_the_engine_is_compared_on_every_matrix(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"

    def run(*more: str) -> dict[str, Any]:
        command = [sys.executable, "benchmarks/dlmc.py", "--device", "cpu", "--pairs", "all", "--folder", str(folder)]
        subprocess.run([*command, "--out", str(out), *more], cwd=ROOT, check=True, capture_output=True, timeout=300)
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    assert len(run("--matrices", "1")["matrices"]) == 1
    first = out.with_suffix(".jsonl").read_text()
    found = run()
    assert out.with_suffix(".jsonl").read_text().startswith(first)  # not measured again
    assert [matrix["name"] for matrix in found["matrices"]] == list(NAMES)
    for i in range(3):
        pairs = [(row["v"], row["pair"]) for row in found["spmm"] if row["matrix"] == i]
        named = [f"L{left}-R{right}" for left, right in mc.SPMM_PAIRS]
        assert pairs == [*((8, name) for name in named), (4, "L8-R8"), (2, "L8-R8")]
        assert {row["pair"] for row in found["sddmm"] if row["matrix"] == i} == {"L16-R16", "L8-R8", "L4-R4"}
    assert all(row[f"times {name}"] > 0 for row in found["spmm"] for name in ("float32", "scipy CSR float32"))
    assert found["machine"]["commit"] and found["setting"]["threads"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_other_device_is_refused() -> None:
    done = subprocess.run([sys.executable, "benchmarks/dlmc.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr == "this benchmark needs a CUDA device\n"


def test_blocks_of_float16_are_placed() -> None:
    blocks = Blocks(torch.tensor([[1], [0]], dtype=torch.int32), torch.arange(8.0).half().view(2, 1, 2, 2), 4)
    dense = [[0, 0, 0, 1], [0, 0, 2, 3], [4, 5, 0, 0], [6, 7, 0, 0]]
    assert blocks.dense().dtype == torch.float16 and blocks.dense().tolist() == dense
    assert len(set(half_forms())) == 4 and all("float16, sums float32" in str(form) for form in half_forms())


@pytest.mark.skipif(not (paper_magicube.RESULTS / "dlmc_cpu.json").is_file(), reason="no CPU results")
def test_the_page_shows_the_results() -> None:
    page = paper_magicube.PAGE.read_text()
    for mark, table in paper_magicube.tables().items():
        assert table in page, mark
    text = [line for line in page.splitlines() if not line.startswith("|")]
    assert len(" ".join(text).split()) <= 1200


def test_the_fastest_dense_product_of_each_matrix_counts() -> None:
    products = [(2.0, 1.25, 0.5), (4.0, 5.0, 8.0)]  # times of dense over ours: fp16, int8, fp8
    names = ("dense fp16", "dense int8", "dense fp8")
    rows = [
        {"pair": "L8-R8", "v": 8, "n": 256, "matrix": i}
        | {f"behind: times {name}": ratio for name, ratio in zip(names, ratios, strict=True)}
        | {f"times {name}": 2 * ratio for name, ratio in zip(names, ratios, strict=True)}
        for i, ratios in enumerate(products)
    ]
    others = [rows[0] | {"v": 4}, rows[0] | {"n": 512}, rows[0] | {"pair": "L8-R4"}]
    results = {"spmm": [*rows, *others], "matrices": [{"target": 0.9}, {"target": 0.9}]}
    assert dlmc_tables._fastest(results)[4] == "| 0.9 | 2 | 1.41 (0.50 to 4.00) | 2.83 (1.00 to 8.00) | 50% |"


def test_the_gpu_s_records_come_together(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow of a run on a GPU, with a stand-in for every measurement."""
    asked: list[tuple[str, object]] = []

    def measured(matrix: Any, pattern: Any, groups: Any, dense: Any, pairs: Any) -> dict[str, Any]:
        asked.append((matrix.name, pairs))
        dense.rows[(len(asked),)] = row = {"shape": [len(asked)]}
        return {"matrices": [dlmc.facts(matrix, pattern)], "spmm": [{"us": 1.0}], "others": [{"n": 1}], "dense": [row]}

    monkeypatch.setattr(dlmc, "measure", measured)
    monkeypatch.setattr(dlmc, "gpu_machine", lambda: {"commit": "a", "torch": "b", "gpu": "c"})
    monkeypatch.setattr(dlmc, "compile_ahead", lambda configs: {})
    monkeypatch.setattr(dlmc, "compare_patterns", lambda name, n, one, other: {"name": name, "n": n})
    monkeypatch.setattr(dlmc, "break_even_record", lambda dense: {"break_even": [{"v": 8}], "dense": []})
    args = Namespace(pairs="L16-R4,L8-R8", figures=False, fresh=False, out=tmp_path / "gpu.json", seconds=60.0)
    matrices = sample(1, root=folder)
    dlmc.run_gpu(matrices[:1], args, time.perf_counter())
    dlmc.run_gpu(matrices, args, time.perf_counter())
    found = json.loads(args.out.read_text())
    assert [name for name, _ in asked] == list(NAMES)  # each once
    assert {pairs for _, pairs in asked} == {(Widths(16, 4), Widths(8, 8))}
    before = json.loads((paper_magicube.RESULTS / "dlmc_h200.json").read_text())
    assert list(found) == list(before) and before["setting"].items() <= found["setting"].items()
    assert [row["matrix"] for row in found["spmm"]] == [row["matrix"] for row in found["others"]] == [0, 1, 2]
    assert found["dense"] == [{"shape": [i]} for i in (1, 2, 3)] and len(found["skew"]) == len(dlmc.SKEWED)
    with pytest.raises(SystemExit, match="another pairs"):
        dlmc.run_gpu(matrices, Namespace(**vars(args) | {"pairs": None}), time.perf_counter())
    monkeypatch.setattr(
        dlmc, "measure_figures", lambda matrix, pattern, dense: measured(matrix, pattern, (), dense, ())
    )
    args = Namespace(**vars(args) | {"figures": True, "pairs": None, "out": tmp_path / "figures.json"})
    dlmc.run_gpu(matrices, args, time.perf_counter())
    found = json.loads(args.out.read_text())
    assert len(found["matrices"]) == 3 and not found["skew"]
