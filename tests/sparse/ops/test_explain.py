"""Reports are records: prose as str, backend and kernel that the call uses, facts that are JSON."""

from __future__ import annotations

import json

import pytest
import torch

import magicube_cutlass as mc
import residual
from cute_kernels.cpu import engine
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
