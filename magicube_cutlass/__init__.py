"""Quantized sparse matrix products: SR-BCRS matrices, SpMM and SDDMM with exact integers of 4 to 16 bits."""

from cute_kernels._moved import register_moved
from cute_kernels.dtypes import SDDMM_PAIRS, SPMM_PAIRS
from magicube_cutlass import autograd, masks, nn, reference
from magicube_cutlass.attention import sparse_attention, sparse_softmax
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.generate import prune, random_pattern
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.smtx import read_smtx, write_smtx
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.nn import convert
from magicube_cutlass.ops.explain import explain
from magicube_cutlass.ops.sddmm import sddmm
from magicube_cutlass.ops.spmm import spmm
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor
from magicube_cutlass.quantization.quant_tensor import QuantTensor
from magicube_cutlass.quantization.quantize import quantize

register_moved(
    "magicube_cutlass",
    {
        "bcrs": ("magicube_cutlass.formats.bcrs",),
        "block_scales": ("magicube_cutlass.quantization.float_tensor",),
        "generate": ("magicube_cutlass.formats.generate",),
        "matrix": ("magicube_cutlass.formats.base",),
        "pattern": ("magicube_cutlass.formats.pattern",),
        "quantize": ("magicube_cutlass.quantization.quant_tensor", "magicube_cutlass.quantization.quantize"),
        "smtx": ("magicube_cutlass.formats.smtx",),
        "srbcrs": ("magicube_cutlass.formats.srbcrs",),
    },
)

__version__ = "0.1.0"

__all__ = [
    "BCRS",
    "SDDMM_PAIRS",
    "SPMM_PAIRS",
    "SRBCRS",
    "Pattern",
    "QuantTensor",
    "ScaledFloatTensor",
    "autograd",
    "convert",
    "explain",
    "masks",
    "nn",
    "prune",
    "quantize",
    "random_pattern",
    "read_smtx",
    "reference",
    "sddmm",
    "sparse_attention",
    "sparse_softmax",
    "spmm",
    "write_smtx",
]
