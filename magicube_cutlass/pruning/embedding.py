"""What a model says about a batch: one vector per sample, and the block outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from magicube_cutlass.pruning.walk import Batch, token_mask

__all__ = ["Embed", "mean_embedding"]

Embed = Callable[[Any, Batch], Tensor]


def output_tensor(output: Any) -> Tensor:
    """The tensor of an output: itself, ``last_hidden_state`` or ``logits`` of it, or its first entry."""
    for name in ("last_hidden_state", "logits"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    return output[0] if isinstance(output, (tuple, list)) else output


def mean_embedding(output: Any, batch: Batch) -> Tensor:
    """Return the mean of the output over the tokens of each sample, of unit length: float32 (B, D).

    ``e = v / |v|`` with ``v = sum_t m_t y_t / sum_t m_t``, m the attention mask of the batch if it has one. An output
    of two dimensions is taken as it is.

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.pruning import mean_embedding
    >>> mean_embedding(torch.tensor([[[3.0, 4.0], [3.0, 4.0]]]), None)
    tensor([[0.6000, 0.8000]])
    """
    y = output_tensor(output).float()
    if y.ndim > 2:
        mask = token_mask(batch)
        weights = torch.ones(y.shape[:-1], device=y.device) if mask is None else mask.float()
        y = (y * weights[..., None]).flatten(1, -2).sum(1) / weights.flatten(1).sum(1, keepdim=True)
    return torch.nn.functional.normalize(y, dim=-1)


@contextmanager
def outputs_of(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the outputs of blocks in the order of their calls; the list is cleared by the caller."""
    found: list[Tensor] = []

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, (tuple, list)) else output)

    handles = [block.register_forward_hook(hook) for block in blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
