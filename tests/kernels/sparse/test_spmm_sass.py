"""Machine code of the products' kernels, compiled without a GPU: the instructions that were meant, nothing spilled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from cute_kernels.catalog import default_configs
from cute_kernels.dtypes import ElementType, Integer
from cute_kernels.jit import Binary
from cute_kernels.machine import Machine, Problem, ProblemTypes
from cute_kernels.sddmm.config import SampleConfig
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.sddmm.heuristics import SddmmKernel, choose_sddmm
from cute_kernels.sddmm.panel import SddmmPanelConfig
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import SpmmKernel, choose_spmm
from cute_kernels.spmm.panel import PanelConfig
from cute_kernels.spmm.resident import ResidentConfig
from tests.helpers import disassemble

pytest.importorskip("cuda.core")

Config = SpmmKernel | SddmmKernel
OTHERS = ("sm_86", "sm_89", "sm_100a", "sm_120a")


def few(arch: str) -> Iterator[Config]:
    """A gather, an SDDMM and, where there are panels, a panel kernel; 8-bit, 4-bit and 16 x 8 bits."""
    here = Machine(arch, 100)
    yield choose_spmm(
        ProblemTypes(8, Integer(8, True), Integer(8, True), "float16"), here, Problem(4096, 4096, 410 * 4096, 512, 512)
    )
    yield choose_spmm(
        ProblemTypes(4, Integer(16, True), Integer(8, False), "float32"), here, Problem(32, 4096, 410 * 32, 512, 512)
    )
    yield choose_sddmm(ProblemTypes(8, Integer(4, True), Integer(4, True), "int32"), here, stride=32, inner=256)


def of_few_columns(arch: str) -> Iterator[Config]:
    """By many vector rows and by few."""
    for left, right, n, rows in (
        (8, 8, 16, 1792),
        (8, 8, 64, 1792),
        (16, 8, 16, 1792),
        (4, 4, 32, 1792),
        (8, 8, 16, 64),
    ):
        kind = ProblemTypes(8, Integer(left, True), Integer(right, True), "float16")
        yield choose_spmm(kind, Machine(arch, 132), Problem(rows, 4096, 410 * rows, 512, n))


def transposed(arch: str) -> Iterator[Config]:
    """What a layer of few and of many tokens runs."""
    for n, per_row in ((16, 410), (512, 410), (1024, 410), (4096, 410), (4096, 2048)):
        kind = ProblemTypes(8, Integer(8, True), Integer(8, True), "float16")
        problem = Problem(512, 4096, per_row * 512, per_row, n)
        yield choose_spmm(kind, Machine(arch, 132), problem, transposes=True)
    for left, right in ((Integer(8, False), Integer(8, True)), (Integer(16, True), Integer(8, True)),
                        (Integer(8, True), Integer(4, True)), (Integer(4, True), Integer(4, True))):  # fmt: skip
        problem = Problem(512, 4096, 410 * 512, 410, 4096)
        yield choose_spmm(ProblemTypes(8, left, right, "bfloat16"), Machine(arch, 132), problem, transposes=True)


CASES = [
    (config, arch)
    for arch, configs in (
        ("sm_90a", [*default_configs(), *of_few_columns("sm_90a"), *transposed("sm_90a")]),
        ("sm_80", default_configs(arch="sm_80")),
        *((arch, few(arch)) for arch in OTHERS),
    )
    for config in dict.fromkeys(configs)
]


# Compilers for 8.x place a slow path for a diverged warp beside a shuffle or barrier, and call it; it never runs here. An
# emulated instruction is a call too, of another name.
_DIVERGED = re.compile(r"\$__internal_\d+_\$__cuda_sm70_(?:warpsync|shflsync)\w*|\.L_x_\d+")


def clean_sass(binary: Binary) -> str:
    """SASS, after checking that nothing is spilled, on a stack or emulated."""
    sass = disassemble(binary.code)
    assert not re.search(r"\b(?:LDL|STL)\b", sass), f"{binary.title} for {binary.arch} uses local memory"
    if binary.usage is not None:  # some linkers tell nothing of it
        assert binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    called = re.findall(r"\bCALL\S*\s+`?\(?([^)\s;]+)", sass)
    strange = {name for name in called if not _DIVERGED.fullmatch(name) or int(binary.arch[3:5]) >= 90}
    assert not strange, f"{binary.title} for {binary.arch} calls {sorted(strange)}"
    return sass


def digit_signs(number: ElementType, one_sign: bool = False) -> list[bool]:
    """Signs of the digits of an integer; stacked digits share the top one's."""
    return [number.signed] if number.bits <= 8 else [number.signed and one_sign, number.signed]


