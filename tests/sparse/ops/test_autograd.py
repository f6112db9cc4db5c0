"""Gradients of the sparse products against torch's own on dense float64 matrices, and what the backward pass rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from magicube_cutlass import autograd as ag
from magicube_cutlass.autograd import integer
from tests.helpers import SCALES, random_mask

CASES = [(37, 50, 20, 8, ()), (64, 40, 33, 4, (2,)), (16, 24, 5, 1, (2, 3)), (5, 9, 1, 16, ()), (24, 16, 7, 2, (1,))]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def pattern_of(m: int, k: int, v: int) -> mc.Pattern:
    """Random, with empty vector rows and a full one."""
    return mc.Pattern.from_dense(random_mask(m, k, 0.3, seed=m + k), v)


def through(x: Tensor, rounded: Tensor) -> Tensor:
    """``rounded`` with the gradient of ``x``."""
    return x + (rounded - x).detach()


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().double().norm() / want.detach().double().norm())


def leaves(m: int, k: int, n: int, v: int, batch: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Any:
    """Pattern, dense weight, x, bias and the gradient of the product."""
    w, x = normal(m, k, dtype=dtype).requires_grad_(), normal(*batch, k, n, seed=1, dtype=dtype).requires_grad_()
    bias = normal(m, seed=2, dtype=dtype).requires_grad_()
    return pattern_of(m, k, v), w, x, bias, normal(*batch, m, n, seed=3, dtype=dtype)


def spmm(p: mc.Pattern, w: Tensor, x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    values = ag.vectors_at(w, p)
    return ag.spmm(ag.compress(values, p), x, values=values, bias=bias, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_spmm_has_the_gradients_of_a_dense_product_of_the_rounded_operands(case: Any, bits: int) -> None:
    p, w, x, bias, g = leaves(*case)
    values = ag.vectors_at(w, p)
    a = ag.compress(values, p, bits=bits)
    y = ag.spmm(a, x, values=values, bias=bias, act_bits=bits, grad_bits=None)
    rounded = mc.quantize(x, bits, scale="column").dequantize()
    dense = through(w * p.to_dense(), a.to_dense()) @ through(x, rounded) + bias[:, None]
    assert y.dtype == torch.float64 and relative(y, dense) < 1e-14
    for got, want in zip(torch.autograd.grad(y, (w, x, bias), g), torch.autograd.grad(dense, (w, x, bias), g),
                         strict=True):  # fmt: skip
        assert got.dtype == want.dtype and got.shape == want.shape
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_sddmm_has_the_gradients_of_a_dense_product_of_the_rounded_operands(case: Any, bits: int) -> None:
    m, n, k, v, batch = case
    p = pattern_of(m, n, v)
    x, y = normal(*batch, m, k).requires_grad_(), normal(*batch, n, k, seed=1).requires_grad_()
    s = ag.sddmm(x, y, p, bits=bits, grad_bits=None)
    left, right = (through(t, mc.quantize(t, bits, scale="row").dequantize()) for t in (x, y))
    dense = left @ right.mT
    want_s = mc.reference.at_vectors(dense, p)
    assert s.shape == (*batch, p.vectors, v) and torch.allclose(s, want_s, rtol=1e-12, atol=1e-12)
    g = normal(*s.shape, seed=2)
    for got, want in zip(torch.autograd.grad(s, (x, y), g), torch.autograd.grad(want_s, (x, y), g), strict=True):
        assert got.dtype == want.dtype and torch.allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_integers_that_need_no_rounding_have_exact_gradients(case: Any) -> None:
    m, k, n, v, batch = case
    p = pattern_of(m, k, v)

    def whole(*shape: int, most: int, seed: int) -> Tensor:
        """Integers whose largest magnitude in each row and column is ``most``."""
        x = torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).double()
        rows, columns = torch.arange(shape[-2]), torch.arange(shape[-1])
        return torch.where((rows[:, None] % shape[-1] == columns) | (columns % shape[-2] == rows[:, None]), most, x)

    w = (whole(m, k, most=127, seed=0).abs().clamp(min=127)).requires_grad_()
    x, g = whole(*batch, k, n, most=127, seed=1).requires_grad_(), whole(*batch, m, n, most=32767, seed=2)
    y = spmm(p, w, x, None, grad_bits=16)
    kept = w.detach() * p.to_dense()
    assert torch.equal(y, kept @ x.detach())
    of_w, of_x = torch.autograd.grad(y, (w, x), g)
    assert torch.equal(of_x, kept.mT @ g)
    assert torch.equal(of_w, (g @ x.detach().mT).reshape(-1, m, k).sum(0) * p.to_dense())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("bits", [4, 8, 12, 16])
def test_rounding_of_gradients_is_within_half_a_step_of_each(case: Any, bits: int) -> None:
    p, w, x, _, g = leaves(*case)
    y = spmm(p, w, x, None, grad_bits=bits)
    of_w, of_x = torch.autograd.grad(y, (w, x), g)
    a, q = ag.compress(ag.vectors_at(w, p), p), mc.quantize(x.detach(), 8, scale="column")
    ints, scale = a.to_dense(dequantize=False).double(), a.scale.double()  # (M, K), (M, 1)
    most = 2 ** (bits - 1) - 1
    step = (g * scale).abs().amax(-2, keepdim=True) / most  # (*batch, 1, N)
    error = (of_x - a.to_dense().double().mT @ g).abs()
    assert (error <= 0.51 * step * ints.abs().sum(0)[:, None] + 1e-12).all()
    step = (g * q.scale).abs().amax(-1, keepdim=True) / most  # (*batch, M, 1)
    bound = (0.51 * step * q.ints().double().abs().sum(-1).unsqueeze(-2)).reshape(-1, *w.shape).sum(0)  # (M, K)
    error = (of_w - (g @ q.dequantize().mT).reshape(-1, *w.shape).sum(0) * p.to_dense()).abs()
    assert (error <= bound + 1e-12).all()


@pytest.mark.parametrize(("bits", "bound"), [(16, 1e-4), (8, 1e-2)])
def test_gradients_of_random_data_are_as_near_as_the_page_says(bits: int, bound: float) -> None:
    p, w, x, _, g = leaves(256, 192, 64, 8, (), torch.float32)
    exact = torch.autograd.grad(spmm(p, w, x, None, grad_bits=None), (w, x), g)
    for got, want in zip(torch.autograd.grad(spmm(p, w, x, None, grad_bits=bits), (w, x), g), exact, strict=True):
        assert bound / 100 < relative(got, want) < bound


def test_gradients_are_near_those_without_any_quantization() -> None:
    p, w, x, bias, g = leaves(256, 192, 64, 8, (), torch.float32)
    y = spmm(p, w, x, bias)
    true = (w * p.to_dense()) @ x + bias[:, None]
    assert relative(y.detach(), true.detach()) < 0.02
    bounds = (0.01, 0.01, 1e-6)  # 8-bit operands are off by 0.6% each here, 16-bit gradients by 0.003%
    for got, want, bound in zip(torch.autograd.grad(y, (w, x, bias), g),
                                torch.autograd.grad(true, (w, x, bias), g), bounds, strict=True):  # fmt: skip
        assert relative(got, want) < bound
    q, k = normal(256, 48).float().requires_grad_(), normal(192, 48, seed=1).float().requires_grad_()
    s, dense = ag.sddmm(q, k, p), mc.reference.at_vectors(q @ k.mT, p)
    g = normal(*s.shape, seed=2).float()
    for got, want in zip(torch.autograd.grad(s, (q, k), g), torch.autograd.grad(dense, (q, k), g), strict=True):
        assert relative(got, want) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("grad_bits", [16, None])
def test_results_and_gradients_have_the_inputs_dtypes(dtype: torch.dtype, grad_bits: int | None) -> None:
    p, w, x, bias, g = leaves(40, 30, 12, 8, (2,), dtype)
    y = spmm(p, w, x, bias, grad_bits=grad_bits)
    exact = [t.detach().double().requires_grad_() for t in (w, x, bias)]
    dense = (exact[0] * p.to_dense()) @ exact[1] + exact[2][:, None]
    assert y.dtype == dtype and relative(y.detach(), dense.detach()) < 0.02
    wants = torch.autograd.grad(dense, exact, g.double())
    for got, want in zip(torch.autograd.grad(y, (w, x, bias), g), wants, strict=True):
        assert got.dtype == dtype and relative(got, want) < 0.02
    s = ag.sddmm(x.mT, x.mT, mc.random_pattern(12, 12, 0.3, 4), grad_bits=grad_bits)
    assert s.dtype == dtype and torch.autograd.grad(s.sum(), x)[0].dtype == dtype


def test_what_needs_no_gradient_gets_none_and_costs_no_graph() -> None:
    p, w, x, bias, g = leaves(40, 30, 12, 8, ())
    a = ag.compress(ag.vectors_at(w, p).detach(), p)
    y = ag.spmm(a, x, bias=bias.detach())
    assert torch.autograd.grad(y, x, g)[0].shape == x.shape
    assert not ag.spmm(a, x.detach()).requires_grad
    with torch.no_grad():
        assert not spmm(p, w, x, bias).requires_grad
        assert not ag.sddmm(x.mT, x.mT, mc.random_pattern(12, 12, 0.3, 4)).requires_grad
    s = ag.sddmm(x.mT, x.detach().mT, mc.random_pattern(12, 12, 0.3, 4))
    assert torch.autograd.grad(s.sum(), x)[0].abs().sum() > 0


def test_the_transposed_structure_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    p, w, x, _, g = leaves(64, 40, 33, 4, ())
    made = []
    unique = torch.unique
    monkeypatch.setattr(torch, "unique", lambda *a, **o: made.append(1) or unique(*a, **o))
    for step in range(3):
        torch.autograd.grad(spmm(p, w * (step + 1), x, None), x, g)
    assert len(made) == 1
    target = p.transpose_map().pattern
    assert p.transpose_map().pattern is target and target.shape == (40, 64)


def test_one_matrix_serves_several_products_and_gradients_add_up() -> None:
    p, w, x, _, g = leaves(37, 50, 20, 8, ())
    values = ag.vectors_at(w, p)
    a = ag.compress(values, p)
    both = ag.spmm(a, x, values=values) + 3 * ag.spmm(a, x, values=values)
    single = torch.autograd.grad(spmm(p, w, x, None), (w, x), g)
    for got, want in zip(torch.autograd.grad(both, (w, x), g), single, strict=True):
        assert relative(got, 4 * want) < 1e-4


def test_products_follow_each_other_as_in_attention() -> None:
    p = pattern_of(32, 40, 8)
    q, k, v = (normal(n, 16, seed=i).requires_grad_() for i, n in enumerate((32, 40, 40)))
    s = ag.sddmm(q, k, p).tanh()
    o = ag.spmm(ag.compress(s, p, bits=16), v, values=s, act_bits=16)
    dense = ((q @ k.mT).tanh() * p.to_dense()) @ v
    g = normal(32, 16, seed=5)
    for got, want in zip(torch.autograd.grad(o, (q, k, v), g), torch.autograd.grad(dense, (q, k, v), g), strict=True):
        assert relative(got, want) < 0.05


def test_column_major_operands_and_given_scales() -> None:
    p, w, x, bias, g = leaves(37, 50, 20, 8, (2,))
    turned = x.detach().mT.contiguous().mT.requires_grad_()
    results = [torch.autograd.grad(spmm(p, w, each, bias), (w, each, bias), g) for each in (x, turned)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    scale = mc.quantize(x.detach(), 8).scale
    static = torch.autograd.grad(spmm(p, w, x, bias, act_scale=scale), (w, x), g)
    tensor = torch.autograd.grad(spmm(p, w, x, bias, act_axis=None), (w, x), g)
    assert all(torch.equal(a, b) for a, b in zip(static, tensor, strict=True))
    assert relative(spmm(p, w, x, None, act_scale=scale / 4), spmm(p, w, x, None)) > 0.2  # three quarters saturate


@pytest.mark.parametrize("bits", [4, 8, 12, 16])
@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compress_is_from_mask(case: Any, axis: int | None, bits: int) -> None:
    m, k, _, v, _ = case
    p = pattern_of(m, k, v)
    for w in (normal(m, k), normal(m, k).float(), normal(m, k).float() * 1e-37):
        a = ag.compress(ag.vectors_at(w, p), p, bits=bits, axis=axis)
        want = mc.SRBCRS.from_mask(w, p.to_dense(), vector_length=v, bits=bits, scale=SCALES[axis])
        a.check_format(full=True)
        assert torch.equal(a.values, want.values) and torch.equal(a.scale, want.scale)
        assert a.pattern.equals(want.pattern)


def test_compress_drops_rows_beyond_and_marks_rows_that_are_not_finite() -> None:
    p = mc.Pattern.from_dense(torch.ones(5, 3, dtype=torch.bool), 4)
    values = torch.full((p.vectors, 4), 2.0)
    values[0, 1] = torch.inf
    a = ag.compress(values, p)
    a.check_format(full=True)
    assert a.scale.isnan().flatten().tolist() == [False, True, False, False, False]
    assert a.to_dense()[4].tolist() == [2.0, 2.0, 2.0]


def test_vectors_at_passes_gradcheck() -> None:
    p = pattern_of(11, 6, 4)
    assert torch.autograd.gradcheck(lambda w: ag.vectors_at(w, p), normal(11, 6).requires_grad_())
    dense = normal(11, 6)
    assert torch.equal(ag.vectors_at(dense, p), mc.reference.at_vectors(dense, p))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_gradients_that_are_not_finite_are_seen(bad: float) -> None:
    p, w, x, _, g = leaves(40, 30, 12, 8, (), torch.float32)
    g[3, 5] = bad
    of_w, of_x = torch.autograd.grad(spmm(p, w, x, None), (w, x), g)
    stored = p.to_dense()
    assert of_w[3][stored[3]].isnan().all() and of_w[:3].isfinite().all()
    assert of_x[:, 5].isnan().all() and of_x[:, :5].isfinite().all()


def test_empty_operands_have_empty_gradients() -> None:
    p = mc.Pattern.from_dense(torch.zeros(16, 8, dtype=torch.bool), 8)
    w, x = normal(16, 8).requires_grad_(), normal(8, 3).requires_grad_()
    y = spmm(p, w, x, None)
    of_w, of_x = torch.autograd.grad(y, (w, x), torch.ones(16, 3, dtype=torch.float64))
    assert not y.any() and not of_w.any() and not of_x.any()
    x = normal(8, 0).requires_grad_()
    assert torch.autograd.grad(spmm(pattern_of(16, 8, 8), w, x, None).sum(), x)[0].shape == (8, 0)
    s = ag.sddmm(normal(16, 4).requires_grad_(), normal(8, 4), p)
    assert s.shape == (0, 8)


def test_the_operators_pass_torch_s_checks() -> None:
    checked = ("test_schema", "test_faketensor")
    for shape, bits, axis in (((5, 7), 8, 1), ((2, 5, 7), 4, 0), ((5, 7), 16, None), ((5, 7), 8, 0), ((0, 4), 8, 1)):
        x = normal(*shape).float()
        torch.library.opcheck(torch.ops.magicube.quantize.default, (x, bits, axis), test_utils=checked)
        given = (x, torch.tensor(0.02), bits)
        torch.library.opcheck(torch.ops.magicube.quantize_by.default, given, test_utils=checked)
        want, got = mc.quantize(x, bits, scale=SCALES[axis]), integer.quantized(x, bits, axis)
        assert torch.equal(got.data, want.data) and torch.equal(got.scale, want.scale)
        if x.ndim == 2:  # by the scale that it found
            torch.library.opcheck(torch.ops.magicube.quantize_by.default, (x, want.scale, bits), test_utils=checked)
            assert torch.equal(torch.ops.magicube.quantize_by(x, want.scale, bits), want.data)
    x = torch.tensor([[0.0, 1.0, -3.0, torch.inf, torch.nan]])
    assert integer.quantized(x, 8, None, torch.tensor(0.02)).ints().tolist() == [[0, 50, -128, 127, 0]]


def test_bad_arguments_are_named() -> None:
    p, w, x, _, _ = leaves(40, 30, 12, 8, ())
    values = ag.vectors_at(w, p)
    a = ag.compress(values, p)
    with pytest.raises(ValueError, match=r"dense must have shape \(40, 30\).* got \(30, 40\)"):
        ag.vectors_at(w.mT, p)
    with pytest.raises(TypeError, match=r"values must be a float tensor, got torch\.int8"):
        ag.compress(values.to(torch.int8), p)
    with pytest.raises(ValueError, match=r"values must have shape .* got \(8, "):
        ag.spmm(a, x, values=values.mT)
    with pytest.raises(TypeError, match="pattern must be a Pattern, got Tensor"):
        ag.compress(values, w)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"axis must be None .* got 0"):
        ag.compress(values, p, axis=0)
    with pytest.raises(TypeError, match=r"x must be a float tensor, got torch\.int64"):
        ag.spmm(a, x.long())
    with pytest.raises(ValueError, match="x must have at least 2 dimensions"):
        ag.spmm(a, x[:, 0])
    with pytest.raises(ValueError, match="B must have 30 rows"):
        ag.spmm(a, x[:29])
    with pytest.raises(ValueError, match=r"act_axis must be None .* got 1"):
        ag.spmm(a, x, act_axis=1)
    with pytest.raises(TypeError, match="A must be an SRBCRS, got Tensor"):
        ag.spmm(w, x)  # type: ignore[arg-type]
    unsigned = mc.SRBCRS.from_pattern(p, torch.ones(values.shape, dtype=torch.int64), bits=8, signed=False)
    with pytest.raises(TypeError, match="A must hold signed quantized integers"):
        ag.spmm(unsigned, x)
    with pytest.raises(TypeError, match="pattern must be a Pattern, got SRBCRS"):
        ag.sddmm(w, x.mT, a)  # type: ignore[arg-type]
    for product in (lambda: ag.spmm(a, x, grad_bits=7), lambda: ag.sddmm(w, x.mT, p, grad_bits=7)):
        with pytest.raises(ValueError, match=r"grad_bits must be one of .* got 7"):
            product()


@pytest.mark.parametrize("layout", ["row-major", "column-major"])
@pytest.mark.parametrize("calls", [1, 2], ids=["first", "warm"])
def test_a_given_scale_is_one_float_in_memory_or_refused(calls: int, layout: str) -> None:
    """The engine reads its address: the whole call in one, and the quantizer before it, take the same scales."""
    matrix = mc.SRBCRS.from_dense(torch.randn(64, 128), vector_length=8, bits=8)
    x = torch.randn(128, 20) if layout == "row-major" else torch.randn(20, 128).mT
    want = ag.spmm(matrix, x, act_scale=torch.tensor(0.02))
    negated, zero = torch._neg_view(torch.tensor(-0.02)), torch._efficientzerotensor((), dtype=torch.float32)
    refused = {
        "one float": (torch.full((3,), 0.02), torch.empty(0), torch.tensor(1)),
        "hold its values": (negated, zero),
    }
    for _ in range(calls):
        assert torch.equal(ag.spmm(matrix, x, act_scale=torch.tensor([0.02])), want)
        for words, scales in refused.items():
            for scale in scales:
                with pytest.raises(ValueError, match=f"scale must (be )?{words}"):
                    ag.spmm(matrix, x, act_scale=scale)
        with pytest.raises(ValueError, match="act_scale must not require a gradient"):
            ag.spmm(matrix, x, act_scale=torch.tensor(0.02, requires_grad=True))
