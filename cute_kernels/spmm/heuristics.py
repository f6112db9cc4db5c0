"""Which SpMM kernel runs a product: a pure choice from its numbers."""

from __future__ import annotations

from dataclasses import replace

from cute_kernels.dtypes import element_bits
from cute_kernels.layout.choice import _atom, _check_warp
from cute_kernels.machine import MMA_COLUMNS, PANEL_ARCHES, SAFE_RUN, SHARED_BYTES, Kind, Machine, Problem, outgrows
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.panel import PanelConfig


def panel_cost(config: PanelConfig, machine: Machine, problem: Problem) -> float:
    """Whole waves of blocks, each of which fills its panels and multiplies its vector rows at the same time."""
    model = machine.panel
    clusters = machine.num_sms // config.cluster
    items = config.items(problem.vector_rows, problem.n, problem.batch)
    waves = -(-items // clusters)
    mean, tiles = problem.vectors / problem.vector_rows, -(-problem.inner // config.tile)
    groups = max(mean / config.mma_k + 0.5, min(tiles / config.tile_window, mean))
    rows = min(config.warps * config.rows_per_warp, problem.vector_rows)
    # mma operations a chunk, in those of L8-R8 at V = 8
    products = config.products * max(1, config.vector_length // 8) * config.columns / config.tile_n_bytes
    share = dict(model.share)[config.warps, config.rows_per_warp]
    window = mean * config.tile * config.tile_window / problem.inner  # columns
    passes = 1.0 + min(model.conflict / window, 1.4)  # of a read, by the columns to choose from
    chunks = config.tile_n_bytes / 16 * max(passes, 0.5 * (passes + products))
    chunks *= (model.narrow if config.tile_n_bytes <= 64 else 1.0) * (model.ahead if config.a_stages else 1.0)
    work = rows * groups * chunks * model.chunk * share
    row = model.half if config.tile_n_bytes == 32 else model.row
    fill = problem.inner * (model.byte * config.tile_n_bytes / config.cluster * items / (waves * clusters) + row)
    fill += tiles * model.flight / (config.stages - config.tile_window)
    rest = model.block + model.result * rows * config.tile_n_bytes
    return model.launch + waves * ((work**2 + fill**2) ** 0.5 + rest)


def gather_cost(config: GatherConfig, machine: Machine, problem: Problem) -> float:
    """Waves of warps, each of which fetches and multiplies the groups of one vector row in turn."""
    model = machine.gather
    strips = -(-problem.n // config.columns) * problem.batch
    registers = 80 if config.tile_n_bytes == 128 else 64
    blocks = min(SHARED_BYTES // (config.smem_bytes + 1024), 65536 // (registers * config.threads))
    resident = min(blocks * config.warps, 64) * machine.num_sms
    full = problem.vector_rows * strips * config.split_k_warps / resident
    mean = problem.vectors / max(problem.vector_rows, 1)
    groups = mean / (config.mma_k * config.split_k_warps) + 0.5
    # A row far longer than the others, which a uniform pattern does not have: its warp is the last one to end.
    longest = max(mean, problem.longest - 3 * mean**0.5) / (config.mma_k * config.split_k_warps) + 0.5
    crowd = model.crowd * max(config.tile_n_bytes, 64) / 64 * min(1.0, full) * resident / machine.num_sms / 32
    products = config.digits[0] * config.digits[1] * max(config.vector_length / 8, 1.0)
    products *= config.columns / config.tile_n_bytes
    step = model.group + crowd * max(1.0, 0.5 + 0.5 * products)
    team = model.team * (config.split_k_warps - 1) / 4 * config.columns / 64
    warps = max(1.0, full) * (model.warp + groups * step + team) + (longest - groups) * step
    return model.launch + warps + model.result * problem.vector_rows * 8 * problem.n


SpmmKernel = GatherConfig | PanelConfig


_spmm: dict[str, SpmmKernel] = {}


def choose_spmm(
    kind: Kind, machine: Machine, problem: Problem, atom: str | None = None, single_use: bool = False
) -> SpmmKernel:
    """The config for C = A B; ``single_use``: A is used once."""
    found = [
        each for each in candidates(kind, machine, problem, atom) if not (single_use and isinstance(each, PanelConfig))
    ]
    costs = {config: spmm_cost(config, machine, problem) for config in found}
    return register_config(min(costs, key=lambda config: costs[config]))


def candidates(kind: Kind, machine: Machine, problem: Problem, atom: str | None = None) -> list[SpmmKernel]:
    """The configs that :func:`choose_spmm` weighs against each other."""
    name = _atom(atom, kind, machine.arch)
    operands = (name, kind.vector_length, kind.left, kind.right, kind.out)
    gather = GatherConfig(*operands)
    wide = outgrows(gather, problem.longest)
    found: list[SpmmKernel] = _gathers(replace(gather, int64_accum=wide))
    if machine.arch in PANEL_ARCHES and not wide and problem.vectors >= 16 * max(problem.vector_rows, 1):
        found += _panels(PanelConfig(*operands), machine.arch)
    row = problem.n * element_bits(kind.right) // 8
    if row > _NARROW[-1] or wide:
        return found
    # Few columns: rows of B that are as long as these are, where a group's pieces of 16 bytes still fill a warp's loads
    # and the instruction's rows.
    least = 32 if kind.right.bits > 8 or gather.mma_k < 32 else 16
    size = next(size for size in _NARROW if size >= max(row, least))
    return [
        _ahead(replace(each, tile_n_bytes=size)) if isinstance(each, PanelConfig) else replace(each, tile_n_bytes=size)
        for each in found
        if each.tile_n_bytes == 64
    ]


def _ahead(config: PanelConfig) -> PanelConfig:
    """With as many records of A on their way as there is room for."""
    tried = (replace(config, a_stages=records) for records in _RECORDS)
    return next((each for each in tried if each.smem_bytes <= SHARED_BYTES), config)


def _waits(config: PanelConfig) -> bool:
    """Whether two records ahead are too few, as measured: their way from memory is longer than what hides it.

    It is where few warps multiply, and where a record is of two planes, which are many bytes.
    """
    few = config.warps <= 8 and config.b.bits >= 8
    return few or config.digits[0] > 1 or (config.tile_n_bytes == 64 and config.warps <= 11)


_NARROW = (16, 32, 64)  # bytes of a row of B, of few columns


_RECORDS = (8, 6, 4, 3)  # of A, on their way to a warp


# Warps and vector rows a warp; and the registers for sums that so many warps leave, without spills.
_PANEL_SHAPES = ((16, 1), (15, 2), (14, 2), (13, 2), (11, 3), (11, 2), (8, 2), (11, 1), (8, 1), (7, 1))


_MOST_SUMS = {16: 48, 15: 64, 14: 64, 13: 64, 11: 96, 8: 128, 7: 160}


def _panels(base: PanelConfig, arch: str) -> list[PanelConfig]:
    """Configs whose sums fit the registers."""
    narrow = replace(base, tile_n_bytes=64, tile=512, stages=6, tile_window=3, cluster=2)
    shapes = [
        replace(c, warps=w, rows_per_warp=r)
        for c in (base, replace(base, tile_window=4), narrow)
        for w, r in _PANEL_SHAPES
    ]
    # Wide results, deep groups, stacked digits of many columns, floats and what other compilers make of it all take
    # registers; from 13 warps on there are too few for broad strips of floats.
    floating = base.entry.floating
    crowded = floating or base.out == "int64" or base.mma_k > 32 or (base.has_fused_digits and base.b.bits == 4)
    fewer = crowded or arch != "sm_90a"
    most = {warps: most // 2 if fewer and warps > 7 else most for warps, most in _MOST_SUMS.items()}
    if not base.out.startswith(("float", "bfloat")):  # the sums' weights are put together in registers of their own
        most[16] = min(most[16], 32)
    if base.b.bits > 8 or base.vector_length > MMA_COLUMNS or (base.digits[0] > 1 and base.b.bits == 4):
        most[8] = min(most[8], 64)
    fitting = [
        config
        for config in shapes
        if config.sums <= most[config.warps] and not (floating and config.tile_n_bytes == 128 and config.warps > 11)
    ]
    return [_ahead(config) if _waits(config) else config for config in fitting or [replace(narrow, warps=7)]]


def spmm_cost(config: SpmmKernel, machine: Machine, problem: Problem) -> float:
    """Predicted nanoseconds of a launch."""
    if isinstance(config, PanelConfig):
        return panel_cost(config, machine, problem)
    return gather_cost(config, machine, problem)


def _gathers(base: GatherConfig) -> list[SpmmKernel]:
    """Narrow and wide strips, by one warp a vector row or several; narrow ones alone where sums fill the registers."""
    found = [base, replace(base, split_k_warps=4), replace(base, split_k_warps=8, warps=8, stages=2)]
    if not base.int64_accum and base.vector_length * base.digits[0] * base.digits[1] <= 16:
        broad = replace(base, tile_n_bytes=128, stages=3)
        found += [broad, replace(broad, split_k_warps=2), replace(broad, split_k_warps=4, stages=2)]
    return [config for config in found if config.fits]


def reason(config: SpmmKernel, vector_rows: int, vectors: int, longest: int, single_use: bool = False) -> str:
    """Why :func:`choose_spmm` takes this kernel, in a sentence."""
    mean = vectors / max(vector_rows, 1)
    if isinstance(config, PanelConfig):
        return (
            f"panel: {vector_rows} vector rows of {mean:.0f} vectors on average share tiles of B in shared memory; "
            f"{config.warps} warps of {config.rows_per_warp} vector rows make the cheapest whole waves of blocks"
        )
    if config.int64_accum:
        return f"gather, wide: a vector row of {longest} vectors can outgrow sums of 32 bits"
    split = f"; {config.split_k_warps} warps share a vector row, for few rows" if config.split_k_warps > 1 else ""
    if single_use:
        return f"gather: the matrix is used once, and its copy for panels of B would take longer than the product{split}"
    return (
        f"gather: {vector_rows} vector rows of {mean:.0f} vectors on average are too few to share a panel of B{split}"
    )


def register_config(config: SpmmKernel) -> SpmmKernel:
    """``config``, from now on found by its name."""
    return _spmm.setdefault(config.name, config)


def check_spmm(config: SpmmKernel, kind: Kind, longest: int) -> None:
    """Raise ``ValueError`` unless ``config`` is for operands of this kind and this longest vector row."""
    made_for = Kind(config.vector_length, config.a, config.b, config.out)
    if made_for != kind:
        raise ValueError(f"config must be for {kind}, got one for {made_for}")
    _check_warp(config.atom)
    if outgrows(config, longest) and not getattr(config, "int64_accum", False):
        raise ValueError(
            f"config must have int64_accum=True for a vector row of {longest} > {SAFE_RUN} vectors, got {config.name}"
        )
    register_config(config)


def spmm_config(name: str) -> SpmmKernel:
    """The SpMM config of this name, once chosen."""
    return _spmm[name]
