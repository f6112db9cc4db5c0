"""Which fused attention kernel runs a call: a pure choice from its numbers."""

from __future__ import annotations

from typing import NamedTuple

from cute_kernels.attention.config import NO_TILE, AttentionConfig, GatherAttention, PanelAttention

TMA_FLOATS = 4  # of 16 bytes, what a bulk copy moves
_MAX_COORDINATE = 2**31 - 1  # of a tensor map
PANEL_ARCHES = ("sm_90a", "sm_100a", "sm_103a")  # tensor copies and 227 KiB of shared memory


PANEL_HEAD = 64  # sums of several longer rows outgrow the registers; of shorter ones the gather kernel is as fast


class Problem(NamedTuple):
    """The numbers that :func:`choose` knows."""

    batch: int
    vector_rows: int
    keys: int
    vectors: int  # of one mask
    reach: float  # keys from the first to the last that a block of vector rows has, on average


def panel_cost(config: PanelAttention, multiprocessors: int, problem: Problem) -> float:
    """Predicted microseconds: waves of blocks, each of which opens, fetches tiles and does the steps of its rows.

    The constants were measured on an H200.
    """
    mean = problem.vectors / max(problem.vector_rows, 1)
    inside = mean / max(problem.reach, 1.0) * config.window * config.tile  # keys that a step may take
    # a step is cut off where its window has no more keys, and the last of a row is half full
    steps = mean / min(config.step, 0.8 * inside) + 0.5 if mean else 0.0
    waves = -(-problem.batch * -(-problem.vector_rows // config.block_rows) // multiprocessors)
    return waves * (5.1 + 0.0012 * problem.reach + 0.057 * config.warps * config.rows * steps)


def gather_cost(config: GatherAttention, multiprocessors: int, problem: Problem) -> float:
    """Predicted microseconds: launch and tail, and rows of K and V from the second-level cache; likewise."""
    moved = 2 * config.head * problem.batch * problem.vectors
    return 14 + moved / (65_000 * multiprocessors)


def choose(head: int, arch: str, multiprocessors: int, problem: Problem) -> AttentionConfig:
    """The config of least predicted time."""
    gather, panel = GatherAttention(head), PanelAttention(head)
    possible = arch in PANEL_ARCHES and head == PANEL_HEAD and problem.vectors > 0 and problem.keys % TMA_FLOATS == 0
    small = problem.keys <= NO_TILE * panel.tile and problem.batch * problem.keys <= _MAX_COORDINATE
    many = 2 * problem.batch * -(-problem.vector_rows // panel.block_rows) >= multiprocessors
    if not (possible and small and many):
        return gather
    costs = panel_cost(panel, multiprocessors, problem), gather_cost(gather, multiprocessors, problem)
    return panel if costs[0] < costs[1] else gather
