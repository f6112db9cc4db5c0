"""``magicube explore``: one HTML page that answers "Will it be faster?" for a mask, without a server.

The page is a template with the scripts of the folder ``explorer`` and the constants of the cost models, which
``benchmarks/explorer_data.py`` writes, so that a page needs neither a GPU nor the compiler's wheels.
"""

from __future__ import annotations

import base64
import json
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicube_cutlass import __version__
from magicube_cutlass.cli.arguments import ENDINGS, Json, TensorName, VectorLength, check_file, check_length, print_json

if TYPE_CHECKING:
    from magicube_cutlass.formats.pattern import Pattern

FOLDER = Path(__file__).with_name("explorer")
DATA = FOLDER / "data.json"
SCRIPTS = ("mask.js", "order.js", "model.js", "draw.js", "page.js")
MAX_CELLS = 2**26  # of a mask: 8 MB of the page


def packed_mask(pattern: Pattern, is_smtx: bool) -> dict[str, Any]:
    """Return a mask of V = 1 as the page holds it: a bit per element, or per vector of an .smtx file, in base64."""
    import numpy as np

    rows, columns = pattern.shape
    if rows * columns > MAX_CELLS:
        raise ValueError(f"mask must have at most {MAX_CELLS} elements, got {rows} x {columns}")
    bits = np.packbits(pattern.to_dense().numpy(), bitorder="little")
    return {"rows": rows, "cols": columns, "unit": "vector" if is_smtx else "element",
            "bits": base64.b64encode(bits.tobytes()).decode()}  # fmt: skip


def this_cpu() -> dict[str, Any]:
    """Return the CPU of this machine as the page predicts its products: measured in 0.2 s, or read from the cache."""
    from dataclasses import asdict

    from cute_kernels.cpu import engine
    from magicube_cutlass.dispatch.cpu_costs import Processor, processor

    name = f"this CPU: {processor()}, {engine.isa()}"
    return {"name": name, "kind": "cpu", "here": True, **asdict(Processor.here())}


def page_text(start: dict[str, Any] | None = None, cpu: dict[str, Any] | None = None) -> str:
    """Return the page.

    Parameters
    ----------
    start : dict, optional
        Mask that the page opens with, as :func:`packed_mask` returns it, and its name.
    cpu : dict, optional
        CPU to offer, as :func:`this_cpu` returns it.
    """
    data = json.loads(DATA.read_text())
    data["version"], data["start"] = __version__, start
    if cpu is not None:
        data["machines"].insert(0, cpu)
    parts = {
        "STYLE": (FOLDER / "page.css").read_text(),
        "SCRIPT": "\n".join((FOLDER / name).read_text() for name in SCRIPTS),
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),  # ends no script element
    }
    text = (FOLDER / "page.html").read_text()
    for name, part in parts.items():
        text = text.replace(f"/*{name}*/", part)
    return text


def explore(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help=f"A matrix: {', '.join(ENDINGS)}.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output page. Default: a temporary file.")] = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    vector_length: VectorLength = None,
    tensor: TensorName = None,
    as_json: Json = False,
) -> None:
    """Write and open a page that predicts whether the sparse product is faster."""
    check_length(vector_length)
    start: dict[str, Any] | None = None
    if file is not None:
        check_file(file)
        from magicube_cutlass.formats.files import read_pattern

        is_smtx = file.name.removesuffix(".gz").endswith(".smtx")
        mask = packed_mask(read_pattern(file, vector_length=1, tensor=tensor).pattern, is_smtx)
        start = {"name": file.name, "v": vector_length, **mask}
    from cute_kernels.cpu import extension

    text = page_text(start, this_cpu() if extension.available() else None)
    if out is None:
        out = Path(tempfile.mkdtemp(prefix="magicube-")) / "explore.html"
    out.write_text(text)
    opened = show and webbrowser.open(out.resolve().as_uri())
    if as_json:
        print_json({"out": str(out), "opened": bool(opened)})
    else:
        typer.echo(f"wrote {out}" + ("" if opened or not show else "; open it in a browser"))
