"""QuantLinear: results against dequantized weights, gradients, learning, state, copies, moves, files and compilers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.nn import QuantConfig, QuantLinear
from magicube_cutlass.quantization.group_tensor import GroupTensor, quantize_groups

FORMATS: list[dict[str, Any]] = [
    {"weight": "int8"},
    {"weight": "int8", "group_size": 32},
    {"weight": "int4", "group_size": 32},
    {"weight": "int4", "group_size": 64, "symmetric": False},
    {"weight": "int8", "symmetric": False, "act": "none"},
    {"weight": "int4", "act": "none", "clip": "mse"},
    {"weight": "e4m3"},
    {"weight": "mxfp4"},
    {"weight": "nvfp4", "act": "none"},
    {"weight": "e4m3_b128"},
    {"weight": "e4m3_b128", "act": "none"},
]
ids = [" ".join(map(str, each.values())) for each in FORMATS]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(inputs: int = 96, outputs: int = 40, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().double().norm() / want.detach().double().norm())


def rounded(x: Tensor, layer: QuantLinear) -> Tensor:
    """The rows that the layer multiplies, in float64."""
    if layer.act == "none":
        return x.double()
    if layer.act != "int8":
        return mc.quantize(x.reshape(-1, x.shape[-1]), dtype=layer.act, scale="row").dequantize().view(x.shape).double()
    scale = layer.act_scale if layer.act_scale is not None else x.abs().amax(-1, keepdim=True) / 127
    return (x.double() / scale.double()).round().clamp(-128, 127) * scale.double()


@pytest.mark.parametrize("options", FORMATS, ids=ids)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_multiplies_rounded_rows_by_its_dequantized_weight(options: dict[str, Any], bias: bool) -> None:
    layer = QuantLinear.from_linear(plain(bias=bias), **options).eval()
    with torch.no_grad():
        for shape in ((96,), (5, 96), (2, 3, 96), (0, 96)):
            x = normal(*shape)
            want = rounded(x, layer) @ layer.dequantize().double().t()
            want = want if layer.bias is None else want + layer.bias.double()
            y = layer(x)
            assert y.shape == want.shape and y.dtype == torch.float32
            assert torch.allclose(y.double(), want, atol=2e-5 * float(want.abs().max() if want.numel() else 1))
        wide = normal(5, 200)[:, 7:103]
        assert torch.equal(layer(wide), layer(wide.contiguous()))


@pytest.mark.parametrize(
    ("options", "bound"),
    list(zip(FORMATS, (0.012, 0.01, 0.12, 0.11, 0.012, 0.2, 0.045, 0.18, 0.13, 0.045, 0.035), strict=True)),
    ids=ids,
)
def test_a_layer_is_the_linear_one_within_its_rounding(options: dict[str, Any], bound: float) -> None:
    dense, x = plain(), normal(64, 96)
    error = relative(QuantLinear.from_linear(dense, **options)(x), dense(x))
    assert bound / 4 < error < bound


def test_int8_weights_are_those_of_quantize_and_of_the_sparse_layer_without_zeros() -> None:
    dense, x = plain(), normal(7, 96)
    layer = QuantLinear.from_linear(dense).eval()
    q = mc.quantize(dense.weight.detach(), 8, scale="row")
    weight = layer.product().weight
    assert torch.equal(weight.data, q.data) and torch.equal(weight.scale, q.scale)
    other = mc.nn.SparseQuantLinear.from_linear(dense, 0.0).eval()
    with torch.no_grad():
        assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, None), (4, 32), (8, 16), (8, None)])
def test_groups_are_rounded_to_half_a_step(bits: int, group: int | None, symmetric: bool) -> None:
    w = normal(9, 70) * 3
    w[2], w[3, :40], w[4] = 0, 5, -1e-30
    found = quantize_groups(w, bits, group, symmetric=symmetric)
    step = found._spread(found.scale)
    assert bool(((found.dequantize() - w).abs() <= 0.5001 * step + 1e-6 * w.abs()).all())
    assert bool((found.dequantize()[2] == 0).all()) and (found.minimum is None) is symmetric
    close = quantize_groups(w, bits, group, symmetric=symmetric, clip="mse")
    errors = [(each.dequantize() - w).square().sum(1) for each in (close, found)]
    assert bool((errors[0] <= errors[1] * 1.0001 + 1e-12).all())
    parts = quantize_groups(w.repeat(1, 1), bits, group, symmetric=symmetric)
    assert torch.equal(parts.data, found.data)


def test_long_weights_are_quantized_in_parts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    w = normal(9, 70)
    want = quantize_groups(w, 4, 32, symmetric=False)
    monkeypatch.setattr("magicube_cutlass.quantization.group_tensor._CPU_CHUNK", 150)
    got = quantize_groups(w, 4, 32, symmetric=False)
    assert torch.equal(got.data, want.data) and torch.equal(got.scale, want.scale)
    assert want.minimum is not None and got.minimum is not None and torch.equal(got.minimum, want.minimum)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", FORMATS, ids=ids)
def test_outputs_have_the_dtype_of_the_input(options: dict[str, Any], dtype: torch.dtype) -> None:
    layer = QuantLinear.from_linear(plain(), **options).eval()
    with torch.no_grad():
        y = layer(normal(5, 96).to(dtype))
        assert y.dtype == dtype and relative(y.float(), layer(normal(5, 96))) < 0.04


def test_training_evaluation_and_a_frozen_layer_compute_the_same() -> None:
    for options in FORMATS:
        layer, x = QuantLinear.from_linear(plain(), **options), normal(7, 96)
        y = layer(x)
        layer.eval()
        with torch.no_grad():
            assert torch.equal(layer(x), y)
        assert torch.equal(layer.freeze()(x), y) and layer.frozen


def test_static_scales_saturate_and_dynamic_ones_do_not() -> None:
    for act, top in (("int8", 127), ("e4m3", 448)):
        weight = "int8" if act == "int8" else "e4m3"
        layer = QuantLinear.from_linear(plain(bias=False), weight=weight, calibrate=[normal(50, 96), 2 * normal(9, 96)])
        largest = max(normal(50, 96).abs().max(), 2 * normal(9, 96).abs().max())
        assert layer.act_scale is not None and float(layer.act_scale) == pytest.approx(float(largest) / top)
        with torch.no_grad():
            far = torch.full((1, 96), float(largest) * 10)
            want = largest * layer.dequantize().sum(1)
            assert torch.allclose(layer.eval()(far)[0], want, rtol=0.01, atol=1e-3)
    blocks = QuantLinear.from_linear(plain(), weight="mxfp4")
    assert mc.nn.calibrate(blocks, [normal(5, 96)], progress=False) == {"": None}


@pytest.mark.parametrize("options", FORMATS, ids=ids)
def test_gradients_are_straight_through(options: dict[str, Any]) -> None:
    layer = QuantLinear.from_linear(plain(), **options)
    x, g = normal(2, 7, 96).requires_grad_(), normal(2, 7, 40, seed=1)
    got = torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), g)
    rows, flat = rounded(x.detach(), layer).reshape(-1, 96), g.reshape(-1, 40).double()
    want = (g.double() @ layer.dequantize().double(), flat.t() @ rows, flat.sum(0))
    for mine, true in zip(got, want, strict=True):
        assert mine.shape == true.shape and relative(mine, true) < 1e-5
    with pytest.raises(RuntimeError, match="cannot differentiate twice"):
        (first,) = torch.autograd.grad(layer(x), x, g, create_graph=True)
        first.sum().backward()


@pytest.mark.parametrize("make", [QuantLinear, mc.nn.SparseQuantLinear])
def test_integers_follow_a_fused_optimizer(make: Callable[..., Any]) -> None:
    """It does not raise the version of what it writes."""
    layer, x = make(16, 8), normal(3, 16)
    before = layer(x).detach()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1.0, fused=True)
    layer(x).sum().backward()
    optimizer.step()
    assert relative(layer(x), before) > 0.5
    fresh = copy.deepcopy(layer)
    assert torch.equal(layer(x), fresh(x))


def test_a_layer_learns_and_its_integers_follow() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(256, 32), torch.randn(16, 32)
    layer = QuantLinear(32, 16, weight="int4", group_size=16)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(80):
        loss = (layer(x) - x @ target.mT).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.02 * losses[0]
    assert relative(layer.eval().dequantize(), target) < 0.12
    layer.weight = nn.Parameter(torch.ones(16, 32))
    assert torch.allclose(layer.dequantize(), torch.ones(16, 32))


@pytest.mark.parametrize("options", FORMATS, ids=ids)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_state_dict_goes_round_and_brings_the_options(options: dict[str, Any], frozen: bool) -> None:
    layer, x = QuantLinear.from_linear(plain(), **options, calibrate=[normal(9, 96)]).eval(), normal(5, 96)
    layer = layer.freeze() if frozen else layer
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    for into in (QuantLinear(96, 40), QuantLinear(96, 40, weight="nvfp4").freeze()):
        result = into.load_state_dict(state)
        assert not result.missing_keys and not result.unexpected_keys
        assert into.frozen is frozen and into.config == layer.config
        with torch.no_grad():
            assert torch.equal(into(x), layer(x))


def test_damaged_states_are_refused_and_plain_ones_load() -> None:
    layer = QuantLinear(96, 40, weight="int4", group_size=32).freeze()
    state = layer.state_dict()
    state["scale"] = state["scale"][:, 1:].clone()
    with pytest.raises(RuntimeError, match=r"weight: scale must be torch\.float32 of shape \(40, 3\), got .*\(40, 2\)"):
        QuantLinear(96, 40).load_state_dict(state)
    state = layer.state_dict()
    state["_extra_state"] = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="weight: stored must hold the options of a QuantLinear"):
        QuantLinear(96, 40).load_state_dict(state)
    dense, trained = plain(), QuantLinear(96, 40)
    trained.load_state_dict(dense.state_dict(), strict=False)
    assert relative(trained(normal(5, 96)), dense(normal(5, 96))) < 0.02


def test_safetensors_hold_a_model(tmp_path: Path) -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(QuantLinear(96, 40, weight="int4", group_size=32).freeze(), nn.ReLU(), nn.Linear(40, 3))

    first, second, x = model(), model(), normal(5, 96)
    save_model(first, str(tmp_path / "model.safetensors"))
    load_model(second, str(tmp_path / "model.safetensors"))
    with torch.no_grad():
        assert torch.equal(second(x), first(x))


@pytest.mark.parametrize("frozen", [False, True])
def test_copies_stand_alone_and_changes_of_dtype_keep_scales(frozen: bool) -> None:
    layer = QuantLinear.from_linear(plain(), weight="int4", group_size=32, symmetric=False, calibrate=[normal(9, 96)])
    layer, x = layer.freeze() if frozen else layer, normal(5, 96)
    with torch.no_grad():
        before = layer(x)
        other = copy.deepcopy(layer)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        third = torch.load(file, weights_only=False)
        (layer.scale if frozen else layer.weight).zero_()  # type: ignore[union-attr]
        assert torch.equal(other(x), before) and torch.equal(third(x), before)
        for dtype in (torch.float64, torch.bfloat16):
            moved = copy.deepcopy(other).to(dtype)
            y = moved(x.to(dtype))
            assert y.dtype == dtype and relative(y.float(), before) < 0.02
            assert moved.act_scale is not None and moved.act_scale.dtype == torch.float32
            assert moved.scale is None or torch.equal(moved.scale, other.scale)


def test_compressed_bytes_are_those_of_the_frozen_layer() -> None:
    for options in FORMATS:
        layer = QuantLinear.from_linear(plain(), **options)
        expected = layer.compressed_bytes
        state = layer.freeze().state_dict()
        assert expected == layer.compressed_bytes == sum(t.nbytes for n, t in state.items() if n != "_extra_state")


def test_smooth_scales_cancel_in_exact_arithmetic_and_help_outliers() -> None:
    dense, x = plain(bias=False), normal(50, 96)
    x[:, 3] *= 100
    layer = QuantLinear.from_linear(dense)
    before = relative(layer(x), dense(x))
    chosen = mc.nn.smooth(layer, [x], progress=False)
    assert layer.smooth is not None and torch.equal(chosen[""], layer.smooth)
    assert relative(layer(x), dense(x)) < 0.5 * before
    assert relative(layer.dequantize(), dense.weight) < 0.04
    (of_weight,) = torch.autograd.grad(layer(x).sum(), layer.weight)
    rows = rounded(x / layer.smooth, layer) * layer.smooth.double()  # what the weight is multiplied by
    assert relative(of_weight[0], rows.sum(0)) < 1e-5
    y = layer.eval()(x)
    assert torch.equal(layer.freeze()(x), y)
    x.requires_grad_()
    (got,) = torch.autograd.grad(layer(x).sum(), x)
    assert relative(got[0], layer.dequantize().sum(0)) < 1e-5
    with pytest.raises(RuntimeError, match=r"smooth needs master weights, which freeze\(\) gave up"):
        mc.nn.smooth(layer, [x])


@pytest.fixture
def compiled() -> Iterator[Callable[[nn.Module], Callable[..., Tensor]]]:
    yield lambda model: torch.compile(model, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [FORMATS[0], FORMATS[3], FORMATS[7], FORMATS[9]], ids=str)
def test_a_compiled_layer_is_one_graph(options: dict[str, Any], compiled: Callable[..., Any]) -> None:
    layer = QuantLinear.from_linear(plain(), **options).eval().freeze()
    with torch.no_grad():
        run = compiled(layer)
        for shape in ((5, 96), (2, 3, 96)):
            assert torch.equal(run(normal(*shape)), layer(normal(*shape)))
        exported = torch.export.export(layer, (normal(5, 96),)).module()
        assert torch.equal(exported(normal(5, 96)), layer(normal(5, 96)))


def test_a_compiled_model_trains_as_a_plain_one() -> None:
    layer = QuantLinear.from_linear(plain(), weight="int4", group_size=32)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, g = normal(5, 96).requires_grad_(), normal(5, 40, seed=1)
    for _ in range(2):
        inputs = (x, layer.weight, layer.bias)
        pairs = zip(torch.autograd.grad(run(x), inputs, g), torch.autograd.grad(layer(x), inputs, g), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in pairs)
        with torch.no_grad():
            layer.weight.mul_(-2)
    torch._dynamo.reset()


def test_explain_names_what_multiplies() -> None:
    assert QuantLinear(64, 32, weight="int4", group_size=32).explain().backend in ("engine", "torch")
    found = QuantLinear(64, 32, weight="int8", act="none").explain()
    assert (
        found.backend == "torch"
        and "no kernel for this format" in found
        and found.facts["weight_bytes"] == 64 * 32 + 128
    )


def test_a_quantized_weight_is_taken_as_it_is() -> None:
    ints = torch.randint(-8, 8, (10, 64), generator=torch.Generator().manual_seed(0))
    weight = GroupTensor.from_ints(ints, torch.rand(10, 2), torch.rand(10, 2), bits=4, group=32)
    layer = QuantLinear.from_quantized(weight, torch.ones(10))
    assert torch.equal(layer.dequantize(), weight.dequantize())
    assert layer.config == QuantConfig("int4", 32, symmetric=False) and layer.frozen and not layer.training
    floats = mc.quantize(normal(10, 64), dtype="nvfp4", scale="row")
    assert QuantLinear.from_quantized(floats).config == QuantConfig("nvfp4")


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"weight must be one of .* got 'int3'"):
        QuantConfig("int3")
    with pytest.raises(ValueError, match=r"act must be one of \('int8', 'none'\) for weight='int8', got 'e4m3'"):
        QuantConfig("int8", act="e4m3")
    with pytest.raises(ValueError, match=r"group_size must be None or one of .* got 48"):
        QuantConfig("int4", group_size=48)
    with pytest.raises(ValueError, match="group_size, symmetric and clip must keep their defaults for weight='mxfp4'"):
        QuantConfig("mxfp4", group_size=32)
    with pytest.raises(TypeError, match=r"linear must be a torch\.nn\.Linear, got Conv2d"):
        QuantLinear.from_linear(nn.Conv2d(1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x must have 96 features, got shape \(2, 40\)"):
        QuantLinear(96, 40)(torch.ones(2, 40))
    with pytest.raises(TypeError, match=r"x must be a float tensor, got torch\.int64"):
        QuantLinear(96, 40)(torch.ones(2, 96).long())
    with pytest.raises(ValueError, match="weight must be finite"):
        quantize_groups(torch.full((1, 3), torch.nan), 8)


def test_a_flop_counter_counts_dense_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    layer, x = QuantLinear(64, 32), normal(5, 64)
    frozen = copy.deepcopy(layer).freeze()
    exported = torch.export.export(frozen, (x,)).module()
    for run, products in ((layer, 2), (frozen, 1), (exported, 1)):  # the weight's gradient, not that of x
        with FlopCounterMode(display=False) as counter:
            y = run(x)
            if y.requires_grad:
                y.sum().backward()
        assert counter.get_total_flops() == products * 2 * 5 * 64 * 32
