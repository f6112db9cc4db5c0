"""Split, selection and packing of Algorithm 1 on a GPU: the integers of the CPU, and products that add to their output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.atoms import atom
from cute_kernels.compensate import select
from cute_kernels.compensate.split import find_amaxes, leading_plane, residual_plane
from cute_kernels.dtypes import Integer
from cute_kernels.jit import get_kernel
from cute_kernels.layout.fragments import pack_index
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg
from cute_kernels.spmm.gather import GatherConfig
from residual.paper.quantize import Quantizer, quantize_operand

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1), (37, 50), (300, 1000), (1030, 2051)]


def matrix(m: int, k: int) -> Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m + k))
    ties = (torch.arange(-127, 128)[: min(k, 255)] + 0.5).clamp(-127, 127)
    x[0, : len(ties)] = ties * float(x.abs().max()) / 127
    return x


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("rounding", ["trunc", "nearest"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_integers_are_those_of_the_cpu(
    shape: tuple[int, int], axis: int | None, rounding: str, transposed: bool
) -> None:
    x = matrix(*shape)
    expected = quantize_operand(x, Quantizer(8, axis, rounding, 127), "x")
    found = find_amaxes(x.cuda(), axis, 127.0)
    for plane, made in ((leading_plane, expected.leading), (residual_plane, expected.residual)):
        here = plane(found, truncate=rounding == "trunc", transposed=transposed)
        assert torch.equal(here.integers.cpu(), made.integers)
        assert torch.equal(here.scales.cpu(), made.scale.flatten())


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_magnitudes(shape: tuple[int, int]) -> None:
    x = matrix(*shape)
    sums = select.slice_sums(x.cuda())
    assert torch.allclose(sums.of_rows.sum(0).cpu(), x.double().abs().sum(1), rtol=1e-13)
    assert torch.allclose(sums.of_columns.sum(0).cpu(), x.double().abs().sum(0), rtol=1e-13)
    levels = select.find_levels((sums.of_rows, sums.of_columns), (shape[1], shape[0]), 0.3, one=False)
    for level, dim in zip(levels, (1, 0), strict=True):
        assert torch.allclose(level.cpu(), (0.3 * x.double().abs().mean(dim)).float(), rtol=2**-23)


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("vector_length", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("columns", [50, 128, 257])
def test_what_is_selected_is_multiplied_and_added(
    shape: tuple[int, int], vector_length: int, axis: int, one: bool, columns: int
) -> None:
    x, v = matrix(*shape), vector_length
    values = x if axis == 0 else x.t()
    slices, positions = values.shape
    levels = 2.0 + torch.rand(1 if one else slices, generator=torch.Generator().manual_seed(1))
    operand = find_amaxes(x.cuda(), None if one else axis, 127.0)
    marks = select.mark(operand, axis, levels.cuda(), vector_length=v)
    report = torch.zeros(select.REPORT, dtype=torch.float64, device="cuda")
    select.lay_out((operand, operand), (marks, marks), report)
    found, _ = select.read_report(report.tolist())
    packed = select.pack_marked(marks, found, truncate=True)
    keep = torch.nn.functional.pad(values.abs() > levels[:, None], (0, 0, 0, -slices % v)).view(-1, v, positions).any(1)
    assert torch.equal(marks.counts.cpu().long(), keep.sum(1)) and found.vectors == int(keep.sum())
    kept = values * keep.repeat_interleave(v, 0)[:slices]
    expected = quantize_operand(kept.contiguous(), Quantizer(8, None if one else 0, "trunc", 127), "x").leading
    assert torch.equal(marks.scales.cpu(), expected.scale.flatten())

    dense = torch.randint(-127, 128, (positions, -(-columns // 16) * 16), dtype=torch.int8)
    col_scale = torch.rand(columns)
    product = expected.integers.double() @ dense[:, :columns].double() * expected.scale * col_scale.double()
    before = torch.randn(slices, columns)
    base = GatherConfig("s8_m16n8k32", v, Integer(8, True), Integer(8, True), "float32", accumulate=True)
    on_gpu, scales = dense.cuda(), col_scale.cuda()
    for turned in (False, True):
        for config in (base, replace(base, split_k_warps=4)):
            out = (before.t() if turned else before).contiguous().cuda()
            chosen = replace(config, transposed=turned)
            chosen.launch(
                get_kernel(chosen), packed, DenseArg(on_gpu.data_ptr(), dense.shape[1], 0, dense.shape[1]),
                OutputArg(out.data_ptr(), 1, slices, positions, columns),
                ScaleArg(marks.scales32.data_ptr(), int(not one), 0), ScaleArg(scales.data_ptr(), 1, 0), 0,
            )  # fmt: skip
            result = (out.t() if turned else out).cpu().double() - before.double()
            assert torch.allclose(result, product, rtol=1e-5, atol=1e-6 * float(product.abs().max() + 4))
    groups = torch.empty(found.groups, max(v // 8, 1), min(v, 8) * 32, dtype=torch.int8)
    groups[..., torch.from_numpy(pack_index(atom("s8_m16n8k32"))[: 32 * min(v, 8)])] = (
        packed.values.cpu().view(torch.int8).view(groups.shape)
    )
    assert int(groups.long().sum()) == int(expected.integers.long().sum())
