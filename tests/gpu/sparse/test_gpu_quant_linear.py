"""Dense quantized layers on a GPU: what the CPU computes, in every format, in graphs and through the compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magicube_cutlass as mc
from cute_kernels.gemm.epilogue import activate
from magicube_cutlass.nn import QuantLinear
from magicube_cutlass.nn.dense import product
from tests.gpu.problems import needs_warp_groups
from tests.nn.test_fuse_glu import made

pytestmark = pytest.mark.gpu

FORMATS: list[dict[str, Any]] = [
    {"weight": "int8"},
    {"weight": "int4", "group_size": 32},
    {"weight": "int4", "group_size": 64, "symmetric": False},
    {"weight": "e4m3"},
    {"weight": "mxfp4"},
    {"weight": "nvfp4"},
    {"weight": "int4", "group_size": 128, "act": "none"},
    {"weight": "int8", "act": "none"},
    {"weight": "mxfp4", "act": "none"},
    {"weight": "nvfp4", "act": "none"},
    {"weight": "e4m3", "act": "none"},
    {"weight": "e4m3_b128", "act": "none"},
    {"weight": "e4m3_b128", "act": "e4m3"},
]
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
BACKENDS = {"int8": "gemm", "int4": "few_rows"}  # of layers that quantize their rows; the others scaled_gemm


def name_of(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


def layer_of(options: dict[str, Any], dtype: torch.dtype = torch.float32, inner: int = 256) -> QuantLinear:
    torch.manual_seed(0)
    return QuantLinear.from_linear(nn.Linear(inner, 192, dtype=dtype), **options).eval()


def exact(layer: QuantLinear, x: Tensor) -> Tensor:
    """The product of the layer's own integers or codes, in float64."""
    from magicube_cutlass.nn.dense.product import quantize_act

    rows = quantize_act(x, layer.act, layer.act_scale)
    values = x.double() if rows is None else rows.dequantize().double()
    y = values @ layer.dequantize().double().T
    return y if layer.bias is None else y + layer.bias.double()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("options", FORMATS, ids=name_of)
def test_a_layer_gives_the_product_of_its_codes(options: dict[str, Any], dtype: torch.dtype) -> None:
    on_cpu = layer_of(options, dtype)
    layer = copy.deepcopy(on_cpu).cuda().eval()
    backend = "few_rows" if layer.act == "none" else BACKENDS.get(options["weight"], "scaled_gemm")
    assert layer.explain().backend == backend
    assert torch.equal(layer.product().weight.data.cpu(), on_cpu.product().weight.data)
    assert torch.allclose(layer.dequantize().cpu(), on_cpu.dequantize(), rtol=2e-7, atol=0)
    for rows in (1, 16, 100):
        x = torch.randn(rows, 256, dtype=dtype)
        with torch.no_grad():
            got = layer(x.cuda())
        want = exact(layer, x.cuda())
        assert got.dtype == dtype and got.shape == want.shape
        coarse = layer.act != "int8" and backend != "few_rows"
        assert float((got.double() - want).norm() / want.norm()) < max(BOUNDS[dtype], 2e-3 * coarse)
        assert float((got.cpu().double() - on_cpu(x).double()).norm() / want.norm()) < 2 * max(BOUNDS[dtype], 2e-3)


