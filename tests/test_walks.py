"""Calls of the operators pass through few files: how often control moves from one file of the packages to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import magicube_cutlass as mc
import residual
from tests.helpers import python_calls
from tests.house import PACKAGES, ROOT

FOLDERS = tuple(f"{ROOT / package}/" for package in PACKAGES)
COLD_CHANGES, COLD_FILES = 12, 9
WARM_CHANGES = 4
LINEAR_CHANGES = 12
CHECKED_CHANGES, CHECKED_CALLS = 13, 20


@dataclass(frozen=True)
class Walk:
    """The file of each call of a function of the packages, in order."""

    files: tuple[str, ...]

    @property
    def changes(self) -> int:
        """Return how often a call enters another file than the call before it."""
        return sum(a != b for a, b in pairwise(self.files))

    def __str__(self) -> str:
        steps = [file for file, last in zip(self.files, ("", *self.files), strict=False) if file != last]
        return " -> ".join(str(Path(file).relative_to(ROOT)) for file in steps)


def walk(call: Callable[[], Any]) -> Walk:
    """Return the walk of a call in this thread; methods that a dataclass generates are in no file."""
    files = (code.co_filename for code in python_calls(call))
    return Walk(tuple(file for file in files if file.startswith(FOLDERS)))


def product() -> Callable[[], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=generator)
    weight[weight.abs() < 1] = 0
    A = mc.SRBCRS.from_dense(weight, vector_length=8, bits=8)  # (64, 128) int8
    B = mc.quantize(torch.randn(128, 32, generator=generator), bits=8, scale="column")  # (128, 32) int8
    return lambda: mc.spmm(A, B, out_dtype=torch.float16)


def test_the_first_spmm_of_a_matrix_passes_few_files() -> None:
    steps = walk(product())
    assert steps.changes <= COLD_CHANGES, steps
    assert len(set(steps.files)) <= COLD_FILES, steps


def test_a_warm_spmm_passes_few_files() -> None:
    call = product()
    call()
    steps = walk(call)
    assert steps.files
    assert steps.changes <= WARM_CHANGES, steps


def test_a_warm_linear_layer_passes_few_files() -> None:
    torch.manual_seed(0)
    layer = mc.nn.SparseQuantLinear.from_linear(torch.nn.Linear(128, 64), sparsity=0.8, vector_length=8, bits=8).eval()
    x = torch.randn(32, 128)
    with torch.no_grad():
        layer(x)
        steps = walk(lambda: layer(x))
    assert steps.files
    assert steps.changes <= LINEAR_CHANGES, steps


def test_a_warm_checked_float32_product_takes_few_calls() -> None:
    A, B = torch.randn(64, 64), torch.randn(64, 64)
    for tol in (1e-2, 1e-5):
        residual.matmul(A, B, tol=tol)
        steps = walk(lambda tol=tol: residual.matmul(A, B, tol=tol))
        assert steps.changes <= CHECKED_CHANGES, steps
        assert len(steps.files) <= CHECKED_CALLS, steps


def test_only_files_of_the_packages_count() -> None:
    assert walk(lambda: torch.ones(2).sum()).files == ()
    assert Walk(("a", "b", "a", "a")).changes == 2
