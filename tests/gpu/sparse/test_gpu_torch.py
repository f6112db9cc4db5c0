"""The operators inside torch on a GPU: streams, graphs, the compiler, opcheck, waiting, memory, views, the launch's cost."""

from __future__ import annotations

import cProfile
import io
import itertools
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magicube_cutlass as mc
from cute_kernels.dtypes import Integer
from cute_kernels.jit import get_kernel
from cute_kernels.jit import kernel as jit_kernel
from cute_kernels.spmm.heuristics import SpmmKernel
from magicube_cutlass.dispatch import cuda as gpu
from magicube_cutlass.dispatch.plan import plan_sddmm, plan_spmm
from tests.gpu.problems import PANELS, check_spmm, choices, dense, gather, ints, kind, panel, sparse

pytestmark = pytest.mark.gpu

BOTH: list[SpmmKernel] = [gather(kind(out="int32")), *([panel(kind(out="int32"))] if PANELS else [])]
S8 = Integer(8, True)


def named(config: SpmmKernel) -> str:
    return config.name


def small(config: SpmmKernel | None = None) -> tuple[mc.SRBCRS, mc.QuantTensor, torch.Tensor]:
    """Operands on the GPU and the expected product there, with everything warm."""
    torch.manual_seed(0)
    a, b = sparse(64, 300, 8, S8), dense((300, 96), S8)
    there = a.to("cuda"), b.to("cuda")
    mc.spmm(*there, out_dtype=torch.int32, config=config)
    torch.cuda.synchronize()
    return *there, mc.reference.spmm(a, b).int().cuda()


@pytest.mark.parametrize("config", BOTH, ids=named)
def test_work_is_ordered_on_the_current_stream(config: SpmmKernel) -> None:
    a, b, expected = small(config)
    right, out, side = b.data.clone(), torch.zeros_like(expected), torch.cuda.Stream()
    mc.spmm(a, b, config=config)  # what comes first compiles and loads, longer than the stream below is busy
    b.data.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        b.data.copy_(right)  # a kernel on another stream would read zeros
        mc.spmm(a, b, out=out, config=config)
    assert not side.query()
    assert int(out.clone().abs().sum()) == 0  # the default stream does not wait for the other one
    side.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("config", BOTH, ids=named)
