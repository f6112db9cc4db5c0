"""Checked products on sm_90 GPUs by one product of 16-bit floats, whose error is bounded by probes in float64.

Operands of one 16-bit dtype are multiplied as they are, float32 ones in float16, each times a power of two. The passes
over B and A that multiply them by the probes W write those copies and sum squares; torch multiplies; a pass over the
product C compares. Sums are float64, and their rounding is bounded: :func:`residual.cuda.check.rounding_of_double`.
Calls that repeat with all addresses replay their launches. Where the bound misses the tolerance, or something is not
finite, the caller goes on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cute_kernels.estimate import probes
from cute_kernels.estimate.probe_squares import launch_double_comparison, launch_probe_squares, probe_tiles
from cute_kernels.jit.device import current_arch, device_of, num_sms, on_device
from cute_kernels.jit.launch_cache import LaunchCache
from residual.cuda.check import drawn_transposed, rounding_of_double, transpose_probes
from residual.cuda.passes import Measured, rungs_for_shapes
from residual.cuda.products import product_16bit
from residual.cuda.verdict_words import wait_until
from residual.error.estimate import ErrorEstimate, from_sums
from residual.error.factor import CONFIDENCE, confidence
from residual.error.probes import Probes, ProbeSums
from residual.operand.prepared import PreparedOperand, TransposedProbes
from residual.options import Options
from residual.planning.ladder import Rung
from residual.report import Report, attempt_of

ARCH = "sm_90a"
_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_OUT_DTYPES = (None, torch.float32, *_SIXTEEN_BIT)
_LEAST_SIXTEEN_BIT = 1e-4  # tolerance; sums on Tensor Cores are cut and not rounded
# float32 operands: rounding to float16 leaves 4e-4 at most where entries are in range, 1.35 times that is its bound
_LEAST = 6e-4
_MOST = 3e-3  # from here on one product of bytes may do
# of float32 operands, by whether B is prepared: below them the host, which starts torch's product, takes longer
_LEAST_MULTIPLICATIONS = {False: 4_000_000_000, True: 20_000_000_000}
_LOAD = 16  # bytes of four float32, which kernels read at once
_ALIGNED = 8  # elements of a slice that torch's fast products want
_KINDS = 256  # of calls, that a thread keeps
_ADDRESSES = 64  # sets of them for each kind
_MOST_STEPS = 32  # of a CTA that has the rows of a tile for itself, where few CTAs have work
_STEP = 256  # columns
_UNWRITTEN = 0x7FF4_0000_DEAD_BEEF  # bits of a NaN that no sum has: theirs is quiet
_GRAM = probes.PROBES**2
_SUMS = probes.SUMS + 4  # with those of squares
RUNG = Rung("fp16")


class _Words:
    """Where kernels write the sums of one product: pinned memory, or the GPU's for a graph that is captured."""

    def __init__(self, device: torch.device, captured: bool) -> None:
        where: dict[str, Any] = {"device": device} if captured else {"pin_memory": True, "device": "cpu"}
        self.tensor, self.device = torch.zeros(_SUMS, dtype=torch.float64, **where), device
        self._array = None if captured else self.tensor.numpy()
        self._bits = None if self._array is None else self._array.view(np.int64)
        self.owner: weakref.ref[StartedSixteenBit] | None = None

    @property
    def is_written(self) -> bool:
        """Whether the last kernel has written all of its sums."""
        return self._bits is None or not bool((self._bits == _UNWRITTEN).any())

    def arm(self, owner: StartedSixteenBit) -> None:
        """Mark the sums as not written, for one who will read them."""
        if self._bits is not None:
            self._bits[:] = _UNWRITTEN
        self.owner = weakref.ref(owner)

    def read(self) -> np.ndarray:
        """Return the sums once they are written."""
        if self._array is None:
            return self.tensor.cpu().numpy()  # as often as the graph is replayed
        wait_until(lambda: self.is_written, self.device)
        self.owner = None
        return self._array.copy()


