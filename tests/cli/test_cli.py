"""The command line: what it prints, and that a mistake is one line and exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import magicube_cutlass as mc
from cute_kernels.cpu import engine
from cute_kernels.integers import int_range
from magicube_cutlass.bench.layers import LayerTimes, time_layers
from magicube_cutlass.bench.problems import check_product, exact_spmm, random_matrix, random_operand
from magicube_cutlass.bench.timing import measure
from magicube_cutlass.cli import app, main
from magicube_cutlass.cli.console import bytes_text
from magicube_cutlass.cli.info import format_bytes, histogram

needs_engine = pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")


@pytest.fixture
def smtx(tmp_path: Path) -> Path:
    path = tmp_path / "a.smtx"
    mc.write_smtx(path, mc.random_pattern(24, 70, 0.8, 1, "skewed"))
    return path


def run(*args: object) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())  # tables wrap


def fail(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err.startswith("magicube: error: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


def test_info_shows_shape_and_sizes(smtx: Path) -> None:
    text = run("info", smtx, "--vector-length", 4)
    assert "96 x 70 (24 vector rows of V = 4" in text
    assert "density 0.2" in text
    assert f"dense int8 {96 * 70} " in text


@pytest.mark.parametrize("stride", [16, 32, 64])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_info_bytes_are_those_of_the_matrix(bits: int, stride: int) -> None:
    pattern = mc.random_pattern(45, 70, 0.8, 8, "skewed")
    matrix = mc.SRBCRS.from_pattern(pattern, torch.zeros(pattern.vectors, 8).int(), bits=bits, stride=stride)
    assert format_bytes(pattern, stride)[f"SR-BCRS int{bits}"] == matrix.nbytes


@pytest.mark.parametrize("lengths", [[], [0], [5, 5, 5], [0, 1, 9, 10, 99], list(range(1000))])
def test_histogram_counts_every_row_once(lengths: list[int]) -> None:
    bins = histogram(torch.tensor(lengths, dtype=torch.int64))
    assert len(bins) <= 10
    assert sum(count for *_, count in bins) == len(lengths)
    for first, last, count in bins:
        assert count == sum(first <= length <= last for length in lengths)


@pytest.mark.parametrize("lhs, rhs", [*mc.SPMM_PAIRS, (4, 16)])
def test_spmm_checks_and_times(smtx: Path, lhs: int, rhs: int) -> None:
    text = run("spmm", smtx, "--n", 9, "--lhs-bits", lhs, "--rhs-bits", rhs, "--vector-length", 8)
    assert f"L{lhs}-R{rhs}, n = 9" in text
    assert "equal to the exact product on all 192 rows" in text
    assert re.search(r"useful [\d.]+ Gop/s", text) and re.search(r"dense-equivalent [\d.]+ Gop/s", text)
    assert re.search(r"fastest of (bfloat16, )?float32", text) and ("torch dynamic int8" in text) <= (
        max(lhs, rhs) <= 8
    )


@pytest.mark.parametrize("row", range(20))
def test_check_finds_a_wrong_element_in_any_row(row: int) -> None:
    lhs = random_matrix(mc.random_pattern(20, 64, 0.9, 8), 8, 0)
    rhs = random_operand(64, 16, 8, 1)
    product = mc.spmm(lhs, rhs)
    check_product(lhs, rhs, product)
    product[row, 5] += 1
    with pytest.raises(ArithmeticError, match=rf"element \({row}, 5\)"):
        check_product(lhs, rhs, product)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("lhs_bits, rhs_bits", mc.SPMM_PAIRS)
def test_exact_product_is_the_reference(lhs_bits: int, rhs_bits: int, signed: bool) -> None:
    pattern, generator = mc.random_pattern(48, 70, 0.8, 8), torch.Generator().manual_seed(0)
    (low, high), (low_rhs, high_rhs) = int_range(lhs_bits, signed), int_range(rhs_bits, signed)
    vectors = torch.randint(low, high + 1, (pattern.vectors, 8), generator=generator)
    lhs = mc.SRBCRS.from_pattern(pattern, vectors, bits=lhs_bits, signed=signed)
    ints = torch.randint(low_rhs, high_rhs + 1, (70, 9), generator=generator)
    rhs = mc.QuantTensor.from_ints(ints, bits=rhs_bits, signed=signed)
    assert exact_spmm(lhs, rhs).equal(mc.reference.spmm(lhs, rhs))


def test_exact_product_holds_sums_that_float64_cannot() -> None:
    low, k = -(2**15), 2**23 + 1
    pattern = mc.Pattern.from_dense(torch.ones(1, k, dtype=torch.bool), 1)
    ints = torch.full((k, 1), low)
    ints[-1] = 1
    lhs = mc.SRBCRS.from_pattern(pattern, ints, bits=16)
    assert exact_spmm(lhs, mc.QuantTensor.from_ints(ints, bits=16)).item() == 2**53 + 1


def test_exact_product_needs_quantized_integers() -> None:
    lhs = mc.sddmm(random_operand(8, 4, 8, 0), random_operand(16, 4, 8, 1), mc.random_pattern(8, 16, 0.5, 8))
    assert isinstance(lhs, mc.SRBCRS)
    with pytest.raises(ValueError, match="lhs must be quantized"):
        exact_spmm(lhs, random_operand(16, 3, 8, 2))


@pytest.mark.parametrize("name", ["empty rows", "no rows", "no columns"])
def test_degenerate_files_work(tmp_path: Path, name: str) -> None:
    text = {"empty rows": "3, 5, 0\n0 0 0 0\n\n", "no rows": "0, 5, 0\n0\n\n", "no columns": "2, 0, 0\n0 0 0\n\n"}[name]
    path = tmp_path / "a.smtx"
    path.write_text(text)
    run("info", path)
    run("spmm", path, "--n", 3)
    pytest.importorskip("matplotlib")
    run("spy", path, "-o", tmp_path / "a.png")


@needs_engine
def test_bench_times_exact_layers_of_the_shapes_asked_for() -> None:
    options = ("--shape", "40x48", "--tokens", 3, "--tokens", 1, "--sparsity", 0.5, "--budget", 0)
    text, before = run("bench", *options), torch.get_num_threads()
    assert "40 x 48" in text and "ours, 0.5" in text and "best baseline" in text
    report = json.loads(run("bench", *options, "--threads", 2, "--json"))
    assert report["setting"]["threads"] == 2 and before == torch.get_num_threads()
    assert [(row["out"], row["in"], row["tokens"]) for row in report["results"]] == [(40, 48, 3), (40, 48, 1)]
    assert {"float32", "ours, 0.5"} <= set(report["results"][0]["us"]) and report["machine"]["torch"]


@needs_engine
def test_bench_times_dense_weights_in_formats() -> None:
    formats = ("int8", "int4-g16", "int4-g16:none", "mxfp4", "nvfp4:none", "e4m3")
    options = (
        "--shape",
        "40x64",
        "--tokens",
        3,
        "--budget",
        0,
        *(each for name in formats for each in ("--format", name)),
    )
    text = run("bench", *options)
    assert all(f"ours, {name}" in text for name in formats) and "..." not in text and "\u2026" not in text
    (row,) = json.loads(run("bench", *options, "--sparsity", 0.5, "--json"))["results"]
    assert {f"ours, {name}" for name in (*formats, "0.5")} == {name for name in row["us"] if name.startswith("ours")}


def test_a_layer_far_from_its_weight_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mc.nn.QuantLinear, "forward", lambda self, x: torch.ones(x.shape[0], 40))
    with pytest.raises(ArithmeticError, match="40 x 64, 3 tokens, ours, int4: the layer must"):
        next(time_layers(40, 64, (3,), (), formats=("int4",)))


def test_bench_names_a_wrong_format(capsys: pytest.CaptureFixture[str]) -> None:
    if engine.available():
        for text, words in (("int4-32", "format must be WEIGHT, WEIGHT-gGROUP"), ("int5", "weight must be one of"),
                            ("int4:fp8", "act must be one of"), ("int4-g3", "group_size must")):  # fmt: skip
            assert words in fail(capsys, "bench", "--shape", "48x40", "--tokens", 1, "--format", text), text


def test_bench_names_a_wrong_shape(capsys: pytest.CaptureFixture[str]) -> None:
    if engine.available():
        assert "shape must be OUTxIN" in fail(capsys, "bench", "--shape", "40,48")


def test_the_best_baseline_is_named() -> None:
    times = LayerTimes(4, 8, 1, {"float32": 3.0, "torch dynamic int8": 2.0, "ours, 0": 4.0, "ours, 0.9": 1.0}, {})
    assert times.baseline == "torch dynamic int8" and times.speed_up("ours, 0.9") == 2.0


def test_a_layer_that_is_not_exact_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mc.nn.SparseQuantLinear, "forward", lambda self, x: torch.zeros(x.shape[0], 40))
    with pytest.raises(ArithmeticError, match="40 x 48, 3 tokens, ours, 0: the layer is not the exact product"):
        next(time_layers(40, 48, (3,)))


@pytest.mark.parametrize("shape", [(24, 70), pytest.param((3000, 2500), marks=pytest.mark.long)])
def test_spy_writes_a_picture(tmp_path: Path, shape: tuple[int, int]) -> None:
    pytest.importorskip("matplotlib")
    mc.write_smtx(tmp_path / "a.smtx", mc.random_pattern(*shape, 0.99, 1))
    run("spy", tmp_path / "a.smtx", "-o", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_spy_without_matplotlib_names_the_extra(
    smtx: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'magicube-cutlass[plots]'" in fail(capsys, "spy", smtx, "-o", tmp_path / "a.png")


def test_collect_env_names_versions_and_paths() -> None:
    text = run("collect-env")
    for word in (version("torch"), "engine path", "threads", "gpu"):
        assert word in text


@pytest.mark.parametrize(
    "args, message",
    [
        (["info", "missing.smtx"], "No such file"),
        (["info"], "Missing argument"),
        (["info", "{bad}"], "line 1: header must be"),
        (["info", "{smtx}", "--vector-length", "3"], "vector_length must be one of"),
        (["info", "{smtx}", "--stride", "7"], "stride must be one of"),
        (["spmm", "{smtx}", "--n", "0"], "n must be at least 1, got 0"),
        (["spmm", "{smtx}", "--n", "x"], "Invalid value for '--n'"),
        (["spmm", "{smtx}", "--lhs-bits", "5"], "lhs-bits must be one of"),
        (["spmm", "{smtx}", "--rhs-bits", "0"], "rhs-bits must be one of"),
        (["spmm", "{smtx}", "--device", "?"], "device must be one of cpu, cuda, auto, got '?'"),
        (["bench", "--device", "gpu"], "device must be one of cpu, cuda, auto, got 'gpu'"),
        (["spy", "{smtx}"], "Missing option"),
        (["spy", "{smtx}", "-o", "{folder}/no/such/a.png"], "No such file"),
        (["spy", "{smtx}", "-o", "{folder}/a.nonsense"], "nonsense"),
        (["nonsense"], "No such command"),
    ],
)
def test_a_mistake_is_one_line(smtx: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    if args[0] == "spy":
        pytest.importorskip("matplotlib")
    bad = smtx.parent / "bad.smtx"
    bad.write_text("hello")
    assert message in fail(capsys, *(arg.format(smtx=smtx, bad=bad, folder=smtx.parent) for arg in args))


def test_the_module_exits_with_2_and_no_traceback() -> None:
    command = [sys.executable, "-m", "magicube_cutlass", "info", "missing.smtx"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_the_library_imports_no_command_line() -> None:
    code = "import sys, magicube_cutlass; print(sorted({'typer', 'rich', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_measure_interleaves_baselines_and_bounds_rounds() -> None:
    calls: list[str] = []
    times = measure({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, budget=0, min_runs=3)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"  # a warm-up, then rounds that rotate
    assert {timing.runs for timing in times.values()} == {3}


@pytest.mark.parametrize("size, text", [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB")])
def test_bytes_text(size: int, text: str) -> None:
    assert bytes_text(size) == text
