"""Selected entries of float32 matrices as sparse operands of the gather kernel: host side of ``compensate/select.cuh``.

References
----------
.. [1] Gu, arXiv 2403.06924, Algorithm 1, line 7, and equation 14.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.compensate.split import Amaxes, by_rows, float_arguments, tiles_of
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.spmm.gather import PackedGather

__all__ = [
    "GROUP", "REPORT", "Found", "Marks", "SelectConfig", "SliceSums", "find_levels", "lay_out",
    "mark", "pack_marked", "read_report", "slice_sums",
]  # fmt: skip

GROUP = 32  # vectors of a group, K of the MMA; positions of a word of marks
_WARPS = 8
_STORED = 6  # numbers of an operand in a report
REPORT = 16  # words of a report: those of both operands, zeros, and 1 once they are written


@dataclass(frozen=True)
class SelectConfig(KernelConfig):
    """Config of a kernel of the selection.

    Parameters
    ----------
    kernel : {"magnitude_sums", "levels", "mark_entries", "layout_groups", "fill_groups"}
        Kernel entry.
    vector_length : int
        V.
    across : bool
        Slices are columns.
    one : bool
        One level (``levels``) or one scale (``mark_entries``) of all slices.
    signed : bool
        Entries are compared, not their magnitudes.
    truncate : bool
        Digits round toward zero, else to nearest even.

    Examples
    --------
    >>> SelectConfig("fill_groups", 8, across=True, truncate=True).name
    'select-fill_groups-v8-across-trunc'
    """

    kernel: str
    vector_length: int = 1
    across: bool = False
    one: bool = False
    signed: bool = False
    truncate: bool = False

    kernel_header = "compensate/select.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.kernel

    @property
    def threads(self) -> int:
        return 256

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        flags = {"across": self.across, "one": self.one, "signed": self.signed, "trunc": self.truncate}
        return "-".join(["select", self.kernel, f"v{self.vector_length}", *(tag for tag, on in flags.items() if on)])

    def _constants(self) -> dict[str, object]:
        return {
            "kVector": self.vector_length,
            "kAcross": self.across,
            "kOne": self.one,
            "kOneScale": self.one,
            "kSigned": self.signed,
            "kTruncate": self.truncate,
        }


class SliceSums(NamedTuple):
    """Partial sums of magnitudes of the rows and of the columns of a matrix; what was not asked for is empty.

    Examples
    --------
    >>> slice_sums(torch.ones(64, 256, device="cuda")).of_rows.shape  # doctest: +SKIP
    torch.Size([2, 64])
    """

    of_rows: Tensor  # (parts, M) float64
    of_columns: Tensor  # (parts, N) float64


class Found(NamedTuple):
    """What the host has to know of a selection before it is packed.

    Examples
    --------
    >>> Found(groups=2, vectors=40, last=0, long=0, most=1.0, least=1.0).vectors
    40
    """

    groups: int
    vectors: int
    last: int  # vectors of the last vector row
    long: int  # vector rows that a whole CTA multiplies
    most: float  # largest amax of the operand's slices
    least: float  # least one above zero, inf if there is none


class Marks(NamedTuple):
    """Marked vectors of a matrix, counted but not packed.

    Examples
    --------
    >>> found = find_amaxes(torch.eye(64, device="cuda"), None, 127.0)  # doctest: +SKIP
    >>> marks = mark(found, 0, torch.zeros(1, device="cuda"), vector_length=8)  # doctest: +SKIP
    >>> marks.counts  # doctest: +SKIP
    tensor([8, 8, 8, 8, 8, 8, 8, 8], device='cuda:0', dtype=torch.int32)
    """

    x: Tensor  # (rows, columns) float32, contiguous rows
    across: bool  # slices are columns of x
    vector_length: int
    words: Tensor  # (vector rows, words) int32
    numbers: Tensor  # (vector rows + scales,) int32: `counts`, then `kept`
    offsets: Tensor  # (vector rows + 1,) int64, of the groups, once laid out
    long_rows: Tensor  # (vector rows,) int32, likewise
    scales: Tensor  # (slices,) or (1,) float64, likewise
    scales32: Tensor  # the same in float32

    @property
    def counts(self) -> Tensor:
        """Vectors of each vector row, int32 (vector rows,)."""
        return self.numbers[: self.words.shape[0]]

    @property
    def kept(self) -> Tensor:
        """Bits of the largest kept magnitudes, int32 (slices,) or (1,)."""
        return self.numbers[self.words.shape[0] :]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All memory but the matrix."""
        return self.words, self.numbers, self.offsets, self.long_rows, self.scales, self.scales32

    @property
    def slices(self) -> int:
        """Rows of the sparse operand."""
        return self.x.shape[int(self.across)]


