"""Launch of the small-M product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from cute_kernels.jit import workspace
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.jit.tma import tensor_map
from cute_kernels.scaled_gemm.small_m.config import K_SLICE_BYTES, ReorderConfig, SmallMConfig

if TYPE_CHECKING:
    from cute_kernels.gemm.epilogue import EpilogueArguments
    from cute_kernels.operands import Rows

ScaleArguments = tuple[int, int, int]  # block scales: address, memory stride, blocks per row


def launch_small_m(
    config: SmallMConfig,
    a: tuple[Rows, ScaleArguments],
    b: tuple[Rows, ScaleArguments],
    shape: tuple[int, int, int],
    epilogue: EpilogueArguments,
    alpha: float,
    beta: float,
) -> None:
    """Launch a small-M product: reorder X, then multiply.

    Parameters
    ----------
    config : SmallMConfig
        Kernel config.
    a : tuple of Rows and ScaleArguments, shape (M, K)
        X and its block scales.
    b : tuple of Rows and ScaleArguments, shape (N, K)
        Weights and their block scales.
    shape : tuple of int
        (M, N, K).
    epilogue : EpilogueArguments
        Output, scales, bias and source.
    alpha : float
        Factor of the product.
    beta : float
        Factor of the source.
    """
    (m, n, k), (x, x_scales), (weights, scales) = shape, a, b
    scaled = config.block_sums and config.a.block > 0
    tile, size = config.tile_k if scaled else 128, 2 if config.uses_bfloat16 else 1
    units = -(-k // tile) * tile // 64  # of 64 values
    pitch = units * 64 * size
    # Bytes of the scales of X: (blocks, rows) as float32.
    factors = units * 64 // config.a.block * config.rows * 4 if scaled else 0
    ordered = workspace.empty((factors + m * pitch,), torch.uint8, x.owner.device)  # (bytes,)
    start = ordered.data_ptr() + factors
    # This kernel waits for its predecessor before it launches its dependents: the product then reads weights at once.
    get_kernel(ReorderConfig(config.a, config.b.bits, config.uses_bfloat16, config.block_sums)).launch(
        (-(-m * units // 128), 1, 1),
        (x.pointer, x.pitch, x.owner.shape[1], m, *x_scales, start, pitch, ordered.data_ptr(), config.rows),
    )
    width, swizzle = (128, 128) if config.block_sums else (config.k_slices * K_SLICE_BYTES, 0)
    of_x = tensor_map(start, 1, (pitch, m), pitch, (128, config.rows), 128)
    of_weights = tensor_map(
        weights.pointer, 1, (weights.owner.shape[1], n), weights.pitch, (width, config.tile_n), swizzle
    )
    operands: tuple[bytes | int, ...] = (of_x, of_weights, k, *scales)
    if config.block_sums:
        pointer, step, blocks = scales
        of_scales = of_weights  # not read
        if config.b.block:
            of_scales = tensor_map(pointer, 1, (blocks, n), step, (config.scale_box, config.tile_n))
        operands = (of_x, of_weights, of_scales, ordered.data_ptr() if scaled else 0, k)
    factor = np.float32(alpha * config.exponent_bias_factor)
    get_kernel(config).launch(
        (config.tiles(n) * config.split, 1, 1),
        (*operands, *epilogue.arguments, factor, np.float32(beta)),
        (config.split, 1, 1) if config.split > 1 else None,
        pdl=True,
    )
