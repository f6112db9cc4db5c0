"""The paper's ablations: every step is a config that names a kernel, on the matrices that the arguments give."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ablation
from harness.gpu_data import Widths
from harness.paper_studies import LENGTHS, PAIRS, SAMPLED, figure_11, figure_13, figures

import magicube_cutlass as mc
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.sddmm.heuristics import sddmm_config
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import SpmmKernel, spmm_config


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_steps_of_figure_11_add_one_idea_each(arch: str, length: int) -> None:
    for study in figure_11("", length, arch):
        configs = [variant.config for variant in study.variants]
        assert all(isinstance(config, GatherConfig) and spmm_config(config.name) == config for config in configs)
        switches = [(c.swizzle, c.stages > 1, c.shuffle) for c in configs if isinstance(c, GatherConfig)]
        four = "L4-R4" in study.name
        steps = [(False, False, not four), (True, False, not four), (True, True, not four), (True, True, True)]
        assert switches == steps[: len(switches)] and len(switches) == 3 + four


def test_figure_13_switches_the_prefetch_off() -> None:
    studies = list(figure_13("", 8, "sm_90a"))
    assert [study.name for study in studies] == [f"Figure 13, {widths} V=8" for widths in SAMPLED]
    for study in studies:
        off, on = (variant.config for variant in study.variants)
        assert isinstance(off, SddmmConfig) and isinstance(on, SddmmConfig) and (off.stages, on.stages) == (1, 3)
        assert sddmm_config(off.name) == off


def test_the_figures_have_every_pair_and_length() -> None:
    patterns = {length: mc.random_pattern(8 * length, 64, 0.5, length) for length in LENGTHS}
    asked: list[tuple[int, Widths]] = []

    def choose(pattern: mc.Pattern, widths: Widths) -> SpmmKernel:
        asked.append((pattern.vector_length, widths))
        name = f"spmm_gather-s8_m16n8k32-v8-s{widths.left}xs{widths.right}-float16-b64s4w4r1"
        return spmm_config(name)

    found = figures("m", patterns, "sm_80", choose)
    assert asked == [(length, widths) for length in LENGTHS for widths in PAIRS]
    assert len(found) == len(LENGTHS) * (3 + 1 + 3)


def test_matrices_are_named_by_their_sparsity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGICUBE_DATA", str(tmp_path))
    monkeypatch.setattr(ablation, "ROOT", tmp_path)
    path = tmp_path / "dlmc" / "matrices" / "rn50" / "m" / "0.7" / "one.smtx"
    path.parent.mkdir(parents=True)
    mc.write_smtx(path, mc.random_pattern(6, 40, 0.7, 1))
    ((name, patterns),) = ablation.figure_workloads(["rn50/m/{}/one.smtx"], "0.7").items()
    assert name == "rn50/m/0.7/one"
    assert {length: pattern.shape for length, pattern in patterns.items()} == {8: (48, 40), 4: (24, 40), 2: (12, 40)}
    with pytest.raises(SystemExit, match=r"no rn50/m/0\.8/one\.smtx"):
        ablation.figure_workloads(["rn50/m/{}/one.smtx"], "0.7,0.8")
