"""The model of bytes and times of parallel layers, and the command that prints it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from magicube_cutlass.cli import app
from magicube_cutlass.distributed.cost_model import (
    CLUSTERS,
    LinearShape,
    cluster_of,
    layer_seconds,
    plan_layers,
    product_seconds,
    traffic,
)
from tests.house import ROOT


def test_times_of_one_gpu_are_near_the_measured_ones() -> None:
    ratios = []
    for case in json.loads((ROOT / "benchmarks" / "results" / "llm_h200.json").read_text())["cases"]:
        m, k, n = case["shape"]
        for each in case["ours"]:
            if each["pair"] == "L8-R8":
                layer = LinearShape("", m, k, 1 - each["sparsity"])
                ratios.append(1e6 * product_seconds(layer, n, 1, CLUSTERS[2]) / each["us"])
    ratios.sort()
    assert len(ratios) == 64 and ratios[0] > 1 / 1.7 and ratios[-1] < 1.7 and 0.9 < ratios[32] < 1.1


@pytest.mark.parametrize("gpus", [2, 4])
def test_times_of_several_gpus_are_near_the_measured_ones(gpus: int) -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / f"distributed_nccl_{gpus}.json").read_text())["results"]
    ratios: dict[int, list[float]] = {}
    for row in found:
        case = row["case"]
        if row["group"] not in ("spmm", "mlp") or "ms of a graph" not in row or "floats" in case:
            continue
        options: dict[str, Any] = {"cut_tokens": "cut" in case, "static": "static" in case}
        if row["group"] == "spmm":
            out, inner, tokens = map(int, row["shape"].split(" x "))
            layers = [("colwise", LinearShape("", out, inner, 0.1))]
        else:
            tokens, width, hidden = map(int, row["shape"].split(" x "))
            density = {"0.8": 0.2, "0.9": 0.1}.get(case[:3], 1.0)
            layers = [("colwise", LinearShape("", hidden, width, density)),
                      ("rowwise", LinearShape("", width, hidden, density))]  # fmt: skip
            options["reduce"] = "exact" if "exact" in case else "bfloat16"
        seconds = sum(layer_seconds(style, layer, tokens, cluster_of(gpus), **options) for style, layer in layers)
        ratios.setdefault(tokens, []).append(1e3 * seconds / row["ms of a graph"])
    assert len(ratios[8192]) == 18 and min(ratios[8192]) > 0.69 and max(ratios[8192]) < 1.3
    assert min(ratios[256]) > 0.45 and max(ratios[256]) < 1.1


def test_int8_is_half_of_bfloat16_and_a_quarter_of_int32() -> None:
    layer = LinearShape("", 4096, 4096)
    exact, half, quarter = (
        traffic("rowwise", layer, 1024, 8, reduce=reduce, static=True) for reduce in ("exact", "bfloat16", "int8")
    )
    assert exact == 2 * half and half / quarter == pytest.approx(2, rel=2e-3)
    assert traffic("colwise", layer, 1024, 8, static=True) == quarter - 7 * 128 * 4
    assert traffic("colwise", layer, 1024, 1) == traffic("colwise", layer, 1024, 8, cut_tokens=False) == 0
    with pytest.raises(ValueError, match="style must be 'colwise' or 'rowwise', got 'diagonal'"):
        traffic("diagonal", layer, 1, 2)
    with pytest.raises(ValueError, match="gpus must be at least 1, got 0"):
        cluster_of(0)


def test_one_gpu_is_better_for_few_tokens_and_slow_links() -> None:
    layers = [LinearShape("up", 16384, 4096, 0.3), LinearShape("down", 4096, 16384, 0.3)]
    for tokens, gpus, expected in ((1, 8, False), (8192, 2, True), (8192, 8, True)):
        found = plan_layers(layers, tokens, cluster_of(gpus), "int8")
        assert all((each.style != "one GPU") == expected for each in found), (tokens, gpus)
    host, hosts = (sum(each.seconds for each in plan_layers(layers, 8192, cluster_of(n), "int8")) for n in (8, 64))
    assert hosts > host
    few = plan_layers(layers, 256, cluster_of(2), "int8")  # the host takes longer than two GPUs save
    assert {each.style for each in few} == {"one GPU"} and few[0].seconds == cluster_of(2).host
    graphs = plan_layers(layers, 8192, cluster_of(2), "bfloat16", graphs=True)
    eager = plan_layers(layers, 8192, cluster_of(2), "bfloat16")
    assert all(a.seconds <= b.seconds and a.bytes == b.bytes for a, b in zip(graphs, eager, strict=True))
    assert plan_layers(layers, 256, cluster_of(2), "int8", graphs=True)[0].seconds < cluster_of(2).host


def test_the_command_plans_a_file(tmp_path: Path) -> None:
    shapes = {"mlp.down_proj": (256, 1024), "mlp.up_proj": (1024, 256), "attn.q_proj": (64, 256), "lm_head": (9, 256)}
    path = tmp_path / "model.safetensors"
    save_file({f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}, path)
    result = CliRunner().invoke(app, ["plan-parallel", str(path), "--gpus", "4", "--tokens", "64", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {row["layer"]["name"] for row in found["layers"]} == set(shapes) - {"lm_head"}
    assert {row["style"] for row in found["layers"]} == {"one GPU"}  # so small
    text = CliRunner().invoke(app, ["plan-parallel", str(path), "--gpus", "4"]).stdout
    assert "0 of 3 layers are cut" in text and "one GPU is predicted to be faster" in text
    assert isinstance(CliRunner().invoke(app, ["plan-parallel", str(tmp_path / "none.safetensors")]).exception, OSError)
