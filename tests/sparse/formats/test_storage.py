"""Files of patterns and matrices: round trips, and files that must be refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.generate import random_pattern
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS
from tests.helpers import SCALES, Case, cases

Stored = type[Pattern] | type[SRBCRS] | type[BCRS]
KINDS: tuple[Stored, ...] = (Pattern, SRBCRS, BCRS)


def example(kind: Stored) -> Pattern | SRBCRS | BCRS:
    pattern = random_pattern(20, 30, 0.8, 8)
    if kind is Pattern:
        return pattern
    vectors = torch.full((pattern.vectors, 8), 3)
    vectors[pattern.row_indices == 2, 4:] = 0
    maker = SRBCRS if kind is SRBCRS else BCRS
    return maker.from_pattern(pattern, vectors, bits=4, scale=torch.tensor(0.5))


def rewrite_header(path: Path, change: dict[str, str | None]) -> None:
    """Change metadata entries (None removes one) and leave the tensors as they are."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"].update(change)
    header["__metadata__"] = {key: value for key, value in header["__metadata__"].items() if value is not None}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


@settings(max_examples=30)
@given(cases())
def test_matrices_read_back_bit_by_bit(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    path = tmp_path_factory.getbasetemp() / "matrix"
    matrix = SRBCRS.from_dense(case.ints, **case.options)
    for one in (matrix, matrix.to_bcrs()):
        one.save(path)
        back = type(one).load(path)
        assert back._fields() == one._fields() and back.scale is None
        for name, tensor in one._tensors().items():
            assert torch.equal(getattr(back, name), tensor), name
    matrix.pattern.save(path)
    assert Pattern.load(path).equals(matrix.pattern)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32])
def test_batched_results_read_back(tmp_path: Path, dtype: torch.dtype) -> None:
    pattern = random_pattern(16, 30, 0.8, 8)
    matrix = SRBCRS.from_pattern(pattern, torch.ones(2, pattern.vectors, 8, dtype=dtype), bits=None)
    matrix.save(tmp_path / "a")
    back = SRBCRS.load(tmp_path / "a")
    assert back.bits is None and torch.equal(back.values, matrix.values) and back.dtype == dtype


@pytest.mark.parametrize("axis", [None, 1])
def test_scale_reads_back(tmp_path: Path, axis: int | None) -> None:
    matrix = SRBCRS.from_dense(torch.randn(16, 16), scale=SCALES[axis])
    matrix.save(tmp_path / "a")
    back = SRBCRS.load(tmp_path / "a")
    assert back.scale is not None and matrix.scale is not None and torch.equal(back.scale, matrix.scale)


def test_tensors_that_share_memory_are_stored_apart(tmp_path: Path) -> None:
    nothing = torch.zeros(3, dtype=torch.int64)  # three empty vector rows: both pointers are the same
    columns, values = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 8, 32, dtype=torch.int8)
    SRBCRS(nothing, nothing, columns, values, shape=(24, 5), vector_length=8, bits=8).save(tmp_path / "a")
    assert SRBCRS.load(tmp_path / "a").nnz == 0


def test_saving_over_a_file_leaves_nothing_else_behind(tmp_path: Path) -> None:
    for _ in range(2):
        example(SRBCRS).save(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example(SRBCRS).save(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()

    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("magicube_cutlass.formats.storage.os.replace", fail)
    with pytest.raises(KeyboardInterrupt):
        example(SRBCRS).save(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_missing_file_is_the_ordinary_error(tmp_path: Path, kind: Stored) -> None:
    with pytest.raises(FileNotFoundError):
        kind.load(tmp_path / "absent")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "BCRS"}, "must hold a SRBCRS, got kind 'BCRS'"),
        ({"kind": None}, "must hold a SRBCRS, got kind None"),
        ({"version": "2"}, "must have version '1', got '2'"),
        ({"version": None}, "must have version '1', got None"),
        ({"colour": "1"}, r"has unknown fields \['colour'\]"),
        ({"stride": None}, "field 'stride' is missing"),
        ({"stride": "17"}, r"stride must be one of \(16, 32, 64\), got 17"),
        ({"stride": "true"}, "field 'stride' must be an integer, got True"),
        ({"stride": "__import__('os')"}, "field 'stride' is not JSON"),
        ({"stride": "[" * 100000}, "field 'stride' is not JSON"),
        ({"vector_length": "3"}, "vector_length must be one of"),
        ({"bits": "5"}, "bits must be one of"),
        ({"bits": "8"}, "values must be torch.int8, got torch.uint8"),
        ({"bits": "4.0"}, "field 'bits' must be an integer, got 4.0"),
        ({"signed": "1"}, "field 'signed' must be true or false, got 1"),
        ({"shape": "[20]"}, r"field 'shape' must be two integers, got \[20\]"),
        ({"shape": "[20, -1]"}, r"shape must hold sizes in \[0, 2147483647\], got \(20, -1\)"),
        ({"shape": "[20, 1e3]"}, "field 'shape' must be two integers"),
        ({"shape": "[2000000000, 30]"}, "row_start must have 250000000 entries, got 3"),
        ({"shape": "[20, 4]"}, r"col_indices must lie in \[0, 4\)"),
        ({"shape": "[17, 30]"}, "values must be zero in rows beyond M = 17"),
    ],
)
def test_foreign_metadata_is_refused(tmp_path: Path, change: dict[str, str | None], message: str) -> None:
    path = tmp_path / "a"
    example(SRBCRS).save(path)
    rewrite_header(path, change)
    with pytest.raises(ValueError, match=message) as caught:
        SRBCRS.load(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_safetensors_file_is_refused(tmp_path: Path, kind: Stored) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "a")
    with pytest.raises(ValueError, match=f"must hold a {kind.__name__}, got kind None"):
        kind.load(tmp_path / "a")


@pytest.mark.parametrize(
    "tensors",
    [
        {"row_offsets": torch.zeros(1, dtype=torch.int64)},
        {
            "row_offsets": torch.zeros(1, dtype=torch.int64),
            "col_indices": torch.zeros(0, dtype=torch.int32),
            "more": torch.zeros(1),
        },
    ],
    ids=["one missing", "one too many"],
)
def test_other_tensors_than_the_fields_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    metadata = {"kind": "Pattern", "version": "1", "shape": "[0, 0]", "vector_length": "8"}
    save_file(tensors, tmp_path / "a", metadata)
    with pytest.raises(ValueError, match="must hold the tensors"):
        Pattern.load(tmp_path / "a")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=4),
    length=st.integers(0, 2**16) | st.none(),
)
def test_damaged_file_loads_or_raises_value_error(
    tmp_path_factory: pytest.TempPathFactory, kind: Stored, changes: list[tuple[int, int]], length: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz"
    example(kind).save(path)
    damaged = bytearray(path.read_bytes())
    for at, byte in changes:
        damaged[at % len(damaged)] = byte
    path.write_bytes(damaged if length is None else damaged[: length % len(damaged)])
    try:
        kind.load(path).check_format(full=True)
    except ValueError as error:
        assert str(path) in str(error)
