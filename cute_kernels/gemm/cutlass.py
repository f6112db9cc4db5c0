"""CUTLASS's own kernels of the dense integer product, emitted by ``cutlass_library`` and compiled by NVRTC.

``cutlass_library`` of the wheel ``nvidia-cutlass`` enumerates operations and writes their C++ types. A unit adds what
NVRTC lacks and the entry point of ``gemm/cutlass.cuh``; no nvcc, host compiler or driver takes part. The kernel has run
on an H100: ``gemm(backend="cutlass")`` names it, nothing selects it.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cute_kernels.convert.pack import pack_rows
from cute_kernels.gemm.problem import GemmProblem
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.compiler import Unit
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.operands import ALIGNMENT, aligned, is_ready

# nvcuda::wmma needs headers that are in no wheel of NVRTC, and two names of <type_traits> are missing there.
_PREAMBLE = """#undef __CUDACC_VER_MAJOR__
#define __CUDACC_VER_MAJOR__ 0
#include <cutlass/arch/wmma.h>
#undef __CUDACC_VER_MAJOR__
#define __CUDACC_VER_MAJOR__ {major}
#include <cuda/std/type_traits>
namespace std {{
template <class T> inline constexpr bool is_pointer_v = cuda::std::is_pointer_v<T>;
template <class...> using void_t = void;
}}
"""
_HOST_HEADERS = ("cutlass/gemm/device/",)
_VECTOR = 4  # int32 results of a store


@lru_cache(maxsize=8)
def operations(generator: str, kernels: str = "") -> tuple[Any, ...]:
    """Return the matrix products that a generator of ``cutlass_library`` enumerates.

    Parameters
    ----------
    generator : str
        Function of ``cutlass_library.generator``, such as ``"GenerateSM80"``.
    kernels : str, default ""
        Pattern of names. Without one CUTLASS enumerates its default tiles, with one all tiles.

    Returns
    -------
    tuple of GemmOperation

    Examples
    --------
    >>> operations("GenerateSM80_TensorOp_16864_TN")[0].tile_description.math_instruction.instruction_shape
    [16, 8, 64]
    """
    from cutlass_library import generator as generators
    from cutlass_library.manifest import Manifest

    version, arguments = "13.0.0", ["--operations", "gemm", "--architectures", "75;80;89;90a", "--kernels", kernels]
    given: Namespace = generators.define_parser().parse_args([*arguments, "--cuda-version", version])
    manifest = Manifest(given)
    getattr(generators, generator)(manifest, version)
    by_arch = (each.values() for kind in manifest.operations.values() for each in kind.values())
    return tuple(operation for lists in by_arch for each in lists for operation in each)


@dataclass(frozen=True)
class CutlassGemm(KernelConfig):
    """A kernel of CUTLASS 2.x: ``D = A B`` in int32.

    Attributes
    ----------
    operation : str
        CUTLASS's name of the operation.
    generator : str
        Function of ``cutlass_library.generator`` that enumerates it.
    emitter : str
        Class of ``cutlass_library.gemm_operation`` that writes its types.
    tile : tuple of int
        M and N of a CTA's tile in CUTLASS's order of the operands.
    num_threads : int
        Threads per CTA.
    smem : int
        Bytes of dynamic shared memory; the unit checks it against CUTLASS's.
    """

    operation: str
    generator: str
    emitter: str
    tile: tuple[int, int]
    num_threads: int
    smem: int

    @property
    def name(self) -> str:
        """CUTLASS's name."""
        return self.operation

    @property
    def threads(self) -> int:
        return self.num_threads

    @property
    def smem_bytes(self) -> int:
        return self.smem

    def translation_unit(self, arch: str) -> Unit:
        """Return the C++ source that CUTLASS emits, with its entry point."""
        from cutlass_library import gemm_operation

        from cute_kernels.jit import toolchain

        found = [each for each in operations(self.generator, "*") if each.procedural_name() == self.operation]
        if not found:
            raise ValueError(f"operation must be one of {self.generator}, got {self.operation!r}")
        emitter = getattr(gemm_operation, self.emitter)()
        headers = [each for each in emitter.includes if not each.startswith(_HOST_HEADERS)]
        source = "".join(
            (
                _PREAMBLE.format(major=toolchain.find().versions["nvrtc"].partition(".")[0]),
                *(f"#include <{header}>\n" for header in headers),
                emitter.emit(found[0]),
                '\n#include "gemm/cutlass.cuh"\n',
            )
        )
        return Unit(source, f"magicube::cutlass_gemm<{self.operation}, {self.smem}>", arch, self.name)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Return the grid of an (m, n) output."""
        rows, columns = -(-m // self.tile[0]), -(-n // self.tile[1])
        # GemmIdentityThreadblockSwizzle<8>::get_log_tile
        log = 3 if columns >= 6 else 2 if columns >= 3 else 1 if columns >= 2 else 0
        return rows << log, -(-columns // (1 << log)), 1


CONFIG = CutlassGemm(
    "cutlass_tensorop_i16832gemm_s8_256x128_64x3_tn_align16", "GenerateSM80_TensorOp_16832_TN",
    "EmitGemmUniversalInstance", (256, 128), 256, 73728,
)  # fmt: skip


def check_backend(problem: GemmProblem, backend: str) -> None:
    """Raise unless `backend` is ``"cutlass"`` and computes a product.

    Raises
    ------
    ValueError
        If the name is unknown, or the product is not on a GPU or not a single unscaled one in int32.
    """
    if backend != "cutlass":
        raise ValueError(f"backend must be None or 'cutlass', got {backend!r}")
    if problem.device.type != "cuda":
        raise ValueError(f"backend must be None on {problem.device}, got 'cutlass'")
    n = problem.shape[1]
    if problem.out_dtype != torch.int32 or n % _VECTOR:
        raise ValueError(
            f"backend must be None unless out_dtype is torch.int32 and N a multiple of {_VECTOR}, got 'cutlass' for "
            f"{problem.out_dtype} and N = {n}"
        )


def _rows(plane: Tensor) -> tuple[Tensor, int]:
    """A plane, (rows, K), whose rows end with whole vectors, and its pitch."""
    ready = is_ready(plane) and plane.shape[1] % ALIGNMENT == 0
    plane = plane if ready else pack_rows(plane)
    return plane, plane.stride(0) if plane.shape[0] > 1 else plane.shape[1]


def gemm_cutlass(problem: GemmProblem, out: Tensor) -> Tensor:
    """Write a product to `out` by CUTLASS's kernel and return it.

    Parameters
    ----------
    problem : GemmProblem
        A product that :func:`check_backend` accepts; M, N and K are not 0.
    out : Tensor, shape (M, N)
        int32; rows start at multiples of 16 bytes.

    Returns
    -------
    Tensor, shape (M, N)
        `out`.

    Raises
    ------
    ValueError
        If rows of `out` are not aligned.
    """
    m, n, k = problem.shape
    pitch = out.stride(0) if m > 1 else n
    if out.data_ptr() % ALIGNMENT or pitch % _VECTOR:
        raise ValueError(f"out must have rows at multiples of {ALIGNMENT} bytes, got memory stride {pitch}")
    problem = problem.unpacked()
    with device_of(out):
        a, pitch_a = _rows(problem.a[0])  # (M, K)
        b, pitch_b = _rows(problem.b[0].t())  # (N, K)
        get_kernel(CONFIG).launch(
            CONFIG.grid(m, n),
            (
                a.data_ptr(), pitch_a, b.data_ptr(), pitch_b, out.data_ptr(), pitch, np.int32(m), np.int32(n),
                np.int32(aligned(k)),
            ),
        )  # fmt: skip
    return out
