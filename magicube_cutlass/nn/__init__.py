"""Layers for PyTorch models: sparse quantized weights, fine-tuning, calibration, conversion of a whole model."""

from magicube_cutlass.dispatch.graph_sums import compile_options
from magicube_cutlass.nn.attention import SparseQuantAttention
from magicube_cutlass.nn.auto_plan import Budget, PlanChoice
from magicube_cutlass.nn.calibration import calibrate
from magicube_cutlass.nn.config import QuantConfig, SparseQuantConfig
from magicube_cutlass.nn.convert import convert
from magicube_cutlass.nn.dense.embedding import QuantEmbedding
from magicube_cutlass.nn.dense.fuse import fuse, fuse_activations, fuse_glu, fuse_quantization
from magicube_cutlass.nn.dense.linear import QuantLinear, quantize_weight
from magicube_cutlass.nn.dense.projections import fuse_projections
from magicube_cutlass.nn.dense.smooth import fold_smooth, smooth
from magicube_cutlass.nn.flop_formulas import register_formulas
from magicube_cutlass.nn.linear import SparseQuantLinear
from magicube_cutlass.nn.report import ConversionReport, ConversionRow
from magicube_cutlass.nn.schedule import PruningSchedule
from magicube_cutlass.nn.weight_modules import to_dense

register_formulas()

__all__ = [
    "Budget",
    "ConversionReport",
    "ConversionRow",
    "PlanChoice",
    "PruningSchedule",
    "QuantConfig",
    "QuantEmbedding",
    "QuantLinear",
    "SparseQuantAttention",
    "SparseQuantConfig",
    "SparseQuantLinear",
    "calibrate",
    "compile_options",
    "convert",
    "fold_smooth",
    "fuse",
    "fuse_activations",
    "fuse_glu",
    "fuse_projections",
    "fuse_quantization",
    "quantize_weight",
    "smooth",
    "to_dense",
]
