"""``explain``: which kernel a product uses, and why."""

from __future__ import annotations

import torch

from cute_kernels.cpu import engine
from cute_kernels.dtypes import check_pair, num_digits, result_dtype
from magicube_cutlass.dispatch.dense_fallback import forecast
from magicube_cutlass.dispatch.plan import plan_spmm, problem, size_bucket
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.ops.problem import Operand, as_srbcrs, check_dense, unusable
from magicube_cutlass.quantization.float_operands import DenseFloats
from magicube_cutlass.quantization.quant_tensor import QuantTensor


def explain(A: SRBCRS | BCRS, B: Operand, *, out_dtype: torch.dtype | None = None) -> str:
    """Report which kernel :func:`magicube_cutlass.spmm` uses for these operands, what it moves, and why.

    Parameters
    ----------
    A : SRBCRS or BCRS, shape (M, K)
        Sparse operand.
    B : QuantTensor, ScaledFloatTensor or Tensor, shape (..., K, N)
        Dense operand.
    out_dtype : torch.dtype, optional
        As in :func:`magicube_cutlass.spmm`.

    Returns
    -------
    str
        On a GPU: kernel config, MMA atom, digits, megabytes read and written, the reason for the selection, and the
        predicted times of the sparse and the dense product. On a CPU: engine path, threads, layout of B.

    Raises
    ------
    TypeError, ValueError
        As :func:`magicube_cutlass.spmm`.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> A = mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)
    >>> B = mc.QuantTensor.from_ints(torch.ones(16, 64, dtype=torch.int8), bits=8)
    >>> mc.explain(A, B).split(",")[0]
    'CPU engine'
    """
    matrix = as_srbcrs(A)
    dense = check_dense("B", B, matrix.device)
    lhs, rhs = matrix.element_type, dense.element_type
    if lhs is None or matrix.batch_shape:
        raise unusable(matrix)
    if matrix.device.type == "cuda":
        scaled = matrix.scale is not None or dense.scale is not None
        return _explain_cuda(matrix, dense, result_dtype(out_dtype, scaled, matrix.shape[1], lhs, rhs))
    check_pair(lhs, rhs)
    threads = torch.get_num_threads()
    if isinstance(dense, DenseFloats):
        return (f"torch's CSR product of float32, {threads} threads: {matrix.shape[0]} x "
                f"{matrix.shape[1]} of {lhs.name} times {tuple(dense.shape)} of {rhs.name}")  # fmt: skip
    predicted = forecast(matrix, dense, out_dtype or torch.int32)
    operand = engine.DenseOperand(dense.data, dense.bits, dense.signed, -2, dense.packed_dim)
    order = "row" if engine.run_dim(operand) == -1 else "column"
    return (
        f"CPU engine, {engine.isa()} path, {threads} threads: {matrix.shape[0]} x {matrix.shape[1]} "
        f"times {tuple(dense.shape)}, {num_digits(lhs)} x {num_digits(rhs)} digits of 8 bits, B {order}-major, "
        "panels of 64 columns" + ("" if predicted is None else f"\n{predicted}")
    )


def _explain_cuda(matrix: SRBCRS, dense: QuantTensor | DenseFloats, out: torch.dtype) -> str:
    """The report for operands on a GPU."""
    from cute_kernels.spmm.heuristics import reason, spmm_config
    from magicube_cutlass.dispatch import cuda as gpu

    n, batch = dense.shape[-1], dense.shape[:-2].numel()
    right = dense.element_type
    name, copy = plan_spmm(matrix, right, out, size_bucket(n), min(batch, 2), None, None)
    config = spmm_config(name)
    sizes = problem(matrix.pattern, config.vector_length, n, batch)
    moved = config.traffic(sizes.vector_rows, matrix.shape[1], copy, n, batch)
    operand = engine.DenseOperand(dense.data, dense.bits, dense.signed, -2, dense.packed_dim)
    written, kept = out.itemsize * matrix.shape[0] * n * batch, sum(tensor.nbytes for tensor in copy)
    dtype = str(out).removeprefix("torch.")
    lines = [
        f"{name}: {matrix.shape[0]} x {matrix.shape[1]} times {tuple(dense.shape)} to {dtype}",
        f"instruction {config.atom}, {config.digits[0]} x {config.digits[1]} digits"
        + (", digits of A share an instruction" if config.has_fused_digits else ""),
        f"reads about {moved / 1e6:.1f} MB of operands, writes {written / 1e6:.1f} MB; "
        f"its copy of A has {kept / 1e6:.1f} MB",
        reason(config, sizes.vector_rows, sizes.vectors, sizes.longest, matrix.single_use),
    ]
    if config.vector_length != matrix.vector_length:
        lines.append(f"{config.vector_length // matrix.vector_length} vector rows are merged into one: {sizes.vectors} "
                     f"vectors of {config.vector_length} rows for {matrix.pattern.vectors}")  # fmt: skip
    predicted = forecast(matrix, dense, out)
    if predicted is not None:
        lines.append(str(predicted))
    if gpu.copies(operand, -1):
        lines.append("B is copied first: it is not row-major with rows that start at multiples of 16 bytes")
    return "\n".join(lines)
