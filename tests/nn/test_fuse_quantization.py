"""Layers that write the integers which the next layer reads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magicube_cutlass as mc
from cute_kernels.gemm.epilogue import activate, integers_of
from magicube_cutlass.nn import QuantConfig, QuantLinear, fuse_activations, fuse_quantization
from magicube_cutlass.nn.dense import product


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """An MLP whose pairs of layers are read in all the ways that matter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)
        self.shared_up, self.shared_down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.far_up, self.far_down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.twice_up, self.one, self.other = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.act(self.up(x)))
        y = self.shared_up(x)
        x = x + self.shared_down(y) + 1e-3 * y.mean()
        x = x + self.far_down(self.far_up(x).tanh())
        y = self.twice_up(x)
        return self.one(y) + self.other(y)


def block(config: QuantConfig | None = None, static: bool = True) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    model, x = Block().eval(), normal(6, 64)
    mc.convert(model, config or QuantConfig("int8"), freeze=True, calibrate=[x] if static else None, progress=False)
    fuse_activations(model, x)
    return model, x


def by_gemm(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers multiply as on a GPU."""
    monkeypatch.setattr(product, "key_of", lambda *_: None)
    for each in model.modules():
        if isinstance(each, QuantLinear):
            each.product().backend = "gemm"


def test_a_layer_whose_rows_are_divided_by_a_smooth_scale_reads_floats() -> None:
    torch.manual_seed(0)
    model, x = Block().eval(), normal(6, 64)
    mc.convert(model, QuantConfig("int8"), freeze=True, data=[x], smooth=0.5, calibrate=[x], progress=False)
    fuse_activations(model, x)
    assert model.down.smooth is not None and model.down.act_scale is not None
    assert fuse_quantization(model, x) == {}
    model, x = block()
    assert fuse_quantization(model, x) == {"up": "down"} and model.up._out_scale() is not None
    model.down.smooth = torch.ones(96)
    assert model.up._out_scale() is None


def test_only_a_pair_that_nothing_else_reads_is_fused() -> None:
    model, x = block()
    want = model(x)
    assert fuse_quantization(model, x) == {"up": "down"}
    assert torch.equal(model(x), want)  # the engine quantizes in its call
    assert not model.up.explain().facts["writes_integers"]
    assert not list(model.up.children())


@pytest.mark.parametrize(
    "config", [QuantConfig("int8", group_size=32), QuantConfig("int4"), QuantConfig("e4m3")], ids=str
)
def test_other_formats_are_left_alone(config: QuantConfig) -> None:
    model, x = block(config)
    assert fuse_quantization(model, x) == {}
    dynamic, x = block(static=False)
    assert fuse_quantization(dynamic, x) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_integers_are_those_of_the_second_layer(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = block()
    model, x = model.to(dtype), x.to(dtype)
    by_gemm(model, monkeypatch)
    want = model.down(model.up(x))
    given: list[Tensor] = []
    model.down.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    floats = model.up(x)
    fuse_quantization(model, x)
    by_gemm(model, monkeypatch)
    assert model.up.explain().facts["writes_integers"] and "writes int8" in str(model.up.explain())
    got = model.down(model.up(x))
    assert given[-1].dtype == torch.int8 and got.dtype == dtype
    assert model.down.act_scale is not None
    near = given[-1].double() - floats.double() / model.down.act_scale.double()
    assert float(near.abs().max()) <= (0.51 if dtype == torch.float32 else 1.0)  # of bfloat16, floats are rounded
    assert float((got - want).norm() / want.norm()) < 1e-2
    copied = copy.deepcopy(model)
    by_gemm(copied, monkeypatch)
    assert torch.equal(copied(x), model(x))
    copied.down.act_scale *= 2  # the scale is read at each call, the copy's own
    assert not torch.equal(copied.up(x), model.up(x)) and torch.equal(model.up(x), given[-1])


def test_floats_are_written_while_the_next_layer_takes_no_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = block()
    fuse_quantization(model, x)
    by_gemm(model, monkeypatch)
    mc.nn.calibrate(model, [x, 2 * x], progress=False)
    assert float(model.down.act_scale) > 0 and model.up(x).dtype == torch.int8
    model.down.act_scale = None
    assert model.up(x).dtype == torch.float32 and model(x).isfinite().all()
    assert fuse_quantization(model, x) == {} and model.up._next is None


def test_a_compiled_pair_passes_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = block()
    fuse_quantization(model, x)
    by_gemm(model, monkeypatch)
    want, rows = model.down(model.up(x)), model.up(x)
    torch._dynamo.reset()
    with torch.inference_mode():
        got = torch.compile(model.down, fullgraph=True, backend="eager")(rows)
    assert torch.equal(got, want)


def test_integers_without_a_static_scale_are_refused() -> None:
    model, _ = block(static=False)
    rows = torch.zeros(2, 96, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"x must be a float tensor, got torch.int8; int8 needs a frozen int8 layer"):
        model.down(rows)
    with pytest.raises(TypeError, match=r"got torch.int32"):
        model.down(rows.int())


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
def test_a_product_ends_in_an_activation_and_integers(activation: Any, dtype: torch.dtype) -> None:
    from cute_kernels.gemm import gemm

    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-128, 128, (33, 40), generator=generator, dtype=torch.int8)
    b = torch.randint(-128, 128, (40, 17), generator=generator, dtype=torch.int8)
    bias, c, scale = normal(17), normal(33, 17), torch.tensor(0.03)
    options: dict[str, Any] = {"scale_a": 3e-4, "scale_b": normal(17).abs(), "bias": bias, "c": c, "beta": 0.5}
    plain = gemm(a, b, **options, out_dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    out_scale = scale if dtype == torch.int8 else None
    got = gemm(a, b, **options, activation=activation, out_scale=out_scale, out_dtype=dtype)
    want = activate(plain, activation)
    assert torch.equal(got, integers_of(want, scale) if dtype == torch.int8 else want.to(dtype))
    out = torch.empty(33, 17, dtype=dtype)
    gemm(a, b, **options, activation=activation, out_scale=out_scale, out=out, out_dtype=dtype)
    assert torch.equal(out, got)
    empty = gemm(a[:, :0], b[:0], bias=bias, activation=activation, out_scale=out_scale, out_dtype=dtype)
    rows = bias.expand(33, 17).contiguous()  # torch's GELU in float32 depends on the place, on some CPUs
    want = activate(rows.double() if dtype == torch.float64 else rows, activation)
    assert torch.equal(empty, integers_of(want, scale) if dtype == torch.int8 else want.to(dtype))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"activation": "swish", "out_dtype": torch.float32}, r"activation must be one of \(None, 'relu', .*, got 'swish'"),
        ({"activation": "relu"}, "activation must be None for out_dtype torch.int32, got 'relu'"),
        ({"out_dtype": torch.int8}, "out_scale must be given for out_dtype torch.int8, and for no other, got None"),
        ({"out_scale": torch.ones(()), "out_dtype": torch.float32}, "and for no other, got a tensor for torch.float32"),
        ({"out_scale": torch.ones(2), "out_dtype": torch.int8}, r"out_scale must have the shape \(\), got \(2,\)"),
        ({"out_scale": torch.ones(()).double(), "out_dtype": torch.int8}, "out_scale must be torch.float32, got"),
    ],
)  # fmt: skip
def test_bad_finishes_are_named(options: dict[str, Any], match: str) -> None:
    from cute_kernels.gemm import explain_gemm, gemm

    a = torch.ones(4, 4, dtype=torch.int8)
    with pytest.raises((TypeError, ValueError), match=match):
        gemm(a, a, **options)
    assert explain_gemm(a, a, out_dtype=torch.int8).products == 1
