"""Factorizations and solvers over a quantized product."""
