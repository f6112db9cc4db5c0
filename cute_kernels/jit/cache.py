"""Disk cache of compiled kernels: per user, written atomically, keyed by everything that can change the code.

Nothing here raises for what it finds on disk. An entry that is truncated, changed, of another key or of another user
is a miss. If the folder cannot be used, kernels stay in memory for the life of the process.
File: magic, SHA-256 of the rest, length of the header, header as JSON, code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from cute_kernels.jit import shipped, toolchain, user_files
from cute_kernels.jit.compiler import ARCHES, COMPILE_OPTIONS, LINK_OPTIONS, Binary, Unit, Usage, compile_unit

log = logging.getLogger("magicube")

SCHEMA = 2  # to be raised when the meaning of a file changes
_MAGIC = b"magicube-kernel\n"
SUFFIX = ".kernel"
_DIGEST = 32
_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 28  # of a file; the largest kernel has 200 KB
_in_memory: dict[str, Binary] = {}  # what could not be written


@dataclass(frozen=True)
class Entry:
    """One file of the cache; ``size`` is the file's in bytes."""

    key: str
    title: str
    arch: str
    size: int
    date: datetime


def directory() -> Path:
    """Return the cache folder: below ``MAGICUBE_CACHE``, ``XDG_CACHE_HOME/magicube`` or ``~/.cache/magicube``."""
    if root := os.environ.get("MAGICUBE_CACHE"):
        return Path(root) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "magicube" / "kernels"


def headers_digest(source: str) -> str:
    """Return the SHA-256 over names and contents of the project's headers that `source` includes, directly or not."""
    names, found = _includes(source), {}
    while names:
        name = names.pop()
        path = toolchain.KERNEL_HEADERS / name
        if name in found or not path.is_file():  # the compiler names a missing one
            continue
        status = path.stat()
        found[name], included = _header(path, status.st_mtime_ns, status.st_size)
        names |= included
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()


def _includes(source: str) -> set[str]:
    """Headers named in quotes, which is how the project's are included; also those that a condition leaves out."""
    return set(re.findall(r'^\s*#\s*include\s*"([^"]+)"', source, re.MULTILINE))


@lru_cache(maxsize=256)
def _header(path: Path, changed: int, size: int) -> tuple[str, frozenset[str]]:
    """SHA-256 of a header and what it includes; read again only if its time of change or size differs."""
    text = path.read_text()
    return hashlib.sha256(text.encode()).hexdigest(), frozenset(_includes(text))


def key(unit: Unit, versions: dict[str, str] | None = None) -> str:
    """Return the key of `unit`: a digest of everything that can change the compiled code.

    `versions` are those of the toolchain; by default of the one that is installed.

    Raises
    ------
    ToolchainError
        If the compiler is missing, because its version is part of the key.
    """
    ingredients = {
        "schema": SCHEMA,
        "unit": asdict(unit),
        "headers": headers_digest(unit.source),
        "versions": versions or toolchain.find().versions,
        "options": [COMPILE_OPTIONS, LINK_OPTIONS],
    }
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


def pack_file(key: str, binary: Binary) -> bytes:
    """Return the content of a file."""
    facts: dict[str, Any] = {**asdict(binary), "key": key}
    del facts["code"]
    header = json.dumps(facts).encode()
    rest = _LENGTH.pack(len(header)) + header + binary.code
    return _MAGIC + hashlib.sha256(rest).digest() + rest


def _unpack(content: bytes) -> tuple[str, Binary]:
    """Key and binary of a file's content; raises ``ValueError`` unless it is whole."""
    start = len(_MAGIC) + _DIGEST
    rest = content[start:]
    if content[: len(_MAGIC)] != _MAGIC or hashlib.sha256(rest).digest() != content[len(_MAGIC) : start]:
        raise ValueError("not a kernel")
    try:
        (length,) = _LENGTH.unpack_from(rest)
        code = rest[_LENGTH.size + length :]
        facts = json.loads(rest[_LENGTH.size : _LENGTH.size + length])
        key, symbol, arch, title = (facts[name] for name in ("key", "symbol", "arch", "title"))
        usage = None if facts["usage"] is None else Usage(**facts["usage"])
    except (struct.error, KeyError, TypeError, RecursionError) as error:  # a file of another schema, or of no writer
        raise ValueError("not a kernel") from error
    texts = all(isinstance(each, str) and each.isprintable() for each in (key, symbol, arch, title))
    numbers = usage is None or all(type(each) is int and 0 <= each < 2**31 for each in asdict(usage).values())
    if not texts or arch not in ARCHES or not numbers:
        raise ValueError("not a kernel")
    return key, Binary(code, symbol, arch, title, usage)


def _read(name: str) -> tuple[str, Binary, os.stat_result]:
    """Return key, binary and status of a file; raise ``OSError`` or ``ValueError`` unless it is a sound entry."""
    content, status = user_files.read(directory() / name, _MAX_BYTES)
    return *_unpack(content), status


def load(key: str) -> Binary | None:
    """Return the binary of `key`, or None if there is no sound entry."""
    try:
        found, binary, _ = _read(key + SUFFIX)
    except (OSError, ValueError):
        return _in_memory.get(key)
    return binary if found == key else None


def save(key: str, binary: Binary) -> None:
    """Store `binary` under `key`: on disk, or in this process if the disk cannot be written."""
    try:
        user_files.write(directory() / (key + SUFFIX), pack_file(key, binary))
    except OSError as error:
        if not _in_memory:
            log.warning("compiled kernels stay in memory only: %s", error)
        _in_memory[key] = binary


def entries() -> list[Entry]:
    """Return the sound entries on disk, newest first."""
    found = []
    for name in user_files.names(directory(), SUFFIX):
        try:
            key, binary, status = _read(name)
        except (OSError, ValueError):
            continue
        date = datetime.fromtimestamp(status.st_mtime).astimezone()
        found.append(Entry(key, binary.title, binary.arch, status.st_size, date))
    return sorted(found, key=lambda entry: entry.date, reverse=True)


def clear() -> int:
    """Remove all entries and partial files; return the number of entries removed."""
    _in_memory.clear()
    return user_files.remove(directory(), SUFFIX)


def _shipped(unit: Unit) -> Binary | None:
    """The binary of `unit` that the wheel of compiled kernels has."""
    found = shipped.find_wheel()
    if found is None:
        return None
    name = key(unit, found.versions)
    try:
        stored, binary = _unpack((found.folder / (name + SUFFIX)).read_bytes())
    except (OSError, ValueError):
        return None
    return binary if stored == name else None


def build(unit: Unit) -> Binary:
    """Return the binary of `unit`, from the wheel of compiled kernels, from the cache, or compiled into it.

    Raises
    ------
    ToolchainError
        If the compiler or a header is missing.
    CompileError
        If the compiler refuses the unit.

    Examples
    --------
    >>> unit = Unit("template <int N> __global__ void scale(float* x) { x[threadIdx.x] *= N; }", "scale<2>", "sm_90a")
    >>> build(unit) == build(unit)  # the second one is read from the cache
    True
    """
    binary = _shipped(unit)
    if binary is not None:
        return binary  # without the compiler, which a key of the cache names
    name = key(unit)
    binary = load(name)
    if binary is None:
        binary = compile_unit(unit)
        save(name, binary)
    return binary
