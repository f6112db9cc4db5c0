"""Which SDDMM kernel runs a product: a pure choice from its numbers."""

from __future__ import annotations

from dataclasses import replace

from cute_kernels.dtypes import element_bits
from cute_kernels.layout.choice import _atom
from cute_kernels.machine import PANEL_ARCHES, SHARED_BYTES, Kind, Machine, outgrows
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.sddmm.panel import SddmmPanelConfig

SddmmKernel = SddmmConfig | SddmmPanelConfig


_sddmm: dict[str, SddmmKernel] = {}


def choose_sddmm(
    kind: Kind,
    machine: Machine,
    *,
    stride: int,
    inner: int,
    atom: str | None = None,
    vector_rows: int = 0,
    vectors: int = 0,
    columns: int = 0,
) -> SddmmKernel:
    """The config for S = X Y^T at a pattern; ``stride`` is the one of the output, ``inner`` the length of the sum.

    ``vector_rows``, ``vectors`` and ``columns`` of the pattern; without them it counts as small.
    """
    name = _atom(atom, kind, machine.arch)
    base = SddmmConfig(name, kind.vector_length, kind.left, kind.right, kind.out, stride)
    narrow = min(kind.left.bits, kind.right.bits) * 2 >= max(kind.left.bits, kind.right.bits)
    short = inner <= base.depth // 2 and narrow
    config: SddmmKernel = replace(base, tile_k_bytes=64 if short else 128, int64_accum=outgrows(base, inner))
    small = vectors + 64 * vector_rows < 2**31  # the panel kernel counts places in 32 bits
    if machine.arch in PANEL_ARCHES and vectors and small:
        panels = _sddmm_panels(
            SddmmPanelConfig(name, kind.vector_length, kind.left, kind.right, kind.out, stride), inner
        )
        costs = {panel: _sddmm_panel_cost(panel, machine, vector_rows, vectors, columns) for panel in panels}
        best = min(costs, key=lambda panel: costs[panel], default=None)
        if best is not None and costs[best] < _sddmm_gather_cost(kind, inner, vectors):
            config = best
    return _sddmm.setdefault(config.name, config)


_FEW_SAMPLING_REGISTERS = 12  # so many leave 24 warps without spills


_MOST_SAMPLING_REGISTERS = 48  # for rows of X and sums that 16 warps leave, without spills


def _sddmm_panels(base: SddmmPanelConfig, inner: int) -> list[SddmmPanelConfig]:
    """Configs that hold all of k and fit the shared memory and the registers."""
    if base.entry.mma_bits != 8 or base.entry.floating:
        return []
    fitting = (replace(base, boxes=boxes, box_bytes=width) for boxes, width in ((1, 64), (1, 128), (2, 128), (4, 128)))
    held = next((config for config in fitting if config.depth >= inner), None)
    if held is None:
        return []
    slots = 32 if held.boxes == 1 and base.stride >= 32 else 16
    # with the registers of few sums and narrow rows there are more warps to hide the waiting
    warps = 24 if held.box_bytes == 64 and held.registers <= _FEW_SAMPLING_REGISTERS else base.warps
    found = [replace(held, tile=tile, slots=slots, warps=warps) for tile in (2048, 1024, 512, 256)]
    return [c for c in found if c.smem_bytes <= SHARED_BYTES and c.registers <= _MOST_SAMPLING_REGISTERS]


def _sddmm_panel_cost(
    config: SddmmPanelConfig, machine: Machine, vector_rows: int, vectors: int, columns: int
) -> float:
    """Nanoseconds, roughly: waves of blocks, each of which fetches its rows and gives every warp vector rows in turn.

    The constants were measured on an H200.
    """
    tiles = -(-columns // config.tile)
    rows = -(-vector_rows // max(1, machine.num_sms // tiles))
    waves = -(-tiles // machine.num_sms)
    fetched = (
        config.boxes * config.box_bytes * config.tile
        + rows * config.vector_length * config.depth * element_bits(config.x) // 8
    )
    units = vectors / vector_rows / tiles / config.slots + 0.55
    # mma operations a box, in those of L8-R8 at V = 8
    products = config.digits[0] * config.digits[1] * max(1, config.vector_length // 8) * 8 / element_bits(config.y)
    unit = 250 + 12 * config.slots * config.boxes * config.box_bytes / 128 * (0.5 + 0.5 * products)
    busy = (0.4 + 0.6 * min(1.0, rows / config.warps)) * config.warps / 16  # what one warp of 16 takes
    return waves * (1600 + 0.0081 * fetched + -(-rows // config.warps) * (270 + units * unit) * busy)


def _sddmm_gather_cost(kind: Kind, inner: int, vectors: int) -> float:
    """Nanoseconds, roughly: the launch, and each vector with its row of Y and its part of the rows of X."""
    moved = inner / 8 * (kind.right.bits + kind.left.bits * kind.vector_length / 32)
    return 2000 + vectors * (0.022 + 0.00016 * moved)


def sddmm_config(name: str) -> SddmmKernel:
    """The SDDMM config of this name, once chosen."""
    return _sddmm[name]
