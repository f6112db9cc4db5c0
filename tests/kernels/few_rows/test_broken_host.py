"""Breaches of the few-rows kernel's source that the emulation must see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cute_kernels.few_rows.decode import DecodeConfig
from cute_kernels.few_rows.product import FewRowsConfig, candidates
from cute_kernels.few_rows.product_int8 import FewRowsInt8Config
from tests.kernels.few_rows.host import ACTS, HostFewRows, has_compiler
from tests.kernels.few_rows.test_decode_host import check_operands, check_rounded
from tests.kernels.few_rows.test_dense_host import HostDecode
from tests.kernels.few_rows.test_dense_host import check as check_dense
from tests.kernels.few_rows.test_int8_host import check as check_int8
from tests.kernels.few_rows.test_product_host import check

pytestmark = [pytest.mark.skipif(not has_compiler(), reason="no g++"), pytest.mark.long]

FORMATS, PRODUCT, DENSE = "few_rows/formats.cuh", "few_rows/product.cuh", "few_rows/decode.cuh"
TILE_END = "scaled_gemm/small_m/kernel.cuh"
WAIT = "barrier_wait(gemm.empty(at.stage), at.parity ^ 1);"


def replaced(header: str, *changes: tuple[str, str]) -> Callable[[str, str], str]:
    """An edit of one header; each text must be there."""

    def edit(name: str, text: str) -> str:
        for old, new in changes if name == header else ():
            assert old in text, old
            text = text.replace(old, new)
        return text

    return edit


DECODERS = [
    # (format, act, what is in the source, what is compiled)
    ("int4", "bfloat16", "kPower<Half>(3 - 6)", "kPower<Half>(2 - 6)"),
    ("int4", "bfloat16", "kPower<Half>(127 - 4)", "kPower<Half>(127 - 3)"),
    ("int4", "float16", "0x64086408", "0x64096409"),
    ("int4", "float16", "0xD480D480", "0xD481D481"),
    ("int4", "float16", "0x6A)", "0x6E)"),
    ("e2m1", "bfloat16", "0x888", "0x880"),
    ("e2m1", "float16", "0x0E000E00", "0x0C000C00"),
    ("e2m3", "bfloat16", "0x00300030", "0x00100010"),
    ("e3m2", "float16", "4 - p % 8 * 2", "4 - p % 8 * 2 + p / 15"),
    ("e4m3", "float16", "0x7F00u", "0x7E00u"),
    ("int8", "bfloat16", "0x00800080", "0x00000000"),
    ("int8", "bfloat16", "kPower<Half>(7 - 6)", "kPower<Half>(6 - 6)"),
    ("int8", "float16", ", 0x64806480);  //", ", 0x64816481);  //"),
    ("mxfp4", "bfloat16", "0x4342 : 0x4140) * (1u << Half::kMantissa)", "0x4140 : 0x4140) * (1u << Half::kMantissa)"),
    ("nvfp4", "float16", "kLift - 9 - 9", "kLift - 9 - 8"),
    ("int4_g16", "bfloat16", "broadcast<Half, i % 2>", "broadcast<Half, 0>"),
    ("int8_g64_min", "float16", "broadcast<Half, 1>", "broadcast<Half, 0>"),
    ("int8_g128", "float16", "__float2half2_rn(scale)", "__float2half2_rn(scale * 1.001f)"),  # of 64 rows
    ("e4m3_g128", "bfloat16", "kLift == 0 && (Scale::kSum ||", "Scale::kSum || (kLift == 0 &&"),
]


@pytest.mark.parametrize("breach", DECODERS, ids=lambda breach: f"{breach[0]}-{breach[1]}-{breach[2]}")
def test_a_wrong_constant_of_a_decoder_is_seen(breach: tuple[str, str, str, str], tmp_path: Path) -> None:
    name, act, old, new = breach
    config = FewRowsConfig(name, 64 if name.endswith("g128") else 16, act, act)
    decoders = HostFewRows(tmp_path, (), [config], replaced(FORMATS, (old, new)))
    with pytest.raises(AssertionError):
        (check_rounded if config.rounds_scales else check_operands)(decoders, config)


DEEP, SHARED = candidates("int4_g128", 16)[3], candidates("mxfp4", 64)[0]
EIGHT = candidates("int4_g128", 8)[4]
PLAIN = candidates("int4_g32_min", 32)[0]  # of two units a stage
BREACHES = [
    # (config, header, changes of it, what is said, if not that the product is wrong)
    (PLAIN, PRODUCT, [(WAIT, WAIT.replace(" ^ 1", ""))], "waits for ever"),
    (PLAIN, PRODUCT, [(WAIT, "")], "waits for ever|more arrivals|not close"),
    (PLAIN, PRODUCT, [("barrier_wait(gemm.full(at.stage), at.parity);", "")], "not close|more arrivals"),
    (PLAIN, PRODUCT, [("finish_piece<0>(a);  //", "finish_piece<1>(a);  //"), ("    finish_piece<0>(b);\n    if", "    if")], None),
    (PLAIN, PRODUCT, [("if (u > 0) finish_piece<1>(a);", "")], "not close"),
    (PLAIN, PRODUCT, [("if (!kSum && u > 0) finish_piece<1>(b);", "")], "not close"),
    (DEEP, PRODUCT, [("finish_piece<0>(b);\n          add_scaled", "add_scaled")], "not close"),
    (DEEP, TILE_END, [("warp_group::named_barrier_sync(1, kAll);  // all", "//")], "not close"),
    (DEEP, PRODUCT, [("  if constexpr (C::kSplit > 1) cluster::sync();  // other", "  //")], "has ended"),
    (DEEP, PRODUCT, [("blocks * G::kBlockBytes);", "blocks * G::kBlockBytes - 16);")], "more bytes"),
    (DEEP, PRODUCT, [("4 * C::kGroups / C::kDepth);", "4 * C::kGroups);")], "waits for ever"),
    (DEEP, PRODUCT, [("kStages = C::kStages,", "kStages = C::kStages - 1,"), ("kStages % kDepth == 0,", "true,")], "more arrivals"),
    (EIGHT, PRODUCT, [("2 * s + lane / 8)", "2 * s + lane / 16)")], "not close"),
    (EIGHT, PRODUCT, [("(a[s + 1], b[2], b[3], sum)", "(a[s + 1], b[3], b[2], sum)")], "not close"),
    (EIGHT, PRODUCT, [("__uint_as_float(scales[r / 2][0])", "__uint_as_float(scales[0][0])")], "not close"),
    (EIGHT, PRODUCT, [("barrier_wait(gemm.full(at.stage), at.parity);", "")], "not close|more arrivals"),
    (EIGHT, PRODUCT, [("typename G::Accumulators partial = {};", "typename G::Accumulators& partial = accum;")], "not close"),
    (SHARED, PRODUCT, [("G::kXBytes + blocks *", "G::kXBytes + G::kBlocks *")], "waits for ever"),
    (SHARED, PRODUCT, [("present < G::kBlocks ? present : G::kBlocks", "G::kBlocks")], "beyond the weights"),
    (SHARED, PRODUCT, [(" && own < n) prefetch_l2", ") prefetch_l2")], "beyond the array"),
    (SHARED, PRODUCT, [("* 8 * (C::kGroups + 1),", "* 8 * (C::kGroups + 2),")], "setmaxnreg"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(BREACHES)))
def test_a_wrong_wait_count_or_size_is_seen(index: int, tmp_path: Path) -> None:
    config, header, changes, said = BREACHES[index]
    assert config.act in ACTS and config.out == "bfloat16"
    kernels = HostFewRows(tmp_path, [config], edit=replaced(header, *changes))
    torch.manual_seed(0)
    with pytest.raises((RuntimeError, AssertionError), match=said):
        for late in (0, 1, 2, 3):
            for seed in range(3):
                check(kernels, config, "bfloat16", (5, 77, 9300 if config in (DEEP, EIGHT) else 3000), late, seed)


QUAD = "device/quad.cuh"
DENSE_BREACHES = [
    # (format, what is in the source, what is compiled, what is said)
    ("int4_g32", "upper ? x[i] : x[i | bit], bit", "upper ? x[i] : x[i | bit], 3 - bit", "another weight"),
    ("int8_g16_min", "if (upper) x[i] = theirs;\n      else x", "x", "another weight"),
    ("e4m3", "const bool upper = t & bit;", "const bool upper = t & 1;", "another weight"),
    ("nvfp4", "8 * t < left", "8 * t < left + 8", "outside"),
    ("mxfp4", "present ? int(columns - column) : 0", "int(columns - column)", "outside"),
    (
        "int4_g128",
        "first = block * kUnitRows + threadIdx.x / 32 % 4 * 16",
        "first = block * kUnitRows",
        "another weight",
    ),
    ("int8_g128", "scale *= __uint_as_float(scales[row][i]);", "{}", "another weight"),
    (
        "e4m3_g128",
        "scale *= __uint_as_float(scales[row][i]);",
        "scale = __uint_as_float(scales[row][i]);",
        "another weight",
    ),
    ("int8", " + threadIdx.x / 128;", ";", "another weight"),
]


@pytest.mark.parametrize("index", range(len(DENSE_BREACHES)))
def test_a_wrong_exchange_or_end_is_seen(index: int, tmp_path: Path) -> None:
    name, old, new, said = DENSE_BREACHES[index]
    config = DecodeConfig(name, "float16")
    kernels = HostDecode(tmp_path, [config], replaced(QUAD if index < 3 else DENSE, (old, new)))
    with pytest.raises((RuntimeError, AssertionError), match=said):
        check_dense(kernels, config, (77, 300))


INT8_PRODUCT = "few_rows/product_int8.cuh"
INT8, INT8_ROWS = FewRowsInt8Config("int4_g128", 32, groups=4), FewRowsInt8Config("int4", 16, depth=2, split=2)
INT8_BREACHES = [
    # (config, what is in the source, what is compiled, what is said)
    (INT8, "warpgroup_wait<1>();", "warpgroup_wait<2>();", "not close"),
    (INT8, "  warpgroup_wait<0>();\n  add(G::kSums - 1);", "  add(G::kSums - 1);", None),
    (INT8, "<< 4 & 0xF0F0F0F0", "<< 4 & 0xF0F0F0E0", "not close"),
    (INT8, "group_scale<C>(scales[u % 2][1], group)", "group_scale<C>(scales[u % 2][0], group)", "not close"),
    (INT8, "{group_scale<C>(scales[u % 2][0]", "{group_scale<C>(scales[0][0]", "not close"),
    (INT8, "if (lane == 0) barrier_arrive(gemm.empty(at.stage));", "", "waits for ever"),
    (INT8_ROWS, "stage, u, 0, 4, false, sums);", "stage, u, 0, 4, u == 0, sums);", "not close"),
    (INT8_ROWS, "  warpgroup_wait<0>();\n  CUTE_UNROLL", "  CUTE_UNROLL", None),
    (INT8_ROWS, "at.skip(depth);\n  for", "for", "not close|waits for ever|more arrivals"),
]


@pytest.mark.parametrize("index", range(len(INT8_BREACHES)))
def test_a_wrong_product_of_int8_rows_is_seen(index: int, tmp_path: Path) -> None:
    config, old, new, said = INT8_BREACHES[index]
    kernels = HostFewRows(tmp_path, [config], edit=replaced(INT8_PRODUCT, (old, new)))
    with pytest.raises((RuntimeError, AssertionError), match=said):
        for late in (0, 1, 2, 3):
            for seed in range(3):
                check_int8(kernels, config, "bfloat16", (20, 100, 9300), late, seed)
