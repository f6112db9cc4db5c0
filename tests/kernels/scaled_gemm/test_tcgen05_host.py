"""The source of the kernel for sm_100a and sm_103a, host_library for the CPU and run there by as many threads as a block has.

Copy engine, Tensor Cores and barriers are those of ``tcgen05_host.hpp``: what waits for what, where things lie, and what
is written are the kernel's own.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels import floats
from cute_kernels.float_format import float_format
from cute_kernels.scaled_gemm.api import FloatOperand
from cute_kernels.scaled_gemm.config import OperandFormat
from cute_kernels.scaled_gemm.sm100 import MapParameters, Tcgen05Config, candidates, check_copied
from tests.kernels.scaled_gemm.tcgen05_model import Launch
from tests.kernels.scaled_gemm.test_tcgen05 import MX, NV, launched, operand

KERNELS = Path(__file__).resolve().parents[3] / "cute_kernels"
REAL = (
    "scaled_gemm/sm100.cuh",
    "gemm/tile_scheduler.cuh",
    "gemm/epilogue.cuh",
    "gemm/activation.cuh",
    "device/quad.cuh",
)  # the rest is tcgen05_host.hpp
EMPTY = ("device/math.cuh", "device/packed_int.cuh", "scaled_gemm/tcgen05.cuh", "gemm/wgmma.cuh", "device/cluster.cuh", "cuda_bf16.h", "cuda_fp16.h", "cuda/std/cstdint", "cuda/std/type_traits",
         "cute/config.hpp", "cute/numeric/numeric_types.hpp")  # fmt: skip
CALL = """
using namespace magicube;
extern "C" const char* run(int blocks, unsigned seed, int slices, const TmaDescriptor* a, const TmaDescriptor* b,
                           const int64_t* x, float alpha, float beta) {
  using Words = const uint32_t*;
  using Floats = const float*;
  return host::run(blocks, FloatTcgen05<Config>::kThreads, seed, slices, [=] {
    gemm_floats_sm100<Config>(*a, *b, x[0], x[1], x[2], Words(x[3]), Words(x[4]), x[5], (Config::Out*)x[6], x[7], x[8],
                              x[9], Floats(x[10]), x[11], Floats(x[12]), x[13], Floats(x[14]),
                              (const Config::Source*)x[15], x[16], x[17], alpha, beta);
  }, FloatTcgen05<Config>::kCtas);
}
"""
pytestmark = [
    pytest.mark.long,  # kernels that have not run; the digests guard their machine code
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]


class HostMap(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("bits", "inner", "rows", "pitch", "box")),
    )

    @classmethod
    def of(cls, map: MapParameters) -> HostMap:
        return cls(map.pointer, map.unpack or 8, *map.shape, map.pitch_bytes, map.box[1])


Compile = Callable[[Tcgen05Config], ctypes.CDLL]


@pytest.fixture(scope="module")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """The kernel of a config as a library of this machine."""
    folder = tmp_path_factory.mktemp("tcgen05")
    for name in EMPTY:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    for name in REAL:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(KERNELS / name, folder / name)
    known: dict[Tcgen05Config, ctypes.CDLL] = {}

    def get(config: Tcgen05Config) -> ctypes.CDLL:
        if config not in known:
            source, library = folder / f"{config.name}.cpp", folder / f"{config.name}.so"
            header = Path(__file__).with_name("tcgen05_host.hpp")
            source.write_text(f'#include "{header}"\n{config.translation_unit("sm_100a").source}{CALL}')
            command = [
                "g++",
                "-std=c++20",
                "-O1",
                "-w",
                "-shared",
                "-fPIC",
                "-fno-gnu-unique",
                "-pthread",
                f"-I{folder}",
            ]
            subprocess.run([*command, str(source), "-o", str(library)], check=True)
            known[config] = ctypes.CDLL(str(library))
            known[config].run.restype = ctypes.c_char_p
        return known[config]

    return get


def run(host_library: Compile, launch: Launch, blocks: int, seed: int = 1, slices: int = 100) -> None:
    """The launch, by so many blocks; raises ``RuntimeError`` where nothing moves on for so many tenths of a second or
    a barrier is miscounted."""
    *addresses, alpha, beta = launch.output
    first = (launch.k, launch.part_bytes, launch.instruction, launch.factors_a, launch.factors_b, launch.factor_words)
    numbers = (ctypes.c_int64 * 18)(*first, *addresses)
    maps = [ctypes.byref(HostMap.of(map)) for map in (launch.a, launch.b)]
    scales = (ctypes.c_float(alpha), ctypes.c_float(beta))
    wrong = host_library(launch.config).run(blocks, seed, slices, *maps, numbers, *scales)
    if wrong:
        raise RuntimeError(wrong.decode())


def small(kind: OperandFormat, rows: int, k: int, seed: int) -> FloatOperand:
    """Integers of -2 to 2, factors of 1/4 to 4: float32 has their sums exactly."""
    found = operand(kind, rows, k, seed)
    values = torch.randint(-2, 3, (rows, k), generator=torch.Generator().manual_seed(seed)).float()
    return replace(found, packed_data=floats.pack(floats.encode(values, kind.dtype), kind.dtype))


CASES = [
    # (a, b, M, N, K, columns of a tile, blocks): rings that go round, several tiles a block, odd sizes
    (OperandFormat("e4m3"), OperandFormat("e5m2"), 130, 150, 128 * 12, 64, 2),
    (OperandFormat("e2m1"), OperandFormat("e3m2"), 257, 300, 128, 64, 1),
    (OperandFormat("e2m3"), OperandFormat("e2m1"), 100, 300, 384, 256, 1),
    (MX["e4m3"], MX["e2m1"], 140, 130, 128 * 8, 128, 1),
    (MX["e2m1"], MX["e2m1"], 130, 140, 640, 128, 2),
    (NV, NV, 130, 140, 256 * 6 + 128, 128, 1),
]


def config_of(launch: Launch, width: int) -> Tcgen05Config:
    return next(config for config in candidates(launch.config.kind) if config.tile_n == width)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{case[0].name}-{case[1].name}-{case[5]}", marks=[pytest.mark.long] * (i % 3 > 0))
     for i, case in enumerate(CASES)],
)  # fmt: skip
def test_the_source_computes_the_product(case: Any, host_library: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, m, n, k, width, blocks = case
    x, y = small(a, m, k, 1), small(b, n, k, 2)
    config = config_of(launched(monkeypatch, x, y), width)
    truth = x.values(torch.float64) @ y.values(torch.float64).t()
    for seed, columns in enumerate((n, n + 4 + -n % 8)):  # rows of the output at multiples of 16 bytes, and not
        frame = torch.full((m, columns), torch.nan)
        run(host_library, launched(monkeypatch, x, y, config, frame[:, :n]), blocks, seed)
        assert torch.equal(frame[:, :n].double(), truth)
        assert bool(frame[:, n:].isnan().all()), "written outside"


@pytest.mark.parametrize("a", ["e2m1", *(pytest.param(a, marks=pytest.mark.long) for a in ("e2m3", "e3m2", "e5m2"))])
def test_the_source_unpacks_a_into_tensor_memory(
    a: str, host_library: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = 130, 150, 128 * 12
    x, y = small(OperandFormat(a), m, k, 1), small(OperandFormat("e4m3"), n, k, 2)
    for width in (64, 128):
        config = replace(config_of(launched(monkeypatch, x, y), width), bits_a=float_format(a).bits)
        for seed in range(2):
            out = torch.full((m, n), torch.nan)
            run(host_library, launched(monkeypatch, x, y, config, out), 2, seed)
            assert torch.equal(out.double(), x.values(torch.float64) @ y.values(torch.float64).t())


@pytest.mark.parametrize(
    ("rows", "width"), [(128, 128), (256, 64), *(pytest.param(m, 256, marks=pytest.mark.long) for m in (128, 256))]
)
def test_two_ctas_compute_the_product_of_a_pair(
    rows: int, width: int, host_library: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd sizes, more tiles than pairs, and more parts of k than stages."""
    m, n, k = 300, 270, 128 * 16
    x, y = small(OperandFormat("e2m1"), m, k, 1), small(OperandFormat("e5m2"), n, k, 2)
    config = Tcgen05Config("float32", tile_n=width, pair_rows=rows)
    frame = torch.full((m, n + 6), torch.nan)
    launch = launched(monkeypatch, x, y, config, frame[:, :n])
    run(host_library, launch, 4)
    assert torch.equal(frame[:, :n].double(), x.values(torch.float64) @ y.values(torch.float64).t())
    assert bool(frame[:, n:].isnan().all()), "written outside"


