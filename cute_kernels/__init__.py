"""Kernels: integer digits, the CPU engine, and what the sparse and the residual products are built from."""
