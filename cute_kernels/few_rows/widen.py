"""int8 rows as the 16-bit floats that the few-rows product reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.kernel import get_kernel


@dataclass(frozen=True)
class WidenConfig(KernelConfig):
    """Config of the widening kernel.

    Attributes
    ----------
    act : str
        ``"bfloat16"`` or ``"float16"``.
    threads : int
        Threads per CTA.
    """

    act: str
    threads: int = 128

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        return f"few-rows-widen-{self.act}"

    kernel_header = "few_rows/widen.cuh"
    kernel_entry = "few::widen_rows"

    def _constants(self) -> dict[str, object]:
        return {"kThreads": self.threads}

    def _types(self) -> dict[str, str]:
        return {"Half": self.act.upper()}


def widen_rows(ints: Tensor, act: str) -> Tensor:
    """Return int8 rows (M, K) as floats, exactly; one launch.

    Parameters
    ----------
    ints : Tensor, shape (M, K)
        int8 on a GPU, rows contiguous, not empty.
    act : str
        ``"bfloat16"`` or ``"float16"``.

    Returns
    -------
    Tensor, shape (M, K)
        Rows at multiples of 16 bytes.
    """
    (m, k), dtype = ints.shape, torch.bfloat16 if act == "bfloat16" else torch.float16
    pitch = -(-k // 8) * 8
    out = workspace.empty((m, pitch), dtype, ints.device)
    config = WidenConfig(act)
    vector = int(ints.data_ptr() % 16 == 0 and (m == 1 or ints.stride(0) % 16 == 0))
    get_kernel(config).launch(
        (m, -(-pitch // (16 * config.threads)), 1),
        (ints.data_ptr(), ints.stride(0) if m > 1 else k, k, out.data_ptr(), pitch, vector),
    )
    return out[:, :k]
