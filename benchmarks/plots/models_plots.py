"""Draw the results of ``models.py``: quality by sparsity, and by steps of distillation, and the tables of the page.

Run: ``PYTHONPATH=. python benchmarks/plots/models_plots.py`` writes ``docs/lab/models.md`` and its pictures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from smollm_plots import draw_language, grid, render_language
from smollm_plots import points_of as language_points

from magicube_cutlass.bench.figures import (
    COLORS,
    DENSE,
    MARKERS,
    OTHER,
    label_ends,
    label_points,
    note,
    panels,
    save_figure,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "models_quality.json"
SPEED = RESULTS.with_name("models_speed.json")
LANGUAGE_SPEED = RESULTS.with_name("models_speed_smollm.json")
PAGE = ROOT / "docs" / "lab" / "models.md"
SPARSITIES = (0.3, 0.5, 0.7, 0.9)
ROWS = (
    ("distilled", "end", None),
    ("OBS + refit, by layer", "oneshot", ("obs", True, "output_energy", 1500)),
    ("OBS + refit", "oneshot", ("obs", True, "uniform", 128)),
    ("Wanda", "oneshot", ("wanda", False, "uniform", 128)),
    ("magnitude", "oneshot", ("magnitude", False, "uniform", 128)),
)


Kind = tuple[str, bool, str, int]  # method, refit, allocation, sentences of each source


def points_of(rows: list[dict[str, Any]], stage: str, kind: Kind | None) -> list[tuple[float, float]]:
    """Sparsity and Spearman x 100 with W8A8 of the rows of one kind, by sparsity."""
    found = {}
    for row in rows:
        is_final = kind is None and row.get("name", "").startswith("final")
        own = tuple(row.get(key) for key in ("method", "refit", "allocation", "n"))
        if row["stage"] == stage and (is_final or (own == kind and row["damp"] == 0.01)):
            found[row["s"]] = row["w8a8_sts"]
    return sorted(found.items())


def _note(rows: list[dict[str, Any]]) -> str:
    done = next(row for row in rows if row["stage"] == "done")
    return f"pruned and trained on an {done['device']}, torch {done['torch']}, 8-bit products emulated in float32"


def draw_by_sparsity(results: dict[str, Any]) -> Figure:
    """Spearman of all pairs of STS-B by sparsity: one-shot and distilled, with the dense model and the floor."""
    rows = results["gpu"]
    figure, (axes,) = panels(size=(8.4, 4.8))
    ends = {}
    for (name, stage, kind), color, marker in zip(ROWS, COLORS, MARKERS, strict=False):
        points = points_of(rows, stage, kind)
        if points:
            axes.plot(*zip(*points, strict=True), f"{marker}-", color=color)
            ends[name] = (*points[-1], color)
    dense = next(row for row in rows if row["stage"] == "dense")["sts"]
    floor = next(row for row in _encoders(results) if row["name"] == "floor")["STS-B"]["all"]
    for value, name, color in ((dense, "float32, dense", "black"), (floor, "all layers zero", OTHER)):
        axes.axhline(value, color=color, linewidth=1, linestyle="--")
        axes.text(0.29, value + 0.5, name, color=color, fontsize=9)
    axes.set(
        xlabel="sparsity in 8 x 1 vectors (share of zeros)",
        ylabel="STS-B Spearman x 100",
        xlim=(0.28, 0.92),
        ylim=(44, 86),
    )
    axes.set_title("all-MiniLM-L6-v2, W8A8, 1,379 pairs")
    note(figure, _note(rows))
    label_ends(axes, ends)
    return figure


def draw_by_steps(results: dict[str, Any]) -> Figure:
    """Spearman of all pairs of STS-B by steps of distillation."""
    rows = results["gpu"]
    figure, (axes,) = panels(size=(7.6, 4.6))
    ends = {}
    for i, sparsity in enumerate((0.5, 0.7, 0.9)):
        own = [row for row in rows if row.get("name") == f"final_{sparsity}" and "sts" in row]
        points = sorted({row.get("step", 0): row["sts"] for row in own if row["stage"] in ("start", "distill")}.items())
        if points:
            axes.plot(*zip(*points, strict=True), f"{MARKERS[i]}-", color=COLORS[i])
            ends[f"{sparsity:.0%} zeros"] = (*points[-1], COLORS[i])
    dense = next(row for row in rows if row["stage"] == "dense")["sts"]
    axes.axhline(dense, color=DENSE, linewidth=1, linestyle="--")
    axes.text(0, dense + 0.25, "float32, dense", color=DENSE, fontsize=9)
    axes.set(xlabel="steps of distillation (batches of up to 64 sentences)", ylabel="STS-B Spearman x 100")
    axes.set_title("all-MiniLM-L6-v2, pruned in 8 x 1 vectors")
    note(figure, _note(rows))
    label_ends(axes, ends)
    return figure


def quality_by_name(results: dict[str, Any]) -> dict[str, float]:
    """Spearman of all pairs by the names of ``models_speed.py``."""
    rows = {each["name"]: each for each in _encoders(results)}
    dense = rows["dense"]["float32"]["all"]
    found = {"float32": dense, "ONNX Runtime float32": dense, "ours, 0": rows["dense"]["W8A8"]["all"]}
    found["ours, smooth"] = found["ours, fused GELU"] = rows["smooth"]["W8A8 smooth"]["all"]
    found |= {name: rows[name]["STS-B"]["all"] for name in ("torch dynamic int8", "ONNX Runtime int8") if name in rows}
    for s in SPARSITIES:
        if f"distilled, {s}" in rows:
            found[f"ours, distilled {s}"] = rows[f"distilled, {s}"]["W8A8"]["all"]
    return found | {f"{name}, compiled": value for name, value in found.items()}


def draw_pareto(results: dict[str, Any]) -> Figure:
    """Quality against sentences a second of :data:`SPEED`, one thread, batches of 32."""
    speed = json.loads(SPEED.read_text())
    (case,) = [each for each in speed["cases"] if (each["threads"], each["batch"]) == (1, 32)]
    rates, quality = {row["name"]: row["best"] for row in case["rows"]}, quality_by_name(results)
    figure, (axes,) = panels(size=(8.0, 4.8))
    points = {name: (rate, quality[name]) for name, rate in rates.items() if name in quality}
    colors = {name: COLORS[0] if name.startswith("ours") else DENSE for name in points}
    for name, point in points.items():
        axes.plot(*point, "o" if name.startswith("ours") else "s", color=colors[name])
    axes.set(xlabel=f"rate (sentences of {speed['tokens']} tokens a second), one thread, batches of 32")
    axes.set_ylabel("STS-B Spearman x 100")
    axes.set_title("all-MiniLM-L6-v2 on a CPU")
    axes.margins(0.12)
    label_points(axes, [(*point, name, colors[name]) for name, point in points.items()])
    machine = speed["machine"]
    note(figure, f"{machine['cpu']}, torch {machine['torch']}, {machine['date']}, commit {machine['commit']}")
    return figure


def _machine(results: dict[str, Any], path: Path) -> str:
    machine = results["machine"]
    return (
        f"Source: [{path.name}](../../benchmarks/results/{path.name}): {machine['cpu']}, torch {machine['torch']}, "
        f"{machine['date']}, commit {machine['commit']}."
    )


def render_speed(results: dict[str, Any], speed: dict[str, Any]) -> str:
    """Sentences a second of every way to run the encoder, beside the fastest int8 baseline."""
    quality, cases = quality_by_name(results), speed["cases"]
    rows, tables = [], [{row["name"]: row for row in case["rows"]} for case in cases]
    fastest = [max(each["best"] for name, each in table.items() if "int8" in name) for table in tables]
    for name, first in tables[0].items():
        rates = [
            f"{t[name]['best']:.0f} ({t[name]['best'] / best:.2f}x)" for t, best in zip(tables, fastest, strict=True)
        ]
        shown = f"{quality[name]:.2f}" if name in quality else "-"
        rows.append([name, shown, f"{first['state bytes'] / 1e6:.0f}", *rates])
    plural = {1: "1 thread", 2: "2 threads"}
    head = [f"batch {case['batch']}, {plural[case['threads']]}" for case in cases]
    table = grid(["sentences of 16 tokens a second", "Spearman x 100", "MB", *head], rows)
    return f"{table}\n\nIn brackets: beside the fastest int8 baseline. {_machine(speed, SPEED)}"


def render_language_speed(speed: dict[str, Any]) -> str:
    """Tokens a second of the language model."""
    cases, names = speed["cases"], {row["name"]: row["state bytes"] for case in speed["cases"] for row in case["rows"]}
    rows, tables = [], [{row["name"]: row for row in case["rows"]} for case in cases]
    for name, size in names.items():
        cells = [f"{table[name]['best']:.1f}" if name in table else "-" for table in tables]
        rows.append([name, f"{size / 1e6:.0f}" if size else "-", *cells])
    plural = {1: "1 thread", 2: "2 threads"}
    head = [
        f"{'new tokens' if case['kind'] == 'decode' else 'prompt of 512'}, {plural[case['threads']]}" for case in cases
    ]
    table = grid(["SmolLM2-135M, tokens a second, batch 1", "MB", *head], rows)
    return f"{table}\n\n{_machine(speed, LANGUAGE_SPEED)}"


def render_quality(results: dict[str, Any]) -> str:
    """Spearman with W8A8 by method and sparsity, pruned and trained on a GPU."""
    rows, names = [], {"uniform": "uniform", "gauss_newton": "Gauss-Newton", "output_energy": "output energy"}
    kinds = {(each["method"], each["refit"], each["allocation"], each["n"]): None for each in results["gpu"]
             if each["stage"] == "oneshot" and each["damp"] == 0.01}  # fmt: skip
    for kind in sorted(kinds, key=lambda each: (each[3], names[each[2]], each[0], each[1])):
        found = dict(points_of(results["gpu"], "oneshot", kind))
        cells = [f"{found[each]:.2f}" if each in found else "-" for each in SPARSITIES]
        method, refit, allocation, n = kind
        rows.append([f"{method}{', refit' * refit}; {names[allocation]}; {6 * n:,} sentences", *cells])
    found = dict(points_of(results["gpu"], "end", None))
    rows.append(["**distilled**", *[f"**{found[each]:.2f}**" if each in found else "-" for each in SPARSITIES]])
    return grid(["W8A8 on top, STS-B Spearman x 100", *map(str, SPARSITIES)], rows)


def _encoders(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the encoder, those of calibration and training with more text last."""
    found: list[dict[str, Any]] = []
    for section, text in (("minilm", ""), ("minilm, more text", ", more text")):
        known = [each["name"] for each in found]
        rows = results.get(section, {"rows": []})["rows"]
        found += [{**each, "text": text} for each in rows if each["name"] not in known or "refit" in each["name"]]
    return found


