"""Sparse products of the CPU engine with few columns, and with floats that the call quantizes: exact on every path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.cpu import extension, linear
from cute_kernels.cpu.arguments import SparseOperand
from cute_kernels.cpu.calls import column_masks
from cute_kernels.integers import int_range
from magicube_cutlass.autograd.integer import compress, quantized
from magicube_cutlass.dispatch import cpu_linear
from magicube_cutlass.dispatch.cpu import pack_operand

pytestmark = pytest.mark.skipif(not extension.available(), reason="no engine")


@pytest.fixture(params=[(isa, threads) for isa in extension.isas() for threads in (1, 2)], ids=str)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An instruction set with one and with two threads, however little work there is."""
    isa, threads = request.param
    monkeypatch.setenv("MAGICUBE_CPU", isa)
    before, work = torch.get_num_threads(), extension.load_extension().set_serial_work(0 if threads > 1 else 2**62)
    torch.set_num_threads(threads)
    yield isa
    torch.set_num_threads(before)
    extension.load_extension().set_serial_work(work)


def ints(shape: tuple[int, ...], bits: int, signed: bool, seed: int) -> Tensor:
    low, high = int_range(bits, signed)
    found = torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))
    found.view(-1)[:2] = torch.tensor([low, high])[: found.numel()]
    return found


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """The product of int8 in int64: that of float64, whose sums are exact below 2^53 and ten times as quick."""
    assert a.shape[1] < 1 << 37
    return (a.double() @ b.double()).long()


@pytest.mark.parametrize("columns", [31, 48, 65, 80, 176])
@pytest.mark.parametrize("k", [70, 2500])  # rows of a panel: two parts of 32 columns on AVX2, or one
def test_panels_are_exact(path: str, columns: int, k: int) -> None:
    pattern = mc.random_pattern(1504, k, 0.97, 8, seed=k)
    a = mc.SRBCRS.from_pattern(pattern, ints((pattern.vectors, 8), 8, True, 1), bits=8)
    data = ints((k, columns), 8, True, 2)
    b, expected = mc.QuantTensor.from_ints(data, bits=8), multiply(a.to_dense(dequantize=False), data)
    for dtype in (torch.int32, torch.float32, torch.float16):
        product = mc.spmm(a, b, out_dtype=dtype)
        assert torch.equal(product, expected.to(torch.float32).to(dtype) if dtype.is_floating_point else expected.int())


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    ("m", "columns", "v"), [(40, 17, 8), (61, 70, 8), (2048, 144, 8), (2048, 176, 4)]
)  # the last two stream their results
def test_scaled_panels_have_the_bits_of_the_formula(path: str, m: int, columns: int, v: int, signed: bool) -> None:
    pattern = mc.random_pattern(m, 192, 0.7, v, seed=m)
    values, x = ints((pattern.vectors, v), 8, True, 1), ints((columns, 192), 8, signed, 2)
    row, column, bias = (
        torch.linspace(0.1, 2, m)[:, None],
        torch.linspace(0.5, 3, columns)[None],
        torch.linspace(-9, 9, m),
    )
    a = mc.SRBCRS.from_pattern(pattern, values, bits=8, scale=row)
    total = multiply(a.to_dense(dequantize=False), x.mT)
    for data in (x.mT, x.mT.contiguous()):  # runs of B along K, and across it
        b = mc.QuantTensor.from_ints(data, bits=8, signed=signed, scale=column)
        assert torch.equal(
            mc.spmm(a, b, out_dtype=torch.float32, bias=bias), total.float() * row * column + bias[:, None]
        )


