"""Write what the page of ``magicube explore`` computes with.  Run: ``python benchmarks/explorer_data.py``

Constants of the cost models come from the library, measured times from ``benchmarks/results``. Dense products of other
libraries have no cost model: the page uses a fit to all measured shapes, whose errors it states.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from cute_kernels.atoms import atom
from cute_kernels.dtypes import SPMM_PAIRS, Integer
from cute_kernels.gemm.config import Products
from cute_kernels.gemm.heuristics import BYTES_PER_US, LEAST_US, costed_candidates, ctas_per_sm
from cute_kernels.layout.column_order import PHASE
from cute_kernels.layout.fragments import gather_order
from cute_kernels.machine import (
    MMA_COLUMNS,
    PANEL_ARCHES,
    SHARED_BYTES,
    GatherModel,
    Machine,
    PanelModel,
    Problem,
    ProblemTypes,
    ResidentModel,
)
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import (
    PANEL_VECTORS,
    RESIDENT_BYTES,
    RESIDENT_CLUSTERS,
    RESIDENT_ROWS,
    RESIDENT_STAGES,
    candidates,
)
from cute_kernels.spmm.panel import PanelConfig
from cute_kernels.spmm.resident import ResidentConfig
from magicube_cutlass.cli.arguments import LENGTHS, STRIDES
from magicube_cutlass.cli.explore import DATA
from magicube_cutlass.dispatch.cpu_costs import CLASSES, FEW, HALF, CpuCosts, fit_costs
from magicube_cutlass.dispatch.dense_fallback import CPU_CALL, CPU_ROW, CPU_SHORT

sys.path.append(str(Path(__file__).resolve().parent / "plots"))
import roofline

RESULTS = Path(__file__).resolve().parent / "results"
OUT = "float16"
PANEL = ("warps", "rows_per_warp", "cluster", "tile", "stages", "tile_window", "tile_n", "tile_n_bytes", "a_stages",
         "mma_k", "products", "vector_length")  # fmt: skip
GATHER = ("warps", "split_k_warps", "threads", "smem_bytes", "tile_n", "tile_n_bytes", "shares_long_rows", "mma_k",
          "vector_length")  # fmt: skip
RESIDENT = ("warps", "together", "tile_n", "tile_n_bytes", "mma_k", "record_bytes", "sum_words")
GPUS = (  # name, architecture, SMs, whether cost models and dense products were measured on it
    ("NVIDIA H200", "sm_90a", 132, True),
    ("NVIDIA H100 SXM", "sm_90a", 132, False),
    ("NVIDIA A100", "sm_80", 108, False),
)
DENSE = ("dense fp16", "dense fp8", "dense int8")  # of torch: cuBLASLt
GPU_FILES, CPU_LAYERS, CPU_SPMM = ("spmm_h200", "llm_h200", "dlmc_h200"), "cpu_layers", "cpu_spmm"
Shapes = list[tuple[tuple[int, int, int], float]]


def load(name: str) -> dict[str, Any]:
    """Return one results file."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def source(name: str) -> dict[str, str]:
    """Return file, machine, date and commit of a results file."""
    machine, is_cpu = load(name)["machine"], name.startswith("cpu_")
    chip = f"{machine['cpu']}, {machine['engine path']}" if is_cpu else machine["gpu"]
    return {
        "file": f"{name}.json",
        "kind": "cpu" if is_cpu else "gpu",
        "machine": chip,
        "torch": machine["torch"],
        "date": machine["date"],
        "commit": machine.get("commit", "not recorded"),
    }


