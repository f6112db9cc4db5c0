"""Processes that run checks together: started once, then grouped by 1 to 4 over gloo, or NCCL with a GPU each.

A fork server imports the library once, so that four processes cost one start. Each check is a function of a mesh; it
runs on all ranks at once, and its failure on any rank is the test's.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

Check = Callable[..., Any]
Results = list[list[tuple[bool, Any]]]  # per rank and check: whether it passed, and what it returned or its traceback
PRELOAD = [
    "torch", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict",
    "magicube_cutlass.distributed", "residual.distributed", "tests.distributed.checks", "scipy.special",
]  # fmt: skip


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(*job))


def _run(
    rank: int, ranks: int, store: str, checks: Sequence[tuple[Check, tuple[Any, ...]]], seconds: float, device: str
) -> Any:
    """Results of the checks, each (whether it passed, what it returned or its traceback)."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    found = []
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(device)  # where the checks make their operands
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl"}[device],
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
    )
    try:
        mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("tp",))
        for check, arguments in checks:
            torch.manual_seed(0)
            begin = time.perf_counter()
            try:
                found.append((True, check(mesh, *arguments)))
            except BaseException:
                found.append((False, traceback.format_exc()))
            if rank == 0 and "MAGICUBE_SHOW_SECONDS" in os.environ:
                print(f"{ranks} ranks, {check.__name__}: {time.perf_counter() - begin:.2f} s", flush=True)
    finally:
        dist.destroy_process_group()
    return found


class Pool:
    """Up to four processes."""

    def __init__(self, ranks: int = 4, device: str = "cpu") -> None:
        self.device = device
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        os.environ["OMP_NUM_THREADS"] = "1"
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def start(
        self, ranks: int, checks: Sequence[tuple[Check, tuple[Any, ...]]], seconds: float = 30.0, at: int = 0,
        wait: float = 240.0,
    ) -> Callable[[], Results]:  # fmt: skip
        """Start checks on `ranks` processes from the one `at`; the call returns their results per rank.

        Ends the processes if they take longer than `wait`.
        """
        folder = tempfile.TemporaryDirectory()
        pipes = self.pipes[at : at + ranks]
        for rank, pipe in enumerate(pipes):
            pipe.send((rank, ranks, os.path.join(folder.name, "store"), list(checks), seconds, self.device))

        def finish() -> Results:
            found = []
            with folder:
                for rank, pipe in enumerate(pipes):
                    if not pipe.poll(wait):
                        self.close()
                        raise TimeoutError(f"rank {rank} of {ranks} did not answer within {wait:.0f} s")
                    found.append(pipe.recv())
            return found

        return finish

    def run(self, ranks: int, checks: Sequence[tuple[Check, tuple[Any, ...]]], wait: float = 240.0) -> Results:
        """Return the results of checks on `ranks` processes, per rank."""
        return self.start(ranks, checks, wait=wait)()

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)


def failures(results: Sequence[Sequence[tuple[bool, Any]]], index: int) -> str:
    """Return the tracebacks of a check on the ranks where it failed."""
    wrong = [(rank, each[index][1]) for rank, each in enumerate(results) if not each[index][0]]
    return "\n".join(f"rank {rank} of {len(results)}:\n{text}" for rank, text in wrong)
