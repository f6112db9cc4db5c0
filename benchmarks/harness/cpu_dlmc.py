"""Products of the Deep Learning Matrix Collection's matrices on one CPU thread: the engine against float32 and int8.

SpMM and SDDMM of Table IV's pairs with float32 output, equal to the exact result in every element before they are
timed. Baselines have the same integers: float32 and torch's dynamic int8 layer as dense products, once for a shape;
CSR in float32 by MKL (``--mkl``), scipy and torch, once for a matrix. Times are microseconds, the best of some rounds.
"""

from __future__ import annotations

import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.cpu.engine import isa
from cute_kernels.dtypes import SDDMM_PAIRS
from cute_kernels.integers import int_range
from harness import mkl_csr
from harness.dlmc_data import Journal, Matrix, Record, facts, of_length, pairs_of
from harness.gpu_results import RESULTS, rounded, save
from harness.timing import measure
from magicube_cutlass.bench.problems import dense_baselines
from magicube_cutlass.cli.environment import provenance
from magicube_cutlass.reference import at_vectors

VECTORS = (8, 4, 2)
COLUMNS = 256  # of B, and K of SDDMM
SCALE = 2.0**-7  # a power of two, so that results are the exact integers rounded once
BASE = ((8, 8),)
BUDGET, ROUNDS = 0.02, 3  # seconds a call, and at least so many rounds
CLOSE = {"torch dynamic int8": 0.05, "bfloat16": 0.05}  # of the largest result; others 1e-5

Shape = tuple[str, int, int, int]


def ints(shape: tuple[int, int], bits: int, seed: int) -> Tensor:
    """Uniform integers of the whole signed range."""
    low, high = int_range(bits, True)
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def operands(pattern: mc.Pattern, pair: tuple[int, int]) -> tuple[mc.SRBCRS, mc.QuantTensor]:
    """A on the pattern and B (K, N), each with one scale."""
    vectors, scale = ints((pattern.vectors, pattern.vector_length), pair[0], 1), torch.tensor(SCALE)
    a = mc.SRBCRS.from_pattern(pattern, vectors, bits=pair[0], scale=scale)
    return a, mc.QuantTensor.from_ints(ints((pattern.shape[1], COLUMNS), pair[1], 2), bits=pair[1], scale=scale)


def checked_spmm(pattern: mc.Pattern, pair: tuple[int, int]) -> Callable[[], object]:
    """The engine's product, after a comparison of every element."""
    a, b = operands(pattern, pair)
    exact = a.to_dense(dequantize=False).double() @ b.ints().double()  # exact below 2^53
    out = torch.full((a.shape[0], COLUMNS), torch.nan)
    mc.spmm(a, b, out=out)
    _compare(out, exact)
    return partial(mc.spmm, a, b, out=out)


def checked_sddmm(pattern: mc.Pattern, pair: tuple[int, int]) -> Callable[[], object]:
    """The engine's sampled product X Y^T, after a comparison of every element."""
    (m, n), scale = pattern.shape, torch.tensor(SCALE)
    x, y = (
        mc.QuantTensor.from_ints(ints((rows, COLUMNS), bits, seed), bits=bits, scale=scale)
        for seed, (rows, bits) in enumerate(zip((m, n), pair, strict=True))
    )
    call = partial(mc.sddmm, x, y, pattern, out_dtype=torch.float32)
    _compare(call().vectors(), at_vectors(x.ints().double() @ y.ints().double().T, pattern))
    return call


def _compare(found: Tensor, exact: Tensor) -> None:
    wrong = int((found != exact.float() * SCALE**2).sum())
    if wrong:
        raise ArithmeticError(f"{wrong} of {found.numel()} elements are wrong")


def dense_times(a: mc.SRBCRS, b: mc.QuantTensor) -> dict[str, float]:
    """Times of the dense products of the same integers."""
    calls = dense_baselines(a, b)
    exact = a.to_dense(dequantize=False).double() @ b.ints().double()
    return _timed(calls, exact)


def csr_calls(a: mc.SRBCRS, b: mc.QuantTensor, mkl: Any) -> dict[str, Callable[[], object]]:
    """CSR products in float32; scipy's and torch's beside MKL's, as each is the fastest somewhere."""
    csr, right = a.to_scipy(dequantize=False).astype("float32"), b.ints().float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR is in beta
        start, columns, values = (torch.from_numpy(array) for array in (csr.indptr, csr.indices, csr.data))
        tensor = torch.sparse_csr_tensor(start, columns, values, size=csr.shape, check_invariants=False)
    found: dict[str, Callable[[], object]] = {
        "scipy CSR float32": lambda: csr @ right.numpy(),
        "torch CSR float32": lambda: tensor @ right,
    }
    return found | ({} if mkl is None else {"MKL CSR float32": mkl_csr.CsrProduct(mkl, csr, right.numpy())})


