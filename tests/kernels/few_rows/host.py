"""The few-rows kernel compiled for this machine: the source as it stands, a cluster as fibers; see ``cluster_host.hpp``."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.few_rows import product
from cute_kernels.few_rows.formats import PackedWeight
from cute_kernels.few_rows.product import FewRowsConfig
from cute_kernels.jit.codegen import KernelConfig

KERNELS = Path(__file__).resolve().parents[3] / "cute_kernels"
REAL = (
    "few_rows/product.cuh", "few_rows/product_int8.cuh", "few_rows/decode.cuh", "few_rows/formats.cuh", "few_rows/widen.cuh",
    "device/float_formats.cuh", "device/quad.cuh", "device/smem_descriptor.cuh", "scaled_gemm/small_m/kernel.cuh", "scaled_gemm/small_m/order.cuh", "scaled_gemm/small_m/blocks.cuh", "scaled_gemm/wgmma.cuh", "scaled_gemm/common.cuh", "gemm/wgmma.cuh", "gemm/epilogue.cuh", "gemm/activation.cuh",  "gemm/tile_scheduler.cuh",
)  # fmt: skip
_EMPTY = ("device/math.cuh", "device/packed_int.cuh", "device/warpgroup.cuh", "device/copy.cuh", "cuda_bf16.h", "cuda_fp16.h", "cuda/std/cstdint",
          "cuda/std/type_traits", "cute/config.hpp", "cute/arch/copy_sm75.hpp", "cute/arch/mma_sm80.hpp",
          "cute/arch/mma_sm90_desc.hpp", "cute/arch/mma_sm90_gmma.hpp")  # fmt: skip
# What g++ does not take: dynamic shared memory, and a LOP3 in PTX.
_SHARED = ("extern __shared__ __align__(1024) uint8_t shared[];", "uint8_t* const shared = dynamic_shared();")
_LOP3 = (
    r'asm\("lop3\.b32 %0, %1, %2, %3, (\w+);" : "=r"\((\w+)\) : "r"\((\w+)\), "n"\((\w+)\), "n"\((\w+)\)\)',
    r"\2 = host::lop3(\3, \4, \5, \1)",
)
_RUN = """
extern "C" const char* run_{name}(const host::Launch* launch, const magicube::TmaDescriptor* x, const int64_t* a,
                                  int64_t weight_bytes) {{
  using namespace magicube;
  using C = {name};
  return host::run(*launch, {{{{(const uint8_t*)a[0], weight_bytes}}, {{(const uint8_t*)a[8], 4 * a[5]}}}}, [=] {{
    {entry}<C>(*x, (const uint8_t*)a[0], a[1], (C::Out*)a[2], a[3], a[4], a[5], (const float*)a[6], a[7],
                             (const float*)a[8], (const float*)a[9], a[10]);
  }});
}}
"""
# The A operand of a unit, (threads, halves of a unit, 4 instructions, 4 registers), and the scales as words (threads, 2, 8).
_DECODE = """
extern "C" void decode_{name}(const uint8_t* unit, uint32_t (*pieces)[2][4][4], uint32_t (*scales)[2][8]) {{
  using namespace magicube;
  using C = {name};
  for (threadIdx.x = 0; threadIdx.x < 128; ++threadIdx.x) {{
    uint32_t words[2][few::FewRows<C>::kWords];
    few::load_unit<C>(unit, words, scales[threadIdx.x]);
    few::decode_piece<C, 0>(words, scales[threadIdx.x], pieces[threadIdx.x][0], make_int_sequence<8>{{}});
    few::decode_piece<C, 1>(words, scales[threadIdx.x], pieces[threadIdx.x][1], make_int_sequence<8>{{}});
  }}
}}
"""
# The conversion to e4m3, which g++ does not have; the first code is in the upper byte, as the instruction has it.
E4M3 = """
#include <algorithm>
#include <cmath>
namespace host {
// cvt.rn.satfinite.e4m3.f32: nearest, ties to even, at most 448; NaN is 0x7F.
inline uint8_t e4m3(float x) {
  if (std::isnan(x)) return 0x7F;
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const double size = std::min(448.0, std::fabs(double(x)));
  const int exponent = std::max(-6, size > 0 ? std::ilogb(size) : -6);
  const double steps = std::nearbyint(std::ldexp(size, 3 - exponent));  // of 2^(exponent - 3)
  return sign | uint8_t((exponent + 6) * 8 + int(steps));
}
}
"""
_CVT = r'asm\("cvt\.rn\.satfinite\.e4m3x2\.f32 %0, %2, %1;" : "=h"\(codes\) : "f"\((low)\), "f"\((high)\)\);'
_CVT_HOST = r"codes = uint16_t(host::e4m3(\2) << 8 | host::e4m3(\1));"
ACTS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Launch(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in ("grid_x", "grid_y", "split", "threads", "smem_bytes", "resident", "seed", "late")
    )


class Map(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("size", "inner", "rows", "pitch", "box_bytes", "box", "swizzle")),
    )


def has_compiler() -> bool:
    """Return whether kernels can be compiled for this machine."""
    return shutil.which("g++") is not None


def make_map(
    pointer: int, size: int, shape: tuple[int, int], pitch: int, box: tuple[int, int], swizzle: int = 0
) -> Map:
    """Return what stands in for a tensor map."""
    assert pointer % 16 == pitch % 16 == 0 and max(box) <= 256 and swizzle in (0, 128)
    return Map(pointer, size, *shape, pitch, size * box[0], box[1], swizzle)


Edit = Callable[[str, str], str]


def compile_library(folder: Path, source: str, edit: Edit | None = None) -> ctypes.CDLL:
    """Compile C++ text for this machine, with the kernels' headers; `edit` changes these, given their name and text."""
    for name in _EMPTY:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    for name in REAL:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(*_LOP3, (KERNELS / name).read_text()).replace(*_SHARED)
        (folder / name).write_text(edit(name, text) if edit else text)
    (folder / "kernels.cpp").write_text(f'#include "{Path(__file__).with_name("cluster_host.hpp")}"\n{source}')
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-fpermissive", "-shared", "-fPIC"]
    files = [str(folder / "kernels.cpp"), "-o", str(folder / "kernels.so")]
    subprocess.run(["g++", *flags, "-fno-gnu-unique", f"-I{folder}", *files], check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


def with_host_conversion(text: str) -> str:
    """Return a header's text with the conversion to e4m3 as g++ takes it; :data:`E4M3` goes before."""
    text, count = re.subn(_CVT, _CVT_HOST, text)
    assert count == 1, "the conversion"
    return text


def launcher(library: ctypes.CDLL, names: Mapping[Any, str]) -> type:
    """Return what stands for ``get_kernel``: kernels of 128 to 1,024 threads a CTA that call ``run_{name}``."""

    class Kernel:
        def __init__(self, config: Any) -> None:
            self.config = config

        def launch(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
            run = getattr(library, f"run_{names[self.config]}")
            run.restype = ctypes.c_char_p
            launch = Launch(*grid[:2], 1, self.config.threads, 0, 1, 0, 0)
            wrong = run(ctypes.byref(launch), (ctypes.c_int64 * len(args))(*args))
            if wrong:
                raise RuntimeError(wrong.decode())

    return Kernel


def source_of(config: KernelConfig, name: str) -> str:
    """Return the C++ text of a config with a name of its own."""
    return config.translation_unit("sm_90a").source.replace("struct Config {", f"struct {name} {{")


class HostFewRows:
    """The kernels of some configs as a library of this machine, compiled together."""

    def __init__(
        self,
        folder: Path,
        configs: Iterable[FewRowsConfig],
        decoders: Iterable[FewRowsConfig] = (),
        edit: Edit | None = None,
    ) -> None:
        self._names: dict[FewRowsConfig, str] = {}
        source = ""
        for text, each in ((_RUN, configs), (_DECODE, decoders)):
            for config in each:
                if config not in self._names:
                    self._names[config] = f"Config{len(self._names)}"
                    source += source_of(config, self._names[config])
                source += text.format(name=self._names[config], entry=config.kernel_entry)
        self._library = compile_library(folder, source, edit)

    def operand(self, config: FewRowsConfig, unit: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a warp group multiplies of a unit, (64, 128) of the config's dtype, and scale words (64, 8)."""
        pieces = torch.zeros(128, 2, 4, 4, 2, dtype=torch.int16)  # last: halves of a register
        scales = torch.zeros(128, 2, 8, dtype=torch.int32)
        unit = unit.contiguous()
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (unit, pieces, scales)]
        getattr(self._library, f"decode_{self._names[config]}")(*pointers)
        # PTX ISA: register r of lane (g, t) is row g + 8 (r % 2), k 8 (r / 2) + 2 t and the next
        split = pieces.view(4, 8, 4, 2, 4, 2, 2, 2)  # (warp, g, t, piece, step, part, half of rows, half of register)
        found = split.permute(0, 6, 1, 3, 4, 5, 2, 7).reshape(64, 128)
        return found.view(ACTS[config.act]), scales.view(4, 8, 4, 2, 8)[:, :, 0].permute(0, 2, 1, 3).reshape(64, 8)

    def launch(
        self,
        config: FewRowsConfig,
        x: Tensor,
        weight: PackedWeight,
        out: Tensor,
        bias: Tensor | None = None,
        row_scale: Tensor | None = None,
        *,
        seed: int = 0,
        late: int = 3,
    ) -> None:
        """Launch as ``launch_few_rows`` does. late: bit 0: copies, bit 1: products; raises what the emulation found."""
        run = getattr(self._library, f"run_{self._names[config]}")
        run.restype = ctypes.c_char_p

        class Kernel:
            def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], cluster: tuple[int, ...] | None) -> None:
                assert (cluster or (1, 1, 1)) == (config.split, 1, 1) and grid[0] % config.split == 0 and grid[2] == 1
                launch = Launch(*grid[:2], config.split, config.threads, config.smem_bytes, config.resident, seed, late)
                numbers = (ctypes.c_int64 * 11)(*args[1:])
                assert (args[0].box_bytes, args[0].box, args[0].swizzle) == (128, config.rows, 128)
                size = ctypes.c_int64(weight.data.nbytes)
                wrong = run(ctypes.byref(launch), ctypes.byref(args[0]), numbers, size)
                if wrong:
                    raise RuntimeError(wrong.decode())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(product, "get_kernel", lambda config: Kernel())
            patch.setattr(product, "tensor_map", make_map)
            product.launch_few_rows(config, x, weight, out, bias, row_scale)
