"""Direct product of int8 digits on the CPU engine, with its error by sixteen probes, in one call per left operand.

``C = s_a (A1 B1) s_b`` with one int8 digit per entry, ``A ~ s_a A1`` per row and ``B ~ B1 s_b`` per column. The
residuals ``dA = A - s_a A1`` and ``dB = B - B1 s_b`` are exact, and ``A B - s_a (A1 B1) s_b = A dB + dA (B - dB)`` is
no difference of large numbers: its product with probes W (N, 16) measures the error without reading C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.cpu import extension
from cute_kernels.cpu.arguments import check_array
from cute_kernels.cpu.conversions import decompose_cpu
from cute_kernels.cpu.estimate import PROBES

MAX_K = 2**17  # int32 sums products of magnitude 127^2 exactly
_HIGH, _RADIX = 127.0, 256.0  # the rule of int8 digits, as in convert/digits.py
_PANEL, _QUAD = 64, 4  # columns of a panel, k of a lane
_FLOOR = 2.0**-60  # added to bounds whose largest is 1: exceeds what subnormal numbers lose


@dataclass(frozen=True)
class DirectRight:
    """Right operand of :func:`direct`, made by :func:`prepare_direct`; its tensors must not be changed."""

    shape: tuple[int, int]  # (K, N)
    scale: Tensor  # (N,) float32, s_b
    packed: Tensor  # (panels, K / 4, 64, 4) int8, digits of B
    column_sums: Tensor  # (64 panels,) int32
    vectors: Tensor  # (K, 2, 16) float32, dB W and (B - dB) W, divided by a power of two
    bounds: Tensor  # (2, K) float32, |dB| wbar and |B - dB| wbar, likewise
    handle: object  # of the engine: addresses of these tensors


class DirectProduct(NamedTuple):
    """A direct product and its error; all sums are NaN if an entry is non-finite or overflows."""

    out: Tensor  # (M, N) float32, C
    energy: float  # ||E W||_F^2, E = A B - s_a (A1 B1) s_b
    eta: float  # bound of the rounding in E W, Frobenius norm
    norm: float  # ||C||_F^2
    rounding: float  # bound of ||C - s_a (A1 B1) s_b||_F
    gram_bytes: bytes  # (16, 16) float64

    @property
    def gram(self) -> Tensor:
        """Gram matrix of ``E W``, shape (16, 16), float64; `energy` is its trace."""
        return torch.frombuffer(bytearray(self.gram_bytes), dtype=torch.float64).view(PROBES, PROBES)


def prepare_direct(B: Tensor, W: Tensor, wbar: Tensor) -> DirectRight:
    """Prepare the right operand of :func:`direct`: packed digits, and products of B and its residuals with probes.

    Parameters
    ----------
    B : Tensor, shape (K, N)
        float32, on the CPU; K at most ``2^17``.
    W : Tensor, shape (N, 16)
        float32 probes, contiguous.
    wbar : Tensor, shape (N,)
        float64 row norms of `W`.

    Returns
    -------
    DirectRight
        Independent of the instruction set and of later changes of `B`.

    Raises
    ------
    TypeError
        If a dtype is not supported.
    ValueError
        If shapes or devices do not match, or K is too large for int32 sums.

    Examples
    --------
    >>> W = torch.ones(2, 16)
    >>> prepare_direct(torch.tensor([[127.0, 254.0]]), W, W.double().norm(dim=1)).scale.tolist()
    [1.0, 2.0]
    """
    if B.dtype != torch.float32:
        raise TypeError(f"B must be torch.float32, got {B.dtype}")
    if B.ndim != 2 or B.shape[0] > MAX_K:
        raise ValueError(f"B must have 2 dimensions and at most {MAX_K} rows, got shape {tuple(B.shape)}")
    k, n = B.shape
    B = B.contiguous()
    check_array("B", B, torch.float32, k, n)
    check_array("W", W, torch.float32, n, PROBES)
    check_array("wbar", wbar, torch.float64, n)
    engine, threads = extension.ENGINE or extension.load_extension(), torch.get_num_threads()
    (digits,), scale, _ = decompose_cpu(B, 1, 0, high=_HIGH, radix=_RADIX)  # (K, N) int8, (N,)
    panels = -(-n // _PANEL)
    packed = torch.empty(panels, -(-k // _QUAD), _PANEL, _QUAD, dtype=torch.int8, device="cpu")
    column_sums = torch.empty(panels * _PANEL, dtype=torch.int32, device="cpu")
    engine.pack_digits(digits.data_ptr(), k, n, n, 1, packed.data_ptr(), column_sums.data_ptr(), threads)
    products, limits = (
        torch.empty(2, k, PROBES, dtype=torch.float64, device="cpu"),
        torch.empty(2, k, dtype=torch.float64, device="cpu"),
    )
    w = W.double()  # (N, 16)
    engine.probe_digits(
        B.data_ptr(), digits.data_ptr(), scale.data_ptr(), k, n, w.data_ptr(), wbar.data_ptr(), products.data_ptr(),
        limits.data_ptr(), threads,
    )  # fmt: skip
    # limits bound the products, so that both are at most 1 after the division and float32 holds them
    unit = math.ldexp(1.0, math.frexp(float(limits.amax()))[1]) if k and bool(limits.isfinite().all()) else 1.0
    vectors = (products / unit).transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)  # (K, 2, 16)
    bounds = (limits / unit * (1 + 2.0**-20) + _FLOOR).float()  # (2, K)
    handle = engine.DirectRight(
        packed.data_ptr(), column_sums.data_ptr(), scale.data_ptr(), vectors.data_ptr(), bounds.data_ptr(), unit,
        float(scale.amax()) if n else 1.0, k, n,
    )  # fmt: skip
    return DirectRight((k, n), scale, packed, column_sums, vectors, bounds, handle)


def _malformed(A: Tensor, k: int) -> Exception:
    """The error of a left operand that :func:`direct` does not take."""
    if A.dtype != torch.float32:
        return TypeError(f"A must be torch.float32, got {A.dtype}")
    if A.ndim != 2 or A.shape[1] != k:
        return ValueError(f"A must have shape (any, {k}), got {tuple(A.shape)}")
    if not A.is_cpu or A.is_neg() or A._is_zerotensor():
        return ValueError(f"A must be on the CPU and hold its values, got {A.device}; use A.clone()")
    return ValueError(f"A must have contiguous rows, got strides {A.stride()}; use A.contiguous()")


def direct(A: Tensor, right: DirectRight) -> DirectProduct:
    """Multiply by a prepared operand with one int8 digit per entry, and measure the error by its probes.

    Integer sums are exact; ``C = (float32(A1 B1) * s_a) * s_b`` as :func:`cute_kernels.gemm.api.gemm` computes it, with
    the digits of :func:`cute_kernels.convert.digits.digits`. The sums of ``E W`` are float32 over blocks of 64
    products, then float64: at most 68 roundings of magnitude ``|A| |dB| wbar + |dA| |B - dB| wbar`` [1]_.

    Parameters
    ----------
    A : Tensor, shape (M, K)
        float32 with contiguous rows, on the CPU.
    right : DirectRight
        Prepared operand of shape (K, N).

    Returns
    -------
    DirectProduct
        C and its error. Results depend on the instruction set, not on the number of threads.

    Raises
    ------
    TypeError
        If `A` is not float32.
    ValueError
        If the shape, device or memory order of `A` does not match.

    References
    ----------
    .. [1] Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sections 3.1 and 4.2.

    Examples
    --------
    >>> W = torch.ones(1, 16)
    >>> right = prepare_direct(torch.tensor([[127.0], [64.0]]), W, W.double().norm(dim=1))
    >>> found = direct(torch.tensor([[127.0, 0.25]]), right)
    >>> found.out.tolist(), float(found.gram[0, 0]), found.norm == 16129.0**2
    ([[16129.0]], 256.0, True)
    """
    k, n = right.shape
    shape, stride = A.shape, A.stride()
    if (
        len(shape) != 2
        or shape[1] != k
        or A.dtype is not torch.float32
        or not A.is_cpu
        or (stride[1] != 1 and k > 1)
        or A.is_neg()
        or A._is_zerotensor()
    ):
        raise _malformed(A, k)
    out = torch.empty(shape[0], n, dtype=torch.float32, device="cpu")
    engine = extension.ENGINE or extension.load_extension()
    sums = engine.direct(right.handle, A.data_ptr(), stride[0], shape[0], out.data_ptr(), torch.get_num_threads())
    return DirectProduct(out, *sums)
