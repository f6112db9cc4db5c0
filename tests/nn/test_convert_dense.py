"""Conversion to dense formats: convolutions, embeddings, masks, meta devices, the way back, and plans by a budget."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

import magicube_cutlass as mc
from magicube_cutlass.nn import Budget, QuantConfig, QuantEmbedding, QuantLinear, SparseQuantConfig, SparseQuantLinear
from magicube_cutlass.nn.dense.conv import PatchLinear


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().norm() / want.detach().norm())


class Language(nn.Module):
    """An embedding tied to the head, a normalization, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(self.norm(x + self.down(self.up(x).relu())))


PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "quantize-a-model.md"
IDS = torch.arange(40).view(2, 20)


def test_every_module_with_a_weight_has_a_row() -> None:
    model = Language().eval()
    with torch.no_grad():
        want = model(IDS)
        plan = {"head": QuantConfig("int8"), "table": QuantConfig("int8"), "up": None, "*": QuantConfig("int4", 32)}
        report = mc.convert(model, plan, kinds=("linear", "embedding"), freeze=True)
        assert {row.name: (row.kind, row.note) for row in report.rows} == {
            "table": ("embedding", ""),
            "up": ("linear", "left, as 'up' says"),
            "down": ("linear", ""),
            "norm": ("LayerNorm", "left: a LayerNorm"),
            "head": ("linear", ""),
        }
        assert isinstance(model.table, QuantEmbedding) and isinstance(model.head, QuantLinear)
        assert model.table.qweight is model.head.qweight  # tied integers are stored once
        assert 0 < relative(model(IDS), want) < 0.03
    text = str(report)
    assert "int4 g32, int8" in text and "norm" not in text and "3 of 4 layers replaced" in text.replace("\n", " ")
    left = mc.convert(Language(), QuantConfig("int8"))
    assert {row.name: row.note for row in left.rows}["table"] == "left: kinds has no 'embedding'"


@pytest.mark.parametrize("config", [QuantConfig("int8"), SparseQuantConfig(0.0)], ids=str)
@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(3, 8, (3, 2), stride=2, dilation=(1, 2), padding=(2, 1), bias=False),
        nn.Conv2d(3, 8, 1),
        nn.Conv2d(3, 8, (3, 5), padding="same", dilation=(1, 2)),
        nn.Conv1d(3, 8, 5, padding=2, stride=2),
        nn.Conv1d(3, 8, 1),
    ],
    ids=str,
)
def test_a_convolution_is_a_product_over_patches(conv: nn.Conv1d | nn.Conv2d, config: Any) -> None:
    model = nn.Sequential(copy.deepcopy(conv)).eval()
    x = normal(2, 3, 13) if isinstance(conv, nn.Conv1d) else normal(2, 3, 13, 11)
    report = mc.convert(model, config, kinds=("conv",))
    assert report.converted == ("0",) and isinstance(model[0], PatchLinear)
    assert report.rows[0].shape == tuple(conv.weight.shape)
    with torch.no_grad():
        y = model(x)
        assert y.shape == conv(x).shape and relative(y, conv(x)) < 0.02
        assert torch.equal(model(x[0]), y[0])
    assert mc.nn.to_dense(model) == ("0",) and type(model[0]) is type(conv)
    assert torch.equal(model(x), conv(x))


