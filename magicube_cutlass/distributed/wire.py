"""Bytes that collectives send, counted as they are called."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from magicube_cutlass.distributed.cost_model import sent_bytes

__all__ = ["WireBytes"]

_KINDS = {  # of torch.ops.c10d and of functional collectives
    "_allgather_base_": "all_gather_into_tensor", "_reduce_scatter_base_": "reduce_scatter_tensor",
    "allreduce_": "all_reduce", "alltoall_base_": "all_to_all_single", "broadcast_": "broadcast",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor",
    "all_gather_into_tensor": "all_gather_into_tensor", "reduce_scatter_tensor": "reduce_scatter_tensor",
    "all_reduce": "all_reduce", "all_to_all_single": "all_to_all_single", "broadcast": "broadcast",
}  # fmt: skip


class WireBytes(TorchDispatchMode):
    """Count what this rank sends in collectives: a context manager.

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
    >>> import torch.distributed as dist
    >>> from magicube_cutlass.distributed import init_mesh
    >>> group = init_mesh("cpu").get_group()
    >>> with WireBytes() as wire:
    ...     work = dist.all_reduce(torch.ones(4), group=group)
    >>> wire.total, dict(wire.calls)
    (0, {'all_reduce': 1})
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
        namespace, _, name = func._schema.name.partition("::")
        kind = _KINDS.get(name) if "c10d" in namespace else None
        if kind is not None:
            self._count(kind, {**dict(zip(_names(func), args, strict=False)), **(kwargs or {})})
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, given: dict[str, Any]) -> None:
        """Count a call by its arguments, which differ between both families of operators."""
        group = given.get("process_group")
        if group is None:
            group = dist.distributed_c10d._resolve_process_group(given["group_name"])
        else:
            group = dist.ProcessGroup.unbox(group)
        x = next(given[name] for name in ("input_tensor", "input", "inputs", "tensors", "self") if name in given)
        for each in x if isinstance(x, (list, tuple)) else [x]:
            size, ranks = each.numel() * each.element_size(), group.size()
            if kind == "all_to_all_single":
                splits = given.get("input_split_sizes") or [1] * ranks
                sent = size // max(sum(splits), 1) * (sum(splits) - splits[group.rank()])
            else:
                sent = sent_bytes(kind, size, ranks)
            self.calls[kind] += 1
            self.by_kind[kind] += sent
            self.by_dtype[each.dtype] += sent


def _names(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]
