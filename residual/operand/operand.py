"""One operand of a quantized product: finite lines in float32, their scales, and digit planes made when asked for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

FAR = 30  # a line's magnitude beyond 2**FAR or below 2**-FAR is brought to one by a power of two
HOT = 16.0  # a column of k is an outlier where its mean square is this many times the median one
MOST_HOT = 16  # at most one column in so many is an outlier
SAMPLE = 16  # lines that statistics look at
_HALVES = (torch.float16, torch.bfloat16)
# Of a line's largest magnitude: float16 holds it, and entries down to a 16th of it, with all of their digits.
HALF_RANGE = (2.0**-10, 2.0**15)
_DTYPES = (torch.float32, *_HALVES, torch.float64)
_SMALL_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.bool)


def real_dtype(x: Tensor) -> torch.dtype:
    """The float dtype that holds ``x``: its own, or float32 for short and float64 for long integers."""
    if x.dtype in _DTYPES or x.is_floating_point():
        return x.dtype
    return torch.float32 if x.dtype in _SMALL_INTEGERS else torch.float64


def check_bits(bits: object) -> None:
    """Raises ``ValueError`` unless ``bits`` is None, or 4 or 8 as an integer: 8.0 equals 8 and is no width."""
    if bits is not None and not (isinstance(bits, int) and bits in (4, 8)):
        raise ValueError(f"bits must be None, 4 or 8, got {bits!r}")


def check_operand(name: str, x: object) -> Tensor:
    """``x`` as a 2-D real tensor; raises ``TypeError`` or ``ValueError``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in _DTYPES and (x.is_complex() or x.is_floating_point()):
        raise TypeError(f"{name} must be of an integer dtype or one of {', '.join(map(str, _DTYPES))}, got {x.dtype}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {x.layout}")
    if x.dim() != 2:
        raise ValueError(f"{name} must be 2-D, got {x.dim()} dimensions")
    if x.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{name} must be on a CPU or a CUDA device, got {x.device}")
    return x


def largest(x: Tensor) -> Tensor:
    """Largest magnitude of each line of ``x`` (L, K); NaN where the line holds one."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0])
    return torch.maximum(x.amax(1), x.amin(1).neg_())  # (L,)


def scale_by_powers(x: Tensor, exponent: Tensor) -> Tensor:
    """``x * 2**exponent`` for a line's ``exponent`` (L,), in two steps so that neither factor leaves the range."""
    half = torch.div(exponent, 2, rounding_mode="floor")
    ones = torch.ones_like(half, dtype=x.dtype)
    first, second = torch.ldexp(ones, half), torch.ldexp(ones, exponent - half)  # (L,)
    return x * first[:, None] * second[:, None]  # (L, K)


