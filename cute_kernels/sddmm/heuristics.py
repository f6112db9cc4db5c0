"""Selection of the SDDMM kernel config by predicted time; needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from cute_kernels.atoms import resolve_atom
from cute_kernels.dtypes import element_bits
from cute_kernels.machine import PANEL_ARCHES, SHARED_BYTES, Machine, ProblemTypes, outgrows
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.sddmm.panel import SddmmPanelConfig

SddmmKernel = SddmmConfig | SddmmPanelConfig


def choose_sddmm(
    kind: ProblemTypes,
    machine: Machine,
    *,
    stride: int,
    inner: int,
    atom: str | None = None,
    vector_rows: int = 0,
    vectors: int = 0,
    columns: int = 0,
) -> SddmmKernel:
    """Return the kernel config with the least predicted time for S = X Y^T at a pattern.

    Parameters
    ----------
    kind : ProblemTypes
        Element types, vector length and output dtype.
    machine : Machine
        GPU.
    stride : int
        SR-BCRS stride of the output, in vectors.
    inner : int
        K, columns of X and Y.
    atom : str, optional
        Name of the MMA atom. Default: selected by element types and architecture.
    vector_rows, vectors, columns : int, default 0
        Sizes of the pattern. 0 vectors: the gather kernel is selected.

    Returns
    -------
    SddmmConfig or SddmmPanelConfig

    Raises
    ------
    TypeError
        If no atom multiplies the element types.
    ValueError
        If `atom` is not an atom of the architecture.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> kind, h200 = ProblemTypes(8, Integer(8, True), Integer(8, True), "float16"), Machine("sm_90a", 132)
    >>> large = {"vector_rows": 512, "vectors": 512 * 410, "columns": 4096}
    >>> type(choose_sddmm(kind, h200, stride=32, inner=256, **large)).__name__
    'SddmmPanelConfig'
    """
    name = resolve_atom(atom, kind, machine.arch)
    base = SddmmConfig(name, kind.vector_length, kind.lhs, kind.rhs, kind.out, stride)
    narrow = min(kind.lhs.bits, kind.rhs.bits) * 2 >= max(kind.lhs.bits, kind.rhs.bits)
    short = inner <= base.depth // 2 and narrow
    config: SddmmKernel = replace(base, tile_k_bytes=64 if short else 128, int64_accum=outgrows(base, inner))
    small = vectors + 64 * vector_rows < 2**31  # the panel kernel has 32-bit slots
    if machine.arch in PANEL_ARCHES and vectors and small:
        panels = _sddmm_panels(SddmmPanelConfig(name, kind.vector_length, kind.lhs, kind.rhs, kind.out, stride), inner)
        costs = {panel: _sddmm_panel_cost(panel, machine, vector_rows, vectors, columns) for panel in panels}
        best = min(costs, key=lambda panel: costs[panel], default=None)
        if best is not None and costs[best] < _sddmm_gather_cost(kind, inner, vectors):
            config = best
    return config


# `SddmmPanelConfig.registers` without spills.
_MAX_REGISTERS_24_WARPS = 12
_MAX_REGISTERS_16_WARPS = 48


def _sddmm_panels(base: SddmmPanelConfig, inner: int) -> list[SddmmPanelConfig]:
    """Return the panel configs that hold all of K and fit the shared memory and the registers."""
    if base.entry.mma_bits != 8 or base.entry.floating:
        return []
    fitting = (replace(base, boxes=boxes, box_bytes=width) for boxes, width in ((1, 64), (1, 128), (2, 128), (4, 128)))
    held = next((config for config in fitting if config.depth >= inner), None)
    if held is None:
        return []
    slots = 32 if held.boxes == 1 and base.stride >= 32 else 16
    # With few registers per lane, more warps hide more latency.
    warps = 24 if held.box_bytes == 64 and held.registers <= _MAX_REGISTERS_24_WARPS else base.warps
    found = [replace(held, tile=tile, slots=slots, warps=warps) for tile in (2048, 1024, 512, 256)]
    return [c for c in found if c.smem_bytes <= SHARED_BYTES and c.registers <= _MAX_REGISTERS_16_WARPS]


def _sddmm_panel_cost(
    config: SddmmPanelConfig, machine: Machine, vector_rows: int, vectors: int, columns: int
) -> float:
    """Predict the time of the panel kernel in nanoseconds, with constants measured on an H200."""
    tiles = -(-columns // config.tile)
    rows = -(-vector_rows // max(1, machine.num_sms // tiles))
    waves = -(-tiles // machine.num_sms)
    fetched = (
        config.boxes * config.box_bytes * config.tile
        + rows * config.vector_length * config.depth * element_bits(config.x) // 8
    )
    units = vectors / vector_rows / tiles / config.slots + 0.55
    # MMAs per box, relative to L8-R8 at V = 8
    products = config.digits[0] * config.digits[1] * max(1, config.vector_length // 8) * 8 / element_bits(config.y)
    unit = 250 + 12 * config.slots * config.boxes * config.box_bytes / 128 * (0.5 + 0.5 * products)
    busy = (0.4 + 0.6 * min(1.0, rows / config.warps)) * config.warps / 16  # fraction of 16 warps that have work
    return waves * (1600 + 0.0081 * fetched + -(-rows // config.warps) * (270 + units * unit) * busy)


def _sddmm_gather_cost(kind: ProblemTypes, inner: int, vectors: int) -> float:
    """Predict the time of the gather kernel in nanoseconds: launch, then a row of Y and a share of X per vector."""
    moved = inner / 8 * (kind.rhs.bits + kind.lhs.bits * kind.vector_length / 32)
    return 2000 + vectors * (0.022 + 0.00016 * moved)


@lru_cache(maxsize=1024)
def sddmm_config(name: str) -> SddmmKernel:
    """Return the config of this name.

    Raises
    ------
    ValueError
        If there is none.

    Examples
    --------
    >>> sddmm_config("sddmm-s8_m16n8k32-v8-s8xs8-float16-k32b128s3w4").warps
    4
    """
    return (SddmmPanelConfig if name.startswith(SddmmPanelConfig.STEM) else SddmmConfig).from_name(name)
