"""What the kernels of sparse attention are compiled for, and what they want to know of a mask."""

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
from cute_kernels.layout.column_order import spread_slots

QUERIES = 8  # of a vector
GROUP = 32  # keys that a warp takes at once
HEADS = (32, 64, 128)
ATOM = "s8_m16n8k32"
ALL_SEE = 0xFF  # queries of a vector that see a key, a bit each
TILE_BIT, SEEN_BIT = 16, 24  # first bits of a word's parts
NO_TILE = 255  # that no step waits for


class Vectors(NamedTuple):
    """The vectors of one or several masks, one after the other."""

    row_offsets: Tensor  # int64 (masks * R + 1,)
    columns: Tensor  # int32 (vectors,), rising in each row
    seen: Tensor  # int32 (vectors,), which of the eight queries see the key, a bit each
    rows: int  # R, of one mask


def vectors_of(patterns: Sequence[tuple[Tensor, Tensor]], causal: bool) -> Vectors:
    """The vectors of ``patterns``, pairs of ``row_offsets`` and ``col_indices``.

    ``causal``: a query sees the keys up to its own number, and vectors that none of the eight sees are left out.
    """
    rows = patterns[0][0].numel() - 1
    lengths = torch.cat([offsets.diff() for offsets, _ in patterns])  # (masks * R,)
    columns = torch.cat([columns for _, columns in patterns])
    seen = torch.full_like(columns, ALL_SEE)
    if causal:
        row = torch.repeat_interleave(lengths, output_size=columns.numel()) % max(rows, 1)
        hidden = (columns - row * QUERIES).clamp(0, QUERIES)  # queries of the vector ahead of the key
        seen = (ALL_SEE << hidden & ALL_SEE).to(torch.int32)
        kept = seen != 0
        owner = torch.repeat_interleave(lengths, output_size=columns.numel())[kept]
        columns, seen = columns[kept], seen[kept]
        lengths = torch.bincount(owner, minlength=lengths.numel())
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=columns.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return Vectors(offsets, columns, seen, rows)


