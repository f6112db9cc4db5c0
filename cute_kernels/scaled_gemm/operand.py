"""Operands of a product of small floats, and a checked product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import floats
from cute_kernels.floats import float_format, packed_bytes
from cute_kernels.gemm.problem import check_float_tensor
from cute_kernels.scaled_gemm.config import TILE, OperandFormat

BLOCKS = (16, 32)


BLOCK_SCALES = ("ue8m0", "e4m3")


@dataclass(frozen=True, eq=False)
class FloatOperand:
    """``x[r, k] = scale[r] blocks[r, k // block] tiles[r // 128, k // 128] decode(codes)[r, k]``.

    Arguments:
        codes: uint8 (R, ceil(K bits / 8)), packed along k as by :func:`cute_kernels.floats.pack`.
        dtype: the codes' format.
        k: K.
        scale: float32, float16 or bfloat16 (R,) or (), or None.
        blocks: codes of ``scale_dtype``, uint8 (R, ceil(K / block)), or None.
        block: 16 or 32, with ``blocks``.
        scale_dtype: ``"ue8m0"`` or ``"e4m3"``, with ``blocks``.
        tiles: float32 (ceil(R / 128), ceil(K / 128)), or None; not with ``blocks``.
    Raises ``TypeError`` and ``ValueError`` that name the argument.
    """

    packed_data: Tensor
    dtype: str
    k: int
    scale: Tensor | None = None
    blocks: Tensor | None = None
    block: int = 0
    scale_dtype: str = ""
    tiles: Tensor | None = None

    def __post_init__(self) -> None:
        float_format(self.dtype)
        if self.packed_data.dtype != torch.uint8:
            raise TypeError(f"codes must be uint8, got {self.packed_data.dtype}")
        expected = packed_bytes(self.k, self.dtype)
        if self.packed_data.dim() != 2 or self.packed_data.shape[1] != expected:
            raise ValueError(f"codes must have the shape (R, {expected}) for {self.k} codes of {self.dtype}, "
                             f"got {tuple(self.packed_data.shape)}")  # fmt: skip
        if self.scale is not None:
            check_float_tensor(self.scale, "scale", ((self.rows,), ()), self.device, False)
        if (self.blocks is None) != (self.block == 0) or (self.blocks is None) != (self.scale_dtype == ""):
            raise ValueError(f"blocks, block and scale_dtype must be given together, got block {self.block} and "
                             f"scale_dtype {self.scale_dtype!r}")  # fmt: skip
        if self.blocks is not None:
            self._check_blocks(self.blocks)
        if self.tiles is not None:
            if self.blocks is not None:
                raise ValueError(f"tiles must be None with blocks, got tiles of shape {tuple(self.tiles.shape)}")
            if self.tiles.dtype != torch.float32:
                raise TypeError(f"tiles must be float32, got {self.tiles.dtype}")
            check_float_tensor(self.tiles, "tiles", ((-(-self.rows // TILE), -(-self.k // TILE)),), self.device, False)

    def _check_blocks(self, blocks: Tensor) -> None:
        if self.block not in BLOCKS:
            raise ValueError(f"block must be one of {BLOCKS}, got {self.block}")
        if self.scale_dtype not in BLOCK_SCALES:
            raise ValueError(f"scale_dtype must be one of {', '.join(BLOCK_SCALES)}, got {self.scale_dtype!r}")
        if blocks.dtype != torch.uint8:
            raise TypeError(f"blocks must be uint8, got {blocks.dtype}")
        expected = (self.rows, -(-self.k // self.block))
        if tuple(blocks.shape) != expected:
            raise ValueError(f"blocks must have the shape {expected}, got {tuple(blocks.shape)}")
        if blocks.device != self.device:
            raise ValueError(f"blocks must be on {self.device} as codes is, got {blocks.device}")

    @property
    def rows(self) -> int:
        return self.packed_data.shape[0]

    @property
    def device(self) -> torch.device:
        return self.packed_data.device

    @property
    def format(self) -> OperandFormat:
        """What kernels are compiled for."""
        return OperandFormat(self.dtype, self.block, self.scale_dtype, self.tiles is not None)

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The real numbers (R, K), without ``scale``."""
        found = floats.decode(
            floats.unpack(self.packed_data, self.k, self.dtype), self.dtype, out_dtype=dtype
        )  # (R, K)
        if self.blocks is not None:
            factors = floats.decode(self.blocks, self.scale_dtype, out_dtype=dtype)  # (R, blocks)
            found *= factors.repeat_interleave(self.block, 1)[:, : self.k]  # (R, K)
        if self.tiles is not None:
            rows = self.tiles.to(dtype).repeat_interleave(TILE, 0)[: self.rows]  # (R, tiles)
            found *= rows.repeat_interleave(TILE, 1)[:, : self.k]  # (R, K)
        return found


@dataclass(frozen=True)
class ScaledGemmProblem:
    """A checked product; ``c`` is None where ``beta`` is 0."""

    a: FloatOperand  # M rows
    b: FloatOperand  # N rows
    alpha: float
    beta: float
    c: Tensor | None  # (M, N)
    bias: Tensor | None  # (N,)
    out_dtype: torch.dtype
    fast_accum: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.a.rows, self.b.rows, self.a.k
