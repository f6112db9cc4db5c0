"""Dense float product on a GPU: operands made ready, the kernel chosen and launched."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.gemm.epilogue import Result, result_of
from cute_kernels.jit.device import current_arch, device_of, num_sms
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.jit.tma import tensor_map
from cute_kernels.operands import Rows, aligned, is_ready
from cute_kernels.scaled_gemm import sm100 as gemm_floats_sm100
from cute_kernels.scaled_gemm.config import OperandFormat, ScaledGemmConfig, choose
from cute_kernels.scaled_gemm.dequantize import dequantize, dequantize_first
from cute_kernels.scaled_gemm.operand import FloatOperand, ScaledGemmProblem
from cute_kernels.scaled_gemm.sm100 import TILE_M, PackedMatrix, Tcgen05Config, check_alignment, map_parameters
from cute_kernels.scaled_gemm.small_m import SmallMConfig, choose_small_m, launch_small_m, supports
from cute_kernels.scaled_gemm.tcgen05 import ARCHES, MmaKind

_WISH = "MAGICUBE_TCGEN05"


def _ready(codes: Tensor) -> Rows:
    rows, size = codes.shape
    if not is_ready(codes):
        fresh = torch.empty((rows, aligned(size)), dtype=torch.uint8, device=codes.device)
        codes = fresh[:, :size].copy_(codes)
    return Rows(codes.data_ptr(), codes.stride(0) if rows > 1 else aligned(size), codes)


def _scales(operand: FloatOperand) -> tuple[tuple[int, int, int], Tensor | None]:
    """Address, pitch in elements and number of a row's factors of blocks, or of tiles; the tensor that they lie in."""
    found = operand.blocks if operand.blocks is not None else operand.tiles
    if found is None:
        return (0, 0, 0), None
    found = found.contiguous()
    return (found.data_ptr(), found.shape[1], found.shape[1]), found


class Choice(NamedTuple):
    """A kernel; ``refused``: why it is not that of the arch's own instructions, where there is one."""

    config: ScaledGemmConfig | SmallMConfig | Tcgen05Config
    refused: str = ""


def _codes(name: str, operand: FloatOperand) -> PackedMatrix:
    """An operand's codes as they lie; raises ``ValueError`` unless the bytes of a row are neighbours."""
    codes = operand.packed_data
    if codes.shape[1] > 1 and codes.stride(1) != 1:
        raise ValueError(f"{name} must have bytes at stride 1 for tcgen05.mma, got {codes.stride(1)}")
    return PackedMatrix(operand.dtype, operand.k, operand.rows, codes.data_ptr(), codes.stride(0))


def _tcgen05_kind(problem: ScaledGemmProblem) -> MmaKind:
    """The kind of ``tcgen05.mma`` that multiplies these operands; raises ``ValueError`` where none does."""
    kind = gemm_floats_sm100.mma_kind(problem.a.format, problem.b.format)
    for name, operand in (("a", problem.a), ("b", problem.b)):
        check_alignment(name, _codes(name, operand), kind)
        blocks = operand.blocks
        if blocks is not None and blocks.is_contiguous() and blocks.data_ptr() % 4:
            raise ValueError(f"{name} must have blocks that start at a multiple of 4 bytes for {kind.name}, "
                             f"got {blocks.data_ptr():#x}")  # fmt: skip
    return kind


def choose_config(
    m: int,
    n: int,
    k: int,
    a: OperandFormat,
    b: OperandFormat,
    arch: str,
    *,
    fast: bool = False,
    out: str = "float32",
    source: str = "none",
    multiprocessors: int = 132,
) -> ScaledGemmConfig | SmallMConfig:
    """The config for a product of (m, k) and (k, n) that no tcgen05.mma makes."""
    if supports(m, a, b, arch):
        return choose_small_m(m, n, k, a, b, out=out, source=source, multiprocessors=multiprocessors)
    if arch == "sm_90a":
        a, b = dequantize_first(m, n, k, a, b)
    return choose(m, n, k, a, b, arch, fast=fast, out=out, source=source, multiprocessors=multiprocessors)


def choose_for(problem: ScaledGemmProblem, arch: str, multiprocessors: int) -> Choice:
    """The config of a product; looks at addresses and strides, computes nothing."""
    m, n, k = problem.shape
    out = str(problem.out_dtype).removeprefix("torch.")
    source = "none" if problem.c is None else str(problem.c.dtype).removeprefix("torch.")
    refused = ""
    if arch in ARCHES and os.environ.get(_WISH) != "1":
        refused = f"the kernel of tcgen05.mma has not been run on any chip; {_WISH}=1 takes it"
    elif arch in ARCHES:
        try:
            return Choice(gemm_floats_sm100.choose(m, n, _tcgen05_kind(problem).name, out, source, multiprocessors))
        except ValueError as error:
            refused = str(error)
    config = choose_config(
        m, n, k, problem.a.format, problem.b.format, arch,
        fast=problem.fast_accum, out=out, source=source, multiprocessors=multiprocessors,
    )  # fmt: skip
    return Choice(config, refused)


