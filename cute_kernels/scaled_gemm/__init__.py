"""Dense products of low-precision floats with per-row, block and tile scales."""
