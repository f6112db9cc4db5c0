"""Loading and launching on a GPU: arguments, streams, threads, graphs, PTX, clusters, tensor maps, and the cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from cute_kernels.jit import (
    DeviceError,
    Kernel,
    LaunchCache,
    Unit,
    compile_unit,
    get_kernel,
    kernel,
    occupancy,
    tensor_map,
)

pytestmark = pytest.mark.gpu

SOURCE = """
#include <cute/arch/copy_sm90_desc.hpp>
namespace probe {
__global__ void add(int* out, long long value, long long count) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < count) out[i] += int(value);
}
__global__ void widths(double* out, signed char a, float b, unsigned short c, double d, long long e, bool f) {
  out[0] = a, out[1] = b, out[2] = c, out[3] = d, out[4] = double(e), out[5] = f;
}
__global__ void many(int* out, long long a, long long b, long long c, long long d, long long e, long long f,
                     long long g, long long h, long long i, long long j, long long k, long long l, long long m,
                     long long n, long long o, long long p, long long q, long long r, long long s) {
  if (out) out[0] = int(a + b + c + d + e + f + g + h + i + j + k + l + m + n + o + p + q + r + s);
}
__global__ void reverse(int* x, long long count) {  // through dynamic shared memory
  extern __shared__ int tile[];
  for (int i = threadIdx.x; i < count; i += blockDim.x) tile[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) x[i] = tile[count - 1 - i];
}
__global__ void ranks(int* out) {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  out[blockIdx.x] = int(rank);
}
// One box of 64 bytes x 8 rows, in the layout of shared memory.
__global__ void box(unsigned char* out, const __grid_constant__ cute::TmaDescriptor map, long long x, long long y) {
  __shared__ alignas(1024) unsigned char tile[512];
  __shared__ alignas(8) unsigned long long barrier;
  unsigned to = unsigned(__cvta_generic_to_shared(tile)), at = unsigned(__cvta_generic_to_shared(&barrier));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.proxy.async;" ::"r"(at) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 512;" ::"r"(at) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&map), "r"(int(x)), "r"(int(y)), "r"(at) : "memory");
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra again; }"
                 ::"r"(at) : "memory");
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 512; i += blockDim.x) out[i] = tile[i];
}
}
"""


@dataclass(frozen=True)
class Probe:
    name: str
    threads: int = 128
    smem_bytes: int = 0
    shared_carveout: int = -1
    wide_cluster: bool = False

    def translation_unit(self, arch: str) -> Unit:
        source = SOURCE if arch == "sm_90a" else SOURCE.partition("// One box")[0].replace("#include", "//") + "}"
        if arch == "compute_80":
            source = source.replace("%%cluster_ctarank", "%%ctaid.x")
        return Unit(source, f"probe::{self.name}", arch)


@pytest.fixture(autouse=True)
def fresh(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path_factory.getbasetemp() / "kernels"  # shared by the tests of this run
    monkeypatch.setenv("MAGICUBE_CACHE", str(folder))
    monkeypatch.delenv("MAGICUBE_ARCH", raising=False)
    yield folder


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a Hopper instruction")


def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype, device="cuda")


def add(out: torch.Tensor, value: int) -> None:
    get_kernel(Probe("add")).launch((-(-len(out) // 128), 1, 1), (out.data_ptr(), value, len(out)))


def test_launch_and_attributes() -> None:
    out = zeros(1000)
    add(out, 7)
    add(out[:10], -3)
    assert out.tolist() == [4] * 10 + [7] * 990
    found = get_kernel(Probe("add"))
    assert found is get_kernel(Probe("add"))
    assert found.usage is not None and found.num_regs == found.usage.registers
    assert (
        compile_unit(Probe("add").translation_unit(kernel.current_arch())).usage == found.usage
    )  # another time it tells as much
    assert found.local_bytes == 0 and found.shared_bytes == 0
    assert occupancy(found) >= 8


def test_an_empty_grid_launches_nothing() -> None:
    get_kernel(Probe("add")).launch((0, 1, 1), (0, 0, 0))


def test_ptx_runs_on_any_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGICUBE_ARCH", "compute_80")
    monkeypatch.setattr(kernel, "_kernels", {})
    out = zeros(300)
    add(out, 5)
    assert out.tolist() == [5] * 300
    found = get_kernel(Probe("add"))
    assert (found.arch, found.usage) == ("compute_80", None) and found.num_regs > 0


def test_arguments_keep_their_widths() -> None:
    out = zeros(6, torch.float64)
    args = (out.data_ptr(), np.int8(-5), np.float32(0.5), np.uint16(65535), np.float64(1e300), -(2**40), np.bool_(True))
    for _ in range(2):  # the second takes the layout that the first one made
        get_kernel(Probe("widths")).launch((1, 1, 1), args)
        assert out.tolist() == [-5, 0.5, 65535, 1e300, -(2**40), 1]
        out.zero_()


@pytest.mark.parametrize(
    "args, message",
    [
        ((1, 2), "arguments are of .* bytes, the kernel's parameters of"),
        ((1, np.int32(2), 3), r"arguments are of \[8, 4, 8\] bytes, the kernel's parameters of \[8, 8, 8\]"),
        ((1, 2.0, 3), "argument 1 must be .*, got float"),
        ((1, True, 3), "argument 1 must be .*, got bool"),
        ((b"short", 2, 3), "argument 0 must be .*, got bytes"),
    ],
)
def test_wrong_arguments_are_refused(args: tuple[object, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_kernels", {})
    with pytest.raises(TypeError, match=message):
        get_kernel(Probe("add")).launch((1, 1, 1), args)


def test_too_few_arguments_are_refused_on_a_later_launch_too() -> None:
    add(zeros(1), 1)
    with pytest.raises(TypeError, match="arguments of probe::add"):
        get_kernel(Probe("add")).launch((1, 1, 1), (1, 2))


def test_the_current_stream_is_used() -> None:
    out, side = zeros(1 << 20), torch.cuda.Stream()
    add(out, 0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        add(out, 1)
        done = torch.cuda.Event()
        done.record()
    before = out.clone()  # the default stream does not wait for the other one
    assert not done.query()
    side.synchronize()
    assert int(before.sum()) == 0 and int(out.sum()) == 1 << 20


def test_a_graph_captures_launches() -> None:
    out = zeros(100)
    add(out, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(out, 2)
    for _ in range(3):
        graph.replay()
    assert out.tolist() == [7] * 100


def test_replays_become_a_graph_that_runs_on_any_stream() -> None:
    out, replays, side = zeros(1 << 20), LaunchCache(4, graph_after=1), torch.cuda.Stream()

    def launch() -> None:
        add(out, 1)
        add(out, 2)

    for _ in range(5):
        replays.run(out.data_ptr(), launch)
    assert out.unique().tolist() == [15]
    assert set(replays._graphs) == {out.data_ptr()}
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        replays.run(out.data_ptr(), launch)
    assert int(out.sum()) == 15 << 20  # behind the other stream's work
    side.synchronize()
    assert out.unique().tolist() == [18]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replays.run(out.data_ptr(), launch)
    graph.replay()
    assert out.unique().tolist() == [21]
    replays._graphs.clear()  # while it may still run
    torch.cuda.synchronize()


def test_threads_share_a_kernel() -> None:
    outs = [zeros(5000) for _ in range(4)]
    add(zeros(1), 1)
    torch.cuda.synchronize()

    def work(index: int) -> None:
        for _ in range(500):
            add(outs[index], index + 1)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [out.unique().tolist() for out in outs] == [[500], [1000], [1500], [2000]]


def test_shared_memory_above_48_kib() -> None:
    count = 96 * 1024 // 4
    x = torch.arange(count, dtype=torch.int32, device="cuda")
    found = get_kernel(Probe("reverse", 256, count * 4))
    found.launch((1, 1, 1), (x.data_ptr(), count))
    assert torch.equal(x.cpu(), torch.arange(count - 1, -1, -1, dtype=torch.int32))
    assert found.max_dynamic_shared_bytes >= count * 4


def test_more_shared_memory_than_there_is_is_named() -> None:
    with pytest.raises(DeviceError, match=r"probe::reverse with 1048576 bytes of dynamic shared memory .*CUDA_ERROR"):
        get_kernel(Probe("reverse", 256, 1 << 20))


def test_a_refused_launch_is_named() -> None:
    with pytest.raises(DeviceError, match=r"probe::add .* with grid \(1, 1, 1\), 4096 threads.*: CUDA_ERROR"):
        get_kernel(Probe("add", threads=4096)).launch((1, 1, 1), (0, 0, 0))


def test_a_device_without_an_arch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(DeviceError, match=r"must be one of 8\.0, .*9\.0.*, got 7\.5"):
        kernel.current_arch()
    monkeypatch.setenv("MAGICUBE_ARCH", "sm_75")
    with pytest.raises(ValueError, match="arch must be one of"):
        kernel.current_arch()


def test_clusters(hopper: None) -> None:
    out = zeros(8)
    for _ in range(2):
        out.fill_(-1)
        get_kernel(Probe("ranks")).launch((8, 1, 1), (out.data_ptr(),), cluster=(4, 1, 1))
        assert out.tolist() == [0, 1, 2, 3] * 2


def expected_box(matrix: torch.Tensor, x: int, y: int, swizzle: int) -> torch.Tensor:
    """The box as shared memory holds it: rows of 64 bytes whose 16-byte chunks are exchanged by the swizzle."""
    padded = torch.zeros(matrix.shape[0] + 8, matrix.shape[1] + 64, dtype=torch.uint8)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    flat = padded[y : y + 8, x : x + 64].flatten()
    chunk = torch.arange(32)
    mask = {0: 0, 32: 1, 64: 3}[swizzle]
    return flat.view(32, 16)[chunk ^ (chunk >> 3 & mask)].flatten()


@pytest.mark.parametrize("swizzle", [0, 64])
@pytest.mark.parametrize("x, y", [(0, 0), (32, 5), (80, 30)])
def test_a_tensor_map_brings_the_box(hopper: None, x: int, y: int, swizzle: int) -> None:
    rows, cols, pitch = 33, 100, 112
    storage = torch.randint(0, 256, (rows, pitch), dtype=torch.uint8)
    on_gpu, out = storage.cuda(), zeros(512, torch.uint8)
    encoded = tensor_map(on_gpu.data_ptr(), 1, (cols, rows), pitch, (64, 8), swizzle)
    assert isinstance(encoded, bytes) and len(encoded) == 128
    get_kernel(Probe("box")).launch((1, 1, 1), (out.data_ptr(), encoded, x, y))
    assert torch.equal(out.cpu(), expected_box(storage[:, :cols], x, y, swizzle))


def test_bad_tensor_maps_are_named(hopper: None) -> None:
    with pytest.raises(DeviceError, match=r"tensor map with shape \(64, 8\) of UINT8, pitch 65.*CUDA_ERROR"):
        tensor_map(zeros(1024).data_ptr(), 1, (64, 8), 65, (64, 8))
    with pytest.raises(ValueError, match="swizzle must be one of"):
        tensor_map(0, 1, (64, 8), 64, (64, 8), 16)
    with pytest.raises(ValueError, match="element_bytes must be one of"):
        tensor_map(0, 3, (64, 8), 64, (64, 8))


def microseconds(found: Kernel, grid: tuple[int, int, int], args: tuple[int, ...]) -> float:
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            found.launch(grid, args)
        best = min(best, (time.perf_counter() - start) / 200 * 1e6)
    return best


@pytest.mark.alone
def test_a_launch_with_twenty_arguments_is_quick() -> None:
    found = get_kernel(Probe("many", threads=32))
    out = zeros(1)
    found.launch((1, 1, 1), (out.data_ptr(), *range(19)))
    assert int(out) == sum(range(19))
    taken = microseconds(found, (1, 1, 1), (0, *range(19)))
    print(f"{taken:.1f} us a launch")
    assert taken < 15
