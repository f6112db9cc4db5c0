"""Dense layers of e4m3 with 128 x 128 scales: products over several tiles, files, conversions, and what multiplies."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.nn import QuantConfig, QuantLinear
from magicube_cutlass.nn.dense import encode
from magicube_cutlass.nn.dense.product import DenseProduct
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor

ACTS = ("e4m3_g128", "e4m3", "none")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def given(rows: int = 200, columns: int = 300) -> ScaledFloatTensor:
    """A weight whose tiles have scales of several magnitudes."""
    return mc.quantize(normal(rows, columns) * normal(rows, 1).exp(), dtype="e4m3_b128")


def tile_scales(weight: ScaledFloatTensor) -> Tensor:
    """The scale of each element, element by element."""
    rows, columns = (torch.arange(size) // 128 for size in weight.shape)
    return weight.scale.double()[rows][:, columns]


@pytest.mark.parametrize("act", ACTS)
def test_a_layer_of_several_tiles_multiplies_its_codes(act: str) -> None:
    weight, bias, x = given(), normal(200, seed=2), normal(7, 300, seed=1)
    layer = QuantLinear.from_quantized(weight, bias, QuantConfig("e4m3_b128", act=act))
    values = weight.data.view(torch.float8_e4m3fn).double() * tile_scales(weight)
    rows = x.double()
    if act != "none":
        top = torch.stack([part.abs().amax(1) for part in x.split(128 if act == "e4m3_g128" else 300, 1)], 1)
        spread = (top / 448).repeat_interleave(128 if act == "e4m3_g128" else 300, 1)[:, :300]
        rows = (x / spread).to(torch.float8_e4m3fn).double() * spread.double()
    want = rows @ values.t() + bias.double()
    got = layer(x)
    assert float((got - want).norm() / want.norm()) < 1e-6
    assert torch.equal(layer.dequantize(), values.float())


def test_other_formats_are_no_weights_of_a_layer() -> None:
    for other in (
        mc.quantize(normal(200, 300), dtype="e2m1", block=(128, 128)),
        mc.quantize(normal(200, 300), dtype="e4m3_g128"),
        mc.quantize(normal(200, 300), dtype="e4m3"),
        mc.quantize(normal(200, 300), dtype="e4m3", block=32),
        given().mT,
    ):
        with pytest.raises(ValueError, match="weight must have scales per row, block of a row or tile"):
            QuantLinear.from_quantized(other)


def test_rows_with_a_scale_per_128_are_closer_than_with_one() -> None:
    x = normal(20, 512) * normal(1, 4, seed=3).mul(3).exp().repeat_interleave(128, 1)
    linear = nn.Linear(512, 256)
    exact, found = linear(x).detach(), {}
    for act in ACTS:
        layer = QuantLinear.from_linear(linear, weight="e4m3_b128", act=act)
        found[act] = float((layer(x).detach() - exact).norm() / exact.norm())
    assert found["none"] < found["e4m3_g128"] <= found["e4m3"] < 0.06


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (384, 128)])
def test_files_and_conversions_keep_the_codes(shape: tuple[int, int], tmp_path: Path) -> None:
    out, inner = shape
    model, x = nn.Sequential(nn.Linear(inner, out), nn.ReLU()), normal(3, inner, seed=1)
    report = mc.convert(model, QuantConfig("e4m3_b128"), freeze=True, progress=False)
    assert report.converted == ("0",)
    layer = model[0]
    assert isinstance(layer, QuantLinear) and layer.scale is not None and layer.qweight is not None
    assert layer.qweight.shape == shape and layer.qweight.dtype == torch.uint8
    assert layer.scale.shape == (-(-out // 128), -(-inner // 128)) and layer.scale.dtype == torch.float32
    bias_bytes = 4 * out
    assert layer.compressed_bytes == out * inner + 4 * layer.scale.numel() + bias_bytes
    with torch.no_grad():
        y = model(x)
        other = nn.Sequential(QuantLinear(inner, out, weight="e4m3_b128").freeze(), nn.ReLU())
        save_model(model, str(tmp_path / "model.safetensors"))
        load_model(other, str(tmp_path / "model.safetensors"))
        assert torch.equal(other(x), y)
        meta = nn.Sequential(nn.Linear(inner, out, device="meta"), nn.ReLU())
        mc.convert(meta, QuantConfig("e4m3_b128"), freeze=True, progress=False)
        meta.load_state_dict(model.state_dict(), assign=True)
        assert torch.equal(meta(x), y)
        weight = layer.dequantize()
        mc.nn.to_dense(model)
        assert type(model[0]) is nn.Linear and torch.equal(model[0].weight, weight)


def test_other_shapes_of_scales_are_refused() -> None:
    layer = QuantLinear(300, 200, weight="e4m3_b128").freeze()
    state = layer.state_dict()
    state["scale"] = state["scale"].t().contiguous()
    with pytest.raises(RuntimeError, match=r"scale must be torch\.float32 of shape \(2, 3\), got .*\(3, 2\)"):
        QuantLinear(300, 200).load_state_dict(state)
    with pytest.raises(ValueError, match="group_size, symmetric and clip must keep their defaults"):
        QuantConfig("e4m3_b128", group_size=128)
    with pytest.raises(ValueError, match=r"act must be one of \('e4m3_g128', 'e4m3', 'none'\).* got 'mxfp8'"):
        QuantConfig("e4m3_b128", act="mxfp8")


def test_a_scale_that_is_no_number_stays_in_its_rows() -> None:
    weight = given()
    weight.scale[1, 2] = math.nan
    y = QuantLinear.from_quantized(weight, config=QuantConfig("e4m3_b128", act="none"))(normal(3, 300))
    assert bool(y[:, 128:].isnan().all() & y[:, :128].isfinite().all())


def test_gradients_pass_the_rounding_straight() -> None:
    layer, x = QuantLinear.from_linear(nn.Linear(300, 200), weight="e4m3_b128"), normal(5, 300).requires_grad_()
    g = normal(5, 200, seed=1)
    of_x, of_weight = torch.autograd.grad(layer(x), (x, layer.weight), g)
    assert torch.allclose(of_x, g @ layer.dequantize(), rtol=1e-4, atol=1e-5)
    rows = mc.quantize(x.detach(), dtype="e4m3_g128").dequantize()
    assert torch.allclose(of_weight, g.t() @ rows, rtol=1e-4, atol=1e-5)


class OnGpu(ScaledFloatTensor):
    """A weight that says it is on a GPU: what a product asks before it multiplies."""

    device = torch.device("cuda")  # type: ignore[assignment]


def on_gpu(rows: int, columns: int) -> OnGpu:
    weight = given(rows, columns)
    return OnGpu(weight.data, weight.k, weight.dtype, weight.scale, block=weight.block)


DEQUANTIZED = "torch.matmul in float32 on the dequantized weight: "


@pytest.mark.parametrize(
    ("arch", "act", "shape", "backend", "text"),
    [
        ("sm_90a", "none", (200, 300), "few_rows", "few-rows product of float16 and bfloat16"),
        ("sm_90a", "e4m3", (200, 300), "scaled_gemm", "scaled GEMM, rows quantized before"),
        (
            "sm_90a",
            "e4m3_g128",
            (208, 512),
            "blockwise",
            "; 129 rows and more to bfloat16 without a bias by torch._scaled_mm with blockwise scales",
        ),
        ("sm_90a", "e4m3_g128", (200, 512), "blockwise", "; torch: blockwise scales need outputs in multiples of 16"),
        ("sm_90a", "e4m3_g128", (208, 300), "blockwise", "inputs in multiples of 512, got 208 and 300"),
        ("sm_80", "none", (200, 300), "torch", DEQUANTIZED + "no kernel for this format here"),
        ("sm_80", "e4m3", (200, 300), "scaled_gemm", "scaled GEMM, rows quantized before"),
        ("sm_80", "e4m3_g128", (208, 512), "torch", DEQUANTIZED + "scales of 128 values need sm_90a, got sm_80"),
    ],
)
def test_what_multiplies_on_a_gpu_and_why(
    arch: str, act: str, shape: tuple[int, int], backend: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGICUBE_ARCH", arch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = DenseProduct(on_gpu(*shape), act)
    assert found.backend == backend and text in found.describe()


def test_explain_says_what_a_layer_on_a_cpu_reads() -> None:
    for act in ACTS:
        found = QuantLinear(208, 512, weight="e4m3_b128", act=act).explain()
        assert found.backend == "torch" and DEQUANTIZED + "no kernel for this format here" in found.text
        assert "it is kept, 425,984 bytes more" in found.text
        assert found.facts["weight_bytes"] == 208 * 512 + 2 * 4 * 4 and f"activations {act}, dynamic" in found.text


@pytest.mark.parametrize("act", ["e4m3", "e4m3_g128"])
def test_rows_are_encoded_by_a_kernel_where_there_is_one(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows:  # what is asked of them
        device = torch.device("cuda")

        def __init__(self, dtype: torch.dtype = torch.bfloat16, size: int = 8) -> None:
            self.dtype, self.size = dtype, size

        def numel(self) -> int:
            return self.size

    def encodes(*args: Any) -> bool:
        rows: Any = Rows(*args)
        return encode.encodes(rows, act)

    monkeypatch.setenv("MAGICUBE_ARCH", "sm_90a")
    assert encodes() and encodes(torch.float32)
    assert not encodes(torch.float64) and not encodes(torch.bfloat16, 0)
    assert not encode.encodes(torch.ones(2, 4), act), "on a CPU"
    monkeypatch.setenv("MAGICUBE_ARCH", "sm_80")
    assert not encodes()


def test_torch_multiplies_rows_with_scales_of_128(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what the layer hands to torch stands for its rows and its weight."""

    def scaled_mm(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
        spread = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, : b.shape[1]]
        return ((a.float() * scale_a.repeat_interleave(128, 1)) @ (b.float() * spread)).to(out_dtype)

    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda a, b, **options: calls.append(a.shape) or scaled_mm(a, b, **options)
    )
    product = QuantLinear.from_quantized(given(144, 1024)).product()
    for dtype, bias, bound, count in (
        (torch.bfloat16, None, 4e-3, 1),
        (torch.bfloat16, normal(144, seed=2), 4e-3, 0),
        (torch.float32, None, 1e-6, 0),
    ):
        x = normal(3, 50, 1024, seed=1).to(dtype)  # more rows than the scaled GEMM takes
        want = product(x, None, bias)
        monkeypatch.setattr(product, "backend", "blockwise")
        got = product(x, None, bias)
        assert got.dtype == dtype and got.shape == (3, 50, 144) and "torch._scaled_mm" in product.describe()
        assert float((got - want).norm() / want.norm()) < bound and len(calls) == count, (dtype, calls)
        monkeypatch.setattr(product, "backend", "torch")
        calls.clear()
