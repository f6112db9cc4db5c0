"""Which operands the records of layers take: those that no kernel's caller copies, since a replay would not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import magicube_cutlass as mc
from magicube_cutlass.nn.dense import gpu_record
from magicube_cutlass.nn.dense.encode import folds_scales
from magicube_cutlass.nn.dense.gpu_record import FloatRecord, GemmRecord
from magicube_cutlass.nn.dense.product import DenseProduct
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor
from magicube_cutlass.quantization.group_tensor import quantize_groups


@pytest.mark.parametrize(
    ("dtype", "act", "inner", "taken"),
    [
        ("mxfp4", "mxfp8", 64, True),
        ("mxfp4", "mxfp8", 48, False),  # 24 bytes a row
        ("mxfp6", "mxfp8", 64, True),
        ("mxfp6", "mxfp8", 32, False),
        ("mxfp8", "nvfp4", 64, True),
        ("mxfp8", "nvfp4", 48, False),
        ("e4m3_b128", "e4m3_g128", 48, True),
        ("e4m3_b128", "e4m3_g128", 40, False),
    ],
)
def test_rows_of_bytes_that_a_product_would_copy_are_not_recorded(
    dtype: str, act: str, inner: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_record, "encodes", lambda x, act: True)
    weight = mc.quantize(torch.randn(40, inner), dtype=dtype)
    assert isinstance(weight, ScaledFloatTensor)
    assert FloatRecord.takes(weight, act, torch.randn(5, inner), None) == taken


def test_scales_that_a_product_would_copy_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_record, "encodes", lambda x, act: True)
    weight = mc.quantize(torch.randn(40, 512), dtype="mxfp4")
    assert isinstance(weight, ScaledFloatTensor)
    for at, taken in ((0, True), (8, False)):
        moved = torch.empty(40 * 16 + 16, dtype=torch.uint8)[at : at + 40 * 16].view(40, 16).copy_(weight.scale)
        assert FloatRecord.takes(replace(weight, scale=moved), "mxfp8", torch.randn(5, 512), None) == taken


def test_rows_of_integers_that_a_product_would_copy_are_not_recorded() -> None:
    weight = quantize_groups(torch.randn(40, 64), 8)
    for at, taken in ((0, True), (1, False)):
        rows = torch.zeros(5 * 64 + 1, dtype=torch.int8)[at : at + 5 * 64].view(5, 64)
        assert GemmRecord.takes(weight, rows, torch.ones(())) == taken
        record = GemmRecord(weight, None, rows, torch.float32, None, None, False)
        record._replays = SimpleNamespace(run=lambda *_: None)  # type: ignore[assignment]
        assert (record(rows, torch.ones(()), None) is not None) == taken
    assert GemmRecord.takes(weight, torch.zeros(5 * 64 + 1)[1:].view(5, 64), None), "floats are read at any address"


@pytest.mark.parametrize(
    ("dtype", "act", "arch", "folded"),
    [
        ("mxfp4", "mxfp8", "sm_90a", True),
        ("mxfp4", "e4m3", "sm_90a", True),
        ("mxfp4", "nvfp4", "sm_90a", False),
        ("nvfp4", "mxfp8", "sm_90a", False),
        ("e4m3", "e4m3", "sm_90a", False),
        ("mxfp4", "mxfp8", "sm_80", False),
    ],
)
def test_what_is_folded_is_told(dtype: str, act: str, arch: str, folded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGICUBE_ARCH", arch)
    weight = mc.quantize(torch.randn(40, 64), dtype=dtype)
    assert isinstance(weight, ScaledFloatTensor)
    assert folds_scales(weight, act) == folded
    product = DenseProduct(weight, act)
    monkeypatch.setattr(product, "backend", "scaled_gemm")
    assert ("ue8m0 scales become part of e4m3 values" in product.describe()) == folded
