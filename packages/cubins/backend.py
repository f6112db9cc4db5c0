"""Build backend of the wheel ``magicube-cutlass-cubins``: what ``magicube warmup`` compiles, for several GPUs.

The environment needs magicube-cutlass[cuda], and no GPU::

    pip wheel --no-build-isolation --no-deps -w dist packages/cubins -C arch=sm_90a -C jobs=4

Settings: ``arch``, with commas (default: ARCHES); ``jobs``, compilers at a time; ``match``, part of a kernel's name.
Kernels go through the user's cache, so that a build that was stopped goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from cute_kernels import catalog
from cute_kernels.jit import cache, shipped, toolchain, warmup
from cute_kernels.jit.compiler import keep_headers

ARCHES = "sm_80,sm_89,sm_90a,sm_100a,sm_120a"
NAME = "magicube-cutlass-cubins"
METADATA = f"""\
Metadata-Version: 2.4
Name: {NAME}
Version: {shipped.VERSION}
Summary: Compiled GPU kernels of magicube-cutlass
License-Expression: Apache-2.0
Requires-Python: >=3.11
Requires-Dist: magicube-cutlass=={shipped.VERSION}
{"".join(f"Requires-Dist: {wheel}{chr(10)}" for wheel in toolchain.LAUNCH_WHEELS)}"""
WHEEL = f"Wheel-Version: 1.0\nGenerator: {NAME} {shipped.VERSION}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def compiled(arch: str, match: str, jobs: int) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each kernel's file for `arch`."""
    configs = [config for config in catalog.warm_configs(False, arch) if match in config.translation_unit(arch).title]
    if not configs:
        raise ValueError(f"match must be part of the name of a kernel for {arch}, got {match!r}")
    keep_headers()
    for made in warmup(configs, arch, jobs):
        print(f"{arch}: {made.done} of {made.total}", flush=True)
    for name in dict.fromkeys(cache.key(config.translation_unit(arch)) for config in configs):
        binary = cache.load(name)
        assert binary is not None, "the cache was cleared while the kernels were compiled"
        yield name + cache.SUFFIX, cache.pack_file(name, binary)


def contents(arches: list[str], match: str, jobs: int) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file of the wheel but its RECORD."""
    info = f"{shipped.PACKAGE}-{shipped.VERSION}.dist-info"
    kernels: dict[str, int] = {}
    for arch in arches:
        for file, content in compiled(arch, match, jobs):
            kernels[arch] = kernels.get(arch, 0) + 1
            yield f"{shipped.PACKAGE}/{file}", content
    manifest = {
        "version": shipped.VERSION,
        "source": shipped.source_digest(),
        "versions": toolchain.find().versions,
        "kernels": kernels,
    }
    yield f"{shipped.PACKAGE}/__init__.py", b'"""Compiled kernels of magicube-cutlass."""\n'
    yield f"{shipped.PACKAGE}/{shipped.MANIFEST}", json.dumps(manifest, indent=1).encode()
    yield f"{info}/METADATA", METADATA.encode()
    yield f"{info}/WHEEL", WHEEL.encode()


def build_wheel(
    wheel_directory: str, config_settings: dict[str, str] | None = None, metadata_directory: str | None = None
) -> str:
    """Write the wheel into a folder and return its name (PEP 517)."""
    settings = {"arch": ARCHES, "match": "", "jobs": str(os.cpu_count() or 1), **(config_settings or {})}
    name = f"{shipped.PACKAGE}-{shipped.VERSION}-py3-none-any.whl"
    record = ""
    with ZipFile(Path(wheel_directory) / name, "w", ZIP_DEFLATED) as wheel:
        for file, content in contents(settings["arch"].split(","), settings["match"], int(settings["jobs"])):
            wheel.writestr(file, content)
            digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record += f"{file},sha256={digest},{len(content)}\n"
        path = f"{shipped.PACKAGE}-{shipped.VERSION}.dist-info/RECORD"
        wheel.writestr(path, f"{record}{path},,\n")
    return name
