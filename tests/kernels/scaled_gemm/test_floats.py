"""Small float formats: every code, every tie and every packing against ``ml_dtypes``, torch and their definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels import floats
from cute_kernels.floats import FORMATS, SCALE

ml_dtypes = pytest.importorskip("ml_dtypes")

OTHERS = {
    "e5m2": "float8_e5m2", "e4m3": "float8_e4m3fn", "e3m2": "float6_e3m2fn", "e2m3": "float6_e2m3fn",
    "e2m1": "float4_e2m1fn", "ue8m0": "float8_e8m0fnu",
}  # fmt: skip
NAMES = list(FORMATS)


def other(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, OTHERS[name]))


def their_values(name: str) -> Tensor:
    count = 1 << floats.float_format(name, scale=True).bits
    return torch.from_numpy(np.arange(count, dtype=np.uint8).view(other(name)).astype(np.float32))


def their_codes(x: Tensor, name: str) -> Tensor:
    return torch.from_numpy(x.numpy().astype(other(name)).view(np.uint8))


@pytest.mark.parametrize("name", OTHERS)
def test_every_code_has_the_value_that_others_give_it(name: str) -> None:
    theirs = their_values(name)
    codes = torch.arange(len(theirs), dtype=torch.uint8)
    ours = floats.decode(codes, name)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(ours[theirs == 0]), torch.signbit(theirs[theirs == 0]))
    described = floats.float_format(name, scale=True)
    assert described.largest == float(theirs[theirs.isfinite()].max())
    assert bool(floats.decode(torch.arange(len(theirs), 256).to(torch.uint8), name).isnan().all())
    exact = theirs[~theirs.isnan()]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        if name != "ue8m0" or dtype != torch.bfloat16:
            assert torch.equal(floats.encode(exact.to(dtype), name), codes[~theirs.isnan()]), "codes survive the way"


def neighbourhood(name: str) -> Tensor:
    """All values, all midpoints of neighbours, one step of float32 to either side of each, and what is beyond."""
    values = their_values(name)
    values = values[values.isfinite()].unique()
    between = (values[1:] + values[:-1]) / 2
    top = float(values[-1])
    if name == "ue8m0":
        points = torch.cat((values, between))
    else:
        points = torch.cat((values, between, torch.tensor([top * 1.03, top * 1.0625, top * 1.125, top * 2, 1e30])))
    up = torch.nextafter(points, torch.full_like(points, torch.inf))
    down = torch.nextafter(points, torch.full_like(points, -torch.inf))
    points = torch.cat((points, up, down))
    return points if name != "ue8m0" else points[(points > 0) & ~lowest_gap(points)]


def lowest_gap(x: Tensor) -> Tensor:
    """Where ml_dtypes and torch round to the second smallest power of two though the smallest is nearer."""
    return (x > 2.0**-127) & (x < 1.5 * 2.0**-127)


@pytest.mark.parametrize("name", OTHERS)
def test_rounding_is_that_of_others_at_values_ties_and_their_neighbours(name: str) -> None:
    x = neighbourhood(name)
    theirs = their_codes(x, name)
    # What saturates there is a code of the largest value in both.
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(floats.encode(x.to(dtype), name), theirs), dtype
    if name != "ue8m0":
        assert torch.equal(floats.encode(-x, name) ^ (1 << (FORMATS[name].bits - 1)), floats.encode(x, name))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_16_bit_floats_are_encoded_as_others_do(name: str, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x[~x.isnan()]
    if name == "ue8m0":
        assert not bool(floats.encode(x[lowest_gap(x)], name).any())
        x = x[(x > 0) & ~lowest_gap(x)]
    assert torch.equal(floats.encode(x, name), their_codes(x.float(), name))


def test_double_precision_is_rounded_once() -> None:
    # In float32 this is a tie; it is above one.
    x = torch.tensor([2.5 + 2.0**-40, 2.5, 2.5 - 2.0**-40], dtype=torch.float64)
    assert floats.decode(floats.encode(x, "e2m1"), "e2m1").tolist() == [3.0, 2.0, 2.0]


def test_what_is_beyond_a_format_follows_its_kind() -> None:
    beyond = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan])
    for name, shape in FORMATS.items():
        saturated = floats.decode(floats.encode(beyond, name, saturate=True), name)
        assert saturated[:4].tolist() == [shape.largest, -shape.largest] * 2
        plain = floats.decode(floats.encode(beyond, name), name)
        if shape.special == "finite":
            assert torch.equal(plain, saturated) and plain[4] == shape.largest
        else:
            assert bool(plain[4].isnan()) and bool(saturated[4].isnan())
            expected = [torch.inf, -torch.inf] if shape.special == "ieee" else [torch.nan, torch.nan]
            torch.testing.assert_close(plain[:4], torch.tensor(expected * 2), equal_nan=True)
    scales = floats.encode(torch.tensor([0.0, 1e-45, -1.0, torch.inf, torch.nan, 3e38]), "ue8m0")
    assert scales.tolist() == [0, 0, 255, 255, 255, 255]
    assert floats.encode(torch.tensor([torch.inf, 3e38]), "ue8m0", saturate=True).tolist() == [254, 254]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 16, 37])
def test_packing_is_a_stream_of_bits_and_comes_back(name: str, count: int) -> None:
    bits = FORMATS[name].bits
    codes = torch.randint(0, 1 << bits, (3, count), generator=torch.Generator().manual_seed(count)).to(torch.uint8)
    packed = floats.pack(codes, name)
    assert packed.shape == (3, floats.packed_bytes(count, name)) == (3, (count * bits + 7) // 8)
    for row, stream in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(code << (bits * i) for i, code in enumerate(row))
        assert int.from_bytes(bytes(stream), "little") == number
    assert torch.equal(floats.unpack(packed, count, name), codes)


@pytest.mark.parametrize(("name", "size"), [("e2m1", 8), ("e2m3", 12), ("e3m2", 12), ("e4m3", 16)])
def test_the_padded_layout_has_sixteen_codes_in_sixteen_bytes(name: str, size: int) -> None:
    packed = torch.randint(1, 256, (2, 3 * size), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    padded = floats.pad16(packed, name)
    assert padded.shape == (2, 48)
    for group in range(3):
        assert torch.equal(padded[:, 16 * group : 16 * group + size], packed[:, size * group : size * (group + 1)])
        assert not bool(padded[:, 16 * group + size : 16 * (group + 1)].any())
    assert torch.equal(floats.unpad16(padded, name), packed)
    with pytest.raises(ValueError, match=f"packed must have a multiple of {size} bytes for {name}, got {size + 1}"):
        floats.pad16(packed[:, : size + 1], name)


def test_codes_are_those_of_torchs_dtypes() -> None:
    codes = torch.arange(256).to(torch.uint8)
    for name in ("e5m2", "e4m3", "ue8m0"):
        theirs = floats.to_torch(codes, name)
        torch.testing.assert_close(theirs.float(), floats.decode(codes, name), rtol=0, atol=0, equal_nan=True)
        back, found = floats.from_torch(theirs)
        assert found == name and back.data_ptr() == codes.data_ptr()
    x = torch.linspace(-400, 400, 4001)
    assert torch.equal(floats.encode(x, "e4m3"), x.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(floats.encode(x, "e5m2"), x.to(torch.float8_e5m2).view(torch.uint8))
    if floats.torch_dtype("e2m1") is not None:
        pairs, found = floats.from_torch(floats.to_torch(codes, "e2m1"))
        assert found == "e2m1" and torch.equal(pairs, codes)
    assert floats.torch_dtype("e3m2") is None
    with pytest.raises(NotImplementedError, match=r"dtype must be one that torch .* has, got 'e2m3'"):
        floats.to_torch(codes, "e2m3")


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: floats.encode(torch.ones(2), "e8m1"), ValueError, "dtype must be one of e5m2, .*, got 'e8m1'"),
        (lambda: floats.encode(torch.ones(2).int(), "e2m1"), TypeError, "x must be one of .* got torch.int32"),
        (lambda: floats.decode(torch.ones(2), "e2m1"), TypeError, "codes must be uint8, got torch.float32"),
        (lambda: floats.unpack(torch.ones(2, dtype=torch.uint8), 5, "e2m1"), ValueError, "packed must have 3 bytes for 5 codes of e2m1, got 2"),
        (lambda: floats.pack(torch.ones((), dtype=torch.uint8), "e2m1"), ValueError, "codes must have at least 1 dimension, got 0"),
        (lambda: floats.unpad16(torch.ones(15, dtype=torch.uint8), "e2m1"), ValueError, "padded must have a multiple of 16 bytes, got 15"),
        (lambda: floats.from_torch(torch.ones(2)), TypeError, "x must be one of torch.float8_e5m2, .* got torch.float32"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_the_scale_format_has_no_sign_and_no_zero() -> None:
    assert SCALE.bits == 8 and SCALE.values[0] == 2.0**-127 and SCALE.values[254] == 2.0**127
