"""The layout of the packages: which folder may import which, and the graphs that tests compare with it.

``python -m tests.house --update`` rewrites the snapshot of the public signatures.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cute_kernels", "magicube_cutlass", "residual")
REFERENCE = ROOT / "docs" / "reference" / "api"
FACES = Path(__file__).with_name("public_faces.json")

_KERNELS: dict[str, set[str]] = {
    "integers": set(),
    "float_format": set(),
    "floats": {"float_format"},
    "dtypes": {"integers", "float_format"},
    "mma_atom": {"dtypes"},
    "atoms": {"dtypes", "machine", "mma_atom"},
    "operands": {"dtypes"},
    "machine": {"dtypes"},
    "explanation": set(),
    "watch": set(),
    "jit": set(),
    "device": set(),  # headers only
    "cpu": {"integers"},
    "layout": {"atoms", "cpu", "jit", "dtypes"},
    "convert": {"cpu", "jit", "dtypes", "integers", "operands", "machine"},
    "gemm": {"watch", "convert", "cpu", "integers", "jit", "operands", "machine"},
    "scaled_gemm": {"watch", "gemm", "convert", "float_format", "floats", "jit", "operands", "machine"},
    "few_rows": {"scaled_gemm", "float_format", "jit"},
    "sparse_config": {"atoms", "dtypes", "jit"},
    "spmm": {
        "layout",
        "jit",
        "atoms",
        "dtypes",
        "float_format",
        "floats",
        "integers",
        "machine",
        "operands",
        "sparse_config",
    },
    "compensate": {"spmm", "jit", "operands"},
    "sddmm": {"layout", "jit", "atoms", "dtypes", "machine", "operands", "sparse_config"},
    "attention": {"spmm", "layout", "convert", "jit", "atoms", "dtypes", "integers", "machine", "operands"},
    "estimate": {"convert", "jit", "dtypes", "operands"},
    "ranks": {"jit", "dtypes", "operands"},
    "double_sums": {"jit", "operands"},
}
_KERNELS["catalog"] = set(_KERNELS)
# Each may import those before it.
_MAGICUBE = ("checks", "quantization", "formats", "reference", "masks", "dispatch", "ops", "autograd", "attention", "nn",
             "pruning", "hooks", "distributed", "bench", "tuning", "_api", "cli", "__main__")  # fmt: skip
_RESIDUAL = ("error", "planning", "operand", "options", "report", "cuda", "execute", "torch_op", "matmul", "explain", "nn",
             "paper", "linalg", "distributed")  # fmt: skip


def _layers(package: str, order: tuple[str, ...], below: set[str]) -> dict[str, set[str]]:
    names = [f"{package}.{name}" for name in order]
    return {name: {*names[:i], *below} for i, name in enumerate(names)}


def allowed_arrows() -> dict[str, set[str]]:
    """Return folder or top-level file -> those that it may import, by dotted names."""
    kernels = {f"cute_kernels.{name}": {f"cute_kernels.{to}" for to in arrows} for name, arrows in _KERNELS.items()}
    kernels["cute_kernels._moved"] = set()
    below = set(kernels)
    magicube = _layers("magicube_cutlass", _MAGICUBE, below)
    magicube["magicube_cutlass.cli"] |= {"magicube_cutlass"}
    # its compensated products are made of sparse ones, by the package's face
    above = below | set(magicube) | {"magicube_cutlass"}
    residual = _layers("residual", _RESIDUAL, above)
    faces = {"cute_kernels": below, "magicube_cutlass": below | set(magicube), "residual": above | set(residual)}
    moved = {f"{package}._moved" for package in PACKAGES}
    return {**kernels, **magicube, **residual, **{face: targets | moved for face, targets in faces.items()}}


FOLDERS = allowed_arrows()


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return every module of the packages by dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def folder_of(module: str) -> str:
    """Return the folder or top-level file of a module: the first two parts of its name."""
    return ".".join(module.split(".")[:2])


def file_graph(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Return module -> imported modules of the packages with a line each; lazy and type-only imports count."""
    known = modules(root)
    graph: dict[str, dict[str, int]] = {}
    for module, path in known.items():
        graph[module] = {}
        for node in ast.walk(ast.parse(path.read_text())):
            for target in _targets(node, known):
                if target != module:
                    graph[module].setdefault(target, getattr(node, "lineno", 0))
    return graph


def _targets(node: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name if name in known else node.module for name in names if name.split(".")[0] in PACKAGES)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)


def circles(graph: Mapping[str, Mapping[str, int]]) -> list[set[str]]:
    """Return the strongly connected components of more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(component)

    for node in graph:
        if node not in index:
            visit(node)
    return found


def wrong_arrows(graph: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the imports between folders that :data:`FOLDERS` does not allow."""
    return [
        f"{module}:{line}: {folder_of(module)} -> {folder_of(target)}"
        for module, targets in graph.items()
        for target, line in targets.items()
        if folder_of(module) != folder_of(target) and folder_of(target) not in FOLDERS.get(folder_of(module), set())
    ]


