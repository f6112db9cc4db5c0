"""The guard of the kernels' machine code: it covers every kernel, strikes names only, and sees a changed instruction."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cute_kernels.jit import toolchain
from tests.kernels import code_digests
from tests.kernels.code_digest_catalog import ARCHES, catalog
from tests.kernels.code_digests import (
    DIFFERENT,
    OTHER_TOOLCHAIN,
    Fact,
    committed,
    differences,
    digest,
    instruction_count,
    main,
    normalize,
    toolchain_change,
)

pytest.importorskip("cuda.core")

# Kernels with instructions of some architectures only; the others run on every architecture.
ONLY_ON = {
    "spmm_panel": {"sm_90a", "sm_100a"},
    "spmm_resident": {"sm_90a", "sm_100a"},
    "sddmm_panel": {"sm_90a", "sm_100a"},
    "attention_panel": {"sm_90a", "sm_100a"},
    "attention_blocks": {"sm_90a"},
    "attention_tiles": {"sm_90a"},
    "probe_box": {"sm_90a", "sm_100a"},
    "gemm_wgmma": {"sm_90a"},
    "probe_squares": {"sm_90a"},
    "compare_double": {"sm_90a"},
    "gemm_floats_wgmma": {"sm_90a"},
    "gemm_floats_few": {"sm_90a"},
    "gemm_floats_few_blocks": {"sm_90a"},
    "fold_floats": {"sm_90a"},
    "order_few_rows": {"sm_90a"},
    "few_rows_product": {"sm_90a"},
    "few_rows_int8": {"sm_90a"},
    "encode_turned": {"sm_90a", "sm_100a"},
    "encode_e4m3_rows": {"sm_90a", "sm_100a"},
    "encode_mxfp8_rows": {"sm_90a", "sm_100a"},
    "encode_e4m3_groups": {"sm_90a", "sm_100a"},
    "encode_nvfp4_rows": {"sm_90a", "sm_100a"},
    "gemm_floats_sm100": {"sm_100a"},
}
COMPILED = (
    "column order/default",
    "compress/offsets",
    "gemm/strided plane",
    "probe/sum_comparison float32 groups=1",
    "decode/e2m1 to 8 bits",
    "spmm/L8-R8 V=8 out=float16 rows=64 n=8",
)
LISTING = """
	.target	sm_90a

//--------------------- .debug_frame              --------------------------
	.section	.debug_frame,"",@progbits
        /*0000*/ 	.byte	0xff, 0xff

//--------------------- .nv.info                  --------------------------
	.section	.nv.info,"",@"SHT_CUDA_INFO"
        /*0004*/ 	.word	index@(_ZN8magicube5probeEv)

//--------------------- .nv.info._ZN8magicube5probeEv --------------------------
	.section	.nv.info._ZN8magicube5probeEv,"",@"SHT_CUDA_INFO"
        /*000a*/ 	.short	(.L_9 - .L_8)
        /*0012*/ 	.short	0x0088

//--------------------- .text._ZN8magicube5probeEv --------------------------
	.section	.text._ZN8magicube5probeEv,"ax",@progbits
        .type           _ZN8magicube5probeEv,@function
_ZN8magicube5probeEv:
	//## File "/elsewhere/probe.cuh", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;            /* 0x00000a00ff017b82 */
                                                                     /* 0x000fe20000000800 */
.L_x_44:
        /*0010*/              @!P1 BRA `(.L_x_44) ;                  /* 0x00000004006c9947 */
                                                                     /* 0x000fea0003800000 */
        /*0020*/                   CALL.REL.NOINC `($_ZN8magicube5probeEv$slow) ; /* 0x0000000000447944 */
                                                                     /* 0x000fea0003c00000 */

//--------------------- .nv.constant4 --------------------------
	.section	.nv.constant4,"a",@progbits
        /*0000*/ 	.dword	_ZN8magicube5tableE
        /*0008*/ 	.word	0x00000007
