"""Quantization to small floats: scales by their definition, errors by the formats' steps, layouts, products."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels import floats
from cute_kernels.floats import FORMATS
from cute_kernels.scaled_gemm import api
from magicube_cutlass.quantization import float_tensor
from magicube_cutlass.quantization.float_tensor import RECIPES, ScaledFloatTensor, matmul

KINDS: list[dict[str, Any]] = [
    {"dtype": "e4m3"}, {"dtype": "e5m2", "scale": "row"}, {"dtype": "e2m3", "scale": "column"}, {"dtype": "e2m1", "block": (128, 128)},
    {"dtype": "e2m1", "block": 16}, {"dtype": "e3m2", "block": 16, "scale_dtype": "ue8m0", "scale": "column"},
    {"dtype": "e4m3", "block": 32, "scale_dtype": "e4m3"}, *({"dtype": name} for name in RECIPES),
    {"dtype": "mxfp4", "scale": "column"}, {"dtype": "nvfp4", "scale": "column"},
]  # fmt: skip


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # magnitudes of several orders, so that blocks differ
    return torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))


def quantized(x: Tensor, **options: Any) -> ScaledFloatTensor:
    found = mc.quantize(x, **options)
    assert isinstance(found, ScaledFloatTensor)
    return found


def spacing(values: Tensor, dtype: str) -> Tensor:
    """Of the format's values around these magnitudes."""
    kind = FORMATS[dtype]
    exponent = torch.frexp(values.double()).exponent - 1
    return 2.0 ** (exponent.clamp(1 - kind.bias, kind.largest_exponent) - kind.mantissa).double()


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_each_element_is_within_half_a_step_of_its_scaled_format(options: dict[str, Any]) -> None:
    x = normal(150, 200)
    found = quantized(x, **options)
    assert found.shape == x.shape and found.codes().shape == x.shape
    scales = found.dequantize().double() / floats.decode(found.codes(), found.dtype).double()
    scales = torch.where(scales.isnan(), 0, scales)  # codes of zero tell nothing
    elements = x.double() / torch.where(scales == 0, 1, scales)
    elements = torch.where(scales == 0, 0, elements)
    top = FORMATS[found.dtype].largest
    inside = elements.abs() <= top
    error = (floats.decode(found.codes(), found.dtype).double() - elements).abs()
    assert bool((error[inside] <= spacing(elements.abs(), found.dtype)[inside] / 2 * (1 + 1e-6)).all())
    saturated = floats.decode(found.codes(), found.dtype).abs()[~inside]
    assert bool((saturated == top).all())
    # A power of two may leave the largest out by less than twice, an e4m3 scale by its rounding.
    limit = {"float32": 1 + 1e-6, "e4m3": 1 + 2**-4 + 1e-6, "ue8m0": 2.0}[found.scale_dtype]
    assert float(elements.abs().max()) <= top * limit


def test_scales_are_what_the_standards_say() -> None:
    x = torch.zeros(2, 64)
    x[0, 3], x[0, 40], x[1, 0] = 5.0, -0.75, 448.0
    found = quantized(x, dtype="mxfp8")
    assert floats.decode(found.scale, "ue8m0").tolist() == [[2.0 ** (2 - 8), 2.0 ** (-1 - 8)], [1.0, 1.0]]
    assert torch.equal(found.dequantize(), x)
    nv = quantized(x, dtype="nvfp4")
    assert nv.tensor_scale is not None and float(nv.tensor_scale) == pytest.approx(448 / (448 * 6), rel=1e-6)
    assert float(nv.scales()[1, 0]) == pytest.approx(448 / 6, rel=1e-6) and nv.scale.shape == (2, 4)
    blocks = floats.encode(torch.tensor(5.0 / 6) / nv.tensor_scale, "e4m3")
    assert int(nv.scale[0, 0]) == int(blocks)
    rows = quantized(x, dtype="e2m1", scale="row")
    assert rows.scale.flatten().tolist() == pytest.approx([5.0 / 6, 448 / 6])
    tiles = quantized(normal(200, 300), dtype="e4m3", block=(128, 128))
    assert tiles.scale.shape == (2, 3)
    tops = normal(200, 300)[128:, 256:].abs().max() / 448
    assert float(tiles.scale[1, 2]) == pytest.approx(float(tops))


