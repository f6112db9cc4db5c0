"""Dense to SR-BCRS on a GPU: three launches, and one wait for the size of the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.integers import int_range, storage_dtype
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel

# dtype -> C++ type of the entries; floats, of which only zero or not matters, as their bits.
_TYPES = {
    torch.int8: "int8_t", torch.uint8: "uint8_t", torch.int16: "int16_t", torch.uint16: "uint16_t",
    torch.int32: "int32_t", torch.uint32: "uint32_t", torch.int64: "int64_t", torch.uint64: "uint64_t",
    torch.float16: "uint16_t", torch.bfloat16: "uint16_t", torch.float32: "uint32_t", torch.float64: "uint64_t",
}  # fmt: skip
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PIECE = 16  # columns of one word of marks
_NARROW = 2048  # columns up to which one warp has a vector row


@dataclass(frozen=True)
class CompressConfig(KernelConfig):
    """What a kernel is compiled for: ``kernel`` is its name in the source, ``value`` the C++ type of an entry.

    ``warps`` share a vector row.  For ``mark``: ``real``, whether the entries are the bits of floats, and ``checked``,
    whether their range is.  For ``fill``: ``bits`` of a stored integer, 4, 8 or 16, and ``nibbles``, whether the
    entries are packed.  ``masked``: a mask says which entries count.
    """

    kernel: str
    value: str = "int8_t"
    warps: int = 8
    real: bool = False
    checked: bool = False
    masked: bool = False
    bits: int = 8
    nibbles: bool = False

    @property
    def threads(self) -> int:
        return 256

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        named = {"real": self.real, "checked": self.checked, "masked": self.masked, "nibbles": self.nibbles}
        tags = [tag for tag, on in named.items() if on]
        return "-".join(["compress", self.kernel, self.value, f"{self.bits}w{self.warps}", *tags])

    def grid(self, vector_rows: int) -> tuple[int, int, int]:
        return (-(-vector_rows * self.warps * 32 // self.threads), 1, 1)

    kernel_header = "convert/dense_to_sparse.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.kernel

    def _constants(self) -> dict[str, object]:
        return {
            "kThreads": self.threads,
            "kWarps": self.warps,
            "kRows": 4,
            "kFloat": self.real,
            "kChecked": self.checked,
            "kMasked": self.masked,
            "kBits": self.bits,
            "kNibbles": self.nibbles,
        }

    def _types(self) -> dict[str, str]:
        return {"Value": self.value}


def default_configs() -> list[CompressConfig]:
    """The kernels for matrices of int8, float32, float16 and bfloat16, stored with 8 bits, narrow ones and others."""
    found = [CompressConfig("layout_rows")]
    for warps in (1, 8):
        found += [CompressConfig("mark", value, warps, real=value != "int8_t")
                  for value in ("int8_t", "uint16_t", "uint32_t")]  # fmt: skip
        found.append(CompressConfig("fill", warps=warps))
    return found


class Compressed(NamedTuple):
    """The tensors of an SR-BCRS matrix."""

    row_start: Tensor  # int64 (R,)
    row_end: Tensor  # int64 (R,)
    col_indices: Tensor  # int32 (padded vectors,), -1 in the padding
    values: Tensor  # storage form (padded vectors / stride, V, stride), or half as many bytes for 4 bits


def rows_of(x: Tensor) -> Tensor:
    """``x`` (M, K) with contiguous rows; a copy unless it is so."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _pitch(rows: Tensor) -> int:
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


def needs_check(dtype: torch.dtype, bits: int, signed: bool) -> bool:
    """Whether an integer of ``dtype`` may lie outside the range of ``bits``."""
    low, high = int_range(bits, signed)
    return torch.iinfo(dtype).min < low or torch.iinfo(dtype).max > high


