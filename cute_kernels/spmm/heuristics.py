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
from cute_kernels.spmm.gather import GatherConfig, long_groups
from cute_kernels.spmm.panel import PanelConfig


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

    ``launch + waves * (warp + groups * step) + tail + epilogue``: each warp multiplies the groups of one vector row.
    The tail is the longest vector row. The constants are those of ``machine.gather``.
    """
    model = machine.gather
    tiles = -(-problem.n // config.tile_n) * problem.batch
    registers = 80 if config.tile_n_bytes == 128 else 64
    blocks = min(SHARED_BYTES // (config.smem_bytes + 1024), 65536 // (registers * config.threads))
    resident = min(blocks * config.warps, 64) * machine.num_sms
    full = problem.vector_rows * tiles * config.split_k_warps / resident
    mean = problem.vectors / max(problem.vector_rows, 1)
    groups = mean / (config.mma_k * config.split_k_warps) + 0.5
    # Vector rows longer than in a uniform pattern extend the tail. All warps of a CTA share long ones.
    longest = _longest(mean, problem.longest) / config.mma_k
    is_long = config.shares_long_rows and longest > long_groups(problem.vectors // config.mma_k, problem.vector_rows)
    longest = longest / (config.warps if is_long else config.split_k_warps) + 0.5
    crowd = model.crowd * max(config.tile_n_bytes, 64) / 64 * min(1.0, full) * resident / machine.num_sms / 32
    products = config.digits[0] * config.digits[1] * max(config.vector_length / 8, 1.0)
    products *= config.tile_n / config.tile_n_bytes
    step = model.group + crowd * max(1.0, 0.5 + 0.5 * products)
    team = model.team * (config.split_k_warps - 1) / 4 * config.tile_n / 64
    warps = max(1.0, full) * (model.warp + groups * step + team) + (longest - groups) * step
    return model.launch + warps + model.result * problem.vector_rows * 8 * problem.n


SpmmKernel = GatherConfig | PanelConfig


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
        A is multiplied once. The panel kernel is excluded: packing A for it takes longer than the product.
    transposes : bool, default False
        C^T is wanted. The config is one that writes it, unless a launch more is faster.

    Returns
    -------
    GatherConfig or PanelConfig

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
    found = [
        each for each in candidates(kind, machine, problem, atom) if not (single_use and isinstance(each, PanelConfig))
    ]
    if transposes:
        found = _transposing(found, problem.n)
    costs = {config: spmm_cost(config, machine, problem) for config in found}
    return min(costs, key=lambda config: costs[config])


def candidates(kind: ProblemTypes, machine: Machine, problem: Problem, atom: str | None = None) -> list[SpmmKernel]:
    """Return the configs whose predicted times :func:`choose_spmm` compares.

    Parameters
    ----------
    kind, machine, problem, atom
        As for :func:`choose_spmm`, with its errors.

    Returns
    -------
    list of GatherConfig and PanelConfig
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
    return [
        _with_a_stages(replace(each, tile_n_bytes=size))
        if isinstance(each, PanelConfig)
        else replace(each, tile_n_bytes=size)
        for each in found
        if each.tile_n_bytes == 64
    ]


def _transposing(found: list[SpmmKernel], columns: int) -> list[SpmmKernel]:
    """Return the configs among which one writes the transpose of `columns` columns, or is followed by a launch more.

    Stores of 16 bytes cost 3 us of 19 for 512 columns, and 50 of 100 for 4,096: of many columns, only pairs of vector
    rows are written transposed. 11 warps of 4 vector rows then read less of B than 15 of 2.
    """
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
    return gather_cost(config, machine, problem)


def _gathers(base: GatherConfig) -> list[SpmmKernel]:
    """Return gather configs with one or several warps per vector row, and wide N tiles if the registers allow them."""
    found = [base, replace(base, split_k_warps=4), replace(base, split_k_warps=8, warps=8, stages=2)]
    if not base.int64_accum and base.vector_length * base.digits[0] * base.digits[1] <= 16:
        large = replace(base, tile_n_bytes=128, stages=3)
        found += [large, replace(large, split_k_warps=2), replace(large, split_k_warps=4, stages=2)]
    return [config for config in found if config.fits]


def reason(config: SpmmKernel, vector_rows: int, vectors: int, longest: int, single_use: bool = False) -> str:
    """Return one sentence on why :func:`choose_spmm` selects this kernel.

    Parameters
    ----------
    config : GatherConfig or PanelConfig
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
    config : GatherConfig or PanelConfig
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
    return (PanelConfig if name.startswith(PanelConfig.STEM) else GatherConfig).from_name(name)
