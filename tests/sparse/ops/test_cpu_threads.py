"""Threads of the CPU engine: the same results from any number of them, whether or not they come in time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import magicube_cutlass as mc
from cute_kernels.cpu import engine, extension
from cute_kernels.cpu.dense import multiply, pack_right
from tests.helpers import SCALES

pytestmark = pytest.mark.skipif(not engine.available(), reason="needs the compiled engine")


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """Processes that leave the workers of a call little time, so that many come late."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    yield
    for process in processes:
        process.kill()
        process.wait()


def calls() -> list[Callable[[], Tensor]]:
    """Calls with one to many phases."""
    generator = torch.Generator().manual_seed(0)
    a = mc.SRBCRS.from_dense(torch.randn(70, 130, generator=generator), vector_length=8, bits=8)
    ints, wide = (torch.randint(-high, high, (130, 200), generator=generator) for high in (128, 1 << 15))
    right = mc.QuantTensor.from_ints(ints, bits=8)
    x = torch.randn(90, 130, generator=generator)
    torch.manual_seed(0)
    layer = mc.nn.SparseQuantLinear.from_linear(nn.Linear(130, 70), 0.5).eval().freeze()
    sparse, rows = mc.nn.SparseQuantLinear.from_linear(nn.Linear(256, 512), 0.9).eval().freeze(), torch.randn(330, 256)
    left, packed = ints.t().to(torch.int8).contiguous(), pack_right(ints.to(torch.int8))
    return [
        lambda: mc.spmm(a, right),
        lambda: mc.spmm(a, mc.QuantTensor.from_ints(wide, bits=16)),
        lambda: layer(x),
        lambda: layer(x[:5]),
        lambda: sparse(rows),  # six panels of quantized rows, the last of ten
        lambda: multiply(left, packed),
        *(lambda axis=axis: mc.quantize(x, bits=8, scale=SCALES[axis]).data for axis in (None, 0, 1)),  # type: ignore[misc]
    ]


@pytest.mark.usefixtures("busy_cores", "thread_source")
def test_late_threads_change_no_result(use_threads: Callable[[int], None]) -> None:
    with torch.inference_mode():
        for call in calls():
            use_threads(1)
            expected = call()
            for threads in (2, 3, 7):
                use_threads(threads)
                for _ in range(20):
                    torch.full_like(expected, 77)  # the output takes this memory, not that of an earlier one
                    assert torch.equal(call(), expected)


COUNTED = """
import os
import time

import torch

import magicube_cutlass as mc
from cute_kernels.cpu import extension

engine = extension.load_extension()
torch.set_num_threads(2)
A = mc.SRBCRS.from_dense(torch.randn(256, 512), vector_length=8, bits=8)
B = mc.QuantTensor.from_ints(torch.ones(512, 512, dtype=torch.int8), bits=8)
torch.randn(1 << 20).exp()
engine.set_serial_work(0)
counts = []
for is_wanted in (True, False):
    engine.want_openmp(is_wanted)
    mc.spmm(A, B)
    counts.append(len(os.listdir("/proc/self/task")))
busy = 0.0
for _ in range(20):
    engine.want_openmp(True)
    mc.spmm(A, B)
    time.sleep(0.001)  # the workers sleep now
    before = time.process_time()
    time.sleep(0.01)
    busy += time.process_time() - before
print(counts[1] - counts[0], busy < 0.1 * 20 * 0.01)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads as Linux lists them")
@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info(), reason="torch has other threads")
def test_threads_are_those_of_torch_which_sleep_at_once_on_demand() -> None:
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    run = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, check=False, env=environment)
    assert run.stdout == "1 True\n", run.stderr


@pytest.mark.long
@pytest.mark.alone
def test_no_thread_runs_between_calls(use_threads: Callable[[int], None]) -> None:
    engine_module, call = extension.load_extension(), calls()[0]
    wanted = engine_module.want_openmp(False)  # whose threads wait as the variable OMP_WAIT_POLICY says
    use_threads(4)
    call()
    idle = 0.0
    for _ in range(50):
        call()
        before = time.process_time()
        time.sleep(0.005)
        idle += time.process_time() - before
    engine_module.want_openmp(wanted)
    assert idle < 0.1 * 50 * 0.005