def slice_sums(x: Tensor, of_rows: bool = True, of_columns: bool = True) -> SliceSums:
    """Sum the magnitudes of tiles of a float32 matrix (M, N) on a GPU, along its rows and along its columns.

    Examples
    --------
    >>> slice_sums(torch.ones(64, 256, device="cuda")).of_columns[0, :2]  # doctest: +SKIP
    tensor([64., 64.], device='cuda:0', dtype=torch.float64)
    """
    rows, turned = by_rows(x)
    down, across = tiles_of(rows)
    if turned:
        of_rows, of_columns = of_columns, of_rows
    along, beside = (
        workspace.empty((parts if wanted else 0, size), torch.float64, x.device)
        for parts, size, wanted in ((across, rows.shape[0], of_rows), (down, rows.shape[1], of_columns))
    )
    with device_of(x):
        get_kernel(SelectConfig("magnitude_sums")).launch(
            (down * across, 1, 1),
            (*float_arguments(rows), along.data_ptr() if of_rows else 0, beside.data_ptr() if of_columns else 0),
        )
    return SliceSums(beside, along) if turned else SliceSums(along, beside)


def find_levels(sums: tuple[Tensor, Tensor], counts: tuple[int, int], threshold: float, one: bool) -> list[Tensor]:
    """Return levels, ``threshold * sum / count``, of two operands in one launch.

    Parameters
    ----------
    sums : tuple of Tensor, shapes (parts, slices)
        float64 partial sums of A and of B.
    counts : tuple of int
        Entries of a slice, or, with `one`, of all.
    threshold : float
        Finite.
    one : bool
        One level of all slices.

    Returns
    -------
    list of Tensor, shape (slices,) or (1,)
        float32.

    Examples
    --------
    >>> sums = torch.ones(2, 64, device="cuda", dtype=torch.float64)  # doctest: +SKIP
    >>> find_levels((sums, sums), (4, 4), 3.0, one=False)[0][0]  # doctest: +SKIP
    tensor(1.5000, device='cuda:0')
    """
    device, config = sums[0].device, SelectConfig("levels", one=one)
    found = [workspace.empty((1 if one else each.shape[1],), torch.float32, device) for each in sums]
    blocks = [1 if one else -(-each.shape[1] // config.threads) for each in sums]
    sides = [
        (each.data_ptr(), *each.shape, np.float64(count), to.data_ptr())
        for each, count, to in zip(sums, counts, found, strict=True)
    ]
    with device_of(sums[0]):
        get_kernel(config).launch((sum(blocks), 1, 1), (*sides[0], *sides[1], np.float64(threshold), blocks[0]))
    return found


def mark(operand: Amaxes, axis: int, levels: Tensor, *, vector_length: int, signed: bool = False) -> Marks:
    """Mark the vectors of a matrix with an entry above its slice's level.

    Parameters
    ----------
    operand : Amaxes
        Matrix (M, K), and how its slices share scales: so do the kept entries.
    axis : int
        0 if a row of the sparse operand is a row of the matrix, 1 if it is a column.
    levels : Tensor, shape (slices,) or (1,)
        float32.
    vector_length : int
        V, 1 to 32.
    signed : bool, default False
        Entries are compared, not their magnitudes.

    Examples
    --------
    >>> found = find_amaxes(torch.eye(64, device="cuda"), None, 127.0)  # doctest: +SKIP
    >>> mark(found, 0, torch.zeros(1, device="cuda"), vector_length=1).counts.sum()  # doctest: +SKIP
    tensor(64, device='cuda:0')
    """
    x, device = operand.x, operand.x.device
    across = (axis == 1) != operand.turned
    slices, positions = x.shape[int(across)], x.shape[int(not across)]
    vector_rows, words, one = -(-slices // vector_length), -(-positions // GROUP), operand.scales == 0
    scales = 1 if one else slices
    marks = Marks(
        x, across, vector_length, workspace.empty((vector_rows, words), torch.int32, device),
        workspace.zeros((vector_rows + scales,), torch.int32, device),
        workspace.empty((vector_rows + 1,), torch.int64, device), workspace.empty((vector_rows,), torch.int32, device),
        workspace.empty((scales,), torch.float64, device), workspace.empty((scales,), torch.float32, device),
    )  # fmt: skip
    config = SelectConfig("mark_entries", vector_length, across, one=one, signed=signed)
    chunks = -(-x.shape[1] // 128)
    warps = chunks * (words if across else vector_rows)
    with device_of(x):
        get_kernel(config).launch(
            (-(-warps // _WARPS), 1, 1),
            (
                *float_arguments(x), levels.data_ptr(), int(levels.numel() > 1), marks.words.data_ptr(), words,
                marks.counts.data_ptr(), marks.kept.data_ptr(),
            ),
        )  # fmt: skip
    return marks


def lay_out(operands: tuple[Amaxes, Amaxes], marks: tuple[Marks, Marks] | None, report: Tensor) -> None:
    """Find where the groups of A and of B start, and their scales; without `marks`, only the ranges of the amaxes.

    Parameters
    ----------
    operands : tuple of Amaxes
        A and B.
    marks : tuple of Marks or None
        What is kept of them; gets offsets, long rows and scales.
    report : Tensor, shape (16,)
        float64, on the GPU or pinned, for :func:`read_report`; the last word is written after all others.

    Examples
    --------
    >>> found = find_amaxes(torch.eye(64, device="cuda"), None, 127.0)  # doctest: +SKIP
    >>> lay_out((found, found), None, report := torch.zeros(16, dtype=torch.float64, device="cuda"))  # doctest: +SKIP
    >>> read_report(report.tolist())[0].most  # doctest: +SKIP
    1.0
    """
    nothing = workspace.empty((1,), torch.int64, operands[0].x.device)  # the offsets of no vector row
    sides = []
    for i, operand in enumerate(operands):
        of = None if marks is None else marks[i]
        selected = (
            (0, 0, 0, 0, nothing.data_ptr(), 0, 0, 0)
            if of is None
            else (
                of.counts.data_ptr(), len(of.counts), of.kept.data_ptr(), len(of.kept), of.offsets.data_ptr(),
                of.long_rows.data_ptr(), of.scales.data_ptr(), of.scales32.data_ptr(),
            )
        )  # fmt: skip
        sides += [*selected, operand.bits.data_ptr(), operand.slices]
    with device_of(nothing):
        get_kernel(SelectConfig("layout_groups")).launch(
            (1, 1, 1), (*sides, np.float64(operands[0].high), report.data_ptr())
        )


def read_report(numbers: list[float]) -> tuple[Found, Found]:
    """Return what a report says of A and of B.

    Examples
    --------
    >>> read_report([1, 20, 20, 0, 0x3F800000, 0x3F000000] * 2)[0]
    Found(groups=1, vectors=20, last=20, long=0, most=1.0, least=0.5)
    """
    found = []
    for i in range(0, 2 * _STORED, _STORED):
        groups, vectors, last, long, *bits = map(int, numbers[i : i + _STORED])
        most, least = struct.unpack("2f", struct.pack("2I", *bits))
        found.append(Found(groups, vectors, last, long, most, least))
    return found[0], found[1]


def pack_marked(marks: Marks, found: Found, *, truncate: bool) -> PackedGather:
    """Return the marked entries as integers, packed for the gather kernel.

    Parameters
    ----------
    marks : Marks
        Laid out by :func:`lay_out`.
    found : Found
        Its report.
    truncate : bool
        Digits round toward zero, else to nearest even.

    Examples
    --------
    >>> pack_marked(marks, found, truncate=True).columns.shape  # doctest: +SKIP
    torch.Size([64])
    """
    x, v, device = marks.x, marks.vector_length, marks.x.device
    columns = torch.empty(found.groups * GROUP, dtype=torch.int32, device=device)
    values = torch.empty(found.groups, v * GROUP, dtype=torch.uint8, device=device)
    vector_rows, words = marks.words.shape
    config = SelectConfig("fill_groups", v, marks.across, truncate=truncate)
    address, pitch, *_ = float_arguments(x)
    if found.groups:
        with device_of(x):
            get_kernel(config).launch(
                (vector_rows, 1, 1),
                (
                    marks.words.data_ptr(), words, marks.offsets.data_ptr(), address, pitch, marks.slices,
                    marks.scales.data_ptr(), int(len(marks.scales) > 1), columns.data_ptr(), values.data_ptr(),
                ),
            )  # fmt: skip
    return PackedGather(marks.offsets, columns, values, marks.long_rows[: found.long])
