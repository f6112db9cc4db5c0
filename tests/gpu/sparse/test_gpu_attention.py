"""Sparse softmax and sparse attention on a GPU: against the CPU, against float64, in graphs, without waiting."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.attention.config import GatherAttention
from cute_kernels.attention.quantize_qkv import choose as choose_operands
from cute_kernels.attention.sparse_softmax import SoftmaxConfig
from cute_kernels.dtypes import Integer
from cute_kernels.integers import int_range, widen
from cute_kernels.operands import Vectors
from magicube_cutlass import masks
from magicube_cutlass.attention import softmax, sparse_attention, sparse_softmax
from magicube_cutlass.attention.block_diagonal import repeat_on_diagonal
from tests.gpu.problems import HERE, gather, kind, sddmm

pytestmark = pytest.mark.gpu

PAIRS = [(16, 8), (8, 8), (8, 4), (4, 4)]
SHAPES = [(v, stride, bits) for v, (stride, bits) in product((1, 4, 8, 32), ((16, 4), (32, 8), (64, 16)))]
LENGTHS = (1, 2, 4, 8, 16, 32)
NAMES = ("float16", "bfloat16", "float32")
ATOMS = {(bits, qkv): "int4_as_int8_m16n8k32" if (bits, qkv) == (4, 4) else "s8_m16n8k32" for bits, qkv in PAIRS}


def softmaxes() -> list[Any]:
    """The kernels of the tests of the softmax alone."""
    kinds = [(NAMES[i % 3], *shape) for i, shape in enumerate(SHAPES)]
    return [SoftmaxConfig(*kind, causal, bias) for kind in kinds for causal, bias in ((True, False), (False, True))]


def pipelines() -> list[Any]:
    """Those of the three products at V = 8, and the fused ones for few queries."""
    found: list[Any] = [choose_operands("float16", 64, 8, HERE.arch)]
    for bias, lse in product((False, True), repeat=2):
        found.append(GatherAttention(64, key_scale=True, bias=bias, lse=lse))
    for (bits, qkv), causal, bias in product(PAIRS, (False, True), (False, True)):
        found.append(SoftmaxConfig("float16", bits=bits, causal=causal, bias=bias, atom=ATOMS[bits, qkv]))
    for bits, qkv in PAIRS:
        found.append(sddmm(kind(8, (qkv, True), (qkv, True), "float16"), 32, 64))
        found.append(gather(kind(8, (bits, False), (qkv, True), "float16"), ATOMS[bits, qkv]))
    return found


def logits(pattern: mc.Pattern, batch: tuple[int, ...], dtype: torch.dtype, stride: int) -> mc.SRBCRS:
    generator = torch.Generator().manual_seed(0)
    values = 3 * torch.randn(*batch, pattern.vectors, pattern.vector_length, generator=generator)
    return mc.SRBCRS.from_pattern(pattern, values.to(dtype), bits=None, stride=stride)


def check(S: mc.SRBCRS, bits: int, **options: Any) -> None:
    """The GPU's integers are the nearest ones of the definition, which the CPU's are too."""
    on_gpu = options | ({"bias": options["bias"].cuda()} if "bias" in options else {})
    ours, lse = sparse_softmax(S.to("cuda"), bits=bits, return_lse=True, **on_gpu)
    ours.check_format(full=True)
    theirs, sums = sparse_softmax(S, bits=bits, return_lse=True, **options)
    high = int_range(bits, False)[1]
    u, w = widen(ours.to("cpu").ints()), widen(theirs.ints())
    assert ours.scale is not None and theirs.scale is not None
    real = theirs.scale.isfinite().all()
    if real:  # each within 1/2, and the exponentials' errors, of one number
        assert (u - w).abs().max() <= 1, "integers differ by more than their rounding"
        assert int((u != w).sum()) <= 2 + u.numel() * high * 4e-6, "integers differ too often"
    together = widen(ours.to("cpu").to_dense(dequantize=False)).sum(1)
    expected = torch.where(together > 0, 1 / together.float(), theirs.scale[:, 0])
    assert torch.allclose(ours.scale[:, 0].cpu(), expected, rtol=1e-6, equal_nan=True) or not real
    assert torch.equal(ours.scale.isnan().cpu(), theirs.scale.isnan())
    assert torch.allclose(lse.cpu(), sums, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("v", "stride", "bits"), SHAPES)
@pytest.mark.configs(softmaxes())
def test_softmax_is_that_of_the_cpu(v: int, stride: int, bits: int) -> None:
    dtype = getattr(torch, NAMES[SHAPES.index((v, stride, bits)) % 3])
    for (m, n), batch, sparsity in (((64, 200), (), 0.5), ((37, 700), (3,), 0.9), ((130, 90), (2, 2), 0.1)):
        S = logits(mc.random_pattern(m, n, sparsity, v, "skewed" if m == 37 else "uniform"), batch, dtype, stride)
        check(S, bits, scale=0.5, causal=True)
        bias = torch.randn(*batch[:1], *[1] * len(batch[1:]), n)
        bias[..., ::7] = -math.inf
        check(S, bits, bias=bias)


@pytest.mark.configs([SoftmaxConfig("float32", causal=causal) for causal in (False, True)])
def test_rows_without_keys_nan_and_infinity() -> None:
    pattern = masks.local(40, 3, keys=16)
    S = logits(pattern, (2,), torch.float32, 32)
    S.values[0, 0, 3, 1], S.values[1, 1, 2, 4] = math.nan, math.inf
    for causal, empty in product((False, True), (False, True)):
        check(S, 8, causal=causal, nan_for_empty=empty)
    S.values[0, 0, 3], S.values[1, 1, 2] = -math.inf, -1e30
    check(S, 8)
    unaligned = torch.empty(S.values.numel() + 1, device="cuda")[1:].view_as(S.values).copy_(S.values)
    there = S.to("cuda")
    assert torch.equal(sparse_softmax(there.with_values(unaligned)).values, sparse_softmax(there).values)


def copies() -> list[Any]:
    """The softmax kernels with and without a copy in fragment order."""
    atoms = ("", "s8_m16n8k32")
    found = [SoftmaxConfig("float16", v, bits=bits, atom=atom) for v, bits, atom in product(LENGTHS, (4, 8, 16), atoms)]
    return [*found, SoftmaxConfig("float16", bits=4, atom="int4_as_int8_m16n8k32")]


@pytest.mark.parametrize("v", LENGTHS)
@pytest.mark.configs(copies())
def test_the_copy_in_fragment_order_is_the_one_that_the_product_would_make(v: int) -> None:
    S = logits(mc.random_pattern(100, 300, 0.7, v), (3,), torch.float16, 32).to("cuda")
    on = repeat_on_diagonal(S.pattern, 32, 3)
    for bits, qkv in PAIRS if v == 8 else PAIRS[:3]:
        config = softmax.product_config(on, bits, (qkv, True), 64, torch.float16)
        of = softmax.Logits(S.pattern, 32, (10**6, 10**6), 0.37, None, False)
        factors = torch.tensor([1.0, 0.5, 3.0], device="cuda")
        found = softmax.softmax_for_product(S.values, of, config, factors, nan_for_empty=False, lse=False)
        matrix = sparse_softmax(S, bits=bits, scale=0.37)
        assert matrix.scale is not None
        scale = found.scale.view(3, -1) / factors[:, None]
        assert torch.allclose(scale[:, :100].flatten(), matrix.scale.view(3, -1)[:, :100].flatten(), rtol=1e-6)
        pattern = matrix.pattern
        vectors = Vectors(pattern.row_offsets, pattern.col_indices, matrix.vectors(), Integer(bits, False))
        copy = config.pack(vectors, pattern.shape[1])
        given = softmax.packed_probabilities(on, 32, found.values)
        assert all(torch.equal(a, b) for a, b in zip(given, copy, strict=True))


def inputs(shape: tuple[int, ...], queries: int, keys: int, depth: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, length, depth).to(dtype) for length in (queries, keys, keys)]


def exact(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64."""
    s = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    s = (s if bias is None else s + bias.double().unsqueeze(-2)).masked_fill(~kept, -math.inf)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v.double(), s.logsumexp(-1)


