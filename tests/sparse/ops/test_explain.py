"""Reports are records: prose as str, backend and kernel that the call uses, facts that are JSON."""

from __future__ import annotations

import json

import pytest
import torch

import magicube_cutlass as mc
import residual
from cute_kernels.cpu import engine, extension
from cute_kernels.gemm import explain_gemm
from cute_kernels.scaled_gemm.api import FloatOperand, explain_scaled_gemm

X8 = mc.QuantTensor.from_ints(torch.ones(16, 24, dtype=torch.int8), bits=8)
X16 = mc.QuantTensor.from_ints(torch.ones(16, 24, dtype=torch.int16), bits=16)
A = mc.SRBCRS.from_dense(torch.eye(32, 16, dtype=torch.int8), vector_length=8)


def test_spmm() -> None:
    found = mc.explain(A, X16, out_dtype=torch.int64)
    assert isinstance(found, mc.Explanation) and str(found) == found.text and "CPU engine" in found
    assert (found.operator, found.backend, found.kernel) == ("spmm", "engine", engine.isa())
    assert found.facts["digits"] == (1, 2) and found.facts["columns"] == 24
    json.dumps(found.as_dict())
    predicted = mc.explain(A, X8)
    assert f"{predicted.facts['sparse_us']:.1f} us" in predicted
    floats = mc.explain(mc.SRBCRS.from_dense(torch.eye(16), dtype="float16"), torch.ones(16, 2).half())
    assert (floats.backend, floats.kernel) == ("torch", "CSR")


def test_sddmm() -> None:
    mask = torch.eye(16, dtype=torch.bool)
    found = mc.explain_sddmm(X8, X16, mask)
    assert found.backend == "engine" and found.facts["vectors"] == 16 and "s8 and s16 to int32" in found
    floats16 = mc.explain_sddmm(torch.ones(16, 8).half(), torch.ones(16, 8).half(), mask)
    assert floats16.backend == "torch" and "float16 and float16 to float32" in floats16
    json.dumps(found.as_dict())
    with pytest.raises(ValueError, match="X must have 16 rows"):
        mc.explain_sddmm(X8.mT, X8, mask)


def test_attention_names_the_obstacle() -> None:
    q, mask = torch.randn(2, 32, 16), mc.masks.local(32, 4)
    found = mc.explain_attention(q, q, q, mask)
    assert found.kernel == "fused" and found.backend == "engine" and not found.facts["obstacle"]
    wide = mc.explain_attention(q, q, q, mask, softmax_bits=16)
    assert wide.kernel == "unfused" and "does not support softmax_bits=16" in wide
    assert mc.explain_attention(q, q, q, mask, backend="unfused").kernel == "unfused"
    json.dumps(found.as_dict())
    with pytest.raises(ValueError, match="backend must be None, 'fused' or 'unfused', got 'three'"):
        mc.explain_attention(q, q, q, mask, backend="three")  # type: ignore[arg-type]


def test_residual_names_the_rungs_that_the_call_tries() -> None:
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    found = residual.explain(x, y, tol=1e-3)
    _, report = residual.matmul(x, y, tol=1e-3, return_report=True)
    assert report.plan in found.facts["rungs"] and found.kernel == found.facts["rungs"][0]
    full = residual.explain(x, residual.prepare(y, mode="full"), mode="full", tol=1e-4, on_failure="fallback")
    assert full.facts["rungs"] == ["int8 full", "fp32", "fp64"] and "int8 full (3 integer products), then fp32" in full
    json.dumps(full.as_dict())


def test_dense_plans_have_prose() -> None:
    a = torch.zeros(4, 8, dtype=torch.int8)
    assert str(explain_gemm((a, a), (a.T, a.T), out_dtype=torch.float32)).endswith(": 3 digit products")
    assert str(explain_gemm(a, a.T)).endswith(": 1 digit product")
    operand = FloatOperand(torch.zeros(4, 8, dtype=torch.uint8), "e4m3", k=8)
    assert str(explain_scaled_gemm(operand, operand)) == "torch.matmul"


def test_impl_is_now_backend() -> None:
    q, mask = torch.randn(2, 32, 16), mc.masks.local(32, 4)
    wanted = mc.sparse_attention(q, q, q, mask, backend="unfused")
    for old in ("unfused", "three"):
        with pytest.warns(DeprecationWarning, match=f"impl='{old}' is deprecated; use backend='unfused'") as told:
            assert torch.equal(mc.sparse_attention(q, q, q, mask, impl=old), wanted)
        assert told[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="use backend='fused'"):
        assert mc.nn.SparseQuantAttention(16, 2, mask, impl="fused").backend == "fused"


def test_without_the_engine_reports_name_torch_and_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "ENGINE", None)
    q, x, mask = torch.randn(2, 32, 16), torch.randn(64, 64), torch.eye(16, dtype=torch.bool)
    found = {
        "reference": [mc.explain(A, X8), mc.explain_sddmm(X8, X8, mask)],
        "unfused": [mc.explain_attention(q, q, q, mc.masks.local(32, 4))],
        "int8 full": [residual.explain(x, x, tol=1e-3, mode="full")],
        "fp32": [residual.explain(x, x, tol=1e-3)],
        "int8": [mc.nn.QuantLinear(64, 32, weight="int8").explain()],
    }
    for kernel, reports in found.items():
        for each in reports:
            assert (each.backend, each.kernel) == ("torch", kernel), each
            assert "without the compiled engine" in each or extension.MISSING in each
            assert "CPU engine, " not in each and "reference path" not in each
            assert not {"digits", "order", "sparse_us"} & set(each.facts)
    assert mc.spmm(A, X8).shape == (32, 24) and mc.sddmm(X8, X8, mask).values.any()  # they do run so
    floats = mc.explain(mc.SRBCRS.from_dense(torch.eye(16), dtype="float16"), torch.ones(16, 2).half())
    assert (floats.backend, floats.kernel) == ("torch", "CSR") and extension.MISSING not in floats  # torch's anyway


def test_the_portable_path_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGICUBE_CPU", "portable")
    q, mask = torch.randn(2, 32, 16), torch.eye(16, dtype=torch.bool)
    for found in (mc.explain(A, X8), mc.explain_sddmm(X8, X8, mask)):
        assert (found.backend, found.kernel) == ("engine", "portable") and "CPU engine, portable path" in found
    assert "CPU engine, portable path" in mc.explain_attention(q, q, q, mc.masks.local(32, 4))


def test_residual_names_what_multiplies_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 64)
    assert residual.explain(x, x, tol=1e-3).backend == "torch"  # float32
    assert residual.explain(x, x, mode="direct").backend == ("engine" if engine.available() else "torch")
    for name, backend in (("float32", "torch"), ("engine", "engine")):
        monkeypatch.setenv("MAGICUBE_GEMM", name)
        assert residual.explain(x, x, mode="full").backend == backend
