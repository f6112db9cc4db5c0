"""Float64 sums over the columns of a matrix: the kernel's source on the CPU, its machine code, and on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels.double_sums import RowSums
from cute_kernels.double_sums import row_sums as sums
from cute_kernels.double_sums.row_sums import RowSumsConfig, default_configs, roundings
from cute_kernels.jit import Binary, Unit
from tests.helpers import disassemble
from tests.kernels.estimate.cta_host import HostKernels, has_compiler

UNIT = 2.0**-53
# One entry; less than a warp's share; parts of a chunk; a chunk and one more; three sets of rows.
SHAPES = [(1, 1), (3, 5), (64, 128), (65, 129), (130, 300), (33, 1000)]


def matrices(shape: tuple[int, int], device: str = "cpu") -> list[Tensor]:
    """The same numbers by rows, by rows that are not aligned, and by columns."""
    m, n = shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(m + n)).to(device)
    wide = torch.zeros(m, n + 3, device=device)
    wide[:, 1 : n + 1] = x
    tall = torch.zeros(n, m + 2, device=device)
    tall[:, 2:] = x.mT
    return [x, wide[:, 1 : n + 1], tall[:, 2:].mT]


def operands(n: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    v, norms = (torch.randn(n, k, generator=generator, dtype=torch.float64) for k in (sums.VECTORS, 1))
    return v.to(device), norms[:, 0].abs().to(device)


def check(x: Tensor, found: RowSums, v: Tensor, norms: Tensor) -> None:
    """Each sum is within its roundings, counted once for the kernel and once for the reference."""
    x = x.double()
    allowed = (roundings(x.shape[1]) + x.shape[1]) * UNIT
    for got, left, right in (
        (found.products, x, v), (found.bounds[:, None], x.abs(), norms[:, None]),
        (found.squares[:, None], x.square(), torch.ones_like(norms)[:, None]),
    ):  # fmt: skip
        assert got.shape == (len(x), right.shape[1]) and got.dtype == torch.float64
        assert bool(((got - left @ right).abs() <= allowed * (left.abs() @ right.abs())).all())


@pytest.mark.skipif(not has_compiler(), reason="no g++")
def test_the_source_gives_the_sums_of_float64(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = HostKernels(tmp_path_factory.mktemp("sums"), ("double_sums/row_sums.cuh",))
    monkeypatch.setattr(sums, "get_kernel", kernels.get)
    monkeypatch.setattr(sums, "device_of", lambda _: nullcontext())
    for shape in SHAPES:
        v, norms = operands(shape[1])
        found = [sums.sum_rows(x, v, norms) for x in matrices(shape)]
        for each in found:
            check(matrices(shape)[0], each, v, norms)
            assert all(map(torch.equal, each, found[0]))  # whatever the memory order


@pytest.mark.parametrize("config", default_configs(), ids=lambda config: config.name)
def test_machine_code_keeps_the_sums_in_registers(config: RowSumsConfig, compile_one: Callable[[Unit], Binary]) -> None:
    binary = compile_one(config.translation_unit("sm_90a"))
    sass = disassemble(binary.code)
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    assert len(re.findall(r"\bDFMA\b", sass)) >= 16 * 2 * 17 and not re.search(r"\b(?:LDL|STL)\b", sass)
    assert len(re.findall(r"LDS\.128", sass)) >= 16 * 8
    assert ("LDG.E.128" in sass) == (not config.transposed)


def test_a_term_sees_as_many_roundings_as_the_sums_have() -> None:
    assert roundings(1) == 16 + 1 + 8 and roundings(128) == 25 and roundings(129) == 26


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 4096), (5000, 16384)])
def test_sums_on_a_gpu(shape: tuple[int, int]) -> None:
    v, norms = operands(shape[1], "cuda")
    given = matrices(shape, "cuda")
    found = [sums.sum_rows(x, v, norms) for x in given]
    for each in found:
        check(given[0], each, v, norms)
        assert all(map(torch.equal, each, found[0]))
    assert all(map(torch.equal, sums.sum_rows(given[0], v, norms), found[0]))
    assert (
        sums.can_sum_rows(given[2])
        and not sums.can_sum_rows(given[0].double())
        and not sums.can_sum_rows(given[0][:, ::2][::2])
    )
