"""Integers: storage, packing, digits and the overflow bound."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels import integers as it

KINDS = [(bits, signed) for bits in it.BITS for signed in (True, False)]


@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_every_integer_survives_storage_and_digits(bits: int, signed: bool) -> None:
    low, high = it.int_range(bits, signed)
    every = torch.arange(low, high + 1)[None]
    stored = it.store(every, bits, signed)
    back = it.fetch(stored, every.shape[1], bits, signed)
    assert torch.equal(it.widen(back), every)
    assert torch.equal(it.combine_digits(it.split_digits(back, bits, signed), bits, signed), every)


@given(st.integers(1, 40), st.booleans(), st.sampled_from([-1, -2]))
def test_packing_keeps_odd_lengths_on_either_dimension(length: int, signed: bool, dim: int) -> None:
    low, high = it.int_range(4, signed)
    ints = torch.randint(low, high + 1, (length, length + 1))
    packed = it.pack4(ints, dim)
    assert packed.shape[dim] == (ints.shape[dim] + 1) // 2
    assert torch.equal(it.unpack4(packed, ints.shape[dim], signed, dim).long(), ints)


def test_low_nibble_comes_first() -> None:
    assert it.pack4(torch.tensor([1, 2, -1])).tolist() == [0x21, 0x0F]


def test_lower_digits_are_unsigned_and_the_top_one_is_signed() -> None:
    planes = it.split_digits(torch.tensor([-1, 255, -32768], dtype=torch.int16), 16, True)
    assert planes[0].tolist() == [255, 255, 0]
    assert planes[1].view(torch.int8).tolist() == [-1, 0, -128]
    assert it.digit_signs(16, True) == (False, True)


def test_the_bound_is_reached_by_the_extreme_integers() -> None:
    assert it.product_bound(3, 8, True, 8, False) == 3 * 128 * 255
    assert it.fits(2**31 - 1, torch.int32)
    assert not it.fits(2**31, torch.int32)


@pytest.mark.parametrize(
    ("value", "bits", "signed"), [(128, 8, True), (-1, 8, False), (-9, 4, True), (4096, 12, False)]
)
def test_a_value_out_of_range_is_named(value: int, bits: int, signed: bool) -> None:
    with pytest.raises(ValueError, match=rf"ints must lie in \[.*got values in \[{value}, {value}\]"):
        it.check_range(torch.tensor([value]), bits, signed)


def test_bad_widths_and_dtypes_are_named() -> None:
    with pytest.raises(ValueError, match=r"bits must be one of \(4, 8, 12, 16\), got 7"):
        it.int_range(7, True)
    with pytest.raises(TypeError, match=r"ints must have an integer dtype, got torch\.float32"):
        it.check_range(torch.ones(2), 8, True)
    with pytest.raises(ValueError, match="packed must have 3 bytes for length 5, got 2"):
        it.unpack4(torch.zeros(2, dtype=torch.uint8), 5, True)
