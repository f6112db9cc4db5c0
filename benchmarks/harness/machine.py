"""The head of a results file of a GPU."""

from __future__ import annotations

import shutil
import subprocess
import time

import torch

from magicube_cutlass.cli.environment import provenance

_QUERIES = {
    "driver": "driver_version",
    "gpu memory (MiB)": "memory.total",
    "SM clock under load (MHz)": "clocks.sm",
    "SM clock limit (MHz)": "clocks.max.sm",
    "memory clock (MHz)": "clocks.mem",
    "power under load (W)": "power.draw",
    "power limit (W)": "power.limit",
}


def gpu_machine() -> dict[str, str]:
    """Return :func:`provenance`, and of torch's current GPU: SMs, size of its L2 cache, driver, clocks and power.

    Clocks and power are read by ``nvidia-smi``, which changes nothing, while a dense product keeps the GPU busy.
    """
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts = {
        "gpu": torch.cuda.get_device_name(),  # and no other one that is there
        "multiprocessors": str(properties.multi_processor_count),
        "L2 cache (MB)": f"{properties.L2_cache_size / 1e6:.0f}",
    }
    if torch.backends.cusparselt.is_available():
        facts["cuSPARSELt"] = str(torch.backends.cusparselt.version())
    return provenance() | facts | _clocks()


def _clocks() -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {name: "no nvidia-smi" for name in _QUERIES}
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(1200):  # about two seconds of work, queued
        a @ a
    time.sleep(0.7)
    gpu = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"  # its number may be another here
    command = [
        "nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(_QUERIES.values())}", "--format=csv,noheader,nounits",
    ]  # fmt: skip
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    torch.cuda.synchronize()
    if answer.returncode:
        return {name: f"nvidia-smi failed: {answer.stderr.strip()[:100]}" for name in _QUERIES}
    return dict(zip(_QUERIES, (x.strip() for x in answer.stdout.strip().split(",")), strict=True))