def digits(x: Tensor, bits: int, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """``x ~ scale (q0 + q1 / 2**bits + q2 / 4**bits)`` line by line, by :func:`cute_kernels.convert.digits.digits`.

    ``x``: float32, float16 or bfloat16 (L, K).  Returns ``count`` int8 planes of the layout of ``x`` and the scale,
    float32 (L,): 1 for a line of zeros, NaN for one that is not finite.
    """
    from cute_kernels.convert import digits as gemm_digits  # takes longer to import than this package

    found = gemm_digits.digits(x, bits, count, axis=1)
    return found.planes, found.scale


@dataclass(frozen=True)
class Digits:
    """A form of an operand as integers; ``mean`` is what the centred form took out of each line, else None."""

    planes: tuple[Tensor, ...]  # int8 (L, K) each
    scale: Tensor  # float32 (L,)
    mean: Tensor | None = None  # float32 (L,)


@dataclass(eq=False)
class Operand:
    """Lines of one operand: rows of A, or columns of B, so that the sum runs along the second dimension of both.

    Attributes:
        given: (L, K), the input as it is.
        real: the same in float32, or in the half dtype given on a GPU; finite where a call may wait for a GPU: lines
            with inf or NaN are zero then, and all are multiplied by ``2**-exponent``.
        exponent: int32 (L,), or None where no line's magnitude is far from one.
        broken: int64, the lines with inf or NaN, or None where there are none.
        seen: whether such lines were looked for.
    """

    given: Tensor
    real: Tensor
    exponent: Tensor | None = None
    broken: Tensor | None = None
    seen: bool = True
    made: dict[tuple[str, int, bool], Digits] = field(default_factory=dict)
    kept: dict[object, Any] = field(default_factory=dict)  # statistics and probes of a constant operand

    @cached_property
    def values(self) -> Tensor:
        """``real`` in float32 (L, K)."""
        return self.real.float()

    @cached_property
    def half(self) -> Tensor:
        """``real`` in its own half dtype, or in float16 (L, K)."""
        return self.real if self.real.dtype in _HALVES else self.real.half()

    def fits_half(self) -> bool:
        """Whether the lines' largest magnitudes are zero or in :data:`HALF_RANGE`; waits for a GPU."""
        least, most = HALF_RANGE
        near = (self.top >= least) & (self.top <= most)
        return bool((near | (self.top == 0)).all())

    @cached_property
    def top(self) -> Tensor:
        """float32 (L,): largest magnitude of each line of ``values``."""
        return largest(self.values)

    @property
    def knows_tops(self) -> bool:
        """Whether ``top`` is there already."""
        return "top" in self.__dict__

    @property
    def exact_in_single(self) -> bool:
        """Whether ``values`` are the given numbers, all near one."""
        return self.exponent is None and real_dtype(self.given) != torch.float64

    def finite(self) -> Tensor:
        """The given numbers in float64 (L, K), lines with inf or NaN zero."""
        exact = self.given.double()  # (L, K)
        return exact if self.broken is None else exact.index_fill(0, self.broken, 0.0)

    def digits(self, bits: int, count: int, form: str = "plain", hot: Tensor | None = None) -> Digits:
        """Digit planes of a form: ``plain``; ``centred``: without each line's mean; ``outlier``: zero where ``hot``.

        Kept, unless ``hot``, bool (K,), says which columns are outliers.
        """
        key = (form, bits, count == 3)  # the leading digits of three are other ones
        found = self.made.get(key)
        if found is not None and len(found.planes) >= count and hot is None:
            return Digits(found.planes[:count], found.scale, found.mean)
        if form == "plain" and bits == 8 and self.given.dtype == torch.int8:  # bytes are their own digits
            planes = (self.given, *(torch.zeros_like(self.given) for _ in range(count - 1)))
            result = Digits(planes, torch.ones(self.given.shape[0], device=self.given.device))
        elif form == "plain":
            result = Digits(*digits(self.real, bits, count))
        elif form == "centred":
            mean = self.values.mean(1)  # (L,)
            result = Digits(*digits(self.values - mean[:, None], bits, count), mean)
        else:
            kept = self.values.masked_fill(self.hot() if hot is None else hot, 0.0)  # (L, K)
            result = Digits(*digits(kept, bits, count))
        if hot is None:
            self.made[key] = result
        return result

    def hot(self) -> Tensor:
        """bool (K,): the outlier columns, from a sample of the lines; at most ``K / MOST_HOT`` of them."""
        found = self.kept.get("hot")
        if found is not None and not isinstance(found, Tensor):
            found = self.kept["hot"] = found.outliers  # by the statistics' kernels
        if not isinstance(found, Tensor):
            step = max(1, self.values.shape[0] // SAMPLE)
            lines = self.values[::step] / self.top[::step, None].clamp(min=2.0**-FAR)  # (S, K)
            found = hot_columns(lines.square().sum(0))
            self.kept["hot"] = found
        return found


def hot_columns(energy: Tensor) -> Tensor:
    """bool (K,): where ``energy`` (K,) exceeds ``HOT`` times its median, the ``K / MOST_HOT`` largest at most."""
    k = energy.shape[0]
    most = k // MOST_HOT
    if most == 0:
        return torch.zeros_like(energy, dtype=torch.bool)
    bound = torch.maximum(HOT * energy.median(), energy.topk(most + 1).values[-1])
    return energy > bound


def operand(x: Tensor, *, waits: bool = True) -> Operand:
    """An :class:`Operand` of ``x`` (L, K).

    ``waits``: look for lines with inf or NaN or far from one, which waits for a GPU; without it such lines get scale
    NaN, and far ones may lose digits of their scale below 1e-38.
    """
    x = x.detach()
    real = x.to(real_dtype(x))
    if not x.is_cuda and real.dtype != torch.float64:
        real = real.float()
    broken = exponent = None
    if waits and x.numel():
        top = largest(real)
        finite = torch.isfinite(top)
        far = finite & (top > 0) & ((top > 2.0**FAR) | (top < 2.0**-FAR))
        any_broken, any_far = torch.stack(((~finite).any(), far.any())).tolist()
        if any_broken:
            broken = (~finite).nonzero().flatten()
            real = real.index_fill(0, broken, 0.0)  # (L, K)
            top = top.index_fill(0, broken, 0.0)
        if any_far:
            top = top.float() if top.dtype in _HALVES else top
            exponent = torch.frexp(top).exponent  # (L,)
            real = scale_by_powers(real.to(top.dtype), -exponent)  # (L, K)
            top = torch.frexp(top).mantissa
    side = Operand(x, real.float() if real.dtype == torch.float64 else real, exponent, broken, waits)
    if waits and x.numel():
        side.top = top.float()  # found on the way
    return side


class Prepared:
    """A constant right operand ``W`` (K, N) of :func:`residual.matmul`: what is derived of it is derived once.

    Digits, statistics and the probes' product ``W w`` are made at their first use and kept; a digit plane takes a byte
    an entry.  It holds on to the memory of ``W`` and notices writes to it, except those through ``W.data`` and those to
    tensors made for inference.
    """

    def __init__(self, weight: Tensor, follows: bool = False) -> None:
        """``follows``: derive everything anew where W was written to, instead of refusing to serve."""
        self.follows = follows
        self.slot = next(_numbers)
        _slots[self.slot] = self
        self.weight = check_operand("W", weight).detach()
        self._operand: Operand | None = None
        self._version = _version(self.weight)

    @property
    def operand(self) -> Operand:
        """The columns of W as they are now."""
        if self._operand is None:
            self._version = _version(self.weight)
            self._operand = operand(self.weight.mT)
        return self._operand

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.weight.shape[0], self.weight.shape[1]

    def made_of(self, weight: Tensor) -> bool:
        """Whether ``weight`` lies where W lies."""
        mine = self.weight
        return (
            weight.data_ptr() == mine.data_ptr()
            and weight.shape == mine.shape
            and weight.stride() == mine.stride()
            and weight.dtype == mine.dtype
            and weight.device == mine.device
        )

    def serving(self, weight: Tensor) -> Operand | None:
        """The columns of ``weight``, or None where that is another tensor, such as a compiler's copy of W.

        Raises ``ValueError`` where W was written to and is not to be followed.
        """
        if not self.made_of(weight):
            return None
        # compilers pass aliases with a count of their own, so only the tensor given at first is asked
        if _version(self.weight) != self._version:
            if not self.follows:
                raise ValueError("prepared must be made of B as it is now, but B was written to since")
            self._operand = None
        return self.operand

    def require(self, weight: Tensor) -> None:
        """Raise ``ValueError`` unless this was made of ``weight``; compilers, which see no addresses, go without."""
        if not torch.compiler.is_compiling() and not self.made_of(weight):
            raise ValueError(
                f"prepared must be made of B, got one of a tensor {tuple(self.weight.shape)} elsewhere for B "
                f"{tuple(weight.shape)}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the digit planes, scales and halves made so far."""
        side = self.operand
        digits = sum(t.nbytes for made in side.made.values() for t in (*made.planes, made.scale))
        return digits + (side.half.nbytes if "half" in side.__dict__ and side.half is not side.real else 0)

    def __repr__(self) -> str:
        found = {} if self._operand is None else self._operand.made
        forms = sorted(f"int{bits} {form} x{len(d.planes)}" for (form, bits, _), d in found.items())
        return f"Prepared({self.shape[0]} x {self.shape[1]}, {self.weight.dtype}, {self.weight.device}, {forms})"


_numbers = itertools.count()
_slots: WeakValueDictionary[int, Prepared] = WeakValueDictionary()  # an operator's arguments are tensors and numbers


def in_slot(slot: int) -> Prepared:
    """The living :class:`Prepared` of this number."""
    return _slots[slot]


def _version(x: Tensor) -> int:
    """How often ``x`` was written to; tensors made for inference do not tell."""
    return 0 if x.is_inference() else x._version


FORMS = {"direct": ("plain", 1), "centred": ("centred", 1), "outlier": ("outlier", 1), "columns": ("plain", 2),
          "sparse": ("plain", 2), "full": ("plain", 2), "full4": ("plain", 2), "three_digit": ("plain", 3)}  # fmt: skip


def prepare(W: Tensor, *, mode: str = "auto", bits: int | None = None) -> Prepared:
    """Quantize a constant right operand once, for ``residual.matmul(A, W, prepared=...)``.

    Args:
        W: (K, N), any real dtype and strides; kept, not copied.
        mode: a mode of :func:`residual.matmul` to make the digits of now; ``"auto"`` makes them at their first use.
        bits: 4 or 8, the digits' width; None is 8.

    Raises:
        TypeError: ``W`` is no real dense tensor.
        ValueError: ``W`` is not 2-D, or ``mode`` or ``bits`` is unknown.
    """
    if mode != "auto" and mode not in FORMS:
        raise ValueError(f"mode must be 'auto' or one of {', '.join(FORMS)}, got {mode!r}")
    check_bits(bits)
    prepared = Prepared(W)
    side = prepared.operand
    if mode != "auto":
        form, count = FORMS[mode]
        side.digits(bits or 8, count, form)
    return prepared
