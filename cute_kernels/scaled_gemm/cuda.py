"""Dense product of low-precision floats on a GPU: kernel selection and launch."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.gemm.cuda import row_order
from cute_kernels.gemm.epilogue import RUN, EpilogueArguments, epilogue_arguments, takes_runs
from cute_kernels.jit.device import current_arch, device_of, num_sms
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.jit.tma import tensor_map
from cute_kernels.operands import Rows, is_ready
from cute_kernels.scaled_gemm import sm100
from cute_kernels.scaled_gemm.config import TILE, OperandFormat, ScaledGemmConfig, choose, lines_refusal
from cute_kernels.scaled_gemm.dequantize import (
    dequantize,
    dequantize_first,
    dequantized_format,
    fold_operands,
    folded_format,
    folds,
    packed_rows,
)
from cute_kernels.scaled_gemm.operand import FloatOperand, ScaledGemmProblem
from cute_kernels.scaled_gemm.sm100 import PackedMatrix, Tcgen05Config, check_alignment, map_parameters
from cute_kernels.scaled_gemm.small_m.config import (
    ROWS,
    SmallMConfig,
    choose_small_m,
    supports_small_m,
    takes_block_sums,
)
from cute_kernels.scaled_gemm.small_m.launch import launch_small_m
from cute_kernels.scaled_gemm.tcgen05 import ARCHES, MmaKind

_ENABLE_TCGEN05 = "MAGICUBE_TCGEN05"


def _scales(operand: FloatOperand) -> Tensor | None:
    """Return block scales (R, blocks) or tile scales (tiles, tiles)."""
    return operand.blocks if operand.blocks is not None else operand.tiles


def _are_ready(scales: Tensor) -> bool:
    """Whether kernels read these scales where they lie: TMA, from a multiple of 16 bytes."""
    return scales.is_contiguous() and scales.data_ptr() % 16 == 0


def _scale_arguments(operand: FloatOperand) -> tuple[tuple[int, int, int], Tensor | None]:
    """Return address, memory stride and length of a row of block or tile scales, and the tensor that owns them."""
    found = _scales(operand)
    if found is None:
        return (0, 0, 0), None
    if not _are_ready(found):
        found = found.clone(memory_format=torch.contiguous_format)
    return (found.data_ptr(), found.shape[1], found.shape[1]), found


class Selection(NamedTuple):
    """A kernel config; `refused` says why ``tcgen05.mma`` does not run on an architecture that has it."""

    config: ScaledGemmConfig | SmallMConfig | Tcgen05Config
    refused: str = ""


def _packed_matrix(name: str, operand: FloatOperand) -> PackedMatrix:
    """Return an operand's packed data as it is; raise ``ValueError`` unless the bytes of a row are contiguous."""
    data = operand.packed_data
    if data.shape[1] > 1 and data.stride(1) != 1:
        raise ValueError(f"{name} must have bytes at stride 1 for tcgen05.mma, got {data.stride(1)}")
    return PackedMatrix(operand.dtype, operand.k, operand.rows, data.data_ptr(), data.stride(0))


def _tcgen05_kind(problem: ScaledGemmProblem) -> MmaKind:
    """Return the ``tcgen05.mma`` kind that multiplies these operands; raise ``ValueError`` if none does."""
    kind = sm100.mma_kind(problem.a.format, problem.b.format)
    for name, operand in (("a", problem.a), ("b", problem.b)):
        check_alignment(name, _packed_matrix(name, operand), kind)
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
    fold: bool = False,
    out: str = "float32",
    source: str = "none",
    num_sms: int = 132,
) -> ScaledGemmConfig | SmallMConfig:
    """Return the config for a product of (m, k) and (k, n) without ``tcgen05.mma``.

    Parameters
    ----------
    m, n, k, a, b, arch, fast, out, source, num_sms
        As for :func:`cute_kernels.scaled_gemm.config.choose`.
    fold : bool, default False
        Whether ue8m0 block scales may become part of e4m3 values.

    Returns
    -------
    ScaledGemmConfig or SmallMConfig
        The small-M kernel if it supports the operands, else a tiled kernel.

    Raises
    ------
    NotImplementedError
        For float32 scales of 128 values of `b`; for those of `a` beside block scales of `b`, or not on sm_90a.
    """
    refused = lines_refusal(a, b, arch)
    if refused:
        raise NotImplementedError(refused)
    if supports_small_m(m, a, b, arch):
        return choose_small_m(m, n, k, a, b, out=out, source=source, num_sms=num_sms)
    if arch == "sm_90a":
        if fold and m > ROWS[-1] and folds(a, b):
            a, b = folded_format(a, True), folded_format(b, False)
        a, b = dequantize_first(m, n, k, a, b)
    config = choose(m, n, k, a, b, arch, fast=fast, out=out, source=source, num_sms=num_sms)
    return config.side_by_side if n % RUN == 0 else config


