"""Render the tables of the README and of the pages for users.  Run: ``python benchmarks/reader_tables.py``

Every number comes from ``benchmarks/results``; each table ends with machine, date and commit of its files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.few_rows_tables import (
    render_e4m3_blocks,
    render_few_rows,
    render_few_rows_int8,
    render_few_rows_layers,
    render_sparse_decode,
)
from harness.tables import grid, results, source
from README_table import update

ROOT = Path(__file__).resolve().parents[1]
SAME_MATRIX = (
    "dense fp16",
    "dense int8",
    "dense fp8",
    "magicube dense int8",
)  # baselines that multiply the same matrix


def gpu_case(shape: list[int], sparsity: float) -> tuple[float, str, float]:
    """Return ours, the fastest dense product of the same matrix and its time, us behind another kernel."""
    case = next(c for c in results("spmm_h200")["spmm"] if c["shape"] == shape and c["sparsity"] == sparsity)
    ours = next(row["behind_us"] for row in case["ours"] if row["name"] == "L8-R8 V=8")
    us, name = min((row["behind_us"], row["name"]) for row in case["rivals"] if row["name"] in SAME_MATRIX)
    return ours, name, us


def _gpu_times(shape: list[int], sparsity: float) -> dict[str, float]:
    case = next(c for c in results("spmm_h200")["spmm"] if c["shape"] == shape and c["sparsity"] == sparsity)
    return {row["name"]: row["behind_us"] for row in case["ours"]}


def cpu_case(n: int, density: float) -> tuple[float, str, float]:
    """Return ours, the fastest dense product of the same matrix and its time, ms on one thread with AVX2."""
    size = next(size for size in results("cpu_spmm_avx2")["sizes"] if size["n"] == n)
    row = next(row for row in size["rows"] if row["density"] == density)
    return row["ms"]["magicube"], row["dense"], row["ms"]["dense"]


def _layer(out: int, inner: int, tokens: int, sparsity: float) -> tuple[float, str, float]:
    row = next(
        row
        for row in results("cpu_layers_avx2")["results"]
        if (row["out"], row["in"], row["tokens"]) == (out, inner, tokens)
    )
    ours = next(us for name, us in row["us"].items() if name == f"ours, {sparsity:g}")
    dense = {name: us for name, us in row["us"].items() if not name.startswith("ours")}
    dense["magicube dense int8"] = row["us"]["ours, 0"]
    name = min(dense, key=dense.__getitem__)
    return ours, name, dense[name]


def render_summary() -> str:
    """Four rows for the README: two machines, a win, a loss."""
    large = [4096, 4096, 4096]
    found = [
        ("CPU, 1 thread: SpMM 1024 x 1024 x 1024, 90% zeros, ms", cpu_case(1024, 0.1), 2),
        ("CPU, 1 thread: layer 1536 x 384, 16 tokens, 90% zeros, us", _layer(1536, 384, 16, 0.9), 0),
        ("H200: SpMM 4096 x 4096 x 4096, 90% zeros, us", gpu_case(large, 0.9), 0),
        ("H200: the same, 70% zeros, us", gpu_case(large, 0.7), 0),
    ]
    rows = [
        [name, f"{ours:.{digits}f}", f"{theirs:.{digits}f} ({kind})", f"{theirs / ours:.2f}x"]
        for name, (ours, kind, theirs), digits in found
    ]
    head = ["8-bit product, V = 8", "magicube", "fastest dense product", "speed-up"]
    return f"{grid(head, rows)}\n\n{source('cpu_spmm_avx2', 'cpu_layers_avx2', 'spmm_h200')}"


def render_choose_product() -> str:
    """Time of the sparse and of the fastest dense product by density and V."""
    rows = []
    for density in (0.02, 0.1, 0.3, 0.6):
        ours, kind, dense = cpu_case(1024, density)
        rows.append(["CPU", "1024 x 1024 x 1024", f"{density:g}", "8", f"{ours:.1f} ms", f"{dense:.1f} ms ({kind})"])
    large = [4096, 4096, 4096]
    for shape, sparsity in (([4096, 4096, 512], 0.98), (large, 0.9), (large, 0.8), (large, 0.7)):
        us, kind, dense = gpu_case(shape, sparsity)
        for v in (8, 4, 2) if sparsity == 0.9 else (8,):
            us = _gpu_times(shape, sparsity)[f"L8-R8 V={v}"]
            rows.append(["H200", " x ".join(map(str, shape)), f"{1 - sparsity:.2g}", f"{v}", f"{us:.1f} us",
                         f"{dense:.1f} us ({kind})"])  # fmt: skip
    head = ["machine", "M x K x N", "density", "V", "magicube", "fastest dense"]
    return f"{grid(head, rows)}\n\n{source('cpu_spmm_avx2', 'spmm_h200')}"


def render_choose_format() -> str:
    """Bits, error of a product of normal data and of data with outliers, and time on an H200."""
    errors = {(row["kind"], row["way"]): row for row in results("float_errors")["errors"]}
    times = {name: f"{us:.0f}" for name, us in _gpu_times([4096, 4096, 4096], 0.9).items()}
    outliers = next(kind for kind, _ in errors if "outlier" in kind)
    rows = []
    for name, way, time in (
        ("`bits=8`", "int8, rows", "L8-R8 V=8"),
        ("`bits=4`", "int4, rows", "L4-R4 V=8"),
        ('`dtype="e4m3"`', "e4m3, rows", ""),
        ('`dtype="e2m1"`', "e2m1, rows", ""),
        ('`dtype="mxfp8"` (dense only)', "mxfp8", ""),
        ('`dtype="nvfp4"` (dense only)', "nvfp4", ""),
    ):
        normal, spiked = errors["normal", way], errors[outliers, way]
        rows.append([name, f"{normal['bits']:.2f}", f"{normal['product']:.1e}", f"{spiked['product']:.1e}",
                     times.get(time, "-")])  # fmt: skip
    rows.append(["`bits=16`, other operand 8", "16.03", "-", "-", times["L16-R8 V=8"]])
    rows.append(["`bits=16`, both", "16.03", "-", "-", times["L16-R16 V=8"]])
    head = ["quantize(...)", "bits", "error, normal data", "error, outlier columns", "SpMM on an H200, us"]
    return f"{grid(head, rows)}\n\n{source('float_errors', 'spmm_h200')}"


def render_choose_tolerance() -> str:
    """Checked products and torch's own on an H200: ms by size."""
    sizes = {size["n"]: size for size in results("compensated_h200")["sizes"]}
    shown = [n for n in (2048, 4096, 8192) if n in sizes]
    rows = []
    for name, key in (
        ("torch float32", "torch float32"),
        ("torch tf32, unchecked", "torch tf32"),
        ("`matmul(A, B, tol=2e-2)`", "0.02"),
        ("`plan(B, tol=2e-2)`, then `product(A)`", "0.02, prepared"),
        ("`matmul(A, B, tol=1e-3)`", "0.001"),
        ("`plan(B, tol=1e-3)`, then `product(A)`", "0.001, prepared"),
    ):
        plan = sizes[shown[-1]]["plans"].get(key, "-").replace("int8 direct, ", "").replace("int8 full, ", "")
        rows.append([name, *(f"{sizes[n]['loop_us'][key] / 1000:.2f}" for n in shown), plan.replace("error ", "")])
    head = ["call", *(f"n = {n}, ms" for n in shown), f"error, n = {shown[-1]}"]
    return f"{grid(head, rows)}\n\n{source('compensated_h200')}"


