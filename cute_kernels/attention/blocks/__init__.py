"""Fused sparse attention at whole blocks of a mask."""