"""


@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_has_an_entry(arch: str) -> None:
    inner = r"[^()]*"
    for _ in range(3):  # nested parentheses
        inner = rf"(?:[^()]|\({inner}\))*"
    pattern = re.compile(rf"__global__\s+void\s+(?:__launch_bounds__\({inner}\)\s*)?(\w+)\s*\(")
    folders = [toolchain.KERNEL_HEADERS, Path(__file__).resolve().parents[2] / "benchmarks" / "harness"]
    headers = [re.sub(r"//.*", "", path.read_text()) for folder in folders for path in folder.rglob("*.cuh")]
    kernels = [name for text in headers for name in pattern.findall(text)]
    assert len(kernels) == sum(len(re.findall(r"\b__global__\b", text)) for text in headers)
    assert set(ONLY_ON) <= set(kernels)
    wanted = {name for name in kernels if arch in ONLY_ON.get(name, ARCHES)}
    units = [config.translation_unit(arch) for config in catalog(arch).values()]
    covered = {found[1] for unit in units if (found := re.search(r"(\w+)(?:<|$)", unit.kernel))}
    assert covered == wanted


@pytest.mark.parametrize("arch", ARCHES)
def test_the_committed_digests_have_the_entries_of_the_catalog(arch: str) -> None:
    configs, kernels = catalog(arch), committed(arch)["kernels"]
    assert kernels.keys() == configs.keys()
    launches = {key: (config.threads, config.smem_bytes) for key, config in configs.items()}
    assert {key: (fact["threads"], fact["smem"]) for key, fact in kernels.items()} == launches
    names = {key: getattr(config, "name", "") for key, config in configs.items()}
    assert {key: fact["name"] for key, fact in kernels.items()} == names


def test_compiled_kernels_have_the_committed_digests() -> None:
    if change := toolchain_change("sm_90a"):
        pytest.skip(f"the toolchain differs from the committed one: {change}")
    configs, kernels = catalog("sm_90a"), committed("sm_90a")["kernels"]
    found = digest({key: configs[key] for key in COMPILED}, "sm_90a")
    assert differences({key: kernels[key] for key in COMPILED}, found) == []


def test_names_and_comments_do_not_change_the_text() -> None:
    text = normalize(LISTING)
    assert not re.search(r"magicube|_ZN|probe|table|L_x|/elsewhere", text)
    renamed = LISTING.replace("_ZN8magicube5probeEv", "_ZN5house4gemm7measureEv").replace("5tableE", "6valuesE")
    renamed = renamed.replace(".L_x_44", ".L_x_7").replace("/elsewhere/probe.cuh", "/another/gemm/measure.cuh")
    assert renamed != LISTING and normalize(renamed) == text
    assert instruction_count(text) == 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LDC R1", "LDC R2"),
        ("c[0x0][0x28]", "c[0x0][0x30]"),
        ("@!P1 BRA", "@P1 BRA"),
        ("0x00000004006c9947", "0x00000004006c9948"),
        ("0x000fea0003c00000", "0x000fe20003c00000"),
        (".word	0x00000007", ".word	0x00000008"),
        (".short	0x0088", ".short	0x0090"),
    ],
)
def test_a_changed_instruction_constant_or_parameter_changes_the_text(old: str, new: str) -> None:
    assert LISTING.count(old) == 1
    assert normalize(LISTING.replace(old, new)) != normalize(LISTING)


def test_differences_name_the_key_and_what_changed() -> None:
    before: dict[str, Fact] = {"a": {"sass": "1", "registers": 8}, "b": {"sass": "2"}, "d": {"sass": "4"}}
    now: dict[str, Fact] = {"a": {"sass": "1", "registers": 9}, "c": {"sass": "3"}, "d": {"sass": "4"}}
    assert differences(before, now) == ["a: registers 8 -> 9", "b: missing from the catalog", "c: not committed"]


def test_the_exit_status_says_what_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    key = COMPILED[0]
    known = committed("sm_90a")
    changed = {"toolchain": known["toolchain"], "kernels": {key: {**known["kernels"][key], "sass": "0" * 16}}}
    same = {**known["kernels"][key]}
    monkeypatch.setattr(code_digests, "digest", lambda configs, arch, jobs: {key: same})
    monkeypatch.setattr(code_digests, "toolchain_change", lambda arch: "")
    monkeypatch.setattr(code_digests, "committed", lambda arch: changed)
    assert main(["--arch", "sm_90a", "--only", key]) == DIFFERENT
    assert f"{key}: sass 0000000000000000 -> {same['sass']}" in capsys.readouterr().out
    monkeypatch.setattr(code_digests, "toolchain_change", lambda arch: "nvrtc 13.0 -> 13.1")
    assert main(["--arch", "sm_90a", "--only", key]) == OTHER_TOOLCHAIN
    assert "nvrtc 13.0 -> 13.1" in capsys.readouterr().out