BLOCKS = "128 x 128 blocks"


def render_attention() -> str:
    """Attention on a CPU and on an H200."""
    cpu = {row["call"]: row["us"] for row in results("cpu_attention_avx2")["results"]}
    torch_us = min(us for call, us in cpu.items() if call.startswith("torch"))
    rows = [
        ["CPU, 1,024 tokens, 1 head", "0.9", f"{cpu['sparse_attention'] / 1e3:.2f} ms", f"{torch_us / 1e3:.2f} ms", "-"]
    ]
    for case in results("attention_h200")["cases"]:
        us = {row["name"]: f"{row['us']:.0f} us" for row in case["rows"]}
        name = f"H200, {case['length']:,} tokens, 8 x 4 heads"
        vectors = (us["fused 8b-8b from float16"], us["SDPA fp16"], "-")
        ours, flex = us[f"{BLOCKS}, fused 8b-8b from float16"], us[f"{BLOCKS}, FlexAttention fp16"]
        rows.append([f"{name}, 8 x 1 vectors", f"{case['sparsity']:g}", *vectors])
        rows.append([f"{name}, {BLOCKS}", f"{case['sparsity']:g}", ours, us["SDPA fp16"], flex])
    head = ["d = 64", "sparsity", "magicube, 8-bit", "torch SDPA with mask", "FlexAttention fp16"]
    return f"{grid(head, rows)}\n\n{source('cpu_attention_avx2', 'attention_h200')}"


