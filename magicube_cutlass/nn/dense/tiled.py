"""Weights with 128 x 128 scales on a GPU: what multiplies by them."""

from __future__ import annotations

from cute_kernels.jit.device import current_arch
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor

# Backends that may multiply by tile-scaled weights: of "few_rows" (float rows) and "scaled_gemm" (rows with a scale
# each). They have not run on a GPU with tiles of the weight alone, and run where they are named here; torch multiplies
# by the dequantized weight instead.
TILED_BACKENDS: frozenset[str] = frozenset()


def is_tiled(weight: object) -> bool:
    """Return whether a weight has a scale per tile of 128 x 128.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> is_tiled(mc.quantize(torch.ones(2, 64), dtype="e4m3_b128"))
    True
    """
    return isinstance(weight, ScaledFloatTensor) and isinstance(weight.block, tuple)


def tiled_backend(weight: ScaledFloatTensor, act: str) -> tuple[str, str]:
    """Return the backend of a tile-scaled weight on a GPU, and the reason if it is torch.

    Parameters
    ----------
    weight : ScaledFloatTensor, shape (M, K)
        Weight.
    act : str
        As for :class:`magicube_cutlass.nn.QuantConfig`.
    """
    wanted = {"none": "few_rows", "e4m3": "scaled_gemm"}.get(act)
    if wanted is None or (wanted == "few_rows" and current_arch() != "sm_90a"):
        return "torch", "no kernel for this format here"
    if wanted not in TILED_BACKENDS:
        return "torch", f"{wanted} has not run with 128 x 128 scales, see TILED_BACKENDS"
    return wanted, ""