@needs_warp_groups
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("act", "inner", "backend"),
    [("none", 1024, "few_rows"), ("e4m3", 1024, "scaled_gemm"), ("e4m3_g128", 1024, "blockwise"),
     ("e4m3_g128", 640, "blockwise")],
)  # fmt: skip
def test_a_tile_scaled_layer_gives_the_product_of_its_codes(
    act: str, inner: int, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "DECODED_ROWS", 90)
    layer = layer_of({"weight": "e4m3_b128", "act": act}, dtype, inner)
    with torch.no_grad():
        layer.weight.mul_(torch.randn(192, 1).exp())
    layer = layer.cuda().eval()
    assert layer.explain().backend == backend, layer.explain().text
    for rows in (1, 16, 23, 100, 140, 150):
        if rows == 150:  # by torch, where it takes the weight
            layer.bias = None
        x = (torch.randn(rows, inner) * torch.randn(inner).exp()).to(dtype).cuda()
        with torch.no_grad():
            got, again = layer(x), layer(x)
        want = exact(layer, x)
        assert got.dtype == dtype and got.shape == want.shape and torch.equal(got, again)
        coarse = backend in ("scaled_gemm", "blockwise")
        assert float((got.double() - want).norm() / want.norm()) < max(BOUNDS[dtype], 2e-3 * coarse), rows


@needs_warp_groups
def test_a_graph_replays_a_blockwise_product() -> None:
    layer = layer_of({"weight": "e4m3_b128"}, torch.bfloat16, 1024).cuda().eval().freeze()
    x = torch.randn(23, 1024, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        layer(x)
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, layer(x))


