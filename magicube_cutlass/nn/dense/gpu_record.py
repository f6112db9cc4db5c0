"""``q(x) W^T + bias`` on a GPU as one record: quantization of the rows and product, replayed by addresses.

Rows of integers are multiplied as they are: a compiled graph quantizes them itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.convert import quantize as kernels
from cute_kernels.few_rows.api import few_rows_product
from cute_kernels.few_rows.formats import PackedWeight
from cute_kernels.few_rows.product_int8 import few_rows_int8_product
from cute_kernels.few_rows.widen import widen_rows
from cute_kernels.gemm.api import gemm
from cute_kernels.jit.workspace import Kept
from cute_kernels.operands import is_ready
from cute_kernels.scaled_gemm.api import scaled_gemm
from magicube_cutlass.formats.tracking import is_current, stamp
from magicube_cutlass.nn.dense.encode import encoded, encodes
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor
from magicube_cutlass.quantization.group_tensor import GroupTensor

_REPLAYS = 32  # sets of addresses per record
_ALIGNMENT = 16  # of a row in memory, or the product copies its operands


class LayerRecord:
    """The product for one weight (M, K) and one shape and dtype of contiguous rows `x` (N, K).

    Parameters
    ----------
    outputs : int
        M.
    bias : Tensor or None, shape (M,)
        As the caller holds it.
    x : Tensor, shape (N, K)
        For its kind: floats, or int8 that the scales of a call belong to.
    dtype : torch.dtype
        Of the product.
    """

    def __init__(self, outputs: int, bias: Tensor | None, x: Tensor, dtype: torch.dtype) -> None:
        self.bias = bias
        self._seen = stamp(self, ("bias",))
        self._float_bias = (
            None if bias is None else bias.detach().float().contiguous()
        )  # another tensor if `bias` is not
        self._like = x.new_empty(1, dtype=dtype).expand(x.shape[0], outputs)  # (N, M)
        self._replays = Kept(_REPLAYS)

    def __call__(
        self, x: Tensor, act_scale: Tensor | None, bias: Tensor | None, source: Tensor | None = None
    ) -> Tensor | None:
        """Return the product (N, M), or None if the bias is another one or was written to.

        `source` (N, M) is added, by the int8 GEMM alone; always one of a dtype, or none.
        """
        if bias is not self.bias or not is_current(self, self._seen):
            return None
        out = torch.empty_like(self._like, memory_format=torch.contiguous_format)
        scale, added = 0 if act_scale is None else act_scale.data_ptr(), 0 if source is None else source.data_ptr()
        self._replays.run(
            None, (x.data_ptr(), out.data_ptr(), scale, added), out.device,
            lambda: self._launch(x, act_scale, source, out),
        )  # fmt: skip
        return out

    def _launch(self, x: Tensor, act_scale: Tensor | None, source: Tensor | None, out: Tensor) -> tuple[Tensor, ...]:
        """Write the product by kernels of the library alone."""
        raise NotImplementedError


def _is_copied(x: Tensor) -> bool:
    """Whether the product copies rows of integers, by their address."""
    return not x.is_floating_point() and x.data_ptr() % _ALIGNMENT != 0


def _quantized(x: Tensor, act_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows as int8 and their scales, (N,) or ()."""
    given, axis = (None, 1) if act_scale is None else (act_scale.reshape(()), None)
    data, scale = kernels.quantize(x, bits=8, signed=True, axis=axis, scale=given)
    return data, scale.reshape(-1) if given is None else scale