def _output_types(problem: ScaledGemmProblem) -> tuple[str, str]:
    """Return the dtypes of the output and of c as configs name them."""
    source = "none" if problem.c is None else str(problem.c.dtype).removeprefix("torch.")
    return str(problem.out_dtype).removeprefix("torch."), source


def select_scaled_config(problem: ScaledGemmProblem, arch: str, num_sms: int) -> Selection:
    """Return the config of a product; addresses and memory strides are read, nothing is computed."""
    m, n, k = problem.shape
    out, source = _output_types(problem)
    refused = ""
    if arch in ARCHES and os.environ.get(_ENABLE_TCGEN05) != "1":
        refused = f"the kernel of tcgen05.mma has not been run on any chip; {_ENABLE_TCGEN05}=1 takes it"
    elif arch in ARCHES:
        try:
            return Selection(sm100.choose(m, n, _tcgen05_kind(problem).name, out, source, num_sms))
        except ValueError as error:
            refused = str(error)
    config = choose_config(
        m, n, k, problem.a.format, problem.b.format, arch,
        fast=problem.fast_accum, fold=problem.fold_scales, out=out, source=source, num_sms=num_sms,
    )  # fmt: skip
    return Selection(config, refused)


def plan_scaled_gemm(problem: ScaledGemmProblem) -> tuple[Selection, tuple[str, ...]]:
    """Return the selected kernel and what is copied: packed data of operands, their scales; nothing is launched."""
    selection = select_scaled_config(problem, current_arch(), num_sms(problem.a.device.index))
    operands = (("a", problem.a), ("b", problem.b))
    copied = []
    if not isinstance(selection.config, Tcgen05Config):
        copied = [name for name, each in operands if not is_ready(each.packed_data)]
    for name, each in operands:
        scales = _scales(each)
        if scales is not None and not _are_ready(scales):
            copied.append(f"{name}'s scales")
    return selection, tuple(copied)


