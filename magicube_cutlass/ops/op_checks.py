"""Checks of what a torch operator is given directly: kernels read addresses, so sizes must be right.

All are O(1): they read sizes, dtypes, devices and memory strides, and no data. Column indices were scanned when the
matrix was packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.cpu.engine import OUT_TYPES
from cute_kernels.dtypes import FLOATS, FloatFormat, Integer
from cute_kernels.integers import STORAGE_DTYPES, check_bits
from magicube_cutlass.checks import check_stride, check_vector_length
from magicube_cutlass.dispatch.cpu_float import PREFIX


def check_place(name: str, x: Tensor, device: torch.device) -> None:
    """Raise ``ValueError`` unless `x` is a strided tensor on `device` whose memory holds its values."""
    if x.layout != torch.strided:
        raise ValueError(f"{name} must be a dense (strided) tensor, got layout {x.layout}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")
    if x.is_neg() or x.is_conj() or x._is_zerotensor():
        raise ValueError(f"{name} must hold its values, got a negated, conjugate or zero tensor; use {name}.clone()")


def check_output(out: Tensor, shape: Sequence[int], device: torch.device) -> None:
    """Raise unless `out` is contiguous, of this shape and of an output dtype."""
    check_place("out", out, device)
    if out.dtype not in OUT_TYPES:
        raise TypeError(f"out must have one of the dtypes {[str(dtype) for dtype in OUT_TYPES]}, got {out.dtype}")
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out must have shape {tuple(shape)}, got {tuple(out.shape)}")
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")


def check_vector(name: str, x: Tensor | None, length: int, batch: Sequence[int], device: torch.device) -> None:
    """Raise unless `x` is None or contiguous float32 of shape (), (length,) or (..., length)."""
    if x is None:
        return
    check_place(name, x, device)
    if x.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {x.dtype}")
    allowed = {(), (length,), (*batch, length)}
    if tuple(x.shape) not in allowed:
        raise ValueError(f"{name} must have one of the shapes {sorted(allowed)}, got {tuple(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")


def check_arrays(name: str, arrays: Sequence[Tensor], count: int | None, device: torch.device) -> None:
    """Raise ``ValueError`` unless there are `count` contiguous tensors on `device`; None: at least one."""
    if len(arrays) != count if count is not None else not arrays:
        raise ValueError(f"{name} must have {count or 'some'} tensors, got {len(arrays)}")
    for i, each in enumerate(arrays):
        check_place(f"{name}[{i}]", each, device)
        if not each.is_contiguous():
            raise ValueError(f"{name}[{i}] must be contiguous, got strides {each.stride()}")


def cpu_format(kernel: str, bits: int, signed: bool) -> Integer | FloatFormat:
    """Return the format of a dense operand that a kernel of the CPU reads: ``"cpu"`` or ``"cpu:<format>"``."""
    if kernel == "cpu":
        check_bits(bits)
        return Integer(bits, signed)
    found = FLOATS.get(kernel.removeprefix(PREFIX))
    if found is None:
        raise ValueError(f"kernel must be 'cpu' or one of {[PREFIX + key for key in FLOATS]} on a CPU, got {kernel!r}")
    return found


def check_elements(name: str, x: Tensor, kind: Integer | FloatFormat, packed_dim: int, sizes: tuple[int, int]) -> None:
    """Raise unless `x`, (..., *sizes), holds elements of this format, those of 4 bits packed along `packed_dim`."""
    if packed_dim not in (-1, -2):
        raise ValueError(f"packed dimension of {name} must be -1 or -2, got {packed_dim}")
    wanted = list(sizes)
    if kind.bits == 4:
        wanted[packed_dim] = (wanted[packed_dim] + 1) // 2
    if isinstance(kind, Integer) and x.dtype != STORAGE_DTYPES[kind.bits, kind.signed]:
        expected = STORAGE_DTYPES[kind.bits, kind.signed]
        raise TypeError(f"{name} must have dtype {expected} for {kind.bits}-bit integers, got {x.dtype}")
    if x.element_size() != max(8, 1 << (kind.bits - 1).bit_length()) // 8:
        raise TypeError(f"{name} must have elements of {kind.bits} bits, got {x.dtype}")
    if x.ndim < 2 or list(x.shape[-2:]) != wanted:
        raise ValueError(f"{name} must have shape (..., {wanted[0]}, {wanted[1]}), got {tuple(x.shape)}")


def check_csr(matrix: Sequence[Tensor], rows: int, device: torch.device) -> None:
    """Raise unless `matrix` is offsets (rows + 1,), columns and float32 values of one length."""
    check_arrays("matrix", matrix, 3, device)
    for each, wanted in zip(matrix, (torch.int64, torch.int64, torch.float32), strict=True):
        if each.dtype != wanted or each.ndim != 1:
            raise TypeError(f"matrix must hold int64, int64 and float32 vectors, got {each.dtype} {tuple(each.shape)}")
    if matrix[0].numel() != rows + 1 or matrix[1].numel() != matrix[2].numel():
        raise ValueError(f"matrix must have {rows + 1} offsets and as many columns as values, got "
                         f"{[each.numel() for each in matrix]}")  # fmt: skip


def check_samples(pattern: Sequence[Tensor], v: int, stride: int, m: int, device: torch.device) -> None:
    """Raise unless a pattern of SDDMM fits `m` rows in vectors of `v`, padded to multiples of `stride`."""
    check_vector_length(v)
    check_stride(stride)
    check_arrays("pattern", pattern, 3 if device.type == "cpu" else 2, device)
    columns = pattern[-1]
    if columns.dtype != torch.int32 or columns.ndim != 1 or columns.numel() % stride:
        raise ValueError(f"pattern[{len(pattern) - 1}] must be int32 of a multiple of {stride} columns, got "
                         f"{columns.dtype} {tuple(columns.shape)}")  # fmt: skip
    for i, each in enumerate(pattern[:-1] if device.type == "cpu" else ()):
        if each.dtype != torch.int64 or tuple(each.shape) != (-(-m // v),):
            raise ValueError(f"pattern[{i}] must be int64 of shape ({-(-m // v)},), got {each.dtype} "
                             f"{tuple(each.shape)}")  # fmt: skip


def sddmm_formats(
    kernel: str, bits: Sequence[int], signed: Sequence[bool], device: torch.device
) -> list[Integer | FloatFormat]:
    """Return the formats of X and Y that an SDDMM kernel reads."""
    if device.type == "cuda":
        from cute_kernels.sddmm.heuristics import sddmm_config

        config = sddmm_config(kernel)
        return [config.x, config.y]
    names = kernel.removeprefix(PREFIX).split(":") if kernel != "cpu" else ["cpu", "cpu"]
    if len(names) != 2:
        raise ValueError(f"kernel must be 'cpu' or '{PREFIX}<format>:<format>' on a CPU, got {kernel!r}")
    kinds = [name if name == "cpu" else PREFIX + name for name in names]
    return [cpu_format(*each) for each in zip(kinds, bits, signed, strict=True)]
