"""What a product looks like to a choice, and its nanoseconds by small models of the kernels: pure functions.

The constants were measured on one H200 and, for the CPU engine, on one Xeon with AVX-512.

The models are to say which kernel is the faster one, not how long it takes to the last digit: ``benchmarks/llm.py``
writes down what was predicted and what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cute_kernels.dtypes import Number

if TYPE_CHECKING:
    from cute_kernels.spmm.gather import GatherConfig
    from cute_kernels.spmm.panel import PanelConfig

_LAUNCH = 2000.0  # of a dense kernel or a copy, between kernels of a CUDA graph
_MOVED = 3500.0  # bytes that a copy reads or writes
# Tiles of the dense kernel (rows and columns), a turn of a multiprocessor with one, a product of two bytes in it.
_DENSE_TILES = ((128, 2600.0, 0.135e-3), (64, 1300.0, 0.245e-3))
# One thread of the CPU engine: a group of 4 vectors of 8 rows and 64 columns, a result.
_ENGINE_GROUP, _ENGINE_RESULT = 13.3, 0.95
# The dense product there: a product of two bytes, an integer result, a float one, which several passes make.
_CPU_PRODUCT, _CPU_INTEGER, _CPU_FLOAT = 4e-3, 1.5, 3.0

SHARED_BYTES = 227 * 1024  # of a multiprocessor
MMA_COLUMNS = 8  # of the operand that holds the sparse vectors: shorter ones leave some of them empty


@dataclass(frozen=True)
class Kind:
    """Operands of a product, left one first; vector length; name of the output's dtype."""

    vector_length: int
    left: Number
    right: Number
    out: str


@dataclass(frozen=True)
class Problem:
    """Sizes of C = A B.

    ``vector_rows``, ``inner`` and ``vectors`` (stored) of A; ``longest``: vectors of its longest vector row; ``n``:
    columns of B, or a few more; ``batch``: 1 for a single matrix, 2 for several.
    """

    vector_rows: int
    inner: int
    vectors: int
    longest: int
    n: int
    batch: int = 1


@dataclass(frozen=True)
class Forecast:
    """Predicted nanoseconds of the sparse and of the dense product."""

    sparse: float
    dense: float

    @property
    def dense_wins(self) -> bool:
        return self.dense < self.sparse

    def __str__(self) -> str:
        dense, sparse = self.dense / 1e3, self.sparse / 1e3
        if self.dense_wins:
            return f"dense would be faster: about {dense:.1f} us against {sparse:.1f} us; allow_dense=True takes it"
        return f"dense would not be faster: about {dense:.1f} us against {sparse:.1f} us"


@dataclass(frozen=True)
class PanelModel:
    """Nanoseconds of the panel kernel's parts on one multiprocessor."""

    launch: float = 1500.0
    block: float = 713.0  # its start and end
    byte: float = 0.00393  # of a tile, when all multiprocessors fetch
    row: float = 0.335  # of B, whatever its width but 32 bytes
    half: float = 1.1  # of B's rows of 32 bytes
    chunk: float = 5.53  # 16 bytes of a group's rows multiplied without a conflict, for one warp of 16
    flight: float = 198.0  # a tile's way from the second-level cache, shared by those that are on theirs
    conflict: float = 10.2  # columns of a window that double the passes of a read, being so few
    result: float = 0.498  # written, for each byte of a vector row's strip of B
    narrow: float = 1.43  # how much longer a chunk takes in rows of 64 bytes and less
    ahead: float = 0.883  # of a chunk, where more records than two are on their way
    # warps and vector rows a warp: a part of a chunk
    share: tuple[tuple[tuple[int, int], float], ...] = (
        ((16, 1), 0.563), ((15, 2), 0.564), ((14, 2), 0.595), ((13, 2), 0.633), ((11, 3), 0.617), ((11, 2), 0.599),
        ((8, 2), 0.763), ((11, 1), 0.614), ((8, 1), 0.735), ((7, 1), 0.707),
    )  # fmt: skip


@dataclass(frozen=True)
class GatherModel:
    """Nanoseconds of the gather kernel's parts."""

    launch: float = 851.0
    warp: float = 1129.0  # its start and end
    group: float = 295.0  # of a warp that waits for it alone
    crowd: float = 853.0  # more for a group when 32 warps of a multiprocessor wait likewise
    team: float = 333.0  # the meeting of five warps that share a vector row of 64 columns
    result: float = 0.000354


