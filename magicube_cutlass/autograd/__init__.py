"""Differentiable sparse products: straight-through quantization of integers, exact gradients of floats."""

from magicube_cutlass.autograd.integer import compress, spmm, vectors_at
from magicube_cutlass.autograd.integer_sddmm import sddmm
from magicube_cutlass.autograd.operators import multiply

__all__ = ["compress", "multiply", "sddmm", "spmm", "vectors_at"]
