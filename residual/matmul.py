"""``residual.matmul``: a quantized product whose relative error the caller chooses, and its plan."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from cute_kernels.watch import watched
from magicube_cutlass.checks import has_dispatch_mode
from residual.execute.quick import Quick, quick_for
from residual.execute.run import Outcome
from residual.execute.start import Awaited, begin
from residual.operand.operand import FLOATS, check_operand
from residual.operand.prepared import PreparedOperand, prepare_for
from residual.options import MatmulOptions, OnFailure, Options, call_options, check_options, check_pair
from residual.report import Report
from residual.torch_op import product


class Pending:
    """A product that was started; its attributes wait for the verdict.

    On a CPU the product is complete at once. Where an sm_90 GPU measures float32 operands, the verdict is read when it
    is asked for, and no operand must be written to before.

    Examples
    --------
    >>> pending = plan(torch.ones(3, 2), tol=1e-2).start(torch.ones(2, 3))
    >>> pending.report.plan, pending.result().tolist()
    ('fp32', [[3.0, 3.0], [3.0, 3.0]])
    """

    def __init__(self, begun: Awaited) -> None:
        self._begun = begun

    def _outcome(self) -> Outcome:
        self._begun = found = self._begun.outcome()
        return found

    @property
    def product(self) -> Tensor:
        """The product, shape (M, N), whether it is within the tolerance or not."""
        return self._outcome().product

    @property
    def report(self) -> Report:
        """How it was computed."""
        return self._outcome().report

    @property
    def failure(self) -> Exception | None:
        """What :meth:`result` raises."""
        return self._outcome().failure

    def result(self) -> Tensor:
        """Return the product; raise :class:`ToleranceError` if no rung met the tolerance."""
        return self._outcome().checked()


@dataclass(frozen=True)
class Plan:
    """A product with its options checked, and its right operand prepared if that is constant; immutable.

    Attributes
    ----------
    right : PreparedOperand or None
        B; None if calls bring it.
    options : Options
        Of :func:`residual.matmul`.

    Examples
    --------
    >>> B = torch.randn(64, 32)
    >>> product = plan(B, tol=1e-3)
    >>> A = torch.randn(16, 64)
    >>> torch.equal(product(A), matmul(A, B, tol=1e-3))
    True
    """

    right: PreparedOperand | None
    options: Options
    _quick: Quick | None = None

    def _right(self, B: Tensor | PreparedOperand | None) -> tuple[Tensor, PreparedOperand | None]:
        if (B is None) == (self.right is None):
            given = "none" if B is None else "one"
            raise TypeError(f"B must be given once, to the plan or to its call, got {given}")
        return _current(self.right if B is None else B)

    def __call__(self, A: Tensor, B: Tensor | PreparedOperand | None = None) -> Tensor:
        """Return the product; the gradient is straight-through.

        Parameters
        ----------
        A : Tensor, shape (M, K)
            Left operand.
        B : Tensor or PreparedOperand, shape (K, N), optional
            Right operand, if the plan has none.

        Raises
        ------
        ToleranceError
            If no rung met the tolerance.
        """
        found = self._quick(A) if B is None and self._quick is not None and not has_dispatch_mode() else None
        if found is not None:
            return found
        return product(A, *self._right(B), self.options)

    def start(self, A: Tensor, B: Tensor | PreparedOperand | None = None) -> Pending:
        """Start the product, without a gradient, and return it with its verdict pending."""
        weight, prepared = self._right(B)
        check_pair(A, weight)
        return Pending(begin(A, weight if prepared is None else prepared, self.options, measured=True))


def _current(B: Tensor | PreparedOperand | None) -> tuple[Tensor, PreparedOperand | None]:
    """Return the right operand and what was prepared of it."""
    if isinstance(B, PreparedOperand):
        B.check_current()
        return B.weight, B
    return B, None  # type: ignore[return-value]


def prepare(
    W: Tensor, *, mode: str = "auto", bits: int | None = None, tol: float | None = None, seed: int | None = 0
) -> PreparedOperand:
    """Prepare a constant right operand for :func:`residual.matmul`.

    Parameters
    ----------
    W : Tensor, shape (K, N)
        A real dtype, any memory strides; kept, not copied.
    mode : str, default "auto"
        Mode to make the digits for. ``"auto"``: those that this device may use for `tol`.
    bits : int, optional
        Bits per digit, 4 or 8. Default: 8.
    tol : float, optional
        Tolerance of the products. Default: 1e-2.
    seed : int or None, default 0
        Of the probes; None draws one.

    Returns
    -------
    PreparedOperand

    Raises
    ------
    TypeError
        If `W` is not a real dense tensor.
    ValueError
        If `W` is not 2-D, or `mode`, `bits` or `tol` is out of range.

    Examples
    --------
    >>> prepare(torch.ones(8, 4), mode="full").shape
    (8, 4)
    """
    options = check_options(1e-2 if tol is None else tol, mode, bits, seed=seed)
    return prepare_by(W, options)


def prepare_by(W: Tensor, options: Options) -> PreparedOperand:
    """Return `W` prepared for the digit rungs of options, whatever the number of rows of A."""
    check_operand("W", W)
    rungs = options.rungs_to_prepare(W.device)
    found = prepare_for(W, options.seed, rungs)
    if not W.is_cuda:
        return found
    from residual.cuda.check import transpose_probes  # take longer to import than this package
    from residual.cuda.passes import passes_for
    from residual.cuda.sixteen_bit import prepare_right

    is_copied = options.mode != "auto" and found.weight.dtype in FLOATS  # products of a mode read float32 copies
    passes = passes_for(found.weight.float() if is_copied else found.weight, found.probes, rungs)
    transposed = prepare_right(found.weight, found.probes, options)
    if transposed is None and not passes:
        transposed = transpose_probes(found.probes, found.vectors)
    return replace(found, passes=passes, transposed=transposed)


def plan(
    B: Tensor | PreparedOperand | None = None,
    *,
    tol: float | None = None,
    mode: str = "auto",
    bits: int | None = None,
    out_dtype: torch.dtype | None = None,
    seed: int | None = 0,
    rungs: Sequence[str] | None = None,
    on_failure: OnFailure = "raise",
    flow: str = "auto",
) -> Plan:
    """Return a product to be called with A, or with A and B.

    Parameters
    ----------
    B : Tensor or PreparedOperand, shape (K, N), optional
        Constant right operand, prepared once.
    tol, mode, bits, out_dtype, seed, rungs, on_failure, flow
        As in :func:`residual.matmul`.

    Returns
    -------
    Plan

    Raises
    ------
    TypeError, ValueError
        If an option is out of range.

    Examples
    --------
    >>> product = plan(tol=1e-2)
    >>> product(torch.ones(2, 3), torch.ones(3, 2))
    tensor([[3., 3.],
            [3., 3.]])
    """
    options = check_options(tol, mode, bits, out_dtype, seed, rungs, on_failure, flow)
    right = prepare_by(B, options) if isinstance(B, Tensor) else B
    return Plan(right, options, quick_for(right, options))


@overload
def matmul(
    A: Tensor,
    B: Tensor | PreparedOperand,
    *,
    prepared: PreparedOperand | None = None,
    return_report: Literal[False] = False,
    **options: Unpack[MatmulOptions],
) -> Tensor: ...


@overload
def matmul(
    A: Tensor,
    B: Tensor | PreparedOperand,
    *,
    prepared: PreparedOperand | None = None,
    return_report: Literal[True],
    **options: Unpack[MatmulOptions],
) -> tuple[Tensor, Report]: ...


@watched("residual.matmul")
def matmul(
    A: Tensor,
    B: Tensor | PreparedOperand,
    *,
    tol: float | None = None,
    mode: str = "auto",
    bits: int | None = None,
    out_dtype: torch.dtype | None = None,
    prepared: PreparedOperand | None = None,
    seed: int | None = 0,
    rungs: Sequence[str] | None = None,
    on_failure: OnFailure = "raise",
    flow: str = "auto",
    return_report: bool = False,
) -> Tensor | tuple[Tensor, Report]:
    """Return ``C ~ A B`` with ``||AB - C||_F <= tol ||AB||_F``.

    With `tol` the rungs of the device run from the cheapest up. The error of a product of digits is measured before it
    is computed, from what the digits leave; that of a float product by reading it. Both are measured by 16 Gaussian
    probes in float64, and the rounding of the probes is bounded and counts as error. The probability of returning a
    product beyond `tol` is below 1% over the seeds, for operands that do not depend on the seed. The result is a
    function of the operands, the options and the device.
    Without `tol` the `mode` runs, unchecked.

    With digits ``A ~ sA (A1 + A0 / 2**bits)``, one scale per row, and ``B ~ sB (B1 + B0 / 2**bits)``, one per column,
    the modes are ``direct``: A1 B1; ``centered``: the same without A's row and B's column means, which are added
    exactly; ``outlier``: the same, columns of k with outliers as a float32 product; ``full``: A1 B1 + (A1 B0 + A0 B1) /
    2**bits; ``columns``: the cross terms over an eighth of k; ``sparse``: over entries that pass a threshold;
    ``full4``: A0 B0 / 4**bits besides; ``three_digit``: three digits and six products. As published in [1]_.

    Parameters
    ----------
    A : Tensor, shape (M, K)
        float32, float16, bfloat16, float64 or an integer dtype, any memory strides.
    B : Tensor or PreparedOperand, shape (K, N)
        Likewise, on the device of `A`. A prepared operand brings its probes.
    tol : float, optional
        Bound of the relative Frobenius error, in (0, 1); it includes the rounding to `out_dtype`.
    mode : str, default "auto"
        ``"auto"`` needs `tol`; else the one mode to run.
    bits : int, optional
        Bits per digit, 4 or 8. Default: 8.
    out_dtype : torch.dtype, optional
        A float dtype. Default: that of the operands (float32 for integers up to 16 bits, float64 beyond).
    prepared : PreparedOperand, optional
        Deprecated: pass it as `B`.
    seed : int or None, default 0
        Of the probes; None draws one.
    rungs : sequence of str, optional
        Rungs to climb instead of the device's: ``direct``, ``full``, ``full4``, ``three_digit``, ``fp16``, ``fp32``,
        ``fp64``.
    on_failure : {"raise", "fallback"}, default "raise"
        ``"fallback"``: run float32 and float64 products if no rung meets `tol`.
    flow : {"auto", "measured"}, default "auto"
        ``"measured"``: as described, on every device. ``"auto"``: the same, but floats of 16 and 32 bits on a GPU other
        than sm_90, at tolerances below 3e-5 (of one 16-bit dtype: 1e-4) and by modes other than ``direct`` and ``full``
        take kernels whose float32 check is guarded, not proven.
    return_report : bool, default False
        Return ``(C, Report)``; measures the error also without `tol`, and C carries no gradient.

    Returns
    -------
    Tensor, shape (M, N)
        A row of A or a column of B with inf or NaN gives what IEEE arithmetic gives; the others are what they are
        without it. On a GPU without `tol` such lines are NaN throughout, for finding them would wait. The gradient is
        straight-through: that of the exact product, in the dtypes of the operands.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range.
    ToleranceError
        If no rung met `tol`.

    References
    ----------
    .. [1] Gu, arXiv 2403.06924, section 2.3, equations 4 to 7.

    Examples
    --------
    >>> A, B = torch.randn(64, 64), torch.randn(64, 64)
    >>> C, report = matmul(A, B, tol=1e-4, return_report=True)
    >>> report.plan, report.upper <= 1e-4
    ('fp32', True)
    """
    right = B if prepared is None else _with_prepared(B, prepared)
    options = call_options(tol, mode, bits, out_dtype, seed, rungs, on_failure, flow)
    if not return_report:
        return product(A, *_current(right), options)
    pending = Plan(None, options).start(A, right)
    return pending.result(), pending.report


def _with_prepared(B: Tensor | PreparedOperand, prepared: object) -> PreparedOperand:
    """Return the right operand of a call that names it by its old keyword."""
    if not isinstance(prepared, PreparedOperand):
        raise TypeError(f"prepared must come from residual.prepare, got {type(prepared).__name__}")
    warnings.warn("prepared= is deprecated; pass the PreparedOperand as B", DeprecationWarning, stacklevel=3)
    if isinstance(B, Tensor) and not torch.compiler.is_compiling():
        prepared.check_current(B)
    return prepared