@dataclass(frozen=True)
class AttentionConfig(KernelConfig):
    """A kernel that attends ``groups * 32`` keys a step, for rows of ``head`` entries, and writes ``out``.

    ``key_scale``: keys may have a scale each; ``bias``: something is added to the logits of each key; ``lse``: the logs
    of the sums of exponentials are written.
    """

    STEM: ClassVar[str]
    SENTINELS: ClassVar[int] = 0  # steps behind each row's last one

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
        """Keys of a step."""
        return self.groups * GROUP

    @property
    def keyed(self) -> bool:
        """Whether scales or biases of keys lie in shared memory."""
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

    def slots(self, vectors: Vectors, keys: int) -> Tensor:
        """Where each vector goes in its row, int64 (vectors,): slots of steps, one after the other."""
        raise NotImplementedError

    def places(self, columns: Tensor) -> Tensor:
        """Where the key's row lies in shared memory, in units of 16 bytes; below 2^16."""
        raise NotImplementedError

    def last_tiles(self, keys: Tensor, row_of: Tensor) -> Tensor:
        """Which tile each step waits for, int32 (steps,), below 255; ``keys`` (steps, step), ``row_of`` (steps,)."""
        raise NotImplementedError

    def steps(self, vectors: Vectors, keys: int) -> Steps:
        """The vectors as the kernel takes them; torch operators on their own device."""
        device, offsets = vectors.columns.device, vectors.row_offsets
        rows, total = offsets.numel() - 1, vectors.columns.numel()
        slots = self.slots(vectors, keys)
        row_of = torch.repeat_interleave(offsets.diff(), output_size=total)
        used = torch.zeros(rows + 1, dtype=torch.int64, device=device).scatter_reduce_(0, row_of, slots + 1, "amax")
        counts = (used + self.step - 1) // self.step + self.SENTINELS  # (rows + 1,), of the last one no keys
        ends = torch.cumsum(counts, 0)
        start = ends - counts
        count = int(ends[-1])
        positions = start[row_of] * self.step + slots  # (vectors,)
        columns, words = vectors.columns, self.places(vectors.columns).to(torch.int32)
        # Padding names its step's first key, whose row is there, for no query.
        firsts = positions % self.step == 0
        keys_of = torch.zeros(count, self.step, dtype=torch.int32, device=device)
        padded = torch.zeros_like(keys_of)
        keys_of[positions[firsts] // self.step] = columns[firsts][:, None]
        padded[positions[firsts] // self.step] = words[firsts][:, None]
        keys_of.view(-1)[positions] = columns
        padded.view(-1)[positions] = words | vectors.seen << SEEN_BIT
        owner = torch.repeat_interleave(counts, output_size=count)
        waits = self.last_tiles(keys_of, owner)
        if self.SENTINELS:
            waits[ends - 1] = NO_TILE
        return Steps(start.to(torch.int32), padded | waits[:, None] << TILE_BIT, keys_of)


class Steps(NamedTuple):
    """A mask as the kernels take it."""

    start: Tensor  # int32 (rows + 1,), the first step of each vector row and of one more, without keys
    # int32 (steps, step): place of the key's row, from bit 16 on the tile that the step waits for, from bit 24 on
    # the queries that see the key
    words: Tensor
    keys: Tensor  # int32 (steps, step)


@dataclass(frozen=True)
class GatherAttention(AttentionConfig):
    """Each warp gathers the rows that its vector row names, ``stages`` steps in flight."""

    STEM: ClassVar[str] = "attention_gather"

    groups: int = 1
    warps: int = 4
    stages: int = 2

    @property
    def smem_bytes(self) -> int:
        factors = 8 if self.keyed else 0
        return self.warps * self.stages * self.step * (2 * self.head + factors)

    def slots(self, vectors: Vectors, keys: int) -> Tensor:
        lengths = vectors.row_offsets.diff()
        first = torch.repeat_interleave(vectors.row_offsets[:-1], lengths, output_size=vectors.columns.numel())
        return torch.arange(vectors.columns.numel(), device=first.device) - first

    def places(self, columns: Tensor) -> Tensor:
        return torch.zeros_like(columns)

    def last_tiles(self, keys: Tensor, row_of: Tensor) -> Tensor:
        return torch.zeros_like(keys[:, 0])

    def smem_accesses(self) -> list[Access]:
        """Every access of a warp to shared memory."""
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
class PanelAttention(AttentionConfig):
    """Tiles of ``tile`` rows of K and V pass through a ring of ``stages``.

    A step takes keys of ``window`` neighbouring tiles at most.  Each of ``warps`` warps keeps the sums of ``rows``
    vector rows; ``cluster`` blocks share their fetches.
    """

    STEM: ClassVar[str] = "attention_panel"
    SENTINELS: ClassVar[int] = 1  # they wait for a tile that there is not

    warps: int = 11
    stages: int = 6
    tile: int = 256
    window: int = 4
    rows: int = 3
    cluster: int = 1

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def ring(self) -> int:
        """Rows of K, and of V, that the ring holds."""
        return self.tile * self.stages

    @property
    def smem_bytes(self) -> int:
        of_stages = 16 * self.stages + -(-4 * self.stages // 16) * 16  # barriers; whether keys are alike
        return self.ring * (2 * self.head + (8 if self.keyed else 0)) + of_stages

    @property
    def block_rows(self) -> int:
        """Vector rows of a cluster."""
        return self.warps * self.rows * self.cluster

    def _shape(self) -> str:
        shape = f"{super()._shape()}t{self.tile}x{self.window}r{self.rows}"
        return shape + (f"c{self.cluster}" if self.cluster > 1 else "")

    def _constants(self) -> dict[str, object]:
        return super()._constants() | {
            "kTile": self.tile,
            "kWindow": self.window,
            "kRows": self.rows,
            "kCluster": self.cluster,
        }

    def slots(self, vectors: Vectors, keys: int) -> Tensor:
        tiles = -(-keys // self.tile)
        return spread_slots(vectors.columns, vectors.row_offsets, self.tile, tiles, self.step, self.window)

    def places(self, columns: Tensor) -> Tensor:
        slot, chunks = columns % self.ring, self.head // 16
        at = slot // self.tile * (2 * self.tile) + slot % self.tile  # V's tile lies behind K's
        return at * chunks + slot // (128 // self.head) % chunks

    def last_tiles(self, keys: Tensor, row_of: Tensor) -> Tensor:
        last = keys.amax(1) // self.tile
        apart = row_of * NO_TILE
        return (torch.cummax(last + apart, 0).values - apart).to(torch.int32)  # a step waits for those before it

    def ranges(self, vectors: Vectors) -> Tensor:
        """The first tile that each block of rows needs and the one after its last, int32 (masks, row blocks, 2)."""
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
