"""The encoders of the latency benchmark, each with a float32 reference for its error."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from sparse_encoder import VECTOR, BlockAttention, Encoder, Shape, dense, masked, quantized

import magicube_cutlass as mc
from magicube_cutlass import masks
from magicube_cutlass.nn import SparseQuantConfig, SparseQuantLinear

PAIRS = ((16, 8), (8, 8), (8, 4))
DENSE, FLEX, LINEARS = "torch fp16", "FlexAttention fp16", " + linear"
LINEAR = SparseQuantConfig(sparsity=0.9, vector_length=8, bits=8, act_bits=8)
BLOCK = 128  # of FlexAttention's mask
VOCABULARY, CLASSES = 256, 10


@dataclass(frozen=True)
class Case:
    """One field of the figure."""

    length: int
    heads: int
    batch: int
    sparsity: float

    def __str__(self) -> str:
        return f"L = {self.length}, {self.heads} heads, batch {self.batch}, sparsity {self.sparsity:g}"

    def shape(self) -> Shape:
        return Shape(VOCABULARY, CLASSES, self.length, heads=self.heads)


def names() -> list[str]:
    """The baselines, in the order in which they are measured."""
    ours = [f"{bits[0]}b-{bits[1]}b{linear}" for linear in ("", LINEARS) for bits in PAIRS]
    return [DENSE, FLEX, *ours]


@lru_cache(maxsize=4)
def vector_mask(length: int, sparsity: float) -> mc.Pattern:
    """Random 8 x 1 vectors."""
    return masks.random(length, sparsity, vector_length=VECTOR)


def block_mask(length: int, sparsity: float, device: str) -> tuple[Any, Tensor]:
    """FlexAttention's mask, as many random blocks in each row of blocks, and which keys are seen, bool (L, L)."""
    from torch.nn.attention.flex_attention import BlockMask

    count, random = length // BLOCK, torch.Generator().manual_seed(7)
    kept = max(1, round((1 - sparsity) * count))
    order = torch.rand(count, count, generator=random).argsort(1)[:, :kept].sort(1).values.to(torch.int32)
    columns = torch.zeros(1, 1, count, count, dtype=torch.int32)
    columns[0, 0, :, :kept] = order
    none = torch.zeros(1, 1, count, dtype=torch.int32)
    seen = torch.zeros(count, count, dtype=torch.bool).scatter_(1, order.long(), True)
    lists = [each.to(device) for each in (none, torch.zeros_like(columns), torch.full_like(none, kept), columns)]
    known = seen.to(device)
    mask = BlockMask.from_kv_blocks(
        lists[0],
        lists[1],
        lists[2],
        lists[3],
        BLOCK_SIZE=BLOCK,
        mask_mod=None if device == "cuda" else lambda _b, _h, i, j: known[i // BLOCK, j // BLOCK],  # read uncompiled
        seq_lengths=(length, length),
    )
    return mask, seen.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


@dataclass(frozen=True)
class Baseline:
    """A network, and one in float32 with dense products that computes what it should."""

    net: Encoder
    exact: Encoder


def with_weights(net: Encoder, weights: dict[str, Tensor]) -> Encoder:
    net.load_state_dict(weights)
    return net.eval()


def unpruned(net: Encoder, exact: Encoder) -> None:
    """Gives the linear layers of ``exact`` the weights that the sparse ones of ``net`` compute with."""
    for name, layer in net.named_modules():
        if isinstance(layer, SparseQuantLinear):
            plain = exact.get_submodule(name)
            assert isinstance(plain, nn.Linear)
            plain.weight.data = layer.matrix().to_dense().to(torch.float32)


def baselines(case: Case, words: Tensor) -> dict[str, Callable[[], Baseline]]:
    """Makers by name; the nets of a case have the same random weights."""
    shape, device = case.shape(), str(words.device)
    torch.manual_seed(0)
    first = Encoder(shape, dense)
    for name, parameter in first.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data *= 2  # logits of a spread as trained networks have, not an average of all keys
    weights = first.state_dict()
    mask = vector_mask(case.length, case.sparsity)

    def flex() -> Baseline:
        blocks, seen = block_mask(case.length, case.sparsity, device)
        net = with_weights(Encoder(shape, lambda shape: BlockAttention(shape, blocks)), weights)
        exact = with_weights(Encoder(shape, masked(mc.Pattern.from_dense(seen, 8))), weights)
        return Baseline(net.to(device).half(), exact.to(device))

    def ours(bits: tuple[int, int], linear: bool) -> Baseline:
        net = with_weights(Encoder(shape, quantized(mask, *bits)), weights).to(device).half()
        exact = with_weights(Encoder(shape, masked(mask)), weights).to(device)
        if linear:
            mc.convert(net, {"head": None, "*": LINEAR}, calibrate=[words], freeze=True, progress=False)
            unpruned(net, exact)
        return Baseline(net, exact)

    def plain() -> Baseline:
        return Baseline(copy.deepcopy(first).eval().to(device).half(), copy.deepcopy(first).eval().to(device))

    pairs = [(bits, linear) for linear in (False, True) for bits in PAIRS]
    makers: list[Callable[[], Baseline]] = [plain, flex, *(partial(ours, bits, linear) for bits, linear in pairs)]
    return dict(zip(names(), makers, strict=True))


@torch.no_grad()
def relative_error(baseline: Baseline, words: Tensor) -> float:
    """Of the first sequence's vectors after the last block, in the Frobenius norm."""
    expected = baseline.exact.hidden(words[:1])  # (1, L, width)
    return float((baseline.net.hidden(words)[:1].float() - expected).norm() / expected.norm())
