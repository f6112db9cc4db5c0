"""Differentiable sparse products: straight-through quantization of integers, exact gradients of floats."""

from magicube_cutlass.autograd.integer import compress, spmm, vectors_at
from magicube_cutlass.autograd.integer_sddmm import sddmm

__all__ = ["compress", "sddmm", "spmm", "vectors_at"]