@pytest.mark.parametrize("columns", [33, 150])
@pytest.mark.parametrize("vector_length", [8, 16, 32])
@pytest.mark.parametrize(("a_signed", "b_signed"), [(True, True), (True, False), (False, True), (False, False)])
def test_long_vector_rows_are_exact(
    path: str, columns: int, vector_length: int, a_signed: bool, b_signed: bool
) -> None:
    """By tiles where the CPU has them: of vector rows with many vectors, and others between them."""
    rows, k = 9, 1000
    mask = torch.rand(rows, k, generator=torch.Generator().manual_seed(columns)) < 0.6
    mask[1], mask[3, 5:], mask[4, 33:] = False, False, False  # an empty one, and two short ones
    m, pattern = rows * vector_length, mc.Pattern.from_vector_mask(mask, rows * vector_length, vector_length)
    values, data = ints((pattern.vectors, vector_length), 8, a_signed, 1), ints((k, columns), 8, b_signed, 2)
    scale, bias = torch.linspace(0.1, 2, m), torch.linspace(-9, 9, m)
    a = mc.SRBCRS.from_pattern(pattern, values, bits=8, signed=a_signed, scale=scale[:, None])
    b, dense = mc.QuantTensor.from_ints(data, bits=8, signed=b_signed), a.to_dense(dequantize=False)
    expected = multiply(dense, data)
    assert torch.equal(mc.spmm(a, b, out_dtype=torch.int32), expected.int())
    assert torch.equal(
        mc.spmm(a, b, out_dtype=torch.float32, bias=bias), expected.float() * scale[:, None] + bias[:, None]
    )
    weight = linear.pack_left(SparseOperand(*pack_operand(a), m, k, 8, a_signed))
    x = ints((columns, k), 8, True, 3).clamp(-127)  # the scale of each row is 1
    x[:, 7] = 127
    rows_of = linear.LinearCall(weight, columns, k, 8, torch.float32)(x.float(), None, scale, bias)
    assert torch.equal(rows_of, multiply(x, dense.mT).float() * scale + bias)


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("vector_length", [1, 2, 4, 8, 16, 32])
def test_integers_are_exact(path: str, columns: int, vector_length: int) -> None:
    for (m, k, stride), left, right in (
        ((33, 1, 16), (8, True), (8, True)), ((40, 70, 32), (8, True), (8, True)), ((61, 1300, 64), (4, True), (8, False)),
        ((24, 257, 16), (8, False), (4, True)), ((16, 130, 32), (4, False), (4, False)),
    ):  # fmt: skip
        pattern = mc.random_pattern(m, k, 0.6 if k > 1 else 0.0, vector_length, seed=k)
        values = ints((pattern.vectors, vector_length), *left, 1)
        a = mc.SRBCRS.from_pattern(pattern, values, bits=left[0], signed=left[1], stride=stride)
        x = ints((2, k, columns), *right, 2)
        for data in (x, x[0], x[0].t().contiguous().t()):
            b = mc.QuantTensor.from_ints(data, bits=right[0], signed=right[1])
            expected = multiply(a.to_dense(dequantize=False), data)
            for out in (torch.int32, torch.int64):
                assert torch.equal(mc.spmm(a, b, out_dtype=out).long(), expected)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sparsity", [0.5, 0.93])  # three columns read masks where they keep enough
