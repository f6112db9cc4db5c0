"""Kernels of the residual-compensated product on a GPU: split into integers, select entries, pack them."""
