"""Float32 products on an sm_90 GPU whose error is bounded there: digits, passes, two gated products and a verdict.

Nine launches, five with a prepared B, replayed where all addresses equal those of an earlier call; sums are on memory
that each thread keeps per stream. What else a kind of call needs is made once: a record, found by shapes and options.
Nothing waits until the verdict is read, and a CUDA graph can capture the launches. The pass over A bounds the errors of
two rungs and picks one on the GPU; a mode that was asked for is the only one that it may pick. Where no rung meets the
tolerance, :mod:`residual.execute.start` goes on with the next one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping
from functools import lru_cache
from itertools import takewhile
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.convert import digits as convert
from cute_kernels.estimate import look, verdict
from cute_kernels.gemm import cuda as gemm_cuda
from cute_kernels.gemm.config import select_products
from cute_kernels.jit.workspace import Kept
from residual.cuda.verdict_words import Words, WordsPool
from residual.error.estimate import ErrorEstimate
from residual.error.factor import CONFIDENCE, confidence, sharp_factor
from residual.error.probes import Probes, draw
from residual.options import Options
from residual.planning.ladder import Demand, Rung
from residual.report import EMPTY, Attempt, Missed, Report

_BITS = 8
# By a call's first digit rungs: digits per element of the pass that measures them, and which of its products may run.
_PASSES = {
    ("direct", "full"): (2, (True, True)), ("full", "three_digit"): (3, (True, True)),
    ("direct",): (2, (True, False)), ("full",): (2, (False, True)),
}  # fmt: skip
_STATES = 8  # streams of a thread whose memory is kept
_KEPT_BYTES = 2**25  # of the tensors of a call, at most, that are kept for the next one: up to n = 2048
_REPLAYS = 64  # kinds of calls, and sets of addresses, whose launches a thread keeps
_UP = 1 + 2.0**-20  # norms in float32 are rounded up


class RightPass(NamedTuple):
    """What products need of B (K, N)."""

    digits: convert.Digits  # (K, N) int8 planes, column-major
    vectors: look.LookVectors

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All memory."""
        return (*self.digits.planes, self.digits.scale, *self.vectors)


class Measured(NamedTuple):
    """A product within its tolerance, or None, and its report; the rungs that missed."""

    product: Tensor | None
    report: Report
    tried: Missed


def _served(rungs: tuple[Rung, ...]) -> tuple[int, tuple[bool, bool]]:
    """Return digits per element of the pass that serves the first digit rungs, or 0, and which products may run."""
    first = tuple(takewhile(lambda rung: rung.bits, rungs[:2]))
    by_bytes = all(rung.bits == _BITS for rung in first)
    return _PASSES.get(tuple(rung.mode for rung in first) if by_bytes else (), (0, (False, False)))


def planes_of(rungs: tuple[Rung, ...]) -> int:
    """Return the digits per element of the pass that serves the first digit rungs, or 0.

    Examples
    --------
    >>> planes_of((Rung("direct", 8), Rung("full", 8), Rung("fp32"))), planes_of((Rung("fp32"),))
    (2, 0)
    """
    return _served(rungs)[0]


def _serves(shape: torch.Size, stride: tuple[int, ...], k: int, planes: int, device: torch.device) -> bool:
    """Return whether the kernels read a float32 operand and a sum over `k`."""
    if not (planes and device.type == "cuda" and 1 in stride and max(k, shape[1]) <= look.MOST_COLUMNS):
        return False
    return gemm_cuda.can_gate(k, select_products(planes, planes, None), device)


def rungs_to_pick(A: Tensor, B: Tensor, options: Options) -> tuple[Rung, ...]:
    """Return the rungs of a call that this flow serves, or none: float32, one or two digit rungs, an sm_90 GPU."""
    if A.dtype != torch.float32 or B.dtype != torch.float32 or A.is_neg() or B.is_neg():
        return ()
    return rungs_for_shapes(options, A.shape, A.stride(), B.shape, B.stride(), A.device)


