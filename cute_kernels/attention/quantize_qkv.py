"""Quantization of Q, K and V for the fused attention kernel: one launch on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.attention.config import HEADS
from cute_kernels.attention.heuristics import PANEL_ARCHES
from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig
from cute_kernels.jit.device import current_arch, device_of
from cute_kernels.jit.kernel import get_kernel

_ALIGNMENT = 16


@dataclass(frozen=True)
class OperandsConfig(KernelConfig):
    """Config of the kernel ``attention_operands``.

    Parameters
    ----------
    x : str
        Dtype of Q, K and V.
    head : int
        Head dimension.
    bits : int
        Width of the integers, 8 or 4; stored as one byte each.
    cluster : int
        CTAs per matrix.
    steps : int
        Pairs of 16-byte vectors that a thread holds in shared memory. It loads the rest of K and V twice.
    threads : int
        Threads per CTA.

    Examples
    --------
    >>> OperandsConfig("float16", 64).name
    'attention_operands-float16-d64-s8-c8s3w16'
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
    """Quantized Q, K and V for :func:`~cute_kernels.attention.fused.fused_attention`."""

    q: Tensor  # (batch, queries, d) int8
    q_scale: Tensor  # (batch, queries) float32
    k: Tensor  # (batch, keys, d) int8
    k_scale: Tensor  # (batch, keys) float32
    keys_alike: Tensor  # (batch,) int32, nonzero if the keys of a matrix share one scale
    v: Tensor  # (batch, keys, d) int8
    v_scale: Tensor  # (batch,) float32
    ready: Tensor  # (batch, parts) int32, 1 if the part of a matrix is written; the next kernel waits for it


def choose(x: str, head: int, bits: int, arch: str) -> OperandsConfig:
    """Return the config for inputs of dtype `x`, head dimension `head` and `bits` on `arch`.

    Examples
    --------
    >>> choose("bfloat16", 128, 8, "sm_80").cluster
    1
    """
    return OperandsConfig(x, head, bits, cluster=8 if arch in PANEL_ARCHES else 1)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless Q, K and V are contiguous, aligned real matrices on one GPU with matching shapes."""
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
    if q.shape[2] not in HEADS:
        raise ValueError(f"q must have a head dimension of {HEADS}, got {q.shape[2]}")


def encode_operands(q: Tensor, k: Tensor, v: Tensor, *, bits: int) -> Operands:
    """Quantize Q, K and V in one launch, without waiting for the GPU.

    ``round(x / scale)``, one byte each, ``scale = max|x| / (2^(bits - 1) - 1)``.

    - Q has per-row scales.
    - V has one scale per matrix, since the scale must be constant along the sum over keys.
    - 8-bit K has one scale per matrix if the amax of the matrix is at most 2.5 times the mean row amax. Its integers
      are then at most 2.5 times as coarse as with the average row's own scale. Else K has per-row scales.

    Scales are those of :func:`cute_kernels.convert.quantize.quantize`: 1 for zeros, NaN for non-finite entries.

    Parameters
    ----------
    q : Tensor, shape (batch, queries, d)
        float16, bfloat16 or float32 on a GPU, contiguous, aligned to 16 bytes; d is 32, 64 or 128.
    k, v : Tensor, shape (batch, keys, d)
        Like `q`.
    bits : int
        8 or 4.

    Returns
    -------
    Operands

    Raises
    ------
    ValueError
        If a dtype, shape, device or memory layout is not supported.
    """
    _check_inputs(q, k, v)
    batch, queries, head = q.shape
    keys, device = k.shape[1], q.device
    ints = workspace.empty((batch * (queries + 2 * keys) * head,), torch.int8, device)
    scales = workspace.empty((batch * (queries + keys + 1),), torch.float32, device)
    q_ints, k_ints, v_ints = ints.split([batch * rows * head for rows in (queries, keys, keys)])
    k_scale, q_scale, v_scale = scales.split([batch * rows for rows in (keys, queries, 1)])  # K's first: TMA
    with device_of(q):
        config = choose(REAL_DTYPES[q.dtype], head, bits, current_arch())
    alike = workspace.empty((batch,), torch.int32, device)
    ready = workspace.empty((batch, 3 * config.cluster), torch.int32, device)
    found = Operands(
        q_ints.view(q.shape), q_scale.view(batch, queries), k_ints.view(k.shape), k_scale.view(batch, keys), alike,
        v_ints.view(v.shape), v_scale, ready,
    )  # fmt: skip
    if not batch * (queries + keys):
        return found
    with device_of(q):
        get_kernel(config).launch(
            (3 * batch * config.cluster, 1, 1),
            (
                q.data_ptr(), k.data_ptr(), v.data_ptr(), q_ints.data_ptr(), k_ints.data_ptr(), v_ints.data_ptr(),
                q_scale.data_ptr(), k_scale.data_ptr(), v_scale.data_ptr(), alike.data_ptr(), ready.data_ptr(),
                queries, keys,
            ),
            (config.cluster, 1, 1) if config.cluster > 1 else None,
        )  # fmt: skip
    return found


def default_configs(arch: str = "sm_90a") -> list[OperandsConfig]:
    """Return the configs for 8-bit integers of 16-bit floats.

    Examples
    --------
    >>> len(default_configs())
    6
    """
    return [choose(x, head, 8, arch) for x, head in product(("float16", "bfloat16"), (32, 64, 128))]
