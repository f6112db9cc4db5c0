"""Which entries of a quantized operand deserve their correction, and the density where sparse stops paying."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.gemm.api import gemm

RULES = ("eq14", "example", "mean")
ETA = {"cpu": 0.3, "cuda": 0.001}  # printed in arXiv 2403.06924, sections 4.1 D and 4.1 C
_PROBED = (0.05, 0.25)  # densities of the two sparse products that are timed
_SIZES = {"cpu": 512, "cuda": 4096}  # larger ones take longer and say the same; a GPU's small ones measure the launch
_ROUNDS = 10
_CHUNK = 1 << 15  # entries whose doubles stay in a cache


def kept_entries(
    values: Tensor, product: Tensor | None, threshold: float, rule: str, per_row: bool, vector_length: int
) -> Tensor:
    """Return which entries of an operand get their correction: ``Reduce`` of Algorithm 1.

    An entry ``a`` of row ``i`` is kept if

    * ``eq14``: ``|a| > threshold * avg_j |c_ij|``, equation 14 of [1]_;
    * ``example``: ``a > threshold * avg_j |c_ij|``, what the printed example does: no negative entry is kept;
    * ``mean``: ``|a| > 2 * threshold * mean|a|``, over the matrix, or over the row (`per_row`). It is not in [1]_; it
      is fitted to the densities printed there.

    All values are floats, as printed. Zeros are never kept; a threshold of 0 keeps all others and ``inf`` nothing. For
    a right operand pass the transposes.

    Parameters
    ----------
    values : Tensor, shape (M, K)
        float32 or float64.
    product : Tensor or None, shape (M, N)
        Dequantized product of the leading integers; the ``mean`` rule does not read it.
    threshold : float
        At least 0.
    rule : str
        One of `RULES`.
    per_row : bool
        Whether ``mean`` averages over rows.
    vector_length : int
        V; a vector of V neighbors in a column is kept whole if one of its entries is.

    Returns
    -------
    Tensor, shape (M, K)
        bool.

    References
    ----------
    .. [1] Gu, arXiv 2403.06924, section 3.1, equation 14.

    Examples
    --------
    >>> kept_entries(torch.tensor([[1.0, 9.0, -8.0, 2.0]]), None, 1.0, "mean", True, 1).tolist()
    [[False, False, False, False]]
    >>> kept_entries(torch.tensor([[1.0, 9.0, -8.0, 2.0]]), None, 0.5, "mean", True, 1).tolist()
    [[False, True, True, False]]
    """
    if threshold == torch.inf:
        return torch.zeros_like(values, dtype=torch.bool)
    if threshold == 0:
        kept = values != 0
    elif rule == "mean":
        kept = values.abs() > (2 * threshold * average(values, per_row)).to(values.dtype)
    else:
        assert product is not None
        level = (threshold * average(product, True)).to(values.dtype)  # (M, 1)
        kept = (values if rule == "example" else values.abs()) > level
    return kept if vector_length == 1 else _whole_vectors(kept, vector_length)


def average(x: Tensor, per_row: bool) -> Tensor:
    """Return ``avg|x|`` in float64, shape (M, 1) per row, else ()."""
    turned = x.stride(0) < x.stride(1)
    base = x.T if turned else x
    rows = max(1, base.shape[0] if x.is_cuda else _CHUNK // max(base.shape[1], 1))
    sums = [part.abs().double().sum(0 if turned else 1) for part in base.split(rows)]
    total = torch.stack(sums).sum(0) if turned else torch.cat(sums)  # (M,)
    return total[:, None] / max(x.shape[1], 1) if per_row else total.sum() / max(x.numel(), 1)


def _whole_vectors(kept: Tensor, vector_length: int) -> Tensor:
    rows, columns = kept.shape
    padded = torch.nn.functional.pad(kept, (0, 0, 0, -rows % vector_length))
    vectors = padded.view(padded.shape[0] // vector_length, vector_length, columns).any(1)
    return vectors.repeat_interleave(vector_length, 0)[:rows]


def crossover_density(device: torch.device | str, vector_length: int = 1) -> float:
    """Return the density at which the sparse product of int8 matrices takes the time of the dense one, in [0, 1].

    Measured once a process for each device, number of threads and vector length: the dense product, and the sparse one
    at two densities, through which a line is drawn. Square matrices, 512 on a CPU and 4096 on a GPU; packing of the
    sparse operand is not counted. :func:`residual.gemm` takes another path at another `eta`, so its result then depends
    on the measurement.

    Parameters
    ----------
    device : torch.device or str
        CPU or CUDA device.
    vector_length : int, default 1
        V of the sparse operand.

    Raises
    ------
    NotImplementedError
        If the device is neither a CPU nor a CUDA device.

    Examples
    --------
    >>> 0.0 <= crossover_density("cpu") <= 1.0
    True
    """
    found = torch.device(device)
    if found.type not in _SIZES:
        raise NotImplementedError(f"device must be a CPU or a CUDA device, got {found}")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return _crossover(found, torch.get_num_threads(), vector_length)


@lru_cache(maxsize=64)
def _crossover(device: torch.device, threads: int, vector_length: int) -> float:
    n = _SIZES[device.type]
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-127, 128, (n, n), dtype=torch.int8, generator=generator, device="cpu").to(device)
        for _ in range(2)
    )
    right = mc.QuantTensor.from_ints(b, bits=8)
    calls: list[Callable[[], Tensor]] = [lambda: gemm(a, b)]
    for density in _PROBED:
        chosen = torch.rand(-(-n // vector_length), n, generator=generator, device="cpu") < density
        mask = chosen.repeat_interleave(vector_length, 0)[:n].to(device)
        left = mc.SRBCRS.from_mask(a, mask, vector_length=vector_length, bits=8)
        left.single_use = True  # as a correction's
        calls.append(lambda left=left: mc.spmm(left, right, out_dtype=torch.int32))  # type: ignore[misc]
    dense, thin, thick = _fastest(calls, device)
    slope = (thick - thin) / (_PROBED[1] - _PROBED[0])
    if slope <= 0:  # only noise, or launches that hide the work: what counts is which one is faster
        return 1.0 if thick < dense else 0.0
    return min(max(_PROBED[0] + (dense - thin) / slope, 0.0), 1.0)


def _fastest(calls: list[Callable[[], Tensor]], device: torch.device) -> list[float]:
    """Seconds of each call, the best of some rounds of all; the first round makes execution copies and compiles."""
    rounds = []
    for _ in range(_ROUNDS + 1):
        times = []
        for call in calls:
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            times.append(time.perf_counter() - start)
        rounds.append(times)
    return [min(times) for times in zip(*rounds[1:], strict=True)]


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
