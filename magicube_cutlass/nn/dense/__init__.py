"""Layers with dense quantized weights: integers with scales of rows or groups, low-precision floats."""
