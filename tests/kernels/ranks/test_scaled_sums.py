"""Sums over ranks, scaled to rows: the kernel's source on the CPU, its machine code, and on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels.jit import Binary, Unit
from cute_kernels.ranks import scaled_sums as sums
from cute_kernels.ranks.scaled_sums import ScaledSumsConfig
from tests.helpers import disassemble
from tests.kernels.estimate.cta_host import HostKernels, has_compiler

SHAPES = [(1, 1), (64, 64), (70, 130), (3, 200), (129, 5)]  # tokens, outputs


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("sums"), ("ranks/scaled_sums.cuh",))


@pytest.fixture
def host(kernels: HostKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sums, "get_kernel", kernels.get)
    monkeypatch.setattr(sums, "device_of", lambda _: nullcontext())
    yield


def parts_of(shape: tuple[int, int], ranks: int, columns: bool, seed: int, device: str = "cpu") -> list[Tensor]:
    """Matrices (tokens, outputs) that are parts of larger ones in memory."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(ranks):
        lines = shape[::-1] if columns else shape
        wide = torch.randint(-(2**28), 2**28, (lines[0], lines[1] + 8), generator=generator, dtype=torch.int32).to(
            device
        )
        part = wide[:, 4 : 4 + lines[1]]
        found.append(part.mT if columns else part)
    return found


def expected_of(parts: list[Tensor], first: Tensor | None, second: Tensor | None, bias: Tensor | None) -> Tensor:
    total = torch.stack([each.long() for each in parts]).sum(0).float()
    total = total if first is None else total * first
    if bias is None:
        return total if second is None else total * second
    by = torch.ones(()) if second is None else second
    return (total.double() * by.double() + bias.double()).float()


def scales(
    shape: tuple[int, int], seed: int, device: str
) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
    generator = torch.Generator().manual_seed(seed)
    of_token, of_output, bias = (torch.rand(n, generator=generator).to(device) for n in (shape[0], *(shape[1],) * 2))
    yield of_output[None], of_token[:, None], bias
    yield of_token[:, None], of_output[None], None
    yield None, of_token[:1].reshape(()), bias
    yield None, None, None


@pytest.mark.skipif(not has_compiler(), reason="no g++")
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_source_adds_exactly_and_rounds_as_one_gpu(ranks: int, columns: bool, host: None) -> None:
    for seed, shape in enumerate(SHAPES):
        parts = parts_of(shape, ranks, columns, seed)
        for first, second, bias in scales(shape, seed, "cpu"):
            found = sums.scaled_sums(parts, first, second, bias, torch.float32)
            assert torch.equal(found, expected_of(parts, first, second, bias)), shape


@pytest.mark.parametrize(
    "config", [*sums.two_rank_configs(), ScaledSumsConfig(8, True, "float32")], ids=lambda c: c.name
)
def test_machine_code_loads_whole_runs_of_every_rank(
    config: ScaledSumsConfig, compile_one: Callable[[Unit], Binary]
) -> None:
    binary = compile_one(config.translation_unit("sm_90a"))
    sass = disassemble(binary.code)
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    assert len(re.findall(r"LDG\.E\.128", sass)) == 4 * config.ranks and "STG.E.128" in sass


def test_matrices_that_differ_are_refused() -> None:
    one = torch.zeros(4, 6, dtype=torch.int32)
    for parts in ([one, one.mT.contiguous().mT], [one, one.long()], [one, one[:3]]):
        with pytest.raises(ValueError, match=r"parts must be int32 of shape \(4, 6\) and strides \(6, 1\), got"):
            sums.scaled_sums(parts, None, None, None, torch.float32)
    with pytest.raises(ValueError, match="parts must be 2 to 8 matrices, got 1"):
        sums.scaled_sums([one], None, None, None, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_sums_on_a_gpu(ranks: int, columns: bool, dtype: torch.dtype) -> None:
    for seed, shape in enumerate([*SHAPES, (256, 4096)]):
        parts = parts_of(shape, ranks, columns, seed, "cuda")
        for first, second, bias in scales(shape, seed, "cuda"):
            small = None if first is None else first * 2.0**-28
            found = sums.scaled_sums(parts, small, second, bias, dtype)
            moved = [None if each is None else each.cpu() for each in (small, second, bias)]
            assert torch.equal(found.cpu(), expected_of([each.cpu() for each in parts], *moved).to(dtype)), shape
