"""Products over 1 to 4 processes on gloo: integers and exact floats equal those of one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import magicube_cutlass.distributed as md
from magicube_cutlass.distributed import attention
from tests.distributed import checks, residual_checks, training_checks
from tests.distributed.problems import activations, matrix
from tests.distributed.rank_pool import Check, Pool, failures
from tests.house import ROOT, modules

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

EVERYWHERE = [*checks.DEFAULT, *residual_checks.DEFAULT]
CHECKS: dict[int, list[Check]] = {  # the others run in test_distributed_long
    1: [checks.check_products, checks.check_parallel_styles, residual_checks.check_tolerances, residual_checks.check_tall],
    2: [*EVERYWHERE, *(check for check in training_checks.DEFAULT if check is not training_checks.check_graphs)],
    3: [checks.check_nnz_balances, checks.check_products, checks.check_sddmm, checks.check_attention,
        checks.check_keys_have_the_scales_of_one_process,
        checks.check_bytes_equal_the_model, checks.check_errors, residual_checks.check_reports_are_equal,
        residual_checks.check_error_on_all_ranks_or_none, residual_checks.check_a_rank_that_would_plan_otherwise],
    4: [checks.check_shard_and_unshard, checks.check_products, checks.check_dense_styles,
        residual_checks.check_digits_equal_one_process, residual_checks.check_disagreement,
        residual_checks.check_residual_styles],
}  # fmt: skip
Results = list[list[tuple[bool, Any]]]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="module")
def results(pool: Pool) -> dict[int, Results]:
    """Results of all checks, which run in one group per number of ranks."""
    return {ranks: pool.run(ranks, [(check, ()) for check in each]) for ranks, each in CHECKS.items()}


@pytest.mark.parametrize(
    ("ranks", "check"), [(ranks, check) for ranks, each in CHECKS.items() for check in each],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_ranks_agree_with_one_process(check: Check, ranks: int, results: dict[int, Results]) -> None:
    text = failures(results[ranks], CHECKS[ranks].index(check))
    assert not text, text


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
        for pipe in pool.pipes:
            pipe.send((3, str(tmp_path / "store"), [(die, (what, str(tmp_path)))], seconds))
        for rank in (0, 2):
            assert pool.pipes[rank].poll(120), f"rank {rank} hangs"
            ((passed, result),) = pool.pipes[rank].recv()
            assert passed and result < 2 * seconds, result
    finally:
        pool.close()
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
