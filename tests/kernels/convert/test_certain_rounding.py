"""16-bit floats by the scale of their amax: two products and two sums in float32 round as double arithmetic does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels.convert.quantize_transposed import quantize_transposed
from cute_kernels.cpu import engine
from magicube_cutlass import quantize
from magicube_cutlass.nn import QuantLinear
from magicube_cutlass.ops.torch_ops import quantize_by

HIGH = 127


def grid(bits: int) -> np.ndarray:
    """Every float of `bits` significant bits below 2^bits, down to a quotient that rounds to zero for all amaxes."""
    top = 1 << bits
    parts = [np.arange(top)] + [np.arange(top // 2, top) / 2**j for j in range(1, 13)]
    return np.unique(np.concatenate(parts))


def by_double(x: np.ndarray, scale: np.float32) -> np.ndarray:
    return np.rint(x * (1 / np.float64(scale)))


def by_float(x: np.ndarray, amax: int, scale: np.float32, ulps: int) -> np.ndarray:
    """``encode_certain`` by ``certain_inverse``, whose first reciprocal is `ulps` off."""
    high = np.float32(1 / np.float64(scale))
    for _ in range(abs(ulps)):
        high = np.nextafter(high, np.float32(np.inf if ulps > 0 else 0))
    excess = amax - HIGH * np.float64(scale)  # exact, as are the products below
    low = np.float32(high * np.float32(1 - np.float64(high) * np.float64(scale)))
    low = np.float32(np.float64(high) * np.sign(excess) * 2.0**-22 + np.float64(low))
    lows = (x.astype(np.float32) * low).astype(np.float64)
    return np.rint((x * np.float64(high) + lows).astype(np.float32))


@pytest.mark.parametrize("ulps", [-2, 0, 2])
def test_all_quotients_of_11_bits_round_as_in_double(ulps: int) -> None:
    x = grid(11)
    for amax in range(1, 2048):  # other exponents give the same quotients
        scale, below = np.float32(amax / HIGH), x[x <= amax]
        assert np.array_equal(by_float(below, amax, scale, ulps), by_double(below, scale)), amax


def test_one_float_of_the_inverse_is_not_enough() -> None:
    x, wrong = grid(11), 0
    for amax in range(1024, 2048):
        scale, below = np.float32(amax / HIGH), x[x <= amax]
        inverse = np.float64(np.float32(1 / np.float64(scale)))
        wrong += int((np.rint(below * inverse) != by_double(below, scale)).sum())
    assert wrong > 500


def rows_of_all(dtype: torch.dtype, exponent: int) -> Tensor:
    """A row for each amax of that dtype, with every number up to it."""
    bits = 11 if dtype == torch.float16 else 8
    x, amaxes = torch.from_numpy(grid(bits)), torch.arange(1 << bits - 1, 1 << bits)[:, None]
    x = torch.nn.functional.pad(x, (0, -x.numel() % 16))
    rows = torch.where(x <= amaxes, x, 0.0)
    rows[:, -1] = amaxes[:, 0]
    signs = torch.randint(0, 2, rows.shape, generator=torch.Generator().manual_seed(exponent)) * 2 - 1
    return (rows * signs * 2.0**exponent).to(dtype)


@pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")
@pytest.mark.parametrize(
    ("dtype", "exponent"), [(torch.float16, 0), (torch.float16, -12), (torch.bfloat16, -90), (torch.bfloat16, 80)]
)
def test_the_engine_rounds_every_number_by_every_amax_as_in_double(dtype: torch.dtype, exponent: int) -> None:
    identity = nn.Linear(128, 128, bias=False)
    with torch.no_grad():
        identity.weight.copy_(torch.eye(128))
        layer = QuantLinear.from_linear(identity, weight="int8").to(dtype).eval()
        x = rows_of_all(dtype, exponent)
        scale = (x.double().abs().amax(1, keepdim=True) / HIGH).float().double()
        for begin in range(0, x.shape[1], 112):
            part = torch.cat([x[:, begin : begin + 112], x[:, -16:]], 1)  # the amax in each
            part = torch.nn.functional.pad(part, (0, 128 - part.shape[1]))
            got = (layer(part).double() / scale).round()  # results of 8 significant bits tell integers up to 127
            assert torch.equal(got, (part.double() * (1 / scale)).round()), begin


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, exponent",
    [(torch.float16, 0), (torch.float16, -12), (torch.float16, 4), (torch.bfloat16, -90), (torch.bfloat16, 80)],
)
def test_kernels_round_every_number_by_every_amax_as_in_double(dtype: torch.dtype, exponent: int) -> None:
    x = rows_of_all(dtype, exponent).cuda()
    scale = (x.double().abs().amax(1, keepdim=True) / HIGH).float()
    want = (x.double() * (1 / scale.double())).round().to(torch.int8)
    by_row, by_column = quantize(x, 8, scale="row"), quantize(x.mT.contiguous(), 8, scale="column")
    assert by_row.scale is not None and torch.equal(by_row.scale, scale)
    assert torch.equal(by_row.data, want)
    assert torch.equal(by_column.data, want.mT)
    for begin in range(0, x.shape[1], 4096):
        part = torch.cat([x[:, begin : begin + 4080], x[:, -16:]], 1)  # the amax in each
        held = torch.cat([want[:, begin : begin + 4080], want[:, -16:]], 1)
        for rows in (len(x), 48):
            data, found = quantize_transposed(part[:rows])
            assert torch.equal(data, held[:rows].mT) and torch.equal(found, scale[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.5, 1.1])
def test_kernels_round_by_given_scales_as_in_double(dtype: torch.dtype, factor: float) -> None:
    x = rows_of_all(dtype, 0).cuda()[:, -4096:].contiguous()
    scale = factor * (x.double().abs().amax(1, keepdim=True) / HIGH).float()  # half of the amax: entries saturate
    want = (x.double() * (1 / scale.double())).round().clamp(-HIGH - 1, HIGH).to(torch.int8)
    assert torch.equal(quantize_by(x, scale, 8), want)
    assert torch.equal(quantize_transposed(x, scale)[0], want.mT)
    assert torch.equal(quantize_transposed(x[:48], scale[:48])[0], want[:48].mT)
