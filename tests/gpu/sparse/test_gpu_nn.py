"""Gradients and layers on a GPU: what the CPU computes, without waiting, in graphs and through the compiler."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magicube_cutlass as mc
from cute_kernels.convert.transpose import transpose
from magicube_cutlass import autograd as ag
from magicube_cutlass.autograd import integer
from magicube_cutlass.dispatch import cuda_floats
from magicube_cutlass.nn import PruningSchedule, SparseQuantConfig, SparseQuantLinear, calibrate
from tests.helpers import SCALES
from tests.nn.test_projections import GROUPS, Attention, products

pytestmark = pytest.mark.gpu

# Few kinds of kernels, each is compiled: one vector length, other dtypes and widths for one size.
CASES = [(37, 50, 20, 8, ()), (64, 300, 96, 8, (2,)), (256, 512, 130, 8, ())]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def near(got: Tensor, want: Tensor, bound: float = 2e-6) -> None:
    """Both devices sum the same integers, so that only the scaling of float32 may round otherwise."""
    error = (got.cpu().double() - want.cpu().double()).norm() / want.cpu().double().norm().clamp(min=1e-30)
    assert got.dtype == want.dtype and got.shape == want.shape and float(error) < bound, float(error)


BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


KINDS = [*((case, torch.float32) for case in CASES), *((CASES[1], dtype) for dtype in BOUNDS if dtype != torch.float32)]


@pytest.mark.parametrize(
    ("case", "dtype", "grad_bits"), [*((*kind, 16) for kind in KINDS), (*KINDS[1], 8), (*KINDS[1], 4)], ids=str
)
def test_spmm_and_its_gradients_are_the_cpu_s(case: Any, dtype: torch.dtype, grad_bits: int) -> None:
    m, k, n, v, batch = case
    pattern = mc.random_pattern(m, k, 0.6, v)
    found: list[Any] = []
    for device in ("cpu", "cuda"):
        p = pattern.to(device)
        w, x, bias = (
            t.to(device).requires_grad_()
            for t in (normal(m, k, dtype=dtype), normal(*batch, k, n, seed=1, dtype=dtype), normal(m, dtype=dtype))
        )
        values = ag.vectors_at(w, p)
        a = ag.compress(values, p)
        y = ag.spmm(a, x, values=values, bias=bias, grad_bits=grad_bits)
        g = normal(*batch, m, n, seed=2, dtype=dtype).to(device)
        found.append([a.values, a.scale, y.detach(), *torch.autograd.grad(y, (w, x, bias), g)])
    cpu, gpu = found
    assert torch.equal(gpu[0].cpu(), cpu[0]) and torch.equal(gpu[1].cpu(), cpu[1])
    for got, want in zip(gpu[2:5], cpu[2:5], strict=True):
        near(got, want, BOUNDS[dtype])
    near(gpu[5], cpu[5], max(BOUNDS[dtype], 1e-5))  # torch's own sums, in another order


@pytest.mark.parametrize(("case", "dtype"), KINDS, ids=str)
def test_sddmm_and_its_gradients_are_the_cpu_s(case: Any, dtype: torch.dtype) -> None:
    m, n, k, v, batch = case
    pattern = mc.random_pattern(m, n, 0.6, v)
    found: list[Any] = []
    for device in ("cpu", "cuda"):
        x, y = (normal(*batch, rows, k, seed=rows, dtype=dtype).to(device).requires_grad_() for rows in (m, n))
        s = ag.sddmm(x, y, pattern.to(device))
        g = normal(*batch, pattern.vectors, v, seed=2, dtype=dtype).to(device)
        found.append([s.detach(), *torch.autograd.grad(s, (x, y), g)])
    for got, want in zip(*reversed(found), strict=True):
        near(got, want, BOUNDS[dtype])


def test_gradients_are_near_those_of_a_dense_float64_product() -> None:
    p = mc.random_pattern(512, 512, 0.8, 8).to("cuda")
    w, x, g = (normal(512, 512, seed=i).cuda().requires_grad_() for i in range(3))
    values = ag.vectors_at(w, p)
    exact = [t.detach().double().requires_grad_() for t in (w, x)]
    want = torch.autograd.grad((exact[0] * p.to_dense()) @ exact[1], exact, g.double())
    for grad_bits in (16, None):
        y = ag.spmm(ag.compress(values, p), x, values=values, grad_bits=grad_bits)
        for got, true in zip(torch.autograd.grad(y, (w, x), g, retain_graph=True), want, strict=True):
            near(got.double(), true, 0.01)


def test_the_quantizers_are_the_cpu_s_and_wait_for_nothing() -> None:
    p = mc.random_pattern(40, 300, 0.5, 8)
    on_gpu, values = p.to("cuda"), normal(p.vectors, 8)
    there, x = values.cuda(), normal(3, 40, 300).cuda()
    scale = torch.tensor(0.01, device="cuda")

    def run() -> list[Any]:
        return [
            ag.compress(there, on_gpu),
            integer.quantized(x, 8, 1), integer.quantized(x.mT, 4, 0), integer.quantized(x, 16, None), integer.quantized(x, 8, None, scale),
        ]  # fmt: skip

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        matrix, *dense = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = ag.compress(values, p)
    assert (
        torch.equal(matrix.values.cpu(), want.values)
        and want.scale is not None
        and torch.equal(matrix.scale.cpu(), want.scale)
    )
    for got, (bits, axis) in zip(dense[:3], ((8, 1), (4, 0), (16, None)), strict=True):
        expected = mc.quantize(x.cpu() if axis != 0 else x.cpu().mT, bits, scale=SCALES[axis])
        assert expected.scale is not None and torch.equal(got.ints().cpu(), expected.ints())
        assert torch.equal(got.scale.cpu(), expected.scale)
    assert torch.equal(dense[3].ints().cpu(), integer.quantized(x.cpu(), 8, None, scale.cpu()).ints())
    odd = torch.tensor([[0.0, 1.0, -3.0, torch.inf, torch.nan]], device="cuda")
    assert integer.quantized(odd, 8, None, torch.tensor(0.02, device="cuda")).ints().tolist() == [[0, 50, -128, 127, 0]]


def linear(**options: Any) -> SparseQuantLinear:
    torch.manual_seed(0)
    return SparseQuantLinear.from_linear(nn.Linear(96, 128), 0.7, **options).eval()


def chain(device: str, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    mc.convert(model, {"4": None, "*": SparseQuantConfig(0.7, **options)})
    return model.eval()


@pytest.mark.parametrize(
    "options", [{}, {"bits": 4, "act_bits": 4}, {"bits": 16}, {"calibrate": [normal(9, 96)]}], ids=list
)
@torch.no_grad()
def test_a_layer_computes_what_it_does_on_the_cpu(options: dict[str, Any]) -> None:
    layer = linear(**options)
    moved = copy.deepcopy(layer).to("cuda")
    frozen = copy.deepcopy(moved).freeze()
    for shape in ((33, 96), (2, 5, 96), (96,), (0, 96), (1, 96)):
        x = normal(*shape)
        near(moved(x.cuda()), layer(x))
        assert torch.equal(frozen(x.cuda()), moved(x.cuda()))
    half = copy.deepcopy(frozen).half()
    near(half(normal(33, 96).cuda().half()).float(), layer(normal(33, 96)), 0.03)  # some integers of x are others
    back = moved.to("cpu")
    assert torch.equal(back(normal(5, 96)), layer(normal(5, 96)))


@torch.no_grad()
def test_a_state_of_the_cpu_loads_on_the_gpu_and_a_model_is_calibrated_there() -> None:
    first, second = chain("cpu", bits=4), chain("cuda")
    calibrate(first, [normal(64, 96)], progress=False)
    second.load_state_dict(first.state_dict())
    assert second[0].col_indices.is_cuda and second[0].act_scale.is_cuda
    near(second(normal(33, 96).cuda()), first(normal(33, 96)), 1e-3)  # an activation may round to another integer
    again = calibrate(second, [normal(64, 96).cuda()], progress=False)
    layer: Any = first[0]
    assert again["0"] == pytest.approx(float(layer.act_scale))


@torch.no_grad()
def test_a_warm_model_waits_for_nothing_and_is_captured_in_a_graph() -> None:
    for static in (False, True):
        model, x = chain("cuda"), normal(48, 96).cuda()
        if static:
            calibrate(model, [x], progress=False)
        model(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        for seed in range(3):
            x.copy_(normal(48, 96, seed=seed))
            y.fill_(-1)
            graph.replay()
            assert torch.equal(y, model(x))


@pytest.fixture
def compiled() -> Iterator[Callable[[nn.Module], Callable[..., Tensor]]]:
    yield lambda model: torch.compile(model, fullgraph=True)
    torch._dynamo.reset()


@torch.no_grad()
def test_a_compiled_model_is_one_graph(compiled: Callable[..., Any]) -> None:
    model = chain("cuda")
    run, of_ours = compiled(model), compiled(model[:3])
    for shape in ((48, 96), (2, 3, 96)):
        x = normal(*shape).cuda()
        near(run(x), model(x), 1e-3)  # an activation may round to another integer
        assert of_ours(x).is_contiguous()  # torch may pad the rows that its own product writes


@torch.no_grad()
def test_frozen_layers_compiled_one_by_one_share_a_graph() -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(256, 96, device="cuda") for _ in range(9)]
    layers, x, seen = [SparseQuantLinear.from_linear(each, 0.8).eval().freeze() for each in linears], normal(5, 256), []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        seen.append([str(node.target) for node in graph.graph.nodes if "magicube" in str(node.target)])
        return graph.forward

    torch._dynamo.reset()
    for layer in layers:
        assert torch.equal(torch.compile(layer, backend=backend, fullgraph=True)(x.cuda()), layer(x.cuda()))
    assert seen == [["magicube.sparse_frozen_rows"]]
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("options", [{"weight": "int8"}, {"weight": "int4", "group_size": 64, "act": "none"}], ids=str)
def test_projections_that_read_the_same_rows_are_one_product(
    options: dict[str, Any], compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Attention().cuda().bfloat16().eval()
    mc.convert(model, mc.nn.QuantConfig(**options), freeze=True, progress=False)
    x = normal(2, 5, 64).cuda().bfloat16()
    want = model(x)
    assert mc.nn.fuse_projections(model, x) == GROUPS
    seen = products(monkeypatch)
    near(model(x), want, 1e-2)
    assert seen == [456, 64, 256, 64]
    near(compiled(model)(x), want, 2e-2)


def test_a_model_learns_on_a_schedule() -> None:
    torch.manual_seed(0)
    model, x = chain("cuda").train(), normal(512, 96).cuda()
    target = nn.Sequential(nn.Linear(96, 32), nn.Tanh(), nn.Linear(32, 10)).cuda()(x).detach()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = PruningSchedule(model, initial=0.3, final=0.7, end=40, every=10)
    losses = []
    for _ in range(80):
        loss = (model(x) - target).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    assert losses[-1] < 0.2 * losses[0]
    assert model[0].pattern.density == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("at_once", [False, True], ids=["copied", "transposed"])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_warm_product_of_floats_is_the_first_one_and_follows_its_operands(
    dtype: torch.dtype, static: bool, tokens: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call runs a record; its launches are replayed from the third one on."""
    monkeypatch.setattr(cuda_floats, "serves", lambda rows, columns: at_once)
    matrix = mc.SRBCRS.from_mask(normal(64, 300), mc.random_pattern(64, 300, 0.6, 8).to_dense(), vector_length=8).to(
        "cuda"
    )
    bias = normal(64, seed=4, dtype=dtype).cuda()
    scale = torch.tensor(0.03, device="cuda") if static else None
    xs = [normal(tokens, 300, seed=seed, dtype=dtype).cuda() for seed in range(3)]

    def fresh(x: Tensor) -> Tensor:
        matrix._execution.clear()
        return ag.spmm(matrix, x.mT, bias=bias, act_scale=scale)

    wanted = [fresh(x) for x in xs]
    for _ in range(4):
        for x, want in zip(xs, wanted, strict=True):
            assert torch.equal(ag.spmm(matrix, x.mT, bias=bias, act_scale=scale), want)
    assert any(key[0] == "floats" for key in matrix._execution["records"])
    bias.add_(1)
    assert torch.equal(ag.spmm(matrix, xs[0].mT, bias=bias, act_scale=scale), fresh(xs[0]))
    if scale is not None:
        scale.mul_(2)
        assert torch.equal(ag.spmm(matrix, xs[0].mT, bias=bias, act_scale=scale), fresh(xs[0]))
    matrix.values.neg_()
    assert not torch.equal(ag.spmm(matrix, xs[0].mT, bias=bias, act_scale=scale), wanted[0])
    x = xs[0].clone().requires_grad_()
    assert ag.spmm(matrix, x.mT, bias=bias, act_scale=scale).requires_grad


