"""Parallel styles of linear layers, for ``torch.distributed.tensor.parallel.parallelize_module``.

Colwise: a rank holds outputs of the layer (rows of A), ``y_r = q(x) A_r^T + b_r``. Rowwise: it holds inputs (columns of
A), ``y = sum_r q(x)_r A_r^T + b``. A Colwise and a Rowwise layer in turn exchange nothing in between.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from magicube_cutlass.autograd.integer import quantized
from magicube_cutlass.distributed.collectives import (
    all_reduce,
    check_agreement,
    check_mesh,
    chunk_bounds,
    digest,
    gather_bytes,
    sizes_of,
)
from magicube_cutlass.distributed.local_products import DensePart, SparsePart
from magicube_cutlass.distributed.sharded import shard
from magicube_cutlass.distributed.sharded_linear import ShardedLinear, become
from magicube_cutlass.distributed.slices import (
    Slices,
    as_dtensor,
    largest,
    scaled,
    scatter_tokens,
    start_slices,
    sum_of_int8,
)
from magicube_cutlass.nn.linear import SparseQuantLinear

__all__ = ["QuantColwise", "QuantRowwise", "SparseColwise", "SparseRowwise"]

Reduce = Literal["exact", "bfloat16", "int8"]


class _Style(ParallelStyle):
    """Placements of inputs and outputs, as in torch's own styles."""

    kind: type[nn.Module]
    rowwise: bool
    input_layouts: Placement
    output_layouts: Placement
    use_local_output: bool

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = check_mesh(device_mesh)
        if not isinstance(module, self.kind):
            raise TypeError(f"{type(self).__name__} must be applied to a {self.kind.__name__}, got "
                            f"{type(module).__name__}")  # fmt: skip
        return become(module, self._layer(module, mesh))

    def _layer(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        raise NotImplementedError

    def compute(self, layer: ShardedLinear, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The output of a layer as it is placed, by local tokens `x` of a whole of `shape`."""
        raise NotImplementedError

    def forward(self, layer: ShardedLinear, x: Tensor) -> Tensor:
        """Return the output of a layer."""
        local, shape = self._local(x, layer.mesh)
        y = layer.learn(local, shape) if layer.learns(local) else self.compute(layer, local, shape)
        return self._result(y, layer.mesh, (*shape[:-1], layer.part.bounds[-1] if not self.rowwise else y.shape[-1]))

    def _own(self, bias: Tensor | None, bounds: tuple[int, ...], mesh: DeviceMesh) -> Tensor | None:
        """The bias that a part adds."""
        rank = mesh.get_local_rank()
        return bias if bias is None or self.rowwise else bias[bounds[rank] : bounds[rank + 1]]

    def _result(self, y: Tensor, mesh: DeviceMesh, shape: tuple[int, ...]) -> Tensor:
        if self.use_local_output:
            return y
        placement = self.output_layouts
        if isinstance(placement, Shard):
            placement = Shard(placement.dim % len(shape))
        return as_dtensor(y, mesh, placement, shape)

    def _local(self, x: Tensor, mesh: DeviceMesh) -> tuple[Tensor, tuple[int, ...]]:
        """The part of `x` on this rank by the input layout, and the shape of the whole."""
        layout = self.input_layouts
        if isinstance(x, DTensor):
            if x.device_mesh != mesh:
                raise ValueError(f"x must be on the mesh of the layer, {mesh}, got {x.device_mesh}")
            wanted = Shard(layout.dim % x.ndim) if isinstance(layout, Shard) else layout
            given = x if x.placements[0] == wanted else x.redistribute(placements=[wanted])
            return given.to_local(), tuple(x.shape)
        shape = list(x.shape)
        if isinstance(layout, Shard):  # equal parts, as torch's styles take them
            shape[layout.dim] *= mesh.size()
        return x, tuple(shape)


class _Colwise(_Style):
    rowwise = False

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Shard(-1)
        self.use_local_output = use_local_output
        self.chunks = chunks
        if self.output_layouts not in (Shard(-1), Replicate()):
            raise ValueError(f"output_layouts must be Shard(-1) or Replicate(), got {self.output_layouts}")
        if not isinstance(self.input_layouts, (Replicate, Shard)) or self.input_layouts == Shard(-1):
            raise ValueError(f"input_layouts must be Replicate() or Shard(dim) of tokens, got {self.input_layouts}")
        if chunks < 1:
            raise ValueError(f"chunks must be at least 1, got {chunks}")

    def compute(self, layer: ShardedLinear, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Gather the integers of other ranks' tokens if they are cut; multiply by this rank's outputs."""
        part = layer.part
        part.check_input(x)
        if isinstance(self.input_layouts, Replicate):
            y = part.run(x.reshape(-1, shape[-1]), layer.bias_value, layer.act_bits, layer.act_scale)
            y = y.view(*shape[:-1], y.shape[-1])
        else:
            y = self._of_cut_tokens(layer, x, shape)
        if self.output_layouts == Replicate():
            every = gather_bytes([y.movedim(-1, 0)], sizes_of(part.bounds), layer.mesh)[0]
            y = torch.cat(every).movedim(0, -1)
        return y

    def _of_cut_tokens(self, layer: ShardedLinear, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Outputs of all tokens; the all-gather of a chunk runs beside the product of the one before."""
        assert isinstance(self.input_layouts, Shard)
        mesh, dim = layer.mesh, self.input_layouts.dim % local.ndim
        first = local.movedim(dim, 0)  # (S_r, ..., K)
        inner = first.shape[1:-1].numel()
        tokens = [size * inner for size in sizes_of(chunk_bounds(shape[dim], mesh.size()))]
        own = layer.quantize(first.reshape(-1, shape[-1]))
        static = own.scale if layer.act_scale is not None else None
        if static is not None:
            own = own._replace(scale=None)
        cuts = [chunk_bounds(count, self.chunks) for count in tokens]
        mine = cuts[mesh.get_local_rank()]
        blocks: list[list[Tensor]] = [[] for _ in tokens]
        waiting = None
        for i in range(self.chunks + 1):
            coming = None
            if i < self.chunks:
                sizes = [cut[i + 1] - cut[i] for cut in cuts]
                coming = start_slices(own.take(mine[i], mine[i + 1]), sizes, mesh), sizes
            if waiting is not None:
                finish, sizes = waiting
                whole = finish()
                whole = whole if static is None else whole._replace(scale=static)
                y = layer.part.multiply(whole, local.dtype, layer.bias_value)
                for block, piece_of_rank in zip(blocks, y.split(sizes), strict=True):
                    block.append(piece_of_rank)
            waiting = coming
        y = y if self.chunks == 1 else torch.cat([each for block in blocks for each in block])  # (S ..., out_r)
        return y.view(shape[dim], *first.shape[1:-1], y.shape[-1]).movedim(0, dim)


class _Rowwise(_Style):
    rowwise = True

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        reduce: Reduce = "exact",
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Shard(-1)
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output
        self.reduce = reduce
        if self.input_layouts not in (Shard(-1), Replicate()):
            raise ValueError(f"input_layouts must be Shard(-1) or Replicate(), got {self.input_layouts}")
        if not isinstance(self.output_layouts, (Replicate, Shard)) or self.output_layouts == Shard(-1):
            raise ValueError(f"output_layouts must be Replicate() or Shard(dim) of tokens, got {self.output_layouts}")
        if reduce not in ("exact", "bfloat16", "int8"):
            raise ValueError(f"reduce must be 'exact', 'bfloat16' or 'int8', got {reduce!r}")

    def compute(self, layer: ShardedLinear, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Multiply this rank's inputs, and sum over ranks."""
        mesh, part = layer.mesh, layer.part
        if self.input_layouts == Replicate():
            rank = mesh.get_local_rank()
            x = x[..., part.bounds[rank] : part.bounds[rank + 1]]
        part.check_input(x)
        out = self.output_layouts
        dim = out.dim % x.ndim if isinstance(out, Shard) else 0
        first = x.movedim(dim, 0) if x.ndim > 1 else x[None]  # (S, ..., K_r)
        rows = first.reshape(-1, x.shape[-1])
        ints = layer.quantize(rows, None if layer.act_scale is not None else largest(rows, mesh))
        y = self._summed(layer, ints, x.dtype, first.shape[:-1])
        return y.movedim(0, dim) if x.ndim > 1 else y[0]

    def _summed(self, layer: ShardedLinear, ints: Slices, dtype: torch.dtype, tokens: torch.Size) -> Tensor:
        """The output of all tokens (S, ...), or of this rank's part of S."""
        mesh, part, scatters = layer.mesh, layer.part, isinstance(self.output_layouts, Shard)
        inner, scale = tokens[1:].numel(), ints.scale  # (tokens, 1) or ()
        bounds, rank = chunk_bounds(tokens[0], mesh.size()), mesh.get_local_rank()
        own = slice(bounds[rank] * inner, bounds[rank + 1] * inner) if scatters else slice(None)
        if self.reduce == "exact":
            sums = part.sums(ints, part.bounds[-1])  # (tokens, out), of this rank's inputs
        else:
            sums = part.multiply(ints, torch.bfloat16 if self.reduce == "bfloat16" else torch.float32, None)
        if self.reduce == "int8":
            total = sum_of_int8(sums.view(*tokens, -1), mesh, scatters).view(-1, sums.shape[1])
        else:
            total = scatter_tokens(sums, inner, mesh) if scatters else all_reduce(sums, "sum", mesh)
        if self.reduce == "exact":
            columns = scale if scale is None or not scale.ndim else scale[own].mT
            y = scaled(total.mT, part.scale, columns, layer.bias_value, dtype).mT
        else:
            y = total if layer.bias is None else total + layer.bias_value.float()
        return y.to(dtype).reshape(-1, *tokens[1:], y.shape[-1])


class _OfSparse(_Style):
    kind = SparseQuantLinear

    def _layer(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        cut = shard(module.matrix(), mesh, "columns" if self.rowwise else "rows")
        part, config = SparsePart(cut.local, cut.bounds), module.config
        made = ShardedLinear(
            part,
            self._own(module.bias, cut.bounds, mesh),
            module.act_scale,
            config.act_bits,
            mesh,
            self,
            config.grad_bits,
        )
        if module.training and module.weight is not None:
            made.keep_master(module.weight.detach().narrow(int(self.rowwise), cut.span[0], cut.span[1] - cut.span[0]))
        return made


class _OfDense(_Style):
    kind = nn.Linear

    def _layer(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        weight = module.weight.detach()
        check_agreement(mesh, outputs=weight.shape[0], inputs=weight.shape[1], weight=digest(weight))
        whole = quantized(weight, 8, 1)  # (out, in), a scale per output
        bounds = chunk_bounds(weight.shape[int(self.rowwise)], mesh.size())
        start, stop = bounds[mesh.get_local_rank()], bounds[mesh.get_local_rank() + 1]
        scale = whole.scale if self.rowwise or whole.scale is None else whole.scale[start:stop]
        data = whole.data[:, start:stop] if self.rowwise else whole.data[start:stop]
        part = DensePart(data.contiguous(), scale, bounds)
        return ShardedLinear(part, self._own(module.bias, bounds, mesh), None, 8, mesh, self)


class SparseColwise(_OfSparse, _Colwise):
    """Cut a :class:`magicube_cutlass.nn.SparseQuantLinear` by outputs: ``y_r = q(x) A_r^T + b_r``.

    Parameters
    ----------
    input_layouts : Placement, optional
        ``Replicate()`` (default); or ``Shard(dim)`` of tokens (sequence-parallel): each rank quantizes its own, and
        int8 with its scales is gathered in one message.
    output_layouts : Placement, optional
        ``Shard(-1)`` (default) or ``Replicate()``.
    use_local_output : bool, default True
        Return a tensor; else a DTensor.
    chunks : int, default 1
        Parts of the tokens; the all-gather of one runs beside the product of the one before.

    Raises
    ------
    TypeError, ValueError
        For another module, placement or count; for weights that differ between ranks.

    Examples
    --------
    >>> from torch.distributed.tensor import Shard
    >>> SparseColwise(input_layouts=Shard(0), chunks=2).chunks
    2
    """


class SparseRowwise(_OfSparse, _Rowwise):
    """Cut a :class:`magicube_cutlass.nn.SparseQuantLinear` by inputs: ``y = sum_r q(x)_r A_r^T + b``.

    Without a static activation scale, ranks first exchange the amax of each token.

    Parameters
    ----------
    input_layouts : Placement, optional
        ``Shard(-1)`` (default), as a Colwise layer leaves it, or ``Replicate()``.
    output_layouts : Placement, optional
        ``Replicate()`` (default, an all-reduce) or ``Shard(dim)`` of tokens (a reduce-scatter).
    use_local_output : bool, default True
        Return a tensor; else a DTensor.
    reduce : {"exact", "bfloat16", "int8"}, default "exact"
        What the sums travel as: int32, equal to one process bit for bit, or rounded.

    Raises
    ------
    TypeError, ValueError
        For another module, placement or name; for weights that differ between ranks.

    Examples
    --------
    >>> SparseRowwise(reduce="int8").output_layouts
    Replicate()
    """


class QuantColwise(_OfDense, _Colwise):
    """Quantize an ``nn.Linear`` to 8 bits per output, and cut it by outputs; as :class:`SparseColwise`.

    Examples
    --------
    >>> QuantColwise().input_layouts
    Replicate()
    """


class QuantRowwise(_OfDense, _Rowwise):
    """Quantize an ``nn.Linear`` to 8 bits per output, and cut it by inputs; as :class:`SparseRowwise`.

    Examples
    --------
    >>> QuantRowwise().reduce
    'exact'
    """
