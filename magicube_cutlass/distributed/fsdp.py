"""FSDP2 of sparse layers: ``fully_shard`` gathers the stored vectors of a weight, and no zeros.

The master weight becomes a tensor subclass with torch's extension points, ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather``. Gradients are reduced as dense matrices, as FSDP does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from magicube_cutlass.distributed.collectives import chunk_bounds
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.nn.linear import SparseQuantLinear

__all__ = ["SparseMaster", "gather_stored"]

_KEEPS = {  # what fully_shard, checkpoints and copies do with a parameter
    torch.ops.aten.detach.default, torch.ops.aten.split.Tensor, torch.ops.aten.slice.Tensor,
    torch.ops.aten.new_zeros.default, torch.ops.aten.view.default, torch.ops.aten.as_strided.default,
    torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten._pin_memory.default,
    torch.ops.aten.empty_like.default, torch.ops.aten.alias.default,
}  # fmt: skip


class _Stored(NamedTuple):
    """Places of the stored elements of a weight whose rows are cut over ranks."""

    local: tuple[Tensor, ...]  # per rank, flat in its rows
    whole: Tensor  # flat in the whole weight, rank by rank
    longest: int


def _stored(pattern: Pattern, ranks: int) -> _Stored:
    """Cached on the pattern."""
    found: _Stored | None = pattern._cache.get(("fsdp", ranks))
    if found is None:
        (m, k), v = pattern.shape, pattern.vector_length
        rows = (pattern.row_indices[:, None] * v + torch.arange(v, device=pattern.device)).flatten()
        places = rows * k + pattern.col_indices[:, None].long().expand(-1, v).flatten()
        places = places[rows < m].sort().values
        bounds = chunk_bounds(m, ranks)
        edges = torch.searchsorted(places, torch.tensor([cut * k for cut in bounds], device=places.device)).tolist()
        local = tuple(places[edges[r] : edges[r + 1]] - bounds[r] * k for r in range(ranks))
        found = _Stored(local, places, max(map(len, local)))
        pattern._cache["fsdp", ranks] = found
    return found


class SparseMaster(Tensor):
    """Dense float master of a sparse layer (out, in) that FSDP gathers by its stored vectors.

    Made by :func:`gather_stored`. Behaves as the tensor it holds; a checkpoint stores it as a plain one.

    Examples
    --------
    >>> master = SparseMaster(torch.ones(2, 3))
    >>> type(master.detach()).__name__, type(master + 1).__name__
    ('SparseMaster', 'Tensor')
    """

    _data: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, requires_grad: bool = False) -> SparseMaster:
        made: SparseMaster = Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
            device=data.device, requires_grad=requires_grad,
        )  # fmt: skip
        return made

    def __init__(self, data: Tensor, requires_grad: bool = False) -> None:
        self._data = data

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SparseMaster({self._data})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._data.__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> SparseMaster:
        return SparseMaster(inner["_data"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run on the tensors inside."""
        kwargs = kwargs or {}
        inner_args, inner_kwargs = tree_map_only(SparseMaster, lambda x: x._data, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        if func in _KEEPS:
            out = tree_map_only(Tensor, SparseMaster, out)
            return return_and_correct_aliasing(func, args, kwargs, out)
        if func._schema.is_mutable:
            return return_and_correct_aliasing(func, args, kwargs, out) if out is not None else None
        return out

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return the stored elements of this rank's rows, padded to the most of a rank.

        Rows that do not divide evenly are gathered as they are: torch wants them of one size.
        """
        if not isinstance(module, SparseQuantLinear):
            raise TypeError(f"module must be a SparseQuantLinear, got {type(module).__name__}")
        ranks, data = mesh.size(), self._data.detach()
        data = data if mp_policy.param_dtype is None else data.to(mp_policy.param_dtype)
        if outer_size[0] % ranks:
            missing = -(-outer_size[0] // ranks) - data.shape[0]
            return (torch.nn.functional.pad(data, (0, 0, 0, missing)),), (module, None)
        stored = _stored(module.pattern, ranks)
        own = stored.local[mesh.get_local_rank()]
        sent = data.new_zeros(stored.longest)
        sent[: len(own)] = data.reshape(-1)[own]
        return (sent,), (module, stored)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return the dense weight, zeros where nothing is stored; the layer makes its integers anew."""
        (gathered,), (module, stored) = all_gather_outputs, metadata
        shape = (module.out_features, module.in_features)
        dense = gathered.new_empty(shape) if out is None else out.detach()
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(dense):
            if stored is None:
                dense.copy_(gathered.view(-1, shape[1])[: shape[0]])
            else:
                parts = gathered.view(len(stored.local), stored.longest)
                values = torch.cat([part[: len(own)] for part, own in zip(parts, stored.local, strict=True)])
                dense.zero_().view(-1)[stored.whole] = values
        return (dense, (dense,)) if out is None else None


def gather_stored(model: nn.Module) -> nn.Module:
    """Prepare the sparse layers of a model for ``torch.distributed.fsdp.fully_shard``, in place.

    Their master weights become :class:`SparseMaster`, so that an all-gather sends the stored vectors only: a share of
    the bytes that is the density of the weight. Without it zeros travel too.

    Parameters
    ----------
    model : nn.Module
        Converted, before ``fully_shard`` and before the optimizer is made.

    Returns
    -------
    nn.Module
        The same.

    Raises
    ------
    ValueError
        If no layer of `model` has a master weight.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> model = nn.Sequential(nn.Linear(64, 32))
    >>> report = mc.convert(model)
    >>> type(gather_stored(model)[0].weight.data).__name__
    'SparseMaster'
    """
    layers = [each for each in model.modules() if isinstance(each, SparseQuantLinear) and each.weight is not None]
    if not layers:
        raise ValueError("model must have SparseQuantLinear layers with master weights, got none: see convert")
    for layer in layers:
        assert layer.weight is not None
        weight = layer.weight
        if not isinstance(weight.data, SparseMaster):
            layer.weight = nn.Parameter(SparseMaster(weight.detach()), requires_grad=weight.requires_grad)
    return model
