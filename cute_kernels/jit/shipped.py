"""Compiled kernels of the optional wheel ``magicube-cutlass-cubins``: read only, used only if of this source."""

from __future__ import annotations

import hashlib
import json
import logging
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cute_kernels.jit import toolchain

log = logging.getLogger("magicube")

PACKAGE = "magicube_cutlass_cubins"
VERSION = "0.1.0"  # of this library
MANIFEST = "manifest.json"


class Shipped(NamedTuple):
    """Folder of the wheel's kernels, the versions of the toolchain that compiled them, and their number by arch."""

    folder: Path
    versions: dict[str, str]
    kernels: dict[str, int]


def source_digest() -> str:
    """Return the SHA-256 over names and contents of all headers of the kernels."""
    root, digest = toolchain.KERNEL_HEADERS, hashlib.sha256()
    for path in sorted(root.rglob("*.cuh")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def find_wheel() -> Shipped | None:
    """Return the kernels of the installed wheel; None, with one line in the log, if they are not of this source."""
    for folder in toolchain.package_folders(PACKAGE):
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            made = f"{manifest['version']}, source {manifest['source']}"
            found = Shipped(folder, dict(manifest["versions"]), dict(manifest["kernels"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("compiled kernels in %s are not used: %r", folder, error)
            continue
        wanted = f"{VERSION}, source {source_digest()}"
        if made == wanted:
            return found
        log.warning("compiled kernels in %s are not used: they are of version %s, not %s", folder, made, wanted)
    return None


def describe_wheel() -> str:
    """Return what is shipped, for a bug report."""
    found = find_wheel()
    text = "" if found is None else ", ".join(f"{arch} {number}" for arch, number in found.kernels.items())
    return text or "none"
