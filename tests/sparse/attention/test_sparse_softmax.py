"""Sparse softmax on a CPU: the nearest integers of the definition, rows without keys, several matrices as one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.integers import int_range, widen
from magicube_cutlass import masks
from magicube_cutlass.attention import sparse_softmax


def logits(pattern: mc.Pattern, batch: tuple[int, ...], dtype: torch.dtype, stride: int, seed: int = 0) -> mc.SRBCRS:
    generator = torch.Generator().manual_seed(seed)
    values = 3 * torch.randn(*batch, pattern.vectors, pattern.vector_length, generator=generator)
    return mc.SRBCRS.from_pattern(pattern, values.to(dtype), bits=None, stride=stride)


def check_softmax(S: mc.SRBCRS, bits: int, scale: float, causal: bool, bias: Tensor | None) -> None:
    P, lse = sparse_softmax(S, bits=bits, scale=scale, causal=causal, bias=bias, return_lse=True)
    P.check_format(full=True)
    (m, n), copies, high = S.shape, math.prod(S.batch_shape), int_range(bits, False)[1]
    kept = S.pattern.to_dense()
    if causal:
        kept = kept & torch.ones(m, n, dtype=torch.bool).tril()
    s = S.to_dense().double() * scale
    if bias is not None:
        s = s + bias.double().unsqueeze(-2)
    s = s.masked_fill(~kept, -math.inf).view(copies, m, n)
    top = s.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    assert (P.bits, P.signed, P.stride) == (bits, False, S.stride)
    rows = S.pattern.vector_rows * S.vector_length if S.batch_shape else m
    found = widen(P.to_dense(dequantize=False)).view(copies, rows if copies > 1 else m, -1)
    assert P.scale is not None
    scales = P.scale.view(copies, -1)
    for i in range(copies):
        u = found[i, :m, i * n : (i + 1) * n]
        wanted = high * torch.exp(s[i] - top[i])
        # the exponential in float32, of differences that were rounded to it: 1e-6 of u_max
        assert (u - wanted).abs().max() <= 0.5 + 1e-6 * high, "an integer is not the nearest one"
        assert found[i].sum() == u.sum(), "something is off the diagonal"
        sums = u.sum(1)
        assert torch.equal(scales[i, :m], torch.where(sums > 0, 1 / sums.float(), 1.0))
    assert torch.allclose(lse.view(copies, m).double(), torch.logsumexp(s, -1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("v", [1, 2, 4, 8, 16, 32])
def test_softmax_is_the_nearest_integers_of_the_definition(v: int, bits: int) -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for number, ((m, n), batch, stride) in enumerate(
        [((64, 50), (), 32), ((37, 70), (), 16), ((64, 64), (2, 3), 64), ((20, 90), (2,), 32), ((5, 4), (1,), 16)]
    ):
        pattern = mc.random_pattern(m, n, 0.7, v, seed=number)
        S = logits(pattern, batch, dtypes[number % 3], stride, seed=v)
        bias = torch.randn(*batch[:1], *[1] * len(batch[1:]), n) if number % 2 else None
        check_softmax(S, bits, 0.3, causal=number % 3 == 2, bias=bias)
        check_softmax(S, bits, 1.0, causal=number % 3 != 2, bias=None)


def test_rows_without_keys_are_zero_or_nan() -> None:
    pattern = masks.local(24, 0, keys=8)  # the last two vector rows have no key
    S = logits(pattern, (), torch.float32, 32)
    P, lse = sparse_softmax(S, return_lse=True)
    assert not P.to_dense()[8:].any() and (lse[8:] == -math.inf).all() and lse[:8].isfinite().all()
    nan = sparse_softmax(S, nan_for_empty=True)
    assert nan.scale is not None and nan.scale[8:].isnan().all() and nan.scale[:8].isfinite().all()
    away = sparse_softmax(S, bias=torch.full((8,), -math.inf))
    assert not away.to_dense().any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_poison_their_own_row_only(bad: float) -> None:
    S = logits(masks.random(16, 0.5, seed=1), (), torch.float32, 32)
    S.values[0, 3, 1] = bad
    P, lse = sparse_softmax(S, return_lse=True)
    assert P.scale is not None
    assert P.scale.isnan().flatten().nonzero().flatten().tolist() == [3]
    assert lse.isnan().nonzero().flatten().tolist() == [3]


def test_softmax_of_several_matrices_multiplies_their_stacked_operands() -> None:
    pattern = masks.random(32, 0.6, keys=24)
    S = logits(pattern, (2, 3), torch.float16, 32)
    V = torch.randn(6 * 24, 5, generator=torch.Generator().manual_seed(0))
    together = mc.spmm(sparse_softmax(S, bits=16), mc.quantize(V, 16)).view(6, 32, 5)
    dense = S.to_dense().float().masked_fill(~pattern.to_dense(), -math.inf).view(6, 32, 24).softmax(-1)
    expected = dense @ V.view(6, 24, 5)
    assert (together - expected).norm() < 1e-3 * expected.norm()


def test_softmax_names_mistakes() -> None:
    S = logits(masks.local(16, 2), (), torch.float32, 32)
    with pytest.raises(TypeError, match=r"S must hold results of dtype .* got torch.int32"):
        sparse_softmax(S.with_values(S.values.to(torch.int32)))
    with pytest.raises(TypeError, match=r"S must hold results .* got 8-bit integers"):
        sparse_softmax(mc.SRBCRS.from_dense(torch.ones(8, 8)))
    with pytest.raises(TypeError, match="S must be an SRBCRS, got Tensor"):
        sparse_softmax(torch.ones(8, 8))  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="bits must be one of"):
        sparse_softmax(S, bits=12)
