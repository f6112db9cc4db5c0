"""SpMM and SDDMM on CPU tensors: exact against int64, every path, pair, sign, layout and output type."""

import copy
import itertools
import os
import pickle
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import magicube_cutlass as mc
from cute_kernels.cpu import engine as cpu_engine
from cute_kernels.cpu import extension
from cute_kernels.integers import BITS, int_range
from magicube_cutlass.dispatch.cpu import pack_operand
from tests.helpers import SCALES

VECTORS = (1, 2, 4, 8, 16, 32)
LAYOUTS = ("row", "column")


def ints(shape: tuple[int, ...], bits: int, signed: bool, extreme: bool = False) -> torch.Tensor:
    low, high = int_range(bits, signed)
    values = torch.randint(low, high + 1, shape)
    return torch.where(values > (low + high) // 2, high, low) if extreme else values


def dense(
    shape: tuple[int, ...], bits: int, signed: bool, layout: str = "row", extreme: bool = False
) -> mc.QuantTensor:
    x = ints(shape, bits, signed, extreme)
    return mc.QuantTensor.from_ints(x.mT.contiguous().mT if layout == "column" else x, bits=bits, signed=signed)


def sparse(m: int, k: int, v: int, bits: int, signed: bool, *, sparsity: float = 0.6, stride: int = 32,
           extreme: bool = False, seed: int = 0) -> mc.SRBCRS:  # fmt: skip
    mask = mc.random_pattern(m, k, sparsity, v, seed=seed).to_dense()
    return mc.SRBCRS.from_mask(ints((m, k), bits, signed, extreme), mask, vector_length=v, bits=bits, signed=signed,
                               stride=stride)  # fmt: skip


@pytest.fixture(params=cpu_engine.isas())
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MAGICUBE_CPU", request.param)
    return str(request.param)


@pytest.mark.parametrize(("left", "right"), list(itertools.product(BITS, BITS)))
@pytest.mark.parametrize("signs", list(itertools.product([True, False], repeat=2)))
def test_every_pair_and_sign_is_exact(path: str, left: int, right: int, signs: tuple[bool, bool]) -> None:
    for v, stride, layout, extreme in ((8, 32, "row", True), (4, 16, "column", False), (2, 64, "row", False)):
        a = sparse(37, 150, v, left, signs[0], stride=stride, extreme=extreme)
        b = dense((150, 70), right, signs[1], layout, extreme)
        assert torch.equal(mc.spmm(a, b, out_dtype=torch.int64), mc.reference.spmm(a, b))
        x, y = dense((37, 90), left, signs[0], layout, extreme), dense((150, 90), right, signs[1], layout, extreme)
        s = mc.sddmm(x, y, a, out_dtype=torch.int64)
        assert torch.equal(s.vectors(), mc.reference.sddmm(x, y, a.pattern))


@settings(max_examples=150)
@given(
    m=st.integers(1, 40), k=st.integers(1, 80), n=st.integers(0, 70), v=st.sampled_from(VECTORS),
    stride=st.sampled_from([16, 32, 64]), bits=st.tuples(st.sampled_from(BITS), st.sampled_from(BITS)),
    signs=st.tuples(st.booleans(), st.booleans()), sparsity=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    layout=st.sampled_from(LAYOUTS), batch=st.sampled_from([(), (2,), (2, 1, 3)]), engine=st.sampled_from(cpu_engine.isas()),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_random_products_are_exact(m, k, n, v, stride, bits, signs, sparsity, layout, batch, engine, seed) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    a = sparse(m, k, v, bits[0], signs[0], sparsity=sparsity, stride=stride, seed=seed)
    b = dense((*batch, k, n), bits[1], signs[1], layout)
    x, y = dense((*batch, m, n), bits[0], signs[0], layout), dense((*batch, k, n), bits[1], signs[1], "row")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAGICUBE_CPU", engine)
        assert torch.equal(mc.spmm(a, b, out_dtype=torch.int64), mc.reference.spmm(a, b))
        for y_form, transposed in ((y, False), (y.mT, True)):
            s = mc.sddmm(x, y_form, a, out_dtype=torch.int64, transposed_y=transposed)
            s.check_format(full=True)
            assert torch.equal(s.vectors(), mc.reference.sddmm(x, y, a.pattern))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float16, torch.bfloat16])
