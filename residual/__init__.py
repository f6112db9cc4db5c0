"""Quantized dense products that pay back their rounding: as published, or with an error the caller chooses."""

import warnings

from cute_kernels._moved import register_moved
from residual.error.estimate import ErrorEstimate, estimate_error
from residual.error.factor import bound_factor
from residual.explain import explain
from residual.linalg.qr import qr
from residual.linalg.solve import SolveReport, solve
from residual.matmul import Pending, Plan, matmul, plan, prepare
from residual.nn.conv import conv2d
from residual.nn.linear import linear
from residual.nn.modules import ResidualLinear
from residual.operand.decompose import Decomposition, decompose
from residual.operand.prepared import PreparedOperand
from residual.paper.gemm import PaperReport, gemm
from residual.paper.thresholds import crossover_density
from residual.report import Attempt, Report, ToleranceError

register_moved(
    "residual",
    {
        "decompose": ("residual.operand.decompose",),
        "estimate": ("residual.error.estimate", "residual.error.factor"),
        "modules": ("residual.nn.modules",),
        "prepare": ("residual.matmul", "residual.operand.prepared"),
        "qr": ("residual.linalg.qr",),
        "solve": ("residual.linalg.solve",),
        "thresholds": ("residual.paper.thresholds",),
    },
)

__all__ = [
    "Attempt",
    "Decomposition",
    "ErrorEstimate",
    "PaperReport",
    "Pending",
    "Plan",
    "PreparedOperand",
    "Report",
    "ResidualLinear",
    "SolveReport",
    "ToleranceError",
    "bound_factor",
    "conv2d",
    "crossover_density",
    "decompose",
    "estimate_error",
    "explain",
    "gemm",
    "linear",
    "matmul",
    "plan",
    "prepare",
    "qr",
    "solve",
]


def __getattr__(name: str) -> object:
    if name == "Prepared":
        warnings.warn("residual.Prepared is now residual.PreparedOperand", DeprecationWarning, stacklevel=2)
        return PreparedOperand
    raise AttributeError(f"module 'residual' has no attribute {name!r}")
