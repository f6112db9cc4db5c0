"""Checked products of operands of one 16-bit float dtype: torch's product, which takes them as they are, and a check.

The first plan of :mod:`residual.cuda.flow` for such operands, without what a search for plans needs. Behind torch's
product four launches, three with a prepared B, which become a CUDA graph where all addresses equal those of earlier
calls: the products of B and of A with the probes, with sums of squares for the guard of :mod:`residual.cuda.check`, and
the comparison. Where the check does not accept the product, the caller goes on with that flow.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable
from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.estimate import probes
from cute_kernels.jit.device import device_of, num_sms
from cute_kernels.jit.launch_cache import LaunchCache
from residual.cuda.check import drawn_transposed, estimate_of, hidden
from residual.cuda.cost_model import H200, Sizes
from residual.cuda.products import product_16bit
from residual.cuda.search import HALF, Wish, without_statistics
from residual.error.factor import confidence
from residual.operand.prepared import PreparedOperand, TransposedProbes
from residual.options import Options

_OUT_DTYPES = (None, torch.float32, torch.float16, torch.bfloat16)
_RECORDS = 64  # kinds of calls, and sets of addresses of each, whose launches a thread keeps
_MOST_STEPS = 32  # of a CTA that has the rows of a tile for itself, where few CTAs have work
_STEP = 256  # columns


class _Record:
    """What calls of one kind share: a thread's products of these shapes on one stream."""

    def __init__(self, A: Tensor, B: Tensor) -> None:
        (m, k), device = A.shape, A.device

        def single(count: int) -> Tensor:
            return torch.empty(probes.PROBES, probes.padded(count), dtype=torch.float32, device=device)

        self.inner, self.outer = single(k), single(m)  # (B W)^T (16, K and room), (A (B W))^T (16, M and room)
        tiles = [probes.padded(count) // probes.TILE for count in (m, k)]
        words = torch.zeros(probes.SUMS + 2 * sum(tiles), dtype=torch.float64, pin_memory=True, device="cpu")
        sums, of_a, of_b = words.split((probes.SUMS, 2 * tiles[0], 2 * tiles[1]))
        self.sums, self.of_a, self.of_b = sums, of_a.view(-1, 2), of_b.view(-1, 2)
        self.read = sums.numpy(), self.of_a.numpy(), self.of_b.numpy()
        self.parts = torch.empty(num_sms(device.index), probes.SUMS, dtype=torch.float64, device=device)
        self.launches = LaunchCache(_RECORDS, graph_after=2)

    def product(self, A: Tensor, B: Tensor, drawn: TransposedProbes, options: Options) -> Tensor | None:
        """Return the product of a call; None if the check does not accept it."""
        assert options.tol is not None
        C = product_16bit(A, B, options.result_dtype(A, B))  # (M, N)
        inner = self.inner if drawn.products is None else drawn.products

        def launch() -> None:
            with device_of(A):
                if drawn.products is None:
                    probes.launch_probe_squares(B, drawn.vectors, inner, self.of_b, pdl=False)
                probes.launch_probe_squares(A, inner, self.outer, self.of_a, pdl=drawn.products is None)
                probes.launch_comparison(C, drawn.vectors, self.outer, (), (0.0, 0.0), self.parts, self.sums)

        addresses = A.data_ptr(), B.data_ptr(), C.data_ptr(), drawn.vectors.data_ptr(), inner.data_ptr()
        self.launches.run((C.dtype, addresses), launch)
        torch.cuda.current_stream(A.device).synchronize()
        sums, of_a, of_b = self.read
        found = probes.comparison_of(sums)
        estimate = estimate_of(found, C.numel(), confidence(0), options.tol)
        if estimate is None or not estimate.accepts(options.tol):
            return None
        norm = drawn.norm if drawn.products is not None else math.sqrt(float(of_b[:, 1].sum()))
        least = hidden(math.sqrt(float(of_a[:, 0].sum())), norm)
        return C if options.tol * math.sqrt(found.result) > least else None


class _Threads(threading.local):
    """Records of one thread."""

    def __init__(self) -> None:
        self.records: dict[Hashable, _Record] = {}


_threads = _Threads()


def checked_product(A: Tensor, B: Tensor, prepared: PreparedOperand | None, options: Options) -> Tensor | None:
    """Return ``A B`` (M, N) by its first plan; None for operands that this module does not serve, or a missed check.

    Parameters
    ----------
    A, B : Tensor, shapes (M, K) and (K, N)
        CUDA tensors.
    prepared : PreparedOperand, optional
        Of `B`.
    options : Options
        Of the call.
    """
    is_prepared = prepared is not None
    if not _serves(options, A.dtype, B.dtype, A.shape, A.stride(), B.shape, B.stride(), A.device, is_prepared):
        return None
    if A.is_neg() or B.is_neg() or torch.cuda.is_current_stream_capturing():
        return None
    drawn = drawn_transposed(B.shape[1], B.device, options.seed) if prepared is None else prepared.transposed
    if drawn is None:
        return None
    stream = torch._C._cuda_getCurrentRawStream(A.get_device())
    key = A.dtype, A.shape, A.stride(), B.shape, B.stride(), A.device, stream
    record = _threads.records.get(key)
    if record is None:
        if len(_threads.records) >= _RECORDS:
            _threads.records.clear()
        record = _threads.records[key] = _Record(A, B)
    return record.product(A, B, drawn, options)


@lru_cache(maxsize=256)
def _serves(
    options: Options,
    dtype: torch.dtype,
    other_dtype: torch.dtype,
    shape: torch.Size,
    stride: tuple[int, ...],
    other_shape: torch.Size,
    other_stride: tuple[int, ...],
    device: torch.device,
    is_prepared: bool,
) -> bool:
    """Return whether a call's first plan is the product of operands as they are, and kernels read them in place."""
    if dtype != other_dtype or dtype not in (torch.float16, torch.bfloat16) or 1 not in stride or 1 not in other_stride:
        return False
    if options.tol is None or options.mode != "auto" or options.rungs is not None or options.flow != "auto":
        return False
    if options.out_dtype not in _OUT_DTYPES or (options.seed is None and not is_prepared):
        return False
    (m, k), n, sms = shape, other_shape[1], num_sms(device.index)
    passes = ((m, k),) if is_prepared else ((m, k), (k, n))  # rows and columns
    if any(columns > _MOST_STEPS * _STEP and 4 * rows < probes.TILE * sms for rows, columns in passes):
        return False
    wish = Wish(options.tol, last_resort=options.on_failure == "fallback", half=True)
    return without_statistics(wish, Sizes(m, k, n, is_prepared, sixteen_bit=True), H200) == HALF
