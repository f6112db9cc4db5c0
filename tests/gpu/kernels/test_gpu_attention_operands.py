"""Q, K and V as integers on a GPU, in one launch: every integer and scale is the CPU's."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from cute_kernels.attention.quantize_qkv import choose, encode_operands
from cute_kernels.dtypes import REAL_DTYPES
from magicube_cutlass import quantize
from tests.gpu.problems import HERE

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEADS = (32, 64, 128)
# One row, fewer rows than blocks, one more than whole rounds, more than threads keep.
KEYS = (1, 5, 129, 2049, 9000)
COMPILED = [choose(REAL_DTYPES[dtype], head, bits, HERE.arch) for dtype, head, bits in product(DTYPES, HEADS, (4, 8))]


def expected(x: Tensor, bits: int, alike: bool) -> tuple[Tensor, Tensor]:
    """Integers and scales of one matrix, a scale for each row."""
    found = quantize(x.reshape(1, -1) if alike else x, bits, scale="row", nonfinite="propagate")
    assert found.scale is not None
    return found.ints().view(x.shape), found.scale.expand(x.shape[0], 1)[:, 0] if alike else found.scale[:, 0]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().nan_to_num(-1.0), b.nan_to_num(-1.0))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.configs(COMPILED)
def test_every_integer_is_the_one_of_the_cpu(dtype: torch.dtype, head: int, bits: int) -> None:
    for keys in KEYS:
        generator = torch.Generator().manual_seed(keys)
        q = torch.randn(6, keys // 3 + 2, head, generator=generator)
        k, v = (torch.randn(6, keys, head, generator=generator) for _ in range(2))
        k[1, -1] *= 50  # one row of many that is larger
        q[2, 1], k[2], v[2] = 0, 0, 0
        q[3, 1, -1], k[3, keys // 2, 3], v[3, 0, 1] = -torch.inf, torch.nan, torch.inf
        q[4], k[4], v[4] = q[4] * 1e-6, k[4] * 1e-30, v[4] * 1e-4
        k[5] *= torch.logspace(-2, 2, keys)[:, None]
        q, k, v = (x.to(dtype) for x in (q, k, v))
        found = encode_operands(q.cuda(), k.cuda(), v.cuda(), bits=bits)
        told = [bool(x) for x in found.keys_alike]
        assert bool((found.ready == 1).all())
        for i in range(6):
            for name, x, alike in (("q", q, False), ("k", k, told[i]), ("v", v, True)):
                ints, scale = expected(x[i], bits, alike)
                given = getattr(found, f"{name}_scale")[i]
                assert torch.equal(getattr(found, name)[i].cpu(), ints), (keys, i, name)
                assert same(given.expand(scale.shape) if name == "v" else given, scale), (keys, i, name)
        small = keys == 1
        assert (
            told == ([True, True, True, False, True, True] if small else [True, False, True, False, True, False])
            or bits == 4
        )
        assert bits == 8 or told == [bool((x == 0).all()) for x in k]


@pytest.mark.configs(COMPILED)
def test_ties_between_two_integers_go_as_on_the_cpu() -> None:
    """Scales that are powers of two, where halves are met exactly, and others."""
    for top in (127.0, 254.0, 1.984375, 100.0, 31.0):
        steps = torch.linspace(-top, top, 64 * 509).half().view(1, -1, 64)
        found = encode_operands(steps.cuda(), steps.cuda(), steps.cuda(), bits=8)
        for name, alike in (("q", False), ("v", True)):
            assert torch.equal(getattr(found, name)[0].cpu(), expected(steps[0], 8, alike)[0])


@pytest.mark.configs(COMPILED)
def test_wrong_operands_raise_and_empty_ones_give_empty_results() -> None:
    q = torch.zeros(2, 8, 64, device="cuda", dtype=torch.float16)
    with pytest.raises(ValueError, match=r"v must have 3 dimensions, .* got \(2, 9, 64\) for q \(2, 8, 64\)"):
        encode_operands(q, q, q.new_zeros(2, 9, 64), bits=8)
    with pytest.raises(ValueError, match=r"k must have 3 dimensions, .* got \(2, 8, 32\)"):
        encode_operands(q, q[..., :32], q[..., :32], bits=8)
    with pytest.raises(ValueError, match=r"q must have a head dimension of \(32, 64, 128\), got 48"):
        encode_operands(*(q[..., :48].contiguous() for _ in "qkv"), bits=8)
    with pytest.raises(ValueError, match=r"v must be float16, .* like q, got torch\.float32"):
        encode_operands(q, q, q.float(), bits=8)
    with pytest.raises(ValueError, match="k must be contiguous and start at a multiple of 16 bytes"):
        encode_operands(q, q.mT.contiguous().mT, q, bits=8)
    empty = encode_operands(q, q[:, :0], q[:, :0], bits=8)
    assert empty.k.shape == (2, 0, 64) and empty.k_scale.shape == (2, 0) and not empty.q.any()
    assert encode_operands(q[:, :0], q, q, bits=8).q_scale.shape == (2, 0)
