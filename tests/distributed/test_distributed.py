"""Products over 1 to 4 processes on gloo: integers and exact floats equal those of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.distributed import checks
from tests.distributed.harness import Check, Pool, failures

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="module")
def results(pool: Pool) -> dict[int, list[list[tuple[bool, object]]]]:
    """Results of all checks, which run in one group per number of ranks."""
    return {ranks: pool.run(ranks, [(check, ()) for check in checks.DEFAULT]) for ranks in (1, 2, 3, 4)}


@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
@pytest.mark.parametrize("check", checks.DEFAULT, ids=lambda check: check.__name__)
def test_ranks_agree_with_one_process(
    check: Check, ranks: int, results: dict[int, list[list[tuple[bool, object]]]]
) -> None:
    text = failures(results[ranks], checks.DEFAULT.index(check))
    assert not text, text
