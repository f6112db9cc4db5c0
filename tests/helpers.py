"""What several test files share: random matrices, hypothesis strategies for them, and a look into compiled kernels."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from cute_kernels.integers import BITS, int_range, value_dtype
from cute_kernels.jit import Binary
from magicube_cutlass.checks import STRIDES, VECTOR_LENGTHS, Granularity
from magicube_cutlass.formats.construct import narrow
from magicube_cutlass.formats.pattern import Pattern

DENSITIES = (0.0, 0.05, 0.3, 1.0)
SCALES: dict[int | None, Granularity] = {
    None: "tensor",
    0: "column",
    1: "row",
}  # axis of a scale -> its name as an argument


def data_folder() -> Path | None:
    """The folder with the DLMC sample, or None where it is absent."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("MAGICUBE_DATA", root.parent / "shared" / "data")) / "dlmc"
    return folder if (folder / "sample_index.csv").is_file() else None


def python_calls(call: Callable[[], object]) -> list[CodeType]:
    """The functions of Python that run in a call in this thread, in order, its own first; no callback of a collection."""
    found: list[CodeType] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.append(frame.f_code)

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return found


def random_ints(shape: tuple[int, ...], bits: int, signed: bool, seed: int = 0) -> Tensor:
    """Uniform integers of the whole range, the extremes included, in their value dtype."""
    low, high = int_range(bits, signed)
    ints = torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))
    if ints.numel() > 1:
        ints.view(-1)[0], ints.view(-1)[-1] = low, high
    return narrow(ints, bits, signed)


def random_mask(rows: int, cols: int, density: float, seed: int = 0) -> Tensor:
    """bool ``(rows, cols)``; about a third of the rows are empty, one is full when there is anything at all."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, cols, generator=generator) < density
    mask &= torch.rand(rows, 1, generator=generator) < 0.7
    if density and rows:
        mask[int(torch.randint(rows, (1,), generator=generator))] = True
    return mask


@dataclass(frozen=True)
class Case:
    """One random matrix: everything a test needs to build it in any format."""

    ints: Tensor  # (M, K) in the value dtype, zero where mask is false
    mask: Tensor  # bool (M, K)
    vector_length: int
    stride: int
    bits: int
    signed: bool

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that a constructor of SRBCRS takes."""
        return {
            "vector_length": self.vector_length,
            "bits": self.bits,
            "signed": self.signed,
            "stride": self.stride,
        }

    @property
    def kept(self) -> Tensor:
        """bool (M, K): the mask in whole vectors, worked out without the library."""
        kept = torch.zeros_like(self.mask)
        for row in range(0, self.mask.shape[0], self.vector_length):
            kept[row : row + self.vector_length] = self.mask[row : row + self.vector_length].any(0)
        return kept


@st.composite
def cases(draw: st.DrawFn, *, max_size: int = 40) -> Case:
    """Matrices of any legal kind, the tiny and odd shapes first when hypothesis shrinks."""
    rows, cols = draw(st.integers(0, max_size)), draw(st.integers(0, max_size))
    bits, signed = draw(st.sampled_from(BITS)), draw(st.booleans())
    density, seed = draw(st.sampled_from(DENSITIES)), draw(st.integers(0, 2**16))
    mask = random_mask(rows, cols, density, seed)
    ints = random_ints((rows, cols), bits, signed, seed).to(torch.int64)
    if value_dtype(bits, signed) == torch.uint16:
        ints &= 0xFFFF
    ints = narrow(ints * mask, bits, signed)
    vector_length, stride = draw(st.sampled_from(VECTOR_LENGTHS)), draw(st.sampled_from(STRIDES))
    return Case(ints, mask, vector_length, stride, bits, signed)


def pattern_of(rows: list[list[int]], cols: int, vector_length: int = 8) -> Pattern:
    """A pattern from the columns of each vector row, written out."""
    lengths = torch.tensor([0, *map(len, rows)], dtype=torch.int64)
    columns = torch.tensor([column for row in rows for column in row], dtype=torch.int32)
    return Pattern((len(rows) * vector_length, cols), vector_length, lengths.cumsum(0), columns)


def nvdisasm() -> str:
    """The disassembler: that of the wheel nvidia-cuda-nvdisasm, else that of a toolkit."""
    spec = find_spec("nvidia")
    folders = [f"{root}/*/bin" for root in (spec.submodule_search_locations or ())] if spec else []
    folders += ["/usr/local/cuda/bin"]
    found = [path for folder in folders for path in glob(f"{folder}/nvdisasm")]
    tool = found[0] if found else shutil.which("nvdisasm")
    assert tool, "no nvdisasm: pip install nvidia-cuda-nvdisasm"
    return tool


def disassemble(code: bytes) -> str:
    """SASS of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True).stdout


# Compilers for 8.x place a slow path for a diverged warp beside a shuffle, and call it.
DIVERGED = r"\$__internal_\d+_\$__cuda_sm70_(?:warpsync|shflsync)\w*|\.L_x_\d+"


def lean_sass(binary: Binary, calls: str = "") -> str:
    """SASS of `binary`, after a check that it has no local memory, no spills, and only calls that match `calls`."""
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    sass = disassemble(binary.code)
    found = {*re.findall(r"\b(?:LDL|STL)\b\S*", sass), *re.findall(r"\bCALL\S*\s+`?\(?([^)\s;]+)", sass)}
    found = {each for each in found if not re.fullmatch(calls, each)}
    assert not found, f"{binary.title} for {binary.arch}: {sorted(found)}"
    return sass
