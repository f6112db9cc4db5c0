"""``magicube warmup`` and ``magicube cache``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from cute_kernels.jit import ToolchainError, Unit, cache, toolchain
from magicube_cutlass.cli import app, main


@dataclass(frozen=True)
class Probe:
    value: str

    def translation_unit(self, arch: str) -> Unit:
        return Unit(f"__global__ void probe(int* x) {{ x[0] = {self.value}; }}", "probe", arch)


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("MAGICUBE_CACHE", str(tmp_path))
    module = ModuleType("cute_kernels.catalog")

    def warm_configs(every: bool, arch: str) -> Iterable[Probe]:
        return [Probe("1"), Probe("2")] if every else [Probe("1")]

    module.warm_configs = warm_configs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cute_kernels.catalog", module)
    return module


def run(*args: str) -> str:
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def fail(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err.startswith("magicube: error: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


def test_warmup_list_and_clear() -> None:
    assert "0 kernels" in run("cache", "ls")
    assert run("warmup", "--arch", "sm_80") == "1 kernels for sm_80: 1 compiled, 0 in the cache already"
    assert (
        run("warmup", "--arch", "sm_80", "--all", "--jobs", "1")
        == "2 kernels for sm_80: 1 compiled, 1 in the cache already"
    )
    listed = run("cache", "ls")
    assert listed.count("probe sm_80") == 2 and f"in {cache.directory()}" in listed
    assert run("cache", "clear").startswith("removed 2 kernels")
    assert "0 kernels" in run("cache", "ls")


def test_an_unknown_arch_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "arch must be one of sm_80" in fail(capsys, "warmup", "--arch", "sm_77")


def test_a_kernel_that_does_not_compile_is_one_line(
    capsys: pytest.CaptureFixture[str], kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "warm_configs", lambda every, arch: [Probe("absent")])
    message = fail(capsys, "warmup", "--arch", "sm_90a")
    assert 'probe does not compile for sm_90a: unit.cu(1): error: identifier "absent" is undefined' in message


def test_a_missing_toolchain_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ToolchainError("missing: all. Mend it with: pip install everything")

    monkeypatch.setattr(toolchain, "find", absent)
    assert "pip install everything" in fail(capsys, "warmup", "--arch", "sm_80")
    assert "pip install everything" in run("collect-env")


def test_collect_env_names_the_toolchain() -> None:
    text = run("collect-env")
    for word in ("nvrtc 13.", "nvjitlink 13.", "cutlass 4.2.0", "cccl 3.", "jit cache"):
        assert word in text


def test_tune_without_a_gpu_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        main(["tune"])
    assert raised.value.code == 2
    assert "tune needs a CUDA device" in capsys.readouterr().err
