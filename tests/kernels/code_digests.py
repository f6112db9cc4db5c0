"""Guard of the kernels' machine code: a refactoring must leave every digest as it is.

Each config of the catalog is compiled without a GPU, disassembled, and stripped of names. The committed files hold the
SHA-256 of what remains, the resources, and the config's name, launch size and dynamic shared memory.

``python -m tests.kernels.code_digests`` compares; exit status 0: equal, 1: different, 2: another toolchain.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cute_kernels.jit import cache, toolchain
from cute_kernels.jit.compiler import Unit, compile_unit, keep_headers
from tests.helpers import nvdisasm
from tests.kernels.code_digest_catalog import ARCHES, Config, catalog

Fact = dict[str, Any]
FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
RESULTS = ROOT / "build" / "digests"
SAME, DIFFERENT, OTHER_TOOLCHAIN = 0, 1, 2

_SECTION = re.compile(r"\.section\s+(\.(?:nv\.)?[a-z0-9_]+)([^,]*)")
_DROPPED = (".debug", ".note", ".nv.callgraph", ".nv.compat", ".nv.uft", ".nv.rel", ".rel")
# Instructions and data behind their offset, the second word of an encoding, and data without an offset.
_CONTENT = re.compile(r"/\*|\.(?:align|zero|byte|short|word|dword|string)\b")
_OFFSET = re.compile(r"^/\*[0-9a-f]{4,}\*/\s*")
_SYMBOL = re.compile(r"(\.d?word\s+|`)[A-Za-z_.$][\w.$]*")


def normalize(listing: str) -> str:
    """Strip names, labels and comments from the output of ``nvdisasm -hex``.

    Keeps the code with its encodings, constants, sizes of shared memory, and the attributes of kernels, among them the
    layout of their parameters and their launch bounds.
    """
    kept, dropped = [], True  # what comes before the first section names the target
    for raw in listing.splitlines():
        line = raw.partition("//")[0].strip()
        if section := _SECTION.match(line):
            name, symbol = section.groups()
            # the section without a symbol repeats registers and stack by function
            dropped = name.startswith(_DROPPED) or (name == ".nv.info" and not symbol)
            line = f"section {name}"
        elif not _CONTENT.match(line):
            continue
        if dropped:
            continue
        line = re.sub(r"\(.*\)", "(@)", _OFFSET.sub("", line))
        kept.append(" ".join(_SYMBOL.sub(r"\1@", line).split()))
    return "\n".join(kept)


def instruction_count(text: str) -> int:
    """Count the instructions of a normalized listing: each ends with a semicolon before its encoding."""
    return len(re.findall(r";\s*/\* 0x", text))


def _listing(code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([nvdisasm(), "-hex", file.name], capture_output=True, text=True, check=True).stdout


def measure(unit: Unit) -> Fact:
    """Return digest, instructions and resources of `unit`; results are stored below ``build/digests``."""
    ingredients = cache.key(unit) + json.dumps(versions(), sort_keys=True) + Path(__file__).read_text()
    path = RESULTS / f"{hashlib.sha256(ingredients.encode()).hexdigest()}.json"
    if path.is_file():
        return dict(json.loads(path.read_text()))
    binary = compile_unit(unit)
    text, usage = normalize(_listing(binary.code)), binary.usage
    if usage is None or not instruction_count(text):
        raise RuntimeError(f"{unit.title} for {unit.arch} has no instructions or no resources")
    fact = {
        "sass": hashlib.sha256(text.encode()).hexdigest()[:16],
        "instructions": instruction_count(text),
        "registers": usage.registers,
        "stack": usage.stack_bytes,
        "spills": usage.spill_bytes,
        "static_smem": usage.shared_bytes,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(fact))
    part.replace(path)
    return fact


def entry(config: Config, fact: Fact) -> Fact:
    """Return what is committed for `config`, compiled to `fact`."""
    name = str(getattr(config, "name", ""))  # users store it in results files
    return {**fact, "threads": config.threads, "smem": config.smem_bytes, "name": name}


def digest(configs: Mapping[str, Config], arch: str, jobs: int = 1) -> dict[str, Fact]:
    """Return the entries of `configs` by key, compiled in `jobs` processes; equal units are compiled once."""
    units = {key: config.translation_unit(arch) for key, config in configs.items()}
    single = list(dict.fromkeys(units.values()))
    if jobs == 1:
        facts = list(map(measure, single))
    else:  # NVRTC serializes the threads of one process; torch's threads rule out fork
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=keep_headers) as pool:
            facts = list(pool.map(measure, single))
    found = dict(zip(single, facts, strict=True))
    return {key: entry(config, found[units[key]]) for key, config in configs.items()}


@lru_cache
def versions() -> dict[str, str]:
    """Return the versions of compilers, headers and disassembler."""
    text = subprocess.run([nvdisasm(), "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"\bV(\d[\d.]*)", text)
    return {**toolchain.find().versions, "nvdisasm": release[1] if release else text}


def committed_path(arch: str) -> Path:
    """Return where the digests of `arch` are committed."""
    return FOLDER / f"code_digests_{arch}.json"


def committed(arch: str) -> dict[str, Any]:
    """Return ``{"toolchain": ..., "kernels": ...}`` as committed for `arch`; empty if there is no file."""
    path = committed_path(arch)
    return dict(json.loads(path.read_text())) if path.is_file() else {"toolchain": {}, "kernels": {}}


def save(arch: str, kernels: Mapping[str, Fact]) -> None:
    """Write the file of `arch`, one line per entry."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(kernels[key])}" for key in sorted(kernels))
    text = f'{{\n"toolchain": {json.dumps(versions())},\n"kernels": {{\n{lines}\n}}\n}}\n'
    committed_path(arch).write_text(text)


