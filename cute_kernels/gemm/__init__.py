"""Dense int8 products with fused scales: one to six products of digit planes."""

from cute_kernels.gemm.api import explain_gemm, gemm

__all__ = ["explain_gemm", "gemm"]
