"""Grids, offsets and batches of operands far beyond 2**31, seen at the launch: no memory and no GPU."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch

from cute_kernels.dtypes import Integer
from cute_kernels.jit import Kernel
from cute_kernels.jit.toolchain import KERNEL_HEADERS
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg, Vectors
from cute_kernels.spmm import gather as spmm_gather
from cute_kernels.spmm import panel as spmm_panel
from cute_kernels.spmm.config import group_offsets
from cute_kernels.spmm.heuristics import SpmmKernel
from cute_kernels.spmm.panel import PanelConfig
from tests.gpu.problems import gather, kind, panel, sparse
from tests.gpu.problems import sddmm as sddmm_config

HUGE = 2**33

HEADERS = {"spmm_panel": "spmm/panel.cuh", "spmm_gather": "spmm/gather.cuh", "sddmm": "sddmm/gather.cuh"}


def parameters(stem: str) -> list[str]:
    """Names of a kernel's parameters, in order."""
    text = (KERNEL_HEADERS / HEADERS[stem]).read_text()
    found = re.search(rf"\n{stem}\((.*?)\) {{", text, re.S)
    assert found, stem
    return [parameter.split()[-1].lstrip("*") for parameter in found[1].split(",")]


class Launch(NamedTuple):
    grid: tuple[int, int, int]
    args: dict[str, Any]


class Recorder(Kernel):
    """In place of a kernel: what it would be launched with."""

    def __init__(self, stem: str) -> None:  # nothing is loaded
        self.names, self.num_sms = parameters(stem), 132
        self.launches: list[Launch] = []
        self.maps: list[tuple[Any, ...]] = []

    def launch(
        self, grid: tuple[int, int, int], args: tuple[Any, ...], cluster: object = None, pdl: bool = False
    ) -> None:
        assert all(type(arg) in (int, bytes) for arg in args), "a plain int is passed as 64 bits"
        self.launches.append(Launch(grid, dict(zip(self.names, args, strict=True))))

    def tensor_map(self, *args: Any) -> bytes:
        self.maps.append(args)
        return bytes(128)


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder("spmm_panel")
    monkeypatch.setattr(spmm_panel, "tensor_map", recorder.tensor_map)
    return recorder


def structure(rows: int, kind_of_copy: type[tuple[Any, ...]]) -> list[torch.Tensor]:
    """An execution copy of ``rows`` vector rows that takes no memory."""
    return [torch.empty(1).expand(rows + 1), *[torch.empty(0)] * (len(kind_of_copy._fields) - 1)]  # type: ignore[attr-defined]


NONE = ScaleArg(0, 0, 0)


def test_gather_takes_64_bit_sizes() -> None:
    gathers = Recorder("spmm_gather")
    config = gather(kind(1, out="float16"), tile_n_bytes=128)
    rows, n, pitch = 2**20 + 3, 2**17, HUGE + 16
    b, out = DenseArg(1 << 46, pitch, 3 * HUGE, n), OutputArg(1 << 45, 2, rows, 2**31 - 1, n)
    config.launch(gathers, structure(rows, spmm_gather.PackedGather), b, out, NONE, ScaleArg(1 << 44, 1, n), 0)
    ((grid, args),) = gathers.launches
    assert grid == (2**18 + 1, 1024, 2) and args["folds"] == 1
    assert (args["b"], args["b_pitch"], args["b_batch"], args["b_bytes"]) == (1 << 46, pitch, 3 * HUGE, n)
    assert (args["rows"], args["vector_rows"], args["n"], args["col_scale_batch"]) == (rows, rows, n, n)


def test_gather_folds_n_tiles_beyond_the_grid_and_splits_a_batch_beyond_it() -> None:
    gathers = Recorder("spmm_gather")
    config = gather(kind(1, out="float16"), tile_n_bytes=64)
    rows, n = 8, 64 * (2 * 65_535 + 1)  # three folds of 43,691 tiles, two too many
    copy = structure(rows, spmm_gather.PackedGather)
    b, out, scale = DenseArg(1 << 46, n, 5 * n, n), OutputArg(1 << 45, 30_000, rows, 5, n), ScaleArg(1 << 44, 1, n)
    config.launch(gathers, copy, b, out, NONE, scale, 0)
    assert [grid for grid, _ in gathers.launches] == [(2, 43_691, 3 * 21_845), (2, 43_691, 3 * (30_000 - 21_845))]
    (_, first), (_, second) = gathers.launches
    assert first["folds"] == second["folds"] == 3 and 3 * 43_691 - 2 == 2 * 65_535 + 1
    assert second["b"] - first["b"] == 21_845 * 5 * n and second["out"] - first["out"] == 21_845 * rows * n * 2
    assert second["col_scale"] - first["col_scale"] == 4 * 21_845 * n


