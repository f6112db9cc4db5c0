"""An mma shape that the atom table lacks, added from outside the library and used by the SpMM and SDDMM kernels.

``int8_m16n8k64`` is two m16n8k32 one after the other along k.  Without a GPU the kernels are compiled and not run.
Run: ``python examples/new_mma_shape.py``; ``docs/how-to/add-an-mma-shape.md`` explains each part.
"""

import torch
from pycute import Layout

import magicube_cutlass as mc
from cute_kernels.atoms import Atom, register_atom
from cute_kernels.dtypes import Integer
from cute_kernels.jit import compile_unit
from cute_kernels.layout import fragments
from cute_kernels.machine import Machine, Problem, ProblemTypes
from cute_kernels.sddmm.heuristics import choose_sddmm
from cute_kernels.spmm.heuristics import choose_spmm

SOURCE = """
namespace example {
template <class Half>
struct Twice {
  using DRegisters = uint32_t[4];
  using ARegisters = uint32_t[8];
  using BRegisters = uint32_t[4];
  using CRegisters = uint32_t[4];

  CUTE_HOST_DEVICE static void fma(
      uint32_t& d0, uint32_t& d1, uint32_t& d2, uint32_t& d3,
      uint32_t const& a0, uint32_t const& a1, uint32_t const& a2, uint32_t const& a3,
      uint32_t const& a4, uint32_t const& a5, uint32_t const& a6, uint32_t const& a7,
      uint32_t const& b0, uint32_t const& b1, uint32_t const& b2, uint32_t const& b3,
      uint32_t const& c0, uint32_t const& c1, uint32_t const& c2, uint32_t const& c3) {
    Half::fma(d0, d1, d2, d3, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3);
    Half::fma(d0, d1, d2, d3, a4, a5, a6, a7, b2, b3, d0, d1, d2, d3);
  }
};
}  // namespace example

namespace cute {
template <class Half>
struct MMA_Traits<example::Twice<Half>> : MMA_Traits<Half> {
  using Shape_MNK = Shape<_16, _8, _64>;
  using ALayout = Layout<Shape <Shape <_4, _8>, Shape <_4, _2, _2, _2>>,
                         Stride<Stride<_64, _1>, Stride<_16, _8, _256, _512>>>;
  using BLayout = Layout<Shape <Shape <_4, _8>, Shape <_4, _2, _2>>,
                         Stride<Stride<_32, _1>, Stride<_8, _128, _256>>>;
};
}  // namespace cute
"""
NAMES = {True: "S8", False: "U8"}
ATOM = register_atom(
    Atom(
        name="int8_m16n8k64",
        shape=(16, 8, 64),
        bits=8,
        mma_bits=8,
        structs={
            (left, right): f"example::Twice<cute::SM80_16x8x32_S32{NAMES[left]}{NAMES[right]}S32_TN>"
            for left in NAMES
            for right in NAMES
        },
        threads=32,
        a_layout=Layout(((4, 8), (4, 2, 2, 2)), ((64, 1), (16, 8, 256, 512))),
        b_layout=Layout(((4, 8), (4, 2, 2)), ((32, 1), (8, 128, 256))),
        c_layout=Layout(((4, 8), (2, 2)), ((32, 1), (16, 8))),
        archs=("80", "86", "89", "90", "100", "120"),
        headers=("cute/atom/mma_traits_sm80.hpp",),
        source=SOURCE,
    )
)


def show() -> None:
    """What the library derives from the entry."""
    print(f"{ATOM.name}: (M, N, K) = {ATOM.shape}, groups of {fragments.stride(ATOM)} vectors")
    print("  k of the instruction -> gathered row:", fragments.gather_order(ATOM))
    print("  (thread, value) of operand B -> place in a group:", fragments.fragment_order(ATOM))
    print("  the first lane's bytes of a group:", fragments.pack_index(ATOM)[: ATOM.values("B")].tolist())


def compile_kernels(arch: str = "sm_90a") -> None:
    """SpMM for few and for many vector rows, and SDDMM, compiled for ``arch``."""
    kind, gpu = ProblemTypes(8, Integer(8, True), Integer(8, True), "int32"), Machine(arch, 132)
    few, many = (choose_spmm(kind, gpu, Problem(rows, 4096, 410 * rows, 512, 512), ATOM.name) for rows in (32, 4096))
    for config in (few, many, choose_sddmm(kind, gpu, stride=64, inner=256, atom=ATOM.name)):
        binary = compile_unit(config.translation_unit(arch))
        print(f"{config.name} for {arch}: {len(binary.code)} bytes, {binary.usage}")


def run(device: str) -> None:
    """Both products on ``device``, compared with the dense ones of torch."""
    pattern = mc.random_pattern(256, 512, 0.9, 8)
    A = mc.SRBCRS.from_pattern(pattern, torch.randint(-128, 128, (pattern.vectors, 8)), bits=8)
    x, y = torch.randint(-128, 128, (512, 192)), torch.randint(-128, 128, (256, 192))
    X, B = mc.QuantTensor.from_ints(x, bits=8).to(device), mc.QuantTensor.from_ints(y, bits=8).to(device)
    C = mc.spmm(A.to(device), X, atom=ATOM.name)
    assert torch.equal(C.cpu().long(), A.to_dense(dequantize=False).long() @ x)
    S = mc.sddmm(B, X, pattern.to(device), atom=ATOM.name)
    assert torch.equal(S.to_dense().cpu().long(), (y @ x.T) * pattern.to_dense())
    print(f"spmm and sddmm on {device} equal the dense products")


if __name__ == "__main__":
    show()
    if torch.cuda.is_available():
        run("cuda")
    else:
        compile_kernels()
