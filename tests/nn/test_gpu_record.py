"""Which operands the records of layers take: those that no kernel's caller copies, since a replay would not."""

from __future__ import annotations

import pytest
import torch

import magicube_cutlass as mc
from magicube_cutlass.nn.dense import gpu_record
from magicube_cutlass.nn.dense.gpu_record import FloatRecord
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor


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
