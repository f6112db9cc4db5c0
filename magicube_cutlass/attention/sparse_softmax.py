"""Softmax over the stored values of each row of a sparse matrix, with fused quantization."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import torch
from torch import Tensor

from cute_kernels.dtypes import REAL_DTYPES, Integer
from cute_kernels.integers import int_range, store
from cute_kernels.machine import Kind
from cute_kernels.operands import Probabilities
from magicube_cutlass.attention.block_diagonal import Stack, stack, stacked_matrix
from magicube_cutlass.dispatch.machine import get_machine
from magicube_cutlass.dispatch.plan import problem, size_bucket
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS

if TYPE_CHECKING:
    from cute_kernels.spmm.gather import GatherConfig

SOFTMAX_BITS = (4, 8, 16)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Logits(NamedTuple):
    """Where the values of a softmax lie and what is added to them."""

    pattern: Pattern
    stride: int
    period: tuple[int, int]  # rows and columns from one block of the pattern's diagonal to the next
    scale: float
    bias: Tensor | None  # float32 (K,) or (batch, K)
    causal: bool


def check_softmax_bits(bits: int, name: str = "bits") -> None:
    """Raise ``ValueError`` unless ``bits`` is 4, 8 or 16."""
    if bits not in SOFTMAX_BITS:
        raise ValueError(f"{name} must be one of {SOFTMAX_BITS}, got {bits!r}")


def check_scale(scale: float) -> float:
    """``scale`` as a float; raise unless it is a positive number."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return float(scale)


def block_rows(pattern: Pattern, stride: int) -> Tensor:
    """Vector row of each stride of values, int64 (blocks,); cached."""
    key = ("block rows", stride)
    if key not in pattern._cache:
        padded = pattern.padded(stride)
        counts = (pattern.row_lengths + stride - 1) // stride
        total = padded.col_indices.shape[0] // stride
        rows = torch.arange(pattern.vector_rows, device=pattern.device)
        pattern._cache[key] = rows.repeat_interleave(counts, output_size=total)
    found: Tensor = pattern._cache[key]
    return found


def row_max(values: Tensor, rows: Tensor, least: Tensor) -> Tensor:
    """Largest of ``least``, (n, R, V), and of the values (n, blocks, V, stride) of each row."""
    if not values.numel():
        return least
    return least.scatter_reduce_(1, rows[:, None].expand(values.shape[:-1]), values.amax(-1), "amax")


def by_column(per_column: Tensor, columns: Tensor) -> Tensor:
    """``(..., K)`` numbers of columns as ``(..., blocks, 1, stride)``; the padding gets those of column 0."""
    return per_column[..., columns.clamp(min=0)].unsqueeze(-2)


def _kept(of: Logits) -> Tensor:
    """bool (blocks, 1 or V, stride): where there is a key that counts."""
    pattern, stride, v = of.pattern, of.stride, of.pattern.vector_length
    columns = pattern.padded(stride).col_indices.view(-1, 1, stride)
    kept = columns >= 0
    beyond = pattern.shape[0] % v != 0
    if not (of.causal or beyond):
        return kept
    rows = block_rows(pattern, stride)[:, None, None] * v + torch.arange(v, device=pattern.device)[:, None]
    if beyond:
        kept = kept & (rows < pattern.shape[0])
    if of.causal:
        kept = kept & (columns % of.period[1] <= rows % of.period[0])
    return kept


def _softmax_torch(values: Tensor, of: Logits, bits: int, empty: float, lse: bool) -> Probabilities:
    """The definition, in torch operators; ``values``: (copies, blocks, V, stride)."""
    pattern, v, high = of.pattern, of.pattern.vector_length, int_range(bits, False)[1]
    copies, rows = values.shape[0], block_rows(pattern, of.stride)
    s = values * of.scale if values.dtype == torch.float32 else values.to(torch.float32).mul_(of.scale)
    if of.bias is not None:
        s += by_column(of.bias, pattern.padded(of.stride).col_indices.view(-1, of.stride))
    s.masked_fill_(~_kept(of), -math.inf)
    top = row_max(s, rows, torch.full((copies, pattern.vector_rows, v), -math.inf, device=values.device))
    shift = top.masked_fill(top == -math.inf, 0.0)
    e = s.sub_(shift[:, rows, :, None]).exp_()
    sums = torch.zeros_like(top).index_add_(1, rows, e.sum(-1))
    poisoned = sums.isnan()
    if bool(poisoned.any()):
        e.nan_to_num_(nan=0.0)
    u = e.mul_(high).round_()  # float32 holds the sums of a stride exactly
    totals = torch.zeros(top.shape, dtype=torch.int64, device=u.device).index_add_(1, rows, u.sum(-1).to(torch.int64))
    scale = torch.where(totals > 0, 1.0 / totals.clamp(min=1).to(torch.float32), empty).masked_fill_(poisoned, math.nan)
    ints = store(u.to(torch.int32 if bits > 8 else torch.uint8), bits, False)
    logs = (shift + sums.log()).flatten(1) if lse else None
    return Probabilities(ints.flatten(0, 1), scale.flatten(1), logs)


