"""The kernel that decodes a weight to a dense matrix: its source on the CPU, in every bit that of the model."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.few_rows import decode
from cute_kernels.few_rows.decode import DecodeConfig, launch_decode
from cute_kernels.few_rows.formats import FORMATS, PackedWeight
from tests.kernels.few_rows.host import ACTS, Edit, Launch, compile_library, has_compiler, source_of
from tests.kernels.few_rows.model import dense, sample

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")
# Each pair of codes and scale rule once; the other groups and the other dtype take longer.
_RULES = {(form.codes, form.scale): form.name for form in FORMATS.values()}
CONFIGS = [DecodeConfig(name, list(ACTS)[i % 2]) for i, name in enumerate(_RULES.values())]
SHAPES = [(77, 300), (1, 1)]  # (N, K): blocks, units and runs of 8 that end early
_RUN = """
extern "C" const char* run_{name}(const host::Launch* launch, const int64_t* a) {{
  using namespace magicube;
  return host::run(*launch, {{}}, [=] {{
    few::decode_weight<{name}>((const uint8_t*)a[0], a[1], (const float*)a[2], (uint16_t*)a[3], a[4], a[5], a[6]);
  }});
}}
"""


class HostDecode:
    """The kernels of some configs as a library of this machine."""

    def __init__(self, folder: Path, configs: Iterable[DecodeConfig], edit: Edit | None = None) -> None:
        self._names = {config: f"Config{i}" for i, config in enumerate(configs)}
        source = "".join(source_of(each, name) + _RUN.format(name=name) for each, name in self._names.items())
        self._library = compile_library(folder, source, edit)

    def launch(self, config: DecodeConfig, weight: PackedWeight, out: Tensor) -> None:
        """Launch as ``launch_decode`` does; raises what the emulation found."""
        run = getattr(self._library, f"run_{self._names[config]}")
        run.restype = ctypes.c_char_p

        class Kernel:
            def launch(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
                launch = Launch(*grid[:2], 1, config.threads, 0, 1, 0, 0)
                wrong = run(ctypes.byref(launch), (ctypes.c_int64 * 7)(*args))
                if wrong:
                    raise RuntimeError(wrong.decode())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode, "get_kernel", lambda config: Kernel())
            launch_decode(config, weight, out)


def check(kernels: HostDecode, config: DecodeConfig, shape: tuple[int, int]) -> None:
    """Compare a random weight to the model, in a frame that must not change."""
    n, k = shape
    made = sample(config.weight, n, k, config.act, n)
    columns = -(-k // 8) * 8
    frame = torch.full((n + 66, columns + 264), 7.0, dtype=ACTS[config.act])  # with all that blocks and units end in
    got = frame[1 : n + 1, 8 : columns + 8]
    kernels.launch(config, made.weight, got)
    assert torch.equal(got[:, :k].view(torch.int16), dense(made.weight).view(torch.int16)), "another weight"
    p = 8 if config.act == "bfloat16" else 11
    limit = made.slack + (2.0**-p + 2.0**-22) * (made.truth.abs() + made.slack) + (2.0**-25 if p == 11 else 0)
    assert bool(((got[:, :k].double() - made.truth).abs() <= limit).all()), "beyond the bound"
    got.fill_(7.0)
    assert bool((frame == 7.0).all()), "written outside"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostDecode:
    return HostDecode(tmp_path_factory.mktemp("decode"), CONFIGS)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.weight}-{config.act}")
def test_the_source_decodes_what_the_model_does(config: DecodeConfig, kernels: HostDecode) -> None:
    for shape in SHAPES:
        check(kernels, config, shape)


@pytest.mark.long
@pytest.mark.parametrize("act", ACTS)
def test_the_source_decodes_every_format(act: str, tmp_path: Path) -> None:
    configs = [DecodeConfig(name, act, threads) for threads in (256, 384) for name in FORMATS]
    kernels = HostDecode(tmp_path, configs)
    for config in configs:
        for shape in (*SHAPES, (130, 264)):
            check(kernels, config, shape)
