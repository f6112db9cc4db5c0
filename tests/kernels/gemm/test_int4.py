"""Packed 4-bit operands of the dense integer product: exact on every instruction set, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.cpu import extension
from cute_kernels.cpu.dense import MAX_K, PackedRight, linear, multiply, pack_right
from cute_kernels.gemm import NATIVE_INT4, Int4Matrix, explain_gemm, gemm
from cute_kernels.gemm import cpu as gemm_cpu
from cute_kernels.gemm.problem import GemmProblem
from tests.helpers import random_ints

SHAPES = [(1, 1, 1), (1, 4096, 70), (2, 4, 8), (3, 9, 63), (4, 63, 64), (5, 64, 65), (8, 65, 130), (17, 513, 33), (49, 1030, 9), (0, 4, 3), (3, 0, 5), (4, 5, 0)]  # fmt: skip
ENGINE = pytest.mark.skipif(not extension.available(), reason="no engine")


@pytest.fixture(params=[(isa, threads) for isa in extension.isas() for threads in (1, 2)], ids=str)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An instruction set with one and with two threads, however little work there is."""
    isa, threads = request.param
    monkeypatch.setenv("MAGICUBE_CPU", isa)
    before, work = torch.get_num_threads(), extension.load_extension().set_serial_work(0 if threads > 1 else 2**62)
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)
    extension.load_extension().set_serial_work(work)


