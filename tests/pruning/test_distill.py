"""Distillation: it learns, keeps masks, goes on from a checkpoint as if it had not stopped."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magicube_cutlass as mc
from magicube_cutlass.pruning import LossWeights, distill
from magicube_cutlass.pruning import distill as distill_function
from magicube_cutlass.pruning.distill_loss import Teacher, losses, states_of
from magicube_cutlass.pruning.embedding import mean_embedding


class Network(nn.Module):
    """Tokens through two blocks to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(16, 30)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        x = self.table(input_ids)
        for layer in self.layers:
            x = x + layer(x)

        class Output:
            logits = self.head(x)

        return Output()


def _setting() -> tuple[nn.Module, nn.Module, list[dict[str, Tensor]]]:
    dense = Network()
    data = [{"input_ids": torch.randint(30, (12, 5 + i % 3))} for i in range(6)]
    student = copy.deepcopy(dense)
    mc.prune_model(student, 0.5, data, allocation="uniform", progress=False)
    return dense, student, data


def test_training_brings_the_student_closer_and_keeps_the_masks() -> None:
    dense, student, data = _setting()
    before = copy.deepcopy(student)
    options = {"steps": 150, "lr": 2e-3, "warmup": 5, "progress": False}
    report = distill(student, dense, data, weights=LossWeights(logits=1.0), **options)
    assert report.is_finished and report.history[-1]["loss"] < 0.5 * report.history[0]["loss"]
    with torch.no_grad():
        errors = [
            sum(float((each(**batch).logits - dense(**batch).logits).square().mean()) for batch in data)
            for each in (before, student)
        ]
    assert errors[1] < 0.6 * errors[0]
    for old, new in zip(before.layers, student.layers, strict=True):
        assert torch.equal(old[0].weight == 0, new[0].weight == 0)
    assert torch.equal(student.table.weight, dense.table.weight)  # tables are not trained
    assert all(each.requires_grad for each in student.parameters())


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_a_run_that_was_stopped_ends_with_the_same_weights(tmp_path: Path, cache_bytes: int) -> None:
    dense, student, data = _setting()
    other = copy.deepcopy(student)
    options: dict[str, Any] = {"steps": 20, "warmup": 4, "seed": 5, "progress": False, "save_every": 3}
    whole = distill(student, dense, data, cache_bytes=2**20, **options)
    path = tmp_path / "run.pt"
    pieces, times = 0, (0.0, 0.0)
    while True:
        again = copy.deepcopy(other)  # as a new process has it
        report = distill(again, dense, data, checkpoint=path, seconds=0.0, cache_bytes=cache_bytes, **options)
        pieces += 1
        assert report.seconds > times[0] and report.cpu_seconds > times[1]  # those of all pieces
        times = report.seconds, report.cpu_seconds
        if report.is_finished:
            break
        assert report.step == pieces  # one step a piece
    assert pieces == 20 and [row["step"] for row in report.history] == [row["step"] for row in whole.history]
    for name, value in student.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert distill(again, dense, data, checkpoint=path, **options).step == 20  # nothing is left to do


def test_another_schedule_does_not_go_on(tmp_path: Path) -> None:
    dense, student, data = _setting()
    options: dict[str, Any] = {"checkpoint": tmp_path / "run.pt", "progress": False}
    distill(student, dense, data, steps=2, **options)
    with pytest.raises(ValueError, match="another steps"):
        distill(student, dense, data, steps=3, **options)


def test_the_teacher_runs_once_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, student, data = _setting()
    runs = []
    dense.register_forward_hook(lambda *_: runs.append(1))
    distill(student, dense, data, steps=18, progress=False)
    assert len(runs) == len(data)
    runs.clear()
    distill(student, dense, data, steps=18, cache_bytes=0, progress=False)
    assert len(runs) == 18


def test_a_cache_of_some_bytes_holds_some_batches() -> None:
    dense, _, data = _setting()
    blocks = list(dense.layers)
    size = states_of(dense, blocks, data[0], mean_embedding).nbytes
    teacher = Teacher(dense, mean_embedding, size + 1)
    for i, batch in enumerate(data):
        teacher(i, batch)
    assert list(teacher.known) == [0]


def test_hidden_tokens_have_no_part_in_the_loss() -> None:
    dense, student, _ = _setting()
    ids, mask = torch.randint(30, (4, 6)), torch.ones(4, 6, dtype=torch.int64)
    mask[:, 4:] = 0
    changed = ids.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 30
    found = []
    for each in (ids, changed):
        batch = {"input_ids": each, "attention_mask": mask}
        target = Teacher(dense, mean_embedding, 0)(0, batch)
        weights = LossWeights(logits=1.0)
        found.append(float(losses(student, list(student.layers), batch, target, mean_embedding, weights).detach()))
    assert found[0] == pytest.approx(found[1], rel=1e-5) and found[0] > 0


def test_evaluation_is_in_the_history() -> None:
    dense, student, data = _setting()
    found = mc.distill(
        student, dense, data, steps=10, evaluate=lambda model: {"quality": float(model.training)}, evaluate_every=4,
        progress=False,
    )  # fmt: skip
    assert [(row["step"], row["quality"]) for row in found.history if "quality" in row] == [
        (4, 0.0),
        (8, 0.0),
        (10, 0.0),
    ]


def test_bad_arguments_are_named() -> None:
    dense, student, data = _setting()
    assert distill is distill_function
    with pytest.raises(ValueError, match="at least one batch"):
        distill(student, dense, [], steps=1)
    with pytest.raises(ValueError, match="parameters to train"):
        distill(student, dense, data, steps=1, freeze=lambda *_: True)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="no logits"):
        distill(plain, copy.deepcopy(plain), [torch.ones(2, 8)], steps=1, weights=LossWeights(logits=1), progress=False)
