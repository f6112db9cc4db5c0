"""Block scales folded into e4m3 values on a GPU: in every bit what float64 gives, and the products of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels import floats
from cute_kernels.scaled_gemm.api import explain_scaled_gemm, scaled_gemm
from cute_kernels.scaled_gemm.config import OperandFormat, candidates
from cute_kernels.scaled_gemm.dequantize import fold, folded_format
from tests.gpu.kernels.test_gpu_floats import SHAPES, exact, lost, operand
from tests.gpu.problems import needs_warp_groups
from tests.kernels.scaled_gemm.test_fold_host import FORMATS, configs_of, folded, operand_of
from tests.kernels.scaled_gemm.test_fold_host import SHAPES as SMALL_SHAPES

pytestmark = [pytest.mark.gpu, needs_warp_groups]
FOLDING = [
    (OperandFormat("e4m3", 32, "ue8m0"), OperandFormat("e2m1", 32, "ue8m0")),
    (OperandFormat("e2m3", 32, "ue8m0"), OperandFormat("e4m3", 32, "ue8m0")),
    (OperandFormat("e4m3"), OperandFormat("e3m2", 32, "ue8m0")),
    (OperandFormat("e4m3", 32, "ue8m0"), OperandFormat("e4m3", tiles=True)),
    (OperandFormat("e2m1", 32, "ue8m0"), OperandFormat("e2m1")),
]


@pytest.mark.configs(configs_of(True) | configs_of(False))
def test_folded_operands_are_those_of_float64() -> None:
    for fmt in FORMATS:
        for rows, k in (*SMALL_SHAPES, (70, 4100)):
            x = operand_of(fmt, rows, k, 12)
            assert x.scale is not None and x.blocks is not None
            on_gpu = replace(x, packed_data=x.packed_data.cuda(), scale=x.scale.cuda(), blocks=x.blocks.cuda())
            for lines in (True, False):
                codes, scales = folded(x, lines)
                found = fold(on_gpu, lines)
                got = floats.unpack(found.packed_data, k, "e4m3").cpu()
                assert torch.equal(torch.where(got % 128 == 127, 127, got), codes), (fmt, rows, k, lines)
                own = found.blocks if lines else found.scale
                assert own is not None
                assert torch.equal(own.cpu(), scales if lines else x.scale * scales[:, 0])


@pytest.mark.parametrize("pair", FOLDING, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
@pytest.mark.configs(
    [c for a, b in FOLDING for c in candidates(folded_format(a, True), folded_format(b, False), "sm_90a")]
)
def test_folded_blocks_multiply_as_they_do_where_e4m3_holds_them(pair: tuple[OperandFormat, OperandFormat]) -> None:
    for m, k, n in SHAPES[2:]:
        x, y = operand(pair[0], m, k, 1), operand(pair[1], n, k, 9)
        x = replace(x, scale=torch.full((m,), 0.5, device="cuda"))
        y = replace(y, scale=torch.full((), 4.0, device="cuda"))
        got = scaled_gemm(x, y, fold_scales=True)
        assert torch.equal(got.double(), 2 * exact(x, y)), (m, k, n)
        read = {"a": folded_format(pair[0], True), "b": folded_format(pair[1], False)}
        before = {name for name, given in zip("ab", pair, strict=True) if read[name] != given}
        assert m <= 64 or before == set(explain_scaled_gemm(x, y, fold_scales=True).folded)


def test_folded_blocks_lose_what_is_stated() -> None:
    m, k, n = 96, 1000, 96
    a, b = operand(FOLDING[0][0], m, k, 3, None), operand(FOLDING[0][1], n, k, 4, None)
    x, y = fold(a, True).values(torch.float64), fold(b, False).values(torch.float64)
    scale = fold(b, False).scale
    assert scale is not None
    got = scaled_gemm(a, b, fold_scales=True).double() / scale
    assert bool(((got - x @ y.t()).abs() <= lost(x, y, 128)).all())
    rounded = 2.0**-17 * torch.nn.functional.pad(a.values(torch.float64).abs(), (0, 24)).view(m, -1, 128).amax(2)
    assert bool(((x - a.values(torch.float64)).abs() <= rounded.repeat_interleave(128, 1)[:, :k]).all())
    assert torch.equal(y * scale[:, None], b.values(torch.float64)), "e2m1 is exact"
