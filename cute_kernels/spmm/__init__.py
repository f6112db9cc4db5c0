"""SpMM kernels, their configs and their selection."""