def test_the_output_types_round_once(path: str, dtype: torch.dtype) -> None:
    a, b = sparse(20, 50, 8, 8, True), dense((50, 33), 8, True)
    x, y = dense((20, 16), 8, True), dense((50, 16), 8, True)
    assert torch.equal(mc.spmm(a, b, out_dtype=dtype), mc.reference.spmm(a, b).float().to(dtype))
    expected = mc.reference.sddmm(x, y, a.pattern).float().to(dtype)
    assert torch.equal(mc.sddmm(x, y, a, out_dtype=dtype).vectors(), expected)


def test_half_outputs_round_to_even_through_their_whole_range(path: str) -> None:
    mask = torch.eye(8, dtype=torch.bool)
    a = mc.SRBCRS.from_mask(torch.eye(8, dtype=torch.int64), mask, vector_length=1, bits=8)
    b = mc.QuantTensor.from_ints(
        ints((8, 4096), 16, True), bits=16, scale=torch.rand(1, 4096) * 2.0 ** torch.randint(-26, 4, (1, 4096))
    )
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(mc.spmm(a, b, out_dtype=dtype), b.dequantize().to(dtype))


@pytest.mark.parametrize("axis_a", [None, 1])
@pytest.mark.parametrize("axis_b", [None, 0])
def test_scales_and_bias_are_fused(path: str, axis_a: int | None, axis_b: int | None) -> None:
    w, x, bias = torch.randn(19, 40), torch.randn(3, 40, 21), torch.randn(19)
    mask = mc.prune(w, 0.5, 4)
    a = mc.SRBCRS.from_mask(w, mask, vector_length=4, bits=8, scale=SCALES[axis_a])
    b = mc.quantize(x, 8, scale=SCALES[axis_b])
    exact = torch.matmul(a.to_dense().double(), b.dequantize().double()) + bias.double()[:, None]
    assert torch.allclose(mc.spmm(a, b, bias=bias).double(), exact, rtol=1e-5, atol=1e-5)
    assert mc.spmm(a, b).dtype == torch.float32


