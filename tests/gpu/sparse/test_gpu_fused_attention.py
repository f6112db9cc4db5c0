"""Fused sparse attention on a GPU against float64: masks, scales, biases, causal, outputs, sums of exponentials, edges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.attention import fused as attention
from cute_kernels.attention.blocks.config import BLOCK, BLOCK_ARCH, BlockAttention, block_config
from cute_kernels.attention.config import AttentionConfig, GatherAttention, PanelAttention
from cute_kernels.attention.quantize_qkv import Operands, encode_operands
from cute_kernels.attention.quantize_qkv import choose as choose_operands
from tests.gpu.problems import HERE, PANELS, check_guards, guarded

pytestmark = pytest.mark.gpu

# A relative error of rounding weights to 255 levels, and to 15; a wrong key shows as 0.1 and more.
BOUND = {8: 0.02, 4: 0.25}
LSE_BOUND = 2e-4  # absolute; scores are exact, exponentials approximate

Config = AttentionConfig | BlockAttention
CONFIGS: list[Config] = [GatherAttention(32), GatherAttention(64), GatherAttention(128)]
if PANELS:  # few warps and short tiles: a small problem passes many tiles, items and wraps of the ring
    CONFIGS += [
        PanelAttention(64, warps=3, rows_per_warp=2, tile=64, stages=5),
        PanelAttention(64, warps=2, rows_per_warp=1, groups=1, tile=32, stages=4, tile_window=2, cluster=2),
        PanelAttention(128, warps=3, rows_per_warp=1, tile=64, stages=5),
    ]
if HERE.arch == BLOCK_ARCH:
    CONFIGS += [block_config(64), block_config(128), BlockAttention(64, stages=5, resident=1)]
FLAGS: list[dict[str, Any]] = [{}, {"key_scale": True}, {"bias": True}, {"key_scale": True, "bias": True}]


def mask_of(config: Config, queries: int, keys: int, sparsity: float, seed: int) -> Tensor:
    """Vectors at random, bool (queries, keys); whole blocks for the kernel that takes nothing else."""
    if not isinstance(config, BlockAttention):
        return mc.random_pattern(queries, keys, sparsity, 8, seed=seed).to_dense()
    made = (
        torch.rand(-(-queries // BLOCK), -(-keys // BLOCK), generator=torch.Generator().manual_seed(seed)) >= sparsity
    )
    return made.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:queries, :keys]


def summing(config: Config) -> Config:
    """What runs where sums of exponentials are wanted."""
    changes: dict[str, Any] = (
        {"rows_per_warp": min(config.rows_per_warp, 2)} if isinstance(config, PanelAttention) else {}
    )
    return replace(config, out="float32", lse=True, **changes)


COMPILED = [
    *(replace(summing(config), **flags) for config in CONFIGS for flags in FLAGS),
    *(replace(config, out="float32", **flags) for config in CONFIGS for flags in FLAGS[:2]),
    *(replace(config, out=out) for config in CONFIGS for out in ("float16", "bfloat16")),
]
CHOSEN = [GatherAttention(64), *([PanelAttention(64)] if PANELS else [])]
CHOSEN_COMPILED = [
    made
    for config in CHOSEN
    for flags in FLAGS[1::2]
    for made in (replace(config, **flags), replace(summing(config), **flags))
]


class Case:
    """Random operands on the GPU with scales of a form, and the exact answer."""

    def __init__(
        self, config: Config, batch: int, queries: int, keys: int, sparsity: float = 0.8, *, masks: int = 1,
        scales: str = "row", causal: bool = False, bias: str = "", bits: int = 8, holes: bool = False, scale: float = 0.0,
        seed: int = 0,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        d, top = config.head, 2 ** (bits - 1) - 1
        self.config, self.causal, self.scale = config, causal, scale or 1 / math.sqrt(d)
        self.patterns = []
        for i in range(masks):
            mask = mask_of(config, queries, keys, sparsity, seed + i)
            if holes:
                mask[(torch.arange(queries) // (BLOCK if isinstance(config, BlockAttention) else 8)) % 3 == 1] = False
            self.patterns.append(mc.Pattern.from_dense(mask, 8).to("cuda"))
        floats = [torch.randn(batch, rows, d, device="cuda") for rows in (queries, keys, keys)]
        over = {"one": (None, None, None), "matrix": ((1, 2),) * 3, "row": (2, 2, 1)}[scales]
        largest = [x.abs().amax() if dim is None else x.abs().amax(dim) for x, dim in zip(floats, over, strict=True)]
        self.scales = [(x / top).contiguous() for x in largest]
        wide = [
            s
            if dim is None
            else s.view([1 if i in (dim if isinstance(dim, tuple) else (dim,)) else n for i, n in enumerate(x.shape)])
            for s, dim, x in zip(self.scales, over, floats, strict=True)
        ]
        self.ints = [torch.round(x / s).to(torch.int8) for x, s in zip(floats, wide, strict=True)]
        self.values = [x.double() * s.double() for x, s in zip(self.ints, wide, strict=True)]
        self.bias = None
        if bias:
            self.bias = torch.randn((keys,) if bias == "shared" else (batch, keys), device="cuda")
            self.bias.view(-1)[::7] = -torch.inf
        arrays = [(pattern.row_offsets, pattern.col_indices) for pattern in self.patterns]
        self.index = attention.make_index(arrays, queries, keys, batch=batch, head_dim=d, causal=causal, config=config)

    def logits(self) -> Tensor:
        """float64 (batch, queries, keys), -inf where a query does not see a key."""
        q, k, _ = self.values
        seen = torch.stack([pattern.to_dense() for pattern in self.patterns])
        if self.causal:
            seen &= torch.ones_like(seen).tril()
        logits = self.scale * (q @ k.mT)
        if self.bias is not None:
            logits += self.bias if self.bias.ndim == 1 else self.bias[:, None]
        return logits.masked_fill(~seen.repeat(len(q) // len(seen), 1, 1), -torch.inf)

    def expected(self) -> tuple[Tensor, Tensor]:
        logits = self.logits()
        lse = logits.logsumexp(2)
        return (logits - lse[:, :, None]).exp().nan_to_num(0.0) @ self.values[2], lse

    def run(self, out: torch.dtype = torch.float32, lse: bool = False, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Poisoned and guarded outputs."""
        batch, queries = self.ints[0].shape[:2]
        result, memory = guarded((batch, queries, self.config.head), out)
        sums, around = guarded((batch, queries), torch.float32)
        names = ("q_scale", "k_scale", "v_scale")
        q, k, v = self.ints
        attention.fused_attention(
            q, k, v, self.index, scale=self.scale, bias=self.bias, out=result, lse=sums if lse else None,
            **dict(zip(names, self.scales, strict=True)), **options,
        )  # fmt: skip
        check_guards(result, memory)
        check_guards(sums, around)
        return result, sums if lse else None

    def check(self, out: torch.dtype = torch.float32, bits: int = 8, lse: bool = True) -> None:
        result, sums = self.run(out, lse, softmax_bits=bits)
        expected, exact = self.expected()
        assert bool(result.isfinite().all())
        assert error(result, expected) <= BOUND[bits]
        assert bool((result[exact == -torch.inf] == 0).all())
        if sums is not None:
            assert torch.equal(sums.isfinite(), exact.isfinite())
            finite = exact.isfinite()
            assert not finite.any() or float((sums.double() - exact)[finite].abs().max()) <= LSE_BOUND


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def named(config: Config) -> str:
    return config.name


