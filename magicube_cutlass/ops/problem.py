"""Checked arguments of the sparse products, and the keys of calls that were checked before."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.dtypes import FLOATS, INTEGER_OUT, result_dtype
from magicube_cutlass.checks import is_transformed, materialized, transform_error
from magicube_cutlass.dispatch.plan import SpmmProblem
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.formats.tracking import is_current
from magicube_cutlass.quantization.float_operands import DenseFloats, dense_operand
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor
from magicube_cutlass.quantization.quant_tensor import QuantTensor

Operand = QuantTensor | ScaledFloatTensor | Tensor


def check_dense(name: str, given: object, device: torch.device) -> QuantTensor | DenseFloats:
    """Return `given` as a dense operand on `device`; raise an error that names it otherwise."""
    # type() first: asking every operand by isinstance costs more
    operand = given if type(given) is QuantTensor else dense_operand(name, given)
    if len(operand.shape) < 2:
        raise ValueError(f"{name} must have at least 2 dimensions, got shape {tuple(operand.shape)}")
    if operand.data.device != device:
        raise ValueError(f"{name} must be on {device}, got {operand.data.device}")
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{name} must be on a CPU or CUDA device, got {device}; use {name}.to('cpu')")
    return operand


def as_srbcrs(matrix: object) -> SRBCRS:
    """Return `matrix` as SR-BCRS, scanned if a tensor of it was written; a BCRS is converted once."""
    if not isinstance(matrix, (SRBCRS, BCRS)):
        raise TypeError(f"A must be an SRBCRS or BCRS, got {type(matrix).__name__}")
    if not torch.compiler.is_compiling() and not is_current(matrix, matrix._seen):
        matrix.refresh()
    if isinstance(matrix, BCRS):
        found: SRBCRS | None = matrix._execution.get("srbcrs")
        if found is None:
            found = matrix._execution["srbcrs"] = matrix.to_srbcrs()
            found.single_use = matrix.single_use
        return found
    return matrix


def unusable(matrix: SRBCRS) -> Exception:
    """The error for a matrix that no product reads: a batch, or one of results."""
    if matrix.batch_shape:
        return ValueError(f"A must be a single matrix, got a batch of shape {matrix.batch_shape}")
    return TypeError(f"A must hold quantized integers, got results of dtype {matrix.values.dtype}; floats must be "
                     f"{', '.join(FLOATS)}")  # fmt: skip


def check_spmm(
    A: object, B: object, out_dtype: torch.dtype | None, bias: Tensor | None, out: Tensor | None
) -> SpmmProblem:
    """Check the arguments of :func:`magicube_cutlass.spmm`; raise an error that names the wrong one."""
    if not isinstance(A, (SRBCRS, BCRS)):
        raise TypeError(f"A must be an SRBCRS or BCRS, got {type(A).__name__}")
    device = A.values.device
    dense = check_dense("B", B, device)
    rows, inner = A.shape
    if dense.shape[-2] != inner:
        raise ValueError(f"B must have {inner} rows to match A of shape {A.shape}, got {dense.shape[-2]}")
    if dense.axis == 1:
        raise ValueError(
            "B must have a per-tensor or per-column scale, got per-row; use quantize(x, bits=8, scale='column')"
        )
    for name, tensor in (("bias", bias), ("scale of A", A.scale), ("scale of B", dense.scale)):
        refuse_gradient(name, tensor)
    batch, n = dense.shape[:-2], dense.shape[-1]
    scales = float32_scale(A.scale, batch), float32_scale(dense.scale, batch)
    for name, tensor in (("bias", bias), ("out", out)):
        if tensor is not None and not torch.compiler.is_compiling() and is_transformed(tensor):
            raise transform_error(name)
    if bias is not None:
        bias = check_bias(bias, rows, device)
    if out is not None:
        check_out(out, (*batch, rows, n), device)
        out_dtype = out_dtype or out.dtype
    matrix = as_srbcrs(A)
    lhs = matrix.element_type
    if lhs is None or matrix.batch_shape:
        raise unusable(matrix)
    rhs, packed_dim = dense.element_type, dense.packed_dim
    dtype = result_dtype(out_dtype, matrix.scale is not None or dense.scale is not None, inner, lhs, rhs)
    if out is not None and out.dtype != dtype:
        raise TypeError(f"out must have dtype {dtype}, got {out.dtype}")
    if dtype in INTEGER_OUT:
        if bias is not None:
            raise TypeError(f"bias must be None for integer output, got out_dtype {dtype}; use out_dtype=torch.float32")
        scales = None, None
    return SpmmProblem(matrix, dense, lhs, rhs, packed_dim, dtype, *scales, bias)


def float32_scale(scale: Tensor | None, batch: torch.Size) -> Tensor | None:
    """Return a scale as float32, (), (length,) or (..., length)."""
    if scale is None:
        return None
    flat = scale.to(torch.float32)
    if flat.ndim == 0:
        return flat
    flat = flat.flatten(-2)  # one of the two has size 1
    return flat.contiguous() if flat.ndim == 1 else flat.expand(*batch, flat.shape[-1]).contiguous()


def check_written(out: object, A: object, B: object, bias: object) -> None:
    """Raise `ValueError` if `out` requires a gradient or shares memory with an operand."""
    if not isinstance(out, Tensor) or out.numel() == 0:
        return
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError("out must not require a gradient, which a product written in place does not give; "
                         "use out.detach() or magicube_cutlass.autograd.spmm")  # fmt: skip
    begin = out.data_ptr()
    end = begin + out.numel() * out.element_size()
    read = [("values of A", getattr(A, "values", None)), ("scale of A", getattr(A, "scale", None)), ("bias", bias)]
    for name, each in (*read, ("B", getattr(B, "data", None)), ("scale of B", getattr(B, "scale", None))):
        if not isinstance(each, Tensor) or each.data_ptr() >= end:
            continue
        if each.is_contiguous():
            last = each.data_ptr() + each.numel() * each.element_size()
        else:
            steps = [(n - 1) * stride for n, stride in zip(each.shape, each.stride(), strict=True)]
            last = each.data_ptr() + (sum(steps) + 1) * each.element_size() if each.numel() else begin
        if last > begin and each.device == out.device:
            raise ValueError(f"out must share no memory with the operands, got the memory of {name}")


def refuse_gradient(name: str, tensor: Tensor | None) -> None:
    """Raise `ValueError` if a gradient of `tensor` is wanted, which these products do not give."""
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        source = f"{name[-1]}.scale" if name.startswith("scale") else name
        raise ValueError(f"{name} requires a gradient, which this product does not give; use {source}.detach() or "
                         "magicube_cutlass.autograd.spmm")  # fmt: skip


def check_bias(bias: Tensor, rows: int, device: torch.device) -> Tensor:
    """Return a bias (rows,) as contiguous float32; `ValueError` for another shape or device."""
    if tuple(bias.shape) != (rows,):
        raise ValueError(f"bias must have shape ({rows},), got {tuple(bias.shape)}")
    if bias.device != device:
        raise ValueError(f"bias must be on {device}, got {bias.device}")
    return materialized(bias).to(torch.float32).contiguous()


def check_out(out: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise `ValueError` unless `out` is contiguous, of this shape and on this device."""
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    if out.device != device:
        raise ValueError(f"out must be on {device}, got {out.device}")
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")


