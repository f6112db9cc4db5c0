"""Predicted times of the SpMM kernels; needs no GPU."""

from __future__ import annotations

from cute_kernels.machine import SHARED_BYTES, Machine, Problem
from cute_kernels.spmm.gather import GatherConfig, long_groups
from cute_kernels.spmm.panel import PanelConfig
from cute_kernels.spmm.resident import ResidentConfig


def panel_cost(config: PanelConfig, machine: Machine, problem: Problem) -> float:
    """Predict the time of the panel kernel in nanoseconds.

    ``launch + waves * (sqrt(work^2 + fill^2) + epilogue) + tail``: per wave of CTAs, the MMAs of all warps overlap with
    the loads of tiles of B. The tail is the longest vector row, which one warp multiplies. The constants are those of
    ``machine.panel``.
    """
    model = machine.panel
    clusters = machine.num_sms // config.cluster
    items = config.items(problem.vector_rows, problem.n, problem.batch)
    waves = -(-items // clusters)
    mean, tiles = problem.vectors / problem.vector_rows, -(-problem.inner // config.tile)
    groups = max(mean / config.mma_k + 0.5, min(tiles / config.tile_window, mean))
    rows = min(config.warps * config.rows_per_warp, problem.vector_rows)
    # MMAs per 16 bytes of a group's rows of B, relative to L8-R8 at V = 8
    products = config.products * max(1, config.vector_length // 8) * config.tile_n / config.tile_n_bytes
    share = dict(model.share)[config.warps, config.rows_per_warp]
    window = mean * config.tile * config.tile_window / problem.inner  # vectors of a row per window
    # A wide window has more columns to choose from, and so fewer bank conflicts.
    wavefronts = 1.0 + min(model.conflict / window, 1.4)
    chunks = config.tile_n_bytes / 16 * max(wavefronts, 0.5 * (wavefronts + products))
    chunks *= (model.narrow if config.tile_n_bytes <= 64 else 1.0) * (model.ahead if config.a_stages else 1.0)
    work = rows * groups * chunks * model.chunk * share
    row = model.half if config.tile_n_bytes == 32 else model.row
    fill = problem.inner * (model.byte * config.tile_n_bytes / config.cluster * items / (waves * clusters) + row)
    fill += tiles * model.flight / (config.stages - config.tile_window)
    epilogue = model.block + model.result * rows * config.tile_n_bytes
    tail = model.tail * (_longest(mean, problem.longest) - mean) / config.mma_k
    return model.launch + waves * ((work**2 + fill**2) ** 0.5 + epilogue) + tail


def _longest(mean: float, longest: int) -> float:
    """Vectors of the longest vector row beyond those of a uniform pattern: mean + 3 standard deviations."""
    return max(mean, longest - 3 * mean**0.5)


def gather_cost(config: GatherConfig, machine: Machine, problem: Problem) -> float:
    """Predict the time of the gather kernel in nanoseconds.

    ``launch + waves * (warp + groups * step) + tail + epilogue``: each warp multiplies the groups of one vector row. A
    step is longer the more warps the SM with the most CTAs has. The tail is the longest vector row. The constants are
    those of ``machine.gather``.
    """
    model = machine.gather
    tiles = -(-problem.n // config.tile_n) * problem.batch
    registers = 80 if config.tile_n_bytes == 128 else 64
    blocks = min(SHARED_BYTES // (config.smem_bytes + 1024), 65536 // (registers * config.threads))
    resident = min(blocks * config.warps, 64) * machine.num_sms
    full = problem.vector_rows * tiles * config.split_k_warps / resident
    ctas = -(-problem.vector_rows * config.split_k_warps // config.warps) * tiles
    warps = min(resident / machine.num_sms, -(-ctas // machine.num_sms) * config.warps)  # of the SM that has most
    mean = problem.vectors / max(problem.vector_rows, 1)
    groups = mean / (config.mma_k * config.split_k_warps) + 0.5
    # Vector rows longer than in a uniform pattern extend the tail. All warps of a CTA share long ones.
    longest = _longest(mean, problem.longest) / config.mma_k
    is_long = config.shares_long_rows and longest > long_groups(problem.vectors // config.mma_k, problem.vector_rows)
    longest = longest / (config.warps if is_long else config.split_k_warps) + 0.5
    crowd = model.crowd * max(config.tile_n_bytes, 64) / 64 * warps / 32
    products = config.digits[0] * config.digits[1] * max(config.vector_length / 8, 1.0)
    products *= config.tile_n / config.tile_n_bytes
    step = model.group + crowd * max(1.0, 0.5 + 0.5 * products)
    team = model.team * (config.split_k_warps - 1) / 4 * config.tile_n / 64
    work = max(1.0, full) * (model.warp + groups * step + team) + (longest - groups) * step
    return model.launch + work + model.result * problem.vector_rows * 8 * problem.n


def transpose_cost(size: int) -> float:
    """Predict the time in nanoseconds of the launch that transposes `size` bytes of results."""
    return _TRANSPOSE_LAUNCH + _TRANSPOSE_BYTE * size


def resident_cost(config: ResidentConfig, machine: Machine, problem: Problem) -> float:
    """Predict the time of the resident kernel in nanoseconds.

    ``launch + waves * (bytes of A + bytes of B) + team``, of the CTA that has the longest vector row. The constants are
    those of ``machine.resident``.
    """
    model = machine.resident
    blocks = -(-problem.vector_rows // config.block_rows) * config.cluster
    waves = -(-blocks * -(-problem.n // config.tile_n) * problem.batch // machine.num_sms)
    mean, slots = problem.vectors / max(problem.vector_rows, 1), config.mma_k * config.cluster
    rows = min(config.block_rows, problem.vector_rows)
    records = rows * (mean / slots + 0.5) + (_longest(mean, problem.longest) - mean) / slots
    fill = model.fill * config.tile * config.tile_n_bytes
    team = model.team if config.cluster > 1 else 0.0
    return model.launch + waves * (model.byte * records * config.record_bytes + fill) + team


_TRANSPOSE_LAUNCH, _TRANSPOSE_BYTE = 1600.0, 0.0005  # H200, behind another kernel: 0.05 to 120 MB