class GemmRecord(LayerRecord):
    """By the int8 GEMM; `weight` has 8 bits and scales per row. `out_scale` and `glu` as for ``gemm``."""

    def __init__(
        self,
        weight: GroupTensor,
        bias: Tensor | None,
        x: Tensor,
        dtype: torch.dtype,
        activation: str | None,
        out_scale: Tensor | None,
        glu: bool,
    ) -> None:
        super().__init__(weight.shape[0] // 2 if glu else weight.shape[0], bias, x, dtype)
        self._activation, self._out_scale, self._glu = activation, out_scale, glu
        self._right, self._scale = weight.data.t(), weight.scale.reshape(-1)  # (K, M), (M,)

    def __call__(
        self, x: Tensor, act_scale: Tensor | None, bias: Tensor | None, source: Tensor | None = None
    ) -> Tensor | None:
        """Return the product (N, M), or None if the bias is another one or was written to, or rows are misaligned."""
        return None if _is_copied(x) else super().__call__(x, act_scale, bias, source)

    @staticmethod
    def takes(weight: GroupTensor, x: Tensor, act_scale: Tensor | None) -> bool:
        """Return whether all that a call runs are kernels of the library, with no copy by torch."""
        if x.numel() == 0 or x.dtype == torch.float64 or x.shape[1] % _ALIGNMENT or weight.shape[0] == 0:
            return False
        if _is_copied(x):
            return False
        if weight.scale.dtype != torch.float32 or not weight.scale.is_contiguous() or not weight.data.is_contiguous():
            return False
        sizes = (1,) if x.is_floating_point() else (1, x.shape[0])
        return act_scale is None or (act_scale.dtype == torch.float32 and act_scale.numel() in sizes)

    def _launch(self, x: Tensor, act_scale: Tensor | None, source: Tensor | None, out: Tensor) -> tuple[Tensor, ...]:
        data, scale = _quantized(x, act_scale) if x.is_floating_point() else (x, act_scale)
        gemm(
            data, self._right, scale_a=scale, scale_b=self._scale, bias=self._float_bias, c=source,
            beta=0.0 if source is None else 1.0, activation=self._activation, out_scale=self._out_scale, glu=self._glu,
            out=out, out_dtype=out.dtype,
        )  # fmt: skip
        return ()


class FloatRecord(LayerRecord):
    """By the scaled GEMM; `act` is ``"e4m3"``, ``"e4m3_g128"``, ``"mxfp8"`` or ``"nvfp4"``."""

    def __init__(self, weight: ScaledFloatTensor, act: str, bias: Tensor | None, x: Tensor) -> None:
        super().__init__(weight.shape[0], bias, x, x.dtype)
        self._weight, self._act = weight.operand(), act

    @staticmethod
    def takes(weight: ScaledFloatTensor, act: str, x: Tensor, act_scale: Tensor | None) -> bool:
        """Return whether all that a call runs are kernels of the library, with no copy by torch."""
        if x.numel() == 0 or x.shape[1] % _ALIGNMENT or weight.shape[0] == 0 or not encodes(x, act):
            return False
        if act == "nvfp4" and x.shape[1] // 2 % _ALIGNMENT:  # bytes of a row
            return False
        if not is_ready(weight.data) or not weight.scale.is_contiguous() or weight.scale.data_ptr() % _ALIGNMENT:
            return False
        return act_scale is None or (act_scale.dtype == torch.float32 and act_scale.numel() == 1)

    def _launch(self, x: Tensor, act_scale: Tensor | None, source: Tensor | None, out: Tensor) -> tuple[Tensor, ...]:
        rows = encoded(x, self._act, act_scale, for_torch=False).operand()
        scaled_gemm(
            rows, self._weight, bias=self._float_bias, out=out, out_dtype=out.dtype, fold_scales=True
        )  # fmt: skip
        return ()


class FewRowsRecord(LayerRecord):
    """By the few-rows product; `act` is ``"none"`` or ``"int8"``."""

    def __init__(self, weight: PackedWeight, act: str, bias: Tensor | None, x: Tensor) -> None:
        super().__init__(weight.shape[0], bias, x, x.dtype)
        self._weight, self._act = weight, act

    @staticmethod
    def takes(weight: PackedWeight, x: Tensor, act_scale: Tensor | None) -> bool:
        """Return whether all that a call runs are kernels of the library, with no copy by torch."""
        if x.numel() == 0 or x.shape[1] % (_ALIGNMENT // 2) or x.data_ptr() % _ALIGNMENT or weight.shape[0] == 0:
            return False
        return act_scale is None or (act_scale.dtype == torch.float32 and act_scale.numel() == 1)

    def __call__(
        self, x: Tensor, act_scale: Tensor | None, bias: Tensor | None, source: Tensor | None = None
    ) -> Tensor | None:
        """Return the product (N, M), or None if the bias is another one or was written to, or rows are misaligned."""
        return None if x.data_ptr() % _ALIGNMENT else super().__call__(x, act_scale, bias, source)

    def _launch(self, x: Tensor, act_scale: Tensor | None, source: Tensor | None, out: Tensor) -> tuple[Tensor, ...]:
        rows, scale = x, None
        if self._act == "int8":
            data, scale = _quantized(x, act_scale)
            rows = widen_rows(data, self._weight.act)
        few_rows_product(rows, self._weight, self._float_bias, row_scale=scale, out=out)
        return ()


class FewRowsInt8Record(LayerRecord):
    """By the few-rows product of int8 rows, quantized before."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, x: Tensor) -> None:
        super().__init__(weight.shape[0], bias, x, x.dtype)
        self._weight = weight

    @staticmethod
    def takes(weight: PackedWeight, x: Tensor, act_scale: Tensor | None) -> bool:
        """Return whether all that a call runs are kernels of the library, with no copy by torch."""
        if x.numel() == 0 or x.dtype == torch.float64 or x.shape[1] % _ALIGNMENT or weight.shape[0] == 0:
            return False
        return act_scale is None or (act_scale.dtype == torch.float32 and act_scale.numel() == 1)

    def _launch(self, x: Tensor, act_scale: Tensor | None, source: Tensor | None, out: Tensor) -> tuple[Tensor, ...]:
        data, scale = _quantized(x, act_scale)
        few_rows_int8_product(data, self._weight, self._float_bias, row_scale=scale, out=out)
        return ()
