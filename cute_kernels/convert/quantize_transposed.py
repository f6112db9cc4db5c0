"""Quantization of rows into the transposed matrix on a GPU: host side of ``convert/quantize_transposed.cuh``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from cute_kernels.convert.quantize import QuantizeConfig
from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import OUT_BYTES, OUT_TYPES, PORTABLE_CLUSTER, KernelConfig
from cute_kernels.jit.device import current_arch, device_of, num_sms
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.operands import ALIGNMENT, aligned

_MOST_ENTRIES = 1 << 22  # up to which `encode_transposed` takes less than quantization by rows and a copy
_FEW_GIVEN = 1 << 20  # entries with a given scale, up to which it takes less than `encode_turned`
_MOST_CTAS_IN_Y = 65535  # of a grid
_ONE_WAVE = (
    1 << 22
)  # entries, up to which CTAs of one load a thread and row are all resident: more of each pays from here on
_FEW = 64  # rows of `encode_transposed`: stores of a word bind from here on
_CLUSTERED_ROWS = 16  # with dynamic scales, from which on clusters are quicker
_SMALL_CLUSTER = 4  # CTAs of a cluster, up to which it is quicker for any number of rows
_CLUSTERED = ("sm_90a", "sm_100a")
_MOST_CTAS = 16  # of a cluster


class _IntoTranspose(KernelConfig):
    """What both kernels have in common."""

    x: str
    given: bool
    rows: int

    kernel_header = "convert/quantize_transposed.cuh"
    shared_carveout = 100  # the product starts behind it, on the same SMs

    @property
    def threads(self) -> int:
        return 256

    @property
    def shape(self) -> str:
        """The numbers of the config, for its name."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"quantize-{self.kernel_entry}-{self.x}{'-given' * self.given}-{self.shape}"

    def _constants(self) -> dict[str, object]:
        return {
            "kBits": 8,
            "kStored": 8,
            "kSigned": True,
            "kTruncate": False,
            "kRows": self.rows,
            "kThreads": self.threads,
            "kGiven": self.given,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": OUT_TYPES[self.x]}


@dataclass(frozen=True)
class TransposedConfig(_IntoTranspose):
    """Config of the kernel for few rows.

    Parameters
    ----------
    x : str
        Dtype of the input.
    given : bool
        The scale is an input.
    rows : int
        Rows of a CTA, 4, 8 or 16.
    run : int
        Columns of a thread, 1 or 2.

    Examples
    --------
    >>> TransposedConfig("float16").name
    'quantize-encode_transposed-float16-r4c1'
    """

    x: str
    given: bool = False
    rows: int = 4
    run: int = 1

    kernel_entry = "encode_transposed"

    @property
    def shape(self) -> str:
        return f"r{self.rows}c{self.run}"

    def _constants(self) -> dict[str, object]:
        return super()._constants() | {"kSteps": 8, "kRun": self.run}


@dataclass(frozen=True)
class TurnedConfig(_IntoTranspose):
    """Config of the kernel for many rows, whose threads keep their entries in registers.

    Parameters
    ----------
    x : str
        Dtype of the input.
    given : bool
        Scales are an input.
    rows : int
        Rows of a CTA, 32 or 64.
    steps : int
        Loads of 16 bytes of a thread in each of its rows.
    cluster : int
        CTAs of a cluster, which have the rows' columns among them; 1 for given scales.
    resident : int
        CTAs of an SM.

    Examples
    --------
    >>> config = TurnedConfig("float16", steps=2, cluster=8)
    >>> config.name, config.width
    ('quantize-encode_turned-float16-r32s2c8x6', 512)
    """

    x: str
    given: bool = False
    rows: int = 32
    steps: int = 1
    cluster: int = 1
    resident: int = 6

    kernel_entry = "encode_turned"

    @property
    def wide_cluster(self) -> bool:
        return self.cluster > PORTABLE_CLUSTER

    @property
    def width(self) -> int:
        """Columns of a CTA."""
        return self.steps * _span(self.x)

    @property
    def shape(self) -> str:
        return f"r{self.rows}s{self.steps}c{self.cluster}x{self.resident}"

    def _constants(self) -> dict[str, object]:
        own = {"kSteps": self.steps, "kCluster": self.cluster, "kResident": self.resident}
        return super()._constants() | own


def _span(x: str) -> int:
    """Columns that a warp loads at a time."""
    return 32 * ALIGNMENT // OUT_BYTES[x]


def turned_config(x: str, rows: int, columns: int, given: bool) -> TurnedConfig | None:
    """Return the config for many rows of `columns` entries; None for rows that registers of a cluster cannot hold.

    Examples
    --------
    >>> turned_config("float16", 512, 4096, False).name, turned_config("float32", 512, 14336, False)
    ('quantize-encode_turned-float16-r32s1c16x5', None)
    >>> turned_config("float16", 4096, 4096, False).name
    'quantize-encode_turned-float16-r32s2c8x4'
    """
    ones = 6 if x == "float32" else 5  # CTAs of one step on an SM
    if given:
        return TurnedConfig(x, True, resident=ones)
    by_ones = rows * columns <= _ONE_WAVE or columns % (2 * _span(x)) != 0
    for steps, resident in (((1, ones),) if by_ones else ()) + ((2, 4), (4, 2)):
        cluster = -(-columns // (steps * _span(x)))
        if cluster <= _MOST_CTAS:
            return TurnedConfig(x, False, steps=steps, cluster=cluster, resident=resident)
    return None


def _config(x: str, rows: int, given: bool) -> TransposedConfig:
    """The quickest on an H200: amaxes of more rows are found again less often, but later."""
    if rows <= _FEW:
        return TransposedConfig(x, given)
    return TransposedConfig(x, given, 16 if given else 8, 2)


def serves(x: Tensor, scale: Tensor | None = None) -> bool:
    """Return whether a matrix (M, K) on a GPU and given scales are for :func:`quantize_transposed`.

    Few entries always; many on GPUs with clusters of CTAs, in whole runs of 16 bytes.

    Examples
    --------
    >>> serves(torch.empty(4096, 4096, device="cuda"))  # doctest: +SKIP
    True
    """
    if x.ndim != 2 or x.dtype not in REAL_DTYPES or not x.numel() or x.stride(1) != 1:
        return False
    return _choose(x, scale, _arch(x)) is not None


def _arch(x: Tensor) -> str:
    with device_of(x):
        return current_arch()


def _choose(x: Tensor, scale: Tensor | None, arch: str) -> TransposedConfig | TurnedConfig | None:
    """The quickest of an H100 and an H200."""
    (rows, columns), name, size = x.shape, REAL_DTYPES[x.dtype], x.element_size()
    whole = all(each * size % ALIGNMENT == 0 for each in (columns, x.stride(0) if rows > 1 else columns))
    many = None
    if arch in _CLUSTERED and whole and x.data_ptr() % ALIGNMENT == 0:
        many = turned_config(name, rows, columns, scale is not None)
        many = many if many is not None and rows <= _MOST_CTAS_IN_Y * many.rows else None
    by_row = scale is not None and scale.numel() > 1
    if many is not None:
        clustered = rows >= _CLUSTERED_ROWS or many.cluster <= _SMALL_CLUSTER
        if by_row or (clustered if scale is None else x.numel() > _FEW_GIVEN):
            return many
    few = _config(name, rows, scale is not None)
    if by_row or x.numel() > _MOST_ENTRIES or rows > _MOST_CTAS_IN_Y * few.rows:
        return many
    return few


def quantize_transposed(
    x: Tensor,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    config: TransposedConfig | TurnedConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize rows to int8 and store the transpose, on a GPU, without waiting for it.

    ``q[k, m] = clamp(round(x[m, k] / scale[m]))`` with the scales and integers of
    :func:`~cute_kernels.convert.quantize.quantize` by rows.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        float32, float16 or bfloat16, contiguous along K, of a shape that :func:`serves` takes.
    scale : Tensor, shape () or (M, 1), optional
        float32, contiguous: one scale for all rows, or one for each.
    out : Tensor, shape (K, P), optional
        int8, contiguous, where to: `P` is `M` rounded up to 16.
    out_scale : Tensor, shape (M, 1), optional
        float32, contiguous, where to, if no `scale` is given.
    config : TransposedConfig or TurnedConfig, optional
        By default the quickest.

    Returns
    -------
    data : Tensor, shape (K, M)
        int8; rows are `M` rounded up to 16 apart, with zeros in between.
    scale : Tensor, shape (M, 1) or ()
        float32.

    Examples
    --------
    >>> data, scale = quantize_transposed(torch.ones(4, 8, device="cuda"))  # doctest: +SKIP
    >>> data.shape, data.stride(), data[0, 0].item()  # doctest: +SKIP
    (torch.Size([8, 4]), (16, 1), 127)
    """
    rows, columns = x.shape
    config = config or _choose(x, scale, _arch(x))
    assert config is not None
    pitch = x.stride(0) if rows > 1 else columns
    out = workspace.empty((columns, aligned(rows)), torch.int8, x.device) if out is None else out
    source, first, ints = scale, (x.data_ptr(), pitch, rows, columns), (out.data_ptr(), out.shape[1])
    if scale is None:
        scale = workspace.empty((rows, 1), torch.float32, x.device) if out_scale is None else out_scale
    with device_of(x):
        kernel, sms = get_kernel(config), num_sms(x.device.index)
        if isinstance(config, TurnedConfig):
            step = 0 if source is None or source.numel() == 1 else 1  # from the scale of a row to the next
            grid = (-(-columns // config.width), -(-rows // config.rows), 1)
            arguments = (*first, 0 if source is None else source.data_ptr(), step, scale.data_ptr(), *ints)
            kernel.launch(grid, arguments, (config.cluster, 1, 1) if config.cluster > 1 else None)
        else:
            vector = ALIGNMENT // x.element_size()
            loads = int(x.data_ptr() % ALIGNMENT == 0 and pitch % vector == 0)
            groups, at_once = out.shape[1] // config.rows, config.threads * config.run
            runs = -(-columns // at_once)
            share = -(-runs // max(1, min(runs, 2 * sms // groups))) * at_once
            kernel.launch((-(-columns // share), groups, 1), (*first, share, scale.data_ptr(), *ints, loads))
    return out[:, :rows], scale


def amax_rows(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the bits of ``max |x|`` of each row, on a GPU, in one launch.

    As integers they have the order of the magnitudes, infinity and NaN above all: a maximum over ranks keeps NaN.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        float32, float16 or bfloat16, contiguous along K, not empty.
    out : Tensor, shape (M, 1), optional
        int32, contiguous, where to.

    Returns
    -------
    Tensor, shape (M, 1)
        int32: the bits of float32.

    Examples
    --------
    >>> amax_rows(torch.tensor([[1.0, -2.0]], device="cuda")).view(torch.float32).item()  # doctest: +SKIP
    2.0
    """
    rows, columns = x.shape
    config = QuantizeConfig("absmax_slices", REAL_DTYPES[x.dtype])
    out = workspace.empty((rows, 1), torch.int32, x.device) if out is None else out
    pitch = x.stride(0) if rows > 1 else columns
    loads = int(x.data_ptr() % ALIGNMENT == 0 and pitch * x.element_size() % ALIGNMENT == 0)
    with device_of(x):
        get_kernel(config).launch(
            (rows, 1, 1), (x.data_ptr(), pitch, 1, columns, 1, config.lanes(columns), out.data_ptr(), 0, loads)
        )
    return out


def default_configs(arch: str) -> list[TransposedConfig | TurnedConfig]:
    """Return the configs that products of floats use, and those of 512 and 4096 rows of 4096 and 14336 columns.

    Examples
    --------
    >>> len(default_configs("sm_80")), len(default_configs("sm_90a"))
    (12, 22)
    """
    cases = product(REAL_DTYPES.values(), (_FEW, _FEW + 1), (False, True))
    few: list[TransposedConfig | TurnedConfig] = [_config(*case) for case in cases]
    if arch not in _CLUSTERED:
        return few
    many = (turned_config(*case) for case in product(REAL_DTYPES.values(), (512, 4096), (4096, 14336), (False, True)))
    return few + list(dict.fromkeys(each for each in many if each is not None))
