"""Commands read matrices of five kinds of files, convert a model's file, and print JSON."""

from __future__ import annotations

import gzip
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import magicube_cutlass as mc
from magicube_cutlass.bench.layers import time_layers
from magicube_cutlass.cli import app, main
from magicube_cutlass.formats.files import read_pattern
from magicube_cutlass.nn.convert_file import convert_file


def run(*args: object) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def dense() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(45, 70, generator=generator)
    values[torch.rand(45, 70, generator=generator) < 0.9] = 0
    values[8:16] = 0
    return values


@pytest.fixture
def files(tmp_path: Path, dense: torch.Tensor) -> Path:
    matrix = scipy.sparse.csr_array(dense.numpy())
    np.save(tmp_path / "a.npy", dense.numpy())
    np.save(tmp_path / "mask.npy", dense.numpy() != 0)
    np.savez(tmp_path / "dense.npz", one=dense.numpy())
    np.savez(tmp_path / "two.npz", one=dense.numpy(), two=dense.numpy()[:8])
    scipy.sparse.save_npz(tmp_path / "a.npz", matrix)
    scipy.io.mmwrite(tmp_path / "a.mtx", matrix)
    (tmp_path / "b.mtx.gz").write_bytes(gzip.compress((tmp_path / "a.mtx").read_bytes()))
    save_file({"w": dense}, tmp_path / "one.safetensors")
    save_file({"w": dense, "bias": dense[0].clone()}, tmp_path / "layer.safetensors")
    save_file({"w": dense.to(torch.float8_e4m3fn)}, tmp_path / "fp8.safetensors")
    mc.SRBCRS.from_dense(dense, vector_length=4).save(tmp_path / "own.safetensors")
    mc.BCRS.from_dense(dense, vector_length=4).save(tmp_path / "bcrs.safetensors")
    mc.Pattern.from_dense(dense != 0, 4).save(tmp_path / "pattern.safetensors")
    mc.write_smtx(tmp_path / "a.smtx", mc.Pattern.from_dense(dense != 0, 4))
    return tmp_path


ELEMENTS = ["a.npy", "mask.npy", "dense.npz", "a.npz", "a.mtx", "b.mtx.gz", "one.safetensors", "layer.safetensors",
            "fp8.safetensors"]  # fmt: skip


@pytest.mark.parametrize("v", [1, 4, 8])
@pytest.mark.parametrize("name", ELEMENTS)
def test_a_file_of_elements_is_the_pattern_of_its_vectors(files: Path, dense: torch.Tensor, name: str, v: int) -> None:
    if name.startswith("fp8"):
        dense = dense.to(torch.float8_e4m3fn).float()
    found = read_pattern(files / name, vector_length=v)
    assert found.pattern.equals(mc.Pattern.from_dense(dense != 0, v))
    assert found.elements == int((dense != 0).sum())


@pytest.mark.parametrize("name", ["own.safetensors", "bcrs.safetensors", "pattern.safetensors"])
def test_own_files_keep_their_vectors(files: Path, dense: torch.Tensor, name: str) -> None:
    assert read_pattern(files / name).pattern.equals(mc.Pattern.from_dense(dense != 0, 4))
    assert read_pattern(files / name, vector_length=8).pattern.equals(mc.Pattern.from_dense(dense != 0, 8))


def test_a_tensor_of_several_is_named(files: Path, dense: torch.Tensor) -> None:
    found = read_pattern(files / "two.npz", tensor="two").pattern
    assert found.equals(mc.Pattern.from_dense(dense[:8] != 0, 8))
    with pytest.raises(ValueError, match=r"two\.npz: tensor must be one of one, two, got None"):
        read_pattern(files / "two.npz")


@pytest.mark.parametrize("name", ["a.mtx", "a.npz", "a.npy", "a.safetensors", "a.smtx"])
def test_a_malformed_file_is_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(b"hello, world")
    with pytest.raises(SystemExit) as stop:
        main(["info", str(tmp_path / name)])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and name in told and told.count("\n") == 1 and len(told) < 400, told


def test_an_array_of_objects_is_not_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "a.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    with pytest.raises(SystemExit):
        main(["info", str(tmp_path / "a.npy")])
    assert "allow_pickle=False" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.npy", "own.safetensors", "a.smtx"])