class _Record:
    """What calls of one kind share: a thread's products of these shapes and strides on one stream."""

    def __init__(self, A: Tensor, B: Tensor, options: Options, is_prepared: bool, captured: bool = False) -> None:
        assert options.tol is not None
        (m, k), n, device = A.shape, B.shape[1], A.device

        def single(count: int) -> Tensor:
            return torch.empty(probes.PROBES, probes.padded(count), dtype=torch.float32, device=device)

        def double(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float64, device=device)

        self.shape, self.tol, self.out_dtype = (m, k, n), options.tol, options.result_dtype(A, B)
        self.drawn = None if is_prepared else drawn_transposed(n, device, options.seed)
        self.inner, self.outer = single(k), single(m)  # (B W)^T (16, K and room), (A (B W))^T (16, M and room)
        tiles = (probe_tiles(count, A.dtype, device.index) for count in (m, k))
        self.of_a, self.of_b = (double(count, 2) for count in tiles)  # squares
        self.parts, self.captured = double(num_sms(device.index), probes.SUMS), captured
        self.scales = torch.ones(2, dtype=torch.float32, device=device).split(1)
        self.layouts = [(x.shape, _dense(x)) for x in (A, B)] if A.dtype == torch.float32 else None
        self.passes, self.comparison = (LaunchCache(_ADDRESSES, graph_after=2) for _ in range(2))
        self.words: list[_Words] = []

    def _take_words(self) -> _Words:
        """Return words that are not to be read, or whose reader is gone, once the GPU has written them."""
        for words in self.words:
            if words.owner is None or (words.owner() is None and words.is_written):
                return words
        made = _Words(self.outer.device, self.captured)
        self.words.append(made)
        return made

    def _float16(self, operand: int) -> Tensor:
        """Return memory for a copy of A (0) or B (1) in its memory order."""
        assert self.layouts is not None
        return torch.empty_strided(*self.layouts[operand], dtype=torch.float16, device=self.outer.device)

    def start(self, A: Tensor, B: Tensor, drawn: TransposedProbes) -> StartedSixteenBit:
        """Start a product."""
        words, a, b = self._take_words(), A, B
        inner = self.inner if drawn.products is None else drawn.products
        of_b = self.of_b if drawn.squares is None else drawn.squares
        if self.layouts is not None:
            a, b = self._float16(0), self._float16(1) if drawn.scaled is None else drawn.scaled
        scale_a, scale_b = self.scales if drawn.scale is None else (self.scales[0], drawn.scale)
        started = StartedSixteenBit(words, drawn, self)
        words.arm(started)

        def launch_passes() -> None:
            copies = ((a, scale_a), (b, scale_b)) if self.layouts is not None else ((None, None), (None, None))
            with device_of(A):
                if drawn.products is None:
                    launch_probe_squares(B, drawn.vectors, inner, of_b, *copies[1])
                launch_probe_squares(A, inner, self.outer, self.of_a, *copies[0], pdl=drawn.products is None)

        def launch_comparison() -> None:
            with device_of(A):
                launch_double_comparison(
                    C, drawn.vectors, self.outer, scale_a, scale_b, self.parts, (self.of_a, of_b), words.tensor
                )

        used = words.tensor.data_ptr(), of_b.data_ptr(), drawn.vectors.data_ptr(), scale_b.data_ptr()
        self.passes.run(
            (A.data_ptr(), B.data_ptr(), a.data_ptr(), b.data_ptr(), inner.data_ptr(), *used), launch_passes
        )
        started.product = C = product_16bit(a, b, self.out_dtype)  # (M, N)
        self.comparison.run((C.data_ptr(), *used), launch_comparison)
        return started


