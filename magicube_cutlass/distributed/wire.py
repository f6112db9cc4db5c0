"""Bytes that collectives send, counted as they are called."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from magicube_cutlass.distributed.cost_model import sent_bytes

__all__ = ["WireBytes"]

_KINDS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "broadcast")


class WireBytes(TorchDispatchMode):
    """Count what this rank sends in functional collectives: a context manager.

    A ring's volume: an all-gather sends a part n - 1 times, a reduce-scatter (n - 1) / n of its input, an all-reduce
    twice that, an all-to-all what is not its own.

    Attributes
    ----------
    by_kind : Counter
        Bytes by name of the collective.
    by_dtype : Counter
        Bytes by dtype.

    Examples
    --------
    >>> import torch.distributed._functional_collectives as fc
    >>> from magicube_cutlass.distributed import init_mesh
    >>> mesh = init_mesh("cpu")
    >>> with WireBytes() as wire:
    ...     total = fc.all_reduce(torch.ones(4), "sum", mesh)
    >>> total.sum().item(), wire.total, dict(wire.calls)
    (4.0, 0, {'all_reduce': 1})
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: Counter[str] = Counter()
        self.by_dtype: Counter[torch.dtype] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Bytes of all."""
        return sum(self.by_kind.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and run."""
        name = func._schema.name.rpartition("::")[2].removesuffix("_")
        if name in _KINDS and "c10d" in func._schema.name:
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        x = args[0]
        if not isinstance(x, Tensor):
            return
        group = dist.distributed_c10d._resolve_process_group(args[-1])
        size, ranks = x.numel() * x.element_size(), group.size()
        if name == "all_to_all_single":
            inner = x[:1].numel() * x.element_size()
            sent = sum(args[2]) * inner - args[2][group.rank()] * inner
        else:
            sent = sent_bytes(name, size, ranks)
        self.calls[name] += 1
        self.by_kind[name] += sent
        self.by_dtype[x.dtype] += sent