@lru_cache(maxsize=256)
def rungs_for_shapes(
    options: Options,
    shape: torch.Size,
    stride: tuple[int, ...],
    other_shape: torch.Size,
    other_stride: tuple[int, ...],
    device: torch.device,
) -> tuple[Rung, ...]:
    """Return the rungs of :func:`rungs_to_pick` for float32 operands."""
    if options.tol is None or options.out_dtype not in (None, torch.float32):
        return ()
    (m, k), n, last = shape, other_shape[1], options.on_failure == "fallback"
    rungs = options.rungs_at(device, Demand(options.tol, m * k * n, fallback=last))
    planes = planes_of(rungs)
    served = (_serves(each, by, k, planes, device) for each, by in ((shape, stride), (other_shape, other_stride)))
    return rungs if all(served) else ()


def right_pass(B: Tensor, planes: int, probes: look.LookProbes) -> RightPass:
    """Return the pass over `B` (K, N), float32; four launches."""
    found = convert.digits(B, _BITS, planes, axis=0, transpose=True)
    return RightPass(found, look.look_right(B, probes, found.scale, planes))


def passes_for(B: Tensor, probes: Probes, rungs: tuple[Rung, ...]) -> Mapping[int, RightPass]:
    """Return the passes over a constant `B` (K, N) for its rungs, by digits per element; none if B is not served."""
    planes = planes_of(rungs)
    served = B.dtype == torch.float32 and not B.is_neg() and _serves(B.shape, B.stride(), B.shape[0], planes, B.device)
    return MappingProxyType({planes: right_pass(B, planes, padded_probes(probes))} if served else {})


def padded_probes(probes: Probes) -> look.LookProbes:
    """Return probes as the passes read them."""
    n, count = probes.vectors.shape
    if look.padded_length(n) == n:
        return look.LookProbes(probes.vectors, probes.norms.float() * _UP)
    vectors = probes.vectors.new_zeros(look.padded_length(n), count)
    norms = probes.vectors.new_zeros(look.padded_length(n))
    vectors[:n], norms[:n] = probes.vectors, probes.norms * _UP
    return look.LookProbes(vectors, norms)


@lru_cache(maxsize=16)
def _drawn(n: int, device: torch.device, seed: int) -> look.LookProbes:
    with torch.inference_mode(False):
        return padded_probes(draw(n, device, seed))


@lru_cache
def _factors(device: torch.device, before: int) -> Tensor:
    """Factors of both rungs, behind others, by the share of the largest eigenvalue, float64 (2, FACTORS)."""
    shares = [max(i, 1) / (look.FACTORS - 1) for i in range(look.FACTORS)]
    table = [[sharp_factor(share, look.PROBES, confidence(before + i)) for share in shares] for i in range(2)]
    with torch.inference_mode(False):
        return torch.tensor(table, dtype=torch.float64, device=device)


