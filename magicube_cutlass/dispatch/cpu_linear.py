"""The product of a matrix with floats on a CPU in one call of the engine, which quantizes them: sparse or dense.

Both kernels give the same bits, those of quantizing first. The dense one packs a copy of the matrix once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from cute_kernels.cpu import dense, engine, extension
from cute_kernels.gemm.cpu import dense_backend
from magicube_cutlass.checks import is_transformed
from magicube_cutlass.dispatch import cpu_costs
from magicube_cutlass.dispatch.cpu import pack_operand
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.formats.tracking import is_current

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BITS = (4, 8)
# Tokens of the AVX2 kernels that keep sums in registers, and the density from which the dense kernel is faster,
# by `benchmarks/cpu_layers.py` on one EPYC.
_FEW = ((1, 0.4), (2, 0.33), (4, 0.3), (8, 0.45), (16, 0.6))
_SPARSE, _DENSE = 0.3, 0.8  # densities up to and from which the kernel for more tokens needs no prediction
_MAX_SIZES = 64  # numbers of tokens whose choice is kept


class CpuLinear:
    """The product of one matrix (M, K) with float rows; kept on the matrix, which owns what the engine reads."""

    def __init__(self, matrix: SRBCRS) -> None:
        assert matrix.bits is not None
        start, end, columns, planes, sums = pack_operand(matrix)
        self.shape = m, k = matrix.shape
        operand = engine.SparseOperand(start, end, columns, planes, sums, m, k, matrix.bits, matrix.signed)
        self.sparse = engine.SparseLinear(operand)
        self.dense: dense.DenseLinear | None = None
        self.vectors, self.vector_length = matrix.pattern.vectors, matrix.vector_length
        self._choices: dict[int, bool] = {}

    def is_dense(self, tokens: int) -> bool:
        """Whether the dense kernel is predicted to be faster; chosen once for a number of tokens."""
        found = self._choices.get(tokens)
        if found is None:
            if len(self._choices) >= _MAX_SIZES:
                self._choices.clear()
            found = self._choices[tokens] = dense_backend() == "engine" and self._predict(tokens)
        return found

    def _predict(self, tokens: int) -> bool:
        (m, k), v = self.shape, self.vector_length
        density = self.vectors * max(v, 4) / (m * k)  # shorter vectors take the time of 4
        if k > dense.MAX_K:
            return False
        if engine.isa() == "avx2" and tokens <= _FEW[-1][0]:
            return density >= next(limit for most, limit in _FEW if tokens <= most)
        if not _SPARSE < density < _DENSE:
            return density >= _DENSE
        costs, threads = cpu_costs.get_costs(), torch.get_num_threads()
        sparse_terms = cpu_costs.sparse_terms(m, k, tokens, self.vectors, v, 1, 1, 32)
        dense_terms = cpu_costs.dense_terms(m, k, tokens, 1, False)
        sparse = cpu_costs.predict(costs.sparse, sparse_terms, threads)
        return cpu_costs.predict(costs.dense, dense_terms, threads) < sparse

    def dense_call(self, matrix: SRBCRS) -> dense.DenseLinear:
        """Return the dense product, the matrix packed as its right operand, (K, M)."""
        if self.dense is None:
            self.dense = dense.DenseLinear(dense.pack_right(matrix.to_dense(dequantize=False).to(torch.int8).t()))
        return self.dense


def _vector(x: Tensor | None, m: int) -> Tensor | None:
    """A scale or bias as the engine reads it: float32, (M,), contiguous; a copy only if it is another."""
    if x is None or (x.dtype is torch.float32 and x.numel() == m and x.is_contiguous()):
        return x
    return x.detach().to(torch.float32).reshape(-1).expand(m).contiguous()


def _is_scale(x: Tensor) -> bool:
    """Whether `x` is one float in memory on the CPU."""
    return x.numel() == 1 and x.is_floating_point() and x.is_cpu and not (x.is_neg() or x._is_zerotensor())


def _prepare(matrix: SRBCRS) -> CpuLinear | None:
    """The call of a matrix, made once; None for a matrix that the engine does not take."""
    if extension.ENGINE is None or matrix.device.type != "cpu" or matrix.batch_shape or 0 in matrix.shape:
        return None
    if matrix.bits not in _BITS or not matrix.signed:
        return None
    if not is_current(matrix, matrix._seen):
        matrix.refresh()
    found: CpuLinear | None = matrix._execution.get("linear")
    if found is None:
        found = matrix._execution["linear"] = CpuLinear(matrix)
    return found


def linear(matrix: SRBCRS, x: Tensor, bias: Tensor | None, bits: int, x_scale: Tensor | None) -> Tensor | None:
    """Return ``A q(x)^T + bias[:, None]``, (M, N), or None if the engine does not take the operands in one call.

    Parameters
    ----------
    matrix : SRBCRS, shape (M, K)
        Sparse operand.
    x : Tensor, shape (N, K)
        Floats; no gradient is wanted. The result is column-major if it is dense and the rows of `x` are contiguous.
    bias : Tensor or None, shape (M,)
        Float.
    bits : int
        Width of q(x).
    x_scale : Tensor or None, shape ()
        A given scale of x; None: one per row.
    """
    call = matrix._execution.get("linear") if is_current(matrix, matrix._seen) else None
    if call is None:
        call = _prepare(matrix)
    scale, dtype = matrix.scale, x.dtype
    if call is None or bits not in _BITS or dtype not in _DTYPES or (scale is not None and scale.requires_grad):
        return None
    # a subclass may trace the operators
    if type(x) not in (Tensor, Parameter) or not x.is_cpu or x.ndim != 2 or x.is_neg() or x._is_zerotensor():
        return None
    m, k = call.shape
    n, columns = x.shape
    if columns != k or n == 0:
        return None
    if x_scale is not None and not _is_scale(x_scale):
        return None  # the quantizer says what is wrong with it
    if bias is not None and (bias.shape != (m,) or not bias.is_cpu or bias.is_neg() or is_transformed(bias)):
        return None
    takes_dense, has_rows = call.is_dense(n), k == 1 or x.stride(1) == 1
    if not has_rows and not takes_dense:
        return None  # the sparse product reads a row-major operand as it is
    rows = x if has_rows else x.contiguous()
    rows = rows if dtype is torch.float32 else rows.float()
    given = x_scale if x_scale is None or x_scale.dtype is torch.float32 else x_scale.float()
    vectors = given, _vector(scale, m), _vector(bias, m)
    if not takes_dense:
        out = torch.empty((m, n), dtype=dtype)
        call.sparse(rows, bits, *vectors, out)
        return out
    out = torch.empty((n, m), dtype=dtype) if has_rows else torch.empty((m, n), dtype=dtype).t()  # (N, M)
    call.dense_call(matrix)(rows, bits, *vectors, out)
    return out.t()
