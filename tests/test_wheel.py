"""What a user gets from the built wheel: the three packages, their CUDA headers, the engine, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core")
pytest.importorskip("nanobind")

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["cute_kernels", "magicube_cutlass", "residual"]
SOURCES = {".py", ".cuh", ".typed", ".html", ".css", ".js", ".json"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    # In the build folder of the editable install, whose objects are up to date; the installed engine is left alone.
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(out), "."]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def files(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if not name.endswith("/")]


def test_wheel_holds_the_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in files(wheel)}
    (info,) = [top for top in tops if top.endswith(".dist-info")]
    assert tops == {*PACKAGES, info}


def test_wheel_holds_every_source_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in SOURCES
    }
    assert any(name.endswith(".cuh") for name in expected)
    assert {f"{package}/py.typed" for package in PACKAGES} <= expected
    assert not expected - set(files(wheel))


def test_wheel_holds_no_source_of_the_compiled_engine(wheel: zipfile.ZipFile) -> None:
    assert not [name for name in files(wheel) if name.endswith((".cpp", ".hpp")) or "csrc" in name]


def test_wheel_has_the_metadata_of_an_index(wheel: zipfile.ZipFile) -> None:
    (metadata,) = [name for name in files(wheel) if name.endswith(".dist-info/METADATA")]
    text = wheel.read(metadata).decode()
    for line in ("Author: ", "Classifier: Typing :: Typed", "Requires-Python: >=3.11", "Keywords: "):
        assert line in text


def test_wheel_holds_one_engine_and_no_litter(wheel: zipfile.ZipFile) -> None:
    packaged = [name for name in files(wheel) if ".dist-info/" not in name]
    compiled = [name for name in packaged if name.endswith((".so", ".pyd", ".dylib", ".a", ".o"))]
    assert len(compiled) == 1
    assert compiled[0].startswith("cute_kernels/cpu/_engine")
    strange = [name for name in packaged if name not in compiled and Path(name).suffix not in {*SOURCES, ".smtx"}]
    assert not strange
    assert not [name for name in packaged if "test" in name or "__pycache__" in name]


def test_wheel_names_its_licence_and_command(wheel: zipfile.ZipFile) -> None:
    (entry,) = [name for name in files(wheel) if name.endswith(".dist-info/entry_points.txt")]
    assert "magicube = magicube_cutlass.cli:main" in wheel.read(entry).decode().replace("magicube=", "magicube = ")
    (metadata,) = [name for name in files(wheel) if name.endswith(".dist-info/METADATA")]
    assert "License-Expression: Apache-2.0" in wheel.read(metadata).decode()
    assert [name for name in files(wheel) if name.endswith("licenses/LICENSE")]


def test_wheels_of_later_versions_use_the_stable_abi() -> None:
    """The engine keeps to functions that Python 3.12 and all later ones have; 3.11 has a wheel of its own."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert settings["scikit-build"]["wheel"]["py-api"] == "cp312"
    assert settings["cibuildwheel"]["build"].split() == ["cp311-manylinux*", "cp312-manylinux*"]
    assert "STABLE_ABI" in (ROOT / "CMakeLists.txt").read_text()
    macros = re.compile(r"\bPy(?:Tuple|List|Bytes|Unicode)_(?:GET|SET|AS|DATA)_\w+")
    for path in (ROOT / "cute_kernels" / "cpu" / "csrc").iterdir():
        assert not macros.search(path.read_text()), path
