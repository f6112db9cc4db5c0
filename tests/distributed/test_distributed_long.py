"""All checks on 2 to 4 ranks, and agents of two machines: before a release."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.distributed import checks, residual_checks, training_checks
from tests.distributed.rank_pool import Pool, failures
from tests.house import ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_all_checks_hold_on_all_numbers_of_ranks(pool: Pool, ranks: int) -> None:
    every = [*checks.DEFAULT, *residual_checks.DEFAULT, *training_checks.DEFAULT]
    found = pool.run(ranks, [(check, ()) for check in every], wait=600)
    wrong = [failures(found, i) for i in range(len(every))]
    assert not any(wrong), "\n".join(wrong)


def test_two_agents_on_one_machine_run_the_example() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
             "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}",
             "--local-addr", "localhost", "examples/distributed_mlp.py", "--quick", "--device", "cpu"],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in (0, 1)
    ]  # fmt: skip
    texts = [agent.communicate(timeout=240) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], texts
    whole = "".join(out for out, _ in texts)
    assert "4 processes, gloo, cpu" in whole and whole.count("  equal") == 3
