"""Differentiable sparse products: straight-through quantization of integers, exact gradients of floats."""

from cute_kernels.watch import watched
from magicube_cutlass.autograd import integer
from magicube_cutlass.autograd.integer import compress, vectors_at
from magicube_cutlass.autograd.integer_sddmm import sddmm
from magicube_cutlass.autograd.operators import multiply

spmm = watched("magicube_cutlass.autograd.spmm")(integer.spmm)

__all__ = ["compress", "multiply", "sddmm", "spmm", "vectors_at"]
