"""``magicube layout``: the facts, the pictures and the table of bank conflicts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels.atoms import OPERANDS, Atom, atom, atoms
from cute_kernels.layout.bank_conflicts import Access
from magicube_cutlass.cli import app, main
from magicube_cutlass.cli.layout import cells


def run(*args: object) -> str:
    result = CliRunner().invoke(app, ["layout", *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def fail(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["layout", *map(str, args)])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err.startswith("magicube: error: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.mark.parametrize("entry", atoms(), ids=lambda entry: entry.name)
def test_facts_of_every_atom(entry: Atom) -> None:
    text = run(entry.name)
    what = "floats" if entry.floating else "integers"
    assert f"{entry.shape[0]} x {entry.shape[1]} x {entry.shape[2]} of {entry.mma_bits}-bit {what}" in text
    assert all(struct in text for struct in entry.structs.values())
    assert str(entry.a_layout) in text
    assert ("from 4-bit storage" in text) == (entry.bits != entry.mma_bits)


@pytest.mark.parametrize("operand", OPERANDS)
def test_picture_shows_every_thread_and_value(tmp_path: Path, operand: str) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "a.svg"
    assert run("s8_m16n8k16", "--operand", operand, "-o", out) == f"wrote {out}"
    held = re.findall(r"<!-- ([TV]\d+) -->", out.read_text())  # a comment a line of a label
    held = [f"{thread} {value}" for thread, value in zip(held[::2], held[1::2], strict=True)]
    values = atom("s8_m16n8k16").values(operand)
    assert sorted(held) == sorted(f"T{t} V{v}" for t in range(32) for v in range(values))


def test_picture_of_an_operand_in_shared_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "b.png"
    run("s8_m64n8k32", "--operand", "B", "-o", out)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_cells_are_the_layout() -> None:
    entry = atom("s4_m16n8k64")
    thread, value = cells(entry, "A")
    for (m, k), t in np.ndenumerate(thread):
        assert entry.a_layout(int(t), int(value[m, k])) == m + 16 * k
    thread, value = cells(atom("s8_m64n16k32"), "B")
    assert (thread == -1).all() and sorted(value.flat) == list(range(512))


class Config:
    def smem_accesses(self) -> list[Access]:
        lanes = np.arange(32)
        return [Access("rows of B", "store128", lanes * 16), Access("fragments", "ldmatrix.x4", lanes * 128)]


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cute_kernels.catalog")
    module.named_configs = lambda: {"one": Config(), "two": Config()}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cute_kernels.catalog", module)


@pytest.mark.usefixtures("configs")
def test_conflicts_of_a_config() -> None:
    text = run("--smem", "two")
    assert text.startswith("two access kind instructions wavefronts ideal conflicts ")
    assert "rows of B store128 1 4 4 0 fragments ldmatrix.x4 1 32 4 28" in text


@pytest.mark.usefixtures("configs")
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "config must be one of one, two, got 'three'" in fail(capsys, "--smem", "three")
    assert "unknown atom 'm16'; did you mean s8_m8n8k16" in fail(capsys, "m16")
    assert "operand must be one of A, B, C, got 'D'" in fail(capsys, "s8_m16n8k32", "--operand", "D")
    assert "give either an ATOM or --smem CONFIG" in fail(capsys)
    assert "give either an ATOM or --smem CONFIG" in fail(capsys, "s8_m16n8k32", "--smem", "one")
    pytest.importorskip("matplotlib")
    assert "'nonsense' is not supported" in fail(capsys, "s8_m16n8k32", "-o", tmp_path / "a.nonsense")
    assert "No such file" in fail(capsys, "s8_m16n8k32", "-o", tmp_path / "none" / "a.svg")


@pytest.mark.parametrize(
    ("missing", "args", "message"),
    [
        ("cute_kernels.atoms", ("s8_m16n8k32",), "layout needs pycute: pip install 'magicube-cutlass[cuda]'"),
        ("cute_kernels.catalog", ("--smem", "x"), "pip install 'magicube-cutlass[cuda]'"),
        ("matplotlib.figure", ("s8_m16n8k32", "-o", "a.svg"), "pip install 'magicube-cutlass[plots]'"),
    ],
)
def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str, args: tuple[str], message: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert message in fail(capsys, *args)
