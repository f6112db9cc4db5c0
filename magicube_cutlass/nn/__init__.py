"""Layers for PyTorch models: sparse quantized weights, fine-tuning, calibration, conversion of a whole model."""

from magicube_cutlass.nn.attention import SparseQuantAttention
from magicube_cutlass.nn.calibration import calibrate
from magicube_cutlass.nn.config import QuantConfig, SparseQuantConfig
from magicube_cutlass.nn.convert import ConversionReport, ConversionRow, convert
from magicube_cutlass.nn.dense.linear import QuantLinear, quantize_weight
from magicube_cutlass.nn.dense.smooth import smooth
from magicube_cutlass.nn.flop_formulas import register_formulas
from magicube_cutlass.nn.linear import SparseQuantLinear
from magicube_cutlass.nn.schedule import PruningSchedule

register_formulas()

__all__ = [
    "ConversionReport",
    "ConversionRow",
    "PruningSchedule",
    "QuantConfig",
    "QuantLinear",
    "SparseQuantAttention",
    "SparseQuantConfig",
    "SparseQuantLinear",
    "calibrate",
    "convert",
    "quantize_weight",
    "smooth",
]
