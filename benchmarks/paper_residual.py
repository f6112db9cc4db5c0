"""The values printed in the residual-compensation paper beside the library's: every table and figure with numbers.

Writes ``benchmarks/results/paper_residual_cpu.json`` (``..._cuda.json``), ``docs/images/paper_residual.png`` and the
tables of ``docs/lab/paper-residual.md``. A section that is not named keeps its results, date and commit, so that a
long run can be split.
``paper_residual_avx512.json`` and ``..._amx.json`` are ``table4 layers --out FOLDER`` on a processor that has them,
with ``MAGICUBE_CPU`` set. Tables 6 and 7 come from ``examples/qr_table.py`` and ``examples/lenet_fashion_mnist.py``.
Source: Gu, arXiv 2403.06924.
Run: ``python benchmarks/paper_residual.py [accuracy table4 table3 figure1 layers] [--sizes4 512,1024] [--device cuda]
[--out FOLDER]``
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from printed import accuracy, gpu_rates, page, rates
from printed.plot import draw
from printed.values import DENSITIES_3, DENSITIES_4, TABLE_3, TABLE_4
from rich.console import Console
from rich.markdown import Markdown

from magicube_cutlass.cli.environment import provenance

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "lab" / "paper-residual.md"
SECTIONS = ("accuracy", "table4", "table3", "figure1", "layers")


def sizes_of(text: str) -> tuple[int, ...]:
    """Return the numbers of a list with commas."""
    return tuple(int(part) for part in text.split(",") if part)


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows by n, new ones in place of old ones."""
    return [row for _, row in sorted({**{r["n"]: r for r in old}, **{r["n"]: r for r in new}}.items())]


def tables(results: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return the page's tables by mark; what has not run is left out."""
    found = {f"table-{i}": page.rates(results, f"table {i}") for i in (3, 4)}
    if set(results.get("sections", {})) >= set(SECTIONS):
        found["machine"] = page.machine(results["machine"], results["sections"])
    if "example" in results:
        found |= {"example": page.example(results["example"]), "table-5": page.table_5(results)}
    paths = {path: folder / f"paper_residual_{path}.json" for path in ("avx512", "amx")}
    if measured := {path: json.loads(each.read_text()) for path, each in paths.items() if each.is_file()}:
        found["processors"] = page.processors(measured)
    if "table 4" in results:
        found["figure-7"] = page.figure_7(rates.shares(results["table 4"]))
    if (path := folder / "paper_residual_cuda.json").is_file():
        found |= page.on_a_gpu(json.loads(path.read_text()))
    if "figure 1" in results:
        found["figure-1"] = page.figure_1(results["figure 1"])
    if "layers" in results:
        found["layers"] = page.layers(results["layers"])
    for mark, stem, render in (("table-6", "qr_table", page.table_6), ("table-7", "lenet", page.table_7)):
        if (path := folder / f"{stem}.json").is_file():
            found[mark] = render(json.loads(path.read_text())["rows"])
    return found


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write the JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def write_page(found: dict[str, str], path: Path = PAGE, script: str = "paper_residual") -> None:
    """Put each table between its marks, which name the script."""
    text = path.read_text()
    for mark, made in found.items():
        start, end = f"<!-- {mark}: benchmarks/{script}.py writes this -->", f"<!-- end {mark} -->"
        before, opened, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"{path.name} must have the marks {start!r} and {end!r}")
        text = f"{before}{start}\n{made}\n{end}{after}"
    path.write_text(text)


def main(
    sections: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(SECTIONS)}; default: all.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    quick: Annotated[bool, typer.Option(help="n = 64; needs --out.")] = False,
    render: Annotated[bool, typer.Option(help="Measure nothing; draw and write the page.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for results and plot; the page stays.")] = None,
    sizes3: Annotated[
        str, typer.Option(help=f"Sizes of Table 3; printed: {', '.join(map(str, TABLE_3))}.")
    ] = "1024,4096",
    sizes4: Annotated[
        str, typer.Option(help=f"Sizes of Table 4; printed: {', '.join(map(str, TABLE_4))}.")
    ] = "512,1024,2048,4096,8192",
    sizes1: Annotated[str, typer.Option(help="Sizes of Figure 1.")] = "512,1024,2048",
    sizes_layers: Annotated[
        str, typer.Option(help="Columns of fully connected layers.")
    ] = "128,256,512,1024,2048,4096",
    mkl: Annotated[Path | None, typer.Option(help="libmkl_rt of the wheel mkl.")] = None,
    eigen: Annotated[Path | None, typer.Option(help="Folder of Eigen's headers.")] = None,
) -> None:
    """Measure, write and draw."""
    if quick and out is None:
        raise typer.BadParameter("--quick needs --out: its figures do not belong in the project")
    if wrong := set(sections or ()) - set(SECTIONS):
        raise typer.BadParameter(f"sections must be of {SECTIONS}, got {sorted(wrong)}")
    path = (out or RESULTS) / f"paper_residual_{device}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    chosen = () if render else tuple(sections or SECTIONS)
    if chosen:
        machine = provenance()
        results |= {"machine": machine, "device": device}
        ran = {name: {"date": machine["date"], "commit": machine["commit"]} for name in chosen}
        results["sections"] = {**results.get("sections", {}), **ran}
    on_gpu = device != "cpu"
    budget = 0.05 if quick else 0.2 if on_gpu else 3.0
    if "accuracy" in chosen:
        results["n"] = 64 if quick else 1024
        results["example"] = accuracy.worked_example()
        results["figures 6 and 8"] = accuracy.errors_by_threshold(results["n"], device)
        results["table 5"] = accuracy.accuracies(results["n"], device)
    for section, name, sizes, densities in (
        ("table4", "table 4", sizes4, DENSITIES_4),
        ("table3", "table 3", sizes3, DENSITIES_3),
    ):
        for n in ((64,) if quick else sizes_of(sizes)) if section in chosen else ():
            row = (gpu_rates if on_gpu else rates).whole_calls(n, densities, budget)
            results[name] = merged(results.get(name, []), [row])
            write_results(path, results)  # a run that is stopped goes on with the next size
    if "figure1" in chosen and not on_gpu:
        results["figure 1"] = rates.dense_rates((64,) if quick else sizes_of(sizes1), budget, mkl, eigen)
    for n in ((16,) if quick else sizes_of(sizes_layers)) if "layers" in chosen else ():
        batch = 50 if quick else rates.BATCH
        row = gpu_rates.layer_calls(n, budget) if on_gpu else rates.layer_rates(n, budget, batch)
        results["layers"] = merged(results.get("layers", []), [row])
        write_results(path, results)
    write_results(path, results)
    made = page.on_a_gpu(results) if on_gpu else tables(results, RESULTS)
    console = Console(width=170)
    for text in made.values():
        console.print(Markdown(text))
    if on_gpu or "figures 6 and 8" not in results:
        return  # the picture and the page are of runs with all sections on a CPU
    console.print(draw(results, (ROOT / "docs" / "images" if out is None else path.parent) / "paper_residual.png"))
    if out is None:
        write_page(made)


if __name__ == "__main__":
    typer.run(main)
