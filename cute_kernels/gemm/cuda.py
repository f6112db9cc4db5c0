"""Dense integer product on a GPU: pack operands, split long sums, launch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.convert.pack import pack_rows
from cute_kernels.gemm.config import GemmConfig, Products, select_products
from cute_kernels.gemm.epilogue import epilogue_arguments, pointer_of, takes_runs
from cute_kernels.gemm.heuristics import choose
from cute_kernels.gemm.problem import GemmProblem
from cute_kernels.jit.device import current_arch, device_of, num_sms
from cute_kernels.jit.kernel import get_kernel, occupancy
from cute_kernels.jit.launch_cache import LaunchCache
from cute_kernels.jit.tma import tensor_map
from cute_kernels.operands import Rows, aligned, is_ready, line_pitch


def _packed(plane: Tensor) -> Rows:
    """Return `plane`, (rows, K), as the kernels read it: copied unless it is K-major and aligned."""
    if not is_ready(plane):
        plane = pack_rows(plane)
    pitch = plane.stride(0) if plane.shape[0] > 1 else aligned(plane.shape[1])
    return Rows(plane.data_ptr(), pitch, plane)


@lru_cache(maxsize=256)
def _resident_ctas(config: GemmConfig, device: int) -> int:
    """Return the CTAs of a persistent grid that run at the same time."""
    kernel = get_kernel(config)
    return occupancy(kernel) * kernel.num_sms


def _persistent_ctas(config: GemmConfig, m: int, n: int, device: int) -> int:
    """Return the CTAs of a WGMMA kernel: as many as run at the same time, or one per tile."""
    return min(_resident_ctas(config, device) // config.cluster, config.tiles(m, n)) * config.cluster


class Part(NamedTuple):
    """One launch of a product: `size` of K from `first` on, and its epilogue."""

    first: int
    size: int
    c: Tensor | None  # (M, N)
    beta: float
    bias: Tensor | None  # (N,)
    out: Tensor  # (M, N)


def parts(problem: GemmProblem, out: Tensor) -> Iterator[Part]:
    """Yield the launches of a product, several if int32 could overflow.

    Each launch adds its range of K to the result of those before it: in a float32 workspace if the output is
    narrower, in int64 for integers.

    Parameters
    ----------
    problem : GemmProblem
        A product on a GPU.
    out : Tensor, shape (M, N)
        Output of the last launch.

    Yields
    ------
    Part
        In the order of the launches.
    """
    k = problem.shape[2]
    max_k = problem.products.max_k // 128 * 128
    starts = range(0, k, max_k)
    work = (
        out
        if len(starts) == 1 or out.dtype in (torch.float32, torch.int64)
        else out.new_empty(out.shape, dtype=torch.float32)
    )  # (M, N)
    for first in starts:
        last = first == starts[-1]
        c, beta = (problem.c, problem.beta) if first == 0 else (work, 1.0)
        bias = problem.bias if first == 0 else None
        yield Part(first, min(max_k, k - first), c, beta, bias, out if last else work)


def select_config(problem: GemmProblem, part: Part, arch: str, num_sms: int) -> GemmConfig:
    """Return the config of one launch."""
    m, n, _ = problem.shape
    source = "none" if part.c is None else str(part.c.dtype).removeprefix("torch.")
    out = str(part.out.dtype).removeprefix("torch.")
    chosen = choose(m, n, part.size, problem.products, arch, out=out, source=source, num_sms=num_sms, glu=problem.glu)
    is_last = part.first + part.size == problem.shape[2]
    chosen = replace(chosen, activation=problem.activation if is_last else None)
    return chosen.side_by_side if takes_runs(part.out, part.c) else chosen


_INT4_ARCHES = ("sm_80", "sm_86", "sm_87", "sm_88", "sm_89")


def check_config(problem: GemmProblem, config: GemmConfig) -> None:
    """Raise unless a config that the caller named computes a product on its device.

    Raises
    ------
    ValueError
        If the device is no GPU with the config's instruction, or the config is for other operands.
    """
    if problem.device.type != "cuda":
        raise ValueError(f"config must be None on {problem.device}, got {config.name}")
    bits = 4 if None not in problem.packed else 8
    if config.products != problem.products or config.bits not in (bits, 8):
        raise ValueError(f"config must be for {problem.products} of {bits} bits, got {config.name}")
    arch = current_arch()
    if problem.glu and (config.kernel != "wgmma" or config.tile_n % 64):
        raise ValueError(f"config must be of WGMMA and tiles of N a multiple of 64 for glu, got {config.name}")
    if (config.kernel == "wgmma" and arch != "sm_90a") or (config.bits == 4 and arch not in _INT4_ARCHES):
        raise ValueError(f"config must be of instructions of {arch}, got {config.name}")


def on_glu_arch(x: Tensor) -> bool:
    """Return whether kernels of the GPU of `x` compute gated linear units: WGMMA kernels do."""
    with device_of(x):
        return current_arch() == "sm_90a"


def takes_glu(problem: GemmProblem, out: Tensor) -> bool:
    """Return whether one launch computes a gated linear unit, into runs of columns."""
    single = problem.products.number == 1 and problem.shape[2] <= problem.products.max_k // 128 * 128
    return on_glu_arch(out) and single and problem.c is None and takes_runs(out)


def gated_gemm(
    a: tuple[Tensor, ...],
    b: tuple[Tensor, ...],
    scales: tuple[Tensor, Tensor],
    out: Tensor,
    gate: Tensor,
    bits: int = 8,
) -> int:
    """Launch a product of digits that runs if the first word of `gate` is the number of planes minus 1.

    Else every CTA returns at once, and `out` and `gate` stay as they are.

    Parameters
    ----------
    a : tuple of Tensor, shape (M, K)
        int8 digit planes, the leading one first.
    b : tuple of Tensor, shape (K, N)
        As many int8 digit planes.
    scales : tuple of Tensor, shapes (M,) and (N,)
        float32 scales of rows and columns.
    out : Tensor, shape (M, N)
        float32 output.
    gate : Tensor, shape (4 + 2 * warps,)
        float32: the int32 of the picked product, padded to 16 bytes; then per warp the sums of squares of its results
        and of the sums of their levels' magnitudes. See :func:`gate_size`.
    bits : int, default 8
        Bits per digit.

    Returns
    -------
    int
        Warps that write sums.

    Raises
    ------
    NotImplementedError
        If the GPU has no WGMMA kernels, or K takes several launches.
    """
    products = select_products(len(a), len(b), None)
    if not can_gate(a[0].shape[1], products, out.device):
        raise NotImplementedError(
            f"a on {out.device} must be on an sm_90 GPU with a K of one launch, got {a[0].shape[1]}"
        )
    problem = GemmProblem(a, b, products, bits, *scales, 1.0, 0.0, None, None, torch.float32, gate=gate)
    m, n, _ = problem.shape
    gemm_cuda(problem, out)
    with device_of(out):
        (part,) = parts(problem, out)
        config = select_config(problem, part, current_arch(), num_sms(out.device.index))
        config = replace(config, gated=True)
        return 4 * config.groups * _persistent_ctas(config, m, n, out.device.index)


def gate_size(device: torch.device) -> int:
    """Return the float32 elements of a gate: four, and two for each warp of a persistent grid."""
    return 4 + 2 * 8 * num_sms(device.index)


def can_gate(k: int, products: Products, device: torch.device) -> bool:
    """Return whether :func:`gated_gemm` takes a sum over `k`: WGMMA kernels, a single launch."""
    return current_arch() == "sm_90a" and k <= products.max_k // 128 * 128


class RowOrder(NamedTuple):
    """Rows of an operand as TMA writes them to shared memory, the fastest index first: sizes, steps in rows, box."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    box: tuple[int, ...]