class StartedSixteenBit:
    """A product on its way.

    Attributes
    ----------
    product : Tensor, shape (M, N)
        Not to be used before :meth:`outcome` or :meth:`accepted` returned it.
    """

    product: Tensor

    def __init__(self, words: _Words, drawn: TransposedProbes, record: _Record) -> None:
        self._words, self._drawn, self._record = words, drawn, record
        self._found: tuple[ProbeSums, float] | None = None

    def _read(self) -> tuple[ProbeSums, float]:
        """Wait; return the sums and the bound of their rounding."""
        if self._found is None:
            drawn, record, numbers = self._drawn, self._record, self._words.read()
            gram = numbers[:_GRAM].reshape(probes.PROBES, probes.PROBES)
            product, claimed, result, _, aa, _, bb, yy = numbers[_GRAM:].tolist()
            rest = float(gram.trace())
            rounding = rounding_of_double(record.shape, drawn.norm, aa, bb, yy, product, result, rest)
            self._found = ProbeSums(gram, product, claimed, result, 0.0, 0.0), rounding
        return self._found

    def _estimate(self, enough: float) -> ErrorEstimate:
        return from_sums(*self._read(), confidence(0), enough=enough)

    def accepted(self) -> Tensor | None:
        """Wait for the check; return the product if it is within its tolerance."""
        return self.product if self._estimate(self._record.tol).accepts(self._record.tol) else None

    def outcome(self) -> Measured:
        """Wait for the check; return the product if it is within its tolerance, its report, and what missed."""
        estimate = self._estimate(0.0)
        attempt = attempt_of(RUNG, estimate)
        report = Report(str(RUNG), estimate.relative, estimate.upper, CONFIDENCE, RUNG.products, (attempt,))
        if estimate.accepts(self._record.tol):
            return Measured(self.product, report, ())
        return Measured(None, report, ((attempt, estimate),))


class _Threads(threading.local):
    """Records of one thread by kinds of calls; None for a kind that is not served."""

    def __init__(self) -> None:
        self.records: dict[Hashable, _Record | None] = {}


_threads = _Threads()


def start(A: Tensor, B: Tensor, prepared: PreparedOperand | None, options: Options) -> StartedSixteenBit | None:
    """Start ``A B`` (M, N); None for operands that this module does not serve.

    Parameters
    ----------
    A, B : Tensor, shapes (M, K) and (K, N)
        CUDA tensors.
    prepared : PreparedOperand, optional
        Of `B`.
    options : Options
        Of the call.
    """
    if A.layout is not torch.strided or B.layout is not torch.strided:
        return None
    if torch.cuda.is_current_stream_capturing():  # the graph has memory of its own
        served = serves(A, B, prepared, options)
        record = _Record(A, B, options, prepared is not None, captured=True) if served else None
    else:
        record = _record_of(A, B, prepared is not None, options)
    drawn = None if record is None else record.drawn if prepared is None else prepared.transposed
    if record is None or drawn is None or not _serves_now(A, B, prepared):
        return None
    return record.start(A, B, drawn)


def _record_of(A: Tensor, B: Tensor, is_prepared: bool, options: Options) -> _Record | None:
    """Return the record of a kind of calls."""
    device = A.get_device()
    kind = A.dtype, B.dtype, A.shape, A.stride(), B.shape, B.stride(), device, B.get_device(), options, is_prepared
    key = kind, torch._C._cuda_getCurrentRawStream(device)
    records = _threads.records
    if key not in records:
        if len(records) >= _KINDS:
            records.clear()
        records[key] = _Record(A, B, options, is_prepared) if _serves(*kind) else None
    return records[key]


def serves(A: Tensor, B: Tensor, prepared: PreparedOperand | None, options: Options) -> bool:
    """Return whether a call's first plan is this one, and kernels read the operands in place."""
    if not (A.is_cuda and B.is_cuda and A.layout is B.layout is torch.strided):
        return False
    strides, devices = (A.stride(), B.stride()), (A.get_device(), B.get_device())
    is_prepared = prepared is not None
    kind = A.dtype, B.dtype, A.shape, strides[0], B.shape, strides[1], *devices, options, is_prepared
    return _serves(*kind) and _serves_now(A, B, prepared)


def _serves_now(A: Tensor, B: Tensor, prepared: PreparedOperand | None) -> bool:
    """Return what kinds do not say."""
    if A.is_neg() or B.is_neg():
        return False
    is_single = A.dtype == torch.float32
    if prepared is None:
        return not is_single or (A.data_ptr() | B.data_ptr()) % _LOAD == 0
    made = prepared.transposed
    return made is not None and made.is_for_products and not (is_single and A.data_ptr() % _LOAD)


