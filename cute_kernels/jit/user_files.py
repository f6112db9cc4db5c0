"""Private files of this user below the cache folder: written atomically, never reached through a symbolic link.

A folder is used only if it belongs to this user and is not a symbolic link itself; folders above it may be links.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PARTIAL = ".tmp"  # suffix of a file that is being written; its name starts with a dot
_STALE_SECONDS = 3600  # a partial file of this age belongs to a writer that was killed


@contextmanager
def _descriptor(folder: Path) -> Iterator[int]:
    """Yield a descriptor of the folder; raise ``OSError`` unless it is a folder of this user."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.getuid():
            raise PermissionError(f"{folder} must be a folder of this user")
        yield handle
    finally:
        os.close(handle)


def read(path: Path, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """Return content and status of a file; raise ``OSError`` for a file of another kind, user or size."""
    with _descriptor(path.parent) as folder:
        handle = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)  # a pipe must not block
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{path} must be a file of this user")
        if status.st_size > max_bytes:
            raise OSError(f"{path} must have at most {max_bytes} bytes, got {status.st_size}")
        return file.read(max_bytes), status


def write(path: Path, content: bytes) -> None:
    """Replace a file, of mode 0600 in a folder of mode 0700; remove what killed writers left there."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _descriptor(path.parent) as folder:
        if stat.S_IMODE(os.fstat(folder).st_mode) != 0o700:
            os.fchmod(folder, 0o700)
        _remove_partial(folder, time.time() - _STALE_SECONDS)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=_PARTIAL)  # mode 0600
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def names(folder: Path, suffix: str) -> list[str]:
    """Return the sorted names that end in `suffix`, without partial files; none if the folder cannot be used."""
    with suppress(OSError), _descriptor(folder) as handle:
        return sorted(name for name in os.listdir(handle) if name.endswith(suffix) and not name.startswith("."))
    return []


def remove(folder: Path, suffix: str) -> int:
    """Remove all files that end in `suffix`, and all partial files; return the number without the partial ones."""
    found = names(folder, suffix)
    with suppress(OSError), _descriptor(folder) as handle:
        _remove_partial(handle, float("inf"))
        return sum(_unlink(name, handle) for name in found)
    return 0


def _remove_partial(folder: int, before: float) -> None:
    """Remove partial files that were last written before a time."""
    for name in os.listdir(folder):
        if name.startswith(".") and name.endswith(_PARTIAL):
            with suppress(OSError):  # its writer may have renamed it
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < before:
                    _unlink(name, folder)


def _unlink(name: str, folder: int) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True
