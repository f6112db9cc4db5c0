"""Sparse matrices of floats: what goes in comes out, through files, formats and transposes; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels import floats
from cute_kernels.dtypes import FLOAT_DTYPES, FLOATS, HALF_DTYPES
from magicube_cutlass.checks import STRIDES, VECTOR_LENGTHS
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor
from tests.helpers import SCALES, random_mask

SMALL = ("e5m2", "e4m3", "e2m1")


def values_of(shape: tuple[int, int], name: str, seed: int) -> Tensor:
    """float64 values of the format, all codes of a small one among them."""
    generator = torch.Generator().manual_seed(seed)
    if name in HALF_DTYPES:
        return torch.randn(shape, generator=generator).to(FLOAT_DTYPES[name]).double()
    codes = torch.randint(0, 1 << FLOATS[name].bits, shape, generator=generator, dtype=torch.uint8)
    found = floats.decode(codes, name, out_dtype=torch.float64)
    return torch.where(found.isfinite(), found, 1.0)


def float_tensor(x: Tensor, name: str, scale: Tensor) -> ScaledFloatTensor:
    """Exactly these values and this scale."""
    return ScaledFloatTensor(floats.pack(floats.encode(x, name), name), x.shape[-1], name, scale)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("seed", range(4))
def test_values_go_in_and_come_out(name: str, seed: int, tmp_path: Path) -> None:
    v, stride = VECTOR_LENGTHS[(seed + len(name)) % 6], STRIDES[seed % 3]
    m, k = (37, 61) if seed else (8 * v, 64)
    x = values_of((m, k), name, seed) * random_mask(m, k, 0.3, seed)
    scale = torch.linspace(0.25, 2, m)[:, None] if name in SMALL and seed % 2 else torch.tensor(0.5)
    given = x.to(FLOAT_DTYPES[name]) if name in HALF_DTYPES else float_tensor(x, name, scale)
    a = mc.SRBCRS.from_dense(given, vector_length=v, stride=stride, dtype=name)
    a.check_format(full=True)
    expected = x if name in HALF_DTYPES else (x.float() * scale).double()
    assert torch.equal(a.to_dense().double(), expected) and torch.equal(a.to_dense(False).double(), x)
    assert a.values.dtype == FLOAT_DTYPES[name] and a.bits is None and a.element_type == FLOATS[name]
    assert a.values[0].numel() * a.values.element_size() == v * stride * FLOATS[name].bits // 8
    assert (a.to_scipy().toarray() == expected.numpy()).all() and f"values={name}" in repr(a)
    other = a.to_bcrs()
    other.check_format(full=True)
    assert torch.equal(other.to_dense(), a.to_dense()) and torch.equal(other.to_srbcrs(16).to_dense(), a.to_dense())
    a.save(tmp_path / "a")
    loaded = mc.SRBCRS.load(tmp_path / "a")
    assert loaded.element_type == a.element_type and torch.equal(loaded.to_dense(), a.to_dense())
    if a.scale is None or a.scale.ndim == 0:
        turned = a.transpose()
        turned.check_format(full=True)
        assert torch.equal(turned.to_dense(), a.to_dense().mT) and turned.element_type == a.element_type


@pytest.mark.parametrize("name", SMALL)
def test_quantizing_is_that_of_quantize(name: str) -> None:
    x = torch.randn(40, 70) * random_mask(40, 70, 0.5)
    for axis in (None, 1):
        a, q = mc.SRBCRS.from_dense(x, dtype=name, scale=SCALES[axis]), mc.quantize(x, dtype=name, scale=SCALES[axis])
        assert torch.equal(a.to_dense(), q.dequantize()) and torch.equal(
            mc.SRBCRS.from_dense(q).to_dense(), a.to_dense()
        )
    # a vector is kept for a value that rounds to zero
    x[8:16], x[9, 3] = 0, 1e-6
    assert mc.SRBCRS.from_dense(x, dtype=name).pattern.to_dense()[9, 3]


@pytest.mark.parametrize("name", FLOATS)
def test_a_mask_selects_what_is_stored(name: str) -> None:
    x, mask = values_of((24, 40), name, 1), random_mask(24, 40, 0.4)
    x[~mask] = 1e4 if name == "float16" else x.abs().max()  # neither stored nor seen by the scale
    x[mask.nonzero()[0][0], mask.nonzero()[0][1]] = 0
    a = mc.SRBCRS.from_mask(x, mask, vector_length=4, dtype=name)
    a.check_format(full=True)
    kept = (x * mask).float()
    expected = kept if name in HALF_DTYPES else mc.quantize(kept, dtype=name).dequantize()
    assert torch.equal(a.to_dense().float(), expected)
    assert a.pattern.vectors == int(mask.view(6, 4, 40).any(1).sum())
    if name in SMALL:
        codes = mc.quantize(x.float(), dtype=name, scale="row")
        b = mc.SRBCRS.from_mask(codes, mask, vector_length=4)
        assert torch.equal(b.to_dense(), codes.dequantize() * mask) and b.pattern.vectors == a.pattern.vectors


def test_float8_tensors_are_taken_as_they_are() -> None:
    x = (torch.randn(16, 32) * random_mask(16, 32, 0.3)).to(torch.float8_e4m3fn)
    a = mc.SRBCRS.from_dense(x)
    assert a.scale is None and torch.equal(a.to_dense().float(), x.float())
    # minus zero is zero
    minus = torch.zeros(8, 8).neg().to(torch.float8_e5m2)
    assert mc.SRBCRS.from_dense(minus).pattern.vectors == 0
    b = mc.SRBCRS.from_pattern(a.pattern, a.vectors(), bits=None)
    assert b.element_type == FLOATS["e4m3"] and torch.equal(b.to_dense().float(), x.float())


def test_damage_is_seen() -> None:
    for name in FLOATS:
        a = mc.SRBCRS.from_dense(torch.ones(5, 7), dtype=name)  # padding in both directions
        a.values.view(torch.uint8)[...] |= 0x30
        with pytest.raises(ValueError, match="values must be zero in the padding"):
            a.check_format(full=True)


X, ONES = torch.ones(8, 16), torch.ones(8, 16)
A = mc.SRBCRS.from_dense(ONES, dtype="e4m3")
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a six-bit format": (lambda: mc.SRBCRS.from_dense(X, dtype="e3m2"), ValueError, "dtype must be one of float16, bfloat16, e5m2, e4m3, e2m1, got 'e3m2'"),
    "bits and dtype": (lambda: mc.SRBCRS.from_dense(X, dtype="e4m3", bits=8), ValueError, "bits must be None for dtype 'e4m3', got 8"),
    "clip": (lambda: mc.SRBCRS.from_dense(X, dtype="e4m3", clip="mse"), ValueError, "clip must be 'max' for dtype 'e4m3', got 'mse'"),
    "integers": (lambda: mc.SRBCRS.from_dense(X.to(torch.int8), dtype="float16"), TypeError, "values must be .* for dtype 'float16', got torch.int8"),
    "another format": (lambda: mc.SRBCRS.from_dense(mc.quantize(X, dtype="e4m3"), dtype="e5m2"), ValueError, "dtype must be 'e4m3' .* got 'e5m2'"),
    "another float8": (lambda: mc.SRBCRS.from_dense(X.to(torch.float8_e5m2), dtype="e4m3"), ValueError, "dtype must be 'e5m2' for values of torch.float8_e5m2, got 'e4m3'"),
    "scales of columns": (lambda: mc.SRBCRS.from_dense(mc.quantize(X, dtype="e4m3", scale="column")), ValueError, "one a column"),
    "an axis of columns": (lambda: mc.SRBCRS.from_dense(X, dtype="e4m3", scale="column"), ValueError, "axis must be None .* got 0"),
    "an axis without a scale": (lambda: mc.SRBCRS.from_dense(X, dtype="float16", scale="row"), ValueError, "axis must be None for dtype 'float16'"),
    "scales of blocks": (lambda: mc.SRBCRS.from_dense(mc.quantize(X, dtype="mxfp8")), ValueError, "got scales of blocks 32"),
    "a mask of another shape": (lambda: mc.SRBCRS.from_mask(X, torch.ones(8, 15, dtype=torch.bool), vector_length=8, dtype="e4m3"), ValueError, "mask must have the shape"),
    "float32 as an operand": (lambda: mc.spmm(A, torch.ones(16, 4)), TypeError, "B must be .* float16, bfloat16, float8_e5m2, float8_e4m3fn, float4_e2m1fn_x2, got torch.float32"),
    "a float32 result as A": (lambda: mc.spmm(mc.sddmm(X.half(), X.half(), mc.random_pattern(8, 8, 0, 8)), torch.ones(8, 4).half()), TypeError, "A must hold quantized integers, got results of dtype torch.float32; floats must be float16, bfloat16"),
    "integers times floats": (lambda: mc.spmm(mc.SRBCRS.from_dense(ONES), torch.ones(16, 4).half()), TypeError, "both integers or both floats, got s8 and float16"),
    "floats times integers": (lambda: mc.spmm(A, mc.quantize(torch.ones(16, 4), 8)), TypeError, "both integers or both floats, got e4m3 and s8"),
    "both halves": (lambda: mc.spmm(mc.SRBCRS.from_dense(ONES, dtype="float16"), torch.ones(16, 4).bfloat16()), TypeError, "must not be float16 and bfloat16"),
    "both halves sampled": (lambda: mc.sddmm(X.half(), X.bfloat16(), mc.random_pattern(8, 8, 0, 8)), TypeError, "must not be float16 and bfloat16"),
    "an integer output": (lambda: mc.spmm(A, torch.ones(16, 4).half(), out_dtype=torch.int32), TypeError, "out_dtype must be one of .* for a product of floats, got torch.int32"),
    "scales along the sum": (lambda: mc.spmm(A, mc.quantize(torch.ones(16, 4), dtype="e4m3", scale="row")), ValueError, "B must have a per-tensor or per-column scale"),
    "B of another size": (lambda: mc.spmm(A, torch.ones(15, 4).half()), ValueError, "B must have 16 rows .* got 15"),
    "B of blocks": (lambda: mc.spmm(A, mc.quantize(torch.ones(16, 32), dtype="mxfp4", scale="column")), ValueError, "B must have one scale .* got scales of blocks 32"),
    "X of one dimension": (lambda: mc.sddmm(torch.ones(8).half(), X.half(), A), ValueError, "X must have at least 2 dimensions"),
}  # fmt: skip


def test_configs_for_floats_are_checked() -> None:
    pytest.importorskip("pycute")
    from cute_kernels.atoms import default_atom
    from cute_kernels.machine import Machine, Problem, ProblemTypes
    from cute_kernels.spmm.heuristics import check_spmm, choose_spmm

    half, byte = FLOATS["float16"], FLOATS["e4m3"]
    kind, machine = ProblemTypes(8, half, byte, "float16"), Machine("sm_90a", 132)
    chosen = choose_spmm(kind, machine, Problem(64, 4096, 64 * 40_000, 40_000, 64))
    assert chosen.atom == default_atom(kind, "sm_90a") == "f16_m16n8k32" and not getattr(chosen, "int64_accum", False)
    check_spmm(chosen, kind, 40_000)  # float32 does not wrap
    with pytest.raises(ValueError, match="atom must be an instruction for float16, got s8_m16n8k32"):
        choose_spmm(kind, machine, Problem(64, 4096, 64 * 400, 400, 64), "s8_m16n8k32")
    with pytest.raises(ValueError, match="atom must be an instruction of sm_90a, got fp8_m16n8k32"):
        choose_spmm(
            ProblemTypes(8, byte, byte, "float16"), machine, Problem(64, 4096, 64 * 400, 400, 64), "fp8_m16n8k32"
        )
    with pytest.raises(TypeError, match="both integers or both floats"):
        default_atom(ProblemTypes(8, half, mc.quantize(torch.ones(2, 2), 8).element_type, "float16"), "sm_90a")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_is_named(name: str) -> None:
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()
