"""Sparse softmax with fused quantization on a GPU: host side of ``attention/sparse_softmax.cuh``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.dtypes import Integer
from cute_kernels.integers import digit_count, storage_dtype
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.layout.fragments import pack_index
from cute_kernels.operands import Probabilities
from cute_kernels.spmm.gather import GatherConfig

__all__ = ["SoftmaxConfig", "SoftmaxRows", "default_configs", "softmax"]

_VEC = 8  # consecutive values per lane
_FRAGMENT_STRIDE = 32


@dataclass(frozen=True)
class SoftmaxConfig(KernelConfig):
    """Config of the kernel ``softmax``.

    Parameters
    ----------
    x : str
        Dtype of the input.
    vector_length : int
        V, rows of a vector.
    stride : int
        SR-BCRS stride, in vectors.
    bits : int
        Width of the unsigned results: 4, 8 or 16.
    causal : bool
        Elements with ``j > i`` are excluded.
    bias : bool
        A bias per key is added.
    atom : str
        MMA atom of an SpMM in whose fragment order the results are written; its K must be the stride, 32. Empty: the
        results are written in SR-BCRS order.

    Examples
    --------
    >>> SoftmaxConfig("float16", causal=True, atom="s8_m16n8k32").name
    'softmax-float16-v8-k32-u8-causal-s8_m16n8k32'
    """

    x: str
    vector_length: int = 8
    stride: int = 32
    bits: int = 8
    causal: bool = False
    bias: bool = False
    atom: str = ""

    def __post_init__(self) -> None:
        if self.atom and (self.stride, self.sparse.mma_k, self.sparse.entry.mma_bits) != (_FRAGMENT_STRIDE, 32, 8):
            raise ValueError(f"atom must multiply bytes in groups of the stride, {_FRAGMENT_STRIDE}, got {self.atom} "
                             f"of {self.sparse.mma_k} for a stride of {self.stride}")  # fmt: skip

    @property
    def sparse(self) -> GatherConfig:
        """Config of an SpMM that reads the results; defines their fragment order."""
        return GatherConfig(self.atom, self.vector_length, Integer(self.bits, False), Integer(8, True), "float16")

    @property
    def warps(self) -> int:
        """Warps per CTA."""
        return 4

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def lanes(self) -> int:
        """Lanes per row of a stride."""
        return self.stride // _VEC

    @property
    def rows(self) -> int:
        """Rows of a vector row per warp."""
        return min(self.vector_length, 32 // self.lanes)

    @property
    def blocks(self) -> int:
        """Strides of a vector row that a warp processes at once."""
        return 32 // (self.lanes * self.rows)

    @property
    def planes(self) -> int:
        """Digit planes of the results."""
        return digit_count(self.bits)

    @property
    def uses_shuffles(self) -> bool:
        """Whether the four lanes of a row reach fragment order by exchanging pairs of bytes with two shuffles."""
        if not self.atom or self.bits == 4 or self.rows != 8 or self.sparse.has_fused_digits:
            return False
        order = np.arange(self.planes * 8 * 32, dtype=np.int16).reshape(-1, 8, 4, 4, 2)  # planes, rows, lanes, pairs
        return bool(np.array_equal(self.fragment_order(), order.transpose(0, 1, 3, 2, 4).ravel()))

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        tags = [tag for tag, on in (("causal", self.causal), ("bias", self.bias), (self.atom, self.atom)) if on]
        return "-".join(["softmax", self.x, f"v{self.vector_length}", f"k{self.stride}", f"u{self.bits}", *tags])

    kernel_header = "attention/sparse_softmax.cuh"
    kernel_entry = "softmax"

    def _constants(self) -> dict[str, object]:
        return {
            "kVector": self.vector_length,
            "kStride": self.stride,
            "kBits": self.bits,
            "kCausal": self.causal,
            "kBias": self.bias,
            "kFragments": bool(self.atom),
            "kUsesShuffles": self.uses_shuffles,
            "kFuseDigits": bool(self.atom) and self.sparse.has_fused_digits,
            "kWarps": self.warps,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": OUT_TYPES[self.x]}

    def fragment_order(self) -> np.ndarray[Any, np.dtype[np.int16]]:
        """Return the source of each value of a row tile in fragment order, int16 (planes * rows * 32,).

        A source is an index into the digit planes (planes, rows, 32 slots). Operands are concatenated: one plane each,
        or all planes if digits are fused. Values are bytes, or nibbles of 4-bit integers, low nibble first.
        """
        sparse, plane = self.sparse, self.rows * self.stride
        used = plane * (self.planes if sparse.has_fused_digits else 1)
        order = pack_index(sparse.entry, packed=sparse.packed, shuffled=sparse.shuffle)[:used]
        starts = [0] if sparse.has_fused_digits else [p * plane for p in range(self.planes)]
        return np.concatenate([order + start for start in starts]).astype(np.int16)


@lru_cache
def _fragment_order(config: SoftmaxConfig, device: int) -> Tensor:
    """`SoftmaxConfig.fragment_order` on a GPU."""
    return torch.from_numpy(config.fragment_order()).to(f"cuda:{device}")


class SoftmaxRows(NamedTuple):
    """Structure of the sparse matrix S: a padded pattern, possibly block-diagonal.

    Examples
    --------
    >>> start, end = torch.tensor([0]), torch.tensor([2])
    >>> rows = SoftmaxRows(start, end, torch.tensor([0, 9] + 30 * [-1]).int(), total=8, period=(1, 16))
    >>> rows.col_indices.shape
    torch.Size([32])
    """

    row_start: Tensor  # (R,) int64
    row_end: Tensor  # (R,) int64
    col_indices: Tensor  # (padded vectors,) int32
    total: int  # M; further rows of the last vector row give zeros
    period: tuple[int, int]  # vector rows and columns per diagonal block


def softmax(
    x: Tensor,
    rows: SoftmaxRows,
    config: SoftmaxConfig,
    *,
    scale: float,
    bias: Tensor | None,
    empty: float,
    lse: bool,
    matrix_scale: Tensor | None = None,
) -> Probabilities:
    """Compute the quantized softmax of each row's stored values in one launch, without waiting for the GPU.

    ``u = round(u_max exp(s - max s))`` with ``s = scale x + bias``; the row's scale is ``1 / sum(u)``, so that the
    stored row sums to one.

    Parameters
    ----------
    x : Tensor, shape (batch, blocks, V, stride)
        CUDA tensor of the config's dtype, contiguous.
    rows : SoftmaxRows
        Structure of the matrix.
    config : SoftmaxConfig
        Kernel config.
    scale : float
        Scale of the logits.
    bias : Tensor, shape (N,) or (batch, N), optional
        float32, contiguous; -inf excludes a key.
    empty : float
        Scale of a row without keys.
    lse : bool
        Return the log-sum-exp of ``s``, -inf for a row without keys.
    matrix_scale : Tensor, shape (batch * diagonal blocks,), optional
        float32, contiguous. Multiplies the scales of the rows of each diagonal block.

    Returns
    -------
    Probabilities
        The scale is NaN for a row with NaN or +inf.

    Examples
    --------
    >>> x = torch.zeros(1, 1, 8, 32, dtype=torch.float16, device="cuda")  # doctest: +SKIP
    >>> rows = SoftmaxRows(start, end, columns, total=8, period=(1, 16))  # doctest: +SKIP
    >>> options = {"scale": 1.0, "bias": None, "empty": 0.0, "lse": False}
    >>> softmax(x, rows, SoftmaxConfig("float16"), **options).values.dtype  # doctest: +SKIP
    torch.uint8
    """
    batch, blocks, v, stride = x.shape
    vector_rows = rows.row_start.shape[0]
    width = stride // 2 if config.bits == 4 else stride
    dtype = storage_dtype(config.bits, False)
    if config.atom:
        values = torch.empty((batch * blocks, v * width * dtype.itemsize), dtype=torch.uint8, device=x.device)
    else:
        values = torch.empty((batch * blocks, v, width), dtype=dtype, device=x.device)
    scales = torch.empty((batch, vector_rows * v), dtype=torch.float32, device=x.device)
    sums = torch.empty_like(scales) if lse else None
    tiles = batch * vector_rows * (v // config.rows)
    with device_of(x):
        get_kernel(config).launch(
            (-(-tiles // config.warps), 1, 1),
            (
                x.data_ptr(), rows.row_start.data_ptr(), rows.row_end.data_ptr(), rows.col_indices.data_ptr(),
                0 if bias is None else bias.data_ptr(), 0 if bias is None or bias.ndim == 1 else bias.shape[-1],
                _fragment_order(config, x.device.index).data_ptr() if config.atom else 0, values.data_ptr(),
                0 if matrix_scale is None else matrix_scale.data_ptr(), -(-vector_rows // rows.period[0]),
                scales.data_ptr(),
                0 if sums is None else sums.data_ptr(), tiles, rows.total, vector_rows, blocks, *rows.period,
                np.float32(scale), np.float32(empty),
            ),
            pdl=True,
        )  # fmt: skip
    return Probabilities(values, scales, sums)


def default_configs() -> list[SoftmaxConfig]:
    """Return the configs of sparse attention on float16 scores, with and without causality.

    Examples
    --------
    >>> len(default_configs())
    6
    """
    return [
        SoftmaxConfig("float16", bits=bits, causal=causal, atom=atom)
        for bits, atom in ((16, "s8_m16n8k32"), (8, "s8_m16n8k32"), (4, "int4_as_int8_m16n8k32"))
        for causal in (False, True)
    ]