def _serves(
    dtype: torch.dtype,
    other_dtype: torch.dtype,
    shape: torch.Size,
    stride: tuple[int, ...],
    other_shape: torch.Size,
    other_stride: tuple[int, ...],
    index: int,
    other_index: int,
    options: Options,
    is_prepared: bool,
) -> bool:
    """Return whether calls of a kind take this way, but for what :func:`_serves_now` says."""
    if dtype != other_dtype or not len(shape) == len(other_shape) == 2 or shape[1] != other_shape[0]:
        return False
    if index < 0 or index != other_index or not (shape.numel() and other_shape.numel()):
        return False
    device = torch.device("cuda", index)
    if not (_serves_right(options, dtype, other_shape, other_stride, device) and 1 in stride):
        return False
    if options.seed is None and not is_prepared:
        return False
    (m, k), n, sms = shape, other_shape[1], num_sms(index)
    counts = ((m, k),) if is_prepared else ((m, k), (k, n))  # rows and columns
    if any(columns > _MOST_STEPS * _STEP and 4 * rows < probes.TILE * sms for rows, columns in counts):
        return False
    if dtype != torch.float32:
        return True
    if not (_is_wide(shape, stride) and rungs_for_shapes(options, shape, stride, other_shape, other_stride, device)):
        return False
    return m * k * n >= _LEAST_MULTIPLICATIONS[is_prepared]


def _serves_right(
    options: Options, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], device: torch.device
) -> bool:
    """Return whether products with this B, whose A has its dtype, may take this way."""
    if options.tol is None or options.mode != "auto" or options.rungs is not None or options.flow != "auto":
        return False
    if 1 not in stride or _arch(device) != ARCH:
        return False
    if dtype in _SIXTEEN_BIT:
        return options.tol >= _LEAST_SIXTEEN_BIT and options.out_dtype in _OUT_DTYPES
    is_single = dtype == torch.float32 and options.out_dtype in (None, torch.float32)
    return is_single and _LEAST <= options.tol < _MOST and _is_wide(shape, stride)


def _is_wide(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Return whether slices in memory have a multiple of 8 elements and are as far apart."""
    inner = 1 if stride[1] == 1 else 0
    return shape[inner] % _ALIGNED == 0 and stride[1 - inner] % _ALIGNED == 0


def _dense(x: Tensor) -> tuple[int, int]:
    """Return the strides of a matrix without gaps in the memory order of `x`."""
    rows, columns = x.shape
    return (columns, 1) if x.stride(1) == 1 else (1, rows)


def _arch(device: torch.device) -> str:
    with on_device(device.index):
        return current_arch()


def prepare_right(B: Tensor, drawn: Probes, options: Options) -> TransposedProbes | None:
    """Return what products here need of a constant `B` (K, N) with probes; None where no product may be one of these.

    Parameters
    ----------
    B : Tensor, shape (K, N)
        CUDA tensor.
    drawn : Probes
        Its probes.
    options : Options
        Of the products, whose tolerance says whether they come here.
    """
    if B.is_neg() or not _serves_right(options, B.dtype, B.shape, B.stride(), B.device):
        return None
    if B.dtype == torch.float32 and B.data_ptr() % _LOAD:
        return None
    made, k, device = transpose_probes(drawn), B.shape[0], B.device
    products = torch.empty(probes.PROBES, probes.padded(k), dtype=torch.float32, device=device)
    squares = torch.empty(probe_tiles(k, B.dtype, device.index), 2, dtype=torch.float64, device=device)
    scaled = scale = None
    if B.dtype == torch.float32:
        scaled = torch.empty_strided(B.shape, _dense(B), dtype=torch.float16, device=device)
        scale = torch.empty(1, dtype=torch.float32, device=device)
    with device_of(B):
        launch_probe_squares(B, made.vectors, products, squares, scaled, scale)
    return made._replace(products=products, squares=squares, scaled=scaled, scale=scale)