each = pytest.mark.parametrize("config", CONFIGS, ids=named)
compiled = pytest.mark.configs(COMPILED)


@each
@compiled
def test_two_masks_with_empty_rows_and_a_scale_a_row(config: Config) -> None:
    Case(config, 4, 333, 556, masks=2, holes=True).check()


@each
@compiled
@pytest.mark.parametrize("scales", ["one", "matrix"])
def test_one_scale_or_one_a_matrix_and_ragged_keys(config: Config, scales: str) -> None:
    Case(config, 3, 256, 1111, 0.7, scales=scales).check()


@each
@compiled
def test_causal_masks_elements_inside_vectors(config: Config) -> None:
    Case(config, 2, 500, 500, 0.5, scales="one", causal=True).check()
    Case(config, 2, 90, 40, 0.0, scales="one", causal=True).check()


@each
@compiled
@pytest.mark.parametrize("bias", ["shared", "each"])
def test_biases_of_keys_of_which_some_hide_them(config: Config, bias: str) -> None:
    Case(config, 2, 100, 776, 0.9, bias=bias).check()
    Case(config, 2, 100, 776, 0.9, bias=bias, scales="matrix").check()


@each
@compiled
@pytest.mark.parametrize("out", [torch.float16, torch.bfloat16])
def test_16_bit_floats_of_full_masks(config: Config, out: torch.dtype) -> None:
    Case(config, 2, 65, 300, 0.0, scales="one").check(out, lse=False)


