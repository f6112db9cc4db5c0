"""Operands of a product of low-precision floats, and a checked product."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import floats
from cute_kernels.float_format import float_format
from cute_kernels.floats import packed_bytes
from cute_kernels.gemm.problem import check_float_tensor
from cute_kernels.scaled_gemm.config import TILE, OperandFormat

BLOCKS = (16, 32, TILE)
BLOCK_SCALES = ("ue8m0", "e4m3", "float32")


@dataclass(frozen=True, eq=False)
class FloatOperand:
    """A matrix of low-precision floats with its scales.

    ``x[r, k] = scale[r] blocks[r, k // block] tiles[r // 128, k // 128] decode(packed_data)[r, k]``.

    Parameters
    ----------
    packed_data : Tensor, shape (R, ceil(K bits / 8))
        uint8, packed along K by :func:`cute_kernels.floats.pack`.
    dtype : str
        Format of the values: ``"e5m2"``, ``"e4m3"``, ``"e3m2"``, ``"e2m3"`` or ``"e2m1"``.
    k : int
        K.
    scale : Tensor, shape (R,) or (), optional
        Per-row or per-tensor scale: float32, float16 or bfloat16.
    blocks : Tensor, shape (R, ceil(K / block)), optional
        Block scales, uint8 bits of `scale_dtype`, or float32.
    block : int, default 0
        Values per block scale along K: 16 or 32, or 128 of float32; 0 without `blocks`.
    scale_dtype : str, default ""
        Format of the block scales: ``"ue8m0"``, ``"e4m3"`` or ``"float32"``; empty without `blocks`.
    tiles : Tensor, shape (ceil(R / 128), ceil(K / 128)), optional
        float32 scales of 128 x 128 tiles; not together with `blocks`.

    Raises
    ------
    TypeError
        If a dtype is not supported.
    ValueError
        If shapes, devices or formats do not match.

    Examples
    --------
    >>> import torch
    >>> from cute_kernels import floats
    >>> values = floats.encode(torch.tensor([[0.5, -6.0]]), "e2m1")
    >>> FloatOperand(floats.pack(values, "e2m1"), "e2m1", k=2).values()
    tensor([[ 0.5000, -6.0000]])
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
            raise TypeError(f"packed_data must be uint8, got {self.packed_data.dtype}")
        expected = packed_bytes(self.k, self.dtype)
        if self.packed_data.dim() != 2 or self.packed_data.shape[1] != expected:
            raise ValueError(f"packed_data must have the shape (R, {expected}) for k={self.k} of {self.dtype}, "
                             f"got {tuple(self.packed_data.shape)}")  # fmt: skip
        if self.scale is not None:
            check_float_tensor(self.scale, "scale", ((self.rows,), ()), self.device, False)
        if (self.blocks is None) != (self.block == 0) or (self.blocks is None) != (self.scale_dtype == ""):
            raise ValueError(f"blocks, block and scale_dtype must be given together, got block {self.block} and "
                             f"scale_dtype {self.scale_dtype!r}")  # fmt: skip
        if self.blocks is not None:
            self._check_blocks(self.blocks)
        if self.tiles is not None:
            self._check_tiles(self.tiles)

    def _check_blocks(self, blocks: Tensor) -> None:
        """Check the format, dtype, shape and device of the block scales."""
        if self.block not in BLOCKS:
            raise ValueError(f"block must be one of {BLOCKS}, got {self.block}")
        if self.scale_dtype not in BLOCK_SCALES:
            raise ValueError(f"scale_dtype must be one of {', '.join(BLOCK_SCALES)}, got {self.scale_dtype!r}")
        wide = self.scale_dtype == "float32"
        if wide != (self.block == TILE):
            raise ValueError(f"scale_dtype must be float32 for a block of {TILE} and only then, got block {self.block} "
                             f"and scale_dtype {self.scale_dtype!r}")  # fmt: skip
        if blocks.dtype != (torch.float32 if wide else torch.uint8):
            raise TypeError(f"blocks must be {'float32' if wide else 'uint8'}, got {blocks.dtype}")
        expected = (self.rows, -(-self.k // self.block))
        if tuple(blocks.shape) != expected:
            raise ValueError(f"blocks must have the shape {expected}, got {tuple(blocks.shape)}")
        if blocks.device != self.device:
            raise ValueError(f"blocks must be on {self.device} as packed_data is, got {blocks.device}")

    def _check_tiles(self, tiles: Tensor) -> None:
        """Check the dtype, shape and device of the tile scales."""
        if self.blocks is not None:
            raise ValueError(f"tiles must be None with blocks, got tiles of shape {tuple(tiles.shape)}")
        if tiles.dtype != torch.float32:
            raise TypeError(f"tiles must be float32, got {tiles.dtype}")
        check_float_tensor(tiles, "tiles", ((-(-self.rows // TILE), -(-self.k // TILE)),), self.device, False)

    @property
    def codes(self) -> Tensor:
        """Deprecated name of `packed_data`."""
        warnings.warn("FloatOperand.codes is deprecated, use packed_data", DeprecationWarning, stacklevel=2)
        return self.packed_data

    @property
    def rows(self) -> int:
        """Number of rows, R."""
        return self.packed_data.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the packed data and the scales."""
        return self.packed_data.device

    @property
    def format(self) -> OperandFormat:
        """Format that kernels are compiled for."""
        return OperandFormat(self.dtype, self.block, self.scale_dtype, self.tiles is not None)

    def folded(self) -> FloatOperand | None:
        """Return the same numbers as e4m3 with scales of rows, not of blocks; None where e4m3 does not hold them.

        ``scale[r] blocks[r, k // block] x = scale'[r] y`` with a power of two between the scales of each row, so that
        the largest ``y`` of a row is near the largest e4m3. A value of 4 bits has 2 to 3 binades, e4m3 has 18, so
        ue8m0 scales of a row may differ by some 2^12. Waits for a GPU: for operands that are used often.

        Returns
        -------
        FloatOperand or None
            Exact, or None, also where a scale is NaN or float32 does not hold that of a row; the operand itself without
            block scales of ue8m0.

        Examples
        --------
        >>> blocks = torch.tensor([[127, 125]], dtype=torch.uint8)
        >>> packed = floats.pack(floats.encode(torch.ones(1, 64), "e2m1"), "e2m1")
        >>> found = FloatOperand(packed, "e2m1", k=64, blocks=blocks, block=32, scale_dtype="ue8m0").folded()
        >>> found.dtype, found.scale.tolist(), found.values()[0, [0, 63]].tolist()
        ('e4m3', [0.00390625], [256.0, 64.0])
        """
        if self.blocks is None or self.scale_dtype != "ue8m0":
            return self
        unpacked = floats.decode(floats.unpack(self.packed_data, self.k, self.dtype), self.dtype).double()  # (R, K)
        binades = torch.frexp(unpacked).exponent  # (R, K): |x| below two to this
        exponent = (self.blocks.int() - 127).repeat_interleave(self.block, 1)[:, : self.k]  # (R, K)
        least = torch.iinfo(torch.int32).min
        top = torch.where(unpacked == 0, least, binades + exponent).amax(1, keepdim=True)  # (R, 1)
        base = torch.where(top == least, 0, top - 9).clamp(-126, 127)  # below 2^9; 480 is no e4m3
        is_nan = bool((self.blocks == 255).any())
        for shift in () if is_nan else (0, 1):
            y = torch.ldexp(unpacked, exponent - base - shift)  # (R, K)
            codes = floats.encode(y.clamp(-448, 448).float(), "e4m3")
            wide = torch.ldexp(
                torch.ones(self.rows, dtype=torch.float64, device=self.device), base[:, 0] + shift
            )  # (R,)
            wide = wide if self.scale is None else wide * self.scale.double()
            scale = wide.float()
            if torch.equal(floats.decode(codes, "e4m3").double(), y) and torch.equal(scale.double(), wide):
                return FloatOperand(codes, "e4m3", self.k, scale)
        return None

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantized values without the per-row scale.

        Parameters
        ----------
        dtype : torch.dtype, default torch.float32
            Dtype of the result and of the arithmetic.

        Returns
        -------
        Tensor, shape (R, K)
            ``blocks * tiles * decode(packed_data)``.
        """
        unpacked = floats.unpack(self.packed_data, self.k, self.dtype)  # (R, K) uint8
        found = floats.decode(unpacked, self.dtype, out_dtype=dtype)  # (R, K)
        if self.blocks is not None:
            wide = self.scale_dtype == "float32"
            scales = self.blocks.to(dtype) if wide else floats.decode(self.blocks, self.scale_dtype, out_dtype=dtype)
            found *= scales.repeat_interleave(self.block, 1)[:, : self.k]  # (R, K)
        if self.tiles is not None:
            rows = self.tiles.to(dtype).repeat_interleave(TILE, 0)[: self.rows]  # (R, ceil(K / 128))
            found *= rows.repeat_interleave(TILE, 1)[:, : self.k]  # (R, K)
        return found


@dataclass(frozen=True)
class ScaledGemmProblem:
    """A checked product of low-precision floats.

    Attributes
    ----------
    a : FloatOperand, shape (M, K)
        Left operand.
    b : FloatOperand, shape (N, K)
        Transpose of the right operand.
    alpha, beta, c, bias, out_dtype
        As for :class:`cute_kernels.gemm.problem.GemmProblem`.
    fast_accum : bool
        Whether Tensor Cores accumulate all of K.
    fold_scales : bool
        Whether ue8m0 block scales may become part of e4m3 values.
    """

    a: FloatOperand
    b: FloatOperand
    alpha: float
    beta: float
    c: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype
    fast_accum: bool
    fold_scales: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.a.rows, self.b.rows, self.a.k

    @property
    def device(self) -> torch.device:
        """Device of the operands."""
        return self.a.device
