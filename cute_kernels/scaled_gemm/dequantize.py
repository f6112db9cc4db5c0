"""Operands of the dense float product that are decoded once, before it, where decoding in it would take longer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.operands import Rows, aligned
from cute_kernels.scaled_gemm.config import OperandFormat
from cute_kernels.scaled_gemm.operand import FloatOperand

_RUN = 16  # codes of a thread's row
_ROWS = 4  # of a thread
_MOST_RUNS = 128  # of a block's row
# Seconds, measured on an H200.
_LAUNCH = 2.5e-6
_MOVED = 1 / 7e12  # for a byte, of the pass and of what the product reads more
_BYTES = {4: 0.65e-15, 6: 1e-15}  # that decoding an operand of these bits adds to a product, for each of its M N K
_HALVES = 4e-15  # that decoding to bfloat16 adds


@dataclass(frozen=True)
class DequantizeConfig(KernelConfig):
    """The kernel that writes codes of ``kind`` as bytes of e4m3 or e5m2; ``uses_bfloat16``: as bfloat16, times its blocks'
    factors."""

    kind: OperandFormat
    uses_bfloat16: bool
    threads: int = 128

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"gemm-floats-decode-{self.kind.name}-{16 if self.uses_bfloat16 else 8}"

    kernel_header = "scaled_gemm/dequantize.cuh"
    kernel_entry = "decode_floats"

    def _constants(self) -> dict[str, object]:
        return {
            "kBlock": self.kind.block,
            "kHalves": self.uses_bfloat16,
        }

    def _types(self) -> dict[str, str]:
        return {"Format": self.kind.dtype.upper(), "Scale": self.kind.scale.upper() or "void"}


def dequantized_format(kind: OperandFormat, uses_bfloat16: bool) -> OperandFormat:
    """What an operand is once it is decoded."""
    if uses_bfloat16:
        return OperandFormat("bfloat16", tiles=kind.tiles)
    return kind._replace(dtype="e4m3") if kind.bits < 8 else kind


def dequantize_first(m: int, n: int, k: int, a: OperandFormat, b: OperandFormat) -> tuple[OperandFormat, OperandFormat]:
    """What the product takes: operands that are decoded before it, if that is faster, or these."""
    uses_bfloat16 = a.block > 0 or b.block > 0
    wanted = dequantized_format(a, uses_bfloat16), dequantized_format(b, uses_bfloat16)
    before, during = 0.0, _HALVES if uses_bfloat16 else 0.0
    for kind, found, rows in ((a, wanted[0], m), (b, wanted[1], n)):
        if kind != found:
            before += _LAUNCH + rows * k * (kind.bits + 2 * found.bits) / 8 * _MOVED
            during += 0.0 if uses_bfloat16 else _BYTES[kind.bits]
    return wanted if before < m * n * k * during else (a, b)


def dequantize(operand: FloatOperand, codes: Rows, wanted: OperandFormat) -> Rows:
    """``operand``, whose codes lie as ``codes`` says, as ``wanted``: one launch."""
    config = DequantizeConfig(operand.format, wanted.bits > 8)
    size = wanted.bits // 8
    rows, runs = operand.rows, -(-operand.k // _RUN)
    out = workspace.empty((rows, aligned(operand.k) * size), torch.uint8, operand.device)
    shift = (min(runs, _MOST_RUNS) - 1).bit_length()
    across = _ROWS * (_MOST_RUNS >> shift)
    blocks = None if operand.blocks is None else operand.blocks.contiguous()
    scales = (0, 0) if blocks is None else (blocks.data_ptr(), blocks.shape[1])
    get_kernel(config).launch(
        (-(-rows // across), -(-runs >> shift), 1),
        (
            codes.pointer, codes.pitch, codes.owner.shape[1], rows, runs, shift, *scales, out.data_ptr(), out.shape[1]
        ),
    )  # fmt: skip
    return Rows(out.data_ptr(), out.shape[1], out[:, : operand.k * size])
