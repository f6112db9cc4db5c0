"""Operands of attention as integers on a GPU: Q, K and V in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.attention.config import HEADS
from cute_kernels.attention.heuristics import PANEL_ARCHES
from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig
from cute_kernels.jit.device import current_arch, device_of
from cute_kernels.jit.kernel import get_kernel

_ALIGNMENT = 16


@dataclass(frozen=True)
class OperandsConfig(KernelConfig):
    """What the kernel is compiled for: rows of ``head`` entries of dtype ``x``, integers of ``bits``.

    ``cluster`` blocks share a matrix; a thread keeps ``steps`` pairs of vectors of 16 bytes in shared memory, and loads
    what else it has of K and V twice.
    """

    x: str
    head: int
    bits: int = 8
    cluster: int = 8
    steps: int = 3
    threads: int = 512

    @property
    def smem_bytes(self) -> int:
        return self.threads * self.steps * 32

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return (
            f"attention_operands-{self.x}-d{self.head}-s{self.bits}-c{self.cluster}s{self.steps}w{self.threads // 32}"
        )

    kernel_header = "attention/quantize_qkv.cuh"
    kernel_entry = "attention_operands"

    def _constants(self) -> dict[str, object]:
        return {
            "kHead": self.head,
            "kBits": self.bits,
            "kStored": 8,
            "kSigned": True,
            "kTruncate": False,
            "kSteps": self.steps,
            "kThreads": self.threads,
            "kCluster": self.cluster,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": OUT_TYPES[self.x]}


class Operands(NamedTuple):
    """Q, K and V as :func:`cute_kernels.attention.fused.attend` takes them: what :func:`encode_operands` returns."""

    q: Tensor  # int8 (batch, queries, d)
    q_scale: Tensor  # float32 (batch, queries)
    k: Tensor  # int8 (batch, keys, d)
    k_scale: Tensor  # float32 (batch, keys)
    keys_alike: Tensor  # int32 (batch,), not 0 where the scales of a matrix are one
    v: Tensor  # int8 (batch, keys, d)
    v_scale: Tensor  # float32 (batch,)
    ready: Tensor  # int32 (batch, parts), 1 where a part of a matrix is there, for the kernel that comes next


def choose(x: str, head: int, bits: int, arch: str) -> OperandsConfig:
    """The config for ``arch``."""
    return OperandsConfig(x, head, bits, cluster=8 if arch in PANEL_ARCHES else 1)


def encode_operands(q: Tensor, k: Tensor, v: Tensor, *, bits: int) -> Operands:
    """``round(x / scale)``, one byte each, ``scale = max|x| / (2^(bits - 1) - 1)``; one launch, waits for nothing.

    Q has a scale a row.  V has a scale a matrix, since it may not vary along the sum over keys.  So has K of 8 bits
    where the largest magnitude of the matrix is at most 2.5 times the mean of those of its rows: integers are then up
    to 2.5 times as coarse as an average row's own, and no coarser than those of the largest row.  Elsewhere each row of
    K has its scale.

    Arguments:
        q: float16, bfloat16 or float32 (batch, queries, d) on a GPU, contiguous, at a multiple of 16 bytes; d is 32, 64
            or 128.
        k, v: (batch, keys, d), otherwise like q.
        bits: 8 or 4.
    Scales are those of :func:`cute_kernels.convert.quantize.quantize`: 1 for zeros, NaN with infinities and NaN.
    Raises ``ValueError`` naming the argument, and what :func:`cute_kernels.jit.get_kernel` raises.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in REAL_DTYPES or x.dtype != q.dtype or x.device != q.device or not x.is_cuda:
            raise ValueError(
                f"{name} must be float16, bfloat16 or float32, on a GPU, like q, got {x.dtype}, {x.device}"
            )
        wanted = tuple((q if x is q else k).shape)
        if x.ndim != 3 or tuple(x.shape) != wanted or x.shape[::2] != q.shape[::2]:
            raise ValueError(
                f"{name} must have 3 dimensions, batch and depth of q and the keys of k, got {tuple(x.shape)} "
                f"for q {tuple(q.shape)} and k {tuple(k.shape)}"
            )
        if not x.is_contiguous() or x.data_ptr() % _ALIGNMENT:
            raise ValueError(f"{name} must be contiguous and start at a multiple of {_ALIGNMENT} bytes")
    batch, queries, head = q.shape
    if head not in HEADS:
        raise ValueError(f"q must have a depth of {HEADS}, got {head}")
    keys, device = k.shape[1], q.device
    ints = torch.empty(batch * (queries + 2 * keys) * head, dtype=torch.int8, device=device)
    scales = torch.empty(batch * (queries + keys + 1), dtype=torch.float32, device=device)
    of_q, of_k, of_v = ints.split([batch * rows * head for rows in (queries, keys, keys)])
    k_scale, q_scale, v_scale = scales.split([batch * rows for rows in (keys, queries, 1)])  # K's is copied in runs
    with device_of(q):
        config = choose(REAL_DTYPES[q.dtype], head, bits, current_arch())
    alike = torch.empty(batch, dtype=torch.int32, device=device)
    ready = torch.empty((batch, 3 * config.cluster), dtype=torch.int32, device=device)
    found = Operands(
        of_q.view(q.shape), q_scale.view(batch, queries), of_k.view(k.shape), k_scale.view(batch, keys), alike,
        of_v.view(v.shape), v_scale, ready,
    )  # fmt: skip
    if not batch * (queries + keys):
        return found
    with device_of(q):
        get_kernel(config).launch(
            (3 * batch * config.cluster, 1, 1),
            (
                q.data_ptr(), k.data_ptr(), v.data_ptr(), of_q.data_ptr(), of_k.data_ptr(), of_v.data_ptr(),
                q_scale.data_ptr(), k_scale.data_ptr(), v_scale.data_ptr(), alike.data_ptr(), ready.data_ptr(),
                queries, keys,
            ),
            (config.cluster, 1, 1) if config.cluster > 1 else None,
            pdl=True,
        )  # fmt: skip
    return found


def default_configs(arch: str = "sm_90a") -> list[OperandsConfig]:
    """The kernels for 8-bit integers of halves."""
    return [choose(x, head, 8, arch) for x, head in product(("float16", "bfloat16"), (32, 64, 128))]
