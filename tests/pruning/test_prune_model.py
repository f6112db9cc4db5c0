"""Pruning of whole models: structure, order, memory, allocation, warnings."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.pruning import (
    InputStatistics,
    PruningWarning,
    allocate,
    allocation,
    find_blocks,
    predicted_us,
    row_sensitivity,
    search,
)
from magicube_cutlass.pruning import model as pruning_model


class Block(nn.Module):
    """Two layers with one input, one after them, a residual connection; the second argument is shared by all blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden_states: Tensor, shift: Tensor | None = None) -> tuple[Tensor]:
        x = hidden_states if shift is None else hidden_states + shift
        return (hidden_states + self.down(torch.tanh(self.gate(x)) * self.up(x)),)


class Model(nn.Module):
    """Tokens to vectors through blocks."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x, shift = self.table(input_ids), torch.ones(1)
        for layer in self.layers:
            x = layer(hidden_states=x, shift=shift)[0]
        return self.head(x)


def _batches(count: int = 4) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.randint(50, (8, 6 + i))} for i in range(count)]


def _pruned(model: nn.Module, sparsity: float, data: list[Any], **options: Any) -> tuple[nn.Module, Any]:
    new = copy.deepcopy(model)
    return new, mc.prune_model(new, sparsity, data, progress=False, **options)


def _error(model: nn.Module, dense: nn.Module, data: list[Any]) -> float:
    with torch.no_grad():
        return sum(float((model(**each) - dense(**each)).square().mean()) for each in data)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "obs"])
@pytest.mark.parametrize("way", ["uniform", "output_energy", "gauss_newton"])
def test_masks_are_of_whole_vectors_and_of_the_sparsity(method: str, way: str) -> None:
    model, data = Model(), _batches()
    new, report = _pruned(model, 0.5, data, method=method, allocation=way)
    assert len(report.masks) == 9 and report.sparsity == pytest.approx(0.5, abs=0.01)
    for name, mask in report.masks.items():
        weight = new.get_submodule(name).weight
        assert torch.equal(weight != 0, mask.repeat_interleave(8, 0)[: len(weight)])
    left = {row.name: row.note for row in report.rows if row.note}
    assert list(left) == ["head"] and "outside" in left["head"]
    assert torch.equal(new.head.weight, model.head.weight) and new.training


def test_convert_takes_the_vectors_of_the_report() -> None:
    model, data = Model(), _batches()
    new, report = _pruned(model, 0.6, data)
    zeros = {name: new.get_submodule(name).weight == 0 for name in report.masks}
    mc.convert(new, report.configs(bits=8))
    for name, empty in zeros.items():
        layer = new.get_submodule(name)
        assert torch.equal(layer.matrix().to_dense().abs().sum() > 0, torch.tensor(True))
        assert bool((layer.matrix().to_dense()[empty] == 0).all())
        assert layer.pattern.vectors == int(report.masks[name].sum())
    assert type(new.head) is nn.Linear


def test_the_refit_keeps_more_of_the_model() -> None:
    model, data = Model(), _batches(8)
    options = {"allocation": "uniform"}
    errors = {
        (method, refit): _error(_pruned(model, 0.5, data, method=method, refit=refit, **options)[0], model, data)
        for method in ("magnitude", "wanda", "obs")
        for refit in (False, True)
    }
    for method in ("magnitude", "wanda", "obs"):
        assert errors[method, True] < errors[method, False]
    assert errors["obs", False] < errors["magnitude", False]


def test_sparsity_zero_changes_nothing_but_rounding() -> None:
    model, data = Model(), _batches()
    new, report = _pruned(model, 0.0, data)
    assert report.sparsity == 0 and _error(new, model, data) < 1e-9


def test_equal_arguments_give_equal_weights() -> None:
    model, data = Model(), _batches()
    first, second = (_pruned(model, 0.7, data, seed=3)[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_layers_see_the_inputs_of_the_pruned_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments of a stage are those of the model whose earlier layers are pruned already."""
    model, data = Model(), _batches(1)
    seen: list[tuple[Tensor, Tensor]] = []
    add = InputStatistics.add

    def spy(self: InputStatistics, x: Tensor, x_dense: Tensor | None = None) -> None:
        assert x_dense is not None
        seen.append((x.clone(), x_dense.clone()))
        add(self, x, x_dense)

    monkeypatch.setattr(InputStatistics, "add", spy)
    new, _ = _pruned(model, 0.7, data, allocation="uniform")
    assert len(seen) == 6  # gate and up share their input
    for which, (x, x_dense) in enumerate(seen):
        for source, found in ((new, x), (model, x_dense)):
            inputs: list[Tensor] = []
            block = source.layers[which // 2]
            layer = block.down if which % 2 else block.gate
            handle = layer.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
            with torch.no_grad():
                source(**data[0])
            handle.remove()
            torch.testing.assert_close(inputs[0].reshape(found.shape), found)


def test_padding_does_not_count() -> None:
    model = Model()
    short = torch.randint(50, (8, 5))
    padded = {"input_ids": torch.cat([short, torch.full((8, 3), 49)], 1), "attention_mask": torch.ones(8, 8)}
    padded["attention_mask"][:, 5:] = 0
    one, _ = _pruned(model, 0.5, [{"input_ids": short}], allocation="output_energy")
    two, _ = _pruned(model, 0.5, [padded], allocation="output_energy")
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, rtol=1e-4, atol=1e-4)


