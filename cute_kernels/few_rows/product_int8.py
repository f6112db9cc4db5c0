"""Few-rows product of int8 rows with packed int4 and int8 weights on sm_90a: configs, selection and launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.few_rows.formats import FORMATS, PackedWeight, takes_int8
from cute_kernels.few_rows.product import SCALE_TYPES, FewRowsConfig, aligned_rows, first_busy, launch_few_rows
from cute_kernels.jit.device import device_of, num_sms

INT8_ROWS = (16, 32, 64, 128)  # rows of X that a kernel is compiled for
MAX_K = (1 << 17) - 1  # without groups: 128 * 128 * K < 2^31


@dataclass(frozen=True)
class FewRowsInt8Config(FewRowsConfig):
    """Config of the few-rows kernel of int8 rows: ``D = X W^T``."""

    act: str = "int8"

    @property
    def threads(self) -> int:
        """Threads per CTA: consumers, and a warp group that fetches and gives up its registers."""
        return 128 * self.groups + 128

    @property
    def stage_bytes(self) -> int:
        """Bytes per stage: units of weights, the same k of X, and two barriers."""
        return self.units * (self.groups // self.depth * self.format.unit_bytes + self.rows * 128) + 16

    kernel_header = "few_rows/product_int8.cuh"
    kernel_entry = "few::few_rows_int8"

    def _types(self) -> dict[str, str]:
        return {**super()._types(), "Half": "few::INT8", "Scale": SCALE_TYPES[self.format.scale]}


def int8_candidates(weight: str, rows: int) -> list[FewRowsInt8Config]:
    """Return the configs for `rows` of 16, 32, 64 or 128, largest tile first.

    CTAs share K where tiles are few: 4096 rows of weights are 64 tiles for 132 SMs.
    """
    base = FewRowsInt8Config(weight, rows)
    large = []
    if rows <= 32:  # four warp groups, which decode faster; more rows leave registers for two
        base = replace(base, groups=4, depth=2)
        large = [replace(base, depth=1)]
    elif rows == 128 and weight == "int8_g64":
        base = replace(base, units=1)  # two spill: sums and operands take 208 of 240 registers
    deep, group = replace(base, groups=2, depth=2), FORMATS[weight].group
    shared = [replace(deep, split=split) for split in (1, 2, 4)]
    if rows == 128 and group:  # two units of several groups spill, or of one where a cluster shares K
        shared = [replace(each, units=1) if group < 128 or each.split > 1 else each for each in shared]
    found = [*large, base, *shared]
    # of two stages, each is filled while nothing or little is left to read
    return [replace(each, units=1) if each.stages == 2 else each for each in found]


@lru_cache(maxsize=4096)
def choose_few_rows_int8(
    weight: str, m: int, n: int, k: int, out: str = "bfloat16", num_sms: int = 132
) -> FewRowsInt8Config:
    """Return the config of a product: the largest tile that keeps two of three SMs busy, split-K in one turn.

    Parameters
    ----------
    weight : str
        Name of a weight format.
    m, n, k : int
        Shape of the product.
    out : str
        Dtype of the output.
    num_sms : int
        SMs of the GPU.
    """
    rows = next((each for each in INT8_ROWS if m <= each), INT8_ROWS[-1])
    num_sms = -(-num_sms // -(-m // rows))  # for each of the parts of 128 rows
    return replace(first_busy(int8_candidates(weight, rows), n, k, num_sms), out=out)


def few_rows_int8_product(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    row_scale: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: FewRowsInt8Config | None = None,
) -> Tensor:
    """Multiply int8 rows by a packed integer weight: ``D = row_scale X W^T + bias``.

    The sum of a group is an exact integer. Its product with the group's scale is added in float32, in a fixed order.
    Up to 128 rows read the weight once; more do so per 128.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        int8 on a GPU of sm_90a.
    weight : PackedWeight, shape (N, K)
        Packed for int8 rows.
    bias : Tensor, shape (N,), optional
        float32.
    row_scale : Tensor, shape (M,) or (), optional
        float32: multiplies the rows of the product.
    out : Tensor, shape (M, N), optional
        float32, float16 or bfloat16 with contiguous rows. Default: a new one of `out_dtype`.
    out_dtype : torch.dtype, default bfloat16
        Dtype of the product without `out`.
    config : FewRowsInt8Config, optional
        Kernel config; overrides kernel selection.

    Returns
    -------
    Tensor, shape (M, N)

    Raises
    ------
    TypeError
        If `x` is not int8, or the weight is not packed for int8 rows.
    ValueError
        If shapes do not match, or int32 sums over K could overflow.

    Examples
    --------
    >>> weight = pack_weight(codes, FORMATS["int4_g128"], "int8", scales)  # doctest: +SKIP
    >>> few_rows_int8_product(x, weight, row_scale=x_scale)  # doctest: +SKIP
    """
    n, k = weight.shape
    if x.dtype != torch.int8:
        raise TypeError(f"x must be torch.int8, got {x.dtype}")
    if weight.act != "int8":
        raise TypeError(f"weight must be packed for 'int8', got {weight.act!r}")
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"x must have shape (M, {k}) to match the weight, got {tuple(x.shape)}")
    if weight.format.scale == "none" and k > MAX_K:
        raise ValueError(f"weight must have K <= {MAX_K} without groups, got {k}")
    m = x.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    if m == 0 or n == 0:
        return out
    x = aligned_rows(x)
    with device_of(x):
        if config is None:
            name = str(out.dtype).removeprefix("torch.")
            config = choose_few_rows_int8(weight.format.name, m, n, k, name, num_sms(x.device.index))
        launch_few_rows(config, x, weight, out, bias, row_scale)
    return out


def int8_formats() -> list[str]:
    """Return the names of the weight formats that the product has."""
    return [name for name, form in FORMATS.items() if takes_int8(form)]