WEIGHT_ONLY = [options for options in FORMATS if options.get("act") == "none"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", WEIGHT_ONLY, ids=name_of)
def test_many_rows_are_multiplied_by_the_decoded_weight(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "DECODED_ROWS", 512)
    layer = layer_of(options, dtype, 520).cuda().eval().freeze()
    assert "512 rows and more" in layer.explain().text
    x = torch.randn(7, 100, layer.in_features, device="cuda", dtype=dtype)
    with torch.inference_mode():
        layer(x)  # packs the weight
        memory = torch.cuda.memory_allocated()
        got = layer(x)
        assert torch.cuda.memory_allocated() - memory <= got.nbytes + 512, "the decoded weight is not kept"
        few = torch.cat([layer(each) for each in x.flatten(0, 1).split(350)])
    want = exact(layer, x.flatten(0, 1))
    assert got.dtype == dtype and got.shape == (7, 100, layer.out_features)
    for each in (got.flatten(0, 1), few):
        assert float((each.double() - want).norm() / want.norm()) < BOUNDS[dtype]
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(x.flip(0))
        graph.replay()
        assert float((y.flip(0).flatten(0, 1).double() - want).norm() / want.norm()) < BOUNDS[dtype]


@pytest.mark.parametrize("options", FORMATS, ids=name_of)
def test_gradients_are_the_cpu_s(options: dict[str, Any]) -> None:
    found = []
    for device in ("cpu", "cuda"):
        layer = layer_of(options).to(device).train()
        x = torch.randn(24, 256, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        layer(x).square().sum().backward()
        assert layer.weight is not None and layer.bias is not None
        found.append([x.grad, layer.weight.grad, layer.bias.grad])
    for cpu, gpu in zip(*found, strict=True):
        assert cpu is not None and gpu is not None
        assert float((gpu.cpu() - cpu).norm() / cpu.norm()) < 4e-3


@pytest.mark.parametrize("options", FORMATS, ids=name_of)
def test_a_graph_replays_a_layer_on_other_inputs(options: dict[str, Any]) -> None:
    layer = layer_of(options, torch.float16).cuda().eval().freeze()
    x, others = (torch.randn(rows, 256, device="cuda", dtype=torch.float16) for rows in (16, 48))
    with torch.inference_mode():
        for _ in range(3):
            layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for other in others.split(16):
            x.copy_(other)
            graph.replay()
            assert torch.equal(y, layer(other))


def test_warm_calls_see_other_inputs_biases_and_scales() -> None:
    static = QuantLinear.from_linear(
        nn.Linear(256, 192, device="cuda"), calibrate=[torch.randn(64, 256, device="cuda")]
    )
    for layer in (layer_of({"weight": "int8"}).cuda().eval().freeze(), static.eval().freeze()):
        with torch.inference_mode():
            for turn in range(6):
                x = torch.randn(16, 256, device="cuda") * (1 + turn)
                near = float((layer(x).double() - exact(layer, x)).norm() / exact(layer, x).norm())
                assert near < BOUNDS[torch.float32]
            assert layer.bias is not None
            layer.bias.add_(1)
            assert float((layer(x).double() - exact(layer, x)).norm() / exact(layer, x).norm()) < BOUNDS[torch.float32]


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_an_activation_is_part_of_an_int8_product(activation: Any, dtype: torch.dtype) -> None:
    layer = layer_of({"weight": "int8", "activation": activation}, dtype).cuda().eval().freeze()
    assert "in its epilogue" in str(layer.explain())
    for rows in (1, 100):
        x = torch.randn(rows, 256, device="cuda", dtype=dtype)
        want = activate(exact(layer, x), activation)
        with torch.inference_mode():
            y = layer(x)
        assert y.dtype == dtype and float((y.double() - want).norm() / want.norm()) < BOUNDS[dtype]


def mlp(dtype: torch.dtype) -> tuple[nn.Sequential, Tensor]:
    """Two layers, the second with a static scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 256)).to("cuda", dtype).eval()
    x = torch.randn(70, 256, device="cuda", dtype=dtype)
    mc.convert(model, mc.nn.QuantConfig("int8"), freeze=True, calibrate=[x], progress=False)
    assert isinstance(model[0], QuantLinear)
    model[0].act_scale = None
    return model, x


def replayed(model: nn.Module, x: Tensor) -> Tensor:
    """The output of a graph that was captured with other rows in `x`: that of a call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z: Tensor = model(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(z, model(x))
    return z


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_layer_writes_the_integers_of_the_next(dtype: torch.dtype, compiled: Callable[..., Any]) -> None:
    model, x = mlp(dtype)
    first, second = model[0], model[2]
    assert isinstance(first, QuantLinear) and isinstance(second, QuantLinear)
    with torch.inference_mode():
        want = model(x)
        assert mc.nn.fuse_activations(model, x) == {"0": "gelu"}
        assert mc.nn.fuse_quantization(model, x) == {"0": "2"}
        assert "writes int8" in str(first.explain())
        for _ in range(3):  # recorded, then replayed
            y = model(x)
            assert first(x).dtype == torch.int8 and y.dtype == dtype
            assert float((y.double() - want.double()).norm() / want.double().norm()) < 1e-2
        again = compiled(model)(x)  # a compiler's quotient may round to the next integer
        assert torch.equal(again, y) or dtype != torch.float32
        assert float((again.double() - y.double()).norm() / y.double().norm()) < 1e-2
        z = replayed(model, x)
        assert second.act_scale is not None
        second.act_scale *= 2
        again = model(x)
        assert not torch.equal(z, again)
        assert float((z.double() - again.double()).norm() / z.double().norm()) < 4e-2


@needs_warp_groups
@pytest.mark.parametrize(("calibrated", "smooth"), [(False, None), (True, None), (False, 0.7), (True, 0.7)])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_joint_product_of_a_gated_mlp_gates_its_results(
    dtype: torch.dtype, calibrated: bool, smooth: float | None, compiled: Callable[..., Any]
) -> None:
    model, x = made(calibrated=calibrated, smooth=smooth)
    model, x = model.to("cuda", dtype), torch.randn(70, 64, device="cuda", dtype=dtype)
    with torch.inference_mode():
        want = model(x)
        assert len(mc.nn.fuse_glu(model, x)) == 2
        for _ in range(3):  # recorded, then replayed
            y = model(x)
            assert y.dtype == dtype and float((y.double() - want.double()).norm() / want.double().norm()) < 1e-2
        assert "multiplies the results of the second" in str(model.mlps[0].gate.explain())
        assert model.mlps[0].gate._joint.takes_glu(x)
        again = compiled(model)(x)
        assert float((again.double() - y.double()).norm() / y.double().norm()) < 1e-2
        replayed(model, x)


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    torch._dynamo.reset()  # as often as the compiler would see a layer of another kind
    yield partial(torch.compile, fullgraph=True)
    torch._dynamo.reset()


@pytest.mark.parametrize("weight", ["e4m3", "e4m3_b128"])
def test_a_compiled_layer_gives_the_same(weight: str, compiled: Callable[..., Any]) -> None:
    layer = layer_of({"weight": weight}, torch.bfloat16, 512).cuda().eval().freeze()
    x = torch.randn(32, 512, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        want = layer(x)
        assert torch.equal(compiled(layer)(x), want)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_a_compiled_int8_layer_gives_the_same_but_for_ties(
    static: bool, smooth: bool, dtype: torch.dtype, compiled: Callable[..., Any]
) -> None:
    torch.manual_seed(3)
    linear, x = nn.Linear(256, 192, device="cuda", dtype=dtype), torch.randn(3, 40, 256, device="cuda", dtype=dtype)
    layer = QuantLinear.from_linear(linear, calibrate=[x[0]] if static else None)
    if smooth:
        mc.nn.smooth(layer, [x], progress=False)
    layer.eval().freeze()
    x[0, 0] = 0
    with torch.inference_mode():
        want = layer(x)
        got = compiled(layer)(x)
        x[1, 1, 5] = torch.inf
        poisoned = compiled(layer)(x)
    assert got.dtype == want.dtype and got.shape == want.shape
    if not smooth:  # the compiler does not round a smoothed input to its dtype
        assert float((got.double() - want.double()).norm() / want.double().norm()) < 2e-3
    x[1, 1, 5] = 0
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    errors = [float(((y.double() - exact)[2] / exact[2].norm()).norm()) for y in (got, want)]
    assert errors[0] < 1.05 * errors[1]
    if not static:
        assert bool(poisoned[1, 1].isnan().all()) and bool(poisoned[0].isfinite().all())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_sum_that_ends_a_compiled_graph_is_part_of_its_product(
    dtype: torch.dtype, compiled: Callable[..., Any]
) -> None:
    layer = layer_of(FORMATS[0], dtype).cuda().eval().freeze()
    back = nn.Linear(layer.out_features, layer.in_features, bias=False, device="cuda", dtype=dtype)
    x = torch.randn(2, 40, 256, device="cuda", dtype=dtype)
    last = QuantLinear.from_linear(back).eval().freeze()

    def block(x: Tensor) -> Tensor:
        return x + last(layer(x))

    with torch.inference_mode():
        want = block(x)
        run = compiled(block, options=mc.nn.compile_options())
        got = run(x)
        for _ in range(2):
            assert torch.equal(run(x), got)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            run(x)
            torch.cuda.synchronize()
    assert got.dtype == dtype and float((got.double() - want.double()).norm() / want.double().norm()) < 1e-2
    kernels = [each.name for each in found.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels and "gemm" in kernels[-1] and sum("gemm" in name for name in kernels) == 2, kernels


def test_a_compiler_quantizes_the_rows_of_several_layers_once(compiled: Callable[..., Any]) -> None:
    layers = nn.ModuleList(layer_of(FORMATS[0], torch.bfloat16).cuda().eval().freeze() for _ in range(3))
    x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16)

    def together(x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in layers]

    with torch.inference_mode():
        run = compiled(together)
        run(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            run(x)
            torch.cuda.synchronize()
    kernels = [each.name for each in found.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("triton" in name for name in kernels) <= 2, kernels


def test_a_converted_model_gives_what_it_gives_on_a_cpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128)).eval()
    x = torch.randn(4, 24, 128)
    for config in (mc.nn.QuantConfig("int8"), mc.nn.SparseQuantConfig(sparsity=0.5, vector_length=8, bits=8)):
        new = copy.deepcopy(model)
        mc.convert(new, config, freeze=True, progress=False)
        want = new(x)
        got = new.cuda()(x.cuda()).cpu()
        assert float((got - want).norm() / want.norm()) < 2e-3  # a token's scale may round otherwise behind GELU
