"""Dense products of low-precision floats with block scales."""
