"""``explain`` and ``explain_sddmm``: which kernel a product uses, and why."""

from __future__ import annotations

import torch

from cute_kernels.cpu import engine
from cute_kernels.dtypes import check_pair, num_digits, result_dtype
from cute_kernels.explanation import Explanation
from magicube_cutlass.dispatch.dense_fallback import Forecast, forecast
from magicube_cutlass.dispatch.plan import plan_sddmm, plan_spmm, problem, size_bucket
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.ops.problem import Operand, as_srbcrs, check_dense, unusable
from magicube_cutlass.ops.sddmm import Mask, as_pattern, check_operands
from magicube_cutlass.quantization.float_operands import DenseFloats
from magicube_cutlass.quantization.quant_tensor import QuantTensor

__all__ = ["explain", "explain_sddmm"]


def explain(A: SRBCRS | BCRS, B: Operand, *, out_dtype: torch.dtype | None = None) -> Explanation:
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
    Explanation
        Its ``str`` is, on a GPU: kernel config, MMA atom, digits, megabytes read and written, the reason for the
        selection, and the predicted times of the sparse and the dense product. On a CPU: engine path, threads, layout
        of B.

    Raises
    ------
    TypeError, ValueError
        As :func:`magicube_cutlass.spmm`.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> A = mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)
    >>> B = mc.QuantTensor.from_ints(torch.ones(16, 64, dtype=torch.int8), bits=8)
    >>> found = mc.explain(A, B)
    >>> found.operator, found.facts["digits"], str(found).split(",")[0]
    ('spmm', (1, 1), 'CPU engine')
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
    sizes = {"shape": matrix.shape, "columns": int(dense.shape[-1]), "threads": threads}
    product = f"{matrix.shape[0]} x {matrix.shape[1]} of {lhs.name} times {tuple(dense.shape)} of {rhs.name}"
    if isinstance(dense, DenseFloats):
        text = f"torch's CSR product of float32, {threads} threads: {product}"
        return Explanation("spmm", "torch", "CSR", text, sizes)
    if not engine.available():
        text = f"torch's int64 product of the decompressed matrix, {threads} threads: {product}; {engine.MISSING}"
        return Explanation("spmm", "torch", engine.isa(), text, sizes)
    predicted = forecast(matrix, dense, out_dtype or torch.int32)
    operand = engine.DenseOperand(dense.data, dense.bits, dense.signed, -2, dense.packed_dim)
    order = "row" if engine.run_dim(operand) == -1 else "column"
    text = (
        f"CPU engine, {engine.isa()} path, {threads} threads: {matrix.shape[0]} x {matrix.shape[1]} "
        f"times {tuple(dense.shape)}, {num_digits(lhs)} x {num_digits(rhs)} digits of 8 bits, B {order}-major, "
        "panels of 64 columns" + ("" if predicted is None else f"\n{predicted}")
    )
    digits = {"digits": (num_digits(lhs), num_digits(rhs)), "order": order}
    return Explanation("spmm", "engine", engine.isa(), text, {**sizes, **digits, **_predicted(predicted)})


def _predicted(found: Forecast | None) -> dict[str, float]:
    """The predicted times as facts."""
    return {} if found is None else {"sparse_us": found.sparse / 1e3, "dense_us": found.dense / 1e3}


def explain_sddmm(
    X: Operand, Y: Operand, mask: Mask, *, out_dtype: torch.dtype | None = None, transposed_y: bool = False
) -> Explanation:
    """Report which kernel :func:`magicube_cutlass.sddmm` uses for these operands.

    Parameters
    ----------
    X, Y, mask, out_dtype, transposed_y
        As for :func:`magicube_cutlass.sddmm`.

    Returns
    -------
    Explanation

    Raises
    ------
    TypeError, ValueError
        As :func:`magicube_cutlass.sddmm`.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> X = mc.QuantTensor.from_ints(torch.ones(8, 4, dtype=torch.int8), bits=8)
    >>> mc.explain_sddmm(X, X, torch.eye(8, dtype=torch.bool)).facts["vectors"]
    8
    """
    pattern, stride = as_pattern(mask, False)
    x, y = check_dense("X", X, pattern.device), check_dense("Y", Y, pattern.device)
    check_operands(x, y, pattern, transposed_y)
    kinds, inner, scaled = (
        (x.element_type, y.element_type),
        int(x.shape[-1]),
        x.scale is not None or y.scale is not None,
    )
    dtype = result_dtype(out_dtype, scaled, inner, *kinds)
    kernel, _ = plan_sddmm(pattern, stride, kinds, dtype, size_bucket(inner), None)
    facts = {"shape": pattern.shape, "inner": inner, "vectors": pattern.vectors, "vector_length": pattern.vector_length}
    m, n = pattern.shape
    size = (f"{pattern.vectors} vectors of {pattern.vector_length} x 1 in {m} x {n}, sums of {inner} products of "
            f"{kinds[0].name} and {kinds[1].name} to {str(dtype).removeprefix('torch.')}")  # fmt: skip
    if pattern.device.type == "cuda":
        return Explanation("sddmm", "cuda", kernel, f"{kernel}: {size}", facts)
    threads = torch.get_num_threads()
    if kernel != "cpu":
        text = f"torch's sampled product of float32, {threads} threads: {size}"
        return Explanation("sddmm", "torch", "sampled_addmm", text, {**facts, "threads": threads})
    if not engine.available():
        text = f"torch's int64 product of all entries, {threads} threads: {size}; {engine.MISSING}"
        return Explanation("sddmm", "torch", engine.isa(), text, {**facts, "threads": threads})
    text = f"CPU engine, {engine.isa()} path, {threads} threads: {size}"
    return Explanation("sddmm", "engine", engine.isa(), text, {**facts, "threads": threads})


def _explain_cuda(matrix: SRBCRS, dense: QuantTensor | DenseFloats, out: torch.dtype) -> Explanation:
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
    if gpu.copies(operand, -1, config.any_rows):
        lines.append("B is copied first: it is not row-major with rows that start at multiples of 16 bytes")
    facts = {
        "shape": matrix.shape, "columns": int(n), "digits": tuple(config.digits), "atom": config.atom,
        "bytes_read": moved, "bytes_written": written, "packed_bytes": kept, **_predicted(predicted),
    }  # fmt: skip
    return Explanation("spmm", "cuda", name, "\n".join(lines), facts)