def test_tiny_and_zero_blocks_keep_their_accuracy() -> None:
    x = normal(4, 64)
    x[1] *= 1e-36
    x[2] = 0
    for options in ({"dtype": "mxfp8"}, {"dtype": "e4m3", "scale": "row"}):
        found = quantized(x, **options).dequantize()
        relative = (found - x).norm(dim=1) / x.norm(dim=1).clamp(min=1e-45)
        assert float(relative[0]) < 0.05 and float(relative[1]) < 0.05 and not bool(found[2].any())
    assert not bool(quantized(torch.zeros(3, 40), dtype="nvfp4").dequantize().any())


def test_a_block_far_below_the_largest_keeps_the_smallest_scale() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 1.0, 0.8 * 2.0**-10 / 448  # rounded, its scale would be zero
    found = quantized(x, dtype="nvfp4")
    assert int(found.scale[0, 1]) == 1
    assert float(found.dequantize()[0, 16]) == pytest.approx(float(x[0, 16]), rel=0.2)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_infinities_and_nan_spoil_their_slice_alone(options: dict[str, Any]) -> None:
    x = normal(150, 200)
    clean = quantized(x, **options).dequantize()
    spoiled = x.clone()
    spoiled[3, 5] = math.inf
    with pytest.raises(ValueError, match="x must be finite in float32, got 1 inf or nan of 30000 entries"):
        quantized(spoiled, **options)
    found = quantized(spoiled, **options, nonfinite="propagate").dequantize()
    lost = found.isnan()
    assert bool(lost[3, 5])
    if "scale" in options or options["dtype"] in RECIPES or "block" in options:
        assert int(lost.sum()) < 150 * 200
        if (
            "e4m3" not in (options.get("scale_dtype"), RECIPES.get(options["dtype"], ("", 0, ""))[2])
            and options.get("block") != 16
        ):
            assert torch.equal(found[~lost], clean[~lost])


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_transposes_devices_and_batches_agree(options: dict[str, Any]) -> None:
    x = normal(2, 40, 70)
    found = quantized(x, **options)
    if options["dtype"] not in ("nvfp4", "e4m3") and options.get("block") != 16:  # one scale for both matrices
        single = quantized(x[1], **options)
        assert torch.equal(found.dequantize()[1], single.dequantize())
    assert torch.equal(found.mT.dequantize(), found.dequantize().mT) and found.mT.shape == (2, 70, 40)
    flipped = quantized(x.mT.contiguous().mT, **options)
    assert torch.equal(flipped.dequantize(), found.dequantize())
    assert found.to("cpu").nbytes == found.nbytes and "ScaledFloatTensor" in repr(found)


def test_bytes_are_those_of_the_formats() -> None:
    x = normal(128, 256)
    expected = {
        "mxfp8": 8.25,
        "mxfp6": 6.25,
        "mxfp4": 4.25,
        "nvfp4": 4.5,
        "e4m3_g128": 8.25,
        "e4m3_b128": 8 + 32 / 128**2,
    }
    for name, bits in expected.items():
        found = quantized(x, dtype=name)
        extra = 0 if found.tensor_scale is None else 4
        assert (found.nbytes - extra) * 8 / x.numel() == bits


@pytest.mark.parametrize("left", KINDS, ids=str)
def test_products_are_those_of_the_dequantized_matrices(left: dict[str, Any]) -> None:
    a = quantized(normal(30, 140), **(left | {"scale": "row" if left.get("scale") == "column" else left.get("scale")}))
    bias = normal(50, seed=3)
    for right in (
        {"dtype": "e2m1", "scale": "column"},
        {"dtype": "nvfp4", "scale": "column"},
        {"dtype": "e3m2", "block": (128, 128)},
    ):
        b = quantized(normal(140, 50, seed=1), **right)
        truth = a.dequantize().double() @ b.dequantize().double() + bias.double()
        for out in (torch.float32, torch.float16, torch.bfloat16):
            got = matmul(a, b, bias=bias, out_dtype=out)
            size = a.dequantize().double().abs() @ b.dequantize().double().abs() + bias.double().abs()
            bound = torch.finfo(out).eps * truth.abs() + 2.0**-18 * size
            assert got.dtype == out and bool(((got.double() - truth).abs() <= bound)[truth.abs() < 6e4].all())


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_empty_tensors(options: dict[str, Any], size: tuple[int, int]) -> None:
    found = quantized(torch.zeros(size), **options)
    assert found.shape == size and found.dequantize().shape == size


