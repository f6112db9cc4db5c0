"""Digit planes by the GPU's kernels: every integer and every scale as the CPU has them, ready for the product."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from cute_kernels.convert.digits import Digits, columns_config, digits, rows_config
from cute_kernels.convert.pack import PackConfig
from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.gemm.api import explain_gemm, gemm
from cute_kernels.operands import is_ready

pytestmark = pytest.mark.gpu

ARCH = "sm_90a" if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else "sm_80"
# One entry, narrow, odd, whole runs, more columns than threads keep, more rows than a cluster keeps, tall.
SHAPES = [(1, 1), (3, 5), (70, 33), (64, 256), (5, 4100), (3, 20_000), (9001, 40), (3000, 7), (600, 33), (1500, 48)]
CONFIGS = [
    config
    for name, count in product(REAL_DTYPES.values(), (1, 2, 3))
    for config in (
        rows_config(name, count, 1),
        rows_config(name, count, 20_000),
        columns_config(name, count, ARCH, 1),
        columns_config(name, count, ARCH, 9001),
    )
]


def matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of all magnitudes that the dtype has, among them zeros, infinity and NaN."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if dtype == torch.float32:
        x *= 10.0 ** torch.randint(-44, 38, (rows, 1), generator=generator).double()
    x[rows // 2] = 0
    if rows > 4:
        x[1, columns // 3], x[3, 0] = torch.inf, torch.nan
    return x.to(dtype)


def assert_same(got: Digits, expected: Digits) -> None:
    assert torch.equal(got.scale.cpu().nan_to_num(-1), expected.scale.nan_to_num(-1))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(got.planes, expected.planes, strict=True))


@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.configs([*CONFIGS, PackConfig("pack_transposed"), PackConfig("pack_strided")])
def test_digits_are_those_of_the_cpu(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = matrix(*shape, dtype)
    on_gpu = x.cuda()
    for count, axis, power in product((1, 2, 3), (None, 0, 1), (False, True)):
        expected = digits(x, count=count, axis=axis, exponent_scale=power)
        for transpose in (False, True):
            got = digits(on_gpu, count=count, axis=axis, exponent_scale=power, transpose=transpose)
            assert_same(got, expected)
            assert all(is_ready(plane.t() if transpose else plane) for plane in got.planes)
    for source in (
        on_gpu.t().contiguous().t(),
        torch.cat((on_gpu, on_gpu), 1)[:, 1 : shape[1] + 1],
        on_gpu.repeat(2, 2)[::2, ::2],
    ):
        for axis in (None, 0, 1):
            assert_same(digits(source, 4, axis=axis), digits(source.cpu(), 4, axis=axis))


def test_the_product_of_digits_needs_no_copy_and_is_as_good_as_on_the_cpu() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    x, y = (
        torch.randn(300, 1000, generator=generator, device="cuda"),
        torch.randn(1000, 260, generator=generator, device="cuda"),
    )
    truth = x.double() @ y.double()
    for count, bound in ((1, 1.3e-2), (2, 1e-4), (3, 6e-7)):
        a, b = digits(x, count=count, axis=1), digits(y, count=count, axis=0, transpose=True)
        assert explain_gemm(a.planes, b.planes, out_dtype=torch.float32).copies == ()
        got = gemm(a.planes, b.planes, scale_a=a.scale, scale_b=b.scale, out_dtype=torch.float32)
        assert float((got.double() - truth).norm() / truth.norm()) <= bound


def test_graphs_hold_the_whole_call() -> None:
    x, y = torch.randn(256, 512, device="cuda"), torch.randn(512, 128, device="cuda")
    out = torch.empty(256, 128, device="cuda")

    def call() -> None:
        a, b = digits(x, axis=1), digits(y, axis=0, transpose=True)
        gemm(a.planes, b.planes, scale_a=a.scale, scale_b=b.scale, out=out, out_dtype=torch.float32)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    x.copy_(torch.randn(256, 512, device="cuda"))
    graph.replay()
    truth = x.double() @ y.double()
    assert float((out.double() - truth).norm() / truth.norm()) < 1e-4
