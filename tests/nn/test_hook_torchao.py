"""torchao's quantize_ makes the layers of this library."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from magicube_cutlass.nn import QuantConfig, QuantLinear, SparseQuantConfig, SparseQuantLinear

torchao = pytest.importorskip("torchao.quantization", reason="needs torchao: the extra 'torchao'")
hook = pytest.importorskip("magicube_cutlass.hooks.torchao")


def test_linear_layers_are_replaced_where_the_filter_says() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 8))).eval()
    x = torch.randn(5, 64)
    want = model(x).detach()
    torchao.quantize_(model, hook.MagicubeConfig(SparseQuantConfig(0.0), freeze=False), lambda _, name: name == "2")
    assert isinstance(model[2], SparseQuantLinear) and not model[2].frozen and type(model[0]) is nn.Linear
    torchao.quantize_(
        model, hook.MagicubeConfig(), lambda module, name: name != "3.0" and isinstance(module, nn.Linear)
    )
    assert isinstance(model[0], QuantLinear) and model[0].frozen and model[0].config == QuantConfig()
    assert type(model[3][0]) is nn.Linear
    with torch.no_grad():
        assert 0 < float((model(x) - want).norm() / want.norm()) < 0.03
