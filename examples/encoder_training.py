"""Data, training and checkpoints of the sparse Transformer's example."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parent / "data"))

import bytes_text
import listops

CLASS = 1  # the word whose place the class is read from, in either task; 0 is padding
assert CLASS == listops.CLASS == bytes_text.CLASS and listops.PAD == bytes_text.PAD == 0
_WARM, _TOLD = 0.1, 10  # share of the steps in which the rate rises; steps between two looks at the loss
Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Corpus:
    """Words int16 (n, length), padded with zeros behind, and classes int64 (n,), to train and to test with."""

    name: str
    train: Pairs
    test: Pairs
    vocabulary: int
    classes: int

    def to(self, device: torch.device) -> Corpus:
        train, test = ((words.to(device), labels.to(device)) for words, labels in (self.train, self.test))
        return Corpus(self.name, train, test, self.vocabulary, self.classes)


def _filled(samples: Iterable[tuple[Any, int]], count: int, length: int, told: Callable[[], object]) -> Pairs:
    words, labels = torch.zeros(count, length, dtype=torch.int16), torch.zeros(count, dtype=torch.int64)
    words[:, 0] = CLASS
    for i, (numbers, label) in enumerate(samples):
        words[i, 1 : 1 + len(numbers)] = torch.from_numpy(numbers).to(torch.int16)
        labels[i] = label
        told()
    return words, labels


def load_listops(kind: listops.ListOps, counts: tuple[int, int], length: int, progress: Progress) -> Corpus:
    """Lists drawn for training and for the test, ``counts`` of them; ``ValueError`` unless they fit ``length``."""
    if kind.max_length >= length:
        raise ValueError(f"length must be above max_length = {kind.max_length} of the lists, got {length}")
    bar = progress.add_task("lists", total=sum(counts))
    parts = [
        _filled(islice(listops.samples(kind, (0, split)), count), count, length, lambda: progress.advance(bar))
        for split, count in enumerate(counts)
    ]
    return Corpus("listops", parts[0], parts[1], len(listops.WORDS), listops.CLASSES)


def load_bytes(folder: Path, counts: tuple[int, int], length: int, progress: Progress) -> Corpus:
    """The first texts of ``folder`` in a drawn order, at most ``counts`` of them, cut to ``length - 1`` bytes."""
    parts = []
    for split, most in zip(("train", "test"), counts, strict=True):
        found = bytes_text.samples(folder, split, length - 1)[:most]
        bar = progress.add_task(f"texts, {split}", total=len(found))
        parts.append(_filled(found, len(found), length, lambda bar=bar: progress.advance(bar)))  # type: ignore[misc]
    return Corpus("bytes", parts[0], parts[1], bytes_text.VOCABULARY, len(bytes_text.classes(folder)))


@dataclass(frozen=True)
class Plan:
    """How a stage trains: AdamW, a rate that rises and then falls as a cosine, no dropout.

    ``half``: autocast, float16 on a GPU and bfloat16 on a CPU.  ``seconds``: the time it may take; the rate falls
    sooner where that ends it before ``steps``.
    """

    steps: int
    batch: int
    rate: float
    half: bool = False
    seconds: float = math.inf
    seed: int = 0


@dataclass
class State:
    """How far a stage has come; ``result`` is empty until it is done."""

    step: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    result: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)  # of who trains


class Trainer:
    """One stage of training, which a checkpoint holds wholly: another process goes on with the same numbers."""

    def __init__(self, net: nn.Module, corpus: Corpus, plan: Plan) -> None:
        self.net, self.corpus, self.plan, self.state = net, corpus, plan, State()
        self.device = corpus.train[0].device
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=plan.rate, weight_decay=0.01)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=plan.half and self.device.type == "cuda")

    def autocast(self) -> AbstractContextManager[Any]:
        """Lower precision, where the plan says so."""
        dtype = torch.float16 if self.device.type == "cuda" else torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=self.plan.half)

    @property
    def share(self) -> float:
        """Of the training that is done, by steps or by time."""
        return max(self.state.step / max(self.plan.steps, 1), self.state.seconds / self.plan.seconds)

    def _rate(self) -> float:
        share = min(self.share, 1.0)
        if share < _WARM:
            return self.plan.rate * (share + 1 / max(self.plan.steps, 1)) / _WARM
        return self.plan.rate * 0.5 * (1 + math.cos(math.pi * (share - _WARM) / (1 - _WARM)))

    def step(self) -> Tensor:
        """One step on words drawn by its number; returns the loss, ()."""
        words, labels = self.corpus.train
        random = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + self.state.step)
        chosen = torch.randint(len(words), (self.plan.batch,), generator=random).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.net.train()
        self.optimizer.zero_grad()
        with self.autocast():
            loss = F.cross_entropy(self.net(words[chosen].long(), words[chosen] == 0).float(), labels[chosen])
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.state.step += 1
        return loss.detach()

    def run(self, progress: Progress, name: str, deadline: float, path: Path | None, every: float = 60.0) -> bool:
        """Train on; whether it came to its end before ``deadline``, a time of :func:`time.perf_counter`.

        The checkpoint at ``path`` is written every ``every`` seconds and at the end.
        """
        bar = progress.add_task(name, total=1.0)
        progress.update(bar, completed=min(self.share, 1.0))
        begin = now = saved = time.perf_counter()
        before = self.state.seconds
        while self.share < 1 and now < deadline:
            loss = self.step()
            if self.state.step % _TOLD == 0 or self.state.step == self.plan.steps:
                self.state.loss = float(loss)  # waits for the device
                told = f"{name}, step {self.state.step}, loss {self.state.loss:.3f}"
                progress.update(bar, completed=min(self.share, 1.0), description=told)
            now = time.perf_counter()
            self.state.seconds = before + now - begin
            if path is not None and now - saved > every:
                self.save(path)
                saved = now
        if path is not None:
            self.save(path)
        return self.share >= 1

    @torch.no_grad()
    def accuracy(self, progress: Progress, name: str) -> float:
        """Share of the test's sequences that get their class."""
        self.net.eval()
        words, labels = self.corpus.test
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        parts = list(zip(words.split(self.plan.batch), labels.split(self.plan.batch), strict=True))
        for some, classes in progress.track(parts, description=f"{name}, test"):
            with self.autocast():
                right += (self.net(some.long(), some == 0).argmax(1) == classes).sum()
        return int(right) / labels.numel()

    def save(self, path: Path) -> None:
        """Parameters, the state and, until the stage is done, the optimizer's numbers: one file, replaced at once."""
        tensors = {f"model.{name}": each for name, each in self.net.state_dict().items()}
        for name, parameter in self.net.named_parameters() if not self.state.result else ():
            for key, each in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = each
        state = {"state": asdict(self.state), "scaler": self.scaler.state_dict()}
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        whole = {name: each.detach().contiguous() for name, each in tensors.items()}
        save_file(whole, part, metadata={"training": json.dumps(state)})
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Go on from what :meth:`save` wrote; the plan and the shapes must be those that it was written with."""
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            stored = json.loads(file.metadata()["training"])
        self.net.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
        state: dict[int, dict[str, Tensor]] = {}
        for number, (name, _) in enumerate(self.net.named_parameters()):
            prefix = f"optimizer.{name}."
            found = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            if found:
                state[number] = found
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.scaler.load_state_dict(stored["scaler"])
        self.state = State(**stored["state"])


def stored_state(path: Path) -> State | None:
    """How far the stage of a checkpoint has come; None where there is none."""
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        return State(**json.loads(file.metadata()["training"])["state"])
