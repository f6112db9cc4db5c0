"""A constant right operand: what a product needs of it, derived once and never changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.cpu import engine
from cute_kernels.cpu.direct import MAX_K, DirectRight, prepare_direct
from residual.error.look import RightLook, look_right
from residual.error.probes import Probes, draw, probe_right
from residual.operand.operand import FLOATS, Digits, Operand, check_operand, operand
from residual.planning.ladder import Rung

DIRECT = Rung("direct", 8)  # the rung that the CPU engine computes and measures in one call


class Form(NamedTuple):
    """What a rung needs of B: for the CPU engine, or digits with the pass over B that measures the error."""

    digits: Digits | None = None
    look: RightLook | None = None
    direct: DirectRight | None = None


class TransposedProbes(NamedTuple):
    """Probes as a GPU's kernels read them: float32, one vector after the other, with room after each.

    What follows `norm` is of a constant B.
    """

    probes: Probes
    vectors: Tensor  # (16, N and room): W^T
    norm: float = math.nan  # ||W||_F
    products: Tensor | None = None  # (16, K and room): (B W)^T
    squares: Tensor | None = None  # (tiles, 2) float64: parts of ||B||_F^2 and ||B W||_F^2
    scaled: Tensor | None = None  # (K, N) float16: a float32 B times `scale`
    scale: Tensor | None = None  # (1,) float32, a power of two

    @property
    def is_for_products(self) -> bool:
        """Whether all is there that a product of 16-bit floats needs of B; see ``residual.cuda.sixteen_bit``."""
        return self.squares is not None


@dataclass(frozen=True, eq=False, repr=False)
class PreparedOperand:
    """A constant right operand B (K, N) of :func:`residual.matmul`, complete and immutable.

    It holds on to the memory of B. A product refuses it once B was written to; writes through ``B.data`` and to tensors
    made for inference are not seen.

    Attributes
    ----------
    weight : Tensor, shape (K, N)
        B.
    version : int
        Writes to `weight` until it was prepared.
    seed : int or None
        Of the probes.
    columns : Operand
        Columns of B.
    probes : Probes
        W and the norms of its rows.
    vectors, bound : Tensor, shapes (K, 16) and (K,)
        float64: ``B W`` and ``|B| wbar``.
    forms : Mapping of Rung to Form
        Digits for the rungs that it was prepared for; products make others anew.
    passes : Mapping
        Passes over B on a GPU by digits per element; see ``residual.cuda.passes``.
    transposed : TransposedProbes, optional
        Of products on a GPU in 16 bits or whose plan is searched for; see ``residual.cuda``.

    Examples
    --------
    >>> import residual
    >>> residual.prepare(torch.ones(8, 4), mode="full")
    PreparedOperand(8 x 4, torch.float32, cpu, seed=0, int8 full)
    """

    weight: Tensor
    version: int
    seed: int | None
    columns: Operand
    probes: Probes
    vectors: Tensor
    bound: Tensor
    forms: Mapping[Rung, Form] = field(default_factory=lambda: MappingProxyType({}))
    passes: Mapping[int, Any] = field(default_factory=lambda: MappingProxyType({}))
    transposed: TransposedProbes | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of what was derived."""
        tensors = [*self.probes, self.vectors, self.bound]
        for form in self.forms.values():
            if form.digits is not None:
                tensors += [*form.digits.planes, form.digits.scale]
            if form.look is not None:
                tensors += [form.look.vectors, form.look.bounds]
            if form.direct is not None:
                made = form.direct
                tensors += [made.scale, made.packed, made.column_sums, made.vectors, made.bounds]
        for made in self.passes.values():
            tensors += made.tensors
        if self.transposed is not None:
            tensors += [x for x in self.transposed[1:] if isinstance(x, Tensor)]
        return sum(each.nbytes for each in tensors)

    def shares_memory(self, weight: Tensor) -> bool:
        """Return whether `weight` has the memory of B."""
        mine, given = ((x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in (self.weight, weight))
        return mine == given

    def is_current(self, weight: Tensor) -> bool:
        """Return whether `weight` has the memory of B, unchanged since."""
        return self.shares_memory(weight) and version_of(weight) == self.version

    def check_current(self, weight: Tensor | None = None) -> None:
        """Raise ``ValueError`` if B was written to, or does not have the memory of `weight`."""
        if weight is not None and not self.shares_memory(weight):
            raise ValueError(
                f"prepared must be made of B, got one of a tensor {tuple(self.weight.shape)} elsewhere for B "
                f"{tuple(weight.shape)}"
            )
        if version_of(self.weight) != self.version:
            raise ValueError("B must be as it was prepared, but was written to since; use residual.prepare(B)")

    def digits(self, rung: Rung) -> tuple[Digits, RightLook]:
        """Return the digits of a rung with their pass over B, made anew if B was not prepared so."""
        found = self.forms.get(rung, Form())
        if found.digits is None or found.look is None:
            found = _looked(self.columns, rung, self.probes)
        assert found.digits is not None and found.look is not None
        return found.digits, found.look

    def __repr__(self) -> str:
        rungs = ", ".join(map(str, self.forms)) or "no digits"
        return (
            f"PreparedOperand({self.shape[0]} x {self.shape[1]}, {self.weight.dtype}, {self.weight.device}, "
            f"seed={self.seed}, {rungs})"
        )


def version_of(x: Tensor) -> int:
    """Return how often `x` was written to; 0 for tensors made for inference, which do not count."""
    return 0 if x.is_inference() else x._version


def _looked(columns: Operand, rung: Rung, probes: Probes) -> Form:
    digits = columns.digits(rung)
    return Form(digits, look_right(columns.exact, columns.planes(rung, digits), probes))


def form_of(columns: Operand, rung: Rung, probes: Probes) -> Form:
    """Return the form of a rung."""
    near = columns.exponent is None and columns.nonfinite is None
    single = columns.given.dtype in FLOATS and columns.given.device.type == "cpu"
    if rung == DIRECT and near and single and columns.given.shape[1] <= MAX_K and engine.available():
        return Form(direct=prepare_direct(columns.given.mT.float(), *probes))
    return _looked(columns, rung, probes) if rung.can_look else Form(columns.digits(rung))


def prepare_for(B: Tensor, seed: int | None, rungs: tuple[Rung, ...]) -> PreparedOperand:
    """Return the prepared operand of `B` (K, N) with the digits of `rungs`."""
    weight = check_operand("B", B).detach()
    version = version_of(weight)
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        columns = operand(weight.mT)
        probes = draw(weight.shape[1], weight.device, seed)
        vectors, bound = probe_right(columns.exact.mT, *probes)
        forms = {rung: form_of(columns, rung, probes) for rung in rungs if rung.bits}
    return PreparedOperand(weight, version, seed, columns, probes, vectors, bound, MappingProxyType(forms))
