"""``q(x) W^T + bias`` with an int8 weight on a GPU as one record: quantization and product, replayed by addresses.

Rows of integers are multiplied as they are: a compiled graph quantizes them itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.convert import quantize as kernels
from cute_kernels.gemm.api import gemm
from cute_kernels.jit.workspace import Kept
from magicube_cutlass.formats.tracking import is_current, stamp
from magicube_cutlass.quantization.group_tensor import GroupTensor

_REPLAYS = 32  # sets of addresses per record
_ALIGNMENT = 16  # of a row in memory, or the product copies its operands


class GemmRecord:
    """The product for one weight (M, K) and one shape and dtype of contiguous rows `x` (N, K).

    Parameters
    ----------
    weight : GroupTensor, shape (M, K)
        8 bits, with scales per row.
    bias : Tensor or None, shape (M,)
        As the caller holds it.
    x : Tensor, shape (N, K)
        For its kind: floats, or int8 that the scales of a call belong to.
    dtype : torch.dtype
        Of the product.
    """

    def __init__(self, weight: GroupTensor, bias: Tensor | None, x: Tensor, dtype: torch.dtype) -> None:
        self.bias = bias
        self._seen = stamp(self, ("bias",))
        self._float_bias = (
            None if bias is None else bias.detach().float().contiguous()
        )  # another tensor if `bias` is not
        self._right, self._scale = weight.data.t(), weight.scale.reshape(-1)  # (K, M), (M,)
        self._like = x.new_empty(1, dtype=dtype).expand(x.shape[0], weight.shape[0])  # (N, M)
        self._replays = Kept(_REPLAYS)

    @staticmethod
    def takes(weight: GroupTensor, x: Tensor, act_scale: Tensor | None) -> bool:
        """Return whether all that a call runs are kernels of the library, with no copy by torch."""
        if x.numel() == 0 or x.dtype == torch.float64 or x.shape[1] % _ALIGNMENT or weight.shape[0] == 0:
            return False
        if weight.scale.dtype != torch.float32 or not weight.scale.is_contiguous() or not weight.data.is_contiguous():
            return False
        sizes = (1,) if x.is_floating_point() else (1, x.shape[0])
        return act_scale is None or (act_scale.dtype == torch.float32 and act_scale.numel() in sizes)

    def __call__(self, x: Tensor, act_scale: Tensor | None, bias: Tensor | None) -> Tensor | None:
        """Return the product (N, M), or None if the bias is another one or was written to."""
        if bias is not self.bias or not is_current(self, self._seen):
            return None
        out = torch.empty_like(self._like, memory_format=torch.contiguous_format)
        addresses = x.data_ptr(), out.data_ptr(), 0 if act_scale is None else act_scale.data_ptr()
        self._replays.run(None, addresses, out.device, lambda: self._launch(x, act_scale, out))
        return out

    def _launch(self, x: Tensor, act_scale: Tensor | None, out: Tensor) -> tuple[Tensor, ...]:
        if x.is_floating_point():
            given, axis = (None, 1) if act_scale is None else (act_scale.reshape(()), None)
            x, scale = kernels.quantize(x, bits=8, signed=True, axis=axis, scale=given)
            act_scale = scale.reshape(-1) if given is None else scale
        gemm(
            x, self._right, scale_a=act_scale, scale_b=self._scale, bias=self._float_bias, out=out, out_dtype=out.dtype
        )
        return ()
