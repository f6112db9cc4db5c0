"""Packed weights as a dense matrix of 16-bit floats, which torch multiplies by many rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.few_rows.formats import FORMATS, PackedWeight, WeightFormat
from cute_kernels.few_rows.product import CODE_TYPES, SCALE_TYPES
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel

_RUN = 8  # values that a thread stores at a time


@dataclass(frozen=True)
class DecodeConfig(KernelConfig):
    """Config of the kernel that decodes a weight.

    Attributes
    ----------
    weight : str
        Name of a :class:`~cute_kernels.few_rows.formats.WeightFormat`.
    act : str
        Dtype of the result: ``"bfloat16"`` or ``"float16"``.
    threads : int
        Threads per CTA: 128 per unit of 64 rows x 128 k.
    """

    weight: str
    act: str = "bfloat16"
    threads: int = 256

    @property
    def format(self) -> WeightFormat:
        """Entry of the table of formats."""
        return FORMATS[self.weight]

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        return f"few-rows-decode-{self.weight}-{self.act}-t{self.threads}"

    kernel_header = "few_rows/decode.cuh"
    kernel_entry = "few::decode_weight"

    def _constants(self) -> dict[str, object]:
        return {"kThreads": self.threads, "kGroup": self.format.group or 128}

    def _types(self) -> dict[str, str]:
        return {
            "Half": self.act.upper(),
            "Weights": CODE_TYPES[self.format.codes],
            "Scale": SCALE_TYPES[self.format.scale],
        }


def launch_decode(config: DecodeConfig, weight: PackedWeight, out: Tensor) -> None:
    """Launch the kernel.

    Parameters
    ----------
    config : DecodeConfig
        Kernel config, of the weight's format and dtype.
    weight : PackedWeight, shape (N, K)
        Weight.
    out : Tensor, shape (N, K rounded up to a multiple of 8)
        Rows at multiples of 16 bytes; columns from K on are written too.
    """
    (n, k), (blocks, units, _) = weight.shape, weight.data.shape
    get_kernel(config).launch(
        (-(-units * 128 // config.threads), blocks, 1),
        (
            weight.data.data_ptr(), units, weight.row_scale.data_ptr(), out.data_ptr(), out.stride(0), n,
            -(-k // _RUN) * _RUN,
        ),
    )  # fmt: skip


def decode_weight(weight: PackedWeight) -> Tensor:
    """Return a packed weight as a dense matrix: ``(code * scale + minimum) * row_scale``.

    One launch. Weight-only layers multiply ``magicube_cutlass.nn.dense.product.DECODED_ROWS`` rows and more by it.

    Parameters
    ----------
    weight : PackedWeight, shape (N, K)
        Weight on a GPU.

    Returns
    -------
    Tensor, shape (N, K)
        Of the dtype that the weight is packed for, rows at multiples of 16 bytes.

    Notes
    -----
    A value is computed in float32 with at most two roundings, and rounded to the result's dtype once. For the scales as
    they are packed, its relative error is at most ``2^-p + 2^-22``; `p` is 8 for bfloat16 and 11 for float16, which
    adds 2^-25 (subnormal numbers) and is infinite above 65504.
    """
    (n, k), dtype = weight.shape, torch.bfloat16 if weight.act == "bfloat16" else torch.float16
    out = torch.empty((n, -(-k // _RUN) * _RUN), dtype=dtype, device=weight.data.device)
    if n and k:
        with device_of(out):
            launch_decode(DecodeConfig(weight.format.name, weight.act), weight, out)
    return out[:, :k]
