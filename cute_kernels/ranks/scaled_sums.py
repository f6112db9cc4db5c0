"""Sums over ranks of int32 matrices in memory that a GPU maps, scaled to rows: ``ranks/scaled_sums.cuh``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit.codegen import OUT_BYTES, OUT_TYPES, KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.operands import ALIGNMENT

MOST_RANKS = 8
_TILE = 64


@dataclass(frozen=True)
class ScaledSumsConfig(KernelConfig):
    """Config of the kernel.

    Parameters
    ----------
    ranks : int
        Matrices to add, 2 to 8.
    columns : bool
        Outputs are the lines in memory, as an SpMM leaves them; else tokens are.
    out : str
        Dtype of the result.

    Examples
    --------
    >>> ScaledSumsConfig(2, True, "bfloat16").name
    'scaled_sums-2-columns-bfloat16'
    """

    ranks: int
    columns: bool
    out: str

    kernel_header = "ranks/scaled_sums.cuh"
    kernel_entry = "scaled_sums"

    @property
    def threads(self) -> int:
        return 256

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"{self.kernel_entry}-{self.ranks}-{'columns' if self.columns else 'rows'}-{self.out}"

    def _constants(self) -> dict[str, object]:
        return {"kRanks": self.ranks, "kColumns": self.columns}

    def _types(self) -> dict[str, str]:
        return {"Out": OUT_TYPES[self.out]}


def scaled_sums(
    parts: Sequence[Tensor], first: Tensor | None, second: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``sum(parts) * first * second + bias`` as contiguous rows; one launch.

    The sum is rounded to float32, each product is, and the last product and the bias are together.

    Parameters
    ----------
    parts : sequence of Tensor, shape (N, M)
        2 to 8 matrices of int32 that a GPU can read, not empty, all contiguous along N or all along M, with equal
        strides; their sum is within int32.
    first, second : Tensor, shape () or (1, M) or (N, 1), optional
        float32, contiguous.
    bias : Tensor, shape (M,), optional
        float32, contiguous.
    dtype : torch.dtype
        Of the result: float32, float16 or bfloat16.

    Returns
    -------
    Tensor, shape (N, M)

    Raises
    ------
    ValueError
        For another number of matrices, or matrices that differ in shape or strides.

    Examples
    --------
    >>> part = torch.ones(2, 3, dtype=torch.int32, device="cuda")  # doctest: +SKIP
    >>> scaled_sums([part, part], None, None, None, torch.float32)[0].tolist()  # doctest: +SKIP
    [2.0, 2.0, 2.0]
    """
    one = parts[0]
    if not 2 <= len(parts) <= MOST_RANKS:
        raise ValueError(f"parts must be 2 to {MOST_RANKS} matrices, got {len(parts)}")
    for each in parts:
        if each.shape != one.shape or each.stride() != one.stride() or each.dtype != torch.int32:
            raise ValueError(f"parts must be int32 of shape {tuple(one.shape)} and strides {one.stride()}, got "
                             f"{each.dtype} {tuple(each.shape)} and {each.stride()}")  # fmt: skip
    tokens, outputs = one.shape
    columns = one.stride(1) != 1 and outputs > 1
    pitch = one.stride(1 if columns else 0)
    out = torch.empty(tokens, outputs, dtype=dtype, device=one.device)
    name = REAL_DTYPES[dtype]
    loads = all(each.data_ptr() % ALIGNMENT == 0 for each in parts) and pitch * 4 % ALIGNMENT == 0
    stores = outputs * OUT_BYTES[name] % ALIGNMENT == 0
    pointers = [each.data_ptr() for each in parts] + [0] * (MOST_RANKS - len(parts))
    blocks = -(-tokens // _TILE) * -(-outputs // _TILE)
    with device_of(one):
        get_kernel(ScaledSumsConfig(len(parts), columns, name)).launch(
            (blocks, 1, 1),
            (
                *pointers, pitch, tokens, outputs, *_scale(first), *_scale(second),
                0 if bias is None else bias.data_ptr(), out.data_ptr(), int(loads), int(stores),
            ),
        )  # fmt: skip
    return out


def _scale(x: Tensor | None) -> tuple[int, int, int]:
    """Address, and the steps from an output and from a token to the next."""
    if x is None:
        return 0, 0, 0
    if x.numel() == 1:
        return x.data_ptr(), 0, 0
    return x.data_ptr(), int(x.shape[0] == 1), int(x.shape[0] != 1)


def two_rank_configs() -> Iterator[ScaledSumsConfig]:
    """Yield the configs for two ranks and 16-bit floats; not warmed while no call takes them by itself."""
    for columns, out in product((False, True), ("float16", "bfloat16")):
        yield ScaledSumsConfig(2, columns, out)
