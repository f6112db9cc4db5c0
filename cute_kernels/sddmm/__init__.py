"""SDDMM kernels, their configs and their selection."""
