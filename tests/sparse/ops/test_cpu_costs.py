"""Costs of products on a CPU: measured once per engine path, stored, bounded in time, and near the times of products."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import magicube_cutlass as mc
from cute_kernels.cpu import engine
from magicube_cutlass.dispatch import cpu_costs, measured
from magicube_cutlass.dispatch.cpu_costs import CpuCosts, fit_costs, predict
from magicube_cutlass.dispatch.dense_fallback import DenseCall, forecast

LAYERS = tuple(tuple(float(i) for i in range(8)) for _ in cpu_costs.CLASSES)
PRODUCTS = [[float(i) for i in range(1, count + 1)] for count in (4, 6, 7, 2)]  # sparse, dense, packed, turned
MEASURED = CpuCosts(tuple(PRODUCTS[0]), tuple(PRODUCTS[1]), LAYERS, tuple(PRODUCTS[2]), tuple(PRODUCTS[3]))
LISTS = [*PRODUCTS, *map(list, LAYERS)]
DAMAGED = [[[*each[:-1], bad] if each is LISTS[0] else each for each in LISTS] for bad in (-3.0, 3, float("nan"), None)]


@pytest.fixture
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engine paths that were measured, with an empty cache folder; the figures are `MEASURED`."""
    found: list[str] = []

    def measure() -> CpuCosts:
        found.append(engine.isa())
        return MEASURED

    monkeypatch.setenv("MAGICUBE_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_costs, "measure_costs", measure)
    cpu_costs._get.cache_clear()
    yield found
    cpu_costs._get.cache_clear()


def test_costs_are_measured_once_per_engine_path_and_stored(
    measurements: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "magicube")
    for isa in engine.isas():
        monkeypatch.setenv("MAGICUBE_CPU", isa)
        for _ in range(2):
            assert cpu_costs.get_costs() == MEASURED
            cpu_costs._get.cache_clear()  # another process
    assert measurements == engine.isas()
    files = list((tmp_path / "cpu").iterdir())
    assert len(files) == len(measurements) == len(caplog.records)
    assert all(str(file) in caplog.text and file.stat().st_mode & 0o777 == 0o600 for file in files)


def test_costs_of_another_build_are_measured_again(
    measurements: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for build in ("aa", "bb", "aa"):
        monkeypatch.setattr(cpu_costs, "_build", lambda build=build: build)
        assert cpu_costs.get_costs() == MEASURED
        cpu_costs._get.cache_clear()  # another process
    assert len(measurements) == 2 == len(list((tmp_path / "cpu").iterdir()))


@pytest.mark.skipif(not engine.available(), reason="no engine")
def test_another_engine_is_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = cpu_costs._build(), tmp_path / "engine.so"
    other.write_bytes(Path(str(cpu_costs.extension.load_extension().__file__)).read_bytes() + b"x")
    monkeypatch.setattr(cpu_costs.extension, "load_extension", lambda: SimpleNamespace(__file__=str(other)))
    assert cpu_costs._build.__wrapped__() != here


@pytest.mark.parametrize("damage", ["", "null", "[]", "[[1.0], [2.0]]", '"text"', "[" * 100_000, "{}", "1" * 400,
                                    json.dumps(LISTS[:2]), json.dumps([*LISTS, []]), *map(json.dumps, DAMAGED)],
                         ids=lambda text: text[:40])  # fmt: skip
def test_a_damaged_file_is_measured_again(measurements: list[str], tmp_path: Path, damage: str) -> None:
    cpu_costs.get_costs()
    (file,) = (tmp_path / "cpu").iterdir()
    file.write_text(damage)
    cpu_costs._get.cache_clear()
    assert cpu_costs.get_costs() == MEASURED and len(measurements) == 2
    assert json.loads(file.read_text()) == LISTS
    assert measured.load("cpu", file.stem) is not None


def test_fitted_costs_are_those_that_made_the_times_and_never_negative() -> None:
    terms = [(1.0, 100.0, 7.0), (1.0, 3.0, 900.0), (1.0, 50.0, 50.0), (1.0, 2.0, 1.0)]
    costs = (40.0, 2.0, 0.5)
    assert fit_costs(terms, [predict(costs, each, 1) for each in terms]) == pytest.approx(costs)
    assert predict(costs, terms[0], 2) == 40.0 + (200.0 + 3.5) / 2
    falling = fit_costs(terms, [100.0, 5.0, 50.0, 100.0])
    assert min(falling) == 0.0 and max(falling) > 0.0


def test_a_layer_takes_the_costs_of_its_number_of_tokens() -> None:
    costs = CpuCosts(layers=tuple((10.0, n, 0.0, 1.0, 20.0, 0.5 * n, 1.0, 0.0) for n in cpu_costs.CLASSES))
    assert costs.layer(3, 4, 5.0, 1, 1) == (10 + 5 + 4, 20 + 6 + 3)
    assert costs.layer(3, 4, 5.0, 12, 1) == (10 + 80 + 4, 20 + (96 + 3) * 12 / 16)
    assert costs.layer(3, 4, 5.0, 65, 2) == (10 + (320 + 4) * 80 / 64 / 2, 20 + (384 + 3) * 65 / 64 / 2)
    assert costs.layer(3, 4, 5.0, 400, 1) == (10 + (320 + 4) * 400 / 64, 20 + (384 + 3) * 400 / 64)


def test_a_sparse_layer_reads_an_element_no_faster_than_a_dense_one() -> None:
    costs = CpuCosts(layers=tuple((10.0, 1.0, 0.0, 0.0, 20.0, 2.0, 0.0, 0.0) for _ in cpu_costs.CLASSES))
    assert costs.layer(8, 16, 100.0, 1, 1) == (10 + 2 * 100, 20 + 2 * 128)


def shortest(runs: list[Callable[[], object]]) -> list[float]:
    """Nanoseconds of one thread of each, in turns: a machine that changes its clock does not slow all runs of one."""
    best = [float("inf")] * len(runs)
    for _ in range(7):
        for i, run in enumerate(runs):
            run()
            start = time.thread_time()
            run()
            best[i] = min(best[i], (time.thread_time() - start) * 1e9)
    return best


def worst_error() -> float:
    """The largest ratio between predicted and measured times of a few products."""
    guesses: list[float] = []
    runs: list[Callable[[], object]] = []
    for n, columns, sparsity, out in ((256, 64, 0.0, torch.int32), (512, 256, 0.9, torch.int64),
                                      (512, 512, 0.5, torch.float32), (1024, 128, 0.97, torch.float16)):  # fmt: skip
        pattern = mc.random_pattern(n, n, sparsity, 8, seed=1)
        scales = (None, None) if out in (torch.int32, torch.int64) else (torch.rand(n, 1), torch.rand(1, columns))
        A = mc.SRBCRS.from_pattern(pattern, torch.randint(-128, 128, (pattern.vectors, 8)), bits=8, scale=scales[0])
        B = mc.QuantTensor.from_ints(torch.randint(-128, 128, (n, columns)), bits=8, scale=scales[1])
        predicted = forecast(A, B, out)
        assert predicted is not None
        dense = DenseCall(A, B, out)
        guesses += [predicted.sparse, predicted.dense]
        runs.append(lambda A=A, B=B, out=out: mc.spmm(A, B, out_dtype=out))  # type: ignore[misc]
        runs.append(lambda dense=dense, B=B: dense(B.data, B.scale, None, None))  # type: ignore[misc]
    return max(max(guess / true, true / guess) for guess, true in zip(guesses, shortest(runs), strict=True))


def test_without_vnni_the_forecast_is_near_the_times_of_both_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("torch._int_mm is a scalar loop without VNNI")

    if "avx2" not in engine.isas():
        pytest.skip("needs AVX2")
    monkeypatch.setenv("MAGICUBE_CPU", "avx2")
    monkeypatch.setattr(torch, "_int_mm", forbidden)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        worst = float("inf")
        for _ in range(6):  # a busy machine changes its clock between the two
            start = time.thread_time()
            costs = cpu_costs.measure_costs()
            assert time.thread_time() - start < 0.3
            monkeypatch.setattr(cpu_costs, "get_costs", lambda costs=costs: costs)
            worst = min(worst, worst_error())
            if worst < 1.5:
                break
        assert worst < 1.5
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_measuring_leaves_the_number_of_threads(use_threads: Callable[[int], None]) -> None:
    use_threads(2)
    cpu_costs.measure_costs()
    assert torch.get_num_threads() == 2


def test_a_reading_of_no_time_is_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_costs.time, "thread_time", lambda: 1.0)
    times = cpu_costs._shortest_times([lambda: time.sleep(1e-4)])
    assert 1e5 <= times[0] < 1e8
