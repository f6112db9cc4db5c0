"""Entries of the code digests for SpMM and SDDMM: problems that kernel selection gets, and explicit options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cute_kernels.dtypes import FLOATS, SDDMM_PAIRS, SPMM_PAIRS, ElementType, Integer
from cute_kernels.machine import Machine, Problem, ProblemTypes
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.sddmm.heuristics import SddmmKernel, choose_sddmm
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import SpmmKernel, candidates, choose_spmm, spmm_cost
from cute_kernels.spmm.panel import PanelConfig
from cute_kernels.spmm.resident import ResidentConfig

SpmmEntry = tuple[str, SpmmKernel]
SddmmEntry = tuple[str, SddmmKernel]


def _number(text: str) -> ElementType:
    """Parse ``"8"``, ``"u8"`` or the name of a float format."""
    return FLOATS[text] if text in FLOATS else Integer(int(text.removeprefix("u")), not text.startswith("u"))


def _spmm(
    arch: str, left: str, right: str, v: int, out: str, rows: int, n: int = 512, longest: int = 512, atom: str = ""
) -> SpmmEntry:
    """Select the SpMM config of a problem with 410 vectors per vector row on average."""
    kind = ProblemTypes(v, _number(left), _number(right), out)
    problem = Problem(rows, max(4096, longest), 410 * rows, longest, n)
    tags = f"{f' longest={longest}' if longest != 512 else ''}{f' atom={atom}' if atom else ''}"
    key = f"spmm/L{left}-R{right} V={v} out={out} rows={rows} n={n}{tags}"
    return key, choose_spmm(kind, Machine(arch, 132), problem, atom or None)


def spmm_entries(arch: str) -> Iterator[SpmmEntry]:
    """Yield the SpMM entries of `arch`."""
    for a, b in SPMM_PAIRS:
        for rows in (32, 512):
            yield _spmm(arch, str(a), str(b), 8, "float16", rows)
    for left, right, v, out, rows in (
        ("16", "16", 8, "int32", 32), ("16", "8", 8, "int32", 512), ("8", "8", 8, "int32", 32),
        ("4", "4", 8, "int32", 512), ("8", "8", 8, "bfloat16", 512), ("8", "8", 8, "int64", 512),
        ("16", "16", 8, "int64", 512), ("12", "4", 4, "float16", 512), ("u16", "u8", 2, "float32", 32),
        ("8", "8", 16, "float16", 512), ("8", "8", 32, "float16", 32), ("4", "4", 16, "int32", 512),
        ("u8", "8", 8, "float16", 512), ("8", "u8", 8, "int32", 32), ("u4", "u4", 8, "int32", 512),
        ("16", "u16", 8, "float32", 512), ("float16", "float16", 8, "float16", 512),
        ("bfloat16", "bfloat16", 8, "bfloat16", 512), ("e4m3", "e4m3", 8, "float16", 512), ("e2m1", "e2m1", 8, "float32", 32),
        ("e5m2", "bfloat16", 8, "bfloat16", 32), ("float16", "e2m1", 16, "float32", 512),
        ("bfloat16", "e4m3", 32, "float32", 32),
    ):  # fmt: skip
        yield _spmm(arch, left, right, v, out, rows)
    for left, right, rows, n in (
        ("8", "8", 64, 8), ("8", "8", 1792, 16), ("4", "4", 1792, 32),
        ("12", "4", 64, 16), ("float16", "float16", 1792, 16), ("8", "8", 4096, 512),
    ):  # fmt: skip
        yield _spmm(arch, left, right, 8, "float16", rows, n)
    yield _spmm(arch, "8", "8", 8, "float16", 32, longest=40000)
    yield _spmm(arch, "4", "4", 8, "int32", 512, longest=40000)
    yield _spmm(arch, "8", "8", 8, "float16", 512, atom="s8_m16n8k16")
    yield _spmm(arch, "float16", "float16", 8, "float32", 32, atom="f16_m16n8k16")
    if arch == "sm_80":
        yield _spmm(arch, "4", "4", 8, "float16", 32, atom="int4_as_int8_m16n8k32")
        yield _spmm(arch, "8", "8", 8, "float16", 32, atom="s8_m8n8k16")
    yield from _spmm_options(arch)


def _spmm_options(arch: str) -> Iterator[SpmmEntry]:
    """Options that selection leaves at their defaults, products of a softmax, and a matrix that is used once."""
    once = ProblemTypes(8, Integer(8, True), Integer(8, True), "float16")
    problem, machine = Problem(512, 4096, 410 * 512, 512, 512), Machine(arch, 132)
    yield "spmm/L8-R8 V=8 out=float16 rows=512 n=512 once", choose_spmm(once, machine, problem, single_use=True)
    for bits, right, rows in ((16, 8, 32), (4, 4, 512)):
        kind = ProblemTypes(8, Integer(bits, False), Integer(right, True), "float16")
        atom = "s8_m16n8k32" if bits > 4 else "int4_as_int8_m16n8k32"
        sizes = Problem(rows, 4096, 410 * rows, 512, 64)
        gathers = [each for each in candidates(kind, machine, sizes, atom) if isinstance(each, GatherConfig)]
        best = min(gathers, key=lambda each: spmm_cost(each, machine, sizes))
        yield f"spmm/softmax u{bits} x s{right} rows={rows} n=64", replace(best, a_just_written=True)
    for n, per_row in ((64, 410), (512, 410), (2048, 410), (4096, 410), (4096, 2048)):  # those of a layer
        sizes = Problem(512, 4096, per_row * 512, per_row, n)
        yield f"spmm/transpose n={n} vectors a row={per_row}", choose_spmm(once, machine, sizes, transposes=True)
    operands = ("s8_m16n8k32", 4, Integer(12, True), Integer(4, True), "float16")
    plain = GatherConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "float16")
    yield "spmm/gather L12-R4 V=4 digits apart", GatherConfig(*operands, fuse_digits=False)
    yield "spmm/gather L8-R8 without swizzle", replace(plain, swizzle=False)
    yield "spmm/gather L8-R8 without prefetch", replace(plain, stages=1)
    nibbles = GatherConfig("int4_as_int8_m16n8k32", 8, Integer(4, True), Integer(4, True), "float16")
    yield "spmm/gather L4-R4 without shuffle", replace(nibbles, shuffle=False)
    if arch == "sm_80":
        yield "spmm/gather L4-R4 without shuffle, 4-bit mma", replace(nibbles, atom="s4_m16n8k64", shuffle=False)
    if arch in ("sm_90a", "sm_100a"):
        panel = PanelConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "float16")
        yield "spmm/panel L12-R4 V=4 digits apart", PanelConfig(*operands, fuse_digits=False, warps=8)
        yield "spmm/panel L8-R8 without swizzle", replace(panel, swizzle=False)
        yield "spmm/panel L8-R8 without prefetch", replace(panel, stages=1, tile_window=1)
        yield (
            "spmm/panel L8-R8 cluster of 2, records",
            replace(panel, tile_n_bytes=64, tile=512, cluster=2, a_stages=3, warps=8, rows_per_warp=2),
        )
        few = ResidentConfig("s8_m16n8k32", 8, Integer(4, True), Integer(8, True), "bfloat16")
        yield "spmm/resident L4-R8", few
        yield "spmm/resident L4-R8 transposed", replace(few, transposed=True)
        wide = ResidentConfig("s8_m16n8k32", 8, Integer(16, True), Integer(16, True), "float16", tile_n_bytes=32)
        yield "spmm/resident L16-R16 cluster of 2", replace(wide, cluster=2, stages=3)


def _sddmm(
    arch: str, left: str, right: str, v: int, out: str, rows: int, inner: int = 256, stride: int = 32, atom: str = ""
) -> SddmmEntry:
    """Select the SDDMM config of a pattern with 410 vectors per vector row; 0 rows: of unknown size."""
    kind = ProblemTypes(v, _number(left), _number(right), out)
    config = choose_sddmm(
        kind, Machine(arch, 132), stride=stride, inner=inner, atom=atom or None, vector_rows=rows, vectors=410 * rows,
        columns=4096,
    )  # fmt: skip
    tags = f" atom={atom}" if atom else ""
    return f"sddmm/L{left}-R{right} V={v} out={out} rows={rows} k={inner} stride={stride}{tags}", config


def sddmm_entries(arch: str) -> Iterator[SddmmEntry]:
    """Yield the SDDMM entries of `arch`."""
    for bits, _ in SDDMM_PAIRS:
        for rows, out in ((0, "float16"), (512, "int32")):
            yield _sddmm(arch, str(bits), str(bits), 8, out, rows)
    for left, right, v, out, rows, inner, stride in (
        ("8", "8", 8, "bfloat16", 512, 64, 32), ("8", "8", 8, "float32", 512, 128, 16),
        ("8", "8", 8, "int64", 512, 512, 64), ("8", "8", 1, "float16", 512, 64, 32),
        ("8", "8", 16, "float16", 512, 128, 32), ("8", "8", 32, "float16", 0, 256, 64), ("u8", "8", 8, "float16", 512, 256, 32),
        ("16", "8", 8, "float16", 512, 64, 32), ("8", "4", 8, "float32", 0, 256, 32), ("4", "16", 8, "int64", 0, 512, 32),
        ("8", "8", 8, "float16", 0, 40000, 32),
        ("float16", "float16", 8, "float16", 512, 256, 32), ("bfloat16", "e5m2", 8, "bfloat16", 0, 256, 32),
        ("e4m3", "e4m3", 8, "float32", 0, 64, 16),
    ):  # fmt: skip
        yield _sddmm(arch, left, right, v, out, rows, inner, stride)
    sampled = SddmmConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "float16", stages=1)
    yield "sddmm/gather L8-R8 without prefetch", sampled
    if arch == "sm_80":
        yield _sddmm(arch, "4", "4", 8, "float16", 0, atom="int4_as_int8_m16n8k32")