def operands(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    return random_ints((m, k), 8, True, 1), random_ints((k, n), 4, True, 2)


@ENGINE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nibbles_are_multiplied_exactly(path: None, shape: tuple[int, int, int]) -> None:
    a, b = operands(*shape)
    right = pack_right(b, bits=4)
    assert right.packed.nbytes == -(-shape[2] // 64) * -(-shape[1] // 8) * 256
    assert torch.equal(multiply(a, right).long(), a.long() @ b.long())
    assert torch.equal(multiply(a, right, out=torch.empty(shape[2], shape[0], dtype=torch.int64).t(), out_dtype=torch.int64), a.long() @ b.long())  # fmt: skip


@ENGINE
@pytest.mark.parametrize("rows", [1, 2, 4, 7])
@pytest.mark.parametrize(("x", "y"), [(-128, -8), (-128, 7), (127, 7), (127, -8)])
def test_extreme_values_do_not_saturate(path: None, rows: int, x: int, y: int) -> None:
    a, b = torch.full((rows, MAX_K), x, dtype=torch.int8), torch.full((MAX_K, 3), y, dtype=torch.int8)
    assert multiply(a, pack_right(b, bits=4)).tolist() == [[MAX_K * x * y] * 3] * rows


@ENGINE
@pytest.mark.parametrize("k", [5, 64, 203])
def test_quantized_rows_have_the_bits_of_int8_weights(path: None, k: int) -> None:
    b, scale, bias = operands(1, k, 70)[1], torch.linspace(0.5, 2, 70), torch.linspace(-3, 3, 70)
    x = torch.randn(50, k, generator=torch.Generator().manual_seed(3))
    x[3, 1] = float("nan")
    for bits in (8, 4):
        found, expected = (
            linear(x, pack_right(b, width), bits=bits, col_scale=scale, bias=bias).nan_to_num(7.0) for width in (4, 8)
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("engine", [True, False])
def test_packed_operands_give_the_product_of_their_integers(
    shape: tuple[int, int, int], engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not engine:
        monkeypatch.setenv("MAGICUBE_GEMM", "float32")
    a, b = operands(*shape)
    a4 = random_ints(tuple(a.shape), 4, True, 3)
    left, right = Int4Matrix.from_ints(a4, axis=1), Int4Matrix.from_ints(b, axis=0)
    assert torch.equal(right.ints(), b) and torch.equal(left.ints(), a4)
    for x, y, ints_x, ints_y in ((a, right, a, b), (left, right, a4, b), (left, b, a4, b)):
        assert torch.equal(gemm(x, y).long(), ints_x.long() @ ints_y.long())
        m, n = a.shape[0], b.shape[1]
        scale, bias, c = torch.linspace(0.1, 1, n), torch.linspace(-1, 1, n), torch.ones(m, n)
        for options in (
            {"scale_b": scale, "bias": bias},
            {"scale_a": 0.5, "scale_b": scale, "c": c, "beta": 2.0},
            {"out_dtype": torch.float64, "scale_b": scale},
            {"out_dtype": torch.float16, "scale_a": torch.ones(m)},
        ):
            given: dict[str, Any] = {"out_dtype": torch.float32, **options}
            assert torch.equal(gemm(x, y, **given), gemm(ints_x, ints_y, **given))


@ENGINE
def test_digit_planes_and_long_sums_unpack() -> None:
    a, b = operands(3, 20, 5)
    right = Int4Matrix.from_ints(b, axis=0)
    planes = (a, a.flip(0))
    assert torch.equal(gemm(planes, right, out_dtype=torch.float32), gemm(planes, b, out_dtype=torch.float32))
    k = MAX_K + 9
    a, b = torch.full((2, k), -128, dtype=torch.int8), torch.full((k, 3), -8, dtype=torch.int8)
    assert gemm(a, Int4Matrix.from_ints(b, axis=0), out_dtype=torch.int64).tolist() == [[1024 * k] * 3] * 2


@ENGINE
def test_a_right_operand_is_packed_once_and_read_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands(4, 70, 33)
    right, calls = Int4Matrix.from_ints(b, axis=0), list[PackedRight]()
    monkeypatch.setattr(GemmProblem, "unpacked", lambda self: pytest.fail("a packed operand was unpacked"))

    def observed(rows: Tensor, packed: PackedRight, **options: Any) -> Tensor:
        calls.append(packed)
        return multiply(rows, packed, **options)

    monkeypatch.setattr(gemm_cpu.dense, "multiply", observed)
    for _ in range(2):
        assert torch.equal(gemm(a, right).long(), a.long() @ b.long())
    assert calls[0] is calls[1] and calls[0].packed.dtype == torch.uint8
    assert explain_gemm(a, right).kernel == "engine"


@pytest.mark.parametrize("column_major", [True, False])
def test_a_quant_tensor_packed_along_k_is_an_operand_as_it_lies(column_major: bool) -> None:
    ints = random_ints((7, 10), 4, True, 1)
    q = mc.QuantTensor.from_ints(ints.t().contiguous().t() if column_major else ints, bits=4)
    matrix = Int4Matrix(q.data, (7, 10), q.packed_dim % 2)
    assert matrix.axis == (0 if column_major else 1) and torch.equal(matrix.ints(), ints)
    assert matrix.lines.data_ptr() == q.data.data_ptr()


A, B = operands(4, 6, 5)
FOUR = Int4Matrix.from_ints(B, axis=0)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: Int4Matrix.from_ints(torch.tensor([[8]]), 0), ValueError, "ints must lie in [-8, 7]"),
        (lambda: Int4Matrix.from_ints(torch.zeros(3, dtype=torch.int8), 0), ValueError, "ints must have 2 dimensions, got 1"),
        (lambda: Int4Matrix(FOUR.data.int(), (6, 5), 0), TypeError, "data must be torch.uint8, got torch.int32"),
        (lambda: Int4Matrix(FOUR.data, (6, 5), 2), ValueError, "axis must be 0 or 1, got 2"),
        (lambda: Int4Matrix(FOUR.data, (6, 5), 1), ValueError, "data must have shape (6, 3), got (3, 5)"),
        (lambda: gemm(FOUR, B), ValueError, "a must be packed along K, axis=1, got axis=0"),
        (lambda: gemm(A[:, :5], FOUR), ValueError, "b must have 5 rows to match a of shape (4, 5), got 6"),
        (lambda: gemm(A, FOUR, config=NATIVE_INT4), ValueError, "config must be None on cpu, got gemm-mma-1x1l1"),
        (lambda: pack_right(A, bits=4), ValueError, "b must lie in [-8, 7] for signed 4-bit integers"),
        (lambda: pack_right(A, bits=2), ValueError, "bits must be 4 or 8, got 2"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=re.escape(match)):
        call()


def test_the_native_config_is_never_selected_and_has_a_name_of_its_own() -> None:
    from cute_kernels.gemm.heuristics import candidates

    assert all(
        each.bits == 8 for arch in ("sm_80", "sm_89", "sm_90a") for each in candidates(NATIVE_INT4.products, arch)
    )
    assert NATIVE_INT4.name.endswith("-s4") and replace(NATIVE_INT4, bits=8).name != NATIVE_INT4.name
