"""Softmax over the stored values of each row of a sparse matrix, with fused quantization."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from cute_kernels.dtypes import REAL_DTYPES, Integer
from cute_kernels.integers import int_range, store
from cute_kernels.machine import ProblemTypes
from cute_kernels.operands import Probabilities
from cute_kernels.watch import watched
from magicube_cutlass.attention.block_diagonal import BlockDiagonal, block_diagonal_matrix, repeat_on_diagonal
from magicube_cutlass.dispatch.machine import get_machine
from magicube_cutlass.dispatch.plan import problem, size_bucket
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS

if TYPE_CHECKING:
    from cute_kernels.spmm.gather import GatherConfig

SOFTMAX_BITS = (4, 8, 16)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class SoftmaxOptions(TypedDict, total=False):
    """Options of :func:`sparse_softmax`, documented there."""

    bits: int
    scale: float
    causal: bool
    bias: Tensor | None
    nan_for_empty: bool


class Logits(NamedTuple):
    """Structure, scale and bias of the logits of a softmax."""

    pattern: Pattern
    stride: int
    period: tuple[int, int]  # rows and columns per diagonal block
    scale: float
    bias: Tensor | None  # (K,) or (batch, K) float32
    causal: bool


def check_softmax_bits(bits: int, name: str = "bits") -> None:
    """Raise ``ValueError`` unless ``bits`` is 4, 8 or 16."""
    if bits not in SOFTMAX_BITS:
        raise ValueError(f"{name} must be one of {SOFTMAX_BITS}, got {bits!r}")


def check_scale(scale: float) -> float:
    """Return `scale` as a float; raise ``TypeError``/``ValueError`` unless it is a positive number."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return float(scale)


def block_rows(pattern: Pattern, stride: int) -> Tensor:
    """Return the vector row of each stride of values, int64 (blocks,); cached."""
    key = ("block rows", stride)
    if key not in pattern._cache:
        padded = pattern.padded(stride)
        counts = (pattern.row_lengths + stride - 1) // stride
        total = padded.col_indices.shape[0] // stride
        rows = torch.arange(pattern.vector_rows, device=pattern.device)
        pattern._cache[key] = rows.repeat_interleave(counts, output_size=total)
    cached: Tensor = pattern._cache[key]
    return cached


def row_max(values: Tensor, rows: Tensor, least: Tensor) -> Tensor:
    """Return the maximum of `least` (n, R, V) and of the values (n, blocks, V, stride) of each row."""
    if not values.numel():
        return least
    return least.scatter_reduce_(1, rows[:, None].expand(values.shape[:-1]), values.amax(-1), "amax")


def by_column(per_column: Tensor, columns: Tensor) -> Tensor:
    """Expand numbers per column (..., K) to (..., blocks, 1, stride); padding gets those of column 0."""
    return per_column[..., columns.clamp(min=0)].unsqueeze(-2)


def _included(of: Logits) -> Tensor:
    """Mask of the elements that take part in the softmax, bool (blocks, 1 or V, stride)."""
    pattern, stride, v = of.pattern, of.stride, of.pattern.vector_length
    columns = pattern.padded(stride).col_indices.view(-1, 1, stride)  # (blocks, 1, stride)
    included = columns >= 0
    partial = pattern.shape[0] % v != 0
    if not (of.causal or partial):
        return included
    lane = torch.arange(v, device=pattern.device)[:, None]  # (V, 1)
    rows = block_rows(pattern, stride)[:, None, None] * v + lane  # (blocks, V, 1)
    if partial:
        included = included & (rows < pattern.shape[0])
    if of.causal:
        included = included & (columns % of.period[1] <= rows % of.period[0])
    return included


