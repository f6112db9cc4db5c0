"""Gated MLPs whose joint product gates its results."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.nn import QuantConfig, QuantLinear, fuse, fuse_activations, fuse_glu, fuse_projections
from magicube_cutlass.nn.dense import product, projections


class Gated(nn.Module):
    """A gated MLP of 64 and 96 features; `scale` changes what it computes."""

    def __init__(self, bias: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 96, bias), nn.Linear(64, 96, bias), nn.Linear(96, 64, bias)
        self.other, self.act, self.scale = nn.Linear(96, 64, bias), nn.SiLU(), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) * self.scale


class Blocks(nn.Module):
    def __init__(self, *mlps: nn.Module) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(mlps)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.mlps:
            x = x + each(x)
        return x


def made(*mlps: nn.Module, calibrated: bool = False, smooth: float | None = None, **options: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = Blocks(*(mlps or (Gated(True), Gated()))).eval()
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    config = QuantConfig(**{"weight": "int8"} | options)
    data: dict[str, Any] = {"calibrate": [x]} if calibrated else {}
    data |= {"data": [x], "smooth": smooth} if smooth is not None else {}
    mc.convert(model, config, freeze=True, progress=False, **data)
    if calibrated:
        for each in model.mlps:
            each.gate.act_scale = each.up.act_scale = None
    fuse_projections(model, x)
    fuse_activations(model, x)
    return model, x


def by_gemm(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers multiply as on a GPU whose kernels gate their results."""
    monkeypatch.setattr(product, "key_of", lambda *_: None)
    monkeypatch.setattr(projections, "_gates_results", lambda _: True)
    for each in model.modules():
        if isinstance(each, QuantLinear):
            joint: Any = each._joint
            for layer in (each, *(() if joint is None else (joint.layer, joint.divided))):
                layer.product().backend = "gemm"
            if joint is not None:
                joint.gates_results = True


@torch.no_grad()
def test_only_what_a_gated_mlp_computes_is_fused() -> None:
    model, x = made(Gated(), Gated(scale=2.0), nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)))
    want, state = model(x), model.state_dict()
    assert fuse_glu(model, x) == {"mlps.0": "mlps.0.down"}
    assert torch.equal(model(x), want) and model.state_dict().keys() == state.keys()  # the engine's products
    assert "multiplies the results" not in str(model.mlps[0].gate.explain())
    plain, x = made()
    for each in plain.mlps:
        each.act = nn.Tanh()
    assert fuse_glu(plain, x) == {}
    floats, x = made(weight="e4m3")
    want = floats(x)
    assert fuse_glu(floats, x) == {"mlps.0": "mlps.0.down", "mlps.1": "mlps.1.down"}
    assert torch.equal(floats(x), want)


