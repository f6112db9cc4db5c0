"""Operands: digits, scales, non-finite slices."""