def test_info_and_spmm_print_json(files: Path, name: str) -> None:
    pattern = read_pattern(files / name, vector_length=4).pattern
    found = json.loads(run("info", files / name, "--vector-length", 4, "--json"))
    assert found["shape"] == list(pattern.shape) and found["vectors"] == pattern.vectors
    assert sum(count for *_, count in found["histogram"]) == pattern.vector_rows
    times = json.loads(run("spmm", files / name, "--n", 3, "--vector-length", 4, "--json"))
    assert times["is_exact"] and times["times"]["spmm"]["median_ms"] > 0 and times["device"] == "cpu"


def test_info_tells_of_fill_in(files: Path) -> None:
    assert "fill-in" in run("info", files / "a.npy") and "fill-in" not in run("info", files / "a.smtx")


def test_json_of_the_other_commands(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGICUBE_CACHE", str(files))
    assert json.loads(run("collect-env", "--json"))["torch"] == version("torch")
    assert json.loads(run("cache", "ls", "--json"))["kernels"] == []
    assert json.loads(run("cache", "clear", "--json"))["removed"] == 0


def test_cuda_needs_a_gpu(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for command in (["spmm", str(files / "a.smtx"), "--n", "3"], ["bench"]):
        with pytest.raises(SystemExit):
            main([*command, "--device", "cuda"])
        assert "torch finds no CUDA device" in capsys.readouterr().err
    assert json.loads(run("spmm", files / "a.smtx", "--n", 3, "--device", "auto", "--json"))["device"] == "cpu"


def test_a_sparse_rival_stands_for_the_layer_of_its_zeros_only() -> None:
    (times,) = time_layers(40, 48, (3,), (0.0, 0.75), budget=0, has_sparse_baselines=True)
    assert {"torch CSR, 0.75", "scipy CSR, 0.75"} <= set(times.us) and "CSR" not in times.baseline
    slow = times._replace(us=dict.fromkeys(times.us, 9.0) | {"scipy CSR, 0.75": 1.0})
    assert slow.baseline_of("ours, 0.75") == "scipy CSR, 0.75" and "CSR" not in slow.baseline_of("ours, 0")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16, bias=False), nn.LayerNorm(16))


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_converted_file_is_the_state_of_the_converted_model(tmp_path: Path, bits: int) -> None:
    config = mc.nn.SparseQuantConfig(sparsity=0.5, vector_length=4, bits=bits)
    source, x = model().eval(), torch.randn(3, 64)
    save_file(source.state_dict(), tmp_path / "m.safetensors")
    report = convert_file(tmp_path / "m.safetensors", tmp_path / "out.safetensors", config)
    mc.convert(source, config, freeze=True)
    other = model().eval()
    mc.convert(other, config, freeze=True)
    for layer in other.modules():  # something else than the file has
        if isinstance(layer, nn.LayerNorm):
            nn.init.zeros_(layer.weight)
    other.load_state_dict(load_file(tmp_path / "out.safetensors"))
    assert {"0.values", "0.bias", "2.values", "3.weight"} <= set(load_file(tmp_path / "out.safetensors"))
    assert "0.weight" not in load_file(tmp_path / "out.safetensors")  # frozen
    assert report.converted == ("0", "2") and torch.equal(other(x), source(x))
    assert report.bytes_after < report.bytes_before


def test_convert_reports_and_leaves_what_it_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"embed.weight": torch.randn(8, 8), "a.weight": torch.randn(8, 8), "b.weight": torch.randn(8, 8)}, path)
    found = json.loads(run("convert", path, "--only", "a", "--only", "embed", "--json"))
    notes = {row["name"]: row["note"] for row in found["layers"]}
    assert notes == {"a": "", "b": "no pattern fits", "embed": "left, as '*embed*' says"} and found["out"] is None
    assert "1 of 3 layers replaced" in " ".join(run("convert", path, "--only", "a").split())
    with pytest.raises(SystemExit):
        main(["convert", str(path), "--only", "nothing"])
    assert "must hold a matrix to convert" in capsys.readouterr().err
