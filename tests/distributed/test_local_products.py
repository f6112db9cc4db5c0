"""Addresses by which a rank's part of a product replays launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import magicube_cutlass as mc
from magicube_cutlass.autograd.integer import quantized
from magicube_cutlass.distributed.local_products import DensePart, LayerPart, SparsePart


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_the_launches_of_a_rank_s_tokens_are_those_of_every_tensor_that_they_write(kind: str) -> None:
    weight = torch.randn(64, 48)
    part: LayerPart
    if kind == "sparse":
        part = SparsePart(mc.SRBCRS.from_dense(weight, vector_length=8, scale="row"), (0, 64))
    else:
        ints = quantized(weight, 8, 1)
        assert ints.scale is not None
        part = DensePart(ints.data, ints.scale, (0, 64))
    rows, data, scale, act_scale = torch.randn(16, 48), torch.empty(16, 48), torch.empty(16, 1), torch.tensor(0.1)
    seen: list[tuple[int, ...]] = []
    launches: Any = SimpleNamespace(run=lambda kind, addresses, device, function: seen.append(addresses))
    part._quantize_own(rows, act_scale, data, scale, launches)
    assert set(seen[0]) == {each.data_ptr() for each in (rows, act_scale, data, scale)}
