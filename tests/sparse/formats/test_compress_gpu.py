"""SR-BCRS made by the GPU's kernels: every tensor as the CPU constructor has it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels.convert.dense_to_sparse import CompressConfig, needs_check
from cute_kernels.integers import BITS, int_range, widen
from cute_kernels.jit import compile_unit
from magicube_cutlass import SRBCRS
from magicube_cutlass.checks import STRIDES, VECTOR_LENGTHS
from tests.helpers import SCALES, disassemble, random_ints, random_mask

SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.long), "sm_90a"])
@pytest.mark.parametrize(
    "config",
    [
        CompressConfig("mark"),
        CompressConfig("mark", "int64_t", warps=1, checked=True, masked=True),
        CompressConfig("layout_rows"),
        CompressConfig("fill"),
        CompressConfig("fill", "uint8_t", warps=1, bits=4, nibbles=True),
    ],
    ids=lambda config: config.name,
)
def test_machine_code_keeps_everything_in_registers(config: CompressConfig, arch: str) -> None:
    binary = compile_unit(config.translation_unit(arch))
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    assert not re.search(r"\b(?:LDL|STL)\b", disassemble(binary.code))


def test_only_integers_that_may_be_out_of_range_are_checked() -> None:
    assert not needs_check(torch.int8, 8, True) and not needs_check(torch.uint8, 16, True)
    assert (
        needs_check(torch.int8, 8, False) and needs_check(torch.uint8, 8, True) and needs_check(torch.int16, 12, True)
    )


def same(ours: SRBCRS, expected: SRBCRS) -> None:
    """Equal in every field."""
    found = ours.to("cpu")
    assert found._fields() == expected._fields()
    assert found._tensors().keys() == expected._tensors().keys()
    for name, tensor in expected._tensors().items():
        other = found._tensors()[name]
        assert other.dtype == tensor.dtype and other.shape == tensor.shape, name
        assert torch.equal(
            widen(other) if name == "values" else other, widen(tensor) if name == "values" else tensor
        ), name


def check(dense: Tensor, mask: Tensor | None = None, **options: Any) -> SRBCRS:
    """``dense`` and ``mask`` are on the CPU; returns the matrix on the GPU."""
    if mask is None:
        ours, expected = SRBCRS.from_dense(dense.cuda(), **options), SRBCRS.from_dense(dense, **options)
    else:
        ours = SRBCRS.from_mask(dense.cuda(), mask.cuda(), **options)
        expected = SRBCRS.from_mask(dense, mask, **options)
    same(ours, expected)
    return ours


def some_ints(rows: int, cols: int, bits: int, signed: bool, density: float, seed: int = 0) -> Tensor:
    mask = random_mask(rows, cols, density, seed)
    ints = random_ints((rows, cols), bits, signed, seed)
    return (ints.view(torch.int16) * mask).view(ints.dtype) if ints.dtype == torch.uint16 else ints * mask


@pytest.mark.gpu
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("vector_length", VECTOR_LENGTHS)
def test_every_kind_of_matrix_is_as_the_cpu_makes_it(vector_length: int, bits: int, signed: bool) -> None:
    for i, (rows, cols, density) in enumerate([(1, 1, 1.0), (37, 130, 0.2), (67, 64, 0.05), (33, 2100, 0.1)]):
        dense = some_ints(rows, cols, bits, signed, density, i)
        full, mask = random_ints((rows, cols), bits, signed, i), random_mask(rows, cols, density, i + 50)
        for stride in STRIDES:
            options = {"vector_length": vector_length, "bits": bits, "signed": signed, "stride": stride}
            check(dense, **options)
            check(full, mask, **options)
            check(torch.zeros_like(full), mask, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("density", [0.0005, 0.01, 0.3, 1.0])
def test_long_vector_rows_are_written_in_stretches(density: float, stride: int) -> None:
    for bits in (4, 8):
        check(some_ints(9, 20_011, bits, True, density, 3), vector_length=8, bits=bits, stride=stride)
        check(some_ints(9, 2040, bits, True, density, 3), vector_length=8, bits=bits, stride=stride)


@pytest.mark.gpu
def test_many_vector_rows_are_laid_out_one_after_the_other() -> None:
    check(some_ints(5003, 40, 8, True, 0.1), vector_length=1)
    check(some_ints(40_000, 3, 8, True, 0.3), vector_length=2, stride=16)


@pytest.mark.gpu
def test_a_large_matrix_is_as_the_cpu_makes_it() -> None:
    mask = torch.rand(512, 4096, generator=torch.Generator().manual_seed(0)) < 0.1
    dense = random_ints((4096, 4096), 8, True) * mask.repeat_interleave(8, 0)
    matrix = check(dense, vector_length=8)
    assert "pattern" not in matrix._cache
    matrix.check_format(full=True)
    assert torch.equal(matrix.to_dense().cpu(), dense)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (8, 40)])
def test_matrices_without_a_nonzero_are_empty(shape: tuple[int, int]) -> None:
    for dtype in (torch.int8, torch.float32):
        matrix = check(torch.zeros(shape, dtype=dtype))
        assert matrix.nnz == 0
    check(torch.ones(shape, dtype=torch.int8), torch.zeros(shape, dtype=torch.bool), vector_length=4, bits=4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED], ids=str)
def test_any_integer_dtype_is_taken_and_its_range_checked(dtype: torch.dtype) -> None:
    for bits, signed in ((4, True), (4, False), (8, True), (12, True), (16, False)):
        low, high = int_range(bits, signed)
        low, high = max(low, torch.iinfo(dtype).min), min(high, torch.iinfo(dtype).max)
        generator = torch.Generator().manual_seed(bits)
        wide = torch.randint(low, high + 1, (21, 75), generator=generator) * random_mask(21, 75, 0.3)
        mask = random_mask(21, 75, 0.3, 1)
        options = {"vector_length": 4, "bits": bits, "signed": signed, "stride": 16}
        expected = SRBCRS.from_dense(wide, **options)
        same(SRBCRS.from_dense(wide.to(dtype).cuda(), **options), expected)
        same(SRBCRS.from_mask(wide.to(dtype).cuda(), mask.cuda(), **options), SRBCRS.from_mask(wide, mask, **options))
        for beyond in (int_range(bits, signed)[1] + 1, int_range(bits, signed)[0] - 1):
            if not torch.iinfo(dtype).min <= beyond <= torch.iinfo(dtype).max:
                continue
            bad = wide.clone()
            bad[20, 74] = beyond
            with pytest.raises(ValueError, match=rf"dense must lie in \[.*got values in \[.*{beyond}"):
                SRBCRS.from_dense(bad.to(dtype).cuda(), **options)
            mask[20, 74] = False
            SRBCRS.from_mask(bad.to(torch.int64).cuda(), mask.cuda(), **options)
            mask[20, 74] = True
            with pytest.raises(ValueError, match=r"values must lie in"):
                SRBCRS.from_mask(bad.to(torch.int64).cuda(), mask.cuda(), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_quantized_by_the_conversion(dtype: torch.dtype, axis: int | None) -> None:
    weight = torch.randn(83, 300, generator=torch.Generator().manual_seed(0)) * random_mask(83, 300, 0.2)
    weight[3, 4], weight[11, 7] = 1e-7, -0.0  # one rounds to zero and stays, the other is no entry
    mask = random_mask(83, 300, 0.2, 5)
    for bits in BITS:
        for rounding in ("nearest", "trunc"):
            check(weight.to(dtype), bits=bits, scale=SCALES[axis], rounding=rounding)
        check(weight.to(dtype), bits=bits, scale=SCALES[axis], clip=99.0)
        check(weight.abs().to(dtype), bits=bits, scale=SCALES[axis], signed=False)
        check(weight.to(dtype), mask, vector_length=4, bits=bits, scale=SCALES[axis])


@pytest.mark.gpu
def test_layouts_give_the_matrix_of_a_contiguous_tensor() -> None:
    ints, floats = some_ints(70, 96, 8, True, 0.3), torch.randn(70, 96) * random_mask(70, 96, 0.3)
    for dense in (ints, floats):
        on_gpu = dense.cuda()
        views = {
            "column-major": on_gpu.mT.contiguous().mT,
            "transposed": on_gpu.mT,
            "rows apart": on_gpu[:, :50],
            "unaligned": on_gpu[:, 3:],
            "every second row": on_gpu[::2],
            "every second column": on_gpu[:, ::2],
            "one row for all": on_gpu[:1].expand(9, 96),
            "one column": on_gpu[:, 5:6],
        }
        for name, view in views.items():
            for bits in (8, 16):
                assert view.is_cuda, name
                same(SRBCRS.from_dense(view, bits=bits), SRBCRS.from_dense(view.cpu(), bits=bits))
                mask = view != 0
                same(
                    SRBCRS.from_mask(view, mask, vector_length=2, bits=bits),
                    SRBCRS.from_mask(view.cpu(), mask.cpu(), vector_length=2, bits=bits),
                )


BAD = {
    "nan": (lambda: SRBCRS.from_dense(torch.full((3, 4), torch.nan, device="cuda")), ValueError, "x must be finite, got 12"),
    "inf behind a mask": (
        lambda: SRBCRS.from_mask(torch.full((3, 4), torch.inf, device="cuda"), torch.ones(3, 4, dtype=torch.bool, device="cuda"), vector_length=1, bits=8),
        ValueError, "x must be finite, got 12",
    ),
    "negative": (lambda: SRBCRS.from_dense(-torch.ones(3, 4, device="cuda"), signed=False), ValueError, "x must not be negative"),
    "bool": (lambda: SRBCRS.from_dense(torch.ones(3, 4, device="cuda") > 0), TypeError, "dense must have an integer dtype, got torch.bool"),
    "complex": (lambda: SRBCRS.from_dense(torch.ones(3, 4, device="cuda") * 1j), TypeError, "dense must have an integer dtype"),
    "axis": (lambda: SRBCRS.from_dense(torch.ones(3, 4, device="cuda"), scale="column"), ValueError, "scale must be 'tensor' or 'row'"),
    "bits": (lambda: SRBCRS.from_dense(torch.ones(3, 4, device="cuda"), bits=5), ValueError, "bits must be one of"),
    "vector length": (lambda: SRBCRS.from_dense(torch.ones(3, 4, device="cuda"), vector_length=3), ValueError, "vector_length must be one of"),
    "dimensions": (lambda: SRBCRS.from_dense(torch.ones(3, device="cuda")), ValueError, "dense must have 2 dimensions"),
    "mask on the CPU": (
        lambda: SRBCRS.from_mask(torch.ones(3, 4, device="cuda"), torch.ones(3, 4, dtype=torch.bool), vector_length=1, bits=8),
        ValueError, "mask must be on cuda:0",
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.gpu
def test_hidden_infinities_do_not_count() -> None:
    values = torch.full((8, 40), torch.inf)
    mask = random_mask(8, 40, 0.3)
    values[mask] = 2.0
    check(values, mask, vector_length=2, bits=8)


@pytest.mark.gpu
def test_the_device_is_waited_for_once() -> None:
    dense = some_ints(64, 96, 8, True, 0.3).cuda()
    SRBCRS.from_dense(dense)
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as seen:
        SRBCRS.from_dense(dense)
    waits = [
        event.name
        for event in seen.events()
        if event.name in ("aten::_local_scalar_dense", "cudaStreamSynchronize", "cudaMemcpy")
    ]
    assert waits.count("cudaStreamSynchronize") + waits.count("cudaMemcpy") <= 1, waits