def test_sddmm_scales_belong_to_rows_of_both(path: str) -> None:
    q, k = torch.randn(2, 24, 32), torch.randn(2, 40, 32)
    pattern = mc.random_pattern(24, 40, 0.5, 8)
    x, y = mc.quantize(q, 8, scale="row"), mc.quantize(k, 8, scale="row")
    s = mc.sddmm(x, y, pattern).to_dense()
    exact = torch.matmul(x.dequantize(), y.dequantize().mT) * pattern.to_dense()
    assert torch.allclose(s, exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(mc.sddmm(x, y, pattern, out_format="bcrs").to_dense(), s)


def test_long_rows_do_not_overflow_the_int32_lanes(path: str) -> None:
    k = 70_000
    a = mc.SRBCRS.from_mask(
        torch.full((1, k), 255), torch.ones(1, k, dtype=torch.bool), vector_length=1, bits=8, signed=False
    )
    b = mc.QuantTensor.from_ints(torch.full((k, 2), 255), bits=8, signed=False)
    assert mc.spmm(a, b, out_dtype=torch.int64).tolist() == [[k * 255 * 255] * 2]
    x = mc.QuantTensor.from_ints(torch.full((1, k), 255), bits=8, signed=False)
    s = mc.sddmm(x, x, mc.Pattern.from_dense(torch.ones(1, 1, dtype=torch.bool), 1), out_dtype=torch.int64)
    assert s.vectors().tolist() == [[k * 255 * 255]]


def test_views_are_read_without_a_copy(path: str) -> None:
    a = sparse(16, 48, 8, 8, True)
    wide = ints((50, 200), 8, True).to(torch.int8)
    view = wide[1:49, 3:100]
    b = mc.QuantTensor(view, None, 8, True, None, view.shape)
    assert torch.equal(mc.spmm(a, b), mc.reference.spmm(a, b).int())
    assert torch.equal(mc.spmm(a, mc.QuantTensor.from_ints(wide[1:49, ::2], bits=8)),
                       torch.matmul(a.to_dense().long(), wide[1:49, ::2].long()).int())  # fmt: skip
    with pytest.raises(ValueError, match="must be row- or column-major, got strides"):
        mc.spmm(a, mc.QuantTensor(wide[1:49, ::2], None, 8, True, None, wide[1:49, ::2].shape))


def test_out_is_written_in_place_and_nowhere_else(path: str) -> None:
    a, b = sparse(19, 30, 8, 8, True), dense((30, 67), 8, True)
    guarded = torch.full((21, 67), 77, dtype=torch.int32)
    assert mc.spmm(a, b, out=guarded[1:20]).data_ptr() == guarded[1:20].data_ptr()
    assert torch.equal(guarded[1:20], mc.reference.spmm(a, b).int())
    assert bool((guarded[[0, 20]] == 77).all())


@pytest.mark.parametrize("shape", [(512, 300), (512, 1300), (3, 512, 1300)])
def test_threads_do_not_change_the_result(path: str, shape: tuple[int, ...]) -> None:
    a, b = sparse(100, 512, 8, 8, True), dense(shape, 8, True)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(mc.spmm(a, b))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], mc.reference.spmm(a, b).int())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


CONCURRENT = """
import os
import pickle
import threading

import torch

import magicube_cutlass as mc
from cute_kernels.cpu import extension

torch.set_num_threads(3)
extension.load_extension().set_serial_work(0)
extension.load_extension().want_openmp(IS_WANTED)
mask = mc.random_pattern(256, 512, 0.5, 8).to_dense()
a = mc.SRBCRS.from_mask(torch.randint(-128, 128, (256, 512)), mask, vector_length=8, bits=8)
b = mc.QuantTensor.from_ints(torch.randint(-128, 128, (512, 300)), bits=8)
expected = mc.reference.spmm(a, b).int().numpy().tobytes()


def right() -> bool:
    torch.set_num_threads(3)
    return all(mc.spmm(a, b).numpy().tobytes() == expected for _ in range(20))


results = [right()]
threads = [threading.Thread(target=lambda: results.append(right())) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
child = os.fork()
if child == 0:
    os._exit(0 if right() else 1)
results += [os.waitpid(child, 0)[1] == 0, right()]
print(results)
"""


@pytest.mark.parametrize("is_wanted", ["True", "False"], ids=["openmp", "pool"])
def test_callers_on_several_threads_and_after_a_fork_get_their_results(is_wanted: str) -> None:
    code = CONCURRENT.replace("IS_WANTED", is_wanted)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert run.stdout.strip() == str([True] * 7), run.stderr


@pytest.mark.parametrize("n", [576, 580])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16])
def test_outputs_too_large_for_a_cache_hold_the_same_results(path: str, n: int, dtype: torch.dtype) -> None:
    a, b = sparse(1000, 64, 8, 8, True, sparsity=0.9), dense((64, n), 8, True)
    product = mc.spmm(a, b, out_dtype=dtype)
    assert torch.equal(product, mc.reference.spmm(a, b).to(dtype))
    shifted = torch.zeros(1000 * n + 1, dtype=dtype)[1:].view(1000, n)  # not aligned to a line
    assert torch.equal(mc.spmm(a, b, out=shifted), product)


def test_row_sums_beyond_int32_are_exact() -> None:
    planes = torch.full((1, 140_000, 1, 64), 255, dtype=torch.uint8)
    assert cpu_engine.row_sums(planes, torch.zeros(1, dtype=torch.int64), False).tolist() == [[[140_000 * 64 * 255]]]


