"""Layers over ``residual.matmul``."""
