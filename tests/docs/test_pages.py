"""Pages for readers: short, with code that runs, links that lead somewhere, and tables of what the library has."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from tests.house import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SHORT = [page for page in PAGES if page.relative_to(DOCS).parts[0] not in ("lab", "reference")]
WORDS = 1200  # of a page, besides rows of tables: figures are looked up, not read
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", SHORT, ids=name)
def test_a_page_keeps_its_word_budget(page: Path) -> None:
    assert sum(len(line.split()) for line in page.read_text().splitlines() if not line.startswith("|")) <= WORDS


def test_the_readme_keeps_its_word_budget_and_begins_with_what_it_is() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) < 1500
    first = text[: text.index("## ")].split()
    assert len(first) <= 350  # one screen: what, for whom, two commands, code, output, one table
    assert {"demo", "test"} <= set(re.findall(r"^make (\w+)", text, re.M))


@pytest.mark.parametrize("page", [page for page in PAGES if "```pycon" in page.read_text()], ids=name)
def test_the_output_shown_in_a_page_is_the_output(page: Path) -> None:
    text = "\n".join(re.findall(r"```pycon\n(.*?)```", page.read_text(), re.S))
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found = doctest.DocTestRunner(optionflags=options).run(test)
    assert found.attempted > 5 and not found.failed


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub and Sphinx make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=name)
def test_links_and_anchors_of_a_page_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    wrong = []
    for link in LINK.findall(text) + re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        made = target.is_relative_to(DOCS / "gallery")  # by the build
        if not made and (not target.exists() or (anchor and anchor not in anchors(target))):
            wrong.append(link)
    assert not wrong


def test_pictures_have_alternative_text() -> None:
    for page in [*PAGES, ROOT / "README.md"]:
        assert not re.search(r"!\[\s*\]\(", page.read_text()), page


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = {DOCS / "index.md"}
    for page in PAGES:
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.S):
            entries = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{entry}.md").resolve() for entry in entries}
    assert set(PAGES) <= listed


def test_the_page_on_variables_has_those_that_the_code_reads() -> None:
    sources = [
        p for f in ("cute_kernels", "magicube_cutlass", "residual", "examples") for p in (ROOT / f).rglob("*.[ph]*")
    ]
    read = re.compile(r"(?:environ(?:\.get)?|getenv)[(\[]\"(MAGICUBE_\w+)\"")
    used = {name for path in sources if path.suffix in (".py", ".hpp") for name in read.findall(path.read_text())}
    page = (DOCS / "reference" / "environment.md").read_text()
    assert len(used) >= 5 and used <= set(re.findall(r"`(MAGICUBE_\w+)`", page))


def test_the_page_on_the_command_line_has_every_command() -> None:
    from typer.main import get_command

    from magicube_cutlass.cli import app

    page = (DOCS / "reference" / "cli.md").read_text()
    assert {f"magicube {command}" for command in get_command(app).commands} <= set(
        re.findall(r"magicube [a-z-]+", page)
    )


def test_the_glossary_has_the_words_that_pages_use_without_explaining() -> None:
    text = (DOCS / "reference" / "glossary.md").read_text()
    for word in (
        "SR-BCRS",
        "V, vector length",
        "stride",
        "L8-R8",
        "atom",
        "digit",
        "panel",
        "W8A8",
        "rung",
        "epilogue",
    ):
        assert re.search(rf"^\| [^|]*{re.escape(word)}", text, re.M), word


def test_the_page_on_reports_has_every_fact() -> None:
    import torch

    import magicube_cutlass as mc
    import residual

    A = mc.SRBCRS.from_dense(torch.ones(16, 32), vector_length=8, bits=8)
    floats = mc.SRBCRS.from_dense(torch.ones(16, 32), vector_length=8, dtype="float16")
    x, q = mc.quantize(torch.ones(32, 16), 8), torch.ones(1, 1, 16, 8)
    found = (
        mc.explain(A, x),
        mc.explain(floats, torch.ones(32, 16).half()),
        mc.explain_sddmm(mc.quantize(torch.ones(16, 8), 8), mc.quantize(torch.ones(32, 8), 8), A.pattern),
        mc.explain_attention(q, q, q, mc.masks.local(16, window=4)),
        residual.explain(torch.ones(8, 8), torch.ones(8, 8), tol=1e-3),
    )
    words = set(re.findall(r"`\"?(\w+)\"?`", (DOCS / "reference" / "explain.md").read_text()))
    for each in found:
        assert {each.operator, each.backend, *each.facts} <= words, each
