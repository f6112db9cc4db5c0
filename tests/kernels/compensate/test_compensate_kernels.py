"""Split, selection and packing of Algorithm 1 for a GPU: their source on the CPU gives what the CPU engine gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from cute_kernels.atoms import atom
from cute_kernels.compensate import select, split
from cute_kernels.compensate.select import GROUP, REPORT, Found, Marks
from cute_kernels.compensate.split import Amaxes, find_amaxes, leading_plane, residual_plane
from cute_kernels.cpu import engine
from cute_kernels.cpu.compensate import EntrySelection, split_residual
from cute_kernels.layout.fragments import pack_index
from cute_kernels.spmm.gather import PackedGather, find_long_rows
from tests.kernels.estimate.cta_host import HostKernels, has_compiler

HEADERS = ("compensate/split.cuh", "compensate/select.cuh", "device/packed_int.cuh")
HIGH = 127.0
pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="no g++"),
    pytest.mark.skipif(not engine.available(), reason="no CPU engine"),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("compensate"), HEADERS)


@pytest.fixture(autouse=True)
def host(kernels: HostKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostKernels]:
    """The kernels run on the CPU."""
    for module in (split, select):
        monkeypatch.setattr(module, "get_kernel", kernels.get)
        monkeypatch.setattr(module, "device_of", lambda _: nullcontext())
    yield kernels


def matrix(m: int, k: int, seed: int = 0) -> Tensor:
    """Normal entries, with ties of digits, of either sign, and a zero row and column."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    x[m // 2] = 0
    x[:, k // 3] = 0
    ties = torch.arange(-127, 128)[: min(k, 255)] + 0.5
    x[0, : len(ties)] = ties.clamp(-127, 127) * float(x.abs().max()) / 127
    return x


def stored(x: Tensor, turned: bool) -> Tensor:
    """The same matrix, with contiguous columns if `turned`."""
    return x.t().contiguous().t() if turned else x


SPLITS = [
    (axis, truncate, *order)
    for axis in (None, 0, 1)
    for truncate in (True, False)
    for order in ((False, False), (True, False), (False, True))
]
SHORT = {(None, True, True, False), (1, False, False, False)}  # the others compile for seconds each


@pytest.mark.parametrize(
    ("axis", "truncate", "transposed", "turned"),
    [pytest.param(*case, marks=() if case in SHORT else pytest.mark.long) for case in SPLITS],
)
def test_the_integers_are_those_of_the_cpu(axis: int | None, truncate: bool, transposed: bool, turned: bool) -> None:
    x = matrix(70, 131)
    expected = split_residual(x, axis, high=HIGH, truncate=truncate)
    found = find_amaxes(stored(x, turned), axis, HIGH)
    for plane, integers, scales in zip(
        (leading_plane, residual_plane), (expected.leading, expected.residual), expected.scales, strict=True
    ):
        made = plane(found, truncate=truncate, transposed=transposed)
        assert torch.equal(made.integers, integers)
        assert torch.equal(made.scales, scales) and torch.equal(made.scales32, scales.float())
        assert made.integers.stride()[int(not transposed)] == 1 and max(made.integers.stride()) % 16 == 0


@pytest.mark.parametrize("turned", [False, pytest.param(True, marks=pytest.mark.long)])
def test_sums_and_levels_are_those_of_float64(turned: bool) -> None:
    x = matrix(70, 131)
    sums = select.slice_sums(stored(x, turned))
    magnitudes = x.double().abs()
    assert torch.allclose(sums.of_rows.sum(0), magnitudes.sum(1), rtol=1e-14)
    assert torch.allclose(sums.of_columns.sum(0), magnitudes.sum(0), rtol=1e-14)
    levels = select.find_levels((sums.of_rows, sums.of_columns), (131, 70), 0.3, one=False)
    for level, dim in zip(levels, (1, 0), strict=True):
        assert torch.allclose(level, (0.3 * magnitudes.mean(dim)).float(), rtol=2**-23)
    one = select.find_levels((sums.of_rows, sums.of_columns), (131 * 70, 131 * 70), 0.3, one=True)
    assert all(torch.allclose(each, (0.3 * magnitudes.mean()).float().view(1), rtol=2**-23) for each in one)


def laid_out(operands: tuple[Amaxes, Amaxes], marks: tuple[Marks, Marks] | None = None) -> tuple[Found, Found]:
    report = torch.full((REPORT,), -1.0, dtype=torch.float64)
    select.lay_out(operands, marks, report)
    assert float(report[-1]) == 1.0
    return select.read_report(report.tolist())


def dense_of(packed: PackedGather, marks: Marks, positions: int) -> Tensor:
    """The packed operand as a matrix (slices, positions)."""
    v = marks.vector_length
    rows = min(v, 8)
    index = torch.from_numpy(pack_index(atom("s8_m16n8k32"))[: 4 * rows * 8])
    tiles = packed.values.view(torch.int8).view(-1, v // rows, rows * GROUP)
    groups = torch.empty_like(tiles)
    groups[..., index] = tiles
    vectors = groups.view(-1, v, GROUP).transpose(1, 2).reshape(-1, v)  # (groups * 32, V)
    out = torch.zeros(len(marks.counts) * v, positions, dtype=torch.int8)
    for r, (start, end) in enumerate(
        zip(packed.group_offsets[:-1].tolist(), packed.group_offsets[1:].tolist(), strict=True)
    ):
        columns = packed.columns[start * GROUP : end * GROUP]
        count = int(marks.counts[r])
        assert (columns[:count].diff() > 0).all() and (columns[count:] == -1).all()
        assert not vectors[start * GROUP + count : end * GROUP].any()
        out[r * v : (r + 1) * v, columns[:count].long()] = vectors[start * GROUP : start * GROUP + count].t()
    return out[: marks.slices]


@pytest.mark.parametrize(
    ("vector_length", "axis", "one", "signed", "turned"),
    [
        pytest.param(v, axis, *kind, marks=() if v == 8 and kind[0] else pytest.mark.long)
        for v in (1, 2, 4, 8, 16, 32)
        for axis in (0, 1)
        for kind in ((True, False, False), (False, True, False), (False, False, True))
    ],
)
def test_the_selection_is_that_of_the_cpu(vector_length: int, axis: int, one: bool, signed: bool, turned: bool) -> None:
    x = matrix(70, 131)
    slices, positions = x.shape[axis], x.shape[1 - axis]
    levels = 1.3 + torch.rand(1 if one else slices, generator=torch.Generator().manual_seed(1))
    expected = EntrySelection(x, levels, transposed=axis == 1, vector_length=vector_length, is_signed=signed)
    operand = find_amaxes(stored(x, turned), None if one else axis, HIGH)
    marks = select.mark(operand, axis, levels, vector_length=vector_length, signed=signed)
    assert marks.counts.tolist() == expected.lengths.tolist()
    largest = marks.kept.view(torch.float32)
    assert torch.equal(largest, expected.largest.max().view(1) if one else expected.largest)
    found, _ = laid_out((operand, operand), (marks, marks))
    assert found.vectors == int(expected.lengths.sum()) and found.last == int(expected.lengths[-1])
    assert torch.equal(marks.long_rows[: found.long].sort().values, find_long_rows(marks.offsets, found.groups))
    scale = largest.double() / HIGH
    scale = torch.where(scale > 0, scale, 1.0)
    assert torch.equal(marks.scales, scale) and torch.equal(marks.scales32, scale.float())
    packed = select.pack_marked(marks, found, truncate=True)
    values = x if axis == 0 else x.t()
    keep = (values if signed else values.abs()) > levels[:, None]
    keep = torch.nn.functional.pad(keep, (0, 0, 0, -slices % vector_length)).view(-1, vector_length, positions).any(1)
    keep = keep.repeat_interleave(vector_length, 0)[:slices]
    whole = split_residual((values * keep).contiguous(), None if one else 0, high=HIGH, truncate=True)
    assert torch.equal(dense_of(packed, marks, positions), whole.leading)


def test_a_report_has_the_range_of_the_amaxes() -> None:
    x = matrix(64, 64)
    x[3] *= 1e-30
    operands = find_amaxes(x, 0, HIGH), find_amaxes(x * float("inf"), None, HIGH)
    a, b = laid_out(operands)
    amaxes = x.abs().amax(1)
    assert a[:4] == b[:4] == (0, 0, 0, 0)
    assert (a.most, a.least) == (float(amaxes.max()), float(amaxes[amaxes > 0].min()))
    assert not b.most < float("inf")
    zeros = find_amaxes(torch.zeros(3, 5), None, HIGH)
    assert laid_out((zeros, zeros))[0][4:] == (0.0, float("inf"))


@pytest.mark.long
def test_long_rows_are_found() -> None:
    x = torch.zeros(64, 4096)
    x[9] = 1.0
    operand: Amaxes = find_amaxes(x, None, HIGH)
    marks = select.mark(operand, 0, torch.zeros(1), vector_length=1)
    found, _ = laid_out((operand, operand), (marks, marks))
    assert (found.groups, found.long, int(marks.long_rows[0])) == (128, 1, 9)
