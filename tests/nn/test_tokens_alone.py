"""The result of a token does not depend on the tokens beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from magicube_cutlass.nn import QuantLinear, SparseQuantLinear
from magicube_cutlass.nn.config import ACTIVATIONS
from magicube_cutlass.quantization.float_tensor import quantize_floats

DENSE = [(weight, act) for weight, known in ACTIVATIONS.items() for act in known]


def tokens() -> torch.Tensor:
    """Tokens (7, 96), one of which is 1000 times as large, one of zeros."""
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    x[2] *= 1000
    x[5] = 0
    return x


@pytest.mark.parametrize(("weight", "act"), DENSE)
def test_of_a_dense_layer(weight: str, act: str) -> None:
    torch.manual_seed(0)
    layer = QuantLinear.from_linear(nn.Linear(96, 48), weight=weight, act=act).eval()
    x = tokens()
    with torch.inference_mode():
        together, alone = layer(x), torch.cat([layer(row) for row in x.split(1)])
    # Only torch's float32 sums may differ, which depend on the number of rows.
    assert bool(((together - alone).norm(dim=1) <= 1e-5 * alone.norm(dim=1)).all())


@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_of_a_sparse_layer(act_bits: int) -> None:
    torch.manual_seed(0)
    layer = SparseQuantLinear.from_linear(nn.Linear(96, 48), 0.5, act_bits=act_bits).eval()
    x = tokens()
    with torch.inference_mode():
        assert torch.equal(layer(x), torch.cat([layer(row) for row in x.split(1)]))


def test_rows_of_nvfp4_are_quantized_each_for_itself_on_request() -> None:
    x = tokens()
    rows = quantize_floats(x, "nvfp4", axis=1, tensor_scale_per_row=True)
    assert rows.tensor_scale is not None and rows.tensor_scale.shape == (7, 1)
    whole = quantize_floats(x, "nvfp4", axis=1)
    assert whole.tensor_scale is not None and whole.tensor_scale.shape == ()
    for i, row in enumerate(x.split(1)):
        assert torch.equal(rows.dequantize()[i : i + 1], quantize_floats(row, "nvfp4", axis=1).dequantize())
    operand = rows.operand()
    assert operand.scale is not None and operand.scale.shape == (7,)
    torch.testing.assert_close(operand.values() * operand.scale[:, None], rows.dequantize(), rtol=1e-6, atol=0)
    empty = quantize_floats(torch.zeros(3, 0), "nvfp4", axis=1, tensor_scale_per_row=True)
    assert empty.tensor_scale is not None and empty.dequantize().shape == (3, 0)
