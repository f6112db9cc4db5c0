"""How long a fresh process takes to its first sparse product: with the wheel of kernels, a warm cache, or NVRTC.

Each case is a process of its own: import torch and the library, build the operands of README's product on the device,
multiply, copy the result, which is compared after the clock has stopped. "wheel" has no compiler: an error is
in its place. Writes ``first_call_<gpu>.json``.
Run: ``PYTHONPATH=. python benchmarks/first_call.py --wheel dist/magicube_cutlass_cubins-0.1.0-py3-none-any.whl``
(``--device cpu`` times the CPU alone).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from magicube_cutlass.cli.environment import provenance

RESULTS = Path(__file__).resolve().parent / "results"
CHILD = """
import json, sys, time
start = time.perf_counter()
import torch
torch_at = time.perf_counter() - start
import magicube_cutlass as mc
device, compiler = sys.argv[1:]
if compiler == "none":
    from cute_kernels.jit import toolchain

    def missing():
        raise toolchain.ToolchainError("this case has no compiler")

    toolchain.find = missing
weight, x = torch.randn(256, 512), torch.randn(512, 128)
weight = weight * mc.prune(weight, sparsity=0.9, vector_length=8)
A = mc.SRBCRS.from_dense(weight, vector_length=8, bits=8).to(device)
B = mc.quantize(x.to(device), bits=8, scale="column")
C = mc.spmm(A, B, out_dtype=torch.float32).cpu()
total = time.perf_counter() - start
exact = A.cpu().to_dense().double() @ B.to("cpu").dequantize().double()
assert (C.double() - exact).norm() < 1e-6 * exact.norm(), "the product is wrong"
print(json.dumps({"torch_s": torch_at, "total_s": total}))
"""


def run(case: str, device: str, folder: Path, wheel: Path | None) -> dict[str, float]:
    """Return the seconds of one fresh process."""
    paths = [str(wheel)] if case == "wheel" else []
    cache = folder / ("nvrtc" if case == "warm cache" else case)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "MAGICUBE_CACHE": str(cache),
    }
    command = [sys.executable, "-c", CHILD, device, "none" if case == "wheel" else "any"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    wheel: Annotated[Path | None, typer.Option(help="The wheel of compiled kernels.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Processes per case; the median is kept.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Results file.")] = None,
) -> None:
    """Time the cases, print a table, write the JSON."""
    if wheel is not None and not wheel.is_file():
        raise typer.BadParameter(f"wheel must be a file, got {str(wheel)!r}")
    shipped = ["wheel"] if wheel is not None else []
    cases = ["cpu"] if device == "cpu" else [*shipped, "nvrtc", "warm cache"]
    table = Table("first product", "import torch, s", "in all, s", title="256 x 512 x 128, 90% zeros, int8 to float32")
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if wheel is not None:
            zipfile.ZipFile(wheel).extractall(folder / "site")
        for case in cases:
            found = []
            for number in range(rounds):
                own = folder / str(0 if case == "warm cache" else number)  # each "nvrtc" begins with an empty cache
                found.append(run(case, device, own, folder / "site"))
            middle = sorted(found, key=lambda each: each["total_s"])[rounds // 2]
            rows.append({"case": case, **middle, "all_s": [each["total_s"] for each in found]})
            table.add_row(case, f"{middle['torch_s']:.2f}", f"{middle['total_s']:.2f}")
    Console().print(table)
    stem = "cpu" if device == "cpu" else _gpu()
    path = out or RESULTS / f"first_call_{stem}.json"
    path.write_text(
        json.dumps({"machine": provenance(), "date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1) + "\n"
    )
    print(f"wrote {path}")


def _gpu() -> str:
    """The GPU's short name in the names of results files."""
    from harness.gpu_results import results_file

    return results_file("first_call").stem.removeprefix("first_call_")


if __name__ == "__main__":
    typer.run(main)
