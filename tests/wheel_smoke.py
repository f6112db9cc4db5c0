"""Check an installed wheel: the engine is there, products are exact, commands answer.

Run outside of the source tree with the Python of an environment that has nothing but the wheel: ``python wheel_smoke.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import magicube_cutlass as mc
import residual
from cute_kernels.cpu import engine

# Words, and what the last line says where the command needs more than the wheel.
COMMANDS = {
    "--version": "", "--help": "", "collect-env": "", "info FILE": "", "spmm FILE --n 64": "",
    "explore FILE --no-open -o OUT.html": "", "bench --shape 64x64 --tokens 1 --json": "",
    "convert MODEL -o OUT.safetensors": "", "plan-parallel MODEL --gpus 2": "", "layout s8_m16n8k32": "",
    "cache": "", "cache ls": "", "cache clear": "",
    "spy FILE -o OUT.png": "spy needs matplotlib: pip install 'magicube-cutlass[plots]'",
    "warmup --arch sm_90a": "warmup needs cuda: pip install 'magicube-cutlass[cuda]'",
    "tune": "tune needs a CUDA device",
}  # fmt: skip


def check_products() -> None:
    """Compare integer products with int64 sums, and a checked product with its tolerance."""
    generator = torch.Generator().manual_seed(0)
    for bits in (4, 8, 16):
        top = 2 ** (bits - 1)
        dense = torch.randint(-top, top, (64, 96), generator=generator)
        dense *= mc.random_pattern(64, 96, 0.7, 8).to_dense()
        right = torch.randint(-top, top, (96, 40), generator=generator)
        a = mc.SRBCRS.from_dense(dense.to(torch.int16), vector_length=8, bits=bits)
        b = mc.QuantTensor.from_ints(right, bits=bits)
        assert torch.equal(mc.spmm(a, b, out_dtype=torch.int64), dense @ right), bits
        assert engine.isa() in mc.explain(a, b, out_dtype=torch.int64)
    x, y = (torch.randn(96, 96, generator=generator) for _ in range(2))
    exact = x.double() @ y.double()
    error = (residual.matmul(x, y, tol=1e-3).double() - exact).norm() / exact.norm()
    assert error <= 1e-3, error


def check_commands(folder: Path) -> None:
    """Run every command; one that needs a GPU, a compiler or matplotlib says so."""
    mc.write_smtx(folder / "a.smtx", mc.random_pattern(64, 96, 0.7, 1))
    model = {"up.weight": torch.randn(64, 32), "down.weight": torch.randn(32, 64)}
    save_file(model, folder / "model.safetensors")
    env = {**os.environ, "MAGICUBE_CACHE": str(folder / "cache")}
    for command, missing in COMMANDS.items():
        words = [{"FILE": "a.smtx", "MODEL": "model.safetensors"}.get(word, word) for word in command.split()]
        done = subprocess.run(
            [sys.executable, "-m", "magicube_cutlass", *words],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        said = " ".join(done.stderr.split())
        assert done.returncode == 0 or (missing and missing in said), (command, done.stderr[-2000:])


if __name__ == "__main__":
    check_products()
    with tempfile.TemporaryDirectory() as made:
        check_commands(Path(made))
    version = ".".join(map(str, sys.version_info[:3]))
    print(
        f"magicube-cutlass {mc.__version__}, Python {version}, torch {torch.__version__}, engine {engine.isa()}: good"
    )
