"""``spmm(..., allow_dense=True)``: the dense product where it is expected to be faster, with the same result."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.cpu import dense as dense_engine
from cute_kernels.cpu import extension
from cute_kernels.dtypes import Integer
from cute_kernels.gemm.cpu import packs_weights
from cute_kernels.integers import int_range
from cute_kernels.machine import Problem, ProblemTypes
from magicube_cutlass.dispatch import cpu_costs, dense_fallback
from magicube_cutlass.dispatch.dense_fallback import DenseCall, Forecast, cpu_forecast, dense_copy, forecast

BYTES = ((8, True), (4, True), (4, False))  # bits and sign of what an int8 holds
EPS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True)
def xeon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Select by the costs of one thread of one CPU, whichever runs the tests."""
    costs = cpu_costs.CpuCosts()
    costs = replace(costs, packed=(*costs.dense[:2], 0.0, *costs.dense[2:]), turned=(1.0, 0.0))
    monkeypatch.setattr(cpu_costs, "get_costs", lambda: costs)
    for name in ("CPU_CALL", "CPU_GEMM", "CPU_ROW"):  # small products take the dense one too
        monkeypatch.setattr(dense_fallback, name, 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ints(shape: tuple[int, ...], bits: int, signed: bool) -> Tensor:
    low, high = int_range(bits, signed)
    return torch.randint(low, high + 1, shape)


def sparse(m: int, k: int, v: int, of: tuple[int, bool] = (8, True), sparsity: float = 0.1) -> mc.SRBCRS:
    pattern = mc.random_pattern(m, k, sparsity, v, seed=m + k)
    return mc.SRBCRS.from_pattern(pattern, ints((pattern.vectors, v), *of), bits=of[0], signed=of[1])


def dense(shape: tuple[int, ...], of: tuple[int, bool] = (8, True), column: bool = False) -> mc.QuantTensor:
    x = ints(shape, *of)
    return mc.QuantTensor.from_ints(x.mT.contiguous().mT if column else x, bits=of[0], signed=of[1])


def scaled(a: mc.SRBCRS, b: mc.QuantTensor, rows: bool, columns: bool) -> tuple[mc.SRBCRS, mc.QuantTensor]:
    left = torch.rand(a.shape[0], 1) + 0.5 if rows else torch.tensor(0.25)
    right = (torch.rand(*b.shape[:-2], 1, b.shape[-1]) + 0.5) / 128 if columns else torch.tensor(0.0078125)
    matrix = mc.SRBCRS.from_pattern(a.pattern, a.vectors(), bits=a.bits, signed=a.signed, scale=left)
    return matrix, mc.QuantTensor.from_ints(b.ints(), bits=b.bits, signed=b.signed, scale=right)


def cached_dense(a: mc.SRBCRS | mc.BCRS) -> list[DenseCall]:
    return [call for call in a._execution.get("records", {}).values() if isinstance(call, DenseCall)]


def took_dense(a: mc.SRBCRS | mc.BCRS) -> bool:
    return bool(cached_dense(a))


@pytest.mark.parametrize(("left", "right"), list(itertools.product(BYTES, BYTES)))
@pytest.mark.parametrize("column", [False, True])
def test_integers_equal_the_reference(left: tuple[int, bool], right: tuple[int, bool], column: bool) -> None:
    for v, (m, k, n), out in ((8, (50, 301, 67), torch.int32), (1, (17, 256, 1), torch.int64)):
        a, b = sparse(m, k, v, left), dense((k, n), right, column)
        got = mc.spmm(a, b, out_dtype=out, allow_dense=True)
        assert took_dense(a)
        assert got.dtype == out
        assert torch.equal(got.long(), mc.reference.spmm(a, b))


def test_the_extremes_of_int8_are_exact() -> None:
    k = 4096
    pattern = mc.random_pattern(16, k, 0.0, 8)
    a = mc.SRBCRS.from_pattern(pattern, torch.full((pattern.vectors, 8), -128), bits=8)
    b = mc.QuantTensor.from_ints(torch.full((k, 33), -128), bits=8)
    assert torch.equal(mc.spmm(a, b, allow_dense=True), torch.full((16, 33), k * 2**14, dtype=torch.int32))
    assert took_dense(a)


@pytest.mark.parametrize("out", list(EPS))
@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_scales_bias_and_batch_are_those_of_the_sparse_product(out: torch.dtype, batch: tuple[int, ...]) -> None:
    for rows, columns, with_bias, v in itertools.product((False, True), (False, True), (False, True), (8, 2)):
        a, b = scaled(sparse(37, 1500, v, sparsity=0.02), dense((*batch, 1500, 64)), rows, columns)
        bias = torch.randn(37) if with_bias else None
        got = mc.spmm(a, b, out_dtype=out, bias=bias, allow_dense=True)
        assert took_dense(a)
        assert a.scale is not None and b.scale is not None
        exact = mc.reference.spmm(a, b).double() * a.scale.double() * b.scale.double()
        size, offset = exact.abs(), torch.zeros(37, 1) if bias is None else bias.double()[:, None]
        # three roundings to float32, one to the output, of which float16 has numbers no smaller than 2^-24
        bound = (3 * EPS[torch.float32] + EPS[out]) * (size + offset.abs()) + 2.0**-25
        assert bool(((got.double() - exact - offset).abs() <= bound).all())
        assert got.shape == (*batch, 37, 64)


@pytest.mark.parametrize("column", [False, True])
def test_the_output_is_written_in_place_and_a_second_call_sees_new_data(column: bool) -> None:
    a, b = scaled(sparse(64, 1500, 4), dense((1500, 64)), True, True)
    if column:
        b = mc.QuantTensor(b.data.t().contiguous().t(), b.scale, 8, True, b.axis, b.shape)
    out, first = torch.full((64, 64), torch.nan), cached_dense(a)
    for seed in range(3):
        torch.manual_seed(seed)
        b.data.copy_(ints((1500, 64), 8, True))
        assert a.scale is not None and b.scale is not None
        a.scale.uniform_(0.5, 2.0)
        b.scale.uniform_(0.5, 2.0)
        assert mc.spmm(a, b, out=out, allow_dense=True) is out
        exact = mc.reference.spmm(a, b).double() * a.scale.double() * b.scale.double()
        assert torch.allclose(out.double(), exact, rtol=1e-6, atol=0)
        first = cached_dense(a) if seed == 0 else first
    assert took_dense(a) and cached_dense(a)[0] is first[0]
    a.scale = torch.tensor(2.0)  # another tensor: the cached call is for the old one
    exact = mc.reference.spmm(a, b).double() * 2.0 * b.scale.double()
    assert torch.allclose(mc.spmm(a, b, out=out, allow_dense=True).double(), exact, rtol=1e-6, atol=0)


def prefer(monkeypatch: pytest.MonkeyPatch, turned: bool) -> None:
    """Let a row-major B be turned, or packed in the call."""
    monkeypatch.setattr(dense_fallback, "_row_major_costs", lambda *_: (1.0, 2.0) if turned else (2.0, 1.0))


def test_the_dense_copy_is_made_once_and_left_behind_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, turned=False)
    a, b = sparse(40, 250, 8), dense((250, 33))
    mc.spmm(a, b, allow_dense=True)
    copy = a._execution["dense"]
    mc.spmm(a, dense((250, 65)), allow_dense=True)
    assert a._execution["dense"] is copy
    assert copy.dtype == torch.int8 and copy.stride(0) % 16 == 0
    assert torch.equal(copy, a.to_dense(dequantize=False))
    assert dense_copy(sparse(8, 16, 8)).is_contiguous()