@dataclass(frozen=True)
class Machine:
    """What a choice depends on of a GPU; the models by ``magicube tune`` where it ran there."""

    arch: str
    multiprocessors: int
    panel: PanelModel = PanelModel()
    gather: GatherModel = GatherModel()


def panel_cost(config: PanelConfig, machine: Machine, problem: Problem) -> float:
    """Whole waves of blocks, each of which fills its panels and multiplies its vector rows at the same time."""
    model = machine.panel
    clusters = machine.multiprocessors // config.cluster
    items = config.items(problem.vector_rows, problem.n, problem.batch)
    waves = -(-items // clusters)
    mean, tiles = problem.vectors / problem.vector_rows, -(-problem.inner // config.tile)
    groups = max(mean / config.group + 0.5, min(tiles / config.window, mean))
    rows = min(config.warps * config.rows, problem.vector_rows)
    # mma operations a chunk, in those of L8-R8 at V = 8
    products = config.products * max(1, config.vector_length // 8) * config.columns / config.row_bytes
    share = dict(model.share)[config.warps, config.rows]
    window = mean * config.tile * config.window / problem.inner  # columns
    passes = 1.0 + min(model.conflict / window, 1.4)  # of a read, by the columns to choose from
    chunks = config.row_bytes / 16 * max(passes, 0.5 * (passes + products))
    chunks *= (model.narrow if config.row_bytes <= 64 else 1.0) * (model.ahead if config.records else 1.0)
    work = rows * groups * chunks * model.chunk * share
    row = model.half if config.row_bytes == 32 else model.row
    fill = problem.inner * (model.byte * config.row_bytes / config.cluster * items / (waves * clusters) + row)
    fill += tiles * model.flight / (config.stages - config.window)
    rest = model.block + model.result * rows * config.row_bytes
    return model.launch + waves * ((work**2 + fill**2) ** 0.5 + rest)


def gather_cost(config: GatherConfig, machine: Machine, problem: Problem) -> float:
    """Waves of warps, each of which fetches and multiplies the groups of one vector row in turn."""
    model = machine.gather
    strips = -(-problem.n // config.columns) * problem.batch
    registers = 80 if config.row_bytes == 128 else 64
    blocks = min(SHARED_BYTES // (config.smem_bytes + 1024), 65536 // (registers * config.threads))
    resident = min(blocks * config.warps, 64) * machine.multiprocessors
    full = problem.vector_rows * strips * config.row_warps / resident
    mean = problem.vectors / max(problem.vector_rows, 1)
    groups = mean / (config.group * config.row_warps) + 0.5
    # A row far longer than the others, which a uniform pattern does not have: its warp is the last one to end.
    longest = max(mean, problem.longest - 3 * mean**0.5) / (config.group * config.row_warps) + 0.5
    crowd = model.crowd * max(config.row_bytes, 64) / 64 * min(1.0, full) * resident / machine.multiprocessors / 32
    products = config.digits[0] * config.digits[1] * max(config.vector_length / 8, 1.0)
    products *= config.columns / config.row_bytes
    step = model.group + crowd * max(1.0, 0.5 + 0.5 * products)
    team = model.team * (config.row_warps - 1) / 4 * config.columns / 64
    warps = max(1.0, full) * (model.warp + groups * step + team) + (longest - groups) * step
    return model.launch + warps + model.result * problem.vector_rows * 8 * problem.n


def dense_cost(machine: Machine, m: int, problem: Problem) -> float:
    """The int8 product of a dense (``m``, K) matrix, K neighbours in both operands: whole turns of tiles."""
    each = []
    for tile, turn, product in _DENSE_TILES:
        tiles = -(-m // tile) * -(-problem.n // tile)
        turns = -(-tiles // machine.multiprocessors)
        each.append(turns * (turn + product * tile * tile * problem.inner))
    return problem.batch * (_LAUNCH + max(min(each), m * problem.inner / _MOVED))


def copy_cost(size: int) -> float:
    """``size`` bytes brought into another order before a product."""
    return _LAUNCH + 2 * size / _MOVED


def engine_forecast(kind: Kind, m: int, digits: int, problem: Problem) -> Forecast:
    """The CPU engine and the dense product on one thread; ``digits``: of A times those of B."""
    panels, results = -(-problem.n // 64) * problem.batch, m * problem.n * problem.batch
    group = _ENGINE_GROUP * max(kind.vector_length, 4) / 8 * digits
    sparse = results * _ENGINE_RESULT + panels * problem.vectors / 4 * group
    result = _CPU_INTEGER if kind.out.startswith("int") else _CPU_FLOAT
    return Forecast(sparse, results * (result + _CPU_PRODUCT * problem.inner))