def test_what_cannot_be_converted_says_why() -> None:
    model = nn.ModuleDict(
        {
            "grouped": nn.Conv2d(4, 4, 3, groups=2),
            "circular": nn.Conv1d(4, 4, 3, padding_mode="circular"),
            "clipped": nn.Embedding(5, 4, max_norm=1.0),
            "table": nn.Embedding(5, 4),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "fine": nn.Linear(4, 4),
        }
    )
    report = mc.convert(model, SparseQuantConfig(0.5), kinds=("linear", "conv", "embedding"))
    notes = {row.name: row.note for row in report.rows}
    assert (
        notes["grouped"]
        == notes["circular"].replace("Conv1d", "Conv2d")
        == "left: a Conv2d with groups or another padding"
    )
    assert notes["clipped"] == "left: an Embedding" and notes["table"] == "left: an embedding takes int8 or int4"
    assert notes["normed"].startswith("left: ") and notes["fine"] == ""
    with pytest.raises(ValueError, match=r"kinds must be of \('linear', 'conv', 'embedding'\), got 'norm'"):
        mc.convert(model, kinds=("norm",))
    with pytest.raises(ValueError, match="plan='auto' and budget must be given together"):
        mc.convert(model, "auto")
    with pytest.raises(ValueError, match="plan must be a config, a mapping or 'auto', got 'fast'"):
        mc.convert(model, "fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="smooth must be given with data"):
        mc.convert(model, smooth=0.5)
    with pytest.warns(DeprecationWarning, match="config is deprecated; use plan"):
        mc.convert(model, config={"normed": None})


def test_a_mask_of_torch_is_taken() -> None:
    linear = nn.Linear(32, 16)
    mask = torch.zeros(16, 32, dtype=torch.bool)
    mask[8:, 3], mask[2, 5] = True, True
    torch_prune.custom_from_mask(linear, "weight", mask)
    model = nn.Sequential(linear)
    want = linear(normal(3, 32)).detach()
    report = mc.convert(model, SparseQuantConfig(0.9))
    assert isinstance(model[0], SparseQuantLinear) and report.converted == ("0",)
    assert model[0].pattern.vectors == 2 and relative(model[0](normal(3, 32)), want) < 0.02
    assert not model[0].matrix().to_dense()[~mask].any()


def test_transposed_linear_layers_are_linear() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(24, 32)).eval()
    want = model(normal(3, 32)).detach()
    report = mc.convert(model, QuantConfig("int8"))
    assert report.rows[0].shape == (24, 32) and report.converted == ("0",)
    with torch.no_grad():
        assert relative(model(normal(3, 32)), want) < 0.02


