"""Tests marked ``gpu`` are skipped where torch has no CUDA device; how many is told at the end."""

from __future__ import annotations

import pytest
import torch

_skipped = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    waiting = [item for item in items if item.get_closest_marker("gpu")]
    for item in waiting:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    config.stash[_skipped] = len(waiting)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if count := terminalreporter.config.stash.get(_skipped, 0):
        terminalreporter.write_line(f"{count} GPU tests skipped: torch has no CUDA device")