def expected_mmas(config: Config) -> set[str]:
    """Mnemonics of the digit products: the dense operand, or Y, is the instruction's first one."""
    if isinstance(config, SampleConfig):
        first, second = digit_signs(config.y), digit_signs(config.x)
    else:
        first = digit_signs(config.b)
        second = digit_signs(config.a, config.has_fused_digits)
    shape, letter = "".join(map(str, config.entry.shape)), {True: "S", False: "U"}
    width = config.entry.mma_bits
    return {f"IMMA.{shape}.{letter[x]}{width}.{letter[y]}{width}" for x in first for y in second}


# Two thirds of the compilations wait for make test-long, and more for the chips that nothing runs on.
@pytest.mark.parametrize(
    ("config", "arch"),
    [
        pytest.param(
            config,
            arch,
            id=f"{arch}-{config.name}",
            marks=[pytest.mark.long] * (i % (3 if arch == "sm_90a" else 6) > 0),
        )
        for i, (config, arch) in enumerate(CASES)
    ],
)
def test_the_kernel_is_made_of_the_instructions_that_were_meant(
    config: Config, arch: str, binaries: dict[tuple[Config, str], Future[Binary]]
) -> None:
    binary = binaries[config, arch].result()
    sass = clean_sass(binary)
    assert set(re.findall(r"IMMA\.\w+\.\w+\.\w+", sass)) == expected_mmas(config)
    panel, resident = isinstance(config, (PanelConfig, SddmmPanelConfig)), isinstance(config, ResidentConfig)
    assert ("UTMALDG.2D" in sass) == panel and ("UBLKCP" in sass) == resident and ("SYNCS" in sass) == panel | resident
    assert bool(re.search(r"LDGSTS\.E\.BYPASS\S*\.128", sass)) == (
        not isinstance(config, PanelConfig) or config.a_stages > 0
    )
    assert bool(re.search(r"LDSM\.16\.MT88\.[24]", sass)) == (not isinstance(config, SampleConfig))
    assert binary.usage is None or binary.usage.registers * config.threads <= 65536
    if isinstance(config, (PanelConfig, ResidentConfig)) and arch == "sm_90a":
        # What a compiler adds where it does not see that a warp stays together: a quarter of the time, once.
        added = [block for block in blocks(sass) if "LDSM" in block and re.search(r"\b(?:R2UR|S2R|WARPSYNC)\b", block)]
        assert not added, added[0]


def blocks(sass: str) -> list[str]:
    """The basic blocks of a listing."""
    return re.split(r"^\s*\.L_x_\d+:|^.*\bBRA\b.*$", sass, flags=re.M)


def test_the_cases_have_every_kernel_and_the_4_bit_instruction_where_it_is_native() -> None:
    kinds = {(arch, type(config)) for config, arch in CASES}
    assert kinds >= {("sm_90a", PanelConfig), ("sm_90a", GatherConfig), ("sm_90a", SddmmConfig),
                     ("sm_90a", SddmmPanelConfig), ("sm_90a", ResidentConfig), ("sm_100a", PanelConfig),
                     *((arch, kernel) for arch in ("sm_80", *OTHERS) for kernel in (GatherConfig, SddmmConfig))}  # fmt: skip
    assert not any(
        isinstance(config, (PanelConfig, ResidentConfig, SddmmPanelConfig))
        for config, arch in CASES
        if arch in ("sm_80", "sm_86", "sm_89")
    )
    native = {arch: {mma for config, at in CASES if at == arch for mma in expected_mmas(config)} for _, arch in CASES}
    assert all(("IMMA.16864.S4.S4" in mmas) == (arch in ("sm_80", "sm_86", "sm_89")) for arch, mmas in native.items())
