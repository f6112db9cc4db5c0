"""Weights of dense quantized layers in the formats of the few-rows product: what the kernel reads is the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.few_rows import product_int8
from cute_kernels.few_rows.formats import FORMATS, PackedWeight
from magicube_cutlass.nn.config import QuantConfig
from magicube_cutlass.nn.dense import product
from magicube_cutlass.nn.dense.few_rows import few_rows_format, pack_few_rows, takes_int8_rows
from magicube_cutlass.nn.dense.linear import quantize_weight
from magicube_cutlass.nn.dense.product import quantize_act
from magicube_cutlass.quantization.float_tensor import quantize_floats
from magicube_cutlass.quantization.group_tensor import GroupTensor
from tests.kernels.few_rows.model import decode, dense, int8_product, integers

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


@pytest.mark.parametrize("options", INTEGERS, ids=lambda options: "-".join(map(str, options.values())))
def test_the_weight_beside_int8_rows_is_the_layer_s(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    weight = quantize_weight(torch.randn(70, 530) * torch.rand(70, 1), QuantConfig(**options))
    assert takes_int8_rows(weight) == (options["symmetric"] and options["group_size"] not in (16, 32))
    if not options["symmetric"] or options["group_size"] == 16:
        with pytest.raises(ValueError, match="form must have symmetric integers"):
            pack_few_rows(weight, "int8")
        return
    packed = pack_few_rows(weight, "int8")
    codes, scales = integers(packed)
    group = packed.format.group or 530
    got = codes.double() * scales.repeat_interleave(group, 1)[:, :530] * packed.row_scale.double()[:, None]
    want = weight.dequantize().double()
    error = (got - want).abs() / want.abs().amax(1, keepdim=True)
    assert float(error.max()) < (2.0**-11 if packed.format.scale == "half" else 2.0**-22)


@pytest.mark.parametrize("options", INTEGERS, ids=lambda options: "-".join(map(str, options.values())))
def test_int8_rows_are_multiplied_as_integers_where_that_product_exists(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = quantize_weight(torch.randn(70, 530), QuantConfig(**options))
    monkeypatch.setattr(GroupTensor, "device", torch.device("cuda"))
    for arch in ("sm_80", "sm_90a"):
        monkeypatch.setenv("MAGICUBE_ARCH", arch)
        few = "few_rows" if arch == "sm_90a" else "torch"
        whole = options == {"weight": "int8", "group_size": None, "symmetric": True}
        integers = arch == "sm_90a" and options["symmetric"] and options["group_size"] not in (16, 32)
        assert product._backend(weight, "none") == few
        assert product._backend(weight, "int8") == ("gemm" if whole else "few_rows_int8" if integers else few)


def test_sums_that_could_overflow_are_left_to_widened_rows() -> None:
    for k in (product_int8.MAX_K, product_int8.MAX_K + 1):
        scale = torch.ones(1, 1)
        whole = GroupTensor(torch.zeros(1, -(-k // 2), dtype=torch.uint8), scale, None, 4, None, k)
        assert takes_int8_rows(whole) == (k == product_int8.MAX_K)
        groups = GroupTensor(whole.data, scale.expand(1, -(-k // 128)), None, 4, 128, k)
        assert takes_int8_rows(groups), "sums of groups are small"


@pytest.mark.parametrize("group", [None, 64, 128])
def test_a_layer_multiplies_its_int8_rows(group: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = quantize_weight(torch.randn(70, 530), QuantConfig("int4", group_size=group))
    found, calls = product.DenseProduct(weight, "int8"), []

    def exact(x: Tensor, packed: PackedWeight, bias: Tensor | None, **options: Any) -> Tensor:
        calls.append(options["out_dtype"])
        y = int8_product(x, packed, options["row_scale"], bias)
        return y.to(options["out_dtype"])

    monkeypatch.setattr(product_int8, "few_rows_int8_product", exact)
    found.backend = "few_rows_int8"  # as on a GPU
    narrow, rounds = [torch.float16, torch.bfloat16], group == 64
    assert found.describe().endswith("float32 by torch" if rounds else "quantized before")
    bias = torch.randn(70)
    for dtype in (torch.float32, *narrow, torch.float64):
        for act_scale in (None, torch.tensor(0.03)):
            x = torch.randn(2, 3, 530).to(dtype)  # no record: K is no multiple of 16
            rows = quantize_act(x.flatten(0, 1), "int8", act_scale)
            assert rows is not None
            want = rows.dequantize().double() @ weight.dequantize().double().t() + bias.double()
            got = found(x, act_scale, bias)
            assert got.shape == (2, 3, 70) and got.dtype == dtype
            error = float((got.flatten(0, 1).double() - want).norm() / want.norm())
            assert error < (2e-6 if dtype in (torch.float32, torch.float64) else torch.finfo(dtype).eps)
    assert calls == [each for each in ([] if rounds else [torch.float32]) + narrow for _ in range(2)]
    assert found(x[:0].half(), None, bias).shape == (0, 3, 70)
