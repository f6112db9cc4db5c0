"""The product of float rows with a dense quantized weight, ``q(x) W^T + bias``: the engine, a GPU's GEMM, or torch.

The engine quantizes the rows in its call. Its product takes int8 and packed int4 weights with scales per row or group.
What has no kernel runs in torch on the dequantized weight, of which a CPU keeps a float32 copy.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels import floats
from cute_kernels.cpu import extension
from cute_kernels.cpu.dense import MAX_K, PackedRight, pack_right
from cute_kernels.cpu.linear import LinearCall
from cute_kernels.gemm.epilogue import activate
from cute_kernels.jit.device import current_arch
from magicube_cutlass.autograd.gpu_rows import key_of
from magicube_cutlass.autograd.integer import quantized
from magicube_cutlass.dispatch.cpu_linear import kind_of
from magicube_cutlass.nn.dense.blockwise import blockwise_gemm, refusal
from magicube_cutlass.nn.dense.encode import encoded, encodes, folds_scales
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor, matmul, quantize_floats
from magicube_cutlass.quantization.group_tensor import GroupTensor
from magicube_cutlass.quantization.quant_tensor import QuantTensor

if TYPE_CHECKING:
    from cute_kernels.few_rows.formats import PackedWeight
    from magicube_cutlass.nn.dense.gpu_record import LayerRecord

QuantWeight = GroupTensor | ScaledFloatTensor
_MAX_CALLS = 64  # kept per weight
# Rows from which weight-only layers decode their weight, for torch to multiply by; fewer read it once per 64 rows.
# On an H200, 4096 x 14336 and back, 512 rows of int4 tie (125 and 123 us; 100 and 112), 1,024 of all formats gain 4
# to 22%.
DECODED_ROWS = 768
OWN_ROWS = 128  # of e4m3_g128 that the scaled GEMM multiplies, not torch (docs/lab/performance.md)


def quantize_act(x: Tensor, act: str, act_scale: Tensor | None) -> QuantTensor | ScaledFloatTensor | None:
    """Return the quantized rows of `x`; None for ``"none"``.

    Parameters
    ----------
    x : Tensor, shape (N, K)
        Floats.
    act : str
        As for :class:`magicube_cutlass.nn.QuantConfig`.
    act_scale : Tensor or None, shape ()
        Given scale of int8 and e4m3; None: one per row.
    """
    if act == "none":
        return None
    if act == "int8":
        return quantized(x, 8, 1 if act_scale is None else None, act_scale)
    if encodes(x, act):
        return encoded(x, act, act_scale)
    if act == "e4m3" and act_scale is not None:
        codes = floats.encode(x.double() / act_scale.double(), "e4m3", saturate=True)
        return ScaledFloatTensor(floats.pack(codes, "e4m3"), x.shape[1], "e4m3", act_scale)
    return quantize_floats(x, act, axis=1, nonfinite="propagate", tensor_scale_per_row=True)


def inverse_of(smooth: Tensor) -> Tensor:
    """What an input is multiplied by for a smooth scale (K,), float32: every path uses the rounded inverse."""
    return smooth.detach().float().reciprocal().contiguous()


def smoothed(x: Tensor, factors: Tensor | None) -> Tensor:
    """The input times :func:`inverse_of`, in its dtype."""
    return x if factors is None else (x * factors).to(x.dtype)


def _round_trip(x: Tensor, act: str, act_scale: Tensor | None) -> Tensor:
    """The rows that the product multiplies, float32."""
    found = quantize_act(x, act, act_scale)
    return x.float() if found is None else found.dequantize().float()


class DenseProduct:
    """``q(x / smooth) W^T + bias`` for one weight (M, K), packed once for the kernel of its device."""

    def __init__(self, weight: QuantWeight, act: str, smooth: Tensor | None = None) -> None:
        self.weight, self.act, self.shape = weight, act, (int(weight.shape[0]), int(weight.shape[1]))
        self.backend = _backend(weight, act)
        self._torch_refuses = refusal(*self.shape) if self.backend == "blockwise" else ""
        self.factors = None if smooth is None else inverse_of(smooth)
        self._copy: Tensor | None = None  # float32, what torch multiplies by on a CPU
        self._calls: dict[Hashable, LinearCall] = {}
        self._records: dict[Hashable, LayerRecord] = {}
        self._few: dict[torch.dtype, PackedWeight] = {}  # by the dtype of the rows
        if self.backend == "engine":
            assert isinstance(weight, GroupTensor)
            self.right, self._scale = _packed(weight)

    def __call__(
        self,
        x: Tensor,
        act_scale: Tensor | None,
        bias: Tensor | None,
        activation: str | None = None,
        out_scale: Tensor | None = None,
    ) -> Tensor:
        """Return ``activation(product)`` (..., M), of the dtype of `x` (..., K).

        With `out_scale` (), its integers, if the product :attr:`writes_integers`.
        """
        if self.backend == "engine":
            kind = kind_of(x, bias, 8, act_scale)
            if kind is not None:
                return self._by_engine(x, act_scale, bias, kind, activation)
        rows = smoothed(x, self.factors).reshape(-1, self.shape[1])
        if self.backend == "gemm":
            dtype = rows.dtype if out_scale is None else torch.int8
            y = self.by_gemm(rows, act_scale, bias, dtype, activation, out_scale)
            return y.view(*x.shape[:-1], self.shape[0])
        if self.backend == "few_rows_int8" and rows.dtype in self._int8_dtypes():
            y = self._by_few_rows_int8(rows, act_scale, bias)
        elif self.backend == "few_rows" and rows.dtype in (torch.float16, torch.bfloat16):
            y = self._by_few_rows(rows, act_scale, bias)
        elif self.backend == "scaled_gemm":
            y = self._by_scaled_gemm(rows, act_scale, bias)
        elif self.backend == "blockwise":
            y = self._by_blockwise(rows, bias)
        else:
            y = self._by_torch(rows, act_scale, bias)
        return activate(y, activation).view(*x.shape[:-1], self.shape[0])

    def _by_engine(
        self, x: Tensor, act_scale: Tensor | None, bias: Tensor | None, kind: Hashable, activation: str | None
    ) -> Tensor:
        m, k = self.shape
        lead, rows = x.shape[:-1], x.shape[:-1].numel()
        if rows == 0:
            return x.new_empty(*lead, m)
        given, factors = x, self.factors
        if factors is not None and x.dtype is not torch.float32:
            given, factors = smoothed(x, factors), None
        if not (x.is_contiguous() or (x.ndim == 2 and x.stride(1) == 1)):
            given = given.contiguous()
        call = self._calls.get(kind)
        if call is None:
            _make_room(self._calls)
            row_elements = given.stride(0) if given.ndim == 2 and rows > 1 else k
            call = self._calls[kind] = LinearCall(self.right, rows, row_elements, 8, x.dtype, x_dtype=given.dtype)
        y = call(given, _float32(act_scale), self._scale, _float32(bias), factors, activation)
        return y if x.ndim == 2 else y.view(*lead, m)

    @property
    def writes_integers(self) -> bool:
        """Whether results can be integers, and rows may be."""
        return self.backend == "gemm"

    def _by_record(
        self,
        rows: Tensor,
        act_scale: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        activation: str | None = None,
        out_scale: Tensor | None = None,
        glu: bool = False,
        source: Tensor | None = None,
    ) -> Tensor | None:
        """The product by kernels alone, for rows that they take as they are."""
        from magicube_cutlass.nn.dense.gpu_record import FewRowsInt8Record, FewRowsRecord, FloatRecord, GemmRecord

        key = key_of(rows, act_scale)
        if key is None:
            return None
        if source is not None and not source.is_contiguous():
            return None
        added = None if source is None else source.dtype
        key = (*key, dtype, activation, None if out_scale is None else out_scale.data_ptr(), glu, added)
        record = self._records.get(key)
        y = None if record is None else record(rows, act_scale, bias, source)
        if y is not None:
            return y
        if self.backend == "few_rows":
            packed = self.packed_for(rows.dtype)
            if FewRowsRecord.takes(packed, rows, act_scale):
                record = FewRowsRecord(packed, self.act, bias, rows)
        elif self.backend == "few_rows_int8":
            packed = self.packed_for(torch.int8)
            if FewRowsInt8Record.takes(packed, rows, act_scale):
                record = FewRowsInt8Record(packed, bias, rows)
        elif isinstance(self.weight, ScaledFloatTensor):
            if FloatRecord.takes(self.weight, self.act, rows, act_scale):
                record = FloatRecord(self.weight, self.act, bias, rows)
        elif GemmRecord.takes(self.weight, rows, act_scale):
            record = GemmRecord(self.weight, bias, rows, dtype, activation, out_scale, glu)
        if record is None or record.bias is not bias:
            return None
        _make_room(self._records)
        self._records[key] = record
        return record(rows, act_scale, bias, source)

    def by_gemm(
        self,
        rows: Tensor,
        act_scale: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        activation: str | None,
        out_scale: Tensor | None,
        glu: bool = False,
        source: Tensor | None = None,
    ) -> Tensor:
        """Return the product (N, M) with scales per row, on Tensor Cores; (N, M / 2) with `glu`, see ``gemm``.

        Of float rows (N, K), or of int8 ones that are quantized already, with scales (N,) or (). `source` (N, M) is
        added.
        """
        from cute_kernels.gemm.api import gemm

        assert isinstance(self.weight, GroupTensor)
        y = self._by_record(rows, act_scale, bias, dtype, activation, out_scale, glu, source)
        if y is not None:
            return y
        if rows.is_floating_point():
            dense = quantized(rows, 8, 1 if act_scale is None else None, act_scale)
            rows, act_scale = dense.data, dense.scale
        scale_a = act_scale if act_scale is None or act_scale.ndim == 0 else act_scale.reshape(-1)
        return gemm(
            rows, self.weight.data.t(), scale_a=scale_a, scale_b=self.weight.scale.reshape(-1), bias=bias, c=source,
            beta=0.0 if source is None else 1.0, activation=activation, out_scale=out_scale, glu=glu, out_dtype=dtype,
        )  # fmt: skip

    def packed_for(self, dtype: torch.dtype) -> PackedWeight:
        """Return the weight as the few-rows product reads it beside rows of `dtype`, packed once."""
        from magicube_cutlass.nn.dense.few_rows import pack_few_rows

        found = self._few.get(dtype)
        if found is None:
            found = self._few[dtype] = pack_few_rows(self.weight, str(dtype).removeprefix("torch."))
        return found

    def _by_few_rows(self, rows: Tensor, act_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """4- and 8-bit weights decoded in registers; rows of int8 are widened, exactly."""
        from cute_kernels.few_rows.api import few_rows_product

        many = self._decoded_rows()
        if many is not None and rows.shape[0] >= many:
            return self._by_decoding(rows, bias)
        y = self._by_record(rows, act_scale, bias, rows.dtype)
        if y is not None:
            return y
        scale = None
        if self.act == "int8" and rows.numel():
            dense = quantized(rows, 8, 1 if act_scale is None else None, act_scale)
            assert dense.scale is not None
            scale = dense.scale.float().reshape(-1 if dense.scale.ndim else ())
            rows = dense.data.to(rows.dtype)
        return few_rows_product(rows, self.packed_for(rows.dtype), _float32(bias), row_scale=scale)

    def _by_few_rows_int8(self, rows: Tensor, act_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """Int8 rows times 4- and 8-bit weights on Tensor Cores for integers, with scales of groups."""
        from cute_kernels.few_rows.product_int8 import few_rows_int8_product

        y = self._by_record(rows, act_scale, bias, rows.dtype)
        if y is not None:
            return y
        if rows.shape[0] == 0:
            return rows.new_empty(0, self.shape[0])
        dense = quantized(rows, 8, 1 if act_scale is None else None, act_scale)
        assert dense.scale is not None
        scale = dense.scale.float().reshape(-1 if dense.scale.ndim else ())
        return few_rows_int8_product(
            dense.data, self.packed_for(torch.int8), _float32(bias), row_scale=scale, out_dtype=rows.dtype
        )

    def _int8_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of an input whose int8 rows are multiplied as such: scales of groups below 128 are float16 there."""
        assert isinstance(self.weight, GroupTensor)
        exact = self.weight.group is None or self.weight.group >= 128
        return (torch.float16, torch.bfloat16, torch.float32) if exact else (torch.float16, torch.bfloat16)

    def _decoded_rows(self) -> int | None:
        """Rows from which the weight is decoded first, or None. Scales of int8 rows would come after a rounding."""
        return DECODED_ROWS if self.backend == "few_rows" and self.act == "none" else None

    def _by_decoding(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Many rows by a 16-bit copy of the weight, made for this product; the bias is rounded to 16 bits too."""
        from cute_kernels.few_rows.decode import decode_weight

        weight = decode_weight(self.packed_for(rows.dtype))  # (M, K)
        return torch.nn.functional.linear(rows, weight, None if bias is None else bias.to(rows.dtype))

    def _by_scaled_gemm(self, rows: Tensor, act_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        y = self._by_record(rows, act_scale, bias, rows.dtype)
        if y is not None:
            return y
        dense = quantize_act(rows, self.act, act_scale)
        assert isinstance(dense, ScaledFloatTensor) and isinstance(self.weight, ScaledFloatTensor)
        return matmul(dense, self.weight.mT, bias=bias, out_dtype=rows.dtype, fold_scales=True)

    def _by_blockwise(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """e4m3 rows with a scale per 128 values: few by the scaled GEMM, many by torch where it takes the weight.

        torch adds no bias and writes bfloat16: others would take its float32 result and a pass over it.
        """
        if rows.shape[0] <= OWN_ROWS or self._torch_refuses or bias is not None or rows.dtype != torch.bfloat16:
            return self._by_scaled_gemm(rows, None, bias)
        dense = quantize_act(rows, self.act, None)
        assert isinstance(dense, ScaledFloatTensor) and isinstance(self.weight, ScaledFloatTensor)
        return blockwise_gemm(dense.data, dense.scale, self.weight.data, self.weight.scale)

    def _by_torch(self, rows: Tensor, act_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        weight = self.dequantized()  # (M, K) float32
        y = _round_trip(rows, self.act, act_scale) @ weight.t()
        return (y if bias is None else y + bias.float()).to(rows.dtype)

    def dequantized(self) -> Tensor:
        """Return the weight in float32, (M, K); a CPU keeps it."""
        if self._copy is not None:
            return self._copy
        found = self.weight.dequantize()
        if found.is_cpu and self.backend == "torch":
            self._copy = found
        return found

    def predicted_seconds(self, rows: int) -> float | None:
        """Return the predicted time of the few-rows product; None for other products and for more rows than a tile."""
        from cute_kernels.few_rows.cost import MOST_ROWS, few_rows_seconds
        from magicube_cutlass.nn.dense.few_rows import few_rows_format

        name = few_rows_format(self.weight) if self.backend == "few_rows" else None
        return few_rows_seconds(name, rows, *self.shape) if name is not None and 1 <= rows <= MOST_ROWS else None

    def describe(self) -> str:
        """Return what multiplies, in words."""
        on_engine = self.backend == "engine"
        takes = isinstance(self.weight, GroupTensor) and self.act == "int8" and self.weight.device.type == "cpu"
        reason = extension.MISSING if takes and not extension.available() else "no kernel for this format here"
        if self.act == "e4m3_g128" and self.weight.device.type != "cpu":
            reason = "scales of 128 values need sm_90a, got " + current_arch()
        many = f"{OWN_ROWS + 1} rows and more to bfloat16 without a bias by torch._scaled_mm with blockwise scales"
        many = f"torch: {self._torch_refuses}" if self._torch_refuses else many
        texts = {
            "engine": f"CPU engine, {extension.isa()} path, rows quantized in the call" if on_engine else "",
            "gemm": "int8 GEMM, rows quantized before",
            "few_rows": "few-rows product of float16 and bfloat16, weights decoded in registers; float32 by torch",
            "few_rows_int8": "few-rows product of int8 rows, quantized before",
            "scaled_gemm": "scaled GEMM, rows quantized before",
            "blockwise": f"scaled GEMM, rows quantized before; {many}",
            "torch": f"torch.matmul in float32 on the dequantized weight: {reason}",
        }
        decoded, text = self._decoded_rows(), texts[self.backend]
        if self.backend == "torch" and self.weight.device.type == "cpu":
            text += f"; it is kept, {4 * self.shape[0] * self.shape[1]:,} bytes more"
        if self.backend == "few_rows_int8" and torch.float32 not in self._int8_dtypes():
            text += "; float32 by torch"
        if self.backend == "scaled_gemm" and folds_scales(self.weight, self.act):
            text += "; of more than 64 rows, ue8m0 scales become part of e4m3 values"
        return text + (f"; {decoded} rows and more by torch on weights decoded before" if decoded else "")


def _make_room(calls: dict[Hashable, Any]) -> None:
    """Forget all calls if there are too many."""
    if len(calls) >= _MAX_CALLS:
        calls.clear()


def _float32(x: Tensor | None) -> Tensor | None:
    """A scale or a bias as the engine reads it."""
    return x if x is None or (x.dtype is torch.float32 and x.is_contiguous()) else x.detach().float().contiguous()


def _backend(weight: QuantWeight, act: str) -> str:
    on_cpu, grouped = weight.device.type == "cpu", isinstance(weight, GroupTensor)
    if act == "e4m3_g128":
        return "torch" if on_cpu or current_arch() != "sm_90a" else "blockwise"
    if isinstance(weight, GroupTensor) and act == "int8":
        if on_cpu:
            return "engine" if extension.available() and weight.k <= MAX_K else "torch"
        if weight.bits == 8 and weight.group is None and weight.minimum is None:
            return "gemm"
    if weight.device.type == "cuda" and (act == "none" or (grouped and act == "int8")):
        from magicube_cutlass.nn.dense import few_rows

        if few_rows.few_rows_format(weight) is not None and current_arch() == "sm_90a":
            integers = act == "int8" and few_rows.takes_int8_rows(weight)
            return "few_rows_int8" if integers else "few_rows"
    return "scaled_gemm" if act != "none" and not on_cpu and isinstance(weight, ScaledFloatTensor) else "torch"


def _packed(weight: GroupTensor) -> tuple[PackedRight, Tensor | None]:
    """What the engine reads of a weight, and its scales per row (M,) if they are not of groups."""
    ints = weight.ints().t()  # (K, M)
    if weight.minimum is None and weight.scale.shape[1] == 1:
        return pack_right(ints, weight.bits), weight.scale.reshape(-1)
    minima = None if weight.minimum is None else weight.minimum.t().contiguous()
    group = weight.group or -(-weight.k // 8) * 8
    return pack_right(
        ints, weight.bits, group=group, group_scales=weight.scale.t().contiguous(), group_minima=minima
    ), None
