"""Products over 1 to 4 processes on gloo: integers and exact floats equal those of one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import magicube_cutlass.distributed as md
from magicube_cutlass.distributed import attention
from tests.distributed import attention_checks, checks, residual_checks, training_checks
from tests.distributed.problems import activations, matrix
from tests.distributed.rank_pool import Check, Pool, Results, failures
from tests.house import ROOT, modules

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

ROUNDS = (  # groups that run at a time: ranks, first process, random products, tolerances
    ((2, 0, 400, 110), (2, 2, 400, 110)), ((3, 0, 240, 70), (1, 3, 800, 170)), ((4, 0, 160, 40),),
)  # fmt: skip
RANDOM = (checks.check_products, residual_checks.check_tolerances)
CHECKS: dict[int, list[Check]] = {  # the others run in test_distributed_long
    1: [checks.check_parallel_styles, residual_checks.check_tall],
    2: [check for check in (*checks.DEFAULT, attention_checks.check_queries_run_the_kernel_of_all,
                            *residual_checks.DEFAULT, *training_checks.DEFAULT)
        if check not in (*RANDOM, training_checks.check_graphs)],
    3: [checks.check_nnz_balances, checks.check_sddmm, checks.check_attention,
        checks.check_keys_have_the_scales_of_one_process, attention_checks.check_queries_run_the_kernel_of_all,
        checks.check_bytes_equal_the_model, checks.check_errors, residual_checks.check_reports_are_equal,
        residual_checks.check_error_on_all_ranks_or_none, residual_checks.check_a_rank_that_would_plan_otherwise],
    4: [checks.check_shard_and_unshard, checks.check_dense_styles,
        residual_checks.check_digits_equal_one_process, residual_checks.check_disagreement,
        residual_checks.check_residual_styles],
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="module")
def random_results(pool: Pool) -> list[Results]:
    """Results of random products and tolerances; groups beside each other, for they wait most of the time."""
    found: list[Results] = []
    for groups in ROUNDS:
        waiting = []
        for ranks, at, *counts in groups:
            calls = [(check, (10000 * ranks + 1000 * at, n)) for check, n in zip(RANDOM, counts, strict=True)]
            waiting.append(pool.start(ranks, calls, at=at))
        found += [each() for each in waiting]
    return found


@pytest.fixture(scope="module")
def results(pool: Pool) -> dict[int, Results]:
    """Results of all checks, two groups at a time: those of two ranks by halves, three ranks beside one."""
    jobs = {ranks: [(check, ()) for check in each] for ranks, each in CHECKS.items()}
    half = -len(training_checks.DEFAULT)
    halves = pool.start(2, jobs[2][:half]), pool.start(2, jobs[2][half:], at=2)
    found = {2: [a + b for a, b in zip(*(each() for each in halves), strict=True)]}
    beside = pool.start(3, jobs[3]), pool.start(1, jobs[1], at=3)
    found[3], found[1] = (each() for each in beside)
    return {**found, 4: pool.run(4, jobs[4])}


@pytest.mark.parametrize(
    ("ranks", "check"), [(ranks, check) for ranks, each in CHECKS.items() for check in each],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_ranks_agree_with_one_process(check: Check, ranks: int, results: dict[int, Results]) -> None:
    text = failures(results[ranks], CHECKS[ranks].index(check))
    assert not text, text


def test_two_thousand_products_are_equal_and_no_tolerance_of_500_is_missed(random_results: list[Results]) -> None:
    for found in random_results:
        for i in range(2):
            assert not failures(found, i), failures(found, i)
        assert all(each == found[0] for each in found)  # the same on every rank
    of_rank_0 = [found[0] for found in random_results]
    assert sum(products for (_, products), _ in of_rank_0) == 2000
    within, missed, raised = (sum(counts[i] for _, (_, counts) in of_rank_0) for i in range(3))
    assert (within + missed + raised, missed) == (500, 0) and within > 300, (within, missed, raised)


def test_two_ranks_save_and_one_to_three_load(pool: Pool, tmp_path: Path) -> None:
    def losses(ranks: int) -> list[float]:
        found = pool.run(ranks, [(training_checks.check_checkpoint, (str(tmp_path),))])
        assert not failures(found, 0), failures(found, 0)
        return found[0][0][1]

    saved = losses(2)
    assert losses(2) == losses(1) == saved
    assert torch.allclose(torch.tensor(losses(3)), torch.tensor(saved), rtol=1e-5)  # a third of a gradient rounds


def die(mesh: DeviceMesh, what: str, folder: str) -> float:
    """Rank 1 ends by SIGKILL before a collective; the others return after how many seconds that raised."""
    A, B = matrix(40, 48, checks.generator(1)), activations(48, 6, checks.generator(2))
    part, x = md.shard(A, mesh), distribute_tensor(B, mesh, [Shard(1)])
    state = {"x": distribute_tensor(torch.randn(40, 48), mesh, [Shard(0)])}
    if what == "save":
        dcp.save(state, checkpoint_id=folder + "/first")
    dist.barrier()
    if mesh.get_local_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        if what == "spmm":
            md.spmm(part, x).full_tensor()
        else:
            dcp.save(state, checkpoint_id=folder + "/second")
    except Exception as error:
        assert not isinstance(error, ValueError), error
        return time.monotonic() - begin
    raise AssertionError("a collective without one of its ranks returned")


@pytest.mark.parametrize("what", ("spmm", "save"))
def test_a_killed_rank_ends_the_others(what: str, tmp_path: Path) -> None:
    pool, seconds = Pool(3), 20.0
    try:
        waiting = pool.start(3, [(die, (what, str(tmp_path)))], seconds)
        for rank in (0, 2):
            assert pool.pipes[rank].poll(120), f"rank {rank} hangs"
            ((passed, result),) = pool.pipes[rank].recv()
            assert passed and result < 2 * seconds, result
    finally:
        pool.close()
        del waiting  # and the file where the ranks met
    if what == "save":  # nothing half-written counts as a checkpoint, and the one before is whole
        assert (tmp_path / "first" / ".metadata").exists() and not (tmp_path / "second" / ".metadata").exists()
        state = {"x": torch.zeros(40, 48)}
        dcp.load(state, checkpoint_id=tmp_path / "first", no_dist=True)
        assert state["x"].abs().min() > 0


def test_without_a_process_group_the_error_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = md.init_mesh("cpu")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"mesh must have a process group, got none; run under torchrun"):
        md.shard(torch.ones(2, 2), mesh)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device_type must be 'cuda' or 'cpu', got 'tpu'"):
        md.init_mesh("tpu")


def test_the_rule_for_scales_of_keys_is_the_kernel_s() -> None:
    header = (ROOT / "cute_kernels" / "attention" / "quantize_qkv.cuh").read_text()
    assert f"kMaxAbsmaxRatio = Config::kBits >= 8 ? {attention._MAX_AMAX_RATIO}f" in header


def test_only_the_folders_of_distributed_import_torch_distributed() -> None:
    found = [name for name, path in modules().items() if "torch.distributed" in path.read_text()]
    assert found and all(".distributed" in name for name in found), found
