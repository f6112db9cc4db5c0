"""Selection of the SpMM kernel config by predicted time; needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from cute_kernels.atoms import check_warp_atom, resolve_atom
from cute_kernels.dtypes import element_bits
from cute_kernels.machine import (
    MMA_COLUMNS,
    PANEL_ARCHES,
    SAFE_RUN,
    SHARED_BYTES,
    Machine,
    Problem,
    ProblemTypes,
    outgrows,
)
from cute_kernels.spmm.config import OUT_BYTES
from cute_kernels.spmm.cost import gather_cost, panel_cost, resident_cost, transpose_cost
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.panel import PanelConfig
from cute_kernels.spmm.resident import ResidentConfig

SpmmKernel = GatherConfig | PanelConfig | ResidentConfig


def choose_spmm(
    kind: ProblemTypes,
    machine: Machine,
    problem: Problem,
    atom: str | None = None,
    single_use: bool = False,
    transposes: bool = False,
) -> SpmmKernel:
    """Return the kernel config with the least predicted time for C = A B.

    Parameters
    ----------
    kind : ProblemTypes
        Element types, vector length and output dtype.
    machine : Machine
        GPU and its cost models.
    problem : Problem
        Sizes of the product.
    atom : str, optional
        Name of the MMA atom. Default: selected by element types and architecture.
    single_use : bool, default False
        A is multiplied once. Only the gather kernel is tried: packing A for another takes longer than the product.
    transposes : bool, default False
        C^T is wanted. The config is one that writes it, unless a launch more is faster.

    Returns
    -------
    GatherConfig, PanelConfig or ResidentConfig

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
    >>> large, small = Problem(512, 4096, 512 * 410, 460, 512), Problem(32, 2304, 32 * 230, 280, 512)
    >>> type(choose_spmm(kind, h200, large)).__name__, type(choose_spmm(kind, h200, small)).__name__
    ('PanelConfig', 'GatherConfig')
    """
    found = candidates(kind, machine, problem, atom)
    if single_use:
        found = [each for each in found if isinstance(each, GatherConfig)]
    after = 0.0
    if transposes:
        found = _transposing(found, problem.n)
        results = kind.vector_length * problem.vector_rows * problem.n * problem.batch
        after = transpose_cost(results * OUT_BYTES[kind.out])
    costs = {each: spmm_cost(each, machine, problem) + (0.0 if each.transposed else after) for each in found}
    return min(costs, key=lambda config: costs[config])


def candidates(kind: ProblemTypes, machine: Machine, problem: Problem, atom: str | None = None) -> list[SpmmKernel]:
    """Return the configs whose predicted times :func:`choose_spmm` compares.

    Parameters
    ----------
    kind, machine, problem, atom
        As for :func:`choose_spmm`, with its errors.

    Returns
    -------
    list of GatherConfig, PanelConfig and ResidentConfig
    """
    name = resolve_atom(atom, kind, machine.arch)
    operands = (name, kind.vector_length, kind.lhs, kind.rhs, kind.out)
    gather = GatherConfig(*operands)
    int64_accum = outgrows(gather, problem.longest)
    found: list[SpmmKernel] = _gathers(replace(gather, int64_accum=int64_accum))
    if (
        machine.arch in PANEL_ARCHES
        and not int64_accum
        and problem.vectors >= PANEL_VECTORS * max(problem.vector_rows, 1)
    ):
        found += _panels(PanelConfig(*operands), machine.arch)
    size = None if int64_accum else _small_tile(gather, problem.n)
    if size is None:
        return found
    narrow: list[SpmmKernel] = [
        _with_a_stages(replace(each, tile_n_bytes=size))
        if isinstance(each, PanelConfig)
        else replace(each, tile_n_bytes=size)
        for each in found
        if each.tile_n_bytes == 64
    ]
    if machine.arch in PANEL_ARCHES and size <= RESIDENT_BYTES:
        narrow += _residents(ResidentConfig(*operands, tile_n_bytes=size), machine, problem)
    return narrow


def _residents(base: ResidentConfig, machine: Machine, problem: Problem) -> list[ResidentConfig]:
    """Return configs for one CTA and for a pair of CTAs per block of vector rows, where their rows of B fit."""
    found: list[ResidentConfig] = []
    for cluster in RESIDENT_CLUSTERS:
        rows = -(-problem.vector_rows // max(1, machine.num_sms // cluster))  # of a cluster, if all run at once
        tile = -(-problem.inner // (8 * cluster)) * 8
        sized = replace(base, tile=tile, block_rows=max(1, min(rows, RESIDENT_ROWS)), cluster=cluster)
        tried = (replace(sized, stages=stages, stage_records=records) for stages, records in RESIDENT_STAGES)
        found += [each for each in tried if each.smem_bytes <= SHARED_BYTES][:1]
    return found


def _transposing(found: list[SpmmKernel], columns: int) -> list[SpmmKernel]:
    """Return the configs among which one writes the transpose of `columns` columns, or is followed by a launch more.

    Stores of 16 bytes cost 3 us of 19 for 512 columns, and 50 of 100 for 4,096: of many columns, only pairs of vector
    rows are written transposed. 11 warps of 4 vector rows then read less of B than 15 of 2.
    """
    found = [each for each in found if not isinstance(each, ResidentConfig)]  # no faster where C^T is written
    if columns <= _MOST_SHORT_STORES:
        short = [each for each in found if not (isinstance(each, PanelConfig) and each.rows_per_warp == 3)]
        return [replace(each, transposed=True) for each in short]
    panels = (replace(each, transposed=True) for each in found if isinstance(each, PanelConfig))
    # 128 sums of 4-bit entries and the two results of a word do not fit 168 registers
    pairs = [each for each in panels if each.pairs and not (each.b.bits < 8 and each.accumulators > 64)]
    wide = [
        replace(each, warps=11, rows_per_warp=4)
        for each in pairs
        if (each.warps, each.rows_per_warp, each.tile_n_bytes) == (15, 2, 128)
    ]
    return [*(each for each in found if isinstance(each, GatherConfig)), *pairs, *wide] if pairs else found


def _small_tile(config: GatherConfig, n: int) -> int | None:
    """Return the bytes of the smallest N tile that holds all columns, None for large N.

    The 16-byte chunks of a group must fill the loads of a warp and the rows of the MMA.
    """
    row, least = n * element_bits(config.b) // 8, 32 if config.b.bits > 8 or config.mma_k < 32 else 16
    return next((size for size in _SMALL_TILES if size >= max(row, least)), None)


def _with_a_stages(config: PanelConfig) -> PanelConfig:
    """Return the config with as many stages of A as fit the shared memory."""
    tried = (replace(config, a_stages=stages) for stages in _A_STAGES)
    return next((each for each in tried if each.smem_bytes <= SHARED_BYTES), config)


def _needs_a_stages(config: PanelConfig) -> bool:
    """Whether two records in registers do not hide the latency of A (measured): few warps, or two digit planes."""
    few = config.warps <= 8 and config.b.bits >= 8
    return few or config.digits[0] > 1 or (config.tile_n_bytes == 64 and config.warps <= 11)


PANEL_VECTORS = 16  # of a vector row on average, from which on the panel kernel is tried
_SMALL_TILES = (16, 32, 64)  # tile_n_bytes for small N
_A_STAGES = (8, 6, 4, 3)
_MOST_SHORT_STORES = 512  # columns
RESIDENT_BYTES = 32  # of a row of B; the panel kernel is faster with wider ones
RESIDENT_CLUSTERS = (1, 2)  # of four, fewer run at once than there are SMs for
RESIDENT_ROWS = 32
RESIDENT_STAGES = ((2, 12), (4, 4), (3, 4))  # of the resident kernel: stages, records of one
# (warps, rows_per_warp)
_PANEL_SHAPES = ((16, 1), (15, 2), (14, 2), (13, 2), (11, 3), (11, 2), (8, 2), (11, 1), (8, 1), (7, 1))
# By warps: accumulator registers per lane without spills.
_MAX_ACCUMULATORS = {16: 48, 15: 64, 14: 64, 13: 64, 11: 96, 8: 128, 7: 160}


def _panels(base: PanelConfig, arch: str) -> list[PanelConfig]:
    """Return the panel configs whose accumulators fit the registers."""
    narrow = replace(base, tile_n_bytes=64, tile=512, stages=6, tile_window=3, cluster=2)
    shapes = [
        replace(c, warps=w, rows_per_warp=r)
        for c in (base, replace(base, tile_window=4), narrow)
        for w, r in _PANEL_SHAPES
    ]
    # These need more registers: int64 results, K above 32 per MMA, fused digits with 4-bit B, floats, and the code that
    # is compiled for other architectures. From 13 warps on, floats do not fit with N tiles of 128 bytes.
    floating = base.entry.floating
    crowded = floating or base.out == "int64" or base.mma_k > 32 or (base.has_fused_digits and base.b.bits == 4)
    fewer = crowded or arch != "sm_90a"
    most = {warps: most // 2 if fewer and warps > 7 else most for warps, most in _MAX_ACCUMULATORS.items()}
    if not base.out.startswith(("float", "bfloat")):  # combining digits needs more registers
        most[16] = min(most[16], 32)
    if base.b.bits > 8 or base.vector_length > MMA_COLUMNS or (base.digits[0] > 1 and base.b.bits == 4):
        most[8] = min(most[8], 64)
    fitting = [
        config
        for config in shapes
        if config.accumulators <= most[config.warps]
        and not (floating and config.tile_n_bytes == 128 and config.warps > 11)
    ]
    return [
        _with_a_stages(config) if _needs_a_stages(config) else config
        for config in fitting or [replace(narrow, warps=7)]
    ]


def spmm_cost(config: SpmmKernel, machine: Machine, problem: Problem) -> float:
    """Predict the time of a launch in nanoseconds.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> config = GatherConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "float16")
    >>> round(spmm_cost(config, Machine("sm_90a", 132), Problem(512, 4096, 512 * 410, 460, 512)) / 1e3)  # us
    19
    """
    if isinstance(config, PanelConfig):
        return panel_cost(config, machine, problem)
    if isinstance(config, ResidentConfig):
        return resident_cost(config, machine, problem)
    return gather_cost(config, machine, problem)


def _gathers(base: GatherConfig) -> list[SpmmKernel]:
    """Return gather configs with one or several warps per vector row, and wide N tiles if the registers allow them.

    Of equal predicted times the first is selected: eight warps, for half the CTAs start sooner.
    """
    eight = replace(base, warps=8)
    found = [eight, base, replace(base, split_k_warps=4), replace(eight, split_k_warps=8, stages=3)]
    if not base.int64_accum and base.vector_length * base.digits[0] * base.digits[1] <= 16:
        found.append(replace(eight, tile_n_bytes=128, stages=2))
    return [config for config in found if config.fits]


def reason(config: SpmmKernel, vector_rows: int, vectors: int, longest: int, single_use: bool = False) -> str:
    """Return one sentence on why :func:`choose_spmm` selects this kernel.

    Parameters
    ----------
    config : GatherConfig, PanelConfig or ResidentConfig
        Selected config.
    vector_rows, vectors, longest : int
        Sizes of A: vector rows, stored vectors, vectors of the longest vector row.
    single_use : bool, default False
        As for :func:`choose_spmm`.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> config = GatherConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "float16")
    >>> reason(config, vector_rows=32, vectors=32 * 230, longest=280)
    'gather: 32 vector rows of 230 vectors on average are too few to share tiles of B'
    """
    mean = vectors / max(vector_rows, 1)
    if isinstance(config, PanelConfig):
        return (
            f"panel: {vector_rows} vector rows of {mean:.0f} vectors on average share tiles of B in shared memory; "
            f"{config.warps} warps of {config.rows_per_warp} vector rows have the least predicted time"
        )
    if isinstance(config, ResidentConfig):
        return (
            f"resident: {config.tile} rows of B stay in the shared memory of a CTA, and its {config.warps} warps share "
            f"the vectors of {config.block_rows} vector rows equally"
        )
    if config.int64_accum:
        return f"gather, int64 accumulators: a vector row of {longest} vectors can overflow int32"
    split = f"; {config.split_k_warps} warps share a vector row (split-K)" if config.split_k_warps > 1 else ""
    if single_use:
        return f"gather: A is used once, and packing it for the panel kernel takes longer than the product{split}"
    return f"gather: {vector_rows} vector rows of {mean:.0f} vectors on average are too few to share tiles of B{split}"


def check_spmm(config: SpmmKernel, kind: ProblemTypes, longest: int) -> None:
    """Check that `config` can multiply operands of this kind.

    Parameters
    ----------
    config : GatherConfig, PanelConfig or ResidentConfig
        Kernel config of the caller.
    kind : ProblemTypes
        Element types, vector length and output dtype of the product.
    longest : int
        Vectors of the longest vector row.

    Raises
    ------
    ValueError
        If `config` is of another kind or atom, or its int32 accumulators could overflow.
    """
    made_for = ProblemTypes(config.vector_length, config.a, config.b, config.out)
    if made_for != kind:
        raise ValueError(f"config must be for {kind}, got {made_for}")
    check_warp_atom(config.atom)
    if outgrows(config, longest) and not getattr(config, "int64_accum", False):
        raise ValueError(
            f"config must have int64_accum=True for a vector row of {longest} > {SAFE_RUN} vectors, got {config.name}"
        )


@lru_cache(maxsize=1024)
def spmm_config(name: str) -> SpmmKernel:
    """Return the config of this name.

    Raises
    ------
    ValueError
        If there is none.

    Examples
    --------
    >>> spmm_config("spmm_gather-s8_m16n8k32-v8-s8xs8-int32-b64s4w4r1").warps
    4
    """
    return next(each for each in _CLASSES if name.startswith(each.STEM) or each is GatherConfig).from_name(name)


_CLASSES: tuple[type[SpmmKernel], ...] = (PanelConfig, ResidentConfig, GatherConfig)