def render_cpu_paths() -> str:
    """Layers on each instruction set of one CPU."""
    found = results("cpu_paths")
    paths = list(found["results"][0]["us"])
    rows = [
        [
            f"{row['out']} x {row['in']}",
            f"{row['zeros']:g}",
            str(row["tokens"]),
            *(f"{row['us'][path]:.0f}" for path in paths),
        ]
        for row in found["results"]
    ]
    return f"{grid(['out x in', 'zeros', 'tokens', *(f'{path}, us' for path in paths)], rows)}\n\n{source('cpu_paths')}"


def render_models_avx512() -> str:
    """Whole models on one thread of a CPU with VNNI: the best turn, beside the fastest baseline in 8 bits."""
    cases = [case for case in results("models_speed_avx512")["cases"] if case["threads"] == 1]
    ways = [(case, key) for case in cases for key in ("best", "in use, best")]
    best = [{row["name"]: row[key] for row in case["rows"]} for case, key in ways]
    fastest = [max(x for name, x in each.items() if "int8" in name) for each in best]
    labels = (f"batch {case['batch']}, {'in turn' if key == 'best' else 'in use'}" for case, key in ways)
    head = ["MiniLM, sentences of 16 tokens a second", *labels]
    rows = [
        [name, *(f"{each[name]:.0f} ({each[name] / top:.2f}x)" for each, top in zip(best, fastest, strict=True))]
        for name in best[0]
    ]
    language = {case["kind"]: case["rows"] for case in results("models_speed_smollm_avx512")["cases"]}
    of_prompt = {row["name"]: row["best"] for row in language["prefill"]}
    tokens = [[row["name"], f"{row['best']:.1f}", f"{of_prompt[row['name']]:.0f}"] for row in language["decode"]]
    head_of_tokens = ["SmolLM2-135M, tokens a second, batch 1", "new tokens", "prompt of 512"]
    sources = source("models_speed_avx512", "models_speed_smollm_avx512")
    return f"{grid(head, rows)}\n\n{grid(head_of_tokens, tokens)}\n\n{sources}"


_FUSED = ("bfloat16, fused", "torch fp8, fused")
_TORCHAO = ("torchao int8", "torchao fp8")
_WHOLE = ("ours int8", "ours int8, static MLP", "ours int8, static", "ours int8, smooth static")