def render_engine(results: dict[str, Any]) -> str:
    """The encoders that were run by the int8 kernels of a CPU, by genre."""
    rows = []
    names = {"dense": "dense", "smooth": "dense", "static": "dense"}
    names |= {f"weights, final_{s}": f"distilled on the GPU, {s}" for s in (0.5, 0.7, 0.9)}
    for each in _encoders(results):
        label = names.get(
            each["name"], each["name"] if "refit" in each["name"] or "distilled" in each["name"] else None
        )
        for kind in ("float32", "W8A8", "W8A8 smooth", "W8A8 static"):
            if label and kind in each:
                values = [f"{each[kind][key]:.2f}" for key in ("all", "captions", "forums", "news")]
                cosine = f"{each[kind]['cosine']:.4f}" if "cosine" in each[kind] else "-"
                rows.append([f"{label}{each['text'] * (label != 'dense')}, {kind}", *values, cosine])
    return grid(["run by the kernels of a CPU", "all", "captions", "forums", "news", "held-out cosine"], rows)


def render_training(results: dict[str, Any]) -> str:
    """The distillations that ran on this CPU."""
    rows = []
    for each in _encoders(results):
        if each["name"].startswith("distilled"):
            start, texts = each["start"], " + ".join(f"{number:,} {name}" for name, number in each["texts"].items())
            cells = [f"{each['steps']:,} of {each['of']:,}", f"{start['cpu seconds']:.0f}", f"{each['cpu seconds']:,}"]
            rows.append([str(each["sparsity"]), *cells, texts, f"{each['W8A8']['all']:.2f}"])
    head = ["trained on a CPU, sparsity", "steps", "pruning, s of one core", "training, s of one core", "sentences"]
    return grid([*head, "W8A8, all pairs"], rows)


