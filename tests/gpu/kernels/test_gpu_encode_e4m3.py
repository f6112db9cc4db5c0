"""Rows encoded to e4m3, mxfp8 and nvfp4 on a GPU, against what torch computes, bit for bit."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.few_rows.encode_e4m3 import ENCODED, encode_config
from cute_kernels.few_rows.widen import WidenConfig, widen_rows
from magicube_cutlass.nn.dense.encode import encoded
from magicube_cutlass.nn.dense.product import quantize_act
from magicube_cutlass.quantization.float_tensor import quantize_floats
from tests.gpu.problems import needs_warp_groups

pytestmark = [pytest.mark.gpu, needs_warp_groups]

SHAPES = [(1, 1), (3, 77), (16, 4096), (5, 5000), (40, 256), (130, 2500)]
KERNELS = {
    encode_config(entry, str(dtype).removeprefix("torch."), *shape)
    for entry in ("encode_e4m3_rows", "encode_e4m3_groups", "encode_mxfp8_rows", "encode_nvfp4_rows")
    for dtype in ENCODED
    for shape in SHAPES
}


@pytest.mark.parametrize("dtype", ENCODED, ids=str)
@pytest.mark.parametrize("act", ["e4m3", "e4m3_g128", "mxfp8", "nvfp4"])
@pytest.mark.configs(KERNELS)
def test_codes_and_scales_are_those_of_torch(act: str, dtype: torch.dtype) -> None:
    for m, k in SHAPES:
        x = (torch.randn(m, k) * torch.randn(m, 1).mul(6).exp()).to(dtype)
        if m > 2:
            x[1] = 0
            x[2, k // 2] = torch.nan if m == 3 else torch.inf
        if dtype != torch.float16:
            x[0] *= 1e-36
        want = quantize_floats(x, act, axis=1, nonfinite="propagate", tensor_scale_per_row=True)
        got = encoded(x.cuda(), act, None)
        assert torch.equal(got.scale.cpu(), want.scale) or torch.equal(got.scale.cpu().isnan(), want.scale.isnan())
        assert torch.equal(torch.nan_to_num(got.scale.cpu().float()), torch.nan_to_num(want.scale.float()))
        if want.tensor_scale is not None:
            assert got.tensor_scale is not None and torch.equal(got.tensor_scale.cpu(), want.tensor_scale)
        assert torch.equal(got.data.cpu(), want.data), (m, k)


def test_a_given_scale_is_taken() -> None:
    x, scale = torch.randn(9, 300), torch.tensor(0.003)
    want = quantize_act(x, "e4m3", scale)
    got = encoded(x.cuda(), "e4m3", scale.cuda())
    assert want is not None and torch.equal(got.data.cpu(), want.data)


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.configs([WidenConfig("bfloat16"), WidenConfig("float16")])
def test_widened_rows_are_exact(act: str) -> None:
    for m, k in SHAPES:
        ints = torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda")
        got = widen_rows(ints, act)
        assert torch.equal(got.double(), ints.double()) and got.stride(0) % 8 == 0
