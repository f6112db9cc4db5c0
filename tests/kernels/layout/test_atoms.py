"""The table of mma atoms against PTX's published fragments, CuTe's own traits, and the machine code of each chip."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from pycute import Layout

from cute_kernels import atoms as table
from cute_kernels.atoms import OPERANDS, Atom, atom, atoms, declaration, register_atom, runs_on, unregister_atom
from tests.helpers import disassemble

NAMES = [entry.name for entry in atoms()]
WRONG_IN_CUTE = ("s4_m16n8k32", "B")  # CUTLASS 4.2: a stride of 32 where PTX has 64

DenseArg = Callable[[int, int, int], tuple[int, int]]


def tall(i: int, run: int) -> int:
    """PTX's row term: 8 more for the odd ones among the runs of ``run`` values."""
    return 8 * (i // run % 2)


def accumulator(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if i < 2 else g + 8, 2 * t + (i & 1))


# (g, t, i) -> (row, column), copied from the PTX ISA; g = groupID, t = threadID_in_group
PTX: dict[str, dict[str, DenseArg]] = {
    "s8_m16n8k32": {
        "A": lambda g, t, i: (g if i < 4 or 8 <= i < 12 else g + 8, 4 * t + (i & 3) + (16 if i >= 8 else 0)),
        "B": lambda g, t, i: (g, 4 * t + (i & 3) + (16 if i >= 4 else 0)),
        "C": accumulator,
    },
    "s8_m16n8k16": {
        "A": lambda g, t, i: (g if i < 4 else g + 8, 4 * t + (i & 3)),
        "B": lambda g, t, i: (g, 4 * t + i),
        "C": accumulator,
    },
    "s8_m8n8k16": {
        "A": lambda g, t, i: (g, 4 * t + i),
        "B": lambda g, t, i: (g, 4 * t + i),
        "C": lambda g, t, i: (g, 2 * t + i),
    },
    "s4_m16n8k64": {
        "A": lambda g, t, i: (g if i < 8 or 16 <= i < 24 else g + 8, 8 * t + (i & 7) + (32 if i >= 16 else 0)),
        "B": lambda g, t, i: (g, 8 * t + (i & 7) + (32 if i >= 8 else 0)),
        "C": accumulator,
    },
    "s4_m16n8k32": {
        "A": lambda g, t, i: (g if i < 8 else g + 8, 8 * t + (i & 7)),
        "B": lambda g, t, i: (g, 8 * t + (i & 7)),
        "C": accumulator,
    },
    "s4_m8n8k32": {
        "A": lambda g, t, i: (g, 8 * t + i),
        "B": lambda g, t, i: (g, 8 * t + i),
        "C": lambda g, t, i: (g, 2 * t + i),
    },
    # wgmma: g = lane / 4 + 16 * warp
    "s8_m64n8k32": {
        "A": lambda g, t, i: (g + tall(i, 4), 4 * t + i % 4 + 16 * (i // 8)),
        "C": lambda g, t, i: (g + tall(i, 2), 2 * t + i % 2 + 8 * (i // 4)),
    },
}
# 16-bit operands of m16n8k16; k goes on in the second one of two in a row
PTX["f16_m16n8k32"] = {
    "A": lambda g, t, i: (g + tall(i, 2), 2 * t + i % 2 + 8 * (i // 4)),
    "B": lambda g, t, i: (g, 2 * t + i % 2 + 8 * (i // 2)),
    "C": accumulator,
}
PTX["f16_m16n8k16"] = PTX["bf16_m16n8k16"] = PTX["bf16_m16n8k32"] = PTX["f16_m16n8k32"]
PTX["int4_as_int8_m16n8k32"] = PTX["fp8_m16n8k32"] = PTX["s8_m16n8k32"]
PTX["s8_m64n16k32"] = PTX["s8_m64n8k32"]


@pytest.mark.parametrize(("name", "operand"), list(product(NAMES, OPERANDS)))
def test_layout_is_the_published_one(name: str, operand: str) -> None:
    entry = atom(name)
    layout, (rows, columns) = entry.layout(operand), entry.extent(operand)
    seen = set()
    for thread, value in product(range(layout[0].size()), range(layout[1].size())):
        warp, lane = divmod(thread, 32)
        at = layout(thread, value)
        seen.add((at % rows, at // rows))
        if operand in PTX[name]:
            assert (at % rows, at // rows) == PTX[name][operand](lane // 4 + 16 * warp, lane % 4, value)
    assert seen == set(product(range(rows), range(columns)))
    assert entry.b_shared == (entry.threads == 128)
    assert operand in PTX[name] or (entry.b_shared and operand == "B")


def cpp(layout: Layout) -> str:
    def spell(tree: object, name: str) -> str:
        if isinstance(tree, tuple):
            return f"cute::{name}<{', '.join(spell(part, name) for part in tree)}>"
        return f"cute::Int<{tree}>"

    return f"cute::Layout<{spell(layout.shape, 'Shape')}, {spell(layout.stride, 'Stride')}>"


def traits_checks(entries: tuple[Atom, ...]) -> str:
    """A unit that compiles only if CuTe's traits of all signs have the entries' shapes and layouts."""
    headers = {f"#include <{header}>" for entry in entries for header in entry.headers}
    lines = [*sorted(headers), "template <class A, class B> constexpr bool same() {"]
    lines += ["  return cute::is_same_v<decltype(cute::coalesce(A{})), decltype(cute::coalesce(B{}))>; }"]
    for entry in entries:
        m, n, k = entry.shape
        for struct in entry.structs.values():
            traits = f"cute::MMA_Traits<{struct if '::' in struct else f'cute::{struct}'}>"
            shape = f"cute::Shape<cute::Int<{m}>, cute::Int<{n}>, cute::Int<{k}>>"
            lines += [f"static_assert(cute::is_same_v<{traits}::Shape_MNK, {shape}>);"]
            lines += [
                f"static_assert({'!' * ((entry.name, operand) == WRONG_IN_CUTE)}"
                f'same<{traits}::{operand}Layout, {cpp(entry.layout(operand))}>(), "{entry.name} {operand}");'
                for operand in OPERANDS
            ]
    return "\n".join([*lines, "__global__ void probe(int* out) { *out = 1; }"])


def test_layouts_are_those_of_cutes_traits() -> None:
    pytest.importorskip("cuda.core")
    from cute_kernels.jit import CompileError, Unit, compile_unit

    assert compile_unit(Unit(traits_checks(atoms()), "probe", "sm_90a")).code
    swapped = replace(atom("s8_m16n8k32"), b_layout=Layout(((4, 8), (4, 2)), ((32, 1), (8, 64))))
    with pytest.raises(CompileError, match="s8_m16n8k32 B"):
        compile_unit(Unit(traits_checks((swapped,)), "probe", "sm_90a"))


SHORT = {"float16": "f16", "bfloat16": "bf16"}


@pytest.mark.parametrize("name", NAMES)
def test_structs_are_in_the_headers_with_these_signs(name: str) -> None:
    library = pytest.importorskip("cutlass_library")
    folder = Path(library.__file__).parent / "source" / "include" / "cute" / "arch"
    entry = atom(name)
    stem = "mma_sm90_gmma" if entry.b_shared else "mma_sm8"
    text = "".join(path.read_text() for path in sorted(folder.glob(f"{stem}*.hpp")))
    m, n, k = entry.shape
    assert len(entry.structs) == (1 if entry.mma_bits == 16 else 4)
    for key, named in entry.structs.items():
        struct = named.removeprefix("magicube::MmaKPair<cute::").removesuffix(">")
        k = entry.shape[2] // (1 if struct == named else 2)
        body = text.split(f"struct {struct.replace('SM90_', 'MMA_')}\n", 1)[1].split("\n};", 1)[0]
        kinds = [
            SHORT.get(each, each) if isinstance(each, str) else f"{'s' if each else 'u'}{entry.mma_bits}"
            for each in key
        ]
        sums = "f32" if entry.floating else "s32"
        assert re.search(rf"m{m}n{n}k{k}\.(row\.col\.)?{sums}\.{kinds[0]}\.{kinds[1]}\b", body), struct


def calls(entries: tuple[Atom, ...]) -> str:
    """A kernel that executes each warp's instruction once."""
    lines = [f"#include <{header}>" for entry in entries for header in entry.headers]
    lines += ["__global__ void probe(unsigned* x) {"]
    for entry in entries:
        a, b, c = (entry.registers(operand) for operand in OPERANDS)
        sums, kind = [f"d[{i}]" for i in range(c)], "float" if entry.floating else "unsigned"
        given = [*sums, *(f"x[{i}]" for i in range(a)), *(f"x[{16 + i}]" for i in range(b)), *sums]
        struct = next(iter(entry.structs.values()))
        struct = struct if "::" in struct else f"cute::{struct}"
        lines += [f"  {{ {kind} d[{c}] = {{}}; {struct}::fma({', '.join(given)});"]
        lines += [f"    for (int i = 0; i < {c}; ++i) reinterpret_cast<{kind}*>(x)[i] = d[i]; x += 64; }}"]
    return "\n".join([*lines, "}"])


@pytest.mark.parametrize(
    ("arch", "native"),
    [
        ("sm_80", ["16832.S8", "16816.S8", "8816.S8", "16864.S4", "16832.S4", "8832.S4"]),
        pytest.param(
            "sm_89",
            ["16832.S8", "16816.S8", "8816.S8", "16864.S4", "16832.S4", "8832.S4", "E4M3"],
            marks=pytest.mark.long,
        ),
        ("sm_90a", ["16832.S8", "16816.S8", "8816.S8"]),
        pytest.param("sm_120a", ["16832.S8", "16816.S8", "E4M3"], marks=pytest.mark.long),
    ],
)
def test_native_atoms_are_one_instruction_each(arch: str, native: list[str]) -> None:
    pytest.importorskip("cuda.core")
    from cute_kernels.jit import Unit, compile_unit

    warps = tuple(entry for entry in atoms(arch) if not entry.b_shared)
    entries = tuple(entry for entry in warps if entry.bits == entry.mma_bits)
    sass = disassemble(compile_unit(Unit(calls(entries), "probe", arch)).code)
    kinds = [f"IMMA.{kind}.{kind[-2:]}" for kind in native if kind != "E4M3"]
    assert sorted(re.findall(r"IMMA\.\w+\.\w+\.\w+", sass)) == sorted(kinds)
    # of 16-bit floats one a type, and two where it is twice along k
    assert sorted(re.findall(r"HMMA\.[\w.]+", sass)) == ["HMMA.16816.F32"] * 3 + ["HMMA.16816.F32.BF16"] * 3
    assert re.findall(r"QMMA\.[\w.]+", sass) == ["QMMA.16832.F32.E4M3.E4M3"] * ("E4M3" in native)
    assert "CALL.REL" not in sass


def test_emulated_atoms_are_calls_or_conversions() -> None:
    pytest.importorskip("cuda.core")
    from cute_kernels.jit import Unit, compile_unit

    assert not runs_on(atom("s4_m16n8k64"), "sm_90a")
    sass = disassemble(compile_unit(Unit(calls((atom("s4_m16n8k64"),)), "probe", "sm_90a")).code)
    assert "CALL.REL" in sass and ".S4" not in sass
    floats = atom("fp8_m16n8k32")
    assert not runs_on(floats, "sm_90a")
    sass = disassemble(compile_unit(Unit(calls((floats,)), "probe", "sm_90a")).code)
    assert "QMMA" not in sass and sass.count("HMMA.16816.F32") == 2 and "F2FP.F16.E4M3.UNPACK_B" in sass


def test_arch_is_a_target_or_a_capability() -> None:
    group, four = atom("s8_m64n8k32"), atom("s4_m16n8k64")
    assert runs_on(group, "sm_90a") and runs_on(group, 90)
    assert not runs_on(group, "sm_90") and not runs_on(group, "sm_100a") and not runs_on(group, 80)
    assert [arch for arch in (80, 86, 89, 90, 100, 103, 120) if runs_on(four, arch)] == [80, 86, 89]
    assert runs_on(atom("int4_as_int8_m16n8k32"), "sm_120a") and runs_on(four, "compute_80")
    assert group in atoms("sm_90a") and group not in atoms("sm_80") and set(atoms(80)) < set(atoms())
    with pytest.raises(ValueError, match="arch must look like 'sm_90a' or 90, got 'hopper'"):
        runs_on(group, "hopper")


def test_the_error_for_an_unknown_atom_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown atom 'm16n8k33', known are s8_m16n8k32, "):
        atom("m16n8k33")
    with pytest.raises(ValueError, match="operand must be one of A, B, C, got 'D'"):
        atom("s8_m16n8k32").layout("D")


def test_registering_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_atoms", dict(table._atoms))
    mine = replace(atom("s8_m16n8k32"), name="mine", source="struct Mine {};")
    assert register_atom(mine) is mine
    assert register_atom(replace(mine)) is mine and atom("mine") is mine and atoms()[-1] is mine
    with pytest.raises(ValueError, match="'mine' is registered already with other fields"):
        register_atom(replace(mine, source="struct Other {};"))
    unregister_atom("mine")
    assert register_atom(replace(mine, source="struct Other {};")).source == "struct Other {};"
    unregister_atom("mine")
    with pytest.raises(ValueError, match="unknown atom 'mine'"):
        unregister_atom("mine")


A = atom("s8_m16n8k32").a_layout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a b"}, "name must be letters"),
        ({"shape": (16, 8)}, "shape of mine must be three powers of two"),
        ({"shape": (16, 8, 24)}, "shape of mine must be three powers of two"),
        ({"shape": (16, 8, 64)}, "a_layout of mine must have 16 x 64 = 1024 elements, got 512"),
        ({"mma_bits": 16}, "bits <= mma_bits of mine"),
        ({"mma_bits": 4}, "bits <= mma_bits of mine"),
        ({"structs": {("e4m3", "float16"): "S"}}, "must map formats of e5m2, e4m3, got the key ('e4m3', 'float16')"),
        ({"structs": {("e4m3", "e4m3"): "S"}, "bits": 4}, "bits <= mma_bits of mine must be in (8, 16)"),
        ({"threads": 64}, "threads of mine must be 32 or 128, got 64"),
        ({"threads": 128}, "a_layout of mine must have 128 threads, got 32"),
        ({"structs": {}}, "at least one mix"),
        ({"structs": {True: "S"}}, "got the key True"),
        ({"structs": {(True, True): "S; int x"}}, "names of C++ structs, got 'S; int x'"),
        ({"archs": ("sm_90",)}, "archs of mine must look like '80' or '90a', got 'sm_90'"),
        ({"a_layout": Layout(512)}, "a_layout of mine must have two modes, thread and value, got 1"),
        ({"a_layout": Layout(A.shape, ((64, 1), (16, 8, 128)))}, "each of 512 elements once, it reaches 384 of them"),
        ({"a_layout": Layout(A.shape, ((64, 1), (16, 8, 512)))}, "each of 512 elements once, it reaches 256 of them"),
    ],
)
def test_what_cannot_be_an_atom_is_refused(change: dict[str, object], message: str) -> None:
    wrong = replace(atom("s8_m16n8k32"), **{"name": "mine", **change})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape(message)):
        register_atom(wrong)
    assert "mine" not in [entry.name for entry in atoms()]


def test_atoms_are_keys_and_travel() -> None:
    assert len({entry: None for entry in atoms()}) == len(NAMES)
    for entry in atoms():
        assert pickle.loads(pickle.dumps(entry)) == entry and hash(pickle.loads(pickle.dumps(entry))) == hash(entry)
    assert [atom("s8_m16n8k32").registers(operand) for operand in OPERANDS] == [4, 2, 4]
    assert [atom("s4_m16n8k64").registers(operand) for operand in OPERANDS] == [4, 2, 4]
    assert [atom("f16_m16n8k32").registers(operand) for operand in OPERANDS] == [8, 4, 4]
    assert [atom("s8_m64n16k32").registers(operand) for operand in OPERANDS] == [4, 0, 8]


def test_declaration_defines_one_type_a_mix_of_signs() -> None:
    mine = replace(
        atom("int4_as_int8_m16n8k32"),
        structs={(True, False): "SM80_16x8x32_S32S8U8S32_TN", (False, False): "user::Mine<int>"},
        headers=("cute/layout.hpp", "mine.hpp"),
        source="\nnamespace user { template <class> struct Mine; }\n",
    )
    assert declaration(mine) == (
        "#include <cute/layout.hpp>\n#include <mine.hpp>\nnamespace user { template <class> struct Mine; }\n"
        "namespace magicube {\ntemplate <bool kSigned> struct Integer;\ntemplate <class Left, class Right> struct AtomFor;\n"
        "template <> struct AtomFor<Integer<true>, Integer<false>> { using type = cute::SM80_16x8x32_S32S8U8S32_TN; };\n"
        "template <> struct AtomFor<Integer<false>, Integer<false>> { using type = user::Mine<int>; };\n"
        "struct AtomInfo { static constexpr int kM = 16, kN = 8, kK = 32, kBits = 8, kThreads = 32; };\n"
        "}  // namespace magicube\n"
    )
