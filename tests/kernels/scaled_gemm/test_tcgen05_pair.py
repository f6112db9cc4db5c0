"""Tiles that two CTAs share on sm_100a and sm_103a: places in tensor memory, descriptors, rules, and that none is selected."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from cute_kernels.scaled_gemm.config import OperandFormat
from cute_kernels.scaled_gemm.sm100 import Tcgen05Config, candidates, check_two_ctas, choose
from cute_kernels.scaled_gemm.tcgen05 import COLUMNS, MMA_KINDS, accumulator_place
from tests.kernels.scaled_gemm.test_tcgen05 import launched, operand

PLAIN = MMA_KINDS["f8f6f4"]
SHAPES = [(128, 128), (128, 256), (256, 64), (256, 128), (256, 256)]  # rows and columns of a tile
CONFIGS = [Tcgen05Config("float32", tile_n=n, pair_rows=rows) for rows, n in SHAPES]


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_a_product_fills_the_lanes_of_both_ctas(m: int, n: int) -> None:
    columns = Tcgen05Config("float32", tile_n=n, pair_rows=m).tile_columns
    places = {accumulator_place(row, column, m, n, 2) for row in range(m) for column in range(n)}
    assert places == set(product(range(2), range(128), range(columns))) and len(places) == m * n


def test_places_are_those_of_the_manual() -> None:
    """PTX ISA 9.0, section 9.7.16.10.5: layouts A (256 rows, two CTAs), B (128 rows, two CTAs) and D (128 rows, one)."""
    for row, column in product((0, 63, 64, 127), (0, 127, 128, 255)):
        assert accumulator_place(row, column, 128, 256) == (0, row, column)
        assert accumulator_place(row + 128, column, 256, 256, 2) == (1, row, column)
        lane = row % 64 + (64 if column >= 128 else 0)
        assert accumulator_place(row, column, 128, 256, 2) == (row // 64, lane, column % 128)


def test_descriptors_of_pairs_have_the_rows_of_both() -> None:
    assert PLAIN.instruction("e4m3", "e4m3", 256, 256, 2) == 0x10400010
    assert PLAIN.instruction("e2m1", "e5m2", 128, 64, 2) == 0x08100010 | 5 << 7 | 1 << 10
    for m, n, ctas, match in (
        (256, 128, 1, "m must be 128, got 256"),
        (64, 128, 2, "m must be 128 or 256, got 64"),
        (256, 48, 2, "n must be a multiple of 32 up to 256, got 48"),
        (256, 288, 2, "n must be a multiple of 32 up to 256, got 288"),
    ):
        with pytest.raises(ValueError, match=match):
            PLAIN.instruction("e4m3", "e4m3", m, n, ctas)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_configs_of_pairs_fit_the_chip(config: Tcgen05Config) -> None:
    check_two_ctas(config)
    assert config.smem_bytes <= 227 * 1024 < config.smem_bytes + config.part_bytes + 16, "as many stages as fit"
    assert config.part_bytes % 1024 == 0 and config.box_rows[0] % 8 == config.box_rows[1] % 8 == 0
    assert config.columns <= COLUMNS and config.columns & (config.columns - 1) == 0
    # The even CTA's barrier expects the bytes of both: two stages of codes of 8 bits.
    assert config.counted_bytes("e4m3", "e5m2") == 2 * config.part_bytes
    assert config.tiles(config.tile_m + 1, config.tile_n) == 2


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (Tcgen05Config("float32", pair_rows=64), "pair_rows must be 0, 128 or 256, got 64"),
        (Tcgen05Config("float32", tile_n=64, pair_rows=128), "tile_n must be 128 or 256 for pair_rows=128, got 64"),
        (Tcgen05Config("float32", tile_n=192, pair_rows=256), "tile_n must be 64, 128 or 256 for pair_rows=256, got 192"),
        (Tcgen05Config("float32", bits_a=4, pair_rows=256), "config must be f8f6f4 without bits_a for pair_rows=256, got"),
        (Tcgen05Config("float32", kind="mxf4", pair_rows=256), "config must be f8f6f4 without bits_a for pair_rows=256, got"),
    ],
)  # fmt: skip
def test_what_pairs_cannot_do_is_named(config: Tcgen05Config, match: str) -> None:
    with pytest.raises(ValueError, match=re.escape(match)):
        check_two_ctas(config)


def test_the_rules_hold_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operand(OperandFormat("e2m1"), 130, 256, 1), operand(OperandFormat("e4m3"), 70, 256, 2)
    for config in CONFIGS:
        launch = launched(monkeypatch, a, b, config)
        assert (launch.a.box[1], launch.b.box[1]) == config.box_rows
        assert launch.part_bytes == config.counted_bytes("e2m1", "e4m3")
        assert launch.instruction == PLAIN.instruction("e2m1", "e4m3", config.tile_m, config.tile_n, 2)
    with pytest.raises(ValueError, match="pair_rows must be 0, 128 or 256, got 32"):
        launched(monkeypatch, a, b, replace(CONFIGS[0], pair_rows=32))
    short = operand(OperandFormat("e2m1"), 5, 200, 1)
    with pytest.raises(ValueError, match="a must have rows of a multiple of 128 values"):
        launched(monkeypatch, short, operand(OperandFormat("e4m3"), 7, 200, 2), CONFIGS[0])


def test_pairs_are_never_selected() -> None:
    for kind in MMA_KINDS:
        assert not any(config.pair_rows for config in candidates(kind))
        assert choose(8192, 8192, kind, "float32", "none", 148).ctas == 1
    names = {config.name for config in CONFIGS}
    assert len(names) == len(CONFIGS) and all(name.endswith("-pair") for name in names)
    assert not names & {replace(config, pair_rows=0).name for config in CONFIGS}
