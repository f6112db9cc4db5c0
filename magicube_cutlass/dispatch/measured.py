"""Measurements of a device, stored per user beside the compiled kernels: small JSON files, written atomically."""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

log = logging.getLogger("magicube")


def path_of(kind: str, device: str) -> Path:
    """Return the file of one kind of measurements for a device of this name."""
    from cute_kernels.jit.cache import directory  # its room of the cache is the kernels'

    return directory().parent / kind / ("".join(c if c.isalnum() else "_" for c in device) + ".json")


def load(kind: str, device: str) -> Any:
    """Return what :func:`save` wrote, or None if there is no valid file of this user."""
    try:
        with open(os.open(path_of(kind, device), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                return None
            return json.load(file)
    except (OSError, ValueError):
        return None


def save(kind: str, device: str, figures: object) -> None:
    """Store measurements in a folder of mode 0700; what cannot be written is logged and lost with the process."""
    path = path_of(kind, device)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(path.parent)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{path.parent} is not a folder of this user")
        path.parent.chmod(0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")  # mode 0600
        with open(handle, "w") as file:
            json.dump(figures, file, indent=1)
        os.replace(temporary, path)
    except OSError as error:
        log.warning("measured figures are kept for this process only: %s", error)
