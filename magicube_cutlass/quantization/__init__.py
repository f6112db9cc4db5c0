"""Quantized operands: integers with a scale, low-precision floats with block scales."""
