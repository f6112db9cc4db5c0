"""The command line answers without torch: help, versions, typing errors; and every command has an entry."""

from __future__ import annotations

import ast
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import magicube_cutlass as mc
from magicube_cutlass import _api
from magicube_cutlass.cli import _COMMANDS, app, arguments, main
from tests.house import ROOT

SECONDS = 0.5
HEAVY = {"torch", "numpy", "scipy", "rich", "matplotlib", "safetensors"}
PROBE = """
import json, sys
from magicube_cutlass.cli import main
try:
    main({args})
except SystemExit as stop:
    code = stop.code
print(json.dumps([code, sorted({{name.split(".")[0] for name in sys.modules}} & set({heavy}))]))
"""


@pytest.mark.parametrize(
    "args, code",
    [
        (["--help"], 0),
        (["--version"], 0),
        (["spmm", "--help"], 0),
        (["cache"], 0),
        (["nonsense"], 2),
        (["bnch"], 2),
        (["spmm", "x.smtx", "--devic", "cpu"], 2),
        (["spmm", "x.smtx", "--lhs-bits", "7"], 2),
        (["spmm", "x.smtx", "--device", "gpu"], 2),
        (["info", "missing.smtx"], 2),
        (["warmup", "--arch", "sm_90"], 2),
        (["convert", "model.bin"], 2),
        (["layout", "--operand", "D"], 2),
    ],
)
def test_answers_need_no_torch(args: list[str], code: int) -> None:
    program = PROBE.format(args=args, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [code, []], done.stderr


def test_help_takes_half_a_second() -> None:
    best = SECONDS
    for _ in range(3):  # of the process, which others that run do not make longer
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "magicube_cutlass", "--help"], cwd=ROOT, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert best < SECONDS


@pytest.mark.parametrize(
    "code, expected",
    [
        ("import magicube_cutlass as mc; print('torch' in sys.modules, mc.__version__)", f"False {mc.__version__}"),
        ("import torch, magicube_cutlass; print(torch.ops.magicube.spmm)", "magicube.spmm"),
        ("import magicube_cutlass as mc; mc.spmm; import torch; print(torch.ops.magicube.spmm)", "magicube.spmm"),
        ("from magicube_cutlass import SRBCRS, masks, nn; print(masks.__name__)", "magicube_cutlass.masks"),
        ("import magicube_cutlass.formats.srbcrs as f, magicube_cutlass as mc; print(f.SRBCRS is mc.SRBCRS)", "True"),
        ("from magicube_cutlass import *; print(spmm.__name__)", "spmm"),
        ("import magicube_cutlass as mc; print(mc.formats.__name__)", "magicube_cutlass.formats"),
        ("import magicube_cutlass as mc; print(hasattr(mc, 'absent'), hasattr(mc, '_absent'))", "False False"),
    ],
)
def test_the_package_loads_with_its_first_attribute(code: str, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected


def test_the_exported_names_are_those_of_the_loaded_module() -> None:
    assert len({*mc.__all__}) == len(mc.__all__)
    assert set(mc.__all__) == {name for name in vars(_api) if not name.startswith("_")}
    listed = next(node for node in ast.walk(ast.parse(Path(mc.__file__).read_text())) if isinstance(node, ast.If))
    imported = [alias.name for each in listed.body if isinstance(each, ast.ImportFrom) for alias in each.names]
    assert sorted(imported) == sorted(mc.__all__)  # what a type checker sees
    assert set(mc.__all__) <= set(dir(mc))
    assert all(getattr(mc, name) is getattr(_api, name) for name in mc.__all__)


@pytest.mark.long
def test_a_pickle_needs_no_import_of_the_package() -> None:
    code = """
import pickle, sys, torch
if sys.argv[1:]:
    print(pickle.load(open(sys.argv[1], "rb")).nnz)
else:
    import magicube_cutlass as mc
    sys.stdout.buffer.write(pickle.dumps(mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)))
"""
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"matrix-{os.getpid()}.pickle"
    path.write_bytes(made.stdout)
    try:
        read = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, check=True)
    finally:
        path.unlink()
    assert read.stdout.strip() == b"64"


def test_choices_are_those_of_the_library() -> None:
    from cute_kernels import jit
    from cute_kernels.integers import check_bits
    from magicube_cutlass.checks import check_stride, check_vector_length

    assert jit.ARCHES == arguments.ARCHES
    for check, known in (
        (check_bits, arguments.BITS),
        (check_vector_length, arguments.LENGTHS),
        (check_stride, arguments.STRIDES),
    ):
        for value in range(1, 70):
            if value in known:
                check(value)
            else:
                with pytest.raises(ValueError):
                    check(value)


@pytest.mark.parametrize("name", [*_COMMANDS, "cache ls", "cache clear"])
def test_every_command_has_help_and_json(name: str) -> None:
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0 and "--json" in result.stdout


@pytest.mark.parametrize("args", [["cache"], ["--help"], []])
def test_help_exits_with_0(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 0 and "Usage: magicube" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args, hint",
    [
        (["spy2"], "Did you mean 'spy'"),
        (["info", "a.smtx", "--strid", "16"], "--stride"),
        (["warmup", "--arch", "sm_90"], "did you mean sm_90a"),
        (["nonsense"], "`magicube --help` lists them"),
        (["layout", "s8_m16n8k3"], "did you mean s8_m16n8k32"),
        (["layout", "--smem", "spmm_gathr"], "`magicube layout --list` lists all"),
        (["info", "{folder}/mask.sntx"], "did you mean"),
    ],
)
def test_a_typing_error_names_the_closest_words(
    args: list[str], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if args[0] == "layout":
        pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")
    (tmp_path / "mask.smtx").write_text("")
    with pytest.raises(SystemExit) as stop:
        main([arg.format(folder=tmp_path) for arg in args])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and hint in told and len(told) < 300 and told.count("\n") == 1, told


@pytest.mark.parametrize("words, found", [("magicube in", ["info"]), ("magicube spmm --device c", ["cpu", "cuda"])])
def test_a_shell_completes_commands_and_values(words: str, found: list[str]) -> None:
    env = {**os.environ, "_MAGICUBE_COMPLETE": "complete_bash", "COMP_WORDS": words,
           "COMP_CWORD": str(len(words.split()) - 1)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "magicube_cutlass"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == found, done.stderr


@pytest.mark.parametrize("absent", ["cuda.core", "cute_kernels.catalog"])
def test_warmup_without_the_cuda_extra_names_it(
    absent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(SystemExit) as stop:
        main(["warmup", "--arch", "sm_90a"])
    assert stop.value.code == 2 and "pip install 'magicube-cutlass[cuda]'" in capsys.readouterr().err


def test_the_smoke_test_of_the_wheel_runs_every_command() -> None:
    from tests.wheel_smoke import COMMANDS

    assert {line.split()[0] for line in COMMANDS if not line.startswith("-")} == {*_COMMANDS, "cache"}
