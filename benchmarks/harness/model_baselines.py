"""Whole models in bfloat16 with joint projections, and with torch's products of e4m3, beside which ours are timed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class FloatPart(nn.Module):
    """A float projection whose rows of a joint weight (all, in) are multiplied by the first one's call."""

    def __init__(self, joint: nn.Linear, begin: int, end: int, held: list[Tensor | None]) -> None:
        super().__init__()
        self.begin, self.end, self.is_last = begin, end, end == joint.out_features
        self.joint, self.held = joint if begin == 0 else None, held

    def forward(self, x: Tensor) -> Tensor:
        y = self.held[0] if self.joint is None else self.joint(x)
        self.held[0] = None if self.is_last else y
        assert y is not None
        return y[..., self.begin : self.end]


def fuse_float(model: Any) -> None:
    """Make one float product of queries, keys and values, and of gate and up."""
    for parent in list(model.layers.modules()):
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value")):
            if not hasattr(parent, names[0]):
                continue
            layers: list[nn.Linear] = [getattr(parent, name) for name in names]
            joint = nn.Linear(layers[0].in_features, sum(each.out_features for each in layers), device="meta")
            joint.weight = nn.Parameter(torch.cat([each.weight.detach() for each in layers]))
            biases = [each.bias.detach() for each in layers if each.bias is not None]
            joint.bias = nn.Parameter(torch.cat(biases)) if biases else None  # type: ignore[assignment]
            held: list[Tensor | None] = [None]
            end = 0
            for name, layer in zip(names, layers, strict=True):
                begin, end = end, end + layer.out_features
                setattr(parent, name, FloatPart(joint, begin, end, held))


class Float8Linear(nn.Module):
    """torch's product of e4m3: a scale per row of the weight, and one per token, found at each call."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()  # (out, in)
        scale = weight.abs().amax(1, keepdim=True) / 448
        self.register_buffer("weight", (weight / scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale.t().contiguous())  # (1, out)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale = rows.abs().amax(1, keepdim=True).float() / 448  # (N, 1)
        codes = (rows.float() / scale).to(torch.float8_e4m3fn)
        y = torch._scaled_mm(
            codes, self.weight.t(), scale, self.scale, self.bias, out_dtype=x.dtype, use_fast_accum=True
        )  # fmt: skip
        return y.view(*x.shape[:-1], -1)


def use_float8(model: Any) -> None:
    """Make the products of "bfloat16, fused" those of e4m3."""
    fuse_float(model)
    for parent in list(model.layers.modules()):
        for name, each in list(parent.named_children()):
            if type(each) is nn.Linear:
                setattr(parent, name, Float8Linear(each))
