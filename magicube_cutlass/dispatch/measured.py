"""Measurements of a device, stored per user beside the compiled kernels: small JSON files, written atomically."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger("magicube")
_MAX_BYTES = 1 << 20


def path_of(kind: str, device: str) -> Path:
    """Return the file of one kind of measurements for a device of this name."""
    from cute_kernels.jit.cache import directory  # beside the compiled kernels

    return directory().parent / kind / ("".join(c if c.isalnum() else "_" for c in device) + ".json")


def load(kind: str, device: str) -> Any:
    """Return what :func:`save` wrote, or None if there is no valid file of this user."""
    from cute_kernels.jit import user_files

    try:
        return json.loads(user_files.read(path_of(kind, device), _MAX_BYTES)[0])
    except (OSError, ValueError, RecursionError):
        return None


def save(kind: str, device: str, figures: object) -> None:
    """Store measurements in a folder of mode 0700; what cannot be written is logged and lost with the process."""
    from cute_kernels.jit import user_files

    try:
        user_files.write(path_of(kind, device), json.dumps(figures, indent=1).encode())
    except OSError as error:
        log.warning("measured figures are lost with this process: %s", error)
