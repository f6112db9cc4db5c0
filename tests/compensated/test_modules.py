"""Layers, convolutions and the operator: gradients, state, copies, moves and compilers."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from residual.matmul import prepare
from residual.nn.conv import conv2d
from residual.nn.linear import linear
from residual.nn.modules import ResidualLinear
from residual.report import ToleranceError
from tests.compensated.test_matmul import normal

OPTIONS = [{"tol": 1e-3}, {"mode": "direct"}, {"mode": "full", "tol": 1e-3}, {"mode": "full", "bits": 4}]


def layer(inputs: int = 64, outputs: int = 48, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().norm() / want.detach().norm())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_a_linear_one_within_its_error(options: dict[str, object], bias: bool) -> None:
    plain = layer(bias=bias)
    mine = ResidualLinear.from_linear(plain, **options)  # type: ignore[arg-type]
    for shape in ((64,), (5, 64), (2, 3, 64), (0, 64)):
        x = normal(*shape)
        y = mine(x)
        assert y.shape == (*shape[:-1], 48) and y.dtype == torch.float32
        if x.numel():
            assert relative(y, plain(x)) < (1e-3 if "tol" in options else 0.05)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_those_of_the_linear_layer(options: dict[str, object]) -> None:
    plain = layer()
    mine = ResidualLinear.from_linear(plain, **options)  # type: ignore[arg-type]
    x, g = normal(7, 64).requires_grad_(), normal(7, 48, seed=1)
    want = torch.autograd.grad(plain(x), (x, plain.weight, plain.bias), g)
    for got, expected in zip(torch.autograd.grad(mine(x), (x, mine.weight, mine.bias), g), want, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_layer_learns() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(256, 16), torch.randn(4, 16)
    mine = ResidualLinear(16, 4, mode="direct")
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.2)
    losses = []
    for _ in range(60):
        loss = (mine(x) - x @ w.mT).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 1e-2 * losses[0]


def test_digits_are_made_once_and_follow_the_weight() -> None:
    mine = ResidualLinear.from_linear(layer(), mode="direct")
    x = normal(5, 64)
    first = mine(x)
    made = mine._prepared
    assert made is not None and len(made.forms) == 1
    mine(x)
    assert mine._prepared is made
    with torch.no_grad():
        mine.weight.mul_(-3)
        mine.bias.zero_()
    assert relative(mine(x), x @ mine.weight.mT) < 0.05 and relative(mine(x), first) > 1
    mine.weight = nn.Parameter(torch.ones(48, 64))
    assert torch.allclose(mine(x), x.sum(1, keepdim=True).expand(5, 48), atol=0.2)


def test_a_state_dict_goes_round_and_takes_that_of_a_linear_layer() -> None:
    mine = ResidualLinear.from_linear(layer(), tol=1e-2, on_failure="fallback")
    file = io.BytesIO()
    torch.save(mine.state_dict(), file)
    file.seek(0)
    other = ResidualLinear(64, 48, mode="full", bits=4)
    x = normal(5, 64)
    other(x)
    other.load_state_dict(torch.load(file))
    assert (other.tol, other.mode, other.bits, other.on_failure) == (1e-2, "auto", None, "fallback")
    assert torch.equal(other.weight, mine.weight) and relative(other(x), mine(x)) < 2e-2
    other.load_state_dict(layer().state_dict(), strict=False)
    assert torch.equal(other.weight, layer().weight)


def test_copies_stand_alone() -> None:
    mine = ResidualLinear.from_linear(layer(), mode="direct")
    x = normal(5, 64)
    before = mine(x)
    other = copy.deepcopy(mine)
    file = io.BytesIO()
    torch.save(mine, file)
    file.seek(0)
    third = torch.load(file, weights_only=False)
    with torch.no_grad():
        mine.weight.zero_()
    assert torch.equal(other(x), before) and torch.equal(third(x), before)
    assert torch.equal(mine(x), mine.bias.expand(5, 48)) and other._prepared is not mine._prepared


def test_a_move_takes_the_digits_along() -> None:
    mine = ResidualLinear.from_linear(layer(), mode="direct")
    x = normal(5, 64)
    want = mine(x)
    got = mine.double()(x.double())
    assert got.dtype == torch.float64 and relative(got.float(), want) < 1e-6
    half = mine.to(torch.bfloat16)(x.bfloat16())
    assert half.dtype == torch.bfloat16 and relative(half.float(), want) < 2e-2


@pytest.mark.parametrize("options", [{"tol": 1e-3}, {"mode": "direct"}])
def test_a_compiled_layer_is_one_graph_and_follows_the_weight(options: dict[str, object]) -> None:
    mine = ResidualLinear.from_linear(layer(), **options)  # type: ignore[arg-type]
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    x, g = normal(5, 64).requires_grad_(), normal(5, 48, seed=1)
    for _ in range(2):
        assert torch.allclose(compiled(x), mine(x), atol=1e-5)
        got, want = (torch.autograd.grad(f(x), (x, mine.weight), g) for f in (compiled, mine))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))
        with torch.no_grad():
            mine.weight.mul_(-2)  # digits of the former weight would be off by far more than the tolerance


def test_the_operator_passes_torch_s_checks() -> None:
    a, b = normal(6, 8).requires_grad_(), normal(8, 5, seed=1).requires_grad_()
    operator = torch.ops.residual.matmul.default
    for tol, mode, rungs in ((0.1, "direct", ""), (None, "full", ""), (0.1, "auto", "direct,fp32")):
        found = torch.library.opcheck(operator, (a, b, tol, mode, None, torch.float32, 1, rungs, "raise", "auto"))
        assert set(found.values()) == {"SUCCESS"}


CONVOLUTIONS = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (2, 3)])
def test_a_convolution_is_torch_s_within_its_error(options: dict[str, object], kernel: tuple[int, int]) -> None:
    x, w = normal(2, 5, 12, 11).requires_grad_(), normal(7, 5, *kernel, seed=1).requires_grad_()
    bias = normal(7, seed=2).requires_grad_()
    want = nn.functional.conv2d(x, w, bias, **options)  # type: ignore[arg-type]
    held = prepare(w.detach().flatten(1).t())
    for more in ({"tol": 1e-3}, {"mode": "full"}, {"mode": "full", "prepared": held}):
        y = conv2d(x, w, bias, **options, **more)  # type: ignore[arg-type]
        assert y.shape == want.shape and relative(y, want) < 1e-3
        g = normal(*y.shape, seed=3)
        for got, expected in zip(
            torch.autograd.grad(y, (x, w, bias), g),
            torch.autograd.grad(want, (x, w, bias), g, retain_graph=True),
            strict=True,
        ):
            assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_bad_layers_and_shapes_are_named() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"layer must be a torch\.nn\.Linear, got Conv2d"):
        ResidualLinear.from_linear(nn.Conv2d(1, 1, 1), tol=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight must have as many columns as x, got 4 and 3"):
        linear(x, torch.ones(5, 4), tol=0.1)
    with pytest.raises(TypeError, match=r"weight must be of the dtype of x, got torch\.float64 and torch\.float32"):
        linear(x, torch.ones(5, 3).double(), tol=0.1)
    with pytest.raises(TypeError, match=r"x must be a floating-point tensor, got torch\.int64"):
        linear(x.long(), torch.ones(5, 3), tol=0.1)
    with pytest.raises(ValueError, match="prepared must be made of B"):
        linear(x, torch.ones(5, 3), mode="direct", prepared=prepare(torch.ones(3, 5)))
    with pytest.raises(ValueError, match="weight must have as many channels as x, got 2 and 3"):
        conv2d(torch.ones(1, 3, 4, 4), torch.ones(1, 2, 1, 1), tol=0.1)
    with pytest.raises(ValueError, match=r"x must be as large as the filter, got \(2, 2\) and \(3, 3\)"):
        conv2d(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 3, 3), tol=0.1)
    with pytest.raises(ValueError, match="tol must be given for mode='auto', got None"):
        ResidualLinear(3, 3)(x)
    with pytest.raises(ToleranceError):
        ResidualLinear(30, 30, tol=1e-7, mode="direct")(normal(30, 30))
