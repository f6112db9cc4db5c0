"""What ranks check together over gloo, on two GPUs over NCCL: integers and exact floats equal those of one GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.distributed import checks, residual_checks, training_checks
from tests.distributed.rank_pool import Check, Pool, Results, failures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_nccl_available(), reason="needs NCCL"),
]
CHECKS: list[Check] = [*checks.DEFAULT, *residual_checks.DEFAULT, *training_checks.DEFAULT]


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    pool = Pool(2, "cuda")
    try:
        yield pool.run(2, [(check, ()) for check in CHECKS], wait=500)
    finally:
        pool.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_gpus_agree_with_one(check: Check, results: Results) -> None:
    text = failures(results, CHECKS.index(check))
    assert not text, text