_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.M)


def wrong_includes(root: Path = ROOT) -> list[str]:
    """Return the includes of CUDA headers outside of their own folder, ``device`` and the allowed folders."""
    base, found = root / "cute_kernels", []
    for path in sorted(base.rglob("*.cuh")):
        own = path.relative_to(base).parts[0]
        for name in _INCLUDE.findall(path.read_text()):
            there, _, rest = name.partition("/")
            allowed = {own, "device"} | {each.split(".")[1] for each in FOLDERS.get(f"cute_kernels.{own}", ())}
            if not rest or there not in allowed or not (base / name).is_file():
                found.append(f"{path.relative_to(root)}: {name}")
    return found


def crowded(root: Path = ROOT, most: int = 15, depth: int = 2) -> list[str]:
    """Return folders of more than `most` files, ``__init__`` not counted, or deeper than `depth`."""
    found = []
    for package in PACKAGES:
        for folder in [root / package, *(path for path in sorted((root / package).rglob("*")) if path.is_dir())]:
            if "__pycache__" in folder.parts:
                continue
            files = [path for path in folder.iterdir() if path.suffix in {".py", ".cuh", ".cpp", ".hpp"}]
            count = sum(path.name != "__init__.py" for path in files)
            level = len(folder.relative_to(root / package).parts)
            if count > most or level > depth:
                found.append(f"{folder.relative_to(root)}: {count} files, level {level}")
    return found


def public_definitions(package: str, root: Path = ROOT) -> dict[str, list[str]]:
    """Return public names of module-level functions and classes -> the modules of the package that define them."""
    found: dict[str, list[str]] = {}
    for module, path in modules(root).items():
        if module.split(".")[0] == package:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                    where = found.setdefault(node.name, [])
                    if module not in where:  # overloads
                        where.append(module)
    return found


def lengths(root: Path = ROOT) -> Iterator[tuple[str, int]]:
    """Yield each function of the packages with its lines, the docstring not counted."""
    for module, path in modules(root).items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                first = node.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    lines -= (first.end_lineno or first.lineno) - first.lineno + 1
                yield f"{module}.{node.name}", lines


def undocumented(root: Path = ROOT) -> list[str]:
    """Return public functions, classes and methods of the packages without a docstring.

    A method inherits one: it counts as documented if another class documents the name.
    """
    found: list[str] = []
    methods: set[str] = set()

    def visit(node: ast.Module | ast.ClassDef, prefix: str) -> None:
        for each in node.body:
            if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and not each.name.startswith("_"):
                if any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in each.decorator_list):
                    continue
                if ast.get_docstring(each) is None:
                    found.append(f"{prefix}.{each.name}")
                elif isinstance(node, ast.ClassDef):
                    methods.add(each.name)
                if isinstance(each, ast.ClassDef):
                    visit(each, f"{prefix}.{each.name}")

    for module, path in modules(root).items():
        visit(ast.parse(path.read_text()), module)
    return [name for name in found if name.rpartition(".")[2] not in methods]


def public_objects() -> dict[str, Any]:
    """Return the functions and classes of the modules that the reference documents, by dotted name."""
    found: dict[str, Any] = {}
    for page in sorted(REFERENCE.glob("*.rst")):
        for name in re.findall(r"automodule:: (\S+)", page.read_text()):
            module = importlib.import_module(name)
            own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == name]
            for key in getattr(module, "__all__", own):
                if callable(getattr(module, key)) and not key.startswith("_"):
                    found[f"{name}.{key}"] = getattr(module, key)
    return found


def _members(value: Any) -> list[str]:
    own = [each for each in value.__mro__ if each.__module__.split(".")[0] in PACKAGES]
    return sorted({name for each in own for name in vars(each) if not name.startswith("_")})


def public_faces() -> dict[str, Any]:
    """Return the signatures of what users import, module paths struck."""
    found: dict[str, Any] = {}
    for package in ("magicube_cutlass", "residual"):
        face = importlib.import_module(package)
        for name in face.__all__:
            value = getattr(face, name)
            inner = {f"{name}.{each}": getattr(value, each) for each in getattr(value, "__all__", ())}
            for key, each in (inner if inspect.ismodule(value) else {name: value}).items():
                if inspect.isclass(each):
                    found[f"{package}.{key}"] = [_signature(each), _members(each)]
                elif callable(each):
                    found[f"{package}.{key}"] = _signature(each)
    return found


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except ValueError:
        return "?"
    return re.sub(r"\b(?:magicube_cutlass|residual|cute_kernels)\.(?:\w+\.)*", "", text)


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit("usage: python -m tests.house --update")
    FACES.write_text(json.dumps(public_faces(), indent=1, sort_keys=True) + "\n")
