"""The verdict on a product that was picked on the GPU: its source on the CPU against its formula."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from cute_kernels.estimate import verdict
from cute_kernels.estimate.look import RECORD, LookState
from tests.kernels.estimate.cta_host import HostKernels, has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")
WARPS = (5, 300)
SHAPE = (100, 60)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("verdict"), ("estimate/verdict.cuh",))


@pytest.fixture
def host(kernels: HostKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostKernels]:
    monkeypatch.setattr(verdict, "get_kernel", kernels.get)
    monkeypatch.setattr(verdict, "device_of", lambda _: nullcontext())
    yield kernels


def state(picked: int, squares: float = 4.0, levels: float = 9.0) -> LookState:
    """What the pass over A and the picked product leave; the norm of C is 2, that of its levels 3."""
    record = torch.tensor([0.01, 0.03, 0.001, 0.0001, 0.0003, 0.00001, 1.9, 0.0], dtype=torch.float64)
    gate = torch.zeros(4 + 2 * max(WARPS))
    gate[:1].view(torch.int32)[0] = picked
    warps = WARPS[min(max(picked, 0), 1)]
    gate[4 : 4 + 2 * warps : 2], gate[5 : 5 + 2 * warps : 2] = squares / warps, levels / warps
    gate[4 + 2 * warps :] = math.nan  # of another product
    return LookState(torch.empty(1, RECORD, dtype=torch.float64), record, gate, torch.zeros(1, dtype=torch.int32))


def run(memory: LookState, planes: int = 2) -> verdict.Verdict:
    out = torch.full((verdict.WORDS,), math.nan, dtype=torch.float64)
    verdict.start_verdict(memory, WARPS, planes, SHAPE, out)
    assert out[15] == 1
    return verdict.read_verdict(out.tolist())


@pytest.mark.parametrize("picked", [0, 1])
def test_the_bound_is_that_of_the_picked_product(picked: int, host: HostKernels) -> None:
    memory = state(picked)
    found = run(memory)
    error, bound, noise = memory.record[3 * picked : 3 * picked + 3].tolist()
    assert found.planes == picked + 1 and found.out_of_range == 0
    assert found.predicted[1] == pytest.approx((0.0001 / 1.9, 0.0003 / 1.9, 0.00001 / 1.9))
    assert found.norm == pytest.approx(2 * math.sqrt(1 - 2**-8), rel=1e-6)
    assert found.error == pytest.approx(error / found.norm) and found.noise == pytest.approx(noise / found.norm)
    total = bound + 1.01 * 2**-24 * (2 * 2 + (picked + 1) * 3)
    assert found.upper == pytest.approx(total / (found.norm - total), rel=1e-3)
    assert found.upper >= (bound + 2**-24 * (2 * 2 + (picked + 1) * 3)) / 2


def test_the_levels_follow_the_planes_of_the_pass(host: HostKernels) -> None:
    memory = state(2)
    assert run(memory, planes=3).planes == 3
    assert run(state(1), planes=3).planes == 2


def test_no_product_has_no_bound(host: HostKernels) -> None:
    found = run(state(-1))
    assert found.planes == 0 and found.upper == math.inf
    assert found.norm == 1.9 and found.error == pytest.approx(0.0001 / 1.9)


@pytest.mark.parametrize(
    ("squares", "levels"), [(math.inf, 9.0), (math.nan, 9.0), (4.0, math.inf), (0.0, 0.0), (1e-9, 1.0)]
)
def test_sums_that_prove_nothing_give_no_bound(squares: float, levels: float, host: HostKernels) -> None:
    assert run(state(1, squares, levels)).upper == math.inf
