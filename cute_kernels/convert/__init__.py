"""Real matrices to operands: quantization, digits, compression, packing."""
