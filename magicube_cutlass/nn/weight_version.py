"""When a master weight has changed: its version, and the steps of optimizers.

Fused optimizers of torch (``AdamW(fused=True)``, the default of transformers' Trainer) write weights without raising
their versions, so each step of any optimizer counts as a change. FSDP2 hides its gathers from versions too, and sets
the gathered weight each time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_STEPS = [0]


def _count(*_: Any) -> None:
    _STEPS[0] += 1


register_optimizer_step_post_hook(_count)


def weight_version(weight: Tensor) -> int:
    """Return a number that differs from an earlier one if the tensor may have changed since.

    Examples
    --------
    >>> import torch
    >>> w = torch.zeros(2)
    >>> before = weight_version(w)
    >>> before == weight_version(w), before == weight_version(w.add_(1))
    (True, False)
    """
    version = 0 if weight.is_inference() else weight._version
    return version + (_STEPS[0] << 40)


class WatchedWeight(nn.Module):
    """A layer whose integers are made again when its `weight` is set; a warm call sets nothing."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self.__dict__["_made_of"] = None
        super().__setattr__(name, value)
