"""Dense products of int8 digit planes with a fused epilogue."""

from cute_kernels.gemm.api import explain_gemm, gemm

__all__ = ["explain_gemm", "gemm"]
