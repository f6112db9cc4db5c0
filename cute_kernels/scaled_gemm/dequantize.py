"""Operands that a kernel of its own dequantizes before the product, if decoding in the product takes longer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.operands import Rows, aligned
from cute_kernels.scaled_gemm.config import TILE, OperandFormat
from cute_kernels.scaled_gemm.operand import FloatOperand

_RUN = 16  # values that a thread decodes per row
_ROWS = 4  # rows per thread
_MAX_RUNS = 128  # runs per row and CTA
# Seconds, measured on an H200.
_LAUNCH = 2.5e-6
_PER_BYTE = 1 / 7e12  # of the pass, and of the larger operand that the product then reads
_DECODE_BYTES = {4: 0.65e-15, 6: 1e-15}  # bits -> per M N K, decoding an operand to e4m3 in the product
_DECODE_BFLOAT16 = 4e-15  # per M N K, decoding to bfloat16 in the product


@dataclass(frozen=True)
class DequantizeConfig(KernelConfig):
    """Config of the dequantization kernel.

    Attributes
    ----------
    format : OperandFormat
        Format of the operand.
    uses_bfloat16 : bool
        Write bfloat16 times the block scales; else bytes of e4m3 or e5m2.
    threads : int
        Threads per CTA.
    """

    format: OperandFormat
    uses_bfloat16: bool
    threads: int = 128

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        return f"gemm-floats-decode-{self.format.name}-{16 if self.uses_bfloat16 else 8}"

    kernel_header = "scaled_gemm/dequantize.cuh"
    kernel_entry = "decode_floats"

    def _constants(self) -> dict[str, object]:
        return {
            "kBlock": self.format.block,
            "kBfloat16": self.uses_bfloat16,
        }

    def _types(self) -> dict[str, str]:
        return {"Format": self.format.dtype.upper(), "Scale": self.format.scale.upper() or "void"}


def dequantized_format(fmt: OperandFormat, uses_bfloat16: bool) -> OperandFormat:
    """Return the format of an operand after dequantization, as bfloat16 or as bytes."""
    if uses_bfloat16:
        return OperandFormat("bfloat16", tiles=fmt.tiles)
    return fmt._replace(dtype="e4m3") if fmt.bits < 8 else fmt


def dequantize_first(m: int, n: int, k: int, a: OperandFormat, b: OperandFormat) -> tuple[OperandFormat, OperandFormat]:
    """Return the formats that the product reads: dequantized ones if that is predicted to be faster.

    Parameters
    ----------
    m, n, k : int
        Sizes of the product.
    a, b : OperandFormat
        Formats of the operands.

    Returns
    -------
    tuple of OperandFormat
        `a` and `b`, or what :func:`dequantized_format` makes of them.
    """
    uses_bfloat16 = any(0 < fmt.block < TILE for fmt in (a, b))
    wanted = dequantized_format(a, uses_bfloat16), dequantized_format(b, uses_bfloat16)
    before, during = 0.0, _DECODE_BFLOAT16 if uses_bfloat16 else 0.0
    for fmt, found, rows in ((a, wanted[0], m), (b, wanted[1], n)):
        if fmt != found:
            before += _LAUNCH + rows * k * (fmt.bits + 2 * found.bits) / 8 * _PER_BYTE
            during += 0.0 if uses_bfloat16 else _DECODE_BYTES[fmt.bits]
    return wanted if before < m * n * k * during else (a, b)


def dequantize(operand: FloatOperand, packed: Rows, wanted: OperandFormat) -> Rows:
    """Launch the dequantization of an operand.

    Parameters
    ----------
    operand : FloatOperand, shape (R, K)
        Operand on a GPU.
    packed : Rows
        Its packed data with aligned rows.
    wanted : OperandFormat
        Result of :func:`dequantized_format`.

    Returns
    -------
    Rows
        Dequantized rows in a workspace.
    """
    fmt, blocks = operand.format, operand.blocks
    if fmt.block == TILE:  # the product reads them
        fmt, blocks = fmt._replace(block=0, scale=""), None
    config = DequantizeConfig(fmt, wanted.bits > 8)
    size = wanted.bits // 8
    rows, runs = operand.rows, -(-operand.k // _RUN)
    out = workspace.empty((rows, aligned(operand.k) * size), torch.uint8, operand.device)
    shift = (min(runs, _MAX_RUNS) - 1).bit_length()
    across = _ROWS * (_MAX_RUNS >> shift)
    blocks = None if blocks is None else blocks.contiguous()
    scales = (0, 0) if blocks is None else (blocks.data_ptr(), blocks.shape[1])
    get_kernel(config).launch(
        (-(-rows // across), -(-runs >> shift), 1),
        (
            packed.pointer, packed.pitch, packed.owner.shape[1], rows, runs, shift, *scales, out.data_ptr(),
            out.shape[1],
        ),
    )  # fmt: skip
    return Rows(out.data_ptr(), out.shape[1], out[:, : operand.k * size])
