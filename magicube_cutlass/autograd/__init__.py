"""Differentiable sparse products: straight-through quantization of integers, exact gradients of floats."""

from magicube_cutlass.autograd.integer import compress, sddmm, spmm, vectors_at

__all__ = ["compress", "sddmm", "spmm", "vectors_at"]
