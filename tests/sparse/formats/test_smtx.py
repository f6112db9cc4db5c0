"""Reading and writing .smtx: round trips, hostile files, and the DLMC sample."""

from __future__ import annotations

import csv
import gzip
import tracemalloc
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicube_cutlass.formats.generate import random_pattern
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.smtx import read_smtx, write_smtx
from tests.helpers import Case, cases, data_folder, pattern_of

GOOD = b"2, 9, 3\n0 2 3 \n1 8 0 \n"


def write(folder: Path, data: bytes, name: str = "a.smtx") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["a.smtx", "a.smtx.gz"])
@settings(max_examples=25)
@given(case=cases())
def test_written_pattern_reads_back(tmp_path_factory: pytest.TempPathFactory, name: str, case: Case) -> None:
    pattern = Pattern.from_dense(case.mask, case.vector_length)
    path = tmp_path_factory.getbasetemp() / name
    write_smtx(path, pattern)
    back = read_smtx(path, vector_length=case.vector_length)
    back.check_format(full=True)
    assert back.shape == (pattern.vector_rows * case.vector_length, pattern.shape[1])
    assert back.row_offsets.equal(pattern.row_offsets) and back.col_indices.equal(pattern.col_indices)


@pytest.mark.parametrize(
    "data",
    [
        GOOD,
        gzip.compress(GOOD),
        GOOD.replace(b"\n", b"\r\n"),
        GOOD.replace(b", ", b","),
        GOOD.replace(b", ", b" "),
        GOOD.replace(b" ", b"\t").replace(b"8\t", b"8\v\f"),
        GOOD.rstrip(),
        GOOD + b"\n \n",
        GOOD.replace(b"1 8", b"8 1"),
    ],
    ids=["plain", "gzip", "crlf", "commas", "spaces", "other blanks", "no newline", "blank tail", "unsorted columns"],
)
def test_dialects_read_alike(tmp_path: Path, data: bytes) -> None:
    assert read_smtx(write(tmp_path, data), vector_length=4).equals(pattern_of([[1, 8], [0]], 9, vector_length=4))


@pytest.mark.parametrize("data", [b"0, 5, 0\n0", b"0 0 0\n0\n\n", b"3, 7, 0\n0 0 0 0\n", b"3, 0, 0\n0 0 0 0\n\n"])
def test_pattern_without_nonzeros_needs_no_third_line(tmp_path: Path, data: bytes) -> None:
    assert read_smtx(write(tmp_path, data)).nnz == 0


def test_header_with_a_trillion_nonzeros_is_refused_without_the_memory(tmp_path: Path) -> None:
    path = write(tmp_path, b"1000000, 1000000, 1000000000000\n0 1000000000000\n1 2\n")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="line 2: expected 1000001 row offsets, got 2"):
            read_smtx(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


BEYOND = "the text goes on beyond 4288 characters after the header, too many for 3 row offsets and 3 column indices"
BOMBS = {
    "spaces after the header": (b"2, 9, 3\n", b" ", f"line 2: {BEYOND}"),
    "lines after the header": (b"2, 9, 3\n", b"\n", f"line 4290: {BEYOND}"),
    "offset of many digits": (b"2, 9, 3\n0 2 3", b"3", f"line 2: {BEYOND}"),
    "many offsets": (b"2, 9, 3\n", b"0 ", f"line 2: {BEYOND}"),
    "many columns": (b"2, 9, 3\n0 2 3\n", b"8 ", f"line 3: {BEYOND}"),
    "lines at the end": (GOOD, b"\n", f"line [0-9]+: {BEYOND}"),
    "spaces in the header": (b"2, 9, 3", b" ", "line 1: header must be at most 256 characters"),
    "digits in the header": (b"2, 9, 3", b"3", "line 1: header must be at most 256 characters"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_small_gzip_file_of_a_huge_text_is_refused_early(tmp_path: Path, name: str) -> None:
    start, filler, message = BOMBS[name]
    bomb = gzip.compress(start + filler * (50_000_000 // len(filler)))
    path = write(tmp_path, bomb, "a.smtx.gz")
    assert len(bomb) < 10**5
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message) as caught:
            read_smtx(path)
        assert str(path) in str(caught.value)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


HUGE = b"1000000000, 1000000000, 1000000000000000000\n"


@pytest.mark.parametrize("filler", [b"0 ", b" ", b"\n", b"7"])
def test_a_huge_header_does_not_let_a_small_gzip_file_unfold(tmp_path: Path, filler: bytes) -> None:
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join([packer.compress(HUGE), *(packer.compress(filler * (2**20 // len(filler))) for _ in range(64)),
                     packer.flush()])  # fmt: skip
    path = write(tmp_path, bomb, "a.smtx.gz")
    assert len(bomb) < 10**5
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"at most {2**24} characters for {len(bomb)} bytes of gzip data"):
            read_smtx(path)
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**24
    finally:
        tracemalloc.stop()


def test_text_of_one_character_a_line_needs_no_more_memory_than_other_text(tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress(HUGE + b"0\n" * 2**20 + b"0"), "a.smtx.gz")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"line 4: a file has 3 lines, got {2**20 + 2}"):
            read_smtx(path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_a_gzip_file_of_a_large_regular_pattern_reads(tmp_path: Path) -> None:
    pattern = Pattern((1_000_000, 5), 1, torch.zeros(1_000_001, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
    write_smtx(tmp_path / "a.smtx.gz", pattern)
    assert read_smtx(tmp_path / "a.smtx.gz").equals(pattern)


def test_numbers_with_many_digits_and_blanks_still_read(tmp_path: Path) -> None:
    numbers = " ".join(f"{0:019d}" for _ in range(10_001))
    assert read_smtx(write(tmp_path, f"10000, 9, 0\n{numbers}{' ' * 4000}\n\n".encode())).nnz == 0


def test_gzip_file_is_the_same_each_time(tmp_path: Path) -> None:
    pattern = random_pattern(16, 16, 0.5, 8)
    for name in ("a.gz", "b.gz"):
        write_smtx(tmp_path / name, pattern)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


@settings(max_examples=300)
@given(
    st.sampled_from([GOOD, gzip.compress(GOOD, mtime=0)]),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=4),
    st.integers(0, 70),
)
def test_damaged_file_reads_or_raises_value_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, changes: list[tuple[int, int]], length: int
) -> None:
    damaged = bytearray(data)
    for at, byte in changes:
        damaged[at % len(damaged)] = byte
    path = write(tmp_path_factory.getbasetemp(), bytes(damaged[:length]))
    try:
        read_smtx(path).check_format(full=True)
    except ValueError as error:
        assert str(path) in str(error)


@settings(max_examples=200)
@given(st.text("0123456789,- \n\tx.", max_size=60))
def test_any_text_reads_or_raises_value_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = write(tmp_path_factory.getbasetemp(), text.encode())
    try:
        read_smtx(path).check_format(full=True)
    except ValueError as error:
        assert str(path) in str(error)


@pytest.mark.skipif(data_folder() is None, reason="the DLMC sample is not there (set MAGICUBE_DATA)")
def test_every_dlmc_sample_matrix_agrees_with_the_index() -> None:
    folder = data_folder()
    assert folder is not None
    with open(folder / "sample_index.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 287
    for row in rows:
        pattern = read_smtx(folder / "matrices" / f"{row['path']}.gz")
        pattern.check_format(full=True)
        assert (*pattern.shape, pattern.nnz) == tuple(int(row[key]) for key in ("nrows", "ncols", "nnz")), row["path"]