def test_a_cached_call_reads_other_data_scales_and_bias(path: str) -> None:
    torch.manual_seed(3)
    weight, bias = torch.randn(40, 70), torch.randn(40)
    for axis in (None, 1):
        a = mc.SRBCRS.from_dense(weight, vector_length=8, bits=8, scale=SCALES[axis])
        for seed in range(3):
            torch.manual_seed(seed)
            b = mc.quantize(torch.randn(70, 33), 8, scale="column")
            assert b.scale is not None
            for step in range(4):
                expected = torch.matmul(a.to_dense().double(), b.dequantize().double()) + bias.double()[:, None]
                worst = (mc.spmm(a, b, bias=bias).double() - expected).abs().max()
                assert worst <= 4 * 2.0**-24 * expected.abs().max(), (seed, step)  # four roundings of float32
                assert torch.equal(mc.spmm(a, b, out_dtype=torch.int64), mc.reference.spmm(a, b))
                assert a.scale is not None
                (a.scale if step % 2 else b.scale).mul_(2)
                bias.add_(1)
                if step == 1:
                    a.scale = a.scale * 3
        a.scale = None
        assert torch.equal(mc.spmm(a, mc.QuantTensor.from_ints(b.ints(), bits=8)), mc.reference.spmm(a, b).int())


def test_bcrs_multiplies_too() -> None:
    a, b = sparse(19, 30, 8, 8, True), dense((30, 9), 8, True)
    assert torch.equal(mc.spmm(a.to_bcrs(), b), mc.spmm(a, b))


def test_a_matrix_without_columns_or_rows_gives_zeros() -> None:
    empty = mc.SRBCRS.from_mask(
        torch.zeros(5, 0, dtype=torch.int8), torch.zeros(5, 0, dtype=torch.bool), vector_length=2, bits=8
    )
    assert torch.equal(mc.spmm(empty, dense((0, 3), 8, True)), torch.zeros(5, 3, dtype=torch.int32))


def test_the_fallback_without_the_extension_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = sparse(19, 30, 8, 16, True), dense((2, 30, 9), 4, False, "column")
    x, y = mc.quantize(torch.randn(19, 7), 8, scale="row"), mc.quantize(torch.randn(30, 7), 8, scale="row")
    expected = mc.spmm(a, b, out_dtype=torch.int64), mc.sddmm(x, y, a).values
    monkeypatch.setattr(extension, "ENGINE", None)
    assert torch.equal(mc.spmm(a, b, out_dtype=torch.int64), expected[0])
    assert torch.allclose(mc.sddmm(x, y, a).values, expected[1], rtol=1e-6)


def test_without_the_engine_a_report_and_a_choice_have_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    a = mc.SRBCRS.from_dense(torch.eye(16, 32), vector_length=8, bits=8)
    b = mc.quantize(torch.ones(32, 8), bits=8)
    wanted = mc.spmm(a, b, allow_dense=True)
    monkeypatch.setattr(extension, "ENGINE", None)
    found = mc.explain(a, b)
    assert found.kernel == "reference" and "sparse_us" not in found.facts
    assert torch.equal(mc.spmm(a, b, allow_dense=True), wanted)


