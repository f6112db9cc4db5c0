"""What the GPU tests share: configs, random operands on the CPU, and products with poisoned and guarded outputs.

Operands are made on the CPU, where the int64 reference is computed, and copied to the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.atoms import default_atom
from cute_kernels.dtypes import Integer
from cute_kernels.integers import BITS, int_range
from cute_kernels.jit import current_arch, get_kernel
from cute_kernels.machine import MMA_COLUMNS, PANEL_ARCHES, Machine, Problem, ProblemTypes
from cute_kernels.sddmm import heuristics
from cute_kernels.sddmm.heuristics import SddmmKernel, choose_sddmm
from cute_kernels.sddmm.panel import SddmmPanelConfig
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import SpmmKernel, choose_spmm
from cute_kernels.spmm.panel import PanelConfig
from cute_kernels.spmm.resident import ResidentConfig
from magicube_cutlass.checks import STRIDES, VECTOR_LENGTHS
from magicube_cutlass.dispatch.plan import size_bucket

HERE = Machine("sm_90a", 132)
if torch.cuda.is_available():
    HERE = Machine(current_arch(), torch.cuda.get_device_properties(0).multi_processor_count)
PANELS = HERE.arch in PANEL_ARCHES
needs_warp_groups = pytest.mark.skipif(HERE.arch != "sm_90a", reason="no warp groups multiply on this GPU")
SIGNS = tuple(product((True, False), repeat=2))
POISON = -0x21524111  # as an integer; outputs that are floats are poisoned with nan
GUARD = 64


Widths = Any  # (bits, signed), or an Integer that a config declares as ElementType


def kind(
    v: int = 8, left: tuple[int, bool] = (8, True), right: tuple[int, bool] = (8, True), out: str = "int64"
) -> ProblemTypes:
    return ProblemTypes(v, Integer(*left), Integer(*right), out)


def gather(of: ProblemTypes, atom: str = "", arch: str = HERE.arch, **options: Any) -> GatherConfig:
    return GatherConfig(atom or default_atom(of, arch), of.vector_length, of.lhs, of.rhs, of.out, **options)


def panel(of: ProblemTypes, atom: str = "", **options: Any) -> PanelConfig:
    """Few warps, short tiles and two blocks: a small matrix passes many tiles, items and wraps of the ring."""
    small = {"tile": 256, "warps": 3, "tile_n_bytes": 64} | options
    return PanelConfig(atom or default_atom(of, HERE.arch), of.vector_length, of.lhs, of.rhs, of.out, **small)


def resident(of: ProblemTypes, atom: str = "", inner: int = 2112, **options: Any) -> ResidentConfig:
    """Few warps, short stages and blocks: a small matrix fills several CTAs, and a warp refills its stages."""
    cluster = options.get("cluster", 1)
    small = {
        "tile": -(-inner // (8 * cluster)) * 8,
        "block_rows": 3,
        "warps": 3,
        "stages": 2,
        "stage_records": 3,
        "together": 2,
    }
    name = atom or default_atom(of, HERE.arch)
    return ResidentConfig(name, of.vector_length, of.lhs, of.rhs, of.out, **(small | options))


def sddmm(of: ProblemTypes, stride: int = 32, inner: int = 1024, atom: str | None = None) -> SddmmKernel:
    return choose_sddmm(of, HERE, stride=stride, inner=inner, atom=atom)


def sddmm_panel(of: ProblemTypes, stride: int = 32, atom: str = "", **options: Any) -> SddmmPanelConfig:
    """Few warps and a short tile: a small pattern has many tiles, and each warp many vector rows."""
    small = {"tile": 64, "boxes": 1, "slots": min(stride, 32), "warps": 3} | options
    name = atom or default_atom(of, "sm_90a")
    return SddmmPanelConfig(name, of.vector_length, of.lhs, of.rhs, of.out, stride, **small)


@contextmanager
def sampling_with(config: SddmmKernel) -> Iterator[None]:
    """``sddmm`` takes this kernel, on a GPU that seems to have five SMs."""
    few = patch.object(get_kernel(config), "num_sms", 5)
    with few, patch.object(heuristics, "choose_sddmm", lambda *_, **__: config):
        yield


def merged(of: ProblemTypes) -> ProblemTypes:
    """The kind that ``spmm`` chooses a config for: short vectors are merged."""
    return replace(of, vector_length=max(of.vector_length, MMA_COLUMNS))


def choices(of: ProblemTypes) -> list[SpmmKernel]:
    """Every config that ``choose_spmm`` gives for this kind on this GPU."""
    sizes = product((1, 40, 300, 4096), (8, 64, 512, 4096), (16, 128, 1024), (1, 2))
    found = [
        choose_spmm(of, HERE, Problem(rows, 4096, rows * longest, longest, n, batch))
        for rows, longest, n, batch in sizes
    ]
    return list(dict.fromkeys(found))


def chosen(of: ProblemTypes, rows: int, longest: int, n: int, batch: int = 1, atom: str | None = None) -> SpmmKernel:
    """What ``spmm`` chooses for a matrix of ``rows`` vector rows, the longest of ``longest`` vectors."""
    width = size_bucket(n)
    problem = Problem(rows, 4096, rows * longest, longest, width, batch)
    return choose_spmm(of, HERE, problem, atom)


def every_pair(shift: int = 0) -> Iterator[tuple[ProblemTypes, int]]:
    """Every pair of widths with every mix of signs; vector lengths and strides take turns from ``shift`` on; 0 and 4 have all."""
    for i, (left, right, (s, t)) in enumerate(product(BITS, BITS, SIGNS)):
        yield kind(VECTOR_LENGTHS[(i + i // 4 + shift) % 6], (left, s), (right, t)), STRIDES[(i + shift) % 3]


def ints(shape: tuple[int, ...], bits: int, signed: bool, extreme: bool = False) -> Tensor:
    """int64; ``extreme``: only the smallest and the largest integer."""
    low, high = int_range(bits, signed)
    values = torch.randint(low, high + 1, shape)
    return torch.where(values > (low + high) // 2, high, low) if extreme else values


def dense(shape: tuple[int, ...], of: Widths, layout: str = "row", extreme: bool = False) -> mc.QuantTensor:
    x = ints(shape, of[0], of[1], extreme)
    x = x.mT.contiguous().mT if layout == "column" else x
    return mc.QuantTensor.from_ints(x, bits=of[0], signed=of[1])


def sparse(
    m: int,
    k: int,
    v: int,
    of: Widths,
    *,
    sparsity: float = 0.6,
    stride: int = 32,
    extreme: bool = False,
    empty: bool = False,
    seed: int = 0,
) -> mc.SRBCRS:
    """A random matrix; ``empty``: every third vector row has nothing."""
    mask = mc.random_pattern(m, k, sparsity, v, distribution="uniform", seed=seed).to_dense()
    if empty:
        mask[(torch.arange(m) // v) % 3 == 1] = False
    return mc.SRBCRS.from_mask(
        ints((m, k), of[0], of[1], extreme), mask, vector_length=v, bits=of[0], signed=of[1], stride=stride
    )


def guarded(shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> tuple[Tensor, Tensor]:
    """A poisoned output and the memory around it; ``offset`` elements spoil its alignment."""
    size = 1
    for extent in shape:
        size *= extent
    value = float("nan") if dtype.is_floating_point else POISON
    memory = torch.full((size + 2 * GUARD + offset,), value, dtype=dtype, device="cuda")
    return memory[GUARD + offset : GUARD + offset + size].view(shape), memory


def check_guards(out: Tensor, memory: Tensor) -> None:
    start = out.storage_offset()
    for part in (memory[:start], memory[start + out.numel() :]):
        kept = part.isnan() if part.is_floating_point() else part == POISON
        assert bool(kept.all()), "written outside of out"


def spmm(
    a: mc.SRBCRS,
    b: mc.QuantTensor,
    out: torch.dtype = torch.int64,
    config: SpmmKernel | None = None,
    atom: str | None = None,
    bias: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """The product on the GPU, of operands that lie there or on the CPU; back on the CPU, guards checked."""
    a, b = a.to("cuda"), b.to("cuda")
    result, memory = guarded((*b.shape[:-2], a.shape[0], b.shape[-1]), out, offset)
    mc.spmm(a, b, out=result, config=config, atom=atom, bias=None if bias is None else bias.cuda())
    check_guards(result, memory)
    return result.cpu()


def check_spmm(a: mc.SRBCRS, b: mc.QuantTensor, config: Any = None, offset: int = 0) -> None:
    """The product in the config's output type, or int64, equals the reference."""
    out = getattr(torch, config.out) if config else torch.int64
    expected = mc.reference.spmm(a, b)
    expected = expected.float().to(out) if out.is_floating_point else expected.to(out)
    got = spmm(a, b, out, config, offset=offset)
    same = got == expected
    assert torch.equal(got, expected), (
        f"{config.name if config else 'the chosen kernel'}: {int((~same).sum())} of {same.numel()} differ, "
        f"first at {(~same).nonzero()[0].tolist()}, A {a.shape}, B {tuple(b.shape)}"
    )


