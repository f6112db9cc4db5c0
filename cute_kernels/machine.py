"""What kernel selection reads: the types and sizes of a product, and the GPU with its cost models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cute_kernels.dtypes import ElementType

SHARED_BYTES = 227 * 1024  # of an SM


MMA_COLUMNS = 8  # of the operand that holds the sparse vectors: shorter ones leave some of them empty


@dataclass(frozen=True)
class ProblemTypes:
    """Types of a product.

    Attributes
    ----------
    vector_length : int
        V of the sparse operand.
    lhs, rhs : Integer or FloatFormat
        Element types of the operands.
    out : str
        Name of the output dtype.
    """

    vector_length: int
    lhs: ElementType
    rhs: ElementType
    out: str


@dataclass(frozen=True)
class Problem:
    """Sizes of ``C = A B``.

    Attributes
    ----------
    vector_rows : int
        Vector rows of A.
    inner : int
        K.
    vectors : int
        Stored vectors of A.
    longest : int
        Vectors of the longest vector row.
    n : int
        Columns of B, rounded up to a bucket.
    batch : int
        1 for a single matrix, 2 for several.
    """

    vector_rows: int
    inner: int
    vectors: int
    longest: int
    n: int
    batch: int = 1


@dataclass(frozen=True)
class PanelModel:
    """Cost model of the panel kernel: nanoseconds per part on one SM."""

    launch: float = 1698.0
    block: float = 713.0  # prologue and epilogue of a CTA
    byte: float = 0.00393  # of a tile, if all SMs load
    row: float = 0.335  # of B, of any width but 32 bytes
    half: float = 1.1  # of B's rows of 32 bytes
    chunk: float = 5.53  # MMA of 16 bytes of a group's rows without bank conflicts, for one warp of 16
    flight: float = 198.0  # latency of a tile from L2, divided by the tiles in flight
    conflict: float = 10.2  # vectors per window below which the wavefronts of a read double
    result: float = 0.498  # store, per byte of a vector row in an N tile
    narrow: float = 1.43  # of a chunk, in rows of at most 64 bytes
    ahead: float = 0.883  # of a chunk, with more than two records in flight
    tail: float = 200.0  # of a group of the longest vector row, beyond a mean one
    # (warps, vector rows per warp) -> multiplier of a chunk
    share: tuple[tuple[tuple[int, int], float], ...] = (
        ((16, 1), 0.563), ((15, 2), 0.564), ((14, 2), 0.595), ((13, 2), 0.633), ((11, 4), 0.645), ((11, 3), 0.617),
        ((11, 2), 0.599), ((8, 2), 0.763), ((11, 1), 0.614), ((8, 1), 0.735), ((7, 1), 0.707),
    )  # fmt: skip


@dataclass(frozen=True)
class GatherModel:
    """Cost model of the gather kernel: nanoseconds per part."""

    launch: float = 620.6
    warp: float = 1271.0  # prologue and epilogue of a warp
    group: float = 208.3  # latency for a single warp
    crowd: float = 979.0  # added per group if 32 warps of an SM load
    team: float = 377.1  # split-K reduction of five warps, 64 columns
    result: float = 0.000334


@dataclass(frozen=True)
class ResidentModel:
    """Cost model of the resident kernel: nanoseconds per part.

    Fitted to the choice among the three kernels on an H100, weights cold and warm, behind another kernel.
    """

    launch: float = 2820.0
    byte: float = 0.0118  # of A, read by one SM of all
    fill: float = 0.0071  # of a byte of B that a CTA holds
    team: float = 2270.0  # sums of two CTAs


@dataclass(frozen=True)
class Machine:
    """A GPU as kernel selection reads it.

    Attributes
    ----------
    arch : str
        Architecture, such as ``"sm_90a"``.
    num_sms : int
        SMs.
    panel, gather, resident : PanelModel, GatherModel, ResidentModel
        Cost models; measured ones after ``magicube tune``.
    """

    arch: str
    num_sms: int
    panel: PanelModel = PanelModel()
    gather: GatherModel = GatherModel()
    resident: ResidentModel = ResidentModel()


PANEL_ARCHES = ("sm_90a", "sm_100a", "sm_103a")  # TMA and 227 KiB of shared memory


SAFE_RUN = 32768  # products of two bytes that int32 can sum without overflow, in any kernel


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