@each
@compiled
def test_four_bits(config: Config) -> None:
    Case(config, 2, 130, 400, 0.8, scales="matrix", bits=4).check(bits=4)
    Case(config, 2, 130, 400, 0.8, scales="matrix", bits=4).check()


@each
@compiled
def test_weights_are_rounded_to_255_levels_of_the_largest(config: Config) -> None:
    """32 keys are one step, whose maximum is that of the row; weights are halves before they are integers."""
    case = Case(config, 4, 64, 32, 0.0, scales="matrix")
    logits = case.logits()
    weights = (255 * (logits - logits.amax(2, keepdim=True)).exp()).half().double().round()
    expected = weights @ case.values[2] / weights.sum(2, keepdim=True)
    assert error(case.run()[0], expected) <= 1e-3  # few weights lie so near to a half that they go the other way
    assert error(case.run()[0], case.expected()[0]) >= 3e-3  # as far as rounding takes it


@each
@compiled
def test_equal_scores_give_the_mean(config: Config) -> None:
    case = Case(config, 2, 72, 500, 0.6, scales="matrix")
    case.ints[0].zero_()
    case.values[0].zero_()
    assert error(case.run()[0], case.expected()[0]) <= 1e-6


@each
@compiled
def test_steep_scores_choose_one_key(config: Config) -> None:
    case = Case(config, 2, 72, 500, 0.6, scales="matrix", scale=50.0)
    assert error(case.run()[0], case.expected()[0]) <= 0.02


@each
@compiled
def test_no_key_at_all_gives_zeros_or_nan(config: Config) -> None:
    case = Case(config, 2, 40, 100, 1.0, scales="matrix")
    assert not case.run()[0].any()
    result, sums = case.run(lse=True, nan_for_empty=True)
    assert bool(result.isnan().all()) and sums is not None and bool((sums == -torch.inf).all())


@each
@compiled
def test_scales_that_are_no_numbers_show_where_they_are_met(config: Config) -> None:
    case = Case(config, 2, 72, 500, 0.6)
    case.scales[0][0, 5] = torch.nan
    case.scales[1][1, 7] = torch.nan
    met = torch.zeros(2, 72, dtype=torch.bool, device="cuda")
    met[0, 5] = True
    met[1] = case.patterns[0].to_dense()[:, 7]
    result, _ = case.run()
    assert torch.equal(result.isnan().all(2), met) and torch.equal(result.isnan().any(2), met)


