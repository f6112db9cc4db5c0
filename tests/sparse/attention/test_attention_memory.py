"""What sparse attention makes on the way follows the mask's vectors, not the square of the length."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from magicube_cutlass import masks
from magicube_cutlass.attention import sparse_attention
from tests.sparse.attention.test_attention import fake_kernel


class Made(TorchDispatchMode):
    """Bytes of all tensors that operators make inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[int, int] = {}
        self.kept: list[Tensor] = []  # so that no address repeats

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.bytes:
                self.bytes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                self.kept.append(x)
        return out


@pytest.mark.parametrize("backend", ["unfused", "fused"])
def test_memory_follows_the_mask_and_not_the_square_of_the_length(
    monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    """All that the operator makes, the fused kernel's integers and results too, for a window of 64 keys a query."""
    if backend == "fused":
        attention = pytest.importorskip("cute_kernels.attention.fused", reason="needs the wheel nvidia-cutlass")
        fake_kernel(monkeypatch)
        monkeypatch.setattr(attention, "make_index", lambda arrays, *_, **__: SimpleNamespace(config=None))
        monkeypatch.setattr(attention, "fused_attention", lambda *_, **__: None)
    sums, largest = [], []
    for length in (1024, 2048, 4096):
        q, k, v = (torch.randn(2, length, 32) for _ in "qkv")
        mask = masks.local(length, 32)
        sparse_attention(q, k, v, mask, backend=backend, return_lse=True)  # what is derived from a mask is cached
        with Made() as made:
            sparse_attention(q, k, v, mask, backend=backend, return_lse=True)
        sums.append(sum(made.bytes.values()))
        largest.append(max(made.bytes.values()))
    assert all(b < 2.1 * a for values in (sums, largest) for a, b in pairwise(values)), (sums, largest)
    assert largest[-1] < 2 * 4096 * 4096 / 4, "a byte for each query and key would be four times as much"