def plan_cuda(problem: ScaledGemmProblem) -> tuple[Choice, tuple[str, ...]]:
    """The choice, and the operands whose codes are copied."""
    choice = choose_for(problem, current_arch(), num_sms(problem.a.device.index))
    if isinstance(choice.config, Tcgen05Config):
        return choice, ()
    return choice, tuple(name for name, each in (("a", problem.a), ("b", problem.b)) if not is_ready(each.packed_data))


def dequantized_operands(
    problem: ScaledGemmProblem, config: ScaledGemmConfig | SmallMConfig | Tcgen05Config
) -> tuple[str, ...]:
    """The operands that are decoded before the product."""
    if not isinstance(config, ScaledGemmConfig):
        return ()
    pairs = (("a", config.a, problem.a.format), ("b", config.b, problem.b.format))
    return tuple(name for name, taken, given in pairs if taken != given)


def _map(rows: Rows, kind: OperandFormat, count: int, tile: int, config: ScaledGemmConfig) -> bytes:
    """Boxes of a part of k of ``tile`` rows; packed ones lie row by row, ready ones swizzled."""
    decoded = config.decoded(kind)
    width = config.tile_k * kind.bits // 8
    return tensor_map(rows.pointer, 1, (rows.owner.shape[1], count), rows.pitch, (width, tile), 0 if decoded else width)


def _launch_tcgen05(problem: ScaledGemmProblem, config: Tcgen05Config, written: Result) -> None:
    m, n, k = problem.shape
    kind = _tcgen05_kind(problem)
    if config.mma != kind:
        raise ValueError(f"config must be of the kind {kind.name} for these operands, got {config.kind}")
    maps = [
        tensor_map(*map_parameters(name, _codes(name, operand), kind, tile))
        for name, operand, tile in (("a", problem.a, TILE_M), ("b", problem.b, config.tile_n))
    ]
    pair = (problem.a.dtype, problem.b.dtype)
    ((factors_a, _, count), _owner_a), ((factors_b, _, _), _owner_b) = _scales(problem.a), _scales(problem.b)
    kernel = get_kernel(config)
    kernel.launch(
        (min(kernel.multiprocessors, config.tiles(m, n)), 1, 1),
        (
            *maps, k, config.counted_bytes(*pair), kind.instruction(*pair, TILE_M, config.tile_n),
            factors_a, factors_b, count // 4, *written.arguments, np.float32(problem.alpha), np.float32(problem.beta),
        ),
    )  # fmt: skip


def _launch(problem: ScaledGemmProblem, config: ScaledGemmConfig | SmallMConfig, written: Result) -> None:
    m, n, k = problem.shape
    a, b = _ready(problem.a.packed_data), _ready(problem.b.packed_data)
    (scales_a, _owner_a), (scales_b, _owner_b) = _scales(problem.a), _scales(problem.b)
    if isinstance(config, SmallMConfig):
        launch_small_m(config, (a, scales_a), (b, scales_b), problem.shape, written, problem.alpha, problem.beta)
        return
    kernel = get_kernel(config)
    if config.a != problem.a.format:
        a, scales_a = dequantize(problem.a, a, config.a), scales_a if config.a.tiles else (0, 0, 0)
    if config.b != problem.b.format:
        b, scales_b = dequantize(problem.b, b, config.b), scales_b if config.b.tiles else (0, 0, 0)
    alpha = np.float32(problem.alpha * config.exponent_bias_factor(problem.a.format, problem.b.format))
    result = (k, *scales_a, *scales_b, *written.arguments, alpha, np.float32(problem.beta))
    tiles = config.tiles(m, n)
    if config.kernel == "mma":
        operands = (a.pointer, a.pitch, a.owner.shape[1], b.pointer, b.pitch, b.owner.shape[1])
        kernel.launch((tiles, 1, 1), (*operands, *result))
        return
    maps = (_map(a, config.a, m, config.tile_m, config), _map(b, config.b, n, config.tile_n, config))
    if config.split > 1:
        kernel.launch((tiles * config.split, 1, 1), (*maps, *result), (config.split, 1, 1))
    else:
        kernel.launch((min(kernel.multiprocessors * config.resident, tiles), 1, 1), (*maps, *result))


def scaled_gemm_cuda(
    problem: ScaledGemmProblem, out: Tensor, config: ScaledGemmConfig | SmallMConfig | Tcgen05Config | None = None
) -> Tensor:
    """The product, written to ``out``; M, N and K are not 0.

    ``config``: the kernel to take instead of the chosen one; its ``out`` and ``source`` follow from the problem.
    """
    with device_of(out):
        chosen = choose_for(problem, current_arch(), num_sms(out.device.index)).config
        if config is not None:
            chosen = replace(config, out=chosen.out, source=chosen.source)
        written = result_of(out, problem.a.scale, problem.b.scale, problem.bias, problem.c)
        if isinstance(chosen, Tcgen05Config):
            _launch_tcgen05(problem, chosen, written)
        else:
            _launch(problem, chosen, written)
    return out
