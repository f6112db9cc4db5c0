"""The loss of a distillation, and the states of the teacher it compares with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from magicube_cutlass.nn.calibration import forward_batch
from magicube_cutlass.pruning.embedding import Embed, outputs_of
from magicube_cutlass.pruning.walk import Batch, find_blocks, token_mask

__all__ = ["LossWeights"]


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms of the loss of ``distill``.

    Attributes
    ----------
    hidden : float, default 1
        Mean squared difference of the block outputs, over the variance of the teacher's.
    embedding : float, default 3
        1 minus the cosine of the embeddings.
    similarity : float, default 10
        Mean squared difference of the cosines of all pairs of a batch.
    logits : float, default 0
        KL divergence of the student's distribution from the teacher's per token; for language models.

    Examples
    --------
    >>> from magicube_cutlass.pruning import LossWeights
    >>> LossWeights(embedding=0, similarity=0, logits=1).hidden
    1.0
    """

    hidden: float = 1.0
    embedding: float = 3.0
    similarity: float = 10.0
    logits: float = 0.0


class States(NamedTuple):
    """What a model makes of a batch: outputs of its blocks, embeddings and, for a language model, logits."""

    hidden: list[Tensor]
    embedding: Tensor
    logits: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(each.nbytes for each in (*self.hidden, self.embedding, self.logits) if each is not None)


def states_of(model: nn.Module, blocks: Sequence[nn.Module], batch: Batch, embed: Embed) -> States:
    """Run the model and collect its states."""
    with outputs_of(blocks) as hidden:
        output: Any = forward_batch(model, batch)
    logits = getattr(output, "logits", None)
    return States(hidden, embed(output, batch), logits if isinstance(logits, Tensor) else None)


class Teacher:
    """States of the dense model by the index of the batch; those that fit into `cache_bytes` are kept."""

    def __init__(self, model: nn.Module, embed: Embed, cache_bytes: int) -> None:
        self.model, self.embed, self.free = model, embed, cache_bytes
        self.blocks = list(find_blocks(model).values())
        self.known: dict[int, States] = {}

    def __call__(self, index: int, batch: Batch) -> States:
        """The states for batch `index`."""
        if index in self.known:
            return self.known[index]
        with torch.no_grad():
            found = states_of(self.model, self.blocks, batch, self.embed)
        if found.nbytes <= self.free:
            self.free -= found.nbytes
            self.known[index] = found
        return found


def losses(
    student: nn.Module, blocks: Sequence[nn.Module], batch: Batch, target: States, embed: Embed, weights: LossWeights
) -> Tensor:
    """The weighted sum of the terms."""
    found = states_of(student, blocks, batch, embed)
    mask = token_mask(batch)

    def tokens(x: Tensor) -> Tensor:
        return x[mask] if mask is not None and x.shape[:-1] == mask.shape else x

    terms = []
    if weights.hidden:
        pairs = [(tokens(h).float(), tokens(t).float()) for h, t in zip(found.hidden, target.hidden, strict=True)]
        each = [(h - t).square().mean() / t.var().clamp_min(1e-12) for h, t in pairs]
        terms.append(weights.hidden * torch.stack(each).mean())
    if weights.embedding:
        terms.append(weights.embedding * (1 - (found.embedding * target.embedding).sum(-1)).mean())
    if weights.similarity:
        similarity, goal = (each.embedding @ each.embedding.T for each in (found, target))
        terms.append(weights.similarity * (similarity - goal).square().mean())
    if weights.logits:
        if found.logits is None or target.logits is None:
            raise ValueError("weights.logits must be 0 for a model whose output has no logits")
        p, q = (log_softmax(tokens(each).float().flatten(0, -2), -1) for each in (target.logits, found.logits))
        terms.append(weights.logits * kl_div(q, p, reduction="batchmean", log_target=True))
    return torch.stack([each.float() for each in terms]).sum()
