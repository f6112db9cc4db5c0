"""Results files of the GPU benchmarks: one row a line, written again after every step."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parents[1] / "results"


def results_file(stem: str) -> Path:
    """The file for torch's GPU."""
    gpu = torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "_")
    return RESULTS / f"{stem}_{gpu}.json"


def _text(value: Any) -> str:
    """JSON; the lists of an outer object have an entry a line."""
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n  " + ",\n  ".join(json.dumps(entry) for entry in value) + "\n ]"


def save(results: dict[str, Any], path: Path) -> None:
    """Write ``results`` in one step, so that a run that is stopped leaves what it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("{\n" + ",\n".join(f" {json.dumps(k)}: {_text(v)}" for k, v in results.items()) + "\n}\n")
    os.replace(part, path)


def rounded(us: float) -> float:
    """Microseconds to four digits."""
    return float(f"{us:.4g}")


def gpu_arguments(doc: str | None, quick: str, **options: dict[str, Any]) -> argparse.Namespace:
    """The command line of a GPU benchmark: ``--quick`` with this help, ``--out``, and more options by name.

    Exits unless torch has a CUDA device, or the option ``device`` is "cpu".
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, help="the results file")
    for name, settings in options.items():
        parser.add_argument("--" + name.replace("_", "-"), **settings)
    args = parser.parse_args()
    if getattr(args, "device", "cuda") != "cpu" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    return args


def write_results(results: dict[str, Any], out: Path | None, stem: str, start: float) -> None:
    """Write the file of torch's GPU, or `out`, and print its name and the seconds since `start`."""
    path = out or results_file(stem)
    save(results, path)
    print(f"\nwrote {path}, {time.perf_counter() - start:.0f} s in all")
