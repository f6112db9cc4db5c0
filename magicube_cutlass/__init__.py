"""Quantized sparse matrix products: SR-BCRS matrices, SpMM and SDDMM with exact integers of 4 to 16 bits.

The package loads with its first attribute, or at once if torch is loaded: the command line answers ``--help`` without
torch. Loading registers the torch operators ``torch.ops.magicube``.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from cute_kernels._moved import register_moved

if TYPE_CHECKING:
    from magicube_cutlass import autograd, masks, nn, pruning, reference
    from magicube_cutlass._api import (
        BCRS,
        SDDMM_PAIRS,
        SPMM_PAIRS,
        SRBCRS,
        Explanation,
        Pattern,
        QuantTensor,
        ScaledFloatTensor,
        convert,
        distill,
        explain,
        explain_attention,
        explain_sddmm,
        matmul,
        prune,
        prune_model,
        quantize,
        random_pattern,
        read_smtx,
        sddmm,
        sparse_attention,
        sparse_softmax,
        spmm,
        write_smtx,
    )

register_moved(
    "magicube_cutlass",
    {
        "bcrs": ("magicube_cutlass.formats.bcrs",),
        "block_scales": ("magicube_cutlass.quantization.float_tensor",),
        "generate": ("magicube_cutlass.formats.generate",),
        "matrix": ("magicube_cutlass.formats.base",),
        "pattern": ("magicube_cutlass.formats.pattern",),
        "quantize": ("magicube_cutlass.quantization.quant_tensor", "magicube_cutlass.quantization.quantize"),
        "smtx": ("magicube_cutlass.formats.smtx",),
        "srbcrs": ("magicube_cutlass.formats.srbcrs",),
    },
)

__version__ = "0.1.0"

__all__ = [
    "BCRS",
    "SDDMM_PAIRS",
    "SPMM_PAIRS",
    "SRBCRS",
    "Explanation",
    "Pattern",
    "QuantTensor",
    "ScaledFloatTensor",
    "autograd",
    "convert",
    "distill",
    "explain",
    "explain_attention",
    "explain_sddmm",
    "masks",
    "matmul",
    "nn",
    "prune",
    "prune_model",
    "pruning",
    "quantize",
    "random_pattern",
    "read_smtx",
    "reference",
    "sddmm",
    "sparse_attention",
    "sparse_softmax",
    "spmm",
    "write_smtx",
]


def _load() -> None:
    """Bind the exported names; a second call, also one from within the first, binds what is there."""
    api = import_module("magicube_cutlass._api")
    globals().update({name: vars(api)[name] for name in __all__ if name in vars(api)})


def __getattr__(name: str) -> object:
    if not name.startswith("_"):
        _load()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:
    _load()
