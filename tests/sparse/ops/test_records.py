"""Records: a warm call passes addresses in few calls of Python, with the bits of a cold one, and sees its operands change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.cpu import extension
from cute_kernels.gemm.cpu import packs_weights
from magicube_cutlass.autograd.integer import spmm_of
from magicube_cutlass.dispatch import cpu_linear, dense_fallback
from magicube_cutlass.formats.tracking import MAX_RECORDS
from magicube_cutlass.nn import SparseQuantLinear
from tests.helpers import python_calls
from tests.house import ROOT

pytestmark = pytest.mark.skipif(not extension.available(), reason="no engine")

MOST_CALLS = 12


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def count_calls(call: Callable[[], object], among: str = "") -> int:
    """Calls of Python functions in a call of `call`, which itself counts as none; `among`: of the library's in a folder."""
    files = [code.co_filename for code in python_calls(call)[1:]]
    return sum(file.startswith(among) and not (among and "site-packages" in file) for file in files)


def layer(sparsity: float = 0.5, *, static: bool = False, **options: Any) -> SparseQuantLinear:
    torch.manual_seed(0)
    calibrate = [normal(9, 48)] if static else None
    return SparseQuantLinear.from_linear(torch.nn.Linear(48, 40), sparsity, calibrate=calibrate, **options)


def products() -> dict[str, Callable[[], object]]:
    """Warm calls of the operators."""
    weight = normal(40, 48)
    weight[weight.abs() < 1] = 0
    a = mc.SRBCRS.from_dense(weight, vector_length=8, bits=8)
    b, one = mc.quantize(normal(48, 5), bits=8, scale="column"), mc.quantize(normal(48, 5), bits=8)
    x, y = mc.quantize(normal(40, 16), bits=8, scale="row"), mc.quantize(normal(48, 16, seed=1), bits=8)
    pattern, heads = a.pattern, normal(3, 2, 48, 8)
    mask, masks = mc.masks.local(48, 5), [mc.masks.local(48, 5), mc.masks.random(48, 0.5)]
    return {
        "spmm": lambda: mc.spmm(a, b),
        "spmm, one scale": lambda: mc.spmm(a, one, bias=torch.ones(40)),
        "sddmm": lambda: mc.sddmm(x, y, pattern).values,
        "sparse_attention": lambda: mc.sparse_attention(*heads, mask),
        "sparse_attention, masks and bias": lambda: mc.sparse_attention(*heads, masks, bias=torch.zeros(48)),
    }


@pytest.mark.parametrize("name", list(products()))
def test_a_warm_product_takes_few_calls_of_python_and_the_same_bits(name: str) -> None:
    call = products()[name]
    first = call()
    assert count_calls(call) <= MOST_CALLS
    again = call()
    assert isinstance(first, Tensor) and isinstance(again, Tensor) and torch.equal(first, again)


@pytest.mark.skipif(not packs_weights(), reason="no path of the engine packs weights here")
def test_a_warm_dense_product_takes_few_calls_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = mc.SRBCRS.from_dense(normal(40, 48), vector_length=8, bits=8), mc.quantize(normal(5, 48).t(), bits=8)
    monkeypatch.setattr(dense_fallback, "forecast", lambda *_: dense_fallback.Forecast(2.0, 1.0))
    mc.spmm(a, b, allow_dense=True)
    assert count_calls(lambda: mc.spmm(a, b, allow_dense=True)) <= MOST_CALLS


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_a_warm_layer_takes_few_calls_of_python(sparsity: float, static: bool) -> None:
    module, x = layer(sparsity, static=static).eval(), normal(5, 48)
    with torch.inference_mode():
        module(x)
        assert count_calls(lambda: module(x)) <= MOST_CALLS
    module.train()(x)
    assert count_calls(lambda: module(x), f"{ROOT}/") <= MOST_CALLS  # those of torch are as many again


def test_scales_are_read_at_each_call() -> None:
    ints, mask = torch.randint(-9, 9, (16, 32), dtype=torch.int8), mc.random_pattern(16, 48, 0.5, 8)
    a = mc.SRBCRS.from_dense(ints, vector_length=8)
    for shape in ((), (16, 1)):
        a.scale = torch.full(shape, 0.5)
        for columns in ((), (1, 4)):
            b = mc.QuantTensor.from_ints(torch.ones(32, 4, dtype=torch.int8), bits=8, scale=torch.full(columns, 3.0))
            before = mc.spmm(a, b)
            assert b.scale is not None and len(a._execution["records"]) > 0
            a.scale.mul_(2), b.scale.mul_(0.5)
            assert torch.equal(mc.spmm(a, b), before)
            b.scale.mul_(2)
            assert torch.equal(mc.spmm(a, b), 2 * before)
    x = mc.QuantTensor.from_ints(ints, bits=8, scale=torch.ones(16, 1))
    y = mc.QuantTensor.from_ints(torch.ones(48, 32, dtype=torch.int8), bits=8, scale=0.5)
    first = mc.sddmm(x, y, mask)
    assert x.scale is not None and len(mask._cache["records"]) == 1
    x.scale.mul_(2)
    second = mc.sddmm(x, y, mask)
    assert torch.equal(second.values, 2 * first.values) and second.is_current
    first.values.zero_()
    assert torch.equal(mc.sddmm(x, y, mask).values, second.values) and len(mask._cache["records"]) == 1


