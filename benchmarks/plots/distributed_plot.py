"""Predicted time of two sparse layers on 1 to 64 GPUs, and where the measured one of one GPU lies."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from magicube_cutlass.bench.figures import COLORS, OTHER, log_ticks, panels
from magicube_cutlass.distributed.cost_model import CLUSTERS, LinearShape, plan_layers

UP, DOWN, ZEROS = (11008, 4096), (4096, 11008), 0.9
TOKENS = [2**i for i in range(18)]


def draw(results: dict[str, Any]) -> Figure:
    """Draw the predictions, and the times of one GPU of ``llm_h200.json``."""
    figure, (axes,) = panels(size=(9.6, 4.4))
    layers = [LinearShape("up", *UP, 1 - ZEROS), LinearShape("down", *DOWN, 1 - ZEROS)]
    alone = [1e6 * sum(each.alone for each in plan_layers(layers, n, CLUSTERS[2])) for n in TOKENS]
    axes.plot(TOKENS, alone, color=OTHER, label="1 GPU, predicted")
    for color, (gpus, cluster) in zip(COLORS, CLUSTERS.items(), strict=False):
        for reduce, line in (("exact", "-"), ("int8", "--")):
            found = [1e6 * sum(each.seconds for each in plan_layers(layers, n, cluster, reduce)) for n in TOKENS]
            sums = "int32" if reduce == "exact" else reduce
            axes.plot(TOKENS, found, line, color=color, label=f"{gpus} GPUs, {sums} sums, predicted")
    measured: dict[int, float] = {}
    for case in results["cases"]:
        m, k, n = case["shape"]
        if (m, k) in (UP, DOWN):
            measured[n] = measured.get(n, 0.0) + next(
                each["us"] for each in case["ours"] if each["pair"] == "L8-R8" and each["sparsity"] == ZEROS
            )
    axes.plot(list(measured), list(measured.values()), "o", color="black", label="1 GPU, measured")
    axes.set(xscale="log", yscale="log", xlabel="tokens (rows of x)", ylabel="two layers 4096-11008-4096 (us)")
    log_ticks(axes.xaxis)
    axes.xaxis.set_major_locator(LogLocator())  # six decades: no room for 2 and 5
    log_ticks(axes.yaxis)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure
