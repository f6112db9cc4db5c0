"""The kernels on disk: keyed by all that matters, private, whole or absent, and never in the way."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cute_kernels.jit import Binary, CompileError, Toolchain, Unit, Usage, cache, toolchain, warmup

UNIT = Unit("__global__ void probe(int* x) { x[0] = 1; }", "probe", "sm_80")
BINARY = Binary(bytes(range(256)) * 8, "_Z5probePi", "sm_80", "probe", Usage(8, 0, 0, 1024))


USAGE = {"registers": 8, "stack_bytes": 0, "spill_bytes": 0, "shared_bytes": 1024}
HEADER = {"key": "k", "symbol": "_Z5probePi", "arch": "sm_80", "title": "probe", "usage": USAGE}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MAGICUBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_in_memory", {})
    find = toolchain.find
    yield cache.directory()
    find.cache_clear()  # a test may have moved the headers


def stored(key: str = "k", binary: Binary = BINARY) -> Path:
    cache.save(key, binary)
    (path,) = cache.directory().glob(f"{key}.kernel")
    return path


@pytest.mark.parametrize("binary", [BINARY, replace(BINARY, arch="compute_80", usage=None)])
def test_what_was_saved_is_loaded(binary: Binary) -> None:
    assert cache.load("k") is None
    stored(binary=binary)
    assert cache.load("k") == binary
    assert cache.load("another") is None
    assert not cache._in_memory


def test_folder_and_files_are_private(folder: Path) -> None:
    path = stored()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(folder.iterdir()) == [path]


def test_a_folder_open_to_others_is_closed(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    stored()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"MAGICUBE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/kernels"),
        ({"MAGICUBE_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/magicube/kernels"),
        ({"MAGICUBE_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/magicube/kernels"),
    ],
)
def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache.directory() == Path(expected)


def test_every_ingredient_changes_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "KERNEL_HEADERS", tmp_path)
    versions = dict.fromkeys(("nvrtc", "nvjitlink", "cutlass", "cccl", "runtime"), "1")
    keys = []

    def note() -> None:
        monkeypatch.setattr(toolchain, "find", lambda: Toolchain((), dict(versions)))
        keys.append(cache.key(UNIT))

    note()
    note()
    assert keys.pop() == keys[0]
    keys += [cache.key(replace(UNIT, **{name: "other"})) for name in ("source", "kernel", "arch")]
    for name in versions:
        versions[name] = "2"
        note()
    monkeypatch.setattr(cache, "COMPILE_OPTIONS", {**cache.COMPILE_OPTIONS, "std": "c++20"})
    note()
    monkeypatch.setattr(cache, "LINK_OPTIONS", {})
    note()
    monkeypatch.setattr(cache, "SCHEMA", cache.SCHEMA + 1)
    note()
    assert len(set(keys)) == len(keys) == 12


def test_the_key_holds_the_headers_that_a_unit_includes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "KERNEL_HEADERS", tmp_path)
    (tmp_path / "deep").mkdir()
    times = iter(range(1, 10))

    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, ns=(1, next(times)))  # two writes may fall into one tick of the clock
        return cache.key(unit)

    unit = replace(UNIT, source='#include "a.cuh"\n#include <cute/tensor.hpp>\n' + UNIT.source)
    keys = [
        write("other.cuh", "1"),
        write("a.cuh", '  # include "deep/b.cuh"\n#include "a.cuh"'),
        write("deep/b.cuh", "1"),
        write("deep/b.cuh", "2"),
    ]
    assert len(set(keys)) == 4
    assert write("other.cuh", "2") == keys[-1]  # no kernel is compiled again for a header that it does not read


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "flipped bit":
        content = content[:-1] + bytes([content[-1] ^ 1])
    elif how == "truncated":
        content = content[:-100]
    elif how == "only magic":
        content = content[:16]
    elif how == "wrong magic":
        content = b"x" + content[1:]
    elif how == "empty":
        content = b""
    else:
        content = cache.pack_file("k", BINARY) if how == "another key's" else cache._MAGIC + os.urandom(5000)
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["flipped bit", "truncated", "only magic", "wrong magic", "empty", "noise"])
def test_a_damaged_entry_is_a_miss_and_is_replaced(how: str) -> None:
    path = stored()
    damage(path, how)
    assert cache.load("k") is None
    assert cache.entries() == []
    stored()
    assert cache.load("k") == BINARY


HOSTILE = [
    b"null", b"[]", b'"text"', b"1", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"\xff", b"{}",
    *(json.dumps({**HEADER, **change}).encode() for change in (
        {"key": None}, {"title": 5}, {"title": ["probe"]}, {"title": "\x1b[2J"}, {"arch": "sm_1"}, {"symbol": None},
        {"usage": "text"}, {"usage": [1, 2, 3, 4]}, {"usage": {}}, {"usage": {**USAGE, "registers": 10**400}},
        {"usage": {**USAGE, "registers": None}}, {"usage": {**USAGE, "registers": True}},
        {"usage": {**USAGE, "registers": -1}}, {"usage": {**USAGE, "registers": float("nan")}},
    )),
]  # fmt: skip


@pytest.mark.parametrize("header", HOSTILE, ids=lambda header: header[:80].decode("latin-1"))
def test_an_entry_with_any_header_and_a_sound_digest_is_a_miss(header: bytes) -> None:
    path = stored()
    rest = struct.pack("<I", len(header)) + header + b"code"
    path.write_bytes(cache._MAGIC + hashlib.sha256(rest).digest() + rest)
    assert cache.load("k") is None and cache.entries() == []
    stored()
    assert cache.load("k") == BINARY


def test_an_entry_of_a_terabyte_is_a_miss() -> None:
    os.truncate(stored(), 1 << 40)  # a sparse file
    assert cache.load("k") is None and cache.entries() == []


def test_an_entry_under_another_name_is_a_miss() -> None:
    damage(stored("moved"), "another key's")
    assert cache.load("moved") is None


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_a_miss(kind: str, tmp_path: Path) -> None:
    path = stored()
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert cache.load("k") is None
    cache.save("k", BINARY)
    assert cache.load("k") == BINARY


def test_another_users_files_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored()
    before = path.read_bytes()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert cache.load("k") is None
    cache.save("k", replace(BINARY, code=b"mine"))
    loaded = cache.load("k")
    assert loaded is not None and loaded.code == b"mine"
    assert path.read_bytes() == before


@pytest.mark.parametrize("where", ["a file", "/proc/absent"])
def test_an_unusable_folder_leaves_memory(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("MAGICUBE_CACHE", str(tmp_path / where))
    for name in ("k", "l"):
        cache.save(name, BINARY)
        assert cache.load(name) == BINARY
    assert [record.getMessage()[:23] for record in caplog.records] == ["compiled kernels stay i"]
    assert cache.entries() == [] and cache.clear() == 0
    assert cache.load("k") is None


def test_entries_and_clear(folder: Path) -> None:
    assert cache.entries() == []
    first, second = stored("a"), stored("b", replace(BINARY, title="later", arch="sm_90a"))
    os.utime(first, (1e9, 1e9))
    (folder / ".broken.tmp").write_bytes(b"half")
    (folder / "c.kernel").write_bytes(b"damaged")
    (folder / "notes.txt").write_text("the user's")
    found = cache.entries()
    assert [(e.key, e.title, e.arch) for e in found] == [("b", "later", "sm_90a"), ("a", "probe", "sm_80")]
    assert found[0].size == second.stat().st_size and found[1].date.timestamp() == 1e9
    assert cache.clear() == 3
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_folder_that_is_a_link_is_neither_read_nor_cleared(folder: Path, tmp_path: Path) -> None:
    path = stored()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / ".other.tmp").touch()
    assert cache.load("k") is None and cache.entries() == [] and cache.clear() == 0
    assert sorted(each.name for each in (tmp_path / "elsewhere").iterdir()) == [".other.tmp", path.name]
    cache.save("l", BINARY)
    assert cache.load("l") == BINARY and len(list((tmp_path / "elsewhere").iterdir())) == 2


def test_a_link_is_cleared_and_its_target_is_not(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    stored().rename(target)
    for name in ("k.kernel", ".k.tmp"):
        (folder / name).symlink_to(target)
    assert cache.clear() == 1
    assert list(folder.iterdir()) == [] and target.is_file()


def test_what_a_killed_writer_left_is_removed_by_a_later_one(folder: Path) -> None:
    code = f"""
import os, sys
from cute_kernels.jit import user_files
os.replace = lambda *_: os.kill(os.getpid(), 9)
user_files.write(__import__("pathlib").Path({str(folder / "k.kernel")!r}), b"half")
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (partial,) = folder.iterdir()
    path = stored()
    assert sorted(folder.iterdir()) == [partial, path]  # it may still be written
    os.utime(partial, (time.time() - 7200,) * 2)
    stored()
    assert list(folder.iterdir()) == [path]


def hammer(start: object, seed: int) -> int:
    """Save and load one key over and over; returns how many loads were neither empty nor whole."""
    start.wait()  # type: ignore[attr-defined]
    wrong = 0
    for turn in range(60):
        cache.save("k", replace(BINARY, code=bytes([seed]) * (1 + 997 * turn)))
        found = cache.load("k")
        wrong += found is None or len(set(found.code)) != 1
    return wrong + len(cache._in_memory)


def test_two_processes_at_one_key_never_fail(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(2) as pool:
        start = manager.Barrier(2)
        assert pool.starmap(hammer, [(start, 1), (start, 2)]) == [0, 0]
    assert cache.load("k") is not None
    assert len(list(folder.iterdir())) == 1


@dataclass(frozen=True)
class Probe:
    value: int

    def translation_unit(self, arch: str) -> Unit:
        return Unit(f"__global__ void probe(int* x) {{ x[0] = {self.value}; }}", "probe", arch)


@pytest.mark.parametrize("jobs", [1, 2])
def test_warmup_compiles_what_is_not_there(jobs: int) -> None:
    first = list(warmup([Probe(1)], "sm_80"))
    assert [(w.cached, w.done, w.total) for w in first] == [(False, 1, 1)]
    second = list(warmup([Probe(2), Probe(1), Probe(3), Probe(1)], "sm_80", jobs))
    assert [(w.cached, w.done, w.total) for w in second] == [(True, 1, 3), (False, 2, 3), (False, 3, 3)]
    for value in (1, 2, 3):
        assert cache.build(Probe(value).translation_unit("sm_80")) in [w.binary for w in second]
    assert len(cache.entries()) == 3


def test_warmup_stops_at_a_kernel_that_does_not_compile() -> None:
    class Broken(Probe):
        def translation_unit(self, arch: str) -> Unit:
            return Unit("nonsense", "probe", arch)

    with pytest.raises(CompileError, match="nonsense"):
        list(warmup([Probe(1), Broken(2)], "sm_80", 2))


def test_warmup_refuses_bad_arguments_at_once() -> None:
    with pytest.raises(ValueError, match="arch must be one of"):
        warmup([], "sm_1")
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        warmup([], "sm_80", 0)


def test_the_second_build_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    built = cache.build(UNIT)
    monkeypatch.setattr(cache, "compile_unit", None)
    assert cache.build(UNIT) == built


def test_import_leaves_cuda_alone() -> None:
    code = (  # torch itself imports some of it
        "import sys, torch; before = set(sys.modules); import cute_kernels.jit\n"
        "print([name for name in set(sys.modules) - before if name.startswith('cuda')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
