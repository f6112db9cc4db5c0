"""Group scales of the CPU engine's dense product: sums of a group exact, scaled and added in order on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cute_kernels.cpu import extension
from cute_kernels.cpu.conversions import quantize_cpu
from cute_kernels.cpu.dense import linear, multiply, pack_right

pytestmark = pytest.mark.skipif(not extension.available(), reason="no engine")


@pytest.fixture(params=[(isa, threads) for isa in extension.isas() for threads in (1, 2)], ids=str)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    isa, threads = request.param
    monkeypatch.setenv("MAGICUBE_CPU", isa)
    before, work = torch.get_num_threads(), extension.load_extension().set_serial_work(0 if threads > 1 else 2**62)
    torch.set_num_threads(threads)
    yield isa
    torch.set_num_threads(before)
    extension.load_extension().set_serial_work(work)


def problem(m: int, k: int, n: int, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + k + n)
    low = -(2 ** (bits - 1))
    a = torch.randint(-128, 128, (m, k), generator=generator, dtype=torch.int8)
    b = torch.randint(low, -low, (k, n), generator=generator, dtype=torch.int8)
    scales, minima = (torch.rand(-(-k // group), n, generator=generator) - 0.3 for _ in range(2))
    return a, b, scales, minima


def by_groups(a: Tensor, b: Tensor, group: int, scales: Tensor, minima: Tensor | None) -> Tensor:
    """Float32 totals in the order of the groups."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for g in range(len(scales)):
        rows = slice(g * group, (g + 1) * group)
        total = total + (a[:, rows].long() @ b[rows].long()).float() * scales[g]
        if minima is not None:
            total = total + a[:, rows].long().sum(1, keepdim=True).float() * minima[g]
    return total


@pytest.mark.parametrize("has_minima", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("m", "k", "n", "group"),
    [(1, 64, 64, 32), (1, 1, 1, 8), (3, 70, 65, 16), (7, 200, 130, 64), (49, 257, 40, 32), (97, 128, 17, 128), (2, 40, 9, 512),
     (5, 1030, 3, 512), (6, 1100, 9, 520)],
)  # fmt: skip
def test_groups_have_the_bits_of_float32(
    path: str, m: int, k: int, n: int, group: int, bits: int, has_minima: bool
) -> None:
    a, b, scales, minima = problem(m, k, n, bits, group)
    given = minima if has_minima else None
    right = pack_right(b, bits, group=group, group_scales=scales, group_minima=given)
    total = by_groups(a, b, group, scales, given)
    assert torch.equal(multiply(a, right, out_dtype=torch.float32), total)
    columns, bias = torch.rand(n) + 0.5, torch.rand(n)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(n, m, dtype=dtype).t()
        assert multiply(a, right, col_scale=columns, bias=bias, out_dtype=dtype, out=out) is out
        assert torch.equal(out, (total * columns + bias).to(dtype))
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(5))
    ints, x_scale = torch.empty(m, k, dtype=torch.int8), torch.empty(m)
    quantize_cpu(x, ints, x_scale, bits=8, signed=True, truncate=False, given=False, mode=1)
    expected = by_groups(ints, b, group, scales, given) * x_scale.view(-1, 1) + bias
    assert torch.equal(linear(x, right, bias=bias), expected)


def test_sums_of_each_group_are_kept_for_paths_with_unsigned_rows() -> None:
    _, b, scales, _ = problem(1, 70, 65, 8, 16)
    right = pack_right(b, group=16, group_scales=scales)
    sums = torch.stack([b[g : g + 16].sum(0) for g in range(0, 70, 16)])  # (groups, N)
    assert right.column_sums.dtype == torch.int32 and right.column_sums.shape == (2, 5, 64)
    assert torch.equal(right.column_sums.transpose(0, 1).flatten(1)[:, :65].long(), sums)


def test_extreme_values_of_a_long_group_do_not_wrap(path: str) -> None:
    k = 2**16
    a, b = torch.full((2, k), -128, dtype=torch.int8), torch.full((k, 3), -128, dtype=torch.int8)
    b[:, 1] = 127
    right = pack_right(b, group=k // 2, group_scales=torch.ones(2, 3), group_minima=torch.full((2, 3), 128.0))
    assert multiply(a, right, out_dtype=torch.float32).tolist() == [[0.0, -255.0 * 128 * k, 0.0]] * 2


def test_bad_groups_are_named() -> None:
    b = torch.ones(40, 3, dtype=torch.int8)
    with pytest.raises(ValueError, match="group must be a multiple of 8, got 12"):
        pack_right(b, group=12, group_scales=torch.ones(4, 3))
    with pytest.raises(ValueError, match="group and group_scales must be given together, got 8 and no scales"):
        pack_right(b, group=8)
    with pytest.raises(ValueError, match=r"group_scales must have shape \(5, 3\), got \(3, 5\)"):
        pack_right(b, group=8, group_scales=torch.ones(3, 5))
    with pytest.raises(TypeError, match=r"group_minima must be torch\.float32, got torch\.float64"):
        pack_right(b, group=8, group_scales=torch.ones(5, 3), group_minima=torch.ones(5, 3).double())
    right = pack_right(b, group=8, group_scales=torch.ones(5, 3))
    with pytest.raises(ValueError, match="group scales need a float output"):
        multiply(b.t().contiguous(), right)
