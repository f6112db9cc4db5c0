"""Kernel configs of fused sparse attention, and the form in which a kernel reads a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels import atoms
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig
from cute_kernels.layout.bank_conflicts import Access, swizzled
from cute_kernels.layout.column_order import ordered_slots
from cute_kernels.layout.ring import RingConfig

QUERIES = 8  # per vector
GROUP = 32  # keys per MMA of a warp, one per lane
HEADS = (32, 64, 128)  # supported head dimensions
ATOM = "s8_m16n8k32"
ALL_VISIBLE = 0xFF  # one bit per query of a vector
TILE_BIT, VISIBLE_BIT = 16, 24  # first bits of the tile number and of the visible bits in a word of `Steps`
NO_TILE = 255  # tile number of a sentinel step, which no tile reaches


class QueryVectors(NamedTuple):
    """Vectors of one or several masks, concatenated: 8 queries x 1 key each."""

    row_offsets: Tensor  # (masks * R + 1,) int64
    columns: Tensor  # (vectors,) int32, key of each vector, increasing in each vector row
    visible_bits: Tensor  # (vectors,) int32, bit i is set if query i of the vector attends to the key
    rows: int  # R, vector rows of one mask


def query_vectors(patterns: Sequence[tuple[Tensor, Tensor]], causal: bool) -> QueryVectors:
    """Concatenate the vectors of `patterns`, with causality applied.

    Parameters
    ----------
    patterns : sequence of (Tensor, Tensor)
        ``row_offsets``, int64 (R + 1,), and ``col_indices``, int32 (vectors,), of each mask.
    causal : bool
        Query ``i`` attends to the keys ``j <= i`` only. Vectors that are visible to none of their queries are dropped.

    Returns
    -------
    QueryVectors

    Examples
    --------
    >>> import torch
    >>> mask = torch.tensor([0, 3]), torch.tensor([0, 5, 9], dtype=torch.int32)  # one vector row, keys 0, 5 and 9
    >>> vectors = query_vectors([mask], causal=True)
    >>> vectors.columns.tolist(), [f"{bits:08b}" for bits in vectors.visible_bits.tolist()]
    ([0, 5], ['11111111', '11100000'])
    """
    rows = patterns[0][0].numel() - 1
    lengths = torch.cat([offsets.diff() for offsets, _ in patterns])  # (masks * R,)
    columns = torch.cat([columns for _, columns in patterns])  # (vectors,)
    visible_bits = torch.full_like(columns, ALL_VISIBLE)  # (vectors,)
    if causal:
        row = torch.repeat_interleave(lengths, output_size=columns.numel()) % max(rows, 1)  # (vectors,)
        before = (columns - row * QUERIES).clamp(0, QUERIES)  # (vectors,) queries of the vector before the key
        visible_bits = (ALL_VISIBLE << before & ALL_VISIBLE).to(torch.int32)  # (vectors,)
        used = visible_bits != 0  # (vectors,)
        owner = torch.repeat_interleave(lengths, output_size=columns.numel())[used]  # (used vectors,)
        columns, visible_bits = columns[used], visible_bits[used]
        lengths = torch.bincount(owner, minlength=lengths.numel())  # (masks * R,)
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=columns.device)  # (masks * R + 1,)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return QueryVectors(offsets, columns, visible_bits, rows)


@dataclass(frozen=True)
class AttentionConfig(KernelConfig):
    """Config of a fused attention kernel: base of :class:`GatherAttention` and :class:`PanelAttention`.

    Parameters
    ----------
    head : int
        Head dimension: entries per row of Q, K and V, one of `HEADS`.
    out : str
        Dtype of the output.
    key_scale : bool
        K may have one scale per key.
    bias : bool
        A bias per key is added to the logits.
    lse : bool
        The log-sum-exp of the logits is written.
    groups : int
        A step processes ``32 * groups`` keys.
    warps : int
        Warps per CTA that compute.
    stages : int
        Pipeline stages.
    """

    STEM: ClassVar[str]
    SENTINELS: ClassVar[int] = 0  # extra steps after the last one of each vector row

    head: int
    out: str = "float16"
    key_scale: bool = False
    bias: bool = False
    lse: bool = False
    groups: int = 2
    warps: int = 4
    stages: int = 2

    @property
    def step(self) -> int:
        """Keys per step."""
        return self.groups * GROUP

    @property
    def keyed(self) -> bool:
        """Whether scales or biases of keys are in shared memory."""
        return self.key_scale or self.bias

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        kinds = [text for text, used in (("ks", self.key_scale), ("b", self.bias), ("lse", self.lse)) if used]
        return "-".join([self.STEM, f"d{self.head}", self.out, *kinds, self._shape()])

    def _shape(self) -> str:
        return f"g{self.groups}s{self.stages}w{self.warps}"

    def _constants(self) -> dict[str, object]:
        return {
            "kHead": self.head,
            "kKeyScale": self.key_scale,
            "kBias": self.bias,
            "kLse": self.lse,
            "kGroups": self.groups,
            "kWarps": self.warps,
            "kStages": self.stages,
        }

    @property
    def kernel_header(self) -> str:
        return self.STEM.replace("_", "/") + ".cuh"

    @property
    def kernel_entry(self) -> str:
        return self.STEM

    def _preamble(self) -> str:
        return atoms.declaration(atoms.atom(ATOM))

    def _types(self) -> dict[str, str]:
        return {"Out": OUT_TYPES[self.out]}

    def slots(self, vectors: QueryVectors, keys: int) -> Tensor:
        """Assign the vectors of each row to slots of its steps, in order of the steps: int64 (vectors,)."""
        raise NotImplementedError

    def smem_rows(self, columns: Tensor) -> Tensor:
        """Return the offset in shared memory of the rows of keys `columns`, in units of 16 bytes, below 2^16."""
        raise NotImplementedError

    def last_tiles(self, keys: Tensor, row_of: Tensor) -> Tensor:
        """Return the tile that each step waits for, int32 (steps,), below `NO_TILE`.

        Parameters
        ----------
        keys : Tensor, shape (steps, step)
            Keys of each step.
        row_of : Tensor, shape (steps,)
            Vector row of each step.
        """
        raise NotImplementedError

    def steps(self, vectors: QueryVectors, keys: int) -> Steps:
        """Return the words that the kernel reads for `vectors`, computed on their device."""
        device, offsets = vectors.columns.device, vectors.row_offsets
        rows, total = offsets.numel() - 1, vectors.columns.numel()
        slots = self.slots(vectors, keys)
        row_of = torch.repeat_interleave(offsets.diff(), output_size=total)
        used = torch.zeros(rows + 1, dtype=torch.int64, device=device).scatter_reduce_(0, row_of, slots + 1, "amax")
        counts = (used + self.step - 1) // self.step + self.SENTINELS  # (rows + 1,); the last row has no keys
        ends = torch.cumsum(counts, 0)
        start = ends - counts
        count = int(ends[-1])
        positions = start[row_of] * self.step + slots  # (vectors,)
        columns, words = vectors.columns, self.smem_rows(vectors.columns).to(torch.int32)
        # Padding repeats the first key of its step, whose row has arrived, with no visible bit.
        firsts = positions % self.step == 0
        keys_of = torch.zeros(count, self.step, dtype=torch.int32, device=device)
        padded = torch.zeros_like(keys_of)
        keys_of[positions[firsts] // self.step] = columns[firsts][:, None]
        padded[positions[firsts] // self.step] = words[firsts][:, None]
        keys_of.view(-1)[positions] = columns
        padded.view(-1)[positions] = words | vectors.visible_bits << VISIBLE_BIT
        owner = torch.repeat_interleave(counts, output_size=count)
        waits = self.last_tiles(keys_of, owner)
        if self.SENTINELS:
            waits[ends - 1] = NO_TILE
        return Steps(start.to(torch.int32), padded | waits[:, None] << TILE_BIT, keys_of)


class Steps(NamedTuple):
    """Masks in the form that the kernels read."""

    start: Tensor  # (rows + 1,) int32, first step of each vector row; the last row has no keys
    # Bits 0 to 15: offset of the key's row in shared memory; 16 to 23: tile that the step waits for; 24 to 31: visible
    # bits.
    words: Tensor  # (steps, step) int32
    keys: Tensor  # (steps, step) int32


@dataclass(frozen=True)
class GatherAttention(AttentionConfig):
    """Gather kernel: each warp copies the rows of K and V that its vector row needs, `stages` steps in flight.

    Examples
    --------
    >>> GatherAttention(128, key_scale=True).name
    'attention_gather-d128-float16-ks-g1s2w4'
    """

    STEM: ClassVar[str] = "attention_gather"

    groups: int = 1
    warps: int = 4
    stages: int = 2

    @property
    def smem_bytes(self) -> int:
        scale_and_bias = 8 if self.keyed else 0  # bytes per key
        return self.warps * self.stages * self.step * (2 * self.head + scale_and_bias)

    def slots(self, vectors: QueryVectors, keys: int) -> Tensor:
        lengths = vectors.row_offsets.diff()
        first = torch.repeat_interleave(vectors.row_offsets[:-1], lengths, output_size=vectors.columns.numel())
        return torch.arange(vectors.columns.numel(), device=first.device) - first

    def smem_rows(self, columns: Tensor) -> Tensor:
        return torch.zeros_like(columns)

    def last_tiles(self, keys: Tensor, row_of: Tensor) -> Tensor:
        return torch.zeros_like(keys[:, 0])

    def smem_accesses(self) -> list[Access]:
        """Return every shared-memory access of a warp."""
        lane, chunks = np.arange(32), self.head // 16
        piece = np.arange(self.step * chunks).reshape(-1, 32)
        rows = [
            swizzled(GROUP * group + lane, chunk, self.head) for group in range(self.groups) for chunk in range(chunks)
        ]
        return [
            Access("fetch: cp.async of rows", "store128", swizzled(piece // chunks, piece % chunks, self.head)),
            Access("read: rows of K and V", "ldmatrix.x4", np.stack(rows)),
        ]


@dataclass(frozen=True)
class PanelAttention(RingConfig, AttentionConfig):
    """Panel kernel: a TMA producer warp streams tiles of K and V through shared memory for many vector rows.

    Parameters
    ----------
    tile : int
        Keys per tile; the ring has `stages` tiles.
    tile_window : int
        A step takes its keys from at most `tile_window` consecutive tiles.
    rows_per_warp : int
        Vector rows whose accumulators each of the `warps` consumer warps holds.
    cluster : int
        CTAs that share their tiles by multicast.

    Examples
    --------
    >>> config = PanelAttention(64)
    >>> config.threads, config.ring, config.smem_bytes, config.block_rows
    (384, 1536, 196736, 33)
    """

    STEM: ClassVar[str] = "attention_panel"
    SENTINELS: ClassVar[int] = 1  # waits for `NO_TILE`, which ends the loop of a row

    warps: int = 11
    stages: int = 6
    tile: int = 256
    tile_window: int = 4
    rows_per_warp: int = 3
    cluster: int = 1

    @property
    def smem_bytes(self) -> int:
        per_stage = 16 * self.stages + -(-4 * self.stages // 16) * 16  # mbarriers; whether the keys share one scale
        return self.ring * (2 * self.head + (8 if self.keyed else 0)) + per_stage

    def _shape(self) -> str:
        shape = f"{super()._shape()}t{self.tile}x{self.tile_window}r{self.rows_per_warp}"
        return shape + (f"c{self.cluster}" if self.cluster > 1 else "")

    def _constants(self) -> dict[str, object]:
        return super()._constants() | self._ring_constants()

    def slots(self, vectors: QueryVectors, keys: int) -> Tensor:
        tiles = -(-keys // self.tile)
        return ordered_slots(vectors.columns, vectors.row_offsets, self.tile, tiles, self.step, self.tile_window)

    def smem_rows(self, columns: Tensor) -> Tensor:
        slot, chunks = columns % self.ring, self.head // 16
        at = slot // self.tile * (2 * self.tile) + slot % self.tile  # a stage is K's tile, then V's
        return at * chunks + slot // (128 // self.head) % chunks

    def last_tiles(self, keys: Tensor, row_of: Tensor) -> Tensor:
        last = keys.amax(1) // self.tile
        # A step runs after those before it: the maximum runs along each row, which the offset separates from the next.
        offset = row_of * NO_TILE
        return (torch.cummax(last + offset, 0).values - offset).to(torch.int32)

    def tile_ranges(self, vectors: QueryVectors) -> Tensor:
        """Return the first tile of each block of rows and the one after its last, int32 (masks, row blocks, 2)."""
        offsets, columns, rows = vectors.row_offsets, vectors.columns, vectors.rows
        masks = (offsets.numel() - 1) // max(rows, 1)
        blocks = -(-rows // self.block_rows)
        ranges = torch.zeros(2, masks * blocks, dtype=torch.int64, device=columns.device)
        row = torch.repeat_interleave(offsets.diff(), output_size=columns.numel())
        block = row // max(rows, 1) * blocks + row % max(rows, 1) // self.block_rows
        tile = columns.to(torch.int64) // self.tile
        ranges[0].scatter_reduce_(0, block, tile, "amin", include_self=False)
        ranges[1].scatter_reduce_(0, block, tile + 1, "amax")
        return ranges.view(2, masks, blocks).movedim(0, -1).to(torch.int32).contiguous()
