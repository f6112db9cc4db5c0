"""Packed 4-bit integers as operands of the dense product: half the bytes of int8, unpacked in registers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cute_kernels.cpu.dense import PackedRight, pack_right
from cute_kernels.gemm.config import GemmConfig, Products
from cute_kernels.integers import check_range, pack4, unpack4

__all__ = ["NATIVE_INT4", "Int4Matrix"]

# One product by s4 instructions, native from sm_80 to sm_89, where it has not run. On an H100, which takes several
# instructions for each, it is exact, and takes 17 to 26 times as long as int8.
NATIVE_INT4 = GemmConfig("mma", Products(1, 1, 1), "int32", tile_k=64, bits=4)


@dataclass(frozen=True, eq=False)
class Int4Matrix:
    """Signed 4-bit integers, two per byte along K: the left (M, K) or right (K, N) operand of ``gemm``.

    ``Int4Matrix(q.data, tuple(q.shape), q.packed_dim % 2)`` reads a 4-bit ``QuantTensor`` that is packed along K. A
    right operand on a CPU is reordered at its first product and keeps that copy.

    Parameters
    ----------
    data : Tensor, shape (M, ceil(K / 2)) or (ceil(K / 2), N)
        uint8, low nibble first, of any memory strides; an odd K ends with a zero nibble. Must not be changed.
    shape : tuple of int
        (M, K) or (K, N).
    axis : int
        Dimension of K: 1 for a left operand, 0 for a right one.

    Raises
    ------
    TypeError
        If `data` is not uint8.
    ValueError
        If its shape does not fit.

    Examples
    --------
    >>> import torch
    >>> from cute_kernels.gemm import Int4Matrix, gemm
    >>> b = Int4Matrix.from_ints(torch.tensor([[1, -8], [7, 2]]), axis=0)
    >>> gemm(torch.tensor([[100, -1]], dtype=torch.int8), b)
    tensor([[  93, -802]], dtype=torch.int32)
    """

    data: Tensor
    shape: tuple[int, int]
    axis: int
    _copies: dict[str, PackedRight] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.data.dtype != torch.uint8:
            raise TypeError(f"data must be torch.uint8, got {self.data.dtype}")
        if self.axis not in (0, 1):
            raise ValueError(f"axis must be 0 or 1, got {self.axis!r}")
        expected = [*self.shape]
        expected[self.axis] = (expected[self.axis] + 1) // 2
        if list(self.data.shape) != expected:
            raise ValueError(f"data must have shape {tuple(expected)}, got {tuple(self.data.shape)}")

    @classmethod
    def from_ints(cls, ints: Tensor, axis: int) -> Int4Matrix:
        """Pack a matrix of integers in [-8, 7] along `axis`.

        Raises
        ------
        TypeError, ValueError
            If `ints` is no matrix of integers in this range.
        """
        check_range(ints, 4, True, "ints")
        if ints.ndim != 2:
            raise ValueError(f"ints must have 2 dimensions, got {ints.ndim}")
        lines = ints if axis else ints.t()  # (M or N, K)
        packed = pack4(lines).contiguous()  # (M or N, ceil(K / 2))
        return cls(packed if axis else packed.t(), (ints.shape[0], ints.shape[1]), axis)

    @property
    def device(self) -> torch.device:
        """Device of the integers."""
        return self.data.device

    @property
    def lines(self) -> Tensor:
        """The bytes as int8, (M or N, ceil(K / 2)), a view."""
        return (self.data if self.axis else self.data.t()).view(torch.int8)

    def ints(self) -> Tensor:
        """Return the integers as int8, K-major."""
        lines = unpack4(self.lines.view(torch.uint8), self.shape[self.axis], True)  # (M or N, K)
        return lines if self.axis else lines.t()

    def shell(self) -> Tensor:
        """Return an int8 tensor of this shape and device, without memory of its own."""
        return torch.empty((), dtype=torch.int8, device=self.device).expand(self.shape)

    def packed_right(self) -> PackedRight:
        """Return the right operand of the CPU engine, packed once."""
        if "right" not in self._copies:
            self._copies["right"] = pack_right(self.ints(), bits=4)
        return self._copies["right"]
