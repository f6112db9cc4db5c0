"""Kernels: integer digits, the CPU engine, and what the sparse and the residual products are built from."""

from cute_kernels._moved import register_moved

__all__: list[str] = []  # names are those of its modules

register_moved(
    "cute_kernels",
    {
        "banks": ("cute_kernels.layout.bank_conflicts",),
        "compress": ("cute_kernels.convert.dense_to_sparse",),
        "fragments": ("cute_kernels.layout.fragments",),
        "gemm_digits": ("cute_kernels.convert.digits",),
        "gemm_floats": ("cute_kernels.scaled_gemm.api", "cute_kernels.scaled_gemm.operand"),
        "numbers": ("cute_kernels.dtypes",),
        "probes": ("cute_kernels.estimate.probes", "cute_kernels.estimate.config"),
        "quantize": ("cute_kernels.convert.quantize",),
        "sddmm_panel": ("cute_kernels.sddmm.panel",),
        "softmax": ("cute_kernels.attention.sparse_softmax",),
        "spmm_gather": ("cute_kernels.spmm.gather",),
        "spmm_panel": ("cute_kernels.spmm.panel",),
    },
)
