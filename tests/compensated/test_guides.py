"""The code of the guides on products with a chosen error runs, and the numbers in their comments hold."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from residual.error.probes import steps
from tests.house import ROOT


@pytest.mark.parametrize("page", ["how-to/tolerance", "explanation/tolerance"])
def test_the_code_of_a_guide_runs(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert len(text.split()) <= 1200
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(block, names)
    if page == "how-to/tolerance":
        assert [attempt.plan for attempt in names["report"].attempts] == ["int8 direct", "int8 full"]
        assert names["plan_used"] == "fp32" and names["C0"].item() == 2.0**-30
        assert 2e-3 < names["found"].relative < names["found"].upper < 5e-3


def test_a_sum_rounds_a_term_as_often_as_the_page_says() -> None:
    assert all(steps(n) <= 2 * n**0.5 + 3 for n in range(1, 3000))
