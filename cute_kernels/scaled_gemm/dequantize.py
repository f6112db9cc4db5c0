"""Operands that a kernel of its own dequantizes or folds before the product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.operands import Rows, aligned, is_ready
from cute_kernels.scaled_gemm.config import TILE, OperandFormat
from cute_kernels.scaled_gemm.operand import FloatOperand, ScaledGemmProblem

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


def packed_rows(packed: Tensor) -> Rows:
    """Return packed data, (rows, bytes), with rows at multiples of 16 bytes: copied unless they are."""
    rows, size = packed.shape
    if not is_ready(packed):
        copy = torch.empty((rows, aligned(size)), dtype=torch.uint8, device=packed.device)
        packed = copy[:, :size].copy_(packed)  # (rows, bytes)
    return Rows(packed.data_ptr(), packed.stride(0) if rows > 1 else aligned(size), packed)


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


@dataclass(frozen=True)
class FoldConfig(KernelConfig):
    """Config of the kernel that folds ue8m0 block scales into e4m3 values.

    Attributes
    ----------
    format : OperandFormat
        Format of the operand.
    lines : bool
        128 values of a row have a scale; else rows have.
    held : int
        Runs that a thread holds: of as many rows; or of one row, of which it reads what is more twice.
    threads : int
        Threads per CTA.
    """

    format: OperandFormat
    lines: bool
    held: int = 1
    threads: int = 128

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        return f"gemm-floats-fold-{self.format.name}-{TILE if self.lines else 'row'}-h{self.held}"

    kernel_header = "scaled_gemm/dequantize.cuh"
    kernel_entry = "fold_floats"

    def _constants(self) -> dict[str, object]:
        return {"kBlock": self.format.block, "kLines": self.lines, "kHeld": self.held, "kThreads": self.threads}

    def _types(self) -> dict[str, str]:
        return {"Format": self.format.dtype.upper()}


def folded_format(fmt: OperandFormat, lines: bool) -> OperandFormat:
    """Return the format of an operand after :func:`fold`; the same one if it has no block scales that fold.

    Examples
    --------
    >>> folded_format(OperandFormat("e2m1", 32, "ue8m0"), lines=False).name
    'e4m3'
    """
    if fmt.scale != "ue8m0" or fmt.dtype == "e5m2":  # e4m3 has no infinities
        return fmt
    return OperandFormat("e4m3", TILE, "float32") if lines else OperandFormat("e4m3")


def fold_config(fmt: OperandFormat, lines: bool, k: int) -> FoldConfig:
    """Return the config that folds rows of K values: they stay in registers up to 16,384."""
    if lines:
        return FoldConfig(fmt, lines)  # as fast as with rows of four a thread, and with few rows faster
    each = -(-k // (_RUN * FoldConfig.threads))
    return FoldConfig(fmt, lines, held=next((held for held in (1, 2, 4) if each <= held), 8))


def folds(a: OperandFormat, b: OperandFormat) -> bool:
    """Return whether bytes can be multiplied once block scales are folded: no others are there.

    Examples
    --------
    >>> mxfp8, nvfp4 = OperandFormat("e4m3", 32, "ue8m0"), OperandFormat("e2m1", 16, "e4m3")
    >>> folds(mxfp8, mxfp8), folds(mxfp8, nvfp4), folds(OperandFormat("e4m3"), OperandFormat("e4m3"))
    (True, False, False)
    """
    left, right = folded_format(a, True), folded_format(b, False)
    return (left, right) != (a, b) and left.block in (0, TILE) and right.block == 0


def fold(operand: FloatOperand, lines: bool) -> FloatOperand:
    """Launch the folding of an operand's ue8m0 block scales.

    ``scale[r] blocks[r, k // block] x = scale'[r, ...] y`` with e4m3 y and powers of two between the scales, where y is
    rounded to nearest: ``|error| <= 2^-17 max |blocks x|``, of the row, or of 128 values of it.

    Parameters
    ----------
    operand : FloatOperand, shape (R, K)
        Operand on a GPU (sm_90a) whose format folds.
    lines : bool
        The scales are of 128 values of a row; else of rows.

    Returns
    -------
    FloatOperand, shape (R, K)
        e4m3 with its scales, in a workspace.
    """
    rows, runs = operand.rows, -(-operand.k // _RUN)
    packed, blocks, given = packed_rows(operand.packed_data), operand.blocks, operand.scale
    assert blocks is not None
    blocks = blocks.contiguous()
    if given is not None and not lines:
        given = given.float().contiguous()
    config = fold_config(operand.format, lines, operand.k)
    parts, shift = -(-runs // 8), (min(max(runs, 8), config.threads) - 1).bit_length()
    out = workspace.empty((rows, aligned(operand.k)), torch.uint8, operand.device)
    scales = workspace.empty((rows, parts) if lines else (rows,), torch.float32, operand.device)
    by = (0, 0) if given is None or lines else (given.data_ptr(), 0 if given.ndim == 0 else 1)
    across = config.held * (config.threads >> shift)
    get_kernel(config).launch(
        (-(-rows // across), -(-runs >> shift), 1) if lines else (rows, 1, 1),
        (
            packed.pointer, packed.pitch, packed.owner.shape[1], rows, runs, shift, blocks.data_ptr(), blocks.shape[1],
            *by, scales.data_ptr(), out.data_ptr(), out.shape[1],
        ),
    )  # fmt: skip
    codes = out[:, : operand.k]
    if lines:
        return FloatOperand(codes, "e4m3", operand.k, operand.scale, scales, TILE, "float32")
    return FloatOperand(codes, "e4m3", operand.k, scales)


def fold_operands(problem: ScaledGemmProblem, a: OperandFormat, b: OperandFormat) -> ScaledGemmProblem:
    """Return the problem with the operands folded that a kernel reads so, as `a` and `b`; see :func:`folded_format`."""

    def read(operand: FloatOperand, wanted: OperandFormat, lines: bool) -> FloatOperand:
        is_folded = operand.format != folded_format(operand.format, lines) == wanted
        return fold(operand, lines) if is_folded else operand

    return replace(problem, a=read(problem.a, a, True), b=read(problem.b, b, False))
