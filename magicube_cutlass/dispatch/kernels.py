"""Which kernel runs a product: one pure choice from the problem's numbers, and the configs by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product

from cute_kernels import atoms
from cute_kernels.dtypes import Integer, element_bits
from cute_kernels.jit.warmup import Source
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.sddmm.panel import SddmmPanelConfig
from cute_kernels.spmm.config import SAFE_RUN
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.panel import PanelConfig
from magicube_cutlass.dispatch.cost_model import (
    MMA_COLUMNS,
    SHARED_BYTES,
    Kind,
    Machine,
    Problem,
    gather_cost,
    panel_cost,
)
from magicube_cutlass.quantization.precision import SDDMM_PAIRS, SPMM_PAIRS, check_pair

SpmmKernel = GatherConfig | PanelConfig
SddmmKernel = SddmmConfig | SddmmPanelConfig
_PANEL_ARCHES = ("sm_90a", "sm_100a", "sm_103a")  # tensor copies and 227 KiB of shared memory

_spmm: dict[str, SpmmKernel] = {}
_sddmm: dict[str, SddmmKernel] = {}


def default_atom(kind: Kind, arch: str) -> str:
    """The instruction for these operands: 4-bit integers where both are and the chip has it, 16-bit floats for floats.

    Smaller floats become bfloat16 beside that, and float16 otherwise, exactly.  Raises ``TypeError`` for operands that
    no instruction takes together.
    """
    check_pair(kind.left, kind.right)
    if not isinstance(kind.left, Integer):
        return "bf16_m16n8k32" if "bfloat16" in (kind.left.name, kind.right.name) else "f16_m16n8k32"
    if (kind.left.bits, kind.right.bits) != (4, 4):
        return "s8_m16n8k32"
    native = "s4_m16n8k64"
    return native if atoms.runs_on(atoms.atom(native), arch) else "int4_as_int8_m16n8k32"


def _atom(wish: str | None, kind: Kind, arch: str) -> str:
    """``wish``, after checking that the kernels can use it on this architecture, or the default."""
    if wish is None:
        return default_atom(kind, arch)
    _check_warp(wish)
    if not atoms.runs_on(atoms.atom(wish), arch):
        natives = ", ".join(f"sm_{each}" for each in atoms.atom(wish).archs)
        raise ValueError(f"atom must be an instruction of {arch}, got {wish} of {natives}")
    for number in (kind.left, kind.right):
        atoms.operand_of(atoms.atom(wish), number)  # raises
    return wish


def _check_warp(atom: str) -> None:
    threads = atoms.atom(atom).threads
    if threads != 32:
        raise ValueError(f"atom must be an instruction of a warp, 32 threads, got {atom} of {threads}: "
                         "each warp gathers rows of its own")  # fmt: skip


def choose_spmm(
    kind: Kind, machine: Machine, problem: Problem, atom: str | None = None, once: bool = False
) -> SpmmKernel:
    """The config for C = A B; ``atom`` is a wish for an instruction, ``once``: A is used once, and its copy counts."""
    found = [each for each in candidates(kind, machine, problem, atom) if not (once and isinstance(each, PanelConfig))]
    costs = {config: spmm_cost(config, machine, problem) for config in found}
    return registered(min(costs, key=lambda config: costs[config]))


def candidates(kind: Kind, machine: Machine, problem: Problem, atom: str | None = None) -> list[SpmmKernel]:
    """The configs that :func:`choose_spmm` weighs against each other."""
    name = _atom(atom, kind, machine.arch)
    operands = (name, kind.vector_length, kind.left, kind.right, kind.out)
    gather = GatherConfig(*operands)
    wide = _outgrows(gather, problem.longest)
    found: list[SpmmKernel] = _gathers(replace(gather, wide=wide))
    if machine.arch in _PANEL_ARCHES and not wide and problem.vectors >= 16 * max(problem.vector_rows, 1):
        found += _panels(PanelConfig(*operands), machine.arch)
    row = problem.n * element_bits(kind.right) // 8
    if row > _NARROW[-1] or wide:
        return found
    # Few columns: rows of B that are as long as these are, where a group's pieces of 16 bytes still fill a warp's loads
    # and the instruction's rows.
    least = 32 if kind.right.bits > 8 or gather.group < 32 else 16
    size = next(size for size in _NARROW if size >= max(row, least))
    return [
        _ahead(replace(each, row_bytes=size)) if isinstance(each, PanelConfig) else replace(each, row_bytes=size)
        for each in found
        if each.row_bytes == 64
    ]


def _ahead(config: PanelConfig) -> PanelConfig:
    """With as many records of A on their way as there is room for."""
    tried = (replace(config, records=records) for records in _RECORDS)
    return next((each for each in tried if each.smem_bytes <= SHARED_BYTES), config)


def _waits(config: PanelConfig) -> bool:
    """Whether two records ahead are too few, as measured: their way from memory is longer than what hides it.

    It is where few warps multiply, and where a record is of two planes, which are many bytes.
    """
    few = config.warps <= 8 and config.b.bits >= 8
    return few or config.digits[0] > 1 or (config.row_bytes == 64 and config.warps <= 11)


def _outgrows(config: SpmmKernel | SddmmKernel, longest: int) -> bool:
    """Whether sums of so many products of bytes can outgrow int32 on the way to the result."""
    return longest > SAFE_RUN and not config.entry.floating and (config.out != "int32" or config.shifted)


_NARROW = (16, 32, 64)  # bytes of a row of B, of few columns
_RECORDS = (8, 6, 4, 3)  # of A, on their way to a warp
# Warps and vector rows a warp; and the registers for sums that so many warps leave, without spills.
_PANEL_SHAPES = ((16, 1), (15, 2), (14, 2), (13, 2), (11, 3), (11, 2), (8, 2), (11, 1), (8, 1), (7, 1))
_MOST_SUMS = {16: 48, 15: 64, 14: 64, 13: 64, 11: 96, 8: 128, 7: 160}


def _panels(base: PanelConfig, arch: str) -> list[PanelConfig]:
    """Configs whose sums fit the registers."""
    narrow = replace(base, row_bytes=64, tile=512, stages=6, window=3, cluster=2)
    shapes = [replace(c, warps=w, rows=r) for c in (base, replace(base, window=4), narrow) for w, r in _PANEL_SHAPES]
    # Wide results, deep groups, stacked digits of many columns, floats and what other compilers make of it all take
    # registers; from 13 warps on there are too few for broad strips of floats.
    floating = base.entry.floating
    crowded = floating or base.out == "int64" or base.group > 32 or (base.stacked and base.b.bits == 4)
    fewer = crowded or arch != "sm_90a"
    most = {warps: most // 2 if fewer and warps > 7 else most for warps, most in _MOST_SUMS.items()}
    if not base.out.startswith(("float", "bfloat")):  # the sums' weights are put together in registers of their own
        most[16] = min(most[16], 32)
    if base.b.bits > 8 or base.vector_length > MMA_COLUMNS or (base.digits[0] > 1 and base.b.bits == 4):
        most[8] = min(most[8], 64)
    fitting = [
        config
        for config in shapes
        if config.sums <= most[config.warps] and not (floating and config.row_bytes == 128 and config.warps > 11)
    ]
    return [_ahead(config) if _waits(config) else config for config in fitting or [replace(narrow, warps=7)]]


def spmm_cost(config: SpmmKernel, machine: Machine, problem: Problem) -> float:
    """Predicted nanoseconds of a launch."""
    if isinstance(config, PanelConfig):
        return panel_cost(config, machine, problem)
    return gather_cost(config, machine, problem)


def _gathers(base: GatherConfig) -> list[SpmmKernel]:
    """Narrow and wide strips, by one warp a vector row or several; narrow ones alone where sums fill the registers."""
    found = [base, replace(base, row_warps=4), replace(base, row_warps=8, warps=8, stages=2)]
    if not base.wide and base.vector_length * base.digits[0] * base.digits[1] <= 16:
        broad = replace(base, row_bytes=128, stages=3)
        found += [broad, replace(broad, row_warps=2), replace(broad, row_warps=4, stages=2)]
    return [config for config in found if config.fits]


def reason(config: SpmmKernel, vector_rows: int, vectors: int, longest: int, once: bool = False) -> str:
    """Why :func:`choose_spmm` takes this kernel, in a sentence."""
    mean = vectors / max(vector_rows, 1)
    if isinstance(config, PanelConfig):
        return (
            f"panel: {vector_rows} vector rows of {mean:.0f} vectors on average share tiles of B in shared memory; "
            f"{config.warps} warps of {config.rows} vector rows make the cheapest whole waves of blocks"
        )
    if config.wide:
        return f"gather, wide: a vector row of {longest} vectors can outgrow sums of 32 bits"
    split = f"; {config.row_warps} warps share a vector row, for few rows" if config.row_warps > 1 else ""
    if once:
        return (
            f"gather: the matrix is used once, and its copy for panels of B would take longer than the product{split}"
        )
    return (
        f"gather: {vector_rows} vector rows of {mean:.0f} vectors on average are too few to share a panel of B{split}"
    )


def registered(config: SpmmKernel) -> SpmmKernel:
    """``config``, from now on found by its name."""
    return _spmm.setdefault(config.name, config)


def check_spmm(config: SpmmKernel, kind: Kind, longest: int) -> None:
    """Raise ``ValueError`` unless ``config`` is for operands of this kind and this longest vector row."""
    made_for = Kind(config.vector_length, config.a, config.b, config.out)
    if made_for != kind:
        raise ValueError(f"config must be for {kind}, got one for {made_for}")
    _check_warp(config.atom)
    if _outgrows(config, longest) and not getattr(config, "wide", False):
        raise ValueError(f"config must be wide for a vector row of {longest} > {SAFE_RUN} vectors, got {config.name}")
    registered(config)


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
    config: SddmmKernel = replace(base, row_bytes=64 if short else 128, wide=_outgrows(base, inner))
    small = vectors + 64 * vector_rows < 2**31  # the panel kernel counts places in 32 bits
    if machine.arch in _PANEL_ARCHES and vectors and small:
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
    rows = -(-vector_rows // max(1, machine.multiprocessors // tiles))
    waves = -(-tiles // machine.multiprocessors)
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


def spmm_config(name: str) -> SpmmKernel:
    """The SpMM config of this name, once chosen."""
    return _spmm[name]


def sddmm_config(name: str) -> SddmmKernel:
    """The SDDMM config of this name, once chosen."""
    return _sddmm[name]


def default_configs(all: bool = False, arch: str = "sm_90a") -> Iterator[SpmmKernel | SddmmKernel]:
    """Kernels of the products: V = 8 with float16 and int32 output; with ``all`` every V, sign and output."""
    here = Machine(arch, 132)
    lengths = (1, 2, 4, 8, 16, 32) if all else (8,)
    outs = ("float16", "int32", "bfloat16", "float32", "int64") if all else ("float16", "int32")
    signs = tuple(product((True, False), repeat=2)) if all else ((True, True),)
    for v, out, (left, right) in product(lengths, outs, signs):
        for a, b in SPMM_PAIRS if v >= MMA_COLUMNS else ():  # shorter vectors are merged
            for rows in (32, 512):
                kind = Kind(v, Integer(a, left), Integer(b, right), out)
                yield choose_spmm(kind, here, Problem(rows, 4096, 410 * rows, 512, 512))
        for x, y in SDDMM_PAIRS:
            for rows in (0, 512):
                kind, vectors = Kind(v, Integer(x, left), Integer(y, right), out), 410 * rows
                yield choose_sddmm(kind, here, stride=32, inner=256, vector_rows=rows, vectors=vectors, columns=4096)


def warm_configs(all: bool, arch: str) -> Iterator[Source]:
    """What ``magicube warmup`` compiles: the products' kernels and all that have a list of their own."""
    from cute_kernels.attention import fused as attention
    from cute_kernels.attention import quantize_qkv as attention_operands
    from cute_kernels.attention import sparse_softmax as softmax
    from cute_kernels.convert import dense_to_sparse as compress
    from cute_kernels.convert import quantize
    from cute_kernels.estimate import probes, statistics
    from cute_kernels.layout import column_order as ordering

    others = (quantize, compress, ordering, softmax, probes, statistics)
    attentions = (each.default_configs(arch) for each in (attention, attention_operands))
    return chain(default_configs(all, arch), *attentions, *(each.default_configs() for each in others))


def named_configs() -> dict[str, SpmmKernel | SddmmKernel]:
    """The default configs by name."""
    return {config.name: config for config in default_configs()}
