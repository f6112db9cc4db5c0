"""The text of explain for a GPU."""

from __future__ import annotations

import torch

from cute_kernels.cpu import engine
from magicube_cutlass.dispatch.dense_fallback import forecast
from magicube_cutlass.dispatch.plan import _name, plan_spmm, problem, size_bucket
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.quantization.float_operands import DenseFloats
from magicube_cutlass.quantization.quant_tensor import QuantTensor


def explain_spmm(matrix: SRBCRS, dense: QuantTensor | DenseFloats, out: torch.dtype) -> str:
    """The text of :func:`magicube_cutlass.explain` for operands on a GPU."""
    from cute_kernels.spmm.heuristics import reason, spmm_config
    from magicube_cutlass.dispatch import cuda as gpu

    n, batch = dense.shape[-1], dense.shape[:-2].numel()
    right = dense.number
    name, copy = plan_spmm(matrix, right, out, size_bucket(n), min(batch, 2), None, None)
    config = spmm_config(name)
    sizes = problem(matrix.pattern, config.vector_length, n, batch)
    moved = config.traffic(sizes.vector_rows, matrix.shape[1], copy, n, batch)
    operand = engine.Dense(dense.data, dense.bits, dense.signed, -2, dense.packed_dim)
    written, kept = out.itemsize * matrix.shape[0] * n * batch, sum(tensor.nbytes for tensor in copy)
    lines = [
        f"{name}: {matrix.shape[0]} x {matrix.shape[1]} times {tuple(dense.shape)} to {_name(out)}",
        f"instruction {config.atom}, {config.digits[0]} x {config.digits[1]} digits"
        + (", digits of A share an instruction" if config.stacked else ""),
        f"reads about {moved / 1e6:.1f} MB of operands, writes {written / 1e6:.1f} MB; "
        f"its copy of A has {kept / 1e6:.1f} MB",
        reason(config, sizes.vector_rows, sizes.vectors, sizes.longest, matrix.used_once),
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