def _timed(calls: dict[str, Callable[[], object]], exact: Tensor) -> dict[str, float]:
    largest = float(exact.abs().max())
    for name, call in calls.items():
        found = call()
        given = found if isinstance(found, Tensor) else torch.as_tensor(found)  # numpy has no bfloat16
        error = float((given.double().reshape(-1) - _as(name, exact)).abs().max())
        if error > CLOSE.get(name, 1e-5) * largest:
            raise ArithmeticError(f"{name} is off by {error / max(largest, 1):.2g} of the largest result")
    return _best(calls)


def _as(name: str, exact: Tensor) -> Tensor:
    """The result as a call returns it: a layer's rows are the columns of C."""
    return (exact.T if name == "torch dynamic int8" else exact).reshape(-1)


def _best(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    return {
        name: rounded(1e6 * timing.best)
        for name, timing in measure(calls, budget=BUDGET, min_runs=ROUNDS, max_runs=50).items()
    }


class Baselines:
    """Times of dense products by shape, measured where a shape is met first."""

    def __init__(self, journal: Journal) -> None:
        rows = (row for record in journal.records.values() for row in record.get("dense", []))
        self.rows: dict[Shape, dict[str, Any]] = {(row["kind"], *row["shape"]): row for row in rows}

    def of(self, shape: Shape, a: mc.SRBCRS, b: mc.QuantTensor) -> dict[str, float]:
        """Times of ``shape`` (kind, M, K, N)."""
        if shape not in self.rows:
            self.rows[shape] = {"kind": shape[0], "shape": list(shape[1:]), "us": dense_times(a, b)}
        times: dict[str, float] = self.rows[shape]["us"]
        return times


def rows_of(
    calls: dict[str, Callable[[], object]], v: int, size: dict[str, int], others: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """A row a pair; "times X": how many times as fast as X ours is."""
    for pair, us in _best(calls).items():
        yield {"pair": pair, "v": v, **size, "us": us, **{f"times {x}": rounded(t / us) for x, t in others.items()}}


def run_matrix(matrix: Matrix, pairs: tuple[tuple[int, int], ...], dense: Baselines, mkl: Any) -> Record:
    """All products of a matrix: every pair at V = 8, L8-R8 alone at the shorter lengths if there are others."""
    file, seen = mc.read_smtx(matrix.path), len(dense.rows)
    found: Record = {"matrices": [facts(matrix, file)], "spmm": [], "sddmm": [], "sparse": []}
    for v in VECTORS:
        pattern = of_length(file, v)
        m, k = pattern.shape
        chosen = [pair for pair in pairs if v == VECTORS[0] or pair in BASE]
        calls = {f"L{x}-R{y}": checked_spmm(pattern, (x, y)) for x, y in chosen}
        a, b = operands(pattern, BASE[0])
        exact = a.to_dense(dequantize=False).double() @ b.ints().double()
        sparse = _timed(csr_calls(a, b, mkl), exact)
        found["sparse"].append({"v": v, "n": COLUMNS, "us": sparse})
        found["spmm"] += rows_of(calls, v, {"n": COLUMNS}, dense.of(("spmm", m, k, COLUMNS), a, b) | sparse)
        calls = {f"L{x}-R{y}": checked_sddmm(pattern, (x, y)) for x, y in chosen if (x, y) in SDDMM_PAIRS}
        whole = mc.SRBCRS.from_dense(ints((m, COLUMNS), 8, 1), vector_length=v, bits=8)
        right = mc.QuantTensor.from_ints(ints((COLUMNS, k), 8, 2), bits=8)
        found["sddmm"] += rows_of(calls, v, {"inner": COLUMNS}, dense.of(("sddmm", m, COLUMNS, k), whole, right))
    return found | {"dense": list(dense.rows.values())[seen:]}


def run_cpu(matrices: list[Matrix], args: Namespace, start: float) -> None:
    """Measure, each matrix once, on one thread."""
    torch.set_num_threads(1)
    out, end = args.out or RESULTS / "dlmc_cpu.json", start + args.seconds
    machine, pairs = provenance() | {"threads": "1"}, pairs_of(args.pairs) or BASE
    results: dict[str, Any] = {
        "machine": machine,
        "setting": {
            "out": "float32", "pattern": "a row of the file is a vector row", "isa": isa(), "threads": 1,
            "check": "every product of ours equal in every element, others within 1e-5, int8 layers 0.05",
            "us": f"best of at least {ROUNDS} rounds",
        },
        "matrices": [], "spmm": [], "sddmm": [], "sparse": [], "dense": [],
    }  # fmt: skip
    head = {key: machine[key] for key in ("commit", "torch", "cpu")}
    journal = Journal(out, head | {"pairs": args.pairs, "mkl": args.mkl is not None}, args.fresh)
    dense, mkl = Baselines(journal), None if args.mkl is None else mkl_csr.load(args.mkl)
    left = [matrix for matrix in matrices if matrix.name not in journal.records]
    for count, matrix in enumerate(left):
        if time.perf_counter() > end:
            print(f"no time for {len(left) - count} of {len(matrices)} matrices: run the same command again")
            break
        journal(matrix.name, partial(run_matrix, matrix, pairs, dense, mkl))
        print(f"  {matrix.name}, {end - time.perf_counter():.0f} s left", flush=True)
    journal.add_to(results)
    save(results, out)
