"""SDDMM's panel kernel without a GPU: its index of a pattern, its launch, and its bank conflicts."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pycute")

from cute_kernels.dtypes import Integer
from cute_kernels.jit import Kernel
from cute_kernels.layout.bank_conflicts import report, swizzled, wavefronts
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg
from cute_kernels.sddmm import panel as sddmm_panel
from cute_kernels.sddmm.panel import SddmmPanelConfig
from magicube_cutlass import Pattern
from tests.helpers import random_mask

NONE = ScaleArg(0, 0, 0)


def panel(v: int = 8, x: int = 8, y: int = 8, out: str = "float16", **options: Any) -> SddmmPanelConfig:
    return SddmmPanelConfig("s8_m16n8k32", v, Integer(x, True), Integer(y, True), out, **options)


def index(config: SddmmPanelConfig, pattern: Pattern) -> torch.Tensor:
    start = pattern.padded(config.stride).row_start
    return config.index(pattern.row_offsets, pattern.col_indices, start, pattern.shape[1])


@given(rows=st.integers(1, 20), columns=st.integers(1, 500), density=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
       stride=st.sampled_from([16, 32, 64]), slots=st.sampled_from([16, 32]), tile=st.sampled_from([64, 128, 512]),
       seed=st.integers(0, 999))  # fmt: skip
def test_units_name_each_vector_once_in_its_tile_and_ranges_the_padding(
    rows: int, columns: int, density: float, stride: int, slots: int, tile: int, seed: int
) -> None:
    mask = random_mask(rows, columns, density, seed)
    mask[rows // 2] = False
    pattern, config = Pattern.from_dense(mask, 1), panel(1, stride=stride, slots=slots, tile=tile)
    found = index(config, pattern)
    padded, unit = pattern.padded(stride).col_indices, slots // 8
    assert found.shape == (-(-columns // tile) + 1, rows, 2) and found.dtype == torch.int32 and found.is_contiguous()
    again = torch.zeros_like(mask)
    for number, row in product(range(len(found) - 1), range(rows)):
        first, last = found[number, row].tolist()
        named = padded[first * unit : last * unit]
        own = named[(named >= number * tile) & (named < (number + 1) * tile)]
        assert (first, last) == (0, 0) if not own.numel() else last - first <= len(own) // unit + 2
        assert not again[row, own.long()].any()
        again[row, own.long()] = True
    assert torch.equal(again, mask)
    zeros = [slot for first, last in found[-1].tolist() for slot in range(first, last)]
    assert zeros == (padded < 0).nonzero().view(-1).tolist()


class Recorder(Kernel):
    """In place of a kernel: what it would be launched with."""

    num_sms = 132

    def __init__(self) -> None:  # nothing is loaded
        self.launches: list[tuple[tuple[int, int, int], tuple[Any, ...], bool]] = []

    def launch(
        self, grid: tuple[int, int, int], args: tuple[Any, ...], cluster: object = None, pdl: bool = False
    ) -> None:
        assert all(type(arg) in (int, bytes) for arg in args), "a plain int is passed as 64 bits"
        self.launches.append((grid, args, pdl))


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sddmm_panel, "tensor_map", lambda *args: made.append(args) or bytes(128))
    return made


def structure(tiles: int, rows: int, slots: int) -> list[torch.Tensor]:
    """The index of a pattern of these sizes, without memory."""
    return [torch.empty(1).expand(tiles + 1, rows, 2), torch.empty(1).expand(slots)]


@pytest.mark.parametrize(
    ("rows", "n", "batch", "blocks", "block_rows"),
    [(512, 4096, 1, 8 * 16, 32), (512, 4096, 4, 8 * 4 * 4, 128), (3, 500, 1, 3, 1), (512, 100_000, 1, 196, 512)],
)
def test_blocks_fill_the_gpu_once_where_there_are_no_more_tiles(
    maps: list[tuple[Any, ...]], rows: int, n: int, batch: int, blocks: int, block_rows: int
) -> None:
    config, kernel = panel(), Recorder()
    x, y = DenseArg(4096, 256, 8 * rows * 256, 256), DenseArg(8192, 256, n * 256, 256)
    pattern = structure(-(-n // 512), rows, 6400)
    config.launch(kernel, pattern, x, y, OutputArg(64, batch, 8 * rows, 256, n), NONE, NONE, True)
    (((grid, _, _), args, pdl),) = kernel.launches
    step = n if batch > 1 else 0
    assert grid == blocks and args[-2] == block_rows and args[-1] == step and pdl
    assert args[3:7] == tuple(x)
    assert maps == [(8192, 1, (256, step * (batch - 1) + n), 256, (128, 128), 128)]


def test_a_batch_that_no_single_step_separates_is_launched_one_by_one(maps: list[tuple[Any, ...]]) -> None:
    config, kernel = panel(out="int64"), Recorder()
    x, y, right = DenseArg(1 << 40, 96, 640, 80), DenseArg(4096, 96, 4816, 80), ScaleArg(1 << 30, 1, 50)
    config.launch(kernel, structure(1, 1, 32), x, y, OutputArg(1 << 50, 3, 8, 80, 50), NONE, right)
    assert [made[0] for made in maps] == [4096, 8912, 13728]
    assert [args[3] - (1 << 40) for _, args, _ in kernel.launches] == [0, 640, 1280]
    assert [args[7] - (1 << 50) for _, args, _ in kernel.launches] == [i * 32 * 8 * 8 for i in range(3)]
    assert [args[11] - (1 << 30) for _, args, _ in kernel.launches] == [0, 200, 400]
    kernel.launches.clear()
    far = DenseArg(0, 128, 2**37, 128)  # 2**30 rows apart
    config.launch(kernel, structure(1, 1, 32), x, far, OutputArg(0, 3, 8, 128, 50), NONE, NONE)
    assert len(kernel.launches) == 3


def test_sums_of_nothing_read_no_row(maps: list[tuple[Any, ...]]) -> None:
    kernel = Recorder()
    panel().launch(kernel, structure(2, 3, 32), DenseArg(0, 16, 0, 0), DenseArg(0, 16, 0, 0), OutputArg(256, 2, 24, 0, 600), NONE, NONE)  # fmt: skip
    ((_, args, _),) = kernel.launches
    assert maps[0][:3] == (256, 1, (16, 1)) and args[3] == 256 and args[6] == 0


@given(st.lists(st.integers(0, 511), min_size=8, max_size=8))
def test_lane_groups_read_any_rows_without_conflicts_and_all_their_bytes(rows: list[int]) -> None:
    lane = np.arange(32)
    g, t, row = lane // 4, lane % 4, np.array(rows)[lane // 4]
    lane_base = (t + g % 2 * 4) * 16  # as RowOfY has it
    at, crossed = (lane_base ^ (row & 3) << 4) + row * 128, (row >> 2 ^ lane_base >> 6) & 1
    for half, place in ((crossed, at), (1 - crossed, at ^ 64)):
        assert np.array_equal(place, swizzled(row, 4 * half + t, 128))
        assert wavefronts(place, 16) == 4


@pytest.mark.parametrize("v", [1, 8, 32])
@pytest.mark.parametrize(("x", "y"), list(product((4, 8, 16), repeat=2)))
def test_configs_have_no_conflicts_but_those_of_long_parts_of_x(v: int, x: int, y: int) -> None:
    for options in ({"boxes": 1}, {"boxes": 2, "slots": 16, "tile": 128}):
        rows_of_y, _, rows_of_x = report(panel(v, x, y, **options).smem_accesses())  # type: ignore[arg-type]
        assert rows_of_y.conflicts == 0
        assert rows_of_x.conflicts == 0 or x > y  # a lane's part is then longer than one load
    rows_of_y, _, rows_of_x = report(panel(v, x, y, boxes=1, box_bytes=64).smem_accesses())
    assert rows_of_y.wavefronts == 2 * rows_of_y.ideal  # units of four: all rows of one parity, the worst case
    assert rows_of_x.conflicts == 0 or x > y
