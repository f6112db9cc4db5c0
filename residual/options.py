"""The options of a product, checked once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from residual.operand.operand import FLOATS as SHORT_FLOATS
from residual.operand.operand import check_operand, real_dtype
from residual.planning.ladder import (
    FLOATS,
    LEAST_DIRECT,
    LEAST_SLICES,
    MODES,
    RUNGS,
    SMALL,
    Demand,
    Machine,
    Rung,
    rungs_of,
)

OnFailure = Literal["raise", "fallback", "fp32"]
_OUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_OLD_MODES = {"centred": "centered"}
_FLOWS = ("auto", "measured")


class MatmulOptions(TypedDict, total=False):
    """Keyword options of :func:`residual.matmul`, :func:`residual.plan` and the layers."""

    tol: float | None
    mode: str
    bits: int | None
    out_dtype: torch.dtype | None
    seed: int | None
    rungs: Sequence[str] | None
    on_failure: OnFailure
    flow: str


class Options(NamedTuple):
    """Checked options; fields as the arguments of :func:`residual.matmul`."""

    tol: float | None = None
    mode: str = "auto"
    bits: int | None = None
    out_dtype: torch.dtype | None = None
    seed: int | None = 0
    rungs: tuple[str, ...] | None = None
    on_failure: str = "raise"
    flow: str = "auto"

    def result_dtype(self, A: Tensor, B: Tensor) -> torch.dtype:
        """Return the dtype of the product."""
        return self.out_dtype or torch.promote_types(real_dtype(A), real_dtype(B))

    def starts_single(self, A: Tensor, B: Tensor, is_prepared: bool) -> bool:
        """Return whether the first attempt at a tolerance is the float32 product of CPU tensors as they are."""
        if self.tol is None or not A.is_cpu or not A.dtype == B.dtype == (self.out_dtype or A.dtype) == torch.float32:
            return False
        if self.rungs is not None:
            return self.rungs[0] == "fp32"
        if self.mode != "auto":
            return False
        is_small = A.shape[0] * B.numel() < SMALL or _are_few(A, B, is_prepared)
        return self.tol < LEAST_DIRECT or is_small or not machine_of(A.device).int8

    def rungs_at(self, device: torch.device, demand: Demand) -> tuple[Rung, ...]:
        """Return the rungs of products on a device from the cheapest up."""
        if self.rungs is not None:
            return tuple(Rung(each, 0 if each in FLOATS else self.bits or 8) for each in self.rungs)
        return rungs_of(self.mode, self.bits or 8, machine_of(device), demand)

    def rungs_for(self, A: Tensor, B: Tensor, is_prepared: bool = False) -> tuple[Rung, ...]:
        """Return the rungs of ``A B``; `is_prepared`: what digits need of B is there."""
        double = torch.float64 in (real_dtype(A), real_dtype(B), self.result_dtype(A, B))
        is_short = A.dtype == B.dtype and A.dtype in (torch.float16, torch.bfloat16)
        if "fp16" in (self.rungs or ()) and not (is_short and machine_of(A.device).cuda):
            given = f"{A.dtype} and {B.dtype} on {A.device.type}"
            raise ValueError(f"rungs may name fp16 for operands of one 16-bit dtype on cuda, got {given}")
        size = A.shape[0] * A.shape[1] * B.shape[1]
        last, few = self.on_failure == "fallback", _are_few(A, B, is_prepared)
        return self.rungs_at(A.device, Demand(self.tol or 0.0, size, double, is_short, last, few))

    def rungs_to_prepare(self, device: torch.device) -> tuple[Rung, ...]:
        """Return the rungs of large float32 products, whatever the number of rows of A."""
        return self.rungs_at(device, Demand(self.tol or 0.0, SMALL, fallback=self.on_failure == "fallback"))


def machine_of(device: torch.device) -> Machine:
    """Return what the table of rungs depends on."""
    if device.type == "cuda":
        return Machine(True, True)
    from cute_kernels.cpu.extension import has_vnni  # takes longer to import than this package

    return Machine(False, has_vnni())


def _are_few(A: Tensor, B: Tensor, is_prepared: bool) -> bool:
    """Return whether a pass over B on a CPU takes longer than digits save: that of float64 and integers always does."""
    if is_prepared or machine_of(A.device).cuda:
        return False
    return min(A.shape[0], B.shape[1]) < LEAST_SLICES or not {A.dtype, B.dtype} <= set(SHORT_FLOATS)


def check_bits(bits: object) -> None:
    """Raise ``ValueError`` unless `bits` is 4 or 8 as an integer: key on the type, since 8.0 == 8."""
    if not (isinstance(bits, int) and bits in (4, 8)):
        raise ValueError(f"bits must be None, 4 or 8, got {bits!r}")


def check_mode(mode: object) -> str:
    """Return a mode other than ``"auto"`` under its present name; raise ``ValueError``."""
    if isinstance(mode, str) and mode in _OLD_MODES:
        warnings.warn(f"mode={mode!r} is now {_OLD_MODES[mode]!r}", DeprecationWarning, stacklevel=5)
        mode = _OLD_MODES[mode]
    if mode not in MODES:
        raise ValueError(f"mode must be 'auto' or one of {', '.join(MODES)}, got {mode!r}")
    return str(mode)


def check_seed(seed: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless `seed` is None or a 64-bit integer."""
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an integer or None, got {type(seed).__name__}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be a 64-bit integer, got {seed}")


