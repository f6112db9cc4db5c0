"""Names of the sparse kernels' configs give the configs back, in a process that never chose them."""

import subprocess
import sys

import pytest

from cute_kernels.catalog import default_configs
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.sddmm.heuristics import sddmm_config
from cute_kernels.sddmm.panel import SddmmPanelConfig
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import spmm_config
from cute_kernels.spmm.panel import PanelConfig

OPERANDS = "s8_m16n8k32-v8-s8xs8-float16"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_every_config_comes_back_from_its_name(arch: str) -> None:
    configs = list(default_configs(all=True, arch=arch))
    assert len(configs) > 50
    for config in configs:
        sampled = isinstance(config, (SddmmConfig, SddmmPanelConfig))
        assert (sddmm_config if sampled else spmm_config)(config.name) == config


@pytest.mark.parametrize("name", [
    "spmm_gather-f16_m16n8k32-v4-e4m3xfloat16-float32-unstacked-unswizzled-b16s3w2r4-wide-fresh",
    "spmm_panel-s8_m16n8k32-v8-s8xu4-int64-b64t256s6x3w3r1c2a8-unordered",
])  # fmt: skip
def test_every_field_is_read(name: str) -> None:
    config = spmm_config(name)
    assert config.name == name
    if isinstance(config, GatherConfig):
        assert (config.tile_n_bytes, config.stages, config.warps, config.split_k_warps) == (16, 3, 2, 4)
        assert (config.int64_accum, config.a_just_written, config.swizzle, config.fuse_digits) == (
            True,
            True,
            False,
            False,
        )
    else:
        assert isinstance(config, PanelConfig)
        assert (config.cluster, config.a_stages, config.ordered, config.rows_per_warp) == (2, 8, False, 1)


@pytest.mark.parametrize("name", [
    "", "-", "nope", "spmm_gather", f"spmm_gather-{OPERANDS}", f"spmm_gather-{OPERANDS}-b64s4w4r1-b64s4w4r1",
    f"spmm_gather-{OPERANDS}-b64s4w4", f"spmm_gather-{OPERANDS}-b064s4w4r1", f"spmm_gather-{OPERANDS}-b64s4w4r1-narrow",
    "spmm_gather-s8_m16n8k32-v8-s8-float16-b64s4w4r1", "spmm_gather-s8_m16n8k32-v8-s9xs8-float16-b64s4w4r1",
    "spmm_gather-s8_m16n8k32-vx-s8xs8-float16-b64s4w4r1", f"sddmm-{OPERANDS}-k32b128s3w4",
])  # fmt: skip
def test_other_names_are_errors(name: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        spmm_config(name)


def test_another_process_knows_the_name() -> None:
    name = f"sddmm_panel-{OPERANDS}-k32t512b1np32w24"
    code = f"from cute_kernels.sddmm.heuristics import sddmm_config; print(sddmm_config({name!r}).box_bytes)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "64\n"
