"""Citations name sections that the papers have, and the references page has every source in short form."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUBJECTS = {"IV-A": "SR-BCRS", "IV-B": "SpMM", "IV-C": "SDDMM", "IV-D": "digits", "V-C": "attention"}
SHORT_FORMS = {
    r"SC'22": "Li, Osawa, Hoefler, SC'22",
    r"arXiv 2403\.06924": "Gu, arXiv 2403.06924",
    r"Higham, Accuracy": "Accuracy and Stability of Numerical Algorithms",
    r"Freivalds": "Freivalds",
    r"Hutchinson": "Hutchinson",
    r"Schreiber": "Schreiber, Van Loan",
    r"Carson and Higham": "Carson, Higham",
    r"FlexAttention": "FlexAttention",
    r"Microscaling Formats": "OCP MX",
}


def sources() -> list[Path]:
    folders = ("cute_kernels", "magicube_cutlass", "residual")
    return [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in {".py", ".cuh", ".hpp", ".cpp"}]


def test_sections_of_the_sparse_paper_exist_and_sddmm_is_iv_c() -> None:
    cited = 0
    for path in sources():
        for found in re.findall(r"SC'22,\s+sections?\s+([IVX]+-[A-Z])(?:\s+to\s+([IVX]+-[A-Z]))?", path.read_text()):
            assert set(found) - {""} <= set(SUBJECTS), (path, found)
            if "sddmm" in path.parts or path.stem == "sddmm":
                assert found == ("IV-C", ""), (path, found)
            cited += 1
    assert cited > 20


@pytest.mark.parametrize(("pattern", "entry"), SHORT_FORMS.items())
def test_the_references_page_has_what_sources_cite(pattern: str, entry: str) -> None:
    page = (ROOT / "docs" / "reference" / "references.md").read_text()
    assert any(re.search(pattern, path.read_text()) for path in sources()), f"no source cites {pattern}"
    assert entry in page


def test_the_citation_file_has_the_version_and_license_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "CITATION.cff").read_text()
    assert f"version: {project['version']}\n" in text and f"license: {project['license']}\n" in text
    assert f"title: {project['name']}\n" in text and "2209.06979" in text and "2403.06924" in text