def toolchain_change(arch: str) -> str:
    """Return how this toolchain differs from the one of the committed digests, or an empty string."""
    before, now = committed(arch)["toolchain"], versions()
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return ", ".join(f"{name} {before.get(name, 'missing')} -> {now.get(name, 'missing')}" for name in names)


def differences(before: Mapping[str, Fact], now: Mapping[str, Fact]) -> list[str]:
    """Return one line per entry that is missing, extra or changed."""
    found = []
    for key in sorted(before.keys() | now.keys()):
        if key not in now:
            found.append(f"{key}: missing from the catalog")
        elif key not in before:
            found.append(f"{key}: not committed")
        elif before[key] != now[key]:
            old, new = before[key], now[key]
            fields = [name for name in (*new, *(old.keys() - new.keys())) if old.get(name) != new.get(name)]
            found.append(f"{key}: " + ", ".join(f"{name} {old.get(name)} -> {new.get(name)}" for name in fields))
    return found


def _select(kernels: Mapping[str, Any], only: str) -> dict[str, Any]:
    return {key: value for key, value in kernels.items() if only in key}


def _run(arch: str, only: str, jobs: int, update: bool) -> list[str]:
    """Compile `arch`; write the digests or return their differences."""
    start = time.perf_counter()
    found = digest(_select(catalog(arch), only), arch, jobs)
    print(f"{arch}: {len(found)} entries, {time.perf_counter() - start:.0f} s", flush=True)
    before = committed(arch)["kernels"]
    if update:
        others = {key: value for key, value in before.items() if only not in key}
        save(arch, others | found)
    changes = differences(_select(before, only), found)
    for line in changes:
        print(f"{arch} {line}", flush=True)
    return [] if update else changes


def main(arguments: Iterable[str] | None = None) -> int:
    """Compare the machine code with the committed digests, or write them."""
    parser = argparse.ArgumentParser(prog="code_digests", description="Compare the kernels' machine code with digests.")
    parser.add_argument("--arch", nargs="+", choices=ARCHES, default=ARCHES, help="architectures; default: all")
    parser.add_argument("--update", action="store_true", help="write the committed digests")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="entries whose key contains this")
    parser.add_argument("--jobs", type=int, default=2, help="processes; default: 2")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if ROOT not in toolchain.KERNEL_HEADERS.parents:  # an editable installation of another tree
        parser.error(f"headers must be in {ROOT}, got {toolchain.KERNEL_HEADERS}")
    if not options.update or options.only:  # one file has the digests of one toolchain
        for arch in options.arch:
            if committed(arch)["toolchain"] and (change := toolchain_change(arch)):
                print(f"{arch}: not compared, the toolchain differs from the committed one: {change}")
                return OTHER_TOOLCHAIN
    changed = [_run(arch, options.only, options.jobs, options.update) for arch in options.arch]
    return DIFFERENT if any(changed) else SAME


if __name__ == "__main__":
    sys.exit(main())
