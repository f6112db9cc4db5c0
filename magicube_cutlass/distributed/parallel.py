"""Parallel styles of linear layers, for ``torch.distributed.tensor.parallel.parallelize_module``.

Colwise: a rank holds outputs of the layer (rows of A), ``y_r = q(x) A_r^T + b_r``. Rowwise: it holds inputs (columns of
A), ``y = sum_r q(x)_r A_r^T + b``. A Colwise and a Rowwise layer in turn exchange nothing in between.
"""

from __future__ import annotations

from functools import partial
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
    gather,
    sizes_of,
)
from magicube_cutlass.distributed.local_products import DensePart, LayerPart, SparsePart, rows_of
from magicube_cutlass.distributed.peers import peers_of
from magicube_cutlass.distributed.sharded import shard
from magicube_cutlass.distributed.sharded_linear import ShardedLinear, become
from magicube_cutlass.distributed.slices import (
    Slices,
    as_dtensor,
    is_eager_on_gpu,
    largest,
    plus,
    scatter_tokens,
    slice_scale,
    start_slices,
    sum_dtype,
    sum_of_int8,
)
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.linear import SparseQuantLinear
from magicube_cutlass.quantization.group_tensor import GroupTensor

__all__ = ["QuantColwise", "QuantRowwise", "SparseColwise", "SparseRowwise"]

Reduce = Literal["exact", "bfloat16", "int8"]


