"""Cells of the comparison page that the installed libraries decide: a new release of one makes the page stale."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy
import scipy.sparse
import torch
from torch import Tensor

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "explanation" / "comparison.md").read_text()


def checked(library: str, installed: str) -> None:
    """Skip unless the page is about the installed release."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith("- Run on a CPU")]
    (release,) = re.findall(rf"{library} (\d+\.\d+)\.\d", line)
    if not installed.startswith(release):
        pytest.skip(f"the page is about {library} {release}, this is {installed}")


def cells(row: str) -> list[str]:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_scipy() -> None:
    checked("scipy", scipy.__version__)
    product = scipy.sparse.csr_array(np.full((1, 300), 100, np.int8)) @ np.full((300, 1), 100, np.int8)
    assert product.dtype == np.int8 and cells("scipy.sparse")[3] == "int dtypes wrap around"
    with pytest.raises(ValueError, match="float16"):
        scipy.sparse.csr_array(np.eye(2, dtype=np.float16))
    assert cells("scipy.sparse")[2] == "NumPy dtypes without float16"


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "CSR": Tensor.to_sparse_csr, "CSC": Tensor.to_sparse_csc, "COO": Tensor.to_sparse,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse")
def test_torch_sparse() -> None:
    checked("torch", torch.__version__)
    dense = torch.eye(8)
    for name, convert in LAYOUTS.items():
        x = dense.clone().requires_grad_()
        (convert(x) @ torch.ones(8, 2)).sum().backward()
        assert x.grad is not None and name in cells("torch.sparse")[6]
        if name != "COO":
            with pytest.raises(NotImplementedError):
                convert(dense.to(torch.int8)) @ dense.to(torch.int8)
    assert (dense.to(torch.int8).to_sparse() @ dense.to(torch.int8)).dtype == torch.int8
    assert cells("torch.sparse")[2] == "float; ints in COO on a CPU"
    with pytest.raises(RuntimeError, match="Only CUDA tensors"):
        torch.sparse.to_sparse_semi_structured(torch.tensor([0, 0, 1, 1]).tile(64, 16).half())


def test_flex_attention() -> None:
    checked("torch", torch.__version__)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    x = torch.randn(1, 1, 128, 16)
    assert mask.BLOCK_SIZE == (128, 128) and flex_attention(x, x, x, block_mask=mask).shape == x.shape
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(x.requires_grad_(), x, x, block_mask=mask)
    assert cells("FlexAttention")[4:] == ["forward only", "yes", "on a GPU"]