def compress(
    entries: Tensor,
    *,
    bits: int,
    signed: bool,
    vector_length: int,
    stride: int,
    mask: Tensor | None = None,
    ints: Tensor | None = None,
    report: Tensor | None = None,
    refuse: Callable[[int], None],
) -> Compressed:
    """The vectors of ``entries`` with an entry that is not zero, or that ``mask`` keeps.

    Arguments:
        entries: CUDA tensor (M, K), not empty, of any integer dtype, checked for the range of ``bits``, or of a dtype
            in :data:`FLOATS`; a copy is made unless its rows are contiguous.
        mask: bool (M, K): exactly the vectors with a true entry are stored; where it is false integers count as zero.
        ints: storage form of the integers (M, K), packed along the rows for 4 bits; ``entries`` themselves by default.
        report: int64 (2,) of zeros, where kernels launched before may have put flags into the second; new by default.
        refuse: called with the flags, when there are any, before anything is stored; 4 is an integer out of range.
    Waits once for the device.  The workspace is K / 8 bytes and 4 more for each vector row.
    Raises what ``refuse`` and :func:`cute_kernels.jit.get_kernel` raise.
    """
    m, k = entries.shape
    device, rows = entries.device, -(-m // vector_length)
    warps, pieces = 1 if k <= _NARROW else 8, -(-k // PIECE)
    report = torch.zeros(2, dtype=torch.int64, device=device) if report is None else report
    marks = torch.empty(rows, pieces, dtype=torch.int16, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    bounds = torch.empty(2, rows, dtype=torch.int64, device=device)
    entries = rows_of(entries)
    mask = None if mask is None else rows_of(mask)
    masked = mask is not None and ints is None  # given integers are zero where the mask is false
    with device_of(entries):
        _mark(entries, mask, marks, counts, report, (bits, signed), vector_length, warps)
        get_kernel(CompressConfig("layout_rows")).launch(
            (1, 1, 1),
            (
                counts.data_ptr(), rows, stride, bounds.data_ptr(), bounds.data_ptr() + 8 * rows, report.data_ptr(),
            ),
        )  # fmt: skip
        total, flags = report.tolist()  # waits
        if flags:
            refuse(flags)
        width = stride // 2 if bits == 4 else stride
        columns = torch.empty(total, dtype=torch.int32, device=device)
        values = torch.empty(total // stride, vector_length, width, dtype=storage_dtype(bits, signed), device=device)
        source = entries if ints is None else ints
        stored = 16 if bits == 12 else bits
        packed = ints is not None and bits == 4
        fill = CompressConfig("fill", _TYPES[source.dtype], warps=warps, masked=masked, bits=stored, nibbles=packed)
        if total:
            get_kernel(fill).launch(
                fill.grid(rows),
                (
                    marks.data_ptr(), pieces, bounds.data_ptr(), source.data_ptr(), _pitch(source),
                    *_mask_place(mask if masked else None), m, rows, vector_length.bit_length() - 1,
                    stride.bit_length() - 1, columns.data_ptr(), values.data_ptr(),
                ),
            )  # fmt: skip
    return Compressed(bounds[0], bounds[1], columns, values)


def _mask_place(mask: Tensor | None) -> tuple[int, int]:
    return (0, 0) if mask is None else (mask.data_ptr(), _pitch(mask))


def _aligned(rows: Tensor, size: int) -> int:
    """Whether every row starts at a multiple of ``size`` bytes: 1 or 0."""
    single = rows.shape[0] == 1
    return int(rows.data_ptr() % size == 0 and (single or _pitch(rows) * rows.element_size() % size == 0))


def _mark(
    entries: Tensor,
    mask: Tensor | None,
    marks: Tensor,
    counts: Tensor,
    report: Tensor,
    kind: tuple[int, bool],
    vector_length: int,
    warps: int,
) -> None:
    """Marks and counts of the vectors, and the flag of an integer out of range."""
    checked = entries.dtype not in FLOATS and needs_check(entries.dtype, *kind)
    if mask is not None and not checked:
        entries, mask = mask.view(torch.uint8), None  # the mask alone says what is stored
    config = CompressConfig(
        "mark",
        _TYPES[entries.dtype],
        warps=warps,
        real=entries.dtype in FLOATS,
        checked=checked,
        masked=mask is not None,
    )
    get_kernel(config).launch(
        config.grid(marks.shape[0]),
        (
            entries.data_ptr(), _pitch(entries), *_mask_place(mask), *entries.shape, vector_length, marks.data_ptr(),
            marks.shape[1], counts.data_ptr(), *int_range(*kind), report.data_ptr() + 8,
            _aligned(entries, 16), 0 if mask is None else _aligned(mask, 16 // entries.element_size()),
        ),
    )  # fmt: skip
