"""SR-BCRS by the CPU engine: tensor by tensor what torch makes, on every path and any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.cpu import engine, extension
from cute_kernels.integers import int_range, value_dtype
from magicube_cutlass import SRBCRS
from tests.helpers import SCALES

pytestmark = pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")

FIELDS = ("row_start", "row_end", "col_indices", "values", "scale")
SHAPES = [(1, 1), (7, 33), (70, 129), (65, 64), (256, 500)]


def problem(m: int, k: int, bits: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Integers of the whole range, and a mask with empty, full and skewed rows."""
    generator = torch.Generator().manual_seed(m * k + bits)
    low, high = int_range(bits, signed)
    values = torch.randint(low, high + 1, (m, k), generator=generator)
    share = torch.rand(m, 1, generator=generator) ** 3
    mask = torch.rand(m, k, generator=generator) < share
    mask[m // 2 :: 5] = False
    mask[:: max(3, m - 1)] = True
    return values, mask


def both(monkeypatch: pytest.MonkeyPatch, call: Any) -> tuple[SRBCRS, SRBCRS]:
    """What the engine makes, and what torch makes where it is not compiled."""
    mine = call()
    with monkeypatch.context() as patch:
        patch.setattr(extension, "ENGINE", None)
        return mine, call()


def assert_same(mine: SRBCRS, theirs: SRBCRS) -> None:
    for field in FIELDS:
        one, other = getattr(mine, field), getattr(theirs, field)
        assert (one is None) == (other is None), field
        if one is not None:
            assert one.dtype == other.dtype and torch.equal(one, other), field
    assert mine.pattern.equals(theirs.pattern)
    mine.check_format(full=True)


@pytest.mark.parametrize("path", engine.isas())
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("bits", "signed"), [(4, True), (4, False), (8, True), (8, False), (12, True), (16, True)])
def test_integers_are_those_of_torch(
    bits: int,
    signed: bool,
    threads: int,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    use_threads: Callable[[int], None],
) -> None:
    monkeypatch.setenv("MAGICUBE_CPU", path)
    use_threads(threads)
    for shape in SHAPES:
        wide, mask = problem(*shape, bits, signed)
        for values in (wide, wide.to(value_dtype(bits, signed))):
            for v, stride in ((1, 16), (2, 32), (8, 32), (8, 64), (32, 16)):
                options: dict[str, Any] = {"vector_length": v, "stride": stride, "bits": bits, "signed": signed}
                assert_same(*both(monkeypatch, lambda: SRBCRS.from_mask(values, mask, **options)))  # noqa: B023
                kept = values * mask
                assert_same(*both(monkeypatch, lambda: SRBCRS.from_dense(kept, **options)))  # noqa: B023


@pytest.mark.parametrize("axis", [None, 1])
def test_only_stored_floats_are_quantized(axis: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, mask = problem(70, 129, 8, True)
    values = torch.randn(70, 129, generator=torch.Generator().manual_seed(0))
    values[~mask] = torch.nan  # not seen
    assert_same(*both(monkeypatch, lambda: SRBCRS.from_mask(values, mask, vector_length=8, bits=8, scale=SCALES[axis])))
    dense = values.nan_to_num()
    assert_same(*both(monkeypatch, lambda: SRBCRS.from_dense(dense, bits=4, scale=SCALES[axis])))


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[::2], lambda x: x[:, 3:], lambda x: x[:, ::2]])
def test_views_are_read_as_they_are(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values, mask = problem(70, 130, 8, True)
    x, kept = view(values.to(torch.int8)), view(mask)
    assert_same(*both(monkeypatch, lambda: SRBCRS.from_mask(x, kept, vector_length=4, bits=8)))


def test_an_empty_mask_keeps_nothing() -> None:
    x = torch.ones(20, 30, dtype=torch.int8)
    found = SRBCRS.from_mask(x, torch.zeros(20, 30, dtype=torch.bool), vector_length=8, bits=8)
    assert found.nnz == 0 and found.values.shape == (0, 8, 32) and not found.to_dense().any()


def test_what_is_masked_out_is_not_checked() -> None:
    x = torch.full((16, 20), 1000)
    mask = torch.zeros(16, 20, dtype=torch.bool)
    mask[3, 4] = True
    x[3, 4] = -7
    assert float(SRBCRS.from_mask(x, mask, vector_length=8, bits=4).to_dense().sum()) == -7
    with pytest.raises(ValueError, match="values must"):
        SRBCRS.from_mask(x, ~mask, vector_length=8, bits=4)
