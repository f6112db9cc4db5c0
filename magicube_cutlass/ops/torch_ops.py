"""The products as torch operators, ``torch.ops.magicube.*``, with fakes; tensors only, already checked by ``ops``.

``matrix`` and ``pattern`` are the execution copies that ``kernel`` wants: the engine's on a CPU, those of the config
that ``kernel`` names on a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels.cpu import engine
from cute_kernels.integers import combine_digits, fetch, storage_dtype, widen
from magicube_cutlass.dispatch import cpu_float as float_products
from magicube_cutlass.dispatch.plan import SpmmProblem
from magicube_cutlass.quantization.quantize import _encode, encode_on_gpu
from magicube_cutlass.reference import scale_out


def _operator(name: str, mutates: tuple[str, ...] = (), **implementations: Callable[..., Any]) -> Any:
    """``torch.ops.magicube.<name>`` with an implementation for each kind of device.

    Not ``torch.library.custom_op``: that one imports the compiler stack at its first call, a second of waiting.
    """
    schema = torch.library.infer_schema(implementations["cpu"], mutates_args=mutates)
    torch.library.define(f"magicube::{name}", schema)
    for device, function in implementations.items():
        torch.library.impl(f"magicube::{name}", device)(function)
    return getattr(torch.ops.magicube, name)


def _dense_ints(b: engine.DenseOperand, shape: tuple[int, int]) -> Tensor:
    length = shape[b.packed_dim] if b.bits == 4 else 0
    return widen(fetch(b.data, length, b.bits, b.signed, b.packed_dim))


def _matrix_ints(a: engine.SparseOperand) -> Tensor:
    """The sparse operand as a dense int64 matrix (M, K), for the path without a compiled engine."""
    ints = combine_digits(a.planes, a.bits, a.signed)  # (blocks, V, stride)
    blocks, v, stride = ints.shape
    dense = torch.zeros(a.row_start.numel() * v, a.columns, dtype=torch.int64)
    block_row = torch.searchsorted(a.row_start // stride, torch.arange(blocks), right=True) - 1
    rows = (block_row[:, None] * v + torch.arange(v))[:, :, None].expand_as(ints)
    cols = a.col_indices.view(blocks, 1, stride).expand_as(ints).long()
    kept = cols >= 0
    dense[rows[kept], cols[kept]] = ints[kept]
    return dense[: a.rows]


def _spread(factor: Tensor | None, length: int) -> Tensor | None:
    """One factor for all as one each."""
    return factor if factor is None or factor.ndim else factor.expand(length).contiguous()


def _spmm_into(
    out: Tensor,
    a: engine.SparseOperand,
    b: engine.DenseOperand,
    left: Tensor | None,
    right: Tensor | None,
    bias: Tensor | None,
) -> None:
    if out.numel() == 0:
        return
    left, right = _spread(left, out.shape[-2]), _spread(right, out.shape[-1])
    if engine.available():
        flat_right = None if right is None else right.reshape(-1, out.shape[-1]).squeeze(0)
        engine.spmm(a, b, out.view(-1, *out.shape[-2:]), left, flat_right, bias)
        return
    total = torch.matmul(_matrix_ints(a), _dense_ints(b, (a.columns, out.shape[-1])))
    dtype = torch.float32 if out.is_floating_point() else out.dtype
    rows, columns = None if left is None else left[:, None], None if right is None else right.unsqueeze(-2)
    scaled = scale_out(total, dtype, rows, columns)
    out.copy_(scaled if bias is None else scaled + bias[:, None])


def _spmm_out(
    matrix: list[Tensor],
    b: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    bias: Tensor | None,
    inner: int,
    bits: list[int],
    signed: list[bool],
    packed_dim: int,
    kernel: str,
    out: Tensor,
) -> None:
    """As ``spmm``, into ``out``."""
    if kernel != "cpu":
        number = kernel.removeprefix(float_products.PREFIX)
        float_products.spmm(matrix, b, number, packed_dim, inner, out, left, right, bias)
        return
    row_start, row_end, col_indices, planes, row_sums = matrix
    blocks = engine.SparseOperand(
        row_start, row_end, col_indices, planes, row_sums, out.shape[-2], inner, bits[0], signed[0]
    )
    _spmm_into(out, blocks, engine.DenseOperand(b, bits[1], signed[1], -2, packed_dim), left, right, bias)


def _spmm_out_cuda(
    matrix: list[Tensor],
    b: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    bias: Tensor | None,
    inner: int,
    bits: list[int],
    signed: list[bool],
    packed_dim: int,
    kernel: str,
    out: Tensor,
) -> None:
    from magicube_cutlass.dispatch import cuda as gpu  # its kernels need the CUDA wheels

    gpu.spmm(kernel, matrix, engine.DenseOperand(b, bits[1], signed[1], -2, packed_dim), inner, out, left, right, bias)


def _returning(into: Callable[..., None]) -> Callable[..., Tensor]:
    """The form of ``spmm`` that makes its output."""

    def spmm(
        matrix: list[Tensor],
        b: Tensor,
        left: Tensor | None,
        right: Tensor | None,
        bias: Tensor | None,
        rows: int,
        inner: int,
        n: int,
        bits: list[int],
        signed: list[bool],
        packed_dim: int,
        kernel: str,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """``C = (A B) * left * right + bias``; ``bits`` and ``signed`` name A, then B."""
        out = b.new_empty((*b.shape[:-2], rows, n), dtype=out_dtype)
        into(matrix, b, left, right, bias, inner, bits, signed, packed_dim, kernel, out)
        return out

    return spmm


spmm = _operator("spmm", cpu=_returning(_spmm_out), cuda=_returning(_spmm_out_cuda))
spmm_out = _operator("spmm_out", ("out",), cpu=_spmm_out, cuda=_spmm_out_cuda)
torch.library.register_fake("magicube::spmm")(_returning(lambda *_: None))


def _sddmm(
    pattern: list[Tensor],
    x: Tensor,
    y: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    shape: list[int],
    vector_length: int,
    stride: int,
    bits: list[int],
    signed: list[bool],
    inner_y: int,
    packed: list[int],
    kernel: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """``(X Y^T) * left * right`` at the pattern, as SR-BCRS values; ``shape`` is (M, N, K)."""
    m, n, k = shape
    row_start, row_end, col_indices = pattern
    blocks = col_indices.numel() // stride
    out = torch.zeros((*x.shape[:-2], blocks, vector_length, stride), dtype=out_dtype)
    if kernel != "cpu":
        owner = torch.searchsorted(row_start // stride, torch.arange(blocks), right=True) - 1
        names = kernel.removeprefix(float_products.PREFIX).split(":")
        sides = (
            float_products.rows(x, names[0], packed[0], -1, (m, k)),
            float_products.rows(y, names[1], packed[1], inner_y, (n, k)),
        )
        float_products.sddmm(col_indices.view(blocks, stride), owner, *sides, out, left, right)
        return out
    dense_x = engine.DenseOperand(x, bits[0], signed[0], -1, packed[0])
    dense_y = engine.DenseOperand(y, bits[1], signed[1], inner_y, packed[1])
    if out.numel() == 0:
        return out
    left, right = _spread(left, m), _spread(right, n)
    if engine.available():
        left = None if left is None else left.reshape(-1, m).squeeze(0)
        right = None if right is None else right.reshape(-1, n).squeeze(0)
        batch = out.view(-1, *out.shape[-3:])
        engine.sddmm(dense_x, dense_y, row_start, row_end, col_indices, batch, (m, n, k), left, right)
        return out
    ints_y = _dense_ints(dense_y, (n, k) if inner_y == -1 else (k, n))
    total = torch.matmul(_dense_ints(dense_x, (m, k)), ints_y.mT if inner_y == -1 else ints_y)  # (*batch, M, N)
    full = scale_out(total, out_dtype, None if left is None else left.unsqueeze(-1),
                     None if right is None else right.unsqueeze(-2))  # fmt: skip
    full = torch.nn.functional.pad(full, (0, 0, 0, row_start.numel() * vector_length - m))
    owner = torch.searchsorted(row_start // stride, torch.arange(blocks), right=True) - 1
    rows = (owner[:, None] * vector_length + torch.arange(vector_length))[:, :, None].expand(out.shape[-3:])
    cols = col_indices.view(blocks, 1, stride).expand(out.shape[-3:]).long()
    picked = full[..., rows, cols.clamp(min=0)]
    return picked.masked_fill_(cols < 0, 0)


def _sddmm_cuda(
    pattern: list[Tensor],
    x: Tensor,
    y: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    shape: list[int],
    vector_length: int,
    stride: int,
    bits: list[int],
    signed: list[bool],
    inner_y: int,
    packed: list[int],
    kernel: str,
    out_dtype: torch.dtype,
) -> Tensor:
    from magicube_cutlass.dispatch import cuda as gpu

    out = x.new_empty((*x.shape[:-2], pattern[1].numel() // stride, vector_length, stride), dtype=out_dtype)
    dense_x = engine.DenseOperand(x, bits[0], signed[0], -1, packed[0])
    dense_y = engine.DenseOperand(y, bits[1], signed[1], inner_y, packed[1])
    gpu.sddmm(kernel, pattern, dense_x, dense_y, (shape[0], shape[1], shape[2]), out, left, right)
    return out


sddmm = _operator("sddmm", cpu=_sddmm, cuda=_sddmm_cuda)


@torch.library.register_fake("magicube::sddmm")
def _fake_sddmm(
    pattern: list[Tensor],
    x: Tensor,
    y: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    shape: list[int],
    vector_length: int,
    stride: int,
    bits: list[int],
    signed: list[bool],
    inner_y: int,
    packed: list[int],
    kernel: str,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-2], pattern[-1].shape[0] // stride, vector_length, stride), dtype=out_dtype)


def _quantize(x: Tensor, bits: int, axis: int | None) -> tuple[Tensor, Tensor]:
    """Signed integers of ``x``, packed along its last dimension, and their scale; a slice with inf or nan gets NaN."""
    real = x if x.dtype == torch.float64 else x.float()
    return _encode(real.contiguous(), bits, axis, True, False, None)[:2]


def _quantize_cuda(x: Tensor, bits: int, axis: int | None) -> tuple[Tensor, Tensor]:
    return encode_on_gpu(x, bits, axis, True, False) if x.numel() else _quantize(x, bits, axis)


quantize = _operator("quantize", cpu=_quantize, cuda=_quantize_cuda)


def _width(x: Tensor, bits: int) -> int:
    return (x.shape[-1] + 1) // 2 if bits == 4 else x.shape[-1]


@torch.library.register_fake("magicube::quantize")
def _fake_quantize(x: Tensor, bits: int, axis: int | None) -> tuple[Tensor, Tensor]:
    shape = list(x.shape) if axis is not None else []
    if axis is not None:
        shape[-2 if axis == 0 else -1] = 1
    scale = x.new_empty(shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    return _fake_quantize_by(x, scale, bits), scale


def _quantize_by(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """As ``quantize`` with one given scale: what lies beyond its range saturates, and nan becomes zero."""
    real = x if x.dtype == torch.float64 else x.float()
    return _encode(real.contiguous(), bits, None, True, False, scale.to(real.dtype))[0]


def _quantize_by_cuda(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    if not x.numel():
        return _quantize_by(x, scale, bits)
    from cute_kernels.convert import quantize as kernels

    given = scale.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return kernels.quantize(x, bits=bits, signed=True, axis=None, scale=given)[0]


quantize_by = _operator("quantize_by", cpu=_quantize_by, cuda=_quantize_by_cuda)


@torch.library.register_fake("magicube::quantize_by")
def _fake_quantize_by(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], _width(x, bits)), dtype=storage_dtype(bits, True))


def run_spmm(problem: SpmmProblem, kernel: str, packed: list[Tensor], out: Tensor | None) -> Tensor:
    """Run the operator of a checked SpMM; ``kernel``: name of the config, ``packed``: what it reads of A."""
    rows, inner = problem.matrix.shape
    lhs, rhs = problem.lhs, problem.rhs
    operands = (packed, problem.dense.data, problem.row_scale, problem.col_scale, problem.bias)
    kinds = ([lhs.bits, rhs.bits], [lhs.signed, rhs.signed], problem.packed_dim, kernel)
    if out is None:
        result: Tensor = spmm(*operands, rows, inner, problem.dense.shape[-1], *kinds, problem.out_dtype)
        return result
    spmm_out(*operands, inner, *kinds, out)
    return out