def _softmax_gpu(
    values: Tensor, of: Logits, bits: int, empty: float, lse: bool, atom: str = "", factors: Tensor | None = None
) -> Probabilities:
    from cute_kernels.attention import sparse_softmax as kernels

    pattern, v = of.pattern, of.pattern.vector_length
    padded = pattern.padded(of.stride)
    columns = padded.col_indices
    config = kernels.SoftmaxConfig(REAL_DTYPES[values.dtype], v, of.stride, bits, of.causal, of.bias is not None, atom)
    period = (max(1, of.period[0] // v), of.period[1])
    rows = kernels.Rows(padded.row_start, padded.row_end, columns, pattern.shape[0], period)
    if values.data_ptr() % 16:
        values = values.clone()
    return kernels.softmax(values, rows, config, scale=of.scale, bias=of.bias, empty=empty, lse=lse, factors=factors)


def quantized_softmax(values: Tensor, of: Logits, bits: int, *, nan_for_empty: bool, lse: bool) -> Probabilities:
    """:func:`sparse_softmax` on values (copies, blocks, V, stride), nothing checked."""
    empty = math.nan if nan_for_empty else 1.0
    if values.is_cuda and values.numel():
        return _softmax_gpu(values, of, bits, empty, lse)
    return _softmax_torch(values, of, bits, empty, lse)


def softmax_for_product(
    values: Tensor, of: Logits, config: GatherConfig, factors: Tensor, *, nan_for_empty: bool, lse: bool
) -> Probabilities:
    """As :func:`quantized_softmax` on a GPU, the integers as an operand of ``config`` and with its bits.

    ``factors``: float32, of the scales, one for each matrix on a diagonal of each copy.
    """
    empty = math.nan if nan_for_empty else 1.0
    return _softmax_gpu(values, of, config.a.bits, empty, lse, config.atom, factors)


def product_config(found: Stack, bits: int, right: tuple[int, bool], columns: int, out: torch.dtype) -> GatherConfig:
    """The gather kernel for probabilities of ``bits`` on ``found`` times integers of ``columns``: the cheapest; cached.

    Never the panel kernel, whose blocks would fetch the operands of all matrices for vector rows of one.
    """
    key = ("product config", bits, right, columns, out)
    if key not in found.pattern._cache:
        found.pattern._cache[key] = _choose_product(found.pattern, bits, right, columns, out)
    config: GatherConfig = found.pattern._cache[key]
    return config


def _choose_product(
    pattern: Pattern, bits: int, right: tuple[int, bool], columns: int, out: torch.dtype
) -> GatherConfig:
    from cute_kernels.spmm.gather import GatherConfig
    from cute_kernels.spmm.heuristics import candidates, spmm_cost

    kind = Kind(pattern.vector_length, Integer(bits, False), Integer(*right), str(out).removeprefix("torch."))
    sizes = problem(pattern, pattern.vector_length, size_bucket(columns), 1)
    here = get_machine(pattern.device.index)
    # Of 32 vectors a group, as many as a stride has: the 4-bit instructions of older chips take 64.
    atom = "int4_as_int8_m16n8k32" if (bits, right[0]) == (4, 4) else "s8_m16n8k32"
    choices = [c for c in candidates(kind, here, sizes, atom) if isinstance(c, GatherConfig)]
    return replace(min(choices, key=lambda config: spmm_cost(config, here, sizes)), fresh=True)


def product_copy(found: Stack, stride: int, fragments: Tensor) -> list[Tensor]:
    """The execution copy for the gather kernel, of values that a kernel has written in its order."""
    key = ("gather copy", stride)
    cache = found.pattern._cache
    if key not in cache:
        total = found.col_indices.shape[0]
        starts = torch.cat((found.row_start, found.row_start.new_tensor([total])))
        cache[key] = (starts // stride, found.col_indices)
    return [*cache[key], fragments]


def check_key_bias(bias: Tensor, keys: int, device: torch.device) -> None:
    """Raise ``TypeError``/``ValueError`` unless ``bias`` is float ``(..., keys)`` on ``device``."""
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        raise TypeError(f"bias must be a float tensor, got {getattr(bias, 'dtype', type(bias).__name__)}")
    if bias.ndim < 1 or bias.shape[-1] != keys:
        raise ValueError(f"bias must have one number for each of the {keys} keys, got shape {tuple(bias.shape)}")
    if bias.device != device:
        raise ValueError(f"bias must be on {device}, got {bias.device}")


@overload
def sparse_softmax(
    S: SRBCRS,
    *,
    bits: int = 8,
    scale: float = 1.0,
    causal: bool = False,
    bias: Tensor | None = None,
    nan_for_empty: bool = False,
    return_lse: Literal[False] = False,
) -> SRBCRS: ...
@overload
def sparse_softmax(
    S: SRBCRS,
    *,
    bits: int = 8,
    scale: float = 1.0,
    causal: bool = False,
    bias: Tensor | None = None,
    nan_for_empty: bool = False,
    return_lse: Literal[True],
) -> tuple[SRBCRS, Tensor]: ...
def sparse_softmax(
    S: SRBCRS,
    *,
    bits: int = 8,
    scale: float = 1.0,
    causal: bool = False,
    bias: Tensor | None = None,
    nan_for_empty: bool = False,
    return_lse: bool = False,
) -> SRBCRS | tuple[SRBCRS, Tensor]:
    """``P[i, j] = exp(s[i, j]) / sum_j exp(s[i, j])`` with ``s = scale S + bias`` at S's vectors, as unsigned integers.

    ``P ~ p[i] u[i, j]`` with ``u = round(u_max exp(s - max_j s))``, ``u_max = 2**bits - 1``, and the row's scale
    ``p = 1 / sum_j u``: the largest probability of a row always is ``u_max``, however many keys share the row, and a
    row sums to one as it is stored.

    ``S``: float values (``bits=None``) of an SDDMM, ``(M, N)``; leading dimensions of its values are several matrices.
    ``bits``: 4, 8 or 16.  ``causal`` leaves out the elements with j > i, one by one.  ``bias``: float ``(N,)`` or, with
    the leading dimensions, ``(..., N)``; -inf leaves a key out.  A row without keys has zeros, or the scale NaN with
    ``nan_for_empty``; so has a row with NaN or +inf.
    Returns the matrix ``(M, N)``, on S's pattern.  Of several, n in number, the block-diagonal one of
    ``n R V`` rows, R V being M filled up to whole vectors, and ``n N`` columns: ``spmm`` multiplies it with V stacked
    to ``(n N, d)``, in one launch.  With ``return_lse`` also ``log sum_j exp(s[i, j])``, float32 ``(..., M)``, -inf
    for a row without keys.
    Raises ``TypeError`` for a matrix of integers, ``ValueError`` for other bits, scales and shapes.
    Source: Li, Osawa, Hoefler, SC'22, section V-C and figure 16.
    """
    check_softmax_bits(bits)
    factor = check_scale(scale)
    if not isinstance(S, SRBCRS):
        raise TypeError(f"S must be an SRBCRS, got {type(S).__name__}")
    if S.bits is not None or S.values.dtype not in _FLOATS:
        kind = S.values.dtype if S.bits is None else f"{S.bits}-bit integers"
        raise TypeError(f"S must hold results of dtype {_FLOATS}, got {kind}; sddmm(..., out_dtype=torch.float16)")
    pattern, (m, n), copies = S.pattern, S.shape, math.prod(S.batch_shape)
    values = S.values.reshape(copies, *S.values.shape[-3:])
    if bias is not None:
        check_key_bias(bias, n, S.device)
        bias = _spread_bias(bias, S.batch_shape)
    rows = pattern.vector_rows * pattern.vector_length
    of = Logits(pattern, S.stride, (max(1, rows), max(1, n)), factor, bias, causal)
    found = quantized_softmax(values, of, bits, nan_for_empty=nan_for_empty, lse=return_lse)
    on = stack(pattern, S.stride, copies)
    matrix = stacked_matrix(on, S.stride, found.values, found.scale.view(-1, 1)[: on.pattern.shape[0]], bits, False)
    if found.lse is None:
        return matrix
    return matrix, found.lse[:, :m].reshape(*S.batch_shape, m)


def _spread_bias(bias: Tensor, batch: tuple[int, ...]) -> Tensor:
    """As float32 (K,), or (copies, K) where it differs among the matrices; ``ValueError`` for other dimensions."""
    if bias.ndim == 1:
        return bias.detach().to(torch.float32).contiguous()
    try:
        wide = bias.detach().to(torch.float32).expand(*batch, bias.shape[-1])
    except RuntimeError:
        raise ValueError(f"bias must go with the leading dimensions {batch}, got shape {tuple(bias.shape)}") from None
    return wide.reshape(-1, bias.shape[-1]).contiguous()
