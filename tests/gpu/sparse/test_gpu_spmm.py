"""SpMM on a GPU, with every kernel: each pair, sign, vector length and atom, odd shapes, long runs of random problems."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import magicube_cutlass as mc
from cute_kernels.atoms import atoms, runs_on
from cute_kernels.cpu.engine import DenseOperand
from cute_kernels.integers import BITS
from cute_kernels.machine import ProblemTypes
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import SpmmKernel
from cute_kernels.spmm.panel import PanelConfig
from magicube_cutlass.dispatch.cuda import aligned_rows
from magicube_cutlass.dispatch.plan import _vectors
from tests.gpu.problems import (
    HERE,
    PANELS,
    SIGNS,
    check_spmm,
    choices,
    chosen,
    dense,
    every_pair,
    gather,
    ints,
    kind,
    merged,
    panel,
    sparse,
    spmm,
)

pytestmark = pytest.mark.gpu


def covering() -> list[SpmmKernel]:
    """Gather and panel configs of every pair and sign; both together have every vector length with every pair."""
    gathers = [gather(of, tile_n_bytes=(64, 128)[i % 2], split_k_warps=(1, 2, 4)[i % 3])
               for i, (of, _) in enumerate(every_pair())]  # fmt: skip
    light = [i % 2 if of.vector_length <= 8 else 0 for i, (of, _) in enumerate(every_pair(4))]
    panels = [panel(of, rows_per_warp=1 + light[i], ordered=i % 3 > 0) for i, (of, _) in enumerate(every_pair(4))]
    return [*gathers, *(panels if PANELS else [])]


def variants() -> list[SpmmKernel]:
    """Every knob of both kernels, on few kinds."""
    bytes8, wide16, short, nibbles = kind(), kind(4, (16, False), (8, True)), kind(1, (12, True), (4, True)), kind(
        8, (4, True), (4, False))  # fmt: skip
    found: list[SpmmKernel] = [gather(of, fuse_digits=False) for of in (wide16, short)]
    for of in (bytes8, wide16, nibbles):
        found += [gather(of, tile_n_bytes=size, split_k_warps=team, warps=max(4, team)) for size in (64, 128)
                  for team in (1, 2, 4, 8)]  # fmt: skip
        found += [gather(of, stages=stages, warps=2) for stages in (2, 3, 6)]
        found += [gather(of, int64_accum=True, split_k_warps=team) for team in (1, 4)]
        found += [gather(of, stages=1, int64_accum=wide, warps=2) for wide in (False, True)]
    found += [
        gather(of, shuffle=False) for of in (nibbles, kind(8, (4, True), (4, True)), kind(4, (4, False), (4, True)))
    ]
    found += [gather(bytes8, atom="s8_m16n8k16"), gather(nibbles, atom="s8_m16n8k32")]
    if PANELS:
        for of in (bytes8, wide16, short):
            found += [panel(of, tile_n_bytes=size, rows_per_warp=rows) for size in (64, 128) for rows in (1, 2, 3)]
            found += [panel(of, ordered=False), panel(of, tile=512, stages=4), panel(of, tile=64, stages=5, warps=15)]
            found += [panel(of, fuse_digits=False), panel(of, stages=1, tile_window=1)]
        found += [panel(bytes8, rows_per_warp=2, tile_n_bytes=128, cluster=2), panel(kind(16), rows_per_warp=2)]
        found += [panel(kind(8, (16, True), (16, False))), panel(bytes8, rows_per_warp=3, tile_n_bytes=128, warps=11)]
        found += [panel(kind(8, (4, s), (4, t)), shuffle=False) for s, t in SIGNS]
        found += [panel(bytes8, tile_n_bytes=32), panel(bytes8, atom="s8_m16n8k16"), panel(nibbles, tile_n_bytes=128)]
    return list(dict.fromkeys(found))


def named(config: SpmmKernel) -> str:
    return config.name


def operands_of(config: Any) -> tuple[Any, Any]:
    return config.a, config.b


@pytest.mark.parametrize("config", covering(), ids=named)
def test_every_pair_sign_and_vector_length_is_exact(config: SpmmKernel) -> None:
    torch.manual_seed(len(config.name))
    left, right = operands_of(config)
    v = config.vector_length
    check_spmm(sparse(100, 700, v, left, sparsity=0.8, extreme=True), dense((700, 70), right, extreme=True), config)
    check_spmm(sparse(61, 331, v, left, empty=True, seed=1), dense((2, 331, 193), right, "column"), config)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("k", "n"), [(331, 193), (48, 1), (2, 70), (1000, 1040), (256, 5000)])
def test_column_major_bytes_are_transposed(k: int, n: int, signed: bool) -> None:
    b = dense((k, n), (8, signed), "column")
    check_spmm(sparse(61, k, 8, (8, True)), b, gather(kind(8, (8, True), (8, signed))))
    rows = aligned_rows(DenseOperand(b.data.cuda(), 8, signed, -2, -1), -1, k)
    assert rows.stride(1) == 1 and rows.stride(0) % 16 == 0 and torch.equal(rows.cpu(), b.data)


def test_the_pairs_cover_every_vector_length() -> None:
    met = {(config.a.bits, config.b.bits, config.vector_length) for config in covering()}
    assert len(met) == len(BITS) ** 2 * 6 or not PANELS
    assert {(operands_of(config)) for config in covering()} == {
        ((a, s), (b, t)) for a in BITS for b in BITS for s, t in SIGNS
    }


@pytest.mark.parametrize("config", variants(), ids=named)
def test_every_knob_keeps_the_result(config: SpmmKernel) -> None:
    torch.manual_seed(2)
    left, right = operands_of(config)
    for m, k, n, sparsity in ((100, 1300, 200, 0.8), (7, 2111, 33, 0.3), (90, 256, 129, 0.95), (33, 40, 520, 0.0)):
        check_spmm(sparse(m, k, config.vector_length, left, sparsity=sparsity), dense((k, n), right), config)


def with_long_rows() -> list[SpmmKernel]:
    """Gather configs whose CTAs share long rows, with one warp or several for each of the others."""
    bytes8, wide16, nibbles = kind(), kind(4, (16, True), (8, False)), kind(16, (4, True), (4, True))
    teams = ((1, 4), (2, 4), (4, 4), (8, 8))
    found = [gather(bytes8, split_k_warps=team, warps=warps) for team, warps in teams]
    found += [gather(of, tile_n_bytes=size) for of in (wide16, nibbles) for size in (64, 128)]
    return [*found, gather(bytes8, tile_n_bytes=16), gather(bytes8, int64_accum=True), gather(kind(8, out="float16"))]


@pytest.mark.parametrize("config", with_long_rows(), ids=named)
def test_rows_far_longer_than_the_others_are_exact(config: SpmmKernel) -> None:
    (left, right), v, k = operands_of(config), config.vector_length, 2111
    mask = torch.zeros(50, 1, k, dtype=torch.bool)
    mask[:, :, 7] = mask[::3, :, 99] = True
    mask[3], mask[17, :, :1200], mask[49, :, 5:175] = True, True, True
    mask[20] = False
    full = mask.expand(-1, v, -1).reshape(50 * v, k)[: 50 * v - v // 2]  # the last vector row lacks rows
    a = mc.SRBCRS.from_mask(ints(full.shape, *left), full, vector_length=v, bits=left[0], signed=left[1])
    assert isinstance(config, GatherConfig) and config.pack(_vectors(a, v), k).long_rows.tolist() == [3, 17]
    for n in (1, 16, 193):
        check_spmm(a, dense((k, n), right), config)
    check_spmm(a, dense((2, k, 70), right, "column"), config)


KINDS = [kind(), kind(8, (4, True), (4, True)), kind(4, (16, True), (8, False)), kind(16, (8, False), (4, True))]


@pytest.mark.parametrize("of", KINDS, ids=lambda of: f"v{of.vector_length}-{of.lhs[0]}x{of.rhs[0]}")
@pytest.mark.configs([config for of in KINDS for config in choices(merged(of))])
def test_the_chosen_kernel_is_exact_in_every_regime(of: ProblemTypes) -> None:
    torch.manual_seed(3)
    used = set()
    for rows, k, n, sparsity in ((1, 4096, 16, 0.5), (40, 512, 128, 0.7), (130, 800, 300, 0.9), (1100, 256, 520, 0.5),
                                 (4, 60, 2000, 0.1), (600, 90, 1, 0.2)):  # fmt: skip
        a, b = (
            sparse(rows * of.vector_length - 1, k, of.vector_length, of.lhs, sparsity=sparsity),
            dense((k, n), of.rhs),
        )
        on_gpu = a.to("cuda")
        assert torch.equal(spmm(on_gpu, b), mc.reference.spmm(a, b))
        used |= {
            plan[0] for key, plan in on_gpu._execution.items() if isinstance(key, tuple) and isinstance(plan, tuple)
        }
    assert len(used) > 1, used


EDGES = [gather(kind(), split_k_warps=2), gather(kind(4, (16, True), (16, True))),
         *([panel(kind()), panel(kind(4, (12, True), (4, False)), rows_per_warp=2)] if PANELS else [])]  # fmt: skip


EDGE_KINDS = [merged(kind(config.vector_length, *operands_of(config))) for config in EDGES]


@pytest.mark.parametrize("config", EDGES, ids=named)
@pytest.mark.configs([config for of in EDGE_KINDS for config in choices(of)])
@pytest.mark.parametrize(
    ("m", "k", "n", "batch"),
    [(1, 1, 1, ()), (5, 1, 3, ()), (5, 1, 16, (3,)), (8, 33, 0, ()), (0, 12, 9, ()), (9, 0, 5, ()), (9, 64, 7, (0,)),
     (17, 65, 1, (2, 3)), (3, 255, 17, (1,)), (40, 257, 65, (5,)), (200, 511, 47, ())],
)  # fmt: skip
def test_tiny_empty_and_odd_shapes(config: SpmmKernel, m: int, k: int, n: int, batch: tuple[int, ...]) -> None:
    left, right = operands_of(config)
    a = sparse(m, k, config.vector_length, left, sparsity=0.4)
    check_spmm(a, dense((*batch, k, n), right), config)
    check_spmm(a, dense((*batch, k, n), right))


MERGED = [gather(kind(8)), gather(kind(16)), *([panel(kind(8)), panel(kind(32))] if PANELS else [])]


@pytest.mark.parametrize("v", [1, 2, 4, 8])
@pytest.mark.parametrize("config", MERGED, ids=named)
@pytest.mark.configs(MERGED)
def test_short_vectors_are_merged_for_a_config_of_longer_ones(config: SpmmKernel, v: int) -> None:
    torch.manual_seed(v)
    a, b = sparse(37, 600, v, (8, True), sparsity=0.8), dense((600, 70), (8, True))
    check_spmm(a, b, config)
    on_gpu = a.to("cuda")
    assert torch.equal(spmm(on_gpu, b), mc.reference.spmm(a, b))
    assert ("vector rows are merged" in mc.explain(on_gpu, b.to("cuda"))) == (v < 8)


@pytest.mark.parametrize("config", EDGES, ids=named)
def test_rows_may_be_empty_single_or_full(config: SpmmKernel) -> None:
    left, right = operands_of(config)
    v, k = config.vector_length, 1100
    mask = torch.zeros(12 * v, k, dtype=torch.bool)
    mask[2 * v : 3 * v] = True
    mask[5 * v : 6 * v, k - 1] = True
    mask[7 * v, ::31] = True
    mask[9 * v : 10 * v, 512:800] = True
    mask[11 * v :, torch.arange(0, k, 32)] = True  # one shared-memory bank, were it not for the swizzle
    a = mc.SRBCRS.from_mask(torch.randint(-7, 7, mask.shape), mask, vector_length=v, bits=left[0], signed=left[1])
    check_spmm(a, dense((k, 130), right), config)
    check_spmm(sparse(50, k, v, left, sparsity=1.0), dense((k, 130), right), config)


RANDOM = [*EDGES, gather(kind(1, (8, False), (8, True)), tile_n_bytes=128), gather(kind(32, (4, True), (8, True))),
          gather(kind(2, (8, True), (4, False)), stages=3, split_k_warps=4),
          *([panel(kind(16, (8, True), (8, False)), tile_n_bytes=128), panel(kind(1, (8, False), (16, True)))] if PANELS else [])]  # fmt: skip


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(config=st.sampled_from(RANDOM), m=st.integers(0, 70), k=st.integers(0, 600), n=st.integers(0, 150),
       sparsity=st.sampled_from([0.0, 0.5, 0.9, 1.0]), layout=st.sampled_from(["row", "column"]),
       batch=st.sampled_from([(), (2,), (2, 1, 3)]), stride=st.sampled_from([16, 32, 64]), offset=st.integers(0, 3),
       seed=st.integers(0, 1000))  # fmt: skip
@pytest.mark.configs(RANDOM)
def test_random_products_are_exact(config, m, k, n, sparsity, layout, batch, stride, offset, seed) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    left, right = operands_of(config)
    a = sparse(m, k, config.vector_length, left, sparsity=sparsity, stride=stride, seed=seed)
    check_spmm(a, dense((*batch, k, n), right, layout), config, offset)


@pytest.mark.configs(RANDOM)
def test_a_thousand_small_problems() -> None:
    torch.manual_seed(4)
    order = random.Random(4)
    for i in range(1000):
        config = RANDOM[i % len(RANDOM)]
        left, right = operands_of(config)
        m, k, n = order.randint(1, 48), order.randint(1, 300), order.randint(1, 100)
        a = sparse(m, k, config.vector_length, left, sparsity=order.choice((0.0, 0.3, 0.7, 0.95)), seed=i)
        check_spmm(a, dense((k, n), right), config, offset=i % 2)


ATOMS = [entry.name for entry in atoms() if entry.threads == 32 and runs_on(entry, HERE.arch) and not entry.floating]


def pairs_of(atom: str) -> list[tuple[tuple[int, bool], tuple[int, bool]]]:
    return [((4, True), (4, False))] if atom.startswith("int4") else [((8, True), (8, False)), ((4, True), (16, True))]


@pytest.mark.parametrize("atom", ATOMS)
@pytest.mark.configs([chosen(kind(8, *pair), 6, 256, 77, atom=atom) for atom in ATOMS for pair in pairs_of(atom)])
def test_every_native_atom_multiplies(atom: str) -> None:
    for left, right in pairs_of(atom):
        a, b = sparse(45, 333, 8, left, sparsity=0.5), dense((333, 77), right)
        assert torch.equal(spmm(a, b, atom=atom), mc.reference.spmm(a, b))


REPEATED = [config for config in EDGES if config.vector_length == 8]


@pytest.mark.parametrize("config", REPEATED, ids=named)
def test_repeated_runs_agree_to_the_bit(config: SpmmKernel) -> None:
    left, right = operands_of(config)
    a, b = sparse(1000, 2000, 8, left, sparsity=0.8), dense((2000, 300), right)
    on_gpu, there = a.to("cuda"), b.to("cuda")
    expected = mc.reference.spmm(a, b)
    results = [mc.spmm(on_gpu, there, out_dtype=torch.int64, config=config) for _ in range(20)]
    assert all(torch.equal(one.cpu(), expected) for one in results)


@pytest.mark.skipif(not PANELS, reason="no panel kernel on this GPU")
def test_persistent_blocks_pass_any_number_of_items() -> None:
    config = panel(kind(out="int32"), tile=128, warps=1)
    assert isinstance(config, PanelConfig)
    a, b = sparse(1000, 600, 8, (8, True), sparsity=0.7), dense((2, 600, 260), (8, True))
    assert config.items(125, 260, 2) > 2 * torch.cuda.get_device_properties(0).multi_processor_count
    check_spmm(a, b, config)