def test_a_graph_replays_with_new_data(config: SpmmKernel) -> None:
    a, b, expected = small(config)
    x, y, mask = (
        dense((40, 64), S8).to("cuda"),
        dense((56, 64), S8).to("cuda"),
        mc.random_pattern(40, 56, 0.5, 8).to("cuda"),
    )
    mc.sddmm(x, y, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mc.spmm(a, b, config=config)
        sampled = mc.sddmm(x, y, mask)
    for seed in range(3):
        torch.manual_seed(seed)
        b.data.copy_(ints((300, 96), *S8))
        x.data.copy_(ints((40, 64), *S8))
        out.fill_(-1), sampled.values.fill_(-1)
        graph.replay()
        assert torch.equal(out.cpu(), mc.reference.spmm(a.to("cpu"), b.to("cpu")).int())
        expected = mc.reference.sddmm(x.to("cpu"), y.to("cpu"), mask.to("cpu"))
        assert torch.equal(sampled.to("cpu").vectors(), expected.int())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one() -> None:
    a, b = sparse(64, 300, 8, S8), dense((300, 96), S8)
    assert torch.cuda.current_device() == 0
    there, right = a.to("cuda:1"), b.to("cuda:1")
    x, y, pattern = dense((64, 128), S8), dense((96, 128), S8), mc.random_pattern(64, 96, 0.8, 8)
    sampled = mc.reference.sddmm(x, y, pattern)
    operands = x.to("cuda:1"), y.to("cuda:1"), pattern.to("cuda:1")
    for config in (None, *BOTH):
        for _ in range(3):  # the later ones are kept
            got = mc.spmm(there, right, out_dtype=torch.int32, config=config)
            assert got.device.index == 1 and torch.equal(got.cpu(), mc.reference.spmm(a, b).int())
            assert torch.equal(mc.sddmm(*operands, out_dtype=torch.int64).to("cpu").vectors(), sampled)
    assert torch.cuda.current_device() == 0


def test_operands_of_two_devices_are_refused() -> None:
    a, b = sparse(64, 300, 8, S8), dense((300, 96), S8)
    with pytest.raises(ValueError, match="B must be on cuda:0, got cpu"):
        mc.spmm(a.to("cuda"), b)


def test_compiled_spmm_has_no_graph_break() -> None:
    a = sparse(16, 48, 8, S8)
    on_gpu = a.to("cuda")

    def shifted(data: torch.Tensor) -> torch.Tensor:
        b = mc.QuantTensor(data, None, 8, True, None, data.shape)
        return mc.spmm(on_gpu, b, out_dtype=torch.float32) + 1

    compiled = torch.compile(shifted, fullgraph=True)
    for n in (48, 48, 33):
        data = ints((48, n), *S8).to(torch.int8)
        expected = torch.matmul(a.to_dense(dequantize=False).long(), data.long()).float() + 1
        assert torch.equal(compiled(data.cuda()).cpu(), expected)


def test_compiled_sddmm_has_no_graph_break() -> None:
    pattern = mc.random_pattern(16, 48, 0.5, 8).to("cuda")

    def doubled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = (mc.QuantTensor(t, None, 8, True, None, t.shape) for t in (x, y))
        s = mc.sddmm(left, right, pattern, out_dtype=torch.float32)
        assert isinstance(s, mc.SRBCRS)
        return s.values * 2

    compiled = torch.compile(doubled, fullgraph=True)
    for _ in range(2):
        x, y = (ints((rows, 40), *S8).to(torch.int8).cuda() for rows in (16, 48))
        assert torch.equal(compiled(x, y), doubled(x, y))


def test_opcheck_passes() -> None:
    a, b = sparse(16, 48, 8, S8).to("cuda"), dense((2, 48, 20), S8).to("cuda")
    name, copy = plan_spmm(a, S8, torch.int32, 32, 2, None, None)
    operands = (copy, b.data, None, None, None)
    torch.library.opcheck(torch.ops.magicube.spmm.default,
                          (*operands, 16, 48, 20, [8, 8], [True, True], -1, name, torch.int32))  # fmt: skip
    out = torch.empty(2, 16, 20, dtype=torch.int32, device="cuda")
    torch.library.opcheck(torch.ops.magicube.spmm_out.default, (*operands, 48, [8, 8], [True, True], -1, name, out))
    x, y = dense((16, 8), S8).to("cuda"), dense((48, 8), S8).to("cuda")
    name, pattern = plan_sddmm(a.pattern, 32, (S8, S8), torch.int32, 16, None)
    torch.library.opcheck(
        torch.ops.magicube.sddmm.default,
        (
            pattern,
            x.data,
            y.data,
            None,
            None,
            [16, 48, 8],
            8,
            32,
            [8, 8],
            [True, True],
            -1,
            [-1, -1],
            name,
            torch.int32,
        ),
    )


@pytest.mark.parametrize("config", [None, *BOTH], ids=lambda config: config.name if config else "chosen")
def test_a_warm_call_waits_for_nothing_and_allocates_its_output_only(config: SpmmKernel | None) -> None:
    a, b, expected = small(config)
    x, y, mask = (
        dense((40, 64), S8).to("cuda"),
        dense((56, 64), S8).to("cuda"),
        mc.random_pattern(40, 56, 0.5, 8).to("cuda"),
    )
    mc.sddmm(x, y, mask)
    out = torch.empty_like(expected)

    def counted(call: Callable[[], Any]) -> int:
        call()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)

    assert counted(lambda: mc.spmm(a, b, out=out, config=config)) == 0
    assert counted(lambda: mc.spmm(a, b, out_dtype=torch.int32, config=config)) == 1
    assert counted(lambda: mc.sddmm(x, y, mask)) == 1
    assert torch.equal(out, expected)


