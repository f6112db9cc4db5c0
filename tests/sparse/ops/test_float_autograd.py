"""Gradients of the products of floats against torch's own of the dense product."""

from __future__ import annotations

import pytest
import torch

import magicube_cutlass as mc
from magicube_cutlass.autograd import sddmm, spmm, vectors_at
from magicube_cutlass.reference import at_vectors

EPS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def near(found: torch.Tensor | None, expected: torch.Tensor | None, dtype: torch.dtype) -> bool:
    assert found is not None and expected is not None
    return bool((found.double() - expected).abs().max() <= 4 * EPS[dtype] * expected.abs().max())


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("of", ["half", "e4m3"])
def test_spmm(dtype: torch.dtype, batch: tuple[int, ...], of: str) -> None:
    torch.manual_seed(0)
    name = str(dtype).removeprefix("torch.") if of == "half" else of
    pattern = mc.random_pattern(29, 40, 0.5, 4)
    weight = (torch.randn(29, 40) * pattern.to_dense()).requires_grad_()
    a = mc.SRBCRS.from_mask(
        weight.detach(), pattern.to_dense(), vector_length=4, dtype=name, scale="tensor" if of == "half" else "row"
    )
    x, bias = torch.randn(*batch, 40, 12).to(dtype).requires_grad_(), torch.randn(29).requires_grad_()
    g = torch.randn(*batch, 29, 12).to(dtype)
    spmm(a, x, values=vectors_at(weight, a.pattern), bias=bias).backward(g)
    dense, y, offset = (
        a.to_dense().double().requires_grad_(),
        x.detach().double().requires_grad_(),
        bias.detach().double(),
    )
    offset.requires_grad_()
    (dense @ y + offset[:, None]).backward(g.double())
    assert near(x.grad, y.grad, dtype) and near(bias.grad, offset.grad, dtype)
    assert dense.grad is not None
    assert near(weight.grad, dense.grad * pattern.to_dense(), dtype)
    assert x.grad is not None and x.grad.dtype == dtype


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("batch", [(), (2,), (0,)])
def test_sddmm(dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    pattern = mc.random_pattern(30, 44, 0.5, 8)
    x, y = (
        torch.randn(*batch, 30, 20).to(dtype).requires_grad_(),
        torch.randn(*batch, 44, 20).to(dtype).requires_grad_(),
    )
    s = sddmm(x, y, pattern, bits=None)
    g = torch.randn_like(s)
    s.backward(g)
    left, right = x.detach().double().requires_grad_(), y.detach().double().requires_grad_()
    expected = at_vectors(left @ right.mT, pattern)
    expected.backward(g.double())
    if batch == (0,):
        assert x.grad is not None and x.grad.shape == x.shape and s.shape[0] == 0
        return
    assert near(s, expected.detach(), dtype) and near(x.grad, left.grad, dtype) and near(y.grad, right.grad, dtype)


def test_floats_of_another_width_are_refused() -> None:
    a = mc.SRBCRS.from_dense(torch.ones(8, 8), dtype="float16")
    with pytest.raises(TypeError, match=r"x must be float16 or bfloat16 for a product of floats, got torch\.float32"):
        spmm(a, torch.ones(8, 2))
    with pytest.raises(TypeError, match="y must be float16 or bfloat16"):
        sddmm(torch.ones(8, 2).half(), torch.ones(8, 2), mc.random_pattern(8, 8, 0, 8), bits=None)