def test_one_block_and_the_moments_of_one_layer_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[str, list[int]] = {"copies": [], "moments": []}
    alive: dict[str, weakref.WeakSet[Any]] = {name: weakref.WeakSet() for name in held}
    make_copy, init = pruning_model.copy_block, InputStatistics.__init__

    def counted(name: str, value: Any) -> None:
        gc.collect()
        alive[name].add(value)
        held[name].append(len(alive[name]))

    def copied(block: nn.Module) -> nn.Module:
        new = make_copy(block)
        counted("copies", new)
        return new

    def made(self: InputStatistics, *arguments: Any) -> None:
        init(self, *arguments)
        counted("moments", self)

    monkeypatch.setattr(pruning_model, "copy_block", copied)
    monkeypatch.setattr(InputStatistics, "__init__", made)
    _pruned(Model(blocks=5), 0.5, _batches(), allocation="uniform")
    # a new one is made before the name of the last one is bound again
    assert len(held["copies"]) == 5 and max(held["copies"]) <= 2
    assert len(held["moments"]) == 10 and max(held["moments"]) <= 2


def test_a_model_without_blocks_is_one_block() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    assert list(find_blocks(model)) == ["0", "1", "2"]
    data = [torch.randn(64, 16)]
    report = mc.prune_model(model, 0.5, data, progress=False)
    assert list(report.masks) == ["0", "2"] and report.sparsity == pytest.approx(0.5, abs=0.01)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu())

    pair = Pair()
    assert list(find_blocks(pair)) == [""]
    report = mc.prune_model(pair, 0.5, data, progress=False)
    assert list(report.masks) == ["a", "b"] and "does not reach" in str(report)


def test_the_encoder_of_torch_is_pruned() -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    report = mc.prune_model(encoder, 0.5, [torch.randn(4, 5, 16)], progress=False)
    names = {row.name: row.note for row in report.rows}
    assert not names["layers.0.linear1"] and not names["layers.1.linear2"]
    assert "NonDynamicallyQuantizableLinear" in names["layers.0.self_attn.out_proj"]


def test_patterns_choose_layers() -> None:
    _, report = _pruned(Model(), 0.5, _batches(), allocation={"*.down": 0.75, "layers.0.gate": 0.25})
    assert {row.name: row.sparsity for row in report.rows if not row.note} == {
        "layers.0.gate": 0.25, "layers.0.down": 0.75, "layers.1.down": 0.75, "layers.2.down": 0.75,
    }  # fmt: skip