class _Memory:
    """Memory for products on one stream of a thread, whose kernels run in their order."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.state = device, look.state_for(device, gemm_cuda.gate_size(device))
        self._kept: Tensor | None = None

    def take(self, size: int) -> Tensor:
        """Return so many bytes or more for the tensors of one call."""
        kept = self._kept
        if kept is not None and kept.shape[0] >= size:
            return kept
        made = torch.empty(size, dtype=torch.uint8, device=self.device)
        if size <= _KEPT_BYTES:
            self._kept = made
        return made


class _Record:
    """What calls of one kind share: a thread's and a stream's products of these shapes, with these options."""

    def __init__(
        self,
        A: Tensor,
        B: Tensor,
        options: Options,
        rungs: tuple[Rung, ...],
        memory: _Memory,
        is_plain: bool,
        before: int,
    ) -> None:
        """`is_plain`: B is not prepared, and the probes follow from the seed; `before`: attempts before these."""
        assert options.tol is not None
        self.rungs, self.tol, self.device = rungs, options.tol, A.device
        self.planes, may_run = _served(rungs)
        # a product that must not run is one whose rounding has no bound
        low, high = (verdict.product_rounding(self.planes - 1 + i) if may_run[i] else math.inf for i in range(2))
        self.roundings, self.first, self.count = (low, high), may_run.index(True), sum(may_run)
        self.state, self.factors = memory.state, _factors(A.device, before)
        self.like = A.new_empty(1).expand(A.shape[0], B.shape[1])  # torch makes one like it in half the time
        self.probes = _drawn(B.shape[1], A.device, options.seed) if is_plain and options.seed is not None else None
        self.launches = Kept(_REPLAYS, graph_after=2, allocate=memory.take)

    def start(
        self, A: Tensor, B: Tensor, words: Words, right: RightPass | None, probes: look.LookProbes | None,
        before: Missed = (),
    ) -> Started:  # fmt: skip
        """Start a product; `right`: of a prepared B, else `probes` or those of the record; `before`: what missed."""
        product = torch.empty_like(self.like)
        used = right.tensors if right is not None else () if probes is None else tuple(probes)
        started = Started(product, words, self, before)
        words.arm(started)

        def launch() -> tuple[Tensor, ...]:
            of_b = right if right is not None else right_pass(B, self.planes, probes or _known(self.probes))
            _launch(A, of_b, self, product, words.tensor)
            return ()

        addresses = A.data_ptr(), B.data_ptr(), product.data_ptr(), words.address, *(x.data_ptr() for x in used)
        self.launches.run(0, addresses, self.device, launch)
        return started


class _Threads(threading.local):
    """What one thread keeps: memory of the passes by device and stream, whose work is in order, records and words."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], _Memory] = {}
        self.records: dict[Hashable, _Record] = {}
        self.words = WordsPool()


_threads = _Threads()


def _memory(device: torch.device, stream: int) -> _Memory:
    """Return memory for a product on the current stream."""
    key = device.index, stream
    if key not in _threads.known:
        if len(_threads.known) >= _STATES:
            _threads.known.clear()
        _threads.known[key] = _Memory(device)
    return _threads.known[key]


class Started:
    """A product on its way.

    Attributes
    ----------
    product : Tensor, shape (M, N)
        Not to be used before :meth:`outcome` or :meth:`accepted` returned it.
    words : Words
        The verdict, once the GPU has written it.
    """

    def __init__(self, product: Tensor, words: Words, record: _Record, before: Missed = ()) -> None:
        self.product, self.words, self._record, self._before = product, words, record, before
        self._numbers: list[float] | None = None

    def _read(self) -> list[float]:
        """Wait for the verdict; return its numbers."""
        if self._numbers is None:
            self._numbers = self.words.read(self.product.device)
        return self._numbers

    def accepted(self) -> Tensor | None:
        """Wait for the verdict; return the product if it is within its tolerance."""
        return self.product if verdict.accepts(self._read(), self._record.tol) else None

    def outcome(self) -> Measured:
        """Wait for the verdict; nothing was tried if the passes do not serve a slice."""
        found = verdict.read_verdict(self._read())
        if found.out_of_range:
            return Measured(None, EMPTY, self._before)
        record, errors = self._record, list(found.predicted)
        first, rungs = record.first, record.rungs
        last = first + record.count - 1
        if found.planes:
            last = found.planes - record.planes + 1
            errors[last] = found.error, found.upper, found.noise
        tried = self._before + tuple(
            (
                Attempt(str(rungs[i - first]), *errors[i]),
                ErrorEstimate(*errors[i][:2], confidence(len(self._before) + i), errors[i][2]),
            )
            for i in range(first, last + 1)
        )
        rung, attempts = rungs[last - first], tuple(attempt for attempt, _ in tried)
        report = Report(str(rung), *errors[last][:2], CONFIDENCE, rung.products, attempts)
        is_met = found.planes > 0 and found.upper <= record.tol
        return Measured(self.product, report, tried[:-1]) if is_met else Measured(None, report, tried)