def row_order(rows: int, box_rows: int, adjacent: int = 0) -> RowOrder:
    """Return the order of rows for a lane to have `adjacent` columns side by side; 0: as they are.

    Row ``4 a w + a z + 2 y + x`` of B, with ``a = adjacent``, goes to row ``4 a w + 8 y + 2 z + x``: an accumulator has
    columns ``8 y + 2 z`` and ``8 y + 2 z + 1`` in lane z of a quad.

    Examples
    --------
    >>> row_order(256, 128, 8)
    RowOrder(shape=(2, 4, 4, 8), steps=(1, 8, 2, 32), box=(2, 4, 4, 4))
    """
    if not adjacent:
        return RowOrder((rows,), (1,), (box_rows,))
    inner, steps = (2, 4, adjacent // 2), (1, adjacent, 2, 4 * adjacent)
    return RowOrder((*inner, rows // steps[-1]), steps, (*inner, box_rows // steps[-1]))


def _launch(problem: GemmProblem, part: Part, config: GemmConfig, a: list[Rows], b: list[Rows]) -> None:
    """Launch one part with packed operands."""
    kernel = get_kernel(config)
    m, n, _ = problem.shape
    epilogue = epilogue_arguments(part.out, problem.row_scale, problem.col_scale, part.bias, part.c)
    result = (
        -(-part.size * config.bits // 8), *epilogue.arguments, np.float32(problem.alpha), np.float32(part.beta),
        np.float32(2.0**-problem.shift), np.float32(4.0**-problem.shift),
    )  # fmt: skip
    padded_a, padded_b = [*a, a[0], a[0]][:3], [*b, b[0], b[0]][:3]
    if config.kernel == "mma":
        first = part.first * config.bits // 8
        operands = (
            *(rows.pointer + first for rows in padded_a), *(rows.pitch for rows in padded_a),
            *(rows.pointer + first for rows in padded_b), *(rows.pitch for rows in padded_b),
        )  # fmt: skip
        kernel.launch((config.tiles(m, n), 1, 1), (*operands, *result, pointer_of(problem.out_scale)))
        return
    rows_a, rows_b = config.box_rows(m, n)
    box_k = min(config.tile_k, 128)
    maps = []
    for planes, (shape, steps, box) in (
        (padded_a, row_order(m, rows_a)),
        (padded_b, row_order(n, rows_b, config.adjacent)),
    ):
        for rows in planes:
            pitches = tuple(step * rows.pitch for step in steps)
            maps.append(tensor_map(rows.pointer + part.first, 1, (part.size, *shape), pitches, (box_k, *box), box_k))
    cluster = (config.cluster, 1, 1) if config.cluster > 1 else None
    ctas, gate = _persistent_ctas(config, m, n, kernel.device), pointer_of(problem.gate)
    # Behind the kernel that writes the gate; where CTAs have several tiles, products took up to 5% longer so.
    pdl = problem.gate is not None and config.tiles(m, n) * config.cluster == ctas
    kernel.launch((ctas, 1, 1), (*maps, *result, gate, pointer_of(problem.out_scale)), cluster, pdl=pdl)


class LaunchPlan(NamedTuple):
    """How a product runs on a GPU: first config, planes that are copied, workspace, launches."""

    config: GemmConfig
    copies: tuple[str, ...]
    workspace_bytes: int
    launches: int


def plan_gemm(problem: GemmProblem) -> LaunchPlan:
    """Return how :func:`gemm_cuda` runs a product; nothing is launched."""
    m, n, _ = problem.shape
    planes = {f"a{i}": plane for i, plane in enumerate(problem.a)}  # (M, K) each
    planes |= {f"b{j}": plane.t() for j, plane in enumerate(problem.b)}  # (N, K) each
    copies = tuple(name for name, plane in planes.items() if not is_ready(plane))
    workspace = sum(planes[name].shape[0] * line_pitch(planes[name].shape[1]) for name in copies)
    launches = list(parts(problem, torch.empty(m, n, dtype=problem.out_dtype, device="meta")))
    if len(launches) > 1 and launches[0].out is not launches[-1].out:
        workspace += launches[0].out.nbytes
    config = select_config(problem, launches[0], current_arch(), num_sms(problem.device.index))
    return LaunchPlan(config, copies, workspace, len(launches))


def gemm_cuda(problem: GemmProblem, out: Tensor, config: GemmConfig | None = None) -> Tensor:
    """Write a product to `out` and return it.

    Parameters
    ----------
    problem : GemmProblem
        A product on a GPU; M, N and K are not 0.
    out : Tensor, shape (M, N)
        Output.
    config : GemmConfig, optional
        Kernel config; overrides kernel selection. `out`, `source`, `activation`, `glu` and `adjacent` are set here.

    Returns
    -------
    Tensor, shape (M, N)
        `out`.
    """

    def run() -> None:
        with device_of(out):
            _run(problem, out, config)

    key = _replay_key(problem, out, config)
    if key is None:
        run()
    else:
        _replays.run(key, run)
    return out


_replays = LaunchCache(256)


def _replay_key(problem: GemmProblem, out: Tensor, config: GemmConfig | None) -> Hashable | None:
    """Return all that the launch of a product depends on; None where it needs memory of its own or several launches."""
    vectors, c = (problem.row_scale, problem.col_scale, problem.bias), problem.c
    if any(x is not None and (x.dtype != torch.float32 or not x.is_contiguous()) for x in vectors):
        return None
    if problem.packed != (None, None) or problem.shape[2] > problem.products.max_k // 128 * 128:
        return None
    planes = *problem.a, *(plane.t() for plane in problem.b)  # (M, K) and (N, K) each
    if not all(map(is_ready, planes)) or (c is not None and c.stride(1) != 1):
        return None
    tensors = *planes, *vectors, c, out, problem.out_scale, problem.gate
    return (
        problem.products, problem.shift, problem.alpha, problem.beta, problem.activation, problem.glu, config,
        out.get_device(), *(x if x is None else (x.data_ptr(), x.dtype, x.shape, x.stride()) for x in tensors),
    )  # fmt: skip


def _run(problem: GemmProblem, out: Tensor, config: GemmConfig | None) -> None:
    """Launch a product on the current device; see :func:`gemm_cuda`."""
    left, right = problem.packed
    if config is not None and config.bits == 4:
        assert left is not None and right is not None
        a, b = [_packed(left.lines)], [_packed(right.lines)]  # (M, K / 2), (N, K / 2)
    else:
        problem = problem.unpacked()
        a = [_packed(plane) for plane in problem.a]  # (M, K) each
        b = [_packed(plane.t()) for plane in problem.b]  # (N, K) each
    arch = current_arch()
    sms = num_sms(out.device.index)
    for part in parts(problem, out):
        chosen = select_config(problem, part, arch, sms)
        if config is not None:
            given = replace(config, out=chosen.out, source=chosen.source, activation=chosen.activation, glu=chosen.glu)
            chosen = given.side_by_side if takes_runs(part.out, part.c) else replace(given, adjacent=0)
        if problem.gate is not None:
            chosen = replace(chosen, gated=True)
        _launch(problem, part, chosen, a, b)
