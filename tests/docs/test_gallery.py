"""Gallery pages ran with output and picture, in seconds; notebooks run and give the output that they show."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.house import ROOT

EXAMPLES = sorted((ROOT / "examples" / "gallery").glob("plot_*.py"))
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LIMIT = 20  # seconds of an example
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def test_there_are_ten_examples_and_two_notebooks() -> None:
    assert len(EXAMPLES) == 10 and len(NOTEBOOKS) == 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_output_a_picture_and_takes_seconds(example: Path, folder: Path) -> None:
    page = (folder / "gallery" / f"{example.stem}.html").read_text()
    assert "sphx-glr-script-out" in page and "Traceback" not in page
    assert re.search(rf"_images/sphx_glr_{example.stem}_001\.png", page)
    (minutes, seconds) = re.findall(r"Total running time of the script:.*?(\d+) minutes ([\d.]+) seconds", page)[0]
    assert 60 * int(minutes) + float(seconds) < LIMIT


def test_the_gallery_shows_every_example_with_a_thumbnail(folder: Path) -> None:
    page = (folder / "gallery" / "index.html").read_text()
    for example in EXAMPLES:
        assert f"sphx_glr_{example.stem}_thumb" in page


def shown(notebook: Any) -> list[str]:
    """Text that each cell prints."""
    found = []
    for cell in notebook["cells"]:
        outputs = cell.get("outputs", [])
        assert not [output for output in outputs if output["output_type"] == "error"]
        found.append("".join("".join(output["text"]) for output in outputs if output.get("name") == "stdout"))
    return found


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    before = shown(json.loads(path.read_text()))
    assert len([text for text in before if text]) >= 5
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    for old, new in zip(before, shown(notebook), strict=True):
        assert NUMBER.sub("#", old) == NUMBER.sub("#", new)
        assert [float(x) for x in NUMBER.findall(new)] == pytest.approx(
            [float(x) for x in NUMBER.findall(old)], rel=0.1
        )
