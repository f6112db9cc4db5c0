"""Few-rows product with packed weights on sm_90a: configs, selection and launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from cute_kernels.few_rows.formats import FORMATS, PackedWeight, WeightFormat
from cute_kernels.jit.codegen import OUT_TYPES
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.jit.tma import tensor_map
from cute_kernels.scaled_gemm.small_m.config import StagedConfig

ROWS = (8, 16, 32, 64)  # rows of X that a kernel is compiled for
CODE_TYPES = {"int4": "few::INT4", "e2m1": "few::E2M1Placed", "int8": "few::INT8", "e4m3": "few::E4M3Bytes",
          "e2m3": "few::E2M3Placed", "e3m2": "few::E3M2Placed"}  # fmt: skip
SCALE_TYPES = {
    "none": "few::NoScale", "power": "few::PowerScale", "e4m3": "few::E5M3Scale", "half": "few::HalfScale",
    "half_min": "few::HalfScaleMinimum", "sum": "few::SumScale",
}  # fmt: skip


@dataclass(frozen=True)
class FewRowsConfig(StagedConfig):
    """Config of the few-rows kernel: ``D = X W^T``.

    Attributes
    ----------
    weight : str
        Name of a :class:`~cute_kernels.few_rows.formats.WeightFormat`.
    rows : int
        Rows of X that the kernel is compiled for, at least M.
    act : str
        Dtype of X: ``"bfloat16"`` or ``"float16"``.
    out : str
        Dtype of the output.
    groups : int
        Consumer warp groups.
    depth : int
        Warp groups that share 64 rows of weights; they take turns in the pipeline's stages.
    split : int
        CTAs of a cluster that share K (split-K).
    resident : int
        CTAs per SM.
    units : int
        Units of 128 k per stage.
    """

    weight: str
    rows: int
    act: str = "bfloat16"
    out: str = "bfloat16"
    groups: int = 2
    depth: int = 1
    split: int = 1
    resident: int = 1
    units: int = 2

    @property
    def format(self) -> WeightFormat:
        """Entry of the table of formats."""
        return FORMATS[self.weight]

    @property
    def stage_bytes(self) -> int:
        """Bytes per stage: units of weights, the same k of X, and two barriers."""
        return self.units * (self.groups // self.depth * self.format.unit_bytes + self.rows * 256) + 16

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        shape = f"r{self.rows}g{self.groups}d{self.depth}k{self.split}x{self.resident}u{self.units}"
        return f"few-rows-{self.weight}-{self.act}-{self.out}-{shape}"

    kernel_header = "few_rows/product.cuh"
    kernel_entry = "few::few_rows_product"

    def _constants(self) -> dict[str, object]:
        return {
            "kFloatAccum": True,
            "kLevels": 1,
            "kRows": self.rows,
            "kGroups": self.groups,
            "kDepth": self.depth,
            "kUnits": self.units,
            "kStages": self.stages,
            "kSplit": self.split,
            "kResident": self.resident,
            "kGroup": self.format.group or 128,
        }

    @property
    def rounds_scales(self) -> bool:
        """Whether scales of 128 k are rounded to 16 bits: integers, 64 rows leave no registers for sums of a unit."""
        return self.format.scale == "sum" and self.rows == 64 and self.format.codes in ("int4", "int8")

    @property
    def _scale_type(self) -> str:
        """C++ type of the scale rule."""
        return "few::FloatScale" if self.rounds_scales else SCALE_TYPES[self.format.scale]

    def _types(self) -> dict[str, str]:
        return {
            "Out": OUT_TYPES[self.out],
            "Source": "NoSource",
            "Half": self.act.upper(),
            "Weights": CODE_TYPES[self.format.codes],
            "Scale": self._scale_type,
        }


_Config = TypeVar("_Config", bound=FewRowsConfig)


def candidates(weight: str, rows: int, act: str = "bfloat16") -> list[FewRowsConfig]:
    """Return the configs for `rows` of 8, 16, 32 or 64, largest tile first."""
    base = FewRowsConfig(weight, rows, act, act)
    deep = replace(base, groups=2, depth=2, resident=2 if rows <= 32 else 1)
    # Sums of a unit of 64 rows fit the registers that four groups leave, but not where two of them take turns.
    sums = base.format.scale == "sum" and rows == 64 and not base.rounds_scales
    found = [
        replace(base, groups=4),
        replace(base, groups=2) if sums else replace(base, groups=4, depth=2),
        *(replace(deep, split=split) for split in (1, 2, 4)),
    ]
    # of two stages, each is filled while nothing or little is left to read
    return [replace(each, units=1) if each.stages == 2 else each for each in found]


def first_busy(configs: list[_Config], n: int, k: int, num_sms: int) -> _Config:
    """Return the first config that keeps two of three SMs busy, else the last, of those whose CTAs share enough K.

    CTAs that share K run at the same time, or the last clusters would double the time.
    """
    fitting = [
        each for each in configs
        if each.split == 1
        or (k >= 1024 * each.split and -(-n // each.tile_n) * each.split <= each.ctas_at_once(num_sms))
    ]  # fmt: skip
    busy = (each for each in fitting if 3 * -(-n // each.tile_n) * each.split >= 2 * num_sms)
    return next(busy, fitting[-1])


@lru_cache(maxsize=4096)
def choose_few_rows(
    weight: str, m: int, n: int, k: int, act: str = "bfloat16", out: str = "bfloat16", num_sms: int = 132
) -> FewRowsConfig:
    """Return the config of a product: the largest tile that keeps two of three SMs busy, split-K in one turn.

    Parameters
    ----------
    weight : str
        Name of a weight format.
    m, n, k : int
        Shape of the product.
    act, out : str
        Dtypes of X and of the output.
    num_sms : int
        SMs of the GPU.
    """
    rows = next((each for each in ROWS if m <= each), ROWS[-1])
    num_sms = -(-num_sms // -(-m // rows))  # for each of the parts of 64 rows
    return replace(first_busy(candidates(weight, rows, act), n, k, num_sms), out=out)


def aligned_rows(x: Tensor) -> Tensor:
    """Return rows (M, K) as TMA reads them, at multiples of 16 bytes; a copy if they lie otherwise."""
    (m, k), run = x.shape, 16 // x.element_size()
    if x.data_ptr() % 16 == 0 and x.stride(1) == 1 and (k if m == 1 else x.stride(0)) % run == 0:
        return x
    return torch.empty((m, -(-k // run) * run), dtype=x.dtype, device=x.device)[:, :k].copy_(x)


def launch_few_rows(
    config: FewRowsConfig,
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> None:
    """Launch the product.

    Parameters
    ----------
    config : FewRowsConfig
        Kernel config.
    x : Tensor, shape (M, K)
        Rows at multiples of 16 bytes, of the config's dtype.
    weight : PackedWeight, shape (N, K)
        Weights.
    out : Tensor, shape (M, N)
        Output with contiguous rows.
    bias : Tensor, shape (N,), optional
        float32, contiguous.
    row_scale : Tensor, shape (M,) or (), optional
        float32, contiguous: multiplies the rows of the product.
    """
    (n, k), m, size = weight.shape, x.shape[0], x.element_size()
    pitch = x.stride(0) * size if m > 1 else -(-k * size // 16) * 16
    vector = n % 8 == 0 and out.data_ptr() % 16 == 0 and out.stride(0) * out.element_size() % 16 == 0
    get_kernel(config).launch(
        (-(-n // config.tile_n) * config.split, -(-m // config.rows), 1),
        (
            tensor_map(x.data_ptr(), size, (k, m), pitch, (128 // size, config.rows), 128),
            weight.data.data_ptr(), weight.data.shape[1], out.data_ptr(), out.stride(0), m, n,
            0 if row_scale is None else row_scale.data_ptr(), int(row_scale is not None and row_scale.dim() > 0),
            weight.row_scale.data_ptr(), 0 if bias is None else bias.data_ptr(), int(vector),
        ),
        (config.split, 1, 1) if config.split > 1 else None,
    )  # fmt: skip
