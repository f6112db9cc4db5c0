"""Slices of activations: quantized where they lie, gathered as integers, and their sums scaled and scattered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn.functional import pad

from cute_kernels.dtypes import REAL_DTYPES
from magicube_cutlass.autograd.integer import quantized
from magicube_cutlass.checks import has_dispatch_mode
from magicube_cutlass.distributed.collectives import (
    all_reduce,
    chunk_bounds,
    exchange_all,
    reduce_scatter,
    start_gather,
)
from magicube_cutlass.distributed.peers import peers_of
from magicube_cutlass.ops import torch_ops as library
from magicube_cutlass.quantization.quant_tensor import QuantTensor

INT_BITS = {torch.int8: 8, torch.int16: 16}


class Slices(NamedTuple):
    """Integers of slices (L, K) with a scale per slice: what a kernel reads of activations."""

    data: Tensor  # (L, K) int8 or int16
    scale: Tensor | None  # (L, 1), or () for all
    bits: int

    def operand(self) -> QuantTensor:
        """As the rows of an operand."""
        axis = None if self.scale is None or not self.scale.ndim else 1
        return QuantTensor(self.data, self.scale, self.bits, True, axis, self.data.shape)

    def take(self, start: int, stop: int) -> Slices:
        """Some of the slices."""
        scale = self.scale if self.scale is None or not self.scale.ndim else self.scale[start:stop]
        return Slices(self.data[start:stop].contiguous(), scale, self.bits)

    def inner(self, start: int, stop: int) -> Slices:
        """A part of K."""
        return self._replace(data=self.data[:, start:stop].contiguous())


def quantize_slices(x: Tensor, bits: int, top: Tensor | None = None) -> Slices:
    """Quantize slices (L, K); `top` (L, 1): their amax, where other ranks hold other parts of K.

    Integers are taken as they are. Slices that lie in memory as columns stay columns.
    """
    if x.dtype in INT_BITS:
        return Slices(x.contiguous(), None, INT_BITS[x.dtype])
    if not x.is_floating_point():
        raise TypeError(f"B must be of a float dtype, int8 or int16, got {x.dtype}")
    if top is None:
        found = quantized(x, bits, 1)
        return Slices(found.data, found.scale, bits)
    return quantize_by_scale(x, slice_scale(top, bits), bits)


def quantize_by_scale(x: Tensor, scale: Tensor, bits: int) -> Slices:
    """Quantize slices (L, K) by given scales, (L, 1) or (); slices that lie as columns stay columns."""
    if not scale.ndim:
        found = quantized(x, bits, None, scale)
        return Slices(found.data, found.scale, bits)
    if x.mT.is_contiguous() and not x.is_contiguous():
        return Slices(library.quantize_by(x.mT, scale.mT, bits).mT, scale, bits)
    return Slices(library.quantize_by(x, scale, bits), scale, bits)


def slice_scale(top: Tensor, bits: int) -> Tensor:
    """Return the scales of slices by their amax (L, 1): those of slices of one element."""
    scale: Tensor = library.quantize(top, bits, 1)[1]
    return scale


def is_eager_on_gpu(x: Tensor) -> bool:
    """Whether kernels may be launched for `x` here and now."""
    return x.is_cuda and not torch.compiler.is_compiling() and not has_dispatch_mode()


def largest(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the amax (L, 1) of slices whose parts (L, K_r) lie on the ranks: one all-reduce of L floats."""
    if is_eager_on_gpu(x) and x.dtype in REAL_DTYPES and x.numel() and x.stride(1) == 1:
        from cute_kernels.convert.quantize_transposed import amax_rows

        peers, size = peers_of(mesh), torch.Size((x.shape[0], 1))
        top = None
        if peers is not None:
            top = peers.reduce("amax", size, torch.int32, partial(amax_rows, x), torch.maximum)
        return (all_reduce(amax_rows(x), "max", mesh) if top is None else top).view(torch.float32)
    wide = torch.promote_types(x.dtype, torch.float32)
    own = torch.linalg.vector_norm(x, torch.inf, 1, keepdim=True, dtype=wide) if x.shape[1] else x.new_zeros(
        x.shape[0], 1, dtype=wide)  # fmt: skip
    # a maximum may lose NaN, so it travels as inf, which gives the scale NaN as well
    return all_reduce(own.nan_to_num_(nan=torch.inf, posinf=torch.inf), "max", mesh)


def start_slices(x: Slices, sizes: Sequence[int], mesh: DeviceMesh) -> Callable[[], Slices]:
    """Start one all-gather of integers, which carries scales of slices too; the call returns the slices of all ranks.

    A scale for all slices is static, the same on all ranks, and stays.
    """
    travels = x.scale is not None and x.scale.ndim > 0
    finish = start_gather([x.data, x.scale] if travels else [x.data], sizes, mesh)  # type: ignore[list-item]

    def joined() -> Slices:
        data, *scales = finish()
        return Slices(data, scales[0] if scales else x.scale, x.bits)

    return joined


