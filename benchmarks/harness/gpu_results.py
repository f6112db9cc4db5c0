"""Results files of the GPU benchmarks: one row a line, written again after every step."""

from __future__ import annotations

import json
import os
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