def _softmax_torch(values: Tensor, of: Logits, bits: int, empty: float, lse: bool) -> Probabilities:
    """Softmax of `values` (copies, blocks, V, stride) by torch operators: the definition."""
    pattern, v, high = of.pattern, of.pattern.vector_length, int_range(bits, False)[1]
    copies, rows = values.shape[0], block_rows(pattern, of.stride)
    s = values * of.scale if values.dtype == torch.float32 else values.to(torch.float32).mul_(of.scale)
    if of.bias is not None:
        s += by_column(of.bias, pattern.padded(of.stride).col_indices.view(-1, of.stride))
    s.masked_fill_(~_included(of), -math.inf)
    largest = row_max(s, rows, torch.full((copies, pattern.vector_rows, v), -math.inf, device=values.device))
    shift = largest.masked_fill(largest == -math.inf, 0.0)
    e = s.sub_(shift[:, rows, :, None]).exp_()
    sums = torch.zeros_like(largest).index_add_(1, rows, e.sum(-1))
    has_nan = sums.isnan()
    if bool(has_nan.any()):
        e.nan_to_num_(nan=0.0)
    u = e.mul_(high).round_()  # float32 holds the sums of a stride exactly
    totals = torch.zeros(largest.shape, dtype=torch.int64, device=u.device).index_add_(
        1, rows, u.sum(-1).to(torch.int64)
    )
    scale = torch.where(totals > 0, 1.0 / totals.clamp(min=1).to(torch.float32), empty).masked_fill_(has_nan, math.nan)
    ints = store(u.to(torch.int32 if bits > 8 else torch.uint8), bits, False)
    logs = (shift + sums.log()).flatten(1) if lse else None
    return Probabilities(ints.flatten(0, 1), scale.flatten(1), logs)