def far(lse: Tensor, expected: Tensor) -> float:
    """Root mean square of what log-sum-exps are off, where there are keys; elsewhere they must be -inf."""
    finite = expected.isfinite()
    assert torch.equal(lse.cpu().isfinite(), finite)
    return float((lse.cpu().double() - expected)[finite].square().mean().sqrt())


def error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm())


@pytest.mark.parametrize(("softmax_bits", "qkv_bits"), PAIRS)
@pytest.mark.configs(pipelines())
def test_both_forms_are_as_near_to_float64_as_the_cpu(softmax_bits: int, qkv_bits: int) -> None:
    bits: dict[str, Any] = {"softmax_bits": softmax_bits, "qkv_bits": qkv_bits, "return_lse": True}
    for queries, keys, causal in ((512, 512, False), (300, 420, True), (512, 512, True)):
        q, k, v = inputs((2, 3), queries, keys, 64, torch.float16)
        heads = [masks.random(queries, 0.9, keys=keys, seed=seed) for seed in range(3)]
        bias = torch.randn(2, 1, keys) if queries == 300 else None
        tril = torch.ones(queries, keys).tril(0 if causal else keys) > 0
        for mask, dense in ((heads[0], heads[0].to_dense()), (heads, torch.stack([one.to_dense() for one in heads]))):
            there = [one.to("cuda") for one in mask] if isinstance(mask, list) else mask.to("cuda")
            on_gpu: dict[str, Any] = {"causal": causal, "bias": None if bias is None else bias.cuda(), **bits}
            tensors = [x.cuda() for x in (q, k, v)]
            expected, true = exact(q, k, v, dense & tril, bias)
            plain, sums = sparse_attention(q, k, v, mask, causal=causal, bias=bias, **bits)
            ours, lse = sparse_attention(*tensors, there, backend="unfused", **on_gpu)
            assert ours.dtype == torch.float16
            assert error(ours, plain) < 4e-3 * (20 if softmax_bits == 4 else 1)  # where a rounding went the other way
            assert torch.allclose(lse.cpu(), sums, rtol=1e-4, atol=5e-3)
            least = error(ours, expected)
            assert least < 1.05 * error(plain, expected) + 1e-3
            default, other = sparse_attention(*tensors, there, **on_gpu)
            assert error(default, expected) < 2 * least
            if (softmax_bits, qkv_bits) == (8, 8):  # keys that are alike share a scale
                assert far(other, true) < 2 * far(lse, true)
                tensors[1][..., 5, :] *= 6  # sticks out, so that each has its own, as in the three products
                _, sums = sparse_attention(q, tensors[1].cpu(), v, mask, causal=causal, bias=bias, **bits)
                _, other = sparse_attention(*tensors, there, **on_gpu)
            assert torch.allclose(other.cpu(), sums, rtol=1e-4, atol=2e-2)


