"""What the page of ``magicube explore`` must compute, by the library; and random cases of it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cute_kernels.dtypes import SPMM_PAIRS, Integer
from cute_kernels.integers import digit_count
from cute_kernels.layout.bank_conflicts import ROW_BYTES, ldmatrix_wavefronts, swizzled
from cute_kernels.layout.column_order import PHASE, ordered_slots, sequential_slots
from cute_kernels.machine import MMA_COLUMNS, Machine, Problem, ProblemTypes
from cute_kernels.spmm.heuristics import candidates, choose_spmm, spmm_cost
from cute_kernels.spmm.panel import PanelConfig
from magicube_cutlass.cli.arguments import LENGTHS, STRIDES
from magicube_cutlass.cli.info import figures as info_figures
from magicube_cutlass.dispatch.cpu_costs import CpuCosts, Processor
from magicube_cutlass.dispatch.dense_fallback import cpu_forecast, dense_cost
from magicube_cutlass.dispatch.plan import problem, size_bucket
from magicube_cutlass.formats.files import FilePattern
from magicube_cutlass.formats.pattern import Pattern

SAMPLED_ROWS = 8
COUNTS = ("vector_rows", "vectors", "nnz", "density", "elements", "element_density", "padding", "empty_rows", "bytes")


def _tuple(x: Any) -> Any:
    return tuple(x) if isinstance(x, list) else x


def machine_of(entry: dict[str, Any], threads: int) -> Machine | Processor:
    """Return a machine of the page as the cost models read it."""
    if entry["kind"] == "gpu":
        return Machine(entry["arch"], entry["sms"])
    costs = CpuCosts(**{name: tuple(map(_tuple, each)) for name, each in entry["costs"].items()})
    return Processor(costs, threads, entry["packs_layers"], entry["panel_columns"])


def wavefronts(columns: torch.Tensor, slots: torch.Tensor, config: PanelConfig) -> tuple[int, int]:
    """Return wavefronts and reads of the first 16 bytes of the rows of B, by their addresses in the ring."""
    group = config.mma_k
    used = -(-(int(slots.max()) + 1) // group) * group if len(slots) else 0
    rows = np.full(used, -1)
    rows[slots.numpy()] = columns.numpy()
    groups = rows.reshape(-1, group)
    groups = np.where(groups < 0, groups[:, :1], groups)  # padding repeats the first row of its group
    places = swizzled(groups.reshape(-1, PHASE) % config.ring, 0, config.tile_n_bytes)  # (reads, PHASE) bytes
    same = places[:, :, None] == places[:, None, :]
    is_first = ~np.tril(same, -1).any(2)  # lanes that read one address take one wavefront
    counts = [(is_first & (places // ROW_BYTES % PHASE == unit)).sum(1) for unit in range(PHASE)]
    most = np.max(counts, axis=0)
    assert not len(places) or most[0] == ldmatrix_wavefronts(places[0], 1)
    return int(most.sum()), len(places)


def bank_figures(pattern: Pattern, config: PanelConfig) -> dict[str, Any]:
    """Return the wavefronts of evenly spread vector rows, by column order and by the order of the kernel; and its slots."""
    most = min(pattern.vector_rows, SAMPLED_ROWS)
    found: dict[str, Any] = {"rows": most, "natural": 0, "natural_reads": 0, "ordered": 0, "ordered_reads": 0}
    for i in range(most):
        row = i * pattern.vector_rows // most
        begin, end = pattern.row_offsets[row : row + 2].tolist()
        columns = pattern.col_indices[begin:end]
        where = (
            columns,
            torch.tensor([0, end - begin]),
            config.tile,
            -(-pattern.shape[1] // config.tile),
            config.mma_k,
            config.tile_window,
        )
        for name, order in (("natural", sequential_slots), ("ordered", ordered_slots)):
            slots = order(*where)
            count, reads = wavefronts(columns, slots, config)
            found[f"{name}_slots"] = slots.tolist()  # of the last row
            found[name] += count
            found[f"{name}_reads"] += reads
    return found


def pattern_of(mask: torch.Tensor, unit: str, v: int) -> FilePattern:
    """Return the vectors of a mask, bool (rows, columns) of elements or, for .smtx, of vectors."""
    if unit == "element":
        return FilePattern(Pattern.from_dense(mask, v), int(mask.sum()))
    single = Pattern.from_dense(mask, 1)
    pattern = Pattern((mask.shape[0] * v, mask.shape[1]), v, single.row_offsets, single.col_indices)
    return FilePattern(pattern, pattern.nnz)


def expected(stored: FilePattern, case: dict[str, Any], machine: Machine | Processor) -> dict[str, Any]:
    """Return the figures of a case."""
    pattern, v, (lhs, rhs), n = stored.pattern, case["v"], case["pair"], case["n"]
    info = info_figures(stored, case["stride"])
    found = {name: info[name] for name in COUNTS} | {"longest": info["row_length_max"]}
    m, types = pattern.shape[0], (Integer(lhs, True), Integer(rhs, True))
    if isinstance(machine, Processor):
        kind = ProblemTypes(v, *types, "float32")
        forecast = cpu_forecast(kind, m, digit_count(lhs) * digit_count(rhs), problem(pattern, v, n, 1), machine)
        return found | {
            "sparse_us": forecast.sparse / 1e3,
            "dense_us": forecast.dense / 1e3,
            "kernel": None,
            "bank": None,
        }
    kind = ProblemTypes(max(v, MMA_COLUMNS), *types, "float16")
    sizes = problem(pattern, kind.vector_length, n, 1)
    config = choose_spmm(kind, machine, replace(sizes, n=size_bucket(n)))
    merged = pattern if v >= MMA_COLUMNS else pattern.merge_map(MMA_COLUMNS).pattern
    bank = bank_figures(merged, config) if isinstance(config, PanelConfig) else None
    times = {
        "sparse_us": spmm_cost(config, machine, sizes) / 1e3,
        "dense_us": dense_cost(machine, m, sizes, "float16") / 1e3,
    }
    return found | times | {"kernel": config.name, "bank": bank}


def random_problems(machines: list[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """Yield sizes of products on GPUs, up to those of large models, with the time of every candidate and of dense int8."""
    generator = np.random.default_rng(32)
    gpus = [i for i, each in enumerate(machines) if each["kind"] == "gpu"]
    for _ in range(count):
        rows, inner, n = (int(2 ** generator.uniform(low, high)) for low, high in ((0, 12), (4, 15), (0, 14)))
        vectors = int(rows * inner * 2 ** generator.uniform(-8, 0))
        longest = min(inner, int(-(-vectors // rows) * 2 ** generator.uniform(0, 4)))
        (a, b), v = SPMM_PAIRS[generator.integers(len(SPMM_PAIRS))], int(generator.choice([8, 16, 32]))
        place = int(generator.choice(gpus))
        machine, sizes = (
            Machine(machines[place]["arch"], machines[place]["sms"]),
            Problem(rows, inner, vectors, longest, n),
        )
        kind = ProblemTypes(v, Integer(a, True), Integer(b, True), "float16")
        costs = {config.name: spmm_cost(config, machine, sizes) for config in candidates(kind, machine, sizes)}
        case = {"rows": rows, "inner": inner, "vectors": vectors, "longest": longest, "n": n}
        found = {"costs": costs, "dense_us": dense_cost(machine, rows * v, sizes, "float16") / 1e3}
        yield {"problem": case, "operands": f"{v}-{a}x{b}", "rhs": b, "v": v, "machine": place, "expected": found}


def random_mask(generator: np.random.Generator, is_large: bool) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """A mask of odd sizes: scattered elements, whole vectors or a band; sometimes empty, sometimes full."""
    rows, columns = (int(generator.integers(1, 80)) for _ in range(2))
    if is_large:  # for the panel kernel
        rows, columns = 12 * rows, 48 * columns
    density = float(generator.choice([0.0, 0.01, 0.02, 0.1, 0.3, 0.6, 1.0]))
    kind = generator.integers(3)
    if kind == 0:
        return generator.random((rows, columns)) < density
    if kind == 1:
        return np.repeat(generator.random((-(-rows // 8), columns)) < density, 8, axis=0)[:rows]
    return np.abs(np.arange(rows)[:, None] - np.arange(columns)) < density * columns


def random_cases(machines: list[dict[str, Any]], masks: int, each: int) -> Iterator[dict[str, Any]]:
    """Yield masks with settings, as node reads them, and what they must give."""
    generator = np.random.default_rng(31)
    for i in range(masks):
        mask = random_mask(generator, i % 4 == 0)
        unit = "vector" if i % 5 == 0 else "element"
        bits = base64.b64encode(np.packbits(mask, bitorder="little").tobytes()).decode()
        settings = []
        patterns = {int(v): pattern_of(torch.from_numpy(mask), unit, int(v)) for v in generator.choice(LENGTHS, 2)}
        for j in range(each):
            case = {
                "v": list(patterns)[j % len(patterns)],
                "pair": list(SPMM_PAIRS[generator.integers(len(SPMM_PAIRS))]),
                "n": int(generator.choice([1, 3, 8, 16, 17, 31, 64, 100, 128, 250, 512, 4096])),
                "stride": int(generator.choice(STRIDES)),
                "machine": int(generator.integers(len(machines))),
                "threads": int(generator.integers(1, 9)),
            }
            machine = machine_of(machines[case["machine"]], case["threads"])
            settings.append(case | {"expected": expected(patterns[case["v"]], case, machine)})
        yield {"rows": mask.shape[0], "cols": mask.shape[1], "unit": unit, "bits": bits, "settings": settings}
