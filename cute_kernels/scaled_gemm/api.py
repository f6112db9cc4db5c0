"""Dense product of small floats: any two of e5m2, e4m3, e3m2, e2m3 and e2m1, with scales of many kinds.

Source: OCP Microscaling Formats (MX) v1.0, section 6 (block scales).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import floats
from cute_kernels.floats import float_format, packed_bytes
from cute_kernels.gemm.checks import check_output, floating, of_nothing
from cute_kernels.scaled_gemm.config import TILE, FloatGemmConfig, Kind
from cute_kernels.scaled_gemm.cuda import decoded_of, gemm_floats_cuda, plan_cuda
from cute_kernels.scaled_gemm.sm100 import Tcgen05Config
from cute_kernels.scaled_gemm.small_m import FewRowsConfig

BLOCKS = (16, 32)
BLOCK_SCALES = ("ue8m0", "e4m3")


@dataclass(frozen=True, eq=False)
class FloatOperand:
    """``x[r, k] = scale[r] blocks[r, k // block] tiles[r // 128, k // 128] decode(codes)[r, k]``.

    Arguments:
        codes: uint8 (R, ceil(K bits / 8)), packed along k as by :func:`cute_kernels.floats.pack`.
        dtype: the codes' format.
        k: K.
        scale: float32, float16 or bfloat16 (R,) or (), or None.
        blocks: codes of ``scale_dtype``, uint8 (R, ceil(K / block)), or None.
        block: 16 or 32, with ``blocks``.
        scale_dtype: ``"ue8m0"`` or ``"e4m3"``, with ``blocks``.
        tiles: float32 (ceil(R / 128), ceil(K / 128)), or None; not with ``blocks``.
    Raises ``TypeError`` and ``ValueError`` that name the argument.
    """

    codes: Tensor
    dtype: str
    k: int
    scale: Tensor | None = None
    blocks: Tensor | None = None
    block: int = 0
    scale_dtype: str = ""
    tiles: Tensor | None = None

    def __post_init__(self) -> None:
        float_format(self.dtype)
        if self.codes.dtype != torch.uint8:
            raise TypeError(f"codes must be uint8, got {self.codes.dtype}")
        expected = packed_bytes(self.k, self.dtype)
        if self.codes.dim() != 2 or self.codes.shape[1] != expected:
            raise ValueError(f"codes must have the shape (R, {expected}) for {self.k} codes of {self.dtype}, "
                             f"got {tuple(self.codes.shape)}")  # fmt: skip
        if self.scale is not None:
            floating(self.scale, "scale", ((self.rows,), ()), self.device, False)
        if (self.blocks is None) != (self.block == 0) or (self.blocks is None) != (self.scale_dtype == ""):
            raise ValueError(f"blocks, block and scale_dtype must be given together, got block {self.block} and "
                             f"scale_dtype {self.scale_dtype!r}")  # fmt: skip
        if self.blocks is not None:
            self._check_blocks(self.blocks)
        if self.tiles is not None:
            if self.blocks is not None:
                raise ValueError(f"tiles must be None with blocks, got tiles of shape {tuple(self.tiles.shape)}")
            if self.tiles.dtype != torch.float32:
                raise TypeError(f"tiles must be float32, got {self.tiles.dtype}")
            floating(self.tiles, "tiles", ((-(-self.rows // TILE), -(-self.k // TILE)),), self.device, False)

    def _check_blocks(self, blocks: Tensor) -> None:
        if self.block not in BLOCKS:
            raise ValueError(f"block must be one of {BLOCKS}, got {self.block}")
        if self.scale_dtype not in BLOCK_SCALES:
            raise ValueError(f"scale_dtype must be one of {', '.join(BLOCK_SCALES)}, got {self.scale_dtype!r}")
        if blocks.dtype != torch.uint8:
            raise TypeError(f"blocks must be uint8, got {blocks.dtype}")
        expected = (self.rows, -(-self.k // self.block))
        if tuple(blocks.shape) != expected:
            raise ValueError(f"blocks must have the shape {expected}, got {tuple(blocks.shape)}")
        if blocks.device != self.device:
            raise ValueError(f"blocks must be on {self.device} as codes is, got {blocks.device}")

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def kind(self) -> Kind:
        """What kernels are compiled for."""
        return Kind(self.dtype, self.block, self.scale_dtype, self.tiles is not None)

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The real numbers (R, K), without ``scale``."""
        found = floats.decode(floats.unpack(self.codes, self.k, self.dtype), self.dtype, out_dtype=dtype)  # (R, K)
        if self.blocks is not None:
            factors = floats.decode(self.blocks, self.scale_dtype, out_dtype=dtype)  # (R, blocks)
            found *= factors.repeat_interleave(self.block, 1)[:, : self.k]  # (R, K)
        if self.tiles is not None:
            rows = self.tiles.to(dtype).repeat_interleave(TILE, 0)[: self.rows]  # (R, tiles)
            found *= rows.repeat_interleave(TILE, 1)[:, : self.k]  # (R, K)
        return found


@dataclass(frozen=True)
class FloatCall:
    """A checked product; ``c`` is None where ``beta`` is 0."""

    a: FloatOperand  # M rows
    b: FloatOperand  # N rows
    alpha: float
    beta: float
    c: Tensor | None  # (M, N)
    bias: Tensor | None  # (N,)
    out_dtype: torch.dtype
    fast_accum: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.a.rows, self.b.rows, self.a.k


@dataclass(frozen=True)
class FloatPlan:
    """How a product would run: ``kernel`` is ``torch.matmul`` or the name of ``config``; ``copies``: operands whose
    codes are copied first, so that their rows start at multiples of 16 bytes; ``decoded``: operands that a
    kernel of its own decodes first, because of many rows; ``refused``: on sm_100a and sm_103a, what keeps the operands
    from ``tcgen05.mma``."""

    kernel: str
    copies: tuple[str, ...] = ()
    decoded: tuple[str, ...] = ()
    config: FloatGemmConfig | FewRowsConfig | Tcgen05Config | None = None
    refused: str = ""


def check(
    a: FloatOperand,
    b: FloatOperand,
    alpha: float,
    beta: float,
    c: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> FloatCall:
    """The product that the arguments of :func:`gemm_floats` describe."""
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, FloatOperand):
            raise TypeError(f"{name} must be a FloatOperand, got {type(operand).__name__}")
    if a.k != b.k:
        raise ValueError(f"k of a must be k of b, got {a.k} and {b.k}")
    if a.device != b.device:
        raise ValueError(f"b must be on {a.device} as a is, got {b.device}")
    shape, wide = (a.rows, b.rows), out_dtype == torch.float64
    check_output(out, out_dtype, shape, a.device, integers=False)
    if beta != 0.0 and c is None:
        raise ValueError(f"c must be given for beta {beta}")
    c = floating(c, "c", (shape,), a.device, wide) if c is not None and beta != 0.0 else None
    if bias is not None:
        bias = floating(bias, "bias", ((b.rows,),), a.device, wide)
    return FloatCall(a, b, float(alpha), float(beta), c, bias, out_dtype, fast_accum)


def gemm_floats(
    a: FloatOperand,
    b: FloatOperand,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    fast_accum: bool = False,
) -> Tensor:
    """``D[m, n] = alpha sum_k a[m, k] b[n, k] + beta c[m, n] + bias[n]`` with a and b as :class:`FloatOperand` says.

    Arguments:
        a: operand of M rows.
        b: operand of N rows: the columns of the right matrix, each contiguous in k.
        alpha, beta, c: as in BLAS; ``c`` (M, N) of a float dtype is not read where ``beta`` is 0, and may be ``out``.
        bias: (N,).
        out: (M, N) of ``out_dtype`` to write to; its rows must not have gaps between elements.
        out_dtype: float32, float16, bfloat16, on the CPU float64.
        fast_accum: on sm_90a without block scales, the Tensor Cores sum all of K, with about 14 bits; otherwise, and by
            the kernel of few rows, 128 of K at a time, and float32 additions do the rest.
    Codes are decoded exactly.  On sm_90a, operands without block scales are multiplied as e4m3 or e5m2; the partial
    sums are then kept to about 2^-13 of the largest of them or of the products (docs/floats.md has the bound).  With
    block scales, and on other chips, values and scales become bfloat16, exactly but for magnitudes outside of
    2^-126..2^128, and sums are those of float32.  On sm_100a and sm_103a, operands that ``tcgen05.mma`` can read are
    multiplied as they are, scales of blocks, which have to be positive, included, where ``MAGICUBE_TCGEN05=1``: that
    kernel has never been run, and docs/blackwell.md has its rules.  On the CPU: ``torch.matmul`` of float32, or of
    float64 for that output.
    Raises ``TypeError`` and ``ValueError`` that name the argument.
    """
    call = check(a, b, alpha, beta, c, bias, out, out_dtype, fast_accum)
    m, n, k = call.shape
    if a.device.type == "cpu":
        result = _gemm_cpu(call)
        return result if out is None else out.copy_(result)
    if a.device.type != "cuda":
        raise NotImplementedError(f"a must be on a CPU or a CUDA device, got {a.device}")
    target = torch.empty((m, n), dtype=out_dtype, device=a.device) if out is None else out
    if min(m, n, k) == 0:
        return of_nothing(call.c, call.beta, call.bias, target)
    return gemm_floats_cuda(call, target)


def _gemm_cpu(call: FloatCall) -> Tensor:
    work = torch.float64 if call.out_dtype == torch.float64 else torch.float32
    result = call.a.values(work) @ call.b.values(work).t()  # (M, N)
    if call.a.scale is not None:
        result *= call.a.scale.to(work).unsqueeze(-1) if call.a.scale.dim() else call.a.scale.to(work)  # (M, 1)
    if call.b.scale is not None:
        result *= call.b.scale.to(work)  # (N,)
    result *= call.alpha
    if call.c is not None:
        result.add_(call.c.to(work), alpha=call.beta)  # (M, N)
    if call.bias is not None:
        result += call.bias.to(work)  # (N,)
    return result.to(call.out_dtype)


def explain_gemm_floats(
    a: FloatOperand, b: FloatOperand, *, out_dtype: torch.dtype = torch.float32, fast_accum: bool = False
) -> FloatPlan:
    """How :func:`gemm_floats` would run these arguments; nothing is computed or compiled."""
    call = check(a, b, 1.0, 0.0, None, None, None, out_dtype, fast_accum)
    if a.device.type == "cpu":
        return FloatPlan("torch.matmul")
    choice, copies = plan_cuda(call)
    return FloatPlan(choice.config.name, copies, decoded_of(call, choice.config), choice.config, choice.refused)
