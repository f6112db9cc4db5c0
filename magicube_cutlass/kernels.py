"""Which kernel runs a product: one pure choice from the problem's numbers, and the configs by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from cute_kernels import atoms
from cute_kernels.sddmm import SddmmConfig
from cute_kernels.spmm import SAFE_RUN
from cute_kernels.spmm_gather import GatherConfig
from cute_kernels.spmm_panel import PanelConfig
from magicube_cutlass.precision import SDDMM_PAIRS, SPMM_PAIRS

SpmmKernel = GatherConfig | PanelConfig
_PANEL_ARCHES = ("sm_90a", "sm_100a", "sm_103a")  # tensor copies and 227 KiB of shared memory

_spmm: dict[str, SpmmKernel] = {}
_sddmm: dict[str, SddmmConfig] = {}


@dataclass(frozen=True)
class Kind:
    """Operands of a product: widths and signs, left one first; vector length; name of the output's dtype."""

    vector_length: int
    left: tuple[int, bool]
    right: tuple[int, bool]
    out: str


@dataclass(frozen=True)
class Machine:
    """What a choice depends on of a GPU."""

    arch: str
    multiprocessors: int


def default_atom(kind: Kind, arch: str) -> str:
    """The instruction for operands of these widths: 4-bit ones where both are and the chip has them."""
    if (kind.left[0], kind.right[0]) != (4, 4):
        return "s8_m16n8k32"
    native = "s4_m16n8k64"
    return native if atoms.runs_on(atoms.atom(native), arch) else "int4_as_int8_m16n8k32"


def choose_spmm(
    kind: Kind, machine: Machine, *, vector_rows: int, longest: int, n: int, batch: int, atom: str | None = None
) -> SpmmKernel:
    """The config for C = A B.

    ``longest``: vectors of the longest vector row; ``n``: columns of B, or a power of two not below.
    ``batch``: 1 for a single matrix, 2 for several.
    """
    name = atom or default_atom(kind, machine.arch)
    gather = GatherConfig(name, kind.vector_length, *kind.left, *kind.right, kind.out)
    wide = longest > SAFE_RUN and (kind.out != "int32" or gather.shifted)
    panel = _panel(PanelConfig(name, kind.vector_length, *kind.left, *kind.right, kind.out), machine)
    # A panel pays when enough vector rows share it, each with enough of it.
    many = panel.items(vector_rows, n, batch) * 3 >= machine.multiprocessors and vector_rows >= 64
    if machine.arch in _PANEL_ARCHES and not wide and many and longest >= 64 and n >= panel.columns:
        return registered(panel)
    return registered(_gather(replace(gather, wide=wide), machine, vector_rows, longest, n, batch))


def _panel(base: PanelConfig, machine: Machine) -> PanelConfig:
    """As many warps as the registers for the sums leave."""
    config = replace(base, multiprocessors=machine.multiprocessors)
    if config.sums > 64:
        config = replace(config, row_bytes=64, tile=1024)
    return replace(config, warps=15 if config.sums <= 64 else 7)


def _gather(base: GatherConfig, machine: Machine, vector_rows: int, longest: int, n: int, batch: int) -> GatherConfig:
    """Wide strips where there is work for all, several warps a vector row where there is not."""
    broad = replace(base, row_bytes=128)
    plenty = vector_rows * -(-n // broad.columns) * batch >= 16 * machine.multiprocessors
    heavy = base.wide or base.vector_length * base.digits[0] * base.digits[1] > 16  # sums fill the registers
    config = broad if plenty and n >= broad.columns and not heavy else base
    tasks = vector_rows * -(-n // config.columns) * batch
    row_warps, groups = 1, -(-longest // config.group)
    while row_warps < 4 and tasks * row_warps < 16 * machine.multiprocessors and groups >= 4 * row_warps:
        row_warps *= 2
    return replace(config, row_warps=row_warps)


def registered(config: SpmmKernel) -> SpmmKernel:
    """``config``, from now on found by its name."""
    return _spmm.setdefault(config.name, config)


def check_spmm(config: SpmmKernel, kind: Kind, longest: int) -> None:
    """Raise ``ValueError`` unless ``config`` is for operands of this kind and this longest vector row."""
    made_for = Kind(
        config.vector_length, (config.a_bits, config.a_signed), (config.b_bits, config.b_signed), config.out
    )
    if made_for != kind:
        raise ValueError(f"config must be for {kind}, got one for {made_for}")
    if longest > SAFE_RUN and (kind.out != "int32" or config.shifted) and not getattr(config, "wide", False):
        raise ValueError(f"config must be wide for a vector row of {longest} > {SAFE_RUN} vectors, got {config.name}")
    registered(config)


def choose_sddmm(kind: Kind, machine: Machine, *, stride: int, inner: int, atom: str | None = None) -> SddmmConfig:
    """The config for S = X Y^T at a pattern; ``stride`` is the one of the output, ``inner`` the length of the sum."""
    name = atom or default_atom(kind, machine.arch)
    base = SddmmConfig(name, kind.vector_length, *kind.left, *kind.right, kind.out, stride)
    narrow = min(kind.left[0], kind.right[0]) * 2 >= max(kind.left[0], kind.right[0])
    short = inner <= base.depth // 2 and narrow
    wide = inner > SAFE_RUN and (kind.out != "int32" or base.shifted)
    config = replace(base, row_bytes=64 if short else 128, wide=wide)
    return _sddmm.setdefault(config.name, config)


def spmm_config(name: str) -> SpmmKernel:
    """The SpMM config of this name, once chosen."""
    return _spmm[name]


def sddmm_config(name: str) -> SddmmConfig:
    """The SDDMM config of this name, once chosen."""
    return _sddmm[name]


@lru_cache
def machine(device: int) -> Machine:
    """The GPU of this index."""
    import torch

    from cute_kernels.jit.kernel import current_arch

    with torch.cuda.device(device):
        return Machine(current_arch(), torch.cuda.get_device_properties(device).multi_processor_count)


def default_configs(all: bool = False, arch: str = "sm_90a") -> Iterator[SpmmKernel | SddmmConfig]:
    """What ``magicube warmup`` compiles: V = 8 with float16 and int32 output; with ``all`` every V, sign and output."""
    here = Machine(arch, 132)
    lengths = (1, 2, 4, 8, 16, 32) if all else (8,)
    outs = ("float16", "int32", "bfloat16", "float32", "int64") if all else ("float16", "int32")
    signs = tuple(product((True, False), repeat=2)) if all else ((True, True),)
    for v, out, (left, right) in product(lengths, outs, signs):
        for a, b in SPMM_PAIRS:
            for rows in (32, 4096):
                yield choose_spmm(
                    Kind(v, (a, left), (b, right), out), here, vector_rows=rows, longest=512, n=512, batch=1
                )
        for x, y in SDDMM_PAIRS:
            yield choose_sddmm(Kind(v, (x, left), (y, right), out), here, stride=32, inner=256)


def named_configs() -> dict[str, SpmmKernel | SddmmConfig]:
    """The default configs by name."""
    return {config.name: config for config in default_configs()}
