"""Configs of the kernels that multiply a matrix with 16 probe vectors and compare products by them."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig

ABSMAX_AXES = ("", "rows", "columns")
PROBES = 16
TILE = 32  # rows per group of warps; vectors are padded to a multiple of it
KERNELS = [*((kernel, axis) for kernel in ("probe", "probe_transposed") for axis in ABSMAX_AXES), ("compare_rows", "")]
SQUARES = ("probe_squares", "probe_squares_transposed")
COMPARED = [*((x, 1) for x in REAL_DTYPES.values()), ("float32", 2)]  # by compare_double: dtype, groups
SUMS = PROBES * PROBES + 4


def _parts(bytes_of_sum: int) -> int:
    """Return the bytes of the warps' sums and absmax; they reuse the pipeline's memory."""
    return 16 * (16 * 40 * bytes_of_sum + 32 * 4)


@dataclass(frozen=True)
class ProbeConfig(KernelConfig):
    """Config of a probe kernel.

    Attributes
    ----------
    kernel : str
        ``"probe"``, ``"probe_transposed"`` (reads X^T row by row), ``"probe_squares"`` and
        ``"probe_squares_transposed"`` (emit sums of squares), ``"compare_rows"``, ``"compare_double"`` or
        ``"sum_comparison"`` (reads float64 sums; `x` is ``"float32"``).
    x : str
        Dtype of the matrix.
    absmax : str
        Slices whose absmax is emitted, one of :data:`ABSMAX_AXES`; empty for ``"compare_rows"``.
    groups : int
        Groups of 32 rows per CTA.
    stages : int
        Pipeline stages per warp.
    emit_float16 : bool
        ``"probe_squares"`` also writes the float32 matrix in float16.

    Examples
    --------
    >>> ProbeConfig("probe", "float32", "rows", groups=2).name
    'probe-float32-g2-rows'
    """

    kernel: str
    x: str
    absmax: str = ""
    groups: int = 1
    stages: int = 3
    emit_float16: bool = False

    @property
    def double(self) -> bool:
        """Whether sums are float64, by Tensor Cores of sm_90."""
        return self.kernel in (*SQUARES, "compare_double")

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 512

    @property
    def smem_bytes(self) -> int:
        """Bytes of dynamic shared memory per CTA."""
        if self.kernel == "sum_comparison":
            return 0
        ring = self.stages * 16 * self.threads * (4 if self.x == "float32" else 2)  # 16 elements per thread and stage
        return max(ring, _parts(8 if self.double else 4))

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        marks = "".join(f"-{mark}" for mark in (self.absmax, "float16" * self.emit_float16) if mark)
        return f"{self.kernel}-{self.x}-g{self.groups}{marks}"

    @property
    def kernel_header(self) -> str:
        if self.double:
            return "estimate/probe_squares.cuh"
        return f"estimate/{'probes' if self.kernel.startswith('probe') else 'probe_compare'}.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.kernel.removesuffix("_transposed")

    def _constants(self) -> dict[str, object]:
        return {
            "kAbsmax": ABSMAX_AXES.index(self.absmax),
            "kTransposed": self.kernel.endswith("_transposed"),
            "kGroups": self.groups,
            "kStages": self.stages,
            "kDouble": self.double,
            "kPartsBytes": _parts(8 if self.double else 4),
            "kEmitFloat16": self.emit_float16,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": OUT_TYPES[self.x]}


def default_configs() -> list[ProbeConfig]:
    """Return the configs of all kernels and input dtypes that compile for every arch.

    Examples
    --------
    >>> len(default_configs())
    29
    """
    single = [ProbeConfig(kernel, x, axis) for kernel, axis in KERNELS for x in REAL_DTYPES.values()]
    two = [ProbeConfig(kernel, "float32", axis, groups=2) for kernel, axis in KERNELS]
    return [*single, *two, ProbeConfig("sum_comparison", "float32")]


def double_configs() -> list[ProbeConfig]:
    """Return the configs of the kernels with float64 sums, for sm_90.

    Examples
    --------
    >>> len(double_configs())
    12
    """
    squares = [ProbeConfig(kernel, x) for kernel in SQUARES for x in ("float16", "bfloat16")]
    emitting = [ProbeConfig(kernel, "float32", groups=n, emit_float16=True) for kernel in SQUARES for n in (1, 2)]
    compared = [ProbeConfig("compare_double", x, groups=n) for x, n in COMPARED]
    return [*squares, *emitting, *compared]
