"""Packed weights of the few-rows product, read in the model of the kernel's arithmetic."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.few_rows.formats import FORMATS, PackedWeight, pack_weight
from tests.kernels.few_rows.model import decode, sample

SHAPES = [(1, 1), (77, 130), (64, 256), (130, 520)]  # (N, K)


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_reads_the_weight_that_was_packed(name: str, act: str) -> None:
    for seed, (n, k) in enumerate(SHAPES):
        made = sample(name, n, k, act, seed)
        error = (decode(made.weight) - made.truth).abs()
        assert bool((error <= made.slack + 2.0**-23 * made.truth.abs()).all()), (n, k, float(error.max()))
        form = made.weight.format
        assert made.weight.data.shape == (-(-n // 64), -(-k // 256) * 2, form.unit_bytes)


def test_formats_without_rounding_are_exact() -> None:
    for name in ("int4", "e2m1", "mxfp4", "nvfp4", "int8", "e4m3"):
        made = sample(name, 70, 300, "bfloat16", 3)
        one = PackedWeight(**{**made.weight.__dict__, "row_scale": made.weight.row_scale.double()})
        # the row's scale is rounded to float32 once, where the format has one of its own
        assert torch.allclose(decode(one), made.truth, rtol=2.0**-23, atol=0), name


def test_what_is_no_number_stays_in_its_row() -> None:
    codes = torch.zeros(3, 64, dtype=torch.uint8)
    scales = torch.full((3, 2), 127, dtype=torch.uint8)
    scales[1, 1] = 255
    weight = pack_weight(codes, FORMATS["mxfp4"], "bfloat16", scales)
    assert weight.row_scale.isnan().tolist() == [False, True, False]
    scales = torch.full((3, 4), 56, dtype=torch.uint8)
    scales[2, 0] = 0x7F
    assert pack_weight(codes, FORMATS["nvfp4"], "bfloat16", scales).row_scale.isnan().tolist() == [False, False, True]
    codes[0, 5] = 0xFF
    assert pack_weight(codes, FORMATS["e4m3"], "bfloat16").row_scale.isnan().tolist() == [True, False, False]
    ints = torch.ones(3, 256, dtype=torch.int8)  # whole groups: one that ends beyond K is NaN, not infinite
    for name in ("int4_g32", "int4_g128"):
        groups = torch.ones(3, 256 // FORMATS[name].group)
        groups[1, 0] = torch.inf
        found = decode(pack_weight(ints, FORMATS[name], "bfloat16", groups))
        assert found[1, 0] == torch.inf and bool(found[[0, 2]].isfinite().all())
    ones, groups = torch.full((4, 256), 0x38, dtype=torch.uint8), torch.ones(4, 2)
    groups[1, 1], groups[2, 0], groups[3] = torch.nan, torch.inf, 0
    found = decode(pack_weight(ones, FORMATS["e4m3_g128"], "float16", groups))
    assert bool(found[1, 128:].isnan().all() & (found[2, :128] == torch.inf).all() & (found[3] == 0).all())
    assert bool((found[0] == 1).all() & (found[1, :128] == 1).all() & (found[2, 128:] == 1).all())
