"""What a choice of a kernel knows: the product, and the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cute_kernels.dtypes import Number

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
    num_sms: int
    panel: PanelModel = PanelModel()
    gather: GatherModel = GatherModel()


PANEL_ARCHES = ("sm_90a", "sm_100a", "sm_103a")  # tensor copies and 227 KiB of shared memory


SAFE_RUN = 32768  # products of two bytes that int32 can sum without overflow, in any of the kernels' forms


class _Summing(Protocol):
    """The part of a kernel config that bounds its integer accumulators."""

    @property
    def entry(self) -> Any: ...
    @property
    def out(self) -> str: ...
    @property
    def shifted(self) -> bool: ...


def outgrows(config: _Summing, longest: int) -> bool:
    """Return whether sums of `longest` products of bytes can overflow the kernel's int32 accumulators."""
    return longest > SAFE_RUN and not config.entry.floating and (config.out != "int32" or config.shifted)
