"""Log, trace, ranges and FLOP counts of calls, which cost nothing if nobody asks for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import magicube_cutlass as mc
import residual
from cute_kernels import watch
from cute_kernels.gemm import gemm
from magicube_cutlass.bench.replay import replay
from magicube_cutlass.cli import main
from tests.house import ROOT

CALLS = """
import sys
import torch
import magicube_cutlass as mc
import residual
from cute_kernels.gemm import gemm
weight = torch.randn(64, 48)
A = mc.SRBCRS.from_dense(weight * mc.prune(weight, 0.5, 8), vector_length=8)
B = mc.quantize(torch.randn(48, 16), 8, "column")
for _ in range(2):
    mc.spmm(A, B, out_dtype=torch.float16)
mc.spmm(A.T, mc.quantize(torch.randn(64, 4), 8))
A @ torch.randn(48, 3)
mc.sddmm(mc.quantize(torch.randn(64, 16), 8, "row"), mc.quantize(torch.randn(48, 16), 8, "row"), A)
q, mask = torch.randn(2, 2, 32, 16), mc.masks.local(32, 4)
mc.sparse_attention(q, q, q, [mask, mc.masks.local(32, 8)], softmax_bits=4)
mc.matmul(mc.quantize(torch.randn(8, 64), dtype="mxfp8", scale="row"),
          mc.quantize(torch.randn(64, 8), dtype="nvfp4", scale="column", block=None))