def scatter_tokens(sums: Tensor, inner: int, mesh: DeviceMesh) -> Tensor:
    """Return the sum over ranks of the tokens of this rank's ``Shard(0)``, `inner` tokens each: (tokens_r, out).

    Sums that lie in memory as (out, tokens) stay so: blocks of columns are sent, and nothing is transposed.
    """
    tokens, out = sums.shape
    if mesh.size() == 1 or sums.is_contiguous() or not sums.mT.is_contiguous():
        return reduce_scatter(sums.reshape(-1, inner, out), mesh).reshape(-1, out) if inner else sums
    bounds, rank = chunk_bounds(tokens // max(inner, 1), mesh.size()), mesh.get_local_rank()
    step = bounds[1] * inner
    whole = sums.mT if tokens == step * mesh.size() else pad(sums.mT, (0, step * mesh.size() - tokens))
    blocks = whole.view(out, mesh.size(), step).movedim(1, 0)  # (ranks, out, step)
    return reduce_scatter(blocks, mesh)[0, :, : (bounds[rank + 1] - bounds[rank]) * inner].mT


def sum_of_int8(x: Tensor, mesh: DeviceMesh, scatters: bool) -> Tensor:
    """Return sums (S, ..., out) of floats that travel as int8 with a scale per token, added in the order of ranks."""
    sent = quantize_slices(x.reshape(-1, x.shape[-1]), 8)
    assert sent.scale is not None
    if scatters:
        inner = x.shape[1:-1].numel()
        bounds = [cut * inner for cut in chunk_bounds(x.shape[0], mesh.size())]
        data, scale = (exchange_all(each, bounds, mesh) for each in (sent.data, sent.scale))
    else:
        ranks = mesh.size()
        found = start_gather([sent.data, sent.scale], [sent.data.shape[0]] * ranks, mesh)()
        data, scale = (list(each.chunk(ranks)) for each in found)
    total = data[0] * scale[0].float()
    for ints, of_ints in zip(data[1:], scale[1:], strict=True):
        total = total.add_(ints * of_ints.float())
    return total.view(-1, *x.shape[1:])


def scaled(
    sums: Tensor, first: Tensor | None, second: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``sums * first * second + bias`` as the epilogue of the kernels computes it.

    Parameters
    ----------
    sums : Tensor, shape (M, N)
        Complete sums of int32 or int64.
    first, second : Tensor, shapes () or (M, 1) or (1, N), optional
        Scales, in the order of the kernel.
    bias : Tensor, shapes (N,) or (M, 1), optional
        Of a float dtype.
    dtype : torch.dtype
        Of the result.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    first, second, bias = (None if each is None else each.to(wide) for each in (first, second, bias))
    if bias is not None and sums.is_cuda and wide == torch.float32:
        out = sums.float() if first is None else sums * first.view(first.shape or (1, 1))
        by = torch.ones_like(out[:1, :1]) if second is None else second
        if torch.compiler.is_compiling() or not _addcmul_rounds_once(sums.device):
            return _rounded_once(bias, out, by).to(dtype)
        return torch.addcmul(bias, out, by, out=torch.empty_like(out, dtype=dtype))  # rounds as it stores
    out = sums.to(wide)
    for each in (first, second):
        out = out if each is None else out.mul_(each)
    return plus(out, bias, dtype)


def plus(x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``x + bias`` in another dtype; added in float32, or wider if `x` is, in one pass."""
    if bias is None:
        return x.to(dtype)
    if x.dtype == bias.dtype == dtype:  # added in float32 and rounded once, also for 16-bit floats
        return x.add_(bias)
    bias = bias.to(torch.promote_types(x.dtype, torch.float32))
    if torch.compiler.is_compiling():
        return (x + bias).to(dtype)
    return torch.add(x, bias, out=torch.empty_like(x, dtype=dtype))


def _rounded_once(bias: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """``bias + x y`` in float32, rounded once, as the kernels of a GPU do."""
    return (x * y.double() + bias.double()).float()


@lru_cache
def _addcmul_rounds_once(device: torch.device) -> bool:
    """Whether torch's kernel is a fused multiply-add there, by numbers of which a third shows two roundings."""
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator(device).manual_seed(0)
        bias, x, y = torch.randn(3, 1, 1 << 14, generator=generator, device=device)
        return torch.equal(torch.addcmul(bias, x, y), _rounded_once(bias, x, y))


def sum_dtype(inner: int, lhs_bits: int, rhs_bits: int) -> torch.dtype:
    """Return int32 if sums over `inner` products of such integers fit it, else int64."""
    return torch.int32 if inner << (lhs_bits + rhs_bits - 2) < 2**31 else torch.int64


def as_dtensor(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: Sequence[int]) -> DTensor:
    """Return the DTensor of row-major `shape` whose part on this rank is `local`, in any memory order."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    found: DTensor = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
    )
    return found
