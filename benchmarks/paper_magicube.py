"""The ratios printed in the Magicube paper beside the library's, from the results of ``dlmc.py``.

Writes the tables of ``docs/lab/paper-magicube.md``; measures nothing.
Source: Li, Osawa, Hoefler, "Efficient Quantized Sparse Matrix Operations on Tensor Cores", SC'22, section V-B.
Run: ``PYTHONPATH=. python benchmarks/paper_magicube.py``
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paper_residual import RESULTS, ROOT, write_page
from printed import magicube

PAGE = ROOT / "docs" / "lab" / "paper-magicube.md"


def read(name: str) -> dict[str, Any]:
    """A results file."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def tables() -> dict[str, str]:
    """The page's tables by mark."""
    gpu, cpu, switched = read("dlmc_figures_h100.json"), read("dlmc_cpu.json"), read("ablation_figures_h100.json")
    return {
        "machine": magicube.machines(gpu, cpu),
        "ratios": magicube.ratios(gpu, cpu),
        "spmm": magicube.by_sparsity(cpu, "spmm"),
        "lengths": magicube.by_length(cpu, "spmm"),
        "pairs": magicube.by_pair(cpu),
        "sddmm": magicube.by_sparsity(cpu, "sddmm"),
        "figure-11": magicube.ablations(switched, 11),
        "figure-12": magicube.mixed(switched),
        "figure-13": magicube.ablations(switched, 13),
    }


def main(page: Path = PAGE) -> None:
    write_page(tables(), page, "paper_magicube")


if __name__ == "__main__":
    main()
