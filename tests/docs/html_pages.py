"""What tests ask of built HTML: links, tables, code, and widths in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (1280, 390)  # pixels
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
# Loads every page in a frame of each width and reports what sticks out of it.
MEASURE = """<!doctype html><body><script>
const pages = PAGES, widths = WIDTHS, found = [];
const look = (page, width) => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.onload = () => setTimeout(() => {
    const root = frame.contentDocument.documentElement, wide = root.scrollWidth - root.clientWidth;
    if (wide > 1) {
      const limit = root.clientWidth + 1;
      const names = [...root.querySelectorAll("article *")].filter(e => e.getBoundingClientRect().right > limit)
        .slice(0, 3).map(e => e.tagName + "." + e.className);
      found.push([page, width, wide, names]);
    }
    for (const e of root.querySelectorAll("article pre, article table")) {
      let box = e;
      while (box !== root && box.scrollWidth <= box.clientWidth + 1) box = box.parentElement;
      if (box !== root && box.tagName !== "ARTICLE" && getComputedStyle(box).overflowX === "hidden")
        found.push([page, width, "cut", [e.tagName]]);
    }
    frame.remove(); done();
  }, 30);
  frame.src = page; document.body.append(frame);
});
(async () => {
  for (const page of pages) await Promise.all(widths.map(width => look(page, width)));
  fetch("/measured", {method: "POST", body: JSON.stringify(found)});
})();
</script></body>"""


class Page(HTMLParser):
    """Identifiers, links, text outside of code, and the cells of each table row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.images: list[str] = []
        self.prose: list[str] = []
        self.codes: list[str] = []
        self.tables: list[list[int]] = []
        self.open_tags: list[str] = []
        self._table_stack: list[list[int]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.add(str(found["id"]))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag == "img" and found.get("src"):
            self.images.append(str(found["src"]))
        if tag == "table":
            self._table_stack.append([])
            self.tables.append(self._table_stack[-1])
        if tag == "tr" and self._table_stack:
            self._table_stack[-1].append(0)
        if tag in ("td", "th") and self._table_stack:
            self._table_stack[-1][-1] += int(found.get("colspan") or 1)
        if tag == "pre":
            self.codes.append("")
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "table" and self._table_stack:
            self._table_stack.pop()
        while self.open_tags and self.open_tags.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "pre" in self.open_tags:
            self.codes[-1] += data
        elif not {"script", "style", "code", "title"} & set(self.open_tags):
            self.prose.append(data)


def pages(folder: Path) -> dict[str, Page]:
    """Return the pages by their path, without the sources that viewcode shows."""
    found = sorted(path for path in folder.rglob("*.html") if "_static" not in path.parts)
    return {str(path.relative_to(folder)): Page(path.read_text()) for path in found}


def broken_text(found: dict[str, Page]) -> Iterator[str]:
    """Yield rows and marks of Markdown that a page shows as text."""
    for name, page in found.items():
        for text in page.prose:
            for line in text.splitlines():
                if re.match(r"\s*\|.*\|", line) or re.search(r"```|^\s*#{1,4} \w|\]\(", line):
                    yield f"{name}: {line.strip()[:60]}"


def broken_tables(found: dict[str, Page]) -> Iterator[str]:
    """Yield tables whose rows have different numbers of cells, and empty code."""
    for name, page in found.items():
        yield from (f"{name}: rows of {sorted(set(rows))} cells" for rows in page.tables if len(set(rows)) > 1)
        if not name.startswith("_modules"):
            yield from (f"{name}: empty code" for code in page.codes if not code.strip())


def broken_links(folder: Path, found: dict[str, Page]) -> Iterator[str]:
    """Yield internal links and pictures that lead nowhere."""
    for name, page in found.items():
        for link in [*page.links, *page.images]:
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (folder / name).parent / unquote(path) if path else folder / name
            key = str(target.resolve().relative_to(folder.resolve()))
            checked = key in found and not name.startswith("_modules")  # viewcode links back to names of other modules
            if not target.exists() or (anchor and checked and unquote(anchor) not in found[key].ids):
                yield f"{name}: {link}"


def browser() -> str | None:
    """Return a Chromium, None if there is none."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def overflows(folder: Path, names: list[str], chromium: str) -> list[list[Any]]:
    """Return [page, width, pixels, elements] of pages that are wider than their window."""
    answer: list[Any] = []
    done = threading.Event()
    script = MEASURE.replace("PAGES", json.dumps(names)).replace("WIDTHS", json.dumps(WIDTHS)).encode()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/measure":
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(script)

        def do_POST(self) -> None:
            answer.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            done.set()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        command += ["--window-size=1400,1000", f"http://127.0.0.1:{server.server_address[1]}/measure"]
        command += ["--remote-debugging-port=0"]  # stays open until it is ended
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            if not done.wait(timeout=100):
                raise TimeoutError("the browser did not measure the pages in 100 s")
        finally:
            process.terminate()
            process.wait(timeout=10)
            server.shutdown()
            server.server_close()
    return answer
