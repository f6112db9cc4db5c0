"""Draw every picture of ``docs`` again from the results files.  Run: ``make plots``"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from magicube_cutlass.bench.figures import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
ACCURACY_SIZE = 8192
# picture -> module, its function, results file
OTHERS = {
    "accuracy.png": ("accuracy_plot", "draw", "accuracy_h200"),
    "paper_residual.png": ("printed.plot", "figure_of", "paper_residual_cpu"),
    "qr_table.png": ("qr_table", "figure_of", "qr_table"),
    "lenet.png": ("lenet_fashion_mnist", "figure_of", "lenet"),
    "models_sparsity.png": ("models_plots", "draw_by_sparsity", "models_quality"),
    "models_steps.png": ("models_plots", "draw_by_steps", "models_quality"),
    "models_smollm.png": ("smollm_plots", "draw_language", "models_quality"),
    "models_pareto.png": ("models_plots", "draw_pareto", "models_quality"),
    "transformer.png": ("transformer", "figure_of", "transformer_h200"),
    "several_gpus.png": ("distributed_plot", "draw", "llm_h200"),
}
OF_PRODUCTS = ("spmm.png", "roofline.png", "cpu_spmm.png", "dlmc_spmm.png", "dlmc_sddmm.png", "break_even.png")


def figure_of(picture: str) -> Figure:
    """Draw one picture of :data:`OTHERS` or :data:`OF_PRODUCTS`."""
    for folder in ("benchmarks/plots", "examples", "benchmarks"):
        if str(ROOT / folder) not in sys.path:
            sys.path.insert(0, str(ROOT / folder))
    if picture in OTHERS:
        module, function, name = OTHERS[picture]
        arguments = (ACCURACY_SIZE,) if picture == "accuracy.png" else ()
        results = json.loads((RESULTS / f"{name}.json").read_text())
        figure: Figure = getattr(importlib.import_module(module), function)(results, *arguments)
        return figure
    files = (RESULTS / f"{name}.json" for name in ("spmm_h200", "cpu_spmm_avx2", "dlmc_h200"))
    source, draw = importlib.import_module("gpu_plots").drawings(*files)[picture]
    drawn: Figure = draw(json.loads(source.read_text()))
    return drawn


if __name__ == "__main__":
    for name in (*OTHERS, *OF_PRODUCTS):
        print(save_figure(figure_of(name), IMAGES / name))
