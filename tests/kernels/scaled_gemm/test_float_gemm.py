"""The dense float product on the CPU, what is refused, and which kernel a shape takes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import floats
from cute_kernels.floats import FORMATS
from cute_kernels.scaled_gemm import api
from cute_kernels.scaled_gemm.api import FloatOperand, check, explain_scaled_gemm, scaled_gemm
from cute_kernels.scaled_gemm.config import OperandFormat, ScaledGemmConfig, candidates, choose
from cute_kernels.scaled_gemm.cuda import check_reads, choose_config
from cute_kernels.scaled_gemm.dequantize import dequantize_first, dequantized_format

KINDS = [
    *(OperandFormat(name) for name in FORMATS), OperandFormat("e2m1", 16, "e4m3"), OperandFormat("e4m3", 32, "ue8m0"), OperandFormat("e5m2", 32, "ue8m0"),
    OperandFormat("e4m3", tiles=True), OperandFormat("e2m1", tiles=True),
]  # fmt: skip
PAIRS = [(a, b) for a in KINDS for b in KINDS]
LINES = OperandFormat("e4m3", 128, "float32")


def operand(kind: OperandFormat, rows: int, k: int, seed: int = 0) -> FloatOperand:
    """Finite codes of all values, and scales."""
    generator = torch.Generator().manual_seed(seed)
    known = floats.decode(torch.arange(1 << kind.bits).to(torch.uint8), kind.dtype).isfinite().nonzero().flatten()
    codes = known[torch.randint(len(known), (rows, k), generator=generator)].to(torch.uint8)
    scales: dict[str, Any] = {}
    if kind.block:
        low, high = (120, 135) if kind.scale == "ue8m0" else (0, 0x7F)
        blocks = torch.randint(low, high, (rows, -(-k // kind.block)), generator=generator).to(torch.uint8)
        blocks = torch.rand(blocks.shape, generator=generator) + 0.5 if kind.scale == "float32" else blocks
        scales = {"blocks": blocks, "block": kind.block, "scale_dtype": kind.scale}
    if kind.tiles:
        scales = {"tiles": torch.rand(-(-rows // 128), -(-k // 128), generator=generator) + 0.5}
    return FloatOperand(floats.pack(codes, kind.dtype), kind.dtype, k, **scales)


def real(x: FloatOperand) -> Tensor:
    """The operand by its definition, element by element."""
    codes = floats.unpack(x.packed_data, x.k, x.dtype).tolist()
    values = floats.float_format(x.dtype).values
    factors = [] if x.block == 128 else floats.float_format(x.scale_dtype or "e4m3", scale=True).values
    found = torch.zeros(x.rows, x.k, dtype=torch.float64)
    for row in range(x.rows):
        for k in range(x.k):
            found[row, k] = values[codes[row][k]]
            if x.blocks is not None:
                own = x.blocks[row, k // x.block]
                found[row, k] *= float(own) if x.block == 128 else factors[int(own)]
            if x.tiles is not None:
                found[row, k] *= float(x.tiles[row // 128, k // 128])
    return found


@pytest.mark.parametrize("dtype", ["e2m1", "e2m3", "e3m2"])
def test_block_scales_fold_into_e4m3_exactly_or_not_at_all(dtype: str) -> None:
    x = operand(OperandFormat(dtype, 32, "ue8m0"), 60, 150)
    assert x.blocks is not None
    for first, count in ((0, 256), (100, 4), (0, 3), (250, 4)):  # of scales: far apart, and near each other
        x.blocks.copy_(torch.randint(first, first + count, x.blocks.shape, generator=torch.Generator().manual_seed(1)))
        x.packed_data[5] = 0
        for scale in (None, torch.rand(60) + 0.5):
            given = replace(x, scale=scale)
            found = given.folded()
            assert (found is None) == (count == 256)
            if found is not None:
                assert found.format == OperandFormat("e4m3") and found.scale is not None
                rows = torch.ones(60) if scale is None else scale
                expected = given.values(torch.float64) * rows.double()[:, None]
                assert torch.equal(found.values(torch.float64) * found.scale.double()[:, None], expected)
    wide = replace(x, blocks=None, block=0, scale_dtype="")
    assert wide.folded() is wide


def test_what_a_block_scale_spans_in_e4m3() -> None:
    packed = floats.pack(floats.encode(torch.tensor([6.0, 0.5]).repeat_interleave(32).expand(2, 64), "e2m1"), "e2m1")
    for apart in range(20):
        blocks = torch.tensor([[127, 127 - apart], [127 - apart, 127]], dtype=torch.uint8)
        found = FloatOperand(packed, "e2m1", k=64, blocks=blocks, block=32, scale_dtype="ue8m0").folded()
        assert (found is None) == (apart > 14), apart  # 6 becomes 384, and 0.5 * 2^-14 the smallest e4m3


@pytest.mark.parametrize(
    ("values", "blocks", "scale", "folds"),
    [
        ((6.0, 6.0), (254, 254), None, True),
        ((1.0, 1.0), (0, 0), None, True),
        ((6.0, 1.0), (254, 0), None, False),  # the second is 2^-254 of the first
        ((0.0, 1.0), (254, 0), None, True),
        ((1.0, 1.0), (127, 255), None, False),  # NaN
        ((0.0, 0.0), (255, 127), None, False),
        ((1.0, 1.0), (0, 0), 1.3 * 2.0**-20, False),  # the product of scales loses bits, or is infinite
        ((6.0, 6.0), (250, 250), 2.0**20, False),
        ((6.0, 6.0), (250, 250), 2.0**-20, True),
    ],
)
def test_folding_is_exact_at_the_ends_of_the_range(
    values: tuple[float, float], blocks: tuple[int, int], scale: float | None, folds: bool
) -> None:
    packed = floats.pack(floats.encode(torch.tensor(values).repeat_interleave(32)[None], "e2m1"), "e2m1")
    x = FloatOperand(packed, "e2m1", 64, None if scale is None else torch.tensor([scale]),
                     torch.tensor([blocks], dtype=torch.uint8), 32, "ue8m0")  # fmt: skip
    found = x.folded()
    assert (found is not None) == folds
    if found is not None and found.scale is not None:
        expected = x.values(torch.float64) * (1.0 if scale is None else torch.tensor([scale]).double())
        assert torch.equal(found.values(torch.float64) * found.scale.double(), expected)


def test_scales_of_128_values_multiply_sums_of_bytes() -> None:
    plain = OperandFormat("e5m2")
    tiled, packed = plain._replace(tiles=True), OperandFormat("e2m1")
    for b, read in ((plain, plain), (tiled, tiled), (packed, OperandFormat("e4m3"))):  # packed ones are decoded before
        found = candidates(LINES, b, "sm_90a")
        assert all(config.promote and not config.uses_bfloat16 and config.tile_k == 128 for config in found)
        few = choose_config(8, 512, 512, LINES, b, "sm_90a")
        assert isinstance(few, ScaledGemmConfig) and replace(few, adjacent=0) in found
        assert few.adjacent == (4 if few.split == 1 and not few.decoders else 0)
        large = choose_config(8192, 8192, 8192, LINES, b, "sm_90a")
        assert isinstance(large, ScaledGemmConfig) and (large.a, large.b) == (LINES, read)


def test_a_config_of_other_formats_is_an_error() -> None:
    plain, tiles, mx = OperandFormat("e4m3"), OperandFormat("e4m3", tiles=True), OperandFormat("e2m1", 32, "ue8m0")
    for given, read, fits in (
        ((LINES, tiles), (LINES, tiles), True),
        ((LINES, tiles), (plain, tiles), False),  # the scales would be lost
        ((plain, tiles), (plain, plain), False),
        ((plain, mx), (OperandFormat("bfloat16"), OperandFormat("bfloat16")), True),
        ((LINES, plain), (OperandFormat("bfloat16"), OperandFormat("bfloat16")), False),
        ((LINES._replace(dtype="e2m1"), plain), (LINES, plain), True),
        ((plain, plain), (OperandFormat("e5m2"), plain), False),
    ):
        a, b = operand(given[0], 20, 300), operand(given[1], 300, 300)
        problem = check(a, b, 1.0, 0.0, None, None, None, torch.float32, False)
        wide, narrow = (replace(candidates(*read, "sm_90a")[0], tile_n=tile_n) for tile_n in (256, 128))
        if fits:
            check_reads(problem, narrow)
        else:
            with pytest.raises(ValueError, match=r"^config must read \S+ as [ab], got "):
                check_reads(problem, narrow)
        if fits and given[1].tiles:
            with pytest.raises(ValueError, match=r"^config must have tile_n 128 for .* b of 300 rows, got 256"):
                check_reads(problem, wide)


@pytest.mark.parametrize(
    ("a", "b", "arch", "message"),
    [
        (
            OperandFormat("e4m3"),
            LINES,
            "sm_90a",
            "^b must have no float32 scales of 128 values on a GPU, got e4m3x128float32",
        ),
        (
            LINES,
            OperandFormat("e2m1", 32, "ue8m0"),
            "sm_90a",
            "^b must have no block scales where a .*, got e2m1x32ue8m0",
        ),
        (LINES, OperandFormat("e4m3"), "sm_80", "^a must have no float32 scales .* but on sm_90a, got .* on sm_80"),
    ],
)
def test_other_scales_of_128_values_are_refused_on_a_gpu(
    a: OperandFormat, b: OperandFormat, arch: str, message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        choose_config(512, 512, 512, a, b, arch)


@pytest.mark.parametrize("kind", [*KINDS, LINES], ids=lambda kind: kind.name)
def test_values_are_those_of_the_definition(kind: OperandFormat) -> None:
    x = operand(kind, 130, 37 if kind.block < 128 else 137)
    assert x.format == kind
    assert torch.equal(x.values(torch.float64), real(x))


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=lambda kind: kind.name)
def test_every_pair_is_multiplied(a: OperandFormat, b: OperandFormat) -> None:
    m, k, n = 17, 150, 23
    x, y = operand(a, m, k, 1), operand(b, n, k, 2)
    left, right = x.values(torch.float64), y.values(torch.float64)
    truth, size = left @ right.t(), left.abs() @ right.abs().t()
    assert torch.equal(scaled_gemm(x, y, out_dtype=torch.float64), truth)
    assert bool(((scaled_gemm(x, y).double() - truth).abs() <= 2.0**-19 * size).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_scales_bias_and_c_enter_once(dtype: torch.dtype) -> None:
    m, k, n = 19, 70, 33
    generator = torch.Generator().manual_seed(1)
    a, b = operand(OperandFormat("e2m1"), m, k, 1), operand(OperandFormat("e2m3"), n, k, 2)
    left, right, bias = (torch.randn(size, generator=generator) for size in (m, n, n))
    c = torch.randn(m, n, generator=generator).half()
    sums = a.values(torch.float64) @ b.values(torch.float64).t()
    for rows, columns in ((left, right), (left[0], None), (None, right[0]), (left, right[1])):
        truth = 0.25 * sums
        if rows is not None:
            truth = truth * (rows.double()[:, None] if rows.dim() else rows.double())
        if columns is not None:
            truth = truth * columns.double()
        whole = truth - 2 * c.double() + bias.double()
        frame = torch.full((m + 2, n + 4), 7.0, dtype=dtype)
        out = frame[1:-1, 2:-2]
        x, y = replace(a, scale=rows), replace(b, scale=columns)
        got = scaled_gemm(x, y, alpha=0.25, beta=-2.0, c=c, bias=bias, out=out, out_dtype=dtype)
        assert got is out
        bound = torch.finfo(dtype).eps * whole.abs() + 2.0**-19 * (truth.abs() + 4 * c.double().abs() + bias.abs())
        assert bool(((out.double() - whole).abs() <= bound + 1e-4).all())
        assert float(frame.sum() - out.sum()) == pytest.approx(7.0 * (frame.numel() - out.numel()), rel=1e-2)


def test_empty_products() -> None:
    empty, bias = FloatOperand(torch.zeros(4, 0, dtype=torch.uint8), "e2m1", 0), torch.arange(4.0)
    assert torch.equal(scaled_gemm(empty, empty, bias=bias), bias.expand(4, 4))
    none = FloatOperand(torch.zeros(0, 3, dtype=torch.uint8), "e2m1", 6)
    assert scaled_gemm(none, none).shape == (0, 0)
    assert explain_scaled_gemm(none, none).kernel == "torch.matmul"


def test_old_names_warn() -> None:
    x = operand(OperandFormat("e4m3"), 4, 6)
    for old, new in (("gemm_floats", scaled_gemm), ("explain_gemm_floats", explain_scaled_gemm)):
        with pytest.warns(DeprecationWarning, match=f"{old} is deprecated, use {new.__name__}"):
            assert getattr(api, old) is new
    with pytest.warns(DeprecationWarning, match="use packed_data"):
        assert x.codes is x.packed_data
    with pytest.raises(AttributeError, match="has no attribute 'gemm_float'"):
        _ = api.gemm_float


CODES = torch.zeros(4, 6, dtype=torch.uint8)
X, Y = FloatOperand(CODES, "e4m3", 6), FloatOperand(CODES[:, :3], "e2m1", 6)
BLOCKS = torch.zeros(4, 1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: FloatOperand(CODES, "e4m4", 6), ValueError, "dtype must be one of e5m2, e4m3, e3m2, e2m3, e2m1, got 'e4m4'"),
        (lambda: FloatOperand(CODES.int(), "e4m3", 6), TypeError, "packed_data must be uint8, got torch.int32"),
        (lambda: FloatOperand(CODES, "e2m1", 6), ValueError, "packed_data must have the shape (R, 3) for k=6 of e2m1, got (4, 6)"),
        (lambda: replace(X, scale=torch.ones(5)), ValueError, "scale must have the shape (4,) or (), got (5,)"),
        (lambda: replace(X, scale=torch.ones(4).double()), TypeError, "scale must be one of torch.float32, "),
        (lambda: replace(X, blocks=BLOCKS), ValueError, "blocks, block and scale_dtype must be given together, got block 0 and scale_dtype ''"),
        (lambda: replace(X, blocks=BLOCKS, block=8, scale_dtype="ue8m0"), ValueError, "block must be one of (16, 32, 128), got 8"),
        (lambda: replace(X, blocks=BLOCKS, block=128, scale_dtype="e4m3"), ValueError, "scale_dtype must be float32 for a block of 128 and only then, got block 128 and scale_dtype 'e4m3'"),
        (lambda: replace(X, blocks=BLOCKS, block=128, scale_dtype="float32"), TypeError, "blocks must be float32, got torch.uint8"),
        (lambda: replace(X, blocks=BLOCKS, block=16, scale_dtype="e5m2"), ValueError, "scale_dtype must be one of ue8m0, e4m3, float32, got 'e5m2'"),
        (lambda: replace(X, blocks=BLOCKS[:2], block=16, scale_dtype="e4m3"), ValueError, "blocks must have the shape (4, 1), got (2, 1)"),
        (lambda: replace(X, tiles=torch.ones(2, 1)), ValueError, "tiles must have the shape (1, 1), got (2, 1)"),
        (lambda: replace(X, tiles=torch.ones(1, 1).half()), TypeError, "tiles must be float32, got torch.float16"),
        (lambda: replace(X, tiles=torch.ones(1, 1), blocks=BLOCKS, block=16, scale_dtype="e4m3"), ValueError, "tiles must be None with blocks"),
        (lambda: scaled_gemm(X, CODES), TypeError, "b must be a FloatOperand, got Tensor"),
        (lambda: scaled_gemm(X, FloatOperand(CODES, "e2m1", 12)), ValueError, "b must have k=6 to match a, got k=12"),
        (lambda: scaled_gemm(X, Y, beta=1.0), ValueError, "c must be given for beta 1.0"),
        (lambda: scaled_gemm(X, Y, beta=1.0, c=torch.ones(4, 5)), ValueError, "c must have the shape (4, 4), got (4, 5)"),
        (lambda: scaled_gemm(X, Y, bias=torch.ones(3)), ValueError, "bias must have the shape (4,), got (3,)"),
        (lambda: scaled_gemm(X, Y, out_dtype=torch.int32), TypeError, "out_dtype on cpu must be one of torch.float16, torch.bfloat16, torch.float32, torch.float64, got torch.int32"),
        (lambda: scaled_gemm(X, Y, out=torch.ones(4, 5)), ValueError, "out must have the shape (4, 4), got (4, 5)"),
        (lambda: scaled_gemm(FloatOperand(CODES.to("meta"), "e4m3", 6), Y), ValueError, "b must be on meta as a is, got cpu"),
        (lambda: scaled_gemm(*[FloatOperand(CODES.to("meta"), "e4m3", 6)] * 2), NotImplementedError, "a must be on a CPU or a CUDA device, got meta"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=re.escape(match)):
        call()


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_120a"])
def test_configs_fit_the_chip(arch: str) -> None:
    shared = {"sm_80": 163, "sm_89": 99, "sm_90a": 227, "sm_120a": 99}[arch] * 1024
    for a, b in PAIRS:
        for fast, decoded in product((False, True), repeat=2):
            left, right = (dequantized_format(kind, a.block > 0 or b.block > 0) if decoded else kind for kind in (a, b))
            configs = candidates(left, right, arch, fast=fast) if arch == "sm_90a" or not decoded else []
            assert len({config.name for config in configs}) == len(configs)
            for config in configs:
                assert config.smem_bytes <= shared and config.stages >= 2
                assert config.resident * (config.smem_bytes + 1024) <= 228 * 1024
                check_config(config, left, right, arch)


def check_config(config: ScaledGemmConfig, a: OperandFormat, b: OperandFormat, arch: str) -> None:
    assert (config.kernel == "wgmma") == (arch == "sm_90a")
    assert config.promote or not (a.tiles or b.tiles), "factors of tiles need sums of tiles"
    if config.kernel == "wgmma":
        assert config.uses_bfloat16 == bool(a.block or b.block or "bfloat16" in (a.dtype, b.dtype))
        assert (config.decoders > 0) == (config.is_decoded(a) or config.is_decoded(b))
        assert config.tile_m == 64 * config.groups and (config.packed_stages >= 2 or not config.decoders)
        # A decoder that is ahead must not come to a packed stage before another's copies of the round before have landed:
        # that round is known to be over if consumers have freed the stage that its last K tile was decoded to.
        turns = config.decoders == 0 or config.packed_stages % config.decoders == 0
        assert turns or config.packed_stages >= config.decoders + config.stages
        assert config.tile_n in (64, 128) or not config.decoders
        assert config.tile_n != 192 or not config.has_factors, "a scale would be of columns of two tiles"


def test_the_exponent_bias_factor_restores_what_decoding_leaves_out() -> None:
    # e2m1 and e2m3 have a bias of 1, e3m2 of 3, and e4m3, in whose bits they are, of 7.
    for dtype, factor in (("e2m1", 64.0), ("e2m3", 64.0), ("e3m2", 16.0), ("e4m3", 1.0), ("e5m2", 1.0)):
        a, b, blocks = OperandFormat(dtype), OperandFormat("e2m1"), OperandFormat("e2m1", 32, "ue8m0")
        for found in ((a, b), (dequantized_format(a, False), dequantized_format(b, False))):
            assert candidates(*found, "sm_90a")[0].exponent_bias_factor(a, b) == factor * 64
        for found in ((a, blocks), (dequantized_format(a, True), dequantized_format(blocks, True))):
            assert candidates(*found, "sm_90a")[0].exponent_bias_factor(a, blocks) == 1.0


def test_the_choice_fits_the_shape() -> None:
    a, b = OperandFormat("e4m3"), OperandFormat("e2m1")
    known = {config.name for config in candidates(a, b, "sm_90a")}
    for m, n, k in ((1, 1, 1), (1, 100_000, 64), (100_000, 1, 64), (4096, 4096, 4096), (129, 257, 100_000)):
        for num_sms in (132, 78, 2):
            config = choose(m, n, k, a, b, "sm_90a", num_sms=num_sms)
            assert config.name in known
            if config.split > 1:
                assert config.tiles(m, n) * config.split <= num_sms and k >= 512 * config.split
    assert choose(4096, 4096, 4096, a, b, "sm_90a").tile_m == 128
    assert choose(64, 4096, 4096, a, b, "sm_90a").split == 2 and choose(64, 4096, 2048, a, b, "sm_90a").split == 1
    assert choose(16, 28672, 8192, a, b, "sm_90a").tile_m == 64
    assert choose(8, 8, 8, a, b, "sm_90a", out="float16", source="float32").source == "float32"


def test_a_tile_has_as_many_columns_as_take_the_least_time() -> None:
    a = OperandFormat("e4m3")
    for m, n, columns in (
        (4096, 4096, 256),
        (8192, 8192, 192),
        (1024, 4096, 256),
        (512, 28672, 128),
        (256, 14336, 256),
    ):
        assert choose(m, n, 4096, a, a, "sm_90a").tile_n == columns, (m, n)
    for m in (4096, 8192):
        assert choose(m, m, 4096, OperandFormat("bfloat16"), OperandFormat("bfloat16"), "sm_90a").tile_n == 256
        assert choose(m, m, 4096, a, a, "sm_90a", fast=True).tile_n == 256
    tiled = OperandFormat("e4m3", tiles=True)
    assert choose(4096, 4096, 4096, tiled, tiled, "sm_90a").tile_n == 256
    # A tile of 256 columns reads two scales of b; the second of the last tile does not exist for an odd number of them.
    for n, columns in ((4000, 256), (3968, 128), (3969, 256)):
        assert choose(8192, n, 4096, tiled, tiled, "sm_90a").tile_n == columns, n
        assert choose(8192, n, 4096, LINES, a, "sm_90a").tile_n == 256


def test_operands_of_many_rows_are_decoded_before_the_product() -> None:
    # As an H200 had it: the faster way in each case.
    e4m3, e2m1, e2m3, mx = (
        OperandFormat("e4m3"),
        OperandFormat("e2m1"),
        OperandFormat("e2m3"),
        OperandFormat("e4m3", 32, "ue8m0"),
    )
    many, few = (4096, 4096, 4096), (256, 14336, 4096)
    assert dequantize_first(*many, e4m3, e4m3) == (e4m3, e4m3)
    assert dequantize_first(*many, e4m3, e2m1) == dequantize_first(*many, e2m3, e2m1) == (e4m3, e4m3)
    assert dequantize_first(*few, e4m3, e2m1) == (e4m3, e2m1)
    assert dequantize_first(*few, e2m3, e2m3) == (e4m3, e4m3)
    assert dequantize_first(*many, mx, e2m1) == (OperandFormat("bfloat16"), OperandFormat("bfloat16"))
    assert dequantize_first(64, 28672, 8192, mx, mx) == (mx, mx)
    tiled = OperandFormat("e2m1", tiles=True)
    assert dequantize_first(*many, tiled, mx) == (OperandFormat("bfloat16", tiles=True), OperandFormat("bfloat16"))
    taken = choose_config(*many, tiled, e2m1, "sm_90a")
    assert isinstance(taken, ScaledGemmConfig) and (taken.a, taken.b) == (OperandFormat("e4m3", tiles=True), e4m3)
    assert taken.decoders == 0 and choose_config(*many, tiled, e2m1, "sm_80").a == tiled


def test_the_example_draws_all_pairs(tmp_path: Path) -> None:
    picture = tmp_path / "pairs.png"
    script = Path(__file__).resolve().parents[3] / "examples" / "mixed_precision_gemm.py"
    command = [sys.executable, str(script), "--size", "64", "--out", str(picture)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    errors = re.findall(r"e2m1 \D*(0\.\d+)\D+(0\.\d+)\D+(0\.\d+)\D+(0\.\d+)\D+(0\.\d+)", said)
    assert len(errors) == 2 and float(errors[0][4]) > float(errors[0][1]) > 0.1, said
    assert picture.exists() == (importlib.util.find_spec("matplotlib") is not None)
