"""Host half of the sparse softmax: probabilities of a sparse matrix's rows as unsigned integers, in one launch."""

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

_VEC = 8  # neighbouring values that a lane takes
_FRAGMENT_STRIDE = 32


@dataclass(frozen=True)
class SoftmaxConfig(KernelConfig):
    """What the sparse softmax is compiled for: ``x`` names the input's dtype, ``bits`` are those of the results.

    ``atom``: where it is named, the results are written in the fragment order of an SpMM by this instruction,
    whose group must be the stride, 32.
    """

    x: str
    vector_length: int = 8
    stride: int = 32
    bits: int = 8
    causal: bool = False
    bias: bool = False
    atom: str = ""

    def __post_init__(self) -> None:
        if self.atom and (self.stride, self.sparse.group, self.sparse.entry.mma_bits) != (_FRAGMENT_STRIDE, 32, 8):
            raise ValueError(f"atom must multiply bytes in groups of the stride, {_FRAGMENT_STRIDE}, got {self.atom} "
                             f"of {self.sparse.group} for a stride of {self.stride}")  # fmt: skip

    @property
    def sparse(self) -> GatherConfig:
        """A product that takes the results as its sparse operand; says their fragment order."""
        return GatherConfig(self.atom, self.vector_length, Integer(self.bits, False), Integer(8, True), "float16")

    @property
    def warps(self) -> int:
        return 4

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def lanes(self) -> int:
        """Lanes that share a row of a stride."""
        return self.stride // _VEC

    @property
    def rows(self) -> int:
        """Rows of a vector row that a warp takes."""
        return min(self.vector_length, 32 // self.lanes)

    @property
    def blocks(self) -> int:
        """Strides of a vector row that a warp takes at once."""
        return 32 // (self.lanes * self.rows)

    @property
    def planes(self) -> int:
        return digit_count(self.bits)

    @property
    def exchanged(self) -> bool:
        """Whether the four lanes of a row only have to exchange pairs of bytes to write in fragment order."""
        if not self.atom or self.bits == 4 or self.rows != 8 or self.sparse.stacked:
            return False
        places = np.arange(self.planes * 8 * 32, dtype=np.int16).reshape(-1, 8, 4, 4, 2)  # planes, rows, lanes, pairs
        return bool(np.array_equal(self.places(), places.transpose(0, 1, 3, 2, 4).ravel()))

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
            "kExchanged": self.exchanged,
            "kFuseDigits": bool(self.atom) and self.sparse.stacked,
            "kWarps": self.warps,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": OUT_TYPES[self.x]}

    def places(self) -> np.ndarray[Any, np.dtype[np.int16]]:
        """int16 (planes * rows * 32,): for each value of a group's copy in fragment order, its place among the planes.

        Of a row tile: (planes, rows, 32 slots).  Operands follow one another: a plane each, or all of them where digits
        are stacked.  Values are bytes, or nibbles of 4-bit integers, low ones first.
        """
        sparse, plane = self.sparse, self.rows * self.stride
        used = plane * (self.planes if sparse.stacked else 1)
        order = pack_index(sparse.entry, packed=sparse.packed)[:used]
        starts = [0] if sparse.stacked else [p * plane for p in range(self.planes)]
        return np.concatenate([order + start for start in starts]).astype(np.int16)


@lru_cache
def _places(config: SoftmaxConfig, device: int) -> Tensor:
    return torch.from_numpy(config.places()).to(f"cuda:{device}")


class Rows(NamedTuple):
    """The structure of S: a padded pattern, and what of it repeats along a diagonal."""

    row_start: Tensor  # int64 (R,)
    row_end: Tensor
    col_indices: Tensor  # int32 (padded vectors,)
    total: int  # M; rows beyond become zeros
    period: tuple[int, int]  # vector rows and columns from one block of the diagonal to the next


def softmax(
    x: Tensor,
    rows: Rows,
    config: SoftmaxConfig,
    *,
    scale: float,
    bias: Tensor | None,
    empty: float,
    lse: bool,
    factors: Tensor | None = None,
) -> Probabilities:
    """``u = round(u_max exp(s - max s))``, ``s = scale x + bias``, over each row's stored values; one launch, no wait.

    Arguments:
        x: CUDA tensor (batch, blocks, V, stride), contiguous, of the config's dtype.
        bias: float32 (N,) or (batch, N), contiguous; -inf leaves a key out.
        empty: the scale of a row without keys.
        lse: whether to return ``log sum exp(s)``, -inf for a row without keys.
        factors: float32 (batch * periods,), contiguous, of the scales: one for each block of a diagonal.
    The scale is ``1 / sum(u)``, so that a row sums to one as it is stored; NaN for a row with NaN or +inf.
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
                _places(config, x.device.index).data_ptr() if config.atom else 0, values.data_ptr(),
                0 if factors is None else factors.data_ptr(), -(-vector_rows // rows.period[0]),
                scales.data_ptr(),
                0 if sums is None else sums.data_ptr(), tiles, rows.total, vector_rows, blocks, *rows.period,
                np.float32(scale), np.float32(empty),
            ),
            pdl=True,
        )  # fmt: skip
    return Probabilities(values, scales, sums)


def default_configs() -> list[SoftmaxConfig]:
    """The kernels of sparse attention on float16 products, with and without causality."""
    return [
        SoftmaxConfig("float16", bits=bits, causal=causal, atom=atom)
        for bits, atom in ((16, "s8_m16n8k32"), (8, "s8_m16n8k32"), (4, "int4_as_int8_m16n8k32"))
        for causal in (False, True)
    ]
