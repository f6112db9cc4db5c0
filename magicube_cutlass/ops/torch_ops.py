"""The products as torch operators, ``torch.ops.magicube.*``, with fakes; arguments are checked by ``ops``.

``matrix`` and ``pattern`` are the packed operands that ``kernel`` reads: the engine's on a CPU, those of the config
that ``kernel`` names on a GPU.
"""

from typing import Any

import torch
from torch import Tensor

from cute_kernels.cpu import engine, extension
from cute_kernels.integers import BITS, combine_digits, fetch, storage_dtype, widen
from magicube_cutlass.checks import materialized
from magicube_cutlass.dispatch import cpu_float as float_products
from magicube_cutlass.dispatch.plan import SpmmProblem
from magicube_cutlass.dispatch.register import register_op
from magicube_cutlass.ops import op_checks
from magicube_cutlass.quantization.quantize import _encode, encode_on_gpu
from magicube_cutlass.reference import scale_out


def _dense_ints(b: engine.DenseOperand, shape: tuple[int, int]) -> Tensor:
    length = shape[b.packed_dim] if b.bits == 4 else 0
    return widen(fetch(b.data, length, b.bits, b.signed, b.packed_dim))


def _matrix_ints(a: engine.SparseOperand) -> Tensor:
    """The sparse operand as a dense int64 matrix (M, K), for the path without a compiled engine."""
    ints = combine_digits(a.planes, a.bits, a.signed)  # (blocks, V, stride)
    blocks, v, stride = ints.shape
    dense = torch.zeros(a.row_start.numel() * v, a.columns, dtype=torch.int64, device="cpu")
    block_row = torch.searchsorted(a.row_start // stride, torch.arange(blocks, device="cpu"), right=True) - 1
    rows = (block_row[:, None] * v + torch.arange(v, device="cpu"))[:, :, None].expand_as(ints)
    cols = a.col_indices.view(blocks, 1, stride).expand_as(ints).long()
    used = cols >= 0
    dense[rows[used], cols[used]] = ints[used]
    return dense[: a.rows]


def _spread(scale: Tensor | None, length: int) -> Tensor | None:
    """A per-tensor scale as one per row or column."""
    return scale if scale is None or scale.ndim else scale.expand(length).contiguous()


def _spmm_cpu(
    out: Tensor,
    a: engine.SparseOperand,
    b: engine.DenseOperand,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Integers on a CPU, by the engine or, without it, by an int64 product."""
    if out.numel() == 0:
        return
    if extension.ENGINE is not None:
        engine.spmm(a, b, out, row_scale, col_scale, bias)
        return
    row_scale, col_scale = _spread(row_scale, out.shape[-2]), _spread(col_scale, out.shape[-1])
    total = torch.matmul(_matrix_ints(a), _dense_ints(b, (a.columns, out.shape[-1])))  # (*batch, M, N)
    dtype = torch.float32 if out.is_floating_point() else out.dtype
    rows, columns = (
        None if row_scale is None else row_scale[:, None],
        None if col_scale is None else col_scale.unsqueeze(-2),
    )
    scaled = scale_out(total, dtype, rows, columns)
    out.copy_(scaled if bias is None else scaled + bias[:, None])


def _check_lengths(**lists: tuple[list[Any], int]) -> None:
    """Raise ``ValueError`` unless each list has its length."""
    for name, (given, length) in lists.items():
        if len(given) != length:
            raise ValueError(f"{name} must have {length} entries, got {len(given)}")


def _check_sizes(**sizes: int) -> None:
    """Raise ``ValueError`` for a size below 0."""
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} must be at least 0, got {size}")


def _spmm_out(
    matrix: list[Tensor],
    b: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    bias: Tensor | None,
    inner: int,
    bits: list[int],
    signed: list[bool],
    packed_dim: int,
    kernel: str,
    out: Tensor,
) -> None:
    """``out = (A B) * row_scale * col_scale + bias``; ``bits`` and ``signed`` name A, then B."""
    _check_lengths(bits=(bits, 2), signed=(signed, 2))
    if out.ndim < 2:
        raise ValueError(f"out must have at least 2 dimensions, got shape {tuple(out.shape)}")
    (rows, n), batch, device = out.shape[-2:], b.shape[:-2], b.device
    op_checks.check_place("b", b, device)
    op_checks.check_output(out, (*batch, rows, n), device)
    op_checks.check_vector("row_scale", row_scale, rows, (), device)
    op_checks.check_vector("col_scale", col_scale, n, batch, device)
    op_checks.check_vector("bias", bias, rows, (), device)
    if device.type == "cuda":
        from cute_kernels.spmm.heuristics import spmm_config
        from magicube_cutlass.dispatch import cuda as gpu  # its kernels need the CUDA wheels

        op_checks.check_elements("b", b, spmm_config(kernel).b, packed_dim, (inner, n))
        op_checks.check_arrays("matrix", matrix, None, device)
        dense = engine.DenseOperand(b, bits[1], signed[1], -2, packed_dim)
        gpu.spmm(kernel, matrix, dense, inner, out, row_scale, col_scale, bias)
        return
    op_checks.check_elements("b", b, op_checks.cpu_format(kernel, bits[1], signed[1]), packed_dim, (inner, n))
    if kernel != "cpu":
        op_checks.check_csr(matrix, rows, device)
        number = kernel.removeprefix(float_products.PREFIX)
        float_products.spmm(matrix, b, number, packed_dim, inner, out, row_scale, col_scale, bias)
    else:
        op_checks.check_arrays("matrix", matrix, 5, device)
        row_start, row_end, col_indices, planes, sums = matrix
        sparse = engine.SparseOperand(
            row_start, row_end, col_indices, planes, sums, out.shape[-2], inner, bits[0], signed[0]
        )
        dense = engine.DenseOperand(b, bits[1], signed[1], -2, packed_dim)
        _spmm_cpu(out, sparse, dense, row_scale, col_scale, bias)


def _spmm(
    matrix: list[Tensor],
    b: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
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
    """As :func:`_spmm_out`, into a new tensor."""
    _check_sizes(rows=rows, inner=inner, n=n)
    if b.ndim < 2:
        raise ValueError(f"b must have at least 2 dimensions, got shape {tuple(b.shape)}")
    out = _empty_product(b, rows, n, out_dtype)
    _spmm_out(matrix, b, row_scale, col_scale, bias, inner, bits, signed, packed_dim, kernel, out)
    return out


def _empty_product(b: Tensor, rows: int, n: int, out_dtype: torch.dtype) -> Tensor:
    return b.new_empty((*b.shape[:-2], rows, n), dtype=out_dtype)


spmm = register_op("magicube::spmm", _spmm, _empty_product)
spmm_out = register_op("magicube::spmm_out", _spmm_out, None, mutates=("out",))


def _sddmm_cpu(
    x: engine.DenseOperand,
    y: engine.DenseOperand,
    pattern: list[Tensor],
    out: Tensor,
    shape: tuple[int, int, int],
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> None:
    """Integers on a CPU, into ``out`` (..., blocks, V, stride), zero on entry."""
    (m, n, k), (row_start, row_end, col_indices) = shape, pattern
    blocks, vector_length, stride = out.shape[-3:]
    if extension.ENGINE is not None:
        flat = [scale if scale is None or scale.ndim < 2 else scale.flatten(0, -2) for scale in (row_scale, col_scale)]
        engine.sddmm(x, y, row_start, row_end, col_indices, out.view(-1, *out.shape[-3:]), shape, *flat)
        return
    row_scale, col_scale = _spread(row_scale, m), _spread(col_scale, n)
    ints_y = _dense_ints(y, (n, k) if y.inner_dim == -1 else (k, n))
    total = torch.matmul(_dense_ints(x, (m, k)), ints_y.mT if y.inner_dim == -1 else ints_y)  # (*batch, M, N)
    full = scale_out(total, out.dtype, None if row_scale is None else row_scale.unsqueeze(-1),
                     None if col_scale is None else col_scale.unsqueeze(-2))  # fmt: skip
    full = torch.nn.functional.pad(full, (0, 0, 0, row_start.numel() * vector_length - m))
    owner = torch.searchsorted(row_start // stride, torch.arange(blocks, device="cpu"), right=True) - 1
    rows = (owner[:, None] * vector_length + torch.arange(vector_length, device="cpu"))[:, :, None].expand(
        out.shape[-3:]
    )
    cols = col_indices.view(blocks, 1, stride).expand(out.shape[-3:]).long()
    out.copy_(full[..., rows, cols.clamp(min=0)].masked_fill_(cols < 0, 0))


def _sddmm(
    pattern: list[Tensor],
    x: Tensor,
    y: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
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
    """``(X Y^T) * row_scale * col_scale`` at the pattern, as SR-BCRS values; ``shape`` is (M, N, K)."""
    _check_lengths(shape=(shape, 3), bits=(bits, 2), signed=(signed, 2), packed=(packed, 2))
    m, n, k = shape
    _check_sizes(m=m, n=n, k=k)
    device, batch, sizes_y = x.device, x.shape[:-2], (n, k) if inner_y == -1 else (k, n)
    op_checks.check_samples(pattern, vector_length, stride, m, device)
    op_checks.check_place("x", x, device)
    op_checks.check_place("y", y, device)
    op_checks.check_vector("row_scale", row_scale, m, batch, device)
    op_checks.check_vector("col_scale", col_scale, n, batch, device)
    if inner_y not in (-1, -2):
        raise ValueError(f"inner_y must be -1 or -2, got {inner_y}")
    kinds = op_checks.sddmm_formats(kernel, bits, signed, device)
    op_checks.check_elements("x", x, kinds[0], packed[0], (m, k))
    op_checks.check_elements("y", y, kinds[1], packed[1], sizes_y)
    if x.shape[:-2] != y.shape[:-2]:
        raise ValueError(f"y must have the batch {tuple(x.shape[:-2])} of x, got {tuple(y.shape[:-2])}")
    dense_x = engine.DenseOperand(x, bits[0], signed[0], -1, packed[0])
    dense_y = engine.DenseOperand(y, bits[1], signed[1], inner_y, packed[1])
    out = _empty_samples(pattern, x, vector_length, stride, out_dtype)
    if x.device.type == "cuda":
        from magicube_cutlass.dispatch import cuda as gpu

        gpu.sddmm(kernel, pattern, dense_x, dense_y, (m, n, k), out, row_scale, col_scale)
        return out
    out.zero_()
    if kernel != "cpu":
        row_start, _, col_indices = pattern
        blocks = col_indices.numel() // stride
        owner = torch.searchsorted(row_start // stride, torch.arange(blocks, device="cpu"), right=True) - 1
        names = kernel.removeprefix(float_products.PREFIX).split(":")
        sides = (
            float_products.rows(x, names[0], packed[0], -1, (m, k)),
            float_products.rows(y, names[1], packed[1], inner_y, (n, k)),
        )
        float_products.sddmm(col_indices.view(blocks, stride), owner, *sides, out, row_scale, col_scale)
    elif out.numel():
        _sddmm_cpu(dense_x, dense_y, pattern, out, (m, n, k), row_scale, col_scale)
    return out


def _empty_samples(pattern: list[Tensor], x: Tensor, vector_length: int, stride: int, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-2], pattern[-1].shape[0] // stride, vector_length, stride), dtype=out_dtype)


sddmm = register_op("magicube::sddmm", _sddmm, _empty_samples)


def _check_floats(x: Tensor, bits: int, axis: int | None) -> Tensor:
    """Return `x` with its values in memory; raise unless the quantizer takes it."""
    if bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}, got {bits!r}")
    if not x.is_floating_point():
        raise TypeError(f"x must have a floating dtype, got {x.dtype}")
    if axis not in (None, 0, 1):
        raise ValueError(f"axis must be None, 0 or 1, got {axis}")
    if x.ndim < (1 if axis is None else 2):
        raise ValueError(f"x must have at least {1 if axis is None else 2} dimensions for axis={axis}, got {x.ndim}")
    return materialized(x) if x.is_neg() or x.is_conj() or x._is_zerotensor() else x


def _quantize(x: Tensor, bits: int, axis: int | None) -> tuple[Tensor, Tensor]:
    """Signed integers of ``x``, packed along its last dimension, and their scale; a slice with inf or nan gets NaN."""
    x = _check_floats(x, bits, axis)
    if x.device.type == "cuda" and x.numel():
        return encode_on_gpu(x, bits, axis, True, False)
    real = x if x.dtype == torch.float64 else x.float()
    return _encode(real.contiguous(), bits, axis, True, False, None)[:2]


def _empty_quantized(x: Tensor, bits: int, axis: int | None) -> tuple[Tensor, Tensor]:
    shape = list(x.shape) if axis is not None else []
    if axis is not None:
        shape[-2 if axis == 0 else -1] = 1
    scale = x.new_empty(shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    return _empty_ints(x, bits), scale


def _empty_ints(x: Tensor, bits: int) -> Tensor:
    width = (x.shape[-1] + 1) // 2 if bits == 4 else x.shape[-1]
    return x.new_empty((*x.shape[:-1], width), dtype=storage_dtype(bits, True))


quantize = register_op("magicube::quantize", _quantize, _empty_quantized)


def _quantize_by(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """As ``quantize`` with a given scale, one or one per row or column of a matrix.

    Values beyond its range saturate, and nan becomes zero.
    """
    x = _check_floats(x, bits, None)
    per: dict[tuple[int, ...], int] = {(x.shape[0], 1): 1, (1, x.shape[1]): 0} if x.ndim == 2 else {}
    axis = None if scale.numel() == 1 else per.get(tuple(scale.shape))
    if (axis is None and scale.numel() != 1) or not scale.is_floating_point() or scale.device != x.device:
        raise ValueError(f"scale must be one float on {x.device}, or one per row or column, got {scale.dtype} "
                         f"{tuple(scale.shape)} on {scale.device}")  # fmt: skip
    scale = materialized(scale.reshape(()) if axis is None else scale)
    if x.device.type == "cuda" and x.numel():
        from cute_kernels.convert import quantize as kernels

        given = scale.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        return kernels.quantize(x, bits=bits, signed=True, axis=axis, scale=given)[0]
    real = x if x.dtype == torch.float64 else x.float()
    return _encode(real.contiguous(), bits, axis, True, False, scale.to(real.dtype))[0]


quantize_by = register_op("magicube::quantize_by", _quantize_by, _empty_ints)


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