def test_opcheck_passes() -> None:
    a, b = sparse(16, 48, 8, 8, True), dense((2, 48, 20), 8, True)
    operands = (pack_operand(a), b.data, None, None, None)
    torch.library.opcheck(torch.ops.magicube.spmm.default,
                          (*operands, 16, 48, 20, [8, 8], [True, True], -1, "cpu", torch.int32))  # fmt: skip
    torch.library.opcheck(torch.ops.magicube.spmm_out.default,
                          (*operands, 48, [8, 8], [True, True], -1, "cpu", torch.empty(2, 16, 20)))  # fmt: skip
    padded = a.pattern.padded(32)
    x, y = dense((16, 8), 8, True), dense((48, 8), 8, True)
    torch.library.opcheck(
        torch.ops.magicube.sddmm.default,
        ([padded.row_start, padded.row_end, padded.col_indices], x.data, y.data, None, None, [16, 48, 8], 8, 32, [8, 8],
         [True, True], -1, [-1, -1], "cpu", torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_the_whole_call_compiles_without_a_graph_break(bits: int) -> None:
    a = sparse(16, 48, 8, bits, True)

    def product(data: torch.Tensor) -> torch.Tensor:
        b = mc.QuantTensor(data, None, 8, True, None, data.shape)
        return mc.spmm(a, b, out_dtype=torch.float32) + 1

    compiled = torch.compile(product, fullgraph=True)
    for n in (20, 33):
        data = ints((48, n), 8, True).to(torch.int8)
        assert torch.equal(compiled(data), product(data))


def test_a_compiled_product_follows_a_matrix_and_a_mask_that_are_replaced() -> None:
    kept: dict[str, Any] = {}

    def product(data: torch.Tensor) -> torch.Tensor:
        return mc.spmm(kept["a"], mc.QuantTensor(data, None, 8, True, None, data.shape))

    def sampled(x: torch.Tensor) -> torch.Tensor:
        left = mc.QuantTensor(x, None, 8, True, None, x.shape)
        s = mc.sddmm(left, left, kept["mask"])
        assert isinstance(s, mc.SRBCRS)
        return s.values.sum()

    compiled, compiled_sampled = torch.compile(product, fullgraph=True), torch.compile(sampled, fullgraph=True)
    data = ints((48, 20), 8, True).to(torch.int8)
    for seed in range(3):
        kept["a"], kept["mask"] = sparse(16, 48, 8, 8, True), mc.random_pattern(48, 48, 0.5, 8, seed=seed)
        assert torch.equal(compiled(data), product(data))
        assert torch.equal(compiled_sampled(data), sampled(data))


def test_compiled_sddmm_has_no_graph_break() -> None:
    pattern = mc.random_pattern(16, 48, 0.5, 8)

    def values(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = (mc.QuantTensor(t, None, 8, True, None, t.shape) for t in (x, y))
        s = mc.sddmm(left, right, pattern)
        assert isinstance(s, mc.SRBCRS)
        return s.values * 2

    x, y = ints((16, 8), 8, True).to(torch.int8), ints((48, 8), 8, True).to(torch.int8)
    assert torch.equal(torch.compile(values, fullgraph=True)(x, y), values(x, y))


def test_a_forced_path_that_cannot_run_is_refused() -> None:
    code = "import torch, magicube_cutlass as mc; mc.quantize(torch.ones(2), 8)"
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "MAGICUBE_CPU": "sse9"}, capture_output=True,
                         text=True, check=False)  # fmt: skip
    assert "MAGICUBE_CPU must be one of" in run.stderr


def test_explain_names_the_path_and_the_digits() -> None:
    random.seed(0)
    text = mc.explain(sparse(16, 48, 8, 16, True), dense((48, 20), 8, True, "column"))
    assert cpu_engine.isa() in text
    assert "2 x 1 digits" in text
    assert "column-major" in text


def test_a_copied_matrix_multiplies_and_takes_no_kernels_along() -> None:
    b = mc.quantize(torch.randn(48, 33), 8, scale="column")
    a = mc.SRBCRS.from_dense(torch.randn(16, 48), vector_length=8, bits=8)
    expected, pattern = mc.spmm(a, b), a.pattern
    mc.sddmm(mc.quantize(torch.randn(16, 8), 8), mc.quantize(torch.randn(48, 8), 8), pattern)
    for matrix in (copy.deepcopy(a), pickle.loads(pickle.dumps(a)), copy.copy(a)):
        assert not matrix._execution and not matrix._cache
        assert torch.equal(mc.spmm(matrix, b), expected)
    for other in (copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
        assert not other._cache and other.equals(pattern)