def test_scales_and_bias_have_the_bits_of_more_columns(
    path: str, columns: int, dtype: torch.dtype, sparsity: float
) -> None:
    pattern = mc.random_pattern(45, 400, sparsity, 8, seed=3)
    values, x = ints((pattern.vectors, 8), 8, True, 1), ints((400, 40), 8, True, 2)
    scales, bias = torch.linspace(0.1, 2, 40)[None], torch.linspace(-9, 9, 45)
    a = mc.SRBCRS.from_pattern(pattern, values, bits=8, scale=torch.linspace(0.5, 3, 45)[:, None])
    whole = mc.spmm(a, mc.QuantTensor.from_ints(x, bits=8, scale=scales), out_dtype=dtype, bias=bias)
    for data in (x[:, :columns], x.t().contiguous()[:columns].t()):  # runs of B across K, and along it
        few = mc.QuantTensor.from_ints(data, bits=8, scale=scales[:, :columns].contiguous())
        assert torch.equal(mc.spmm(a, few, out_dtype=dtype, bias=bias), whole[:, :columns])


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 16, 40, 70])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("takes_dense", [False, True])
def test_one_call_has_the_bits_of_quantizing_first(path: str, tokens: int, bits: int, takes_dense: bool) -> None:
    pattern = mc.random_pattern(45, 200, 0.5, 8, seed=3)
    generator = torch.Generator().manual_seed(tokens)
    a = compress(torch.randn(pattern.vectors, 8, generator=generator), pattern, bits=bits)
    bias, reals = torch.linspace(-9, 9, 45), torch.randn(tokens, 203, generator=generator)
    reals[-1, 7] = float("nan")
    reals[0] *= 1e-40
    call = cpu_linear.CpuLinear(a)
    a._execution["linear"] = call
    call._choices[tokens] = takes_dense
    for x in (reals[:, 3:], reals[:, 3:].half(), reals[:, 3:].contiguous().bfloat16()):
        for scale in (None, torch.tensor(0.013)):
            got = cpu_linear.linear(a, x, bias, 8, scale)
            first = quantized(x.mT, 8, 0 if scale is None else None, scale)
            expected = mc.spmm(a, first, out_dtype=x.dtype, bias=bias)
            assert got is not None and got.dtype == x.dtype
            got = got.mT
            assert torch.equal(got.nan_to_num(), expected.nan_to_num()) and torch.equal(got.isnan(), expected.isnan())


@pytest.mark.parametrize(
    ("k", "tokens"), [(128, 150), (2500, 230)]
)  # several panels, of two parts of 32 columns or one
def test_floats_of_several_panels_are_quantized_to_the_same_integers(path: str, k: int, tokens: int) -> None:
    pattern = mc.random_pattern(64, k, 0.9, 8, seed=k)
    a = compress(torch.randn(pattern.vectors, 8, generator=torch.Generator().manual_seed(1)), pattern, bits=8)
    call = cpu_linear.CpuLinear(a)
    a._execution["linear"], call._choices[tokens] = call, False
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, tokens)[:, None]
    got = cpu_linear.linear(a, x, None, 8, None)
    assert got is not None and torch.equal(got.mT, mc.spmm(a, quantized(x.mT, 8, 0, None), out_dtype=torch.float32))


def test_the_dense_kernel_takes_a_dense_weight_and_sees_it_change(monkeypatch: pytest.MonkeyPatch) -> None:
    if "avx2" not in extension.isas():
        pytest.skip("needs AVX2")
    monkeypatch.setenv("MAGICUBE_CPU", "avx2")
    of_class = (0.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0)  # a stored element takes twice a dense one
    costs = cpu_linear.cpu_costs.CpuCosts(layers=tuple(of_class for _ in cpu_linear.cpu_costs.CLASSES))
    monkeypatch.setattr(cpu_linear.cpu_costs, "get_costs", lambda: costs)
    layer, x = torch.nn.Linear(96, 64), torch.randn(40, 96)
    full, thin = (mc.nn.SparseQuantLinear.from_linear(layer, sparsity=sparsity).eval() for sparsity in (0.0, 0.9))
    with torch.no_grad():
        before = full(x)
        derived = [each.matrix()._execution for each in (full, thin) if each(x) is not None]
        assert ["dense right" in each for each in derived] == [True, False]
        assert before.is_contiguous() and torch.equal(full(x), before)
        layer.weight.mul_(-1)
        assert torch.equal(full(x), mc.nn.SparseQuantLinear.from_linear(layer, sparsity=0.0).eval()(x))
        assert not torch.equal(full(x), before)


@pytest.mark.parametrize(("columns", "words"), [((1, 3), [[10]]), ((3, 1), None), ((1, 1), None)])
def test_masks_need_ascending_columns(columns: tuple[int, int], words: list[list[int]] | None) -> None:
    index = torch.tensor([0]), torch.tensor([2]), torch.tensor(columns, dtype=torch.int32)
    found = column_masks(SparseOperand(*index, torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 8), 8, 5, 8, True))
    assert (None if found is None else found.tolist()) == words