@torch.no_grad()
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_product_gives_what_the_layer_reads(
    dtype: torch.dtype, calibrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = made(calibrated=calibrated)
    model, x = model.to(dtype), x.to(dtype)
    by_gemm(model, monkeypatch)
    want = model(x)
    assert len(fuse_glu(model, x)) == 2
    by_gemm(model, monkeypatch)
    given: list[Tensor] = []
    first = model.mlps[0]
    hook = first.down.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    got = model(x)
    hook.remove()
    h = torch.nn.functional.silu(first.gate._joint.layer(x)[..., :96].float()) * first.gate._joint.layer(x)[..., 96:]
    assert given[0].dtype == (torch.int8 if calibrated else dtype) and given[0].shape == (2, 5, 96)
    floats = given[0].float() * first.down.act_scale if calibrated else given[0].float()
    bound = 0.6 * float(first.down.act_scale) if calibrated else 0.0
    assert bool(((floats - h).abs() <= bound + (1e-5 if dtype == torch.float32 else 2.0**-6) * (1 + h.abs())).all())
    assert got.dtype == dtype and float((got - want).norm() / want.norm()) < 1e-2
    assert "multiplies the results of the second" in str(first.up.explain())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        by_gemm(again, monkeypatch)
        assert torch.equal(again(x), got)
    torch._dynamo.reset()
    with torch.inference_mode():
        compiled = torch.compile(model, fullgraph=True, backend="eager")(x)
    assert float((compiled - got).norm() / got.norm()) < 1e-2


@torch.no_grad()
def test_smooth_scales_of_gate_and_up_divide_the_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Blocks(Gated()).eval(), torch.randn(9, 64)
    x[:, 3] *= 30
    want = model(x)
    mc.convert(model, QuantConfig("int8"), progress=False)
    scale = x.abs().amax(0).sqrt()
    model.mlps[0].gate.smooth = model.mlps[0].up.smooth = scale
    for each in model.modules():
        if isinstance(each, QuantLinear):
            each.eval().freeze()
    assert fuse(model, x).glu == {"mlps.0": "mlps.0.down"}
    by_gemm(model, monkeypatch)
    assert model.mlps[0].gate._joint.layer.smooth is not None and model.mlps[0].gate._joint.takes_glu(x)
    got = model(x)
    torch._dynamo.reset()
    with torch.inference_mode():
        compiled = torch.compile(model, fullgraph=True, backend="eager")(x)
    for each in (got, compiled):
        assert float((each - want).norm() / want.norm()) < 2e-2


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_integers_of_gated_results_are_divided_by_the_smooth_scale_of_their_reader(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Blocks(Gated(bias)).eval(), torch.randn(9, 64)
    model.mlps[0].up.weight[5] *= 40  # a feature of h far beyond the others
    exact = model(x)
    mc.convert(model, QuantConfig("int8"), data=[x], smooth=0.7, calibrate=[x], freeze=True, progress=False)
    want, first = model(x), model.mlps[0]
    assert first.down.act_scale is not None and float((want - exact).norm() / exact.norm()) < 2e-2
    assert fuse(model, x).glu == {"mlps.0": "mlps.0.down"}
    by_gemm(model, monkeypatch)
    given: list[Tensor] = []

    def see(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        given.append(inputs[0])

    hook = model.mlps[0].down.register_forward_pre_hook(see)
    got = model(x)
    hook.remove()
    h = first.act(first.gate(x)) * first.up(x) if isinstance(first.act, nn.SiLU) else first.gate(x) * first.up(x)
    steps = h / first.down.smooth / first.down.act_scale
    assert given[0].dtype == torch.int8 and bool(((given[0] - steps).abs() <= 0.51).all())
    assert float((got - want).norm() / want.norm()) < 2e-2 and first.down.reads_kernel is False
    with torch.inference_mode():
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")(x)
    assert float((compiled - got).norm() / got.norm()) < 1e-2
    model.mlps[0].down.smooth = first.down.smooth * 2  # another one: the plain module multiplies until eval()
    joint = model.mlps[0].gate._joint
    assert not joint.takes_glu(x)
    joint.refresh()
    by_gemm(model, monkeypatch)
    assert joint.takes_glu(x) and torch.equal(joint.divided_by, model.mlps[0].down.smooth)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert not joint.is_current and torch.isfinite(model(x)).all() and joint.is_current


@torch.no_grad()
def test_floats_of_gated_results_are_divided_for_a_reader_without_a_static_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, x = Blocks(Gated(True)).eval(), torch.randn(9, 64)
    model.mlps[0].up.weight[5] *= 40
    mc.convert(model, QuantConfig("int8"), data=[x], smooth=0.7, freeze=True, progress=False)
    want = model(x)
    assert fuse(model, x).glu == {"mlps.0": "mlps.0.down"}
    by_gemm(model, monkeypatch)
    down, joint = model.mlps[0].down, model.mlps[0].gate._joint
    h = nn.functional.silu(joint.layer(x)[..., :96]) * joint.layer(x)[..., 96:]
    assert joint.divides and torch.allclose(joint.glu(x, None), h / down.smooth, rtol=1e-5, atol=1e-6)
    got = model(x)
    assert float((got - want).norm() / want.norm()) < 2e-2
    with torch.inference_mode():
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")(x)
    assert float((compiled - got).norm() / got.norm()) < 1e-2
    seen: list[Tensor] = []
    hook = down.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert not joint.takes_glu(x)  # the hook sees the rows that are not divided
    assert float((model(x) - want).norm() / want.norm()) < 2e-2 and torch.allclose(seen[0], h, rtol=1e-5, atol=1e-6)
    hook.remove()
    assert joint.takes_glu(x)


def test_what_the_module_does_in_training_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropped(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    model, x = made(Dropped())
    with torch.no_grad():
        assert fuse(model, x).glu == {"mlps.0": "mlps.0.down"}
        down = model.mlps[0].down
        assert not down.reads_kernel  # on a CPU a compiler makes the rows
        by_gemm(model, monkeypatch)
        assert down.reads_kernel
        kept = model.mlps[0](x) != 0
        assert bool(kept.all()) and not bool((model.mlps[0].train()(x) != 0).all())


def test_gradients_other_tensors_and_to_dense_take_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(calibrated=True)
    plain = model.mlps[0]
    with torch.no_grad():
        want = model(x)
        assert len(fuse_glu(model, x)) == 2
        by_gemm(model, monkeypatch)
        first = model.mlps[0]
        fused = first.gate._joint.glu(x, None)
    assert first.train().training and plain.training and not first.eval().training and not plain.training
    y = x.clone().requires_grad_()
    assert not first.gate._joint.takes_glu(y) and not first.gate._joint.takes_glu(x.double())
    model(y).sum().backward()
    assert y.grad is not None and y.grad.isfinite().all()
    with torch.no_grad():
        assert first.gate._joint.takes_glu(x)
        mc.nn.calibrate(model, [x], progress=False)  # its hooks see the rows of gate and up
        assert torch.equal(first.gate.act_scale, first.up.act_scale) and first.down.act_scale is not None
        assert float((model(x) - want).norm() / want.norm()) < 1e-2 and first.gate._joint is not None
        first.gate.act_scale = torch.tensor(0.01)
        assert not first.gate._joint.takes_glu(x)  # the layers part: their scales differ
        assert model(x).isfinite().all() and first.gate._joint is None
        first.gate.act_scale = None
        assert float((model(x) - want).norm() / want.norm()) < 1e-2 and fused.shape == (2, 5, 96)
    mc.nn.to_dense(model)
    assert model.mlps[0] is plain and isinstance(plain.act, nn.SiLU) and isinstance(plain.gate, nn.Linear)
    assert float((model(x).detach() - want).norm() / want.norm()) < 2e-2


@torch.no_grad()
def test_all_steps_in_the_order_that_they_need() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    model, x = Blocks(Gated(), mlp).eval(), torch.randn(7, 64)
    with pytest.raises(ValueError, match="model must have QuantLinear layers, got none: see convert"):
        fuse(model, x)
    plain = copy.deepcopy(model)
    mc.convert(plain, QuantConfig("int8"), progress=False)
    assert fuse(plain, x) == ((), {"mlps.0.gate": "silu", "mlps.1.0": "gelu"}, {}, {})
    mc.convert(model, QuantConfig("int8"), freeze=True, calibrate=[x], progress=False)
    want = model(x)
    found = fuse(model, x)
    assert found.projections == (("mlps.0.gate", "mlps.0.up"),)
    assert found.activations == {"mlps.0.gate": "silu", "mlps.1.0": "gelu"}
    assert found.glu == {"mlps.0": "mlps.0.down"} and found.quantization == {"mlps.1.0": "mlps.1.2"}
    assert float((model(x) - want).norm() / want.norm()) < 1e-6
    again = fuse(model, x)
    assert again == (found.projections, {}, found.glu, found.quantization)  # activations are part of their layers
    assert isinstance(model.mlps[0]._plain, Gated) and model.mlps[0].gate._joint.reader is model.mlps[0].down
    assert float((model(x) - want).norm() / want.norm()) < 1e-6
    mc.nn.to_dense(model)
    assert isinstance(model.mlps[0], Gated) and isinstance(model.mlps[1][1], nn.GELU)
