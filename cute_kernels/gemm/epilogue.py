"""Host half of ``gemm/epilogue.cuh``: scales, source, bias, activation, and where a dense product is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from cute_kernels.operands import ALIGNMENT


class DenseProblem(Protocol):
    """What checked dense products have in common."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""

    @property
    def device(self) -> torch.device:
        """Device of the operands."""

    @property
    def beta(self) -> float:
        """Factor of `c`."""

    @property
    def c(self) -> Tensor | None:
        """Source, shape (M, N)."""

    @property
    def bias(self) -> Tensor | None:
        """Bias, shape (N,)."""

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of the output."""


Problem = TypeVar("Problem", bound=DenseProblem)
RUN = 32  # columns that a quad of lanes writes to a row
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "silu": nn.functional.silu,
}


def activate(x: Tensor, activation: str | None) -> Tensor:
    """Return f(x) by torch; `activation` as for :func:`cute_kernels.gemm.gemm`.

    Examples
    --------
    >>> activate(torch.tensor([-1.0, 2.0]), "relu")
    tensor([0., 2.])
    """
    return x if activation is None else _FUNCTIONS[activation](x)


def gated(y: Tensor, activation: str | None) -> Tensor:
    """Return ``f(y1) * y2`` for y = [y1 y2], (M, N): a gated linear unit, (M, N / 2).

    Examples
    --------
    >>> gated(torch.tensor([[-1.0, 2.0, 3.0, 4.0]]), "relu")
    tensor([[0., 8.]])
    """
    gates, others = y.tensor_split(2, dim=-1)
    return activate(gates, activation) * others


def integers_of(x: Tensor, out_scale: Tensor) -> Tensor:
    """Return the nearest integers to float32 or float64 `x` over a scale (), saturated to int8; 0 for NaN.

    Examples
    --------
    >>> integers_of(torch.tensor([0.26, -90.0, float("nan")]), torch.tensor(0.1))
    tensor([   3, -128,    0], dtype=torch.int8)
    """
    near = (x * out_scale.to(x.dtype).reciprocal()).round().clamp(-128, 127)
    return near.nan_to_num(0.0).to(torch.int8)


def run_problem(
    problem: Problem,
    out: Tensor | None,
    run_cpu: Callable[[Problem], Tensor],
    run_cuda: Callable[[Problem, Tensor], Tensor],
) -> Tensor:
    """Run a checked product on its device, with an output tensor where none is given.

    Parameters
    ----------
    problem : DenseProblem
        A checked product.
    out : Tensor, shape (M, N), optional
        Written in place.
    run_cpu : callable
        Returns the product on a CPU.
    run_cuda : callable
        Writes a nonempty product to its second argument and returns it.

    Returns
    -------
    Tensor, shape (M, N)
        `out` if given.

    Raises
    ------
    NotImplementedError
        If the operands are on another device than a CPU or a CUDA device.
    """
    if problem.device.type == "cpu":
        result = run_cpu(problem)  # (M, N)
        return result if out is None else out.copy_(result)
    if problem.device.type != "cuda":
        raise NotImplementedError(f"a must be on a CPU or a CUDA device, got {problem.device}")
    m, n, k = problem.shape
    target = torch.empty((m, n), dtype=problem.out_dtype, device=problem.device) if out is None else out  # (M, N)
    return empty_product(problem, target) if min(m, n, k) == 0 else run_cuda(problem, target)


def empty_product(problem: DenseProblem, out: Tensor) -> Tensor:
    """Write ``beta c + bias``, the product of (M, 0) and (0, N) matrices, to `out`, shape (M, N)."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)  # (M, N)
    if problem.c is not None:
        total.add_(problem.c, alpha=problem.beta)  # (M, N)
    if problem.bias is not None:
        total += problem.bias  # (N,)
    return out.copy_(total)