def _check_rungs(rungs: object, tol: float | None) -> tuple[str, ...]:
    found = tuple(rungs) if isinstance(rungs, Sequence) and not isinstance(rungs, str) else ()
    if not found or not set(found) <= set(RUNGS):
        raise ValueError(f"rungs must be a sequence of {', '.join(RUNGS)}, got {rungs!r}")
    if tol is None:
        raise ValueError("tol must be given for rungs, got None")
    return found


def _check_failure(on_failure: object) -> str:
    if on_failure == "fp32":
        warnings.warn("on_failure='fp32' is now 'fallback'", DeprecationWarning, stacklevel=5)
        return "fallback"
    if on_failure not in ("raise", "fallback"):
        raise ValueError(f"on_failure must be 'raise' or 'fallback', got {on_failure!r}")
    return str(on_failure)


def check_options(
    tol: float | None = None,
    mode: str = "auto",
    bits: int | None = None,
    out_dtype: torch.dtype | None = None,
    seed: int | None = 0,
    rungs: Sequence[str] | None = None,
    on_failure: str = "raise",
    flow: str = "auto",
) -> Options:
    """Return the checked options; raise as :func:`residual.matmul` says."""
    mode = mode if mode == "auto" else check_mode(mode)
    if tol is None and mode == "auto":
        raise ValueError("tol must be given for mode='auto', got None")
    if tol is not None and not 0 < tol < 1:
        raise ValueError(f"tol must be a relative error in (0, 1), got {tol!r}")
    if bits is not None:
        check_bits(bits)
    if out_dtype is not None and out_dtype not in _OUT_DTYPES:
        raise TypeError(f"out_dtype must be one of {', '.join(map(str, _OUT_DTYPES))}, got {out_dtype}")
    failure = on_failure if on_failure == "raise" else _check_failure(on_failure)
    check_seed(seed)
    if flow not in _FLOWS:
        raise ValueError(f"flow must be one of {', '.join(_FLOWS)}, got {flow!r}")
    chosen = None if rungs is None else _check_rungs(rungs, tol)
    return Options(tol, mode, bits, out_dtype, seed, chosen, failure, flow)


@lru_cache(maxsize=256, typed=True)  # 8.0 == 8: key on the types too, so that floats are rejected
def _checked(
    tol: float | None, mode: str, bits: int | None, out_dtype: torch.dtype | None, seed: int | None, flow: str
) -> Options:
    return check_options(tol, mode, bits, out_dtype, seed, flow=flow)


def call_options(
    tol: float | None,
    mode: str,
    bits: int | None,
    out_dtype: torch.dtype | None,
    seed: int | None,
    rungs: Sequence[str] | None,
    on_failure: str,
    flow: str,
) -> Options:
    """Return the checked options of one call; those with neither rungs nor warnings are checked once."""
    if rungs is None and on_failure == "raise" and isinstance(mode, str) and mode not in _OLD_MODES:
        try:
            return _checked(tol, mode, bits, out_dtype, seed, flow)
        except TypeError:  # not hashable: the checks have better words
            pass
    return check_options(tol, mode, bits, out_dtype, seed, rungs, on_failure, flow)


def check_pair(A: object, B: object) -> tuple[Tensor, Tensor]:
    """Return the operands; raise unless they are real matrices of one device whose shapes match."""
    a, b = check_operand("A", A), check_operand("B", B)
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"B must have {a.shape[1]} rows to match A of shape {tuple(a.shape)}, got {b.shape[0]}")
    if a.device != b.device:
        raise ValueError(f"B must be on the device of A, got {b.device} and {a.device}")
    return a, b