def prepared_operands(
    problem: ScaledGemmProblem, config: ScaledGemmConfig | SmallMConfig | Tcgen05Config
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the operands that a kernel of its own dequantizes before the product, and those that it folds."""
    if not isinstance(config, ScaledGemmConfig):
        return (), ()
    operands = (("a", config.a, problem.a.format, True), ("b", config.b, problem.b.format, False))
    read = {name: wanted == folded_format(given, lines) for name, wanted, given, lines in operands if wanted != given}
    return tuple(name for name in read if not read[name]), tuple(name for name in read if read[name])


def _tensor_map(
    rows: Rows, fmt: OperandFormat, count: int, tile: int, config: ScaledGemmConfig, adjacent: int = 0
) -> bytes:
    """Return the tensor map of K tiles of `tile` rows: packed tiles unswizzled, others swizzled."""
    packed = config.is_decoded(fmt)
    width = config.tile_k * fmt.bits // 8
    shape, steps, box = row_order(count, tile, adjacent)
    pitches = tuple(step * rows.pitch for step in steps)
    return tensor_map(rows.pointer, 1, (rows.owner.shape[1], *shape), pitches, (width, *box), 0 if packed else width)


def _launch_tcgen05(problem: ScaledGemmProblem, config: Tcgen05Config, epilogue: EpilogueArguments) -> None:
    """Launch the kernel of sm_100a and sm_103a."""
    m, n, k = problem.shape
    kind = _tcgen05_kind(problem)
    if config.mma != kind:
        raise ValueError(f"config must be of the kind {kind.name} for these operands, got {config.kind}")
    sm100.check_copied(config, problem.a.dtype)
    sm100.check_two_ctas(config)
    maps = [
        tensor_map(*map_parameters(name, _packed_matrix(name, operand), kind, rows))
        for name, operand, rows in zip("ab", (problem.a, problem.b), config.box_rows, strict=True)
    ]
    pair = (problem.a.dtype, problem.b.dtype)
    (scales_a, _, count), _owner_a = _scale_arguments(problem.a)
    (scales_b, _, _), _owner_b = _scale_arguments(problem.b)
    kernel, ctas = get_kernel(config), config.ctas
    instruction = kind.instruction(*pair, config.tile_m, config.tile_n, ctas)
    arguments = (
        *maps, k, config.counted_bytes(*pair), instruction, scales_a, scales_b, count // 4, *epilogue.arguments,
        np.float32(problem.alpha), np.float32(problem.beta),
    )  # fmt: skip
    grid = (ctas * min(kernel.num_sms // ctas, config.tiles(m, n)), 1, 1)
    kernel.launch(grid, arguments, *(((ctas, 1, 1),) if ctas > 1 else ()))


def _launch(problem: ScaledGemmProblem, config: ScaledGemmConfig | SmallMConfig, epilogue: EpilogueArguments) -> None:
    """Launch a small-M or a tiled kernel, after the dequantization kernels that it needs."""
    m, n, k = problem.shape
    a, b = packed_rows(problem.a.packed_data), packed_rows(problem.b.packed_data)
    (scales_a, _owner_a), (scales_b, _owner_b) = _scale_arguments(problem.a), _scale_arguments(problem.b)
    if isinstance(config, SmallMConfig):
        launch_small_m(config, (a, scales_a), (b, scales_b), problem.shape, epilogue, problem.alpha, problem.beta)
        return
    kernel = get_kernel(config)
    if config.a != problem.a.format:
        kept = config.a.tiles or config.a.block == TILE
        a, scales_a = dequantize(problem.a, a, config.a), scales_a if kept else (0, 0, 0)
    if config.b != problem.b.format:
        b, scales_b = dequantize(problem.b, b, config.b), scales_b if config.b.tiles else (0, 0, 0)
    alpha = np.float32(problem.alpha * config.exponent_bias_factor(problem.a.format, problem.b.format))
    result = (k, *scales_a, *scales_b, *epilogue.arguments, alpha, np.float32(problem.beta))
    tiles = config.tiles(m, n)
    if config.kernel == "mma":
        operands = (a.pointer, a.pitch, a.owner.shape[1], b.pointer, b.pitch, b.owner.shape[1])
        kernel.launch((tiles, 1, 1), (*operands, *result))
        return
    maps = (
        _tensor_map(a, config.a, m, min(config.tile_m, m), config),
        _tensor_map(b, config.b, n, config.tile_n, config, config.adjacent),
    )
    if config.split > 1:
        kernel.launch((tiles * config.split, 1, 1), (*maps, *result), (config.split, 1, 1))
    else:
        kernel.launch((min(kernel.num_sms * config.resident, tiles), 1, 1), (*maps, *result))


def check_reads(problem: ScaledGemmProblem, config: ScaledGemmConfig | SmallMConfig) -> None:
    """Check that a given config multiplies these operands.

    Parameters
    ----------
    problem : ScaledGemmProblem
        A product.
    config : ScaledGemmConfig or SmallMConfig
        Config of a kernel.

    Raises
    ------
    ValueError
        If it is for other formats or K, or has no scale for some columns of its tiles.
    """
    for name, given, read, lines in (("a", problem.a.format, config.a, True), ("b", problem.b.format, config.b, False)):
        ways = (False,) if given.block == TILE else (False, True)  # as bytes, as bfloat16 times block scales
        decoded = (dequantized_format(given, uses_bfloat16) for uses_bfloat16 in ways)
        if read not in (given, folded_format(given, lines), *decoded):
            raise ValueError(f"config must read {given.name} as {name}, got {read.name}")
    n = problem.shape[1]
    if isinstance(config, ScaledGemmConfig) and not config.takes(n):
        raise ValueError(f"config must have tile_n {TILE} for tile scales of b of {n} rows, got {config.tile_n}")
    k = problem.shape[2]
    if isinstance(config, SmallMConfig) and config.block_sums and not takes_block_sums(1, k, config.a, config.b):
        raise ValueError(f"config must have no block_sums for {config.a.name} by {config.b.name} and K = {k}")


def scaled_gemm_cuda(
    problem: ScaledGemmProblem,
    out: Tensor,
    config: ScaledGemmConfig | SmallMConfig | Tcgen05Config | None = None,
) -> Tensor:
    """Write a product to `out` and return it.

    Parameters
    ----------
    problem : ScaledGemmProblem
        A product on a GPU; M, N and K are not 0.
    out : Tensor, shape (M, N)
        Output.
    config : ScaledGemmConfig, SmallMConfig or Tcgen05Config, optional
        Kernel config; overrides kernel selection. Its `out` and `source` are set from `problem`; its `adjacent` is
        taken where N and the alignment of `out` allow it.

    Returns
    -------
    Tensor, shape (M, N)
        `out`.

    Raises
    ------
    ValueError
        If `config` does not multiply these operands.
    """
    with device_of(out):
        if config is None:
            chosen = select_scaled_config(problem, current_arch(), num_sms(out.device.index)).config
        else:
            if not isinstance(config, Tcgen05Config):
                check_reads(problem, config)
            kind, source = _output_types(problem)
            chosen = replace(config, out=kind, source=source)
        if isinstance(chosen, ScaledGemmConfig):
            problem = fold_operands(problem, chosen.a, chosen.b)
        if isinstance(chosen, ScaledGemmConfig) and chosen.adjacent:
            chosen = chosen.side_by_side if takes_runs(out, problem.c) else replace(chosen, adjacent=0)
        epilogue = epilogue_arguments(out, problem.a.scale, problem.b.scale, problem.bias, problem.c)
        if isinstance(chosen, Tcgen05Config):
            _launch_tcgen05(problem, chosen, epilogue)
        else:
            _launch(problem, chosen, epilogue)
    return out
