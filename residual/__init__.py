"""Quantized products that pay back their rounding: decomposition into digits and a measured error."""

from residual.decompose import Decomposition, decompose
from residual.estimate import ErrorEstimate, bound_factor, estimate_error

__all__ = ["Decomposition", "ErrorEstimate", "bound_factor", "decompose", "estimate_error"]