@pytest.mark.parametrize("v", [4, 16])
@pytest.mark.parametrize("depth", [7, 40, 128])
def test_other_depths_and_vector_lengths(v: int, depth: int) -> None:
    q, k, values = inputs((4,), 90, 130, depth, torch.float32)
    mask = masks.random(90, 0.6, keys=130, vector_length=v)
    for bits in (4, 8):
        plain = sparse_attention(q, k, values, mask, qkv_bits=bits)
        ours = sparse_attention(q.cuda(), k.cuda(), values.cuda(), mask.to("cuda"), qkv_bits=bits)
        assert error(ours, plain) < 4e-3


@pytest.mark.parametrize("backend", ["fused", "unfused"])
def test_float64_tensors_are_read_as_float32(backend: Any) -> None:
    leaves = list(inputs((4,), 90, 130, 64, torch.float64))
    leaves[1][:, 5] *= 6  # sticks out, so that each key has a scale of its own on a GPU too
    leaves = [x.requires_grad_() for x in leaves]
    there = [x.detach().cuda().requires_grad_() for x in leaves]
    mask = masks.random(90, 0.6, keys=130)
    plain, ours = sparse_attention(*leaves, mask), sparse_attention(*there, mask.to("cuda"), backend=backend)
    assert ours.dtype == torch.float64 and error(ours, plain) < 4e-3 * (1 if backend == "unfused" else 2)
    plain.sin().sum().backward()
    ours.sin().sum().backward()
    for mine, x in zip(there, leaves, strict=True):
        assert mine.grad is not None and x.grad is not None and mine.grad.dtype == torch.float64
        assert error(mine.grad, x.grad) < 2e-2


