"""Malformed matrices and patterns: a named error before any product reads an index, and writes that products follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc

FAR = (2**31 - 1, 64, -1, -(2**31), -7)
M, K, V = 24, 64, 8


def matrix(bits: int = 8, seed: int = 0) -> mc.SRBCRS:
    pattern = mc.random_pattern(M, K, sparsity=0.5, vector_length=V, distribution="fixed", seed=seed)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randint(low, high + 1, (pattern.vectors, V), generator=generator)
    return mc.SRBCRS.from_pattern(pattern, vectors, bits=bits)


def dense(seed: int = 1, n: int = 9) -> mc.QuantTensor:
    ints = torch.randint(-128, 128, (K, n), generator=torch.Generator().manual_seed(seed))
    return mc.QuantTensor.from_ints(ints, bits=8)


def rebuilt(a: mc.SRBCRS, **changes: Tensor) -> mc.SRBCRS:
    """A matrix of the same tensors, some replaced, by the constructor that users have."""
    tensors = {name: changes.get(name, getattr(a, name).clone()) for name in ("row_start", "row_end", "col_indices")}
    values = changes.get("values", a.values.clone())
    return mc.SRBCRS(
        **tensors, values=values, shape=a.shape, vector_length=V, bits=a.bits, signed=a.signed, stride=a.stride
    )


def written(tensor: Tensor, place: int, value: int) -> Tensor:
    found = tensor.clone()
    found[place] = value
    return found


BROKEN: list[tuple[str, Callable[[mc.SRBCRS], dict[str, Tensor]], str]] = [
    *((f"column {far} at {place}", lambda a, f=far, p=place: {"col_indices": written(a.col_indices, p, f)}, "col_indices")
      for far in FAR for place in (0, 5, 31)),
    ("unsorted", lambda a: {"col_indices": written(a.col_indices, 1, int(a.col_indices[0]))}, "col_indices must increase"),
    ("reversed", lambda a: {"col_indices": torch.where(a.col_indices < 0, -1, K - 1 - a.col_indices)}, "increase"),
    ("padding", lambda a: {"row_end": a.row_end - 1}, "col_indices must be -1 in the padding"),
    *((f"row_start {value} at {place}", lambda a, v=value, p=place: {"row_start": written(a.row_start, p, v)}, "row_start")
      for value in (-32, 10**9, 2**62, 7, -(2**62)) for place in (0, 1, 2)),
    *((f"row_end {value} at {place}", lambda a, v=value, p=place: {"row_end": written(a.row_end, p, v)}, "row|col_indices")
      for value in (-1, 10**9, 2**62, 0 - 2**62, 95) for place in (0, 1, 2)),
    ("start shifted", lambda a: {"row_start": a.row_start + 32, "row_end": a.row_end + 32}, "row_start"),
    ("rows swapped", lambda a: {"row_start": a.row_start.flip(0), "row_end": a.row_end.flip(0)}, "row_start"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "match"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_wrong_structure_is_an_error_before_the_first_product(
    change: Callable[[mc.SRBCRS], dict[str, Tensor]], match: str
) -> None:
    good = matrix()
    bad = rebuilt(good, **change(good))
    with pytest.raises(ValueError, match=match):
        mc.spmm(bad, dense())
    with pytest.raises(ValueError, match=match):  # at the second call too
        mc.spmm(bad, dense())


@pytest.mark.parametrize(("change", "match"), [case[1:] for case in BROKEN[::3]], ids=[case[0] for case in BROKEN[::3]])
def test_a_write_after_a_product_is_scanned(change: Callable[[mc.SRBCRS], dict[str, Tensor]], match: str) -> None:
    a, b = matrix(), dense()
    expected = mc.spmm(a, b)
    for name, tensor in change(a).items():
        getattr(a, name).copy_(tensor)
    with pytest.raises(ValueError, match=match):
        mc.spmm(a, b)
    good = matrix()
    for name in ("row_start", "row_end", "col_indices"):
        getattr(a, name).copy_(getattr(good, name))
    assert torch.equal(mc.spmm(a, b), expected)


@pytest.mark.parametrize("far", FAR)
def test_writes_that_torch_does_not_count_reach_no_kernel(far: int) -> None:
    a, b = matrix(), dense()
    expected = mc.spmm(a, b)
    for name in ("row_start", "row_end", "col_indices"):
        getattr(a, name).numpy()[:] = far
    assert torch.equal(mc.spmm(a, b), expected)  # packed operands are copies


@pytest.mark.parametrize("bits", [4, 8, 12, 16])
@pytest.mark.parametrize("write", ["zero", "copy", "replace", "scale"])
def test_products_follow_writes_to_values(bits: int, write: str) -> None:
    a, b = matrix(bits), dense()
    mc.spmm(a, b, out_dtype=torch.int64), mc.spmm(a, b, out_dtype=torch.int64)
    other = matrix(bits, seed=0).values.flip(-2).contiguous()
    if write == "zero":
        a.values.zero_()
    elif write == "copy":
        a.values.copy_(other)
    elif write == "replace":
        a.values = other
    else:
        a.scale = torch.tensor(0.5)
    out = torch.float32 if write == "scale" else torch.int64
    for _ in range(2):
        expected = mc.reference.spmm(a, b).to(out) * (0.5 if write == "scale" else 1)
        assert torch.equal(mc.spmm(a, b, out_dtype=out), expected)


def test_a_scale_that_is_written_is_followed() -> None:
    a = mc.SRBCRS.from_dense(torch.randn(M, K), vector_length=V, scale="row")
    b = dense()
    first = mc.spmm(a, b)
    assert a.scale is not None
    a.scale.mul_(2)
    assert torch.equal(mc.spmm(a, b), 2 * first)


PATTERNS: list[tuple[str, Callable[[mc.Pattern], tuple[Tensor, Tensor]], str]] = [
    *((f"column {far}", lambda p, f=far: (p.row_offsets, written(p.col_indices, 3, f)), "col_indices") for far in FAR),
    ("columns reversed", lambda p: (p.row_offsets, p.col_indices.flip(0)), "col_indices must increase"),
    *((f"offset {value} at {at}", lambda p, v=value, i=at: (written(p.row_offsets, i, v), p.col_indices), "row_offsets")
      for value in (-1, 10**9, 2**62, -(2**62)) for at in (0, 1, 3)),
    ("offsets fall", lambda p: (p.row_offsets.flip(0), p.col_indices), "row_offsets"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "match"), [case[1:] for case in PATTERNS], ids=[case[0] for case in PATTERNS])
@pytest.mark.parametrize("product", ["sddmm", "attention", "bcrs"])
def test_a_wrong_pattern_is_an_error_before_the_first_product(
    product: str, change: Callable[[mc.Pattern], tuple[Tensor, Tensor]], match: str
) -> None:
    good = mc.random_pattern(M, K, sparsity=0.5, vector_length=V, distribution="fixed")
    offsets, columns = change(good)
    if product == "bcrs":
        values = torch.ones(len(columns), V, dtype=torch.int8)
        bad = mc.BCRS(offsets, columns, values, shape=(M, K), vector_length=V, bits=8)
        with pytest.raises(ValueError, match=match):
            mc.spmm(bad, dense())
        return
    pattern = mc.Pattern((M, K), V, offsets, columns)
    with pytest.raises(ValueError, match=match):
        if product == "sddmm":
            x, y = mc.quantize(torch.randn(M, 16), bits=8), mc.quantize(torch.randn(K, 16), bits=8)
            mc.sddmm(x, y, pattern)
        else:
            mc.sparse_attention(torch.randn(1, M, 32), torch.randn(1, K, 32), torch.randn(1, K, 32), pattern)


def test_a_pattern_that_is_written_is_scanned_again() -> None:
    pattern = mc.random_pattern(M, K, sparsity=0.5, vector_length=V, distribution="fixed")
    x, y = mc.quantize(torch.randn(M, 16), bits=8), mc.quantize(torch.randn(K, 16), bits=8)
    mc.sddmm(x, y, pattern)
    pattern.col_indices[0] = 10**6
    with pytest.raises(ValueError, match=r"col_indices must lie in \[0, 64\), got 1000000 at vector 0"):
        mc.sddmm(x, y, pattern)


def test_a_loaded_matrix_owns_its_memory(tmp_path: Path) -> None:
    a, b, file = matrix(), dense(), tmp_path / "a.safetensors"
    a.save(file)
    loaded = mc.SRBCRS.load(file)
    with open(file, "r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
        stream.truncate(16)
    assert torch.equal(mc.spmm(loaded, b), mc.spmm(a, b)) and torch.equal(loaded.values, a.values)


def test_operands_without_memory_of_their_values_are_right() -> None:
    a = matrix()
    real = torch.randn(K, 9, dtype=torch.complex64)
    negated = real.conj().imag  # a view whose memory has the other sign
    assert negated.is_neg()
    assert torch.equal(mc.quantize(negated, bits=8).ints(), mc.quantize(negated.clone(), bits=8).ints())
    zeros = torch._efficientzerotensor((K, 9))
    assert not mc.quantize(zeros, bits=8).ints().any()
    assert not mc.spmm(a, mc.quantize(zeros, bits=8)).any()
    empty = mc.SRBCRS.from_dense(torch.from_numpy(np.zeros((M, 0), dtype=np.int8)), vector_length=V)
    b = mc.QuantTensor.from_ints(torch.from_numpy(np.zeros((0, 5), dtype=np.int8)), bits=8)
    assert torch.equal(mc.spmm(empty, b), torch.zeros(M, 5, dtype=torch.int32))


def test_tensors_without_memory_of_their_values_are_refused_or_right() -> None:
    a, b = matrix(), dense()
    zeros = torch._efficientzerotensor((K, 9), dtype=torch.int8)
    with pytest.raises(ValueError, match="data must hold its values"):
        mc.QuantTensor(zeros, None, 8, True, None, zeros.shape)
    floats = torch.randn(M, dtype=torch.complex64)
    for bias in (floats.conj().imag, torch._efficientzerotensor((M,))):
        mc.spmm(a, b, out_dtype=torch.float32, bias=torch.zeros(M))  # cached for a bias of this shape
        expected = mc.spmm(a, b, out_dtype=torch.float32, bias=bias.clone())
        assert torch.equal(mc.spmm(a, b, out_dtype=torch.float32, bias=bias), expected)
