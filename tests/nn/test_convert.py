"""Whole models: conversion by name, its report, calibration, and pruning on a schedule."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.nn import PruningSchedule, SparseQuantConfig, SparseQuantLinear, calibrate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.again = self.body[2]
        self.attention = nn.MultiheadAttention(64, 2)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.again(self.body(x))
        return self.head(h + self.attention(h, h, h)[0])


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))


def kinds(model: nn.Module) -> dict[str, str]:
    found = model.named_modules(remove_duplicate=False)
    return {name: type(each).__name__ for name, each in found if isinstance(each, (nn.Linear, SparseQuantLinear))}


def test_layers_are_replaced_by_name() -> None:
    model = Net()
    reference = copy.deepcopy(model)
    report = mc.convert(model, {"head": None, "body.0": SparseQuantConfig(0.5, 4, 4), "*": SparseQuantConfig(0.0)})
    assert kinds(model) == {
        "body.0": "SparseQuantLinear",
        "body.2": "SparseQuantLinear",
        "again": "SparseQuantLinear",
        "attention.out_proj": "NonDynamicallyQuantizableLinear",
        "head": "Linear",
    }
    assert model.again is model.body[2] and report.converted == ("body.0", "body.2")
    assert model.body[0].config == SparseQuantConfig(0.5, 4, 4) and model.body[2].config.sparsity == 0
    notes = {row.name: row.note for row in report.rows}
    assert notes == {
        "body.0": "",
        "body.2": "",
        "again": "the same layer again",
        "attention": "left: nn.MultiheadAttention reads in_proj_weight itself",
        "attention.out_proj": "left: a NonDynamicallyQuantizableLinear",
        "head": "left, as 'head' says",
    }
    reference.body[0].weight.data *= model.body[0].pattern.to_dense()
    want, got = reference(inputs()), model(inputs())
    assert (got - want).norm() / want.norm() < 0.2  # 4-bit weights in the first layer
    got.sum().backward()
    assert model.body[0].weight.grad is not None


def test_a_layer_with_two_names_gets_what_the_first_one_that_fits_says() -> None:
    for config, converted in (({"body.2": SparseQuantConfig(), "again": None}, True),
                              ({"body.2": None, "again": SparseQuantConfig()}, False),
                              ({"again": SparseQuantConfig()}, True)):  # fmt: skip
        model = Net()
        mc.convert(model, config)
        assert model.again is model.body[2] and isinstance(model.again, SparseQuantLinear) is converted


def test_the_report_counts_bytes() -> None:
    model = Net()
    before = sum(p.nbytes for p in model.parameters())
    report = mc.convert(model, {"body.*": SparseQuantConfig(0.9)}, freeze=True)
    assert report.model_bytes == before
    assert report.bytes_before == 4 * (32 * 64 + 64 + 64 * 64 + 64)
    layers = model.body[0], model.body[2]
    state = [t for each in layers for name, t in each.state_dict().items() if name != "_extra_state"]
    assert report.bytes_after == sum(t.nbytes for t in state) and all(each.frozen for each in layers)
    text = str(report)
    assert "body.0" in text and "64 x 32" in text and "no pattern fits" in text
    assert f"{report.bytes_before:,} to {report.bytes_after:,} bytes once frozen" in " ".join(text.split())
    console = Console(width=120, record=True, quiet=True)
    with console.capture() as shown:
        console.print(report)
    assert isinstance(shown.get(), str)


def test_patterns_that_fit_nothing_change_nothing() -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"plan must name layers, got 'bdoy', the first to fit none of: body\.0"):
        mc.convert(model, {"body.0": SparseQuantConfig(), "bdoy": None, "*": None})
    assert "SparseQuantLinear" not in kinds(model).values()
    with pytest.raises(TypeError, match=r"model must have linear layers inside.*from_linear"):
        mc.convert(nn.Linear(3, 3))


def test_one_config_serves_every_layer_and_the_default_is_one() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    mc.convert(model)
    assert [each.config for each in model] == [SparseQuantConfig()] * 2


def test_shared_weights_stay_shared() -> None:
    model = nn.Sequential(nn.Embedding(16, 24), nn.Linear(24, 16, bias=False))
    model[1].weight = model[0].weight
    mc.convert(model, SparseQuantConfig(0.5))
    assert model[1].weight is model[0].weight


def test_a_converted_model_loads_into_another(tmp_path: Path) -> None:
    config = {"body.*": SparseQuantConfig(0.7), "head": SparseQuantConfig(0.2, bits=4)}
    first, second = Net().eval(), Net().eval()
    mc.convert(first, config, calibrate=[inputs(1)], freeze=True, progress=False)
    mc.convert(second, SparseQuantConfig(0.1, 2))
    torch.save(first.state_dict(), tmp_path / "model.pt")
    second.load_state_dict(torch.load(tmp_path / "model.pt"))
    with torch.no_grad():
        assert torch.equal(second(inputs()), first(inputs()))


def calibrated(clip: float | str = "max") -> tuple[nn.Sequential, dict[str, float | None]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))
    mc.convert(model, SparseQuantConfig(0.5))
    model[1].eval()
    return model, calibrate(model, [inputs(1), (3 * inputs(2), torch.zeros(6))], clip=clip)


def test_calibration_covers_what_it_saw_and_restores_modes() -> None:
    model, scales = calibrated()
    largest = max(inputs(1).abs().max(), 3 * inputs(2).abs().max())
    assert scales["0"] == pytest.approx(float(largest) / 127)
    assert [each.training for each in model] == [True, False, True, True] and model.training
    assert not model[0]._forward_pre_hooks
    h = model[0](inputs(2) * 3).relu()  # nothing of it saturates, and dropout was off
    assert float(h.detach().abs().max()) <= 127 * scales["3"] * 1.02
    dynamic = copy.deepcopy(model[0])
    dynamic.act_scale = None
    want = dynamic(inputs(2))
    error = (model[0](inputs(2)) - want).norm() / want.norm()
    assert 0 < error < 0.05
    model[0].eval()
    again = calibrate(model[0], [inputs(1)], progress=False)
    assert again[""] == pytest.approx(float(inputs(1).abs().max()) / 127)


def test_percentiles_are_averaged_over_batches() -> None:
    _, scales = calibrated(50.0)
    medians = [mc.quantize(x.reshape(1, -1), 8, clip=50.0).scale for x in (inputs(1), 3 * inputs(2))]
    assert scales["0"] == pytest.approx(float(sum(medians)) / 2)


def test_calibration_needs_layers_batches_and_finite_inputs() -> None:
    model, _ = calibrated()
    with pytest.raises(ValueError, match="batches must hold at least one batch, got none"):
        calibrate(model, [])
    with pytest.raises(ValueError, match="model must have SparseQuantLinear or QuantLinear layers, got none"):
        calibrate(nn.ReLU(), [inputs()])
    with pytest.raises(ValueError, match="x must be finite"):
        calibrate(model, [inputs() / 0])
    assert model[3].training and not model[0]._forward_pre_hooks
    two = nn.ModuleDict({"used": model[0], "idle": SparseQuantLinear(4, 8)})
    two.forward = two["used"].__call__  # type: ignore[method-assign]
    assert calibrate(two, [{"x": inputs()}], progress=False)["idle"] is None


def test_layers_whose_rows_one_scale_does_not_fit_keep_a_scale_per_row() -> None:
    def made(**options: object) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(32, 64))
        mc.convert(model, mc.nn.QuantConfig(**options), progress=False)
        return model

    model = made(weight="int8")
    x = torch.cat([inputs().sign(), torch.zeros(9, 32)])  # rows of zeros are no rows to fit
    x[0, 3] = 4.0
    assert calibrate(model, [x], progress=False)["0"] == pytest.approx(4 / 127)
    x[0, 3] = 4.1
    assert calibrate(model, [x[:4], x[4:]], progress=False) == {"0": None} and model[0].act_scale is None
    assert calibrate(model, [x], max_ratio=4.2, progress=False)["0"] == pytest.approx(4.1 / 127)
    assert calibrate(model, [x], max_ratio=float("inf"), progress=False)["0"] == pytest.approx(4.1 / 127)
    assert calibrate(model, [x], clip="mse", progress=False)["0"] is not None  # does not cover it
    assert calibrate(made(weight="e4m3"), [x], progress=False)["0"] is not None
    for bits, is_static in ((8, False), (16, True)):
        sparse = nn.Sequential(SparseQuantLinear.from_linear(nn.Linear(32, 64), sparsity=0.5, act_bits=bits))
        assert (calibrate(sparse, [x], progress=False)["0"] is not None) == is_static
    model[0].smooth = torch.ones(32)
    model[0].smooth[3] = 4.1
    assert calibrate(model, [x], progress=False)["0"] == pytest.approx(1 / 127)
    with pytest.raises(ValueError, match=r"max_ratio must be 1 or more, got 0\.5"):
        calibrate(model, [x], max_ratio=0.5, progress=False)


def test_sparsity_rises_as_published() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    mc.convert(model, SparseQuantConfig(0.9))
    schedule = PruningSchedule(model, initial=0.5, final=0.9, begin=10, end=110, every=25)
    seen = {}
    for step in range(1, 131):
        if schedule.step():
            seen[step] = 1 - model[0].pattern.density
            assert model[0].pattern.density == pytest.approx(model[1].pattern.density)
    assert list(seen) == [10, 35, 60, 85, 110]
    for step, sparsity in seen.items():
        want = 0.9 + (0.5 - 0.9) * (1 - (step - 10) / 100) ** 3
        assert sparsity == pytest.approx(want, abs=1e-3)
    assert schedule.sparsity == 0.9
    other = PruningSchedule(model, initial=0.5, final=0.9, begin=10, end=110)
    other.load_state_dict(schedule.state_dict())
    assert other.steps == 130 and not other.step()


def test_bad_schedules_are_named() -> None:
    layer = SparseQuantLinear(16, 16)
    for options, text in (
        ({"initial": 0.9, "final": 0.5, "end": 3}, "initial and final must satisfy .* got 0.9 and 0.5"),
        ({"initial": 0, "final": 0.5, "end": 3, "begin": 3}, "begin and end must satisfy .* got 3 and 3"),
        ({"initial": 0, "final": 0.5, "end": 3, "every": 0}, "every must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=text):
            PruningSchedule(layer, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="SparseQuantLinear layers that are not frozen, got none"):
        PruningSchedule(layer.freeze(), initial=0, final=0.5, end=3)


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_an_encoder_layer_runs_the_sparse_weights(freeze: bool, stacked: bool) -> None:
    """torch's fast path in evaluation reads ``linear1.weight`` itself: a converted layer must not take it."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval() if stacked else layer.eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        dense = model(x)
    report = mc.convert(model, mc.nn.SparseQuantConfig(sparsity=0.5), freeze=freeze)
    assert len(report.without_fast_path) == (2 if stacked else 1) and "fast path is off" in str(report).replace(
        "\n", " "
    )
    trained = model(x).detach()
    with torch.no_grad():
        found = model(x)
    assert not torch.equal(dense, found) and torch.allclose(found, trained, atol=1e-6)
