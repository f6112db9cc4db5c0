"""Parallel styles of layers whose products have a chosen error."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from magicube_cutlass.distributed.collectives import check_agreement, check_mesh, chunk_bounds, digest
from magicube_cutlass.distributed.sharded_linear import become
from magicube_cutlass.distributed.slices import as_dtensor
from residual.distributed.matmul import Reduce, matmul
from residual.nn.modules import ResidualLinear

__all__ = ["ResidualColwise", "ResidualRowwise", "ShardedResidualLinear"]


class ShardedResidualLinear(nn.Module):
    """A rank's part of a :class:`residual.ResidualLinear`, made by a parallel style; for inference.

    Examples
    --------
    >>> import torch, residual
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> from magicube_cutlass.distributed import init_mesh
    >>> layer = residual.ResidualLinear(64, 32, tol=1e-3)
    >>> made = parallelize_module(layer, init_mesh("cpu"), ResidualColwise())
    >>> made(torch.ones(2, 64)).shape
    torch.Size([2, 32])
    """

    def __init__(self, layer: ResidualLinear, mesh: DeviceMesh, style: Any) -> None:
        super().__init__()
        self.shape, self.mesh, self.style, self.options = tuple(layer.weight.shape), mesh, style, layer._options()
        bounds, rank = chunk_bounds(self.shape[style.dim], mesh.size()), mesh.get_local_rank()
        part = layer.weight.detach().narrow(style.dim, bounds[rank], bounds[rank + 1] - bounds[rank])
        bias = None if layer.bias is None else layer.bias.detach()
        if bias is not None and style.dim == 0:
            bias = bias[bounds[rank] : bounds[rank + 1]]
        self.weight = nn.Parameter(part.contiguous(), requires_grad=False)  # (out_r, in) or (out, in_r)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + b`` as the style places it."""
        out, inner = self.shape
        style, mesh = self.style, self.mesh
        lead = tuple(x.shape[:-1])
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[Shard(x.ndim - 1) if style.dim else Replicate()]).to_local()
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        A = as_dtensor(rows, mesh, Shard(1) if style.dim else Replicate(), (rows.shape[0], inner))
        B = as_dtensor(self.weight.mT, mesh, Shard(1 - style.dim), (inner, out))
        options: dict[str, Any] = dict(self.options)
        if style.dim:
            options |= {"reduce": style.reduce, "placements": [style.output_layouts]}
        found = matmul(A, B, out_dtype=x.dtype, **options)
        assert isinstance(found, DTensor)
        y = found.to_local()
        y = y if self.bias is None else y + self.bias
        return y.view(*lead, y.shape[-1]) if y.shape[0] == rows.shape[0] else y

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return f"{self.shape[1]} -> {self.shape[0]}, {type(self.style).__name__}, tol={self.options.get('tol')}"


class _Style(ParallelStyle):
    dim: int

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = check_mesh(device_mesh)
        if not isinstance(module, ResidualLinear):
            raise TypeError(f"{type(self).__name__} must be applied to a ResidualLinear, got {type(module).__name__}")
        check_agreement(
            mesh, outputs=module.weight.shape[0], inputs=module.weight.shape[1], tol=module.tol or 0.0,
            weight=digest(module.weight),
        )  # fmt: skip
        return become(module, ShardedResidualLinear(module, mesh, self))


class ResidualColwise(_Style):
    """Cut a :class:`residual.ResidualLinear` by outputs; the tolerance is that of the outputs of all ranks.

    Input on all ranks, output ``Shard(-1)``, a local tensor.

    Examples
    --------
    >>> ResidualColwise().dim
    0
    """

    dim = 0


class ResidualRowwise(_Style):
    """Cut a :class:`residual.ResidualLinear` by inputs; the tolerance covers the reduction of the sums.

    Parameters
    ----------
    output_layouts : Placement, optional
        ``Replicate()`` (default) or ``Shard(0)`` of tokens.
    reduce : {"exact", "bfloat16"}, default "exact"
        As in :func:`residual.distributed.matmul`.

    Examples
    --------
    >>> ResidualRowwise(reduce="bfloat16").output_layouts
    Replicate()
    """

    dim = 1

    def __init__(self, *, output_layouts: Placement | None = None, reduce: Reduce = "exact") -> None:
        super().__init__()
        self.output_layouts = output_layouts or Replicate()
        self.reduce = reduce
        if self.output_layouts not in (Replicate(), Shard(0)):
            raise ValueError(f"output_layouts must be Replicate() or Shard(0), got {self.output_layouts}")
