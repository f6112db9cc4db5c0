"""Malformed arguments of ``torch.ops.magicube.*``: a named error, no read or write outside of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from magicube_cutlass.dispatch.cpu import pack_operand
from magicube_cutlass.dispatch.plan import plan_sddmm

M, K, N, V = 24, 64, 40, 8
A = mc.SRBCRS.from_pattern(
    mc.random_pattern(M, K, 0.5, V), torch.ones(96, V, dtype=torch.int8), bits=8
)  # fmt: skip
FLOATS = mc.SRBCRS.from_dense(torch.randn(M, K), vector_length=V, dtype="float16")
OPS = torch.ops.magicube

Change = Callable[[dict[str, Any]], dict[str, Any]]


def spmm_arguments() -> dict[str, Any]:
    return {
        "matrix": pack_operand(A), "b": torch.ones(K, N, dtype=torch.int8), "row_scale": torch.ones(M),
        "col_scale": torch.ones(N), "bias": torch.ones(M), "inner": K, "bits": [8, 8], "signed": [True, True],
        "packed_dim": -1, "kernel": "cpu", "out": torch.zeros(M, N),
    }  # fmt: skip


def float_arguments() -> dict[str, Any]:
    changes = {"matrix": pack_operand(FLOATS), "b": torch.ones(K, N, dtype=torch.float16), "kernel": "cpu:float16"}
    return spmm_arguments() | changes


def item(name: str, at: int, change: Callable[[Tensor], Tensor]) -> Change:
    def changed(given: dict[str, Any]) -> dict[str, Any]:
        found = list(given[name])
        found[at] = change(found[at])
        return {name: found}

    return changed


SHORT: dict[str, Callable[[Tensor], Tensor]] = {
    "short": lambda x: x[:-1],
    "strided": lambda x: torch.cat((x, x), -1)[..., ::2],
    "float64": lambda x: x.double(),
    "empty": lambda x: x[:0],
}
CASES: list[tuple[str, Change, str]] = [
    *((f"{name} {kind}", lambda g, n=name, f=change: {n: f(g[n])}, name) for name in ("row_scale", "col_scale", "bias")
      for kind, change in SHORT.items()),
    *((f"{name} expanded", lambda g, n=name: {n: torch.ones(1).expand(len(g[n]))}, f"{name} must be contiguous")
      for name in ("row_scale", "col_scale", "bias")),
    ("out expanded", lambda g: {"out": torch.zeros(1, N).expand(M, N)}, r"out must be contiguous, got strides \(0, 1\)"),
    ("out transposed", lambda g: {"out": torch.zeros(N, M).t()}, "out must be contiguous"),
    ("out a vector", lambda g: {"out": torch.zeros(N)}, "out must have at least 2 dimensions"),
    ("out of another batch", lambda g: {"out": torch.zeros(2, M, N)}, "out must have shape"),
    ("out rows", lambda g: {"out": torch.zeros(M + 8, N)}, "row_scale|row_start"),
    ("out rows alone", lambda g: {"out": torch.zeros(M + 8, N), "row_scale": None, "bias": None}, "row_start"),
    ("out fewer rows", lambda g: {"out": torch.zeros(8, N), "row_scale": None, "bias": None}, "row_start"),
    ("out columns", lambda g: {"out": torch.zeros(M, N + 1), "col_scale": None}, "b must have shape"),
    ("out float64", lambda g: {"out": torch.zeros(M, N, dtype=torch.float64)}, "out must have one of the dtypes"),
    ("b short", lambda g: {"b": g["b"][:-1]}, r"b must have shape \(..., 64, 40\), got \(63, 40\)"),
    ("b a vector", lambda g: {"b": torch.ones(N, dtype=torch.int8)}, "b must have shape"),
    ("b int32", lambda g: {"b": g["b"].int()}, "b must have dtype torch.int8"),
    ("b uint8", lambda g: {"b": g["b"].view(torch.uint8)}, "b must have dtype torch.int8"),
    ("b strided both ways", lambda g: {"b": torch.ones(2 * K, 2 * N, dtype=torch.int8)[::2, ::2]}, "row- or column-major"),
    ("b of a batch", lambda g: {"b": g["b"].expand(3, K, N)}, "out must have shape"),
    ("inner", lambda g: {"inner": K + 1}, "b must have shape"),
    ("inner negative", lambda g: {"inner": -1}, "b must have shape"),
    ("bits", lambda g: {"bits": [8, 3]}, "bits must be one of"),
    ("bits of A", lambda g: {"bits": [16, 8]}, "planes must have shape"),
    ("bits few", lambda g: {"bits": [8]}, "bits must have 2 entries, got 1"),
    ("signed few", lambda g: {"signed": [True]}, "signed must have 2 entries, got 1"),
    ("packed_dim", lambda g: {"packed_dim": 2}, "packed dimension of b must be -1 or -2, got 2"),
    ("kernel", lambda g: {"kernel": "nope"}, "kernel must be 'cpu' or one of"),
    ("matrix few", lambda g: {"matrix": g["matrix"][:4]}, "matrix must have 5 tensors, got 4"),
    ("matrix none", lambda g: {"matrix": []}, "matrix must have 5 tensors, got 0"),
    *((f"matrix {at} {kind}", item("matrix", at, change), r"matrix\[|row_start|row_end|col_indices|planes|row_sums")
      for at in range(5) for kind, change in SHORT.items()),
]  # fmt: skip
FLOAT_CASES: list[tuple[str, Change, str]] = [
    *((f"matrix {at} {kind}", item("matrix", at, change), "matrix") for at in range(3)
      for kind, change in SHORT.items() if not (at == 1 and kind == "double")),
    ("matrix few", lambda g: {"matrix": g["matrix"][:2]}, "matrix must have 3 tensors, got 2"),
    ("b short", lambda g: {"b": g["b"][:-1]}, "b must have shape"),
    ("b bytes", lambda g: {"b": g["b"].to(torch.uint8)}, "b must have elements of 16 bits"),
    ("kernel", lambda g: {"kernel": "cpu:float12"}, "kernel must be"),
]  # fmt: skip


def names(cases: list[tuple[str, Change, str]]) -> dict[str, Any]:
    return {"argvalues": [case[1:] for case in cases], "ids": [case[0] for case in cases]}


@pytest.mark.parametrize(("change", "match"), **names(CASES))
def test_spmm_out_names_the_argument(change: Change, match: str) -> None:
    given = spmm_arguments()
    OPS.spmm_out(**given)  # as it is right
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=match):
        OPS.spmm_out(**(given | change(given)))


@pytest.mark.parametrize(("change", "match"), **names(FLOAT_CASES))
def test_float_spmm_out_names_the_argument(change: Change, match: str) -> None:
    given = float_arguments()
    OPS.spmm_out(**given)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=match):
        OPS.spmm_out(**(given | change(given)))


def sddmm_arguments() -> dict[str, Any]:
    index = plan_sddmm(A.pattern, 32, (mc.quantize(torch.ones(1, 1), 8).element_type,) * 2, torch.float32, 16, None)[1]
    return {
        "pattern": index, "x": torch.ones(M, 16, dtype=torch.int8), "y": torch.ones(K, 16, dtype=torch.int8),
        "row_scale": torch.ones(M), "col_scale": torch.ones(K), "shape": [M, K, 16], "vector_length": V, "stride": 32,
        "bits": [8, 8], "signed": [True, True], "inner_y": -1, "packed": [-1, -1], "kernel": "cpu",
        "out_dtype": torch.float32,
    }  # fmt: skip


SDDMM: list[tuple[str, Change, str]] = [
    *((f"{name} {kind}", lambda g, n=name, f=change: {n: f(g[n])}, name) for name in ("row_scale", "col_scale")
      for kind, change in SHORT.items()),
    *((f"pattern {at} {kind}", item("pattern", at, change), "pattern") for at in range(3) for kind, change in SHORT.items()
      if not (at == 2 and kind == "empty")),
    ("x short", lambda g: {"x": g["x"][:-1]}, "x must have shape"),
    ("x int16", lambda g: {"x": g["x"].short()}, "x must have dtype torch.int8"),
    ("y short", lambda g: {"y": g["y"][:, :-1]}, "y must have shape"),
    ("y of a batch", lambda g: {"y": g["y"].expand(2, K, 16)}, "y must have the batch"),
    ("y strided both ways", lambda g: {"y": torch.ones(2 * K, 32, dtype=torch.int8)[::2, ::2]}, "row- or column-major"),
    ("shape few", lambda g: {"shape": [M, K]}, "shape must have 3 entries, got 2"),
    ("shape negative", lambda g: {"shape": [-M, K, 16]}, "m must be at least 0, got -24"),
    ("shape larger", lambda g: {"shape": [2 * M, K, 16]}, "pattern"),
    ("vector_length", lambda g: {"vector_length": 3}, "vector_length must be one of"),
    ("vector_length of others", lambda g: {"vector_length": 4}, "pattern"),
    ("stride", lambda g: {"stride": 8}, "stride must be one of"),
    ("inner_y", lambda g: {"inner_y": 0}, "inner_y must be -1 or -2, got 0"),
    ("packed", lambda g: {"packed": [-1]}, "packed must have 2 entries, got 1"),
    ("bits", lambda g: {"bits": [8, 5]}, "bits must be one of"),
    ("kernel", lambda g: {"kernel": "cpu:e4m3"}, "kernel must be 'cpu' or"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "match"), **names(SDDMM))
def test_sddmm_names_the_argument(change: Change, match: str) -> None:
    given = sddmm_arguments()
    OPS.sddmm(**given)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=match):
        OPS.sddmm(**(given | change(given)))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: OPS.quantize(torch.ones(4, 4, dtype=torch.int32), 8, None), "x must have a floating dtype"),
        (lambda: OPS.quantize(torch.ones(4, 4), 7, None), "bits must be one of"),
        (lambda: OPS.quantize(torch.ones(4, 4), 8, 2), "axis must be None, 0 or 1, got 2"),
        (lambda: OPS.quantize(torch.ones(4), 8, 1), "x must have at least 2 dimensions"),
        (lambda: OPS.quantize_by(torch.ones(4, 4), torch.ones(3), 8), "scale must be one float on cpu"),
        (lambda: OPS.quantize_by(torch.ones(4, 4), torch.ones((), dtype=torch.int32), 8), "scale must be one float"),
        (lambda: OPS.spmm(**{k: v for k, v in spmm_arguments().items() if k != "out"}, rows=-1, n=N,
                          out_dtype=torch.float32), "rows must be at least 0, got -1"),
    ],
)  # fmt: skip
def test_other_operators_name_the_argument(call: Callable[[], object], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        call()


def test_negated_floats_are_quantized_by_their_values() -> None:
    negated = torch.randn(8, 8, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    for axis in (None, 0, 1):
        data, scale = OPS.quantize(negated, 8, axis)
        again, other = OPS.quantize(negated.clone(), 8, axis)
        assert torch.equal(data, again) and torch.equal(scale, other)
