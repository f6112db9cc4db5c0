"""Selection between the fused attention kernels by predicted time."""

from __future__ import annotations

from typing import NamedTuple

from cute_kernels.attention.config import NO_TILE, AttentionConfig, GatherAttention, PanelAttention

TMA_FLOATS = 4  # a bulk copy moves multiples of 16 bytes (PTX ISA, cp.async.bulk)
MAX_COORDINATE = 2**31 - 1  # of a tensor map
PANEL_ARCHES = ("sm_90a", "sm_100a", "sm_103a")  # TMA and 227 KiB of shared memory
# The accumulators of several longer rows exceed the registers; for shorter rows the gather kernel is as fast.
PANEL_HEAD = 64


class AttentionProblem(NamedTuple):
    """Sizes of an attention call that determine its time."""

    batch: int
    vector_rows: int
    keys: int
    vectors: int  # per mask
    reach: float  # mean distance in keys from the first to the last key of a block of vector rows


def attention_panel_cost(config: PanelAttention, num_sms: int, problem: AttentionProblem) -> float:
    """Predict the time of the panel kernel in microseconds.

    ``waves * (5.1 + 0.0012 reach + 0.057 warps * rows * steps)``: prologue, tile loads and steps of each CTA. The
    constants are measured on an H200.

    Examples
    --------
    >>> problem = AttentionProblem(batch=32, vector_rows=512, keys=4096, vectors=209715, reach=4096.0)
    >>> round(attention_panel_cost(PanelAttention(64), 132, problem))
    92
    """
    mean = problem.vectors / max(problem.vector_rows, 1)  # keys per vector row
    inside = mean / max(problem.reach, 1.0) * config.tile_window * config.tile  # keys per window, the limit of a step
    # A step ends where its window has no more keys, and the last step of a row is half full on average.
    steps = mean / min(config.step, 0.8 * inside) + 0.5 if mean else 0.0
    waves = -(-problem.batch * -(-problem.vector_rows // config.block_rows) // num_sms)
    return waves * (5.1 + 0.0012 * problem.reach + 0.057 * config.warps * config.rows_per_warp * steps)


def attention_gather_cost(config: GatherAttention, num_sms: int, problem: AttentionProblem) -> float:
    """Predict the time of the gather kernel in microseconds.

    ``14 + bytes / (65,000 SMs)``: launch and tail, then rows of K and V at the L2 bandwidth measured on an H200.

    Examples
    --------
    >>> problem = AttentionProblem(batch=32, vector_rows=512, keys=4096, vectors=209715, reach=4096.0)
    >>> round(attention_gather_cost(GatherAttention(64), 132, problem))
    114
    """
    moved = 2 * config.head * problem.batch * problem.vectors  # bytes
    return 14 + moved / (65_000 * num_sms)


def choose(head: int, arch: str, num_sms: int, problem: AttentionProblem) -> AttentionConfig:
    """Return the kernel config with the least predicted time.

    Parameters
    ----------
    head : int
        Head dimension, one of `HEADS`.
    arch : str
        Target architecture, such as ``"sm_90a"``.
    num_sms : int
        SMs of the device.
    problem : AttentionProblem
        Sizes of the call.

    Examples
    --------
    >>> problem = AttentionProblem(batch=32, vector_rows=512, keys=4096, vectors=209715, reach=4096.0)
    >>> type(choose(64, "sm_90a", 132, problem)).__name__, type(choose(64, "sm_80", 108, problem)).__name__
    ('PanelAttention', 'GatherAttention')
    """
    gather, panel = GatherAttention(head), PanelAttention(head)
    possible = arch in PANEL_ARCHES and head == PANEL_HEAD and problem.vectors > 0 and problem.keys % TMA_FLOATS == 0
    small = problem.keys <= NO_TILE * panel.tile and problem.batch * problem.keys <= MAX_COORDINATE
    many = 2 * problem.batch * -(-problem.vector_rows // panel.block_rows) >= num_sms
    if not (possible and small and many):
        return gather
    costs = (
        attention_panel_cost(panel, num_sms, problem),
        attention_gather_cost(gather, num_sms, problem),
    )
    return panel if costs[0] < costs[1] else gather