def kernels(arch: str, rows: dict[str, list[list[Any]]]) -> dict[str, Any]:
    """Return the configs that selection compares, by operands and by bytes of the N tile; `rows` collects them."""

    def place(config: GatherConfig | PanelConfig) -> tuple[str, int]:
        is_panel = isinstance(config, PanelConfig)
        kind, names = ("panel", PANEL) if is_panel else ("gather", GATHER)
        values = [getattr(config, name) for name in names]
        if not is_panel:
            values.append(config.digits[0] * config.digits[1])
        row = [config.name.rpartition("-")[2], *(int(each) for each in values)]
        if row not in rows[kind]:
            rows[kind].append(row)
        return kind, rows[kind].index(row)

    found = {}
    for v in (each for each in LENGTHS if each >= MMA_COLUMNS):
        for a, b in SPMM_PAIRS:
            kind = ProblemTypes(v, Integer(a, True), Integer(b, True), OUT)
            tiles: dict[str, dict[str, list[int]]] = {}
            for row_bytes in (1, 17, 33, 4096):  # of B: for each small N tile, and for large N
                problem = Problem(64, 4096, 64 * 400, 400, -(-row_bytes * 8 // b))
                configs = candidates(kind, Machine(arch, 132), problem)
                size = "wide" if row_bytes > 64 else str(configs[0].tile_n_bytes)
                places = [place(config) for config in configs if not isinstance(config, ResidentConfig)]
                tiles[size] = {kind: [i for name, i in places if name == kind] for kind in ("gather", "panel")}
                if arch in PANEL_ARCHES and size != "wide" and int(size) <= RESIDENT_BYTES:
                    base = ResidentConfig(configs[0].atom, v, configs[0].a, configs[0].b, OUT, tile_n_bytes=int(size))
                    tiles[size]["resident"] = [getattr(base, name) for name in RESIDENT]
            first = configs[0]
            prefix = f"{first.atom}-v{v}-{first.a.name}x{first.b.name}-{OUT}"
            found[f"{v}-{a}x{b}"] = {"prefix": prefix, "atom": first.atom, "tiles": tiles}
    return found


def constants() -> dict[str, Any]:
    """Return the constants of the cost models and of kernel selection."""
    rows: dict[str, list[list[Any]]] = {"panel": [], "gather": []}
    spmm = {arch: kernels(arch, rows) for arch in sorted({arch for _, arch, _, _ in GPUS})}
    names = {each["atom"] for table in spmm.values() for each in table.values()}
    atoms = {name: atom(name) for name in sorted(names)}
    gemm = {}
    for arch in spmm:
        costed = costed_candidates(Products(1, 1, 1), arch, OUT)
        gemm[arch] = [[c.tile_m, c.tile_n, c.tile_k, c.cluster, ctas_per_sm(c), *cost] for c, cost in costed]
    panel = asdict(PanelModel())
    share = {f"{warps} {rows}": cost for (warps, rows), cost in panel.pop("share")}
    return {
        "out": OUT,
        "pairs": [list(pair) for pair in SPMM_PAIRS],
        "lengths": list(LENGTHS),
        "strides": list(STRIDES),
        "mma_columns": MMA_COLUMNS,
        "shared_bytes": SHARED_BYTES,
        "panel_vectors": PANEL_VECTORS,
        "phase": PHASE,
        "models": {
            "panel": panel | {"share": share}, "gather": asdict(GatherModel()), "resident": asdict(ResidentModel()),
        },
        "resident": {"clusters": RESIDENT_CLUSTERS, "rows": RESIDENT_ROWS, "stages": RESIDENT_STAGES},
        "fields": {"panel": ["tag", *PANEL], "gather": ["tag", *GATHER, "digit_products"],
                   "resident": list(RESIDENT)},
        "configs": rows,
        "spmm": spmm,
        "gather_order": {name: [gather_order(each)(k) for k in range(each.shape[2])] for name, each in atoms.items()},
        "gemm": {"tiles": gemm, "least_us": LEAST_US, "bytes_per_us": BYTES_PER_US},
        "cpu": {
            "classes": list(CLASSES), "few": FEW, "call": CPU_CALL, "row": CPU_ROW, "short": CPU_SHORT, "half": HALF,
        },
    }  # fmt: skip


def machines() -> list[dict[str, Any]]:
    """Return the machines that the page offers; ``magicube explore`` adds the CPU that it runs on."""
    gpus = [
        {"name": name, "kind": "gpu", "arch": arch, "sms": sms, "measured": measured}
        for name, arch, sms, measured in GPUS
    ]
    costs = asdict(CpuCosts())
    xeon = {
        "name": "Xeon with AVX512-VNNI",
        "kind": "cpu",
        "costs": costs,
        "threads": 1,
        "packs_layers": True,
        "panel_columns": 64,
    }
    return [*gpus, xeon]  # fmt: skip


def dense_times() -> dict[str, Shapes]:
    """Return the measured shapes and microseconds of each dense product of torch on the H200."""
    found: dict[str, dict[tuple[int, int, int], list[float]]] = {name: {} for name in DENSE}
    for case in load("llm_h200")["cases"]:
        for name in DENSE:
            if name in case["dense"]:
                found[name].setdefault(tuple(case["shape"]), []).append(case["dense"][name])
    for case in load("dlmc_h200")["dense"]:
        for name in DENSE:
            if name in case:
                found[name].setdefault(tuple(case["shape"]), []).append(case[name])
    for case in load("spmm_h200")["spmm"]:
        for row in case["rivals"]:
            if row["name"] in DENSE and "us" in row:
                found[row["name"]].setdefault(tuple(case["shape"]), []).append(row["us"])
    return {name: [(shape, median(times)) for shape, times in rows.items()] for name, rows in found.items()}


def dense_terms(m: int, k: int, n: int) -> tuple[float, ...]:
    """Terms of a fit: call, operations, bytes of weights, bytes of activations and results."""
    return 1.0, m * k * n / 1e6, m * k / 1e3, (k + m) * n / 1e3


def dense_fits() -> list[dict[str, Any]]:
    """Return costs in microseconds of each dense product, and how far they are from the measured times."""
    found = []
    for name, rows in dense_times().items():
        costs = fit_costs([dense_terms(*shape) for shape, _ in rows], [us for _, us in rows])
        ratios = [sum(c * t for c, t in zip(costs, dense_terms(*shape), strict=True)) / us for shape, us in rows]
        errors = [max(ratio, 1 / ratio) - 1 for ratio in ratios]
        found.append(
            {
                "name": name,
                "costs": [float(f"{cost:.4g}") for cost in costs],
                "shapes": len(rows),
                "median_error": round(median(errors), 3),
                "p90_error": round(quantiles(errors, n=10)[8], 3),
            }
        )
    return found


def measured_rows() -> list[dict[str, Any]]:
    """Return the measured sparse products, each beside the dense ones of its run."""
    found: list[dict[str, Any]] = []

    def add(
        file: str, shape: list[int], density: float, v: int, pair: str, ours: float, dense: dict[str, float]
    ) -> None:
        times = {name: float(f"{us:.4g}") for name, us in dense.items()}
        found.append({"file": file, "shape": shape, "density": round(density, 4), "v": v, "pair": pair,
                      "us": float(f"{ours:.4g}"), "dense": times})  # fmt: skip

    for case in load("spmm_h200")["spmm"]:
        dense = {row["name"]: row["us"] for row in case["rivals"] if row["name"] in DENSE and "us" in row}
        for row in case["ours"]:
            pair, _, v = row["name"].partition(" V=")
            add("spmm_h200", case["shape"], 1 - case["sparsity"], int(v), pair, row["us"], dense)
    for case in load("llm_h200")["cases"]:
        dense = {name: us for name, us in case["dense"].items() if name in DENSE}
        for row in case["ours"]:
            add("llm_h200", case["shape"], 1 - row["sparsity"], 8, row["pair"], row["us"], dense)
    for isa in ("avx2", "avx512", "amx"):
        for row in load(f"{CPU_LAYERS}_{isa}")["results"]:
            dense = {name: us for name, us in row["us"].items() if not name.startswith("ours")}
            for name, us in row["us"].items():
                if name.startswith("ours, "):
                    shape = [row["out"], row["in"], row["tokens"]]
                    add(f"{CPU_LAYERS}_{isa}", shape, 1 - float(name[6:]), 8, "L8-R8", us, dense)
    for name in (f"{CPU_SPMM}_avx2", CPU_SPMM):
        for size in load(name)["sizes"]:
            for row in size["rows"]:
                dense = {
                    kind: 1e3 * ms
                    for kind, ms in row["ms"].items()
                    if kind not in ("magicube", "dense") and "CSR" not in kind
                }
                add(name, [size["n"]] * 3, row["density"], 8, "L8-R8", 1e3 * row["ms"]["magicube"], dense)  # fmt: skip
    return found


def data() -> dict[str, Any]:
    """Return all that the page computes with and shows."""
    rows = measured_rows()
    files = dict.fromkeys([*GPU_FILES, *(row["file"] for row in rows)])
    roof = {"memory": roofline.MEMORY, "l2": roofline.L2, "mma": roofline.MMA, "gathered": roofline.GATHERED}
    return {
        "constants": constants(),
        "machines": machines(),
        "roofline": {"machine": "NVIDIA H200", **roof},
        "dense_fits": dense_fits(),
        "dense_times": {
            name: [[*shape, float(f"{us:.4g}")] for shape, us in rows] for name, rows in dense_times().items()
        },
        "host_us": round(median(row["enqueue_us"] for case in load("spmm_h200")["spmm"] for row in case["ours"])),
        "sources": {name: source(name) for name in files},
        "measured": rows,
    }


def text() -> str:
    """Return the file: an entry per line, so that changes can be read."""
    parts = []
    for name, value in data().items():
        if not isinstance(value, (dict, list)):
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
            continue
        lines = value.items() if isinstance(value, dict) else enumerate(value)
        inner = ",\n".join(
            (f"{json.dumps(key)}: " if isinstance(value, dict) else "") + json.dumps(each, separators=(",", ":"))
            for key, each in lines
        )
        parts.append(f"{json.dumps(name)}: " + (f"{{\n{inner}\n}}" if isinstance(value, dict) else f"[\n{inner}\n]"))
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    DATA.write_text(text())
    print(f"wrote {DATA}")