@pytest.mark.parametrize("freeze", [False, True])
def test_a_meta_model_is_converted_and_loaded_later(freeze: bool) -> None:
    plan = {"table": QuantConfig("int8"), "*": QuantConfig("int4", 32)}
    source = Language().eval()
    mc.convert(source, plan, kinds=("linear", "embedding"), freeze=freeze)
    with torch.device("meta"):
        other = Language().eval()
    report = mc.convert(other, plan, kinds=("linear", "embedding"), freeze=freeze)
    assert len(report.converted) == 4 and all(each.is_meta for each in other.state_dict().values() if each.ndim > 1)
    other.load_state_dict(source.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(other(IDS), source(IDS))
    sparse = mc.convert(nn.Sequential(nn.Linear(8, 8, device="meta")), SparseQuantConfig(0.5))
    assert sparse.rows[0].note == "left: on the meta device, where no vectors can be selected"


@pytest.mark.parametrize("freeze", [False, True])
def test_to_dense_undoes_a_conversion(freeze: bool) -> None:
    model, reference = Language().eval(), Language().eval()
    plan = {"up": SparseQuantConfig(0.5), "*": QuantConfig("int8")}
    mc.convert(model, plan, kinds=("linear", "embedding"), freeze=freeze)
    with torch.no_grad():
        quantized = model(IDS)
    assert mc.nn.to_dense(model) == ("table", "up", "down", "head")
    assert not any(isinstance(each, (QuantLinear, SparseQuantLinear, QuantEmbedding)) for each in model.modules())
    with torch.no_grad():
        y = model(IDS)
    if freeze:
        assert relative(y, quantized) < 0.02
    else:
        model.table = reference.table  # an embedding keeps integers alone
        with torch.no_grad():
            assert torch.equal(model(IDS), reference(IDS))


def test_an_encoder_gets_its_fast_path_back() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    before = layer.activation_relu_or_gelu
    report = mc.convert(layer, QuantConfig("int8"))
    assert report.without_fast_path and layer.activation_relu_or_gelu == 0
    mc.nn.to_dense(layer)
    assert layer.activation_relu_or_gelu == before


class Uneven(nn.Module):
    """Two large layers, of which rounding the first one costs far more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
        with torch.no_grad():
            self.first.weight[:, 0] *= 40

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + 0.1 * self.second(x)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted times that do not depend on the machine."""

    def predict(m: int, k: int, rows: int, config: Any, threads: int) -> float:
        bits = 32 if config is None else config.bits
        return m * k * rows * bits / 1e6

    monkeypatch.setattr("magicube_cutlass.nn.auto_plan.predict_layer", predict)


def test_a_plan_keeps_its_budget_and_takes_the_fastest_formats(times: None) -> None:
    data = [normal(32, 256), normal(8, 256, seed=1)]
    plans = []
    for most in (0.0, 1e-3, 1.0):
        model, reference = Uneven(), Uneven()
        modes = model.training
        report = mc.convert(model, "auto", budget=Budget(most, data), progress=False)
        found = report.predicted
        assert found is not None and found.loss <= most and model.training is modes
        plans.append(found.plan)
        with torch.no_grad():
            errors = [(model.eval()(x) - reference(x)).double().square().sum() for x in data]
            norms = [reference(x).double().square().sum() for x in data]
        assert float(sum(errors) / sum(norms)) == pytest.approx(found.loss, rel=1e-6, abs=1e-12)
        assert found.microseconds <= found.float_microseconds
    four = QuantConfig("int4", group_size=32)
    assert plans[0] == {"first": None, "second": None} and plans[2] == {"first": four, "second": four}
    assert plans[1]["first"] != four and plans[1]["second"] == four
    assert "predicted" in str(report) and "loss" in str(report)


def test_a_metric_of_the_caller_decides(times: None) -> None:
    calls = []

    def metric(model: nn.Module) -> float:
        calls.append(type(model.first).__name__)
        return 1.0 if isinstance(model.second, QuantLinear) else 0.5

    report = mc.convert(Uneven(), "auto", budget=Budget(0.1, [normal(4, 256)], metric), progress=False)
    assert report.converted == ("first",) and "QuantLinear" in calls


def test_layers_without_a_cost_model_are_timed_and_budgets_checked() -> None:
    from magicube_cutlass.nn.auto_plan import predict_layer

    for config in (None, QuantConfig("int4", group_size=32), QuantConfig("int8"), SparseQuantConfig(0.9)):
        assert 0 < predict_layer(64, 96, 3, config, 1) < 1e6
    with pytest.raises(ValueError, match=r"max_loss must be at least 0, got -1"):
        Budget(-1, [1])
    with pytest.raises(ValueError, match="data must hold at least one entry, got none"):
        Budget(1, [])
    meta = nn.Sequential(nn.Linear(4, 4, device="meta"))
    with pytest.raises(NotImplementedError, match="plan='auto' needs a model on a CPU, got meta"):
        mc.convert(meta, "auto", budget=Budget(1, [torch.ones(1, 4)]))


def test_smooth_scales_are_set_by_a_conversion() -> None:
    model, x = nn.Sequential(nn.Linear(64, 16)), normal(20, 64)
    x[:, 3] *= 100
    want = model(x).detach()
    plain = copy.deepcopy(model)
    mc.convert(plain, QuantConfig("int8"))
    mc.convert(model, QuantConfig("int8"), data=[x], smooth=0.5, calibrate=[x], progress=False)
    assert model[0].smooth is not None and model[0].act_scale is not None
    assert relative(model(x), want) < relative(plain(x), want)


def test_the_page_s_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(block, scope)
    assert len(blocks) >= 3 and relative(scope["y"], scope["want"]) < 0.2
    assert type(scope["model"][0]) is nn.Linear
