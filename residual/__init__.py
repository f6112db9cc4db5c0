"""Quantized dense products that pay back their rounding: as published, or with an error the caller chooses."""

from cute_kernels._moved import register_moved
from residual.error.estimate import ErrorEstimate, bound_factor, estimate_error
from residual.execute.checked import Attempt, Report, ToleranceError
from residual.execute.measure_costs import measure_costs
from residual.linalg.qr import qr
from residual.linalg.solve import SolveReport, solve
from residual.matmul import matmul
from residual.nn.conv import conv2d
from residual.nn.linear import linear
from residual.nn.modules import ResidualLinear
from residual.operand.decompose import Decomposition, decompose
from residual.operand.operand import Prepared, prepare
from residual.paper.gemm import PaperReport, gemm
from residual.paper.thresholds import crossover_density
from residual.planning.cost_model import Costs

register_moved(
    "residual",
    {
        "decompose": ("residual.operand.decompose",),
        "estimate": ("residual.error.estimate",),
        "modules": ("residual.nn.modules",),
        "prepare": ("residual.operand.operand",),
        "qr": ("residual.linalg.qr",),
        "solve": ("residual.linalg.solve",),
        "thresholds": ("residual.paper.thresholds",),
    },
)

__all__ = [
    "Attempt",
    "Costs",
    "Decomposition",
    "ErrorEstimate",
    "PaperReport",
    "Prepared",
    "Report",
    "ResidualLinear",
    "SolveReport",
    "ToleranceError",
    "bound_factor",
    "conv2d",
    "crossover_density",
    "decompose",
    "estimate_error",
    "gemm",
    "linear",
    "matmul",
    "measure_costs",
    "prepare",
    "qr",
    "solve",
]
