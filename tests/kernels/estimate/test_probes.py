"""The kernels of the check's probes, compiled without a GPU: nothing spilled."""

from __future__ import annotations

import re
from concurrent.futures import Future

import pytest

from cute_kernels.estimate.config import KERNELS, PROBES, TILE, ProbeConfig, default_configs
from cute_kernels.estimate.probes import padded
from cute_kernels.jit import Binary
from residual.cuda import check
from tests.helpers import lean_sass

pytest.importorskip("cuda.core")


_PLAIN = tuple(
    f"{kernel}-float32-g{groups}" for kernel in ("probe", "probe_transposed") for groups in (1, 2)
)  # less than what finds magnitudes too
CASES = [
    *((config, "sm_90a") for config in default_configs() if config.x == "float32" and config.name not in _PLAIN),
    (ProbeConfig("probe", "float16", "columns"), "sm_90a"),
    *((ProbeConfig(kernel, "float32", axis), "sm_80") for kernel, axis in KERNELS if axis == "columns"),
]
# Slow paths of shuffles and sums of a diverged warp; one division, for the stride of the grid.
_SELDOM = r"\$__internal_\d+_\$__cuda_(?:sm70_(?:warpsync|shflsync)|redux|sm20_div_u64)\w*|\.L_x_\d+"


@pytest.mark.parametrize(("config", "arch"), CASES, ids=[f"{arch}-{config.name}" for config, arch in CASES])
def test_kernels_keep_their_sums_in_registers(
    config: ProbeConfig, arch: str, binaries: dict[tuple[ProbeConfig, str], Future[Binary]]
) -> None:
    binary = binaries[config, arch].result()
    sass = lean_sass(binary, _SELDOM)
    # CTAs and warps combine results by maxima alone, which do not depend on the order.
    meetings = set(re.findall(r"\b(?:ATOMS|REDG?|ATOMG?)\.\S+", sass))
    assert all(".MAX" in name for name in meetings), meetings
    assert bool(meetings) == bool(config.absmax)
    if config.kernel == "sum_comparison":
        assert "HMMA" not in sass and "DADD" in sass
        return
    # Two products of tf32 parts where an entry is one, else three: 2 mmas for each of 4 tiles.
    assert sass.count("HMMA.1688.F32.TF32") == (24 if config.x == "float32" else 16)
    assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128" if config.x == "float32" else r"LDGSTS\.E\.64", sass)


def test_the_check_keeps_vectors_as_the_kernels_want_them() -> None:
    assert (check.PROBES, check._ROOM) == (PROBES, TILE)
    assert [padded(n) for n in (0, 1, 32, 33)] == [0, 32, 32, 64]