@pytest.mark.parametrize("out", [torch.int32, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("column", [False, True])
def test_the_cpu_dense_kernel_has_the_bits_of_the_sparse_one(
    out: torch.dtype, column: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not extension.available():
        pytest.skip("no engine")
    monkeypatch.setenv("MAGICUBE_GEMM", "engine")
    prefer(monkeypatch, turned=False)
    packs = packs_weights()  # else the matrix is packed in each call
    packed = []
    monkeypatch.setattr(dense_engine, "pack_right", lambda b, run=dense_engine.pack_right: packed.append(b) or run(b))
    for rows, columns, with_bias in itertools.product((False, True), repeat=3):
        a, b = scaled(sparse(64, 1024, 8), dense((1024, 40), column=column), rows, columns)
        b = mc.QuantTensor(b.data.t().contiguous().t(), b.scale, 8, True, b.axis, b.shape) if column else b
        bias = torch.linspace(-9, 9, 64) if with_bias and out != torch.int32 else None
        packed.clear()
        for _ in range(3):
            got = mc.spmm(a, b, out_dtype=out, bias=bias, allow_dense=True)
            assert torch.equal(got, mc.spmm(a, b, out_dtype=out, bias=bias)) and got.is_contiguous()
        assert took_dense(a) and len(packed) == (1 if packs and (column or bias is not None) else 3)


def test_a_bcrs_matrix_works_too() -> None:
    a, b = sparse(40, 250, 8).to_bcrs(), dense((250, 33))
    assert torch.equal(mc.spmm(a, b, allow_dense=True).long(), mc.reference.spmm(a, b))
    assert took_dense(a)


def test_without_the_flag_and_where_the_sparse_kernel_wins_no_dense_copy_is_made() -> None:
    a, b = sparse(64, 1024, 8), dense((1024, 64))
    expected = mc.spmm(a, b)
    assert "dense" not in a._execution
    assert torch.equal(mc.spmm(a, b, allow_dense=True), expected) and took_dense(a)
    a._execution["dense"].zero_()
    assert torch.equal(mc.spmm(a, b), expected)  # not by the cached call of the other
    thin = sparse(64, 1024, 8, sparsity=0.95)
    assert torch.equal(mc.spmm(thin, b, allow_dense=True).long(), mc.reference.spmm(thin, b))
    assert "dense" not in thin._execution and not took_dense(thin)


@pytest.mark.parametrize(("left", "right"), [((8, False), (8, True)), ((8, True), (8, False)), ((16, True), (4, True)),
                                             ((4, True), (12, True))])  # fmt: skip
def test_operands_that_are_no_bytes_stay_sparse(left: tuple[int, bool], right: tuple[int, bool]) -> None:
    a, b = sparse(32, 200, 8, left), dense((200, 20), right)
    assert forecast(a, b, torch.int64) is None
    assert torch.equal(mc.spmm(a, b, out_dtype=torch.int64, allow_dense=True), mc.reference.spmm(a, b))
    assert "dense" not in a._execution


@pytest.mark.parametrize(("m", "k", "n"), [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_empty_products_stay_sparse(m: int, k: int, n: int) -> None:
    a, b = sparse(m, k, 8), dense((k, n))
    assert forecast(a, b, torch.int32) is None
    assert torch.equal(mc.spmm(a, b, allow_dense=True), torch.zeros(m, n, dtype=torch.int32))


def test_sums_that_int32_may_not_hold_stay_sparse() -> None:
    longest = (2**31 - 1) // 2**14
    for k, fits in ((longest, True), (longest + 1, False)):
        a = mc.SRBCRS.from_pattern(mc.random_pattern(8, k, 0.0, 8), torch.full((k, 8), -128), bits=8)
        b = mc.QuantTensor.from_ints(torch.full((k, 1), -128), bits=8)
        assert (forecast(a, b, torch.int64) is not None) == fits
        assert torch.equal(mc.spmm(a, b, out_dtype=torch.int64, allow_dense=True), torch.full((8, 1), k * 2**14))


def test_a_requested_sparse_kernel_contradicts_the_flag() -> None:
    a, b = sparse(16, 64, 8), dense((64, 16))
    with pytest.raises(ValueError, match="allow_dense must be False where a sparse kernel is asked for, got atom='x'"):
        mc.spmm(a, b, allow_dense=True, atom="x")


def test_wrong_arguments_are_refused_as_without_the_flag() -> None:
    a, b = scaled(sparse(16, 64, 8), dense((64, 16)), False, False)
    for error, arguments in (
        (ValueError, {"out": torch.empty(16, 15)}),
        (TypeError, {"out": torch.empty(16, 16), "out_dtype": torch.float16}),
        (ValueError, {"bias": torch.zeros(15)}),
        (TypeError, {"bias": torch.zeros(16), "out_dtype": torch.int32}),
        (ValueError, {"out": torch.empty(16, 32)[:, ::2]}),
    ):
        with pytest.raises(error):
            mc.spmm(a, b, allow_dense=True, **arguments)


def test_explain_says_which_product_is_expected_to_be_faster() -> None:
    full, thin, b = sparse(64, 1024, 8, sparsity=0.0), sparse(64, 1024, 8, sparsity=0.97), dense((1024, 512))
    assert "dense would be faster: about" in mc.explain(full, b)
    assert "dense would not be faster: about" in mc.explain(thin, b)
    assert "dense" not in mc.explain(full, dense((1024, 512), (16, True)))
    assert "dense" not in full._execution  # explain makes no copy


def test_the_engine_is_forecast_as_it_was_measured() -> None:
    """The densities at which both take as long, n = 1024 and 2048, are about a half to three quarters."""
    kind = ProblemTypes(8, Integer(8, True), Integer(8, True), "int32")
    for n in (1024, 2048):
        wins = [
            cpu_forecast(kind, n, 1, Problem(n // 8, n, round(n * n / 8 * density), n, n)).dense_wins
            for density in (0.3, 0.5, 0.8, 1.0)
        ]
        assert wins == [False, False, True, True]
    floats = ProblemTypes(8, Integer(8, True), Integer(8, True), "float16")
    problem = Problem(128, 1024, 100_000, 1024, 1024)
    assert cpu_forecast(floats, 1024, 1, problem).dense > cpu_forecast(kind, 1024, 1, problem).dense
    assert str(Forecast(2000.0, 1000.0)).startswith("dense would be faster: about 1.0 us against 2.0 us")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("m", "n"), [(768, 24), (5, 1), (64, 48), (768, 64)])
def test_a_row_major_operand_is_turned_or_packed(m: int, n: int, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, turned)
    a, rows, columns = sparse(m, 300, 8), dense((300, n)), dense((300, n), column=True)
    call = DenseCall(a, rows, torch.int32)
    assert (call.turned is not None) == ((turned or n == 1) and packs_weights())  # one column lies either way
    for operand, each in ((rows, call), (columns, DenseCall(a, columns, torch.int32))):
        assert torch.equal(each(operand.data, None, None, None).long(), mc.reference.spmm(a, operand))


@pytest.mark.skipif(not packs_weights(), reason="the dense kernel of the engine alone reads scales as they are")
@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("n", [3, 16, 20])
def test_scales_of_every_kind_are_read_by_a_warm_dense_call(
    n: int, column: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_fallback, "forecast", lambda *_: Forecast(2.0, 1.0))
    for rows, columns, with_bias, dtype in itertools.product(*[(False, True)] * 3, (torch.float32, torch.float64)):
        a, b = scaled(sparse(24, 300, 8), dense((300, n), column=column), rows, columns)
        assert a.scale is not None and b.scale is not None
        a.scale, scale = a.scale.to(dtype), b.scale.to(dtype)
        data = b.data.t().contiguous().t() if column else b.data
        b = mc.QuantTensor(data, scale, 8, True, b.axis, b.shape)
        bias = torch.randn(48)[::2] if with_bias else None
        want = mc.spmm(a, b, bias=bias)
        for out in (None, torch.empty(24, n)):
            for _ in range(2):
                assert torch.equal(mc.spmm(a, b, bias=bias, out=out, allow_dense=True), want)
        assert len(cached_dense(a)) == 2 and all(each.turned for each in cached_dense(a))


def test_what_few_columns_and_a_row_major_operand_add_to_a_forecast() -> None:
    packed, turned = (7000.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), (100.0, 2.0)

    def of(n: int, v: int = 8, row_major: bool = False, packs: bool = True) -> Forecast:
        cpu = cpu_costs.Processor(cpu_costs.CpuCosts(packed=packed, turned=turned), 1, packs, 64)
        problem, kind = Problem(16, 512, 4000, 256, n), ProblemTypes(v, Integer(8, True), Integer(8, True), "int32")
        return cpu_forecast(kind, 128, 1, problem, cpu, row_major)

    for n in (1, 16, 64, 65):
        found = of(n, row_major=True)
        assert found.dense == pytest.approx(min(of(n).dense + 100 + 2 * 512 * n, 7000)) and found.sparse == of(n).sparse
    assert of(1, row_major=True).dense < 7000 == of(65, row_major=True).dense
    assert of(16, row_major=True, packs=False) == of(16, packs=False)
    layer = cpu_costs.CpuCosts().layer(128, 512, 4000.0 * 4, 16, 1)[0]
    assert of(16, v=4).sparse == of(16, v=2).sparse == pytest.approx(dense_fallback.CPU_SHORT * layer)
    assert of(32).sparse - of(17).sparse == pytest.approx(15 * 128 * 0.3)  # results: both are half a panel of B
    assert of(33).sparse > 1.2 * of(32).sparse


def test_a_compiler_goes_around_the_call_and_a_whole_graph_refuses_it() -> None:
    a, b = sparse(32, 256, 8), dense((256, 32))
    torch._dynamo.reset()
    around = torch.compile(lambda x: mc.spmm(a, x, allow_dense=True) + 1, backend="eager")
    assert torch.equal(around(b).long(), mc.reference.spmm(a, b) + 1)
    whole = torch.compile(lambda x: mc.spmm(a, x, allow_dense=True), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="allow_dense must be False in a compiled graph"):
        whole(b)