class _Style(ParallelStyle):
    """Placements of inputs and outputs, as in torch's own styles."""

    kinds: tuple[type[nn.Module], ...]
    rowwise: bool

    def __init__(self, inputs: Placement, outputs: Placement, use_local_output: bool) -> None:
        super().__init__()
        self.input_layouts, self.output_layouts, self.use_local_output = inputs, outputs, use_local_output
        pair = (("output_layouts", outputs), ("input_layouts", inputs))
        (inner_name, inner), (outer_name, outer) = pair[::-1] if self.rowwise else pair
        if inner not in (Shard(-1), Replicate()):
            raise ValueError(f"{inner_name} must be Shard(-1) or Replicate(), got {inner}")
        if not isinstance(outer, (Replicate, Shard)) or outer == Shard(-1):
            raise ValueError(f"{outer_name} must be Replicate() or Shard(dim) of tokens, got {outer}")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = check_mesh(device_mesh)
        if not isinstance(module, self.kinds):
            wanted = " or ".join(kind.__name__ for kind in self.kinds)
            raise TypeError(f"{type(self).__name__} must be applied to a {wanted}, got {type(module).__name__}")
        return become(module, self._layer(module, mesh))

    def _layer(self, module: Any, mesh: DeviceMesh) -> ShardedLinear:
        raise NotImplementedError

    def _made(
        self, module: Any, part: LayerPart, act_scale: Tensor | None, bits: int, mesh: DeviceMesh, grad_bits: int | None
    ) -> ShardedLinear:
        """The layer of a part, which learns if `module` is in training mode and has a master."""
        rank = mesh.get_local_rank()
        start, stop = part.bounds[rank], part.bounds[rank + 1]
        bias = module.bias if module.bias is None or self.rowwise else module.bias[start:stop]
        made = ShardedLinear(part, bias, act_scale, bits, mesh, self, grad_bits)
        if module.training and module.weight is not None and module.weight.requires_grad:
            made.keep_master(module.weight.detach().narrow(int(self.rowwise), start, stop - start))
        return made

    def compute(self, layer: ShardedLinear, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The output of a layer as it is placed, by local tokens `x` of a whole of `shape`."""
        raise NotImplementedError

    def forward(self, layer: ShardedLinear, x: Tensor) -> Tensor:
        """Return the output of a layer."""
        local, shape = self._local(x, layer.mesh)
        y = layer.learn(local, shape) if layer.learns(local) else self.compute(layer, local, shape)
        return self._result(y, layer.mesh, (*shape[:-1], layer.part.bounds[-1] if not self.rowwise else y.shape[-1]))

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
        super().__init__(input_layouts or Replicate(), output_layouts or Shard(-1), use_local_output)
        self.chunks = chunks
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
            y = gather(y.movedim(-1, 0), sizes_of(part.bounds), layer.mesh).movedim(0, -1)
        return y

    def _of_cut_tokens(self, layer: ShardedLinear, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Outputs of all tokens; with chunks, the product of this rank's own tokens runs beside the all-gather."""
        assert isinstance(self.input_layouts, Shard)
        mesh, dim, rank = layer.mesh, self.input_layouts.dim % local.ndim, layer.mesh.get_local_rank()
        first = local.movedim(dim, 0)  # (S_r, ..., K)
        bounds = [cut * first.shape[1:-1].numel() for cut in chunk_bounds(shape[dim], mesh.size())]
        if layer.act_bits == 8 and len(set(sizes_of(bounds))) == 1:
            rows, bias = first.reshape(-1, shape[-1]), layer.bias_value
            joined = layer.part.multiply_cut(rows, layer.act_scale, mesh, bias, self.chunks > 1)
            if joined is not None:
                return joined.view(shape[dim], *first.shape[1:-1], joined.shape[-1]).movedim(0, dim)
        own = layer.quantize(first.reshape(-1, shape[-1]))
        cuts = [chunk_bounds(size, max(1, self.chunks - 1)) for size in sizes_of(bounds)]
        parts = [[cut[i + 1] - cut[i] for cut in cuts] for i in range(len(cuts[0]) - 1)]
        waiting = [
            start_slices(own.take(cuts[rank][i], cuts[rank][i + 1]), sizes, mesh) for i, sizes in enumerate(parts)
        ]
        if self.chunks == 1:
            y = layer.part.multiply(waiting[0](), local.dtype, layer.bias_value)
        else:
            y = local.new_empty(bounds[-1], layer.part.shape[0])  # (S ..., out_r)
            layer.part.multiply(own, local.dtype, layer.bias_value, y[bounds[rank] : bounds[rank + 1]])
            for i, (finish, sizes) in enumerate(zip(waiting, parts, strict=True)):
                whole, begin = finish(), 0
                for other, size in enumerate(sizes):
                    if other != rank and size:
                        rows = y[bounds[other] + cuts[other][i] :][:size]
                        piece = whole.take(begin, begin + size)
                        layer.part.multiply(piece, local.dtype, layer.bias_value, rows)
                    begin += size
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
        super().__init__(input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output)
        self.reduce = reduce
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
        top = None if layer.act_scale is not None else largest(rows, mesh)
        y = self._summed(layer, rows, top, first.shape[:-1])
        return y.movedim(0, dim) if x.ndim > 1 else y[0]

    def _summed(self, layer: ShardedLinear, rows: Tensor, top: Tensor | None, tokens: torch.Size) -> Tensor:
        """The output of all tokens (S, ...), or of this rank's part of S."""
        mesh, part, scatters = layer.mesh, layer.part, isinstance(self.output_layouts, Shard)
        scale, dtype = None, rows.dtype
        if self.reduce == "exact":
            ints = layer.quantize(rows, top)
            scale = ints.scale  # (tokens, 1) or ()
            is_even = scatters and tokens[0] % mesh.size() == 0
            found = self._scaled_sums(layer, ints, dtype) if is_even else None
            if found is not None:
                return found.view(-1, *tokens[1:], part.shape[0])
            sums = part.sums(ints, part.bounds[-1])  # (tokens, out), of this rank's inputs
        else:
            by = layer.act_scale.reshape(()) if top is None else slice_scale(top, layer.act_bits)  # type: ignore[union-attr]
            sent = torch.bfloat16 if self.reduce == "bfloat16" else torch.float32
            bits, bias = layer.act_bits, layer.bias_value if mesh.get_local_rank() == 0 else None
            peers = peers_of(mesh) if scatters and sent == torch.bfloat16 and is_eager_on_gpu(rows) else None
            if peers is not None and tokens[0] % mesh.size() == 0:

                def write(out: Tensor, cut: slice) -> Tensor:
                    return part.multiply_floats(rows[cut], by[cut] if by.ndim else by, bits, sent, bias, out)

                summed = peers.sum_rows(torch.Size((rows.shape[0], part.shape[0])), sent, write)
                if summed is not None:
                    return summed.to(dtype).view(-1, *tokens[1:], part.shape[0])
            sums = part.multiply_floats(rows, by, bits, sent)
        inner = tokens[1:].numel()
        if self.reduce == "int8":
            total = sum_of_int8(sums.reshape(*tokens, -1), mesh, scatters).view(-1, sums.shape[1])
        else:
            total = scatter_tokens(sums, inner, mesh) if scatters else all_reduce(sums, "sum", mesh)
        if self.reduce == "exact":
            if scatters and scale is not None and scale.ndim:
                bounds, rank = chunk_bounds(tokens[0], mesh.size()), mesh.get_local_rank()
                scale = scale[bounds[rank] * inner : bounds[rank + 1] * inner]
            y = part.scale_sums(total, scale, layer.bias_value, dtype)
            y = y if y.is_contiguous() else rows_of(y.mT)
        else:
            y = plus(total, layer.bias_value, dtype)
        return y.reshape(-1, *tokens[1:], y.shape[-1])

    def _scaled_sums(self, layer: ShardedLinear, ints: Slices, dtype: torch.dtype) -> Tensor | None:
        """Exact sums of this rank's tokens, read from the memory of all ranks and scaled; None without such memory."""
        part, mesh, size = layer.part, layer.mesh, torch.Size((ints.data.shape[0], layer.part.shape[0]))
        peers = peers_of(mesh) if is_eager_on_gpu(ints.data) and dtype != torch.float64 else None
        if peers is None or size[0] % mesh.size() or sum_dtype(part.bounds[-1], 8, ints.bits) != torch.int32:
            return None
        of_token, of_output = ints.scale, None if part.scale is None else part.scale.mT
        if of_token is not None and of_token.ndim:
            rows = size[0] // mesh.size()
            of_token = of_token[mesh.get_local_rank() * rows :][:rows]
        # by outputs, or by tokens, first
        scales = (of_output, of_token) if part.sums_are_columns else (of_token, of_output)
        bias = None if layer.bias_value is None else layer.bias_value.float()
        write = partial(part.sums, ints, part.bounds[-1])
        return peers.scaled_sums(size, part.sums_are_columns, write, scales, bias, dtype)


class _OfSparse(_Style):
    kinds = (SparseQuantLinear,)

    def _layer(self, module: Any, mesh: DeviceMesh) -> ShardedLinear:
        cut, config = shard(module.matrix(), mesh, "columns" if self.rowwise else "rows"), module.config
        v, learns = cut.local.vector_length, module.training and module.weight is not None
        wrong = [each for each in cut.bounds if each % v and each != cut.shape[0] and learns and not self.rowwise]
        if wrong:
            raise ValueError(f"outputs must be cut at multiples of vector_length={v} to learn, got a cut at {wrong[0]}")
        part = SparsePart(cut.local, cut.bounds)
        return self._made(module, part, module.act_scale, config.act_bits, mesh, config.grad_bits)


class _OfDense(_Style):
    kinds = (nn.Linear, QuantLinear)

    def _layer(self, module: Any, mesh: DeviceMesh) -> ShardedLinear:
        act_scale: Tensor | None = None
        scale: Any
        if isinstance(module, QuantLinear):
            weight = module.product().weight
            plain = isinstance(weight, GroupTensor) and (weight.bits, weight.group, weight.minimum) == (8, None, None)
            if not plain or module.act != "int8" or module.smooth is not None or module.config.activation:
                raise ValueError(f"{type(self).__name__} must be applied to int8 weights with scales per row, int8 "
                                 f"inputs, no smooth scale and no activation, got {module}")  # fmt: skip
            data, scale, act_scale = weight.data, weight.scale, module.act_scale
        else:
            found = quantized(module.weight.float(), 8, 1)  # a scale per output, as QuantLinear has
            data, scale = found.data, found.scale
        check_agreement(mesh, outputs=data.shape[0], inputs=data.shape[1], weight=digest(data, scale))
        bounds, rank = chunk_bounds(data.shape[int(self.rowwise)], mesh.size()), mesh.get_local_rank()
        start, size = bounds[rank], bounds[rank + 1] - bounds[rank]
        part = DensePart(
            data.narrow(int(self.rowwise), start, size).contiguous(),
            scale if self.rowwise else scale.narrow(0, start, size),
            bounds,
        )
        return self._made(module, part, act_scale, 8, mesh, None)


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
        1: one product behind the all-gather. More: the product of this rank's own tokens runs beside the all-gather of
        the others, which has ``chunks - 1`` messages with products of their own; one on a GPU. GPUs of one host always
        multiply their own tokens first, beside copies of the others'.

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
    """Cut a dense layer of 8 bits by outputs; otherwise as :class:`SparseColwise`.

    Takes a :class:`magicube_cutlass.nn.QuantLinear` of int8 weights and activations, or an ``nn.Linear``, which it
    quantizes alike.

    Examples
    --------
    >>> QuantColwise().input_layouts
    Replicate()
    """


class QuantRowwise(_OfDense, _Rowwise):
    """Cut a dense layer of 8 bits by inputs, as :class:`QuantColwise` takes it; otherwise as :class:`SparseRowwise`.

    Examples
    --------
    >>> QuantRowwise().reduce
    'exact'
    """
