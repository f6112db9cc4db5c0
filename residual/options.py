"""The arguments of ``residual.matmul`` besides its operands, checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residual.operand.operand import check_bits, check_operand, real_dtype
from residual.planning.cost_model import Sizes
from residual.planning.history import Kind
from residual.planning.plan import MODES

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Request:
    """The checked arguments of a product besides its operands."""

    tol: float | None
    mode: str
    bits: int | None
    out_dtype: torch.dtype
    on_failure: str
    seed: int | None

    def kind(self, A: Tensor, B: Tensor, owner: int = 0) -> Kind:
        """What calls with a tolerance like this one have in common; ``owner``: ``id`` of the prepared operand, or 0."""
        assert self.tol is not None
        sizes, dtypes = Sizes(A.shape[0], A.shape[1], B.shape[1], owner != 0), (A.dtype, B.dtype, self.out_dtype)
        return Kind(sizes, self.tol, self.mode, self.bits or 8, dtypes, A.device, owner)


def _check_options(
    tol: float | None, mode: str, bits: int | None, out_dtype: torch.dtype | None, on_failure: str, seed: int | None
) -> None:
    if mode != "auto" and mode not in MODES:
        raise ValueError(f"mode must be 'auto' or one of {', '.join(MODES)}, got {mode!r}")
    if tol is None and mode == "auto":
        raise ValueError("tol must be given for mode='auto', got None")
    if tol is not None and not 0 < tol < 1:
        raise ValueError(f"tol must be a relative error in (0, 1), got {tol!r}")
    check_bits(bits)
    if out_dtype is not None and out_dtype not in _FLOATS:
        raise TypeError(f"out_dtype must be one of {', '.join(map(str, _FLOATS))}, got {out_dtype}")
    if on_failure not in ("raise", "fp32"):
        raise ValueError(f"on_failure must be 'raise' or 'fp32', got {on_failure!r}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed must be an integer or None, got {type(seed).__name__}")


def check_request(
    A: Tensor, B: Tensor, tol: float | None, mode: str, bits: int | None, out_dtype: torch.dtype | None,
    on_failure: str, seed: int | None,
) -> Request:  # fmt: skip
    """The request that the arguments of ``residual.matmul`` make; raises as that says."""
    check_operand("A", A)
    check_operand("B", B)
    if A.shape[1] != B.shape[0]:
        raise ValueError(f"B must have as many rows as A has columns, got {B.shape[0]} and {A.shape[1]}")
    if A.device != B.device:
        raise ValueError(f"B must be on the device of A, got {B.device} and {A.device}")
    _check_options(tol, mode, bits, out_dtype, on_failure, seed)
    dtype = out_dtype or torch.promote_types(real_dtype(A), real_dtype(B))
    return Request(tol, mode, bits, dtype, on_failure, seed)
