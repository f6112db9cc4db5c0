"""Accuracy of sparse quantized attention: tasks, masks, stages that go on, and the table."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import magicube_cutlass as mc

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import attention_accuracy as example
import attention_tasks as tasks
from encoder_training import Corpus
from sparse_encoder import dense, quantized

SIZE = example.Size(layers=1, heads=2, counts=(64, 16), steps=4, tuning=2, batch=8, rate=2e-3)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def task() -> tasks.Task:
    return tasks.recall(64, (64, 16), 1, 2, 0)


def run_of(task: tasks.Task, folder: Path, size: example.Size = SIZE, seed: int = 0) -> example.Run:
    return example.Run(task, size, seed, folder, time.perf_counter() + 1e9)


@pytest.mark.parametrize("repeated", [False, True])
def test_an_answer_is_the_value_of_the_key_that_is_asked(repeated: bool) -> None:
    words, answers = tasks.recall_pairs(50, 64, 3, repeated)
    pairs = 28
    assert words.shape == (50, 64) and answers.shape == (50, tasks.QUESTIONS) and words.dtype == torch.int16
    for row, right in zip(words.tolist(), answers.tolist(), strict=True):
        keys, values = row[8::2], row[9::2]
        known = dict(zip(keys, values, strict=True))
        assert all(known[key] == value for key, value in zip(keys, values, strict=True))
        assert [known[key] - 2 * pairs - 1 for key in row[:8]] == right
        assert set(keys) <= set(range(1, 2 * pairs + 1)) and min(right) >= 0 and max(right) < tasks.VALUES
        if not repeated:
            assert len(known) == pairs and len(set(row[:8])) == 8
    counts = answers.flatten().bincount(minlength=tasks.VALUES)
    assert counts.max() < 60  # of 400: none is a good guess
    again = tasks.recall_pairs(50, 64, 3, repeated)
    assert torch.equal(words, again[0]) and torch.equal(answers, again[1])
    assert not torch.equal(words, tasks.recall_pairs(50, 64, 4, repeated)[0])
    with pytest.raises(ValueError, match="length must be even and at least 24, got 23"):
        tasks.recall_pairs(1, 23, 0, repeated)


@pytest.mark.parametrize(("side", "length"), [(14, 200), (28, 792)])
def test_an_image_is_a_sequence_behind_words_without_content(side: int, length: int) -> None:
    images = torch.randint(0, 256, (3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = tasks.pixel_words(images, side)
    read = tasks.read_words(side)
    assert words.shape == (3, length) and length % 8 == 0 and not words[:, :read].any()
    assert words[:, read:].min() >= 1 and words[:, read:].max() <= 256
    if side == 28:
        assert torch.equal(words[:, read:].view(3, 28, 28) - 1, images.to(torch.int16))
    else:
        means = images.double().view(3, 14, 2, 14, 2).mean((2, 4))
        assert (words[:, read:].view(3, 14, 14) - 1 - means).abs().max() <= 0.5
    with pytest.raises(ValueError, match="side must be 14 or 28, got 7"):
        tasks.pixel_words(images, 7)


@pytest.mark.parametrize("length", [200, 256, 792, 1024])
@pytest.mark.parametrize("sparsity", [0.9, 0.95])
def test_masks_have_their_sparsity_and_let_the_values_be_read(length: int, sparsity: float) -> None:
    mask = tasks.reading_mask(length, sparsity, 1)
    assert mask.shape == (length, length) and mask.vector_length == 8
    assert mask.vectors == round((1 - sparsity) * length / 8 * length)
    kept = mask.to_dense().bool()
    assert kept[:8, 1::2].all()  # of recall: every value
    assert kept[0].sum() * 2 <= mask.vectors
    others = kept[8:].sum(1)
    assert others.max() - others.min() <= 1 and others.min() >= 2
    near = [int((kept[row].nonzero() - row).abs().min()) for row in range(8, length)]
    assert max(near) <= 4
    assert not mask.equals(tasks.reading_mask(length, sparsity, 2))
    assert mask.equals(tasks.reading_mask(length, sparsity, 1))
    with pytest.raises(ValueError, match="sparsity must leave two keys to a row of 64 words"):
        tasks.reading_mask(64, 0.99, 0)


def test_without_attention_an_encoder_cannot_see_what_it_needs(task: tasks.Task) -> None:
    words = task.corpus.test[0].long()
    other = words.clone()
    other[:, 8:] = other[:, 8:].roll(1, 0)  # other pairs, the same questions
    torch.manual_seed(0)
    net = tasks.Reader(task, tasks.NoAttention).eval()
    assert net(words).shape == (16, tasks.VALUES, tasks.QUESTIONS)
    assert torch.equal(net(words), net(other))
    net = tasks.Reader(task, dense).eval()
    assert not torch.allclose(net(words), net(other), atol=1e-3)
    image = torch.zeros(2, 200, dtype=torch.long)
    image[1, 4:] = 100
    shape = replace(task.shape, length=200, classes=10)
    pixels = tasks.Task(Corpus("pixels", (image, image[:, 0]), (image, image[:, 0]), 257, 10), shape, 4, 0.1)
    blind, seeing = tasks.Reader(pixels, tasks.NoAttention).eval(), tasks.Reader(pixels, dense).eval()
    assert blind(image).shape == (2, 10) and torch.equal(blind(image)[0], blind(image)[1])
    assert not torch.allclose(seeing(image)[0], seeing(image)[1], atol=1e-3)


@pytest.mark.parametrize("bits", example.PAIRS)
def test_quantized_stages_run_the_library_s_operator(task: tasks.Task, bits: tuple[int, int]) -> None:
    """An encoder of a quantized stage, step by step: its products are those of ``sparse_attention`` to the last bit."""
    mask = tasks.reading_mask(64, 0.8, 0)
    torch.manual_seed(0)
    net = tasks.Reader(task, quantized(mask, *bits)).eval()
    words = task.corpus.test[0].long()
    with torch.no_grad():
        x = net.words(words) + net.places
        block: Any = net.blocks[0]
        y, layer = block.norm1(x), block.attention
        q, k, v = (
            each(y).unflatten(-1, (2, 32)).transpose(1, 2) for each in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        out = mc.sparse_attention(q, k, v, mask, softmax_bits=bits[0], qkv_bits=bits[1])
        h = x + layer.out_proj(out.transpose(1, 2).flatten(2))
        h = h + block.down(F.gelu(block.up(block.norm2(h))))
        assert torch.equal(net(words), net.head(net.norm(h)[:, :8]).transpose(1, 2))


@pytest.mark.long
def test_recall_is_learned_with_attention_and_not_without() -> None:
    task = tasks.recall(32, (4000, 128), 1, 2, 0)
    size = replace(SIZE, steps=250, batch=32, rate=5e-3)
    found = {}
    for stage in example.chosen_stages("no attention,dense"):
        made = example.trainer(stage, run_of(task, Path("none"), size))
        assert made is not None and made.run(example.QUIET, stage.name, float("inf"), None)
        found[stage.name] = made.accuracy(example.QUIET, stage.name)
    assert found["dense fp32"] > 0.9
    assert found["no attention"] < 0.15  # a guess: 1 in 16


def test_stages_build_on_one_another_and_are_not_trained_twice(
    task: tasks.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = tasks.reading_mask
    monkeypatch.setattr(example, "reading_mask", lambda length, sparsity, seed: mask(length, sparsity - 0.2, seed))
    first, last = (example.chosen_stages(name)[0] for name in ("0.9 fp32", "0.9 8b-8b"))
    run = run_of(task, tmp_path)
    assert example.measure(last, run) is None  # what it starts from is not there
    late = replace(run, deadline=0.0)
    assert example.measure(first, late) is None and not list(tmp_path.glob("sparse*"))
    row = example.measure(first, run)
    assert row is not None and row["before tuning"] is None and row["steps"] == 4
    begun = example.trainer(last, run)
    source = example.trainer(first, run)
    assert begun is not None and source is not None and begun.plan.steps == 2
    for name, each in source.net.state_dict().items():
        assert torch.equal(each, begun.net.state_dict()[name]), name
    tuned = example.measure(last, run)
    assert tuned is not None and 0 <= tuned["before tuning"] <= 1 and tuned["density"] == pytest.approx(0.3, abs=0.01)
    assert run.path(first.name).is_file() and not run.path(last.name).is_file()  # weights that others start from
    monkeypatch.setattr(example, "trainer", lambda *of: pytest.fail("a stage that is done was made again"))
    assert example.measure(first, run) == row and example.measure(last, run) == tuned


def test_a_stage_that_was_stopped_ends_with_the_same_weights(task: tasks.Task, tmp_path: Path) -> None:
    stage = example.chosen_stages("dense")[0]
    whole, stopped = (example.trainer(stage, run_of(task, tmp_path / name)) for name in "ab")
    assert whole is not None and stopped is not None
    assert whole.run(example.QUIET, "whole", float("inf"), None)
    stopped.step()
    path = run_of(task, tmp_path / "b").path(stage.name)
    assert not stopped.run(example.QUIET, "stopped", 0.0, path)
    resumed = example.trainer(stage, run_of(task, tmp_path / "b"))
    assert resumed is not None and resumed.state.step == 1
    assert resumed.run(example.QUIET, "resumed", float("inf"), path)
    for (name, x), y in zip(whole.net.state_dict().items(), resumed.net.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


def test_the_table_has_mean_and_spread_of_the_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "SIZES", {"recall": SIZE, "pixels": SIZE})
    command = ["x", "--device", "cpu", "--folder", str(tmp_path), "--test", "16"]
    for seed in ("0", "1"):
        monkeypatch.setattr(sys, "argv", [*command, "--seed", seed, "--stage", "no attention,dense,0.9 8b-8b"])
        example.main()
    out = capsys.readouterr().out
    assert "recall-256-seed1: dense fp32" in out and "not done yet, the same command goes on: sparse 0.9 8b-8b" in out
    monkeypatch.setattr(sys, "argv", ["x", "--table", "--folder", str(tmp_path), "--out", str(tmp_path)])
    example.main()
    results = json.loads((tmp_path / "attention_accuracy.json").read_text())
    (found,) = results["tasks"]
    assert results["device"] == "cpu" and results["machine"]["cpu"] in example.render(results)
    assert [row["stage"] for row in found["rows"]] == ["no attention", "dense fp32"] and found["length"] == 256
    row = found["rows"][1]
    assert row["seeds"] == [0, 1] and row["mean"] == pytest.approx(sum(row["accuracies"]) / 2)
    assert row["spread"] == pytest.approx(abs(row["accuracies"][0] - row["accuracies"][1]) / 2**0.5)
    text = example.render(results)
    assert "from dense fp32 to 8b-8b" not in text
    found["rows"].append({**row, "stage": "sparse 0.95 8b-8b", "mean": row["mean"] - 0.0125})
    assert "Points of recall from dense fp32 to 8b-8b: -1.25 at 0.95." in example.render(results)
    assert f"| dense fp32 |  | {100 * row['mean']:.2f} ± {100 * row['spread']:.2f} |" in text and "2 seeds" in text
    monkeypatch.setattr(sys, "argv", [*command, "--steps", "3"])
    with pytest.raises(SystemExit, match=r"steps must be 4 as for the stages in .* got 3"):
        example.main()
    monkeypatch.setattr(sys, "argv", ["x", "--table", "--folder", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="folder must hold trained stages"):
        example.main()


def test_large_sizes_have_a_table_of_their_own() -> None:
    assert example.results_name([{"length": 256}, {"length": 200}]) == "attention_accuracy"
    assert example.results_name([{"length": 1024}, {"length": 792}]) == "attention_accuracy_large"
    with pytest.raises(ValueError, match=r"folder must hold small or large sizes, got \[256, 792\]"):
        example.results_name([{"length": 256}, {"length": 792}])


def test_stages_are_those_of_the_table() -> None:
    names = [stage.name for stage in example.stages()]
    assert names[:4] == ["no attention", "dense fp32", "sparse 0.9 fp32", "sparse 0.95 fp32"]
    assert names[4:] == [f"sparse {s} {p}" for s in ("0.9", "0.95") for p in ("16b-8b", "8b-8b", "8b-4b", "4b-4b")]
    with pytest.raises(ValueError, match="stage must be parts of"):
        example.chosen_stages("int2")
