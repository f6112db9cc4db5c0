"""The examples, the README's code and the benchmark run as a stranger would run them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import magicube_cutlass as mc
from tests.helpers import disassemble

ROOT = Path(__file__).resolve().parents[1]


def script(*args: object, **environment: str) -> str:
    command = [sys.executable, *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quickstart_is_accurate() -> None:
    found = re.search(r"relative error against float32: ([\d.]+)", script("examples/quickstart.py"))
    assert found is not None and float(found[1]) < 0.03


def test_demo_prints_ten_lines_and_writes_nothing_into_the_project(tmp_path: Path) -> None:
    text = script("examples/demo.py", "--quick", MAGICUBE_DATA=str(tmp_path), TMPDIR=str(tmp_path))
    rows = [line.partition(" ") for line in text.splitlines()]
    names = ["machine", "matrices", "exact", "speed", "break-even", "real", "bytes", "tolerance", "picture", "next"]
    assert [name for name, _, _ in rows] == names
    said = {name: rest.strip() for name, _, rest in rows}
    assert "no DLMC sample at" in said["matrices"] and "MAGICUBE_DATA" in said["matrices"]
    assert said["exact"].startswith("8 products of 4 kinds")
    assert re.search(r"times (faster|slower) than .* fastest dense", said["speed"])
    bound, error = map(float, re.findall(r"(?:bound|measured) (\S+?),?(?= |$)", said["tolerance"]))
    assert error <= bound <= 1e-3
    if importlib.util.find_spec("matplotlib"):
        assert Path(said["picture"]).is_relative_to(tmp_path) and Path(said["picture"]).stat().st_size > 0


def test_demo_s_picture_marks_the_break_even(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "examples")
    demo = load(ROOT / "examples" / "demo.py")
    from magicube_cutlass.bench.figures import overlaps

    points = [(0.1, 1.0, 4.0, "a"), (0.3, 3.0, 4.0, "a"), (0.5, 5.0, 4.0, "b")]
    assert demo.break_even(points) == pytest.approx(0.4)
    assert demo.break_even(points[:2]) is None and demo.break_even(points[2:]) == 0.5
    for shown in (points, points[:2]):
        figure = demo.figure_of(shown, "a machine")
        assert not overlaps(figure) and ("0.40" in figure.axes[0].get_title()) == (len(shown) == 3)
        assert all("(" in label for label in (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()))


def test_shipped_data_are_what_the_generator_makes() -> None:
    maker = load(ROOT / "examples" / "data" / "make_data.py")
    for name, (rows, cols, sparsity, distribution) in maker.FILES.items():
        stored = mc.read_smtx(ROOT / "examples" / "data" / name)
        assert stored.equals(mc.random_pattern(rows, cols, sparsity, 1, distribution, seed=7))


def test_readme_code_runs_and_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    shown = dict(re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL))
    assert blocks and list(shown) == blocks[:1]
    for block in blocks:
        scope: dict[str, object] = {}
        exec(block, scope)
        printed = capsys.readouterr().out
        assert printed == shown.get(block, printed)
        results = [value for name, value in scope.items() if name in ("C", "o")]
        assert results and all(isinstance(value, torch.Tensor) and value.isfinite().all() for value in results)


# Pages with tests of their own: one quotes an example, one needs other packages (tests/nn/test_hook_transformers.py).
OWN = ("add-an-mma-shape", "use-with-other-libraries")
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "```python" in page.read_text()]
PAGES = [page for page in PAGES if page.stem not in OWN]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_the_docs_runs(page: Path) -> None:
    scope: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):  # one after the other
        exec(block, scope)


def test_benchmark_checks_and_writes_what_the_page_renders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    out = tmp_path / "cpu.json"
    script("benchmarks/cpu_spmm.py", "--quick", "--out", out)
    table = load(ROOT / "benchmarks" / "README_table.py")
    page = tmp_path / "page.md"
    start = "<!-- cpu-table: benchmarks/README_table.py writes this -->"
    page.write_text(f"before\n{start}\nold\n<!-- end cpu-table -->\nafter\n")
    table.update(table.CPU, table.render(table.json.loads(out.read_text())), page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| 256 | 0.05 |" in text and "one thread" in text


def test_the_choice_is_near_the_best_config_that_was_timed() -> None:
    pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")
    text = script("benchmarks/choose.py", "--judge")
    found = re.search(r"(\d+) cases: (\d+) picks within 10% .* worst takes ([\d.]+) times", text)
    assert found is not None, text
    assert int(found[1]) >= 50 and int(found[2]) >= 0.9 * int(found[1]) and float(found[3]) <= 1.5


def test_the_pages_on_performance_show_the_results_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = load(ROOT / "benchmarks" / "README_table.py")
    cpu, gpu = ((ROOT / "docs" / "performance" / f"{name}.md").read_text() for name in ("cpu", "gpu"))
    assert table.render_cpu() in cpu and table.render_layers() in cpu
    assert table.render_gpu(table.json.loads((table.RESULTS / "spmm_h200.json").read_text())) in gpu
    page = table.render_dlmc(table.json.loads((table.RESULTS / "dlmc_h200.json").read_text()))
    assert "| magicube e4m3 x e4m3 |" in page and "BSR fp16 32 |" in page


def test_the_readme_and_the_pages_for_users_show_the_results_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = load(ROOT / "benchmarks" / "reader_tables.py")
    for section, page, render in table.SECTIONS:
        assert render() in (ROOT / page).read_text(), section


def test_the_guides_show_the_results_files(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # a table asks another of its scripts
    table = load(ROOT / "benchmarks" / "README_table.py")
    for section, stem, render, guide in table.SECTIONS:
        text = (ROOT / "docs" / f"{guide}.md").read_text()
        assert render(table.json.loads((table.RESULTS / f"{stem}.json").read_text())) in text, section


@pytest.fixture
def new_mma_shape() -> Iterator[ModuleType]:
    pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")
    from cute_kernels.atoms import unregister_atom

    example = load(ROOT / "examples" / "new_mma_shape.py")
    yield example
    unregister_atom(example.ATOM.name)


@pytest.mark.long
def test_new_mma_shape_compiles_into_every_kernel(new_mma_shape: ModuleType) -> None:
    pytest.importorskip("cuda.core")
    from cute_kernels.jit import compile_unit

    binaries = []
    new_mma_shape.compile_unit = lambda unit: binaries.append(compile_unit(unit)) or binaries[-1]
    new_mma_shape.compile_kernels("sm_90a")
    assert [binary.title.split("-")[0] for binary in binaries] == ["spmm_gather", "spmm_panel", "sddmm"]
    for binary in binaries:
        instructions = disassemble(binary.code).count("IMMA.16832.S8.S8")
        assert instructions and instructions % 2 == 0 and binary.usage.stack_bytes == binary.usage.spill_bytes == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_new_mma_shape_is_exact(device: str, new_mma_shape: ModuleType) -> None:
    new_mma_shape.run(device)


def test_page_on_mma_shapes_quotes_the_example() -> None:
    example = (ROOT / "examples" / "new_mma_shape.py").read_text()
    page = (ROOT / "docs" / "how-to" / "add-an-mma-shape.md").read_text()
    quoted = re.findall(r"```(?:cpp|python)\n(.*?)```", page, re.DOTALL)
    assert quoted
    for block in quoted:
        assert block in example
