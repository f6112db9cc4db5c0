"""Sums in float64 over the entries of a float32 matrix."""
