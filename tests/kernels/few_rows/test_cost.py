"""Predicted times of the product of few rows, against those of the results file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cute_kernels.few_rows.cost import few_rows_seconds
from cute_kernels.few_rows.formats import FORMATS
from magicube_cutlass.nn import QuantLinear

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "few_rows_h200.json"


def test_times_are_within_a_tenth_of_the_measured_ones() -> None:
    seen = 0
    for case in json.loads(RESULTS.read_text())["cases"]:
        for name, us in case.get("cold", {}).items():
            weight = name.removesuffix("/chosen")
            if name.endswith("/chosen") and weight in FORMATS:
                predicted = 1e6 * few_rows_seconds(weight, case["m"], case["n"], case["k"])
                assert 0.9 < predicted / us < 1.1, (name, case["m"], case["k"], case["n"], predicted, us)
                seen += 1
    assert seen == 120


def test_more_rows_and_more_weights_take_longer() -> None:
    for weight in FORMATS:
        times = [few_rows_seconds(weight, m, 4096, 4096) for m in (1, 8, 9, 16, 17, 32, 33, 64)]
        assert times == sorted(times) and times[0] < few_rows_seconds(weight, 1, 4097, 4096)


def test_what_is_not_measured_is_refused() -> None:
    for m in (0, 65):
        with pytest.raises(ValueError, match=f"m must be from 1 to 64, got {m}"):
            few_rows_seconds("int8", m, 64, 64)
    with pytest.raises(ValueError, match=r"weight must be one of .*int4_g128.*, got 'int5'"):
        few_rows_seconds("int5", 1, 64, 64)


def test_a_layer_tells_the_time_of_its_rows_where_it_has_the_kernel() -> None:
    layer = QuantLinear(4096, 256, weight="int4", group_size=128, act="none")
    assert layer.explain(16).facts["predicted_us"] is None and "H200" not in layer.explain(16).text
    layer.product().backend = "few_rows"
    found = layer.explain(16)
    assert found.facts["predicted_us"] == pytest.approx(1e6 * few_rows_seconds("int4_g128", 16, 256, 4096))
    assert "the product of 16 rows takes about" in found.text
    assert layer.explain().facts["predicted_us"] is None and layer.explain(65).facts["predicted_us"] is None
