"""Products of the CPU engine with the transpose of a sparse matrix: its vectors sorted by column, nothing filled in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.cpu.arguments import check_address
from cute_kernels.cpu.extension import load_extension

__all__ = ["MAX_SUM", "TransposedOperand", "fits_int32", "pack_transposed", "spmm_transposed"]

MAX_SUM = 2**31 - 1


@dataclass(frozen=True)
class TransposedOperand:
    """The rows of the transpose of a sparse matrix (M, K): the vectors of each column.

    Attributes
    ----------
    offsets : Tensor, shape (K + 1,)
        int64.
    blocks : Tensor, shape (vectors,)
        int32, vector row of each vector.
    planes : Tensor, shape (digits, vectors, V)
        uint8 digits, the top one signed if `signed`; V is even.
    rows : int
        M.
    signed : bool
        Whether the integers are in two's complement.

    Examples
    --------
    >>> import torch
    >>> a = pack_transposed(torch.tensor([0, 0]), torch.tensor([1, 3]), torch.ones(1, 2, 2).byte(), (2, 4), True)
    >>> a.offsets.tolist(), a.nbytes
    ([0, 0, 1, 1, 2], 52)
    """

    offsets: Tensor
    blocks: Tensor
    planes: Tensor
    rows: int
    signed: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return self.offsets.nbytes + self.blocks.nbytes + self.planes.nbytes


def pack_transposed(
    vector_rows: Tensor, columns: Tensor, planes: Tensor, shape: tuple[int, int], signed: bool
) -> TransposedOperand:
    """Return the vectors of a sparse matrix in order of their columns; vectors of one row are paired with a zero.

    Parameters
    ----------
    vector_rows, columns : Tensor, shape (vectors,)
        Vector row and column of each vector, within the matrix.
    planes : Tensor, shape (digits, vectors, V)
        uint8 digits.
    shape : tuple of int
        (M, K).
    signed : bool
        Whether the top digit is signed.

    Examples
    --------
    >>> import torch
    >>> one = pack_transposed(torch.tensor([3]), torch.tensor([0]), torch.ones(1, 1, 1).byte(), (4, 1), True)
    >>> one.blocks.tolist(), one.planes.tolist()
    ([1], [[[0, 1]]])
    """
    (m, k), length = shape, planes.shape[-1]
    for name, index, size in (("vector_rows", vector_rows, -(-m // length)), ("columns", columns, k)):
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise ValueError(f"{name} must lie in [0, {size}), got {int(index.min())} to {int(index.max())}")
    order = torch.argsort(columns, stable=True)
    offsets = torch.zeros(k + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(torch.bincount(columns.long(), minlength=k), 0, out=offsets[1:])
    blocks, sorted_planes = vector_rows[order], planes[:, order]
    if length == 1:
        odd = (blocks % 2).bool()[:, None]  # (vectors, 1)
        sorted_planes = torch.cat((sorted_planes.masked_fill(odd, 0), sorted_planes.masked_fill(~odd, 0)), -1)
        blocks = blocks // 2
    return TransposedOperand(offsets, blocks.to(torch.int32), sorted_planes.contiguous(), m, signed)


def spmm_transposed(a: TransposedOperand, b: list[Tensor], b_signed: bool, columns: int) -> Tensor:
    """Return ``A^T B``, (..., K, N): int32 of single digits, else int64.

    Parameters
    ----------
    a : TransposedOperand, shape (M, K)
        Sparse operand.
    b : list of Tensor, shape (..., M, N)
        Contiguous uint8 digits of B, lowest first.
    b_signed : bool
        Whether the top digit of B is signed.
    columns : int
        N.

    Raises
    ------
    ValueError
        If a sum of digits could exceed int32: M beyond 33,025 for unsigned digits of 8 bits.

    Examples
    --------
    >>> import torch
    >>> from cute_kernels.cpu.extension import available
    >>> a = pack_transposed(torch.tensor([0, 0]), torch.tensor([1, 0]), torch.ones(1, 2, 2).byte(), (2, 2), True)
    >>> b = torch.tensor([[1, 2], [3, 4]]).byte()
    >>> spmm_transposed(a, [b], True, 2).tolist() if available() else [[4, 6], [4, 6]]
    [[4, 6], [4, 6]]
    """
    if not fits_int32(a.rows):
        raise ValueError(f"a must have at most {MAX_SUM // 255**2} rows, got {a.rows}")
    batch, k = b[0].shape[:-2], a.offsets.shape[0] - 1
    total: Tensor | None = None
    for i, plane in enumerate(a.planes):
        for j, other in enumerate(b):
            check_address("b", other, torch.uint8)
            if tuple(other.shape[-2:]) != (a.rows, columns) or not other.is_contiguous():
                raise ValueError(f"b must be contiguous, of shape (..., {a.rows}, {columns}), got {tuple(other.shape)}")
            out = torch.empty(*batch, k, columns, dtype=torch.int32, device="cpu")
            load_extension().spmm_transposed(
                a.offsets.data_ptr(), a.blocks.data_ptr(), plane.data_ptr(), other.data_ptr(), out.data_ptr(), k,
                a.rows, columns, batch.numel(), plane.shape[-1], a.signed and i == len(a.planes) - 1,
                b_signed and j == len(b) - 1, a.blocks.shape[0], torch.get_num_threads(),
            )  # fmt: skip
            part = out if len(a.planes) == len(b) == 1 else out.long() << 8 * (i + j)
            total = part if total is None else total + part
    assert total is not None
    return total


def fits_int32(rows: int) -> bool:
    """Return whether every sum of `rows` products of two digits fits int32.

    Examples
    --------
    >>> fits_int32(33025), fits_int32(33026)
    (True, False)
    """
    return rows * 255**2 <= MAX_SUM
