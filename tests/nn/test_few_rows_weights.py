"""Weights of dense quantized layers in the formats of the few-rows product: what the kernel reads is the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.few_rows.formats import FORMATS
from magicube_cutlass.nn.config import QuantConfig
from magicube_cutlass.nn.dense import product
from magicube_cutlass.nn.dense.few_rows import few_rows_format, pack_few_rows
from magicube_cutlass.nn.dense.linear import quantize_weight
from magicube_cutlass.quantization.float_tensor import quantize_floats
from tests.kernels.few_rows.model import decode, dense

INTEGERS: list[dict[str, Any]] = [
    {"weight": weight, "group_size": group, "symmetric": symmetric}
    for weight in ("int4", "int8")
    for group in (None, 16, 32, 64, 128, 256)
    for symmetric in (True, False)
]
FLOATS = [{"weight": weight} for weight in ("e4m3", "e4m3_b128", "mxfp4", "nvfp4")]


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", INTEGERS + FLOATS, ids=lambda options: "-".join(map(str, options.values())))
def test_the_packed_weight_is_the_layer_s(options: dict[str, Any], act: str) -> None:
    torch.manual_seed(0)
    weight = quantize_weight(torch.randn(70, 530) * torch.rand(70, 1), QuantConfig(**options))
    packed = pack_few_rows(weight, act)
    want = weight.dequantize().double()
    error = (decode(packed) - want).abs() / want.abs().amax(1, keepdim=True)
    eps = torch.finfo(torch.bfloat16 if act == "bfloat16" else torch.float16).eps
    exact = packed.format.scale in ("none", "sum", "power", "e4m3")
    assert float(error.max()) < (2.0**-22 if exact else 2 * eps)
    assert packed.shape == (70, 530) and packed.format.bits == QuantConfig(**options).bits


def test_formats_of_other_float_tensors() -> None:
    x = torch.randn(64, 256)
    for name in ("mxfp6", "mxfp6_e3m2", "e2m1", "e2m3", "e3m2"):
        weight = quantize_floats(x, name, axis=1)
        assert few_rows_format(weight) == name and FORMATS[name].bits == (4 if name == "e2m1" else 6)
        assert torch.allclose(decode(pack_few_rows(weight, "bfloat16")).float(), weight.dequantize(), rtol=1e-6)
    assert few_rows_format(quantize_floats(x, "e5m2", axis=1)) is None
    assert few_rows_format(quantize_floats(x, "e4m3", axis=0)) is None, "scales along the other dimension"
    for name in ("e4m3_b128", "e4m3_g128"):
        assert few_rows_format(quantize_floats(x, name, axis=1)) == "e4m3_g128"
    assert few_rows_format(quantize_floats(x, "e2m1", block=(128, 128))) is None


@pytest.mark.parametrize("act", ["none", "int8"])
def test_many_rows_of_a_weight_only_layer_are_multiplied_by_the_decoded_weight(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight = quantize_weight(torch.randn(70, 530), QuantConfig("int4", group_size=32))
    found = product.DenseProduct(weight, act)
    found.backend = "few_rows"  # as on a GPU
    assert (f"{product.DECODED_ROWS} rows and more by torch" in found.describe()) == (act == "none")
    monkeypatch.setattr(product, "DECODED_ROWS", 32)
    monkeypatch.setattr("cute_kernels.few_rows.decode.decode_weight", dense)
    calls = []
    monkeypatch.setattr("cute_kernels.few_rows.api.few_rows_product", lambda x, *_, **__: calls.append(len(x)) or x)
    x, bias = torch.randn(32, 530).bfloat16(), torch.randn(70)
    assert ("32 rows and more by torch" in found.describe()) == (act == "none")
    found._by_few_rows(x[:31], None, bias)
    assert calls == [31]
    got = found._by_few_rows(x, None, bias)
    if act == "none":
        want = x.double() @ weight.dequantize().double().t() + bias
        assert calls == [31] and got.dtype == x.dtype and got.shape == want.shape
        assert float((got - want).norm() / want.norm()) < 6e-3
    else:
        assert calls == [31, 32], "rows of int8 have scales, and are left to the few-rows product"
