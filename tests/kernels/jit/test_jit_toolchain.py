"""Finding the toolchain: wheels, toolkits, and one useful error where a part is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_kernels.jit import ToolchainError, toolchain


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    toolchain.find.cache_clear()
    yield
    toolchain.find.cache_clear()


def headers(folder: Path, *, runtime: int = 13000, cccl: int | None = 3001004, below: str = "cccl") -> Path:
    """A folder like that of a toolkit or a wheel, with nothing but the versions."""
    folder.mkdir(parents=True)
    if runtime:
        (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {runtime}\n")
    if cccl is not None:
        header = folder / below / "cuda/std/__cccl/version.h"
        header.parent.mkdir(parents=True)
        header.write_text(f"#define CCCL_VERSION {cccl}\n")
    return folder


def only(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    monkeypatch.setattr(toolchain, "header_folders", lambda: list(folders))


def test_found_on_this_machine() -> None:
    found = toolchain.find()
    assert set(found.versions) == {"nvrtc", "nvjitlink", "cutlass", "cccl", "runtime"}
    assert found.versions["cutlass"] == "4.2.0"
    for header in ("device/mma.cuh", "cute/tensor.hpp", "cuda_runtime_api.h", "cuda/std/cstdint", "nv/target"):
        assert any(os.path.isfile(os.path.join(folder, header)) for folder in found.include_dirs), header
    assert toolchain.find() is found
    assert found.versions.items() <= toolchain.describe().items()


def test_a_toolkit_alone_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toolkit = headers(tmp_path / "toolkit/include")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    packages = toolchain.package_folders
    monkeypatch.setattr(toolchain, "package_folders", lambda name: [] if name == "nvidia" else packages(name))
    assert toolkit in toolchain.header_folders()
    assert toolchain.find().include_dirs[2:] == (str(toolkit), str(toolkit / "cccl"))
    assert toolchain.find().versions["cccl"] == "3.1.4"


def test_a_folder_with_both_goes_before_folders_with_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone = headers(tmp_path / "runtime", cccl=None)
    both = headers(tmp_path / "toolkit")
    only(monkeypatch, alone, both)
    assert toolchain.find().include_dirs[2:] == (str(both), str(both / "cccl"))


def test_folders_with_one_each_make_a_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runtime, cccl = headers(tmp_path / "a", cccl=None), headers(tmp_path / "b", runtime=0, below=".")
    only(monkeypatch, runtime, cccl)
    assert toolchain.find().include_dirs[2:] == (str(cccl), str(runtime))


@pytest.mark.parametrize(
    "kinds, words",
    [
        ({"cccl": None}, ["CCCL headers below 3.2", "pip install 'nvidia-cuda-cccl>=13.0,<13.2'"]),
        ({"cccl": 3002000}, ["CCCL headers below 3.2", "pip install 'nvidia-cuda-cccl>=13.0,<13.2'"]),
        ({"runtime": 12090}, ["headers of version 13", "pip install 'nvidia-cuda-runtime>=13.0,<14'"]),
        ({"runtime": 0, "cccl": None}, ["'nvidia-cuda-runtime>=13.0,<14' 'nvidia-cuda-cccl>=13.0,<13.2'"]),
    ],
)
def test_unfit_headers_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kinds: dict[str, int], words: list[str]
) -> None:
    folder = headers(tmp_path / "include", **kinds)
    only(monkeypatch, folder)
    with pytest.raises(ToolchainError) as caught:
        toolchain.find()
    for word in [*words, str(folder)]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert toolchain.describe() == {"jit": str(caught.value)}


def test_all_missing_parts_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> tuple[tuple[int, int], str]:
        raise RuntimeError("Failure finding a library")

    monkeypatch.setattr(toolchain, "cutlass_folders", list)
    monkeypatch.setattr(toolchain, "_nvrtc", absent)
    monkeypatch.setattr(toolchain, "_nvjitlink", absent)
    with pytest.raises(ToolchainError) as caught:
        toolchain.find()
    wheels = "'nvidia-cuda-nvrtc>=13.0,<14' 'nvidia-nvjitlink>=13.0,<14' 'nvidia-cutlass==4.2.0.0'"
    assert str(caught.value).endswith(f"pip install {wheels}")
    assert "cute/tensor.hpp" in str(caught.value)


def test_an_older_linker_than_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_nvrtc", lambda: ((13, 3), "13.3"))
    monkeypatch.setattr(toolchain, "_nvjitlink", lambda: ((13, 0), "13.0"))
    with pytest.raises(ToolchainError, match=r"pip install 'nvidia-nvjitlink==13.3.\*'"):
        toolchain.find()


def test_missing_python_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = toolchain.find_spec
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None if name.startswith("cuda") else real(name))
    with pytest.raises(ToolchainError, match=r"pip install 'cuda-core>=1.2,<2' 'cuda-bindings>=13.0,<14'$"):
        toolchain.find()
