"""The rooms: who may import whom, what an import may cost, and how long a file may get."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ["cute_kernels", "magicube_cutlass", "residual"]
ABOVE = ["examples", "benchmarks", "tests"]
ROOMS = LIBRARY + ABOVE
# Room -> the rooms it may import. Down only, never sideways.
ARROWS: dict[str, set[str]] = {
    "cute_kernels": set(),
    "magicube_cutlass": {"cute_kernels"},
    "residual": {"cute_kernels", "magicube_cutlass"},
    **{room: set(LIBRARY) for room in ABOVE},
}
# Library room -> the other people's packages it may import.
OUTSIDE: dict[str, set[str]] = {
    "cute_kernels": {"torch", "numpy", "cuda", "pycute", "cutlass", "cutlass_library"},
    "magicube_cutlass": {
        "torch",
        "numpy",
        "scipy",
        "safetensors",
        "typer",
        "rich",
        "matplotlib",
        "onnx",
        "onnxruntime",
        "transformers",  # these by hooks alone
        "torchao",
        "gguf",
        "peft",
        "vllm",
    },
    "residual": {"torch", "numpy", "scipy"},
}
# A plain import of the library leaves these to the functions that need them.
LAZY = ["onnx", "onnxruntime", "scipy", "typer", "rich", "matplotlib", "cuda", "cutlass", "cutlass_library", "pycute",
        "transformers", "torchao", "gguf", "peft", "vllm"]  # fmt: skip
IMPORT_SECONDS = 0.3
PYTHON_LINES, CPP_LINES = 400, 500
CPP = {".cpp", ".hpp", ".cuh", ".cu", ".h"}


def imported(tree: ast.AST, room: str) -> Iterator[tuple[int, str]]:
    """Line and top-level package of every import, also inside functions and by import_module of a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, (node.module or "").split(".")[0] if node.level == 0 else room
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            value = node.args[0].value
            if name in ("import_module", "__import__", "importorskip") and isinstance(value, str):
                yield node.lineno, value.split(".")[0]


def wrong_arrows(source: str, room: str) -> list[tuple[int, str]]:
    found = []
    for line, name in imported(ast.parse(source), room):
        if name in ROOMS:
            bad = name != room and name not in ARROWS[room]
        else:
            bad = room in OUTSIDE and name not in OUTSIDE[room] and name not in sys.stdlib_module_names
        if bad:
            found.append((line, name))
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_no_import_goes_up_or_sideways(room: str) -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {room} -> {name}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for line, name in wrong_arrows(path.read_text(), room)
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("room", "source", "name"),
    [
        ("cute_kernels", "import magicube_cutlass.ops", "magicube_cutlass"),
        ("cute_kernels", "def f():\n    from residual import decompose", "residual"),
        ("magicube_cutlass", "from residual.decompose import decompose", "residual"),
        ("magicube_cutlass", "import importlib\nimportlib.import_module('benchmarks.timing')", "benchmarks"),
        ("magicube_cutlass", "import pandas", "pandas"),
        ("residual", "from tests import helpers", "tests"),
        ("examples", "import benchmarks", "benchmarks"),
        ("tests", "from examples import demo", "examples"),
    ],
)
def test_a_planted_wrong_arrow_is_seen(room: str, source: str, name: str) -> None:
    assert [found for _, found in wrong_arrows(source, room)] == [name]


PROBE = """
import json, sys, time, torch
before = set(sys.modules)
start = time.process_time()  # of this process, which others that run do not make longer
import {package}
seconds = time.process_time() - start
print(json.dumps([seconds, torch.cuda.is_initialized(), sorted(set(sys.modules) - before)]))
"""


def probe(package: str, bytecode: Path) -> tuple[float, bool, list[str]]:
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(bytecode)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # users have bytecode from the second import on
    command = [sys.executable, "-c", PROBE.format(package=package)]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    seconds, initialised, modules = json.loads(run.stdout.splitlines()[-1])
    return seconds, initialised, modules


@pytest.fixture(scope="module")
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for bytecode, also torch's, which takes the first process seconds."""
    return tmp_path_factory.mktemp("bytecode")


@pytest.mark.parametrize("package", ["magicube_cutlass", "residual"])
def test_import_is_quick_and_touches_no_gpu(package: str, bytecode: Path) -> None:
    seconds = []
    for _ in range(5):
        taken, initialised, modules = probe(package, bytecode)
        assert not initialised
        heavy = {name.split(".")[0] for name in modules} & set(LAZY)
        assert not heavy, f"import {package} imports {sorted(heavy)}"
        seconds.append(taken)
        if taken < IMPORT_SECONDS:  # the best of up to five counts: the first makes the bytecode
            break
    assert min(seconds) < IMPORT_SECONDS, f"import {package} took {min(seconds):.3f} s on top of torch"


@pytest.mark.parametrize("room", ROOMS)
def test_files_keep_their_line_budget(room: str) -> None:
    long = []
    for path in sorted((ROOT / room).rglob("*")):
        budget = PYTHON_LINES if path.suffix == ".py" else CPP_LINES if path.suffix in CPP else None
        lines = len(path.read_text().splitlines()) if budget else 0
        if budget and lines > budget:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines, the budget is {budget}")
    assert not long, "\n".join(long)
