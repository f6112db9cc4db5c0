"""Matrices of the Deep Learning Matrix Collection: which are run, what is known of them, and which are done.

The protocol of the SpMM literature: each row of a file is a vector row, so M = rows * V; random values.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import magicube_cutlass as mc
from cute_kernels.dtypes import SPMM_PAIRS
from harness.gpu_results import rounded

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Matrix:
    """A file; ``target``: the sparsity that its folder names."""

    path: Path
    model: str
    method: str
    target: float

    @classmethod
    def at(cls, path: Path) -> Matrix:
        model, method, target = path.parts[-4:-1]
        return cls(path, model, method, float(target))

    @property
    def name(self) -> str:
        return "/".join(self.path.parts[-4:]).removesuffix(".gz").removesuffix(".smtx")


def folder(given: Path | None = None) -> Path:
    """Where the matrices are; ``SystemExit`` in one line where they are not."""
    found = given or Path(os.environ.get("MAGICUBE_DATA", ROOT.parent / "shared" / "data")) / "dlmc" / "matrices"
    if not found.is_dir():
        raise SystemExit(
            f"no DLMC matrices at {found}: unpack https://storage.googleapis.com/sgk-sc2020/dlmc.tar.gz, gzip its "
            ".smtx files under dlmc/matrices, and set MAGICUBE_DATA to the folder that holds dlmc"
        )
    return found


def sample(per_group: int, seed: int = 0, root: Path | None = None) -> list[Matrix]:
    """``per_group`` matrices of each model, method and sparsity, the first of every group before the second."""
    groups: dict[tuple[str, ...], list[Path]] = {}
    for path in sorted(folder(root).glob("*/*/*/*.smtx*")):
        groups.setdefault(path.parts[-4:-1], []).append(path)
    picked = []
    for (model, method, target), paths in groups.items():
        random.Random(f"{seed} {model} {method} {target}").shuffle(paths)
        picked.append([Matrix.at(path) for path in paths[:per_group]])
    return [found[turn] for turn in range(per_group) for found in picked if turn < len(found)]


def listed(names: Path, root: Path | None = None) -> list[Matrix]:
    """The matrices that a file names, one a line, as ``rn50_matrices.txt`` of the collection does."""
    there = folder(root)
    found, missing = [], []
    for line in filter(None, map(str.strip, names.read_text().splitlines())):
        stem = line.removesuffix(".gz").removesuffix(".smtx")
        paths = [path for end in (".smtx.gz", ".smtx") if (path := there / (stem + end)).is_file()]
        found += [Matrix.at(path) for path in paths[:1]]
        missing += [] if paths else [line]
    if missing:
        raise SystemExit(f"{len(missing)} of the matrices that {names} names are not in {there}, first {missing[0]}")
    return found


def pairs_of(text: str | None) -> tuple[tuple[int, int], ...] | None:
    """Widths that ``L8-R8,L16-R4`` names; ``all`` are those of Table IV."""
    if text is None:
        return None
    known = {f"L{left}-R{right}": (left, right) for left, right in SPMM_PAIRS}
    if wrong := [name for name in text.split(",") if name != "all" and name not in known]:
        raise SystemExit(f"--pairs must be 'all' or of {', '.join(known)}, got {wrong[0]!r}")
    return SPMM_PAIRS if "all" in text.split(",") else tuple(known[name] for name in text.split(","))


def of_length(pattern: mc.Pattern, vector_length: int) -> mc.Pattern:
    """The same vectors, longer or shorter ones."""
    shape = (pattern.vector_rows * vector_length, pattern.shape[1])
    return mc.Pattern(shape, vector_length, pattern.row_offsets, pattern.col_indices)


def facts(matrix: Matrix, pattern: mc.Pattern) -> dict[str, Any]:
    """What a results file says about a matrix; ``skew``: its longest vector row over the mean one."""
    lengths = pattern.row_lengths.double()
    mean = max(float(lengths.mean()), 1e-9)
    return {"name": matrix.name, "model": matrix.model, "method": matrix.method, "target": matrix.target,
            "rows": pattern.vector_rows, "columns": pattern.shape[1], "vectors": pattern.vectors,
            "skew": rounded(float(lengths.max()) / mean), "empty_rows": int((lengths == 0).sum())}  # fmt: skip


Record = dict[str, list[dict[str, Any]]]


class Journal:
    """Records of a run by name, a line each in a file beside ``out``: a run that was stopped goes on with the next.

    ``head`` says what the records were measured with; ``SystemExit`` if those of the file were measured otherwise.
    ``fresh``: those of the file go.
    """

    def __init__(self, out: Path, head: dict[str, Any], fresh: bool = False) -> None:
        self.path = out.with_suffix(".jsonl")
        if fresh:
            self.path.unlink(missing_ok=True)
        self.records: dict[str, Record] = {}
        lines = self.path.read_text().splitlines(keepends=True) if self.path.is_file() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may have been cut
        if whole and (other := {key for key in head.keys() | whole[0] if head.get(key) != whole[0].get(key)}):
            raise SystemExit(f"{self.path} is of a run with another {', '.join(sorted(other))}: --fresh starts again")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(line) + "\n" for line in whole or [head]))
        for line in whole[1:]:
            self.records[line.pop("record")] = line
        if self.records:
            print(f"{len(self.records)} records are in {self.path}; --fresh measures them again")

    def __call__(self, name: str, make: Callable[[], Record]) -> Record:
        """The record called ``name``, made unless it is there."""
        if name not in self.records:
            self.records[name] = made = make()
            with self.path.open("a") as file:
                file.write(json.dumps({"record": name, **made}) + "\n")
        return self.records[name]

    def add_to(self, results: dict[str, Any]) -> None:
        """Append all records to the lists of ``results``; rows of a matrix get its number."""
        for record in self.records.values():
            at = {"matrix": len(results["matrices"])} if "matrices" in record else {}
            for key, rows in record.items():
                numbered = key in ("spmm", "sddmm", "others", "sparse")
                results[key] += [at | row if numbered else row for row in rows]
