"""Check an installed wheel: the engine is there, products are exact, commands answer.

Run outside of the source tree with the Python of an environment that has nothing but the wheel: ``python wheel_smoke.py``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import magicube_cutlass as mc
import residual
from cute_kernels.cpu import engine

COMMANDS = [["--version"], ["--help"], ["collect-env"], ["info", "FILE"], ["spmm", "FILE", "--n", "64"],
            ["explore", "FILE", "--no-open", "-o", "OUT.html"]]  # fmt: skip


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
    """Run every command that needs no GPU."""
    mc.write_smtx(folder / "a.smtx", mc.random_pattern(64, 96, 0.7, 1))
    for command in COMMANDS:
        words = [word.replace("FILE", "a.smtx").replace("OUT", "out") for word in command]
        done = subprocess.run(
            [sys.executable, "-m", "magicube_cutlass", *words], cwd=folder, capture_output=True, check=False
        )
        assert done.returncode == 0, (words, done.stderr.decode()[-2000:])


if __name__ == "__main__":
    check_products()
    with tempfile.TemporaryDirectory() as made:
        check_commands(Path(made))
    version = ".".join(map(str, sys.version_info[:3]))
    print(
        f"magicube-cutlass {mc.__version__}, Python {version}, torch {torch.__version__}, engine {engine.isa()}: good"
    )
