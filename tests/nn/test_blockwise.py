"""Blockwise-scaled products by torch: the layouts that it is given, what is refused, and the result's rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from magicube_cutlass.nn.dense import blockwise
from magicube_cutlass.nn.dense.blockwise import blockwise_gemm, refusal


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scaled_mm(calls: list[tuple[int, ...]], a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """What torch computes, of operands as its CUDA source asks for them; its registration for fakes checks them too."""
    scale_a, scale_b, dtype = options["scale_a"], options["scale_b"], options["out_dtype"]
    (m, k), n = a.shape, b.shape[1]
    assert a.dtype == b.dtype == torch.float8_e4m3fn and a.is_contiguous() and b.t().is_contiguous()
    assert m % 16 == k % 512 == n % 16 == 0 and set(options) == {"scale_a", "scale_b", "out_dtype"}
    assert scale_a.shape == (m, k // 128) and scale_a.stride(0) == 1 and scale_a.stride(1) in (m, 1)
    assert scale_b.shape == (k // 128, -(-n // 128)) and scale_b.stride() == (1, k // 128)
    fakes = [each.to("meta") for each in (a, b)]
    scales = [torch.empty_strided(each.shape, each.stride(), device="meta") for each in (scale_a, scale_b)]
    found = torch.ops.aten._scaled_mm(*fakes, *scales, out_dtype=dtype)
    calls.append((m, n, k))
    spread = scale_b.t().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    values = a.double() * scale_a.double().repeat_interleave(128, 1)
    y = (values @ (b.t().double() * spread.double()).t()).to(dtype)
    assert found.shape == y.shape and found.dtype == y.dtype
    return y


@pytest.mark.parametrize("m", [0, 1, 16, 37])
def test_torch_gets_the_layouts_that_it_asks_for(m: int, monkeypatch: Any) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **options: scaled_mm(calls, *args, **options))
    a = mc.quantize(normal(m, 1024), dtype="e4m3_g128")
    b = mc.quantize(normal(144, 1024, seed=1) * normal(144, 1).exp(), dtype="e4m3_b128")
    got = blockwise_gemm(a.data, a.scale, b.data, b.scale)
    want = a.dequantize().double() @ b.dequantize().double().t()
    assert got.dtype == torch.bfloat16 and got.shape == (m, 144)
    limit = torch.finfo(torch.bfloat16).eps / 2 * want.abs() + 2.0**-22 * want.abs().amax() if m else want
    assert bool(((got.double() - want).abs() <= limit).all()), "rounded once"
    assert calls == [(-(-m // 16) * 16, 144, 1024)] * (m > 0)


@pytest.mark.parametrize(
    ("arch", "version", "cuda", "shape", "match"),
    [
        ("sm_90a", "2.11.0", "13.0", (144, 1024), ""),
        ("sm_90a", "2.9.0+cu129", "12.9", (144, 1024), ""),
        ("sm_100a", "2.11.0", "13.0", (144, 1024), "need sm_90a, got sm_100a"),
        ("sm_90a", "2.8.1", "12.9", (144, 1024), "need torch 2.9 for CUDA 12.9, got 2.8.1 for 12.9"),
        ("sm_90a", "2.13.0+cpu", None, (144, 1024), "got 2.13.0+cpu for None"),
        ("sm_90a", "2.10.0", "12.8", (144, 1024), "got 2.10.0 for 12.8"),
        ("sm_90a", "2.11.0", "13.0", (150, 1024), "multiples of 512, got 150 and 1024"),
        ("sm_90a", "2.11.0", "13.0", (144, 768), "multiples of 512, got 144 and 768"),
        ("sm_90a", "2.11.0", "13.0", (0, 512), "got 0 and 512"),
    ],
)
def test_what_torch_does_not_take_is_refused(
    arch: str, version: str, cuda: str | None, shape: tuple[int, int], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGICUBE_ARCH", arch)
    monkeypatch.setattr(blockwise.torch, "__version__", version)
    monkeypatch.setattr(blockwise.torch.version, "cuda", cuda)
    found = refusal(*shape)
    assert match in found and bool(found) is bool(match)
