"""The scan before a matrix's first product: one call of the engine, which misses no damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import magicube_cutlass as mc
from cute_kernels.cpu import extension
from magicube_cutlass.formats.base import CompressedMatrix
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.srbcrs import SRBCRS

WIDTHS = [(4, True), (4, False), (8, True), (8, False), (12, True), (12, False), (16, True), (16, False)]
needs_exchange = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="the engine reads tensors of torch 2.10 and later"
)


def again(a: Any) -> Any:
    """The same tensors, cloned, in a new matrix whose structure nobody has scanned."""
    fields = {name: tensor.clone() for name, tensor in a._tensors().items()}
    return type(a)(**fields, **a._fields())


def made(kind: type[Any] = SRBCRS, m: int = 60, bits: int = 8, signed: bool = True, v: int = 8) -> Any:
    pattern = mc.random_pattern(m, 100, 0.6, v, seed=m)
    vectors = torch.ones(pattern.vectors, v, dtype=torch.int8)
    return again(kind.from_pattern(pattern, vectors, bits=bits, signed=signed))


def b(columns: int = 5) -> mc.QuantTensor:
    return mc.QuantTensor.from_ints(torch.ones(100, columns, dtype=torch.int8), bits=8)


@needs_exchange
@pytest.mark.parametrize("kind", [SRBCRS, BCRS])
@pytest.mark.parametrize(("bits", "signed"), WIDTHS)
@pytest.mark.parametrize(("m", "v"), [(0, 8), (1, 1), (60, 8), (64, 32)])
def test_a_first_scan_is_one_call(
    monkeypatch: pytest.MonkeyPatch, kind: type[Any], bits: int, signed: bool, m: int, v: int
) -> None:
    a = made(kind, m, bits, signed, v)
    a.scale = None
    monkeypatch.setattr(CompressedMatrix, "check_format", lambda self, full=False: pytest.fail("checked again"))
    monkeypatch.setattr(kind, "_scan", lambda self: pytest.fail("scanned by torch"))
    assert not a.is_current
    a.refresh()
    assert a.is_current


@needs_exchange
def test_floats_and_batches_are_scanned_in_one_call_too(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 100)
    matrices = [again(SRBCRS.from_dense(x, dtype=dtype)) for dtype in ("float16", "e4m3", "e2m1")]
    one = made()
    matrices.append(SRBCRS(one.row_start, one.row_end, one.col_indices, one.values.expand(3, -1, -1, -1).contiguous(),
                           shape=one.shape, vector_length=8, bits=8))  # fmt: skip
    monkeypatch.setattr(SRBCRS, "_scan", lambda self: pytest.fail("scanned by torch"))
    for a in matrices:
        a.refresh()
        assert a.is_current


@needs_exchange
def test_the_first_scan_of_a_pattern_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = mc.random_pattern(60, 100, 0.6, 8)
    fresh = mc.Pattern(pattern.shape, 8, pattern.row_offsets, pattern.col_indices)
    monkeypatch.setattr(mc.Pattern, "check_format", lambda self, full=False: pytest.fail("checked again"))
    monkeypatch.setattr(mc.Pattern, "_check_columns", lambda self: pytest.fail("scanned by torch"))
    assert not fresh.is_current
    fresh.refresh()
    assert fresh.is_current


def test_a_write_to_a_pattern_before_its_first_product_is_followed() -> None:
    offsets, columns = torch.tensor([0, 2, 3]), torch.tensor([0, 3, 5], dtype=torch.int32)
    pattern = mc.Pattern((16, 8), 8, offsets, columns)
    assert pattern.row_indices.tolist() == [0, 0, 1]
    offsets[1] = 1
    x, y = (mc.QuantTensor.from_ints(torch.ones(n, 4, dtype=torch.int8), bits=8) for n in (16, 8))
    assert torch.equal(mc.sddmm(x, y, pattern).to_dense().bool(), pattern.to_dense())
    assert pattern.row_indices.tolist() == [0, 1, 1]


def test_every_damaged_entry_is_found() -> None:
    a = made()
    for name in ("row_start", "row_end", "col_indices"):
        for i in range(len(getattr(a, name))):
            for value in (-2, 2**31 - 1, 7777):
                damaged = again(a)
                getattr(damaged, name)[i] = value
                with pytest.raises(ValueError, match=r"row_start|row_end|col_indices|vector row"):
                    mc.spmm(damaged, b())
    assert torch.equal(mc.spmm(again(a), b()).long(), mc.reference.spmm(a, b()))


def swap(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[SRBCRS], None]:
    def apply(a: SRBCRS) -> None:
        getattr(a, name).data = change(getattr(a, name))

    return apply


def change(name: str, value: object) -> Callable[[SRBCRS], None]:
    return lambda a: setattr(a, name, value)


UNCOUNTED = {
    "short col_indices": swap("col_indices", lambda t: t[:32].clone()),
    "narrow col_indices": swap("col_indices", lambda t: t.to(torch.int8)),
    "expanded col_indices": swap("col_indices", lambda t: t[:1].expand(len(t))),
    "strided col_indices": swap("col_indices", lambda t: torch.cat((t, t))[::2]),
    "narrow row_start": swap("row_start", lambda t: t.to(torch.int32)),
    "expanded row_end": swap("row_end", lambda t: t[:1].expand(len(t))),
    "empty row_end": swap("row_end", lambda t: t[:0].clone()),
    "flat values": swap("values", lambda t: t.flatten()),
    "short values": swap("values", lambda t: t[:1].clone()),
    "expanded values": swap("values", lambda t: t[:1].expand_as(t)),
    "unsigned values": swap("values", lambda t: t.to(torch.uint8)),
    "wide values": swap("values", lambda t: t.to(torch.float32)),
    "another stride": change("stride", 16),
    "no stride": change("stride", 0),
    "another vector_length": change("vector_length", 4),
    "no vector_length": change("vector_length", 0),
    "unsigned": change("signed", False),
    "other bits": change("bits", 16),
    "fewer rows": change("shape", (8, 100)),
}


@pytest.mark.parametrize("case", UNCOUNTED)
def test_what_torch_does_not_count_before_the_first_product_is_refused(case: str) -> None:
    a = made()
    UNCOUNTED[case](a)
    with pytest.raises((TypeError, ValueError), match="must"):
        mc.spmm(a, b())


def test_a_write_before_the_first_product_is_followed() -> None:
    a = made()
    assert a.nnz > 0  # derives the pattern
    row = next(row for row, end in enumerate(a.row_end.tolist()) if a.col_indices[end - 1] < 99)
    a.col_indices[a.row_end[row] - 1] = 99
    assert torch.equal(mc.spmm(a, b()).long(), mc.reference.spmm(again(a), b()))
    assert bool(a.to_dense()[8 * row, 99])


def test_a_tensor_replaced_before_the_first_product_is_read() -> None:
    a = made()
    a.values = a.values * 3
    assert torch.equal(mc.spmm(a, b()).long(), mc.reference.spmm(again(a), b()))
    assert a.is_current


def test_arguments_of_the_scan_are_checked() -> None:
    a = made()
    for stamp in ((), ((1, 2),) * 5, ((),) * 2):
        with pytest.raises(ValueError, match="stamp must"):
            extension.load_extension().scan({}, stamp, 60, 100, 8, 32, 8, True)
    assert not extension.load_extension().scan({}, a._made, 60, 100, 8, 32, 8, True)