@pytest.mark.parametrize("config", BOTH, ids=named)
def test_views_and_odd_strides_are_read_without_a_copy(config: SpmmKernel) -> None:
    torch.manual_seed(1)
    wide = ints((3, 90, 420), *S8).to(torch.int8)
    on_gpu = wide.cuda()
    a = sparse(40, 70, 8, S8)
    views = [
        lambda t: t[1, 3:73, 3:200],  # nothing is aligned
        lambda t: t[1, 3:73, 16:201],
        lambda t: t[1, :70].expand(5, 70, 420),  # one matrix for all of the batch
        lambda t: t[::2, 10:80, :192],
        lambda t: t[:, 20:, 32:160],
        lambda t: t[0, 5:6, 4:360].expand(70, 356),  # one row for all of K
        lambda t: t[:, 7:8].expand(3, 70, 420),
        lambda t: t[0].mT[2:72, 1:80],  # column-major
        lambda t: t.as_strided((4, 70, 64), (64, 420, 1)),  # matrices of a batch side by side
        lambda t: t.as_strided((4, 70, 64), (16 * 5, 96, 1)),  # and overlapping, no whole rows apart
        lambda t: t.as_strided((3, 70, 64), (448, 0, 1)),  # one row for all of K in each matrix
        lambda t: t.as_strided((70, 64), (16, 1)),  # rows that overlap
        lambda t: t.as_strided((2, 70, 64), (-(-70 * 16 // 112) * 112, 16, 1)),
    ]
    for i, view in enumerate(views):
        b_cpu, b = (mc.QuantTensor(t, None, 8, True, None, t.shape) for t in (view(wide), view(on_gpu)))
        got = mc.spmm(a.to("cuda"), b, out_dtype=torch.int32, config=config).cpu()
        assert torch.equal(got, mc.reference.spmm(a, b_cpu).int()), i


@pytest.mark.parametrize("bits", [4, 12, 16])
@pytest.mark.configs([each for bits in (4, 12, 16) for t in (True, False) for each in choices(kind(8, S8, (bits, t)))])
def test_column_major_operands_of_every_width(bits: int) -> None:
    for signed in (True, False):
        for k, n in ((300, 96), (71, 33), (70, 1), (1, 40)):
            check_spmm(sparse(40, k, 8, S8, sparsity=0.3), dense((2, k, n), (bits, signed), "column"))


def sddmm_operands() -> tuple[mc.QuantTensor, mc.QuantTensor, mc.Pattern]:
    torch.manual_seed(1)
    x, y = dense((64, 128), S8).to("cuda"), dense((96, 128), S8).to("cuda")
    return x, y, mc.random_pattern(64, 96, 0.8, 8).to("cuda")


def per_call(call: Callable[[], Any], calls: int = 1000) -> float:
    """Median microseconds of the enqueue alone."""
    for _ in range(50):
        call()
    rounds = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 9):
            call()
        rounds.append((time.perf_counter() - start) / (calls // 9) * 1e6)
    torch.cuda.synchronize()
    return sorted(rounds)[4]


@pytest.mark.alone
def test_the_cost_of_a_warm_call(capsys: pytest.CaptureFixture[str]) -> None:
    a, b, expected = small()
    out, half = torch.empty_like(expected), torch.randn(64, 64, device="cuda", dtype=torch.float16)
    into, returning = per_call(lambda: mc.spmm(a, b, out=out)), per_call(lambda: mc.spmm(a, b))
    sampled = sddmm_operands()
    sampling = per_call(lambda: mc.sddmm(*sampled))
    plain = per_call(lambda: torch.mm(half, half))
    calls: list[str] = []
    depth, deepest = 0, 0

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal depth, deepest
        if event == "call":
            depth += 1
            if frame.f_globals["__name__"].startswith(("magicube_cutlass", "cute_kernels")):  # not cuda-bindings' own
                deepest = max(deepest, depth)
            calls.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}")
        elif event == "return":
            depth -= 1

    sys.setprofile(profile)
    mc.spmm(a, b, out=out)
    mc.sddmm(*sampled)
    sys.setprofile(None)
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(2000):
        mc.spmm(a, b, out=out)
    watch.disable()
    text = io.StringIO()
    pstats.Stats(watch, stream=text).sort_stats("tottime").print_stats(12)
    with capsys.disabled():
        print(
            f"\nspmm(out=) {into:.1f} us, spmm {returning:.1f} us, sddmm {sampling:.1f} us, torch.mm {plain:.1f} us, "
            f"{len(calls)} Python calls, {deepest} deep:"
        )
        print(", ".join(calls))
        print(text.getvalue())
    slow = max(1.0, plain / 10)  # torch.mm takes 10 us on the hosts that the bounds are for
    assert max(into, returning, sampling) < 15 * slow
    assert deepest <= 5


@pytest.mark.parametrize("room", [2, gpu._CACHED_LAUNCHES])
def test_a_cached_call_reads_other_addresses_scales_and_values(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_CACHED_LAUNCHES", room)
    torch.manual_seed(3)
    a = mc.SRBCRS.from_dense(torch.randn(40, 70), vector_length=8, bits=8, scale="row").to("cuda")
    storage = ints((3, 70 * 64 + 64), *S8).to(torch.int8).cuda()
    bias = torch.randn(40, device="cuda")

    def product(offset: int, scale: torch.Tensor, bias: torch.Tensor | None, strides: tuple[int, int]) -> None:
        data = storage[1, offset:].as_strided((70, 64), strides)
        b = mc.QuantTensor(data, scale, 8, True, 0, data.shape)
        expected = torch.matmul(a.to_dense().double(), b.dequantize().double())
        expected = expected if bias is None else expected + bias.double()[:, None]
        got = mc.spmm(a, b, bias=bias)
        assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-4)

    addresses = range(0, 64, 16)  # 3 and 1 are not aligned, so B is copied
    layouts = ((64, 1), (1, 70))
    for offset in (*addresses, 3, *addresses, 1):
        for factor, strides in itertools.product((1.0, 3.0), layouts):
            scale = torch.full((1, 64), factor, device="cuda")
            product(offset, scale, bias, strides)
            product(offset, scale.double(), None, strides)
    assert any(isinstance(call, gpu.SpmmCall) and call.turns for call in a._execution["records"].values())
    a.scale = a.scale * 2 if a.scale is not None else None
    for strides in layouts:
        product(0, torch.ones(1, 64, device="cuda"), bias, strides)
    assert a.scale is not None
    a.scale.mul_(0.5)
    for strides in layouts:
        product(0, torch.ones(1, 64, device="cuda"), bias, strides)
    a.scale = a.scale.double()
    product(0, torch.ones(1, 64, device="cuda"), bias, layouts[0])


def test_a_cached_sddmm_reads_other_addresses_scales_and_values() -> None:
    torch.manual_seed(4)
    mask = mc.random_pattern(40, 56, 0.5, 8).to("cuda")
    storage = ints((2, 64 * 64 + 64), *S8).to(torch.int8).cuda()

    def product(offset: int, left: torch.Tensor | None, right: torch.Tensor | None, swapped: bool = False) -> None:
        x = mc.QuantTensor(
            storage[0, :2560].view(40, 64), left, 8, True, None if left is None else 1, torch.Size((40, 64))
        )
        shape = (64, 56) if swapped else (56, 64)
        data = storage[1, offset:].as_strided(shape, (64, 1))
        data = data.mT.contiguous().mT if swapped else data
        axis = None if right is None or right.ndim == 0 else 0 if swapped else 1
        y = mc.QuantTensor(data, right, 8, True, axis, data.shape)
        got = mc.sddmm(x, y, mask, transposed_y=swapped)
        got.check_format(full=True)
        assert torch.equal(got.pattern.col_indices, mask.col_indices)
        y_rows = y.dequantize() if right is not None else y.ints()
        total = (x.dequantize() if left is not None else x.ints()).double() @ (
            y_rows if swapped else y_rows.mT
        ).double()
        expected = mc.reference.at_vectors(total.cpu(), mask.to("cpu"))
        assert torch.allclose(got.to("cpu").vectors().double(), expected, rtol=1e-5, atol=1e-4)

    previous = None
    for offset in (0, 16, 3, 0, 1):  # 3 and 1 are not aligned, so Y is copied
        for factor in (1.0, 3.0):
            left, right = torch.full((40, 1), factor, device="cuda"), torch.full((56, 1), 2 * factor, device="cuda")
            product(offset, left, right)
            product(offset, left.double(), torch.tensor(factor, device="cuda"))
            product(offset, None, None)
        storage[1].add_(1)
    product(0, None, torch.full((1, 56), 2.0, device="cuda"), swapped=True)
    x, y, pattern = sddmm_operands()
    for _ in range(3):  # results do not share memory
        result = mc.sddmm(x, y, pattern).values
        assert previous is None or (previous.data_ptr() != result.data_ptr() and torch.equal(previous, result))
        previous = result


def test_explain_names_the_kernel_that_runs() -> None:
    a, b = sparse(64, 300, 8, S8).to("cuda"), dense((300, 96), S8).to("cuda")
    text = mc.explain(a, b)
    assert "spmm_gather-s8_m16n8k32-v8-s8xs8-int32" in text and "too few" in text and "copied" not in text
    assert "copied first" in mc.explain(a, dense((300, 96), S8, "column").to("cuda"))
    assert "float16" in mc.explain(a, b, out_dtype=torch.float16)


def test_a_matrix_that_is_used_once_takes_the_quick_copy() -> None:
    matrix = sparse(4096, 2048, 8, S8)
    often, once = matrix.to("cuda"), matrix.to("cuda")
    once.single_use = True
    b = dense((2048, 512), S8).to("cuda")
    assert "spmm_panel" in mc.explain(often, b)
    text = mc.explain(once, b)
    assert "spmm_gather" in text and "used once" in text
    assert torch.equal(mc.spmm(often, b), mc.spmm(once, b))


def test_kernels_are_loaded_once_a_device() -> None:
    before = len(jit_kernel._kernels)
    found = [get_kernel(BOTH[0]) for _ in range(3)]
    assert found[0] is found[1] is found[2] and len(jit_kernel._kernels) <= before + 1
