"""Kernels that read what other GPUs of a host hold."""
