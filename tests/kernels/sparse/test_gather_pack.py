"""The sparse operand of the gather kernel: groups, padding, and the vector rows that a whole CTA multiplies."""

from __future__ import annotations

from dataclasses import replace

import torch

from cute_kernels.dtypes import Integer
from cute_kernels.machine import Machine, Problem
from cute_kernels.operands import Vectors
from cute_kernels.spmm.cost import gather_cost
from cute_kernels.spmm.gather import GatherConfig, long_groups

CONFIG = GatherConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "float16")


def packed_sizes(sizes: list[int]) -> list[int]:
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    vectors = Vectors(offsets, torch.zeros(sum(sizes), dtype=torch.int32), torch.ones(sum(sizes), 8), CONFIG.a)
    vectors = vectors._replace(values=vectors.values.to(torch.int8))
    return CONFIG.pack(vectors, inner=4096).long_rows.tolist()


def test_rows_of_more_than_four_times_the_mean_groups_are_long() -> None:
    assert packed_sizes([15] * 40 + [0] * 60 + [386, 0, 128, 129]) == [
        100,
        103,
    ]  # 13, 4 and 5 groups: at least 4 are not long
    assert packed_sizes([32 * 10] * 8) == [] == packed_sizes([0, 0]) == packed_sizes([100])
    assert packed_sizes([32 * 3] * 63 + [32 * 16 + 1]) == [63]  # 206 groups of 64 rows: 4 on average, rounded up


def test_a_long_row_adds_ctas_and_no_others_change() -> None:
    assert long_groups(64, 64) == 4 and long_groups(65, 64) == 8 and long_groups(0, 0) == 4
    assert CONFIG.grid(512, 512, 1) == (128, 8, 1) and CONFIG.grid(512, 512, 1, long_rows=3) == (131, 8, 1)
    team = replace(CONFIG, split_k_warps=4)
    assert team.grid(512, 512, 2, long_rows=1) == (512 + 1, 8, 2)


def test_the_cost_of_a_long_row_is_shared_by_the_warps_of_a_cta() -> None:
    h200 = Machine("sm_90a", 132)
    uniform, long = (Problem(2048, 512, 2048 * 15, longest, 256) for longest in (30, 386))
    assert (
        gather_cost(CONFIG, h200, uniform) < gather_cost(CONFIG, h200, long) < 1.4 * gather_cost(CONFIG, h200, uniform)
    )