def test_a_result_of_a_warm_sddmm_is_scanned_after_a_write() -> None:
    q = mc.quantize(normal(16, 8), bits=8, scale="row")
    mask = mc.Pattern.from_dense(torch.eye(16, dtype=torch.bool), vector_length=8)
    results = [mc.sddmm(q, q, mask, out_dtype=torch.float16) for _ in range(3)]
    assert len({each._version_id for each in results}) == 3
    results[2].values.mul_(2)
    assert [each.is_current for each in results] == [True, True, False]


def test_records_are_bounded_and_go_with_the_matrix() -> None:
    pattern, module = mc.random_pattern(40, 48, 0.5, 8), layer().eval()
    for rows in range(1, MAX_RECORDS + 9):
        x = mc.quantize(normal(40, rows), bits=8, scale="row")
        y = mc.quantize(normal(48, rows), bits=8, scale="row")
        mc.sddmm(x, y, pattern)
        with torch.no_grad():
            module(normal(rows, 48))
    assert len(pattern._cache["records"]) == len(module.matrix()._execution["records"]) == MAX_RECORDS
    module.matrix().values.add_(0)
    module.matrix().refresh()
    assert "records" not in module.matrix()._execution


def gradients(y: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    grad = normal(*y.shape, seed=7).to(y.dtype)
    return list(torch.autograd.grad(y, [each for each in inputs if each is not None], grad))


@pytest.mark.parametrize("options", [{}, {"static": True}, {"grad_bits": None}, {"bits": 4}, {"mask": "odd"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("takes_dense", [False, True])
def test_training_has_the_bits_of_products_of_quantized_operands(
    options: dict[str, Any], dtype: torch.dtype, takes_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear.CpuLinear, "is_dense", lambda self, tokens: takes_dense)
    if options.get("mask") == "odd":
        options = {"mask": torch.rand(40, 48, generator=torch.Generator().manual_seed(1)) < 0.3}
    module = layer(**options).to(dtype)
    weight, bias = module.weight, module.bias
    for shape in ((5, 48), (2, 3, 48), (1, 48)):
        x = normal(*shape, seed=3).to(dtype).requires_grad_()
        y = module(x)
        assert any(kind[-1] for kind in module.matrix()._execution["records"]), "no record of training"
        config, flat = module.config, x.reshape(-1, 48)
        assert weight is not None
        values = mc.autograd.vectors_at(weight, module.pattern)
        expected = spmm_of(
            module.matrix(), flat.mT, values, bias, config.act_bits, 0, module.act_scale, config.grad_bits
        ).mT.view(*shape[:-1], 40)
        assert torch.equal(y, expected) and y.dtype == dtype
        pairs = zip(gradients(y, x, weight, bias), gradients(expected, x, weight, bias), strict=True)
        assert all(torch.equal(got, want) and got.dtype == want.dtype for got, want in pairs)


@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_a_training_call_is_one_call_of_the_engine(sparsity: float, monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = layer(sparsity), []
    module.matrix()
    for name in ("quantize", "spmm", "dense", "integer_linear", "sparse_linear", "linear"):
        run = getattr(extension.ENGINE, name)
        noted = lambda *given, run=run, name=name: calls.append(name) or run(*given)  # noqa: E731
        monkeypatch.setattr(extension.ENGINE, name, noted)
    module(normal(5, 48))
    assert calls == ["integer_linear"]


def test_training_saves_no_floats_and_refuses_a_second_derivative() -> None:
    module, x = layer(), normal(5, 48).requires_grad_()
    y = module(x)
    assert y.grad_fn is not None and {each.dtype for each in y.grad_fn.saved_tensors} == {torch.int8, torch.float32}
    (of_x,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot differentiate twice"):
        of_x.sum().backward()


@pytest.mark.parametrize("learns", [False, True])
def test_a_column_major_input_of_the_dense_kernel(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear.CpuLinear, "is_dense", lambda self, tokens: True)
    module, x = layer(0.0), normal(5, 48)
    with torch.set_grad_enabled(learns):
        for given in (x.t().contiguous().t(), normal(5, 60)[:, 12:], x.expand(2, 5, 48)):
            assert torch.equal(module(given), module(given.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_layer_asks_the_engine_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []
    record_of = cpu_linear.record_of
    monkeypatch.setattr(cpu_linear, "record_of", lambda *given: asked.append(given[1].dtype) or record_of(*given))
    module = layer().to(dtype).eval()
    with torch.no_grad():
        module(normal(5, 48).to(dtype))
    assert asked == [dtype]


def test_a_bias_of_another_kind_is_no_known_one() -> None:
    module, x = layer().eval(), normal(5, 48)
    with torch.no_grad():
        want = module(x)
        module.bias.data = module.bias.data.double()
        assert torch.equal(module(x), want)
        module.bias.data = module.bias.data[:1]
        with pytest.raises(ValueError, match=r"bias must have shape \(40,\), got \(1,\)"):
            module(x)
