"""Activations in the epilogue of the engine's dense products: values of every instruction set, shapes, memory orders."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cute_kernels.cpu import extension
from cute_kernels.cpu.dense import pack_right
from cute_kernels.cpu.linear import FUNCTIONS, LinearCall

pytestmark = pytest.mark.skipif(not extension.available(), reason="no engine")
NAMES = [each for each in FUNCTIONS if each is not None]
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, name: str) -> Tensor:
    """The function of the engine's results, by torch in float64."""
    return TORCH[name](x.double())


def close(got: Tensor, x: Tensor, name: str) -> bool:
    """Whether float32 results are within 4e-7 (GELU), 1e-7, or two units in the last place of those in float64."""
    want = exact(x, name)
    apart = (got.double() - want).abs()
    return bool((apart <= torch.clamp(2.0**-22 * want.abs(), min=4e-7 if name == "gelu" else 1e-7)).all())


def results(x: Tensor, name: str) -> Tensor:
    """f(x) by the engine: x is the bias of a product that is zero."""
    weight = pack_right(torch.zeros(8, len(x), dtype=torch.int8), 8)
    return LinearCall(weight, 1, 8, 8, torch.float32)(torch.zeros(1, 8), None, None, x, None, name)[0]


@pytest.mark.parametrize("isa", extension.isas())
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_computes_the_function(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGICUBE_CPU", isa)
    size = torch.logspace(-38, 38, 3001)
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.linspace(-0.1, 0.1, 20_001), size, -size, torch.zeros(1)])
    got = results(x, name)
    assert close(got, x, name)
    monkeypatch.setenv("MAGICUBE_CPU", "portable")
    assert torch.equal(got, results(x, name))  # every instruction set rounds alike
    high, low = results(torch.tensor([torch.inf, -torch.inf]), name).tolist()
    assert high == torch.inf and abs(low) < 1e-15
    assert bool(results(torch.full((70,), torch.nan), name).isnan().all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 96, 70), (7, 96, 64), (300, 40, 1024), (65, 96, 130)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_products_are_activated_before_they_are_rounded(
    dtype: torch.dtype, shape: tuple[int, int, int], name: str
) -> None:
    rows, k, m = shape
    weight = pack_right(torch.randint(-127, 128, (k, m), dtype=torch.int8), 8)
    x, bias, scale = normal(rows, k), normal(m, seed=1), torch.full((m,), 2e-3)
    for column_major in (False, True):
        before = LinearCall(weight, rows, k, 8, torch.float32, column_major)(x, None, scale, bias)
        got = LinearCall(weight, rows, k, 8, dtype, column_major)(x, None, scale, bias, None, name)
        assert got.stride() == ((1, rows) if column_major else (m, 1))
        if dtype is torch.float32:
            assert close(got, before, name)
        else:
            apart = got.double() - exact(before, name)
            step = torch.finfo(dtype).eps * exact(before, name).abs() / 2
            assert bool((apart.abs() <= 1.001 * step + 1e-6).all())
