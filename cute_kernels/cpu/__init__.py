"""CPU engine: integer kernels in C++17 and their host side."""
