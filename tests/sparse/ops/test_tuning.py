"""The constants of the cost models: fitted to measured times, stored on disk, with damaged files ignored."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pycute")

from cute_kernels.machine import GatherModel, Machine, PanelModel, Problem
from cute_kernels.spmm.heuristics import candidates
from magicube_cutlass import tuning
from magicube_cutlass.dispatch import measured
from magicube_cutlass.dispatch.machine import forget_models, load_models, save_models
from magicube_cutlass.dispatch.plan import size_bucket
from magicube_cutlass.tuning import KIND, Case, fit, judge

H200 = Machine("sm_90a", 132)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "choose_h200.json"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGICUBE_CACHE", str(tmp_path))


def timed(held_out: bool) -> list[Case]:
    """Random shapes, as ``magicube tune`` times them, that were timed on an H200."""
    found = []
    for case in json.loads(RESULTS.read_text())["cases"]:
        if case["held_out"] == held_out and case["widths"] == [8, 8] and "matrix" not in case:
            width = size_bucket(case["n"])
            sizes = Problem(-(-case["m"] // 8), case["k"], case["vectors"], case["longest"], width)
            times = {c: case["us"][c.name] * 1e3 for c in candidates(KIND, H200, sizes) if c.name in case["us"]}
            found.append(Case(sizes, times))
    return found


def test_measured_times_correct_wrong_constants() -> None:
    panel, gather = PanelModel(), GatherModel()
    wrong = replace(H200, panel=replace(panel, chunk=0.3 * panel.chunk, byte=5 * panel.byte, block=0.1 * panel.block),
                    gather=replace(gather, group=4 * gather.group, crowd=0.2 * gather.crowd))  # fmt: skip
    fitted_to, held_out = timed(False)[:25], timed(True)
    before, after = judge(held_out, wrong), judge(held_out, fit(fitted_to, wrong))
    assert before.cases == after.cases == len(held_out) >= 50
    assert before.near < 0.6 * before.cases
    assert after.near >= 0.85 * after.cases and after.worst < 1.5
    assert f"{after.near} of {after.cases} picks" in str(after)


def test_stored_models_of_a_gpu_load_and_can_be_removed() -> None:
    other = replace(H200, panel=replace(PanelModel(), chunk=9.0), gather=replace(GatherModel(), team=7.5))
    assert load_models("Some GPU", H200) == H200
    save_models("Some GPU", other)
    assert load_models("Some GPU", H200) == other
    assert load_models("Another GPU", H200) == H200
    assert measured.path_of("models", "Some GPU").stat().st_mode & 0o777 == 0o600
    assert forget_models("Some GPU") and not forget_models("Some GPU")
    assert load_models("Some GPU", H200) == H200


DAMAGES = ["", "{", "[]", "null", "1" * 400, "[" * 100_000, '{"panel": [1.0], "gather": [1.0]}', '{"panel": 3}']


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage[:30])
def test_a_damaged_file_changes_nothing(damage: str) -> None:
    save_models("Some GPU", H200)
    measured.path_of("models", "Some GPU").write_text(damage)
    assert load_models("Some GPU", H200) == H200


def test_impossible_constants_change_nothing() -> None:
    save_models("Some GPU", H200)
    path = measured.path_of("models", "Some GPU")
    for value in (-1.0, 0.0, float("inf"), float("nan"), "1", None, [1.0], 10**400):
        kept = json.loads(path.read_text())
        kept["gather"][0] = value
        path.write_text(json.dumps(kept))
        assert load_models("Some GPU", H200) == H200


def test_a_link_in_the_files_place_is_not_followed(tmp_path: Path) -> None:
    save_models("Some GPU", replace(H200, gather=replace(GatherModel(), team=7.5)))
    path = measured.path_of("models", "Some GPU")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert load_models("Some GPU", H200) == H200


def test_shapes_differ_and_stay_small() -> None:
    one, two = tuning.shapes(40, 1), tuning.shapes(40, 2)
    assert len(set(one)) == 40 and one == tuning.shapes(40, 1) and one != two
    assert all(m * k * n <= 2**36 for m, k, n, _ in one)