def operand_tensors(B: Operand) -> tuple[Tensor, Tensor | None]:
    """Return the data of an operand as a product reads it, and its scale."""
    if isinstance(B, QuantTensor):  # first: to ask whether something is a Tensor takes longer
        return B.data, B.scale
    if isinstance(B, Tensor):
        return B, None
    if B.transposed:
        return B.data.mT, B.scale.mT if B.scale.ndim else B.scale
    return B.data, B.scale


def operand_key(B: object) -> tuple[object, ...] | None:
    """Return everything that the checks read of an operand; None for a subclass, which may hide more."""
    kind: tuple[object, ...]
    if type(B) is QuantTensor:
        data, kind = B.data, (B.shape, B.bits, B.signed, B.axis)
    elif type(B) is Tensor:
        if B.is_neg() or B._is_zerotensor() or is_transformed(B):
            return None
        wanted = B.requires_grad and torch.is_grad_enabled()
        return "tensor", B.shape, B.stride(), B.device, B.dtype, wanted
    elif type(B) is ScaledFloatTensor:
        data, kind = B.data, (B.k, B.dtype, B.block, B.transposed)
    else:
        return None
    if type(data) is not Tensor:
        return None
    scale: tuple[object, ...] | None = None
    if B.scale is not None:
        wanted = B.scale.requires_grad and torch.is_grad_enabled()
        scale = (B.scale.shape, B.scale.stride(), B.scale.dtype, B.scale.device, wanted)
    return data.shape, data.stride(), data.device, kind, scale