def _key(A: Tensor, B: Tensor, options: Options, is_prepared: bool, before: int = 0) -> Hashable:
    """Return what the record of a call depends on."""
    device = A.get_device()
    stream = torch._C._cuda_getCurrentRawStream(device)
    return A.shape, A.stride(), B.shape, B.stride(), options, is_prepared, before, device, stream


def start_known(
    A: Tensor, B: Tensor, options: Options, passes: Mapping[int, RightPass] | None = None
) -> Started | None:
    """Start a product whose kind of call has a record, without the checks of its first call; None for any other.

    Parameters
    ----------
    A, B : Tensor
        CUDA tensors, strided.
    options : Options
        Of the call.
    passes : Mapping of int to RightPass, optional
        Of `B`, where it is prepared.
    """
    if A.dtype is not torch.float32 or B.dtype is not torch.float32:
        return None
    if A.get_device() != B.get_device():
        return None
    if A.layout is not torch.strided or B.layout is not torch.strided:
        return None
    record = _threads.records.get(_key(A, B, options, passes is not None))
    if record is None or torch.cuda.is_current_stream_capturing() or A.is_neg() or B.is_neg():
        return None
    right = None if passes is None else passes.get(record.planes)
    if right is None and (record.probes is None or passes is not None):
        return None
    return record.start(A, B, _threads.words.take(), right, None)


def start_picked(
    A: Tensor,
    B: Tensor,
    options: Options,
    rungs: tuple[Rung, ...],
    passes: Mapping[int, RightPass] | None = None,
    before: Missed = (),
) -> Started:
    """Start a product; nothing waits for the GPU.

    Parameters
    ----------
    A : Tensor, shape (M, K)
        float32, row-major or column-major.
    B : Tensor, shape (K, N)
        Likewise.
    options : Options
        Of the call.
    rungs : tuple of Rung
        As :func:`rungs_to_pick` returns them.
    passes : Mapping of int to RightPass, optional
        Of a prepared B.
    before : tuple, optional
        Attempts that missed, whose share of the probability of failure is taken.

    Returns
    -------
    Started
    """
    right = (passes or {}).get(planes_of(rungs))
    probes = None
    if right is None and options.seed is None:
        probes = padded_probes(draw(B.shape[1], A.device, None))
    if torch.cuda.is_current_stream_capturing():  # the graph has memory of its own
        words, memory = _device_words(A.device), _Memory(A.device)
        alone = _Record(A, B, options, rungs, memory, right is None, len(before))
        return alone.start(A, B, words, right, probes, before)
    key = _key(A, B, options, right is not None, len(before))
    record = _threads.records.get(key)
    if record is None or record.rungs != rungs:
        if len(_threads.records) >= _REPLAYS:
            _threads.records.clear()
        memory = _memory(A.device, torch._C._cuda_getCurrentRawStream(A.get_device()))
        record = _threads.records[key] = _Record(A, B, options, rungs, memory, right is None, len(before))
    return record.start(A, B, _threads.words.take(), right, probes, before)


def _device_words(device: torch.device) -> Words:
    return Words(torch.empty(verdict.WORDS, dtype=torch.float64, device=device), False)


def _known(probes: look.LookProbes | None) -> look.LookProbes:
    assert probes is not None
    return probes


def _launch(A: Tensor, right: RightPass, record: _Record, product: Tensor, words: Tensor) -> None:
    """Launch all behind the pass over B; the verdict goes to `words`."""
    planes, state = record.planes, record.state
    left = convert.digits(A, _BITS, planes, axis=1)
    limits = look.LookLimits(record.tol, record.factors, record.roundings)
    look.look_left(A, right.vectors, left.scale, right.digits.scale, limits, state)
    scales = left.scale, right.digits.scale
    low, high = (
        gemm_cuda.gated_gemm(left.planes[:count], right.digits.planes[:count], scales, product, state.gate)
        for count in (planes - 1, planes)
    )
    verdict.start_verdict(state, (low, high), planes, (product.shape[0], product.shape[1]), words)