def test_panel_grid_stays_the_gpu_while_items_outgrow_32_bits(panels: Recorder) -> None:
    config = panel(kind(8, out="float16"), tile_n_bytes=128, warps=15)
    rows, n = 2**24, 2**31
    assert config.items(rows, n, 1) == -(-rows // 15) * 2**24 > 2**32
    place, out = DenseArg(0, n, 0, n), OutputArg(0, 1, 8 * rows, 4096, n)
    config.launch(panels, structure(rows, spmm_panel.PackedPanel), place, out, NONE, NONE, 0)
    ((grid, args),) = panels.launches
    assert grid == (132, 1, 1) and (args["rows"], args["vector_rows"], args["n"]) == (8 * rows, rows, n)
    assert panels.maps == [(0, 1, (n, 4096), n, (128, 256), 128)]


def test_panel_splits_a_batch_whose_rows_outgrow_the_copy_engines_coordinates(panels: Recorder) -> None:
    config = panel(kind(out="float32"))
    m, k, n, batch = 64, 2**29, 256, 5
    copy, b, right = structure(8, spmm_panel.PackedPanel), DenseArg(1 << 40, n, k * n, n), ScaleArg(1 << 30, 1, n)
    config.launch(panels, copy, b, OutputArg(1 << 50, batch, m, k, n), NONE, right, 0)
    assert len(panels.launches) == batch
    for i, ((grid, args), made) in enumerate(zip(panels.launches, panels.maps, strict=True)):
        assert made == ((1 << 40) + i * k * n, 1, (n, k), n, (64, 256), 64)
        assert args["out"] == (1 << 50) + i * m * n * 4 and args["col_scale"] == (1 << 30) + 4 * i * n
        assert args["batches"] == 1 and grid[0] <= 132
    panels.launches.clear()
    config.launch(panels, copy, b, OutputArg(1 << 50, 3, m, k, n), NONE, right, 0)
    assert len(panels.launches) == 1 and panels.maps[-1][2] == (n, 3 * k)  # 1.5 * 2**30 rows can be named


def test_panel_splits_a_batch_that_is_no_whole_rows_apart(panels: Recorder) -> None:
    config = panel(kind(out="int64"))
    place, out = DenseArg(4096, 96, 80, 64), OutputArg(0, 4, 60, 70, 64)
    config.launch(panels, structure(8, spmm_panel.PackedPanel), place, out, NONE, NONE, 0)
    assert [made[0] for made in panels.maps] == [4096, 4176, 4256, 4336]
    assert [args["out"] for _, args in panels.launches] == [i * 60 * 64 * 8 for i in range(4)]


def test_sddmm_takes_64_bit_sizes() -> None:
    samples = Recorder("sddmm")
    config = sddmm_config(kind(8), stride=64)
    blocks = 2**27
    pattern = [torch.empty(1).expand(blocks), torch.empty(0)]
    place = DenseArg(1 << 45, HUGE, 5 * HUGE, 64)
    config.launch(samples, pattern, place, place, OutputArg(1 << 46, 7, 2**30, 64, 2**30), NONE, NONE)
    ((grid, args),) = samples.launches
    assert grid == (2**28 // 4 * 7, 1, 1) and args["blocks"] == blocks and blocks * 64 * 8 > 2**35
    assert (args["y"], args["y_pitch"], args["y_batch"], args["y_bytes"]) == tuple(place)


def test_group_offsets_of_more_than_two_to_the_31_vectors() -> None:
    lengths = torch.tensor([2**31 - 1, 0, 2**31 - 1, 5, 2**31])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    groups = (lengths + 31) // 32
    starts = torch.zeros(6, dtype=torch.int64)
    starts[1:] = groups.cumsum(0)
    with pytest.MonkeyPatch.context() as patch:  # the list of slots would not fit
        patch.setattr(torch, "repeat_interleave", lambda *_, **__: torch.zeros(1, dtype=torch.int64))
        patch.setattr(torch, "arange", lambda *_, **__: torch.zeros(1, dtype=torch.int64))
        found, _ = group_offsets(offsets, 32)
    assert found.dtype == torch.int64 and torch.equal(found, starts) and int(found[-1]) * 32 > 2**32


@pytest.mark.parametrize(("m", "k", "sparsity"), [(9, 0, 0.4), (0, 12, 0.4), (50, 1100, 1.0), (9, 1, 0.0)])
@pytest.mark.parametrize(
    "config", [gather(kind()), panel(kind()), panel(kind(), ordered=False)], ids=lambda config: config.name
)
def test_execution_copies_of_nothing(config: SpmmKernel, m: int, k: int, sparsity: float) -> None:
    a = sparse(m, k, 8, (8, True), sparsity=sparsity)
    vectors = Vectors(a.pattern.row_offsets, a.pattern.col_indices, a.vectors(), Integer(8, True))
    offsets = config.pack(vectors, k)[0]
    whole = config.warps if isinstance(config, PanelConfig) else 1  # blocks
    assert offsets.shape == (-(-a.pattern.vector_rows // whole) * whole + 1,) and not offsets[0]


def test_execution_copies_index_in_64_bits() -> None:
    vectors = Vectors(
        torch.tensor([0, 2]),
        torch.tensor([0, 2**31 - 2], dtype=torch.int32),
        torch.ones(2, 8, dtype=torch.int8),
        Integer(8, True),
    )
    copy = gather(kind()).pack(vectors, 2**31 - 1)
    assert copy.group_offsets.dtype == torch.int64 and copy.columns[:2].tolist() == [0, 2**31 - 2]
