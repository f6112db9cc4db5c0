"""Runs of a model one block after another, so that the memory of one block bounds what is held."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from magicube_cutlass.nn.calibration import forward_batch

__all__ = ["Batch", "find_blocks", "token_mask"]

Batch = Any  # a tensor, a tuple or list whose first entry is the input, or a dict of keyword arguments


class _Reached(Exception):
    """The layer whose input was asked for was reached."""


def token_mask(batch: Batch) -> Tensor | None:
    """Return the attention mask of a batch as bool, shape (B, T), if it has one that hides a token.

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.pruning import token_mask
    >>> token_mask({"attention_mask": torch.tensor([[1, 1], [1, 0]])}).tolist()
    [[True, True], [True, False]]
    """
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    if mask is None or mask.ndim != 2 or bool(mask.all()):
        return None
    return mask.bool()


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that run one after another, by name: the largest ``nn.ModuleList`` or ``nn.Sequential``.

    Largest by the weights of its ``nn.Linear`` layers, and with at least 2 entries that have some. A model without one
    is one block, of name ``""``.

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.pruning import find_blocks
    >>> encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4), 2)
    >>> list(find_blocks(encoder))
    ['layers.0', 'layers.1']
    """

    def size(module: nn.Module) -> int:
        return sum(each.weight.numel() for each in module.modules() if isinstance(each, nn.Linear))

    best, most = {"": model}, 0
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            sizes = [size(each) for each in module]
            if sum(each > 0 for each in sizes) >= 2 and sum(sizes) > most:
                prefix = f"{name}." if name else ""
                best, most = {f"{prefix}{i}": each for i, each in enumerate(module)}, sum(sizes)
    return best


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no cache of keys and values of earlier tokens, restored at the end."""
    modes = {each: each.training for each in model.modules()}
    config = getattr(model, "config", None)
    cache = getattr(config, "use_cache", None)
    model.eval()
    if cache:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        for each, training in modes.items():
            each.training = training
        if cache:
            config.use_cache = cache  # type: ignore[union-attr]


@dataclass
class BlockCalls:
    """The calls of a chain of blocks on one batch: the arguments beside the hidden states, which blocks share.

    ``tokens``: bool (B, T), which tokens count, or None for all.
    """

    hidden: Any = None  # of the first block
    place: str | None = None  # keyword of the hidden states; None: the first argument
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    tokens: Tensor | None = None

    def run(self, index: int, block: nn.Module, hidden: Any) -> Any:
        """Run block `index` on hidden states and return those after it."""
        args, named = self.others[index]
        out = block(**{self.place: hidden}, **named) if self.place else block(hidden, *args, **named)
        return out[0] if isinstance(out, (tuple, list)) else out

    def selected(self, x: Tensor) -> Tensor:
        """The tokens of `x` (B, T, K) that count, (tokens, K); all if `x` has another shape."""
        if self.tokens is not None and x.shape[:-1] == self.tokens.shape:
            return x[self.tokens]
        return x.reshape(-1, x.shape[-1])


def record_calls(model: nn.Module, blocks: Sequence[nn.Module], batch: Batch) -> BlockCalls:
    """Run the model once and return what its blocks were called with."""
    calls = BlockCalls(tokens=token_mask(batch))

    def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if args:
            hidden, args, place = args[0], args[1:], None
        else:
            place = "hidden_states" if "hidden_states" in named else next(iter(named))
            hidden = named[place]
            named = {key: value for key, value in named.items() if key != place}
        if not calls.others:
            calls.hidden, calls.place = hidden, place
        calls.others.append((args, dict(named)))

    handles = [block.register_forward_pre_hook(hook, with_kwargs=True) for block in blocks]
    try:
        forward_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if len(calls.others) != len(blocks):
        raise ValueError(f"each of the {len(blocks)} blocks must run once per batch, got {len(calls.others)} runs")
    return calls


def linears(block: nn.Module) -> dict[str, nn.Linear]:
    """Plain linear layers of a block by name; subclasses are left, as ``mc.convert`` leaves them."""
    return {name: each for name, each in block.named_modules() if type(each) is nn.Linear}


def find_stages(calls: BlockCalls, index: int, block: nn.Module, hidden: Any) -> list[list[str]]:
    """Names of the linear layers of a block in the order of their calls; those with one input are together."""
    stages: list[list[str]] = []
    inputs: list[Tensor] = []  # held, so that no other tensor gets their memory

    def hook(name: str) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            same = inputs and inputs[-1].data_ptr() == x.data_ptr() and inputs[-1].shape == x.shape
            if any(name in stage for stage in stages):
                return  # called again
            if same:
                stages[-1].append(name)
            else:
                stages.append([name])
                inputs.append(x)

        return note

    handles = [each.register_forward_pre_hook(hook(name)) for name, each in linears(block).items()]
    try:
        calls.run(index, block, hidden)
    finally:
        for handle in handles:
            handle.remove()
    return stages


def input_of(calls: BlockCalls, index: int, block: nn.Module, layer: nn.Module, hidden: Any) -> Tensor:
    """The input of a layer of a block; the block runs up to it."""
    found: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        found.append(args[0])
        raise _Reached

    handle = layer.register_forward_pre_hook(hook)
    try:
        calls.run(index, block, hidden)
    except _Reached:
        pass
    finally:
        handle.remove()
    return calls.selected(found[0])


def copy_block(block: nn.Module) -> nn.Module:
    """A copy of a block that takes no gradients."""
    with torch.no_grad():
        return copy.deepcopy(block).requires_grad_(False)
