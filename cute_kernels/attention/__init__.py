"""Sparse attention kernels: fused, softmax, quantized operands."""
