"""The script for the first run of sm_100a's float product: right products pass and wrong ones are reported."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cute_kernels import floats
from cute_kernels.scaled_gemm.api import FloatOperand
from tests.test_examples import load


@pytest.fixture(autouse=True)
def wished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGICUBE_TCGEN05", "1")


@pytest.fixture
def first_run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script for the first run on a device."""
    folder = Path(__file__).resolve().parents[3] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    return load(folder / "blackwell_first_run.py")


@pytest.mark.parametrize("step", ["identities", "factors", "outputs", "two CTAs"])
def test_the_first_run_finds_nothing_wrong_with_a_right_product(first_run: ModuleType, step: str) -> None:
    findings = list(first_run.STEPS[step]("cpu"))
    assert len(findings) > 5 and all(finding.ok for finding in findings), findings


def test_the_first_run_tells_what_is_wrong(first_run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = first_run.product

    def shifted(a: FloatOperand, b: FloatOperand, *rest: Any, **options: Any) -> torch.Tensor:
        """Sixteen neighbours along k of b trade places, as a wrong swizzle would have them."""
        codes = floats.unpack(b.packed_data, b.k, b.dtype).unflatten(1, (-1, 2, 16)).flip(2).flatten(1)
        return right(a, replace(b, packed_data=floats.pack(codes, b.dtype)), *rest, **options)

    monkeypatch.setattr(first_run, "product", shifted)
    found = {finding.name: finding for finding in first_run.STEPS["identities"]("cpu")}
    assert not found["e2m1 as b"].ok and found["e2m1 as b"].detail.startswith("D[0, 0] is [0, 16], ")
    pairs = first_run.STEPS["pairs"]("cpu")
    assert "differ, first" in next(finding for finding in pairs if not finding.ok).detail


def test_the_first_run_wants_the_chip() -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10:
        pytest.skip("here it is")
    command = [sys.executable, "benchmarks/blackwell_first_run.py"]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "compute capability 10.0 or 10.3" in done.stderr
