"""Dense to SR-BCRS on a GPU: three kernels, and one wait for the size of the result."""

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

__all__ = ["FLOATS", "PIECE", "CompressConfig", "Compressed", "compress", "default_configs", "needs_check", "rows_of"]

# dtype -> C++ type of the entries. Floats are read as their bits: only zero or not matters.
_TYPES = {
    torch.int8: "int8_t", torch.uint8: "uint8_t", torch.int16: "int16_t", torch.uint16: "uint16_t",
    torch.int32: "int32_t", torch.uint32: "uint32_t", torch.int64: "int64_t", torch.uint64: "uint64_t",
    torch.float16: "uint16_t", torch.bfloat16: "uint16_t", torch.float32: "uint32_t", torch.float64: "uint64_t",
}  # fmt: skip
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PIECE = 16  # columns per word of marks
_NARROW = 2048  # most columns for one warp per vector row


@dataclass(frozen=True)
class CompressConfig(KernelConfig):
    """Config of a conversion kernel.

    Parameters
    ----------
    kernel : {"mark", "layout_rows", "fill"}
        Kernel entry.
    value : str
        C++ type of an entry.
    warps : int
        Warps per vector row.
    real : bool
        ``mark``: entries are the bits of floats.
    checked : bool
        ``mark``: the range of the integers is checked.
    masked : bool
        A mask selects the entries.
    bits : int
        ``fill``: width of a stored integer, 4, 8 or 16.
    nibbles : bool
        ``fill``: entries are packed 4-bit integers.

    Examples
    --------
    >>> CompressConfig("mark", "uint16_t", real=True).name
    'compress-mark-uint16_t-8w8-real'
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
        """Return the CTAs for `vector_rows`."""
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
    """Return the configs for int8, float32, float16 and bfloat16 matrices stored with 8 bits, narrow and wide.

    Examples
    --------
    >>> len(default_configs())
    9
    """
    configs = [CompressConfig("layout_rows")]
    for warps in (1, 8):
        configs += [CompressConfig("mark", value, warps, real=value != "int8_t")
                    for value in ("int8_t", "uint16_t", "uint32_t")]  # fmt: skip
        configs.append(CompressConfig("fill", warps=warps))
    return configs


class Compressed(NamedTuple):
    """Tensors of an SR-BCRS matrix.

    Examples
    --------
    >>> entries = torch.eye(8, 64, dtype=torch.int8, device="cuda")  # doctest: +SKIP
    >>> compress(entries, bits=8, signed=True, vector_length=8, stride=32, refuse=print).row_end  # doctest: +SKIP
    tensor([8], device='cuda:0')
    """

    row_start: Tensor  # (R,) int64
    row_end: Tensor  # (R,) int64
    col_indices: Tensor  # (padded vectors,) int32, -1 in the padding
    values: Tensor  # (padded vectors / stride, V, stride), storage form; half as many bytes for 4 bits


def rows_of(x: Tensor) -> Tensor:
    """Return `x` (M, K) with contiguous rows, copied if necessary.

    Examples
    --------
    >>> rows_of(torch.zeros(4, 8).t()).stride()
    (4, 1)
    """
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _pitch(rows: Tensor) -> int:
    """Entries from one row to the next."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


def needs_check(dtype: torch.dtype, bits: int, signed: bool) -> bool:
    """Whether an integer of `dtype` may be outside the range of `bits`.

    Examples
    --------
    >>> needs_check(torch.int16, 8, True), needs_check(torch.int8, 8, True)
    (True, False)
    """
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
    """Convert a dense matrix to SR-BCRS: store the vectors with a nonzero entry, or with an entry in `mask`.

    Waits once for the GPU. The workspace is K / 8 bytes plus 4 bytes per vector row.

    Parameters
    ----------
    entries : Tensor, shape (M, K)
        CUDA tensor, not empty: any integer dtype, checked for the range of `bits`, or a dtype of :data:`FLOATS`. Copied
        unless its rows are contiguous.
    bits, signed : int, bool
        Width and signedness of the stored integers.
    vector_length, stride : int
        V; padding unit of a row, in vectors.
    mask : Tensor, shape (M, K), optional
        bool. Stores exactly the vectors with a true element; integers outside it are stored as zero.
    ints : Tensor, optional
        Integers (M, K) in storage form, packed along the rows for 4 bits. Default: `entries`.
    report : Tensor, shape (2,), optional
        int64 zeros; earlier kernels may have set flags in its second element.
    refuse : callable
        Called with the flags, if any, before anything is stored. 4: an integer is out of range.

    Returns
    -------
    Compressed

    Examples
    --------
    >>> entries = torch.eye(8, 64, dtype=torch.int8, device="cuda")  # doctest: +SKIP
    >>> compress(entries, bits=8, signed=True, vector_length=8, stride=32, refuse=print).values.shape  # doctest: +SKIP
    torch.Size([1, 8, 32])
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
    masked = mask is not None and ints is None  # `ints` are zero outside the mask already
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
                    *_mask_address(mask if masked else None), m, rows, vector_length.bit_length() - 1,
                    stride.bit_length() - 1, columns.data_ptr(), values.data_ptr(),
                ),
            )  # fmt: skip
    return Compressed(bounds[0], bounds[1], columns, values)


def _mask_address(mask: Tensor | None) -> tuple[int, int]:
    """Address and pitch of a mask, 0 for none."""
    return (0, 0) if mask is None else (mask.data_ptr(), _pitch(mask))


def _aligned(rows: Tensor, size: int) -> int:
    """1 if every row starts at a multiple of `size` bytes, else 0."""
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
    """Launch ``mark``: marks and counts of the vectors, and the flag for integers out of range."""
    checked = entries.dtype not in FLOATS and needs_check(entries.dtype, *kind)
    if mask is not None and not checked:
        entries, mask = mask.view(torch.uint8), None  # the mask alone selects the vectors
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
            entries.data_ptr(), _pitch(entries), *_mask_address(mask), *entries.shape, vector_length, marks.data_ptr(),
            marks.shape[1], counts.data_ptr(), *int_range(*kind), report.data_ptr() + 8,
            _aligned(entries, 16), 0 if mask is None else _aligned(mask, 16 // entries.element_size()),
        ),
    )  # fmt: skip
