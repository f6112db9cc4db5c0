"""The kernel that orders columns, against the rules again in Python."""

import pytest

pytest.importorskip("pycute")

from cute_kernels.layout.column_order import ColumnOrderConfig, ordered_slots
from tests.helpers import random_mask
from tests.kernels.layout.column_order import expected_slots
from tests.kernels.layout.test_column_order import ORDERS, structure

pytestmark = [pytest.mark.gpu, pytest.mark.configs([ColumnOrderConfig()])]


@pytest.mark.parametrize(("tile", "group", "window"), ORDERS)
@pytest.mark.parametrize("density", [0.0, 0.03, 0.3])
def test_the_kernel_takes_the_cheapest_of_its_orders(density: float, tile: int, group: int, window: int) -> None:
    columns, offsets = structure(random_mask(37, 600, density, seed=tile + window))
    where = (tile, -(-600 // tile), group, window)
    found = ordered_slots(columns.cuda(), offsets.cuda(), *where)
    assert found.tolist() == expected_slots(columns, offsets, *where)
