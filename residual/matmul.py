"""``residual.matmul``: a quantized product whose relative error the caller chooses."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, overload

import torch
from torch import Tensor

from residual.execute.checked import Report, again, compute, short_kind
from residual.operand.operand import Prepared
from residual.options import Request, check_request
from residual.planning.history import Kind
from residual.torch_op import product

OnFailure = Literal["raise", "fp32"]


@overload
def matmul(
    A: Tensor,
    B: Tensor,
    *,
    tol: float | None = None,
    mode: str = "auto",
    bits: int | None = None,
    out_dtype: torch.dtype | None = None,
    prepared: Prepared | None = None,
    seed: int | None = None,
    on_failure: OnFailure = "raise",
    return_report: Literal[False] = False,
) -> Tensor: ...


@overload
def matmul(
    A: Tensor,
    B: Tensor,
    *,
    tol: float | None = None,
    mode: str = "auto",
    bits: int | None = None,
    out_dtype: torch.dtype | None = None,
    prepared: Prepared | None = None,
    seed: int | None = None,
    on_failure: OnFailure = "raise",
    return_report: Literal[True],
) -> tuple[Tensor, Report]: ...


def matmul(
    A: Tensor,
    B: Tensor,
    *,
    tol: float | None = None,
    mode: str = "auto",
    bits: int | None = None,
    out_dtype: torch.dtype | None = None,
    prepared: Prepared | None = None,
    seed: int | None = None,
    on_failure: OnFailure = "raise",
    return_report: bool = False,
) -> Tensor | tuple[Tensor, Report]:
    """``C ~ A B`` by integer products, with ``||AB - C||_F <= tol ||AB||_F``.

    With ``tol`` the cheapest plan that is predicted to meet it runs, 16 Gaussian probes measure its error, and where
    that misses ``tol`` a better plan follows.  The probability of returning a product that misses ``tol`` is below 1%
    for any input and any error, over all attempts of the call; it is far smaller for the errors that rounding makes.
    Where earlier calls of these sizes, dtypes and tolerance came to one plan, it runs without a prediction, but with
    the same check; not with a ``seed`` or for a report.  On GPUs of sm_90a such calls of ``direct`` measure the error
    from the digits, whose sums are exact, and read the product in one of 16.
    Without ``tol`` the ``mode`` runs as it is, unchecked.

    With digits ``A ~ sA (A1 + A0 / 2**bits)``, a scale for each row, and ``B ~ sB (B1 + B0 / 2**bits)``, one for each
    column, the modes are ``direct``: A1 B1; ``centred``: the same without A's row and B's column means, which are added
    exactly; ``outlier``: the same, columns of k with outliers as a float32 product; ``full``: A1 B1 + (A1 B0 + A0 B1) /
    2**bits; ``columns``: the cross products over a part of k; ``sparse``: over entries that pass a threshold;
    ``full4``: A0 B0 / 4**bits besides; ``three_digit``: three digits and six products.

    Args:
        A: (M, K); float32, float16, bfloat16, float64 or an integer dtype, any strides.
        B: (K, N), on the device of A, likewise.
        tol: bound of the relative Frobenius error, in (0, 1); it includes the rounding to ``out_dtype``.
        mode: ``"auto"`` (needs ``tol``), or the one mode to use.
        bits: width of the digits, 4 or 8; None is 8.
        out_dtype: a float dtype; default that of the operands (float32 for integers up to 16 bits, float64 beyond).
        prepared: :func:`prepare` of B.  It also keeps one draw of probes, unless ``seed`` is given, so that the misses
            of its calls, still below 1% each, are not independent.
        seed: of the probes and of the lines that predictions look at; None draws one.
        on_failure: where no plan up to float32 meets ``tol``: ``"raise"``, or ``"fp32"``: go on with float32, then
            float64 products.
        return_report: return ``(C, Report)``; such a call measures the error also without ``tol``, and its result
            carries no gradient.

    Returns:
        C (M, N).  A row of A or column of B with inf or NaN gives what IEEE arithmetic gives, and the others what they
        give without it.  Without ``tol`` the modes ``direct``, ``centred``, ``full``, ``full4`` and ``three_digit`` do
        not wait for a GPU, and have NaN throughout such a row or column there.  The gradient is straight-through: that
        of the exact product, in the operands' dtypes.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it and both numbers.
        ToleranceError: no plan met ``tol``.

    Source: Gu, arXiv 2403.06924 (residual compensation); the probes' bound is ``residual.error.estimate.sharp_factor``.
    """
    if prepared is not None and not isinstance(prepared, Prepared):
        raise TypeError(f"prepared must come from residual.prepare, got {type(prepared).__name__}")
    request, kind = _looked_at(A, B, tol, mode, bits, out_dtype, on_failure, seed)
    if prepared is not None:
        prepared.require(B)
    if return_report:
        return compute(A, B, request, None if prepared is None else prepared.serving(B), measured=True)
    if _is_plain(A) and _is_plain(B):
        if kind is not None and prepared is None and not torch.is_autocast_enabled("cuda"):
            return again(A, B, request, kind)
        return compute(A, B, request, None if prepared is None else prepared.serving(B))[0]
    slot = -1 if prepared is None else prepared.slot
    return product(A, B, slot, tol, mode, bits, request.out_dtype, on_failure, seed)


_MOST = 256  # shapes may vary without end
_calls: dict[Hashable, tuple[Request, Kind | None]] = {}


def _looked_at(
    A: Tensor, B: Tensor, tol: float | None, mode: str, bits: int | None, out_dtype: torch.dtype | None,
    on_failure: str, seed: int | None,
) -> tuple[Request, Kind | None]:  # fmt: skip
    """What the arguments ask for, and the kind of a call that may go the short way; looked at once for all calls alike.

    Raises as :func:`matmul` says.
    """
    key: Hashable = None
    same = type(A) is type(B) is Tensor and A.layout == B.layout == torch.strided
    if same and not torch.compiler.is_compiling():  # sizes may be symbols there
        operands = A.shape, A.stride(), A.dtype, A.device, B.shape, B.stride(), B.dtype, B.device
        key = *operands, tol, mode, bits, type(bits), out_dtype, on_failure, seed  # 8.0 equals 8 and is wrong
        try:
            found = _calls.get(key)
        except TypeError:  # an argument of a type that no option has
            found = key = None
        if found is not None:
            return found
    request = check_request(A, B, tol, mode, bits, out_dtype, on_failure, seed)
    known = request, short_kind(A, B, request)
    if key is not None and seed is None:
        if len(_calls) >= _MOST:
            _calls.clear()
        _calls[key] = known
    return known


def _is_plain(x: Tensor) -> bool:
    """Whether nobody has to see an operator: no compiler, no gradient, no tensor of another type."""
    wanted = x.requires_grad and torch.is_grad_enabled()
    return type(x) is Tensor and not wanted and not torch.compiler.is_compiling()
