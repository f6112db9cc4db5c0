"""The sparse Transformer: its masks, its training that goes on from checkpoints, its table."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import encoder_training
import sparse_transformer as example
from encoder_training import Corpus, Plan, Trainer
from listops import ListOps
from rich.progress import Progress
from safetensors.torch import load_file
from sparse_encoder import Encoder, Shape, attention_mask, dense, masked, quantized

SMALL = Shape(vocabulary=17, classes=10, length=64, layers=2, heads=2, depth=8)
LISTS = ListOps(max_depth=3, max_args=4, min_length=5, max_length=40)
QUIET = Progress(disable=True)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return encoder_training.load_listops(LISTS, (64, 16), 64, QUIET)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trainer(corpus: Corpus, steps: int = 6, bits: tuple[int, int] | None = (8, 8), half: bool = False) -> Trainer:
    torch.manual_seed(0)
    mask = attention_mask(64, 0.7)
    net = Encoder(SMALL, masked(mask) if bits is None else quantized(mask, *bits))
    return Trainer(net, corpus, Plan(steps, 4, 1e-3, half))


@pytest.mark.parametrize("length", [256, 2048])
@pytest.mark.parametrize("sparsity", [0.9, 0.95])
def test_masks_have_their_sparsity_and_the_first_word_attends_all(length: int, sparsity: float) -> None:
    mask = attention_mask(length, sparsity)
    assert mask.density == pytest.approx(1 - sparsity, rel=0.04)
    kept = mask.to_dense().bool()
    assert kept[:8].all() and kept[:, 0].all()
    assert int(kept.sum(1).min()) >= 2
    with pytest.raises(ValueError, match="sparsity must leave"):
        attention_mask(64, 0.95)


def test_words_are_padded_behind_the_class_word(corpus: Corpus) -> None:
    words, labels = corpus.train
    assert words.shape == (64, 64) and (words[:, 0] == 1).all() and labels.max() < 10
    lengths = (words != 0).sum(1)
    assert (lengths >= 6).all() and (lengths <= 41).all()
    assert all((row[: int(n)] != 0).all() for row, n in zip(words, lengths, strict=True))
    with pytest.raises(ValueError, match="length must be above max_length = 40"):
        encoder_training.load_listops(LISTS, (1, 1), 40, QUIET)


def test_weights_go_from_one_form_to_another_and_the_forms_agree(corpus: Corpus) -> None:
    mask = attention_mask(64, 0.7)
    torch.manual_seed(0)
    first = Encoder(SMALL, masked(mask)).eval()
    words = corpus.test[0].long()
    with torch.no_grad():
        expected = first(words, words == 0)
        for bits, bound in (((16, 16), 2e-3), ((16, 8), 0.02), ((8, 8), 0.02), ((8, 4), 0.2)):
            net = Encoder(SMALL, quantized(mask, *bits)).eval()
            net.load_state_dict(first.state_dict())
            assert (net(words, words == 0) - expected).norm() <= bound * expected.norm(), bits
        whole = Encoder(SMALL, dense).eval()
        whole.load_state_dict(first.state_dict())
        assert (whole(words, words == 0) - expected).norm() > 0.02 * expected.norm()  # the mask matters


def test_padding_changes_nothing(corpus: Corpus) -> None:
    words = corpus.test[0].long()
    words = words[(words != 0).sum(1) <= 32]
    other = words.clone()
    other[words == 0] = 5  # what the mask of the padding hides
    mask = attention_mask(64, 0.7)
    for attention, bound in ((dense, 2e-6), (masked(mask), 2e-6), (quantized(mask, 8, 8), 5e-3)):  # V has one scale
        torch.manual_seed(0)
        net = Encoder(SMALL, attention).eval()
        with torch.no_grad():
            assert torch.allclose(net(words, words == 0), net(other, words == 0), rtol=0, atol=bound)


@pytest.mark.parametrize("bits", [None, (8, 4)])
def test_training_goes_on_from_a_checkpoint_with_the_same_numbers(
    corpus: Corpus, tmp_path: Path, bits: tuple[int, int] | None
) -> None:
    path = tmp_path / "stage.safetensors"
    whole = trainer(corpus, bits=bits)
    assert whole.run(QUIET, "whole", float("inf"), None)
    stopped = trainer(corpus, bits=bits)
    for _ in range(3):
        stopped.step()
    assert not stopped.run(QUIET, "stopped", 0.0, path)  # the time is over: it saves
    torch.manual_seed(99)
    resumed = trainer(corpus, bits=bits)
    for parameter in resumed.net.parameters():
        parameter.data.normal_()
    resumed.load(path)
    assert resumed.state.step == 3
    assert resumed.run(QUIET, "resumed", float("inf"), path)
    for (name, x), y in zip(whole.net.state_dict().items(), resumed.net.state_dict().values(), strict=True):
        assert torch.equal(x, y), name
    assert whole.state.loss == resumed.state.loss
    stored = encoder_training.stored_state(path)
    assert stored is not None and stored.step == 6 and not stored.result


def test_steps_draw_words_of_their_own(corpus: Corpus) -> None:
    one, seen = trainer(corpus, bits=None), []
    one.net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    for seed in (0, 1):
        one.plan = replace(one.plan, seed=seed)
        one.state.step = 0
        for _ in range(6):
            one.step()
    assert len({tuple(words.flatten().tolist()) for words in seen}) == 12


def test_the_rate_rises_falls_and_ends_by_time_as_well(corpus: Corpus) -> None:
    one = trainer(corpus, steps=100, bits=None)
    rates = []
    for step in range(100):
        one.state.step = step
        rates.append(one._rate())
    assert max(rates) == pytest.approx(1e-3, rel=0.02) and rates.index(max(rates)) in range(8, 12)
    assert rates[0] < 3e-4 and rates[-1] < 2e-6
    one.plan = replace(one.plan, seconds=10.0)
    one.state.step, one.state.seconds = 20, 10.0
    assert one.share == 1 and one._rate() == pytest.approx(0, abs=1e-9)


def test_training_learns_a_simple_rule(corpus: Corpus) -> None:
    """Classes that the second word tells: the loss falls far below that of guessing."""
    words = corpus.train[0]
    known = Corpus("rule", (words, words[:, 1].long() % 4), corpus.test, 17, 10)
    one = trainer(known, steps=30)
    one.plan = replace(one.plan, batch=16, rate=1e-2)
    losses = [float(one.step()) for _ in range(30)]
    assert sum(losses[-5:]) / 5 < 0.6 * sum(losses[:5]) / 5


def run_of(corpus: Corpus, folder: Path, linear: float | None, seconds: float = 1e9) -> example.Run:
    import time

    size = example.Size(LISTS, 64, 2, 8, (64, 16), 3, 1, 4, 1e-3, float("inf"))
    return example.Run(corpus, SMALL, size, linear, folder, time.perf_counter() + seconds, QUIET)


def test_stages_build_on_one_another_and_are_saved(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "attention_mask", lambda length, sparsity: attention_mask(length, sparsity - 0.2))
    first, last = (example.chosen_stages(name)[0] for name in ("0.9 fp32", "0.9 8b-8b"))
    run = run_of(corpus, tmp_path, 0.5)
    assert example.measure(last, run) is None  # what it starts from is not there
    assert example.measure(first, run_of(corpus, tmp_path, None, -1.0)) is None and not run.path(first.name).exists()
    row = example.measure(first, run)
    assert row is not None and row["before tuning"] is None and row["steps"] == 3
    begun = example.trainer(last, run_of(corpus, tmp_path, None))
    trained = load_file(run.path(first.name))
    assert begun is not None and begun.state.step == 0
    for name, each in begun.net.state_dict().items():
        assert torch.equal(each, trained[f"model.{name}"]), name
    tuned = example.measure(last, run)
    assert tuned is not None and tuned["steps"] == 1 and 0 <= tuned["before tuning"] <= 1
    assert tuned["density"] == round(attention_mask(64, 0.7).density, 4)
    made = example.trainer(last, run)
    assert made is not None
    assert made.net.get_submodule("blocks.0.up").config.sparsity == 0.5  # linear layers were pruned as well
    monkeypatch.setattr(example, "trainer", lambda *of: pytest.fail("a stage that is done was made again"))
    assert example.measure(first, run) == row and example.measure(last, run) == tuned


def test_stages_are_those_of_the_table() -> None:
    names = [stage.name for stage in example.stages()]
    assert names[:4] == ["dense fp32", "dense fp16", "sparse 0.9 fp32", "sparse 0.95 fp32"]
    assert names[4:] == [f"sparse {s} {p}" for s in ("0.9", "0.95") for p in ("16b-8b", "8b-8b", "8b-4b")]
    assert [stage.name for stage in example.chosen_stages("dense,0.95 8b")] == [*names[:2], *names[-2:]]
    with pytest.raises(ValueError, match="stages must be parts of"):
        example.chosen_stages("int2")


def test_the_example_runs_whole_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(example.SIZES["tiny"], layers=1, counts=(40, 16), batch=4)
    monkeypatch.setattr(example, "SIZES", {**example.SIZES, "tiny": small})
    command = ["x", "--size", "tiny", "--out", str(tmp_path), "--stages", "dense,0.9", "--device", "cpu", "--steps"]
    command.append("2")
    monkeypatch.setattr(sys, "argv", [*command, "--stop-after", "0"])
    with pytest.raises(SystemExit, match="no stage is done"):
        example.main()
    monkeypatch.setattr(sys, "argv", command)
    example.main()
    results = json.loads((tmp_path / "sparse_transformer.json").read_text())
    assert [row["stage"] for row in results["rows"]] == [s.name for s in example.chosen_stages("dense,0.9")]
    text = example.render(results)
    assert results["machine"]["torch"] in text and "listops: 40 sequences" in text
    assert 2 <= results["task"]["commonest"] * 16 <= 16 and f"class is {results['task']['commonest']:.2%}" in text
    for row in results["rows"]:
        assert f"| {row['stage']} |" in text and f"{row['accuracy']:.2%}" in text
    assert "sparse 0.9 8b-4b" in capsys.readouterr().out
    kept = [path.name for path in (tmp_path / "stages").iterdir() if path.suffix != ".safetensors"]
    assert kept == ["setting.json"]
    monkeypatch.setattr(sys, "argv", [*command[:-1], "3"])
    with pytest.raises(SystemExit, match=r"steps must be 2 as for the checkpoints in .* got 3"):
        example.main()
    monkeypatch.setattr(sys, "argv", ["x", "--size", "tiny"])
    with pytest.raises(SystemExit):
        example.main()