def test_what_does_not_fit_tensor_memory_or_has_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = small(OperandFormat("e2m1"), 128, 128, 1), small(OperandFormat("e2m1"), 128, 128, 2)
    wide, narrow = (replace(config, bits_a=4) for config in candidates("f8f6f4")[:2])
    for config, match in ((wide, "config must be f8f6f4 of at most 128 columns for bits_a=4"), (replace(narrow, bits_a=6), "a must have 6 bits for bits_a=6, got e2m1")):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            launched(monkeypatch, x, y, config, torch.zeros(128, 128))
    with pytest.raises(ValueError, match="config must be f8f6f4"):
        check_copied(replace(candidates("mxf8f6f4")[0], bits_a=4), "e2m1")


def test_scales_c_and_bias_enter_once(host_library: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k = 70, 75, 128
    rows, columns, bias = 2.0 ** (torch.arange(m) % 7), 2.0 ** -(torch.arange(n) % 5), torch.arange(n).float()
    c = torch.arange(m * n).view(m, n).float()
    x, y = (
        replace(small(OperandFormat("e2m1"), m, k, 1), scale=rows),
        replace(small(OperandFormat("e4m3"), n, k, 2), scale=columns),
    )
    sums = x.values(torch.float64) @ y.values(torch.float64).t()
    truth = 0.5 * sums * rows.double()[:, None] * columns.double() - 2 * c.double() + bias.double()
    out = torch.full((m, n), torch.nan)
    launch = launched(monkeypatch, x, y, None, out, alpha=0.5, beta=-2.0, c=c, bias=bias)
    run(host_library, launch, 1)
    assert torch.equal(out.double(), truth)


def test_a_wrong_count_of_bytes_would_hang(host_library: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = small(OperandFormat("e2m1"), 128, 256, 1), small(OperandFormat("e3m2"), 64, 256, 2)
    out = torch.zeros(128, 64)
    launch = launched(monkeypatch, x, y, None, out)
    with pytest.raises(RuntimeError, match="waits for ever"):
        run(host_library, replace(launch, part_bytes=launch.config.part_bytes), 1, slices=20)
    run(host_library, launch, 1)
    assert torch.equal(out.double(), x.values(torch.float64) @ y.values(torch.float64).t())