@each
@compiled
def test_a_graph_replays_with_new_data_to_the_bit(config: Config) -> None:
    case = Case(config, 4, 300, 600, 0.8, scales="matrix")
    out = torch.empty(4, 300, config.head, device="cuda", dtype=torch.float16)

    def call() -> None:
        (q, k, v), (q_scale, k_scale, v_scale) = case.ints, case.scales
        attention.fused_attention(
            q, k, v, case.index, scale=case.scale, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    case.ints[2].copy_(case.ints[2].flip(1))
    call()
    expected = out.clone()
    for _ in range(10):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.configs(CHOSEN_COMPILED)
def test_the_chosen_kernels_attend_long_sequences() -> None:
    for sparsity, bias, seed in ((0.9, "", 1), (0.9, "each", 2), (0.97, "", 3)):
        case = Case(GatherAttention(64), 16, 2048, 2048, sparsity, masks=4, bias=bias, seed=seed)
        arrays = [(pattern.row_offsets, pattern.col_indices) for pattern in case.patterns]
        case.index = attention.make_index(arrays, 2048, 2048, batch=16, head_dim=64)
        case.check()
        case.check(torch.float16, lse=False)


@pytest.mark.configs([replace(block_config(head), key_scale=True, source="float16") for head in (64, 128)])
@pytest.mark.skipif(HERE.arch != BLOCK_ARCH, reason="no warp groups multiply on this GPU")
def test_whole_blocks_of_a_mask_are_found_and_taken() -> None:
    """The public call takes the kernel of blocks, and gives what the gather kernel gives, but for roundings of weights."""
    for head, causal in ((64, False), (128, True)):
        q, k, v = (torch.randn(8, 2048, head, device="cuda", dtype=torch.float16) for _ in range(3))
        pattern = mc.Pattern.from_dense(mask_of(block_config(head), 2048, 2048, 0.8, 3), 8).to("cuda")
        arrays = [(pattern.row_offsets, pattern.col_indices)]
        index = attention.make_index(arrays, 2048, 2048, batch=8, head_dim=head, causal=causal)
        assert index.config == block_config(head)
        mask = pattern.to_dense()
        mask = mask.tril() if causal else mask
        logits = (q.double() @ k.double().mT / math.sqrt(head)).masked_fill(~mask, -torch.inf)
        expected = logits.softmax(2).nan_to_num(0.0) @ v.double()
        assert error(mc.sparse_attention(q, k, v, pattern, causal=causal), expected) <= 0.03
        assert "64 x 64 blocks" in str(mc.explain_attention(q, k, v, pattern))


@each
@compiled
def test_keys_that_are_alike_have_the_first_ones_scale(config: Config) -> None:
    case = Case(config, 3, 333, 556, masks=3, holes=True)
    given = case.scales[1]
    case.scales[1] = given.clone()
    for i in (0, 2):  # of the middle one each key has its own
        case.scales[1][i] = given[i, 0]
    case.values[1] = case.ints[1].double() * case.scales[1].double()[..., None]
    case.scales[1][0, 1:], case.scales[1][2, 1:] = torch.nan, torch.inf  # not looked at
    alike = torch.tensor([1, 0, 7], dtype=torch.int32, device="cuda")
    result, sums = case.run(lse=True, keys_alike=alike)
    expected, exact = case.expected()
    assert error(result, expected) <= BOUND[8]
    assert sums is not None and float((sums.double() - exact)[exact.isfinite()].abs().max()) <= LSE_BOUND
    case.scales[1] = given
    for x, y in zip(case.run(lse=True, keys_alike=alike.new_zeros(3)), case.run(lse=True), strict=True):
        assert x is not None and y is not None and torch.equal(x, y)


BESIDE = list(dict.fromkeys([*(config for config in CONFIGS if config.head == 64), *CHOSEN]))
BESIDE_COMPILED = [replace(config, key_scale=True) for config in BESIDE]


@pytest.mark.parametrize(("queries", "keys", "sparsity"), [(1032, 1504, 0.9), (64, 8000, 0.998)])
@pytest.mark.parametrize("config", BESIDE, ids=named)
@pytest.mark.configs([*BESIDE_COMPILED, choose_operands("float16", 64, 8, HERE.arch)])
def test_operands_may_be_made_beside_it(config: Config, queries: int, keys: int, sparsity: float) -> None:
    """Operands of a new call in the memory of the last one, whose matrices all are there: a kernel that does not wait, or
    waits for what the last call left, reads some of the old ones.  With few queries and keys it is early everywhere."""
    batch = 96
    q, k, v = (torch.empty(batch, rows, 64, device="cuda", dtype=torch.float16) for rows in (queries, keys, keys))
    mask = mask_of(config, queries, keys, sparsity, 1)
    mask[384:768] = False  # whole blocks of rows without keys
    mask[128:256, :1024] = False
    if not isinstance(config, BlockAttention):
        mask[0] |= torch.arange(keys) % 500 == 0
    pattern = mc.Pattern.from_dense(mask, 8).to("cuda")
    arrays = [(pattern.row_offsets, pattern.col_indices)]
    index = attention.make_index(arrays, queries, keys, batch=batch, head_dim=64, config=config)
    out, expected = (torch.full_like(q, torch.nan) for _ in range(2))

    def refill(seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        for x in (q, k, v):
            x.normal_(generator=generator)
        k[seed % 3 :: 3, 5] *= 20  # one that sticks out: each key has a scale of its own

    def attend(ints: Operands, to: Tensor, ready: Tensor | None) -> None:
        attention.fused_attention(
            ints.q, ints.k, ints.v, index, scale=0.125, q_scale=ints.q_scale, k_scale=ints.k_scale,
            keys_alike=ints.keys_alike, v_scale=ints.v_scale, ready=ready, out=to,
        )  # fmt: skip

    def call() -> None:
        ints = encode_operands(q, k, v, bits=8)
        attend(ints, out, ints.ready)

    refill(0)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in range(1, 13):
        refill(seed)
        torch.cuda.synchronize()
        graph.replay() if seed % 2 else call()
        call() if seed % 4 == 0 else None  # two in a row
        attend(encode_operands(q, k, v, bits=8), expected, None)
        assert torch.equal(out, expected), seed


def test_devices_that_are_supported() -> None:
    here = torch.device("cuda")
    assert attention.supports_attention(here, head_dim=64, vector_length=8, softmax_bits=8)
    assert not attention.supports_attention(here, head_dim=48, vector_length=8, softmax_bits=8)
    assert not attention.supports_attention(here, head_dim=64, vector_length=4, softmax_bits=8)
    assert not attention.supports_attention(here, head_dim=64, vector_length=8, softmax_bits=16)