@pytest.mark.alone
def test_a_warm_layer_takes_little_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    layer = (
        SparseQuantLinear.from_linear(nn.Linear(1024, 1024, device="cuda", dtype=torch.float16), 0.9).eval().freeze()
    )
    x = torch.randn(16, 1024, device="cuda", dtype=torch.float16)
    with torch.inference_mode():
        for _ in range(10):
            layer(x)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            layer(x)
        taken = (time.perf_counter() - start) / 200 * 1e6
        torch.cuda.synchronize()
    with capsys.disabled():
        print(f"\na warm layer: {taken:.1f} us of the host")
    assert taken < 80


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "n"), [(64, 64), (1, 100), (129, 70), (256, 1024)])
def test_a_matrix_is_transposed(m: int, n: int, dtype: torch.dtype) -> None:
    x, out = torch.randn(m, n, device="cuda").to(dtype), torch.full((n + 1, m), 7, device="cuda").to(dtype)
    transpose(x, out[:n])
    assert torch.equal(out[:n], x.mT) and bool((out[n] == 7).all())


@pytest.mark.parametrize("tokens", [1, 16, 100, 600])
def test_a_layer_s_output_is_contiguous_and_exact_on_every_call(tokens: int) -> None:
    layer = linear().cuda().eval()
    assert layer.bias is not None
    for shape in ((tokens,), (3, tokens)):
        for seed in range(4):
            x = normal(*shape, 96, seed=seed, dtype=torch.float16).cuda()
            with torch.inference_mode(seed % 2 == 0), torch.set_grad_enabled(seed == 1):
                y = layer(x)
            assert y.is_contiguous() and y.shape == (*shape, 128)
            rows, weight = layer._quantize(x.reshape(-1, 96)), layer.matrix().to_dense().double()
            want = rows.dequantize().double().mT @ weight.mT + layer.bias.double()
            assert float((y.detach().reshape(-1, 128).double() - want).abs().max()) < 2e-3 * float(want.abs().max())
