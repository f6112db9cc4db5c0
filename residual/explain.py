"""``explain``: which rungs a product tries, from the cheapest up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.cpu import extension
from cute_kernels.explanation import Explanation
from cute_kernels.gemm.cpu import dense_backend
from residual.operand.prepared import DIRECT, PreparedOperand
from residual.options import OnFailure, Options, check_options, check_pair
from residual.planning.ladder import Rung


def explain(
    A: Tensor,
    B: Tensor | PreparedOperand,
    *,
    tol: float | None = None,
    mode: str = "auto",
    bits: int | None = None,
    out_dtype: torch.dtype | None = None,
    rungs: Sequence[str] | None = None,
    on_failure: OnFailure = "raise",
) -> Explanation:
    """Report the rungs that :func:`residual.matmul` tries for these operands; nothing is computed.

    Which of them the data needs is measured in the call: its report names it.

    Parameters
    ----------
    A, B, tol, mode, bits, out_dtype, rungs, on_failure
        As for :func:`residual.matmul`.

    Returns
    -------
    Explanation
        `kernel` is the first rung.

    Raises
    ------
    TypeError, ValueError
        As :func:`residual.matmul`.

    Examples
    --------
    >>> import residual
    >>> residual.explain(torch.ones(2, 3), torch.ones(3, 2), tol=1e-3).facts["rungs"]
    ['fp32']
    """
    options = check_options(tol, mode, bits, out_dtype, None, rungs, on_failure)
    a, b = check_pair(A, B.weight if isinstance(B, PreparedOperand) else B)
    prepared = B if isinstance(B, PreparedOperand) else None
    tried = (*_before(a, b, prepared, options), *options.rungs_for(a, b, prepared is not None))
    names, products = [str(each) for each in tried], [each.products for each in tried]
    size = f"{a.shape[0]} x {a.shape[1]} times {a.shape[1]} x {b.shape[1]}"
    goal = "as it comes" if tol is None else f"for a relative error of {tol:g}"
    steps = ", then ".join(f"{name} ({count:g} integer products)" if count else name
                           for name, count in zip(names, products, strict=True))  # fmt: skip
    where = "cuda" if a.is_cuda else _cpu_backend(tried[0])
    device = "CUDA" if a.is_cuda else f"CPU, {torch.get_num_threads()} threads"
    reason = "" if a.is_cuda or extension.available() else f"; {extension.MISSING}"
    facts = {"rungs": names, "products": products, "tol": tol, "shape": (a.shape[0], b.shape[1]), "inner": a.shape[1]}
    return Explanation("matmul", where, names[0], f"{device}: {size}, {goal}: {steps}{reason}", facts)


def _before(A: Tensor, B: Tensor, prepared: PreparedOperand | None, options: Options) -> tuple[Rung, ...]:
    """Return the rung in float16 where float32 operands on a GPU take it before digits."""
    if not A.is_cuda or A.dtype != torch.float32:
        return ()
    from residual.cuda import sixteen_bit  # needs the CUDA wheels

    return (sixteen_bit.RUNG,) if sixteen_bit.serves(A, B, prepared, options._replace(seed=0)) else ()


def _cpu_backend(first: Rung) -> str:
    """Return what multiplies by the first rung: the engine or torch."""
    is_engine = extension.available() and (first == DIRECT or dense_backend() == "engine")
    return "engine" if first.bits and is_engine else "torch"