residual.matmul(torch.randn(8, 8), torch.randn(8, 8), tol=1e-3)
gemm(torch.ones(4, 8, dtype=torch.int8), torch.ones(8, 4, dtype=torch.int8))
mc.nn.SparseQuantLinear.from_linear(torch.nn.Linear(48, 64))(torch.randn(2, 48))
"""


def run(code: str, **variables: str) -> str:
    env = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_without_a_variable_nothing_is_wrapped() -> None:
    assert not (watch.LEVEL or watch.NVTX or watch.TRACE)
    for function in (mc.spmm, mc.sddmm, mc.quantize, mc.sparse_attention, residual.matmul, gemm, mc.autograd.spmm):
        assert not hasattr(function, "__wrapped__")
    assert run(CALLS) == ""


@pytest.mark.parametrize("level", [pytest.param("1", marks=pytest.mark.long), "2", "3"])
def test_the_log_tells_what_its_level_says(level: str) -> None:
    lines = run(CALLS, MAGICUBE_LOG=level).splitlines()
    calls = [
        line for line in lines if "magicube spmm(SRBCRS int8 64x48 V=8 density 0.5, QuantTensor int8 48x16)" in line
    ]
    assert len(calls) == 2
    assert any("magicube spmm(transpose of SRBCRS int8 64x48" in line for line in lines)
    assert any("sparse_attention(Tensor float32 2x2x32x16" in line and "[Pattern 32x32" in line for line in lines)
    assert all(any(f"magicube {name}(" in line for line in lines) for name in ("matmul", "sddmm", "gemm", "forward"))
    assert any("spmm selected cpu" in line for line in lines) == (level != "1")
    assert any("packed operand of" in line for line in lines) == (level == "3")
    assert ("bytes of operands" in calls[0]) == (level == "3")


def test_a_wrong_level_is_told_once_and_logs_nothing() -> None:
    assert run(CALLS, MAGICUBE_LOG="verbose").strip() == "MAGICUBE_LOG must be 1, 2 or 3, got 'verbose'"


def test_a_trace_has_a_file_per_operator_and_shape_and_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(CALLS, MAGICUBE_TRACE=str(tmp_path))
    files = {file.name.rpartition("-")[0] for file in tmp_path.glob("*.json")}
    assert files == {"spmm", "quantize", "multiply", "sddmm", "sparse_attention", "matmul", "gemm"}
    assert not list(tmp_path.glob("*.partial"))
    first = {file.name: file.read_text() for file in tmp_path.glob("spmm-*.json")}
    assert len(first) == 2  # one of the calls twice
    run(CALLS, MAGICUBE_TRACE=str(tmp_path))
    assert len(list(tmp_path.glob("spmm-*.json"))) == len(first)
    found = replay(tmp_path, 0)
    assert all(each.us is not None and each.us > 0 and not each.note for each in found), found
    assert {"magicube_cutlass.spmm", "residual.matmul", "cute_kernels.gemm.gemm"} <= {each.operator for each in found}
    with pytest.raises(SystemExit) as stop:
        main(["bench", str(tmp_path), "--budget", "0", "--json"])
    assert stop.value.code == 0
    assert len(json.loads(capsys.readouterr().out)["results"]) == len(found)
    with pytest.raises(SystemExit):
        main(["bench", str(tmp_path), "--budget", "0"])
    assert "transpose of SRBCRS int8 64x48" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "not a trace"),
        (
            '{"operator": "os.system", "operands": {}, "options": {"command": "true"}}',
            "must be a function of this library",
        ),
        ('{"operator": "residual.matmul"}', "not a trace"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ValueError, match="got none in"):
        replay(tmp_path)
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        replay(tmp_path)


def test_what_cannot_run_here_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    tensor = {"kind": "Tensor", "dtype": "float32", "shape": [4, 4], "strides": [4, 1], "device": "cuda"}
    content = {"operator": "residual.matmul", "operands": {"A": tensor, "B": tensor}, "options": {"tol": 1e-3}}
    (tmp_path / "a.json").write_text(json.dumps(content))
    content["operands"] = {"A": {"kind": "PreparedOperand"}}
    (tmp_path / "b.json").write_text(json.dumps(content))
    gpu, other = replay(tmp_path, 0)
    assert gpu.us is None and "torch finds none" in gpu.note
    assert other.us is None and "PreparedOperand cannot be made anew" in other.note


def test_ranges_are_pushed_and_popped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(watch, "NVTX", True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nvtx.range_push", seen.append)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: seen.append("pop"))

    def fails(x: torch.Tensor) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        watch.watched("package.fails")(fails)(torch.ones(2))
    assert seen == ["magicube.fails", "pop"]


def flops(call: object) -> int:
    with FlopCounterMode(display=False) as counter:
        call()  # type: ignore[operator]
    return counter.get_total_flops()


@pytest.mark.parametrize("warm", [False, True])
def test_counted_flops_are_two_per_stored_element_and_column(warm: bool) -> None:
    pattern = mc.random_pattern(64, 48, 0.7, 8)
    a = mc.SRBCRS.from_dense(torch.randn(64, 48) * pattern.to_dense(), vector_length=8)
    b, nnz = mc.quantize(torch.randn(3, 48, 16), 8, "column"), a.nnz
    out = torch.empty(3, 64, 16)
    x, y = (mc.quantize(torch.randn(n, 20), 8, "row") for n in (64, 48))
    q, mask = torch.randn(2, 3, 40, 16), mc.masks.local(40, 4)
    layer = mc.nn.SparseQuantLinear.from_linear(torch.nn.Linear(48, 64), sparsity=0.5)
    tokens = torch.randn(5, 48)
    A, B = torch.randn(8, 12), torch.randn(12, 4)
    floats16 = mc.SRBCRS.from_dense(a.to_dense(), vector_length=8, dtype="float16")
    cases = {
        "spmm": (lambda: mc.spmm(a, b), 2 * nnz * 16 * 3),
        "spmm out": (lambda: mc.spmm(a, b, out=out), 2 * nnz * 16 * 3),
        "spmm floats": (lambda: mc.spmm(floats16, torch.randn(48, 7).half()), 2 * nnz * 7),
        "sddmm": (lambda: mc.sddmm(x, y, a), 2 * nnz * 20),
        "attention": (lambda: mc.sparse_attention(q, q, q, mask), 2 * mask.nnz * 6 * 32),
        "linear": (lambda: layer.eval()(tokens), 2 * layer.matrix().nnz * 5),
        "residual digits": (lambda: residual.matmul(A, B, mode="direct"), 2 * 8 * 12 * 4),
        "residual": (lambda: residual.matmul(A, B, tol=1e-3), 2 * 8 * 12 * 4),
    }
    for name, (call, expected) in cases.items():
        if warm:
            call()
            call()
        assert flops(call) == expected, name


def test_backward_passes_are_counted() -> None:
    layer = mc.nn.SparseQuantLinear.from_linear(torch.nn.Linear(48, 64), sparsity=0.5)
    x, nnz = torch.randn(5, 48, requires_grad=True), layer.matrix().nnz
    transposed = layer.matrix().pattern.transpose().nnz  # what the gradient of x multiplies, filled in
    assert flops(lambda: layer(x).sum().backward()) == 2 * 5 * (2 * nnz + transposed)
    q, mask = torch.randn(2, 40, 16, requires_grad=True), mc.masks.local(40, 4)
    assert flops(lambda: mc.sparse_attention(q, q, q, mask).sum().backward()) == 2 * mask.nnz * 2 * (2 + 5) * 16