def _softmax_gpu(
    values: Tensor, of: Logits, bits: int, empty: float, lse: bool, atom: str = "", matrix_scale: Tensor | None = None
) -> Probabilities:
    """Softmax of `values` by the kernel; with `atom`, in the fragment order of an SpMM."""
    from cute_kernels.attention import sparse_softmax as kernels

    pattern, v = of.pattern, of.pattern.vector_length
    padded = pattern.padded(of.stride)
    columns = padded.col_indices
    config = kernels.SoftmaxConfig(REAL_DTYPES[values.dtype], v, of.stride, bits, of.causal, of.bias is not None, atom)
    period = (max(1, of.period[0] // v), of.period[1])
    rows = kernels.SoftmaxRows(padded.row_start, padded.row_end, columns, pattern.shape[0], period)
    if values.data_ptr() % 16:
        values = values.clone()
    return kernels.softmax(
        values, rows, config, scale=of.scale, bias=of.bias, empty=empty, lse=lse, matrix_scale=matrix_scale
    )


def quantized_softmax(values: Tensor, of: Logits, bits: int, *, nan_for_empty: bool, lse: bool) -> Probabilities:
    """Run :func:`sparse_softmax` on values (copies, blocks, V, stride) without checks."""
    empty = math.nan if nan_for_empty else 1.0
    if values.is_cuda and values.numel():
        return _softmax_gpu(values, of, bits, empty, lse)
    return _softmax_torch(values, of, bits, empty, lse)


def softmax_for_product(
    values: Tensor, of: Logits, config: GatherConfig, matrix_scale: Tensor, *, nan_for_empty: bool, lse: bool
) -> Probabilities:
    """Run :func:`quantized_softmax` on a GPU, with the integers as the packed sparse operand of an SpMM.

    Parameters
    ----------
    values : Tensor, shape (copies, blocks, V, stride)
        Scores.
    of : Logits
        Structure and scale of the logits.
    config : GatherConfig
        Kernel config of the SpMM; defines the width and the order of the integers.
    matrix_scale : Tensor, shape (copies * diagonal blocks,)
        float32; multiplies the row scales.
    nan_for_empty, lse : bool
        As in :func:`sparse_softmax`.
    """
    empty = math.nan if nan_for_empty else 1.0
    return _softmax_gpu(values, of, config.a.bits, empty, lse, config.atom, matrix_scale)


def product_config(
    diagonal: BlockDiagonal, bits: int, right: tuple[int, bool], columns: int, out: torch.dtype
) -> GatherConfig:
    """Select the gather kernel for probabilities times V by predicted time; cached.

    The panel kernel is excluded: its CTAs would load the rows of V of all matrices for vector rows of one.

    Parameters
    ----------
    diagonal : BlockDiagonal
        Structure of the probabilities.
    bits : int
        Width of the probabilities.
    right : (int, bool)
        Width and signedness of V.
    columns : int
        Columns of V.
    out : torch.dtype
        Output dtype.
    """
    key = ("product config", bits, right, columns, out)
    if key not in diagonal.pattern._cache:
        diagonal.pattern._cache[key] = _choose_product(diagonal.pattern, bits, right, columns, out)
    config: GatherConfig = diagonal.pattern._cache[key]
    return config


def _choose_product(
    pattern: Pattern, bits: int, right: tuple[int, bool], columns: int, out: torch.dtype
) -> GatherConfig:
    """Uncached part of `product_config`."""
    from cute_kernels.spmm.gather import GatherConfig
    from cute_kernels.spmm.heuristics import candidates, spmm_cost

    kind = ProblemTypes(pattern.vector_length, Integer(bits, False), Integer(*right), str(out).removeprefix("torch."))
    sizes = problem(pattern, pattern.vector_length, size_bucket(columns), 1)
    here = get_machine(pattern.device.index)
    # MMA K must be the stride, 32; the 4-bit MMA of sm_80 has K = 64.
    atom = "int4_as_int8_m16n8k32" if (bits, right[0]) == (4, 4) else "s8_m16n8k32"
    choices = [c for c in candidates(kind, here, sizes, atom) if isinstance(c, GatherConfig)]
    return replace(min(choices, key=lambda config: spmm_cost(config, here, sizes)), a_just_written=True)


def packed_probabilities(diagonal: BlockDiagonal, stride: int, fragments: Tensor) -> list[Tensor]:
    """Return the packed sparse operand of the gather kernel for values that are already in fragment order."""
    key = ("gather copy", stride)
    cache = diagonal.pattern._cache
    if key not in cache:
        from cute_kernels.spmm.gather import find_long_rows

        total = diagonal.col_indices.shape[0]
        starts = torch.cat((diagonal.row_start, diagonal.row_start.new_tensor([total])))
        starts //= stride
        cache[key] = (starts, diagonal.col_indices, find_long_rows(starts, total // stride))
    starts, columns, long_rows = cache[key]
    return [starts, columns, fragments, long_rows]


def check_key_bias(bias: Tensor, keys: int, device: torch.device) -> None:
    """Raise ``TypeError``/``ValueError`` unless `bias` is a float tensor (..., keys) on `device`."""
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        raise TypeError(f"bias must be a float tensor, got {getattr(bias, 'dtype', type(bias).__name__)}")
    if bias.ndim < 1 or bias.shape[-1] != keys:
        raise ValueError(f"bias must have one number for each of the {keys} keys, got shape {tuple(bias.shape)}")
    if bias.device != device:
        raise ValueError(f"bias must be on {device}, got {bias.device}")


@overload
def sparse_softmax(S: SRBCRS, *, return_lse: Literal[False] = False, **options: Unpack[SoftmaxOptions]) -> SRBCRS: ...
@overload
def sparse_softmax(
    S: SRBCRS, *, return_lse: Literal[True], **options: Unpack[SoftmaxOptions]
) -> tuple[SRBCRS, Tensor]: ...
@watched("magicube_cutlass.sparse_softmax")
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
    """Compute the quantized softmax over the stored values of each row of a sparse matrix.

    ``P[i, j] = exp(s[i, j]) / sum_j exp(s[i, j])`` with ``s = scale S + bias``, as ``P ~ p[i] u[i, j]``: unsigned
    integers ``u = round(u_max exp(s - max_j s))``, ``u_max = 2**bits - 1``, and row scales ``p = 1 / sum_j u``. The
    largest probability of a row is always ``u_max``, and a stored row sums to one. Implements section V-C of [1]_.

    Parameters
    ----------
    S : SRBCRS, shape (M, N)
        Scores of an SDDMM: floats (``bits=None``). Leading dimensions of the values are several matrices.
    bits : int, default 8
        Width of the integers: 4, 8 or 16.
    scale : float, default 1.0
        Positive scale of the scores.
    causal : bool, default False
        Exclude the elements with ``j > i``.
    bias : Tensor, shape (N,) or (..., N), optional
        Floats added per column; -inf excludes a column.
    nan_for_empty : bool, default False
        Rows without keys get the scale NaN instead of zeros.
    return_lse : bool, default False
        Return the log-sum-exp too.

    Returns
    -------
    P : SRBCRS, shape (M, N)
        On the pattern of `S`; the scale of a row with NaN or +inf is NaN. n matrices give the block-diagonal one of
        ``n R V`` rows (M padded to whole vectors) and ``n N`` columns, which ``spmm`` multiplies with the matrices V
        concatenated to ``(n N, d)``.
    lse : Tensor, shape (..., M)
        ``log sum_j exp(s[i, j])``, float32, -inf for a row without keys; only with `return_lse`.

    Raises
    ------
    TypeError
        If `S` is not a float SRBCRS, or a dtype is not supported.
    ValueError
        If `bits`, `scale` or a shape is wrong.

    See Also
    --------
    sparse_attention : The whole of attention.

    References
    ----------
    .. [1] Li, Osawa, Hoefler, SC'22, section V-C and figure 16.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> mask = mc.masks.local(16, 4)
    >>> q = mc.quantize(torch.randn(16, 32), bits=8, scale="row")
    >>> P, lse = mc.sparse_softmax(mc.sddmm(q, q, mask, out_dtype=torch.float16), scale=0.2, return_lse=True)
    >>> P.bits, P.shape, lse.shape
    (8, (16, 16), torch.Size([16]))
    >>> bool(torch.allclose(P.to_dense().sum(1), torch.ones(16)))
    True
    """
    check_softmax_bits(bits)
    logit_scale = check_scale(scale)
    if not isinstance(S, SRBCRS):
        raise TypeError(f"S must be an SRBCRS, got {type(S).__name__}")
    if S.bits is not None or S.values.dtype not in _FLOATS:
        kind = S.values.dtype if S.bits is None else f"{S.bits}-bit integers"
        raise TypeError(f"S must hold results of dtype {_FLOATS}, got {kind}; sddmm(..., out_dtype=torch.float16)")
    pattern, (m, n), copies = S.pattern, S.shape, math.prod(S.batch_shape)
    values = S.values.reshape(copies, *S.values.shape[-3:])  # (copies, blocks, V, stride)
    if bias is not None:
        check_key_bias(bias, n, S.device)
        bias = _expand_bias(bias, S.batch_shape)
    rows = pattern.vector_rows * pattern.vector_length
    of = Logits(pattern, S.stride, (max(1, rows), max(1, n)), logit_scale, bias, causal)
    p = quantized_softmax(values, of, bits, nan_for_empty=nan_for_empty, lse=return_lse)
    diagonal = repeat_on_diagonal(pattern, S.stride, copies)
    row_scale = p.scale.view(-1, 1)[: diagonal.pattern.shape[0]]  # (rows, 1)
    matrix = block_diagonal_matrix(diagonal, S.stride, p.values, row_scale, bits, False)
    if p.lse is None:
        return matrix
    return matrix, p.lse[:, :m].reshape(*S.batch_shape, m)


def _expand_bias(bias: Tensor, batch: tuple[int, ...]) -> Tensor:
    """The bias as float32 (K,), or (copies, K) if it varies among the matrices."""
    if bias.ndim == 1:
        return bias.detach().to(torch.float32).contiguous()
    try:
        expanded = bias.detach().to(torch.float32).expand(*batch, bias.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"bias must broadcast to the leading dimensions {batch}, got shape {tuple(bias.shape)}"
        ) from None
    return expanded.reshape(-1, bias.shape[-1]).contiguous()