def check_sddmm(
    x: mc.QuantTensor,
    y: mc.QuantTensor,
    pattern: mc.Pattern,
    stride: int = 32,
    *,
    transposed: bool = False,
    config: SddmmKernel | None = None,
    **options: Any,
) -> None:
    """The sampled product in int64 equals the reference, its padding is zero, and it is a sound matrix."""
    blank = mc.SRBCRS.from_pattern(
        pattern, torch.zeros(pattern.vectors, pattern.vector_length, dtype=torch.int8), bits=8, stride=stride
    )
    right = y.to("cuda").mT if transposed else y.to("cuda")
    with sampling_with(config) if config else nullcontext():
        # What the allocator hands out next is poisoned: the operator makes its own output.
        poison = torch.full((*x.shape[:-2], *blank.values.shape), POISON, dtype=torch.int64, device="cuda")
        del poison
        got = mc.sddmm(
            x.to("cuda"), right, blank.to("cuda"), out_dtype=torch.int64, transposed_y=transposed, **options
        ).to("cpu")
    got.check_format(full=True)
    assert (
        not got.values.transpose(-1, -2)
        .reshape(*got.values.shape[:-3], -1, pattern.vector_length)[..., got.col_indices < 0, :]
        .any()
    ), "the padding is not zero"
    differ = got.vectors() != mc.reference.sddmm(x, y, pattern)
    assert not differ.any(), (
        f"{config.name if config else 'the chosen kernel'}: {int(differ.sum())} of {differ.numel()} differ, first at "
        f"{differ.nonzero()[0].tolist()}, X {tuple(x.shape)}, Y {tuple(y.shape)}, stride {stride}"
    )