@pytest.mark.parametrize("backend", ["unfused", "fused"])
def test_peak_memory_follows_the_mask(backend: Any) -> None:
    """With as many keys a query, twice the length takes twice the memory, and scores of all pairs would not fit in it."""
    peaks = []
    for length in (4096, 8192, 16384):
        q, k, v = (torch.randn(8, length, 64, device="cuda", dtype=torch.float16) for _ in "qkv")
        mask = masks.local(length, 64).to("cuda")
        sparse_attention(q, k, v, mask, backend=backend)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sparse_attention(q, k, v, mask, backend=backend)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert all(b < 2.1 * a for a, b in pairwise(peaks)) and peaks[-1] < 8 * 16384**2 / 4, peaks


def test_gradients_are_those_of_the_cpu() -> None:
    bias = torch.randn(64)
    q, k, v = inputs((2, 2), 96, 64, 32, torch.float32)
    mask = masks.random(96, 0.7, keys=64)
    found = []
    for device in ("cpu", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in (q, k, v, bias)]
        out = sparse_attention(*leaves[:3], mask.to(device), bias=leaves[3], backend="unfused")
        found.append(torch.autograd.grad(out.sin().sum(), leaves))
    for plain, ours in zip(*found, strict=True):
        assert error(ours, plain) < 5e-3


@pytest.mark.parametrize("backend", ["unfused", None])
@pytest.mark.configs(pipelines())
def test_a_warm_call_waits_for_nothing_and_a_graph_holds_it(backend: Any) -> None:
    tensors = [x.cuda() for x in inputs((2, 4), 256, 256, 64, torch.float16)]
    mask = masks.random(256, 0.8).to("cuda")

    def run() -> Tensor:
        with torch.no_grad():
            return sparse_attention(*tensors, mask, backend=backend)

    run()
    try:
        torch.cuda.set_sync_debug_mode("error")
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(2):
        torch.manual_seed(seed)
        for x in tensors:
            x.normal_()
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, run())


def test_the_result_of_the_last_launch_of_a_batch_is_right() -> None:
    """Places beyond 2**31 bytes of the softmax's input: offsets of 64 bits."""
    pattern = masks.random(4096, 0.0, keys=4096)
    if torch.cuda.get_device_properties(0).total_memory < 32 << 30:
        pytest.skip("needs 32 GiB of GPU memory")
    values = torch.zeros(72, pattern.padded(32).col_indices.shape[0] // 32, 8, 32, dtype=torch.float16, device="cuda")
    of = softmax.Logits(pattern.to("cuda"), 32, (4096, 4096), 1.0, None, False)
    values[-1, -1, -1, -1] = 1.0
    found = softmax.quantized_softmax(values, of, 8, nan_for_empty=False, lse=True)
    assert found.lse is not None
    expected = math.log(4095 + math.e)
    assert abs(float(found.lse[-1, -1]) - expected) < 1e-4 and abs(float(found.lse[0, 0]) - math.log(4096)) < 1e-4
    assert int(found.values[-1, -1, -1]) == 255 and int(found.values[-1, -1, 0]) == round(255 / math.e)
