"""The rungs that may compute a product, from the cheapest up: names and a table per device, no tensors."""

from __future__ import annotations

from typing import NamedTuple

MODES = ("direct", "centered", "outlier", "columns", "sparse", "full", "full4", "three_digit")
PLANES = {"direct": 1, "full": 2, "full4": 2, "three_digit": 3}  # digit planes of the modes that a look can measure
TERMS = {"direct": 1, "full": 3, "full4": 4, "three_digit": 6}  # products of planes
FLOATS = ("fp16", "fp32", "fp64")
RUNGS = (*PLANES, *FLOATS)
_OTHER_PRODUCTS = {"centered": 1.0, "outlier": 1.0, "sparse": 1.0, "columns": 1.25}
SMALL = 2**21  # multiplications below which float32 is the fastest
LEAST_SLICES = 640  # rows of A and columns of B below which a pass over a new B on a CPU takes longer than float32
LEAST_DIRECT = 1e-4  # tolerance below which one digit suffices for hardly any data
_LEAST_SINGLE = 1.2e-7  # relative error of float32 products


class Rung(NamedTuple):
    """One way to compute a product: a mode of digits of `bits` bits, or a float product (`bits` 0)."""

    mode: str
    bits: int = 0

    @property
    def products(self) -> float:
        """Dense integer products of the whole size."""
        return float(TERMS.get(self.mode, _OTHER_PRODUCTS.get(self.mode, 0.0)))

    @property
    def can_look(self) -> bool:
        """Whether its error is measured before the product."""
        return self.mode in PLANES

    def __str__(self) -> str:
        return f"int{self.bits} {self.mode}" if self.bits else self.mode


class Machine(NamedTuple):
    """What the table depends on besides the request."""

    cuda: bool
    int8: bool  # whether int8 products are much faster than float32: VNNI on a CPU


class Demand(NamedTuple):
    """What a call asks of the table."""

    tol: float
    multiplications: int
    double: bool = False  # float64 takes part in the operands or the output
    short: bool = False  # both operands are of one 16-bit float dtype
    fallback: bool = False
    few: bool = False  # on a CPU: measuring B takes longer than digits save


def pairs_of(mode: str) -> frozenset[tuple[int, int]]:
    """Return the pairs of planes that a mode multiplies.

    Examples
    --------
    >>> sorted(pairs_of("full"))
    [(0, 0), (0, 1), (1, 0)]
    """
    count = PLANES[mode]
    most = 2 * count if mode == "full4" else count
    return frozenset((i, j) for i in range(count) for j in range(count) if i + j < most)


def rungs_of(mode: str, bits: int, machine: Machine, demand: Demand) -> tuple[Rung, ...]:
    """Return the rungs of a call.

    Parameters
    ----------
    mode : str
        One of :data:`MODES`, or ``"auto"``.
    bits : int
        Bits per digit.
    machine : Machine
        The device.
    demand : Demand
        The call.

    Returns
    -------
    tuple of Rung
        From the cheapest up.

    Examples
    --------
    >>> [str(rung) for rung in rungs_of("auto", 8, Machine(False, True), Demand(1e-2, 2**30))]
    ['int8 direct', 'fp32']
    """
    last = ("fp32", "fp64") if demand.fallback else ()
    if mode != "auto":
        return (Rung(mode, bits), *map(Rung, last))
    digits = () if demand.few or demand.multiplications < SMALL else _digit_rungs(machine, demand.tol)
    floats: tuple[str, ...] = ("fp64",) if demand.double and demand.tol < _LEAST_SINGLE else ("fp32",)
    if machine.cuda and demand.short:
        digits, floats = (), ("fp16", "fp32")
    if (demand.double or demand.fallback) and floats[-1] != "fp64":
        floats = (*floats, "fp64")
    return (*(Rung(each, bits) for each in digits), *map(Rung, floats))


def _digit_rungs(machine: Machine, tol: float) -> tuple[str, ...]:
    """Return the modes that may run before float products, for large products."""
    if machine.cuda:
        return ("direct", "full") if tol >= 3e-3 else ("full", "three_digit") if tol >= 3e-5 else ("three_digit",)
    return ("direct",) if machine.int8 and tol >= LEAST_DIRECT else ()
