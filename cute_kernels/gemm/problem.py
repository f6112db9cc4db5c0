"""A checked dense integer product, and the checks that all dense products share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_kernels.gemm.config import Products
from cute_kernels.gemm.int4 import Int4Matrix

INTEGER_DTYPES = (torch.int32, torch.int64)
HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class GemmProblem:
    """A checked product of digit planes.

    Attributes
    ----------
    a : tuple of Tensor, shape (M, K)
        int8 digit planes, the leading one first.
    b : tuple of Tensor, shape (K, N)
        int8 digit planes, the leading one first.
    products : Products
        The digit products that are summed.
    shift : int
        Bits of a digit.
    row_scale : Tensor, shape (M,) or (), optional
        Scale of `a`.
    col_scale : Tensor, shape (N,) or (), optional
        Scale of `b`.
    alpha : float
        Factor of the product, times the scales that were given as numbers.
    beta : float
        Factor of `c`.
    c : Tensor, shape (M, N), optional
        Source; None if `beta` is 0.
    bias : Tensor, shape (N,), optional
        Added to each row.
    out_dtype : torch.dtype
        Dtype of the output.
    activation : str or None
        Applied to all that is added.
    out_scale : Tensor or None, shape ()
        Scale of an int8 output.
    glu : bool
        The activation is that of the first half of the columns of B, and the other half is multiplied by it.
    gate : Tensor, optional
        float32: another kernel decides by it if the product runs; see :func:`cute_kernels.gemm.cuda.gated_gemm`.
    packed : tuple of Int4Matrix or None
        Packed operands A and B; `a` or `b` then has their shape and no memory.
    """

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    products: Products
    shift: int
    row_scale: Tensor | None
    col_scale: Tensor | None
    alpha: float
    beta: float
    c: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype
    activation: str | None = None
    out_scale: Tensor | None = None
    glu: bool = False
    gate: Tensor | None = None
    packed: tuple[Int4Matrix | None, Int4Matrix | None] = (None, None)

    def unpacked(self) -> GemmProblem:
        """Return the same product of int8 operands."""
        left, right = self.packed
        a, b = self.a if left is None else (left.ints(),), self.b if right is None else (right.ints(),)
        return replace(self, a=a, b=b, packed=(None, None))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.a[0].shape[0], self.b[0].shape[1], self.a[0].shape[1]

    @property
    def out_shape(self) -> tuple[int, int]:
        """(M, N), or (M, N / 2) of a gated linear unit."""
        m, n, _ = self.shape
        return m, n // 2 if self.glu else n

    @property
    def device(self) -> torch.device:
        """Device of the operands."""
        return self.a[0].device

    @property
    def is_integer(self) -> bool:
        """Whether the output holds the unscaled integer sum."""
        return self.out_dtype in INTEGER_DTYPES

    @property
    def is_linear(self) -> bool:
        """Whether nothing follows the sums."""
        return self.activation is None and self.out_scale is None and not self.glu

    def linear(self) -> GemmProblem:
        """Return the product before activation and rounding to int8."""
        dtype = torch.float64 if self.out_dtype == torch.float64 else torch.float32
        return replace(self, activation=None, out_scale=None, glu=False, out_dtype=dtype)


def check_float_tensor(
    x: Tensor, name: str, shapes: tuple[tuple[int, ...], ...], device: torch.device, allow_float64: bool
) -> Tensor:
    """Return `x` if it is a float tensor of one of `shapes` on `device`.

    Raises
    ------
    TypeError
        If the dtype is not float32, float16, bfloat16 or, with `allow_float64`, float64.
    ValueError
        If the shape or the device does not match.
    """
    dtypes = (torch.float32, *HALF_DTYPES, *((torch.float64,) if allow_float64 else ()))
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must be one of {', '.join(map(str, dtypes))}, got {x.dtype}")
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name} must have the shape {' or '.join(map(str, shapes))}, got {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device} as a is, got {x.device}")
    return x


def check_epilogue(
    c: Tensor | None, beta: float, bias: Tensor | None, shape: tuple[int, int], device: torch.device, float64: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return `c`, None if `beta` is 0, and `bias`.

    Raises
    ------
    TypeError
        If a dtype is not supported.
    ValueError
        If `c` is missing, or a shape or a device does not match.
    """
    if beta != 0.0 and c is None:
        raise ValueError(f"c must be given for beta {beta}")
    c = check_float_tensor(c, "c", (shape,), device, float64) if c is not None and beta != 0.0 else None
    if bias is not None:
        bias = check_float_tensor(bias, "bias", ((shape[1],),), device, float64)
    return c, bias


def check_output(
    out: Tensor | None, dtype: torch.dtype, shape: tuple[int, int], device: torch.device, *, integers: bool
) -> None:
    """Check that results of `dtype` can be written to `out`.

    Raises
    ------
    TypeError
        If `dtype` is not supported on `device`, or `out` has another one.
    ValueError
        If the shape, the device or the memory strides of `out` do not fit.
    """
    floats = (*HALF_DTYPES, torch.float32, *((torch.float64,) if device.type == "cpu" else ()))
    known = (torch.int8, *INTEGER_DTYPES, *floats) if integers else floats
    if dtype not in known:
        raise TypeError(f"out_dtype on {device} must be one of {', '.join(map(str, known))}, got {dtype}")
    if out is None:
        return
    if out.dtype != dtype:
        raise TypeError(f"out must have out_dtype {dtype}, got {out.dtype}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have the shape {shape}, got {tuple(out.shape)}")
    if out.device != device:
        raise ValueError(f"out must be on {device} as a is, got {out.device}")
    if out.shape[1] > 1 and out.stride(1) != 1:
        raise ValueError(f"out must have contiguous rows, got strides {out.stride()}")
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise ValueError(
            f"out must have rows that do not overlap, got strides {out.stride()} for {out.shape[1]} columns"
        )