def _compiled(case: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a case's compiled ways; torchao's are always compiled."""
    ends = (", compiled", *_TORCHAO)
    return {name.removesuffix(", compiled"): way["graph"] for name, way in case["ways"].items() if name.endswith(ends)}


def render_models() -> str:
    """Whole models on a GPU in 8 bits beside bfloat16, torch's fp8 and torchao, and an 8B layer in all ways; ms."""
    rows, layers = [], []
    for case in results("models_gpu_dense_h200")["cases"]:
        ms = _compiled(case)
        quoted = ms.get(_WHOLE[-1], ms["ours int8, static"])  # SmolLM2 does not stand scales that cover all rows
        ms["static"] = quoted
        columns = ("bfloat16", *_FUSED, *_TORCHAO, "ours int8", "static")
        times = (f"{ms[name]:.3f}" if name in ms else "-" for name in columns)
        rows.append([case["case"], *times, f"{ms['bfloat16'] / quoted:.2f}x"])
    head = ["layers of, ms", "bfloat16", "the same, fused", "torch fp8, fused", *_TORCHAO, "int8, a scale per token",
            "int8, static scales", "times as fast as bfloat16"]  # fmt: skip
    for case in results("models_gpu_layer8b_h200")["cases"]:
        ms = _compiled(case)
        ways = (*_FUSED, _WHOLE[-1], "ours e4m3", "ours int4 g128, int8 rows", "ours int4 g128",
                *(f"ours sparse {each}" for each in (0.5, 0.7, 0.9)))  # fmt: skip
        times_as_fast = (f"{ms['bfloat16'] / ms[name]:.2f}x" for name in ways)
        layers.append([f"layer of 8B size, {case['tokens']:,} tokens", f"{ms['bfloat16']:.3f} ms", *times_as_fast])
    names = ["the same, fused", "torch fp8, fused", "int8, static scales", "e4m3", "int4, int8 rows",
             "int4, weight-only", "sparse 0.5", "sparse 0.7", "sparse 0.9"]  # fmt: skip
    sources = source("models_gpu_dense_h200", "models_gpu_layer8b_h200")
    table = grid(["times as fast as bfloat16", "bfloat16", *names], layers)
    return f"{grid(head, rows)}\n\n{table}\n\n{sources}"


def render_models_dense() -> str:
    """Compiled models on a GPU with all scales that int8 may have; ms."""
    rows = []
    for case in results("models_gpu_dense_h200")["cases"]:
        ms = _compiled(case)
        ways = ("bfloat16", *_FUSED, *_TORCHAO, *_WHOLE)
        rows.append([case["case"], *(f"{ms[name]:.3f}" if name in ms else "-" for name in ways)])
    head = ["", "bfloat16", "the same, fused", "torch fp8, fused", *_TORCHAO, "int8", "int8, static MLP",
            "int8, static", "int8, smooth static"]  # fmt: skip
    return f"{grid(head, rows)}\n\n{source('models_gpu_dense_h200')}"


def render_models_packed() -> str:
    """Whole models on a GPU with 4-bit and sparse weights, each way compiled or not, whichever is faster."""
    rows, cases = [], results("models_gpu_h200")["cases"]
    models = list(dict.fromkeys(case["case"].split()[0] for case in cases))
    cases.sort(
        key=lambda each: (models.index(each["case"].split()[0]), not each["cached"], each["batch"], each["tokens"])
    )
    for case in cases:
        ms = {name: way["graph"] for name, way in case["ways"].items() if way.get("mode") == "graph"}
        best = {name: min(ms[name], ms.get(f"{name}, compiled", ms[name])) for name in ms if "compiled" not in name}
        ways = ("bfloat16", "bfloat16, fused", "ours int4 g128", "ours int4 g128, int8 rows",
                "ours sparse 0.5", "ours sparse 0.7", "ours sparse 0.9")  # fmt: skip
        rows.append([case["case"], *(f"{best[way]:.2f}" for way in ways)])
    head = ["layers of, ms", "bfloat16", "bfloat16, fused", "int4, weight-only", "int4, int8 rows", "sparse 0.5",
            "sparse 0.7", "sparse 0.9"]  # fmt: skip
    return f"{grid(head, rows)}\n\n{source('models_gpu_h200')}"


def render_layers() -> str:
    """A sparse layer on a GPU beside a dense one: microseconds behind another kernel, and of the host."""
    rows = []
    for case in results("gpu_layers_h200")["cases"]:
        out, inner, tokens = case["shape"]
        us, learning = case["us"], case["training host"]
        ways = (us.get(way) for way in ("ours, dynamic", "ours, static", "fp8, static", "linear"))
        times = [f"{way['behind']:.1f} ({way['cold']:.1f})" if way else "-" for way in ways]
        hosts = (us["ours, dynamic"]["host"], us["linear"]["host"], learning["ours, dynamic"], learning["linear"])
        rows.append([f"{out} x {inner}, {tokens}", case["dtype"], *times, *(f"{host:.0f}" for host in hosts)])
    head = ["outputs x inputs, tokens", "dtype", "ours, dynamic", "ours, static", "fp8, static", "`nn.Linear`",
            "host, ours", "host, `nn.Linear`", "learning, ours", "learning, `nn.Linear`"]  # fmt: skip
    return f"{grid(head, rows)}\n\n{source('gpu_layers_h200')}"


def render_short_layers() -> str:
    """The same from float16 for readers, with the speed-up of dynamic scales over the fastest dense layer."""
    rows = []
    for case in results("gpu_layers_h200")["cases"]:
        out, inner, tokens = case["shape"]
        us = {name: way["behind"] for name, way in case["us"].items()}
        if case["dtype"] == "float16":
            fastest = min(us["linear"], us.get("fp8, static", us["linear"]))
            ways = (us.get(way) for way in ("ours, dynamic", "ours, static", "fp8, static", "linear"))
            times = [f"{way:.1f}" if way else "-" for way in ways]
            rows.append([f"{out} x {inner}, {tokens}", *times, f"{fastest / us['ours, dynamic']:.2f}x"])
    head = ["outputs x inputs, tokens", "magicube, dynamic scales", "static scales", "dense fp8, static scale",
            "dense float16", "speed-up over the faster dense layer"]  # fmt: skip
    return f"{grid(head, rows)}\n\n{source('gpu_layers_h200')}"


def render_first_product() -> str:
    """Seconds from the start of a process to its first product on a GPU, by where the kernels come from."""
    kernels = {"wheel": "the wheel", "nvrtc": "NVRTC, nothing cached", "warm cache": "the cache of an earlier process"}
    rows = [
        [kernels[row["case"]], f"{row['torch_s']:.1f}", f"{row['total_s']:.1f}"]
        for row in results("first_call_h100")["rows"]
    ]
    head = ["kernels from", "import of torch, s", "first product, s"]
    return f"{grid(head, rows)}\n\n{source('first_call_h100')}"


def render_errors() -> str:
    """Relative error of a product of two quantized matrices, by format and distribution."""
    found = results("float_errors")["errors"]
    kinds = list(dict.fromkeys(row["kind"] for row in found))[:5]
    table = {(row["way"], row["kind"]): row["product"] for row in found}
    shown = (
        "int8, rows",
        "int4, rows",
        "e4m3, rows",
        "e5m2, rows",
        "e2m3, rows",
        "e2m1, rows",
        "mxfp8",
        "mxfp6",
        "mxfp4",
        "nvfp4",
    )
    rows = [[way, *(f"{table[way, kind]:.1e}" for kind in kinds)] for way in shown]
    return f"{grid(['operands', *kinds], rows)}\n\n{source('float_errors')}"


_ON_RANKS = {  # what the guide shows: group, shape, and case of the results
    "layer 14336 x 4096, 0.9 zeros, 8,192 tokens on all ranks": ("spmm", "14336 x 4096 x 8192", "X on all ranks"),
    "the same, tokens cut, int8 gathered": ("spmm", "14336 x 4096 x 8192", "X cut, int8 gather, 1 chunks"),
    "the same, bfloat16 gathered": ("spmm", "14336 x 4096 x 8192", "X cut, gather of floats"),
    "layers 4096-14336-4096, 0.8 zeros, all ranks, bfloat16 sums": ("mlp", "8192 x", "0.8, all, bfloat16"),
    "the same, tokens cut": ("mlp", "8192 x", "0.8, cut, bfloat16"),
    "the same, exact sums": ("mlp", "8192 x", "0.8, cut, exact"),
    "0.9 zeros, tokens cut, bfloat16 sums": ("mlp", "8192 x", "0.9, cut, bfloat16"),
    "dense int8, tokens cut, bfloat16 sums": ("mlp", "8192 x", "dense int8, cut, bfloat16"),
    "the same, static scales": ("mlp", "8192 x", "dense int8, static, cut, bfloat16"),
    "0.9 zeros, 256 tokens, cut, bfloat16 sums": ("mlp", "256 x", "0.9, cut, bfloat16"),
    "`rd.matmul` 16384^3 by rows, `tol=1e-6`": ("residual", "16384", "rows, tol 1e-06"),
    "`rd.matmul` 8192^3 by rows, `tol=1e-2`": ("residual", "8192^3", "rows, tol 0.01"),
    "`rd.qr` of 1,000,000 x 256, float32 products": ("tsqr", "1000000", "float32"),
    "attention, 32 heads, 4,096 queries, heads cut": ("attention", "32 x", "heads"),
    "the same, queries cut": ("attention", "32 x", "queries"),
}


def render_ranks() -> str:
    """Two and four GPUs: ms per call and per graph, one GPU's, and efficiencies."""
    found = {n: results(f"distributed_nccl_{n}")["results"] for n in (2, 4)}
    rows = []
    for name, (group, shape, case) in _ON_RANKS.items():
        two, four = (
            next((row for row in found[n] if row["group"] == group and row.get("shape", "").startswith(shape)
                  and row["case"].startswith(case) and "ms" in row), None)
            for n in (2, 4)
        )  # fmt: skip
        assert two is not None
        graphs = [None if row is None else row.get("ms of a graph", row["ms"]) for row in (two, four)]
        shares = [None if row is None else row.get("efficiency of graphs", row["efficiency"]) for row in (two, four)]
        one = two.get("ms of a graph of one process", two["ms of one process"])
        torchs = two.get("torch ms of a graph")
        both = "; ".join("-" if share is None else f"{share:.2f}" for share in shares)
        rows.append([
            name, f"{one:.2f}", *("-" if ms is None else f"{ms:.2f}" for ms in graphs), both, f"{two['ms']:.2f}",
            "-" if torchs is None else f"{torchs:.2f} ({two['torch efficiency of graphs']:.2f})",
        ])  # fmt: skip
    head = ["case, ms", "one GPU", "two", "four", "efficiency of two; of four", "two, eager calls",
            "torch's bfloat16 layers on two"]  # fmt: skip
    return f"{grid(head, rows)}\n\n{source('distributed_nccl_2', 'distributed_nccl_4')}"


SECTIONS: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("summary", "README.md", render_summary),
    ("first-product", "docs/install.md", render_first_product),
    ("choose-product", "docs/choose.md", render_choose_product),
    ("choose-format", "docs/choose.md", render_choose_format),
    ("choose-tolerance", "docs/choose.md", render_choose_tolerance),
    ("attention-times", "docs/performance/gpu.md", render_attention),
    ("layers-times", "docs/lab/performance.md", render_layers),
    ("short-layers", "docs/performance/gpu.md", render_short_layers),
    ("few-rows", "docs/lab/performance.md", render_few_rows),
    ("few-rows-layers", "docs/lab/performance.md", render_few_rows_layers),
    ("few-rows-int8", "docs/lab/performance.md", render_few_rows_int8),
    ("sparse-decode", "docs/lab/performance.md", render_sparse_decode),
    ("e4m3-blocks", "docs/lab/performance.md", render_e4m3_blocks),
    ("cpu-paths", "docs/performance/cpu.md", render_cpu_paths),
    ("models-times", "docs/performance/gpu.md", render_models),
    ("models-dense", "docs/lab/models.md", render_models_dense),
    ("models-packed", "docs/lab/models.md", render_models_packed),
    ("models-avx512", "docs/lab/models.md", render_models_avx512),
    ("ranks", "docs/how-to/several-gpus.md", render_ranks),
    ("format-errors", "docs/explanation/accuracy.md", render_errors),
)


if __name__ == "__main__":
    for section, page_name, render in SECTIONS:
        update(section, render(), ROOT / page_name, "reader_tables.py")