def apply_epilogue(
    problem: DenseProblem, total: Tensor, alpha: float, row_scale: Tensor | None, col_scale: Tensor | None
) -> Tensor:
    """Return ``alpha row_scale total col_scale + beta c + bias`` in the output dtype, on a CPU.

    Parameters
    ----------
    problem : DenseProblem
        Gives `c`, `beta`, `bias` and the output dtype.
    total : Tensor, shape (M, N)
        float32 or float64, the dtype of the arithmetic; overwritten.
    alpha : float
        Factor of the product.
    row_scale : Tensor, shape (M,) or (), optional
        Scale of A.
    col_scale : Tensor, shape (N,) or (), optional
        Scale of B.

    Returns
    -------
    Tensor, shape (M, N)
        In the output dtype of `problem`.
    """
    dtype = total.dtype
    if row_scale is not None:
        total *= row_scale.to(dtype)[:, None] if row_scale.dim() else row_scale.to(dtype)  # (M, 1) or ()
    if col_scale is not None:
        total *= col_scale.to(dtype)  # (N,) or ()
    if alpha != 1.0:
        total *= alpha  # (M, N)
    if problem.c is not None:
        total.add_(problem.c.to(dtype), alpha=problem.beta)  # (M, N)
    if problem.bias is not None:
        total += problem.bias.to(dtype)  # (N,)
    return total.to(problem.out_dtype)


def _scale_argument(x: Tensor | None) -> tuple[Tensor | None, int]:
    """Return float32 scales and the step from one to the next: 0 if all rows share one."""
    if x is None:
        return None, 0
    return x.to(torch.float32).contiguous(), int(x.dim() > 0)


def pointer_of(x: Tensor | None) -> int:
    """Return the address of `x`, 0 for None."""
    return 0 if x is None else x.data_ptr()


def _with_contiguous_rows(c: Tensor) -> Tensor:
    """Return `c`, shape (M, N), copied if its rows have gaps between elements."""
    return c if c.shape[1] == 1 or c.stride(1) == 1 else c.contiguous()


def _is_aligned(out: Tensor) -> bool:
    """Return whether rows of `out`, (M, N), begin at multiples of 16 bytes."""
    pitch = out.stride(0) if out.shape[0] > 1 else 0
    return out.data_ptr() % ALIGNMENT == 0 and pitch * out.element_size() % ALIGNMENT == 0


def takes_runs(out: Tensor, c: Tensor | None = None) -> bool:
    """Return whether a lane may write 16 bytes at a time to `out`, (M, N), without a look at what is beyond N.

    And read as many at a time of `c`.
    """
    is_read = c is None or ((c.shape[1] == 1 or c.stride(1) == 1) and _is_aligned(c))
    return out.shape[1] % RUN == 0 and _is_aligned(out) and is_read


class EpilogueArguments(NamedTuple):
    """Kernel arguments of an epilogue; `owners` keep their memory alive."""

    arguments: tuple[int, ...]
    owners: tuple[Tensor | None, ...]


def epilogue_arguments(
    out: Tensor, row_scale: Tensor | None, col_scale: Tensor | None, bias: Tensor | None, c: Tensor | None
) -> EpilogueArguments:
    """Return the integer arguments of ``GemmOutput``: addresses, memory strides, sizes.

    Parameters
    ----------
    out : Tensor, shape (M, N)
        Output with contiguous rows.
    row_scale : Tensor, shape (M,) or (), optional
        Scale of A.
    col_scale : Tensor, shape (N,) or (), optional
        Scale of B.
    bias : Tensor, shape (N,), optional
        Added to each row.
    c : Tensor, shape (M, N), optional
        Source.

    Returns
    -------
    EpilogueArguments
        In the order of the kernels' parameters, from the output's address on.
    """
    m, n = out.shape
    rows, row_step = _scale_argument(row_scale)  # (M,) or ()
    columns, column_step = _scale_argument(col_scale)  # (N,) or ()
    bias, _ = _scale_argument(bias)  # (N,)
    c = None if c is None else _with_contiguous_rows(c)  # (M, N)
    pitch = out.stride(0) if m > 1 else n
    vector = n % 8 == 0 and _is_aligned(out)
    arguments = (
        out.data_ptr(), pitch, m, n, pointer_of(rows), row_step, pointer_of(columns), column_step, pointer_of(bias),
        pointer_of(c), 0 if c is None else c.stride(0) if m > 1 else n, int(vector),
    )  # fmt: skip
    return EpilogueArguments(arguments, (rows, columns, bias, c))