def exact(found: ScaledFloatTensor, block: tuple[int, int]) -> Tensor:
    """Codes times scales in float64, element by element."""
    codes = found.data.view(torch.float8_e4m3fn).double()
    rows, columns = (torch.arange(size) // each for size, each in zip(codes.shape, block, strict=True))
    return codes * found.scale.double()[rows][:, columns]


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (300, 520)])
@pytest.mark.parametrize("name", ["e4m3_b128", "e4m3_g128"])
def test_blocks_of_128_are_the_amax_of_each_over_448(name: str, shape: tuple[int, int]) -> None:
    x, block = normal(*shape), (128 if name == "e4m3_b128" else 1, 128)
    x[: shape[0] // 2, 128:256] = 0
    found = quantized(x, dtype=name)
    assert found.scale.shape == tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
    for i, rows in enumerate(x.split(block[0])):
        for j, part in enumerate(rows.split(128, 1)):
            top = float(part.abs().max())
            assert float(found.scale[i, j]) == (1.0 if top == 0 else float(torch.tensor(top / 448).float()))
            want = (part.double() / found.scale[i, j].double()).clamp(-448, 448).float().to(torch.float8_e4m3fn)
            got = found.data[i * block[0] : (i + 1) * block[0], j * 128 : (j + 1) * 128]
            assert torch.equal(got, want.view(torch.uint8))
    assert torch.equal(found.dequantize(), exact(found, block).float()), "one rounding"


@pytest.mark.parametrize("name", ["e4m3_b128", "e4m3_g128"])
def test_given_codes_keep_every_scale(name: str) -> None:
    x = normal(200, 300)
    made = quantized(x, dtype=name)
    scale = made.scale.clone()
    scale[0, 0], scale[0, 1], scale[1, 0], scale[1, 2] = 0, math.nan, math.inf, 2.0**-140
    codes = made.data.view(torch.float8_e4m3fn)
    for given in (codes, codes.view(torch.uint8), codes.t().contiguous().t()):
        found = ScaledFloatTensor.from_codes(given, scale, name)
        want = exact(found, (128 if name == "e4m3_b128" else 1, 128)).float()
        assert torch.equal(found.dequantize().nan_to_num(), want.nan_to_num())
        assert torch.equal(found.dequantize().isnan(), want.isnan()) and bool(want.isnan().any())


CODES = torch.zeros(200, 300, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("codes", "scale", "name", "error", "match"),
    [
        (CODES, torch.ones(2, 3), "mxfp8", ValueError, "dtype must be one of e4m3, e4m3_b128, e4m3_g128, got 'mxfp8'"),
        (CODES.int(), torch.ones(2, 3), "e4m3_b128", TypeError, "codes must be float8_e4m3fn or uint8, got torch.int32"),
        (CODES[0], torch.ones(2, 3), "e4m3_b128", ValueError, "codes must have 2 dimensions, got 1"),
        (CODES, torch.ones(2, 3).half(), "e4m3_b128", TypeError, "scale must be float32, got torch.float16"),
        (CODES, torch.ones(3, 2), "e4m3_b128", ValueError, "scale must have shape (2, 3) for e4m3_b128 codes of shape (200, 300), got (3, 2)"),
        (CODES, torch.ones(2, 3), "e4m3_g128", ValueError, "scale must have shape (200, 3) for e4m3_g128 codes"),
        (CODES, torch.ones(200), "e4m3", ValueError, "scale must have shape (200, 1) for e4m3 codes"),
        (CODES, torch.ones(2, 3, device="meta"), "e4m3_b128", ValueError, "scale must be on cpu as codes is, got meta"),
    ],
)  # fmt: skip
def test_bad_codes_are_named(codes: Tensor, scale: Tensor, name: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=re.escape(match)):
        ScaledFloatTensor.from_codes(codes, scale, name)


def test_rows_with_scales_of_128_are_multiplied() -> None:
    a, b = quantized(normal(4, 300), dtype="e4m3_g128"), quantized(normal(300, 200), dtype="e4m3_b128")
    assert a.operand().format.name == "e4m3x128float32"
    truth = a.dequantize().double() @ b.dequantize().double()
    assert float((matmul(a, b).double() - truth).norm() / truth.norm()) < 1e-6
    with pytest.raises(ValueError, match="bias"):
        matmul(a, b, bias=torch.ones(3))
    with pytest.raises(TypeError, match="out_dtype"):
        matmul(a, b, out_dtype=torch.int32)


@pytest.mark.parametrize("dtype", ["e4m3", "e2m1", *RECIPES])
def test_pieces_are_those_of_the_whole(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 301, 260, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.01, 90, 301)[:, None]
    found = []
    for piece in (1 << 30, 260 * 50, 1):  # 50 rows and 1 row at a time; a tile has 128
        monkeypatch.setattr(float_tensor, "_PIECE", piece)
        found += [quantized(x, dtype=dtype, scale=scale) for scale in ("row", "column")]
    for whole, other in zip(found[:2] * 2, found[2:], strict=True):
        assert torch.equal(whole.data, other.data) and torch.equal(whole.scale, other.scale)


class OnGpu(ScaledFloatTensor):
    """A tensor that says that it is on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


@pytest.mark.parametrize(
    ("a", "b", "arch", "has_kernel"),
    [
        ("e4m3_g128", "e4m3_b128", "sm_90a", True),
        ("e4m3_g128", "e4m3", "sm_90a", True),
        ("e4m3_g128", "e4m3_b128", "sm_80", False),
        ("e4m3_g128", "mxfp4", "sm_90a", False),
        ("e4m3_g128", "e4m3_g128", "sm_90a", False),
        ("e4m3", "e4m3_g128", "sm_90a", False),
        ("mxfp8", "mxfp4", "sm_80", True),
    ],
)
def test_scales_of_128_have_a_kernel_where_it_has_run(
    a: str, b: str, arch: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGICUBE_ARCH", arch)
    calls: list[str] = []
    monkeypatch.setattr(api, "scaled_gemm", lambda *_, **__: calls.append("kernel"))
    monkeypatch.setattr(float_tensor, "_dequantized_product", lambda *_: calls.append("torch"))
    left, right = quantized(normal(4, 256), dtype=a), quantized(normal(128, 256), dtype=b)
    here = [OnGpu(x.data, x.k, x.dtype, x.scale, x.scale_dtype, x.block, x.tensor_scale) for x in (left, right)]
    matmul(here[0], here[1].mT)
    assert calls == ["kernel" if has_kernel else "torch"]


X = torch.ones(4, 6)
Q = quantized(X, dtype="e2m1", scale="row")


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: mc.quantize(X), ValueError, "bits or dtype must be given, got neither"),
        (lambda: mc.quantize(X, 8, dtype="e2m1"), ValueError, "bits must be None for dtype 'e2m1', got 8"),
        (lambda: mc.quantize(X, dtype="e2m1", signed=False), ValueError, "signed must be True for dtype 'e2m1', got False"),
        (lambda: mc.quantize(X, dtype="e2m1", clip="mse"), ValueError, "clip must be 'max' for dtype 'e2m1', got 'mse'"),
        (lambda: mc.quantize(X, 8, block=16), ValueError, "dtype must be given with block and scale_dtype, got block 16"),
        (lambda: mc.quantize(X, dtype="e1m2"), ValueError, "dtype must be one of e5m2, e4m3, e3m2, e2m3, e2m1, mxfp8, "),
        (lambda: mc.quantize(X, dtype="e2m1", block=8), ValueError, "block must be None, 16, 32, 128 or (128, 128), got 8"),
        (lambda: mc.quantize(X, dtype="e4m3_g128", block=128), ValueError, "block and scale_dtype must be None for dtype 'e4m3_g128'"),
        (lambda: mc.quantize(X, dtype="e4m3", block=128, scale_dtype="ue8m0"), ValueError, "scale_dtype must be one of float32 for block 128, got 'ue8m0'"),
        (lambda: mc.quantize(X, dtype="e2m1", block=16, scale_dtype="float32"), ValueError, "scale_dtype must be one of e4m3, ue8m0 for block 16, got 'float32'"),
        (lambda: mc.quantize(X, dtype="nvfp4", block=32), ValueError, "block and scale_dtype must be None for dtype 'nvfp4'"),
        (lambda: mc.quantize(X, dtype="e2m1", scale="block"), ValueError, "scale must be 'tensor', 'row' or 'column'"),
        (lambda: mc.quantize(X.int(), dtype="e2m1"), TypeError, "x must be float64, float32, float16 or bfloat16, got torch.int32"),
        (lambda: mc.quantize(X[0], dtype="e2m1"), ValueError, "x must have at least 2 dimensions, got 1"),
        (lambda: matmul(Q, Q), ValueError, "columns of a must be rows of b, got 6 and 4"),
        (lambda: matmul(Q, quantized(X.T, dtype="e2m1", scale="row")), ValueError, "b must be quantized with scale='column', along the k of the product, got 'row'"),
        (lambda: matmul(X, Q), TypeError, "a must be a ScaledFloatTensor, got Tensor"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=re.escape(match)):
        call()
