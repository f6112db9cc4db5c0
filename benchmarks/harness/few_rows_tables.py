"""Tables of products of few rows on a GPU, dense and sparse."""

from __future__ import annotations

from harness.tables import grid, results, source


def render_few_rows() -> str:
    """Few rows times packed weights on a GPU: microseconds, weights cold, and the time of torch's fp8 over each."""
    names = ("int4_g128", "int4_g32", "int4_g32_min", "mxfp4", "nvfp4", "mxfp6", "int8", "e4m3")
    rows = []
    for case in results("few_rows_h200")["cases"]:
        if "cold" in case:
            us = case["cold"]
            fp8, chosen = min(us["fp8"], us["fp8 fast"]), [us[f"{name}/chosen"] for name in names]
            ours = [f"{each:.1f} ({fp8 / each:.2f})" for each in chosen]
            others = [f"{each:.1f}" for each in (us["bf16"], fp8, us["triton"])]
            rows.append([f"{case['m']} x {case['k']} x {case['n']}", *others, *ours])
    head = ["rows x K x N", "bfloat16", "torch fp8", "Triton, int4", "int4, groups of 128", "of 32", "with minima",
            "mxfp4", "nvfp4", "mxfp6", "int8", "e4m3"]  # fmt: skip
    return f"{grid(head, rows)}\n\n{source('few_rows_h200')}"


def render_few_rows_int8() -> str:
    """Int8 rows times packed weights on a GPU, as integers and widened: microseconds, weights cold."""
    found: dict[str, dict[str, float]] = {}
    for case in results("few_rows_int8_h200")["cases"]:
        found.setdefault(f"{case['m']} x {case['k']} x {case['n']}", {}).update(case["cold"])
    rows = []
    for shape, us in found.items():
        fp8, cells = min(us["fp8"], us["fp8 fast"]), []
        for name in ("int4_g128", "int8_g128"):
            ours = us[f"{name}/chosen"]
            cells += [f"{ours:.1f} ({fp8 / ours:.2f})", f"{us[f'{name}/widened']:.1f}"]
        rows.append([shape, f"{us['bf16']:.1f}", f"{fp8:.1f}", *cells])
    head = ["rows x K x N", "bfloat16", "torch fp8", "int4", "rows widened", "int8", "rows widened"]
    return f"{grid(head, rows)}\n\n{source('few_rows_int8_h200')}"


def render_e4m3_blocks() -> str:
    """Layers with 128 x 128 scales from bfloat16 rows, beside torch's products alone; weights cold."""
    rows = []
    for case in results("few_rows_e4m3_h200")["cases"]:
        us = case["cold"]
        layers = {name.split(",")[1].split(" rows")[0].strip(): x for name, x in us.items() if "_b128" in name}
        plain, fp8 = us["bf16"], min(x for name, x in us.items() if name in ("fp8", "fp8 fast"))
        cells = (plain, fp8, us["fp8 blockwise"], layers["none"], layers["e4m3"], layers["e4m3_g128"])
        rows.append([f"{case['m']} x {case['k']} x {case['n']}", *(f"{x:.1f}" for x in cells)])
    head = ["us", "bfloat16", "torch fp8", "torch blockwise fp8", "layer, weight-only", "e4m3 rows", "e4m3_g128 rows"]
    return f"{grid(head, rows)}\n\n{source('few_rows_e4m3_h200')}"


def render_few_rows_layers() -> str:
    """Whole dense quantized layers on a GPU: microseconds, and of the host."""
    cases = [case for case in results("few_rows_h200")["cases"] if "layer" in case]
    rows = [
        [name, *(f"{case['warm'][name]:.1f} ({case['host'][name]:.0f})" for case in cases)] for name in cases[0]["warm"]
    ]
    head = ["weight, rows", *(f"{case['m']} token{'s' * (case['m'] > 1)}" for case in cases)]
    return f"{grid(head, rows)}\n\n{source('few_rows_h200')}"


def render_sparse_decode() -> str:
    """SpMM of few tokens beside dense products on a GPU: us, weights cold (warm), and fp8's time over each."""
    names = ("L4-R8", "L8-R8", "L4-R4", "e4m3 x float16", "e2m1 x float16")
    rows = []
    for case in results("sparse_decode_h200")["cases"]:
        cold, warm = case["cold"], case["warm"]
        fp8 = min(("fp8", "fp8 fast"), key=cold.__getitem__)
        cells = [f"{cold[name]:.1f} ({warm[name]:.1f})" for name in ("bf16", fp8, "dense e2m1")]
        cells += [f"{cold[name]:.1f} ({warm[name]:.1f}), {cold[fp8] / cold[name]:.2f}" for name in names]
        rows.append([f"{case['m']} x {case['k']}, {case['sparsity']:g}, {case['tokens']}", *cells])
    head = ["outputs x inputs, zeros, tokens", "bfloat16", "torch fp8", "dense e2m1", *names]
    return f"{grid(head, rows)}\n\n{source('sparse_decode_h200')}"