def _source(results: dict[str, Any]) -> str:
    machine, done = results["machine"], next(each for each in results["gpu"] if each["stage"] == "done")
    return (
        f"Source: [models_quality.json](../../benchmarks/results/models_quality.json): {done['device']}, torch "
        f"{done['torch']}; {machine['cpu']}, torch {machine['torch']}, {machine['date']}, commit {machine['commit']}."
    )


def main() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    from report import replace_section

    results = json.loads(RESULTS.read_text())
    parts = (render_quality, render_engine, render_training, render_language, _source)
    text = "\n\n".join(part(results) for part in parts)
    replace_section("models_quality", text, PAGE)
    speed, language = (json.loads(path.read_text()) for path in (SPEED, LANGUAGE_SPEED))
    replace_section("models_speed", render_speed(results, speed), PAGE)
    replace_section("models_language_speed", render_language_speed(language), PAGE)
    figures = {
        "sparsity": draw_by_sparsity(results),
        "steps": draw_by_steps(results),
        "pareto": draw_pareto(results),
    }
    if language_points(results["smollm"]):
        figures["smollm"] = draw_language(results)
    for name, figure in figures.items():
        print(save_figure(figure, ROOT / "docs" / "images" / f"models_{name}.png"))


if __name__ == "__main__":
    main()
