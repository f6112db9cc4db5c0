"""SDDMM on a GPU: every pair, sign, vector length, stride and atom, odd shapes, layouts, scales, long sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import magicube_cutlass as mc
from cute_kernels.atoms import atoms, default_atom, runs_on
from cute_kernels.machine import ProblemTypes
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.sddmm.panel import SddmmPanelConfig
from tests.gpu.problems import (
    HERE,
    PANELS,
    check_sddmm,
    dense,
    every_pair,
    ints,
    kind,
    sampling_with,
    sddmm,
    sddmm_panel,
)
from tests.helpers import SCALES

pytestmark = pytest.mark.gpu

PAIRS = [(of, stride) for shift in (0, 4) for of, stride in every_pair(shift)]
OUTS = ("int32", "float32", "float16", "bfloat16")


def label(value: object) -> str:
    return f"v{value.vector_length}-{value.lhs}-{value.rhs}" if isinstance(value, ProblemTypes) else str(value)


ONE_STAGE = [SddmmConfig(default_atom(of, HERE.arch), of.vector_length, of.lhs, of.rhs, of.out, stages=1)
             for of in (kind(), kind(4, (16, True), (16, False)), kind(8, (4, True), (4, True)))]  # fmt: skip


@pytest.mark.parametrize("config", ONE_STAGE, ids=lambda config: config.name)
@pytest.mark.configs(ONE_STAGE)
def test_without_prefetch_the_result_is_the_same(config: SddmmConfig) -> None:
    torch.manual_seed(1)
    for m, n, k in ((100, 90, 512), (37, 150, 301), (64, 33, 16)):
        pattern = mc.random_pattern(m, n, 0.8, config.vector_length)
        check_sddmm(dense((m, k), config.x), dense((n, k), config.y), pattern, config=config)


@pytest.mark.parametrize(("of", "stride"), PAIRS, ids=label)
@pytest.mark.configs([sddmm(of, stride, 512) for of, stride in PAIRS])
def test_every_pair_sign_vector_length_and_stride_is_exact(of: ProblemTypes, stride: int) -> None:
    torch.manual_seed(of.vector_length)
    for m, n, k, extreme in ((100, 90, 512, True), (37, 150, 301, False)):
        pattern = mc.random_pattern(m, n, 0.8, of.vector_length)
        check_sddmm(dense((m, k), of.lhs, extreme=extreme), dense((n, k), of.rhs, extreme=extreme), pattern, stride)


FEW = [kind(), kind(4, (16, True), (16, False)), kind(2, (4, True), (4, True)), kind(16, (8, False), (8, True)),
       kind(1, (16, False), (4, True))]  # fmt: skip


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(of=st.sampled_from(FEW), m=st.integers(0, 60), n=st.integers(0, 90), k=st.integers(0, 300),
       stride=st.sampled_from([16, 32, 64]), sparsity=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
       layouts=st.tuples(*[st.sampled_from(["row", "column"])] * 2), transposed=st.booleans(),
       batch=st.sampled_from([(), (2,), (2, 1, 3)]), seed=st.integers(0, 1000))  # fmt: skip
@pytest.mark.configs([sddmm(of, stride, inner) for of in FEW for stride in (16, 32, 64) for inner in (16, 512)])
def test_random_products_are_exact(of, m, n, k, stride, sparsity, layouts, transposed, batch, seed) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    pattern = mc.random_pattern(m, n, sparsity, of.vector_length, seed=seed)
    x, y = dense((*batch, m, k), of.lhs, layouts[0]), dense((*batch, n, k), of.rhs, layouts[1])
    check_sddmm(x, y, pattern, stride, transposed=transposed)


ATOMS = [entry.name for entry in atoms() if entry.threads == 32 and runs_on(entry, HERE.arch) and not entry.floating]


def pairs_of(atom: str) -> list[tuple[tuple[int, bool], tuple[int, bool]]]:
    return [((4, True), (4, False))] if atom.startswith("int4") else [((8, True), (8, False)), ((16, True), (8, True))]


@pytest.mark.parametrize("atom", ATOMS)
@pytest.mark.configs([sddmm(kind(8, *pair), inner=512, atom=atom) for atom in ATOMS for pair in pairs_of(atom)])
def test_every_native_atom_multiplies(atom: str) -> None:
    for left, right in pairs_of(atom):
        pattern = mc.random_pattern(45, 77, 0.5, 8)
        check_sddmm(dense((45, 333), left), dense((77, 333), right), pattern, atom=atom)


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("axes", [(None, None), (1, None), (None, 1), (1, 1)])
@pytest.mark.configs([sddmm(kind(out=out), inner=256) for out in OUTS])
def test_scales_belong_to_rows_of_both_and_rounding_happens_once(out: str, axes: tuple[int | None, int | None]) -> None:
    check_scales(getattr(torch, out), axes)


def check_scales(dtype: torch.dtype, axes: tuple[int | None, int | None]) -> None:
    torch.manual_seed(5)
    x, y = (
        mc.quantize(torch.randn(2, rows, 200), 8, scale=SCALES[axis]) for rows, axis in zip((61, 75), axes, strict=True)
    )
    pattern = mc.random_pattern(61, 75, 0.6, 8)
    got = mc.sddmm(x.to("cuda"), y.to("cuda"), pattern.to("cuda"), out_dtype=dtype).to("cpu")
    total = torch.matmul(x.ints().long(), y.ints().long().mT)
    if dtype == torch.int32:
        expected = total.int()
    else:
        assert x.scale is not None and y.scale is not None
        expected = (total.float() * x.scale * y.scale.mT).to(dtype)
    assert torch.equal(got.vectors(), mc.reference.at_vectors(expected, pattern))
    as_bcrs = mc.sddmm(x.to("cuda"), y.to("cuda"), pattern.to("cuda"), out_dtype=dtype, out_format="bcrs").to("cpu")
    assert torch.equal(as_bcrs.to_dense(), got.to_dense())


@pytest.mark.parametrize(("of", "value"), [((8, False), 255), ((4, True), -8), ((16, False), 65535)])
@pytest.mark.parametrize("k", [32_800, 270_001])
def test_long_sums_do_not_overflow(of: tuple[int, bool], value: int, k: int) -> None:
    x, y = (mc.QuantTensor.from_ints(torch.full((n, k), value), bits=of[0], signed=of[1]) for n in (3, 40))
    check_sddmm(x, y, mc.Pattern.from_dense(torch.ones(3, 40, dtype=torch.bool), 1))


def test_views_and_odd_strides_are_read_without_a_copy() -> None:
    torch.manual_seed(6)
    wide = ints((3, 50, 301), 8, True).to(torch.int8)
    for view in (wide[:, 1:46, 5:297], wide[::2, :45, 16:289], wide[:1, :45].expand(4, 45, 301), wide[1, 2:47, 1:]):
        there = wide.cuda()
        same = torch.as_strided(there, view.shape, view.stride(), view.storage_offset())
        x_cpu, x = (mc.QuantTensor(t, None, 8, True, None, t.shape) for t in (view, same))
        y_cpu = dense((*view.shape[:-2], 33, view.shape[-1]), (8, True))
        pattern = mc.random_pattern(45, 33, 0.5, 8)
        got = mc.sddmm(x, y_cpu.to("cuda"), pattern.to("cuda"), out_dtype=torch.int64)
        assert torch.equal(got.to("cpu").vectors(), mc.reference.sddmm(x_cpu, y_cpu, pattern))


def test_repeated_runs_agree_to_the_bit() -> None:
    x, y, pattern = dense((500, 400), (8, True)), dense((700, 400), (8, True)), mc.random_pattern(500, 700, 0.9, 8)
    expected = mc.reference.sddmm(x, y, pattern)
    there = x.to("cuda"), y.to("cuda"), pattern.to("cuda")
    results = [mc.sddmm(*there, out_dtype=torch.int64) for _ in range(20)]
    assert all(torch.equal(one.vectors().cpu(), expected) for one in results)


def fits(config: SddmmPanelConfig) -> bool:
    return config.smem_bytes <= 227 * 1024 and config.registers <= 64


BOXES: tuple[dict[str, Any], ...] = ({"boxes": 1}, {"boxes": 2}, {"boxes": 1, "box_bytes": 64})
PANEL_PAIRS = [
    config
    for shift in (0, 4)
    for i, (of, stride) in enumerate(every_pair(shift))
    if fits(config := sddmm_panel(of, stride, **BOXES[(i + shift) % 3], slots=16 if i % 4 else min(stride, 32)))
]
needs_panels = pytest.mark.skipif(not PANELS, reason="no tensor copies")


def with_holes(pattern: mc.Pattern) -> mc.Pattern:
    """Every third vector row has nothing, and nothing lies in columns 64 to 127."""
    mask = pattern.to_dense()
    mask[(torch.arange(mask.shape[0]) // pattern.vector_length) % 3 == 1] = False
    mask[:, 64:128] = False
    return mc.Pattern.from_dense(mask, pattern.vector_length)


@needs_panels
@pytest.mark.parametrize("config", PANEL_PAIRS, ids=lambda config: config.name)
@pytest.mark.configs(PANEL_PAIRS)
def test_every_pair_is_exact_in_panels(config: SddmmPanelConfig) -> None:
    v = config.vector_length
    torch.manual_seed(v)
    left, right = config.x, config.y
    for m, n, k, sparsity, extreme in (
        (40 * v, 190, config.depth, 0.8, True),
        (37, 301, config.depth - 19, 0.5, False),
    ):
        pattern = with_holes(mc.random_pattern(m, n, sparsity, v, distribution="uniform"))
        x, y = dense((m, k), left, extreme=extreme), dense((n, k), right, extreme=extreme)
        check_sddmm(x, y, pattern, config.stride, config=config)


PANEL_FEW = [sddmm_panel(kind(), 64), sddmm_panel(kind(), 16, tile=512, boxes=2, warps=16), sddmm_panel(kind(16), boxes=2),
             sddmm_panel(kind(4, (16, True), (8, False)), slots=16, tile=256, boxes=2),
             sddmm_panel(kind(), tile=512, box_bytes=64, warps=16), sddmm_panel(kind(2), slots=16, box_bytes=64)]  # fmt: skip


@needs_panels
@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(config=st.sampled_from(PANEL_FEW), m=st.integers(0, 200), n=st.integers(0, 700), k=st.integers(0, 128),
       sparsity=st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]), layouts=st.tuples(*[st.sampled_from(["row", "column"])] * 2),
       transposed=st.booleans(), batch=st.sampled_from([(), (2,), (2, 1, 3)]), seed=st.integers(0, 1000))  # fmt: skip
@pytest.mark.configs(PANEL_FEW)
def test_random_products_are_exact_in_panels(  # type: ignore[no-untyped-def]
    config, m, n, k, sparsity, layouts, transposed, batch, seed
) -> None:
    torch.manual_seed(seed)
    pattern = mc.random_pattern(m, n, sparsity, config.vector_length, seed=seed)
    left, right = config.x, config.y
    k = min(k, config.depth)
    x, y = dense((*batch, m, k), left, layouts[0]), dense((*batch, n, k), right, layouts[1])
    check_sddmm(x, y, pattern, config.stride, transposed=transposed, config=config)


@needs_panels
@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("axes", [(None, None), (1, None), (None, 1), (1, 1)])
@pytest.mark.configs([sddmm_panel(kind(out=out), boxes=2) for out in OUTS])
def test_scales_belong_to_rows_of_both_in_panels(out: str, axes: tuple[int | None, int | None]) -> None:
    dtype, config = getattr(torch, out), sddmm_panel(kind(out=out), boxes=2)
    with sampling_with(config):
        check_scales(dtype, axes)


@needs_panels
@pytest.mark.configs([sddmm_panel(kind(), boxes=4, tile=128)])
def test_batches_that_no_single_step_separates_are_sampled_one_by_one() -> None:
    config = sddmm_panel(kind(), boxes=4, tile=128)
    torch.manual_seed(7)
    wide = ints((3, 50, 301), 8, True).to(torch.int8)
    memory = torch.zeros(3 * (50 * 304 + 16), dtype=torch.int8)
    apart = memory.as_strided((3, 50, 301), (50 * 304 + 16, 304, 1))[:2].copy_(wide[:2])
    y = mc.QuantTensor(memory.cuda().as_strided(apart.shape, apart.stride()), None, 8, True, None, apart.shape)
    y_cpu = mc.QuantTensor(apart.contiguous(), None, 8, True, None, apart.shape)
    x, pattern = dense((2, 45, 301), (8, True)), mc.random_pattern(45, 50, 0.5, 8)
    with sampling_with(config):
        got = mc.sddmm(x.to("cuda"), y, pattern.to("cuda"), out_dtype=torch.int64)
    assert torch.equal(got.to("cpu").vectors(), mc.reference.sddmm(x, y_cpu, pattern))


@needs_panels
@pytest.mark.configs([sddmm(kind(), inner=256), sddmm_panel(kind(), tile=512, boxes=2, warps=16)])
def test_a_large_pattern_shares_panels_and_repeated_calls_agree_to_the_bit() -> None:
    x, y, pattern = dense((2100, 200), (8, True)), dense((2000, 200), (8, True)), mc.random_pattern(2100, 2000, 0.9, 8)
    expected, there = mc.reference.sddmm(x, y, pattern), (x.to("cuda"), y.to("cuda"), pattern.to("cuda"))
    results = [mc.sddmm(*there, out_dtype=torch.int64) for _ in range(20)]
    assert all(torch.equal(one.vectors().cpu(), expected) for one in results)
    assert any(key[0] == "ranges" for key in there[2]._cache if isinstance(key, tuple))