def test_the_fastest_allocation_of_those_that_tie_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = Model(), _batches(8)
    names = allocate(model, 0.5, data, method="uniform")
    candidates = {"slow": names, "bad": {**names, "layers.0.down": 1.0}, "fast": {**names, "layers.0.up": 0.45}}
    times = {"slow": 3.0, "bad": 1.0, "fast": 2.0}

    def time_of(_: nn.Module, allocation: dict[str, float], *__: int) -> float:
        return next(times[name] for name, each in candidates.items() if each == allocation)

    monkeypatch.setattr(search, "predicted_us", time_of)
    best, trials = search.fastest_allocation(model, 0.5, data, candidates=candidates, tie=0.2, progress=False)
    assert [each.name for each in trials] == ["bad", "fast", "slow"] and best.name == "fast"
    assert trials[0].loss > 1.2 * best.loss


def _weight(model: nn.Module) -> float:
    return float(model.layers[0].gate.weight.detach().abs().sum())


def test_a_loss_above_the_budget_warns() -> None:
    model, data = Model(), _batches()
    with pytest.warns(PruningWarning, match=r"lost .* more than max_loss=0"):
        _, report = _pruned(model, 0.9, data, max_loss=0.0)
    assert report.loss is not None and 0 < report.loss < 2
    _, report = _pruned(model, 1.0, data, max_loss=1e9, metric=_weight, refit=False, method="magnitude")
    assert report.loss == pytest.approx(_weight(model))


def test_layers_that_count_less_are_pruned_more() -> None:
    """A head that hears one block through a small factor: its layers lose more vectors."""
    model, data = Model(blocks=2), _batches()
    with torch.no_grad():
        model.layers[1].down.weight.mul_(0.02)
    found = allocate(model, 0.5, data, method="gauss_newton", progress=False)
    assert found["layers.1.gate"] > found["layers.0.gate"] and found["layers.1.up"] > found["layers.0.up"]
    sizes = {name: model.get_submodule(name).weight.numel() for name in found}
    total = sum(found[name] * sizes[name] for name in found) / sum(sizes.values())
    assert total == pytest.approx(0.5, abs=1e-6)
    assert all(0.15 - 1e-9 <= each <= 0.625 + 1e-9 for each in found.values())
    assert all(each.requires_grad for each in model.parameters())


def test_row_sensitivity_is_the_diagonal_of_the_gauss_newton_matrix() -> None:
    """For one linear layer and the output as embedding the mean over directions of |J r|^2 has a closed form."""
    model, x = nn.Linear(4, 3), torch.randn(500, 4)
    found = row_sensitivity(model, [x], embed=lambda y, _: y * torch.tensor([1.0, 2.0, 0.0]))[""]
    torch.testing.assert_close(found, torch.tensor([1.0, 4.0, 0.0], dtype=torch.float64), rtol=0.15, atol=1e-9)
    again = row_sensitivity(model, [x], embed=lambda y, _: y * torch.tensor([1.0, 2.0, 0.0]))[""]
    assert torch.equal(found, again)


def test_time_moves_sparsity_to_layers_whose_vectors_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = Model(), _batches()
    plain = allocate(model, 0.5, data, progress=False)
    monkeypatch.setattr(allocation, "_vector_us", lambda layer, *_: 4.0 if layer is model.layers[0].up else 1.0)
    weighted = allocate(model, 0.5, data, time_weight=1.0, progress=False)
    assert weighted["layers.0.up"] > plain["layers.0.up"]
    assert predicted_us(model, dict.fromkeys(plain, 0.97)) <= predicted_us(model, dict.fromkeys(plain, 0.0))


def test_bad_arguments_are_named() -> None:
    model, data = Model(), _batches()
    for match, options in (
        ("method must be one of", {"method": "random"}),
        ("allocation must be one of", {"allocation": "even"}),
        ("sparsity must lie", {"sparsity": 1.5}),
        ("vector_length must be one of", {"vector_length": 3}),
        ("at least one batch", {"data": []}),
    ):
        with pytest.raises(ValueError, match=match):
            mc.prune_model(model, **{"sparsity": 0.5, "data": data, "progress": False, **options})
