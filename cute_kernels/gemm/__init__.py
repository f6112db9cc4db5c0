"""Dense products of int8 digit planes with a fused epilogue."""

from cute_kernels.gemm.api import explain_gemm, gemm
from cute_kernels.gemm.int4 import NATIVE_INT4, Int4Matrix

__all__ = ["NATIVE_INT4", "Int4Matrix", "explain_gemm", "gemm"]
