"""The built HTML: no Markdown shown as text, no broken table, link or picture, no page wider than its window."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import html_pages
from tests.docs.html_pages import Page


@pytest.fixture(scope="module")
def pages(folder: Path) -> dict[str, Page]:
    found = html_pages.pages(folder)
    assert "index.html" in found and len(found) > 40
    return found


def test_no_markdown_is_shown_as_text(pages: dict[str, Page]) -> None:
    assert not list(html_pages.broken_text(pages))


def test_tables_and_code_are_whole(pages: dict[str, Page]) -> None:
    assert not list(html_pages.broken_tables(pages))


def test_links_pictures_and_anchors_exist(folder: Path, pages: dict[str, Page]) -> None:
    assert not list(html_pages.broken_links(folder, pages))


def test_the_reference_links_to_the_source(pages: dict[str, Page]) -> None:
    assert any(
        "_modules/magicube_cutlass/ops/spmm.html" in link for link in pages["reference/api/magicube_cutlass.html"].links
    )


def test_no_page_is_wider_than_its_window(folder: Path, pages: dict[str, Page]) -> None:
    chromium = html_pages.browser()
    if chromium is None:
        pytest.skip("needs Chromium (Debian: chromium)")
    names = [name for name in pages if not name.startswith(("_modules", "genindex", "search", "py-modindex"))]
    assert not html_pages.overflows(folder, names, chromium)


def test_planted_faults_are_seen(tmp_path: Path) -> None:
    text = (
        "<p>| a | b |</p><table><tr><td>1<tr><td>1<td>2</table><pre> </pre><a href='no.html'>x</a><a href='#no'>y</a>"
    )
    (tmp_path / "a.html").write_text(text)
    found = html_pages.pages(tmp_path)
    assert list(html_pages.broken_text(found)) == ["a.html: | a | b |"]
    assert list(html_pages.broken_tables(found)) == ["a.html: rows of [1, 2] cells", "a.html: empty code"]
    assert list(html_pages.broken_links(tmp_path, found)) == ["a.html: no.html", "a.html: #no"]


def test_a_page_that_is_too_wide_is_seen(tmp_path: Path) -> None:
    chromium = html_pages.browser()
    if chromium is None:
        pytest.skip("needs Chromium (Debian: chromium)")
    (tmp_path / "wide.html").write_text("<article><div style='width:600px'>x</div></article>")
    (tmp_path / "good.html").write_text(
        "<article><p>x</p><div style='overflow-x:auto'><pre>" + "x" * 999 + "</pre></div></article>"
    )
    found = html_pages.overflows(tmp_path, ["wide.html", "good.html"], chromium)
    assert [row[:2] for row in found] == [["wide.html", 390]]
