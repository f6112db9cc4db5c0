"""What ``magicube_cutlass`` exports: the package loads this module with its first attribute."""

# ruff: noqa: F401
from cute_kernels.dtypes import SDDMM_PAIRS, SPMM_PAIRS
from cute_kernels.explanation import Explanation
from magicube_cutlass import autograd, masks, nn, pruning, reference
from magicube_cutlass.attention import explain_attention, sparse_attention, sparse_softmax
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.generate import prune, random_pattern
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.smtx import read_smtx, write_smtx
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.nn import convert
from magicube_cutlass.ops.explain import explain, explain_sddmm
from magicube_cutlass.ops.sddmm import sddmm
from magicube_cutlass.ops.spmm import spmm
from magicube_cutlass.pruning import distill, prune_model
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor, matmul
from magicube_cutlass.quantization.quant_tensor import QuantTensor
from magicube_cutlass.quantization.quantize import quantize
