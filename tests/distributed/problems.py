"""Random matrices for the checks, the same on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

import magicube_cutlass as mc

SHAPES = ((40, 48, 6), (1, 16, 3), (3, 5, 1), (17, 33, 9), (64, 64, 16), (2, 7, 5), (24, 3, 2))


def matrix(
    m: int, k: int, generator: torch.Generator, *, kind: str = "SRBCRS", bits: int = 8, v: int = 8, scaled: bool = True
) -> mc.SRBCRS | mc.BCRS:
    """A sparse matrix with empty, full and skewed rows."""
    density = torch.rand(-(-m // v), 1, generator=generator) ** 2
    mask = (torch.rand(-(-m // v), k, generator=generator) < density).repeat_interleave(v, 0)[:m]
    dense = torch.randn(m, k, generator=generator) * mask
    made = getattr(mc, kind)
    if scaled:
        return made.from_dense(dense, vector_length=v, bits=bits, scale="row")
    top = 2 ** (bits - 1)
    ints = torch.randint(-top, top, (m, k), generator=generator, dtype=torch.int16) * mask
    return made.from_dense(ints, vector_length=v, bits=bits)


def activations(k: int, n: int, generator: torch.Generator) -> Tensor:
    """Floats with rows of very different sizes, one of zeros."""
    x = torch.randn(k, n, generator=generator) * torch.exp(3 * torch.randn(k, 1, generator=generator))
    return x * (torch.rand(1, n, generator=generator) > 0.1)


def integers(k: int, n: int, generator: torch.Generator) -> Tensor:
    """int8 over the whole range."""
    return torch.randint(-128, 128, (k, n), generator=generator, dtype=torch.int8)


def spread(m: int, k: int, generator: torch.Generator) -> Tensor:
    """Floats of four kinds: normal, with large rows, with outliers, of few values."""
    x = torch.randn(m, k, generator=generator)
    kind = int(torch.randint(0, 4, (), generator=generator))
    if kind == 1:
        return x * torch.exp(4 * torch.randn(m, 1, generator=generator))
    if kind == 2:
        return x * (1 + 100 * (torch.rand(m, k, generator=generator) < 0.02))
    return x.sign() if kind == 3 else x
