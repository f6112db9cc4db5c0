"""Runs the selection ``sanitize`` under each tool of compute-sanitizer: ``python -m tests.gpu.sanitize [FILE]``.

Findings are counted where they name one of this library's kernels; those of torch's own are counted apart.  A summary
goes to FILE (JSON).  The tools run side by side; the exit status is that of the worst.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from magicube_cutlass.cli.environment import provenance

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SELECTION = ["-m", "pytest", "-p", "no:cacheprovider", "-k", "sanitize", "tests/gpu/test_gpu_sanitize.py"]
OURS = re.compile(r"magicube::|8magicube")
_BLOCK = re.compile(
    r"^========= (?:Error|Warning|Invalid|Uninitialized|Barrier|Program|Host).*?(?=^========= *$|\Z)", re.M | re.S
)


def find_tool() -> str:
    """compute-sanitizer on the PATH or in the toolkit."""
    folders = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    found = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(f"{folder}/bin" for folder in folders if folder)
    )
    if not found:
        sys.exit("compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin")
    return found


def findings(log: str) -> tuple[list[str], int]:
    """The findings that name one of our kernels, and the number of the others."""
    blocks = [match[0] for match in _BLOCK.finditer(log)]
    ours = [block for block in blocks if OURS.search(block)]
    return ours, len(blocks) - len(ours)


def run(tool: str, sanitizer: str, logs: Path) -> dict[str, object]:
    # Every tensor is an allocation of its own, so that reading past its end is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "SANITIZER_TOOL": tool}
    # cuda.core asks the driver for functions that it may not have: no errors
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [sanitizer, "--tool", tool, *quiet, "--error-exitcode", "0", "--print-limit", "200",
               "--log-file", str(logs / f"{tool}.log"), sys.executable, *SELECTION]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    text = (logs / f"{tool}.log").read_text() if (logs / f"{tool}.log").exists() else ""
    summary = re.search(r"^=+ (?:ERROR|RACECHECK) SUMMARY.*", text, re.M)
    ours, others = findings(text)
    passed = re.search(r"(\d+) passed", done.stdout)
    if ours or done.returncode:
        print(f"{tool}: exit {done.returncode}\n{done.stdout[-3000:]}\n{''.join(ours[:3])}", file=sys.stderr)
    return {
        "tool": tool,
        "tests passed": int(passed[1]) if passed and not done.returncode else 0,
        "errors": len(ours),
        "findings in other code": others,
        "summary": summary[0].strip("= ") if summary else "none",
    }


def version(sanitizer: str) -> str:
    told = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Version\s+(\S+)", told)
    return found[1] if found else told.strip()


def main() -> None:
    sanitizer, logs = find_tool(), ROOT / "build" / "sanitizer"
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("*.log"):
        old.unlink()
    # compiled beforehand: the tools slow this process down only
    subprocess.run([sys.executable, *SELECTION], cwd=ROOT, check=True)
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        tools = list(pool.map(lambda tool: run(tool, sanitizer, logs), TOOLS))
    report = {
        "machine": provenance(),
        "compute-sanitizer": version(sanitizer),
        "tools": tools,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")
    sys.exit(any(tool["errors"] or not tool["tests passed"] for tool in tools))


if __name__ == "__main__":
    main()
