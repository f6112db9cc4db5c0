"""Dense integer product on a GPU: operands made ready, long sums in parts, launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.convert.pack import pack
from cute_kernels.gemm.config import GemmConfig, Products
from cute_kernels.gemm.epilogue import _pointer, result_of
from cute_kernels.gemm.heuristics import choose
from cute_kernels.gemm.problem import GemmProblem
from cute_kernels.jit.device import current_arch, device_of, num_sms
from cute_kernels.jit.kernel import get_kernel, occupancy
from cute_kernels.jit.tma import tensor_map
from cute_kernels.operands import Rows, aligned, is_ready


def _ready(plane: Tensor) -> Rows:
    if not is_ready(plane):
        plane = pack(plane)
    pitch = plane.stride(0) if plane.shape[0] > 1 else aligned(plane.shape[1])
    return Rows(plane.data_ptr(), pitch, plane)


@lru_cache(maxsize=256)
def _blocks(config: GemmConfig, device: int) -> int:
    """Blocks of a persistent grid that run at a time."""
    kernel = get_kernel(config)
    return occupancy(kernel) * kernel.multiprocessors


class Part(NamedTuple):
    """One launch: k from ``first`` on, ``size`` of it; what is read as c, and written."""

    first: int
    size: int
    c: Tensor | None
    beta: float
    bias: Tensor | None
    out: Tensor


def parts(problem: GemmProblem, out: Tensor) -> Iterator[Part]:
    """The launches for sums that int32 may not hold: each adds its part of k to what those before it have written.

    Float sums meet in float32, in a workspace where the output is narrower; integers in int64.
    """
    k = problem.shape[2]
    longest = problem.products.longest // 128 * 128
    starts = range(0, k, longest)
    work = (
        out
        if len(starts) == 1 or out.dtype in (torch.float32, torch.int64)
        else out.new_empty(out.shape, dtype=torch.float32)
    )
    for first in starts:
        last = first == starts[-1]
        c, beta = (problem.c, problem.beta) if first == 0 else (work, 1.0)
        yield Part(first, min(longest, k - first), c, beta, problem.bias if first == 0 else None, out if last else work)


def choose_for(problem: GemmProblem, part: Part, arch: str, multiprocessors: int) -> GemmConfig:
    """The config of one launch."""
    m, n, _ = problem.shape
    source = "none" if part.c is None else str(part.c.dtype).removeprefix("torch.")
    out = str(part.out.dtype).removeprefix("torch.")
    return choose(m, n, part.size, problem.products, arch, out=out, source=source, multiprocessors=multiprocessors)


def sum_of_squares_size(device: torch.device) -> int:
    """Warps that a product may have on this device, each of which leaves a sum of sum_of_squares."""
    return 8 * num_sms(device.index)


def can_emit_sum_of_squares(k: int, products: Products, device: torch.device) -> bool:
    """Whether kernels leave their results' sum_of_squares for a product of float32 without c: warp groups, one launch."""
    return current_arch() == "sm_90a" and k <= products.longest // 128 * 128


def _launch(problem: GemmProblem, part: Part, config: GemmConfig, a: list[Rows], b: list[Rows]) -> None:
    kernel = get_kernel(config)
    m, n, _ = problem.shape
    written = result_of(part.out, problem.scale_a, problem.scale_b, part.bias, part.c)
    result = (
        part.size, *written.arguments, np.float32(problem.alpha), np.float32(part.beta), np.float32(2.0**-problem.shift),
        np.float32(4.0**-problem.shift),
    )  # fmt: skip
    padded_a, padded_b = [*a, a[0], a[0]][:3], [*b, b[0], b[0]][:3]
    if config.kernel == "mma":
        operands = (
            *(rows.pointer + part.first for rows in padded_a), *(rows.pitch for rows in padded_a),
            *(rows.pointer + part.first for rows in padded_b), *(rows.pitch for rows in padded_b),
        )  # fmt: skip
        kernel.launch((config.tiles(m, n), 1, 1), (*operands, *result))
        return
    box_a, box_b = (config.tile_k, config.tile_m), (config.tile_k, config.tile_n // config.cluster)
    maps = [
        tensor_map(rows.pointer + part.first, 1, (part.size, count), rows.pitch, box, config.tile_k)
        for planes, count, box in ((padded_a, m, box_a), (padded_b, n, box_b))
        for rows in planes
    ]
    clusters = min(_blocks(config, kernel.device) // config.cluster, config.tiles(m, n))
    cluster = (config.cluster, 1, 1) if config.cluster > 1 else None
    kernel.launch((clusters * config.cluster, 1, 1), (*maps, *result, _pointer(problem.sum_of_squares)), cluster)


def plan_cuda(problem: GemmProblem) -> tuple[GemmConfig, tuple[str, ...], int, int]:
    """The config of the first launch, the planes that are copied, the bytes of the workspace, and launches."""
    m, n, _ = problem.shape
    planes = {f"a{i}": plane for i, plane in enumerate(problem.a)} | {
        f"b{j}": plane.t() for j, plane in enumerate(problem.b)
    }
    copies = tuple(name for name, plane in planes.items() if not is_ready(plane))
    workspace = sum(planes[name].shape[0] * aligned(planes[name].shape[1]) for name in copies)
    launches = list(parts(problem, torch.empty(m, n, dtype=problem.out_dtype, device="meta")))
    if len(launches) > 1 and launches[0].out is not launches[-1].out:
        workspace += launches[0].out.nbytes
    config = choose_for(problem, launches[0], current_arch(), num_sms(problem.device.index))
    return config, copies, workspace, len(launches)


def gemm_cuda(problem: GemmProblem, out: Tensor, config: GemmConfig | None = None) -> Tensor:
    """The product, written to ``out``; M, N and K are not 0.

    ``config``: the kernel to take instead of the chosen one; its ``out`` and ``source`` follow from the problem.
    """
    with device_of(out):
        a, b = [_ready(plane) for plane in problem.a], [_ready(plane.t()) for plane in problem.b]
        arch = current_arch()
        multiprocessors = num_sms(out.device.index)
        for part in parts(problem, out):
            chosen = choose_for(problem, part, arch, multiprocessors)
            if config is not None:
                chosen = replace(config, out=chosen.out, source=chosen.source)
            if problem.sum_of_squares is not None:
                chosen = replace(chosen, sum_of_squares=True)
            _launch(problem, part, chosen, a, b)
    return out
