"""A product with 4-bit weights in groups of 128 in Triton, autotuned: a baseline."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

tl: Any = None  # triton.language, once a kernel is made; Triton looks the name up in this module


def _kernel() -> Any:
    global tl
    triton, tl = import_module("triton"), import_module("triton.language")

    def product(x, w, s, y, m, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
        rows, half = tl.arange(0, ROWS), tl.arange(0, 64)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        from_x = x + rows[:, None] * k + half[None, :]
        from_w = w + half[:, None] * n + columns[None, :]
        from_s = s + columns
        there = rows[:, None] < m
        for _ in range(k // 128):
            codes = tl.load(from_w)  # (64, COLUMNS) uint8: k in the low nibble, k + 64 in the high one
            first = tl.load(from_x, mask=there, other=0.0)
            second = tl.load(from_x + 64, mask=there, other=0.0)
            low = ((codes & 15).to(tl.int8) - 8).to(tl.bfloat16)
            high = ((codes >> 4).to(tl.int8) - 8).to(tl.bfloat16)
            part = tl.dot(first, low)
            part = tl.dot(second, high, part)
            total += part * tl.load(from_s)[None, :].to(tl.float32)
            from_x += 128
            from_w += 64 * n
            from_s += n
        tl.store(y + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16), mask=there)

    configs = [
        triton.Config({"COLUMNS": columns}, num_warps=warps, num_stages=stages)
        for columns, warps, stages in ((32, 4, 6), (64, 4, 5), (64, 8, 4), (128, 4, 4), (128, 8, 4))
    ]
    return triton.autotune(configs=configs, key=["ROWS", "n", "k"])(triton.jit(product))


_cached: list[Any] = []


def w4_call(x: Tensor, n: int, k: int) -> Callable[[Tensor, Tensor], Tensor]:
    """What multiplies `x` (M, K) by weights (K / 2, N) uint8 with scales (K / 128, N) bfloat16."""
    if not _cached:
        _cached.append(_kernel())
    kernel, m = _cached[0], x.shape[0]
    y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    rows = 16 if m <= 16 else 32 if m <= 32 else 64

    def call(w: Tensor, s: Tensor) -> Tensor:
        kernel[lambda meta: (n // meta["COLUMNS"],)](x, w, s, y, m, n, k, ROWS=rows)
        return y

    return call


def w4_weight(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes, scales and the weight (N, K) in bfloat16."""
    codes = torch.randint(0, 256, (k // 2, n), device="cuda", dtype=torch.uint8)
    scales = (torch.rand(k // 128, n, device="cuda") + 0.1).bfloat16()
    parts = codes.view(k // 128, 64, n)
    ints = torch.cat([(parts & 15).int() - 8, (parts >> 4).int() - 8], 1)  # (K / 128, 128, N)
    return codes, scales, (ints * scales[:, None].float()).view(k, n).t().bfloat16()
